"Every state that is saved can be put back, in another process too, or is told when it is saved"
import enum, io, warnings
from collections import namedtuple
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from reference import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.checkpoint.values import Values

Point = namedtuple('Point', 'x y')
class Color(enum.Enum): red,blue = 1,2
class Mine: pass

def through_file(o):
    file = io.BytesIO()
    torch.save(o, file)
    file.seek(0)
    return torch.load(file, weights_only=True)

def known(): return dict(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).named_parameters())

# In this process and in the next: values that refer to the parameters by name
scalar = st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab', max_size=2)
names = st.sampled_from([*known()]).map(lambda n: ('param', n))
plain_key = scalar | names | st.sampled_from([torch.float32, torch.device('cpu'), Path('a'), b'x', range(3)])
odd = st.sampled_from([len, Point(1, 2), Color.red, Mine(), int])
key = st.recursive(plain_key | odd, lambda k: st.tuples(k, k).map(lambda t: ('of', *t)), max_leaves=3)
value = st.recursive(scalar | names, lambda v: st.lists(v, max_size=3) | st.dictionaries(key, v, max_size=3) | st.sets(key, max_size=3)
                     | st.frozensets(key, max_size=3) | st.tuples(v, v).map(lambda t: ('of', *t)), max_leaves=8)

def of(v, here):
    "The value, with the parameters of a process in the place of their names"
    if type(v) is tuple and v[:1] == ('param',): return here[v[1]]
    if type(v) is tuple and v[:1] == ('of',): return tuple(of(o, here) for o in v[1:])
    if type(v) is dict: return {of(k, here): of(o, here) for k,o in v.items()}
    if type(v) in (list,set,frozenset): return type(v)(of(o, here) for o in v)
    return v

def same(a, b):
    "Tensors are the same if they are one"
    if isinstance(a, Tensor) or isinstance(b, Tensor): return a is b
    if type(a) is not type(b): return False
    if isinstance(a, dict): return len(a) == len(b) and all(any(same(k, q) and same(v, w) for q,w in b.items()) for k,v in a.items())
    if isinstance(a, (set,frozenset)): return len(a) == len(b) and all(any(same(k, q) for q in b) for k in a)
    if isinstance(a, (list,tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b

@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(value, st.sampled_from(['none', 'empty', 'alike']))
def test_put_back(v, there):
    before,after = known(),known()
    vs = Values(before)
    saved = through_file(vs.encode(of(v, before), 'v'))
    if vs.wrong: return                       # it is told
    old = dict(none=None, empty=type(of(v, after))() if isinstance(v, (list,dict,set)) else None, alike=of(v, after))[there]
    back = Values(after)
    new = back.decode(saved, old, 'v')
    assert same(new, of(v, after)) and not back.wrong

@pytest.mark.parametrize('keys,what', [([Color.red], 'Color'), ([(1, Mine())], 'tuple'), ([len], 'builtin'), ([Point(1, 2)], 'Point')])
def test_keys_that_cannot_come_back_are_told(keys, what):
    for o in (dict.fromkeys(keys, 1), {*keys}, frozenset(keys)):
        vs = Values()
        vs.encode([o], 'v')
        assert [*vs.wrong] == ['v[0]'] and re.search(f'a {what}.* in its keys cannot be saved', vs.wrong['v[0]'])

def test_names_of_keys_hold_no_values():
    "One tuple is the key of two dicts, and one list is in both; a number of numpy's comes back as Python's"
    before,after = known(),known()
    def made(here):
        key,held = (next(iter(here.values())),),[1]
        return [{key: [0]}, {key: held, np.int64(3): held}]
    vs = Values(before)
    back = Values(after).decode(through_file(vs.encode(made(before), 'v')), None, 'v')
    assert not vs.wrong and all('Parameter' not in str(path) for path,_ in vs.seen.values())
    p, = next(iter(back[0]))
    assert p is next(iter(after.values())) and back[1][(p,)] is back[1][3] and back[1][3] == [1]

class EMA(Callback):
    "Keyed by parameters, by modules, and by both"
    def __init__(self): self.mean,self.calls,self.both,self.order_of = {},{},{},{}
    def after_batch(self):
        if not self.training: return
        for m in self.model:
            self.calls[m] = self.calls.get(m, 0)+1
            for i,p in enumerate(m.parameters()):
                self.mean[p] = .9*self.mean.get(p, 0.)+.1*p.detach().clone()
                self.both[m,i,(p,)] = [self.mean[p]]
                self.order_of[p] = self.both[m,i,(p,)]        # one list in two places

def ema(stop=False, resume=True):
    CheckpointFolder.in_use.clear()
    set_seed(0)
    items = [(x, x.sum()[None].tanh()) for x in torch.randn(24, 4)]
    dl = DataLoader(items, bs=4, shuffle=True)
    learn = Learner(DataLoaders(dl, dl), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), MSELossFlat(), opt_func=SGD, path='.',
                    cbs=[EMA(), TrainingCheckpoint('whole' if not resume else 'run', every_steps=1)])
    def end(): raise KeyboardInterrupt
    if stop: learn.add_cb(On('batch_ended', lambda l: end() if l.train_iter == 5 else None, order=3000))
    with learn.no_logging(), learn.no_bar():
        try: learn.fit(2, .1)
        except KeyboardInterrupt: pass
    return learn

def test_a_dict_keyed_by_parameters(capsys):
    whole = ema(resume=False)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', 'Since the checkpoint, callbacks have changed')
        ema(stop=True)
        learn = ema()
    assert 'fit 1 continues in epoch 0, after' in capsys.readouterr().out
    for a,b in zip(whole.model, learn.model):
        assert learn.ema.calls[b] == whole.ema.calls[a] == 12
        for i,(p,q) in enumerate(zip(a.parameters(), b.parameters())):
            assert torch.equal(p, q) and torch.equal(whole.ema.mean[p], learn.ema.mean[q])
            assert torch.equal(learn.ema.both[b,i,(q,)][0], learn.ema.mean[q]) and learn.ema.order_of[q] is learn.ema.both[b,i,(q,)]
    assert len(learn.ema.mean) == len(whole.ema.mean) == len(learn.ema.both) == 4
