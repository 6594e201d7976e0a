"A fit that goes on in the middle of an epoch sees a part of it: it does, and says, nothing that the whole fit does not"
import pytest
from reference import *
from test_checkpoint import Interrupt, data, new_process, one_process
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.core import FastaccumWarning

def fitted(*cbs, **kwargs):
    set_seed(0)
    learn = learner(data, 8, GradientAccumulation(32, **kwargs), *cbs, model=nn.Linear(6, 4))
    learn.fit(2, .05)
    return learn

@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('at', [(0, 5), (1, 5)])
def test_resumed_in_mid_epoch(at, remainder, recwarn):
    "61 items: a step of 32, and one of what is left"
    whole = fitted(remainder=remainder)
    with pytest.raises(RuntimeError, match='interrupted'):
        fitted(TrainingCheckpoint(every_steps=1), Interrupt(at), remainder=remainder)
    new_process()
    learn = fitted(TrainingCheckpoint(every_steps=1), remainder=remainder)
    assert torch.equal(weights(learn.model), weights(whole.model))
    assert [str(w.message) for w in recwarn if 'accum_bs' in str(w.message)] == []

def test_told_of_a_whole_epoch():
    with pytest.warns(UserWarning, match='is more than the 61 items of an epoch'):
        learner(data, 8, GradientAccumulation(100), model=nn.Linear(6, 4)).fit(2, .05)

# --- what a fit finds out in its first batches
def said(recwarn):
    "What fastaccum has warned of since the last call, but for the `Interrupt` that is missing now"
    found = {str(w.message) for w in recwarn if issubclass(w.category, FastaccumWarning)}
    recwarn.clear()
    return {text for text in found if not text.startswith('Since the checkpoint')}

def check(fit, at, recwarn):
    "Interrupted and resumed, it is the whole fit to the bit, with its losses and its warnings"
    whole = fit()
    of_whole = said(recwarn)
    with pytest.raises(RuntimeError, match='interrupted'): fit(TrainingCheckpoint(every_steps=1), Interrupt(at))
    said(recwarn)
    new_process()
    learn = fit(TrainingCheckpoint(every_steps=1))
    assert torch.equal(weights(learn.model), weights(whole.model))
    assert torch.equal(torch.stack(learn.recorder.losses), torch.stack(whole.recorder.losses))
    assert said(recwarn) <= of_whole
    return learn,whole

def fit_of(data, loss, model, *cbs, **kwargs):
    set_seed(0)
    learn = learner(data, 8, GradientAccumulation(**kwargs), *cbs, model=model(), loss_func=loss)
    learn.fit(2, .05)
    return learn

class Counting(nn.Module):
    "Its divisor is not found in its targets: the closest rule is taken, and how far it is off is told. Counts its calls"
    def __init__(self): super().__init__(); self.n = 0
    def forward(self, p, y):
        self.n += 1
        counts = (y > 0).float()
        return ((p-y).square()*counts).sum()/counts.sum()*(1 + 1e-6*self.n)

def squares(p, y): return (p-y).square().sum()

@pytest.mark.parametrize('at', [(0, 0), (0, 7), (1, 1)])
def test_what_the_loss_averages_over(at, recwarn):
    "It is measured with the first micro-batches, which are weighted before it is known, and in another order of operations"
    learn,whole = check(lambda *cbs: fit_of(data, Counting(), partial(nn.Linear, 6, 4), *cbs, micro_batch_size=3), at, recwarn)
    assert learn.loss_func.n == whole.loss_func.n > 0
    assert learn.gradient_accumulation.loss_rule == whole.gradient_accumulation.loss_rule

class Columns(Data):
    "Five inputs in a list: in a batch of five items it may as well hold an object for each"
    def __getitem__(self, i): return [self.x[i]*k for k in range(5)],self.y[0][i]
class Sums(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(6, 4)
    def forward(self, xs): return self.lin(sum(xs))

def with_norm(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

# The rest of the epoch is the last batch, of 5 items; of the sum, the last step, of 8 and 5
short = dict(lists=((Columns(data.x, data.y[0]), None, Sums), (0, 6), dict(micro_batch_size=3)),
             batchnorm=((data, None, with_norm), (0, 6), dict(micro_batch_size=3)),
             sum=((data, squares, partial(nn.Linear, 6, 4)), (0, 5), dict(accum_bs=16)))

@pytest.mark.parametrize('case', short)
def test_a_short_last_batch_is_no_example(case, recwarn):
    parts,at,kwargs = short[case]
    check(lambda *cbs: fit_of(*parts, *cbs, **kwargs), at, recwarn)
