"Learners with a loop of their own, from a subclass, a patch or on the instance: an error, or right"
import subprocess, sys, threading
import pytest
from reference import *
from reference import GradientAccumulation    # ours
from fastaccum.logs.steps import StepLogger
from fastaccum.memory.activations import ActivationCheckpointing
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

# --- a `one_batch` of its own: the loop runs it, and begins where it calls `_with_events`
seen = []
def counts(self, i, b):
    seen.append(i)
    self.iter = i
    self._split(self._set_device(b))
    self._with_events(self._do_one_batch, 'batch', CancelBatchException)
def moves_itself(self, i, b):
    "What tsai puts there"
    self.iter = i
    b = to_device(b, device=self.dls.device) if self.dls.device is not None else b
    self._split(b)
    self._with_events(self._do_one_batch, 'batch', CancelBatchException)
def doubles(self, i, b): Learner.one_batch(self, i, (b[0]*2, b[1]))
own_batches = dict(counts=counts, moves_itself=moves_itself, doubles=doubles)
where = ['subclass', 'patched', 'attribute before', 'attribute in the fit']

def with_own(f, how, monkeypatch, *cbs, **kwargs):
    "A Learner whose `one_batch` is `f`, with callbacks"
    if how == 'subclass': return make(*cbs, cls=type('Own', (Learner,), dict(one_batch=f)), **kwargs)
    if how == 'patched' and f is not doubles: monkeypatch.setattr(Learner, 'one_batch', f)
    learn = make(**kwargs)
    if how != 'patched' or f is doubles: learn.one_batch = partial(f, learn)
    if how != 'attribute in the fit': learn.add_cbs(cbs)
    return learn

@pytest.mark.parametrize('how', where)
@pytest.mark.parametrize('name', own_batches)
def test_own_one_batch_is_run(name, how, monkeypatch):
    "Of a step as well as of a validation, with accumulation and without; it comes back when the callback has gone"
    f,acc = own_batches[name],GradientAccumulation(16)
    whole = with_own(f, how, monkeypatch, bs=16)
    learn = with_own(f, how, monkeypatch, acc)
    seen.clear()
    for l in (whole, learn): l.fit(2, .1, cbs=acc if l is learn and how == 'attribute in the fit' else None)
    assert rel_err(weights(learn.model), weights(whole.model)) < 1e-6
    assert name != 'counts' or seen == 2*[*range(2), *range(2)] + 2*[*range(4), *range(4)]
    assert [r[1] for r in learn.recorder.values] == pytest.approx([r[1] for r in whole.recorder.values], 1e-5)
    if acc in learn.cbs: learn.remove_cb(acc)
    assert ('one_batch' in vars(learn)) == ('one_batch' in vars(whole))
    n = len(learn.recorder.losses)
    learn.fit(1, .1)
    assert len(learn.recorder.losses) == n//2*2 == 4           # a step for each of 4 loader batches

def test_half_precision_of_its_own_loop():
    "Before our callback is attached it is fastai's, which the accumulation rejects; the error says what is exact"
    own = type('Own', (Learner,), dict(one_batch=doubles))
    learn,whole = make(cls=own).to_bf16(),make(GradientAccumulation(16), bs=16, cls=own).to_bf16()
    learn.add_cb(GradientAccumulation(16))
    with pytest.raises(ValueError, match=r'once this callback is attached'): learn.fit(1, .1)
    learn.to_bf16()
    for l in (learn, whole): l.fit(1, .1)
    assert isinstance(learn.mixed_precision, MixedPrecision) and rel_err(weights(learn.model), weights(whole.model)) < 1e-2

def its_own_way(self, i, b):
    self.iter = i
    self.xb,self.yb = b[:1],b[1:]
    self.pred = self.model(*self.xb)
    self.loss_grad = self.loss = self.loss_func(self.pred, *self.yb)
def another_function(self, i, b):
    self.iter = i
    self._split(b)
    self._with_events(lambda: self._do_one_batch(), 'batch', CancelBatchException)
def twice(self, i, b):
    self.iter = i
    self._split(b)
    for _ in range(2): self._with_events(self._do_one_batch, 'batch', CancelBatchException)

@pytest.mark.parametrize('cb', ours)
@pytest.mark.parametrize('how', where[:3])
@pytest.mark.parametrize('f,says', [(its_own_way, 'did not call'), (another_function, 'a function of its own'), (twice, 'or twice')])
def test_own_one_batch_that_the_loop_would_bypass(f, says, how, cb, monkeypatch):
    learn = with_own(f, how, monkeypatch, cb())
    with pytest.raises(TypeError, match=says): learn.fit(1)
    assert learn.iter == 0
    learn.remove_cb(learn.cbs[-1])
    if f is not its_own_way: learn.fit(1)

def test_own_all_batches():
    "It may call `_with_events` itself"
    class Own(Learner):
        def all_batches(self):
            self.n_iter = len(self.dl)
            for self.iter,b in enumerate(self.dl):
                self._split(b)
                self._with_events(self._do_one_batch, 'batch', CancelBatchException)
    whole,learn = make(bs=16),make(GradientAccumulation(16), cls=Own)
    for l in (whole, learn): l.fit(2, .1)
    assert rel_err(weights(learn.model), weights(whole.model)) < 1e-6 and len(learn.recorder.losses) == 4

@pytest.mark.parametrize('cb', ours)
def test_one_batch_on_the_instance_after(cb):
    learn = make(cb())
    theirs = learn.one_batch
    learn.one_batch = lambda i, b: theirs(i, b)
    before = weights(learn.model)
    with pytest.raises(TypeError, match='one_batch.*del learn.one_batch'): learn.fit(1)
    assert torch.equal(before, weights(learn.model))
    del learn.one_batch
    learn.fit(1)
    assert learn.one_batch is theirs

# --- what it would bypass
own_methods = ['__call__', '_call_one', '_with_events', '_do_one_batch', '_do_grad_opt']
def own_of(name):
    def method(self, *args, **kwargs): return getattr(Learner, name)(self, *args, **kwargs)
    return type('Own', (Learner,), {name: method}),method

@pytest.mark.parametrize('cb', ours)
@pytest.mark.parametrize('name', own_methods)
def test_own_methods_are_rejected(name, cb):
    "Before anything is trained; also in a validation"
    cls,method = own_of(name)
    for given in (False, True):
        learn = make(*([] if given else [cb()]), cls=cls)
        before = weights(learn.model)
        for call in (lambda **kwargs: learn.fit(1, **kwargs), learn.validate):
            with pytest.raises(TypeError, match=f'{name} of its own'): call(cbs=cb() if given else None)
            learn.lock = threading.Lock()              # fastai leaves it locked
        assert torch.equal(weights(learn.model), before)
    if name == '__call__': return
    learn = make(cb())
    setattr(learn, name, partial(method, learn))
    with pytest.raises(TypeError, match=f'{name} of its own'): learn.fit(1)

@pytest.mark.parametrize('name', ['one_batch', *own_methods])
def test_own_loops_have_fastais_precision(name):
    "They train as if fastaccum were not there; on an attribute of the Learner, too"
    cls,method = own_of(name)
    learns = [make(cls=cls)] + ([make()] if name != '__call__' else [])
    if len(learns) > 1: setattr(learns[1], name, partial(method, learns[1]))
    for learn in learns:
        for call in (learn.to_bf16, learn.to_fp16, partial(learn.to_channelslast, amp_mode='bf16')):
            call()
            assert type(learn.mixed_precision).__module__ == 'fastai.callback.fp16' and not ours_of(learn)
            learn.to_fp32()
            assert not hasattr(learn, 'mixed_precision') and learn.fit(1) is None
            if hasattr(learn, 'channels_last'): learn.to_contiguous()
    mine = make(StepLogger())
    assert type(mine.to_bf16().mixed_precision) is MixedPrecision     # its loop is fastaccum's already

def ours_of(learn): return [cb for cb in learn.cbs if type(cb).__module__.startswith('fastaccum.')] or 'of_fastaccum' in vars(learn)

def test_own_loop_with_what_needs_no_loop():
    "Contexts of a fit, around a loop of its own"
    cls,_ = own_of('_do_one_batch')
    learn,plain = make(ActivationCheckpointing(nn.Linear), cls=cls),make()
    for l in (learn, plain): l.fit(2, .1)
    assert torch.equal(weights(learn.model), weights(plain.model))

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
@pytest.mark.parametrize('before', (True, pytest.param(False, marks=pytest.mark.long)))
def test_patched_backward(before):
    "Before fastaccum is imported, or after"
    run = subprocess.run([sys.executable, '-c', patched.format(before=before, path=sys.path)], capture_output=True, text=True)
    assert run.stdout.split()[-1:] == ['True'], run.stderr
