"Arguments of other libraries get an error that names fastaccum's"
import warnings
import pytest, torch, torch.nn as nn
from fastai.callback.training import ShortEpochCallback
from fastai.basics import DataLoader, DataLoaders, Learner, SGD
from fastaccum.all import GradientAccumulation, GradientAccumulationSchedule

@pytest.mark.parametrize('name,value,says', [
    ('gradient_accumulation_steps', 4, 'accum_bs=4*16'), ('accumulate_grad_batches', 8, 'accum_bs=8*16'),
    ('accum_steps', 2, 'accum_bs=2*16'),
    ('microbatch_size', 8, 'micro_batch_size=8'), ('device_train_microbatch_size', 'auto', "micro_batch_size='auto'"),
    ('n_accumulate', 32, 'accum_bs=32'),
    ('drop_last', True, "remainder='drop'"), ('acum_bs', 4, "unexpected keyword argument 'acum_bs'")])
def test_arguments_of_others(name, value, says):
    for make in (lambda **kw: GradientAccumulation(**kw), lambda **kw: GradientAccumulationSchedule(16, 32, **kw)):
        with pytest.raises(TypeError) as e: make(**{name: value})
        assert says in str(e.value)

def told(n, bs, *args, cbs=(), about='an epoch', **kwargs):
    items = [(x, x.sum()[None]) for x in torch.randn(n, 3)]
    dls = DataLoaders(DataLoader(items, bs=bs), DataLoader(items, bs=bs), device='cpu')
    learn = Learner(dls, nn.Linear(3, 1), loss_func=nn.MSELoss(), opt_func=SGD, cbs=[GradientAccumulation(*args, **kwargs), *cbs])
    with warnings.catch_warnings(record=True) as found, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(3, .01)
    return [str(w.message) for w in found if about in str(w.message)]

@pytest.mark.parametrize('n,bs', [(31, 8), (8, 8), (31, 31), (5, 8)])
def test_an_epoch_is_one_step(n, bs):
    msg, = told(n, bs, 32)
    assert 'accum_bs=32' in msg and f'{n} items' in msg

@pytest.mark.parametrize('n,bs,args,kwargs',
                         [(32, 8, (32,), {}), (33, 8, (32,), {}), (31, 8, (32,), dict(remainder='carry')),
                          (20, 20, (), dict(micro_batch_size=4))])
def test_an_epoch_has_a_full_step(n, bs, args, kwargs): assert not told(n, bs, *args, **kwargs)

def test_an_epoch_cut_short(): assert not told(64, 8, 32, cbs=[ShortEpochCallback(.3)])

@pytest.mark.parametrize('kwargs', [{}, dict(micro_batch_size=8), dict(micro_batch_size='auto')])
def test_a_step_takes_whole_loader_batches(kwargs):
    "With micro-batches these accumulate, so it would be wrong that nothing does"
    msg, = told(80, 40, 16, about='accum_bs=16', **kwargs)
    assert msg.startswith('accum_bs=16 is smaller than a loader batch of 40 items, and a step takes whole ones: each is a step')
    assert 'Write a larger accum_bs, or load smaller batches.' in msg
