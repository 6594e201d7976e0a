"What a callback reads of the loss after a batch is the big batch's: `learn.loss`, and what the loss object keeps of its last call"
import warnings
import pytest
from reference import *
from reference import GradientAccumulation    # ours
import torch.nn.functional as F
from fastai.metrics import LossMetrics
from fastaccum.core.values import _joined_leaves, joined

data = Data(torch.randn(61, 6, generator=torch.manual_seed(0)), torch.randn(61, 4))
plain = partial(SGD, mom=0.)

class Early(Callback):
    "Reads the loss of each step, before the callbacks that have an order"
    run_valid = False
    def __init__(self): self.seen = []
    def after_batch(self):
        if self.learn.stepped is not False: self.seen.append(float(self.learn.loss))

@pytest.mark.parametrize('bs,acc', [(8, dict(accum_bs=32)), (32, dict(micro_batch_size=8)), (16, dict(accum_bs=32, micro_batch_size=5))])
def test_loss_of_the_step(bs, acc):
    whole,learn = (learner(data, n, *cbs, Early(), opt_func=plain) for n,cbs in ((32, ()), (bs, (GradientAccumulation(**acc),))))
    for o in (whole, learn): o.fit(2, .05)
    assert len(learn.early.seen)==4 and np.allclose(learn.early.seen, whole.early.seen, rtol=1e-5)

class Parts(nn.Module):
    "A loss that keeps its parts, as numbers and in a dict, the losses of the items, how many count, and how often it was called"
    calls = 0
    def forward(self, pred, y):
        self.calls += 1
        each = (pred-y).pow(2).mean(1)
        self.mse,self.l1 = each.mean(),F.l1_loss(pred, y).item()
        if len(y) > 1: self.each = each.detach()
        self.all,self.n = dict(mse=self.mse.detach(), big=pred.abs().mean()),int((y > 0).sum())
        return self.mse + .1*self.l1_of(pred)
    def l1_of(self, pred): return pred.abs().mean()

class Words(nn.Module):
    "Averages over the targets that count; one of its values does not"
    def forward(self, pred, y):
        self.ce,self.size = F.cross_entropy(pred, y, ignore_index=-1),pred.pow(2).mean()
        return self.ce

def reading(names):
    "A callback that reads the loss's values after each step"
    class Reads(Callback):
        order,run_valid = 80,False
        def __init__(self): self.seen = []
        def after_batch(self):
            if self.learn.stepped is not False: self.seen.append([plain_values(getattr(self.learn.loss_func, k)) for k in names])
    return Reads()

def plain_values(v):
    return ({k: plain_values(o) for k,o in v.items()} if isinstance(v, dict) else v.detach().tolist()
            if isinstance(v, Tensor) else v)

ways = {'loader batches': (8, dict(accum_bs=32)), 'micro-batches': (32, dict(micro_batch_size=7)),
        'both': (16, dict(accum_bs=32, micro_batch_size=5)),
        'single items': (8, dict(accum_bs=32, micro_batch_size=1)), 'coupled': (16, dict(accum_bs=32, micro_batch_size=4, coupled=True))}

def fitted(of, bs, loss, names, *cbs, metrics=(), train_metrics=False):
    learn = learner(of, bs, *cbs, reading(names), opt_func=plain, loss_func=loss, metrics=metrics)
    learn.recorder.train_metrics = train_metrics
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn.fit(2, .05)
    return learn,[str(w.message) for w in found]

def same(a, b):
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and np.allclose(a, b, rtol=2e-5, atol=1e-7)

@pytest.mark.parametrize('train_metrics', [False, True])
@pytest.mark.parametrize('way', ways)
def test_values_of_the_step(way, train_metrics):
    "Also those that `LossMetrics` shows. A counter is left alone"
    bs,acc = ways[way]
    names = ['mse','l1','all'] if way == 'single items' else ['each','mse','l1','all','n']
    args = dict(metrics=LossMetrics('mse,l1'), train_metrics=train_metrics)
    whole,_ = fitted(data, 32, Parts(), names, **args)
    learn,told = fitted(data, bs, Parts(), names, GradientAccumulation(**acc), **args)
    assert not told and learn.loss_func.calls >= whole.loss_func.calls
    for a,b in zip(learn.reads.seen, whole.reads.seen, strict=True): assert all(map(same, a, b)), (a, b)
    assert np.allclose(learn.recorder.values, whole.recorder.values, rtol=1e-5)

targets = torch.randint(4, (61,), generator=torch.manual_seed(2))
targets[torch.tensor([0, 1, 2, 8, 9, 10, 11, 12, 13, 14, 33, 34, 40])] = -1
@pytest.mark.parametrize('way', ['loader batches', 'micro-batches', 'both'])
def test_each_value_has_its_weight(way):
    of,(bs,acc) = Data(data.x, targets),ways[way]
    whole,_ = fitted(of, 32, Words(), ['ce','size'])
    learn,told = fitted(of, bs, Words(), ['ce','size'], GradientAccumulation(**acc))
    assert not told
    for a,b in zip(learn.reads.seen, whole.reads.seen, strict=True): assert all(map(same, a, b)), (a, b)

def test_numbers_are_joined_in_double_precision():
    for kind,res in dict(mean=.7/3, items=.7/3, sum=.7).items(): assert joined(kind, [.1, .2, .4], [1]*3, [4]*3)==pytest.approx(res, 1e-12)

def test_lists_that_grow_make_up_nothing(): assert _joined_leaves('sum', [[1.], [1., 2.]], [1, 1], [2, 2])==[]

class Odd(Parts):
    def forward(self, pred, y):
        self.most = pred.max()
        return super().forward(pred, y)

@pytest.mark.slow
def test_told():
    "A value that micro-batches do not make up, if somebody reads it; once"
    learn,told = fitted(data, 32, Odd(), ['mse'], GradientAccumulation(micro_batch_size=8))
    assert not told
    class Most(Callback):
        def after_batch(self): self.last = self.learn.loss_func.most
    learn,told = fitted(data, 32, Odd(), ['mse'], GradientAccumulation(micro_batch_size=8), Most())
    assert len(told)==1 and told[0].startswith('Most reads `most`') and '7 of 32' not in told[0] and '8 of 32 items' in told[0]
    assert told[0].endswith('/tutorials/callbacks.html#what-fastaccum-warns-about')
    for metrics in (False, True):
        _,told = fitted(data, 32, Odd(), ['mse'], GradientAccumulation(micro_batch_size=8), metrics=LossMetrics('most'),
                        train_metrics=metrics)
        assert [t[:11] for t in told]==['LossMetrics']*metrics

class WeightedItems(nn.Module):
    "Its weights are set for each batch, as tsai's `WeightedPerSampleLoss` does"
    weights = None
    def __init__(self): super().__init__(); self.rates = torch.tensor([1., 2., 1., .5])        # of its own: 4 outputs, and 4 items
    def forward(self, pred, y):
        each = ((pred-y).pow(2)*self.rates).mean(1)
        return (each if self.weights is None else each*self.weights).mean()

class GivesWeights(Callback):
    "A weight for each item, which is known by its target"
    order = 65
    def __init__(self, in_place=False): self.in_place = in_place
    def before_batch(self):
        f,new = self.learn.loss_func,self.y[:,0].abs()+.1 if self.training else None
        if self.in_place and new is not None and f.weights is not None and f.weights.shape == new.shape: f.weights.copy_(new)
        else: f.weights = new

@pytest.mark.parametrize('in_place', [False, True])
@pytest.mark.parametrize('bs,acc', [(8, dict(accum_bs=16)), (16, dict(micro_batch_size=5)), (4, dict(accum_bs=16, micro_batch_size=3))])
def test_weights_of_items(bs, acc, in_place, recwarn):
    "What a callback gives the loss for the items of a batch is split with them, and whole again afterwards"
    data = Data(torch.randn(32, 6, generator=torch.manual_seed(0)), torch.randn(32, 4))
    whole,learn = (learner(data, n, *cbs, GivesWeights(in_place), opt_func=plain, loss_func=WeightedItems())
                   for n,cbs in ((16, ()), (bs, (GradientAccumulation(**acc),))))
    class Whole(Callback):
        order,run_valid = 70,False
        def after_batch(self): assert len(self.learn.loss_func.weights) == len(self.y) and len(self.learn.loss_func.rates) == 4
    learn.add_cb(Whole())
    for o in (whole, learn): o.fit(2, .05)
    assert rel_err(weights(learn.model), weights(whole.model)) < 1e-6

class Parted(nn.Module):
    "Keeps numbers that add up in different ways in one dict. Averages over the targets that count, over one at least"
    def forward(self, pred, y):
        counts = y >= 0
        each = F.cross_entropy(pred, y.clamp(min=0), reduction='none')*counts
        loss = each.sum()/counts.sum().clamp(min=1)
        self.parts = dict(ce=loss.item(), size=pred.abs().mean().detach(), n=int(counts.sum()), each=each.detach())
        return loss

@pytest.mark.parametrize('acc', [dict(), dict(check_loss='always')], ids=str)
@pytest.mark.parametrize('bs,k', [(8, None), (32, 7), (32, 1), (1, None)])
def test_each_number_of_a_value_is_weighed_by_itself(bs, k, acc):
    "Also where no micro-batch has two items, or one has no target that counts"
    of = Data(data.x, targets)
    whole,_ = fitted(of, 32, Parted(), ['parts'])
    learn,told = fitted(of, bs, Parted(), ['parts'], GradientAccumulation(32, micro_batch_size=k, **acc))
    assert not told
    for a,b in zip(learn.reads.seen, whole.reads.seen, strict=True): assert all(map(same, a, b)), (a, b)
