"""The head of a language model and its cross entropy: all outputs at once, in chunks, and how else it can be done

One forward and backward pass for 1024 positions of width 256 and 16,000 words, in float32 on one thread. `python -m
bench.chunks` takes two minutes and writes chunks.json. In each round each way runs once, in another order each time;
time is the processor's, relative to all outputs at once in the same round. Memory is the most that lives at once,
gradients included; weights and inputs are there before."""
import json, random, time
from datetime import date
from pathlib import Path
from statistics import median, quantiles
import pandas as pd, torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from fastaccum.core import ChunkedLoss, PeakMemory

FILE = Path(__file__).with_suffix('.json')
N_POSITIONS,WIDTH,N_WORDS = 1024,256,16_000

def at_once(head, x, y): return F.cross_entropy(head(x), y)

def chunked(n):
    def loss(head, x, y): return ChunkedLoss(nn.CrossEntropyLoss(), head, n)(x, y)
    return loss

def computed_twice(head, x, y, n=8):
    "PyTorch's checkpoints, written by hand: each chunk's outputs are computed again in the backward pass"
    def part(x, y): return F.cross_entropy(head(x), y, reduction='sum')
    return sum(checkpoint(part, *o, use_reentrant=False) for o in zip(x.chunk(n), y.chunk(n)))/len(y)

def torchs(head, x, y):
    "PyTorch 2.13 and newer"
    return F.linear_cross_entropy(x, head.weight, y, linear_bias=head.bias, options=nn.LinearCrossEntropyOptions())

RUNS = {'all outputs at once': at_once, **{f'ChunkedLoss, {n} chunks': chunked(n) for n in (2, 4, 8, 16, 32)},
        'checkpoints by hand, 8 chunks': computed_twice}
if hasattr(F, 'linear_cross_entropy'): RUNS['F.linear_cross_entropy'] = torchs

def make():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, N_WORDS),torch.randn(N_POSITIONS, WIDTH, requires_grad=True),torch.randint(N_WORDS, (N_POSITIONS,))

def gradients(run, head, x, y): return torch.autograd.grad(run(head, x, y), [x, *head.parameters()])

def off(run) -> float: # Relative to the gradient in float64
    head,x,y = make()
    exact = gradients(at_once, head.double(), x.detach().double().requires_grad_(), y)
    return max(((a-b).norm()/b.norm()).item() for a,b in zip(gradients(run, *make()), exact))

def peak(run) -> int: # Bytes
    made = make()
    with PeakMemory() as memory: gradients(run, *made)
    return memory.peak

def seconds(run, made) -> float:
    start = time.process_time()
    gradients(run, *made)
    return time.process_time()-start

def measure(rounds=11) -> list: # One dict for each way
    ratios,made = {k: [] for k in RUNS},make()
    for i in range(-1, rounds):            # the first warms up
        of = {k: seconds(RUNS[k], made) for k in random.Random(i).sample(list(RUNS), len(RUNS))}
        if i >= 0: [ratios[k].append(of[k]/of['all outputs at once']) for k in RUNS]
    return [dict(name=k, peak=peak(f), off=off(f), **dict(zip(('low','median','high'), quantiles(ratios[k], n=4)))) for k,f in RUNS.items()]

def main():
    torch.set_num_threads(1)
    from .__main__ import machine, versions
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), rows=measure())
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
    print(table(res['rows']))

# -- What is shown -----------------------------------------------------------------------------------------------
def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def table(rows) -> pd.DataFrame:
    "Peak in MiB, time relative to all outputs at once with its quartiles, and the relative error of the gradients"
    return pd.DataFrame(
        [{'': r['name'], 'peak, MiB': f"{r['peak']/2**20:.0f}",
          'time': f"{r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})",
                          'gradients off by': f"{r['off']:.0e}"} for r in rows]).set_index('')

if __name__ == '__main__': main()
