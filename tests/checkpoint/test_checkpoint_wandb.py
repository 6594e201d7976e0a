"Restarted runs have the rows in Weights & Biases, the table of `StepLogger` and the micro-batch sizes of the uninterrupted run"
import os, signal, subprocess, sys
import pytest
wandb = pytest.importorskip('wandb')
from reference import *
from test_checkpoint import Interrupt, Stateless, make, new_process, one_process, run, test_eq_bits
from fastaccum.wandb import WandbCallback, offline_history
from fastaccum.logs.steps import StepLogger
from fastaccum.checkpoint.callback import TrainingCheckpoint, saved_wandb_id

def wandb_run(*cbs, fits=1, stop=None):
    run = wandb.init(project='test', mode='offline', dir=str(Path.cwd()), id=saved_wandb_id('models/checkpoint'),
                     settings=wandb.Settings(silent=True, console='off'))
    learn = make({}, GradientAccumulation(16), StepLogger(), WandbCallback(log_preds=False, log_model=False), *cbs,
                 *([stop] if stop else []))
    try:
        for _ in range(fits): learn.fit_one_cycle(3, .05)
    except RuntimeError: pass
    file = run.settings.sync_file
    run.finish()
    return (learn,run.id,
            [{k: v for k,v in r.items() if k not in ('train_samples_per_sec', '_timestamp', '_runtime')}
             for r in offline_history(file)])

class Second(Interrupt):
    n = 0
    def before_fit(self): self.n += 1
    def _raise(self):
        if self.n == self.fit: super()._raise()

@pytest.mark.slow
@pytest.mark.parametrize('fit', [1, 2])
def test_wandb_rows(fit):
    "The rows of both processes, merged by step, and StepLogger's table, are those of the whole run"
    whole,_,rows = wandb_run(fits=2)
    stop = Second((1, 5)); stop.fit = fit
    _,a,first_rows = wandb_run(TrainingCheckpoint(every_steps=3), fits=2, stop=stop)
    new_process()
    learn,b,more = wandb_run(TrainingCheckpoint(every_steps=3), fits=2)
    assert a == b and 0 < len(first_rows) < len(rows)
    merged = {}
    for r in [*first_rows, *more]: merged.setdefault(r['_step'], {}).update(r)
    assert [merged[k] for k in sorted(merged)] == rows
    assert saved_wandb_id('elsewhere') is None
    def table(l): return l.step_logger.to_df()
    assert table(learn).equals(table(whole))

@pytest.mark.slow
def test_auto():
    class Small(nn.Sequential):
        def forward(self, x):
            if self.training and len(x) > 5: raise torch.OutOfMemoryError('the device is full')
            return super().forward(x)
    case = dict(model=Small(nn.Linear(6, 8), nn.Dropout(.2), nn.Linear(8, 4)),
                cbs=lambda: [GradientAccumulation(24, micro_batch_size='auto')])
    whole = run(case)
    learn = run(case, TrainingCheckpoint(every_steps=2), stop=Interrupt((1, 4)))
    new_process()
    learn = run(case, TrainingCheckpoint(every_steps=2))
    test_eq_bits(learn, whole)
    assert learn.gradient_accumulation.micro_bs == whole.gradient_accumulation.micro_bs

killed = '''
import os, signal
from test_checkpoint_wandb import *
class Kill(Stateless):
    order,run_valid = 2000,False
    def batch_ended(self):
        if (self.learn.epoch,self.learn.iter) == (1,5): os.kill(os.getpid(), signal.SIGKILL)
wandb_run(TrainingCheckpoint(every_steps=3), stop=Kill())
'''

@pytest.mark.slow
def test_killed():
    "Rows of before the checkpoint, which W&B had not written when the process was killed, are not lost"
    _,_,rows = wandb_run()
    env = {k: v for k,v in os.environ.items() if k != 'WANDB_SERVICE'}   # a W&B of its own
    env['PYTHONPATH'] = os.pathsep.join(p for p in sys.path if p)
    assert subprocess.run([sys.executable, '-W', 'ignore', '-c', killed], env=env).returncode == -signal.SIGKILL
    _,_,more = wandb_run(TrainingCheckpoint(every_steps=3))
    assert more == rows
