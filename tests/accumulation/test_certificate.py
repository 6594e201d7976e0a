"With exact=True some steps are computed a second time: the fit goes on as if they were not, and a record says how far apart they are"
import pytest
from contextlib import suppress
from reference import *
from test_exact_runs import ActivationCheckpointing, CutMix, Images, MixUp, cases, ce, img, in_double, net, run, same_run, seq, vec
from fastaccum.accumulation.witnesses import recomputed
from fastaccum.core.warnings import FastaccumWarning
from fastaccum.all import MixedPrecision, StepLogger, TrainingCheckpoint

@pytest.fixture
def each_step(monkeypatch):
    "Compute each step twice"
    def begin_step(self):
        self.n += 1
        self.off = None
        return True
    monkeypatch.setattr(recomputed.Recomputations, 'begin_step', begin_step)

def certificate(learn): return learn.gradient_accumulation.certificate

@pytest.mark.filterwarnings('ignore:.*changes nothing here')
@pytest.mark.parametrize('name', cases)
def test_no_trace(name, each_step):
    "To the bit, whatever the model draws, normalizes or compares"
    learn,once = run(name, 7, StepLogger()),run(name, 7)
    same_run(learn, once, 0.)
    found = certificate(learn)
    assert found['computed_twice'] == found['steps'] == 6 and found['largest'] < 1e-9
    assert certificate(once)['computed_twice'] == 0

mixed = lambda: nn.Sequential(Images(nn.Dropout2d(.3), nn.Dropout(.2))),img,CrossEntropyLossFlat()

beside = dict(mixup=lambda: MixUp(.4), cutmix=CutMix, clipping=lambda: GradientClip(.1), bf16=lambda: MixedPrecision('bf16'),
              fp16=lambda: MixedPrecision('fp16', init_scale=2.**8),
              recomputation=lambda: ActivationCheckpointing(nn.TransformerEncoderLayer))

@pytest.mark.parametrize('make', beside.values(), ids=beside)
def test_beside(make, each_step):
    kind = type(make())
    case = 'transformer' if kind is ActivationCheckpointing else mixed if kind in (MixUp, CutMix) else 'dropout'
    learn,once = (run(case, 7, make(), *more, dtype=torch.float32) for more in ([StepLogger()], []))
    same_run(learn, once, 0.)
    assert certificate(learn)['computed_twice'] == 6 and certificate(learn)['largest'] < (.02 if kind is MixedPrecision else 1e-5)

def test_overflow(each_step):
    "A step whose gradient is not finite is not compared"
    learn = run('dropout', 7, MixedPrecision('fp16', init_scale=2.**60, max_scale=2.**60), StepLogger(), dtype=torch.float32)
    found = certificate(learn)
    assert found['computed_twice'] < found['steps'] == 6 and 'not finite' in found['why_not']

def test_resumed(tmp_path, each_step):
    "A process that goes on has the figures of the one before"
    def saved(name, *cbs):
        def fit(l):
            with suppress(KeyboardInterrupt): l.fit(2, .05)
        return run('dropout', 7, TrainingCheckpoint(every_steps=1), *cbs, fit=fit, path=tmp_path/name)
    whole = saved('a')
    saved('b', Stop('after_batch', KeyboardInterrupt, [(1, 1)]))
    learn = saved('b')
    assert certificate(learn) == certificate(whole) and certificate(learn)['computed_twice'] == 6
    assert torch.equal(weights(learn.model), weights(whole.model))

def test_about_one_in_150():
    "The third step, and then at random, the same in each run"
    def chosen():
        found = recomputed.Recomputations()
        return [i for i in range(1, 5001) if found.begin_step() and not found.add(0., 1.)]
    steps = chosen()
    gaps = [b-a for a,b in zip(steps, steps[1:])]
    assert steps == chosen() and steps[0] == 3 and 28 < len(steps) < 40
    assert 75 <= min(gaps) and max(gaps) <= 225 and len(set(gaps)) > len(gaps)/2

def test_calls():
    "Where somebody listens by a hook, nothing is computed twice"
    def calls(*cbs):
        n = 0
        def count(*_): nonlocal n; n += 1
        def fit(l):
            handle = l.model[0].register_forward_hook(count)
            l.fit(2, .05)
            handle.remove()
        run('no draws', 7, *cbs, fit=fit)
        return n
    assert calls() == calls(StepLogger()) > 0

@pytest.mark.slow
def test_weights_and_biases(each_step, tmp_path, monkeypatch):
    "In the rows of the steps, and in the run's summary"
    wandb = pytest.importorskip('wandb')
    from fastaccum.wandb import WandbCallback
    monkeypatch.chdir(tmp_path)
    wb = wandb.init(project='test', mode='offline', dir=str(tmp_path), settings=wandb.Settings(silent=True, console='off'))
    rows,log = [],wandb.run.log
    monkeypatch.setattr(wandb, 'log', lambda row, *args, **kwargs: (rows.append(dict(row)), log(row, *args, **kwargs)))
    found = certificate(run('dropout', 7, WandbCallback(log_preds=False)))
    summary = dict(wb.summary)
    wb.finish()
    assert found['computed_twice'] == 6 and {k: summary[f'certificate_{k}'] for k in found} == found
    assert [r['grad_off'] for r in rows if 'grad_off' in r] and max(r.get('grad_off', 0) for r in rows) == found['largest']

# -- what a pass changes is put back; what cannot be put back is not computed twice
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.m,self.seen,self.n = nn.Linear(12, 4),[],0
    def forward(self, x):
        self.seen.append(len(x))
        self.n += 1
        return self.m(x)*(1 + .01*self.n*self.training)

class Teacher(nn.Module):
    "Weights that each pass moves"
    def __init__(self):
        super().__init__()
        self.m,self.t = nn.Linear(12, 4),nn.Linear(12, 4).requires_grad_(False)
    def forward(self, x):
        with torch.no_grad(): self.t.weight.lerp_(self.m.weight, .01)
        return self.m(x) + .1*self.t(x)

class Many(nn.Module):
    "It holds more than can be looked through"
    def __init__(self):
        super().__init__()
        self.m,self.words,self.n = nn.Linear(12, 4),{i: (i, [i]) for i in range(30_000)},[[[0]]]
    def forward(self, x):
        self.n[0][0][0] += 1
        return self.m(x)

class Centre(nn.Module):
    "A loss that remembers"
    def __init__(self): super().__init__(); self.register_buffer('c', torch.zeros(4, dtype=torch.float64)); self.calls = 0
    def forward(self, p, y):
        loss = F.cross_entropy(p - self.c.to(p.dtype), y)*(1 + .1*self.calls)
        self.c,self.calls = .9*self.c + .1*p.detach().double().mean(0),self.calls+1
        return loss

class Temperature(nn.Module):
    "A loss that learns"
    def __init__(self): super().__init__(); self.t = nn.Parameter(torch.ones((), dtype=torch.float64))
    def forward(self, p, y): return F.cross_entropy(p*self.t, y)

class OwnDraws:
    def __init__(self): self.g = torch.Generator().manual_seed(3)
    def __call__(self, p, y): return F.cross_entropy(p + .1*torch.randn(p.shape, generator=self.g, dtype=p.dtype), y)

def state(learn):
    mine = {k: v for k,v in vars(learn.model).items() if k in ('seen','n')}
    held = learn.loss_func
    return repr(mine),[*getattr(held, 'state_dict', dict)().values()],getattr(held, 'calls', None)

@pytest.mark.filterwarnings('ignore::fastaccum.core.warnings.FastaccumWarning')
@pytest.mark.parametrize('make,loss,twice', [(Counted, ce, True), (Teacher, ce, False), (Many, ce, False), (net, Centre, True),
                                             (net, Temperature, True), (net, OwnDraws, True)])
def test_state(make, loss, twice, each_step):
    learn,once = (run((make, vec, loss()), 7, *more) for more in ([StepLogger()], []))
    same_run(learn, once, 0.)
    assert repr(state(learn))==repr(state(once))
    found = certificate(learn)
    assert found['computed_twice'] == 6*twice and ('why_not' in found) == (not twice)
    if twice and make is not Counted: assert found['largest'] < 1e-9          # of those the passes are counted

def test_sparse_gradients(each_step):
    def make(): return nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(48, 4))
    def fit(l):
        l.opt_func = SGD
        l.fit(2, .05)
    learn,once = (run((make, None, ce()), 7, *more, fit=fit) for more in ([StepLogger()], []))
    assert torch.equal(weights(learn.model), weights(once.model)) and certificate(learn)['why_not'] == 'gradients are sparse'

def test_out_of_memory(each_step, monkeypatch):
    "A step that begins again is computed twice as it was computed at last"
    seen = []
    distance = recomputed.distance
    def noted(cb, start, leave):
        seen.append((start.way.size, start.half))
        return distance(cb, start, leave)
    monkeypatch.setattr(recomputed, 'distance', noted)
    class TakesFew(nn.Module):
        def __init__(self): super().__init__(); self.m = nn.Linear(12, 4)
        def forward(self, x):
            if self.training and len(x) > 6: raise torch.OutOfMemoryError('CUDA out of memory. planted')
            return self.m(x)
    found = certificate(run((TakesFew, vec, ce()), 'auto', StepLogger()))
    assert seen == [(5, 3)]*6 and found['computed_twice'] == 6 and found['largest'] < 1e-9

@pytest.mark.slow
def test_a_gradient_near_zero(each_step):
    "Rounding is all that is left of it: no warning"
    def fit(l):
        l.dls.train = l.dls.valid                        # the same 20 items in each step
        l.opt_func = SGD
        l.fit(150, 1.)
    learn = run((lambda: nn.Linear(12, 4), vec, ce()), 7, StepLogger(), fit=fit, dtype=torch.float32)
    assert certificate(learn)['computed_twice'] > 100

def test_turns_are_not_used_up():
    "A step in one micro-batch has nothing to compare: the next one is"
    found = certificate(run('no draws', 12, StepLogger(), fit=lambda l: l.fit(1, .05)))       # of 20, 20 and 10 items
    assert found['computed_twice'] == 0
    learn = run('no draws', 12, StepLogger())
    assert learn.step_logger.to_df().grad_off.notna().tolist() == [False]*3 + [True] + [False]*2

# -- told
class Centred(nn.Module):
    def forward(self, h): return h - h.mean(0)

def test_items_that_see_each_other():
    with pytest.warns(FastaccumWarning, match='a step of 10 items was computed a second time.*[0-9.]+% off') as told:
        learn = run((lambda: net(Centred(), nn.ReLU()), vec, ce()), 7, StepLogger())
    assert len([w for w in told if 'second time' in str(w.message)]) == 1
    off = learn.step_logger.to_df().grad_off.dropna()
    assert off.max() == certificate(learn)['largest'] > .01
    assert f'1 of 6 steps computed twice, at most {off.max():.0e} apart' in learn.gradient_accumulation.loss_rule

class Penalty(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + .1*self.learn.pred.square().mean()

def hooked(l):
    for p in l.model.parameters(): p.register_hook(lambda g: g)
    l.fit(2, .05)

@pytest.mark.parametrize('cbs,kwargs,why', [
    ([Penalty()], {}, 'Penalty would hear of each micro-batch twice'), ([], dict(fit=hooked), 'hooks would see'),
    ([], dict(acc=dict(grad_device='cpu')), 'gradients stay on the host')])
def test_why_not(cbs, kwargs, why):
    found = certificate(run('no draws', 7, StepLogger(), *cbs, **kwargs))
    assert found['computed_twice'] == 0 and why in found['why_not']

def test_micro_batches_of_one(): assert 'one item' in certificate(run('no draws', 1, StepLogger()))['why_not']

class Fails(nn.Module):
    def __init__(self): super().__init__(); self.m = nn.Linear(12, 4)
    def forward(self, x):
        if self.training and len(x) == 4: raise AssertionError('not four')
        return self.m(x)

def test_errors_of_the_model():
    "The fit goes on, and the record says why"
    case = (Fails, vec, ce())
    learn = run(case, 7, StepLogger())
    same_run(learn, run(case, 7), 0.)
    assert certificate(learn)['why_not'] == 'AssertionError: not four'

def test_anew():
    "Each fit has its own; a validation has none"
    learn = run('dropout', 7, StepLogger())
    before = certificate(learn)
    learn.validate()
    assert certificate(learn) == before
    learn.fit(1, .01)
    assert certificate(learn)['steps'] == 3
    assert certificate(learner(Data(torch.randn(9, 3), torch.randn(9, 1)), 3, GradientAccumulation(9))) is None
