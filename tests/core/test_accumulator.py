"""The ground floor by itself: gradient and loss of an accumulated batch in closed form

The loss of a micro-batch is `slope*(x+1)` at x=0: its value and its gradient are both `slope`. So the gradient of an accumulated batch,
and its loss, must both be the mean of the slopes, each counted with its weight."""
import warnings
from unittest.mock import Mock, patch
import pytest, torch
from torch import nn, tensor
from bench.measure import SyncCounter
from fastaccum.core.accumulator import Accumulated, GradientAccumulator, _scalars, as_weight, mean_loss, mean_of_divided, \
    nonzero, rescale, scalar, scale_grads, weighted
from fastaccum.core.warnings import FastaccumWarning

KINDS = dict(numbers=lambda w, i: w, integers=lambda w, i: tensor(int(w)), floats=lambda w, i: tensor(float(w)),
             mixed=lambda w, i: w if i%2 else tensor(float(w)), vectors=lambda w, i: tensor([w]),
             doubles=lambda w, i: tensor(w, dtype=torch.float64))
kinds = pytest.mark.parametrize('kind', KINDS.values(), ids=KINDS)

class Toy:
    def __init__(self, accum_bs=8, dtype=torch.float32, **kwargs):
        self.x = nn.Parameter(torch.zeros((), dtype=dtype))
        self.acc,self.i = GradientAccumulator([self.x], accum_bs, **kwargs),0

    def add(self, slope, weight, n, kind=KINDS['numbers'], **kwargs):
        self.acc.add(slope*(self.x+1), n, kind(weight, self.i), **kwargs).backward()
        self.i += 1

    def finish(self):
        loss = self.acc.finish()
        assert loss.item()==pytest.approx(self.x.grad.item(), rel=1e-6)
        return loss.item()

def mean(*parts): return pytest.approx(sum(s*w for s,w,_ in parts)/sum(w for _,w,_ in parts), rel=1e-6)

# Slope, weight, items
PARTS = {'items': ((3., 4, 4), (5., 4, 4)), 'tokens': ((3., 9, 4), (5., 2, 4), (7., 6, 3)), 'nothing first': ((3., 0, 4), (5., 2, 4)),
         'nothing last': ((3., 2, 4), (5., 0, 4)), 'one': ((3., 5, 2),), 'fewer than accum_bs': ((3., 1, 1), (5., 4, 2))}

@kinds
@pytest.mark.parametrize('parts', PARTS.values(), ids=PARTS)
def test_mean(parts, kind):
    toy = Toy()
    for i,p in enumerate(parts):
        assert toy.acc.n_items==sum(n for *_,n in parts[:i])
        toy.add(*p, kind)
    assert toy.acc.ready==(sum(n for *_,n in parts) >= 8)
    assert toy.finish()==mean(*parts) and toy.acc.n_items==0 and not toy.acc.ready

@kinds
@pytest.mark.parametrize('cut', (0, 1, 2, 3))
@pytest.mark.parametrize('parts', (PARTS['tokens'], ((3., .25, 4), (5., .25, 4), (7., .5, 3)), ((3., 0, 4), (5., 2, 4), (7., 1, 3))))
def test_reopen(parts, cut, kind):
    "A `finish` that was taken back leaves no trace, and costs no sync"
    if kind is KINDS['integers'] and .25 in parts[0]: pytest.skip('no integers')
    toy = Toy(16)
    for i,p in enumerate(parts):
        if i==cut and i:
            toy.acc.finish()
            with SyncCounter() as syncs: toy.acc.reopen()
            assert syncs.n==0
        toy.add(*p, kind)
    if cut==3: toy.finish(); toy.acc.reopen()
    assert toy.acc.n_items==11 and toy.finish()==mean(*parts)

def test_reopened_record():
    "The gradients are divided by the sum of the weights now, and more items may come: nothing is complete, or computed"
    toy = Toy()
    toy.acc.shares([9, 2], 8, complete=True)
    for p in PARTS['tokens'][:2]: toy.acc.count(tensor(p[0]), *p[1:])
    toy.acc.finish()
    toy.acc.reopen()
    assert (toy.acc.closed.planned==8 and toy.acc.closed.computed
            and toy.acc.so_far==toy.acc.closed._replace(target=11, planned=-1, computed=None))

def test_reduce():
    "With several ranks: `reduce` gets what this rank has, and what it returns is the step's"
    toy = Toy(16)
    for p in PARTS['tokens'][:2]: toy.add(*p)
    grad,target = toy.x.grad.item(),toy.acc.so_far.target
    toy.acc.reduce = Mock(return_value=(tensor(7.), 17, 12))
    assert toy.acc.finish()==7 and toy.x.grad.item()==grad        # it divides the gradients, too
    toy.acc.reduce.assert_called_once_with(tensor(37/11), 11, 8, target)
    assert toy.acc.closed.n_items==12 and toy.acc.closed.computed==(7, 17)

def test_sums():
    "Not normalized: losses and gradients are added up, whatever the weights"
    toy = Toy(normalize=False)
    for p in ((3., 9, 4), (5., tensor(0.), 4)): toy.add(*p)
    toy.acc.finish()
    toy.acc.reopen()
    toy.add(7., 2, 4)
    assert toy.finish()==15
    toy = Toy(normalize=False)
    pred = toy.x+1
    toy.acc.add(3*pred, 4, 0, pred=pred).backward()      # counts, whatever its weight
    assert toy.finish()==3

def test_nan_of_nothing():
    "Losses of micro-batches without weight may be NaN, and their gradients too where the prediction is given"
    for weight in (0, tensor(0), tensor(0.)):
        toy = Toy()
        pred = toy.x+1
        toy.acc.add((pred-pred)/(pred-pred), 4, weight, pred=pred).backward()
        toy.add(5., 2, 4)
        assert toy.finish()==5

def test_nominal():
    "The target: `accum_bs` items that weigh what the first ones would if nothing were ignored"
    for weight,nominal,target in ((4, None, 8), (12, None, 24), (0, None, 8), (tensor(6.), None, 8), (tensor(6.), 20, 40), (6, 20, 40)):
        toy = Toy()
        toy.add(3., weight, 4, nominal=nominal)
        assert toy.acc.so_far.target==target
    toy = Toy()
    toy.acc.set_target(5)
    toy.add(3., 4, 4)
    assert toy.acc.target==5

@pytest.mark.parametrize('on_device', (False, True))
def test_complete(on_device):
    "All weights at once: nothing is left to multiply, and the loss is the mean"
    toy,parts = Toy(),PARTS['tokens']
    weights = [w for _,w,_ in parts]
    shares = toy.acc.shares(tensor(weights) if on_device else weights, 11, complete=True)
    assert [float(s) for s in shares]==pytest.approx([9/17, 2/17, 6/17]) and isinstance(shares, torch.Tensor)==on_device
    assert Toy(8, torch.float64).acc.shares(tensor(weights), 11).dtype==torch.float64
    for (slope,w,n),share in zip(parts, shares):
        (slope*(toy.x+1)*share).backward()
        toy.acc.count(tensor(slope), tensor(w) if on_device else w, n)
    with patch('fastaccum.core.accumulator.mean_loss', return_value=None) as m: toy.acc.mean(since=1), toy.acc.mean()
    assert [c.args[3:] for c in m.call_args_list]==[(), (toy.acc.target,)]     # the sum is known
    grad = toy.x.grad
    toy.x.grad = None                  # `finish` does not look at it
    loss = toy.acc.finish()
    assert toy.x.grad is None and loss.item()==mean(*parts) and grad.item()==mean(*parts)

def test_half_complete():
    "More items came than were planned"
    toy = Toy()
    share, = toy.acc.shares([9], 4, complete=True)
    (3*(toy.x+1)*share).backward()
    toy.acc.count(tensor(3.), 9, 4)
    toy.add(5., 2, 4)
    assert toy.acc.so_far.planned==-1 and toy.finish()==mean((3., 9, 4), (5., 2, 4))

@pytest.mark.parametrize('stacked', (False, True))
def test_mean_since(stacked):
    "The weights may be at hand in one tensor, and are taken from there"
    toy,weights = Toy(16),tensor([w for _,w,_ in PARTS['tokens']])
    marks = []
    for p in PARTS['tokens']:
        marks.append(len(toy.acc.so_far.losses))
        toy.add(*p)
    if stacked: assert toy.acc.mean(marks[1], tensor([1, 0]))[0]==5
    assert [toy.acc.mean(m, weights[i:] if stacked else None)[0].item()
            for i,m in reversed([*enumerate(marks)])]==[7, mean(*PARTS['tokens'][1:]), mean(*PARTS['tokens'])]
    assert toy.acc.so_far.computed[1]==17 and toy.acc.mean() is toy.acc.so_far.computed and toy.finish()==mean(*PARTS['tokens'])

@kinds
def test_state(kind):
    "Plain numbers; another one goes on with them"
    toy,other = Toy(16),Toy(4)
    for p in PARTS['tokens'][:2]: toy.add(*p, kind)
    state = toy.acc.state_dict()
    assert not any(isinstance(v, torch.Tensor) for v in state.values())
    target = 16*9/4 if kind is KINDS['numbers'] else 16
    assert state==dict(accum_bs=16, n_items=8, loss=pytest.approx(37/11), weight=11, target=target)
    other.acc.load_state_dict(state)
    assert other.acc.accum_bs==16 and other.acc.state_dict()==state|dict(loss=pytest.approx(state['loss']))
    other.x.grad = toy.x.grad
    other.add(*PARTS['tokens'][2], kind)
    assert other.finish()==mean(*PARTS['tokens'])
    other.acc.load_state_dict(Toy(2).acc.state_dict())
    assert other.acc.so_far==Accumulated() and other.acc.accum_bs==2

@pytest.mark.parametrize('known', (False, True))
def test_correct(known):
    "A weight that was wrong; and a loss that turns out to be a sum"
    def first(accum_bs):
        toy = Toy(accum_bs)
        toy.add(3., 2, 1)
        if known: toy.acc.mean()
        return toy
    toy = first(4)
    toy.acc.correct([5])
    assert toy.finish()==3
    toy = first(4)
    toy.acc.correct([5])
    toy.add(7., 1, 1)
    assert toy.finish()==mean((3., 5, 1), (7., 1, 1))
    toy = Toy(4)
    toy.add(0., 2, 1)                   # nothing in it counts: no gradient
    toy.acc.correct([0])
    toy.add(7., 1, 1)
    assert toy.finish()==7
    toy = first(4)
    toy.acc.correct([None])
    assert toy.x.grad==3 and toy.acc.state_dict()['weight']==1 and toy.acc.normalize is False
    toy.add(7., 1, 1)
    assert toy.finish()==10

def test_float64():
    "Factors in the loss's type: 1/3 to 15 digits, from weights that are integers on the device too"
    for kind in KINDS.values():
        toy = Toy(7, torch.float64)
        for slope in (1., 1., 2.): toy.add(slope, 1, 1, kind)
        loss = toy.acc.finish()
        assert abs(toy.x.grad.item()-4/3) < 1e-15 and abs(loss.item()-4/3) < 1e-15
        assert loss.dtype==torch.float64 and toy.acc.dtype==torch.float64
    assert Toy().acc.dtype==torch.float32

def test_weighted():
    loss = tensor(3.)
    assert weighted(loss, 1) is loss and weighted(loss, 2)==6 and weighted(loss, tensor(2.))==6
    assert weighted(tensor(float('nan')), tensor(0.))==0
    with patch('torch.where') as where: weighted(torch.zeros((), device='meta'), 0)
    assert where.call_args[0][0].is_meta

@pytest.mark.parametrize('dtype', (torch.bfloat16, torch.float64))
def test_type_of_one_loss(dtype): assert mean_loss([tensor(3., dtype=dtype)], [tensor(2)])[0].dtype==dtype

def test_scalar():
    "Numbers are kept as tensors, a hundred of them at most"
    _scalars.clear()
    t = scalar(.3, torch.float64, torch.device('cpu'))
    assert t.item()==.3 and t.dtype==torch.float64 and scalar(.3, torch.float64, torch.device('cpu')) is t
    assert scalar(.3, torch.float64, torch.device('meta')).is_meta and scalar(.3, torch.float32, torch.device('cpu')).dtype==torch.float32
    for i in range(98): scalar(i+.1, torch.float64, torch.device('cpu'))
    assert len(_scalars)==101 and scalar(.3, torch.float64, torch.device('cpu')) is t
    scalar(98.1, torch.float64, torch.device('cpu'))
    assert len(_scalars)==1
    t = tensor(2.)
    assert scalar(t, torch.float32, None) is t and scalar(t, torch.float64, None).dtype==torch.float64

def test_scale_grads():
    "Dense and sparse gradients, and parameters that have none"
    ps = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    ps[0].grad,ps[3].grad = torch.ones(3),torch.ones(3, dtype=torch.float64, device='cpu').to(torch.float32)
    ps[1].grad = torch.ones(3).to_sparse()
    for factor in (2., tensor(3.)): scale_grads(ps, factor)
    assert ps[2].grad is None
    assert all((p.grad.to_dense()==6).all() for p in ps if p.grad is not None)

def test_one_multiply_a_device():
    ps = [nn.Parameter(torch.ones(3, device=d)) for d in ('cpu', 'meta', 'cpu')]
    for p in ps: p.grad = torch.ones_like(p)
    with patch('torch._foreach_mul_') as m: scale_grads(ps, tensor(3.))
    assert [(len(grads), grads[0].device, factor.device) for (grads,factor),_ in m.call_args_list]==[
        (n, torch.device(d), torch.device(d)) for n,d in ((2, 'cpu'), (1, 'meta'))]

def test_rescale():
    p = nn.Parameter(torch.zeros(2))
    for weight,expected in ((4, 2.), (tensor(4.), 2.), (8, 1.), (0, 0.), (tensor(0.), 0.)):
        p.grad = torch.ones(2)
        rescale([p], 8, weight)
        assert p.grad.tolist()==[expected]*2

def test_wrong_size():
    "The error says what was given"
    for v,error in ((2.5, TypeError), (True, TypeError), ('8', TypeError), (0, ValueError), (-1, ValueError)):
        with pytest.raises(error, match=f'^accum_bs is {v!r}, a {type(v).__name__}:|^accum_bs={v}:'): GradientAccumulator([], v)

def test_device():
    "Weights go where the loss is"
    assert as_weight(tensor(3.), 'meta').is_meta and as_weight(3, 'meta')==3
    acc = GradientAccumulator([x := nn.Parameter(torch.zeros((), device='meta'))], 8)
    acc.add(x*2, 4, tensor(3.))
    assert acc.so_far.weights[0].is_meta
    with patch('fastaccum.core.accumulator.ignore_empty') as m: acc.add(x*2, 4, 3, pred=x)
    assert m.call_args[0][1].is_meta

def test_nonzero():
    for v,expected in ((0, 1), (3, 3), (.5, .5), (tensor(0), 1), (tensor(3), 3), (tensor(0.), 1), (tensor(.5), .5)):
        assert nonzero(v)==expected

def test_mean_loss():
    "Without losses; of other types; with numbers and tensors mixed"
    loss,weight = mean_loss([], [])
    assert (loss, weight)==(0, 0)
    loss,weight = mean_loss([tensor(3.), tensor(5.)], [1, tensor(3.)])
    assert (loss, weight)==(4.5, 4)
    loss,_ = mean_loss([tensor(3., dtype=torch.float16)]*2, [60000, 60001])
    assert loss==3                       # the sum of such weights is no float16
    assert mean_loss([tensor(3.), tensor(5.)], [tensor(1.), tensor(3.)], total=tensor(8.))[0]==2.25
    there = torch.zeros((), device='meta')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for weights in ([1, 3], [1, there]): assert mean_loss([there, there], weights)[0].is_meta
    for w,normalize,expected in ((tensor(.5), True, 3), (0, True, 0), (0, False, 3)):
        assert mean_loss([tensor(3.)], [w], normalize)[0]==expected

def test_reset():
    toy = Toy()
    toy.add(3., 4, 4)
    toy.acc.reset()
    assert toy.x.grad is None and toy.acc.so_far==Accumulated()
    toy.add(3., 4, 4)
    toy.acc.reset(torch.optim.SGD([toy.x], .1))
    assert toy.x.grad is None and toy.acc.n_items==0
    toy.add(5., 1, 8)
    assert toy.finish()==5

def test_rollback():
    "Back to a record: what was counted since is gone, what is computed from it too"
    toy = Toy(16)
    toy.add(3., 9, 4)
    before = toy.acc.so_far
    toy.add(5., 2, 4)
    toy.acc.mean()
    assert toy.acc.so_far!=before and before.n_items==4
    toy.acc.rollback(before)
    assert toy.acc.so_far==before and toy.acc.mean()[0]==3 and toy.acc.n_items==4

def test_open():
    "What may change from one accumulated batch to the next; `None` changes nothing"
    acc = Toy().acc
    acc.open()
    assert (acc.accum_bs, acc.normalize)==(8, True)
    acc.open(16, False)
    assert (acc.accum_bs, acc.normalize)==(16, False)

def test_count_for_all():
    "Items of other ranks too: what this rank's weights add up to is not the step's"
    toy = Toy()
    toy.acc.shares([9], 4, complete=True)
    toy.acc.count(tensor(3.), 9, 4)
    toy.acc.count_for_all(8)
    assert toy.acc.n_items==8 and toy.acc.ready and toy.acc.so_far.planned==4

def test_batches_for_items():
    "Told once that nothing accumulates: `accum_bs` counts items"
    p = nn.Parameter(torch.ones(()))
    acc = GradientAccumulator([p], 4)
    with pytest.warns(FastaccumWarning, match='16 items.*accum_bs=4 .*4\\*16') as said:
        for _ in range(3):
            acc.add(p*2, 16).backward()
            acc.finish()
    assert len(said) == 1

def test_a_last_micro_batch_may_be_larger_than_what_is_missing():
    p = nn.Parameter(torch.ones(()))
    acc = GradientAccumulator([p], 20)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for n in (16, 16, 20): acc.add(p*2, n).backward()

def test_a_loss_that_is_no_number_is_not_hidden():
    "Of a micro-batch that counts 1, too; one that counts nothing has none"
    losses = [torch.tensor(float('nan')), torch.tensor(2.)]
    assert mean_of_divided([1., 1.], 0, losses, [1., 1.])[0].isnan()
    assert mean_of_divided([1., 1.], 0, losses, [0., 1.])[0] == 2
