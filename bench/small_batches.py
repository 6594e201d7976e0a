"""Does a small batch do as well, if it is tuned? The two problems of `batch_size`, in steps of several sizes, after the
same number of items

`python -m bench.small_batches` takes some minutes on two cores and writes small_batches.json, which the tutorial *When
not to accumulate* shows. For each size, one seed chooses the learning rate from a grid, and three others give the
score. Adam's averages either have the same decay in each step, or the same half-life in items, which arXiv:2507.07101
recommends for small batches."""
import json, os, random, time, warnings
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
import matplotlib.pyplot as plt, pandas as pd, torch
from fastai.basics import *
from fastaccum.all import *
from .batch_size import TASKS, decays, learner, train
from .memory import Activations

FILE = Path(__file__).with_suffix('.json')
SIZES = {'digits': (4, 16, 64, 256), 'characters': (4, 16, 64)}   # items of a step
HOW = {'same decay in each step': False, 'same half-life in items': True}
GRID = 1/4, 1/2, 1, 2, 4         # times the rate for steps of `small`, on top of the square root of the size
TUNING,SEEDS = range(1),range(1, 4)

# -- The score of a size
def score(name, size, how, times, seed) -> dict:
    "One training. Steps of more than `small` items are accumulated"
    task = TASKS[name]
    cbs = [decays(times*task.lr), ScaleLR('sqrt', bs=task.small, half_life=HOW[how])] + [GradientAccumulation(size)]*(size > task.small)
    return dict(task=name, size=size, how=how, times=times, seed=seed, **train(name, cbs, seed, min(size, task.small)))

def is_better(name): return max if TASKS[name].score == 'accuracy' else min

def tuned(case) -> list: # A dict for each training
    "The grid, with more rates beyond its end while the best rate is the last one; then the other seeds, with the best rate"
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    name,size,how = case
    rows,scores = [],{}
    def tune(times):
        new = [score(*case, times, seed) for seed in TUNING]
        scores[times] = mean(r['score'] for r in new)
        rows.extend(new)
    for times in GRID: tune(times)
    while (best := is_better(name)(scores, key=scores.get)) in (end := (min(scores), max(scores))):
        tune(best/2 if best == end[0] else best*2)
    rows += [score(*case, best, seed) for seed in SEEDS]
    print(f"{name}, steps of {size}, {how}: {', '.join(f'{k:g}: {v:.4g}' for k,v in sorted(scores.items()))}; "
          f"then {[round(r['score'], 3) for r in rows[-len(SEEDS):]]}, {rows[-1]['seconds']:.1f} s", flush=True)
    return rows

# -- What it costs: items of a loader batch and of a step
def cost_cases(name):
    small = TASKS[name].small
    return [(1, 1), (1, small), (small, small), (small, 16*small), (16*small, 16*small)]

class StopAfter(Callback):
    def __init__(self, n_items): store_attr()
    def before_fit(self): self.seen = 0
    def after_batch(self):
        self.seen += len(self.y)
        if self.seen >= self.n_items: raise CancelFitException

def short(name, bs, size, n_items, **kwargs):
    "A Learner that trains with `n_items` items, without validation"
    return learner(name, bs, *[GradientAccumulation(size)]*(size > bs), StopAfter(n_items), **kwargs)

def fit(learn):
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)

def item_time(name, bs, size, n_items=1280) -> float: # Microseconds of the processor
    learn,start = short(name, bs, size, n_items),time.process_time()
    fit(learn)
    return 1e6*(time.process_time()-start)/n_items

def peak(name, bs, size) -> int: # Bytes
    "Of what two steps make, without gradients. With SGD, because Adam's averages would hide the activations of models this small"
    learn = short(name, bs, size, 2*size, opt_func=SGD)
    with Activations(learn.model) as seen: fit(learn)
    return seen.peak

def costs(rounds=3) -> list: # A dict for each of `cost_cases`
    "In each round all train, in another order each time; the median of the rounds. The first warms up"
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    res = []
    for name in TASKS:
        cases = cost_cases(name)
        times = {c: [] for c in cases}
        for i in range(-1, rounds):
            for c in random.Random(i).sample(cases, len(cases)): times[c].append(item_time(name, *c))
        res += [dict(task=name, bs=c[0], size=c[1], us=median(times[c][1:]), peak=peak(name, *c)) for c in cases]
    return res

# -- The file, the tables and the picture
def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def table(rows, name) -> pd.DataFrame: # Indexed by how and size; `score` and its standard deviation over `SEEDS`
    "Of one task, with the best learning rate of each size"
    runs = pd.DataFrame([r for r in rows if r['task'] == name and r['seed'] in SEEDS])
    return runs.groupby(['how','size'], sort=False).agg(times=('times','first'), steps=('steps','mean'),
                                                        items=('items','mean'), score=('score','mean'),
                                                        std=('score','std'))

def plot(rows):
    "Score against the items of a step, a panel for each task; bars are a standard deviation over the seeds to each side"
    fig,axs = plt.subplots(1, len(SIZES), figsize=(9, 3.4), layout='constrained')
    for ax,(name,sizes) in zip(axs, SIZES.items()):
        of = table(rows, name)
        for how,marker in zip(HOW, 'so'): ax.errorbar(sizes, of.loc[how].score, of.loc[how]['std'], marker=marker, capsize=3, label=how)
        ax.axvspan(TASKS[name].small*1.5, sizes[-1]*1.5, color='.93', zorder=0)
        ax.set(xlabel='items of a step (gray: accumulated)',
               title=f'{name}: {"accuracy, %" if TASKS[name].score == "accuracy" else "validation loss"}')
        ax.set_xscale('log', base=2)
        ax.set_xticks(sizes, sizes)
        ax.set_xlim(sizes[0]/1.5, sizes[-1]*1.5)
        ax.spines[['top', 'right']].set_visible(False)
    fig.legend(*axs[0].get_legend_handles_labels(), loc='outside upper center', ncols=2, frameon=False)
    return fig

if __name__ == '__main__':
    from .__main__ import machine, versions
    cases = sorted(((name, size, how) for name in SIZES for size in SIZES[name] for how in HOW), key=lambda c: c[1])   # the longest first
    with get_context('spawn').Pool(os.cpu_count()) as pool: rows = [r for res in pool.map(tuned, cases) for r in res]
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), costs=costs(), rows=rows)
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
