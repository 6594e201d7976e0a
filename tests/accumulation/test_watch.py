"Callbacks and hooks that are right for the big batch, and wrong for each micro-batch, are told once; right ones, never"
import warnings
import pytest
from reference import *
from reference import GradientAccumulation    # ours
from test_silent import moved
from fastai.callback.hook import ActivationStats, hook_output
from fastai.callback.tracker import TerminateOnNaNCallback
from fastaccum.all import MixedPrecision
from fastaccum.accumulation import witnesses

data = Data(torch.randn(61, 6, generator=torch.manual_seed(0)), torch.randn(61, 4))
ways = {'loader batches': (8, dict(accum_bs=32)), 'micro-batches': (32, dict(micro_batch_size=8)),
        'both': (16, dict(accum_bs=32, micro_batch_size=8))}
plain = partial(SGD, mom=0.)

def fitted(bs, *cbs, hook=None, epochs=2, lr=.05, of=data, **kwargs):
    "A Learner, and the warnings of its fit"
    learn = learner(of, bs, *cbs, **{**dict(opt_func=plain), **kwargs})
    if hook is not None: hook(learn.model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn.fit(epochs, lr)
    return learn,[str(w.message) for w in found]

def compared(way, cb=None, tol=2e-6, **kwargs):
    "How far off, and the warnings"
    bs,acc = ways[way]
    own = lambda: [] if cb is None else [cb()]
    (whole,_),(learn,told) = fitted(32, *own(), **kwargs),fitted(bs, GradientAccumulation(**acc), *own(), **kwargs)
    start = learner(data, 8)
    return moved(learn, whole, start),told

class Zeroes(Callback):
    def before_batch(self):
        if self.training: self.opt.zero_grad()
class Clips(Callback):
    def after_backward(self): nn.utils.clip_grad_norm_(self.learn.model.parameters(), .05)
class ClipsData(Callback):
    def after_backward(self):
        for p in self.learn.model.parameters(): p.grad.data.clamp_(-.01, .01)
class Decays(Callback):
    def after_backward(self):
        for p in self.learn.model.parameters(): p.grad.add_(p.detach(), alpha=.1)
class Anneals(Callback):
    def before_batch(self):
        if self.training: self.opt.set_hyper('lr', .1/(1+self.train_iter))
class AnnealsByPosition(Callback):
    "`pct_train` stays where it is until the step"
    def before_batch(self):
        if self.training: self.opt.set_hyper('lr', .1*(1-self.pct_train))

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('cb', [Zeroes, Clips, ClipsData, Decays, Anneals])
def test_told(way, cb):
    if way == 'micro-batches' and cb in (Zeroes, Anneals): pytest.skip('it comes once for each loader batch')
    off,told = compared(way, cb)
    assert off > 1e-3, 'the case is harmless'
    msg, = told
    assert cb.__name__ in msg and '%' in msg or 'lr was' in msg
    assert 'before_step' in msg or 'opens' in msg

class Masks(Callback):
    def after_backward(self): self.learn.model[0].weight.grad[:,:2] = 0
class Centers(Callback):
    def after_backward(self):
        g = self.learn.model[0].weight.grad
        g.sub_(g.mean(1, keepdim=True))
class ClipsAtStep(Callback):
    def before_step(self): nn.utils.clip_grad_norm_(self.learn.model.parameters(), .05)
class Reads(Callback):
    def after_backward(self): self.norms = [p.grad.norm().item() for p in self.learn.model.parameters()]
class PutsBack(Callback):
    "Looks at the gradient of this pass alone, and leaves the sum"
    def before_backward(self): self.kept = [(p, p.grad) for p in self.learn.model.parameters()]; self.learn.model.zero_grad()
    def after_backward(self):
        for p,g in self.kept:
            if g is not None: p.grad = g.add_(p.grad)
class AnnealsWhereItOpens(Callback):
    def before_batch(self):
        acc = getattr(self.learn, 'gradient_accumulation', None)
        if self.training and (acc is None or acc.opens): self.opt.set_hyper('lr', .1*(1-self.epoch/2))
class PerEpoch(Callback):
    def before_epoch(self): self.opt.set_hyper('lr', .1/(1+self.epoch))

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('cb', [Masks, Centers, ClipsAtStep, Reads, PutsBack, AnnealsWhereItOpens, AnnealsByPosition,
                                PerEpoch, TerminateOnNaNCallback, GradientClip])
def test_silent_and_exact(way, cb):
    off,told = compared(way, cb)
    assert off < 5e-6 and not told, (off, told)

hooks = {'clamp': (lambda g: g.clamp(-.01, .01), True), 'unit': (lambda g: g/g.norm(), True),
         'in place': (lambda g: (g.clamp_(-.01, .01), None)[1], True),
         'factor': (lambda g: g*.1, False), 'mask': (lambda g: g*(torch.arange(6) > 2), False),
         'centered': (lambda g: g-g.mean(1, keepdim=True), False), 'looks': (lambda g: None, False)}

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('name', hooks)
def test_hooks(way, name):
    f,wrong = hooks[name]
    off,told = compared(way, hook=lambda m: m[0].weight.register_hook(f))
    assert (off > 1e-3) == wrong and len(told) == wrong, (off, told)
    if wrong: assert 'The hook' in told[0] and '0.weight' in told[0] and '%' in told[0]

def test_hook_after_accumulation():
    def hook(model): model[0].weight.register_post_accumulate_grad_hook(lambda p: [p.grad.clamp_(-.01, .01)] and None)
    off,told = compared('loader batches', hook=hook)
    assert off > 1e-3 and len(told) == 1 and 'hook' in told[0]

def test_hook_that_draws_leaves_the_numbers(monkeypatch):
    "It is called once more, and whoever draws next draws the same"
    def numbers():
        _,told = fitted(8, GradientAccumulation(32), hook=lambda m: m[0].weight.register_hook(lambda g: g+torch.randn(6)*1e-3))
        return torch.rand(3),len(told)
    with_check = numbers()
    monkeypatch.setattr(witnesses, 'kinds', [])
    without = numbers()
    assert torch.equal(with_check[0], without[0]) and (with_check[1], without[1]) == (1, 0)

def test_nothing_accumulates():
    for cb in (Zeroes, Clips, Anneals): assert not fitted(32, GradientAccumulation(32), cb())[1]

def test_later():
    "A callback that begins to change gradients in mid-fit is told"
    late = On('before_batch', lambda l: l.opt.zero_grad(), calls=range(4*40, 10**9))
    learn,told = fitted(8, GradientAccumulation(32), late, epochs=60, of=Data(data.x[:32], data.y[0][:32]), lr=1e-3)
    assert len(told) == 1 and 'On' in told[0]

def test_nothing_is_left():
    "No hook of ours stays, however the fit ends, and gradients are what they were"
    for ex in (CancelFitException, KeyboardInterrupt):
        learn = learner(data, 8, GradientAccumulation(32), Stop('after_backward', ex, [(0, 1)]))
        hook = lambda g: g*2
        learn.model[0].weight.register_hook(hook)
        try: learn.fit(1)
        except KeyboardInterrupt: pass
        assert [[*(p._backward_hooks or {}).values()] for p in learn.model.parameters()] == [[hook], [], [], []]

def test_fp16():
    learn,told = fitted(8, GradientAccumulation(32), Reads(), MixedPrecision('fp16', device='cpu'))
    assert not [t for t in told if 'changed' in t]
    assert [t for t in fitted(8, GradientAccumulation(32), Zeroes(), MixedPrecision('fp16', device='cpu'))[1] if 'Zeroes' in t]

@pytest.mark.parametrize('order', (-1, 0, 5, 7))
def test_opens(order):
    "It is right in `before_batch`, whatever the order of the callback"
    seen = []
    fitted(8, GradientAccumulation(32), On('before_batch', lambda l: seen.append(l.gradient_accumulation.opens), order=order), epochs=2)
    assert seen == [True, False, False, False]*4

module_hooks = {'unit': (lambda m, i, o: (i[0]/i[0].norm(),), True),
                'clipped': (lambda m, i, o: (i[0]*(.01/i[0].norm()).clamp(max=1),), True),
                'in place': (lambda m, i, o: (i[0].div_(i[0].norm()), None)[1], True),
                'reversed': (lambda m, i, o: (-i[0],), False), 'each item': (lambda m, i, o: (i[0].clamp(min=0),), False),
                'looks': (lambda m, i, o: None, False), 'own rows': (lambda m, i, o: (i[0]*m.rows,), False)}

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('name', module_hooks)
def test_module_hooks(way, name):
    f,wrong = module_hooks[name]
    def hook(model):
        model[2].register_forward_pre_hook(lambda m, x: setattr(m, 'rows', (x[0] > 0)*1.))
        model[2].register_full_backward_hook(f)
    off,told = compared(way, hook=hook)
    assert (off > 1e-3) == wrong and len(told) == wrong, (off, told)
    if wrong: assert 'The backward hook' in told[0] and 'on the module 2' in told[0] and '%' in told[0]

tensor_hooks = {'unit': (lambda g, _: g/g.norm(), True), 'in place': (lambda g, _: (g.div_(g.norm()), None)[1], True),
                'reversed': (lambda g, _: -g, False), 'each item': (lambda g, _: g.clamp(min=0), False),
                'looks': (lambda g, _: None, False), 'own rows': (lambda g, rows: g*rows, False)}

class OnTensors(nn.Sequential):
    "Its `forward` puts a hook on what the third layer gets, another one in each call"
    hook = None
    def forward(self, x):
        x = self[1](self[0](x))
        f,rows = self.hook,(x > 0).float()
        if x.requires_grad: x.register_hook(lambda g: f(g, rows))
        return nn.Sequential(*self[2:])(x)

def on_tensors(f):
    def hook(model):
        model.__class__ = OnTensors
        model.hook = f
    return hook

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('name', tensor_hooks)
def test_tensor_hooks(way, name):
    f,wrong = tensor_hooks[name]
    off,told = compared(way, hook=on_tensors(f))
    assert (off > 1e-3) == wrong and len(told) == wrong, (off, told)
    if wrong: assert 'The backward hook OnTensors.forward' in told[0] and 'on a tensor' in told[0] and '%' in told[0]

@pytest.mark.slow
@pytest.mark.parametrize('coupled', [True, 'batchnorm'])
def test_tensor_hooks_of_a_coupled_model(coupled):
    for name,(f,wrong) in tensor_hooks.items():
        def hook(model):
            if coupled != True: model.insert(1, nn.BatchNorm1d(model[0].out_features))
            on_tensors(f)(model)
        _,told = fitted(32, GradientAccumulation(micro_batch_size=8, coupled=coupled), hook=hook)
        assert len(told) == wrong, (name, told)

def test_module_hook_of_a_coupled_model():
    def hook(model): model[2].register_full_backward_hook(module_hooks['unit'][0])
    _,told = fitted(32, GradientAccumulation(micro_batch_size=8, coupled=True), hook=hook)
    assert len(told) == 1 and 'on the module 2' in told[0]

@pytest.mark.parametrize('ex', [CancelTrainException, CancelEpochException])
def test_module_hook_after_a_cancelled_batch(ex):
    "The step of the single batch before it has no loader batch, and is not split"
    def hook(model): model[2].register_full_backward_hook(module_hooks['unit'][0])
    acc,stop = GradientAccumulation(32, remainder='step'),Stop('before_batch', ex, [(0, 1)], 20)
    _,told = fitted(8, acc, stop, hook=hook, epochs=1)
    assert not [t for t in told if 'backward hook' in t]

def test_module_pre_hook():
    off,told = compared('both', hook=lambda m: m[2].register_full_backward_pre_hook(lambda m, o: (o[0]/o[0].norm(),)))
    assert off > 1e-3 and len(told) == 1 and 'on the module 2' in told[0]

def test_module_hooks_that_read():
    "fastai's, which keep what they see, those of Grad-CAM, and such as wandb.watch's"
    kept = []
    def hook(model):
        hook_output(model[0], grad=True)
        model[2].register_full_backward_hook(lambda m, i, o: kept.append(o[0].norm()))
        for p in model.parameters(): p.register_hook(lambda g: kept.append(g.norm()) and None)
    _,told = compared('both', cb=partial(ActivationStats, with_hist=True), hook=hook)
    assert kept and not [t for t in told if 'The hook' in t or 'The backward hook' in t]

def test_no_module_hook_of_ours_is_left():
    hook = lambda m, i, o: (i[0]*2,)
    learn = learner(data, 8, GradientAccumulation(32), Stop('after_backward', CancelFitException, [(0, 1)]))
    learn.model[2].register_full_backward_hook(hook)
    learn.fit(1)
    assert [*learn.model[2]._backward_hooks.values()] == [hook]
