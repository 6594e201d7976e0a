"`coupled=`: the second forward pass is the first one again, or it is told. Each against plain fastai with the whole batch"
import warnings
from dataclasses import dataclass
import numpy as np
import pytest
from reference import *
from fastaccum.all import *
from test_silent import moved

torch.manual_seed(0)
data = Data(torch.randn(64, 6), torch.arange(64)%4)

class OneAndAll(nn.Module):
    "Compares all rows with each other, so that parts of a batch do not do"
    def forward(self, z, y=None):
        z = z/z.pow(2).sum(1, keepdim=True).clamp(min=1e-6).sqrt()
        return (z@z.T/.5).logsumexp(1).mean() - (z*z.roll(1, 0)).sum(1).mean()

def trained(model, k=None, loss=None, bs=32, n_epoch=2, of=data, coupled=True, cbs=(), before=noop, n_items=None, **kwargs):
    set_seed(2)
    model = model if isinstance(model, nn.Module) else model()
    mine = [GradientAccumulation(micro_batch_size=k, coupled=coupled, n_items=n_items)] if k else []
    learn = learner(of, bs, *mine, *cbs, model=model, loss_func=loss or OneAndAll(), opt_func=SGD, **kwargs)
    before(learn)
    learn.start = deepcopy(learn.model)
    set_seed(3)
    learn.fit(n_epoch, .05)
    return learn

def off(model, k=8, **kwargs):
    whole = trained(model, **kwargs)
    return moved(trained(model, k, **kwargs), whole, whole.start)

def silent_off(model, k=8, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        return off(model, k, **kwargs)

# --- inputs that the model changes
class InPlace(nn.Module):
    def __init__(self): super().__init__(); self.body = mlp()
    def forward(self, x):
        x.mul_(2).add_(1)
        return self.body(x)
class Pops(nn.Module):
    def __init__(self): super().__init__(); self.body = mlp()
    def forward(self, b): return self.body(b.pop('x'))

@pytest.mark.parametrize('k', [8, 7, 1])
def test_inputs_changed_in_place(k): assert silent_off(InPlace, k) < 2e-6

def test_inputs_of_a_dict_taken_out():
    class AsDict(Callback):
        order = -30
        def before_batch(self): self.learn.xb = (dict(x=self.xb[0]),)
    assert silent_off(Pops, cbs=[AsDict()]) < 2e-6

@dataclass
class Record:
    x: torch.Tensor

class InPlaceOfRecord(InPlace):
    def forward(self, b): return super().forward(b.x)

def test_inputs_of_a_dataclass_changed_in_place():
    class AsRecord(Callback):
        order = -30
        def before_batch(self): self.learn.xb = (Record(self.xb[0].clone()),)
    assert silent_off(InPlaceOfRecord, cbs=[AsRecord()]) < 2e-6

def test_a_loss_that_reads_changed_inputs():
    "It gets what it gets without micro-batches"
    def fit(k):
        seen = []
        learn = trained(InPlace, k, cbs=[On('after_loss', lambda l: seen.append(l.xb[0].clone()))])
        return seen
    for a,b in zip(fit(None), fit(8)): assert torch.equal(a, b)

# --- random numbers of the model's own
class OwnNoise(nn.Module):
    def __init__(self, rng): super().__init__(); self.body,self.rng = mlp(),rng
    def forward(self, x):
        noise = (torch.rand(len(x), 1, generator=self.rng) if isinstance(self.rng, torch.Generator)
                 else torch.tensor(self.rng.random((len(x), 1))).float())
        return self.body(x*(1+noise.to(x)))

@pytest.mark.parametrize('rng', [lambda: torch.Generator().manual_seed(5), lambda: np.random.default_rng(5)])
def test_generators_of_modules(rng):
    "The same draws, in the same order, as in one pass"
    def model():
        torch.manual_seed(0)
        return OwnNoise(rng())
    whole,split = (trained(model(), k) for k in (None, 8))
    assert moved(split, whole, whole.start) < 2e-6

class Hidden(OwnNoise):
    "Nobody finds its generator"
    def __init__(self):
        rng = np.random.default_rng(5)
        super().__init__(None)
        self.draw = lambda: rng.random()
    def forward(self, x): return self.body(x*(1+self.draw()))
class Counts(nn.Module):
    def __init__(self): super().__init__(); self.body,self.n = mlp(),0
    def forward(self, x):
        self.n += self.training
        return self.body(x)*(1+self.n%2) + x[:,:4].sin()*(self.n%3)

@pytest.mark.parametrize('model', [Hidden, Counts])
def test_another_second_pass_is_told(model):
    with pytest.warns(UserWarning, match=r'second forward pass.*\d\.\d\d% apart.*register_buffer') as seen: trained(model, 8, n_epoch=3)
    assert sum('second forward pass' in str(w.message) for w in seen) == 1

def test_told_if_it_begins_later():
    class Late(nn.Module):
        def __init__(self): super().__init__(); self.body,self.late,self.calls = mlp(),False,0
        def forward(self, x):
            self.calls += self.late
            return self.body(x)*(1+self.calls)
    begin = On('before_batch', lambda l: setattr(l.model, 'late', True), calls=[2])
    with pytest.warns(UserWarning, match='second forward pass'): trained(Late, 8, cbs=[begin])     # the third of four loader batches

# --- what cannot be joined
class Matrix(nn.Module):
    def __init__(self): super().__init__(); self.body = mlp()
    def forward(self, x): z = self.body(x); return z@z.T
class Prototypes(nn.Module):
    def __init__(self): super().__init__(); self.body,self.p = mlp(),nn.Parameter(torch.randn(16, 4))
    def forward(self, x): return self.body(x),self.p*1
class Eight(nn.Module):
    "As many columns as a micro-batch has items"
    def __init__(self): super().__init__(); self.body = mlp(n_out=8)
    def forward(self, x): return self.body(x)

@pytest.mark.parametrize('k', [8, 7])
def test_a_matrix_is_told(k):
    with pytest.raises(ValueError, match='matrix of 8 by 8|cannot be joined'): trained(Matrix, k, loss=lambda m, y: m.logsumexp(1).mean())
def test_fixed_rows_are_told():
    with pytest.raises(ValueError, match='16 rows however many'):
        trained(Prototypes, 8, loss=lambda p, y: (p[0]@p[1].T).logsumexp(1).mean())
def test_as_many_columns_as_items(): assert silent_off(Eight, 8) < 2e-6

# --- activations in the loss
class Keeps(nn.Module):
    "Keeps activations, or a term of its weights"
    def __init__(self, what): super().__init__(); self.body,self.what = mlp(),what
    def forward(self, x):
        h = self.body[:2](x)
        self.kept = dict(act=lambda: h, mean=lambda: h.pow(2).mean(),
                         weights=lambda: sum(p.pow(2).sum() for p in self.parameters()),
                         detached=lambda: h.detach())[self.what]()
        return self.body[2](h)
class AddKept(Callback):
    order = 20
    def after_loss(self):
        if not self.training: return
        self.learn.loss_grad = self.learn.loss_grad + .3*self.model.kept.pow(2).mean()
        self.learn.loss = self.learn.loss_grad.clone()

@pytest.mark.parametrize('what', ['act', 'mean'])
def test_activations_in_the_loss_are_told(what):
    with pytest.warns(UserWarning, match="activations that the model keeps.*'kept'.*8 of 32 items") as seen:
        trained(Keeps(what), 8, cbs=[AddKept()])
    assert sum('activations' in str(w.message) for w in seen) == 1
def test_told_in_a_later_batch():
    "Its weight is 0 at first, and then there is no term"
    add = On('after_loss', lambda l: AddKept.after_loss(SimpleNamespace(learn=l, training=True, model=l.model)), calls=[2,3])
    with pytest.warns(UserWarning, match='activations that the model keeps'): trained(Keeps('act'), 8, cbs=[add])
def test_activations_of_a_hook_are_told():
    class Hooked(Callback):
        order = 20
        def before_fit(self): self.hook = self.model[0].register_forward_hook(lambda m, i, o: setattr(self, 'out', o))
        def after_loss(self):
            if self.training: self.learn.loss_grad = self.learn.loss_grad + self.out.pow(2).mean()
        def after_fit(self): self.hook.remove()
    with pytest.warns(UserWarning, match='activations that the model keeps'): trained(mlp(), 8, cbs=[Hooked()])
def test_terms_of_weights_are_exact():
    "Once for the batch, kept by the model, or computed in the loss"
    assert silent_off(partial(Keeps, 'weights'), cbs=[AddKept()]) < 2e-6
    l2 = On('after_loss', lambda l: setattr(l, 'loss_grad', l.loss_grad + .1*sum(p.pow(2).sum() for p in l.model.parameters())))
    assert silent_off(mlp, cbs=[l2]) < 2e-6

# --- rows in views
class TwoViews(nn.Module):
    def __init__(self, by_view, p=0.): super().__init__(); self.body,self.by_view,self.drop = mlp(),by_view,nn.Dropout(p)
    def forward(self, x):
        a,b = self.body(x),self.body(x.flip(1))
        return self.drop(torch.cat((a, b)) if self.by_view else torch.stack((a, b), 1).flatten(0, 1))
class Barlow(nn.Module):
    "Compares the first half of the rows with the second"
    def __init__(self, by_view=True): super().__init__(); self.by_view = by_view
    def forward(self, z, y=None):
        a,b = z.chunk(2) if self.by_view else z.unflatten(0, (-1, 2)).unbind(1)
        a,b = ((t-t.mean(0))/t.std(0).clamp(min=1e-3) for t in (a, b))
        return ((a.T@b/len(a)-torch.eye(a.shape[1]))**2).sum()

@pytest.mark.parametrize('k', [8, 7, 1])
@pytest.mark.parametrize('by_view', [True, False])
def test_outputs_in_views(by_view, k):
    assert silent_off(partial(TwoViews, by_view), k, loss=Barlow(by_view)) < 2e-6

def test_the_order_is_found_under_dropout():
    learn = trained(TwoViews(True, .5), 8, loss=Barlow())
    assert learn.gradient_accumulation.facts.views.found == {0: 2}
    assert trained(TwoViews(False, .5), 8, loss=Barlow(False)).gradient_accumulation.facts.views.found == {}

def test_finding_it_leaves_no_trace():
    "Neither random numbers nor calls are counted"
    class Counted(TwoViews):
        calls = 0
        def forward(self, x): self.calls += 1; return super().forward(x)
    def fit(views_known):
        def known(l): l.gradient_accumulation.facts.views.found = {0: 2}
        rng = []
        cbs = [On('after_batch', lambda l: rng.append(torch.get_rng_state())),
               *([On('before_batch', known, calls=[0])] if views_known else [])]
        return trained(Counted(True, .5), 8, loss=Barlow(), cbs=cbs).model,rng
    (model,rng),(plain,plain_rng) = fit(False),fit(True)
    assert model.calls == plain.calls and all(map(torch.equal, rng, plain_rng)) and torch.equal(weights(model), weights(plain))

class Pairs(nn.Module):
    "Of 2N rows, the two views of N items, each sees the other"
    def __init__(self): super().__init__(); self.body = mlp()
    def forward(self, x):
        a,b = self.body(x).chunk(2)
        return torch.cat((a+b.tanh(), b+a.tanh()))
class Both(Callback):
    "Both views in one tensor, as a loader with two augmentations of each item makes them"
    order = -30
    def before_batch(self): self.learn.xb = (torch.cat((self.xb[0], self.xb[0].flip(1))),)
class BothTargets(Callback):
    order = -30
    def before_batch(self): self.learn.yb = (torch.cat((self.yb[0], self.yb[0])),)

@pytest.mark.parametrize('k', [8, 7])
@pytest.mark.parametrize('model', [Pairs, mlp])
def test_inputs_in_views(model, k):
    "2N inputs, N targets: N items"
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        whole,split = (trained(model, j, loss=Barlow(), cbs=[Both()]) for j in (None, k))
    assert moved(split, whole, whole.start) < 2e-6
    assert split.gradient_accumulation.items == 32

def test_targets_in_views():
    "N inputs, 2N outputs and targets"
    def loss(z, y): return Barlow()(z) + F.cross_entropy(z, y)
    assert silent_off(partial(TwoViews, True), loss=loss, cbs=[BothTargets()]) < 2e-6

# --- half precision: rounding is not told
@pytest.mark.parametrize('to', ['to_bf16', 'to_fp32'])
def test_precision_is_silent(to):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        trained(mlp(), 8, before=lambda l: getattr(l, to)())

# --- several loader batches in a step
def valid_mean(pred, y):
    ok = y >= 0
    return F.cross_entropy(pred[ok], y[ok], reduction='sum')/ok.sum().clamp(min=1)

def summed(pred, y): return F.cross_entropy(pred, y, ignore_index=-100, reduction='sum')/100
summed.reduction = 'sum'   # declared

@pytest.mark.parametrize('loss,over',
                         [(valid_mean, 'valid'), (lambda p, y: F.cross_entropy(p, y, ignore_index=-100), 'valid'),
                          (summed, 'sum')])
def test_its_loss_is_measured(loss, over):
    masked = Data(data.x, torch.where(torch.arange(64)%5 > torch.arange(64)//16, -100, torch.arange(64)%4))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        runs = []
        for bs,acc in ((32, []), (16, [GradientAccumulation(32, micro_batch_size=8, coupled=True)])):
            learn = learner(masked, bs, *acc, loss_func=loss, opt_func=SGD)
            learn.start = deepcopy(learn.model)
            learn.fit(2, .05)
            runs.append(learn)
    assert moved(runs[1], runs[0], runs[0].start) < 2e-6 and over in runs[1].gradient_accumulation.loss_rule

def test_a_loss_of_several_loader_batches_that_compares_items_is_told():
    with pytest.warns(UserWarning, match=r'several loader batches.*\d% off') as seen:
        learner(data, 16, GradientAccumulation(32, micro_batch_size=8, coupled=True), loss_func=OneAndAll()).fit(2, .05)
    assert sum('several loader batches' in str(w.message) for w in seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner(Data(data.x[:40], data.y[0][:40]), 16, GradientAccumulation(16, micro_batch_size=8, coupled=True),
                loss_func=OneAndAll()).fit(2, .05)
