"""BatchNorm in small memory: what each way out does to the gradient, to memory, to time, and to the accuracy on digits

`python -m bench.batchnorm` takes some minutes on one core and writes batchnorm.json, which the tutorial *BatchNorm in
small memory* shows. Gradients, memory and time are those of a resnet18 for 64 images of 64x64 pixels, and micro-batches
of 8. Memory is measured on the simulated accelerator of tests/simulated, as on a CPU nothing moves. For the accuracy a
small residual net that knows the digits 0 to 4 learns all ten."""
import json, random, sys, warnings
from copy import deepcopy
from datetime import date
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple
import matplotlib.pyplot as plt, pandas as pd, torch, torch.nn as nn, torch.nn.functional as F
import torchvision.models as tv
from torch.optim.swa_utils import update_bn
from torch.utils.data import TensorDataset
from torchvision.models.resnet import BasicBlock
from fastai.basics import *
from fastai.callback.schedule import *
from fastai.callback.training import BnFreeze
from fastai.vision.learner import create_head
from fastaccum.all import *
from .batch_size import Batches, digits
from .jobs import Job
from .peers import fit
from .speed import CLOCKS

FILE = Path(__file__).with_suffix('.json')
SEEDS = range(5)
SIZES = 2,4,8,16,32,64    # Items that BatchNorm sees at a time, of a step of 64
N,K = 64,8                # Items of a batch and of a micro-batch; 16 and 2 on the digits, where 8 do well

# -- Models: a body and a head. `norm` is 'batch', 'frozen', 'group', or 'head': GroupNorm in the body, and fastai's
# head, which has BatchNorm
class Standardized(nn.Conv2d):
    "A convolution whose weights are standardized (arXiv:1903.10520)"
    def forward(self, x):
        w = F.batch_norm(self.weight.flatten(1)[None], None, None, training=True)
        return self._conv_forward(x, w.view_as(self.weight), self.bias)

def group(c): return nn.GroupNorm(8, c)
def norm_layer(norm): return nn.BatchNorm2d if norm in ('batch', 'frozen') else group

def joined(body, nf, norm):
    "Body and head, as fastai's vision models are"
    head = create_head(nf, 10, ps=0.) if norm == 'head' else nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(nf, 10))
    model = nn.Sequential(body, head)
    for m in model.modules():
        if isinstance(m, nn.Conv2d) and norm_layer(norm) is group: m.__class__ = Standardized
    if norm == 'frozen': freeze_norm(model)
    return model

def freeze_norm(model):
    "No gradients, which is what fastai's `BnFreeze` looks for"
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d): m.requires_grad_(False)

def resnet(norm): return joined(nn.Sequential(*list(tv.resnet18(norm_layer=norm_layer(norm)).children())[:-2]), 512, norm)

def small_resnet(norm):
    layer = norm_layer(norm)
    def block(i, o): return BasicBlock(i, o, 2, nn.Sequential(nn.Conv2d(i, o, 1, 2, bias=False), layer(o)), norm_layer=layer)
    stem = nn.Unflatten(1, (1,8,8)),nn.Conv2d(1, 16, 3, padding=1, bias=False),layer(16),nn.ReLU()
    return joined(nn.Sequential(*stem, block(16, 32), block(32, 64)), 64, norm)

# -- Ways
class Way(NamedTuple):
    norm:str='batch'
    split:bool=True                # In micro-batches?
    cbs:callable=list              # Makes more callbacks
    coupled:bool|str=False
    anew:bool=False                # Estimate BatchNorm's statistics again after training?
    is_timed:bool=True

    def callbacks(self, k=K):
        return self.cbs() + [GradientAccumulation(micro_batch_size=k, coupled=self.coupled)]*self.split

WAYS = {'whole batch':                             Way(split=False),
        'split':                                   Way(),
        'split, exact BatchNorm':                  Way(coupled='batchnorm'),
        'split, statistics estimated again':        Way(anew=True, is_timed=False),
        'whole batch, recomputed':                 Way(split=False, cbs=lambda: [ActivationCheckpointing()]),
        'whole batch, recomputed, offloaded':      Way(split=False,
                                                       cbs=lambda: [ActivationCheckpointing(), ActivationOffload()],
                                                       is_timed=False),
        'split, BatchNorm frozen':                 Way('frozen', cbs=lambda: [BnFreeze()]),
        'split, GroupNorm':                        Way('group'),
        'split, GroupNorm, BatchNorm in the head': Way('head'),
        "the same, coupled='head'":                Way('head', coupled='head')}

# -- Gradients, memory and time of a resnet18
def make_job(norm, n_steps=1, n=N, put=lambda o: o):
    torch.manual_seed(0)
    model = put(resnet(norm))
    batches = [(torch.randn(n, 3, 64, 64), torch.randint(10, (n,))) for _ in range(n_steps)]
    return Job(model, [tuple(map(put, b)) for b in batches], n_acc=1, device=next(model.parameters()).device.type)

def float32_loss(pred, y): return F.cross_entropy(pred, y).float()      # fastai's Recorder takes no other

def step_gradient(way):
    "Of the first step, in float64: in float32 rounding alone changes this net's gradient by 0.4%"
    job = make_job(way.norm)
    job.model,job.loss_func,job.batches = job.model.double(),float32_loss,[(x.double(), y) for x,y in job.batches]
    res:list = []
    job.on_step = lambda: res.append(torch.cat([p.grad.flatten() for p in trainable_params(job.model)]))
    fit(job, *way.callbacks())
    return res[0]

def gradient_error(way) -> float: # Relative to the norm of the gradient of the same model's whole batch
    whole = step_gradient(way._replace(split=False, cbs=way.cbs if way.split else list))
    ours = step_gradient(way)
    return ((ours-whole).norm()/whole.norm()).item()

def peak(name) -> int: # Bytes on the simulated accelerator beyond weights, data and gradients
    "Of one of `WAYS`"
    sys.path.append(str(Path(__file__).parents[1]/'tests'))
    import simulated
    def put(o): return simulated.move(o) if isinstance(o, nn.Module) else o.to(simulated.device)
    def leave_out(p):
        key = p.grad.raw.untyped_storage()._cdata
        memory.live -= memory.sizes.get(key, 0)
        memory.sizes[key] = 0
    way = WAYS[name]
    job,memory = make_job(way.norm, put=put),simulated.memory
    for p in trainable_params(job.model): p.register_post_accumulate_grad_hook(leave_out)
    memory.reset_peak()
    before = memory.live
    fit(job, *way.callbacks())
    return memory.peak-before

def step_time(way, n_steps=2) -> float: # Seconds of the processor
    "From the first step to the last"
    job,ticks = make_job(way.norm, n_steps),[]
    job.on_step = lambda: ticks.append(CLOCKS['cpu']())
    fit(job, *way.callbacks())
    return (ticks[-1]-ticks[0])/(n_steps-1)

def times(rounds=3) -> dict: # Way -> median over the rounds, relative to the whole batch of the same round
    "In each round every way trains once, in another order each time"
    timed,res = [k for k,w in WAYS.items() if w.is_timed],[]
    for i in range(rounds):
        of = {k: step_time(WAYS[k]) for k in random.Random(i).sample(timed, len(timed))}
        res.append({k: of[k]/of['whole batch'] for k in timed})
    return {k: median(r[k] for r in res) for k in timed}

# -- Accuracy on the digits
@lru_cache(None)
def loaders(bs, low=False):
    "Batches of `bs`: 960 digits to train on (or those of them from 0 to 4), and 360 others"
    x,y = digits()[0].tensors
    def part(where): return TensorDataset(*(o[where][y[where] < (5 if low else 10)] for o in (x, y)))
    return DataLoaders(Batches(part(slice(960)), bs, True), Batches(part(slice(-360, None)), 360, False))

def train(model, dls, n_epoch, *cbs):
    learn = Learner(dls, model, loss_func=F.cross_entropy, metrics=accuracy, cbs=cbs)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n_epoch, 5e-3)
    return learn

@lru_cache(None)
def pretrained(norm, seed):
    "Knows the digits 0 to 4, from whole batches"
    set_seed(seed)
    return train(small_resnet(norm), loaders(64, low=True), 3).model

@lru_cache(None)
def accuracies(way, seed, bs=16, k=2) -> tuple: # In %
    "As it was trained, and with BatchNorm's statistics estimated again"
    model = deepcopy(pretrained('batch' if way.norm == 'frozen' else way.norm, seed))
    if way.norm == 'frozen': freeze_norm(model)
    set_seed(seed)
    learn = train(model, loaders(bs), 1, *way.callbacks(k))
    old = learn.recorder.values[-1][-1]
    update_bn(loaders(64).train, model)
    with learn.no_bar(): return 100*old,100*learn.validate()[1]

def by_size(norm, k, seed) -> float: # In %
    "Of a net from scratch, in steps of 64, if BatchNorm sees `k` items at a time; with norm='head' only in the head"
    set_seed(seed)
    cbs = [] if k == N else [GradientAccumulation(micro_batch_size=k)]
    return 100*train(small_resnet(norm), loaders(N), 3, *cbs).recorder.values[-1][-1]

def by_sizes(seeds=SEEDS) -> list: # One dict for each place of BatchNorm and each size
    return [dict(norm=norm, k=k, accuracy=[by_size(norm, k, seed) for seed in seeds]) for norm in ('batch', 'head') for k in SIZES]

def digits_accuracy(way, seed): return accuracies(way._replace(anew=False, is_timed=True), seed)[way.anew]

# -- All of it
def run(seeds=SEEDS, rounds=3) -> list: # One dict a way
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    time_of,rows = times(rounds),[]
    for name,way in WAYS.items():
        rows.append(dict(way=name, error=gradient_error(way), time=time_of.get(name),
                         accuracy=[digits_accuracy(way, seed) for seed in seeds]))
        print(name, rows[-1], flush=True)
    # Each in a process of its own: PyTorch counts devices in a process's first backward pass, and what an earlier model
    # leaves would be counted
    with get_context('spawn').Pool(1, maxtasksperchild=1) as new:
        for r in rows: r['peak'] = new.apply(peak, [r['way']])
    return rows

def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def table(rows) -> pd.DataFrame: # Indexed by way
    "How far the gradient is off, MiB, time relative to the whole batch, accuracy on the digits"
    def shown(r):
        error = '0' if r['error'] == 0 else f"{r['error']:.0%}" if r['error'] > .01 else f"{r['error']:.0e}"
        return {'': r['way'], 'gradient off by': error, 'MiB': f"{r['peak']/2**20:.0f}",
                'time': '' if r['time'] is None else f"{r['time']:.2f}",
                'accuracy, %': f"{mean(r['accuracy']):.1f} ± {stdev(r['accuracy']):.1f}"}
    return pd.DataFrame(map(shown, rows)).set_index('')

def size_table(rows) -> pd.DataFrame: # Where BatchNorm is x items that it sees at a time
    "Accuracy on the digits, in %"
    where = dict(batch='in the body', head="in fastai's head")
    def shown(r): return f"{mean(r['accuracy']):.1f} ± {stdev(r['accuracy']):.1f}"
    return pd.DataFrame({k: {where[r['norm']]: shown(r) for r in rows if r['k'] == k} for k in SIZES})

def plot(rows):
    "Memory and accuracy of each way; thin bars are a standard deviation over the seeds to each side"
    names = [r['way'] for r in rows]
    fig,(left,right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout='constrained')
    left.barh(names, [r['peak']/2**20 for r in rows], color=['tab:blue' if r['error'] < 1e-3 else 'silver' for r in rows])
    right.errorbar([mean(r['accuracy']) for r in rows], names, xerr=[stdev(r['accuracy']) for r in rows], fmt='o', capsize=3)
    left.set(xlabel='MiB of a step (blue: an exact gradient)')
    right.set(xlabel='accuracy on the digits, %')
    left.invert_yaxis()
    return fig

if __name__ == '__main__':
    from .__main__ import machine, versions
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), rows=run(),
               sizes=dict(date=date.today().isoformat(), rows=by_sizes()))
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
