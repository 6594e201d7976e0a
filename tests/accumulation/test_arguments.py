"""Arguments: each is declared once, and shown where it is taken. Those of other libraries get an error that names fastaccum's"""
import inspect, re, warnings
from functools import partial
import pytest, torch, torch.nn as nn
from fastai.callback.training import ShortEpochCallback
from fastai.basics import DataLoader, DataLoaders, Learner, SGD
from fastcore.docments import docments
from fastai.callback.schedule import SchedPoly
from fastaccum.all import AdaptiveGradientAccumulation, GradientAccumulation, GradientAccumulationSchedule
apidoc = pytest.importorskip('apidoc')

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
    assert 'Write a larger accum_bs (it counts items: for 16 loader batches write 16*40), or load smaller batches.' in msg

def test_schedules_that_take_more():
    "SchedPoly takes a power: told when the callback is made"
    with pytest.raises(TypeError, match='partial.SchedPoly, power=2'): GradientAccumulationSchedule(16, 32, schedule=SchedPoly)
    for schedule in (partial(SchedPoly, power=2), SchedPoly(16, 32, 2), lambda pos: 16):
        GradientAccumulationSchedule(16, 32, schedule=schedule)

# --- one declaration of each argument
def own_parameters(cls): return inspect.signature(cls.__init__).parameters

def test_each_argument_is_declared_once():
    "Its default and its text stand in one signature; classes that pass it on show it, with both"
    takes = {k: p for k,p in own_parameters(GradientAccumulation).items() if k != 'self'}
    told = docments(GradientAccumulation, args_kwargs=True)
    assert {'accum_bs','coupled','micro_batch_tokens'} <= takes.keys() and all(told[k] for k in takes)
    for cls in (GradientAccumulationSchedule, AdaptiveGradientAccumulation):
        passed_on = [k for k in takes if k not in ('accum_bs','n_acc')]
        shown = inspect.signature(cls).parameters
        assert [(k, shown[k].default) for k in passed_on] == [(k, takes[k].default) for k in passed_on]
        written = inspect.unwrap(cls.__init__).__code__
        assert not {*written.co_varnames[:written.co_argcount]} & takes.keys() - {'self'}

def test_texts_of_the_schedule():
    texts = docments(GradientAccumulationSchedule, args_kwargs=True)
    told = docments(GradientAccumulation, args_kwargs=True)
    other = {k for k,v in told.items() if texts.get(k) != v}
    assert other == {'accum_bs','n_acc'}

def test_checks_are_of_arguments():
    "And no annotation shows one"
    for check in GradientAccumulation.__init__.checks:
        assert inspect.signature(check).parameters.keys() <= own_parameters(GradientAccumulation).keys(), check
    assert not [p for p in own_parameters(GradientAccumulation).values() if 'Annotated' in str(p) or 'typing' in str(p)]
    assert str(own_parameters(GradientAccumulation)['micro_batch_size']) == "micro_batch_size: 'int | str | None' = None"

@pytest.mark.parametrize('kwargs,says', [
    (dict(accum_bs=64, n_acc=32), 'pass accum_bs alone'), (dict(micro_batch_size=0), 'an int, at least 1'),
    (dict(micro_batch_size=2.5), 'an int, at least 1'), (dict(micro_batch_tokens='all'), 'the largest number of tokens'),
    (dict(remainder='keep'), "is not one of 'step', 'drop', 'carry'"), (dict(remainder=None), 'is not one of'),
    (dict(coupled=''), 'pass True for one loss'), (dict(coupled=1), 'pass True for one loss'),
    (dict(coupled=True), 'needs micro_batch_size'),
    (dict(micro_batch_size=4, coupled='head', activations='device'), "with coupled='batchnorm'"),
    (dict(activations='cpu'), "pass 'host' or 'device'"), (dict(grad_dtype=torch.float64), 'pass torch.float32'),
    (dict(grad_device='cuda'), "pass 'cpu'"), (dict(weight=2), 'Class weights belong'), (dict(n_items=8), 'the number of items'),
    (dict(check_loss='never'), "'always' to check each"), (dict(unit='lr'), 'becomes a column'), (dict(unit='words'), 'pass count= too'),
    (dict(count=len), 'name it'), (dict(unit='words', count=3), 'count is 3'), (dict(pad_idx=1.), 'an int'),
    (dict(micro_batch_tokens=64, micro_batch_size=4), 'does not go with micro_batch_size=4'),
    (dict(micro_batch_tokens=64, coupled=True), 'does not go with coupled=True'),
    (dict(micro_batch_tokens=64, n_items=len), 'does not go with n_items=')])
def test_wrong_values(kwargs, says):
    "Before training, for each class that takes the argument"
    classes = [GradientAccumulation]
    if not kwargs.keys() & {'accum_bs','n_acc'}:
        classes += [partial(GradientAccumulationSchedule, 16, 32), partial(AdaptiveGradientAccumulation, 16, 32)]
    for cls in classes:
        with pytest.raises((ValueError,TypeError)) as e: cls(**kwargs)
        assert says in str(e.value)

def test_first_positions_stay():
    acc = GradientAccumulation(64, None, False)
    assert (acc.accum_bs, acc.n_acc, acc.log_accum_batch) == (64, None, False)
    assert GradientAccumulation(None, 48).accum_bs == 48

# --- the page
def test_groups_of_the_page():
    "Three tables, the usual arguments first"
    groups = apidoc.groups_of(GradientAccumulation)
    assert [*groups] == ['usual', 'whole loader batches, and memory', 'the loss, ranks and texts']
    assert groups['usual'] == ['accum_bs','n_acc','log_accum_batch','micro_batch_size','remainder','exact']
    assert sum(groups.values(), []) == [k for k in own_parameters(GradientAccumulation) if k != 'self']
    page = apidoc.parameters(GradientAccumulation)
    assert page.count('| Parameter |') == 3 and page.startswith('**Usual**')

@pytest.mark.parametrize('cls,own', [(GradientAccumulationSchedule, ['start_accum_bs','final_accum_bs','start','finish','schedule']),
                                     (AdaptiveGradientAccumulation, ['min_accum_bs','max_accum_bs','beta','monotone'])])
def test_a_page_has_what_is_its_own(cls, own):
    table = apidoc.parameters(cls)
    assert re.findall(r'(?m)^\| `([^`]*)`', table) == [*own, '**kwargs']
    assert '[`GradientAccumulation`](' in table.splitlines()[-1]
    assert re.findall(r'(?:\(|, |    )(\w+)[:=]', apidoc.signature(cls, 'C')) == own
