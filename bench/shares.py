"""Ranks of different speeds: the time of a step with even parts of each loader batch, and with `shares='auto'`

`python -m bench.shares` takes some minutes and writes shares.json. Two processes train on a CPU, and sleep so many
milliseconds an item, as if they had cards of these speeds. A fit with even parts and one with the shares that have
settled take turns; each figure is the median of all their steps."""
import json, time
from datetime import date
from pathlib import Path
from statistics import median
import pandas as pd
from fastai.basics import *
from fastaccum.all import *

FILE = Path(__file__).with_suffix('.json')
BS,STEPS,ROUNDS = 64,20,2
MS = (2, 2), (2, 3), (2, 4), (2, 6), (2, 12)     # an item takes each of the ranks so long

class Slow(nn.Linear):
    "Takes `ms` milliseconds for each item in training"
    ms = 0.
    def forward(self, x):
        if self.training: time.sleep(len(x)*self.ms/1000)
        return super().forward(x)

class StepTimes(Callback):
    run_valid,order = False,70
    def __init__(self): self.times = []
    def before_fit(self): self.last = None
    def after_step(self):
        now = time.perf_counter()
        if self.last is not None: self.times.append(now-self.last)
        self.last = now

def learner(ms, shares):
    x = torch.randn(BS*STEPS, 8)
    dls = DataLoaders.from_dsets(list(zip(x, x[:,:1])), list(zip(x[:2], x[:2,:1])), bs=BS, num_workers=0, device='cpu')
    dp,model = DataParallel(shares=shares),Slow(8, 1)
    model.ms = ms[dp.rank]
    return Learner(dls, model, nn.MSELoss(), cbs=[GradientAccumulation(BS), dp, StepTimes()])

def fit(learn, n_epoch=1):
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch)

def pair(ms) -> dict: # Seconds of a step with even parts and with measured shares, and the items of a loader batch
    set_seed(0)
    even,auto = learner(ms, None),learner(ms, 'auto')
    shares = auto.data_parallel.brings_ranks.shares
    while not shares.settled: fit(auto)
    auto.step_times.times.clear()
    for _ in range(ROUNDS):
        for learn in (even, auto): fit(learn)
    return dict(ms=ms, even=median(even.step_times.times), auto=median(auto.step_times.times), row=auto.data_parallel.brings_ranks.row)

def allowed(ms): return BS/sum(1000/m for m in ms)      # seconds of a step in which both ranks work all the time
def run() -> list: return [launch(pair, len(ms), ms)[0] for ms in MS]

def results(): return json.loads(FILE.read_text(encoding='utf-8'))
def table(rows) -> pd.DataFrame: # Indexed by the speeds
    "The ratios of the times of a step, and what the two speeds allow"
    def shown(r):
        best,slowest = allowed(r['ms']),BS/len(r['ms'])*max(r['ms'])/1000
        return {'ms an item': ' and '.join(f'{m:g}' for m in r['ms']), 'items of 64': ' and '.join(map(str, r['row'])),
                'even parts, ms a step': f"{1000*r['even']:.0f}",
                "shares='auto', ms a step": f"{1000*r['auto']:.0f}", 'faster': f"{r['even']/r['auto']:.2f}",
                'the speeds allow': f'{slowest/best:.2f}'}
    return pd.DataFrame(map(shown, rows)).set_index('ms an item')

if __name__ == '__main__':
    from .__main__ import machine, versions
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), rows=run())
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
    print(table(res['rows']).to_string())
