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

# --- memory

class Forward(nn.Module):
    "A transformer, with a class for each word"
    def __init__(self, d, n_layer=2, n_cls=8):
        super().__init__()
        self.inp,self.out = nn.Linear(6, d),nn.Linear(d, n_cls)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 2, 2*d, dropout=.1, batch_first=True, norm_first=True), n_layer, enable_nested_tensor=False)
    def forward(self, x): return self.out(self.body(self.inp(x))).transpose(1, 2)

class ClassesFirst(nn.Module):
    def forward(self, x): return x.transpose(1, 2)

def conv_net(c):
    def conv(i): return nn.Conv2d(i, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()
    return nn.Sequential(*conv(6), *conv(c), *conv(c), nn.Dropout(.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 8))

big = 8 if is_gpu else 1    # a GPU's allocator and its libraries' workspaces would hide less
def mlp(d): return nn.Sequential(nn.Linear(6, d), nn.Tanh(), nn.Dropout(.2), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 8), ClassesFirst())
nets = {'MLP': (lambda: mlp(32*big), (32*big, 6), (32*big,)),
        'conv net': (lambda: conv_net(8*big), (6, 8*big, 8*big), ()), 'transformer': (lambda: Forward(16*big), (16*big, 6), (16*big,))}
n_items = 64

def net(name, n=2*n_items):
    make_net,shape,dims = nets[name]
    torch.manual_seed(0)
    return Data(torch.randn(n, *shape), torch.randint(8, (n, *dims))), make_net()

class Peaks(Callback):
    "The most memory of each training batch beyond what it began with: its events, and its step"
    order,run_valid = -100,False
    def before_fit(self): self.all = []
    def before_batch(self):
        gc.collect()
        torch_device.reset_peak_memory_stats()
        self.start = torch_device.memory_allocated()
class PeaksEnd(Callback):
    order,run_valid = 300,False
    def after_batch(self): self.learn.peaks.all.append(torch_device.max_memory_allocated() - self.learn.peaks.start)

def peak(name, bs, *cbs, k=None, accum_bs=None, amp='to_fp32', opt_func=SGD, fit=lambda l: l.fit(2, .01), loader=InMemory):
    "Of the second epoch: gradients and the optimizer's state are there before"
    data,model = net(name)
    learn = make(data, bs, Acc(accum_bs or n_items, micro_batch_size=k), Peaks(), PeaksEnd(), *cbs, model=model, loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, dl_type=loader, amp=amp)
    fit(learn)
    assert rel_err(weights(learn.model), weights(model)) > 1e-4
    return max(learn.peaks.all[len(learn.peaks.all)//2:])

def largest(name): return max(p.nbytes for p in net(name)[1].parameters())

@pytest.mark.parametrize('amp', ['to_fp32', 'to_fp16'])
@pytest.mark.parametrize('name', nets)
def test_memory_of_micro_batches(name, amp):
    "Of 8 at most 1.05 eighths of the activations, and the largest weight's gradient, which is there twice while it is added"
    whole,split = peak(name, n_items, amp=amp),peak(name, n_items, k=n_items//8, amp=amp)
    assert split < 1.05*whole/8 + largest(name), (split, whole, largest(name))

extras = {'logger': lambda: [StepLogger()], 'checkpoint': lambda: [TrainingCheckpoint(every_steps=1)], 'both': lambda: [StepLogger(), TrainingCheckpoint(every_steps=1)]}

@pytest.mark.parametrize('name', extras)
def test_peak_with(name):
    "What is logged and saved raises the peak by some numbers"
    plain,more = (peak('MLP', n_items, *cbs, k=8, loader=DataLoader) for cbs in ([], extras[name]()))
    assert more <= plain + 4096

def test_peak_with_scaler():
    "bf16 has none"
    assert peak('MLP', n_items, k=8, amp='to_fp16') <= peak('MLP', n_items, k=8, amp='to_bf16') + 4096

# --- 'auto'

def state(learn):
    return weights(learn.model), *[host(b) for b in learn.model.buffers()], tensor(learn.recorder.losses), host(torch_device.get_rng_state()), torch.get_rng_state()

def fit_auto(name, k, amp='to_fp32', accum_bs=n_items, bytes=None):
    data,model = net(name)
    learn = make(data, n_items, Acc(accum_bs, micro_batch_size=k), model=model, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, dl_type=InMemory, amp=amp)
    if bytes is not None: torch_device.set_per_process_memory_fraction((base(learn)+bytes)/torch_device.get_device_properties(0).total_memory)
    try: learn.fit(2, .05)
    finally: torch_device.set_per_process_memory_fraction(1.)
    return learn

def base(learn):
    "Bytes in use before training, but on the first use of libraries"
    gc.collect()
    torch_device.empty_cache()
    return torch_device.memory_reserved()

@pytest.mark.parametrize('accum_bs', [n_items, 2*n_items])
@pytest.mark.parametrize('name', nets)
def test_auto(name, accum_bs):
    """It ends with the largest of n, n/2, n/4... that fits, wherever memory ran out; weights, BatchNorm, losses and random numbers are those of a
    run with that size, to the bit"""
    data,model = net(name)
    n_params = sum(p.nbytes for p in model.parameters())
    sizes,found = [n_items>>i for i in range(7)],[]
    fixed = {k: peak(name, n_items, k=k, accum_bs=accum_bs) for k in sizes[1:4]}
    # between what two sizes take; at the lower end in backward, at the upper one in forward. The first epoch makes the gradients
    for part in (.15, .9):
        limit = fixed[16] + part*(fixed[32]-fixed[16]) + (2 if accum_bs > n_items else 1)*n_params
        learn = fit_auto(name, 'auto', accum_bs=accum_bs, bytes=limit)
        size = learn.gradient_accumulation.state.micro_bs
        assert size in ((16, 8) if is_gpu else (16,)), (size, fixed, limit)
        found.append(size)
        for a,b in zip(state(learn), state(fit_auto(name, size, accum_bs=accum_bs))): assert torch.equal(a, b)
    assert found

class Heavy(nn.Module):
    "A large weight, and hardly any activations"
    def __init__(self): super().__init__(); self.out,self.weight = nn.Linear(6, 8),nn.Parameter(torch.zeros(250_000*big**2))
    def forward(self, x): return self.out(x) + self.weight[:8]

def test_auto_step():
    "Running out in the optimizer's step says so"
    model = Heavy()
    learn = make(Data(x, ignored().clamp(min=0)), 16, Acc(micro_batch_size='auto'), model=model, dl_type=InMemory, loss_func=nn.CrossEntropyLoss(), opt_func=Adam)
    bytes = base(learn) + 2.5*model.weight.nbytes     # its gradient, and one of Adam's two averages
    torch_device.set_per_process_memory_fraction(bytes/torch_device.get_device_properties(0).total_memory)
    with pytest.raises(torch.OutOfMemoryError, match='optimizer.*step'): learn.fit(1, .01)
