"""What grows with the work: the time of a micro-batch, memory, the messages and the work of a rank, a save

`python -m bench.growth` takes some minutes and writes growth.json, which the page Benchmarks shows; with names
(`python -m bench.growth memory saves`) only these parts are measured anew. Times are processor time, as in `speed`, which leaves out
what a save waits for the disk. Ranks up to 4,096 are simulated: one process trains as the first of them, and the others have the
same as it."""
import ctypes, gc, io, json, os, random, sys, tempfile, time, warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout, suppress
from datetime import date
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
import matplotlib.pyplot as plt, pandas as pd, torch, torch.distributed as dist
from fastai.basics import *
from fastaccum.all import *
from . import jobs
from .comm import CommCounter, _status
from .peers import PEERS
from .speed import time_fit

FILE = Path(__file__).with_suffix('.json')
TENSORS = 4, 30, 300, 3000
MICRO_BATCHES = 1, 4, 16, 64, 256, 1024
MANY = 30_000                     # micro-batches of the fits whose memory is measured
WORLDS = 2, 16, 128, 1024, 4096
ITEMS = 10_000, 1_000_000, 10_000_000
PLACES = 10                       # of a long fit, at which its memory is asked

def alone(f, *args):
    "In a process of its own"
    with ProcessPoolExecutor(1, get_context('spawn'), quiet) as pool: return pool.submit(f, *args).result()

def quiet():
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)

# -- The time of a micro-batch
class Deep(nn.Module):
    "A net of `n_tensors` parameters, each as small as can be"
    def __init__(self, n_tensors, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n_tensors//2))

    def forward(self, x):
        for layer in self.layers: x = x + layer(x)/len(self.layers)
        return x

def deep_job(n_tensors, n_acc=8, steps=3, bs=4):
    torch.manual_seed(0)
    return jobs.Job(Deep(n_tensors), [(torch.randn(bs, 8), torch.randint(8, (bs,))) for _ in range(n_acc*steps)], n_acc=n_acc)

def mlp_job(n_acc): return jobs.job('MLP 32-64-10', n_acc*max(3, 512//n_acc), 4, n_acc=n_acc)

def ratio(job, rounds) -> dict: # us of the hand-written loop and of fastaccum, and their ratio of a round: median and quartiles
    times = {k: [] for k in ('hand', 'split')}
    for i in range(-1, rounds):   # the first warms up
        for k in random.Random(i).sample(list(times), 2):
            t = time_fit(PEERS[k], job, len(job.batches)//job.n_acc)['cpu']
            if i >= 0: times[k].append(t)
    ratios = [ours/hand for ours,hand in zip(times['split'], times['hand'])]
    low,_,high = quantiles(ratios, n=4) if rounds > 1 else ratios*3
    return dict(hand=median(times['hand']), ours=median(times['split']), ratio=median(ratios), low=low, high=high)

def times(make, sizes, rounds): return [dict(n=n, **ratio(make(n), rounds)) for n in sizes]

# -- Memory in a long fit
def long_fit(peer, n) -> list: # Micro-batches so far, MiB more than at the first place, us of a micro-batch since the last
    "The same batch each time"
    job = jobs.job('MLP 32-64-10', 1, 4, n_acc=8)
    job.batches = job.batches*n
    every,steps,rows = n//job.n_acc//PLACES,count(1),[]
    def on_step():
        step = next(steps)
        if step%every == 0: rows.append((step*job.n_acc, time.process_time(), in_use(), time.process_time()))
    PEERS[peer].run(job.fresh(on_step=on_step))
    return [dict(n=n, mib=mib-rows[0][2], us=1e6*(now-before)/(every*job.n_acc)) for (*_,before),(n,now,mib,_) in zip(rows, rows[1:])]

def in_use() -> float: # MiB of this process, without what it has freed and could use again
    gc.collect()
    with suppress(AttributeError): ctypes.CDLL(None).malloc_trim(0)
    return _status('VmRSS')/2**20

def memory(n):
    "Linux counts a process's memory; elsewhere nothing is measured"
    if not Path('/proc/self/status').exists(): return []
    return [dict(peer=PEERS[k].label, rows=alone(long_fit, k, n)) for k in ('whole', 'fastai')]

# -- Many ranks
class Simulated(CommCounter):
    "Counts operators, too. A sum over `world` ranks is that of ranks which all have the same"
    def __init__(self, world): super().__init__(); self.world,self.ops = world,0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        res = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name == 'c10d::allreduce_':
            for t in args[0]: t.mul_(self.world)
        return res

class StepCosts(Callback):
    "What each step costs, but the first, in which the loss is measured"
    order,run_valid = 70,False
    def __init__(self, mode): self.mode,self.seen = mode,[]
    def after_step(self): self.seen.append((self.mode.calls, self.mode.ops, time.process_time()))
    def means(self):
        n,first,last = len(self.seen)-1,*(self.seen[i] for i in (0, -1))
        return [(b-a)/n for a,b in zip(first[:2], last[:2])],median(b[2]-a[2] for a,b in zip(self.seen, self.seen[1:]))

class Same:
    "So many items without memory of their own"
    def __init__(self, n): self.n,self.item = n,(torch.ones(32), torch.ones(10))
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i >= self.n: raise IndexError
        return self.item

def learner(n_items, bs, *cbs, **kwargs):
    dls = DataLoaders.from_dsets(Same(n_items), Same(2), bs=bs, num_workers=0, device='cpu')
    return Learner(dls, jobs.mlp(), nn.MSELoss(), opt_func=SGD, cbs=cbs, **kwargs)

def fit(learn):
    learn._do_epoch_validate = lambda *_: None
    with learn.no_bar(), learn.no_logging(): learn.fit(1)

def one_of(world, steps=20, items=8) -> dict: # Messages, operators and us of a step
    "The first of `world` ranks, of which each has so many items of a loader batch. Its time is longer for being counted"
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=world)
    try:
        learn = learner(items*world*steps, items*world, GradientAccumulation(items*world, micro_batch_size=2), DataParallel())
        with Simulated(world) as mode:
            learn.add_cb(costs := StepCosts(mode))
            fit(learn)
    finally: dist.destroy_process_group()
    (calls,ops),seconds = costs.means()
    return dict(n=world, calls=calls, ops=ops, us=1e6*seconds)

def simulated(worlds): return [one_of(world) for world in worlds]

def trained(double, n=269) -> tuple: # Weights before and after a training
    set_seed(0)
    dtype = torch.float64 if double else torch.float32
    x,y,model = torch.randn(n, 32, dtype=dtype),torch.randn(n, 10, dtype=dtype),jobs.mlp().to(dtype)
    dls = DataLoaders.from_dsets(list(zip(x, y)), list(zip(x, y)), bs=64, drop_last=False, num_workers=0, device='cpu')
    learn = Learner(dls, model, nn.MSELoss(), opt_func=SGD, lr=.1, cbs=[GradientAccumulation(100, micro_batch_size=3), DataParallel()])
    start = weights(model)
    with learn.no_bar(), learn.no_logging(): learn.fit(3)
    return start,weights(model)

def weights(model): return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

def real(world) -> list: # For each type of numbers: how far off, in parts of the way that training moved
    res = []
    for double in (False, True):
        (start,one),(_,many) = trained(double),launch(trained, world, double)[0]
        res.append(dict(n=world, dtype=str(one.dtype).removeprefix('torch.'), off=((many-one).norm()/(one-start).norm()).item()))
    return res

# -- A save in the middle of an epoch
class Saves(Callback):
    "Saves after the first batches of an epoch, and ends the fit"
    order,run_valid,in_checkpoint = 2000,False,False
    def __init__(self, n): self.n,self.seen = n,[]
    def after_batch(self):
        start,now = time.process_time(),self.learn.training_checkpoint.now
        now.save_batch()
        self.seen.append((time.process_time()-start, os.path.getsize(now.folder.files[-1])))
        if len(self.seen) > self.n: raise CancelFitException()

def save(n_items, n=9) -> dict: # Median of the ms of `n` saves, without the first, and bytes of the largest
    with tempfile.TemporaryDirectory() as top, redirect_stdout(io.StringIO()):
        learn = learner(n_items, 8, TrainingCheckpoint('checkpoint', every_minutes=None, resume=False), saves := Saves(n), path=top)
        fit(learn)
        learn.training_checkpoint.finish()
    return dict(n=n_items, ms=1000*median(t for t,_ in saves.seen[1:]), bytes=max(b for _,b in saves.seen))

def saves(items): return [save(n) for n in items]

# -- The file, the tables and the picture
def run(*names, tensors=TENSORS, micro_batches=MICRO_BATCHES, many=MANY, worlds=WORLDS, items=ITEMS, world=8, rounds=7) -> dict:
    "All parts, or those with these names"
    quiet()
    parts = dict(real=lambda: alone(real, world), tensors=lambda: times(deep_job, tensors, rounds),
                 micro_batches=lambda: times(mlp_job, micro_batches, rounds), memory=lambda: memory(many),
                 simulated=lambda: alone(simulated, worlds), saves=lambda: alone(saves, items))
    return {k: parts[k]() for k in names or parts}

def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def times_table(rows, what) -> pd.DataFrame: # Indexed by the sizes
    def shown(r): return {what: f"{r['n']:,}", 'hand-written loop, us': f"{r['hand']:.0f}", 'fastaccum, us': f"{r['ours']:.0f}",
                          'times': '{ratio:.2f} ({low:.2f} to {high:.2f})'.format(**r)}
    return pd.DataFrame(map(shown, rows)).set_index(what)

def memory_table(rows) -> pd.DataFrame: # Indexed by the places in the fit
    cells = {f"{of['peer']}, {what}": [f'{r[k]:{form}}' for r in of['rows']]
             for of in rows for k,what,form in (('mib', 'MiB more', '.1f'), ('us', 'us', '.0f'))}
    places = pd.Index([f"{r['n']:,}" for r in rows[0]['rows']] if rows else [], name='micro-batches')
    return pd.DataFrame(cells, places)

def ranks_table(rows) -> pd.DataFrame: # Indexed by the number of ranks
    def shown(r): return {'ranks': f"{r['n']:,}", 'messages a step': f"{r['calls']:g}", 'operators a step': f"{r['ops']:g}",
                          'us a step': f"{r['us']:.0f}"}
    return pd.DataFrame(map(shown, rows)).set_index('ranks')

def saves_table(rows) -> pd.DataFrame: # Indexed by the number of items
    def shown(r): return {'items of an epoch': f"{r['n']:,}", 'ms a save': f"{r['ms']:.1f}", 'KB': f"{r['bytes']/1000:.1f}"}
    return pd.DataFrame(map(shown, rows)).set_index('items of an epoch')

def tables(res):
    return [times_table(res['tensors'], 'parameter tensors'), times_table(res['micro_batches'], 'micro-batches a step'),
            memory_table(res['memory']), ranks_table(res['simulated']), saves_table(res['saves'])]

def plot(res):
    "What stays flat does not grow"
    fig,axs = plt.subplots(2, 3, figsize=(9, 5), layout='constrained')
    def line(ax, rows, y, **kwargs): ax.plot([r['n'] for r in rows], [r[y] for r in rows], marker='o', **kwargs)
    for ax,k,x in zip(axs[0], ('tensors', 'micro_batches'), ('parameter tensors', 'micro-batches of a step')):
        line(ax, res[k], 'ratio')
        ax.axhline(1, color='.7', lw=1, zorder=0)
        ax.set(xlabel=x, title='time / hand-written loop')
    for of in res['memory']: line(axs[0,2], of['rows'], 'mib', label=of['peer'])
    axs[0,2].set(xlabel='micro-batches of a fit', title='memory, MiB more')
    if res['memory']: axs[0,2].legend(frameon=False, fontsize='small')
    line(axs[1,0], res['simulated'], 'us')
    axs[1,0].set(xlabel='ranks (simulated)', title='time of a rank, us a step')
    for ax,y,title in zip(axs[1,1:], ('ms', 'bytes'), ('a save, ms', 'a save, bytes')):
        line(ax, res['saves'], y)
        ax.set(xlabel='items of an epoch', title=title)
    for ax in axs.flat:
        if ax is not axs[0,2]: ax.set_xscale('log')
        ax.set_ylim(0, 1.3*ax.get_ylim()[1])
        ax.spines[['top', 'right']].set_visible(False)
    return fig

if __name__ == '__main__':
    from .__main__ import machine, versions
    names = sys.argv[1:]
    about = dict(date=date.today().isoformat(), machine=machine(), versions=versions())
    res = (results() if names else {}) | about | run(*names)
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
    for table in tables(res): print(f'{table.to_string()}\n')
