"""How far the gradient of the first step is off the gradient of one big batch with the same items

Libraries that know where an epoch ends only from a PyTorch `DataLoader` get one."""
from functools import partial
import torch, torch.nn.functional as F
from torch import nn, tensor
from torch.utils.data import DataLoader
from .jobs import ClassesFirst, Job
from .peers import PEERS, fastai, installed, split, whole

def linear(*after): return nn.Sequential(nn.Linear(16, 10), *after)
def items(*sizes): return [(torch.randn(n, 16), torch.randint(10, (n,))) for n in sizes]
def sentences(most, n=8, length=20):
    "Of at most `most` words; padding does not count in the loss"
    y = torch.randint(10, (n, length))
    for o in y: o[torch.randint(1, most+1, ()):] = -100
    return torch.randn(n, length, 16), y

def jobs() -> dict:
    torch.manual_seed(0)
    weighted = partial(F.cross_entropy, weight=tensor([.1, 10, 1, 1, 1, 1, 1, 1, .1, 5]))
    return {'end of epoch':       Job(linear(), items(8, 8, 8), n_acc=4),
            'last batch shorter': Job(linear(), items(8, 8, 8, 2), n_acc=4),
            'padded tokens':      Job(linear(ClassesFirst()), [sentences(most) for most in (20, 4, 8, 2)], n_acc=4),
            'class weights':      Job(linear(), items(8, 8, 8, 8), n_acc=4, loss_func=weighted)}

def gradient(model): return torch.cat([p.grad.flatten() for p in model.parameters()])

def big_batch(job):
    job = job.fresh()
    x,y = map(torch.cat, zip(*job.batches))
    job.loss_func(job.model(x), y).backward()
    return gradient(job.model)

def off(run, job) -> float|None: # Norm of the error relative to that of the gradient; None if there is no step
    grads,exact = [],big_batch(job)
    job = job.fresh(on_step=lambda: grads.append(gradient(job.model)))
    if run not in (split, whole, fastai): job.loader = partial(DataLoader, batch_size=None)
    run(job)
    return ((grads[0]-exact).norm()/exact.norm()).item() if grads else None

def run() -> list: # One dict a peer: the error in each of `jobs`
    runs = {p.label: p.run for p in installed().values()}
    if 'trainer' in installed(): runs['... whose loss divides by num_items_in_batch'] = partial(PEERS['trainer'].run, by_items=True)
    return [dict(peer=k, **{case: off(f, job) for case,job in jobs().items()}) for k,f in runs.items()]
