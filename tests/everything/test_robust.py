"""Every callback, and pairs of them in either order, through what real runs meet: the right training or a clear error,
never a silently different one"""
import itertools, pickle, pytest
from functools import lru_cache
from contextlib import contextmanager
from reference import *
from fastai.callback.schedule import SchedLin
from fastaccum.precision.callback import MixedPrecision
from fastaccum.logs.steps import StepLogger
from quick import quickly
try: import wandb
except ImportError: wandb = None
else: from fastaccum.wandb import WandbCallback
try: from fastaccum.checkpoint.callback import TrainingCheckpoint
except ImportError: TrainingCheckpoint = None

torch.manual_seed(0)
class Items(Data):
    def new_empty(self): return Items(self.x[:0], *[t[:0] for t in self.y])   # for `export`

data,bs,lr = Items(torch.randn(61, 6), torch.randn(61, 4)),8,.05
few = Items(data.x[:16], data.y[0][:16])

# --- the table

def schedule(**kwargs): return GradientAccumulationSchedule(8, 40, finish=1., schedule=SchedLin, **kwargs)
callbacks = {  # `None`: not here
    'acc':      lambda: GradientAccumulation(20),                 # no multiple of a loader batch
    'drop':     lambda: GradientAccumulation(20, remainder='drop'),
    'carry':    lambda: GradientAccumulation(20, remainder='carry'),
    'rows':     lambda: GradientAccumulation(20, log_accum_batch=False),
    'split':    lambda: GradientAccumulation(20, micro_batch_size=3),
    'auto':     lambda: GradientAccumulation(20, micro_batch_size='auto'),
    'schedule': lambda: schedule(remainder='carry'),
    'parts':    lambda: schedule(micro_batch_size=3),
    'fp16':     lambda: MixedPrecision('fp16', init_scale=2.**10),
    'bf16':     lambda: MixedPrecision('bf16'),
    'steps':    lambda: StepLogger(grad_norm=True),
    'wandb':    wandb and (lambda: WandbCallback(log_preds=False)),
    'saves':    TrainingCheckpoint and (lambda: TrainingCheckpoint(every_steps=2))}
pairs = ['acc+fp16', 'fp16+acc', 'split+bf16', 'bf16+carry', 'fp16+auto', 'auto+steps', 'steps+drop', 'steps+fp16',
         'wandb+fp16', 'wandb+parts', 'rows+wandb',
         'schedule+fp16+steps', 'steps+fp16+parts', 'wandb+steps+bf16+split', 'saves+acc', 'schedule+saves',
         'fp16+saves', 'parts+fp16+saves+steps',
         'wandb+saves', 'saves+steps+wandb+acc']
for_hours = 'SWEEP' in os.environ    # every setup, every two callbacks in both orders, every event
accumulating,precise = ('acc','drop','carry','rows','split','auto','schedule','parts'),('fp16','bf16')
if for_hours: pairs += [f'{a}+{b}' for a,b in itertools.permutations(callbacks, 2) if not ({a,b} <= {*accumulating} or {a,b} <= {*precise})]
setups = [s for s in dict.fromkeys([*callbacks, *pairs]) if all(callbacks[n] for n in s.split('+'))]
in_short = 'carry','acc+fp16','parts+fp16+saves+steps'
some = 'carry','split','fp16','steps','acc+fp16','parts+fp16+saves+steps'
longer = [] if for_hours else [s for s in setups if '+' in s and s not in some]      # `make cases` has them
every_setup = pytest.mark.parametrize('setup', quickly(in_short, setups, longer))
some_setups = every_setup if for_hours else pytest.mark.parametrize('setup', quickly(in_short, some))

def make(setup): return [callbacks[n]() for n in setup.split('+') if n]
def has(setup, *names): return bool(set(names) & set(setup.split('+')))

def size(setup, n_epoch, n_iter):
    "`accum_bs` of an accumulated batch, for `accumulated`"
    if has(setup, 'schedule', 'parts'): return lambda epoch, i: round(8 + 32*(epoch*n_iter+i)/(n_iter*n_epoch))
    return 20 if has(setup, *accumulating) else 1
def remainder(setup): return 'carry' if has(setup, 'carry', 'schedule') else 'drop' if has(setup, 'drop') else 'step'
def steps_of(setup, n_epoch=1, stop=None, data=data):
    sizes = data.sizes(bs)
    return accumulated(sizes, size(setup, n_epoch, len(sizes)), remainder(setup), n_epoch, stop)

@pytest.fixture(scope='module', autouse=True)
def run(tmp_path_factory):
    "A run of W&B, offline"
    if wandb is None: yield; return
    with pytest.MonkeyPatch.context() as m:
        folder = str(tmp_path_factory.mktemp('wandb'))
        for k in ('CACHE', 'DATA', 'CONFIG', 'ARTIFACT'): m.setenv(f'WANDB_{k}_DIR', folder)
        with wandb.init(project='test', mode='offline', dir=folder, settings=wandb.Settings(silent=True, console='off')): yield

# --- what is right

class Times(nn.Module):
    "A linear layer of which autocast leaves the numbers alone; whether it was on is written down"
    def __init__(self, n_in, n_out):
        super().__init__()
        self.w,self.b,self.autocast = nn.Parameter(torch.randn(n_in, n_out)/n_in),nn.Parameter(torch.zeros(n_out)),None
    def forward(self, x):
        self.autocast = torch.is_autocast_enabled('cpu')
        return (x[...,None]*self.w).sum(-2) + self.b

torch.manual_seed(1)
times = nn.Sequential(Times(6, 8), nn.Tanh(), Times(8, 4))
def two_groups(model): return [list(model[0].parameters()), list(model[2].parameters())]

runs = itertools.count()
def start(setup, data=data, **kwargs):
    "A Learner in a folder of its own"
    path = Path(f'run{next(runs)}').absolute()
    path.mkdir()
    return learner(data, bs, *make(setup), **{**dict(model=times, opt_func=SGD, splitter=two_groups, valid=few, path=path), **kwargs})

class AllSteps(Spy):
    "Of several fits"
    name,steps = 'spy',()
    def before_fit(self):
        steps = self.steps
        super().before_fit()
        self.steps = list(steps)
    def after_cancel_step(self): self.pending = []
    def _step(self, step): super()._step(step) if self.pending else step()

@contextmanager
def watched(learn):
    "Writes down the steps of one fit, `learn.spy.steps`"
    spy = AllSteps()
    learn.add_cb(spy)
    try: yield spy
    finally:
        learn.remove_cb(spy)
        learn.spy = spy
        if learn.opt is not None: vars(learn.opt).pop('step', None)

def rows(learn):
    "How many steps the loggers have written down"
    return [len(cb.rows) if isinstance(cb, StepLogger) else getattr(cb, '_n_steps', 0)
            for cb in learn.cbs if cb.name in ('step_logger','wandb')]

def chained(learn, steps):
    "The weights change by the steps of SGD and by nothing else"
    for s,after in zip(steps, [*[s.weights for s in steps[1:]], weights(learn.model)]):
        assert rel_err(after, s.weights - s.lr*s.grad) < 1e-5

def right(learn, setup, n_epoch=1, steps=None, data=data, fit=None, sgd=True):
    "Train, and every step was the one it should be, and nothing is left"
    steps,before = ifnone(steps, steps_of(setup, n_epoch, data=data)),rows(learn)
    with watched(learn): (fit or (lambda: learn.fit(n_epoch, lr)))()
    check(learn, data, bs, steps)
    if sgd: chained(learn, learn.spy.steps)
    left_nothing(learn, setup)
    assert [b-a for a,b in zip(before, rows(learn))]==[len(steps)]*len(before)
    return learn

def left_nothing(learn, setup):
    assert no_gradients(learn) and not torch.is_autocast_enabled('cpu')
    assert {m.autocast for m in learn.model.modules() if isinstance(m, Times)} <= {None, has(setup, 'fp16', 'bf16')}

@pytest.mark.slow
@every_setup
def test_right(setup):
    "That these setups train as they should, with more than one epoch, and when added later"
    right(start(setup), setup, 3)
    learn = right(start('steps'), 'steps')
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, StepLogger)])
    learn.add_cbs(make(setup))
    right(learn, setup, 2)

# --- copies and files

copies = {'deepcopy': deepcopy, 'pickle': lambda o: pickle.loads(pickle.dumps(o))}

copied = [(s,h) for i,s in enumerate(setups) for j,h in enumerate(copies) if for_hours or i%2==j or 'saves' in s]

@pytest.mark.parametrize('setup,how', quickly([o for o in copied if o[0] in in_short], copied, [o for o in copied if o[0] in longer]))
def test_copies(setup, how):
    "Of Learners and of callbacks, fresh and trained: they train like the original, and the original does not notice"
    learn = start(setup)
    for trained in (False, True):
        copy,lone = copies[how](learn),start('steps')
        before = weights(learn.model)
        for l in (copy, learn):
            (right(l, setup, 2) if l is copy or torch.equal(before, weights(learn.model))
             else pytest.fail('the original changed'))
        assert torch.equal(weights(copy.model), weights(learn.model))
        assert all(cb.learn is copy for cb in copy.cbs) and not {id(cb) for cb in copy.cbs} & {id(cb) for cb in learn.cbs}
        lone.remove_cbs([cb for cb in lone.cbs if isinstance(cb, StepLogger)])
        lone.add_cbs(copies[how]([cb for cb in learn.cbs if type(cb).__module__.startswith('fastaccum')]))
        right(lone, setup)

@every_setup
def test_export(setup):
    "`load_learner` predicts, without fastaccum's callbacks; they can be added again; the exported Learner goes on"
    learn = right(start(setup), setup)
    learn.export('export.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')      # files may hold code
        loaded = load_learner(learn.path/'export.pkl')
    assert not any(type(cb).__module__.startswith('fastaccum') for cb in loaded.cbs)
    loaded.add_cbs(make(setup))
    for l in (learn, loaded): assert torch.equal(l.get_preds(dl=learn.dls.valid)[0], learn.model(few.x).detach())
    right(learn, setup)
    loaded.dls = learn.dls
    right(loaded, setup)

@every_setup
def test_save_and_load(setup):
    a,b = right(start(setup, opt_func=partial(SGD, mom=.9)), setup, sgd=False),start(setup, opt_func=partial(SGD, mom=.9), seed=1)
    b.load(a.save('model').resolve().with_suffix(''))
    for l in (a, b): right(l, setup, sgd=False)
    assert torch.equal(weights(a.model), weights(b.model))

# --- several fits, and what else is done with a Learner

between = {'nothing': noop, 'validate': lambda l: l.validate(), 'get_preds': lambda l: l.get_preds(),
           'get_preds of training': lambda l: l.get_preds(0),
    'lr_find': lambda l: l.lr_find(num_it=12, show_plot=False, stop_div=False), 'freeze': lambda l: (l.freeze(), l.unfreeze()),
    'predictions inside': lambda l: l.fit(1, 0., cbs=Predicts()), 'a new optimizer': lambda l: l.create_opt(),
    'fit of no epochs': lambda l: l.fit(0), 'one cycle': lambda l: l.fit_one_cycle(1, 0.), 'show_results': lambda l: l.summary()}

class Predicts(Callback):
    "Asks for predictions while a fit is under way"
    def after_epoch(self): self.learn.get_preds(dl=self.learn.dls.valid, inner=True)
    def after_train(self): self.preds = to_detach(self.learn.model(few.x))

@every_setup
def test_between_fits(setup):
    learn = start(setup)
    learn.validate()
    for what,f in between.items():
        before = weights(learn.model)
        with learn.no_bar(): f(learn)
        assert what=='one cycle' or torch.equal(before, weights(learn.model)), what
        left_nothing(learn, setup)
        right(learn, setup)

@every_setup
def test_fine_tune(setup):
    "The body is frozen in the first fit"
    learn,n = start(setup),len(steps_of(setup))
    with watched(learn): learn.fine_tune(1, lr)
    both = learn.spy.steps
    for frozen in (False, True):
        (learn.freeze if frozen else learn.unfreeze)()
        learn.spy.steps,learn.recorder.losses = (both[:n], []) if frozen else (both[n:], learn.recorder.losses)
        check(learn, data, bs, steps_of(setup))
        assert all(torch.equal(s.grad[:56], 0*s.grad[:56])==frozen for s in learn.spy.steps)
    assert torch.equal(both[0].weights[:56], both[n].weights[:56]) and not torch.equal(both[n].weights[:56], weights(learn.model)[:56])
    right(learn, setup)

@pytest.mark.parametrize('setup', quickly(in_short, [s for s in setups if 'wandb' not in s]))  # which logs the Recorder's smooth loss
def test_without_recorder(setup):
    "The same steps and rows"
    learn = start(setup)
    learn.remove_cb(Recorder)
    learn.recorder = SimpleNamespace(losses=[])
    right(learn, setup, 2)

# --- gradients that are missing or sparse

class Sometimes(nn.Module):
    "`extra` is for few items; in batches without one of those it has no gradient"
    def __init__(self):
        super().__init__()
        self.all,self.extra = Times(6, 4),Times(6, 4)
    def forward(self, x):
        out,few = self.all(x),x[:,0] > 1.3
        if few.any(): out = out.index_put((few,), out[few]+self.extra(x[few]))
        return out

opts = {'SGD': SGD, 'momentum': partial(SGD, mom=.9, wd=.1, decouple_wd=True), 'Adam': partial(Adam, wd=.1),
        'AdamW': partial(OptimWrapper, opt=torch.optim.AdamW)}

with_opts = [(s,o) for i,s in enumerate(setups) for j,o in enumerate(opts) if for_hours or o=='Adam' or i%3==j]

@pytest.mark.parametrize('setup,opt', quickly([o for o in with_opts if o[0] in in_short], with_opts))
def test_without_gradient(setup, opt):
    "In some batches; the same weights as the big batches give, in two fits"
    learn = start(setup, model=Sometimes(), opt_func=opts[opt], splitter=trainable_params)
    model,steps = deepcopy(learn.model),steps_of(setup, 2)
    for _ in range(2): right(learn, setup, 2, sgd=opt=='SGD')
    ref = train(model, MSELossFlat(), opts[opt], data.steps(bs, steps*2), lr)
    assert rel_err(weights(learn.model), ref) < 1e-5

@some_setups
def test_no_gradient_at_all(setup):
    "A callback before ours lets no loader batch of the first epoch be back-propagated"
    learn = start(setup)
    before,skip = weights(learn.model),Stop('before_backward', CancelBackwardException, [(0,i) for i in range(8)], order=3, once=False)
    learn.fit(1, lr, cbs=skip)
    assert torch.equal(before, weights(learn.model))
    right(learn, setup)

class Words(nn.Module):
    "Sparse gradients"
    def __init__(self):
        super().__init__()
        self.emb,self.out = nn.Embedding(20, 8, sparse=True),Times(8, 4)
    def forward(self, x): return self.out(self.emb(x).tanh().sum(1))

words = Items(torch.randint(20, (61,5)), data.y[0])

@every_setup
def test_sparse(setup):
    opt = SGD if 'split' in setup or 'steps' in setup else partial(OptimWrapper, opt=torch.optim.SGD)
    learn = start(setup, data=words, model=Words(), opt_func=opt, splitter=trainable_params, valid=words)
    for _ in range(2): right(learn, setup, 2, data=words)

# --- little data, and bad

@pytest.mark.parametrize('n', [0, 1, 13])
@every_setup
def test_little_data(setup, n):
    "No items, one, fewer than `accum_bs`"
    little = Items(data.x[:n], data.y[0][:n])
    learn = start(setup, data=little)
    if n and has(setup, 'drop'):
        with pytest.raises(ValueError, match='would never step'): learn.fit(1)
    else:
        for _ in range(2): right(learn, setup, 3, data=little)

@every_setup
def test_nan_in_inputs(setup):
    "In fp16 the steps with them are skipped; else the weights become NaN, as those of the big batch"
    bad = Items(data.x.clone(), data.y[0])
    bad.x[30] = float('nan')
    learn = start(setup, data=bad)
    model,steps = deepcopy(learn.model),steps_of(setup, 2)
    good = [s for s in steps if not {(0,3),(1,3)} & set(s)] if has(setup, 'fp16') else steps
    learn.fit(2, lr)
    ref = train(model, MSELossFlat(), SGD, bad.steps(bs, good), lr)
    assert torch.allclose(weights(learn.model), ref, rtol=1e-5, equal_nan=True) and ref.isnan().any()!=has(setup, 'fp16')
    assert rows(learn)==[len(steps)]*len(rows(learn))
    if has(setup, 'fp16'): assert sum(learn.mixed_precision.scaler.history()['skipped'])==len(steps)-len(good)

@every_setup
def test_loss_not_scalar(setup):
    learn = start(setup, loss_func=MSELossFlat(reduction='none'))
    with pytest.raises((ValueError, RuntimeError), match='needs one number|only for scalar outputs'): learn.fit(1)
    learn.loss_func = MSELossFlat()
    right(learn, setup)

# --- a callback that raises an exception, anywhere

class Raises(Callback):
    "Raises `ex` at `event`, once: in the loader batch `at`, if it is an event of batches"
    def __init__(self, event, ex, at, order, in_training):
        store_attr()
        self.done = False
        setattr(self, event, self._raise)
    def _raise(self):
        here = self.event in epoch_events or (self.learn.training==self.in_training and (self.learn.epoch,self.learn.iter)==self.at)
        if self.done or not here: return
        self.done = True
        raise self.ex('stopped')

class Trained(Callback):
    "The epochs in which batches were trained on"
    run_valid,epochs = False,()
    def before_batch(self): self.epochs = {*self.epochs, self.learn.epoch}

class Boom(RuntimeError): pass
batch_events = L.split('before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch')
valid_events = L.split('before_batch after_pred after_loss after_batch')
epoch_events = L.split('before_fit before_epoch before_train after_train before_validate after_validate after_epoch after_fit')
short = Items(data.x[:37], data.y[0][:37])   # 5 loader batches

def fit_with(learn, stop):
    "Type of the exception that came out of the fit, or `None`"
    with watched(learn):
        try: learn.fit(2, lr, cbs=Raises(*stop))
        except BaseException as e: return type(e)

@lru_cache(None)
def of_fastai(stop):
    "What comes out of fastai's fit, the weights then and after another fit, and the epochs that were trained"
    learn,trained = start('', data=short),Trained()
    learn.add_cb(trained)
    came,ws,epochs = fit_with(learn, stop),weights(learn.model),trained.epochs
    learn.fit(1, lr)
    return came,ws,weights(learn.model),epochs

def steps_with(setup, stop, came, epochs):
    "The steps; of an accumulating setup that does not split"
    event,ex,at,_,in_training = stop
    if event in batch_events and in_training and not came: return steps_of(setup, 2, (event, ex, {at}), short)
    return steps_of(setup, 2, ('before_batch', CancelEpochException, {(e,0) for e in range(2) if e not in epochs}), short)

def survive(setup, stop):
    "As fastai does it; but gradients of a step that was taken are never left"
    learn,(theirs,ws,ws2,epochs) = start(setup, data=short),of_fastai(stop)
    came,accumulates = fit_with(learn, stop),size(setup, 2, 5)!=1
    assert came is theirs, f'{came} comes out of fit, not {theirs}'
    if accumulates or stop[0]=='after_step':
        steps = steps_with(setup, stop, came, epochs)
        if accumulates and not came: left_nothing(learn, setup)
        chained(learn, learn.spy.steps)
        if has(setup, 'split', 'parts'): check_own(learn)
        else: check(learn, short, bs, steps[:len(learn.spy.steps)] if came else steps)
    else: assert rel_err(weights(learn.model), ws) < 1e-6, 'other weights than fastai'
    if came and has(setup, 'saves'): learn.training_checkpoint.finish()
    if accumulates or has(setup, 'fp16', 'bf16') or stop[0]=='after_step': return right(learn, setup, data=short)
    learn.fit(1, lr)
    assert rel_err(weights(learn.model), ws2) < 1e-6, 'other weights than fastai in the next fit'

def stops(setup, ex):
    """Every event, in training and validation, before our callbacks and after; if it is not for hours, one order each,
    and those that fastai catches"""
    first = steps_of(setup, 2, data=short)[0]
    cases = ([(e, first[-1], True) for e in epoch_events+batch_events]
             + [(e, first[0], True) for e in batch_events if 'step' not in e]
             + [(e, (0,0), False) for e in valid_events])
    orders = lambda e: (3, 20) if e!='after_batch' else (3, 55)
    res = [(e, ex, at, order, in_training) for e,at,in_training in dict.fromkeys(cases) for order in orders(e)]
    if for_hours: return res
    return [s for i,s in enumerate(res) if i%8 in (0,7) and (ex is Boom or of_fastai(s)[0] is None or s[0]=='before_batch')]

@pytest.mark.slow
@pytest.mark.parametrize('ex', [*cancels, Boom, KeyboardInterrupt], ids=lambda o: o.__name__)
@some_setups
def test_exception(setup, ex):
    "And the next fit is right"
    wrong = []
    for stop in stops(setup, ex):
        try: survive(setup, stop)
        except Exception as e:
            wrong.append(
                f'{stop[0]}, batch {stop[2]}, order {stop[3]}, training {stop[4]}: {type(e).__name__} {str(e)[:200]}')
    assert not wrong, '\n'.join(wrong)
