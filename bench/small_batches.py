"""Does a small batch do as well, if it is tuned? The two problems of `batch_size`, in batches of several sizes, after the same number of items

`python -m bench.small_batches` takes some ten minutes on two cores and writes small_batches.json, which the tutorial *When not to
accumulate* shows. For each size the learning rate is the best of a grid. Adam's averages either keep their decay for each step, or their
half-life in items, which arXiv:2507.07101 recommends for small batches."""
import json, time, warnings
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
import matplotlib.pyplot as plt, pandas as pd, torch
from fastai.basics import *
from fastaccum.all import *
from .batch_size import TASKS, Batches, _split, decays

FILE = Path(__file__).with_suffix('.json')
SIZES = {'digits': (1, 4, 16, 64, 256), 'characters': (1, 4, 16, 64)}
GRID = 1/4, 1/2, 1, 2, 4       # times the rate of `small`, scaled by the square root of the size
SEEDS = range(2)
MOM,SQR_MOM = .9,.99           # for batches of `small`
HOW = 'decay of each step', 'half-life in items'

def train(name, size, lr, how, seed) -> dict:
    "Steps, seconds of the processor, and the validation's score"
    task,k = TASKS[name],size/TASKS[name].small if how == 'half-life in items' else 1
    set_seed(seed)
    bs = min(size, task.small)
    dls = DataLoaders(*[Batches(ds, b, train) for ds,b,train in zip(_split(name), (bs, 512), (True, False))])
    learn = Learner(dls, task.model(), loss_func=F.cross_entropy, opt_func=partial(Adam, mom=MOM**k, sqr_mom=SQR_MOM**k, wd=0.),
                    metrics=accuracy if task.score == 'accuracy' else None)
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(task.n_epoch, lr, cbs=[decays(lr), *([GradientAccumulation(size)] if size > bs else [])])
    _,loss,*acc = learn.recorder.values[-1]
    return dict(task=name, size=size, lr=lr, how=how, seed=seed, seconds=time.process_time()-start, score=100*acc[0] if acc else loss)

def job(args):
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    res = train(*args)
    print(f"{res['task']} {res['size']:4} {res['how']:20} {res['lr']:.0e}: {res['score']:.4g}, {res['seconds']:.1f} s", flush=True)
    return res

def jobs(): # The longest first
    return [(name, size, f*TASKS[name].lr*(size/TASKS[name].small)**.5, how, seed) for name in reversed(SIZES) for size in SIZES[name]
            for how in HOW for f in GRID for seed in SEEDS]

def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def table(rows, name) -> pd.DataFrame: # A row for each size and way: the best rate, the score with it, its spread over the seeds, seconds
    "The best learning rate of each size"
    runs = pd.DataFrame([r for r in rows if r['task'] == name])
    runs = runs.groupby(['how','size','lr'], sort=False).agg(score=('score','mean'), spread=('score', lambda o: o.max()-o.min()), seconds=('seconds','mean')).reset_index()
    best = runs.groupby(['how','size'], sort=False).score
    which = best.idxmax() if TASKS[name].score == 'accuracy' else best.idxmin()
    return runs.loc[which].set_index(['how','size'])

def plot(rows):
    "Best score against the items of a step, a panel for each problem; bars reach from one seed to the other"
    fig,axs = plt.subplots(1, len(SIZES), figsize=(9, 3.2), layout='constrained')
    for ax,name in zip(axs, SIZES):
        best = table(rows, name)
        for how in HOW: ax.errorbar(best.loc[how].index, best.loc[how].score, best.loc[how].spread/2, marker='o', capsize=3, label=how)
        ax.set(xscale='log', xlabel='items of a step', title=f"{name}: {'accuracy, %' if TASKS[name].score == 'accuracy' else 'validation loss'}")
    fig.legend(*axs[0].get_legend_handles_labels(), loc='outside right center')
    return fig

if __name__ == '__main__':
    from .__main__ import machine, versions
    with ProcessPoolExecutor(2) as pool: rows = list(pool.map(job, jobs()))
    FILE.write_text(json.dumps(dict(date=date.today().isoformat(), machine=machine(), versions=versions(), rows=rows), indent=1)+'\n', encoding='utf-8')
