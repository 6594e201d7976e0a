"""A loss that compares all items of a batch: the batch at once, split, which makes it another loss, and split with `coupled=True`

Time as in speed.py, relative to the split batch's of the same round; memory as in memory.py."""
import random
from functools import partial
from statistics import median, quantiles
import torch, torch.nn.functional as F
from fastaccum.all import GradientAccumulation
from .jobs import job
from .memory import peak
from .peers import PEERS, accumulated, fit
from .speed import time_fit

MODELS,MICRO_BS,N_ACC = ('conv net', 'transformer'),4,8

def nt_xent(z, y, temperature=.1):
    "Items 0 and 1 are two views of the same thing, 2 and 3 of another...: each should be most like its own other view"
    z = F.normalize(z.flatten(1), dim=1)
    return F.cross_entropy((z@z.T/temperature).fill_diagonal_(-1e9), torch.arange(len(z))^1)

def at_once(job): fit(job, batches=accumulated(job))
def split(job, coupled=False):
    fit(job, GradientAccumulation(job.accum_bs, micro_batch_size=job.micro_bs, coupled=coupled, check_loss=False), batches=accumulated(job))
RUNS = {'batch at once': at_once, 'split': split, 'split, coupled=True': partial(split, coupled=True)}

def make(model, n_steps=1):
    "Images of a colour each: the net makes nearly the same of pictures that are nothing but noise"
    a_job = job(model, N_ACC*n_steps, MICRO_BS, n_acc=N_ACC, loss_func=nt_xent)
    if model == 'conv net': a_job.batches = [(x+2*torch.randn(len(x), 3, 1, 1), y) for x,y in a_job.batches]
    return a_job

def gradient(model): return torch.cat([p.grad.flatten() for p in model.parameters()])

def of_all(a_job): # The gradient of all micro-batches as one batch
    a_job = a_job.fresh()
    x,y = map(torch.cat, zip(*a_job.batches))
    a_job.loss_func(a_job.model(x), y).backward()
    return gradient(a_job.model)

def off(run, model) -> float: # Norm of the error relative to that of the gradient
    "In float64: outputs that are much alike, as those of nets that know nothing yet, make rounding large"
    a_job,grads = make(model),[]
    a_job.model.double()
    a_job.loss_func = lambda z, y: nt_xent(z, y).float()      # fastai's Recorder takes no other
    a_job.batches = [(x.double() if x.is_floating_point() else x, y) for x,y in a_job.batches]
    exact,a_job.on_step = of_all(a_job),lambda: grads.append(gradient(a_job.model))
    run(a_job)
    return ((grads[0]-exact).norm()/exact.norm()).item()

def times(model, rounds, steps) -> dict: # Run -> median and quartiles over the rounds, relative to 'split'
    "In each round each trains once, in another order each time"
    ratios,a_job = {k: [] for k in RUNS},make(model, steps)
    for i in range(-1, rounds):        # the first warms up
        of = {k: time_fit(PEERS['split']._replace(label=k, run=RUNS[k]), a_job, steps)['cpu']
              for k in random.Random(i).sample(list(RUNS), len(RUNS))}
        if i >= 0: [ratios[k].append(of[k]/of['split']) for k in RUNS]
    return {k: dict(zip(('low','median','high'), quantiles(v, n=4) if len(v) > 1 else v*3)) for k,v in ratios.items()}

def run(rounds=5, steps=3) -> list: # One dict for each model and way
    rows = []
    for model in MODELS:
        time_of = times(model, rounds, steps)
        rows += [dict(model=model, peer=k, time=time_of[k], peak=peak(f, make(model), False), off=off(f, model)) for k,f in RUNS.items()]
    return rows
