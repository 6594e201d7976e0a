"Detection losses: a sum over all targets, divided by the number of positive ones or by 1. Against plain fastai with the big batch"
from functools import partial
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from quick import quickly
from fastai.basics import DataLoader, DataLoaders, Learner, SGD
from fastaccum.all import FastaccumWarning, GradientAccumulation
import warnings

A,C = 12,3                                       # anchors of an item, classes

class Net(nn.Module):
    "Class scores and boxes of each anchor"
    def __init__(self, n_out=C+4):
        super().__init__()
        self.l,self.head,self.n_out = nn.Linear(6, 8),nn.Linear(8, A*n_out),n_out
    def forward(self, x):
        out = self.head(self.l(x).tanh()).view(len(x), A, self.n_out)
        return (out[...,:-4],out[...,-4:]) if self.n_out > 4 else out

def items(share, n=64, seed=0, background=0, empty=()):
    "Inputs, boxes and classes. Of anchors a `share` is positive; in the items `empty` none is"
    g = torch.Generator().manual_seed(seed)
    x,boxes = torch.randn(n, 6, generator=g),torch.rand(n, A, 4, generator=g)
    y = 1+torch.randint(C, (n, A), generator=g)
    negative = torch.rand(n, A, generator=g) > share
    negative[list(empty)] = True
    first = 1 if background == 0 else 0
    return x,boxes,torch.where(negative, background, y-1+first)

def smoothed(l): return l**2/(1+l)

def retina(first=1, least=1):
    "Focal-like loss of all anchors, and of the boxes of positive ones; the classes begin with `first`"
    def loss(pred, boxes, y):
        cls,reg = pred
        pos = (y >= first) & (y < first+C)
        hot = F.one_hot(torch.where(pos, y-first, C).long(), C+1)[...,:C].to(cls)
        l = F.binary_cross_entropy_with_logits(cls, hot, reduction='none')
        total = smoothed(l).sum() + F.smooth_l1_loss(reg[pos], boxes[pos], reduction='sum')
        return total/pos.sum().clamp(min=least)
    return loss

def fit(loss, data, bs, *cbs, lr=.02, n_epoch=2, net=Net):
    torch.manual_seed(0)
    model,n = net(),len(data)-1
    rows = list(zip(*data))
    dls = DataLoaders(DataLoader(rows, bs=bs), DataLoader(rows, bs=bs), device='cpu')
    dls.n_inp = dls.train.n_inp = 1
    learn = Learner(dls, model, loss_func=loss, opt_func=SGD, cbs=list(cbs), metrics=[])
    before = [p.detach().clone() for p in model.parameters()]
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, lr)
    return before,[p.detach() for p in model.parameters()],learn

def off(loss, data, step=32, bs=8, acc=None, **kw):
    "(how far the weights are off, in the distance moved; what was told; the Learner)"
    before,whole,big = fit(loss, data, step, **kw)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        _,ours,learn = fit(loss, data, bs, GradientAccumulation(**(acc or dict(accum_bs=step))), **kw)
    norm = lambda a, b: sum((p-q).double().pow(2).sum() for p,q in zip(a, b)).sqrt()
    a,b = (torch.stack(l.recorder.losses) for l in (big, learn))
    assert a.shape == b.shape
    return (float(norm(ours, whole)/norm(whole, before)),float((a-b).abs().max()/a.abs().max()),
            [str(w.message) for w in told if w.category is FastaccumWarning],learn)

def exact(*args, **kw):
    d,of_losses,told,learn = off(*args, **kw)
    assert not told and d < 1e-5 and of_losses < 1e-5, (d, of_losses, told, learn.gradient_accumulation.loss_rule)
    return learn

@pytest.mark.parametrize('share', [.03, .05, .15, .5])
@pytest.mark.parametrize('k', [2, 4, 8])
@pytest.mark.parametrize('split', [True, False])
def test_positives(share, k, split):
    "Also where a micro-batch has none"
    data = items(share, empty=range(8, 16))
    exact(retina(), data, bs=32 if split else k, acc=dict(micro_batch_size=k) if split else None)

@pytest.mark.slow
@pytest.mark.parametrize('background,first', [(0, 1), (-1, 0), (C, 0)])
@pytest.mark.parametrize('seed,share', [(0, .03), (1, .03), (2, .15), (3, .5)])
def test_backgrounds(background, first, seed, share):
    "0, -1, or the class after the last one; several accumulated loader batches with a ragged end; no positives at first, or later"
    data = items(share, 61, seed, background, range(9) if seed%2 else range(20, 30))
    exact(retina(first), data, step=24, acc=dict(accum_bs=24, micro_batch_size=3))
    exact(retina(first), data, bs=2)

@pytest.mark.parametrize('least', [1e-6, 1e-4, .5])
def test_other_divisors_without_positives(least):
    for share in (.05, .5): exact(retina(1, least), items(share, empty=range(8, 16)), bs=4)

def test_classes_first():
    x,boxes,y = items(.1, empty=range(8, 12))
    exact(lambda pred, y, boxes: retina()(pred, boxes, y), (x, y, boxes), bs=4)

def test_mean_over_positives():
    "The negative ones do not count at all: a micro-batch without positives has a loss that is no number, and no weight"
    def loss(pred, boxes, y): return F.smooth_l1_loss(pred[1][y > 0], boxes[y > 0])
    exact(loss, items(.05, empty=range(8, 16)), bs=4, lr=.2)

class Heatmap(nn.Module):
    def __init__(self): super().__init__(); self.l,self.head = nn.Linear(6, 8),nn.Linear(8, 2*6*6)
    def forward(self, x): return self.head(self.l(x).tanh()).view(-1, 2, 6, 6)

def heatmaps(objects, n=64, seed=0, empty=()):
    "A peak of 1 for each object, and values below 1 around it"
    g = torch.Generator().manual_seed(seed)
    maps,at = torch.zeros(n, 2, 6, 6),torch.arange(6.)
    for i in range(n):
        for _ in range(0 if i in empty else int(torch.randint(objects+1, (), generator=g))):
            c,u,v = int(torch.randint(2, (), generator=g)),*torch.randint(6, (2,), generator=g)
            maps[i,c] = torch.maximum(maps[i,c], torch.exp(-((at-u)**2)[:,None]-(at-v)**2))
    return torch.randn(n, 6, generator=g),maps

def center(pred, y):
    "CenterNet's: as written by its authors"
    p,pos = pred.sigmoid().clamp(1e-4, 1-1e-4),y.eq(1)
    n = pos.float().sum()
    pos_loss = (p.log()*(1-p)**2*pos).sum()
    neg_loss = ((1-p).log()*p**2*(1-y)**4*~pos).sum()
    return -neg_loss if n == 0 else -(pos_loss+neg_loss)/n

@pytest.mark.parametrize('objects', [1, 4])
@pytest.mark.parametrize('k', quickly([4], [2, 4, 8]))
def test_center_net(objects, k):
    exact(center, heatmaps(objects, empty=range(4)), bs=k, net=Heatmap, lr=.05)
    exact(center, heatmaps(objects, empty=range(16, 24)), bs=32, acc=dict(micro_batch_size=k), net=Heatmap, lr=.05)

def test_sum_is_still_told():
    "Positive targets or none: a sum that divides by a constant"
    for y in (torch.zeros(64, A, dtype=torch.long), items(.1)[2]):
        x,boxes,_ = items(.1)
        d,_,told,learn = off(lambda pred, boxes, y: smoothed((pred[0]-1).abs()).sum()/50, (x, boxes, y), bs=4)
        assert d < 1e-6, learn.gradient_accumulation.loss_rule
        assert not y.any() or len(told) == 1 and 'is a sum, not a mean' in told[0]

def test_division_by_none():
    "Without positive targets the value is infinite, but its items count beside the positives of others"
    def loss(pred, boxes, y): return retina()(pred, boxes, y)*(y > 0).sum().clamp(min=1)/(y > 0).sum()
    exact(loss, items(.5), bs=4)
    exact(loss, items(.3, empty=range(8, 16)), bs=4)
