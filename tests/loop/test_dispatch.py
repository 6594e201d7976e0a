"Callbacks hear, see and raise in fastaccum's batch loop what they do in fastai's"
import pytest
from quick import quickly
from reference import *
from fastai.callback.core import _events
from fastaccum.loop.events import _batch_events as inner

class Plain(LoopCallback):
    "Brings fastaccum's loop, and nothing else"
    order = -20

def seen(learn):
    "What a callback can see of the Learner"
    own = learn.__dict__
    counts = [own.get(k) for k in ('training','epoch','iter','n_iter','train_iter','pct_train')]
    losses = [None if own.get(k) is None else own[k].item() for k in ('loss','loss_grad')]
    return counts, losses, [len(b[0]) for b in (own.get('xb'), own.get('yb')) if b and b[0] is not None]

class Heard(Callback):
    "Writes down each call of its methods, and what it saw"
    def __init__(self, log, who, order=0): self.log,self.who,self.order = log,who,order
    def hear(self, event): self.log.append((self.who, event, self.learn and seen(self.learn)))

class All(Heard): pass
for ev in _events: setattr(All, ev, lambda self, ev=ev: self.hear(ev))
class Some(Heard):
    def after_pred(self): self.hear('after_pred')
    def after_batch(self): self.hear('after_batch')
class More(Some):
    def before_step(self): self.hear('before_step')
    def after_batch(self): super().after_batch(); self.hear('after_batch of More')
class TrainOnly(All): run_valid = False
class ValidOnly(All): run_train = False
class Own(All):
    "Decides for itself what to do at an event"
    def __call__(self, event):
        self.hear(f'__call__ {event}')
        if event != 'after_loss': super().__call__(event)

class At(Callback):
    "Calls `do(learn)` once, at `event` of the second batch of training, or of the first of validation"
    def __init__(self, event, do, training=True, order=0):
        self.do,self.where,self.order = do,(training, 0, int(training)),order
        setattr(self, event, self.act)
    def act(self):
        if self.do is None or (self.learn.training, self.learn.epoch, self.learn.iter) != self.where: return
        do,self.do = self.do,None
        do(self.learn)

class Broken(nn.Module):
    "Calls `f` in the third forward pass"
    def __init__(self, f): super().__init__(); self.f,self.n,self.body = f,0,nn.Linear(6, 4)
    def forward(self, x):
        self.n += 1
        if self.n == 3: self.f(None)
        return self.body(x)

data,valid = (Data(torch.linspace(-1, 1, n*6).view(n, 6), torch.zeros(n, 4)) for n in (20,12))

loops = {'plain': Plain, 'accumulation': lambda: GradientAccumulation(8),
         'split': lambda: GradientAccumulation(micro_batch_size=8),
         'auto': lambda: GradientAccumulation(8, micro_batch_size='auto')}

def outcome(cast, loop, model=None, n_epoch=2, metrics=None, **kwargs):
    "Calls, error, losses and weights of a fit with the callbacks `cast(log)`"
    log = []
    set_seed(0)
    learn = learner(data, 8, *cast(log), valid=valid, model=model and model(), metrics=metrics)
    learn.recorder.train_metrics = metrics is not None
    if loop: learn.add_cb(loop())
    error = None
    try: learn.fit(n_epoch, .01, **kwargs)
    except BaseException as e: error = type(e),str(e),e.args
    return log,error,[float(l) for l in learn.recorder.losses],weights(learn.model).tolist()

def same(cast, calls=1, rows=True, loop=Plain, **kwargs):
    "Both loops do the same, and give the same `rows`. Returns their error"
    (log0,*rest0),(log,*rest) = (outcome(cast, l, **kwargs) for l in (None,loop))
    for a,b in zip(log0, log): assert a==b
    assert len(log0)==len(log) >= calls
    assert rest[0]==rest0[0] and rest[2]==rest0[2] and (rest[1]==rest0[1] or not rows)
    return rest[0]

# --- who is called

def own_method(log):
    cb = Heard(log, 'own method')
    cb.after_loss = partial(cb.hear, 'after_loss')
    return [cb]

def method_from_before_fit(log):
    cb = Heard(log, 'late')
    return [cb, Callback(before_fit=lambda self: setattr(cb, 'after_loss', partial(cb.hear, 'after_loss')))]

casts = {
    'every event':       lambda log: [All(log, 'all')],
    'some events':       lambda log: [Some(log, 'some'), Heard(log, 'none'), More(log, 'more')],
    'orders':            lambda log: [All(log, 'd', 80), All(log, 'b', 3), Some(log, 'c', 3), All(log, 'a', -30)],
    'training only':     lambda log: [TrainOnly(log, 'training')],
    'validation only':   lambda log: [ValidOnly(log, 'validation')],
    'own __call__':      lambda log: [Own(log, 'own'), Some(log, 'some', 5)],
    'keyword arguments': lambda log: [Callback(after_pred=lambda self: log.append(seen(self.learn)),
                                               before_step=lambda self: log.append('before_step'))],
    'before_batch_cb':   lambda log: [before_batch_cb(lambda self, xb, yb: (log.append(len(xb[0])), ((xb[0]*2,), yb))[1])],
    'own method':        own_method,
    'late method':       method_from_before_fit,
}

@pytest.mark.parametrize('loop', loops)
@pytest.mark.parametrize('cast', casts)
def test_calls(cast, loop): assert same(casts[cast], calls=6, loop=loops[loop]) is None

def test_cancelled_step():
    "fastai calls `after_cancel_step` whatever `run_train` says"
    same(lambda log: [TrainOnly(log, 'training'), ValidOnly(log, 'validation'), At('before_step', throw(CancelStepException()))], calls=20)

def fits_in_a_row(loop):
    log = []
    a,b = All(log, 'a'),Heard(log, 'b', 1)
    learn = learner(data, 8, a, b, *([loop()] if loop else []), valid=valid)
    learn.fit(1)
    a.order,b.before_step = 2,partial(b.hear, 'before_step')
    for cbs in (None, Some(log, 'only now'), None): learn.fit(1, cbs=cbs)
    return log

def test_changes_between_fits():
    "Also those that the list of callbacks does not show"
    assert fits_in_a_row(None)==fits_in_a_row(Plain)

def test_model_with_methods_named_like_events():
    "fastai calls them, once for every callback; nobody means that"
    class Model(nn.Linear): pass
    calls = []
    for ev in inner: setattr(Model, ev, lambda self, ev=ev: calls.append(ev))
    learn = learner(data, 8, Plain(), model=Model(6, 4))
    learn._do_epoch_validate = noop
    learn.fit(1)
    assert not calls and len(learn.recorder.losses)==3

@pytest.mark.parametrize('event', ['after_loss', 'before_backward'])
def test_loss_grad_made_of_loss(event):
    "`learn.loss` can be back-propagated, as in fastai"
    def add(self): self.learn.loss_grad = self.learn.loss + .1*sum(p.square().sum() for p in self.learn.model.parameters())
    same(lambda log: [Callback(**{event: add}), All(log, 'all', 1)], calls=20)

@pytest.mark.parametrize('own', ['class', 'object'])
def test_own_split(own):
    "Somebody else's way from a batch to inputs and targets"
    class Twice(Learner):
        def _split(self, b): self.xb,self.yb = (b[0]*2,),b[1:]
    def fit(*cbs):
        learn = learner(data, 8, *cbs)
        if own == 'class': learn.__class__ = Twice
        if own == 'object': learn._split = partial(Twice._split, learn)
        learn.fit(1, .01)
        return weights(learn.model)
    assert torch.equal(fit(Plain()), fit())

@pytest.mark.parametrize('own', ['class', 'object', 'patched'])
@pytest.mark.parametrize('k', [None, 3])
def test_own_backward(own, k, monkeypatch):
    "It gets the weighted loss, whoever it is that has one"
    calls,(learn,expected) = [],[learner(data, 8, GradientAccumulation(16, micro_batch_size=k)) for _ in range(2)]
    class Counts(Learner):
        def _backward(self): calls.append(len(self.xb[0])); self.loss_grad.backward()
    expected.fit(1, .01)
    if own == 'class': learn.__class__ = Counts
    if own == 'object': learn._backward = partial(Counts._backward, learn)
    if own == 'patched': monkeypatch.setattr(Learner, '_backward', Counts._backward)
    learn.fit(1, .01)
    assert sum(calls) == len(data) and max(calls) == (k or 8)
    assert rel_err(weights(learn.model), weights(expected.model)) < 1e-6

# --- the list changes in training

class Late(Some):
    def __init__(self): super().__init__(Late.log, 'late')

def swap(learn, cb):
    learn.cbs.remove(cb); learn.cbs.append(cb)

changes = {  # what is done to the callback `cb`, of which kind
    'add':         lambda learn, cb: learn.add_cb(All(cb.log, 'added', 1)),
    'add before':  lambda learn, cb: learn.add_cb(All(cb.log, 'added', -40)),
    'add a class': lambda learn, cb: (setattr(Late, 'log', cb.log), learn.add_cb(Late)),
    'remove':      lambda learn, cb: learn.remove_cb(cb),
    'replace':     lambda learn, cb: (learn.remove_cb(cb), learn.add_cb(All(cb.log, 'new', 2))),
    'other place': swap,
    'new list':    lambda learn, cb: setattr(learn, 'cbs', L(c for c in learn.cbs if c is not cb)),
    'run':         lambda learn, cb: setattr(cb, 'run', False),
    'run_train':   lambda learn, cb: setattr(cb, 'run_train', False),
    'run_valid':   lambda learn, cb: setattr(cb, 'run_valid', False),
}

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_backward', 'after_step', 'after_batch'])
@pytest.mark.parametrize('change', changes)
def test_changes(change, event):
    for kind in (All, Own):
        for order in (-1,1):
            def cast(log):
                cb = kind(log, 'changed')
                return [cb, All(log, 'other'), At(event, lambda learn: changes[change](learn, cb), order=order)]
            same(cast, calls=50)

@pytest.mark.parametrize('loop', loops)
@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_backward', 'before_step'])
@pytest.mark.parametrize('training', [True, False])
def test_first_to_listen(training, event, loop):
    "To the events after the one at which it came: nobody else hears most of them"
    for hears in ('after_loss','after_backward','after_step','after_batch'):
        def cast(log):
            new = Heard(log, 'new', 1)
            setattr(new, hears, lambda: new.hear(hears))
            return [At(event, lambda learn: learn.add_cb(new), training), Some(log, 'some')]
        same(cast, calls=8, loop=loops[loop])

@pytest.mark.parametrize('change', ['run', 'run_train', 'remove', 'add'])
def test_changes_in_validation(change):
    def cast(log):
        cb = All(log, 'changed')
        return [cb, At('after_loss', lambda learn: changes[change](learn, cb), training=False)]
    same(cast, calls=30)

# --- errors

class Own2(Exception):
    def __init__(self, code, what): super().__init__(code, what); self.code = code

kinds = [ValueError('bad'), KeyError('k'), RuntimeError('two', 'parts'), AttributeError('none'), OSError(2, 'no file'), Own2(3, 'x'),
         torch.OutOfMemoryError('full'), AssertionError(7), KeyboardInterrupt(), SystemExit(3),
         *[c('why') for c in cancels], *[c() for c in cancels]]
before = {'after_cancel_batch': ('after_pred', CancelBatchException), 'after_cancel_backward': ('before_backward', CancelBackwardException),
          'after_cancel_step': ('before_step', CancelStepException)}

def cast_of(event, e, training=True):
    "One callback that raises `e` at `event`, between two that listen"
    def cast(log):
        cause = [At(before[event][0], throw(before[event][1]()))] if event in before else []
        # fastai keeps these gradients
        clear = [Callback(after_step=lambda self: self.learn.opt.zero_grad())] if event=='after_step' else []
        return [All(log, 'first', -1), *cause, *clear, At(event, throw(deepcopy(e)), training), All(log, 'last', 1)]
    return cast

@pytest.mark.parametrize('event', quickly([*inner][::2], inner))
def test_errors(event):
    for e in kinds:
        err = same(cast_of(event, e), n_epoch=1, calls=4, rows=event!='before_batch')  # fastai gives batches that nobody saw a row
        assert isinstance(e, cancels) or err[0] is type(e)
        if isinstance(e, ValueError): assert err[1]==f'Exception occured in `At` when calling event `{event}`:\n\tbad'

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss', 'after_batch'])
def test_errors_in_validation(event):
    for e in kinds[::2]:
        err = same(cast_of(event, e, training=False), n_epoch=1, calls=4)
        assert isinstance(e, cancels) or err[0] is type(e)

@pytest.mark.parametrize('event', ['before_batch', 'after_loss', 'after_step'])
def test_error_without_arguments(event):
    "It passes as it is; fastai itself fails with an IndexError"
    fastais,ours = (outcome(cast_of(event, TimeoutError()), loop)[1] for loop in (None,Plain))
    assert fastais[0] is IndexError and ours==(TimeoutError, '', ())

def own_error(log):
    class Raising(Own):
        def __call__(self, event):
            if event=='before_backward': raise ValueError('mine')
            super().__call__(event)
    return [Raising(log, 'raising'), All(log, 'other')]

def test_error_of_an_own_call(): assert same(own_error)[1]=='mine'

@pytest.mark.parametrize('e', kinds, ids=repr)
def test_error_in_the_model(e):
    same(lambda log: [All(log, 'all')], model=lambda: Broken(throw(deepcopy(e))), n_epoch=1, calls=5, rows=False)

@pytest.mark.parametrize('e', kinds, ids=repr)
def test_error_in_a_training_metric(e):
    def metric(pred, y):
        if len(y)==4: raise deepcopy(e)
        return pred.mean()
    same(lambda log: [All(log, 'all')], metrics=[metric], n_epoch=1, calls=20)
