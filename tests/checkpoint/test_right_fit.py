"Which saved fit a fit continues; what may change between start and restart, and what not"
import linecache, os, subprocess, sys, textwrap, warnings
import fresh, pytest
import torch.utils.data as torch_data
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.tracker import EarlyStoppingCallback
from reference import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.core.functions import _parsed
from fastaccum.logs.steps import StepLogger
from quick import quickly


torch.manual_seed(0)
items = [(x, x.sum()[None].tanh()) for x in torch.randn(24, 4)]

def script(seed=0, fits=1, stop=None, fit=lambda l, **kw: l.fit(2, .1, **kw), **kwargs):
    learn = make(seed, **kwargs)
    with learn.no_logging(), learn.no_bar():
        for _ in range(fits): fit(learn, cbs=[Stop(stop)] if stop else [])
    return learn

class Stop(Callback):
    order,run_valid = 2000,False
    def __init__(self, at): self.at = at
    def batch_ended(self):
        if (self.learn.epoch,self.learn.iter) == self.at: raise RuntimeError('stopped')

def dl_of_fastai(**kwargs): return DataLoader(items, **{**dict(bs=4, shuffle=True), **kwargs})
def make(seed=0, cbs=(), act=nn.ReLU, dl=dl_of_fastai, loss=None, net=None, save={}, metrics=None, opt=SGD, valid={}):
    if seed is not None: set_seed(seed)
    learn = Learner(DataLoaders(dl(), dl_of_fastai(shuffle=False, **valid)),
                    (net or (lambda: nn.Sequential(nn.Linear(4, 4), act(), nn.Linear(4, 1))))(), loss or MSELossFlat(),
                    opt_func=opt, metrics=metrics, path='.',
                    cbs=[*cbs, TrainingCheckpoint(**{**dict(every_steps=1), **save})])
    return learn

@pytest.fixture(autouse=True)
def new_process():
    CheckpointFolder.in_use.clear()
    yield
    CheckpointFolder.in_use.clear()

@pytest.mark.slow
def test_loop_over_seeds(capsys):
    "Finished seeds are left out by the script: each seed finds its own fit"
    whole = [script(seed, save=dict(fname=f'w{seed}')) for seed in range(3)]
    CheckpointFolder.in_use.clear()
    script(0)
    with pytest.raises(RuntimeError): script(1, stop=(1, 2))
    CheckpointFolder.in_use.clear()
    again = script(1), script(2)                      # seed 0 is finished
    for a,b in zip(again, whole[1:]): assert torch.equal(weights(a.model), weights(b.model))
    out = capsys.readouterr().out
    assert 'fit 2 continues in epoch 1, after 3 of 6 batches' in out and 'another seed' not in out
    CheckpointFolder.in_use.clear()
    assert torch.equal(weights(script(2).model), weights(whole[2].model))     # the last one again
    assert 'fit 3 was finished' in capsys.readouterr().out

def test_same_seeds(capsys):
    "Two fits that begin alike are told apart by their order, or by their settings"
    def two(first=True):
        CheckpointFolder.in_use.clear()
        return [script(0, opt=opt) for opt in (SGD, partial(SGD, wd=.1))[0 if first else 1:]]
    one = two()
    assert all(torch.equal(weights(a.model), weights(b.model)) for a,b in zip(two(), one))
    assert torch.equal(weights(two(first=False)[0].model), weights(one[1].model))
    assert 'another seed' not in capsys.readouterr().out

@pytest.mark.parametrize('seed', [1, None])
def test_other_seed(seed, capsys):
    whole = script(save=dict(fname='whole'))
    with pytest.raises(RuntimeError): script(stop=(1, 2))
    CheckpointFolder.in_use.clear()
    capsys.readouterr()
    torch.manual_seed(17)
    again = script(seed)
    out = capsys.readouterr().out
    assert out.count('other initial weights than the saved run') == 1 and out.index('other initial') < out.index('continues in epoch')
    assert torch.equal(weights(again.model), weights(whole.model))

@pytest.mark.slow
def test_no_seed(tmp_path):
    "A script without any seed goes on, in processes of their own"
    code = textwrap.dedent("""
        import sys, random
        sys.path += %r
        from test_right_fit import *
        torch.seed()
        learn = script(None, fits=2, stop=(1, 2) if sys.argv[1] == 'stop' else None)
    """ % sys.path)
    runs = [fresh.run('-c', code, what, cwd=tmp_path) for what in ('stop', 'go')]
    assert 'stopped' in runs[0].stderr
    out = runs[1].stdout
    assert runs[1].returncode == 0 and 'fit 1 continues in epoch 1' in out and out.count('another seed, or none') == 1, runs[1].stderr

@pytest.mark.slow
def test_hash_seed():
    "The order of a set is another one in each process, also of one in the code of a lambda, and of one in a tuple there"
    code = """if 1:
        from fastaccum.checkpoint.fingerprint import setting
        values = [set('abcdefgh'), frozenset(map(str, range(100)))]
        print(setting(values), setting(lambda x: x in {'one', 'two', 'three'} or x in ({'four', 'five'}, 1)))
        print(*map(list, (*values, {'one', 'two', 'three'}, {'four', 'five'})), sep='\\n')"""
    (one,*orders),(other,*others) = (subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                                     env={**os.environ, 'PYTHONHASHSEED': seed}).stdout.splitlines() for seed in '01')
    assert one == other and len(orders) == 4 and all(a != b for a,b in zip(orders, others))

def test_the_same_learner_again(capsys):
    "It has trained since the fit began: no seed is to blame"
    learn = make(0, cbs=[Stop((1, 2))])
    with learn.no_logging(), learn.no_bar():
        with pytest.raises(RuntimeError, match='stopped'): learn.fit(2, .1)
        learn.remove_cbs(learn.cbs.filter(lambda cb: isinstance(cb, Stop)))
        with pytest.warns(UserWarning, match='Stop was removed'): learn.fit(2, .1)
    out = capsys.readouterr().out
    assert 'fit 1 continues in epoch 1' in out and 'another seed' not in out
    assert torch.equal(weights(learn.model), weights(script(0, save=dict(fname='whole')).model))

class Weighted(Module):
    def __init__(self, bounds, weight=1.): self.bounds,self.weight = bounds,weight
    def forward(self, out, targ): return self.weight*F.mse_loss(out, targ)

def test_a_refusal_names_the_entry_that_differs():
    a,b = (dict(loss=Weighted(dict(low=0, high=9), w)) for w in (1., .5))
    with pytest.raises(RuntimeError, match='stopped'): script(**a, stop=(0, 2))
    CheckpointFolder.in_use.clear()
    with pytest.raises(ValueError, match='loss.weight: 1.0 in the checkpoint, 0.5 now. Undo') as e: script(**b)
    assert 'low' not in str(e.value)

# --- what is another run
def clip(n): return dict(cbs=[GradientClip(n)])
def fits(name, *args, **kwargs): return dict(fit=lambda l, cbs: getattr(l, name)(2, *args, cbs=cbs, **kwargs))
class F1(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(4, 4),nn.Linear(4, 1)
    def forward(self, x): return self.b(F.relu(self.a(x)))
class F2(F1):
    def forward(self, x): return self.b(F.gelu(self.a(x)))
class F3(F1):
    "A comment, another name of a variable, a line that prints"
    def forward(self, inputs):
        assert isinstance(inputs, Tensor) and len(inputs.shape) == 2
        hidden = F.relu(self.a(inputs))     # as ever
        return self.b(hidden)
class F4(F1):
    def forward(self, x:Tensor) -> Tensor:
        "Types, a docstring, another order of two lines"
        b,a = self.b,self.a
        return b(F.relu(a(x)))
F2.__name__ = F3.__name__ = F4.__name__ = 'F1'
class Prints(Callback):
    "Looks at training, and changes nothing"
    def after_epoch(self): self.seen = float(self.learn.smooth_loss)
class Verbose(EarlyStoppingCallback): verbose = True
Verbose.__name__ = 'EarlyStoppingCallback'
k1,k2,other_name = .5,.7,.5

changed = dict(
    lr=(fits('fit', .003), fits('fit', .001), 'Fit 1: lr 0.003 in the checkpoint, 0.001 now. Undo'),
    wd=(fits('fit', .003, wd=.1), fits('fit', .003), 'Fit 1: wd 0.1 in the checkpoint, 0 now. Undo'),
    peak=(fits('fit_one_cycle', .003, pct_start=.275), fits('fit_one_cycle', .001, pct_start=.275),
          'Fit 1: lr 0.003 in the checkpoint, 0.001 now. Undo'),
    moms=(fits('fit_one_cycle', .003), fits('fit_one_cycle', .003, moms=(.95, .8, .95)),
          'Fit 1: mom 0.85 in the checkpoint, 0.8 now after 25% of the fit. Undo'),
    flat=(fits('fit_flat_cos', .003), fits('fit_flat_cos', .003, pct_start=.8),
          'Fit 1: lr .* in the checkpoint, .* now after 86% of the fit'),
    max_norm=(clip(1.), clip(2.), 'GradientClip.max_norm: 1.0 in the checkpoint, 2.0 now'),
    alpha=(dict(cbs=[MixUp(.2)]), dict(cbs=[MixUp(.4)]), 'MixUp.distrib'),
    activation=(dict(), dict(act=nn.GELU), "the model's 1: ReLU\\(\\) in the checkpoint, GELU"),
    in_forward=(dict(net=F1), dict(net=F2), "the model's forward: F1\\(relu\\) in the checkpoint, F1\\(gelu\\) now"),
    dropout=(dict(act=partial(nn.Dropout, .1)), dict(act=partial(nn.Dropout, .2)), "Dropout\\(p=0.1"),
    shuffle=(dict(), dict(dl=partial(dl_of_fastai, shuffle=False)), 'shuffle: True in the checkpoint, False now'),
    torch_shuffle=(dict(dl=lambda: torch_data.DataLoader(items, 4, shuffle=True)),
                   dict(dl=lambda: torch_data.DataLoader(items, 4)), 'shuffle: RandomSampler in the checkpoint'),
    lambda_=(dict(loss=lambda p, y: (p-y).square().mean()*k1), dict(loss=lambda p, y: (p-y).square().mean()*k2), 'loss'))

@pytest.mark.parametrize('case', quickly(['peak','moms','max_norm','activation'], changed))
def test_changed(case):
    a,b,words = changed[case]
    with pytest.raises(RuntimeError, match='stopped'): script(**a, stop=(0, 2))
    CheckpointFolder.in_use.clear()
    with pytest.raises(ValueError, match=words): script(**b)

# --- what is the same run
def lambda_a(p, y): return (p-y).square().mean()
same = dict(
    comment=(dict(net=F1), dict(net=F3)), workers=(dict(), dict(dl=partial(dl_of_fastai, num_workers=1))),
    logger=(dict(), dict(cbs=[CSVLogger()])), no_logger=(dict(cbs=[CSVLogger()]), dict()),
    steps=(dict(cbs=[StepLogger()]), dict()), progress=(dict(cbs=[ProgressCallback()]), dict()),
    every=(dict(), dict(save=dict(every_steps=None, every_minutes=5))), keep=(dict(), dict(save=dict(keep=4))),
    background=(dict(), dict(save=dict(background=True))), digest=(dict(), dict(save=dict(digest=True))),
    metric=(dict(), dict(metrics=mae)),
    patience=(dict(cbs=[EarlyStoppingCallback(patience=3)]), dict(cbs=[EarlyStoppingCallback(patience=5)])),
    renamed=(dict(loss=lambda p, y: (p-y).square().mean()), dict(loss=lambda pred, targ: (pred-targ).square().mean())),
    constant=(dict(loss=lambda p, y: (p-y).square().mean()*k1),
              dict(loss=lambda p, y: (p-y).square().mean()*other_name)),
    docs=(dict(cbs=[GradientClip(1.)]), dict(cbs=[GradientClip(max_norm=1.)])),
    pin=(dict(), dict(dl=partial(dl_of_fastai, pin_memory=False, timeout=0))),
    mixup=(dict(cbs=[MixUp(.4)]), dict(cbs=[MixUp(alpha=.4)])),
    partial=(dict(opt=partial(SGD, mom=.9)), dict(opt=partial(SGD, mom=9/10))),
    accumulation=(dict(cbs=[GradientAccumulation(8)]), dict(cbs=[GradientAccumulation(accum_bs=8)])),
    
    # annotations, a docstring, names of variables; another batch size in validation
    hints=(dict(net=F1), dict(net=F4)), prints=(dict(), dict(cbs=[Prints()])),
    verbose=(dict(cbs=[EarlyStoppingCallback()]), dict(cbs=[Verbose()])), valid_bs=(dict(), dict(valid=dict(bs=6))),
    name_of_metric=(dict(metrics=mae), dict(metrics=AvgMetric(mae))),
    lambda_docs=(dict(loss=lambda p, y: lambda_a(p, y)), dict(loss=lambda p, y: lambda_a(p, y))),
    two_loggers=(dict(cbs=[CSVLogger()]), dict(cbs=[StepLogger(), CSVLogger('other.csv')])),
    more_workers=(dict(dl=partial(dl_of_fastai, num_workers=1)), dict(dl=partial(dl_of_fastai, num_workers=2))),
    metric_renamed=(dict(metrics=[mae]), dict(metrics=[mae, mse])),
    positional=(dict(act=partial(nn.Dropout, .1)), dict(act=partial(nn.Dropout, p=.1))),
    in_place=(dict(net=F1), dict(net=F1, metrics=[mse])))

@pytest.mark.parametrize('case', quickly(['comment','workers'], same))
def test_same(case, capsys):
    a,b = same[case]
    with pytest.raises(RuntimeError, match='stopped'): script(**a, stop=(0, 2))
    CheckpointFolder.in_use.clear()
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', 'Since the checkpoint, callbacks have changed: Stop was removed(, Prints was added)?\\. ')
        warnings.filterwarnings('ignore', '.*torch.jit|.*pin_memory')
        learn = make(**b)
        with learn.no_bar(): learn.fit(2, .1)
    out = capsys.readouterr().out
    assert 'fit 1 continues in epoch 0, after' in out and 'another seed' not in out

# --- the code of the script
project = '''
import torch.nn.functional as F
from fastai.basics import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
scale = 1.
unread = 2.
stops = []
def helper(d): return d.square()
def my_loss(p, y): return scale*helper(p-y).mean()
class Net(Module):
    def __init__(self, k=1.): self.l,self.times = nn.Linear(4, 1),k
    def forward(self, x): return self.times*self.l(x)
class Decay(Callback):
    order = 2000
    def __init__(self, rate): self.kept,self.sum = rate,0.
    def after_batch(self):
        self.sum = self.kept*self.sum + float(self.loss)
        if self.learn.train_iter in stops: raise RuntimeError('stopped')
def shift(b): return b
class Noise(Transform):
    def encodes(self, x:Tensor): return x*1.
def run(at=None, rate=.9, k=1.):
    stops[:] = [at]
    set_seed(0)
    items = [(x, x.sum()[None].tanh()) for x in torch.randn(16, 4)]
    dl = DataLoader(items, bs=4, shuffle=True, after_batch=Pipeline([Noise(), shift]))
    learn = Learner(DataLoaders(dl, dl), Net(k), my_loss, opt_func=SGD, path='.', cbs=[Decay(rate), TrainingCheckpoint(every_steps=1)])
    with learn.no_logging(), learn.no_bar(): learn.fit(1, .1)
'''
edits = dict(
    loss=('helper(p-y).mean()', 'helper(p-y).sum()', ['my_loss']), helper=('d.square()', 'd.abs()', ['helper']),
    constant=('scale = 1.', 'scale = .5', ['scale` (1.0 then, 0.5 now)']), forward=('self.times*self.l', '2*self.times*self.l', ['Net']),
    event=('self.sum + float', 'self.sum - float', ['Decay']), transform=('return x*1.', 'return x*2.', ['Noise']),
    function=('return b', 'return tuple(b)', ['shift']), argument=('rate=.9', 'rate=.5', ['decay.kept` (0.9 then, 0.5 now)']),
    model=('k=1.):\n    stops', 'k=3.):\n    stops', ['the model.times` (1.0 then, 3.0 now)']),
    words=('def helper(d): return d.square()',
           '# squares\ndef helper(d:Tensor) -> Tensor:\n    "Of each"\n    return (d.square())   # here', []),
    unread=('unread = 2.', 'unread = 3.', []))

@pytest.mark.parametrize('case', quickly(['helper', 'argument', 'words'], edits))
def test_edited_script(case, monkeypatch, tmp_path):
    "Told once by name, and the run goes on; what does not act is not told"
    monkeypatch.syspath_prepend(str(tmp_path))
    # edited within a second, to the same length: Python would take the old bytecode
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    a,b,names = edits[case]
    assert project.count(a) == 1
    def run(text, **kwargs):
        CheckpointFolder.in_use.clear()
        _parsed.cache_clear()
        sys.modules.pop('project_of_mine', None)
        linecache.clearcache()
        Path('project_of_mine.py').write_text(text)
        import project_of_mine
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter('always')
            try: project_of_mine.run(**kwargs)
            except RuntimeError as e: assert str(e).endswith('stopped')
        return [str(x.message) for x in w if 'code of the run has changed' in str(x.message)]
    assert run(project, at=2) == []
    said = run(project.replace(a, b), at=3)
    assert len(said) == bool(names)
    for n in names: assert f'changed: `{n}`. ' in said[0] or f'changed: `{n}. ' in said[0], said
    assert run(project.replace(a, b)) == []
