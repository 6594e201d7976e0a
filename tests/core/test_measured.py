"What a micro-batch counts is measured: the gradient of a step is that of one loss of all its outputs, or it is found out"
import math, weakref
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from bench.measure import OpCounter
from quick import quickly
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from fastaccum.core import measured
from fastaccum.core.measured import Items, LossMeasure, Reference, ValueMeasure, divisor, joint_value, loss_and_grads

class LiveMemory(TorchDispatchMode):
    "Peak bytes of tensors that come and go inside a `with` block, on a CPU; `known` ones do not count"
    def __init__(self, known=()):
        super().__init__()
        self.live = self.peak = 0
        self.hold = [t.untyped_storage() for t in known]       # keep them alive: their addresses must not be reused
        self.keys = {s._cdata for s in self.hold}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        for t in tree_leaves(res):
            if isinstance(t, torch.Tensor) and (s := t.untyped_storage())._cdata not in self.keys: self._follow(s)
        return res

    def _follow(self, s):
        self.keys.add(s._cdata)
        self.live += s.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(s, self._free, s._cdata, s.nbytes())

    def _free(self, key, n):
        self.keys.discard(key)
        self.live -= n

# -- Losses, as users write them: each with items of its kind ----------------------------------------------------
exact,found = {},{}
def means(make): return lambda f: exact.setdefault(f.__name__, (f, make)) and f
def others(make): return lambda f: found.setdefault(f.__name__, (f, make)) and f

def one(p, v): return torch.tensor(v, dtype=p.dtype)
def each(p, y): return F.cross_entropy(p, y, reduction='none')
def bce(p, y): return F.binary_cross_entropy_with_logits(p, y, reduction='none')

def classes(n): return torch.randn(n, 3),torch.randint(3, (n,))
def four_classes(n): return torch.randn(n, 4),torch.randint(4, (n,))
def rare_class(n): return torch.randn(n, 4),torch.randint(3, (n,)).where(torch.rand(n) > .02, torch.tensor(3))
def confident(n):
    y = torch.randint(4, (n,))
    return 12*F.one_hot(y, 4).to(torch.get_default_dtype()) + torch.randn(n, 4),y
def many_ids(n): return torch.randn(n, 4),torch.randint(40, (n,))
def labels(n): return torch.randn(n, 6),(torch.rand(n, 6) < .3).to(torch.get_default_dtype())
def integers(n): return labels(n)[0],labels(n)[1].long()
def codes(n): return labels(n)[0],5*labels(n)[1]
def numbers(n): return torch.randn(n, 5),torch.randn(n, 5)
def masked_numbers(n): return torch.randn(n, 2),torch.randn(n, 2),(torch.rand(n, 2) < .8).to(torch.get_default_dtype())
def class_and_mask(n): return torch.randn(n, 5),torch.randint(4, (n,)),(torch.rand(n) < .4).to(torch.get_default_dtype())

@means(classes)
def class_weights(p, y): return F.cross_entropy(p, y, weight=one(p, [.2, 1., 3.]))
@means(classes)
def own_weights(p, y):
    w = torch.where(y == 1, 2.5, 1.).to(p.dtype)
    return (each(p, y)*w).sum()/w.sum()
@means(classes)
def ignoring(p, y): return F.cross_entropy(p, y, ignore_index=2)
@means(classes)
def focal(p, y):
    ce = each(p, y)
    return ((1-(-ce).exp())**2*ce).mean()
@means(classes)
def two_terms(p, y): return F.cross_entropy(p, y) + .1*p.square().mean()
@means(classes)
def smoothed(p, y): return F.cross_entropy(p, y, label_smoothing=.1)
@means(classes)
def sum_by_64(p, y): return each(p, y).sum()/64
@means(classes)
def sure_ones(p, y):
    m = (p.softmax(1).amax(1) > .5).to(p.dtype).detach()
    return (each(p, y)*m).sum()/m.sum()
@means(classes)
def hard_ones(p, y):
    l = each(p, y)
    return l[l > .7].mean()
@means(four_classes)
def hard_or_one(p, y):
    l = each(p, y)
    m = (l > 1.).to(p.dtype).detach()
    return (l*m).sum()/m.sum().clamp(min=1)
@means(four_classes)
def effective_numbers(p, y):
    w = (1-.9)/(1-.9**one(p, [50., 20., 5., 1.]))
    return (each(p, y)*w[y]).sum()/w[y].sum()
@means(rare_class)
def rare_weights(p, y): return F.cross_entropy(p, y, weight=one(p, [1., 1., 1., 9.]))
@means(confident)
def confident_weights(p, y): return F.cross_entropy(p, y, weight=one(p, [1., 2., 3., 4.]))
@means(labels)
def positives(p, y): return bce(p, y).sum()/y.sum().clamp(min=1)
@means(labels)
def floor_5(p, y): return bce(p, y).sum()/y.sum().clamp(min=5)
@means(labels)
def floor_90(p, y): return bce(p, y).sum()/y.sum().clamp(min=90)
@means(labels)
def plus_one(p, y): return bce(p, y).sum()/(y.sum()+1)
@means(labels)
def plus_little(p, y): return (bce(p, y)*y).sum()/(y.sum()+1e-6)
@means(labels)
def no_floor(p, y): return bce(p, y).sum()/y.sum()
@means(labels)
def early_return(p, y): return p.sum()*0. if y.sum() == 0 else bce(p, y).sum()/y.sum()
@means(labels)
def early_constant(p, y): return torch.zeros((), dtype=p.dtype, requires_grad=True) if y.sum() == 0 else bce(p, y).sum()/y.sum()
@means(labels)
def each_image(p, y): return (bce(p, y).sum(1)/y.sum(1).clamp(min=1)).mean()
@means(labels)
def focal_by_positives(p, y): return (((y-p.sigmoid()).abs()**2).detach()*bce(p, y)).sum()/y.sum().clamp(min=1)
@means(labels)
def columns(p, y): return (bce(p, y)*y).sum(0).div(y.sum(0).clamp(min=1)).mean()
@means(masked_numbers)
def masked(p, y, m): return ((p-y).square()*m).sum()/m.sum()
@means(masked_numbers)
def by_index(p, y, m): return (p-y)[m > 0].square().mean()
@means(masked_numbers)
def soft_mask(p, y, m): return ((p-y).square()*(.2+m)).sum()/(.2+m).sum()
@means(numbers)
def quantile(p, y): return torch.where(y > p, .9*(y-p), .1*(p-y)).mean()
@means(numbers)
def squares(p, y): return F.mse_loss(p, y)

@others(labels)
def dice(p, y):
    s = p.sigmoid()
    return 1-2*(s*y).sum()/(s.sum()+y.sum())
@others(numbers)
def rmse(p, y): return F.mse_loss(p, y).sqrt()
@others(numbers)
def norm(p, y): return (p-y).norm()
@others(classes)
def hardest_half(p, y):
    l = each(p, y)
    return l.topk(max(1, len(l)//2)).values.mean()
@others(classes)
def centred(p, y): return F.cross_entropy(p, y) + (p-p.mean(0)).square().mean()
@others(classes)
def root_of_n(p, y): return each(p, y).sum()/len(y)**.5
@others(labels)
def two_divisors(p, y): return bce(p, y).mean() + .1*((p-y).square()*y).sum()/y.sum().clamp(min=1)
@others(classes)
def weights_of_outputs(p, y):
    w = p.square().mean(1)
    return (w*each(p, y)).sum()/w.sum()
@others(classes)
def noisy(p, y): return F.cross_entropy(p + .1*torch.randn_like(p), y)
@others(classes)
def mean_and_sum(p, y): return p[:,0].square().mean() + .01*each(p[:,1:], y.clamp(max=1)).sum()
@others(classes)
def size_branch(p, y):
    l = each(p, y)
    return l.mean() if len(l) < 30 else l.topk(len(l)//2).values.mean()
@others(classes)
def capped(p, y): return each(p, y).sum()/min(len(y), 30)
@others(classes)
def same_class(p, y):
    s = (y[:,None] == y[None]).to(p.dtype)
    return (torch.cdist(p, p).square()*s).sum()/len(p) + p.square().mean()
@others(many_ids)
def same_id(p, y):
    s = (y[:,None] == y[None]).to(p.dtype).fill_diagonal_(0)
    return p.square().mean() + ((p[:,None]-p[None]).square().sum(-1)*s).sum()/len(p)
@others(labels)
def mining(p, y):
    l,m = bce(p, y),y > 0
    return (l[m].sum() + l[~m].topk(min(int(3*m.sum()), int((~m).sum()))).values.sum())/m.sum().clamp(min=1)
@others(four_classes)
def balanced(p, y):
    h = torch.bincount(y, minlength=4).to(p.dtype)
    return (each(p, y)/h[y]).sum()/(h > 0).sum()
@others(four_classes)
def by_largest(p, y):
    l = each(p, y)
    return (l/l.detach().max()).mean()
@others(labels)
def power(p, y): return bce(p, y).sum()/(y.sum()**.9+1)
@others(labels)
def logarithm(p, y): return bce(p, y).sum()/(1+y.sum()).log1p()
@others(labels)
def soft_floor(p, y): return bce(p, y).sum()/(y.sum()**2+4).sqrt()
@others(four_classes)
def below_median(p, y):
    l = each(p, y)
    return (l*(l < l.detach().median()*3)).mean()
@others(four_classes)
def least_kept(p, y):
    l = each(p, y)
    return l.topk(max(int((l > 1.5).sum()), len(l)//8, 1)).values.mean()
@others(numbers)
def halves(p, y):
    a,b = p.chunk(2)
    return (a-b).square().mean() if len(a) == len(b) else p.square().mean()
@others(class_and_mask)
def two_heads(p, y, m): return F.cross_entropy(p[:,:4], y) + ((p[:,4:]**2)*m[:,None]).sum()/m.sum().clamp(min=1)
@others(classes)
def sum_and_decay(p, y, w=torch.ones(3, requires_grad=True)): return each(p, y).sum() + .1*w.square().sum()

losses = {**exact, **found}
whole_sizes = 7, 9, 1, 16, 3, 8

# -- A step ------------------------------------------------------------------------------------------------------
def items_of(part): return Items(part[0], part[1:], len(part[0]))

def batch_of(make, empty=(0, 2)):
    "Items of a step, in six parts. In the first and the third nothing counts, if their last target is a mask"
    parts = [make(n) for n in whole_sizes]
    if make in (labels, integers, codes, masked_numbers, class_and_mask):
        for i in empty: parts[i][-1].zero_()
    return [torch.cat(o) for o in zip(*parts)]

def cut(whole, sizes):
    "The items in micro-batches of these sizes, again and again"
    n,ends = len(whole[0]),[0]
    while ends[-1] < n: ends += [ends[-1]+k for k in torch.tensor(sizes).cumsum(0).tolist()]
    return [tuple(t[a:z] for t in whole) for a,z in zip(ends, ends[1:]) if a < n]

def accumulated(m, parts, plan=True, takes_seed=False):
    "(gradients with respect to all outputs, as they are accumulated; the loss), or None if it is not measured"
    items = [items_of(p) for p in parts]
    m.begin_step(items if plan else ())
    counted,seeds = [],[]
    for o in items:
        c = m.measure(o, m.loss_func(o.pred, *o.yb), takes_seed=True) if takes_seed else m.measure(o)
        if c is None: return None
        counted.append(c)
        seeds.append(measured.numerator_grads(c, m.loss_func, o))
    m.look_back()
    D = divisor(counted, m.extra).reshape(-1)[m.block]
    D = torch.where(D > 0, D, 1.)                              # nothing counts
    return [torch.cat(o)/D for o in zip(*seeds)],joint_value(counted, m.extra)

def off_by(m, parts, plan=True, f=None, takes_seed=False):
    "How far the gradient of a step is from that of one loss of all its outputs; NaN if it is not measured"
    res = accumulated(m, parts, plan, takes_seed)
    whole,grads = loss_and_grads(f or m.loss_func, items_of(parts[0]).join(*map(items_of, parts[1:])))
    m.end_step()
    if res is None: return math.nan
    return max(float((a-b).norm()/b.norm()) for a,b in zip(res[0], grads))

limit = {torch.float64: 1e-9, torch.float32: 1e-5}
seeds = 0, pytest.param(1, marks=pytest.mark.slow)

@pytest.fixture(params=limit, ids=str)
def dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)

# -- The table ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('seed', seeds)
@pytest.mark.parametrize('sizes', [(7,), (1,), (2,), (8,), whole_sizes], ids=str)
@pytest.mark.parametrize('name', losses)
def test_exact_or_found_out(name, sizes, seed, dtype):
    f,make = losses[name]
    torch.manual_seed(seed)
    m = LossMeasure(f)
    off = max(off_by(m, cut(batch_of(make), sizes)) for _ in range(2))
    if name in exact: assert off < limit[dtype] and m.message is None, (off, m.message)
    else: assert off < limit[dtype] or m.message, off

@pytest.mark.parametrize('seed', seeds)
@pytest.mark.parametrize('sizes', [(7,), (1,), whole_sizes], ids=str)
@pytest.mark.parametrize('name', [n for n in exact if n not in ('columns','sum_by_64')])
def test_beside_others(name, sizes, seed, dtype, monkeypatch):
    """Gradients are those beside the reference, with no reading from the device before the step ends: also where a loss is at its floor,
    has no gradients, or is not finite. Few items count in some steps, and none at all in others"""
    f,make = exact[name]
    torch.manual_seed(seed)
    m,seen,beside = LossMeasure(f),[],Reference.beside
    monkeypatch.setattr(Reference, 'beside', lambda *args: seen.append(1) or beside(*args))
    for i in range(12):
        whole = batch_of(make, empty=((0, 2), (0, 1, 2, 3), (1, 2, 3, 4, 5))[i%3])
        off = off_by(m, cut(whole, sizes), plan=i < 3, takes_seed=True)
        assert off < limit[dtype] and m.message is None, (i, off, m.message)
    assert seen

class OfAKind:
    "Counts the items of one kind"
    kind = 1
    def __call__(self, p, y):
        counts = (y == self.kind).to(p.dtype)
        return (bce(p, counts)*counts).sum()/counts.sum()

@pytest.mark.parametrize('always', [False, True])
def test_items_of_the_reference_no_longer_count(always, dtype):
    "In mid-epoch: that step has no gradients, and it is told. Steps in which the reference is looked at as they begin are exact"
    torch.manual_seed(0)
    m,off = LossMeasure(OfAKind(), always=always),[]
    def items(n): return torch.randn(n, 6),torch.randint(1, m.loss_func.kind+1, (n, 1)).expand(n, 6).to(torch.get_default_dtype())
    for i in range(40):
        m.loss_func.kind = 1 if i < 32 else 2
        off.append(off_by(m, cut(batch_of(items), (7,)), plan=False, takes_seed=True))
    assert max(off[:32] + off[33:]) < limit[dtype]
    if always: assert off[32] < limit[dtype] and m.message is None
    else: assert off[32] == 1. and 'has changed' in m.message and 'up to 100.00% off' in m.message

@pytest.mark.parametrize('name', exact)
def test_in_groups(name, dtype):
    "Outputs of a micro-batch are too large for one call: in some groups nothing counts, or its items count only beside others"
    f,make = exact[name]
    torch.manual_seed(0)
    m = LossMeasure(f, most=18)
    off = max(off_by(m, cut(batch_of(make), (7,))) for _ in range(3))
    assert off < limit[dtype] or m.message, off
    if name != 'columns': assert m.message is None

in_loader_batches = [n for n in losses if n != 'columns']

@pytest.mark.parametrize('seed', seeds)
@pytest.mark.parametrize('name', quickly(in_loader_batches[::3], in_loader_batches))
def test_loader_batches(name, seed, dtype):
    "Nothing is known of the loader batches to come: a first one in which nothing counts is measured beside targets that are made"
    f,make = losses[name]
    torch.manual_seed(seed)
    m = LossMeasure(f)
    off = max(off_by(m, cut(batch_of(make), sizes), plan=False) for sizes in ((7,), (1,), whole_sizes))
    if name in exact: assert off < limit[dtype] and m.message is None, (off, m.message)
    else: assert off < limit[dtype] or m.message, off

@pytest.mark.parametrize('name', [n for n in exact if n != 'columns'])
def test_value(name, dtype):
    "The loss of the step is that of one loss of all outputs"
    f,make = exact[name]
    torch.manual_seed(0)
    whole,m = batch_of(make),LossMeasure(f)
    _,value = accumulated(m, cut(whole, (7,)))
    assert float(value) == pytest.approx(float(f(*whole)), rel=limit[dtype])

# -- A first micro-batch in which nothing counts -----------------------------------------------------------------
@pytest.mark.parametrize('name', ['no_floor','early_return','early_constant','plus_little','hard_ones'])
@pytest.mark.parametrize('make', [labels, integers])
def test_a_first_one_without_gradients_of_its_own(name, make, dtype):
    "Though its items count beside others, of which none are known: they are measured beside targets that are made"
    f,_ = exact[name]
    torch.manual_seed(1)
    parts,m = cut(batch_of(make), (7,)),LossMeasure(lambda p, y: f(p, y.to(p.dtype)))
    for _ in range(2): assert off_by(m, parts, plan=False) < limit[dtype]
    assert m.message is None

def test_a_first_one_without_boxes():
    "A list of targets for each item: the first pictures show nothing"
    def boxes(p, y):
        each = torch.stack([F.mse_loss(o[:len(t)], t, reduction='sum') if len(t) else (o**2).sum() for o,t in zip(p, y)])
        return each.sum()/sum(map(len, y)) if sum(map(len, y)) else 0*p.sum()
    torch.manual_seed(0)
    def part(*sizes): return [torch.randn(len(sizes), 3, 4), [torch.rand(k, 4) for k in sizes]]
    m = LossMeasure(boxes)
    parts = [part(0, 0), part(0, 0, 0), part(1, 0, 2), part(3, 1)]
    for waits,(p,y) in zip((True, True, False, False), parts): assert m.measure(Items(p, (y,), len(p))).waits == waits
    m.end_step()
    assert 'are left out' in m.message            # there are no boxes of which other targets could be made

# What counts has a target that nobody would guess
def coded(p, y): return no_floor(p, (y > 3).to(p.dtype))

def test_what_cannot_wait_is_told(dtype):
    "Once there is a reference, nothing is left out"
    torch.manual_seed(1)
    parts,m = cut(batch_of(codes), (7,)),LossMeasure(coded)
    assert off_by(m, parts, plan=False) > .01 and 'are left out' in m.message
    assert off_by(m, parts, plan=False) < limit[dtype]

def test_waits(dtype):
    "What such a micro-batch adds is told later"
    torch.manual_seed(1)
    m = LossMeasure(coded)
    parts = cut(batch_of(codes), (7,))
    counted = [m.measure(items_of(p)) for p in parts[:1]]
    assert counted[0].waits
    counted += [m.measure(items_of(p)) for p in parts[1:]]
    assert not any(c.waits for c in counted) and abs(counted[0].adds) < 1e-6 and counted[-1].adds > 1e-3

def test_nothing_counts_here():
    "But on other ranks: that the loss of these items alone is no number says nothing"
    torch.manual_seed(1)
    m = LossMeasure(no_floor, always=True)
    off_by(m, cut(batch_of(labels), (7,)))
    for make in (lambda n: [labels(n)[0], torch.zeros(n, 6)], labels):
        m.begin_step()
        for p in cut(batch_of(make), (7,)): m.measure(items_of(p))
        m.end_step(least=20.)
        assert m.message is None

def test_nothing_counts():
    "A step in which nothing has a gradient: its loss is finite where that of the big batch is"
    m,p = LossMeasure(positives),torch.randn(6, 2)
    def zero(p, y): return (p*y).sum()/y.sum().clamp(min=1)
    m = LossMeasure(zero)
    res,value = accumulated(m, cut([p, torch.zeros(6, 2)], (3,)))
    assert not res[0].any() and float(value) == 0
    m.end_step()
    assert m.message is None                                   # beside targets of 1 it is a mean
    of_none = LossMeasure(lambda p, y: zero(p, 0*y))
    accumulated(of_none, cut([p, torch.zeros(6, 2)], (3,)))
    of_none.end_step()
    assert 'its gradients are zero' in of_none.message

# -- What is not to be forgotten ---------------------------------------------------------------------------------
def test_few_reference_items():
    m = LossMeasure(own_weights)
    accumulated(m, [classes(50)]*2)
    assert m.reference.base.n == 4

def test_reference_grows():
    "A single item beside another one does not show what is done to items of different kinds"
    torch.manual_seed(0)
    m = LossMeasure(own_weights)
    sizes = []
    for _ in range(4):
        off = off_by(m, cut(classes(6), (1,)), plan=False)
        sizes.append(m.reference.base.n)
        assert off < 1e-5
    assert sizes == [1, 2, 3, 4]

def test_half_precision():
    "Of targets in bf16 257 ones add up to 256, and 16-bit gradients are rounded: divisors are whole numbers all the same"
    p,y = torch.randn(600, 3).bfloat16(),torch.cat([torch.ones(257), torch.zeros(343)])[:,None].expand(600, 3).bfloat16()
    m = LossMeasure(masked)
    ref,rest = m.measure(Items(p[:4], (p[:4]*0, y[:4]), 4)),m.measure(Items(p[4:], (p[4:]*0, y[4:]), 596))
    assert float(rest.adds/ref.adds) == pytest.approx(253/4, rel=1e-6)

def test_whole_numbers():
    "Rounding errors of sums are no part of divisors: what 3,000 items count is right to the last digits of float32"
    torch.manual_seed(0)
    m = LossMeasure(ignoring)
    p,y = classes(3000)
    few,many = m.measure(Items(p[:4], (torch.tensor([0, 1, 0, 1]),), 4)),m.measure(Items(p, (y,), 3000))
    assert float(many.adds/few.adds)*4 == pytest.approx(int((y != 2).sum()), rel=3e-7)

def test_nan_is_no_zero():
    m = LossMeasure(squares)
    accumulated(m, cut(numbers(6), (3,)))
    m.note([0., math.nan])
    assert m.verdict.off == math.inf

def test_numbers_among_outputs():
    "They belong to all items, and may be others in each step"
    def scaled(p, y): return F.cross_entropy(p[0]*p[1], y, weight=one(p[0], [.2, 1., 3.]))
    torch.manual_seed(0)
    m = LossMeasure(scaled)
    for scale in (1., 7., .1):
        parts = [Items((p, torch.tensor(scale)), (y,), len(y)) for p,y in map(classes, (5, 3, 8))]
        cs = [m.measure(o) for o in parts]
        whole = loss_and_grads(scaled, parts[0].join(*parts[1:]))[1][0]
        D = divisor(cs, m.extra)
        ours = torch.cat([loss_and_grads(scaled, o)[1][0]*c.divided_by for c,o in zip(cs, parts)])/D
        assert (ours-whole).norm() < 1e-5*whole.norm()
        m.end_step()
    assert m.message is None

def test_another_mode():
    "In each step the reference is measured with the loss as it is then"
    class Warm(nn.Module):
        def forward(self, p, y): return F.cross_entropy(p, y, weight=one(p, [1., 5., 9.] if self.training else [3., 1., 1.]))
    f = Warm()
    torch.manual_seed(0)
    m = LossMeasure(f)
    for mode in (True, True, False, True):
        f.train(mode)
        assert off_by(m, cut(classes(20), (6,))) < 1e-5
    assert m.message is None

def test_one_reference_for_all_ranks():
    "What they add is summed up, what they divided by is compared: with what one process would have found"
    torch.manual_seed(0)
    parts = cut(batch_of(labels), (7,))
    a,b = LossMeasure(floor_5),LossMeasure(floor_5)
    counted = [a.measure(items_of(p)) for p in parts[1:4]]
    b.adopt(a.news)
    there = [b.measure(items_of(p)) for p in parts[4:]]
    D = divisor(counted + there, a.extra)
    ours = torch.cat([loss_and_grads(floor_5, items_of(p))[1][0]*c.divided_by for p,c in zip(parts[1:], counted + there)])/D
    whole = loss_and_grads(floor_5, items_of([torch.cat(o) for o in zip(*parts[1:])]))[1][0]
    assert (ours-whole).norm() < 1e-5*whole.norm()
    assert torch.equal(a.reference.items.pred, b.reference.items.pred) and float(a.extra) == float(b.extra)

def test_adopted_and_saved():
    "A process that goes on with another rank's reference, before it has used it, has no floor in the units of its own"
    torch.manual_seed(0)
    parts = cut(batch_of(labels), (7,))
    a,b,again = (LossMeasure(floor_5) for _ in range(3))
    a.measure(items_of(parts[1]))
    for p in parts[2:]: b.measure(items_of(p))
    b.end_step()
    b.floor.value = torch.tensor(3.)
    b.adopt(a.news)
    again.load_state_dict(b.state_dict())
    assert again.floor.value is not None
    again.measure(items_of(parts[3]))
    assert again.floor.value is None and torch.equal(again.reference.items.pred, a.reference.items.pred)

# -- Texts of other widths ---------------------------------------------------------------------------------------
def token_mean(p, y): return F.cross_entropy(p.flatten(0, 1), y.flatten(), ignore_index=0)
def flat_tokens(p, y): return F.cross_entropy(p, y.flatten(), ignore_index=-100)
def next_tokens(p, y): return F.cross_entropy(p[:,:-1].flatten(0, 1), y[:,1:].flatten(), ignore_index=0)
def text_means(p, y):
    l,m = F.cross_entropy(p.transpose(1, 2), y, reduction='none'),(y > 0).to(p.dtype)
    return ((l*m).sum(1)/m.sum(1).clamp(min=1)).mean()
def padding_counts(p, y): return F.cross_entropy(p.transpose(1, 2), y, reduction='none').mean()

@pytest.mark.parametrize('widths', [(9, 5, 3, 8), (3, 9, 5, 9), (5, 5, 9)], ids=str)
@pytest.mark.parametrize('least', [0, 1], ids=['with padding','without'])
@pytest.mark.parametrize('f', [token_mean, flat_tokens, next_tokens, text_means], ids=lambda f: f.__name__)
def test_widths(f, least, widths, dtype):
    "Loader batches of other widths: the big batch pads them, and padding counts nothing"
    torch.manual_seed(0)
    flat,fill = f is flat_tokens,-100 if f is flat_tokens else 0
    texts = [(torch.randn(n, t, 5), torch.randint(least, 5, (n, t))) for n,t in zip((6, 4, 7, 2), widths)]
    widest = max(widths)
    wide = [F.pad(p, (0, 0, 0, widest-p.shape[1])) for p,_ in texts],[F.pad(y, (0, widest-y.shape[1]), value=fill) for _,y in texts]
    shaped = lambda p: p.flatten(0, 1) if flat else p
    big = Items(shaped(torch.cat(wide[0])), (torch.cat(wide[1]),), sum(len(y) for _,y in texts))
    whole = loss_and_grads(f, big)[1][0].reshape(-1, widest, 5)
    m = LossMeasure(f)
    for _ in range(2):
        parts = [Items(shaped(p), (y,), len(y)) for p,y in texts]
        cs,at,off = [m.measure(o) for o in parts],0,0.
        for c,o,(p,y) in zip(cs, parts, texts):
            ours = (loss_and_grads(f, o)[1][0]*c.divided_by/divisor(cs, m.extra)).reshape(p.shape)
            off += float((ours - whole[at:at+len(y),:y.shape[1]]).square().sum())
            at += len(y)
        assert math.sqrt(off) < limit[dtype]*float(whole.norm())
        m.end_step()
    assert m.message is None

def test_padding_that_counts():
    m = LossMeasure(padding_counts)
    for t in (4, 6): m.measure(Items(torch.randn(3, t, 5), (torch.randint(5, (3, t)),), 3))
    assert 'padding counts in it' in m.message      # of -100 cross entropy makes no loss, but the mean counts it

# -- What the model computes -------------------------------------------------------------------------------------
def test_by_values():
    "Only values of the loss are seen, each of a call of the model"
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x,y = torch.randn(24, 6, 3).double(),torch.randint(4, (24, 6)).where(torch.rand(24, 6) < .6, -100)
    def loss(x, y): return F.cross_entropy(model(x).transpose(1, 2), y)
    m = ValueMeasure(lambda parts: [float(loss(o.yb[0], o.yb[1]).detach()) for o in parts], eps=1e-12)
    cs = [m.measure(Items((), (x[i:i+8], y[i:i+8]), 8)) for i in (0, 8, 16)]
    counts = torch.tensor([int((y[i:i+8] >= 0).sum()) for i in (0, 8, 16)])
    assert [float(c.adds/cs[0].adds) for c in cs] == pytest.approx((counts/counts[0].double()).tolist(), rel=1e-9)
    assert float(joint_value(cs)) == pytest.approx(float(loss(x, y).detach()), rel=1e-9)

def test_the_model_computes_it():
    "The loss does not depend on the outputs: only its values can tell, as `ValueMeasure` sees them"
    w = torch.ones(3, requires_grad=True)
    m = LossMeasure(lambda p, y: (w.sum()*y.float()).mean())
    assert m.measure(items_of(classes(5))) is None and m.verdict.why == 'it does not depend on the outputs'
    same = ValueMeasure(lambda parts: [1. for _ in parts])
    with pytest.raises(ValueError, match='one value'): same.measure(items_of(classes(4)))

# -- Batches of other kinds --------------------------------------------------------------------------------------
def test_objects():
    "A list with an object for each item, such as its boxes: some items have none"
    def boxes(p, objects):
        n = sum(map(len, objects))
        return sum((p[i]-b).abs().sum() for i,bs in enumerate(objects) for b in bs)/max(n, 1) + 0*p.sum()
    torch.manual_seed(0)
    m = LossMeasure(boxes)
    for plan in (True, False):
        numbers_of_boxes = (0, 0, 0),(2, 0),(1, 3, 0, 1)
        parts = [Items(torch.randn(len(ks), 2), ([torch.randn(k, 2) for k in ks],), len(ks)) for ks in numbers_of_boxes]
        m.begin_step(parts if plan else ())
        cs = [m.measure(o) for o in parts]
        whole = loss_and_grads(boxes, parts[0].join(*parts[1:]))[1][0]
        ours = torch.cat([loss_and_grads(boxes, o)[1][0]*c.divided_by for o,c in zip(parts, cs)])/divisor(cs, m.extra)
        assert (ours-whole).norm() < 1e-5*whole.norm()
        m.end_step()
    assert m.message is None

def test_looks_at_inputs():
    "A loss that reads a mask in the inputs sees those of the items that it is called with"
    seen = []
    def by_inputs(p, y): return ((p-y).square()*seen[-1]).sum()/seen[-1].sum()
    class Shown:
        def __init__(self, xb, yb): self.mask = xb[0]
        def __enter__(self): seen.append(self.mask)
        def __exit__(self, *_): seen.pop()
    torch.manual_seed(0)
    parts = [Items(torch.randn(n, 3), (torch.randn(n, 3),), n, (torch.rand(n, 3),), Shown) for n in (4, 7, 2)]
    m = LossMeasure(by_inputs)
    cs = [m.measure(o) for o in parts]
    whole = loss_and_grads(by_inputs, parts[0].join(*parts[1:]))[1][0]
    ours = torch.cat([loss_and_grads(by_inputs, o)[1][0]*c.divided_by for o,c in zip(parts, cs)])/divisor(cs, m.extra)
    assert (ours-whole).norm() < 1e-5*whole.norm() and seen == []

@pytest.mark.parametrize('sizes', [(7,), (1,)], ids=str)
def test_divisor_of_each_output(sizes, dtype):
    "Two outputs, each with a divisor of its own"
    def heads(p, y, m): return F.cross_entropy(p[0], y) + (p[1].square()*m[:,None]).sum()/m.sum().clamp(min=1)
    torch.manual_seed(0)
    whole = torch.randn(40, 3),torch.randn(40, 2),torch.randint(3, (40,)),(torch.rand(40) < .3).to(dtype)
    parts = [Items((a, b), (y, w), len(y)) for a,b,y,w in cut(whole, sizes)]
    m = LossMeasure(heads)
    for _ in range(2):
        m.begin_step(parts)
        cs,given = [],[]
        for o in parts:
            cs.append(m.measure(o))
            given.append(cs[-1].seed)
        D = divisor(cs, m.extra)[m.block]
        for ours,grad in zip(zip(*given), loss_and_grads(heads, parts[0].join(*parts[1:]))[1]):
            assert (torch.cat(ours)/D - grad).norm() < limit[dtype]*grad.norm()
        m.end_step()
    assert m.message is None and str(m.reference.blocks) == 'each output'

def test_later_divisors_by_column_are_told():
    "Gradients of weights are sums over columns: if other loader batches of the step follow, no factor is right for all"
    torch.manual_seed(0)
    m = LossMeasure(columns)
    off_by(m, cut(batch_of(labels), (8,)), plan=False)
    assert '% off' in m.message

# -- What remembers, and what changes ----------------------------------------------------------------------------
def test_changes_itself():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 1
        def forward(self, p, y):
            self.n += 1
            return F.cross_entropy(p, y)*self.n
    m = LossMeasure(f := Counts())
    assert m.measure(items_of(classes(4))) is None and 'changes itself' in m.message and f.n == 1

class Scheduled:
    late = False
    def __call__(self, p, y): return own_weights(p, y) if self.late else each(p, y).mean()

def test_change_in_mid_fit():
    "While the table predicts, a change is noticed within an epoch, and told; then everything is measured"
    f = Scheduled()
    torch.manual_seed(0)
    m,last = LossMeasure(f),None
    for step in range(40):
        if step%10 == 0: m.begin_epoch()
        f.late = step >= 31
        parts = cut(classes(24), (4,))
        counted = [m.measure(items_of(p), loss=f(*p)) for p in parts]
        D = divisor(counted, m.extra)
        ours = torch.cat([loss_and_grads(f, items_of(p))[1][0]*c.divided_by for p,c in zip(parts, counted)])/D
        whole = loss_and_grads(f, items_of([torch.cat(o) for o in zip(*parts)]))[1][0]
        off = float((ours-whole).norm()/whole.norm())
        m.end_step()
        if step == 30: assert m.predicted > 50 and m.message is None
        if m.message: last = last or step
        if last: assert off < 1e-5 or step == last
        elif step < 31: assert off < 1e-5
    assert last and 'has changed' in m.message
    assert m.message

def test_cost_of_a_prediction():
    "What the table predicts takes a few operators, and no call of the loss; nor does the end of its step take many"
    torch.manual_seed(0)
    m,parts = LossMeasure(own_weights),cut(classes(24), (4,))
    most = at_end = 0
    for _ in range(40):
        before = m.predicted
        for p in parts:
            loss,n = own_weights(*p),m.predicted
            with OpCounter() as ops: m.measure(items_of(p), loss=loss)
            if m.predicted > n: most = max(most, sum(ops.calls.values()))
        with OpCounter() as ops: m.end_step()
        if m.predicted == before+len(parts): at_end = max(at_end, sum(ops.calls.values()))
    assert m.predicted > 100 and 0 < most <= 8 and 0 < at_end <= 16

def test_audit_sees_what_items_do_to_their_kind():
    "Attraction within a class shows only where two of a class meet: here only in the whole step"
    def attraction(p, y):
        s = (y[:,None] == y[None]).to(p.dtype).fill_diagonal_(0)
        return p.square().mean() + ((p[:,None]-p[None]).square().sum(-1)*s).sum()/len(p)
    torch.manual_seed(0)
    parts = [(torch.randn(8, 4), torch.arange(8)) for _ in range(2)]
    for room in (2**22, 40):           # all outputs are kept, or some items of each micro-batch
        m = LossMeasure(attraction)
        m.audit.room = room
        off = off_by(m, parts)
        assert not off < .1 and m.verdict.off > .01 and f'{m.verdict.off:.2%} off' in m.message

def test_audits_become_rare():
    m,audited = LossMeasure(own_weights),[]
    for step in range(64):
        m.begin_step()
        if m.audit.due: audited.append(step)
        for _ in range(2): m.measure(items_of(classes(4)))
        m.end_step()
    assert audited == [0, 2, 6, 14, 30, 62]
    m.begin_epoch()
    m.begin_step()
    assert m.audit.due

def test_goes_back_to_the_bit(dtype):
    "Memory may run out in a step: the next attempt is the same, whatever was measured in the one before"
    f,make = exact['floor_5']
    torch.manual_seed(0)
    m = LossMeasure(f)
    first,second = (cut(batch_of(make), (7,)) for _ in range(2))
    off_by(m, first, plan=False)
    before = measured.as_now(m)
    def step(m, parts):
        counted = [m.measure(items_of(p)) for p in parts]
        return torch.stack([torch.stack([c.adds, c.divided_by]) for c in counted])
    failed = step(m, second[::-1])
    twice,again = measured.as_now(before),measured.as_now(before)
    assert torch.equal(step(twice, second), step(again, second)) and (m.n, again.n, before.n) == (14, 14, 7)
    assert all(vars(a) == vars(b) for a,b in zip(measured.as_now(before).counted, before.counted)) and failed.isfinite().all()

class Watched:
    "A look that puts nothing back"
    entered = 0
    drawn = False
    def __init__(self, loss_func): self.loss = loss_func
    def try_out(self, items): pass
    def __enter__(self): Watched.entered += 1; return self
    def __exit__(self, *_): pass

# -- Cost --------------------------------------------------------------------------------------------------------
def calls_of_steps(f, make, monkeypatch, n_steps=125, k=8, n=32):
    "Elements of outputs in each call of the loss, for each step of `k` micro-batches of `n` items, relative to one micro-batch"
    steps,call = [],measured._call
    def counting(f, pred, *args):
        steps[-1].append(pred.numel()/(n*pred.shape[1]))
        return call(f, pred, *args)
    monkeypatch.setattr(measured, '_call', counting)
    torch.manual_seed(0)
    m = LossMeasure(f)
    m.begin_epoch()
    for _ in range(n_steps):
        steps.append([])
        parts = [make(n) for _ in range(k)]
        m.begin_step([items_of(p) for p in parts])
        for p in parts: m.measure(items_of(p), f(*p))
        m.end_step()
    assert m.message is None
    return steps

@pytest.mark.slow
@pytest.mark.parametrize('f,make,copies', [(positives, labels, 1), (masked, masked_numbers, 1), (sum_by_64, classes, 2)],
                         ids=lambda o: getattr(o, '__name__', None))
def test_cost(f, make, copies, monkeypatch):
    """A micro-batch takes one call of the loss, of it (twice that of a sum) and four items, and a step two more, of four items and
    of two copies of them, or as many as lift them above a floor. Few steps are looked at closely"""
    steps = calls_of_steps(f, make, monkeypatch)
    usual = [s for s in steps if len(s) <= 10]
    assert len(usual) > 95 and all(max(s) <= copies + .5 for s in usual)
    closely = sum(map(sum, steps)) - sum(map(sum, usual))
    assert closely < (.4 if copies == 1 else 3.5)*1000, closely

class Reads(TorchDispatchMode):
    "Counts what the host reads inside a `with` block"
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))

@pytest.mark.parametrize('f,make', [(positives, labels), (sum_by_64, classes)], ids=lambda o: getattr(o, '__name__', None))
def test_reads_of_a_usual_micro_batch(f, make):
    "One: does it add as much as those that were looked at closely? Whether the loss draws random numbers shows in close looks"
    m = LossMeasure(f, look=Watched)
    off_by(m, [make(8) for _ in range(12)])
    m.begin_step()
    parts = [make(8) for _ in range(12)]
    losses,counts = [f(*p) for p in parts],[]
    for p,loss in zip(parts, losses):
        with Reads() as reads: m.measure(items_of(p), loss)
        counts.append(reads.n)
    assert sorted(counts)[5] == 1, counts

def test_cost_of_class_weights(monkeypatch):
    "Targets of one number for each item tell what a micro-batch counts, once that is sure"
    assert sum(map(len, calls_of_steps(own_weights, classes, monkeypatch))) < 250

# -- Errors and memory -------------------------------------------------------------------------------------------
def test_errors_of_the_loss_are_reasons():
    def only_fours(p, y):
        if len(p) != 4: raise RuntimeError('I want four')
        return F.cross_entropy(p, y)
    m = LossMeasure(only_fours)
    assert m.measure(items_of(classes(4))) is None
    assert 'could not be measured (RuntimeError: I want four)' in m.message

@pytest.mark.parametrize('place', ['_in_full','_check_calls','_closely'])
def test_own_errors_are_errors(place, monkeypatch):
    def broken(*_): raise ZeroDivisionError('ours')
    monkeypatch.setattr(LossMeasure, place, broken)
    with pytest.raises(ZeroDivisionError): LossMeasure(own_weights).measure(items_of(classes(4)))

def test_out_of_memory_makes_groups_smaller():
    def hungry(p, y):
        if len(p) > 40: raise torch.OutOfMemoryError('out of memory')
        return own_weights(p, y)
    m,p = LossMeasure(hungry),classes(100)
    counted,few = m.measure(items_of(p)),m.measure(items_of([t[:20] for t in p]))
    w = torch.where(p[1] == 1, 2.5, 1.)
    assert m.most < p[0].numel() and m.message is None
    assert float(counted.adds/few.adds) == pytest.approx(float(w.sum()/w[:20].sum()), rel=1e-5)
    def never(p, y): raise torch.OutOfMemoryError('out of memory')
    m = LossMeasure(never)
    assert m.measure(items_of(p)) is None and 'runs out beside a single item' in m.message

def test_memory_of_wide_outputs():
    "They go in groups: a look takes less than 1.2 times their memory beside them"
    p,y = torch.randn(512, 8000),torch.randint(8000, (512,))
    m = LossMeasure(own_weights)
    m.most = p.numel()//8
    with LiveMemory([p, y]) as memory: m.measure(Items(p, (y,), 512))
    assert memory.peak < 1.2*p.nbytes
    with LiveMemory([p, y]) as memory: m.measure(Items(p, (y,), 512))
    assert memory.peak < 1.2*p.nbytes

def test_groups_are_views():
    "They are not copied, and a reference does not keep the outputs that it was chosen from"
    p,y = torch.randn(64, 100),torch.randint(100, (64,))
    assert [g.pred.data_ptr() for g in Items(p, (y,), 64).groups(1600)] == [t.data_ptr() for t in p.split(16)]
    for f in (own_weights, sum_by_64):
        m = LossMeasure(f)
        m.most = 1600
        m.measure(Items(p, (y,), 64))
        assert m.reference.base.pred.untyped_storage().nbytes() <= p.nbytes//4

def test_state_is_put_back():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = None
            self.register_buffer('n', torch.zeros(()))
        def forward(self, p, y):
            self.last = len(p)
            return own_weights(p, y) + 0*torch.rand(())
    f = Remembers()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    p = torch.randn(6, 3)
    before = torch.get_rng_state()
    m = LossMeasure(f)
    m.measure(Items(p, (torch.tensor([0, 1, 2, 0, 1, 2]),), 6))
    assert f.last is None and torch.equal(torch.get_rng_state(), before) and not torch.equal(before, state)

def test_another_look():
    "Who knows better how to call a loss without a trace gives the context"
    Watched.entered = 0
    m = LossMeasure(own_weights, look=Watched)
    off_by(m, cut(classes(12), (4,)))
    assert Watched.entered == 4 and m.message is None

def test_undeclared_sum():
    "Whether a loss is a sum shows in its first step; a floor is none"
    torch.manual_seed(0)
    for f,make,is_sum in ((sum_by_64, classes, True), (floor_90, labels, False), (own_weights, classes, False)):
        m = LossMeasure(f)
        off_by(m, cut(batch_of(make), (7,)), plan=False)
        assert m.is_sum == is_sum and bool(m.sum_message(4)) == is_sum and m.sum_message(1) is None
