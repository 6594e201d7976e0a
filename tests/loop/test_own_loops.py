"Learners with a loop of their own, from a subclass, a patch or on the instance: an error before training, or right"
import subprocess, sys
import pytest
from reference import *
from reference import GradientAccumulation    # ours
from fastai.callback.core import event
from fastaccum.logs.steps import StepLogger
from fastaccum.loop.learner import does_the_same
from fastaccum.precision.callback import MixedPrecision

torch.manual_seed(0)
data = Data(torch.randn(32, 6), torch.randn(32, 4))
def make(*cbs, cls=Learner, bs=8):
    set_seed(0)
    dls = DataLoaders(DataLoader(data, bs=bs), DataLoader(data, bs=bs), device='cpu')
    learn = cls(dls, mlp(), loss_func=MSELossFlat(), opt_func=partial(SGD, mom=0.), cbs=cbs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn
ours = [partial(GradientAccumulation, 16), partial(MixedPrecision, 'bf16', device='cpu'), StepLogger]

@pytest.mark.parametrize('cb', ours)
def test_one_batch_on_the_instance_before(cb):
    learn = make()
    learn.one_batch = lambda i, b: None
    with pytest.raises(TypeError, match='one_batch.*del learn.one_batch'): learn.add_cb(cb())
    with pytest.raises(TypeError, match='one_batch'): learn.fit(1, cbs=cb())
    del learn.one_batch
    assert cb().name not in vars(learn) and not any(hasattr(c, 'loop') for c in learn.cbs)
    learn.fit(1, cbs=cb())

@pytest.mark.parametrize('cb', ours)
def test_one_batch_on_the_instance_after(cb):
    learn = make(cb())
    theirs = learn.one_batch
    learn.one_batch = lambda i, b: theirs(i, b)
    before = weights(learn.model)
    with pytest.raises(TypeError, match='one_batch'): learn.fit(1)
    assert torch.equal(before, weights(learn.model))

@pytest.mark.parametrize('name', ['__call__', '_call_one', '_with_events', '_do_one_batch', '_do_grad_opt'])
def test_own_methods_are_refused(name):
    def method(self, *args, **kwargs): return getattr(Learner, name)(self, *args, **kwargs)
    learn = make(cls=type('Own', (Learner,), {name: method}))
    learn.add_cb(GradientAccumulation(16))
    with pytest.raises(TypeError, match=f'{name} of its own'): learn.fit(1)
    if name == '__call__': return
    learn = make(GradientAccumulation(16))
    setattr(learn, name, partial(method, learn))
    with pytest.raises(TypeError, match=f'{name} of its own'): learn.fit(1)

# what libraries put in the place of fastai's methods, at import
def moves_itself(self, i, b):
    self.iter = i
    b = to_device(b, device=self.dls.device) if self.dls.device is not None else b
    self._split(b)
    self._with_events(self._do_one_batch, 'batch', CancelBatchException)

def in_a_loop(self, event_name):
    if not hasattr(event, event_name): raise Exception(f'missing {event_name}')
    for cb in self.cbs.sorted('order'): cb(event_name)

@pytest.mark.parametrize('f,name', [(moves_itself, 'one_batch'), (in_a_loop, '_call_one')])
def test_patched_with_the_same(f, name, monkeypatch):
    "The loop takes its place, and draws no random number for it"
    set_seed(0)
    whole,before = make(bs=16),torch.get_rng_state()
    monkeypatch.setattr(Learner, name, f)
    assert does_the_same(name, f) and torch.equal(torch.get_rng_state(), before)
    learn = make(GradientAccumulation(16))
    for l in (whole, learn): l.fit(2, .1)
    assert rel_err(weights(learn.model), weights(whole.model)) < 1e-6

seen = []
def counts(self, i, b):
    seen.append(i)
    self.iter = i
    self._split(self._set_device(b))
    self._with_events(self._do_one_batch, 'batch', CancelBatchException)
def twice(self, i, b):
    self.iter = i
    for _ in range(2): self._split(self._set_device(b))
    self._with_events(self._do_one_batch, 'batch', CancelBatchException)
def skips(self, i, b):
    self._split(self._set_device(b))
    self._with_events(self._do_one_batch, 'batch', CancelBatchException)
def swapped(self, event_name):
    for cb in self.cbs: cb(event_name)

@pytest.mark.parametrize('f,name', [(counts, 'one_batch'), (twice, 'one_batch'), (skips, 'one_batch'), (swapped, '_call_one')])
def test_patched_with_something_else(f, name, monkeypatch):
    monkeypatch.setattr(Learner, name, f)
    learn = make()
    learn.add_cb(GradientAccumulation(16))
    with pytest.raises(TypeError, match=f'{name} of its own, from {f.__module__}'): learn.fit(1)
    assert not seen

def test_own_set_device_is_called():
    "Also if all tensors are where they should be"
    class Own(Learner):
        def _set_device(self, b): return tuple(t*2 for t in super()._set_device(b))
    whole,learn = make(cls=Own, bs=16),make(GradientAccumulation(16), cls=Own)
    for l in (whole, learn): l.fit(2, .1)
    assert rel_err(weights(learn.model), weights(whole.model)) < 1e-6

patched = '''
import sys; sys.path[:0] = {path!r}
from fastai.basics import *
before = {before}
def double(self): (2*self.loss_grad).backward()
if before: Learner._backward = double
from test_own_loops import *
if not before: Learner._backward = double
whole,learn = make(bs=16),make(GradientAccumulation(16))
for l in (whole, learn): l.fit(2, .1)
print(rel_err(weights(learn.model), weights(whole.model)) < 1e-6)
'''
@pytest.mark.slow
@pytest.mark.parametrize('before', (True, False))
def test_patched_backward(before):
    "Before fastaccum is imported, or after"
    run = subprocess.run([sys.executable, '-c', patched.format(before=before, path=sys.path)], capture_output=True, text=True)
    assert run.stdout.split()[-1:] == ['True'], run.stderr
