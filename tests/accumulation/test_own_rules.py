"Losses with a divisor of their own, each exact or told: hard examples, N pairs, Dice where there is foreground, class weights made inside"
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastaccum.all import GradientAccumulation
from test_check import fit, items, off
from test_detection import Heatmap, exact, heatmaps, items as anchors, off as off_detection, retina

def told_once(d, told, *words):
    assert len(told) == 1 and '%' in told[0] and all(w in told[0] for w in words), told
    assert d > 1e-5, 'exact, and yet told'

@pytest.mark.parametrize('share', [.25, .5])
def test_hard_examples(share):
    "The mean of the largest losses of a batch: which these are depends on all items"
    def loss(p, t):
        l = F.cross_entropy(p, t, reduction='none')
        return l.topk(max(1, round(share*len(l)))).values.mean()
    x,y = items()
    d,told,_ = off(lambda: loss, x, y)
    told_once(d, told, 'chooses', 'coupled=True')

def test_hard_examples_of_an_item():
    "Among the anchors of each item: a mean over items"
    x,y = items(kind='numbers')
    d,told,_ = off(lambda: lambda p, t: (p-t).pow(2).topk(1, dim=1).values.mean(), x, y, out=2)
    assert d < 1e-5 and not told

def test_n_pairs():
    "As in pytorch-metric-learning: one pair of each class, and all other positives are negatives"
    def loss(p, t):
        pairs = [ids[:2] for c in range(3) if len(ids := (t == c).nonzero()[:,0]) > 1]
        if not pairs: return p.sum()*0
        a,b = torch.stack(pairs).T
        return F.cross_entropy(p[a]@p[b].T, torch.arange(len(a)))
    x,y = items()
    d,told,_ = off(lambda: loss, x, y, lr=.05)
    told_once(d, told, 'compares', 'coupled=True')

def overlap(p, y): return (p*y).flatten(1).sum(1),(p+y).flatten(1).sum(1)

def dice_of_items(pred, y):
    "The mean over the items that have foreground, or 0"
    both,all_of = overlap(pred.sigmoid(), y := (y == 1).float())
    has = y.flatten(1).any(1)
    return ((1-2*both/all_of)*has).sum()/has.sum().clamp(min=1)

@pytest.mark.parametrize('k', [2, 8])
def test_dice_of_items_with_foreground(k):
    x,y = heatmaps(2, empty=range(16, 24))
    exact(dice_of_items, (x, (y == 1).float()), bs=k, net=Heatmap)
    exact(dice_of_items, (x, (y == 1).long()), bs=32, acc=dict(micro_batch_size=k), net=Heatmap)

def test_dice_of_a_batch():
    "One ratio over all pixels: told"
    def loss(pred, y):
        both,all_of = overlap(pred.sigmoid(), (y == 1).float())
        return 1-2*both.sum()/all_of.sum()
    d,_,told,_ = off_detection(loss, heatmaps(2), net=Heatmap)
    told_once(d, told, 'compares', 'coupled=True')

def test_class_weights_made_inside():
    "They are measured"
    x,y = items()
    def outside(p, t, w=torch.linspace(.5, 2, 3)): return F.cross_entropy(p, t, weight=w)
    def attribute(p, t): return F.cross_entropy(p, t, weight=attribute.weight)
    attribute.weight = torch.linspace(.5, 2, 3)
    for loss in (outside, attribute, lambda p, t: F.cross_entropy(p, t, weight=torch.linspace(.5, 2, 3))):
        d,told,learn = off(lambda: loss, x, y)
        assert d < 1e-5 and not told and 'measured' in learn.gradient_accumulation.loss_rule

@pytest.mark.parametrize('root', [lambda v: v.sqrt(), lambda v: (v+1e-8)**.5, lambda v: v**2], ids=['RMSE', 'RMSE of others', 'square'])
def test_function_of_a_mean(root):
    "It does not compare items, but no divisor makes it exact: `coupled=True` does, as it says"
    x,y = items()
    def loss(p, t): return root(F.mse_loss(p, F.one_hot(t, 3).float()))
    d,told,_ = off(lambda: loss, x, y)
    told_once(d, told, 'is a function of a mean', 'RMSE', 'Load the whole batch, and pass micro_batch_size= with coupled=True')
    assert 'weight=' not in told[0]
    before,whole,_ = fit(loss, x, y, 32)
    _,ours,_ = fit(loss, x, y, 32, GradientAccumulation(micro_batch_size=8, coupled=True))
    norm = lambda a, b: sum((p-q).double().pow(2).sum() for p,q in zip(a, b)).sqrt()
    assert norm(ours, whole) < 1e-5*norm(whole, before)

def test_log_of_a_mean():
    "Its gradients are those of a mean: it divides by the sum of what it is the logarithm of"
    x,y = items()
    d,told,_ = off(lambda: lambda p, t: F.mse_loss(p, F.one_hot(t, 3).float()).log(), x, y)
    assert d < 1e-5 and not told

def assigned(pred, boxes, y):
    "Which anchors are positive is decided inside"
    pos = boxes[...,0] + boxes[...,1] > 1.7
    assigned.n = pos.sum()
    l = F.binary_cross_entropy_with_logits(pred[0][...,0], pos.float(), reduction='sum')
    return l/assigned.n.clamp(min=1)

def test_own_count():
    "Exact as it is measured, and with `weight=`"
    data = anchors(.1)
    exact(assigned, data, bs=8)
    counted = lambda learn: (assigned.n, 1)
    exact(assigned, data, bs=2, acc=dict(accum_bs=32, weight=counted))
    exact(assigned, data, bs=32, acc=dict(micro_batch_size=2, weight=counted))

def test_two_divisors():
    "A mean over all anchors, and one over the positive ones"
    def loss(pred, boxes, y):
        return F.cross_entropy(pred[0].flatten(0, 1),
                               (y-1).clamp(min=0).flatten()) + F.smooth_l1_loss(
                                   pred[1][y > 0], boxes[y > 0], reduction='sum')/(y > 0).sum().clamp(min=1)
    d,_,told,_ = off_detection(loss, anchors(.2), bs=4)
    told_once(d, told, 'adds means over different things')
