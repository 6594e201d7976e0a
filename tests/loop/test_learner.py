"Importing fastaccum changes no Learner: what a callback needs stands on the Learner that it is attached to, and goes with it"
import os, pickle, sys
from copy import deepcopy
from pathlib import Path
import fresh
import pytest
from reference import *
from test_checkpoint import new_process, one_process
from reference import GradientAccumulation    # ours
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.logs.steps import StepLogger
from fastaccum.loop.learner import LearnerMethods, methods_of
from fastaccum.memory.activations import ActivationCheckpointing
from fastaccum.precision.callback import MixedPrecision

root = Path(__file__).resolve().parents[2]
torch.manual_seed(0)
x,y = torch.randn(48, 6),torch.randn(48, 4)
def make(*cbs, cls=Learner, bs=8, **kwargs):
    set_seed(0)
    dls = DataLoaders(DataLoader(Data(x, y), bs=bs, shuffle=True), DataLoader(Data(x[:12], y[:12]), bs=4), device='cpu')
    learn = cls(dls, mlp(), loss_func=MSELossFlat(), opt_func=partial(SGD, mom=0.), cbs=cbs, metrics=mae, **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def in_fresh_process(code, *args):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), str(Path(__file__).parent), str(root/'tests')]), OMP_NUM_THREADS='1')
    res = fresh.run('-c', code, *args, env=env, timeout=600)
    assert not res.returncode, res.stdout + res.stderr[-3000:]
    return res.stdout

# --- the class
imports = '''
import sys
from fastai.vision.all import *
from fastai.text.all import *
from fastai.tabular.all import *
from fastai.collab import *
from fastai.callback.all import *
import fastai.callback.fp16, fastai.callback.channelslast, fastai.distributed, fastai.callback.wandb
functions = {m: dict(vars(m)) for n,m in list(sys.modules.items()) if n.startswith('fastai.')}
classes = {c for names in functions.values() for c in names.values() if isinstance(c, type)}
theirs = {c: dict(vars(c)) for c in classes if c.__module__.startswith(('fastai.','fastcore.'))}
from fastaccum.all import *
import fastaccum.wandb
changed = {f'{c.__name__}.{k}' for c,was in theirs.items() for k,v in was.items() if vars(c).get(k) is not v and k not in ('__doc__',)}
new = {f'{c.__name__}.{k}' for c,was in theirs.items() for k in vars(c).keys() - was.keys()}
new = [name for name in sorted(new) if '_orig_' not in name]          # where `@patch` keeps what was there
print(sorted(changed), new, [f'{m.__name__}.{k}' for m,was in functions.items() for k,v in was.items() if vars(m).get(k) is not v])
'''
@pytest.mark.slow
def test_importing_changes_four_functions_of_fastai():
    "Of all its classes and modules"
    changed = ['Learner.to_bf16', 'Learner.to_channelslast', 'Learner.to_fp16', 'Learner.to_fp32']
    assert in_fresh_process(imports).strip() == f"{changed} ['Learner.how_exact', 'Learner.memory_advice', 'Learner.stepped'] []"

code = '''
import importlib, random, sys, warnings
warnings.simplefilter('ignore')
import torch; torch.set_num_threads(1)
from fastai.basics import *
from fastai.test_utils import synth_learner
import fastaccum.all
order = {order!r}
def losses(*cbs):
    set_seed(0, reproducible=True)
    learn = synth_learner(n_trn=4, cbs=cbs, path=Path({tmp!r}))
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    learn.save('m'); learn.load('m')
    with learn.no_bar(): learn.validate()
    return [float(l) for l in learn.recorder.losses],[p.detach().clone() for p in learn.model.parameters()]
def same(a, b): return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))
plain,ours = losses(),losses(fastaccum.all.GradientAccumulation(32))
old = fastaccum.all.GradientAccumulation(32)
for _ in range(2):
    names = sorted(n for n in sys.modules if n.split('.')[0] == 'fastaccum')
    if order == 'reversed': names.reverse()
    if order == 'shuffled': random.Random(1).shuffle(names)
    for n in names: importlib.reload(sys.modules[n])
    assert same(losses(), plain)
    assert same(losses(importlib.import_module('fastaccum.all').GradientAccumulation(32)), ours)
assert same(losses(old), ours)      # one from before
class Own(Learner):
    def _do_one_batch(self): super()._do_one_batch()
learn = Own(synth_learner().dls, nn.Linear(1, 1), loss_func=F.mse_loss).to_fp16()
assert type(learn.mixed_precision).__module__ == 'fastai.callback.fp16'
print('trained')
'''

@pytest.mark.slow
@pytest.mark.parametrize('order', ['sorted','reversed','shuffled'])
def test_loaded_again(order, tmp_path):
    "Twice: a plain Learner and one with accumulation train as before, also with a callback that is older than the modules"
    assert in_fresh_process(code.format(order=order, tmp=str(tmp_path))).split() == ['trained']

# --- what stands on a Learner, and for how long
def ours_on(learn):
    "Names of the attributes that are fastaccum's, but of the callbacks (fastai's precision has a `scaler`, too)"
    def is_ours(f): return any(type(o).__module__.startswith('fastaccum.') for o in (f, getattr(f, '__self__', None)))
    return {k for k,f in vars(learn).items() if k not in ['scaler', *(cb.name for cb in learn.cbs)] and is_ours(f)}

every = {'of_fastaccum', *LearnerMethods.names}
kinds = dict(accumulation=(lambda: GradientAccumulation(16), every | {'one_batch','to_distributed'}),
             precision=(lambda: MixedPrecision('bf16'), every | {'one_batch'}),
             logger=(StepLogger, every | {'one_batch'}), checkpoint=(TrainingCheckpoint, every | {'one_batch'}),
             memory=(lambda: ActivationCheckpointing(lambda m: isinstance(m, nn.Linear)), every))

class Sees(Callback):
    "What is there at each epoch's beginning"
    def before_epoch(self): self.seen = ours_on(self.learn)

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('how', ['add_cb', 'Learner', 'fit', 'class', 'validate', 'get_preds', 'added_cbs', 'error'])
def test_it_comes_and_goes_with_the_callback(kind, how):
    make_cb,names = kinds[kind]
    cb,sees = make_cb(),Sees()
    learn = make(cb) if how == 'Learner' else make()
    learn.add_cb(sees)
    learn.create_opt()
    before = {*vars(learn)} - {cb.name}
    assert ours_on(learn) == (names if how == 'Learner' else set())
    if how == 'add_cb': learn.add_cb(cb)
    if how == 'fit': learn.fit(1, cbs=cb)
    if how == 'class':
        if kind == 'memory': pytest.skip('needs an argument')
        learn.fit(1, cbs=type(cb))
    if how == 'validate': learn.validate(cbs=[cb])
    if how == 'get_preds': learn.get_preds(cbs=cb)
    if how == 'added_cbs':
        with learn.added_cbs([cb]): learn.fit(1)
    if how == 'error':
        with pytest.raises(ValueError): learn.fit(1, cbs=[cb, Fails()])
    if how in ('add_cb', 'Learner'):
        learn.fit(1)
        learn.remove_cb(cb)
    assert sees.seen == names and ours_on(learn) == set()
    assert methods_of(learn) is None and learn.one_batch.__func__ is Learner.one_batch
    assert {*vars(learn)} - before <= {*of_fits}

of_fits = L.split('epoch iter n_iter n_epoch train_iter pct_train xb yb pred loss loss_grad smooth_loss final_record dl')

class Fails(Callback):
    def after_batch(self): raise ValueError('stop')

def test_the_last_one_takes_it_away():
    a,b,m = GradientAccumulation(16),StepLogger(),kinds['memory'][0]()
    learn = make(a, b, m)
    loop = learn.one_batch
    learn.remove_cb(a)
    assert learn.one_batch is loop and ours_on(learn) == every | {'one_batch'}
    learn.remove_cb(b)
    assert ours_on(learn) == every
    learn.remove_cb(m)
    assert not ours_on(learn)

def test_two_that_put_the_same():
    "The first goes: that of the second stays"
    a,b = GradientAccumulation(16),GradientAccumulation(24)
    learn = make(a, b)
    learn.remove_cb(a)
    assert learn.to_distributed.__self__ is b
    learn.add_cb(a)
    learn.remove_cb(a)
    assert learn.to_distributed.__self__ is b
    learn.remove_cb(b)
    assert not ours_on(learn)

def test_own_attributes_are_called_and_come_back():
    calls = []
    learn = make()
    mine = lambda *args, **kwargs: calls.append('validates')
    learn._do_epoch_validate = mine
    learn.add_cb(acc := GradientAccumulation(16))
    learn.fit(2)
    assert calls == ['validates']*2 and ours_on(learn) >= every
    other = lambda *args, **kwargs: calls.append('exports')
    learn.export = other                              # since then
    learn.remove_cb(acc)
    assert learn._do_epoch_validate is mine and learn.export is other and not ours_on(learn)

def test_removed_in_the_middle_of_a_fit():
    "The rest of the fit is fastai's"
    class Leaves(Callback):
        order = 2000
        def after_batch(self):
            if self.training and self.learn.train_iter == 3: self.learn.remove_cb(acc)
    acc = GradientAccumulation(24)
    learn = make(acc, Leaves())
    learn.fit(2)
    assert not ours_on(learn) and len(learn.recorder.losses) == 1 + 3 + 6

def test_a_fit_inside_a_fit():
    "Of the same Learner, with a callback of its own"
    class Inner(Callback):
        def after_epoch(self):
            if self.done or self.learn.epoch: return
            self.done = True
            self.learn.fit(1, cbs=StepLogger())
        done = False
    learn = make(Inner())
    learn.fit(2)
    assert not ours_on(learn)

# --- copies and files
@pytest.mark.parametrize('kind', kinds)
def test_copies(kind):
    "A copy is on its own, and loses it as the Learner does"
    learn = make(kinds[kind][0]())
    learn.fit(1)
    cb = learn.cbs[-1]
    for copy in (deepcopy(learn), pickle.loads(pickle.dumps(learn))) if kind != 'memory' else [deepcopy(learn)]:
        assert ours_on(copy) == ours_on(learn) and methods_of(copy) is not methods_of(learn)
        for k in ours_on(copy):
            owner = vars(copy)[k] if k in ('of_fastaccum','one_batch') else vars(copy)[k].__self__
            assert owner.learn is copy
        before = weights(learn.model)
        copy.fit(1)
        assert torch.equal(weights(learn.model), before) and not torch.equal(weights(copy.model), before)
        copy.remove_cb(copy.cbs[-1])
        assert not ours_on(copy) and ours_on(learn)
    assert learn.cbs[-1] is cb

class Pickles(Callback):
    "A copy, made in the middle of a fit"
    run_valid = False
    def after_batch(self):
        if self.learn.train_iter == 2: self.bytes = pickle.dumps(self.learn)

def test_pickled_during_a_fit():
    learn = make(GradientAccumulation(16), Pickles())
    learn.fit(1, cbs=StepLogger())
    copy = pickle.loads(learn.pickles.bytes)
    assert ours_on(copy) >= every and [cb.name for cb in copy.cbs][-1] == 'step_logger'
    copy.remove_cb(copy.step_logger)
    copy.remove_cb(copy.pickles)
    copy.fit(1)
    copy.remove_cb(copy.gradient_accumulation)
    assert not ours_on(copy)

loads = '''
import sys, warnings
from importlib.abc import MetaPathFinder
class Gone(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition('.')[0] == 'fastaccum': raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
from fastai.learner import load_learner
learn = load_learner(sys.argv[1])
import torch
print([type(cb).__name__ for cb in learn.cbs], [k for k in vars(learn) if 'fastaccum' in k or callable(vars(learn)[k]) and k[0] == '_'])
print(learn.model(torch.ones(1, 6)).shape)
'''
def test_exported_for_where_fastaccum_is_not_installed(tmp_path):
    from fastai.tabular.all import TabularDataLoaders, tabular_learner, Normalize
    import pandas as pd
    df = pd.DataFrame(x.numpy(), columns=list('abcdef')).assign(y=y[:,0].numpy())
    dls = TabularDataLoaders.from_df(df, procs=[Normalize], cont_names=list('abcdef'), y_names='y', bs=8)
    learn = tabular_learner(dls, layers=[4], cbs=[GradientAccumulation(16), StepLogger()], path=tmp_path).to_bf16()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=TrainingCheckpoint())
    names = ours_on(learn)
    learn.export()
    assert names >= every and ours_on(learn) == names
    out = in_fresh_process(loads.replace('learn.model(torch.ones(1, 6)).shape', "type(learn).__name__"), str(tmp_path/'export.pkl'))
    assert "'GradientAccumulation'" not in out and "'TrainEvalCallback'" in out and '[]' in out and 'TabularLearner' in out

# --- TrainingCheckpoint, given to `fit`
class Interrupt(Callback):
    order,run_valid,in_checkpoint = 2000,False,False
    def __init__(self, at): self.at = at
    def after_batch(self):
        if self.learn.train_iter == self.at: raise KeyboardInterrupt

@pytest.mark.parametrize('given', ['to fit', 'to fit_one_cycle', 'before'])
@pytest.mark.parametrize('acc', [False, True])
def test_checkpoint_of_a_plain_learner(given, acc):
    "Interrupted, and resumed by a new process: the weights of a run in one go. What is finished is not trained again"
    cbs = lambda: [TrainingCheckpoint(every_steps=1), *([GradientAccumulation(16)] if acc else [])]
    def run(at=None, checkpoint=True):
        before = cbs() if given == 'before' and checkpoint else [GradientAccumulation(16)] if acc and given == 'before' else []
        learn = make(*before, Interrupt(at))
        own = [] if given == 'before' else cbs()[not checkpoint:]
        for n in (2, 1):
            if given == 'to fit_one_cycle': learn.fit_one_cycle(n, .1, cbs=own)
            else: learn.fit(n, .1, cbs=own)
        return learn
    whole = run(checkpoint=False)
    for at in (5, 9):
        with pytest.raises(KeyboardInterrupt): run(at)
        new_process()
    learn = run()
    assert torch.equal(weights(learn.model), weights(whole.model)) and learn.recorder.losses == whole.recorder.losses
    new_process()
    trained = run(1)                                  # a batch that nobody trains
    assert torch.equal(weights(trained.model), weights(whole.model))
