"Where fastaccum calls a user's loss a second time, to look at it: only where something accumulates, and what the loss keeps stays as it is"
import array, collections, contextlib, contextvars, ctypes, dataclasses, functools, io, itertools, logging, os, queue
import random, sqlite3, subprocess, sys, threading, types, warnings, weakref
from pathlib import Path
import numpy as np, pandas as pd, pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import Callback, CancelBatchException, DataLoader, DataLoaders, Learner, SGD
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.core.untouched import Kept
from fastaccum.all import FastaccumWarning, GradientAccumulation, GradientAccumulationSchedule, TrainingCheckpoint

def items(n=80, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g),torch.randint(3, (n,), generator=g)

def learner(loss_func, bs, *cbs, n=80):
    torch.manual_seed(0)
    net,data = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),list(zip(*items(n)))
    dls = DataLoaders(DataLoader(data, bs=bs), DataLoader(data[:16], bs=16), device='cpu')
    return Learner(dls, net, loss_func=loss_func, opt_func=SGD, cbs=list(cbs), metrics=[])

def fit(learn, n_epoch=3):
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, .5)
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

# --- where nothing accumulates

class Counts:
    "Its weights depend on how often it was called, which it counts where nothing can be put back"
    def __init__(self, fn): self.fn = fn
    def __call__(self, pred, y):
        with open(self.fn, 'a') as f: f.write('.')
        with open(self.fn) as f: n = len(f.read())
        return F.cross_entropy(pred, y, ignore_index=-1)/(1 + .1*n)

def calls_and_weights(name, *cbs, bs=16, n=88, loss=Counts):
    "How often the loss is called, the weights afterwards, and the Learner"
    learn = learner(loss(name), bs, *cbs, n=n)
    after = fit(learn)
    return len(open(name).read()),after,learn

alone = dict(plain={}, smaller=dict(accum_bs=10), micro=dict(micro_batch_size=16), auto=dict(micro_batch_size='auto'),
             per_loader_batch=dict(accum_bs=None, micro_batch_size=20), always=dict(check_loss='always'), rows=dict(log_accum_batch=False),
             carry=dict(remainder='carry'), drop=dict(remainder='drop'), coupled=dict(micro_batch_size=16, coupled=True))

@pytest.mark.filterwarnings('ignore:accum_bs=10', 'ignore:.* changes nothing here')
@pytest.mark.parametrize('name', alone)
def test_nothing_accumulates(name):
    "The loss is called as often as by fastai, and the weights are the same, bit for bit, with a last short batch too"
    n = 80 if name in ('carry', 'drop') else 88
    plain,whole,_ = calls_and_weights('fastai', n=n)
    calls,ours,learn = calls_and_weights('ours', GradientAccumulation(**{'accum_bs': 16, **alone[name]}), n=n)
    assert calls == plain == 3*(-(-n//16) + 1)
    assert torch.equal(ours, whole)
    assert name == 'coupled' or learn.gradient_accumulation.loss_rule.startswith('not looked at')

def test_last_batch_is_dropped():
    calls,_,_ = calls_and_weights('ours', GradientAccumulation(16, remainder='drop'))
    assert calls == 3*(6 + 1)

class Changes(Callback):
    "Puts another loss in the place of the loss function's, or adds something to it"
    def __init__(self, f): self.f = f
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.f(self.loss_grad, self.pred)

changes = dict(replaced=lambda loss, pred: pred.pow(2).mean(0).sum(), added=lambda loss, pred: loss + .1*pred.pow(2).mean())
@pytest.mark.parametrize('kind', changes)
@pytest.mark.parametrize('loss', [lambda name: nn.CrossEntropyLoss(reduction='sum'), lambda name: nn.CrossEntropyLoss(), Counts])
def test_callbacks_change_the_loss(kind, loss):
    "Nothing is added up, so nothing is warned of"
    for name in ('fastai', 'ours'): open(name, 'w').close()
    plain,whole,_ = calls_and_weights('fastai', Changes(changes[kind]), loss=loss)
    calls,ours,_ = calls_and_weights('ours', Changes(changes[kind]), GradientAccumulation(16), loss=loss)
    assert calls == plain and torch.equal(ours, whole)

def undeclared_sum(pred, y): return F.cross_entropy(pred, y, reduction='sum')/16
def over_valid(pred, y): return F.cross_entropy(pred, y, ignore_index=0)

def test_sum():
    "One that is not declared matters only where its micro-batches are added up"
    whole,ours = (fit(learner(undeclared_sum, 16, *cbs)) for cbs in ((), (GradientAccumulation(16),)))
    assert torch.equal(ours, whole)
    with pytest.warns(UserWarning, match='is a sum, not a mean'): fit(learner(undeclared_sum, 16, GradientAccumulation(32)))

def test_sum_is_told_once_for_each_loss():
    "Not once for each callback, nor once for each fit"
    def another_sum(pred, y): return undeclared_sum(pred, y)/2
    learn = learner(undeclared_sum, 16, GradientAccumulation(32))
    with pytest.warns(FastaccumWarning, match='is a sum, not a mean') as told:
        for loss in (undeclared_sum, undeclared_sum, another_sum, undeclared_sum, another_sum):
            learn.loss_func = loss
            fit(learn, 1)
    assert [str(w.message).split()[0] for w in told if w.category is FastaccumWarning] == ['undeclared_sum','another_sum']

def test_sum_is_told_once_over_a_resume(tmp_path):
    "Another process has other objects, by the same names"
    class Stops(Callback):
        order = 2000
        def after_batch(self):
            if self.training and self.epoch == 1: raise OSError('the power is out')
    def told(*cbs):
        def a_sum(pred, y): return undeclared_sum(pred, y)
        CheckpointFolder.in_use.clear()
        learn = learner(a_sum, 16, GradientAccumulation(32), TrainingCheckpoint(tmp_path, every_steps=1), *cbs)
        with warnings.catch_warnings(record=True) as found, contextlib.suppress(OSError):
            warnings.simplefilter('always')
            fit(learn)
        return sum('is a sum' in str(w.message) for w in found)
    assert (told(Stops()), told()) == (1, 0)

def test_first_step_of_two():
    "The first look comes with it; the steps before need no weight"
    rules = []
    class Rules(Callback):
        def after_step(self): rules.append(self.learn.gradient_accumulation.loss_rule)
    learn = learner(over_valid, 8, GradientAccumulationSchedule(8, 16, start=.5, finish=.5, schedule=lambda pos: 16), Rules())
    fit(learn, 1)
    assert [r[:14] for r in rules[:5]] == ['not looked at:']*5 and all('measured' in r for r in rules[5:])
    assert 'measured' in learn.gradient_accumulation.loss_rule

def test_step_is_cancelled():
    "Then the accumulated batch goes on, and the micro-batch that was to be a step of its own is weighted right"
    class Cancel(Callback):
        done = False
        def before_step(self):
            if not self.done: self.done = True; raise CancelBatchException('not yet')
    grads = []
    class Grads(Callback):
        order = 20
        def before_step(self): grads.append(torch.cat([p.grad.flatten().clone() for p in self.learn.model.parameters()]))
    learn = learner(over_valid, 16, GradientAccumulation(16), Cancel(), Grads(), n=32)
    fit(learn, 1)
    fit(learner(over_valid, 32, Grads(), n=32), 1)
    assert len(grads) == 2 and torch.allclose(*grads, rtol=1e-5, atol=1e-7)

@pytest.mark.parametrize('n_chunks,looks', [(1, 0), (4, 1)])
def test_one_chunk(n_chunks, looks, capsys):
    from fastaccum.all import ChunkedLoss
    head = nn.Linear(6, 3)
    def loss(pred, y):
        print('called')                          # what is printed is not taken back
        return F.cross_entropy(pred, y)
    x,y = items(16)
    ChunkedLoss(loss, head, n_chunks=n_chunks)(x, y).backward()
    assert (capsys.readouterr().out.count('called') > n_chunks) == bool(looks)

# --- where something accumulates: what a loss keeps

def mean_of(pred, y): return F.cross_entropy(pred, y)

class Plain: pass
class WithSlots: __slots__ = 'n',
class OfAll:
    n = 0
    def __call__(self, pred, y): OfAll.n += 1; return mean_of(pred, y)

@dataclasses.dataclass
class Record:
    n:int = 0
    seen:list = dataclasses.field(default_factory=list)

config = types.ModuleType('config_of_a_user')
config.n,config.inner = 0,types.SimpleNamespace(n=0)
of_globals = np.zeros(4)
n_global = 0

# Each makes a loss, anew, and a function that says what it keeps
def kind(f): kinds[f.__name__] = f; return f
kinds = {}

def counting(keep, read): return lambda pred, y: (keep(pred, y), mean_of(pred, y))[1],read

@kind
def array_in_closure(a=None):
    a = np.zeros(4)
    def keep(pred, y): a[:len(y)%3+1] += 1
    return counting(keep, a.tolist)
@kind
def array_in_globals():
    of_globals[:] = 0
    def keep(pred, y): of_globals[1] += len(y)
    return counting(keep, of_globals.tolist)
@kind
def array_as_attribute():
    o = Plain()
    o.hist = np.zeros((2, 3), np.int64)
    def keep(pred, y): o.hist[1] += np.bincount(y, minlength=3)
    return counting(keep, o.hist.tolist)
@kind
def array_of_objects():
    a = np.array([None, [], 'x'], dtype=object)
    def keep(pred, y): a[0] = len(y); a[1].append(1)
    return counting(keep, lambda: a.tolist())
@kind
def deque():
    d = collections.deque(maxlen=3)
    return counting(lambda pred, y: d.append(len(d) + float(pred.detach().mean())), lambda: list(d))
@kind
def of_the_class():
    OfAll.n = 0
    return OfAll(),lambda: OfAll.n
@kind
def long_list():
    o = [0]*5000
    def keep(pred, y): o.append(1); o[7] += 1
    return counting(keep, lambda: list(o))
@kind
def nested_dict():
    d = {'a': {'n': 0, 'seen': []}, 3: 'x'}
    def keep(pred, y): d['a']['n'] += 1; d['a']['seen'].append(d.pop(3, None)); d[len(d)] = 'new'
    return counting(keep, lambda: str(d))
@kind
def ordered():
    d,c = collections.OrderedDict(a=1, b=2, c=3),collections.Counter()
    def keep(pred, y): d.move_to_end(next(iter(d))); c.update(y.tolist())
    return counting(keep, lambda: (list(d.items()), dict(c)))
@kind
def default_dict():
    d = collections.defaultdict(list)
    def keep(pred, y): d[len(d)].append(1)
    return counting(keep, lambda: dict(d))
@kind
def record():
    r = Record()
    def keep(pred, y): r.n += 1; r.seen.append(r.n)
    return counting(keep, lambda: str(r))
@kind
def slots():
    o = WithSlots()
    o.n = 0
    def keep(pred, y): o.n += 1
    return counting(keep, lambda: o.n)
@kind
def iterator_count():
    it,seen = itertools.count(),[]
    return counting(lambda pred, y: seen.append(next(it)), lambda: seen)
@kind
def iterator_of_list():
    it,seen = iter(range(1000)),[]
    return counting(lambda pred, y: seen.append(next(it)), lambda: seen)
@kind
def iterator_shared():
    it = itertools.count()
    a,b,seen = Plain(),{'it': it},[]
    a.it = it
    return counting(lambda pred, y: seen.append((next(a.it), next(b['it']))), lambda: seen)
@kind
def reads_file():
    with open('numbers', 'w') as f: f.write('0123456789'*100)
    f,seen = open('numbers'),[]
    return counting(lambda pred, y: seen.append(f.read(1)), lambda: seen)
@kind
def memory_file():
    f = io.StringIO()
    return counting(lambda pred, y: f.write(f'{len(y)} '), f.getvalue)
@kind
def own_generators():
    rngs,seen = (np.random.default_rng(0), random.Random(0), torch.Generator(), np.random.RandomState(0)),[]
    def keep(pred, y): seen.append((rngs[0].random(), rngs[1].random(), torch.rand(1, generator=rngs[2]).item(), rngs[3].rand()))
    return counting(keep, lambda: seen)
@kind
def keyword_of_partial():
    def loss(pred, y, state, hist=collections.deque()):
        state['n'] += 1; hist.append(state['n'])
        return mean_of(pred, y)
    state,hist = {'n': 0},collections.deque()
    return functools.partial(loss, state=state, hist=hist),lambda: (state['n'], list(hist))
@kind
def default_argument():
    def loss(pred, y, seen=[], *, n={'n': 0}):
        seen.append(1); n['n'] += 1
        return mean_of(pred, y)
    return loss,lambda: (len(loss.__defaults__[0]), loss.__kwdefaults__)
@kind
def attribute_of_module():
    config.n = config.inner.n = 0
    def keep(pred, y): config.n += 1; config.inner.n += 1
    return counting(keep, lambda: (config.n, config.inner.n))
@kind
def attribute_of_function():
    def loss(pred, y): loss.n = getattr(loss, 'n', 0) + 1; return mean_of(pred, y)
    return loss,lambda: loss.n
@kind
def number_in_globals():
    global n_global
    n_global = 0
    def keep(pred, y):
        global n_global, born_late
        n_global += 1
        born_late = n_global
    return counting(keep, lambda: n_global)
@kind
def nonlocal_number():
    n = 0
    def loss(pred, y):
        nonlocal n
        n += 1
        return mean_of(pred, y)
    return loss,lambda: n
@kind
def sets_and_bytes():
    s,b,a,c = set(),bytearray(b'ab'),array.array('i', [0]),(ctypes.c_int*2)()
    def keep(pred, y): s.add(len(s)); b.extend(b'x'); a.append(7); c[0] += 1
    return counting(keep, lambda: (sorted(s), bytes(b), a.tolist(), list(c)))
@kind
def weak():
    key = Plain()
    d,s = weakref.WeakKeyDictionary({key: 0}),weakref.WeakSet()
    def keep(pred, y): d[key] += 1; s.add(key)
    return counting(keep, lambda: (d[key], len(s)))
@kind
def through_weakref():
    key = Plain()
    key.n,ref,method = 0,weakref.ref(key),collections.deque().append
    def keep(pred, y): ref().n += 1; method(1)
    return counting(keep, lambda: (key.n, len(method.__self__)))
@kind
def tensors():
    bank,total,plain = torch.zeros(3000, 4),torch.zeros(()),torch.zeros(2)
    def keep(pred, y):
        bank[int(total)] = 1.
        total.add_(1)
        plain.data.add_(1)
    return counting(keep, lambda: (bank.sum().item(), total.item(), plain.tolist()))
@kind
def helper():
    class Helper:
        made = 0
        @property
        def next(self): Helper.made += 1; return Helper.made
        @staticmethod
        def count(seen=[]): seen.append(1)
        @classmethod
        def of_class(cls): cls.late = getattr(cls, 'late', 0) + 1
    o = Helper()
    def keep(pred, y): o.next; o.count(); Helper.of_class()
    return counting(keep, lambda: (Helper.made, len(Helper.count.__defaults__[0]), Helper.late))
@kind
def decorated():
    seen = []
    def logs(f):
        @functools.wraps(f)
        def wrapper(*args): seen.append(1); return f(*args)
        return wrapper
    @logs
    @torch.enable_grad()
    def loss(pred, y): seen.append(2); return mean_of(pred, y)
    return loss,lambda: seen
@kind
def module_with_everything():
    class Loss(nn.Module):
        total = np.zeros(1)
        def __init__(self):
            super().__init__()
            self.n,self.hist,self.queue,self.it = 0,np.zeros(2),collections.deque(maxlen=5),itertools.count()
            self.register_buffer('b', torch.zeros(2))
        def forward(self, pred, y):
            self.n += 1; self.hist += 1; self.queue.append(next(self.it)); self.b.add_(1); Loss.total += 1
            return mean_of(pred, y)
    o = Loss()
    return o,lambda: (o.n, o.hist.tolist(), list(o.queue), o.b.tolist(), Loss.total.tolist())
class Meta(type): n = 0
class OfMeta(metaclass=Meta): pass
variable = contextvars.ContextVar('calls', default=0)
@kind
def odd_places():
    Meta.n,config.n = 0,0
    variable.set(0)
    sys.modules['config_of_a_user'] = config
    def keep(pred, y):
        import config_of_a_user
        config_of_a_user.n += 1; type(OfMeta).n += 1; variable.set(variable.get() + 1)
    return counting(keep, lambda: (config.n, Meta.n, variable.get()))
@kind
def tensor_gets_another():
    t = torch.zeros(2)
    seen = [t]
    def keep(pred, y):
        seen[0] = seen[0] + 1
        t.data = t.data + 1
    return counting(keep, lambda: (t.tolist(), seen[0].tolist()))
@kind
def logger():
    log,out = logging.getLogger('a_loss'),io.StringIO()
    log.handlers = [logging.StreamHandler(out)]
    return counting(lambda pred, y: log.warning('called'), out.getvalue)

@pytest.mark.parametrize('name', kinds)
def test_what_a_loss_keeps(name):
    "It is as after as many calls as there are micro-batches, and the weights are those of the big batch"
    loss,read = kinds[name]()
    assert not Kept([loss]).errors
    learn = learner(loss, 8, GradientAccumulation(16))
    ours = fit(learn)
    found = read()
    assert 'measured' in learn.gradient_accumulation.loss_rule
    loss,read = kinds[name]()
    x,y = items()
    for _ in range(3):
        for i in range(0, 80, 8): loss(torch.zeros(8, 3), y[i:i+8])
        loss(torch.zeros(16, 3), y[:16])
    if name == 'deque': assert [int(v) for v in found] == [int(v) for v in read()]
    else: assert found == read()
    assert torch.allclose(ours, fit(learner(mean_of, 16)), rtol=1e-5, atol=1e-6)

# --- what cannot be put back

def n_of_ours(told):
    "Of other libraries a warning may come at any time: Python warns of a file when it is collected"
    return sum(issubclass(w.category, FastaccumWarning) for w in told)

def lasting(f): for_good[f.__name__] = f; return f
for_good = {}

def numbers():
    n = 0
    while True: n += 1; yield n

@lasting
def generator():
    it,seen = numbers(),[]
    return counting(lambda pred, y: seen.append(next(it)), lambda: seen[-1])
@lasting
def generator_expression():
    it,seen = (n for n in range(1, 10**6)),[]
    return counting(lambda pred, y: seen.append(next(it)), lambda: seen[-1])
@lasting
def generator_of_class():
    class Loss:
        def __init__(self): self.inner = {'it': numbers()}
        def __call__(self, pred, y): self.last = next(self.inner['it']); return mean_of(pred, y)
    o = Loss()
    return o,lambda: o.last
@lasting
def writes_file():
    f = open('log.txt', 'w')
    def keep(pred, y): f.write('.'); f.flush()
    return counting(keep, lambda: len(open('log.txt').read()))
@lasting
def appends_binary():
    if os.path.exists('log.bin'): os.remove('log.bin')
    f = open('log.bin', 'ab')
    return counting(lambda pred, y: f.write(b'.'), lambda: f.tell())
@lasting
def lines_of_file():
    with open('lines', 'w') as f: f.writelines(f'{n}\n' for n in range(1, 1000))
    f,seen = open('lines'),[]
    return counting(lambda pred, y: seen.append(int(next(f))), lambda: seen[-1])
@lasting
def iterator_in_a_tuple():
    seen = []
    def loss(it, pred, y): seen.append(next(it)); return mean_of(pred, y)
    return functools.partial(loss, itertools.count(1)),lambda: seen[-1]
@lasting
def chained_iterators():
    it,seen = map(abs, itertools.islice(itertools.count(1), None)),[]
    return counting(lambda pred, y: seen.append(next(it)), lambda: seen[-1])
@lasting
def with_a_graph():
    total = torch.zeros((), requires_grad=True)*1
    def keep(pred, y): total.add_(1)
    return counting(keep, lambda: int(total))

def fit_not_measured(loss):
    "A Learner and its fit, in which one warning says that calls change the loss for good"
    learn = learner(loss, 8, GradientAccumulation(16))
    message = 'could not be measured .each call changes .* cannot be put back.*weight='
    with pytest.warns(FastaccumWarning, match=message) as told: ours = fit(learn)
    assert n_of_ours(told) == 1
    return learn,ours

@pytest.mark.parametrize('name', for_good)
def test_what_cannot_be_put_back(name):
    "It is noticed after one call, and warned of; the loss is weighted by what is assumed"
    loss,read = for_good[name]()
    learn,ours = fit_not_measured(loss)
    assert 0 <= read() - 3*(10 + 1) <= 2
    assert 'assumed' in learn.gradient_accumulation.loss_rule and 'cannot be put back' in learn.gradient_accumulation.loss_rule
    assert torch.allclose(ours, fit(learner(mean_of, 16)), rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize('name', for_good)
def test_not_looked_at_with_a_weight(name):
    "As the warning advises"
    if name == 'generator_of_class': return      # what it keeps is looked at: below
    loss,read = for_good[name]()
    ours = fit(learner(loss, 8, GradientAccumulation(16, weight=lambda learn: len(learn.yb[0]))))
    assert torch.allclose(ours, fit(learner(mean_of, 16)), rtol=1e-5, atol=1e-6)
    assert read() == 3*(10 + 1)

def test_what_is_kept_is_warned_of():
    "A loss that keeps a value is called once to see how those of micro-batches add up"
    loss,read = generator_of_class()
    learn = learner(loss, 8, GradientAccumulation(16, weight=lambda learn: len(learn.yb[0])))
    message = 'called again .* cannot be put back.*/troubleshooting.html#the-loss-is-off$'
    with pytest.warns(FastaccumWarning, match=message) as told: fit(learn)
    assert n_of_ours(told) == 1 and read() == 3*(10 + 1) + 1

def test_it_begins_later():
    "Then what was measured before stays, and it is looked at no more"
    out,calls = open('late', 'w'),collections.deque()
    def loss(pred, y):
        calls.append(1)
        if len(calls) > 12: out.write('.'); out.flush()
        return F.cross_entropy(pred, y, ignore_index=0)
    learn = learner(loss, 8, GradientAccumulation(16))
    message = 'is no longer checked, as each call changes out.*as measured so far'
    with pytest.warns(FastaccumWarning, match=message) as told: ours = fit(learn)
    assert n_of_ours(told) == 1
    assert 0 < len(open('late').read()) - (3*(10 + 1) - 12) <= 7
    assert torch.allclose(ours, fit(learner(over_valid, 16)), rtol=1e-5, atol=1e-6)

def test_second_fit():
    "It is said once, and one call of each fit is one too many"
    loss,read = writes_file()
    learn = learner(loss, 8, GradientAccumulation(16))
    with pytest.warns(FastaccumWarning): fit(learn)
    fit(learn)
    assert read() == 2*(3*(10 + 1) + 1)

# --- what it does not hold

def outside_of(f): outside[f.__name__] = f; return f
outside = {}

# The weights depend on `n`, the calls so far: that shows where nothing else does
def scaled(count): return lambda pred, y: mean_of(pred, y)*(1 + .1*count())

@outside_of
def file_by_name():
    def count():
        with open('by_name', 'a+') as f:
            f.write('.')
            return f.tell()
    return scaled(count),count
@outside_of
def appends_by_name():
    "Its value does not show it"
    def loss(pred, y):
        with open('appended', 'a') as f: f.write('.')
        return mean_of(pred, y)
    return loss,lambda: os.path.getsize('appended') + 1
@outside_of
def by_descriptor():
    def loss(pred, y):
        fd = os.open('by_fd', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, b'.')
        os.close(fd)
        return mean_of(pred, y)
    return loss,lambda: os.path.getsize('by_fd') + 1
@outside_of
def by_path():
    def loss(pred, y):
        fn = Path('by_path')
        fn.write_text(fn.read_text() + '.' if fn.exists() else '.')
        return mean_of(pred, y)
    return loss,lambda: os.path.getsize('by_path') + 1
@outside_of
def makes_folders():
    def loss(pred, y):
        os.makedirs(f'folders/{len(os.listdir("folders")) if os.path.exists("folders") else 0}')
        return mean_of(pred, y)
    return loss,lambda: len(os.listdir('folders')) + 1
@outside_of
def other_program():
    def loss(pred, y):
        subprocess.run([sys.executable, '-c', "open('by_program', 'a').write('.')"])
        return mean_of(pred, y)
    return loss,lambda: os.path.getsize('by_program') + 1
@outside_of
def environment():
    os.environ['CALLS_OF_A_LOSS'] = '0'
    def count():
        os.environ['CALLS_OF_A_LOSS'] = str(int(os.environ['CALLS_OF_A_LOSS']) + 1)
        return int(os.environ['CALLS_OF_A_LOSS'])
    return scaled(count),count
@outside_of
def database_by_name():
    def count():
        with contextlib.closing(sqlite3.connect('calls.db')) as db, db:
            db.execute('create table if not exists t (x)')
            db.execute('insert into t values (1)')
            return db.execute('select count(*) from t').fetchone()[0]
    return scaled(count),count
@outside_of
def open_database():
    db = sqlite3.connect(':memory:', isolation_level=None)
    db.execute('create table t (x)')
    def count():
        db.execute('insert into t values (1)')
        return db.execute('select count(*) from t').fetchone()[0]
    return scaled(count),count
@outside_of
def queue_of_threads():
    q = queue.Queue()
    def count(): q.put(1); return q.qsize()
    return scaled(count),count
@outside_of
def cached_function():
    @functools.lru_cache
    def f(): return 1
    def count(): f(); return f.cache_info().hits + f.cache_info().misses
    return scaled(count),count
@outside_of
def of_a_library():
    np.calls_of_a_loss = 0
    def count(): np.calls_of_a_loss += 1; return np.calls_of_a_loss
    return scaled(count),count
@outside_of
def name_made_at_run_time():
    globals()['late_name'] = 0
    def count():
        globals()['late_' + 'name'] += 1
        return globals()['late_' + 'name']
    return scaled(count),count
@outside_of
def other_thread():
    inbox,outbox = queue.Queue(),queue.Queue()
    def work():
        n = 0
        while inbox.get(): n += 1; outbox.put(n)
    threading.Thread(target=work, daemon=True).start()
    def count(): inbox.put(True); return outbox.get()
    return scaled(count),count

@pytest.mark.parametrize('name', outside)
def test_what_it_does_not_hold(name):
    "It is noticed after two calls, and the warning says that the looks changed it"
    loss,count = outside[name]()
    learn,_ = fit_not_measured(loss)
    assert 1 <= count() - 3*(10 + 1) <= 3
    assert 'assumed' in learn.gradient_accumulation.loss_rule

@pytest.mark.parametrize('name', outside)
def test_with_a_weight_it_is_called_as_often_as_by_fastai(name):
    loss,count = outside[name]()
    fit(learner(loss, 8, GradientAccumulation(16, weight=lambda learn: len(learn.yb[0]))))
    assert count() - 1 == 3*(10 + 1)

def test_a_table_of_pandas():
    "Followed and put back, as other objects that a loss holds"
    df = pd.DataFrame({'n': [0], 'x': ['a']})
    def count(): df.loc[0, 'n'] += 1; df.loc[len(df)] = [0, 'b']; return int(df.loc[0, 'n'])
    def keep(pred, y): count()
    learn = learner(counting(keep, count)[0], 8, GradientAccumulation(16))
    fit(learn)
    assert 'measured' in learn.gradient_accumulation.loss_rule
    assert len(df) == 1 + 3*(10 + 1) and count() == 3*(10 + 1) + 1

def test_what_leaves_nothing():
    "It reads files, writes to nowhere, imports, draws its own numbers: all of that may be done once more"
    Path('weights.txt').write_text('1 1 1')
    def loss(pred, y):
        w = torch.tensor([float(v) for v in open('weights.txt').read().split()])
        with open(os.devnull, 'w') as f: print('called', file=f)
        import colorsys
        return F.cross_entropy(pred, y, w)
    learn = learner(loss, 8, GradientAccumulation(16))
    fit(learn)
    assert 'measured' in learn.gradient_accumulation.loss_rule

def test_files_of_other_threads():
    "What they write is not the loss's"
    stop,started = threading.Event(),threading.Event()
    def write():
        while not stop.is_set():
            open('by_a_thread', 'w').close()
            started.set()
    thread = threading.Thread(target=write)
    thread.start()
    started.wait()
    try:
        learn = learner(lambda pred, y: mean_of(pred, y), 8, GradientAccumulation(16))
        fit(learn)
    finally:
        stop.set()
        thread.join()
    assert 'measured' in learn.gradient_accumulation.loss_rule

# --- looks at the model

seen_by_models = {}

class Counted(nn.Module):
    "Counts its calls in training in many places; in a generator if `lasting`"
    calls = np.zeros(1)
    def __init__(self, form, lasting=False):
        super().__init__()
        Counted.calls[:] = 0
        seen_by_models.clear()
        self.form,self.it,self.queue = form,numbers() if lasting else itertools.count(1),collections.deque()
        self.a,self.b = nn.Linear(6, 3),nn.Linear(6, 3)
    def forward(self, x):
        if self.training:
            self.last = next(self.it)
            self.queue.append(1)
            Counted.calls[0] += 1
            seen_by_models[len(seen_by_models)] = 1
        out = self.a(x)
        if self.form == 'views': return torch.cat((out, self.b(x)))
        return out,out.softmax(1).mean(0).square().sum()
    @property
    def counts(self): return [self.last, len(self.queue), int(Counted.calls[0]), len(seen_by_models)]

class OfForm:
    "A loss for both forms, that PyTorch's are not"
    def __call__(self, out, y):
        if isinstance(out, tuple): return F.cross_entropy(out[0], y) + out[1]
        return F.cross_entropy(out.unflatten(0, (2, -1)).mean(0), y)

def counted(form, **kwargs):
    acc = GradientAccumulation(16, micro_batch_size=8, coupled=True) if form == 'views' else GradientAccumulation(16)
    learn = learner(OfForm(), 16 if form == 'views' else 8, acc)
    learn.model = Counted(form, **kwargs)
    return learn

@pytest.mark.filterwarnings('ignore:The model.s number in output 1 is a part of the loss')
@pytest.mark.filterwarnings('ignore:OfForm is not a mean over items')
@pytest.mark.parametrize('form,each', [('terms', 1), ('views', 2)])
def test_what_a_model_keeps(form, each):
    learn = counted(form)
    fit(learn)
    assert learn.model.counts == [3*10*each]*4

@pytest.mark.filterwarnings('ignore:The model.s number in output 1 is a part of the loss')
@pytest.mark.filterwarnings('ignore:OfForm is not a mean over items')
@pytest.mark.parametrize('form,what', [('terms', 'whether its numbers in the loss add up'), ('views', 'how many views its outputs hold')])
def test_a_model_cannot_be_put_back(form, what):
    learn = counted(form, lasting=True)
    message = f'The model was called once more, to find out {what}, and each call changes Counted.it,'
    with pytest.warns(FastaccumWarning, match=message): fit(learn)
    each = 1 if form == 'terms' else 2
    assert learn.model.counts[1:] == [3*10*each]*3 and 0 < learn.model.counts[0] - 3*10*each <= 5
