"""A training run that `test_kill.py` kills and starts again. Its end is in `result.pt`, each log row in the file `rows`

Two fits, shuffled and augmented data, dropout, fp16 where it is possible, a growing accumulated batch, one cycle"""
import os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from fastai.basics import *
from fastai.callback.all import *
from fastai.data.all import *
from fastaccum.accumulation.callback import GradientAccumulationSchedule
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.precision.callback import AMPMode, MixedPrecision, can_compute_in

default_device(False)    # processes that use a GPU cannot be forked

class Noise(ItemTransform):
    split_idx = 0
    def encodes(self, o): return o[0] + torch.randn(6)*random.random(), o[1]

class Rows(Callback):
    "Writes a row for each step at once, as a logger would"
    order,run_valid = 900,False
    def __init__(self): self.fit = 0
    def before_fit(self): self.fit += 1
    def after_batch(self):
        rec,loop = self.learn.recorder,self.learn.one_batch
        if loop.closed: open('rows', 'a').write(f'{self.fit} {len(rec.losses)} {rec.losses[-1].item().hex()} {float(rec.lrs[-1]).hex()}\n')

def learner():
    set_seed(0)
    items = [(x, x[:3]*x[3:]) for x in torch.randn(60, 6)]
    dls = DataLoaders(*[TfmdDL(items, bs=4, shuffle=s, num_workers=0, after_item=[Noise()]) for s in (True, False)])
    model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64, 3))
    model.register_buffer('ballast', torch.zeros(1_000_000))   # writing takes a while
    fp16 = [MixedPrecision(growth_interval=7)] if can_compute_in('cpu', AMPMode.FP16) else []
    learn = Learner(dls, model, loss_func=MSELossFlat(), metrics=mae, cbs=[GradientAccumulationSchedule(4, 16), Rows(), *fp16])
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def main(checkpoints):
    learn = learner()
    if checkpoints: learn.add_cb(TrainingCheckpoint(every_steps=3))
    learn.fit_one_cycle(3, .02)
    learn.fit_one_cycle(4, slice(.01))
    rec = learn.recorder
    values = [list(v) for v in rec.values]
    torch.save(dict(model=learn.model.state_dict(), losses=torch.stack(rec.losses).as_subclass(Tensor),
                    lrs=[float(l) for l in rec.lrs], values=values), 'result.pt')

def serve():
    "A new process for each folder in the input, which need not import everything again; its id, and its end, are printed"
    warm = learner()
    warm.remove_cb(Rows)
    warm.fit(1)
    for folder in sys.stdin:
        pid = os.fork()
        if not pid:
            os.chdir(folder.strip())
            sys.stdout = open('log', 'a')
            return main(not folder.endswith('alone\n'))
        print(pid, flush=True)
        print(f'end {os.waitpid(pid, 0)[1]}', flush=True)

if __name__ == '__main__': serve() if 'serve' in sys.argv else main(True)
