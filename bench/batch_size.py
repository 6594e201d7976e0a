"""Which batch size? Ways to train with larger accumulated batches, compared after the same number of items

`python -m bench.batch_size` takes some minutes on one core and writes batch_size.json, which the tutorial *Find your batch size* shows.
The learning rate was chosen for the small batch; every other way gets it by its rule, and none is tuned. What differs between the seeds
is the weights at the start and the order of the items."""
import json, random, sysconfig, time, warnings
from datetime import date
from functools import lru_cache, partial
from pathlib import Path
from statistics import mean, quantiles, stdev
from typing import NamedTuple
import matplotlib.pyplot as plt, pandas as pd, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import TensorDataset
from fastai.basics import *
from fastai.callback.schedule import ParamScheduler, SchedCos
from sklearn.datasets import load_digits
from fastaccum.all import *
from fastaccum.conformance import accumulated
from fastaccum.all import AdaptiveGradientAccumulation, GradientNoiseScale
from fastaccum.all import ScaleLR, batch_ramp
from .jobs import job
from .peers import PEERS, fit
from .speed import time_fit

FILE = Path(__file__).with_suffix('.json')
SEEDS = range(5)
DECAY = SchedCos(1, 1/16)

# -- What is trained
def digits():
    "1,797 handwritten digits of 8x8 pixels; a fifth of them is for validation"
    x,y = map(torch.from_numpy, load_digits(return_X_y=True))
    return TensorDataset((x/16).float(), y.long()),[i%5 > 0 for i in range(len(y))]

def python_sources(length=32, n_files=12):
    "Windows of characters from modules of Python's library, and the characters one further; a tenth of them is for validation"
    files = sorted(Path(sysconfig.get_path('stdlib')).glob('*.py'), key=lambda f: (-f.stat().st_size, f.name))[:n_files]
    text = '\n'.join(f.read_text(encoding='utf-8', errors='ignore') for f in files)
    ids = torch.tensor([min(ord(c), 127) for c in text])
    n = (len(ids)-1)//length
    x,y = ids[:n*length].view(n, length),ids[1:n*length+1].view(n, length)
    keep = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:5120]
    return TensorDataset(x[keep], y[keep]),[i%10 > 0 for i in range(len(keep))]

def mlp(): return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

class Block(nn.Module):
    "Attention to what came before, and a layer of neurons"
    def __init__(self, d, n_heads=4):
        super().__init__()
        self.n_heads,self.norm1,self.norm2 = n_heads,nn.LayerNorm(d),nn.LayerNorm(d)
        self.qkv,self.out,self.mlp = nn.Linear(d, 3*d),nn.Linear(d, d),nn.Sequential(nn.Linear(d, 4*d), nn.GELU(), nn.Linear(4*d, d))
    def forward(self, x):
        n,length,d = x.shape
        q,k,v = self.qkv(self.norm1(x)).view(n, length, 3, self.n_heads, d//self.n_heads).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, length, d))
        return x + self.mlp(self.norm2(x))

class CharTransformer(nn.Module):
    "Two blocks that predict the next character"
    def __init__(self, d=48, length=32):
        super().__init__()
        self.emb,self.pos = nn.Embedding(128, d),nn.Parameter(torch.randn(length, d)*.02)
        self.body = nn.Sequential(Block(d), Block(d), nn.LayerNorm(d), nn.Linear(d, 128))
    def forward(self, x): return self.body(self.emb(x)+self.pos).transpose(1, 2)

class Task(NamedTuple):
    "What is trained: with steps of `small` items, or `large`"
    data:callable
    model:callable
    small:int
    large:int
    lr:float      # for `small`: the best of a grid in steps of 2
    n_epoch:int
    score:str     # 'accuracy' in %, or 'loss'
TASKS = {'digits': Task(digits, mlp, 16, 80, 8e-3, 15, 'accuracy'),
         'characters': Task(python_sources, CharTransformer, 4, 16, 8e-3, 1, 'loss')}

# -- How
def decays(lr, power=1): return ParamScheduler({'lr': lambda pos: lr*DECAY(pos)**power})
WAYS = {  # of a task and its learning rate: the callbacks
    'small':               lambda t: [decays(t.lr)],
    'large, no rule':      lambda t: [decays(t.lr), GradientAccumulation(t.large)],
    'large, linear':       lambda t: [decays(t.lr), GradientAccumulation(t.large), ScaleLR('linear')],
    'large, sqrt':         lambda t: [decays(t.lr), GradientAccumulation(t.large), ScaleLR('sqrt')],
    'large, sqrt, half-life': lambda t: [decays(t.lr), GradientAccumulation(t.large), ScaleLR('sqrt', half_life=True)],
    'very large, sqrt, half-life': lambda t: [decays(t.lr), GradientAccumulation(16*t.small), ScaleLR('sqrt', half_life=True)],
    'ramp instead of decay': lambda t: [GradientAccumulationSchedule(t.small, 16*t.small, start=0., finish=1., schedule=batch_ramp(DECAY))],
    'half ramp, half decay': lambda t: [decays(t.lr, .5),
                                        GradientAccumulationSchedule(
                                            t.small, 16*t.small, start=0., finish=1., schedule=batch_ramp(DECAY))],
    'adaptive, sqrt, half-life': lambda t: [decays(t.lr), AdaptiveGradientAccumulation(2*t.small, 16*t.small),
                                            ScaleLR('sqrt', bs=t.small, half_life=True)],
}

WD = .3
def weight_decay(wd): return ParamScheduler({'wd': lambda pos: wd})
WITH_WD = {  # on the digits: what becomes of weight decay
    'small, wd':          lambda t: [*WAYS['small'](t), weight_decay(WD)],
    'large, same wd':     lambda t: [*WAYS['large, sqrt, half-life'](t), weight_decay(WD)],
    'large, wd*sqrt(k)':  lambda t: [*WAYS['large, sqrt, half-life'](t), weight_decay(WD*(t.large/t.small)**.5)],
}

@lru_cache(None)
def _split(name):
    ds,train = TASKS[name].data()
    return [TensorDataset(*(t[torch.tensor([k == keep for k in train])] for t in ds.tensors)) for keep in (True, False)]

class Batches:
    "Shuffled batches of tensors: a loader that costs little"
    drop_last,n_inp = False,1
    def __init__(self, ds, bs, shuffle): self.dataset,self.bs,self.shuffle,self.n,self.device = ds,bs,shuffle,len(ds),torch.device('cpu')
    def __len__(self): return -(-self.n//self.bs)
    def __iter__(self):
        order = torch.randperm(self.n) if self.shuffle else torch.arange(self.n)
        for i in order.split(self.bs): yield self.dataset[i]

def learner(name, bs, *cbs, opt_func=partial(Adam, wd=0.)):
    "Of a task, with loader batches of `bs`"
    task = TASKS[name]
    dls = DataLoaders(*[Batches(ds, n, shuffle) for ds,n,shuffle in zip(_split(name), (bs, 512), (True, False))])
    return Learner(dls, task.model(), loss_func=F.cross_entropy, opt_func=opt_func,
                   metrics=accuracy if task.score == 'accuracy' else None, cbs=cbs)

def train(name, cbs, seed, bs=None) -> dict:
    "Steps, items, seconds of the processor, and the validation's score, with loader batches of `bs` or of `small`"
    task = TASKS[name]
    set_seed(seed)
    learn,steps = learner(name, bs or task.small),StepLogger()
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(task.n_epoch, task.lr, cbs=[*cbs, steps])
    seconds = time.process_time()-start
    rows,(_,loss,*acc) = steps.to_df(),learn.recorder.values[-1]
    return dict(steps=len(rows), items=int(rows['items'].sum()), seconds=seconds, loss=loss, score=100*acc[0] if acc else loss)

def run_ways(name, ways, seeds=SEEDS) -> list: # A dict for each training
    rows = []
    for way,cbs in ways.items():
        mine = [dict(task=name, way=way, seed=seed, **train(name, cbs(TASKS[name]), seed)) for seed in seeds]
        mean_of = lambda k: mean(r[k] for r in mine)
        print(f"{name}, {way}: {mean_of('steps'):.0f} steps, {mean_of('score'):.4g} +- "
              f"{stdev(r['score'] for r in mine):.2g}, {mean_of('seconds'):.1f} s", flush=True)
        rows += mine
    return rows

def run(seeds=SEEDS) -> list:
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    return [r for name in TASKS for r in run_ways(name, WAYS, seeds)] + run_ways('digits', WITH_WD, seeds)

def noise_cost(rounds=31, steps=9) -> dict: # `every` -> median, lower and upper quartile of the rounds, in %
    "What `GradientNoiseScale` adds to the time of a training with micro-batches of 4, on the conv net of the other benchmarks"
    a_job = job('conv net', 8*steps, 4, n_acc=8)
    def peer(*make):
        return PEERS['split']._replace(
            run=lambda j: fit(j, GradientAccumulation(j.accum_bs, micro_batch_size=j.micro_bs), *(m() for m in make),
                              batches=accumulated(j)))
    peers = {0: peer(), **{k: peer(partial(GradientNoiseScale, every=k)) for k in (1, 4)}}
    times = {k: [] for k in peers}
    for i in range(-1, rounds):
        for k in random.Random(i).sample(list(peers), len(peers)): times[k].append(time_fit(peers[k], a_job, steps)['cpu'])
    over = {k: [100*(t/plain-1) for t,plain in zip(times[k][1:], times[0][1:])] for k in (1, 4)}   # the first warms up
    return {k: dict(zip(('low','median','high'), quantiles(v, n=4))) for k,v in over.items()}

def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def table(rows, name) -> pd.DataFrame: # Indexed by way; `score` and its standard deviation over the seeds, steps and seconds
    "The means over the seeds, of one task"
    runs = pd.DataFrame([r for r in rows if r['task'] == name])
    return runs.groupby('way', sort=False).agg(steps=('steps','mean'), items=('items','mean'),
                                               seconds=('seconds','mean'), score=('score','mean'), std=('score','std'))

def plot(rows):
    "The score of each way and its steps, a panel for each task; bars are a standard deviation over the seeds to each side"
    fig,axs = plt.subplots(1, len(TASKS), figsize=(10, 3.8), layout='constrained', sharey=True)
    for ax,(name,task) in zip(axs, TASKS.items()):
        t = table(rows, name).loc[list(WAYS)]
        ax.errorbar(t.score, range(len(t)), xerr=t['std'], fmt='o', capsize=3)
        for i,(score,steps) in enumerate(zip(t.score, t.steps)):
            ax.annotate(f'{steps:.0f} steps', (score, i), (0, 4), textcoords='offset points', ha='center', fontsize='x-small')
        ax.set(xlabel=f'{name}: {"accuracy, %" if task.score == "accuracy" else "validation loss"}')
        ax.grid(axis='y', alpha=.3)
    axs[0].set_yticks(range(len(WAYS)), list(WAYS))
    axs[0].set_ylim(len(WAYS)-.4, -.8)
    return fig

if __name__ == '__main__':
    from .__main__ import machine, versions
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), noise_cost=noise_cost(), rows=run())
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
