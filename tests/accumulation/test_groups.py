"Pairs and groups: an item that holds its rows is never cut; in other layouts the loss sees all rows, or there is an error or a warning"
import warnings
import pytest
from reference import *
from fastaccum.all import StepLogger

class Score(Module):
    "One number for each row, whatever the shape before the features"
    def __init__(self): self.net = mlp(6, 1)
    def forward(self, x): return self.net(x)[...,0]

def better(pred): return -F.logsigmoid(pred[:,0]-pred[:,1])
def mean(pred, y): return better(pred).mean()
def of_those_that_count(pred, y): return (better(pred)*(y[:,0] > .5)).sum()/(y[:,0] > .5).sum().clamp(min=1)
def by_group(pred, y): return -(pred*(y-y.mean(1, keepdim=True))/(y.std(1, keepdim=True)+1e-4)).mean()

def data(n, rows):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, rows, 6, generator=g),torch.rand(n, rows, generator=g)

def fitted(x, y, bs, loss_func, **kwargs):
    set_seed(0)
    acc = [GradientAccumulation(**kwargs), StepLogger()] if kwargs else []
    learn = learner(list(zip(x, y)), bs, *acc, model=Score(), loss_func=loss_func, opt_func=SGD)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .5)
    return learn,[str(w.message) for w in said if type(w.message).__name__ == 'FastaccumWarning']

def off(learn, whole): return rel_err(weights(learn.model), weights(whole.model))

@pytest.mark.parametrize('rows', [2, 5])
@pytest.mark.parametrize('loss_func', [mean, of_those_that_count, by_group])
@pytest.mark.parametrize('bs,kwargs', [(12, dict(micro_batch_size=5)), (12, dict(micro_batch_size=1)), (4, dict(accum_bs=12)),
                                       (12, dict(micro_batch_size=5, exact=True)), (4, dict(accum_bs=12, micro_batch_size=3))])
def test_an_item_is_a_group(rows, loss_func, bs, kwargs):
    x,y = data(31, rows)
    whole,_ = fitted(x, y, 12, loss_func)
    learn,said = fitted(x, y, bs, loss_func, **kwargs)
    assert off(learn, whole) < 1e-6 and not said
    assert learn.step_logger.to_df()['items'].tolist() == [12, 12, 7]*2

def below(t): return t.flatten(0, 1)                           # the rows of a pair below one another
def in_halves(t): return torch.cat([o.transpose(0, 1).flatten(0, 1) for o in t.split(12)])    # of each 24 rows
layouts = {'below': (below, lambda p, y: mean(p.view(-1, 2), y)), 'halves': (in_halves, lambda p, y: mean(torch.stack(p.chunk(2), 1), y))}

@pytest.mark.parametrize('layout', layouts)
@pytest.mark.parametrize('kwargs', [dict(coupled=True), dict(exact=True)])
@pytest.mark.parametrize('size', [1, 5, 8])
def test_the_loss_sees_all_rows(layout, kwargs, size):
    order,loss_func = layouts[layout]
    x,y = map(order, data(24, 2))
    whole,_ = fitted(x, y, 24, loss_func)
    learn,said = fitted(x, y, 24, loss_func, micro_batch_size=size, **kwargs)
    assert off(learn, whole) < 1e-6 and not said

@pytest.mark.parametrize('layout,size', [('below', 5), ('halves', 5)])
def test_a_pair_that_is_cut_is_an_error(layout, size):
    order,loss_func = layouts[layout]
    x,y = map(order, data(24, 2))
    with pytest.raises(RuntimeError, match='compares items needs coupled=True'): fitted(x, y, 24, loss_func, micro_batch_size=size)

def test_pairs_of_strangers_are_told():
    "A quarter of the rows are all chosen: the halves of each micro-batch are no pairs"
    order,loss_func = layouts['halves']
    said = fitted(*map(order, data(24, 2)), 24, loss_func, micro_batch_size=6)[1]
    assert len(said) == 1 and 'coupled=True' in said[0] and '% off' in said[0]

def test_pairs_below_one_another_in_loader_batches():
    order,loss_func = layouts['below']
    x,y = map(order, data(24, 2))
    whole,_ = fitted(x, y, 24, loss_func)
    learn,said = fitted(x, y, 8, loss_func, accum_bs=24)
    assert off(learn, whole) < 1e-6 and not said
