"What a loss averages over, as the probe measures it: the gradients of micro-batches, weighed by its rule, are the batch's"
import random, re
from functools import partial
from queue import SimpleQueue
import numpy as np, pytest, torch, torch.nn as nn, torch.nn.functional as F
from torch import Tensor, tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from fastai.losses import BaseLoss, CrossEntropyLossFlat, DiceLoss, FocalLoss, LabelSmoothingCrossEntropy, LabelSmoothingCrossEntropyFlat
from fastaccum.core.losses import *
from fastaccum.core.losses import is_known
from fastaccum.core.probe import LossProbe

cw,n = tensor([.1, 1., 5.]),12
class_y = tensor([0, 1, 2, 1, 1, 0, 2, 1, 0, 0, 1, 1])
token_y = torch.where(torch.rand(n, 5, generator=torch.manual_seed(3)) < .4, -100, torch.randint(3, (n, 5)))
token_y[:,0] = class_y
pad_y = token_y.clamp(min=-1)
soft_y = torch.rand(n, 3).softmax(1)
real_y = torch.randn(n, 3)
real_y[2:5,1] = real_y[9,0] = float('nan')
mask = (torch.rand(n, 5) < .6).float()
mask[:,0] = 1
some_y = (torch.rand(n, 3) > .6)*2.
some_y[3,0] = 2

class FocalCE(nn.CrossEntropyLoss):
    def forward(self, pred, y):
        ce = F.cross_entropy(pred, y, weight=self.weight, ignore_index=self.ignore_index, reduction='none')
        return ((1-(-ce).exp())**2*ce).mean()
class ItemMSE(nn.MSELoss):
    def __init__(self): super().__init__(reduction='sum')
    def forward(self, pred, y): return super().forward(pred, y)/len(y)
class Own:
    "An object with `.func`, which is not what it averages over"
    def __init__(self): self.func = nn.CrossEntropyLoss()
    def __call__(self, pred, y): return F.cross_entropy(pred, y, weight=cw)
class Inside(nn.Module):
    "The ignored value stands on another name, the class weights in a buffer of a part"
    def __init__(self, weight=None):
        super().__init__()
        self.pad,self.ce = -1,nn.ModuleDict({'a': nn.CrossEntropyLoss(weight, ignore_index=-1)})
    def forward(self, pred, y): return self.ce['a'](pred.flatten(0, 1), y.flatten())
class SmoothCE(LabelSmoothingCrossEntropy): pass
class Soft(nn.CrossEntropyLoss): pass
class Arc(nn.Module):
    "Has a parameter, keeps its last loss"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
    def forward(self, pred, y):
        self.last = F.cross_entropy(F.linear(F.normalize(pred), F.normalize(self.w)), y)
        return self.last

def per_token(pred, y): return F.cross_entropy(pred.transpose(1, 2), y, reduction='none')
def per_sample(pred, y):
    l,m = per_token(pred, y),y != -100
    return (l.sum(1)/m.sum(1)).mean()
def masked(pred, y, m): return (F.mse_loss(pred, y, reduction='none')*m).sum()/m.sum()
def stacked(pred, y): return (F.l1_loss(pred, y[...,0], reduction='none')*y[...,1]).sum()/y[...,1].sum()
def not_nan(pred, y): return (pred-y)[~y.isnan()].pow(2).mean()
def heads(pred, *ys): return F.cross_entropy(pred[0], ys[0]) + .3*F.mse_loss(pred[1], ys[1])
def by_second(pred, x, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten(), ignore_index=-1)
def positives(pred, y): return F.binary_cross_entropy_with_logits(pred, (y > 0).float(), reduction='sum')/(y > 0).float().sum()
def smooth(pred, y): return F.cross_entropy(pred, y, label_smoothing=.1)
def in_place(pred, y):
    y[y < 0] = 0
    return F.cross_entropy(pred.mul_(2).transpose(1, 2), y)
def dice(pred, y):
    p,t = pred.sigmoid(),F.one_hot(y, 3)
    return 1-2*(p*t).sum()/(p+t).sum()
def clip(pred): return F.cross_entropy(F.normalize(pred[0])@F.normalize(pred[1]).T, torch.arange(len(pred[0])))
def two_divisors(pred, y): return F.cross_entropy(pred, y, weight=cw) + F.cross_entropy(pred, y)
def hardest(pred, y): return F.cross_entropy(pred, y, reduction='none').topk(len(y)//2).values.mean()
def worst(pred, y): return (pred-y).abs().max(1).values.mean()

p3,p53,p5 = (n,3),(n,5,3),(n,5)
real5 = torch.randn(n, 5)
cases = {  # loss, shape(s) of the prediction, targets, what it averages over ('over', or None: no rule)
    'focal, class weights':  (FocalCE(cw), p3, (class_y,), 'items'),
    'focal, ignored':        (FocalCE(ignore_index=1), p3, (class_y,), 'items'),
    'fastai focal':          (type('F', (FocalLoss,), {})(weight=cw), p3, (class_y,), 'items'),
    'subclass':              (type('C', (nn.CrossEntropyLoss,), {})(cw), p3, (class_y,), 'classes'),
    'sum by items':          (ItemMSE(), p3, (torch.randn(n, 3),), 'items'),
    'sum':                   (type('S', (nn.MSELoss,), {})(reduction='sum'), p3, (torch.randn(n, 3),), 'sum'),
    'sum of a function':     (lambda p, y: (p-y).abs().sum(), p3, (torch.randn(n, 3),), 'sum'),
    'own .func':             (Own(), p3, (class_y,), 'classes'),
    'partial of a function': (partial(lambda p, y, w: F.cross_entropy(p, y, weight=w), w=cw), p3, (class_y,), 'classes'),
    'flat subclass':         (type('L', (CrossEntropyLossFlat,), {})(axis=-1), p53, (token_y,), 'valid'),
    'BaseLoss of own':       (BaseLoss(FocalCE, weight=cw), p3, (class_y,), 'items'),
    'label smoothing':       (smooth, p3, (class_y,), 'valid'),
    'fastai smoothing':      (SmoothCE(), p3, (class_y,), 'valid'),
    'smoothing, ignored':    (lambda p, y: F.cross_entropy(p.transpose(1, 2), y, label_smoothing=.2, weight=cw), p53,
                              (token_y,), 'classes'),
    'ignored inside':        (Inside(), p53, (pad_y,), 'valid'),
    'weighted inside':       (Inside(cw), p53, (pad_y,), 'classes'),
    'permuted inside':       (lambda p, y: F.cross_entropy(p.permute(0, 2, 1), y), p53, (token_y,), 'valid'),
    'class axis 1':          (lambda p, y: F.cross_entropy(p, y), (n,3,5), (token_y,), 'valid'),
    'all tokens':            (lambda p, y: per_token(p, y).mean(), p53, (token_y,), 'elements'),
    'per sample':            (per_sample, p53, (token_y,), 'items'),
    'flattened by the model':(lambda p, y: F.cross_entropy(p, y.flatten()), (5*n,3), (token_y,), 'valid'),
    'mask as a target':      (masked, p5, (real5, mask), 'mask'),
    'mask in a column':      (stacked, p5, (torch.stack([real5, mask], -1),), 'mask'),
    'missing values':        (not_nan, p3, (real_y,), 'valid'),
    'lists of objects':      (lambda p, y: sum((a.mean(0)-b.sum(0)).pow(2).sum() for a,b in zip(p, y))/len(y), None,
                              ([torch.ones(1+i%3, 4) for i in range(n)],), 'items'),
    'two heads':             (heads, (p3, p5), (class_y, real5), 'valid'),
    'second target':         (by_second, p53, (real5, pad_y), 'valid'),
    'dict of targets':       (lambda p, y: F.cross_entropy(p.flatten(0, 1), y['ids'].flatten()), p53,
                              ({'x': real5, 'ids': token_y},), 'valid'),
    'positives':             (positives, p3, (some_y,), 'mask'),
    'soft targets':          (Soft(), p3, (soft_y,), 'items'),
    'pos_weight':            (type('B', (nn.BCEWithLogitsLoss,), {})(pos_weight=cw), p3, (soft_y,), 'items'),
    'multi-label':           (lambda p, y: F.binary_cross_entropy_with_logits(p, y.float()), p3, (F.one_hot(class_y, 3),), 'valid'),
    'has a parameter':       (Arc(), (n,4), (class_y,), 'valid'),
    'changes in place':      (in_place, p53, (token_y,), 'elements'),
    'worst element':         (worst, p3, (torch.randn(n, 3),), 'items'),
    'no targets':            (lambda p: p.pow(2).mean(), p3, (), 'items'),
    'dice of the batch':     (dice, p3, (class_y,), None),
    'subclass of dice':      (type('D', (DiceLoss,), {})(reduction='mean'), (n,3,4,4), (torch.randint(3, (n, 4, 4)),), 'items'),
    'contrastive':           (clip, (p3, p3), (), None),
    'two divisors':          (two_divisors, p3, (class_y,), None),
    'fastai two means':      (SmoothCE(weight=cw), p3, (class_y,), None),
    'hardest items':         (hardest, p3, (class_y,), None),
    'batch statistics':      (lambda p, y: F.mse_loss((p-p.mean(0))/p.std(0), y), p3, (soft_y,), None),
}

def predict(shape, dtype, seed=0):
    torch.manual_seed(seed)
    if shape is None: return [torch.randn(2+i%2, 4).to(dtype) for i in range(n)]  # an object for each item
    if isinstance(shape[0], tuple): return tuple(predict(s, dtype, seed+i) for i,s in enumerate(shape))
    return torch.randn(shape).to(dtype)

def in_type(yb, dtype): return tuple(y.to(dtype) if isinstance(y, Tensor) and y.is_floating_point() else y for y in yb)

def probed(loss_func, pred, yb, n=n, **kwargs):
    probe = LossProbe(loss_func)
    probe.look(pred, yb, n, **kwargs)
    return probe

def cut(o, a, z):
    if isinstance(o, tuple): return tuple(cut(t, a, z) for t in o)
    if isinstance(o, dict): return {k: cut(t, a, z) for k,t in o.items()}
    return o[a*(len(o)//n):z*(len(o)//n)]

def gradient(loss_func, pred, yb):
    leaves,spec = tree_flatten(pred)
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    yb = tuple(y.clone() if isinstance(y, Tensor) else y for y in yb)
    return torch.autograd.grad(loss_func(tree_unflatten([t*1 for t in leaves], spec), *yb), leaves)

def accumulated(rule, loss_func, pred, yb, sizes=(3,1,8)):
    "The gradient by micro-batches of these sizes"
    ends = np.cumsum(sizes)
    parts = [(cut(pred, z-k, z), cut(yb, z-k, z), k) for k,z in zip(sizes, ends)]
    weights = [loss_weight(rule, y, k) for _,y,k in parts]
    total = 1 if weights[0] is None else sum(weights)
    grads = [[g*(1 if w is None else float(w)/float(total)) for g in gradient(loss_func, p, y)]
             for (p,y,_),w in zip(parts, weights) if w is None or w > 0]
    return [g for gs in grads for g in gs] if isinstance(pred, list) else [torch.cat(g) for g in zip(*grads)]

def off(a, b):
    a,b = (torch.cat([t.flatten() for t in o]).double() for o in (a, b))
    return float((a-b).norm()/b.norm())

@pytest.mark.parametrize('name', cases)
def test_rule(name):
    loss_func,shape,yb,over = cases[name]
    pred = predict(shape, torch.float32)
    assert not is_known(loss_func)
    probe = probed(loss_func, pred, yb)
    if over is None:
        assert not probe.open and not probe.fits and 'weight=' in probe.message and 'no rule fits' in str(probe), probe
        return
    assert probe.message is None and probe.rule.measured and 'measured' in str(probe), probe
    found = ['sum' if r.reduction == 'sum' else r.over for r in probe.fits]
    assert over in found, f'{probe}: {found}'
    assert off(accumulated(probe.rule, loss_func, pred, yb), gradient(loss_func, pred, yb)) < 1e-6, probe


@pytest.mark.parametrize('dtype,tol', [(torch.float64, 1e-14), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
@pytest.mark.parametrize('name', ['focal, ignored', 'sum by items', 'class axis 1', 'ignored inside', 'per sample',
                                  'missing values', 'two heads', 'two divisors'])
def test_types(name, dtype, tol):
    "Half-precision predictions are measured in float32"
    loss_func,shape,yb,over = cases[name]
    pred,yb = predict(shape, dtype),in_type(yb, torch.float64 if dtype is torch.float64 else torch.float32)
    if dtype is torch.float64 and name == 'two divisors':
        loss_func = lambda p, y: F.cross_entropy(p, y, weight=cw.double()) + F.cross_entropy(p, y)
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype is torch.bfloat16): probe = probed(loss_func, pred, yb)
    if over is None: assert probe.message and not probe.fits; return
    assert over in [r.over for r in probe.fits]
    exact = pred if dtype is torch.float64 else predict(shape, torch.float32)
    assert off(accumulated(probe.rule, loss_func, exact, yb), gradient(loss_func, exact, yb)) < tol

def test_confident_predictions():
    "Their gradients are small differences of large numbers: float64 tells"
    pred = 16.*F.one_hot(class_y, 3) + torch.randn(n, 3)/8
    for f,over in ((FocalCE(), 'items'), (lambda p, y: F.cross_entropy(p, y, ignore_index=2), 'valid')):
        probe = probed(f, pred, (class_y,))
        assert over in [r.over for r in probe.fits], probe

@pytest.mark.parametrize('loss_func,over', [(per_sample, 'items'), (lambda p, y: per_token(p, y).sum()/y.numel(), 'elements'),
                                            (lambda p, y: F.cross_entropy(p.transpose(1, 2), y), 'valid'),
                                            (lambda p, y: F.mse_loss(p[...,0], y.float()), 'elements'),
                                            (lambda p, y: F.mse_loss(p[...,0], y.float(), reduction='sum')/len(y), 'items'),
                                            (lambda p, y: F.ctc_loss(p.transpose(0, 1).log_softmax(2), y.clamp(1),
                                                                     [5]*len(y), [3]*len(y)), 'items'),
                                            (lambda p, y: (p[...,0]-y).pow(2).sum(1).sqrt().mean(), 'items')])
def test_elements_or_items(loss_func, over):
    "All items of a batch have as many elements: the second look cuts through the items. It counts where batches are of different length"
    probe,pred = LossProbe(loss_func),predict(p53, torch.float32)
    for _ in range(2):
        if probe.open: probe.look(pred, token_y)
    assert not probe.open and [r.over for r in probe.fits] == [over], probe

def test_narrowing():
    "Nothing is ignored at first: the probe stays open, for so many looks; a value that comes later decides"
    def loss_func(p, y): return F.cross_entropy(p, y, ignore_index=2)
    probe,pred = LossProbe(loss_func),predict(p3, torch.float32)
    for k in range(8):
        assert probe.open
        probe.look(pred, class_y.clamp(max=1))
    assert not probe.open and {r.over for r in probe.fits} == {'valid', 'items'} and probe.message is None
    probe = LossProbe(loss_func)
    for y in (class_y.clamp(max=1), class_y.clamp(max=1), class_y): probe.look(pred, y)
    assert not probe.open and probe.rule.ignore_index == 2

def test_joins_items():
    "Micro-batches of one item, in pairs; of different lengths they cannot be joined"
    probe,pred = LossProbe(lambda p, y: F.cross_entropy(p.transpose(1, 2), y)),predict(p53, torch.float32)
    for i in range(n):
        if probe.open: probe.look(pred[i:i+1], token_y[i:i+1])
    assert [r.over for r in probe.fits] == ['valid'], probe
    probe = probed(FocalCE(), torch.randn(2, 3), (tensor([1, -100]),), 2)   # the second has no gradient
    assert [r.over for r in probe.fits] == ['items'], probe
    probe = LossProbe(lambda p, y: F.mse_loss(p, y))
    for i in range(1, 17): probe.look(torch.randn(1, i), torch.randn(1, i))
    assert not probe.open and not probe.fits and 'weight=' in probe.message

class Counts:
    calls = SimpleQueue()                 # measuring puts back what is counted in Python, but does not see a queue
    def __init__(self, f): self.f = f
    def as_function(self): return lambda *a: self(*a)
    def __call__(self, *args): Counts.calls.put(1); return self.f(*args)

@pytest.mark.parametrize('name', ['all tokens', 'per sample', 'sum of a function', 'dice of the batch', 'mask as a target'])
def test_calls_of_a_function(name):
    f,shape,yb,_ = cases[name]
    calls = Counts(f)
    probe,pred = LossProbe(calls.as_function()),predict(shape, torch.float32)
    for k in range(1, 10):
        before = Counts.calls.qsize()
        probe.look(pred, yb)
        assert (k > 1) <= Counts.calls.qsize() - before <= (7 if k > 1 else 9) or not probe.fits
    assert Counts.calls.qsize()
    assert not probe.open

seen = SimpleQueue()

class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer('calls', torch.zeros(()))
        self.modes,self.grad_modes = [],[]
        self.bn = nn.BatchNorm1d(3)
    def forward(self, pred, y):
        self.calls += 1
        self.modes.append(self.training)
        seen.put((self.training, self.w.requires_grad, self is loss_of_user))
        self.last = F.mse_loss(pred*self.w, y)
        return self.last

@pytest.mark.parametrize('training', [True, False])
def test_leaves_no_trace(training):
    global loss_of_user
    loss_of_user = Stateful().train(training)
    net = nn.Linear(4, 3)
    pred,y = net(torch.randn(n, 4)),torch.randn(n, 3)
    loss = loss_of_user(pred, y)              # what training did before: `last` hangs on the model's graph
    while not seen.empty(): seen.get()
    before = pred.detach().clone(),y.clone()
    probe = probed(loss_of_user, pred, (y,))
    assert probe.fits, probe
    calls = [seen.get() for _ in range(seen.qsize())]
    assert calls and all(o == (training, False, False) for o in calls)
    assert loss_of_user.calls == 1 and loss_of_user.w.grad is None and loss_of_user.w.requires_grad and net.weight.grad is None
    assert torch.equal(pred, before[0]) and torch.equal(y, before[1])
    loss.backward()                           # the graph is as it was
    assert net.weight.grad is not None and loss_of_user.w.grad is not None

def test_changes_nothing_in_place():
    pred,y = predict(p53, torch.float32),token_y.clone()
    before = pred.clone()
    assert probed(in_place, pred, (y,)).fits
    assert torch.equal(pred, before) and torch.equal(y, token_y)

gen = torch.Generator()
@pytest.mark.parametrize('draw', [lambda p: F.dropout(p), lambda p: p*(1+torch.rand(len(p), 1)),
                                  lambda p: p*random.random(), lambda p: p*np.random.rand(),
                                  lambda p: p*torch.rand(len(p), 1, generator=gen)])
def test_random_losses(draw):
    "They are not said to couple, and random numbers go on as if there was no probe"
    state = lambda: (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(),
                     np.random.get_state()[2], gen.get_state().tolist())
    before = state()
    probe = probed(lambda p, y: F.mse_loss(draw(p), y), torch.randn(n, 3, generator=torch.manual_seed(1)), (torch.ones(n, 3),))
    torch.manual_seed(0); a = state(); probe.look(torch.ones(n, 3)*2, torch.ones(n, 3)); assert state() == a
    assert not probe.fits and not probe.rules.seen and 'random' in str(probe), probe

def fails(pred, y):
    if len(y) < n: raise RuntimeError('only whole')
    return F.mse_loss(pred, y)
class NoCopy(nn.Module):
    def __deepcopy__(self, memo): raise TypeError('no copy')
    def forward(self, pred, y): return F.mse_loss(pred, y)
@pytest.mark.parametrize('loss_func,pred,yb', [
    (fails, torch.randn(n, 3), (torch.ones(n, 3),)), (NoCopy(), torch.randn(n, 3), (torch.ones(n, 3),)),
    (lambda p, y: F.mse_loss(p['a'], y), {'a': torch.randn(n+1, 3)}, (torch.ones(n, 3),)),      # cannot be cut
    (lambda p, y: p.sum(), torch.randn(n, 3), (torch.ones(n+5, 4),)),                           # boxes
    (lambda p, y: p.mean(), torch.tensor(1.), (torch.ones(n),)), (lambda p, y: 0., torch.randn(n, 3), (torch.ones(n),)),
    (lambda p, y: F.mse_loss(p, y, reduction='none'), torch.randn(n, 3), (torch.ones(n, 3),)),
    (lambda p, y: p.argmax(1).float().mean(), torch.randn(n, 3), (torch.ones(n),)),
    (lambda p, y: (p*0).sum(), torch.randn(n, 3), (torch.ones(n),)),
    (lambda p, y: p, object(), (None,)), (lambda p: p.mean(), [], ()), (lambda p, y: p.mean(), torch.randn(7, n, 3), (torch.ones(7, n),))])
def test_cannot_be_probed(loss_func, pred, yb):
    probe = LossProbe(loss_func)
    for _ in range(8):
        assert probe.open and probe.message is None
        probe.look(pred, yb, n)
    assert not probe.open and not probe.rule.measured and 'weight=' in probe.message and 'could not be measured' in probe.message

def test_reason_in_words():
    "A warning names the error of the user's loss, and no class of ours"
    def reason(loss_func):
        probe = LossProbe(loss_func)
        while probe.open: probe.look(torch.randn(n, 3), (torch.ones(n),), n)
        return re.search(r'could not be measured \((.*?)\), and', probe.message)[1]
    def fails(p, y): raise KeyError('mine')
    assert reason(lambda p, y: (p*0).sum())=='its gradients are zero'
    assert reason(fails)=="KeyError: 'mine'"

def test_not_finite_is_looked_at_again():
    probe,pred,y = LossProbe(lambda p, y: (p*y.sum()).mean()),torch.randn(n, 3),torch.full((n,), float('nan'))
    for _ in range(20): probe.look(pred, y, n)
    assert probe.open and probe.message is None and not probe.rules.seen
    probe.look(pred, y.fill_(1.), n)
    assert probe.rules.seen

def test_known_losses_are_not_called(monkeypatch):
    l = nn.MSELoss()
    monkeypatch.setattr(nn.MSELoss, 'forward', None)
    probe = probed(l, torch.ones(3, 3), (torch.ones(3, 3),), 3)
    assert not probe.open and probe.message is None and 'known' in str(probe)

means = {'items': (lambda u, y, m: u.mean(), ['items']), 'valid': (lambda u, y, m: (u*m).sum()/m.sum(), ['valid']),
         'sum': (lambda u, y, m: u.sum(), ['sum']),
         'weights': (lambda u, y, m: (u*cw[y.clamp(0)]*m).sum()/(cw[y.clamp(0)]*m).sum(), ['classes']),
         'top': (lambda u, y, m: u.flatten().topk(5).values.mean(), []),
         'samples': (lambda u, y, m: ((u*m).sum(1)/m.sum(1)).mean(), ['items'])}
@pytest.mark.parametrize('name', means)
@pytest.mark.parametrize('in_place', [False, True])
def test_mean_made_outside(name, in_place):
    "`reduction='none'`: the mean is read off the graph, also if the losses are changed in place"
    mean,over = means[name]
    y = token_y if name != 'items' else token_y.clamp(0)
    pred = predict(p53, torch.float32).requires_grad_()
    loss_func = nn.CrossEntropyLoss(cw if name == 'weights' else None, reduction='none')
    u = F.cross_entropy(pred.transpose(1, 2), y, reduction='none')
    users = u.clone()
    if in_place: users.mul_(1)
    loss = mean(users, y, (y != -100).float())
    probe = probed(loss_func, pred, (y,), loss=loss, losses=u)
    if not over: assert probe.message and not probe.fits
    elif name == 'items': assert {'valid', 'elements'} == {r.over for r in probe.fits}
    else: assert ['sum' if r.reduction == 'sum' else r.over for r in probe.fits] == over, probe
    loss.backward()                           # the graph is still there
