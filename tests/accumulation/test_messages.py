"Errors say what failed, and what to write"
from dataclasses import dataclass
import pytest
from reference import *
from fastaccum.core.chunks import HeadInput

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

def test_only_a_loss_that_fails_is_told_of_coupled():
    where = r"too few \(In micro-batch 1 of 4, with 4 of the loader batch's 16 items."
    with pytest.raises(ValueError, match=where + r' A loss .* coupled=True.\)'): fit(fails)
    for args in ((ce, Fails()), (ce, None, Raises())):
        with pytest.raises(ValueError, match=where + r'\)'): fit(*args)

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

def test_dicts():
    def loss(p, y): return ce(torch.stack([o['scores'] for o in p]), y)
    with pytest.raises(ValueError, match='a list of 4 dicts for 4 items.*torch.stack'): fit(loss, As(per_item), coupled=True)

@pytest.mark.parametrize('use', [lambda o: o*2, lambda o: 2-o, lambda o: o/torch.ones(1), lambda o: o[0], lambda o: -o, lambda o: o > 0])
def test_arithmetic_with_the_input_of_a_head(use):
    with pytest.raises(TypeError, match=r'learn.pred.outputs\(\)'): use(HeadInput(torch.ones(2, 3), nn.Linear(3, 2)))

# --- predictions of a loader batch, for metrics and callbacks
@dataclass
class Out:
    scores: Tensor
    name: str = 'out'

@pytest.mark.filterwarnings('ignore:What .* averages over')
@pytest.mark.parametrize('form,read', [(Out, lambda p: p.scores), (per_item, lambda p: torch.stack([o['scores'] for o in p]))])
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
