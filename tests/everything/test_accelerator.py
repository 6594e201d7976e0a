"""What holds on every accelerator: on the simulated one, or with `make test DEVICE=cuda` on a GPU, by the same code

Waits of the host, memory, sizes found by running out, whole runs in each precision, resumed runs; and what only a GPU
has: fused optimizers, graphs, streams. `torch.cuda` and the simulated `torch.sim` have the same functions for it."""
import gc, pytest
from functools import lru_cache
from reference import *
import simulated
from fastai.callback.fp16 import MixedPrecision as _      # ours must come after it
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.memory.activations import Compile
from fastaccum.memory.chunks import ChunkedHead
from fastaccum.precision.callback import MixedPrecision
from fastaccum.logs.steps import StepLogger
from test_exact import cls_w, ignored
from test_checkpoint import Interrupt, new_process
from quick import quickly

Acc = GradientAccumulation
pytestmark = pytest.mark.slow
accelerators = [n for n in devices.names if n != 'cpu']
if not accelerators: pytest.skip('no GPU here, and this PyTorch has no devices written in Python', allow_module_level=True)
is_gpu = bool(devices.GPU)
only_cuda = pytest.mark.skipif(devices.GPU != 'cuda',
                               reason='the simulated device has no streams, graphs and kernels: make test DEVICE=cuda')

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
    def __init__(self, data, batch_size):
        super().__init__([tuple(map(devices.now.put, data.batch(range(i, min(i+batch_size, len(data))))))
                          for i in range(0, len(data), batch_size)])

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
waits_of = {'mse': (MSELossFlat(), torch.randn(64, 4), {}), 'ignored': (CrossEntropyLossFlat(), ignored(), {}),
            'class weights': (CrossEntropyLossFlat(weight=cls_w), ignored(), {}),
            'smoothing': (nn.CrossEntropyLoss(label_smoothing=.1), ignored(), {}),
            'bce': (BCEWithLogitsLossFlat(), (torch.rand(64, 4) < .3).float(), {}),
            'own weight': (CrossEntropyLossFlat(), ignored(), dict(weight=lambda learn: (learn.y >= 0).sum())),
            'sum': (nn.MSELoss(reduction='sum'), torch.randn(64, 4), {}),
            'not normalized': (MSELossFlat(), torch.randn(64, 4), dict(normalize=False)),
            'carry': (MSELossFlat(), torch.randn(64, 4), dict(remainder='carry'))}
amps = 'to_fp32','to_bf16','to_fp16'

every = [(name, k, amp) for i,name in enumerate(waits_of) for j,k in enumerate([None, 3, 'auto'])
         for l,amp in enumerate(amps) if is_gpu or name == 'mse' or (i+j+l)%3 == 0]

# on the simulated device a third of them: each pair of two once
@pytest.mark.parametrize('name,k,amp', quickly([o for o in every if o[1] == 3 and o[0] in ('mse', 'ignored', 'own weight', 'sum')], every))
def test_no_waits_between_steps(name, k, amp):
    loss_func,y,acc = waits_of[name]
    learn = make(Data(x, y), 16, Acc(32, micro_batch_size=k, **acc), NoWaits(), NoMore(), loss_func=loss_func,
                 dl_type=InMemory, amp=amp, lr=.001)
    learn.fit(2)
    assert len(learn.recorder.losses)==4

@pytest.mark.parametrize('amp', amps)
@pytest.mark.parametrize('name', ['ignored', 'class weights'])
def test_no_waits_of_chunks(name, amp):
    loss_func,y,_ = waits_of[name]
    learn = make(Data(x, y), 16, Acc(32, micro_batch_size=8), NoWaits(), NoMore(), ChunkedHead(2), loss_func=loss_func,
                 dl_type=InMemory, amp=amp, lr=.001)
    learn.fit(2)
    assert len(learn.recorder.losses)==4

def test_no_waits_of_a_schedule():
    "Other sizes in each step"
    acc = GradientAccumulationSchedule(8, 40, finish=1., schedule=SchedLin)
    learn = make(Data(x, torch.randn(64, 4)), 8, acc, NoWaits(), NoMore(), dl_type=InMemory)
    learn.fit_one_cycle(3, .01)
    assert len({acc.size_at(i, 8, 3) for i in range(24)}) > 2

@pytest.mark.quick
def test_waits_are_noticed():
    class Reads(Callback):
        def after_pred(self): self.learn.pred.sum().item()
    with pytest.raises(RuntimeError, match='synchroniz'):
        make(Data(x, torch.randn(64, 4)), 16, Acc(32), NoWaits(), NoMore(), Reads(), dl_type=InMemory).fit(1)

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
    learn = make(Data(x, torch.randn(64, 4)), 16, Acc(32, micro_batch_size=4, **acc), Counted(), CountedEnd(),
                 StepLogger(), dl_type=InMemory, amp=amp, opt_func=opt)
    for cb in without: learn.remove_cb(cb)
    learn.fit(2, .01)
    if amp == 'to_fp16': expected = [expected[0], max(expected[1], 1)]
    assert learn.counted.all==expected*4, simulated.waits.sites

@pytest.mark.skipif(is_gpu, reason='a GPU does not count them')
@pytest.mark.parametrize('mbs', [4, 2])
def test_waits_of_a_measured_loss(mbs):
    "One as a step ends, beside its row, however many micro-batches it has"
    def masked(pred, y):
        counts = (y > -.5).float()
        return (counts*(pred-y)**2).sum()/counts.sum()
    data = Data(torch.randn(320, 6), torch.randn(320, 4))
    learn = make(data, 16, Acc(32, micro_batch_size=mbs), Counted(), CountedEnd(), dl_type=InMemory, loss_func=masked)
    learn.fit(4, .01)
    found = Counter(zip(learn.counted.all[::2], learn.counted.all[1::2]))          # close looks and audits take more
    assert found.most_common(1)[0][0]==(0, 1+1) and found[0, 1+1] > 15, (found, simulated.waits.sites)

@pytest.mark.skipif(is_gpu, reason='a GPU does not count them')
def test_tokens_are_read_once():
    "With `unit='tokens'` each loader batch costs one more wait, and no micro-batch does"
    classes = torch.randint(8, (64, 5))
    acc = Acc(100, unit='tokens', micro_batch_size=4)
    learn = make(Data(x, classes), 16, acc, Counted(), CountedEnd(), model=Words(),
                 loss_func=CrossEntropyLossFlat(ignore_index=0), dl_type=InMemory)
    learn.fit(2, .01)
    assert len(learn.recorder.losses) == 4 and learn.counted.all == [1, 2]*4, simulated.waits.sites

# --- memory

class Words(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(6, 40)
    def forward(self, x): return self.lin(x).unflatten(1, (5, 8))

class Forward(nn.Module):
    "A transformer, with a class for each word"
    def __init__(self, d, n_layer=2, n_cls=8):
        super().__init__()
        self.inp,self.out = nn.Linear(6, d),nn.Linear(d, n_cls)
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d, 2, 2*d, dropout=.1, batch_first=True, norm_first=True), n_layer,
            enable_nested_tensor=False)
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
    """The most memory of each training batch beyond what it began with. (It does not listen to `after_batch`, where
    `learn.pred` would be kept for it)"""
    order,run_valid = -100,False
    def before_fit(self): self.all,self.start = [],None
    def before_batch(self):
        self.after_train()
        gc.collect()
        torch_device.reset_peak_memory_stats()
        self.start = torch_device.memory_allocated()
    def after_train(self):
        if self.start is not None: self.all.append(torch_device.max_memory_allocated() - self.start)
        self.start = None

def peak(name, bs, *cbs, k=None, accum_bs=None, amp='to_fp32', opt_func=SGD, fit=lambda l: l.fit(2, .01), loader=InMemory):
    "Of the second epoch: gradients and the optimizer's state are there before"
    data,model = net(name)
    learn = make(data, bs, Acc(accum_bs or n_items, micro_batch_size=k), Peaks(), *cbs, model=model,
                 loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, dl_type=loader, amp=amp)
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

extras = {'logger': lambda: [StepLogger()], 'checkpoint': lambda: [TrainingCheckpoint(every_steps=1)],
          'both': lambda: [StepLogger(), TrainingCheckpoint(every_steps=1)]}

@pytest.mark.parametrize('name', extras)
def test_peak_with(name):
    "What is logged and saved raises the peak by some numbers"
    plain,more = (peak('MLP', n_items, *cbs, k=8, loader=DataLoader) for cbs in ([], extras[name]()))
    assert more <= plain + 4096

def test_peak_with_scaler():
    "bf16 has none"
    assert peak('MLP', n_items, k=8, amp='to_fp16') <= peak('MLP', n_items, k=8, amp='to_bf16') + 4096

class ManyClasses(nn.Module):
    def __init__(self, n=512*big):
        super().__init__()
        self.inp,self.head = nn.Linear(6, 8),nn.Linear(8, n)
    def forward(self, x): return self.head(self.inp(x).tanh())

def chunked_peak(n_chunks, amp, k=None, n=512*big, loss_func=None, since=1):
    torch.manual_seed(0)
    data,model = Data(torch.randn(64, 16, 6), torch.randint(n, (64, 16))),ManyClasses(n)
    learn = make(data, 32, Acc(32, micro_batch_size=k), *[ChunkedHead(n) for n in n_chunks], Peaks(), model=model,
                 loss_func=loss_func or CrossEntropyLossFlat(), opt_func=SGD, dl_type=InMemory, amp=amp)
    learn.fit(2, .01)
    assert rel_err(weights(learn.model), weights(model)) > 1e-5
    return max(learn.peaks.all[since*len(learn.peaks.all)//2:]),weights(learn.model)

@pytest.mark.parametrize('amp', amps)
def test_memory_of_chunks(amp):
    "The head's outputs take an eighth, beside the gradients of the head, which wait for `backward`; with micro-batches an eighth of theirs"
    grads = 4*(8+1)*512*big
    for k in (None, 16):
        (whole,a),(chunked,b) = chunked_peak([], amp, k),chunked_peak([8], amp, k)
        assert chunked < 1.05*whole/8 + 4*grads + 32*16*8*big*4, (chunked, whole, grads)
        assert rel_err(b, a) < (1e-6 if amp == 'to_fp32' else 1e-3)

def own_loss(pred, y): return (F.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction='none')*(y.flatten() != 3)).sum()/(y != 3).sum()

@pytest.mark.parametrize('amp', quickly([], ['to_fp32', 'to_fp16'], ['to_fp32']))
def test_memory_of_measuring(amp):
    """Chunks of a loss of one's own, while what it averages over is measured: at most eleven times the outputs of a chunk,
    instead of three times"""
    n = 4096*big
    outputs,grads = 4*32*16*n,4*(8+1)*n
    (whole,a),(chunked,b) = (chunked_peak(n_chunks, amp, n=n, loss_func=own_loss, since=0) for n_chunks in ([], [8]))
    assert chunked < 11*outputs/8 + 4*grads + 2**16 < .4*whole, (chunked/outputs, whole/outputs, grads)
    assert rel_err(b, a) < (1e-6 if amp == 'to_fp32' else 1e-3)

# --- losses of one's own

def class_weights(pred, y):
    w = 1 + (y == 0)*4.
    return (F.cross_entropy(pred, y, reduction='none')*w).sum()/w.sum()
def by_zeros(pred, y): return (F.cross_entropy(pred, y, reduction='none')*(y == 0)).sum()/(y == 0).sum()
def of_elements(pred, y): return F.cross_entropy(pred, y, reduction='none').sum()/len(y)

@pytest.mark.parametrize('amp', ['to_fp32', 'to_fp16'])
@pytest.mark.parametrize('loss', [*quickly([], [class_weights, by_zeros, of_elements], [class_weights, of_elements])])
def test_losses_of_ones_own(loss, amp):
    "What is measured beside reference items is on the device: in each step, without a loss of some items, and until a rule is trusted"
    runs = []
    y = torch.arange(48)%3
    for name,mbs in ((accelerators[0], 5), (accelerators[0], 1), ('cpu', 24)):
        devices.use(name)
        learn = make(Data(x[:48], y), 24, Acc(24, micro_batch_size=mbs), loss_func=loss, opt_func=SGD, amp=amp, lr=.1)
        learn.fit(3)
        runs.append(weights(learn.model))
    for run in runs[:2]: assert rel_err(run, runs[2]) < (1e-5 if amp == 'to_fp32' else 1e-2)

# --- 'auto'

def state(learn):
    return (weights(learn.model), *[host(b) for b in learn.model.buffers()], tensor(learn.recorder.losses),
            host(torch_device.get_rng_state()), torch.get_rng_state())

def fit_auto(name, k, amp='to_fp32', accum_bs=n_items, bytes=None):
    data,model = net(name)
    learn = make(data, n_items, Acc(accum_bs, micro_batch_size=k), model=model, loss_func=nn.CrossEntropyLoss(),
                 opt_func=SGD, dl_type=InMemory, amp=amp)
    if bytes is not None:
        torch_device.set_per_process_memory_fraction(
            (base(learn)+bytes)/torch_device.get_device_properties(0).total_memory)
    try: learn.fit(2, .05)
    finally: torch_device.set_per_process_memory_fraction(1.)
    return learn

def base(learn):
    "Bytes in use before training, but on the first use of libraries"
    gc.collect()
    torch_device.empty_cache()
    return torch_device.memory_reserved()

@pytest.mark.parametrize('name,accum_bs',
                         quickly([], [*((name, n_items) for name in nets), ('MLP', 2*n_items)], [('transformer', n_items)]))
def test_auto(name, accum_bs):
    """It ends with the largest of n, n/2, n/4... that fits, wherever memory ran out; weights, BatchNorm, losses and
    random numbers are those of a run with that size, to the bit"""
    data,model = net(name)
    n_params = sum(p.nbytes for p in model.parameters())
    found = []
    fixed = {k: peak(name, n_items, k=k, accum_bs=accum_bs) for k in (32, 16)}
    # between what two sizes take; at the lower end in backward, at the upper one in forward. The first epoch makes the gradients
    for part in (.15, .9):
        limit = fixed[16] + part*(fixed[32]-fixed[16]) + (2 if accum_bs > n_items else 1)*n_params
        learn = fit_auto(name, 'auto', accum_bs=accum_bs, bytes=limit)
        size = learn.gradient_accumulation.micro_bs
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
    learn = make(Data(x, ignored().clamp(min=0)), 16, Acc(micro_batch_size='auto'), model=model, dl_type=InMemory,
                 loss_func=nn.CrossEntropyLoss(), opt_func=Adam)
    bytes = base(learn) + 2.5*model.weight.nbytes     # its gradient, and one of Adam's two averages
    torch_device.set_per_process_memory_fraction(bytes/torch_device.get_device_properties(0).total_memory)
    with pytest.raises(torch.OutOfMemoryError, match='optimizer.*step'): learn.fit(1, .01)

# --- whole runs

def fit_net(name, amp='to_fp32', *cbs, k=8, opt_func=partial(SGD, mom=.9), model=None, data=None, loader=InMemory, n_epoch=3, lr=.02):
    d,m = net(name)
    learn = make(data or d, n_items//2, Acc(n_items, micro_batch_size=k), *cbs, model=model or m,
                 loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, dl_type=loader, amp=amp)
    learn.fit(n_epoch, lr)
    assert rel_err(weights(learn.model), weights(m)) > 1e-4
    return learn

@lru_cache
def in_fp32(name):
    "Losses, and the weights at the end"
    full = fit_net(name)
    return tensor(full.recorder.losses),weights(full.model)

@pytest.mark.parametrize('amp,tol', [('to_bf16', .05), ('to_fp16', .02)])
@pytest.mark.parametrize('name', quickly([], nets, ['transformer']))
def test_half_precision(name, amp, tol):
    "As fp32: in its losses, and in where the weights go"
    half,(losses,end) = fit_net(name, amp),in_fp32(name)
    start = weights(net(name)[1])
    assert rel_err(tensor(half.recorder.losses), losses) < tol
    a,b = weights(half.model)-start,end-start
    assert torch.cosine_similarity(a, b, 0) > .9
    if amp == 'to_fp16': assert half.mixed_precision.scaler.n_overflows==0

@pytest.mark.slow
@pytest.mark.parametrize('amp', quickly([], amps, ['to_fp32']))
def test_resume(amp):
    "Stopped in an epoch and started again: the run that nobody stopped, to the bit, dropout and loss scale included"
    def fit(*cbs): return fit_net('conv net', amp, *cbs, loader=partial(DataLoader, shuffle=True))
    whole = fit(TrainingCheckpoint('whole', every_steps=1))
    new_process()
    with pytest.raises(RuntimeError, match='interrupted'): fit(TrainingCheckpoint('stopped', every_steps=1), Interrupt((1, 3)))
    new_process()
    resumed = fit(TrainingCheckpoint('stopped', every_steps=1))
    for a,b in zip(state(resumed), state(whole)): assert torch.equal(a, b)
    new_process()

# --- loader batches on their way

class Parts(Callback):
    "Is each micro-batch a piece of the loader batch's memory?"
    run_valid = False
    def before_fit(self): self.n = 0
    def before_batch(self): self.whole = storage(self.learn.x)
    def after_pred(self):
        assert storage(self.learn.x)==self.whole and storage(self.learn.y)!=self.whole
        self.n += 1
def storage(t): return (t.raw if hasattr(t, 'raw') else t).untyped_storage().data_ptr()

@pytest.mark.quick
def test_cut_without_copies():
    learn = fit_net('conv net', 'to_fp32', Parts(), n_epoch=1)
    assert learn.parts.n==2*n_items//8

class NonBlocking(DataLoader):
    "Asks for the copy of the next loader batch before it gives this one"
    def __iter__(self):
        place,self.device = self.device,None
        try: batches = [tuple(t.pin_memory() if is_gpu else t for t in b) for b in super().__iter__()]
        finally: self.device = place
        def copied(b): return tuple(t.to(place, non_blocking=True) for t in b)
        coming = copied(batches[0])
        for b in [*batches[1:], None]:
            now,coming = coming,None if b is None else copied(b)
            yield now

@pytest.mark.quick
@pytest.mark.skipif(is_gpu, reason='the next test asks the profiler')
def test_order_of_copies():
    "Between two fetches nothing waits, with fastaccum as without; and no copy is made that fastai does not make"
    def order(*cbs, opt=SGD):
        data,model = net('MLP')
        learn = learner(data, n_items//2, *cbs, model=model, loss_func=nn.CrossEntropyLoss(), opt_func=opt,
                        dl_type=NonBlocking, valid=Data(data.x[:2], data.y[0][:2]))
        learn._do_epoch_validate = noop
        with simulated.trace: learn.fit(1, .01)
        return [o for o in simulated.trace if o in ('copy to the device', 'read', 'copy to the host',
                                                    'blocking copy to the device') or o=='aten::addmm']
    plain,acc = order(),order(Acc(2*n_items, micro_batch_size=8))
    copies = [i for i,o in enumerate(acc) if o=='copy to the device']
    assert len(copies)==8==plain.count('copy to the device')               # x and y of 4 loader batches
    assert not {'read', 'copy to the host', 'blocking copy to the device'} & set(acc[copies[0]:copies[-1]])
    assert 'addmm' in ''.join(acc[copies[3]:copies[4]])                    # the third is asked for while the first is computed
    assert acc.count('read') + acc.count('copy to the host')==1 and plain.count('copy to the host')==4

# --- what only CUDA has

@only_cuda
def test_fetched_while_computing():
    "The profiler sees copies to the device run beside kernels, on a stream of their own, as often as without fastaccum"
    from torch.profiler import ProfilerActivity, profile
    class Prefetch(NonBlocking):
        def __iter__(self):
            stream,main = torch.cuda.Stream(),torch.cuda.current_stream()
            with torch.cuda.stream(stream): batches = super().__iter__()
            while True:
                with torch.cuda.stream(stream): b = next(batches, None)
                if b is None: return
                main.wait_stream(stream)
                for t in b: t.record_stream(main)
                yield b
    def beside(*cbs):
        data,model = net('transformer', 4*n_items)
        learn = learner(data, n_items, *cbs, model=model, loss_func=nn.CrossEntropyLoss(), dl_type=Prefetch,
                        valid=Data(data.x[:2], data.y[0][:2]))
        learn.fit(1, .01)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof: learn.fit(1, .01)
        events = [e for e in prof.events() if e.device_type==torch.autograd.DeviceType.CUDA]
        copies = [e.time_range for e in events if 'HtoD' in e.name and 'Pinned' in e.name]
        kernels = [e.time_range for e in events if not e.name.startswith('Mem')]
        return sum(any(k.start < c.end and c.start < k.end for k in kernels) for c in copies),weights(learn.model)
    assert beside(Acc(n_items, micro_batch_size=8))[0] >= beside()[0] - 1

@only_cuda
@pytest.mark.parametrize('amp', amps)
def test_two_streams(amp):
    "Batches that come on another stream are used when they are there"
    class Side(DataLoader):
        def __iter__(self):
            stream,place,self.device = torch.cuda.Stream(),self.device,None
            try:
                for b in super().__iter__():
                    with torch.cuda.stream(stream): b = tuple(t.pin_memory().to(place, non_blocking=True) for t in b)
                    torch.cuda.current_stream().wait_stream(stream)
                    for t in b: t.record_stream(torch.cuda.current_stream())
                    yield b
            finally: self.device = place
    a,b = fit_net('conv net', amp, loader=Side),fit_net('conv net', amp)
    assert torch.equal(weights(a.model), weights(b.model))

@only_cuda
@pytest.mark.parametrize('amp', amps)
@pytest.mark.parametrize('opt', [torch.optim.AdamW, torch.optim.SGD])
def test_fused(opt, amp):
    "As the one that is not fused; in fp16 it skips steps by itself, and the host reads only the loss"
    a,b = (fit_net('MLP', amp, opt_func=partial(OptimWrapper, opt=partial(opt, fused=f)), lr=.01) for f in (True, False))
    start = weights(net('MLP')[1])
    assert rel_err(weights(a.model)-start, weights(b.model)-start) < (1e-4 if amp == 'to_fp32' else .02)

@only_cuda
@pytest.mark.parametrize('amp', amps)
def test_channels_last(amp):
    "Micro-batches keep the format"
    class Format(Callback):
        order,run_valid = 20,False
        def before_batch(self): self.learn.xb = (self.learn.x.contiguous(memory_format=torch.channels_last),)
        def after_pred(self): assert self.learn.x.is_contiguous(memory_format=torch.channels_last)
    data,model = net('conv net')
    a,b = fit_net('conv net', amp, Format(), model=model.to(memory_format=torch.channels_last)),fit_net('conv net', amp)
    assert rel_err(tensor(a.recorder.losses), tensor(b.recorder.losses)) < (1e-4 if amp == 'to_fp32' else .02)

@only_cuda
def test_graphs():
    "A captured graph replays after a fit that ran out of memory as before it; a graphed model trains as the plain one"
    lin,static = nn.Linear(64, 64).cuda(),torch.randn(8, 64, device='cuda')
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad(): lin(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad(): out = lin(static)
    graph.replay()
    before = out.clone()
    fixed = {k: peak('conv net', n_items, k=k) for k in (16, 32)}
    learn = fit_auto('conv net', 'auto', bytes=(fixed[16]+fixed[32])/2 + sum(p.nbytes for p in net('conv net')[1].parameters()))
    assert learn.gradient_accumulation.micro_bs < n_items
    out.zero_()
    graph.replay()
    assert torch.equal(out, before)
    data,model = (Data(torch.randn(2*n_items, 6), torch.randint(8, (2*n_items,))),
                  nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 8)).cuda())
    plain = fit_net('MLP', model=deepcopy(model), data=data)
    graphed = torch.cuda.make_graphed_callables(deepcopy(model), (torch.randn(8, 6, device='cuda'),))
    learn = make(data, n_items//2, Acc(n_items, micro_batch_size=8), loss_func=nn.CrossEntropyLoss(), dl_type=InMemory)
    learn.model = graphed                              # a copy would not be the graphed one
    learn.fit(3, .02)
    assert rel_err(weights(learn.model), weights(plain.model)) < 1e-5

@only_cuda
@pytest.mark.xfail(reason='pytorch#169545, pytorch#181723: once this passes, `Compile` need not be refused', strict=True)
def test_compiled_into_graphs(monkeypatch):
    "Accumulation with a model that is compiled into CUDA graphs"
    monkeypatch.setattr(Compile, 'cuda_graphs', False)
    plain,compiled = fit_net('MLP'),fit_net('MLP', 'to_fp32', Compile(mode='reduce-overhead'))
    assert rel_err(weights(compiled.model), weights(plain.model)) < 1e-5
