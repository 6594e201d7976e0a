"Changed values in a checkpoint whose digest is right: each is refused with one clear error, and nothing is loaded; or it is harmless"
import os, random, shutil, traceback, warnings
from collections import Counter
import pytest
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from reference import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.files import read_checkpoint, write_checkpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.logs.steps import StepLogger

torch.manual_seed(0)
items = [(x, x.sum()[None].tanh()) for x in torch.randn(24, 4)]

class Stop(Callback):
    order,run_valid = 2000,False
    def batch_ended(self):
        if (self.learn.epoch,self.learn.iter) == (1, 3): raise RuntimeError('stopped')

class Counts(Callback):
    "A user's: numbers, texts, lists, a tensor, an object, a generator"
    order = 70
    def __init__(self):
        self.n,self.total,self.words,self.seen,self.by_name,self.mean,self.rng = (
            0,0.,'a',[],{},torch.zeros(4),random.Random(3))
    def after_batch(self):
        self.n,self.total = self.n+1,self.total+self.rng.random()
        self.seen.append(self.n)
        self.by_name['n'] = self.by_name.get('n', 0)+1
        self.mean.add_(self.learn.xb[0].mean(0))
        self.words.upper()

class Loss(nn.Module):
    def __init__(self): super().__init__(); self.calls = 0; self.register_buffer('scale', torch.ones(1))
    def forward(self, p, y): self.calls += 1; return ((p-y)*self.scale).square().mean()

def make_learn(opt=Adam):
    CheckpointFolder.in_use.clear()
    Path('run').mkdir(exist_ok=True)
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(.1), nn.Linear(4, 1))
    learn = Learner(DataLoaders(*[DataLoader(items, bs=4, shuffle=s) for s in (True, False)]), model, Loss(),
                    opt_func=opt, path='run', metrics=[mae],
                    cbs=[CSVLogger(), SaveModelCallback(), EarlyStoppingCallback(patience=9),
                         ReduceLROnPlateau(patience=9), MixUp(.4), Counts(), GradientAccumulation(8), StepLogger(),
                         TrainingCheckpoint(every_steps=1)])
    learn.remove_cb(ProgressCallback)
    return learn

def fit(learn, *cbs):
    with learn.no_bar(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(3, .01, cbs=list(cbs))
    return learn

def types_of(learn):
    held = dict(learn=learn, opt=learn.opt, model=learn.model, loss=learn.loss_func,
                **{cb.name: cb for cb in learn.cbs if not isinstance(cb, TrainingCheckpoint)})
    return {f'{name}.{k}': type(v).__name__ for name,o in held.items() for k,v in vars(o).items()}

@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    "A folder in the middle of a fit, one at its end, for two optimizers; what the fit is without a change"
    was,res = os.getcwd(),{}
    for opt in (Adam, torch_adam):
        for where in ('middle', 'end'):
            os.chdir(tmp_path_factory.mktemp('saved'))
            try: fit(make_learn(opt), *([Stop()] if where == 'middle' else []))
            except RuntimeError: pass
            for f in CheckpointFolder.in_use.values(): f.wait()
            folder = Path('run').absolute()
            shutil.copytree(folder, folder.with_name('kept'))
            file = sorted(folder.rglob('*.pt'))[-1]
            again = fit(make_learn(opt))
            res[opt,where] = (folder.with_name('kept'),file.relative_to(folder),
                              read_checkpoint(folder.with_name('kept')/file.relative_to(folder)),types_of(again))
    os.chdir(was)
    return res

def torch_adam(params, lr, **kwargs): return OptimWrapper(params, torch.optim.AdamW, lr=lr)

# --- changes
victim = '../victim.csv'
strange = [None, True, 7, -1, 10**18, -10**18, .5, float('nan'), float('inf'), 'x', '', victim, [], {}, (), [1, 'a'],
           dict(a=1), {1: 2}, tensor(1.), tensor([1, 2]), torch.zeros(3, 4, 5), torch.full((4,), float('nan')),
           ('known', 'learn', None), ('known', 'model', None), ('same', None, 'learn'), ('kept', None, None),
           ('object', 'Learner', dict(path=7)), ('dtype', 'dtype', ['torch.save']), ('path', 'PosixPath', [victim]),
           ('list', 'list', 7), ('dict', 'dict', [[[]], [1]]), ('range', 'range', [0, 'x', 1]),
           ('array', 'ndarray', ['<f4', [2], 3]), ('module', 'Sequential', []), ('x', 'x', 'x'),
           ('view', '0.weight', [0, [10**9], [1]]),
           ('enum', 'int', 'a'), ('generator', 'Random', 3), ('namedtuple', 'int', [1]), ('state', 'Adam', 1), ('bytes', 'bytes', [1])]

def places(o, rand):
    "A way to a random value in a nested structure: each level as probable as the others"
    way = []
    while True:
        inside = list(o) if isinstance(o, dict) else range(len(o)) if isinstance(o, (list,tuple)) else ()
        if not len(inside) or way and rand.random() < .2: return way
        k = rand.choice(list(inside))
        way.append(k)
        o = o[k]

def at(o, way):
    for k in way: o = o[k]
    return o

def put(o, way, v):
    if not way: return v
    k,*rest = way
    if isinstance(o, tuple): return tuple(put(x, rest, v) if i == k else x for i,x in enumerate(o))
    new = copy(o)
    new[k] = put(o[k], rest, v)
    return new

def changes(v, rand):
    "Name of a change -> the changed value"
    res = dict(other=rand.choice(strange), nested=rand.choice([[v], (v,), dict(x=v), ('tuple', 'tuple', [v])]))
    if isinstance(v, Tensor):
        res.update(shape=rand.choice([v[None], v.flatten()[:1].clone(), torch.cat([v.flatten(), v.flatten()])]),
                   dtype=v.to(rand.choice([torch.float64, torch.int32, torch.bool, torch.complex64])),
                   values=torch.full_like(v, -7 if v.dtype != torch.uint8 else 255),
                   negative=-v if v.dtype not in (torch.uint8, torch.bool) else ~v)
        if v.is_floating_point(): res['nan'] = torch.full_like(v, float('nan'))
    elif isinstance(v, bool): res['other bool'] = not v
    elif isinstance(v, (int,float)):
        res.update(huge=v+10**12, negative=-v-1, as_text=str(v), as_tensor=tensor(v),
                   type=float(v) if isinstance(v, int) else 3)
    elif isinstance(v, str): res.update(longer=v+'x', path=victim, number=len(v))
    elif isinstance(v, dict) and v:
        k = rand.choice(list(v))
        res.update(missing=type(v)((a, b) for a,b in v.items() if a != k),
                   extra=type(v)({**v, 'extra': rand.choice(strange)}), order=type(v)(reversed(v.items())),
                   number_as_key=type(v)({**v, 7: 7}),
                   renamed=type(v)((f'{a}x' if a == k else a, b) for a,b in v.items()),
                   path=type(v)({**v, 'fname': victim, 'path': victim, 'model_dir': victim, 'learn': 7, '__class__': 7,
                                 'after_batch': 7}))
    elif isinstance(v, (list,tuple)) and v: res.update(missing=v[:-1], extra=v+type(v)([rand.choice(strange)]), order=v[::-1], twice=v+v)
    return res

def has_stepped(opt):
    states = opt.state_dict()['state']
    return any({*s} & {'grad_avg', 'exp_avg'} for s in (states.values() if isinstance(states, dict) else states))

def outcome(case, saved, folder):
    "`refused`, `harmless`, or what is wrong"
    rand = random.Random(case)
    key = rand.choice([k for k in saved for _ in range(3 if k[1] == 'middle' else 1)])
    kept,file,state,types = saved[key]
    way = places(state, rand)
    while way[:1] == ['file']: way = places(state, rand)          # the mark: without it, it is no checkpoint
    was = at(state, way)
    options = changes(was, rand)
    kind = rand.choice(list(options))
    what = f'{key[0].__name__} {key[1]} {way} {kind}: {options[kind]!r:.150}'
    (folder/'victim.csv').write_text('mine')
    shutil.copytree(kept, folder/'run')
    for f in (folder/'run').rglob('*.pt'):
        if f.name != file.name and 'models/checkpoint' in f.as_posix(): f.unlink()
    write_checkpoint(put(state, way, options[kind]), folder/'run'/file)
    before = {f.name for f in folder.rglob('*') if '/run/models/checkpoint' not in f.as_posix()}
    learn = make_learn(key[0])
    initial = weights(learn.model).clone()
    path = learn.path
    try: fit(learn)
    except ValueError as e:
        text = str(e)
        if not ('has a checkpoint of fit' in text or 'has checkpoints of another training run' in text
                or 'The data were replaced' in text):
            return f'{what}: ValueError {text}\n{traceback.format_exc()[-900:]}'
        counts = learn.cbs[L(learn.cbs).map(type).index(Counts)]
        same = (torch.equal(weights(learn.model), initial) and not has_stepped(learn.opt)
                and (counts.n,counts.words,len(counts.seen)) == (0,'a',0)
                and learn.save_model.best in (None, float('inf')))
        res = 'refused' if same else f'{what}: refused, but loaded'
    except Exception as e: return f'{what}: {type(e).__name__} {e}\n{traceback.format_exc()[-900:]}'
    else: res = 'harmless'
    if (folder/'victim.csv').read_text() != 'mine' or {f.name for f in folder.iterdir()} != {'victim.csv', 'run'}: return f'{what}: files'
    if learn.path != path or str(learn.csv_logger.fname) != 'history.csv': return f'{what}: paths'
    if res == 'harmless':
        other = {k: (t, types[k]) for k,t in types_of(learn).items() if k in types and types[k] != t
                 and not {t, types[k]} <= {'int', 'float', 'Tensor', 'TensorBase', 'NoneType'}}
        if other: return f'{what}: types {other}'
    return res

@pytest.mark.slow
@pytest.mark.parametrize('part', range(5))
def test_changed_values(part, saved, capsys, monkeypatch, tmp_path):
    case = tmp_path/'case'
    case.mkdir()
    monkeypatch.chdir(case)
    res,wrong = Counter(),[]
    for i in range(20) if part == 0 else range(30*part, 30*(part+1)):
        for f in case.iterdir(): shutil.rmtree(f) if f.is_dir() else f.unlink()
        o = outcome(i, saved, case)
        res[o if o in ('refused', 'harmless') else 'wrong'] += 1
        if o not in ('refused', 'harmless'): wrong.append(o)
    print(dict(res))
    assert not wrong, f'{len(wrong)} of {sum(res.values())}\n' + '\n'.join(wrong)
