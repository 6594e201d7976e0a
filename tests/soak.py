"""A long run of a tiny model with accumulation, fp16, StepLogger and checkpoints: memory and time per step stay what they are, and
nothing warns again and again. By hand: `python tests/soak.py [steps]`"""
import gc, resource, sys, tempfile, time, warnings
from collections import Counter
from reference import *
from fastaccum.checkpoint import TrainingCheckpoint
from fastaccum.precision import MixedPrecision
from fastaccum.steps import StepLogger

class Meter(Callback):
    "CPU time of each step, and every so often the memory of the process and the number of tensors"
    order,run_valid = 2000,False
    def __init__(self, every): self.every,self.last,self.ms,self.memory,self.n_tensors = every,time.process_time(),[],[],[]
    def after_batch(self):
        if not self.learn.one_batch.closed: return
        self.ms.append(1e3*(time.process_time()-self.last))
        if len(self.ms)%self.every==0: self.look()
        self.last = time.process_time()
    def look(self):
        gc.collect()
        self.memory.append(resident_mib())
        self.n_tensors.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))

def resident_mib():
    try: return int(Path('/proc/self/statm').read_text().split()[1])*resource.getpagesize()/2**20
    except OSError: return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**20   # of macOS: bytes, the most so far

def run(n_steps, folder):
    "Ten fits; what was measured, the Learner and the warnings"
    torch.manual_seed(0)
    data,meter = Data(torch.randn(256, 6), torch.randn(256, 4)),Meter(max(1, n_steps//12))
    cbs = GradientAccumulation(32, micro_batch_size=5),MixedPrecision('fp16', growth_interval=50),StepLogger(grad_norm=True),TrainingCheckpoint(every_steps=200),meter
    learn = learner(data, 8, *cbs, metrics=mae, valid=Data(data.x[:8], data.y[0][:8]), path=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        while len(meter.ms) < n_steps: learn.fit_one_cycle(max(1, -(-n_steps//80)), .01)   # 8 steps an epoch
        learn.training_checkpoint.finish()
    return meter,learn,Counter(f'{w.category.__name__}: {w.message}' for w in caught)

def summary(meter, learn, caught):
    "Means over quarters of the run, and medians"
    def quarters(v, f=np.mean): return [round(float(f(q)), 2) for q in np.array_split(np.array(v), 4)]
    df = learn.step_logger.to_df()
    return dict(steps=len(df), fits=int(df.fit.max()), skipped=int(df.skipped.sum()), first_loss=df.loss.iloc[0], last_loss=df.loss.iloc[-1], mean_ms=quarters(meter.ms),
                median_ms=quarters(meter.ms, np.median), memory_mib=quarters(meter.memory), tensors=quarters(meter.n_tensors), warnings=dict(caught))

if __name__=='__main__':
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder: res = summary(*run(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000, Path(folder)))
    for k,v in res.items(): print(f'{k:12} {v}')
