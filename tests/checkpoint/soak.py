"""A long run of a tiny model with accumulation, fp16, StepLogger and checkpoints: memory and time per step stay what they are, and
nothing warns again and again. By hand: `python tests/checkpoint/soak.py [steps]`"""
import gc, resource, sys, tempfile, time, warnings
from collections import Counter
from reference import *
from array import array   # fastcore has an `array` too
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.precision.callback import MixedPrecision
from fastaccum.logs.steps import StepLogger

class Meter(Callback):
    "CPU time of each step, and at the end of each fit, where the Recorder has as much as at the end of any other, what is in memory"
    order,run_valid = 2000,False
    def __init__(self): self.last,self.ms,self.steps,self.mib,self.blocks,self.tensors = time.process_time(),array('d'),[],[],[],[]
    def after_batch(self):
        if not self.learn.one_batch.closed: return
        self.ms.append(1e3*(time.process_time()-self.last))
        self.last = time.process_time()
    def after_fit(self):
        gc.collect()
        table = self.learn.step_logger.rows
        self.steps.append(len(self.ms))
        self.blocks.append(sys.getallocatedblocks())
        self.tensors.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
        # its rows are to stay
        self.mib.append(resident_mib() - sum(col.nbytes for places in table.cols.values()
                                             for col in places.values())/2**20)
        self.last = time.process_time()

def resident_mib():
    try: return int(Path('/proc/self/statm').read_text().split()[1])*resource.getpagesize()/2**20
    except OSError: return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**20   # of macOS: bytes, the most so far

def run(n_steps, folder, *cbs, n_fits=10):
    "Some fits; what was measured, the Learner and the warnings"
    torch.manual_seed(0)
    data,meter = Data(torch.randn(256, 6), torch.randn(256, 4)),Meter()
    cbs = (GradientAccumulation(32, micro_batch_size=5),MixedPrecision('fp16', growth_interval=50),
           StepLogger(grad_norm=True),TrainingCheckpoint(every_steps=200),meter,*cbs)
    learn = learner(data, 8, *cbs, metrics=mae, valid=Data(data.x[:8], data.y[0][:8]), path=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        while len(meter.ms) < n_steps: learn.fit_one_cycle(max(1, -(-n_steps//(8*n_fits))), .01)   # 8 steps an epoch
        learn.training_checkpoint.finish()
    return meter,learn,Counter(f'{w.category.__name__}: {w.message}' for w in caught)

def per_step(meter, name, first=3):
    """How much more of it a step leaves, in the middle one of the fits after the `first`: what comes once, such as a table that Python
    makes larger, is no leak"""
    return float(np.median((np.diff(getattr(meter, name))/np.diff(meter.steps))[first-1:]))

def summary(meter, learn, caught):
    "Time in quarters of the run, what is in memory at the end of each fit"
    quarters = lambda f: [round(float(f(q)), 2) for q in np.array_split(np.array(meter.ms), 4)]
    df = learn.step_logger.to_df()
    # of an epoch: single steps differ too much
    return dict(steps=len(df), fits=int(df.fit.max()), skipped=int(df.skipped.sum()), first_loss=df.loss[:8].mean(),
                last_loss=df.loss[-8:].mean(),
                mean_ms=quarters(np.mean), median_ms=quarters(np.median), mib=[round(m, 1) for m in meter.mib],
                blocks=meter.blocks, tensors=meter.tensors,
                bytes_per_step=round(per_step(meter, 'mib')*2**20), blocks_per_step=round(per_step(meter, 'blocks'), 3),
                tensors_per_step=per_step(meter, 'tensors'), warnings=dict(caught))

if __name__=='__main__':
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder: res = summary(*run(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000, Path(folder)))
    for k,v in res.items(): print(f'{k:16} {v}')
