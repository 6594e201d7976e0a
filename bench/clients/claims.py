"""What the tests and examples of other libraries claim of their accumulation, tried with a fastai `Learner` and
fastaccum: `python -m bench.clients accelerate`

Their sources were read, not run: each claim is a case of our own. What fastaccum gives is compared with the big batch
in plain fastai or PyTorch: weights, and what else the claim is about, such as losses, rates or the number of steps. The
largest difference counts, relative to what it should be. Some claims are cases of `fastaccum.conformance`, in which
`bench.exact` has measured the library, too. A result is named as for clients; refused is what such a claim asks for,
where it says so."""
import io, os, subprocess, sys, tempfile, warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Callable
import torch, torch.nn.functional as F
from torch import nn
from fastai.basics import SGD, Callback, Learner, set_seed
from fastai.losses import CrossEntropyLossFlat
from fastaccum.accumulation.callback import GradientAccumulation
from fastaccum.conformance import check
from fastaccum.parallel import launch
from .. import peers, report
from . import BS, WAYS, flat, ours, sentence
from .data import loaders, numbers, whole_numbers

CLOSE = 1e-5           # Relative: more than float32 rounds, and far less than one item weighs
REFUSED = 'refused'    # What a claim expects that asks for an error

@dataclass
class Claim:
    name:str                      # What is claimed
    where:str                     # The test or example that claims it
    big:Callable|str              # big(): name -> what it should be; or `REFUSED`
    ways:dict                     # Way -> function that gives the same with fastaccum
    theirs:Callable|None = None   # theirs(): what the library gives, in words
    tol:float = CLOSE

@dataclass
class Conformance:
    "A claim that is a case of `fastaccum.conformance`"
    name:str
    where:str
    case:str
    peers:tuple                   # Names of the library in the results of `bench.exact`
    ways:tuple = tuple(WAYS)
    def theirs(self): return measured(self.peers, self.case)

def same(name, where, train, big=BS, small=4, micro=6, **kwargs):
    "A claim about `train(bs, cbs)`: the values of a training with loader batches of `bs` items"
    ways = {'micro-batches': lambda: train(big, [GradientAccumulation(big, micro_batch_size=micro)])}
    if small: ways['loader batches'] = lambda: train(small, [GradientAccumulation(big)])
    return Claim(name, where, lambda: train(big, []), ways, **kwargs)

def refused(name, where, make): return Claim(name, where, REFUSED, {'': make})

# -- What is trained
N = 42                 # Items: the last accumulated batch of an epoch has 10, the last loader batch 2
x,y = numbers(N, 6),whole_numbers(3, N)

def net():
    set_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def learner(bs, cbs=(), x=x, y=y, model=net, loss_func=None, opt_func=SGD, cls=Learner, **kwargs):
    return cls(loaders(bs, x, y), model(), loss_func=loss_func or nn.CrossEntropyLoss(), opt_func=opt_func, cbs=[*cbs], **kwargs)

# Sentences of 1 to 7 words: what comes after them does not count
words,next_words = numbers(N, 7, 6),whole_numbers(3, N, 7)
for i,o in enumerate(next_words): o[1 + i*i%7:] = -100
def of_words(bs, cbs, loss_func=None): return values(learner(bs, cbs, x=words, y=next_words, loss_func=loss_func or CrossEntropyLossFlat()))

def twice(learn): learn.fit(2, .1)

def values(learn, fit=twice, **more): # Of a fit; `more`: name -> function of the Learner
    start = flat(learn.model)
    with learn.no_bar(), learn.no_logging(): fit(learn)
    rec = learn.recorder
    return dict(moved=flat(learn.model)-start, losses=tensor(rec.losses), rates=tensor(rec.lrs),
                **{k: tensor(f(learn)) for k,f in more.items()})

def tensor(o):
    return (o.double() if isinstance(o, torch.Tensor)
            else torch.tensor([float(v) for v in (o if isinstance(o, (list,tuple)) else [o])], dtype=torch.float64))

def by_hand(batches, model=net, loss_func=F.cross_entropy, opt=partial(torch.optim.SGD, lr=.1), after_step=lambda: None):
    "Weights of a loop in plain PyTorch that steps after each of the `batches`"
    model = model()
    start,opt = flat(model),opt(model.parameters())
    for xb,yb in batches:
        opt.zero_grad()
        loss_func(model(xb), yb).backward()
        opt.step()
        after_step()
    return flat(model)-start

def batches(bs, epochs=2, x=x, y=y): return [(x[i:i+bs], y[i:i+bs]) for _ in range(epochs) for i in range(0, len(x), bs)]

class Steps(Callback):
    "Calls a function after each step"
    order = 70
    def __init__(self, f): self.f = f
    def after_step(self): self.f(self.learn)

class OnlyFits(nn.Module):
    "A model for whose items memory runs out, if there are more than `most`"
    def __init__(self, model, most): super().__init__(); self.model,self.most = model,most
    def forward(self, x):
        if self.training and len(x) > self.most: raise torch.OutOfMemoryError('CUDA out of memory.')
        return self.model(x)

# -- What comes of it
def distance(found, expected): # The largest relative difference of all values
    def one(a, b):
        if a.shape != b.shape: return float('inf')
        d = float((a-b).norm())
        return d/(float(b.norm()) or 1.) if d == d else float('inf')
    if found.keys() != expected.keys(): return float('inf')
    return max(one(found[k], expected[k]) for k in expected)

# What `fn`, a function of a module, gives on the first of two ranks, and how far the other one is from it. In a process
# of its own: one that has trained cannot be forked if it knows a device other than the CPU
def both(fn):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, '-W', 'ignore', '-m', 'bench.clients.claims', fn.__module__, fn.__name__, f'{folder}/values']
        done = subprocess.run(command, env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}, capture_output=True, text=True)
        if done.returncode: raise RuntimeError(f'Two ranks: {done.stderr[-2000:]}')
        a,b = torch.load(f'{folder}/values')
    return {**a, 'ranks differ': tensor(distance(b, a))}
def alike(values): return {**values, 'ranks differ': tensor(0)}

def heard(f): # What `f` returns, and the warnings
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        res = f()
    return res,[str(w.message) for w in said]

def result(claim, way): # (result, distance or None, the sentence that says it), as for clients
    if isinstance(claim, Conformance):
        (r,),_ = heard(lambda: check(dict(zip(WAYS, (peers.split, peers.whole)))[way], [claim.case]))
        return 'exact' if r.exact else 'bug',r.off,r.note
    try:
        expected,before = heard(claim.big) if claim.big != REFUSED else (None,[])
    except Exception as e: return 'fails',None,sentence(e)
    try: found,said = heard(claim.ways[way])
    except Exception as e: return ('refused' if ours(e) else 'bug'),None,f'{type(e).__name__}: {sentence(e)}'
    if expected is None: return 'bug',None,'There is no error.'
    off = distance(found, expected)
    if off < claim.tol: return 'exact',off,''
    told = [m for m in said if m not in before]
    return ('told' if told else 'bug'),off,sentence(told[0]) if told else ''

def measured(labels, case): # What `bench.exact` found for these peers
    res = report.results()
    found = {r['peer']: str(report.result(r)) for r in res['exact'] if r['case'] == case}
    def words(r): return f'{r} off' if r[:1].isdigit() else r
    return '; '.join(f'{k}: {words(found[k])}' for k in labels)

def run(claims): # A row for each claim and way
    rows = []
    for c in claims:
        try: theirs = c.theirs() if c.theirs else ''
        except ImportError: theirs = ''             # the library is not installed
        for way in c.ways:
            what,off,said = result(c, way)
            rows.append(dict(case=c.name, way=way, result=what, off=off, said=said, where=c.where, theirs=theirs))
            print(f'{c.name[:60]:60} {way:15} {what:8} {"" if off is None else f"{off:.0e}":6} {theirs[:40]} {said[:100]}', flush=True)
    return rows

if __name__ == '__main__': # For `both`
    module,fn,file = sys.argv[1:]
    torch.save(launch(getattr(import_module(module), fn), 2), file)
