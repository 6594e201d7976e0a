"A checkpoint is restored as a whole, or not at all: whatever fails on the way, the Learner is what it was, bit for bit"
import random
import pytest
import torch.utils.data as torch_data
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from reference import *
from quick import quickly
from test_checkpoint import Interrupt, OwnDL, data, fastai_dl, fp16, make, net, new_process, one_process, run, test_eq_bits, torch_dl
from fastaccum.checkpoint import state
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.state import CallbackStates, LearnerState, LoaderStates, RandomNumbers, TrainedState
from fastaccum.checkpoint.values import Values
from fastaccum.logs.steps import StepLogger
from fastaccum.precision.callback import MixedPrecision

# --- all that a Learner is, in a form that can be compared: the objects by what they hold, and by who they are
_seen_as_one = (str, bytes, type, Path)

def content(o, seen, path=''):
    "Path -> what is there, for all that an object leads to"
    if isinstance(o, (int, float, complex, type(None), np.generic, *_seen_as_one)): return {path: repr(o)}
    if id(o) in seen: return {path: f'again {seen[id(o)][0]}'}
    seen[id(o)] = path,o
    if isinstance(o, Tensor):
        flags = f'{o.requires_grad} {tuple(o.shape)} {o.dtype} {id(o)}'
        res = {path: (flags, o.detach().cpu().numpy().tobytes())}
        return {**res, **content(o.grad if o.is_leaf else None, seen, f'{path}.grad')}
    if isinstance(o, np.ndarray): return {path: (id(o), o.tobytes())}
    if isinstance(o, random.Random): return {path: o.getstate()}
    if isinstance(o, torch.Generator): return {path: o.get_state().numpy().tobytes()}
    if isinstance(o, np.random.Generator): return {path: repr(o.bit_generator.state)}
    if isinstance(o, dict): inside = {repr(k) if not isinstance(k, Tensor) else i: v for i,(k,v) in enumerate(o.items())}
    elif isinstance(o, (list, tuple, set)): inside = dict(enumerate(o))
    else: inside = {}
    if hasattr(o, '__dict__') and not callable(getattr(o, '__code__', None)): inside.update(vars(o))
    res = {path: (type(o).__name__, id(o), len(inside))}
    for k,v in inside.items(): res.update(content(v, seen, f'{path}.{k}'))
    return res

def all_of(learn):
    generators = random.getstate(),[repr(o) for o in np.random.get_state()],torch.get_rng_state().numpy().tobytes()
    for cb in learn.cbs:
        if isinstance(cb, CSVLogger) and vars(cb).get('file') is not None: cb.file.flush()
    rows = Path('history.csv').read_text() if Path('history.csv').exists() else None
    skipped = {id(o): ('', o) for o in (learn.dls, learn.training_checkpoint, *(dl.dataset for dl in learn.dls.loaders))}
    res = {'generators': generators, 'rows': rows, **content(learn, skipped, 'learn')}
    for i,dl in enumerate(learn.dls.loaders):
        names = vars(dl).keys() - {'dataset','fake_l','_DataLoader__idxs','_iterator'}
        for k in names: res.update(content(vars(dl)[k], skipped, f'dls[{i}].{k}'))
    return res

def differing(a, b): return [k for k in {**a, **b} if a.get(k) != b.get(k)]

# --- a Learner with all that a checkpoint restores
class Average(Callback):
    "A model, a tensor, lists, a dict, generators, an attribute that is new"
    order,run_valid = 60,False
    def __init__(self):
        self.n,self.seen,self.by,self.rng,self.mean = 0,[],{},random.Random(3),torch.zeros(4)
        self.table = np.zeros(3)
    def before_fit(self): self.average = deepcopy(self.learn.model)
    def after_step(self):
        self.n += 1
        self.seen.append(self.rng.random())
        self.by[self.learn.epoch] = self.n
        self.mean += self.n
        self.table[0] += 1
        self.new = self.n
        for a,p in zip(self.average.parameters(), self.learn.model.parameters()): a.data.lerp_(p.data, .1)

class Owns(Callback):
    "Decides itself what to save, and clears its list before it reads the one that it gets"
    order,run_valid,fails = 61,False,[]
    def __init__(self): self.n,self.rows = 0,[]
    def after_step(self): self.n += 1; self.rows.append(self.n)
    def state_dict(self): return dict(n=self.n, rows=self.rows)
    def load_state_dict(self, state):
        self.n,self.extra = state['n'],1
        self.rows.clear()
        if self.fails: raise RuntimeError('planted')
        self.rows.extend(state['rows'])
        del self.extra

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net,self.calls,self.g = net(),0,torch.Generator().manual_seed(3)
        self.register_buffer('mean', torch.zeros(6), persistent=False)
    def forward(self, x):
        if self.training: self.calls += 1; self.mean.lerp_(x.mean(0), .1)
        return self.net(x - self.mean + torch.randn(6, generator=self.g)*.1)

class Loss(nn.Module):
    def __init__(self): super().__init__(); self.n = 0; self.register_buffer('scale', torch.ones(1))
    def forward(self, p, y): self.n += 1; self.scale *= 1.01; return ((p-y)*self.scale).square().mean()

class Count(AvgMetric):
    def __init__(self): super().__init__(mae); self.all = 0
    def accumulate(self, learn): super().accumulate(learn); self.all += 1

class CountsItems:
    def __init__(self): self.n = 0
    def __call__(self, o): self.n += 1; return o[0]*(1+self.n/1e4),o[1]

def case(**more):
    return dict(dict(model=Counting, loss_func=Loss, opt_func=Adam, metrics=[Count()],
                     dl_type=lambda d, batch_size: DataLoader(d, bs=batch_size, shuffle=True, after_item=CountsItems()),
                     cbs=lambda: [Average(), Owns(), CSVLogger(), StepLogger(), SaveModelCallback(),
                                  EarlyStoppingCallback(patience=9)]), **more)

cases = dict(middle=case(), accumulation=case(model=net, loss_func=None,
                                              cbs=lambda: [*case()['cbs'](), GradientAccumulation(16), MixUp(.4)]),
             torch_loader=case(dl_type=torch_dl),
             own_order=case(dl_type=OwnDL), precision=case(cbs=lambda: [*case()['cbs'](), MixedPrecision('bf16')]),
             accelerated=case(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), lookahead=case(opt_func=ranger))

def new(case, *cbs):
    "Models and losses are the script's: new ones in each process"
    torch.manual_seed(5)
    return make({k: v() if k in ('model','loss_func') and v else v for k,v in case.items()}, *cbs)

# --- where a restore fails
def planted(*_, **__): raise RuntimeError('planted')
def after(f): return lambda *args, **kwargs: (f(*args, **kwargs), planted())
def in_place_of(o, name, how=after): return lambda monkeypatch: monkeypatch.setattr(o, name, how(getattr(o, name)))

def at_the_rows(how):
    "In the callback whose `load_state_dict` fails in the middle"
    def plant(monkeypatch): monkeypatch.setattr(Owns, 'fails', ['planted'])
    return plant

stages = dict(
    model=in_place_of(nn.Module, 'load_state_dict'), half_of_the_model=in_place_of(nn.Module, 'load_state_dict'),
    loss=in_place_of(TrainedState, '_put_loss'), optimizer=in_place_of(TrainedState, '_put_opt'),
    gradients=in_place_of(TrainedState, 'put_grads'), attributes_of_modules=in_place_of(state, 'put_module_attrs'),
    a_callbacks_own=at_the_rows(None), callbacks=in_place_of(CallbackStates, 'put'), loaders=in_place_of(LoaderStates, 'put'),
    random_numbers=in_place_of(RandomNumbers, 'put'), half_of_the_random_numbers=in_place_of(torch, 'set_rng_state'),
    interrupted=in_place_of(TrainedState, 'put', lambda f: lambda *a: (f(*a), (_ for _ in ()).throw(KeyboardInterrupt('planted')))))

@pytest.fixture
def watched(monkeypatch):
    seen,enter = [],LearnerState.all_or_nothing
    @contextmanager
    def watching(self):
        seen.append(all_of(self.learn))
        try:
            with enter(self): yield
        finally: seen.append(all_of(self.learn))
    monkeypatch.setattr(LearnerState, 'all_or_nothing', watching)
    return seen

def saved(case, at):
    with pytest.raises(RuntimeError, match='interrupted'): fit(new(case, TrainingCheckpoint(every_steps=1), Interrupt(at)))
    new_process()

def fit(learn): learn.fit(2, .05); return learn

def check_failing(case, plant, watched, monkeypatch):
    learn = new(case, TrainingCheckpoint(every_steps=1))
    with monkeypatch.context() as m:
        plant(m)
        with pytest.raises((RuntimeError, KeyboardInterrupt, ValueError), match='planted'): fit(learn)
    before,now = watched
    assert len(before) > 200 and differing(before, now) == []
    watched.clear()
    new_process()
    return learn

@pytest.mark.parametrize('stage', quickly(['half_of_the_model','a_callbacks_own','loaders','random_numbers'], stages))
def test_nothing_is_half_restored(stage, watched, monkeypatch):
    "In the middle of an epoch"
    saved(cases['middle'], (1, 4))
    check_failing(cases['middle'], stages[stage], watched, monkeypatch)

@pytest.mark.parametrize('name', quickly(['middle','torch_loader'], cases))
def test_every_learner(name, watched, monkeypatch):
    "The last thing that is restored fails, and then nothing does: it ends as the run that nobody stopped"
    whole = fit(new(cases[name]))
    saved(cases[name], (1, 4))
    check_failing(cases[name], stages['random_numbers'], watched, monkeypatch)
    learn = fit(new(cases[name], TrainingCheckpoint(every_steps=1)))
    before,now = watched
    assert len(differing(before, now)) > 50                      # this comparison sees what a restore does
    assert torch.equal(weights(learn.model), weights(whole.model)) and learn.average.seen == whole.average.seen
    assert learn.owns.rows == whole.owns.rows and learn.average.n == whole.average.n

@pytest.mark.parametrize('stage', quickly(['optimizer'], ['optimizer','a_callbacks_own','random_numbers']))
def test_end_of_a_fit(stage, watched, monkeypatch):
    "A fit that was finished is loaded in the same way"
    case = cases['middle']
    fit(new(case, TrainingCheckpoint(every_steps=1)))
    new_process()
    check_failing(case, stages[stage], watched, monkeypatch)

def test_order_of_the_loader(watched, monkeypatch):
    "It begins the epoch when all else is restored, and fails; or cannot load the first item"
    saved(cases['middle'], (1, 4))
    for name in ('before_iter','create_item'):
        check_failing(cases['middle'], lambda m: m.setattr(DataLoader, name, planted), watched, monkeypatch)

def test_the_same_learner_again(watched, monkeypatch):
    "It can go on with the checkpoint as soon as what has failed is mended"
    case = dict(cases['middle'], cbs=lambda: [cb for cb in cases['middle']['cbs']() if not isinstance(cb, CSVLogger)])  # fastai's stays put
    whole = fit(new(case))
    saved(case, (1, 4))
    learn = check_failing(case, stages['a_callbacks_own'], watched, monkeypatch)
    fit(learn)
    assert torch.equal(weights(learn.model), weights(whole.model)) and learn.owns.rows == whole.owns.rows
    assert learn.average.seen == whole.average.seen

@pytest.mark.parametrize('case', [fp16])
def test_loss_scale(case, monkeypatch):
    "With fp16: the scale that was there"
    case = dict(cbs=lambda: [MixedPrecision(init_scale=2.**10, growth_interval=3)])
    run(case, TrainingCheckpoint(every_steps=1), stop=Interrupt((1, 4)))
    new_process()
    learn = make(case, TrainingCheckpoint(every_steps=1))
    stages['random_numbers'](monkeypatch)
    with pytest.raises(RuntimeError, match='planted'): learn.fit_one_cycle(4, .05)
    assert learn.mixed_precision.scaler.get_scale() == 2.**10

def two_groups(m): return [params(m[:2]), params(m[2:])]

def test_groups_of_torchs_optimizers():
    "PyTorch's Adam has one tuple of betas in all groups: the checkpoint has it once"
    case = dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), splitter=two_groups)
    whole = run(case)
    run(case, TrainingCheckpoint(every_steps=2), stop=Interrupt((1, 4)))
    new_process()
    test_eq_bits(run(case, TrainingCheckpoint(every_steps=2)), whole)

@pytest.mark.filterwarnings('ignore:Since the checkpoint, the code of the run has changed. `Owns`')
def test_one_walk(monkeypatch):
    "Each callback is put back by one call, and what only looks by none"
    calls = []
    class Looks(Callback):
        in_checkpoint = False
        def __init__(self): self.held = [Held()]
    class Held:
        def __getattribute__(self, k):
            if k == '__dict__': calls.append('looked at')
            return object.__getattribute__(self, k)
    case = dict(cbs=lambda: [Average(), Owns(), Looks()])
    run(case, TrainingCheckpoint(every_steps=2), stop=Interrupt((1, 4)))
    assert calls == []
    new_process()
    learn = make(case, TrainingCheckpoint(every_steps=2), Interrupt((1, 6)))
    for cls,name in ((Values, 'set_attrs'), (nn.Module, 'load_state_dict'), (Owns, 'load_state_dict'), (np.random, 'set_state')):
        def counted(*args, _f=getattr(cls, name), _name=f'{cls.__name__}.{name}', **kwargs):
            calls.append(_name)
            return _f(*args, **kwargs)
        monkeypatch.setattr(cls, name, counted)
    with pytest.raises(RuntimeError, match='interrupted'): learn.fit_one_cycle(4, .05)
    # the model, its average, the loss
    assert calls.count('Module.load_state_dict') == 3 and calls.count('Owns.load_state_dict') == 1 and 'looked at' not in calls
