"""Gradients on the host, on the simulated accelerator: the same bits, at no time all of them on the device, and in
sight of everybody who reads them"""
import gc, pytest
from collections import Counter
import simulated
from reference import *
from fastai.callback.training import GradientClip
from fastaccum.all import (
    ActivationCheckpointing, AdaptiveGradientAccumulation, GradientNoiseScale, MixedPrecision, StepLogger,
    TrainingCheckpoint)
from contextlib import nullcontext
from fastaccum.accumulation.checks import check_learner
from fastaccum.accumulation.ways import way_of
from fastaccum.core import host as host_module
from fastaccum.core.memory import PeakMemory
from fastaccum.core.host import HostGradient, HostGradients
from simulated import memory, move, raw, trace, waits
from quick import quickly

# every tool is one of `setups`; quickly some of them

@pytest.fixture(autouse=True)
def on_sim(device): devices.use('sim')

class Net(nn.Module):
    "Blocks with dropout and LayerNorm, in any type of weights"
    def __init__(self, n=3, d=16):
        super().__init__()
        block = lambda i: nn.Sequential(nn.Linear(d if i else 6, d), nn.LayerNorm(d), nn.GELU(), nn.Dropout(.1))
        self.blocks,self.out = nn.Sequential(*map(block, range(n))),nn.Linear(d, 4)
    def forward(self, x): return self.out(self.blocks(x.to(self.out.weight.dtype))).float()

def fit(acc=GradientAccumulation, cbs=(), opt_func=Adam, dtype=None, make=Net, n=43, bs=8, n_epoch=2,
        train=lambda l, n: l.fit(n, .01), **kwargs):
    "Weights, losses, what StepLogger writes, and the Learner"
    set_seed(0)
    data,model = Data(torch.randn(n, 6), torch.randint(4, (n,))),make()
    learn = learner(data, bs, acc(**kwargs), *(cb() for cb in cbs), StepLogger(grad_norm=True),
                    model=model.to(dtype or torch.float32), opt_func=opt_func, loss_func=CrossEntropyLossFlat())
    set_seed(1)
    train(learn, n_epoch)
    df = learn.step_logger.to_df()
    return (weights(learn.model),tensor(learn.recorder.losses),
            torch.nan_to_num(torch.tensor(df[['grad_norm', 'loss']].to_numpy().copy(order='C')), -1.),learn)

class Foreign(Callback):
    "Reads gradients before the step, and changes them in several ways"
    order = 12
    def before_step(self):
        self.norms = getattr(self, 'norms', [])
        for i,p in enumerate(self.learn.model.parameters()):
            p.grad.data.mul_(.5)
            p.grad[:1].add_(.01)                      # a view
            p.grad.view(-1)[-1] = 0.
            if i%2: p.grad = p.grad.clamp(-.1, .1)    # a tensor of the device, as the user writes it
            else: p.grad.add_(p.grad.clone(), alpha=.5)
            self.norms.append(p.grad.norm().item())

class Infinite(Callback):
    order = 5
    def before_backward(self):
        if self.learn.train_iter in (3, 8): self.learn.loss_grad = self.learn.loss_grad*float('inf')

class Cancels(Callback):
    order = 30
    def before_step(self):
        if self.learn.train_iter == 5: raise CancelStepException

torch_opt = lambda f, **kw: partial(OptimWrapper, opt=partial(f, **kw))
wide = dict(dtype=torch.bfloat16, grad_dtype=torch.float32)
setups = {
    'plain': {}, 'split': dict(micro_batch_size=3), 'auto': dict(micro_batch_size='auto'),
    'drop': dict(remainder='drop'), 'carry': dict(remainder='carry'),
    'added up': dict(normalize=False), 'checked': dict(check_loss='always'),
    'coupled': dict(micro_batch_size=3, coupled=True, accum_bs=None),
    'schedule': dict(acc=lambda accum_bs, **kw: GradientAccumulationSchedule(8, 24, **kw)),
    'adaptive': dict(acc=lambda accum_bs, **kw: AdaptiveGradientAccumulation(accum_bs, 32, **kw)),
    'clip': dict(cbs=[lambda: GradientClip(.1)]), 'noise': dict(cbs=[GradientNoiseScale]),
    'foreign': dict(cbs=[Foreign]), 'cancelled': dict(cbs=[Cancels]),
    'fp16': dict(cbs=[lambda: MixedPrecision('fp16'), lambda: GradientClip(.1)]),
    'fp16 overflows': dict(cbs=[lambda: MixedPrecision('fp16'), Infinite, Cancels]),
    'bf16': dict(cbs=[lambda: MixedPrecision('bf16'), lambda: GradientClip(.1)]),
    'recomputed': dict(cbs=[lambda: ActivationCheckpointing(nn.Sequential)]),
    'lr_find': dict(train=lambda l, n: (l.lr_find(num_it=10, show_plot=False), l.fit(1))),
    'one cycle': dict(train=lambda l, n: l.fit_one_cycle(n, .05)),
    'bf16 weights': dict(dtype=torch.bfloat16), 'fp32 sums': wide, 'fp32 sums, AdamW': dict(wide, opt_func=torch_opt(torch.optim.AdamW)),
    **{f.__name__: dict(opt_func=f) for f in (SGD, Lamb, ranger)},
    **{f.__name__: dict(opt_func=torch_opt(f)) for f in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor)},
    'foreach': dict(opt_func=torch_opt(torch.optim.AdamW, foreach=True)),
    'AdamW, fp16': dict(opt_func=torch_opt(torch.optim.AdamW), cbs=[MixedPrecision])}

longer = 'drop','checked','noise','cancelled','bf16','one cycle','bf16 weights','fp32 sums','ranger','Adagrad','foreach'
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:.*')
@pytest.mark.parametrize('setup', quickly([], setups, longer))
def test_same_bits(setup):
    kwargs = dict(accum_bs=16, **setups[setup]) if 'accum_bs' not in setups[setup] else setups[setup]
    n_host = Counter()
    class Look(Callback):
        order = 10.9
        def before_step(self): n_host.update(isinstance(p.grad, HostGradient) for p in self.learn.model.parameters())
    (w,losses,rows,learn),(v,others,lines,other) = fit(**kwargs),fit(**{**kwargs, 'cbs': [*kwargs.get('cbs', ()), Look]}, grad_device='cpu')
    assert v.equal(w) and others.equal(losses) and lines.equal(rows) and len(rows) > 2
    assert n_host[True] > 20 and not n_host[False]
    assert rel_err(w, weights(move(Net()))) > .01 and all(p.grad is None for p in other.model.parameters())
    if hasattr(learn, 'mixed_precision') and learn.mixed_precision.scaler.is_enabled():
        histories = [l.mixed_precision.scaler.history() for l in (learn, other)]
        assert histories[0] == histories[1] and any(histories[0]['skipped']) == ('overflows' in setup)
    if setup == 'foreign': assert learn.foreign.norms == other.foreign.norms

def deep(n=8, d=32): return move(nn.Sequential(*[nn.Linear(d, d, bias=False) for _ in range(n)]))
def there(*shape): return torch.randn(*shape).to(simulated.device)

def held(model, opt, n_micro, context):
    """Most bytes beyond weights and the optimizer's state, in a backward pass and in a step, of the second accumulated
    batch; bytes of a gradient"""
    xs = there(2*n_micro, 4, 32)
    with context(model.parameters(), opt):
        for i,x in enumerate(xs, 1):
            if i == n_micro+1: gc.collect(); before = memory.live
            memory.reset_peak()
            model(x).pow(2).mean().backward()
            if i > n_micro+1: backward = memory.peak-before
            if i%n_micro == 0:
                memory.reset_peak()
                nn.utils.clip_grad_norm_(model.parameters(), 1.)
                clip = memory.peak-before if i > n_micro else 0
                opt.step()
                step = memory.peak-before if i > n_micro else 0
                opt.zero_grad()
    return backward,clip,step,next(model.parameters()).nbytes

@pytest.mark.parametrize('opt_func', [torch.optim.SGD, partial(torch.optim.AdamW, foreach=True)], ids=['SGD', 'AdamW'])
def test_never_all_at_once(opt_func):
    "Backward passes hold two of eight gradients, the norm one, and clipping and the step one with the temporaries of its arithmetic"
    def measured(context):
        model = deep()
        return held(model, opt_func(model.parameters(), lr=.1), 3, context)
    acts,(*plain,g),(*host,_) = 8*4*32*4,measured(lambda *_: torch.enable_grad()),measured(HostGradients)
    assert min(plain) >= 8*g                          # all of them
    assert host[0] <= 2*g+2*acts and host[1] <= 2*g and host[2] <= 6*g

@pytest.mark.slow
def test_memory_in_a_fit():
    "It falls by all gradients but one, in `GradientAccumulation`"
    def peak(**kwargs):
        data = Data(torch.randn(32, 32), torch.randn(32, 32))
        learn = learner(data, 2, GradientAccumulation(16, **kwargs),
                        model=nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(20)]),
                        opt_func=partial(SGD, mom=0.))
        gc.collect()
        before = memory.live
        memory.reset_peak()
        learn.fit(1, .1)
        return memory.peak-before
    g = 32*32*4
    assert peak() > 20*g
    assert peak(grad_device='cpu') < 4*g + 20*2*32*4*2

@pytest.mark.parametrize('n', quickly([4], [1, 4]))
def test_bytes(n):
    """A step of `n` micro-batches: `n` times all gradients to the host, `n-1` times to the device, and once for the
    step. Nothing waits for them"""
    model,places = deep(),[]
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    with HostGradients(model.parameters(), opt):
        xs = there(2*n, 4, 32)
        for i,x in enumerate(xs):
            loss = model(x).pow(2).mean()
            with trace, waits: loss.backward()
            assert not waits.n, waits.sites
            assert Counter(o for o in trace if o.startswith('copy to')) == (
                {'copy to the host': 8} if i%n == 0 else {'copy to the host': 8, 'copy to the device': 8})
            places.append({p.grad.host.data_ptr() for p in model.parameters()})
            if i%n == n-1:
                with trace, waits: opt.step()
                assert Counter(trace)['copy to the device'] == 8 and 'copy to the host' not in trace and not waits.n
                opt.zero_grad()
    assert all(o == places[0] for o in places) and len(places[0]) == 8       # the host's memory is used again
    assert not any(host_module.lane(simulated.device).spare.values())

class Counts(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]['k'] = self.param_groups[0].get('k', 0)+1
        return super().step(closure)
class Joint(torch.optim.SGD):
    "Divides by the norm of all gradients"
    def step(self, closure=None):
        ps = [p for g in self.param_groups for p in g['params'] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps: p.data.sub_(p.grad/norm)
class Odd(torch.optim.SGD):
    def __init__(self, params, model, lr): super().__init__(params, lr=lr)
class Own(Optimizer):
    def step(self, closure=None): super().step(closure)
refused = dict(counts=(torch_opt(Counts), 'Counts counts in `k`'), joint=(torch_opt(Joint), 'Joint makes another step'),
               LBFGS=(torch_opt(torch.optim.LBFGS), 'LBFGS.*closure'),
               odd=(torch_opt(Odd, model=1), "Odd cannot be tried.*argument: 'model'"),
               own=(lambda ps, lr: Own(ps, [], lr=lr), 'Own has a `step`'))

@pytest.mark.parametrize('name', quickly(['counts'], refused))
def test_refused(name):
    "Before training. On the CPU, where nothing goes by parts, it trains"
    opt_func,words = refused[name]
    def go(): fit(accum_bs=16, grad_device='cpu', opt_func=opt_func, n_epoch=1)
    with pytest.raises(ValueError, match=words): go()
    if name in ('counts', 'joint', 'own'): devices.use('cpu'); go()

def test_ranks_and_values():
    for wrong in ('cuda', 'host', 0, True):
        with pytest.raises(ValueError, match="grad_device=.*pass 'cpu'"): GradientAccumulation(8, grad_device=wrong)
    GradientAccumulation(8, grad_device=torch.device('cpu'))
    for joint in (True, False):
        acc = GradientAccumulation(16, grad_device='cpu')
        learn = learner(Data(torch.randn(16, 6), torch.randn(16, 4)), 8, acc)
        acc.ranks = SimpleNamespace(world=2, joint_gradients=joint)
        with pytest.raises(ValueError, match='several ranks add them up there') if joint else nullcontext(): check_learner(acc, way_of(acc))

@pytest.mark.slow
def test_cpu():
    "A model on the CPU trains as without it, and its gradients are plain tensors"
    devices.use('cpu')
    kinds = []
    look = lambda: On('before_step', lambda l: kinds.extend(type(p.grad) for p in l.model.parameters()))
    a,b = fit(accum_bs=16, cbs=[look]),fit(accum_bs=16, cbs=[look], grad_device='cpu')
    assert a[0].equal(b[0]) and a[1].equal(b[1]) and set(kinds) == {Tensor}

@pytest.mark.slow
def test_learns_later():
    "Parameters that a callback unfreezes in mid-fit"
    kept = []
    class Thaw(Callback):
        def before_fit(self): self.learn.model.blocks.requires_grad_(False)
        def before_epoch(self): self.learn.model.blocks.requires_grad_(self.learn.epoch > 0)
    class Look(Callback):
        def after_backward(self):
            kept.append({isinstance(p.grad, HostGradient) for p in self.learn.model.parameters() if p.grad is not None})
    a,b = fit(accum_bs=16, cbs=[Thaw]),fit(accum_bs=16, cbs=[Thaw, Look], grad_device='cpu')
    assert a[0].equal(b[0]) and kept == [{True}]*12

@pytest.mark.slow
def test_fits_in_a_row():
    "An exception in mid-batch leaves nothing behind"
    def train(learn, n):
        learn.fit(1, .01)
        with pytest.raises(ZeroDivisionError): learn.fit(1, .01, cbs=On('after_backward', throw(ZeroDivisionError()), calls=[2]))
        on_host = learn.gradient_accumulation.grad_device is not None
        if on_host:
            assert (all(not p._post_accumulate_grad_hooks and p.grad is None for p in learn.model.parameters())
                    and 'step' not in vars(learn.opt))
        learn.fit(1, .01)
    assert fit(accum_bs=16, train=train)[0].equal(fit(accum_bs=16, train=train, grad_device='cpu')[0])

@pytest.mark.slow
def test_resumed(tmp_path):
    "A resumed fit has the contexts of its callbacks again, and no gradient on the device"
    def go(folder, stop=()):
        kinds = []
        class Look(Callback):
            def before_batch(self): kinds.extend(type(p.grad) for p in self.learn.model.parameters() if p.grad is not None)
        cbs = [lambda: TrainingCheckpoint(folder, every_steps=3, digest=True), Look, lambda: Stop('after_batch', KeyboardInterrupt, stop)]
        try: return fit(accum_bs=16, cbs=cbs, grad_device='cpu')[0],kinds
        except KeyboardInterrupt: return kinds
    whole,_ = go(tmp_path/'a')
    go(tmp_path/'b', [(1, 3)])
    resumed,kinds = go(tmp_path/'b')
    assert resumed.equal(whole) and set(kinds) == {HostGradient}

@pytest.mark.slow
def test_advice():
    "The forecast counts a few of the largest gradients in place of all, and says so"
    peaks = {}
    for where in (None, 'cpu'):
        data,model = (Data(torch.randn(32, 64), torch.randint(4, (32,))),
                      nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 4)))
        learn = learner(data, 32, GradientAccumulation(64, micro_batch_size=2, grad_device=where), model=model,
                        opt_func=SGD, loss_func=CrossEntropyLossFlat())
        advice = learn.memory_advice()
        with PeakMemory(learn.dls.device) as real: learn.fit(2)
        peaks[where] = advice.peak,real.peak
        assert any('on the host' in o for o in advice.forecast.notes)==(where=='cpu')
    (all_,real),(few,real_few) = peaks.values()
    assert abs(all_/real-1) < .01 and abs(few/real_few-1) < .05 and few < .8*all_
