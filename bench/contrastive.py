"""Contrastive learning on the digits: what it is worth to compare more items, split and coupled

`python -m bench.contrastive` takes some minutes on one core and writes contrastive.json, which the tutorial
*Contrastive learning in small memory* shows. All ways take the same number of steps with the same 1,024 items each.
What differs between the seeds is the weights at the start and the views."""
import json, math, warnings
from datetime import date
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple
import matplotlib.pyplot as plt, pandas as pd, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import TensorDataset
from fastai.basics import *
from fastai.callback.schedule import *
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from fastaccum.all import *
from .batch_size import Batches

FILE = Path(__file__).with_suffix('.json')
SEEDS = range(3)
N,STEPS = 1024,30

# -- What the tutorial shows
def view(x):
    "Digits turned by up to 20 degrees, moved, larger or smaller, brighter or darker, and noisy"
    def upto(a): return (2*torch.rand(len(x))-1)*a
    turn,size = upto(math.radians(20)),1+upto(.2)
    cos,sin = size*turn.cos(),size*turn.sin()
    where = torch.stack([cos, -sin, upto(.25), sin, cos, upto(.25)], 1).view(-1, 2, 3)
    x = F.grid_sample(x, F.affine_grid(where, x.shape, align_corners=False), align_corners=False)
    return x*(1+upto(.4))[:,None,None,None] + .1*torch.randn_like(x)

class TwoViews(Callback):
    "The model sees two views of each item"
    def before_batch(self): self.learn.xb = torch.stack([view(self.x), view(self.x)], 1),

class Encoder(nn.Module):
    "A row for each item: its two views, as 32 numbers each"
    def __init__(self, width=1):
        super().__init__()
        a,b,c = 16*width,32*width,64*width
        def conv(i, o, stride): return nn.Conv2d(i, o, 3, stride, 1),nn.GroupNorm(4, o),nn.ReLU()
        self.body = nn.Sequential(*conv(1, a, 1), *conv(a, b, 2), *conv(b, c, 2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(4*c, 128), nn.ReLU(), nn.Linear(128, 32))
    def forward(self, x): return self.head(self.body(x.flatten(0, 1))).view(*x.shape[:2], -1)

def info_nce(z, y, temperature=.1):
    "Each view should be most like the other view of its item, among those of all items. The labels `y` are not used"
    a,b = F.normalize(z, dim=-1).unbind(1)
    like,own = a@b.T/temperature,torch.arange(len(z))
    return (F.cross_entropy(like, own) + F.cross_entropy(like.T, own))/2

def linear_probe(body):
    "Accuracy, in %, of a linear classifier on what `body` makes of the digits"
    with torch.no_grad(): train,test = (body(x) for x,_ in data())
    train,test = ((o-train.mean(0))/(train.std(0)+1e-5) for o in (train, test))
    (_,y),(_,y_test) = data()
    return 100*LogisticRegression(C=.01, max_iter=300).fit(train, y).score(test, y_test)

# -- How
@lru_cache(None)
def data() -> list: # Of training, and of testing: images and labels
    "1,024 of the digits, whose labels only the probe sees, and the other 773"
    x,y = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return [((x[i]/16).float().view(-1, 1, 8, 8), y[i]) for i in order.split([N, len(x)-N])]

def learner(*cbs, seed=0, width=1, bs=N):
    set_seed(seed)
    dls = DataLoaders(*[Batches(TensorDataset(*xy), n, train) for xy,n,train in zip(data(), (bs, N), (True, False))])
    learn = Learner(dls, Encoder(width), info_nce, cbs=[TwoViews(), *cbs])
    learn._do_epoch_validate = lambda: None      # the labels are the probe's
    return learn

class Way(NamedTuple):
    size:int          # Items of a micro-batch
    coupled:bool=False
WAYS = {f"{k}{', coupled'*coupled}": Way(k, coupled) for k,coupled in ((4, False), (16, False), (64, False), (N, False), (64, True))}

def train(way, seed=0, steps=STEPS):
    cbs = [] if way.size == N else [GradientAccumulation(micro_batch_size=way.size, coupled=way.coupled, check_loss=False)]
    learn = learner(*cbs, seed=seed)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(steps, 4e-3)     # an epoch is a step
    return learn

def run(seeds=SEEDS) -> list: # A dict for each training
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    rows = []
    for seed in seeds:
        set_seed(seed)
        rows.append(dict(way='not trained', seed=seed, score=linear_probe(Encoder().body)))
        for name,way in WAYS.items():
            rows.append(dict(way=name, seed=seed, **way._asdict(), score=linear_probe(train(way, seed).model.body)))
            print(rows[-1], flush=True)
    return [*rows, dict(way='pixels', seed=0, score=linear_probe(nn.Flatten()))]

def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def table(rows) -> pd.DataFrame: # Indexed by way; the score, and its standard deviation over the seeds
    return pd.DataFrame(rows).groupby('way', sort=False).score.agg(['mean', 'std'])

def plot(rows):
    "Accuracy against the items that are in memory at a time; bars are a standard deviation over the seeds to each side"
    fig,ax = plt.subplots(figsize=(6.5, 3.7), layout='constrained')
    t = table(rows)
    for label,coupled,style in (('split: each item is compared with its micro-batch', False, dict(marker='o')),
                                ('coupled: with all 1,024', True, dict(marker='s', ls=''))):
        names = [k for k,w in WAYS.items() if w.coupled == coupled]
        ax.errorbar([WAYS[k].size for k in names], t['mean'][names], t['std'][names], capsize=3, label=label, **style)
    ax.axhline(t['mean']['not trained'], c='silver', ls='--', label='not trained')
    ax.set(xscale='log', xlabel='items of a micro-batch, of 1,024', ylabel='accuracy of a linear probe, %')
    ax.set_xticks(sizes := sorted({w.size for w in WAYS.values()}), sizes, minor=False)
    ax.minorticks_off()
    fig.legend(loc='outside upper center', ncols=2)
    return fig

if __name__ == '__main__':
    from .__main__ import machine, versions
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), rows=run())
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
