"One notice a fit, if BatchNorm in training sees less than a step has: it names what makes the step exact. Without it, the step is exact"
import re, warnings
import pytest
from torchvision.models import resnet18
from fastaccum.all import *
from quick import quickly
from reference import *

images = Data(torch.randn(32, 3, 16, 16, dtype=torch.float64), torch.randint(0, 4, (32,)))
rows = Data(torch.randn(64, 6), torch.randn(64, 4))

def two_norms():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 4))
def in_the_head(): return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)))
def norms(learn): return [m for m in learn.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
def freeze(learn):
    for m in norms(learn): m.eval()

def get_learner(bs, *cbs, model=two_norms, data=rows, **kwargs):
    return learner(data, bs, *cbs, model=model(), splitter=lambda m: L(m[:2], m[2:]).map(params), **kwargs)

def told(f):
    "The notices that `f()` gives. Other warnings of fastaccum are errors, as in all tests"
    with warnings.catch_warnings(record=True) as seen:
        warnings.filterwarnings('always', 'BatchNorm', FastaccumWarning)
        f()
    return [str(w.message) for w in seen if w.category is FastaccumWarning]

def of_a_fit(bs, *cbs, n_epoch=2, **kwargs): return told(lambda: get_learner(bs, *cbs, **kwargs).fit(n_epoch, .01))

# --- what it says

@pytest.mark.parametrize('n,split', quickly([], [(8, True), (16, False)], long=[(16, False)]))
def test_resnet(n, split):
    "A notice whatever the size, and the line that it names is exact"
    net = resnet18(num_classes=4).double()         # in fp32 rounding errors come to some thousandths of its way
    def fit(bs, *cbs):
        learn = learner(images, bs, *cbs, model=net, loss_func=CrossEntropyLossFlat())
        return told(lambda: learn.fit(1, .01)),weights(learn.model)
    if split: texts,off = fit(32, GradientAccumulation(micro_batch_size=n))
    else: texts,off = fit(n, GradientAccumulation(32))
    text, = texts
    assert f'20 layers see {n} items at a time, and a step has 32' in text
    assert ('load 32 items at a time (bs=32) and write' in text) is not split
    line = re.search(r'GradientAccumulation\([^()]*\)', text)[0]
    assert line == f"GradientAccumulation(micro_batch_size={n}, coupled='batchnorm')"
    (silent,ours),(_,whole) = fit(32, eval(line)),fit(32)
    assert silent == [] and rel_err(ours-weights(net), whole-weights(net)) < 1e-9 < .1 < rel_err(off-weights(net), whole-weights(net))

@pytest.mark.parametrize('bs,kwargs,seen,step,line', [
    (16, dict(accum_bs=64), 16, 64, "load 64 items at a time (bs=64) and write GradientAccumulation(micro_batch_size=16, "),
    (16, dict(n_acc=48, micro_batch_size=4), 4, 48, "load 48 items at a time (bs=48) and write GradientAccumulation(micro_batch_size=4, "),
    (32, dict(micro_batch_size=20), 16, 32, "To be exact, write GradientAccumulation(micro_batch_size=20, "),
    (32, dict(micro_batch_size=8, coupled=True), 8, 32, "To be exact, write GradientAccumulation(micro_batch_size=8, "),
    (16, dict(accum_bs=64, micro_batch_size=4, coupled='batchnorm'), 16, 64,
     "load 64 items at a time (bs=64) and write GradientAccumulation(micro_batch_size=4, "),
    (16, dict(accum_bs=40), 16, 48, 'load 40 items at a time (bs=40) and write GradientAccumulation(micro_batch_size=16, '),
    (16, dict(accum_bs=8, unit='rows', count=lambda l: 4), 16, 'more',
     'load the whole batch and write GradientAccumulation(micro_batch_size=16, ')])
def test_says_what_to_write(bs, kwargs, seen, step, line):
    text, = of_a_fit(bs, GradientAccumulation(**kwargs))
    assert f'2 layers see {seen} items at a time, and a step has {step}' in text and f"{line}coupled='batchnorm')" in text
    assert "warnings.filterwarnings('ignore', 'BatchNorm', FastaccumWarning)" in text

@pytest.mark.filterwarnings('ignore:accum_bs=1000 is more than')
def test_a_step_has_no_more_than_an_epoch():
    text, = of_a_fit(16, GradientAccumulation(1000))
    assert 'a step has 64' in text and '(bs=64)' in text

def test_in_the_head():
    "The head sees the loader batch by `coupled='head'`, which takes less"
    text, = of_a_fit(16, GradientAccumulation(micro_batch_size=4), model=in_the_head)
    assert '1 layer sees 4 items' in text and "GradientAccumulation(micro_batch_size=4, coupled='head')" in text
    assert of_a_fit(16, GradientAccumulation(micro_batch_size=4, coupled='head'), model=in_the_head) == []
    text, = of_a_fit(16, GradientAccumulation(micro_batch_size=4, coupled='head'))              # the other is in the body
    assert "coupled='batchnorm'" in text
    text, = of_a_fit(16, GradientAccumulation(32, micro_batch_size=4, coupled='head'), model=in_the_head)
    assert 'load 32 items at a time (bs=32)' in text

@pytest.mark.parametrize('cbs', [lambda: [GradientAccumulationSchedule(16, 64)],
                                 lambda: [GradientAccumulation(64), GradientNoiseScale()]], ids=['schedule', 'noise'])
def test_where_no_line_is_exact(cbs):
    text, = of_a_fit(16, *cbs())
    assert 'To be exact, freeze BatchNorm (`BnFreeze`) or use GroupNorm' in text

# --- when it comes

def test_one_a_fit():
    learn = get_learner(16, GradientAccumulation(64))
    assert len(told(lambda: learn.fit(3, .01))) == 1
    assert len(told(lambda: learn.fit(3, .01))) == 1
    assert len(told(lambda: learn.lr_find(num_it=5, show_plot=False))) == 1
    assert len(told(lambda: learn.fine_tune(1, .01, freeze_epochs=1))) == 2              # each of its fits

@pytest.mark.filterwarnings('ignore:.* changes nothing here')
def test_none_where_nothing_accumulates():
    for kwargs in (dict(accum_bs=16), dict(micro_batch_size=16), dict(micro_batch_size=100), dict(micro_batch_size=4, coupled='batchnorm')):
        assert of_a_fit(16, GradientAccumulation(**kwargs)) == []
    assert of_a_fit(64, GradientAccumulation(64, micro_batch_size=16, coupled='batchnorm')) == []
    assert of_a_fit(24, GradientAccumulation(24)) == []                                  # the last loader batch has 16

def test_none_without_batchnorm():
    for norm in (nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.InstanceNorm1d(6)):
        assert of_a_fit(16, GradientAccumulation(64), model=lambda: nn.Sequential(norm, mlp(), nn.Identity())) == []

@pytest.mark.parametrize('event', ['before_fit', 'before_epoch', 'before_train', 'before_batch'])
def test_frozen(event):
    "By a callback, after fastai has set the model to training"
    n = len(of_a_fit(16, GradientAccumulation(64), On(event, freeze, training=None)))
    assert n == (event in ('before_fit','before_epoch'))

def test_frozen_by_fastai():
    "Layers whose weights are trained stay in training"
    learn = get_learner(16, GradientAccumulation(64), BnFreeze(), model=lambda: nn.Sequential(nn.BatchNorm1d(6), mlp(), nn.BatchNorm1d(4)))
    for left in (2, 1):
        text, = told(lambda: learn.fit(1, .01))
        assert f'{left} layer' in text
        norms(learn)[left-1].requires_grad_(False)
    assert told(lambda: learn.fit(1, .01)) == []

def test_thawed_in_the_middle_of_a_fit():
    def thaw_late(learn):
        if learn.epoch == 0: freeze(learn)
    assert len(of_a_fit(16, GradientAccumulation(64), On('before_train', thaw_late, training=None))) == 1

def test_none_in_evaluation():
    learn = get_learner(16, GradientAccumulation(64, micro_batch_size=4))
    assert told(lambda: (learn.validate(), learn.get_preds())) == []

def test_batch_statistics_also_in_evaluation():
    "Without running statistics, `eval` does not freeze it"
    def model(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4))
    assert len(of_a_fit(16, GradientAccumulation(64), On('before_batch', freeze), model=model)) == 1

def test_auto_names_what_it_tried():
    text, = of_a_fit(64, GradientAccumulation(128, micro_batch_size='auto'), data=Data(torch.randn(128, 6), torch.randn(128, 4)))
    assert '2 layers see 64 items' in text and "micro_batch_size='auto', coupled='batchnorm'" in text

def test_can_be_hidden():
    "By the filter that it names"
    text, = of_a_fit(16, GradientAccumulation(64))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        exec(re.search(r'warnings\.filterwarnings\([^()]*\)', text)[0])
        get_learner(16, GradientAccumulation(64)).fit(1, .01)
