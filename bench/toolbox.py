"""The memory toolbox: each tool alone, and together with every other one

`TOOLS` is the table. One line more there is a row more in the test of exactness (tests/memory/test_toolbox.py), in what
is measured here, and on the page
*Benchmarks*. `python -m bench.toolbox` takes some minutes on one core and writes toolbox.json.

A fit trains on one batch again and again. Time is the processor's: the fastest of the steps after the first ones, in
which models are compiled, next to the fastest of a plain fit just before. Memory is what PyTorch's profiler sees
allocated in one step, as compiled code allocates where a `TorchDispatchMode` cannot follow. Weights and the batch are
there before and do not count; gradients do."""
import json, time, warnings
from datetime import date
from itertools import combinations_with_replacement
from pathlib import Path
from typing import NamedTuple
import pandas as pd, torch, torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from fastaccum.all import GradientAccumulation
from fastaccum.memory.activations import ActivationCheckpointing, ActivationOffload, Compile
from fastaccum.all import MixedPrecision
from .jobs import Job, mlp, vectors
from .peers import fit

FILE = Path(__file__).with_suffix('.json')

# -- The tools ---------------------------------------------------------------------------------------------------
class Tool(NamedTuple):
    "What it adds to a Learner: a callback, or arguments of `GradientAccumulation`; `half`: the weights are in bf16"
    cb:callable=None
    acc:dict={}
    half:bool=False

TOOLS = {'bf16':            Tool(lambda: MixedPrecision('bf16')),
         'fp16':            Tool(lambda: MixedPrecision('fp16', init_scale=2.**8)),
         'split':           Tool(acc=dict(micro_batch_size=2)),
         'coupled':         Tool(acc=dict(micro_batch_size=2, coupled=True)),
         'checkpointing':   Tool(ActivationCheckpointing),
         '... selective':   Tool(lambda: ActivationCheckpointing(selective=True)),
         'offload':         Tool(ActivationOffload),
         'compile':         Tool(Compile),
         'bf16 weights':    Tool(half=True),
         '... and grad_dtype': Tool(acc=dict(grad_dtype=torch.float32), half=True)}

def callbacks(names, accum_bs, **kwargs) -> list:
    "Those of the tools `names`; `kwargs` for `GradientAccumulation` come before theirs"
    acc = dict(kwargs)
    for n in names: acc.update(TOOLS[n].acc)
    return [GradientAccumulation(accum_bs, **acc), *[TOOLS[n].cb() for n in dict.fromkeys(names) if TOOLS[n].cb]]

def pairs() -> list: # Of two names; of the same one twice for a tool alone
    "All that go together: a Learner has one callback of a class"
    def kind(name): return type(TOOLS[name].cb()) if TOOLS[name].cb else None
    def refused(a, b): return a == 'fp16' and TOOLS[b].half      # it wants weights in fp32
    return [(a, b) for a,b in combinations_with_replacement(TOOLS, 2) if a == b or not (kind(a) and kind(a) is kind(b) or refused(a, b))]

# -- What is measured --------------------------------------------------------------------------------------------
def transformer(n=12, d=64):
    layers = [nn.TransformerEncoderLayer(d, 4, 4*d, 0., 'gelu', batch_first=True, norm_first=True) for _ in range(n)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, d)), nn.Flatten(), nn.Linear(d, 10))

def sequences(n, length=144, d=64): return torch.randn(n, length, d), torch.randint(10, (n,))

class Clock:
    "The processor's time after each step of a fit, and the bytes that live at once in the step after `at`, `ps` and what is older excepted"
    def __init__(self, ps, at): self.ps,self.at,self.ticks,self.peak = list(ps),at,[],None

    def __call__(self):
        done = len(self.ticks)
        if done == self.at+1: self.stop()
        if done == self.at: self.start()
        self.ticks.append(time.process_time())

    def start(self):
        self.grads = sum(p.grad.nbytes for p in self.ps)
        self.prof = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.prof.start()

    def stop(self):
        self.prof.stop()
        live = self.peak = self.grads
        for e in sorted(self.prof.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
            if e.name() != '[memory]': continue
            live += e.nbytes()
            self.peak = max(self.peak, live)

    @property
    def seconds(self): return min(b-a for a,b in zip(self.ticks[self.at+2:], self.ticks[self.at+3:]))

def measure(names, model, data, bs, n_steps=8) -> dict: # Seconds of a step, and bytes
    "A fit with the tools `names`"
    torch.manual_seed(0)
    torch._dynamo.reset()
    m,(x,y) = model(),data(bs)
    if any(TOOLS[n].half for n in names): m,x = m.bfloat16(),x.bfloat16()
    clock = Clock(m.parameters(), at=1)
    job = Job(m, [(x, y)]*(n_steps+4), n_acc=1, loss_func=lambda p, y: F.cross_entropy(p.float(), y), on_step=clock)
    fit(job, *callbacks(names, bs))
    return dict(s=clock.seconds, peak=clock.peak)

def row(names, *args, **kwargs) -> dict: # With the time of a plain fit too
    plain = measure((), *args, **kwargs)
    res = dict(names=list(names), plain_s=plain['s'], **measure(names, *args, **kwargs))
    print(f"{' + '.join(dict.fromkeys(names)) or 'plain'}: {res['peak']/2**20:.1f} MiB, {res['s']*1000:.4g} ms, "
          f"{res['s']/plain['s']:.2f} times the plain step", flush=True)
    return res

def run(bs=16) -> list: # One dict for the plain fit, and for each of `pairs`
    "fp16 is left out: few processors have instructions for it"
    return [row(names, transformer, sequences, bs) for names in [(), *(p for p in pairs() if 'fp16' not in p)]]

def compiled() -> list: # One dict a model
    "The time of a step with `Compile`, of a large model and a tiny one"
    models = {'transformer, 12 blocks': (transformer, sequences, 16, 8), 'MLP 32-64-10': (mlp, vectors, 32, 200)}
    return [dict(model=k, **row(('compile',), *v[:3], n_steps=v[3])) for k,v in models.items()]

def main():
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    from .__main__ import machine, versions
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), compiled=compiled(), rows=run())
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')

# -- What is shown -----------------------------------------------------------------------------------------------
def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def table(rows) -> pd.DataFrame: # Each tool with each other one; a tool alone is on the diagonal
    "Peak in MiB, and time relative to the plain fit"
    def cell(r): return f"{r['peak']/2**20:.1f} MiB, {r['s']/r['plain_s']:.2f}x"
    cells = {tuple(r['names']): cell(r) for r in rows}
    names = list(dict.fromkeys(n for r in rows for n in r['names']))
    return pd.DataFrame([[cells.get((b, a), '') for b in names] for a in names], index=names, columns=names)

def compiled_table(rows) -> pd.DataFrame:
    "Milliseconds of a step"
    return pd.DataFrame([{'': r['model'], 'plain, ms': f"{r['plain_s']*1000:.3g}", 'compiled, ms': f"{r['s']*1000:.3g}",
                          'times': f"{r['s']/r['plain_s']:.2f}"} for r in rows]).set_index('')

if __name__ == '__main__': main()
