"""What holds on every accelerator: on the simulated one, or with `make test DEVICE=cuda` on a GPU, by the same code

Waits of the host, memory, sizes found by running out, whole runs in each precision, resumed runs; and what only a GPU has: fused optimizers,
graphs, streams. `torch.cuda` and the simulated `torch.sim` have the same functions for it."""
import gc, os, pytest, sys
from contextlib import contextmanager
from reference import *
import simulated
from fastai.callback.fp16 import MixedPrecision as _      # ours must come after it
from fastaccum.checkpoint import TrainingCheckpoint
from fastaccum.precision import MixedPrecision
from fastaccum.steps import StepLogger
from test_exact import cls_w, ignored
from test_checkpoint import Interrupt, new_process

Acc = GradientAccumulation
accelerators = [n for n in devices.names if n != 'cpu']
if not accelerators: pytest.skip('no GPU here, and this PyTorch has no devices written in Python', allow_module_level=True)
is_gpu = bool(devices.GPU)
only_cuda = pytest.mark.skipif(devices.GPU != 'cuda', reason='the simulated device has no streams, graphs and kernels: make test DEVICE=cuda')

@pytest.fixture(autouse=True)
def on_it(device):
    "Deterministic kernels; no limit, no debug mode left behind"
    global torch_device
    torch_device = devices.use(accelerators[0]).backend
    torch.use_deterministic_algorithms(True, warn_only=True)
    gc.collect()
    yield
    if hasattr(torch_device, 'set_sync_debug_mode'): torch_device.set_sync_debug_mode('default')
    torch_device.set_per_process_memory_fraction(1.)
    torch.use_deterministic_algorithms(False)

class InMemory(list):
    "Loader batches that are on the device already"
    def __init__(self, data, batch_size): super().__init__([tuple(map(devices.now.put, data.batch(range(i, min(i+batch_size, len(data)))))) for i in range(0, len(data), batch_size)])

def make(data, bs, *cbs, amp='to_fp32', seed=0, **kwargs):
    learn = learner(data, bs, *cbs, valid=Data(data.x[:2], data.y[0][:2]), seed=seed, **kwargs)
    return getattr(learn, amp)()

# --- the host waits once a step

class NoWaits(Callback):
    "An error if the host waits in a training batch: until the step where one is due, everywhere else to the end"
    order,run_valid = -100,False
    def mode(self, m): torch_device.set_sync_debug_mode(m)
    def before_batch(self): self.mode('error')
    def before_step(self): self.mode('default')
class NoMore(Callback):
    order,run_valid = 300,False
    def after_batch(self): torch_device.set_sync_debug_mode('default')

torch.manual_seed(0)
x = torch.randn(64, 6)
waits_of = {'mse': (MSELossFlat(), torch.randn(64, 4), {}), 'ignored': (CrossEntropyLossFlat(), ignored(), {}), 'class weights': (CrossEntropyLossFlat(weight=cls_w), ignored(), {}),
            'smoothing': (nn.CrossEntropyLoss(label_smoothing=.1), ignored(), {}), 'bce': (BCEWithLogitsLossFlat(), (torch.rand(64, 4) < .3).float(), {}),
            'own weight': (CrossEntropyLossFlat(), ignored(), dict(weight=lambda learn: (learn.y >= 0).sum())), 'sum': (nn.MSELoss(reduction='sum'), torch.randn(64, 4), {}),
            'not normalized': (MSELossFlat(), torch.randn(64, 4), dict(normalize=False)), 'carry': (MSELossFlat(), torch.randn(64, 4), dict(remainder='carry'))}
amps = 'to_fp32','to_bf16','to_fp16'

every = [(name, k, amp) for i,name in enumerate(waits_of) for j,k in enumerate([None, 3, 'auto']) for l,amp in enumerate(amps) if is_gpu or name == 'mse' or (i+j+l)%3 == 0]

@pytest.mark.parametrize('name,k,amp', every)   # on the simulated device a third of them: each pair of two once
def test_no_waits_between_steps(name, k, amp):
    loss_func,y,acc = waits_of[name]
    learn = make(Data(x, y), 16, Acc(32, micro_batch_size=k, **acc), NoWaits(), NoMore(), loss_func=loss_func, dl_type=InMemory, amp=amp, lr=.001)
    learn.fit(2)
    assert len(learn.recorder.losses)==4

def test_no_waits_of_a_schedule():
    "Other sizes in each step"
    acc = GradientAccumulationSchedule(8, 40, finish=1., schedule=SchedLin)
    learn = make(Data(x, torch.randn(64, 4)), 8, acc, NoWaits(), NoMore(), dl_type=InMemory)
    learn.fit_one_cycle(3, .01)
    assert len(set(acc.plan(3))) > 2

def test_waits_are_noticed():
    class Reads(Callback):
        def after_pred(self): self.learn.pred.sum().item()
    with pytest.raises(RuntimeError, match='synchroniz'): make(Data(x, torch.randn(64, 4)), 16, Acc(32), NoWaits(), NoMore(), Reads(), dl_type=InMemory).fit(1)

reads = {  # of each loader batch, in the loop: of a step of two loader batches
    'a row a step':         ({}, [], [0, 1]),
    'a row a loader batch': (dict(log_accum_batch=False), [], [1, 1]),
    'no Recorder':          ({}, [Recorder], [0, 0]),
}

class Counted(Callback):
    "How often the host waited in each training batch"
    order,run_valid = -100,False
    def before_fit(self): self.all = []
    def before_batch(self): simulated.waits.__enter__()
class CountedEnd(Callback):
    order,run_valid = 300,False
    def after_batch(self):
        simulated.waits.__exit__()
        self.learn.counted.all.append(simulated.waits.n)

@pytest.mark.skipif(is_gpu, reason='a GPU does not count them')
@pytest.mark.parametrize('opt', [SGD, partial(OptimWrapper, opt=torch.optim.SGD)], ids=['fastai', 'torch'])
@pytest.mark.parametrize('amp', amps)
@pytest.mark.parametrize('name', reads)
def test_waits_are_the_rows(name, amp, opt):
    "And with fp16, whose host must know whether to step, one for every step"
    acc,without,expected = reads[name]
    learn = make(Data(x, torch.randn(64, 4)), 16, Acc(32, micro_batch_size=4, **acc), Counted(), CountedEnd(), StepLogger(), dl_type=InMemory, amp=amp, opt_func=opt)
    for cb in without: learn.remove_cb(cb)
    learn.fit(2, .01)
    if amp == 'to_fp16': expected = [expected[0], max(expected[1], 1)]
    assert learn.counted.all==expected*4, simulated.waits.sites
