"Errors say what failed, and what to write"
from dataclasses import dataclass
import warnings, pytest
from reference import *
from fastaccum.core.chunks import HeadInput
from fastaccum.core.warnings import FastaccumWarning
from fastaccum.memory.chunks import ChunkedHead

torch.manual_seed(0)
data = Data(torch.randn(32, 6), torch.arange(32)%4)
ce = nn.CrossEntropyLoss()

def fit(loss=ce, model=None, *cbs, **acc):
    learn = learner(data, 16, GradientAccumulation(**{**dict(micro_batch_size=5), **acc}), *cbs, model=model, loss_func=loss)
    learn.fit(1, .01)
    return learn

def fails(pred, y):
    if len(y) < 16: raise ValueError('too few')
    return ce(pred, y)
class Fails(nn.Module):
    def __init__(self): super().__init__(); self.body = mlp()
    def forward(self, x):
        if self.training and len(x) < 16: raise ValueError('too few')
        return self.body(x)
class Raises(Callback):
    def after_pred(self):
        if self.training: raise ValueError('too few')

where = r"too few \(In micro-batch 1 of 4, with 4 of the loader batch's 16 items."
def too_few(*_): raise ValueError('too few')
class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    backward = staticmethod(too_few)

@pytest.mark.filterwarnings('ignore:What <lambda> averages over could not be measured .ValueError. too few')
def test_only_a_loss_that_fails_is_told_of_coupled():
    with pytest.raises(ValueError, match=where + r' A loss .* coupled=True.\)'): fit(fails)
    callbacks = Raises(),On('after_loss', too_few),On('after_backward', too_few)
    for args in ((ce, Fails()), (lambda p, y: ce(NoBackward.apply(p), y),), *((ce, None, cb) for cb in callbacks)):
        with pytest.raises(ValueError, match=where + r'\)'): fit(*args)

@pytest.mark.parametrize('event', ['before_batch', 'before_step', 'after_batch', 'before_validate'])
def test_an_error_between_micro_batches_names_none(event):
    "An optimizer that fails steps between them, too"
    with pytest.raises(ValueError, match='too few$'): fit(ce, None, On(event, too_few, training=None))
    def break_optimizer(learn): learn.opt.step = too_few
    with pytest.raises(ValueError, match='too few$'): fit(ce, None, On('before_fit', break_optimizer, training=None))

class As(nn.Module):
    "Outputs in the form of `f`"
    def __init__(self, f): super().__init__(); self.body,self.f = mlp(),f
    def forward(self, x): return self.f(self.body(x))
def time_first(out): return torch.stack([out]*8)
def per_item(out): return [dict(scores=row) for row in out]

@pytest.mark.parametrize('k', [8, 5])
def test_time_first(k):
    with pytest.raises(ValueError, match=r'items in its second dimension.*transpose\(0, 1\)'):
        fit(lambda p, y: ce(p.mean(0), y), As(time_first), micro_batch_size=k, coupled=True)

def test_one_for_each_item():
    def loss(p, y): return ce(torch.stack([o['scores'] for o in p]), y)
    with pytest.raises(ValueError, match='a list of 4 dicts for 4 items.*torch.stack'): fit(loss, As(per_item), coupled=True)
    with pytest.raises(ValueError, match='a list of 4 Outs for 4 items.*torch.stack'):
        fit(ce, As(lambda out: [Out(row) for row in out]), coupled='batchnorm')

def masks(o): o[:, 0] = -1.
@pytest.mark.parametrize('use', [lambda o: o*2, lambda o: 2-o, lambda o: o/torch.ones(1), lambda o: o[0], lambda o: -o, lambda o: o > 0,
                                 len, list, round, masks, torch.tanh])
def test_arithmetic_with_the_input_of_a_head(use):
    "In the model, and in a callback"
    with pytest.raises(TypeError, match=r'learn.pred.outputs\(\)'): use(HeadInput(torch.ones(2, 3), nn.Linear(3, 2)))
    for model,cb in ((As(use), None), (None, On('after_pred', lambda learn: use(learn.pred)))):
        with pytest.raises(TypeError, match=r'learn.pred.outputs\(\)'): fit(ce, model, *filter(None, [ChunkedHead(2), cb]))

# --- predictions of a loader batch, for metrics and callbacks
@dataclass
class Out:
    scores: Tensor
    name: str = 'out'

def two_levels(out): return [dict(scores=out), dict(scores=2*out)]
def item_by_item(p): return torch.stack([o.scores if isinstance(o, Out) else o['scores'] for o in p])
forms = [(Out, lambda p: p.scores), (per_item, item_by_item), (lambda out: [Out(row) for row in out], item_by_item),
         (two_levels, lambda p: sum(o['scores'] for o in p))]

@pytest.mark.filterwarnings('ignore:What .* averages over')
@pytest.mark.parametrize('form,read', forms)
def test_joined_predictions(form, read):
    class Reads(Callback):
        seen = ()
        def after_batch(self):
            if self.training: self.seen = [*self.seen, read(self.learn.pred)]
    def loss(p, y): return ce(read(p), y)
    def seen(*cbs):
        cb = Reads()
        set_seed(0)
        learner(data, 16, cb, *cbs, model=As(form), loss_func=loss).fit(1, .01)
        return torch.cat([*cb.seen])
    for k in (8, 5): assert rel_err(seen(GradientAccumulation(micro_batch_size=k)), seen()) < 1e-6

@pytest.mark.filterwarnings('ignore:What .* averages over')
@pytest.mark.parametrize('form,read', forms)
def test_metrics_of_such_predictions(form, read):
    "In training, of accumulated loader batches and of micro-batches, and in validation"
    def loss(p, y): return ce(read(p), y)
    def values(bs, *cbs):
        learn = learner(data, bs, *cbs, model=model, loss_func=loss, metrics=loss)
        learn.recorder.train_metrics = True
        learn.fit(1, .1)
        return [*learn.recorder.values[0]]
    model = As(form)
    whole = values(16)
    for bs,acc in ((4, dict(accum_bs=16)), (16, dict(micro_batch_size=5)), (8, dict(accum_bs=16, micro_batch_size=5))):
        assert np.allclose(values(bs, GradientAccumulation(**acc)), whole, atol=1e-5)

def test_coupled_levels():
    "A list of dicts, each with all items, is joined"
    model = As(two_levels)
    def loss(p, y): return ce(p[0]['scores'], y) + p[1]['scores'].std()
    def trained(*cbs):
        learn = learner(data, 16, *cbs, model=model, loss_func=loss)
        learn.fit(1, .1)
        return weights(learn.model)
    assert rel_err(trained(GradientAccumulation(micro_batch_size=5, coupled=True)), trained()) < 1e-6

# --- batches in dataclasses
@dataclass
class Columns:
    x: Tensor
    z: Tensor
@dataclass
class WithLen(Columns):
    def __len__(self): return len(self.x)

def mse_of(pred, y): return F.mse_loss(pred, y.x if isinstance(y, Columns) else torch.stack([o.x for o in y]) if isinstance(y, list) else y)
def each(kind, t): return [kind(row, row) for row in t]
def as_it_is(kind, t): return t
def columns(kind, t): return kind(t, t)

@pytest.mark.parametrize('targets', [as_it_is, columns, each])
@pytest.mark.parametrize('inputs', [columns, each])
@pytest.mark.parametrize('kind', [Columns, WithLen])
def test_batches_in_dataclasses(kind, inputs, targets):
    "With columns, or one for each item"
    class Net(nn.Linear):
        def forward(self, b): return super().forward(torch.stack([o.x for o in b]) if isinstance(b, list) else b.x+b.z)
    def trained(bs, *cbs):
        set_seed(0)
        items = list(zip(torch.randn(32, 6), torch.randn(32, 4)))
        def batch(items):
            x,y = map(torch.stack, zip(*items))
            return inputs(kind, x),targets(kind, y)
        dls = DataLoaders(*[DataLoader(items, bs=bs, create_batch=batch) for _ in range(2)], device='cpu')
        learn = Learner(dls, Net(6, 4), loss_func=mse_of, opt_func=SGD, cbs=list(cbs))
        with warnings.catch_warnings(), learn.no_bar(), learn.no_logging():
            warnings.simplefilter('error', FastaccumWarning)
            learn.fit(2, .1)
        return weights(learn.model)
    for bs,acc in ((16, dict(micro_batch_size=5)), (4, dict(accum_bs=16))):
        assert rel_err(trained(bs, GradientAccumulation(**acc)), trained(16)) < 1e-6
