"A fit that goes on in the middle of an epoch sees a part of it: nothing is said of the steps of a whole epoch"
import pytest
from reference import *
from test_checkpoint import Interrupt, data, new_process, one_process
from fastaccum.checkpoint.callback import TrainingCheckpoint

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
