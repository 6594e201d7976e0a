"With exact=True a mean of one's own takes no second forward pass, and what is none is exact by one"
from contextlib import suppress
import pytest
from reference import *
from test_exact_runs import ActivationCheckpointing, Trf, in_double, run, same_run, seq, vec
from fastaccum.accumulation import forecasts
from fastaccum.all import MixedPrecision, TrainingCheckpoint

def ce(p, y): return F.cross_entropy(p, y, reduction='none')
def by_target(p, y): return (ce(p, y)*(1+4*(y == 0))).sum()/(1+4*(y == 0)).sum()
def by_output(p, y):
    w = p.detach().softmax(1)[:,0]
    return (w*ce(p, y)).sum()/w.sum()
means = dict(mean=lambda p, y: ce(p, y).mean(), by_target=by_target, by_output=by_output, total=lambda p, y: ce(p, y).sum(),
             positives=lambda p, y: (ce(p, y)*(y == 0)).sum()/(y == 0).sum().clamp(min=1),
             rare=lambda p, y: (ce(p, y)*(y == 0)).sum()/(y == 0).sum(),       # NaN in a part without any
             floor=lambda p, y: ce(p, y).sum()/max(len(y), 16),
             scaled=lambda p, y: 1e4*ce(p, y).mean(), two_terms=lambda p, y: ce(p, y).mean() + p.pow(2).mean(),
             root=lambda p, y: ce(p, y).mean().sqrt())                         # its gradients are a mean's, but for one factor

class Keeps(nn.Module):
    "What it compares is that of the call before"
    def __init__(self): super().__init__(); self.register_buffer('before', torch.zeros(4, dtype=torch.float64))
    def forward(self, p, y):
        loss = ce(p, y).mean() + (p-self.before).pow(2).mean()
        self.before = p.detach().mean(0)
        return loss
class Lists(nn.Module):
    def __init__(self): super().__init__(); self.sizes = []
    def forward(self, p, y):
        self.sizes.append(len(p))
        return ce(p, y).mean()*len(self.sizes)
def all_at_once(p, y):
    if len(p)%10: raise ValueError('wants ten')
    return ce(p, y).mean() + (p[::2]-p[1::2]).pow(2).mean()
def compares(p, y): return F.cross_entropy(p@p.T, torch.arange(len(p)))
class Draws(nn.Module):
    def forward(self, p, y): return F.cross_entropy(p + .3*torch.randn_like(p), y)
others = dict(keeps=Keeps(), lists=Lists(), all_at_once=all_at_once, compares=compares, draws=Draws())

class Net(nn.Module):
    "Counts its calls in training"
    def __init__(self): super().__init__(); self.a,self.d,self.b,self.calls = nn.Linear(12, 24),nn.Dropout(.3),nn.Linear(24, 4),0
    def forward(self, x):
        self.calls += self.training
        return self.b(self.d(self.a(x).relu()))

k,looks = 7,3                     # 20, 20 and 10 items are three, three and two parts; the first batch shows what the model draws
parts = 2*(3+3+2)
def net(loss): return Net,vec,loss
def forecasts_of(learn): return learn.gradient_accumulation.facts.forecasts

@pytest.mark.parametrize('name', means)
def test_mean(name):
    learn = run(net(means[name]), k)
    same_run(learn, run(net(means[name])))
    assert forecasts_of(learn).n_right == forecasts_of(learn).n == 6
    assert learn.model.calls <= parts + looks

@pytest.mark.parametrize('name', others)
def test_no_mean(name):
    learn = run(net(others[name]), k)
    same_run(learn, run(net(others[name])))
    assert forecasts_of(learn).n_right == 0 and forecasts_of(learn).n == 6
    assert 2*parts <= learn.model.calls <= 2*parts + looks

class Turns(nn.Module):
    "From the second epoch on it compares items"
    def __init__(self, learn=None): super().__init__(); self.compares = False
    def forward(self, p, y): return compares(p, y) if self.compares else ce(p, y).mean()
class Turn(Callback):
    def before_train(self): self.learn.loss_func.compares = self.epoch == 1

def test_turns():
    "What is no mean any more is sent a second time, in the same step"
    learn,whole = (run(net(Turns()), size, Turn()) for size in (k, None))
    same_run(learn, whole)
    assert forecasts_of(learn).n_right == 3 and learn.model.calls <= parts + parts//2 + looks

def test_wrong_forecasts(monkeypatch):
    "Whatever is sent at first, the step is exact: so these tests can fail"
    found = forecasts.Forecast._found
    def wrong(self, out): return {k: 3*g+.1 for k,g in found(self, out).items()}
    monkeypatch.setattr(forecasts.Forecast, '_found', wrong)
    learn = run(net(by_target), k)
    same_run(learn, run(net(by_target)))
    assert forecasts_of(learn).n_right == 0
    monkeypatch.setattr(forecasts.Forecast, 'left', lambda self, grads: self.record.end_step(True, True) or ())
    with pytest.raises(AssertionError): same_run(run(net(by_target), k), run(net(by_target)))

@pytest.mark.parametrize('dtype,tol', [('bf16', .02), ('fp16', .002)])
def test_mixed_precision(dtype, tol):
    "To its rounding, those of a known mean"
    amp = lambda: MixedPrecision(dtype, **({'init_scale': 2.**8} if dtype == 'fp16' else {}))
    learn,known = (run(net(loss), k, amp(), dtype=torch.float32) for loss in (means['mean'], nn.CrossEntropyLoss()))
    same_run(learn, known, tol)
    assert forecasts_of(learn).n_right == (6 if dtype == 'bf16' else 0)      # beside a loss scale nothing goes back before

def test_overflow():
    "It comes with the gradients of the one loss, not with those of a forecast"
    learn = run(net(means['mean']), k, MixedPrecision('fp16', init_scale=2.**60, max_scale=2.**60), dtype=torch.float32)
    assert torch.equal(weights(learn.model), learn.start)
    assert forecasts_of(learn).n == 0

def test_clipping_and_micro_batches_of_one():
    for size in (1, 7, 16):
        learn,whole = (run(net(by_target), n, GradientClip(.1)) for n in (size, None))
        same_run(learn, whole)
        assert forecasts_of(learn).n_right == (4 if size == 16 else 6)      # the last batch is one part

def test_recomputed():
    "What is recomputed in the first pass's backward pass draws the same masks"
    blocks = lambda: ActivationCheckpointing(nn.TransformerEncoderLayer)
    learn,whole = (run((Trf, seq, by_target), size, blocks()) for size in (k, None))
    same_run(learn, whole)
    assert forecasts_of(learn).n_right == 6

class Waits(Callback):
    def after_pred(self): pass

def test_others_wait():
    "A callback may end the batch between forward and backward pass: nothing goes back before"
    learn = run(net(means['mean']), k, Waits())
    same_run(learn, run(net(means['mean'])))
    assert forecasts_of(learn).n == 0 and learn.model.calls >= 2*parts

def test_out_of_memory(monkeypatch):
    "In the second part of the second step: the loader batch starts again"
    class Small(Net):
        def forward(self, x):
            out = super().forward(x)
            if self.training and self.calls > 2 and len(x) > 5: raise torch.OutOfMemoryError('out of memory')
            return out
    learn = run((Small, vec, by_target), 'auto')
    same_run(learn, run(net(by_target)))
    assert forecasts_of(learn).n_right > 3

def test_resumed(tmp_path):
    "In mid-epoch, to the bit"
    def saved(name, *cbs):
        def fit(l):
            with suppress(KeyboardInterrupt): l.fit(2, .05)
        return run(net(by_target), k, TrainingCheckpoint(every_steps=1), *cbs, fit=fit, path=tmp_path/name)
    whole = saved('a')
    saved('b', Stop('after_batch', KeyboardInterrupt, [(1, 0)]))
    learn = saved('b')
    assert torch.equal(weights(learn.model), weights(whole.model))
    assert forecasts_of(learn).n_right == forecasts_of(whole).n_right == 6

class TwoInputs(nn.Module):
    "The second has two rows for each item, view after view"
    def __init__(self): super().__init__(); self.l = nn.Linear(12, 4)
    def forward(self, x, z=None):
        if z is None: return self.l(x)
        a,b = self.l(z).chunk(2)
        return self.l(x) + a*b

@pytest.mark.parametrize('views', [False, True], ids=['weights among targets','two views'])
def test_other_rows(views):
    "What belongs to all items has no forecasts; inputs are cut as the model's are"
    def collate(items):
        x,y = map(torch.stack, zip(*items))
        return (x, torch.cat([x, x+1]), y) if views else (x, y, torch.tensor([1.,2,3,4]))
    def fit(*cbs):
        set_seed(0)
        items = L(zip(torch.randn(40, 12), torch.randint(4, (40,))))
        dls = DataLoaders(*[DataLoader(items, bs=20, create_batch=collate) for _ in range(2)])
        for dl in dls.loaders: dl.n_inp = 1+views
        loss_func = means['mean'] if views else lambda p, y, w: F.cross_entropy(p, y, w)
        learn = Learner(dls, TwoInputs(), loss_func=loss_func, opt_func=SGD, cbs=cbs)
        with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
        return learn
    learn,whole = fit(GradientAccumulation(micro_batch_size=k, exact=True)),fit()
    assert rel_err(weights(learn.model), weights(whole.model)) < 1e-6
    assert forecasts_of(learn).n_right == 2*views

def test_rule():
    learn = run(net(by_target), k)
    assert '6 of 6 steps without a second pass' in learn.gradient_accumulation.loss_rule

def constant(p): return torch.zeros((), dtype=p.dtype, requires_grad=True)
def of_few(p, y): return constant(p) if len(y) > 15 else ce(p, y).mean()
def of_no_outputs(p, y): return p.detach().square().mean().requires_grad_()
@pytest.mark.parametrize('loss', [of_few, lambda p, y: constant(p), of_no_outputs])
def test_without_gradients(loss):
    "The loss of all items has none, in some steps or in each: what was sent counts nothing"
    learn,whole = run(net(loss), k),run(net(loss))
    assert torch.allclose(weights(learn.model), weights(whole.model), rtol=1e-12, atol=1e-15)

class Temperature(nn.Module):
    def __init__(self): super().__init__(); self.t = nn.Parameter(torch.ones((), dtype=torch.float64))
    def forward(self, p, y): return ce(p*self.t, y).mean()
class Decay(Callback):
    "The loss has a term of the model's weights"
    def before_fit(self): self.learn.loss_func.model = [self.learn.model]
class Decayed(nn.Module):
    def forward(self, p, y): return ce(p, y).mean() + .1*sum(w.square().sum() for w in self.model[0].parameters())
class ComparesAndDecays(Decayed):
    def forward(self, p, y): return compares(p, y) + .1*sum(w.square().sum() for w in self.model[0].parameters())
@pytest.mark.parametrize('make,right', [(Temperature, True), (Decayed, True), (ComparesAndDecays, False)])
def test_gradients_of_the_loss_itself(make, right):
    "They are no part of what was sent"
    learn,whole = (run(net(make()), size, *[Decay()]*issubclass(make, Decayed)) for size in (k, None))
    same_run(learn, whole)
    assert forecasts_of(learn).n_right == 6*right

def test_a_temperature_that_is_trained():
    "Its gradients are those of plain fastai, too"
    def fit(*cbs):
        set_seed(0)
        items,loss = L(zip(torch.randn(40, 12).double(), torch.randint(4, (40,)))),Temperature()
        dls = DataLoaders(*[DataLoader(items, bs=20) for _ in range(2)])
        both = lambda model: [[*model.parameters()], [*loss.parameters()]]
        learn = Learner(dls, nn.Linear(12, 4).double(), loss_func=loss, opt_func=SGD, splitter=both, cbs=cbs)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
        return learn
    learn,whole = fit(GradientAccumulation(micro_batch_size=k, exact=True)),fit()
    for a,b in zip(learn.opt.all_params().itemgot(0), whole.opt.all_params().itemgot(0)): assert torch.allclose(a, b, rtol=1e-9)
    assert learn.loss_func.t != 1 and forecasts_of(learn).n_right == 4
