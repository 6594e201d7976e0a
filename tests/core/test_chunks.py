"""The loss of a head's outputs in chunks is that of all outputs: value, gradients of the head's input and of its
parameters, whatever the loss and the cuts"""
import pytest
from reference import *
from fastai.losses import *
from fastaccum.core.chunks import ChunkedLoss, HeadInput, cut_batch
from fastaccum.core.losses import LossInfo
from fastaccum.core.memory import PeakMemory

torch.manual_seed(0)
n_cls,width = 7,5
cls_w = torch.rand(n_cls) + .1
flat_x,flat_y = torch.randn(13, width),torch.randint(n_cls, (13,))
text_x,text_y = torch.randn(3, 8, width),torch.randint(n_cls, (3, 8))
pixels_x,pixels_y = torch.randn(3, width, 6, 4),torch.randint(n_cls, (3, 6, 4))
def padded(y, ignored=-100):
    "The first items have no target at all"
    y = y.clone()
    y[:max(1, len(y)//3)],y.flatten()[::5] = ignored,ignored
    return y
def linear(): return nn.Linear(width, n_cls)
def conv(): return nn.Conv2d(width, n_cls, 1)

def masked(pred, y): return (F.cross_entropy(pred, y, reduction='none')*(y != 2)).sum()/(y != 2).sum()
def by_items(pred, y): return ((pred.flatten(1) - 1)**2).sum(1).mean()
def weighted(pred, y, w=cls_w): return F.cross_entropy(pred, y, w.to(pred.dtype))

cases = {  # loss, head, input, target
    'cross entropy':       (nn.CrossEntropyLoss(), linear, flat_x, flat_y),
    'ignored':             (nn.CrossEntropyLoss(), linear, flat_x, padded(flat_y)),
    'class weights':       (nn.CrossEntropyLoss(weight=cls_w), linear, flat_x, padded(flat_y)),
    'smoothing':           (nn.CrossEntropyLoss(weight=cls_w, label_smoothing=.1, ignore_index=2), linear, flat_x, flat_y),
    'sum':                 (nn.CrossEntropyLoss(reduction='sum'), linear, flat_x, padded(flat_y)),
    'soft targets':        (nn.CrossEntropyLoss(), linear, flat_x, torch.rand(13, n_cls).softmax(1)),
    'mse':                 (nn.MSELoss(), linear, flat_x, torch.randn(13, n_cls)),
    'function':            (partial(F.cross_entropy, ignore_index=3), linear, flat_x, flat_y),
    'texts':               (CrossEntropyLossFlat(ignore_index=1), linear, text_x, text_y),
    'padded texts':        (CrossEntropyLossFlat(), linear, text_x, padded(text_y)),
    'flat targets':        (CrossEntropyLossFlat(), linear, text_x, text_y.flatten()),
    'flat texts':          (CrossEntropyLossFlat(), linear, text_x.flatten(0, 1), text_y),
    'smoothed texts':      (LabelSmoothingCrossEntropyFlat(), linear, text_x, text_y),
    'focal':               (FocalLossFlat(), linear, text_x, text_y),
    'several labels':      (BCEWithLogitsLossFlat(), linear, text_x, (torch.rand(3, 8, n_cls) < .3).float()),
    'pixels':              (CrossEntropyLossFlat(axis=1, weight=cls_w), conv, pixels_x, padded(pixels_y)),
    'pixels, plain':       (nn.CrossEntropyLoss(), conv, pixels_x, pixels_y),
    'pixels, mixed':       (nn.CrossEntropyLoss(), lambda: nn.Conv2d(width, n_cls, 3, padding=1), pixels_x, pixels_y),
    'pixels, labels':      (nn.BCEWithLogitsLoss(), conv, pixels_x, (torch.rand(3, n_cls, 6, 4) < .3).float()),
    'dice':                (DiceLoss(), conv, pixels_x, pixels_y),
    'two layers':          (nn.CrossEntropyLoss(),
                            lambda: nn.Sequential(nn.Linear(width, 4), nn.Tanh(), linear().__class__(4, n_cls)), flat_x,
                            flat_y),
    'own, masked':         (masked, linear, flat_x, flat_y),
    'own, items':          (by_items, linear, text_x, text_y),
    'own, class weights':  (partial(F.cross_entropy, weight=cls_w), linear, flat_x, flat_y)}

def computed(loss, x, head, *yb, start=1.):
    x = x.clone().requires_grad_()
    head.zero_grad()
    value = loss(x, *yb)
    (value*start).sum().backward()
    return value.detach(),x.grad,*[p.grad.clone() for p in head.parameters()]

def check(loss_func, head, x, *yb, n, tol, **kwargs):
    whole = computed(lambda x, *yb: loss_func(head(x), *yb), x, head, *yb, **kwargs)
    parts = computed(ChunkedLoss(loss_func, head, n), x, head, *yb, **kwargs)
    for a,b in zip(parts, whole): assert a.dtype == b.dtype and rel_err(a, b) < tol, (a, b)

@pytest.mark.parametrize('n', [1, 2, 4, 5, 50])
@pytest.mark.parametrize('name', cases)
def test_exact(name, n):
    loss_func,head,x,y = cases[name]
    torch.manual_seed(1)
    check(loss_func, head(), x, y, n=n, tol=1e-6, start=3.)

@pytest.mark.parametrize('name', [k for k,(f,*_) in cases.items() if isinstance(f, nn.Module) or k.startswith('own')])
def test_exact_in_float64(name):
    "fastai's losses compute in float32 anyway"
    loss_func,head,x,y = cases[name]
    torch.manual_seed(1)
    check(double(loss_func), head().double(), x.double(), double(y), n=4, tol=1e-12)

@pytest.mark.parametrize('name,expected',
                         {'texts': [(1, 4)]*6, 'pixels': [(1, 3)]*6, 'flat texts': [(8,)]*3, 'own, items': [(1, 8)]*3,
                          'pixels, mixed': [(1, 6)]*3}.items())
def test_positions(name, expected):
    "Fewer items than chunks are cut along positions, where each counts alone"
    loss_func,head,x,y = cases[name]
    for cut,(t,) in cut_batch(HeadInput(x, head()), (y,), 5, LossInfo(loss_func)):
        part = cut(x)
        assert (part.shape[:1] if x.dim() == 2 else (part.shape[0], part.shape[2 if x.dim() == 4 else 1])) == expected.pop()
    assert not expected

@pytest.mark.parametrize('name', ['ignored', 'class weights', 'smoothing', 'pixels'])
def test_nothing_to_learn(name):
    "NaN, and gradients of zero: NaN would stay in the weights"
    loss_func,head,x,y = cases[name]
    value,*grads = computed(ChunkedLoss(loss_func, h := head(), 3), x, h, torch.full_like(y, 2 if name == 'smoothing' else -100))
    assert value.isnan() and not any(g.any() for g in grads)

@pytest.mark.parametrize('name', ['cross entropy', 'texts', 'pixels', 'pixels, plain'])
def test_each_loss(name):
    "As MixUp asks for them: a number for each element, which may count differently"
    loss_func,head,x,y = cases[name]
    loss_func,h = deepcopy(loss_func),head()
    loss_func.reduction = 'none'
    w = torch.rand_like(loss_func(h(x), y))
    check(loss_func, h, x, y, n=2, tol=1e-6, start=w)
    mean = deepcopy(cases[name][0])
    assert ChunkedLoss(mean, h)(x, y, reduction='none').shape == w.shape if isinstance(mean, partial) else True

def test_parts_that_train():
    "Only what has a gradient gets one"
    loss_func,head,x,y = cases['cross entropy']
    head = head()
    head.bias.requires_grad_(False)
    loss = ChunkedLoss(loss_func, head, 3)
    loss(x, y).backward()
    whole = torch.autograd.grad(loss_func(head(x), y), head.weight)[0]
    assert rel_err(head.weight.grad, whole) < 1e-6 and head.bias.grad is None
    head.requires_grad_(False)
    inp = x.clone().requires_grad_()
    loss(inp, y).backward()
    assert rel_err(inp.grad, torch.autograd.grad(loss_func(head(inp), y), inp)[0]) < 1e-6
    assert not loss(x, y).requires_grad
    with torch.no_grad(): assert rel_err(loss(inp, y), loss_func(head(x), y)) < 1e-6

def test_tied():
    "The gradient of a weight that is used before the head too"
    emb,head = nn.Embedding(n_cls, width),nn.Linear(width, n_cls)
    head.weight = emb.weight
    words,y = torch.randint(n_cls, (4, 6)),torch.randint(n_cls, (4, 6))
    whole = torch.autograd.grad(CrossEntropyLossFlat()(head(emb(words).tanh()), y), emb.weight)[0]
    parts = torch.autograd.grad(ChunkedLoss(CrossEntropyLossFlat(), head, 3)(emb(words).tanh(), y), emb.weight)[0]
    assert rel_err(parts, whole) < 1e-6

def test_once():
    head = linear()
    loss = ChunkedLoss(nn.CrossEntropyLoss(), head, 3)(flat_x, flat_y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='differentiated once'): loss.backward()
    x = flat_x.clone().requires_grad_()
    g, = torch.autograd.grad(ChunkedLoss(nn.CrossEntropyLoss(), head, 3)(x, flat_y), x, create_graph=True)
    with pytest.raises(RuntimeError, match='does not require grad|once_differentiable'): g.sum().backward()

def test_half_weights():
    "Sums of bf16 gradients in fp32: as close to those of fp32 as the gradients of all outputs are"
    torch.manual_seed(1)
    head,x,y = nn.Linear(32, 64).bfloat16(),torch.randn(512, 32).bfloat16(),torch.randint(64, (512,))
    loss_func = nn.CrossEntropyLoss()
    exact = torch.autograd.grad(loss_func((h := double(head))(x.double()), y), [*h.parameters()])
    whole,parts = (torch.autograd.grad(f(x, y), [*head.parameters()])
                   for f in (lambda x, y: loss_func(head(x), y), ChunkedLoss(loss_func, head, 64)))
    for a,b,e in zip(parts, whole, exact): assert a.dtype == torch.bfloat16 and rel_err(a, e) < 1.5*rel_err(b, e) + 1e-3

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """The head computes in half precision, its loss in fp32, also outside of the context; gradients get the loss scale
    before they are rounded"""
    torch.manual_seed(1)
    head,x,y = nn.Linear(32, 64),torch.randn(512, 32)*1e-2,torch.randint(64, (512,))
    scaler = torch.amp.GradScaler('cpu', init_scale=2.**16)
    def whole(x, y):
        with torch.autocast('cpu', dtype): pred = head(x)
        return nn.CrossEntropyLoss()(pred.float(), y)
    def chunked(x, y):
        with torch.autocast('cpu', dtype): inp = HeadInput(x, head)
        return ChunkedLoss(nn.CrossEntropyLoss(), head, 4, scaler)(inp, y)
    a,b = (computed(f, x, head, y, start=2.**16) for f in (chunked, whole))
    for u,v in zip(a, b): assert rel_err(u, v) < 5e-3
    assert rel_err(a[1], 0*a[1] + computed(lambda x, y: nn.CrossEntropyLoss()(head(x), y), x, head, y, start=2.**16)[1]) < .02
    assert rel_err(a[0], nn.CrossEntropyLoss()(head(x), y)) > 0                                # it was not fp32

def test_fp16_needs_the_scale():
    "Without it small gradients are zero in fp16"
    head,x,y = nn.Linear(4, 2),torch.randn(4096, 4),torch.zeros(4096).long()
    with torch.no_grad(): head.bias[:] = tensor([9., -9.])
    def of_x(scaler):
        with torch.autocast('cpu', torch.float16): inp = HeadInput(x.half().requires_grad_(), head)
        loss = ChunkedLoss(nn.CrossEntropyLoss(), head, 4, scaler)(inp, y)
        return torch.autograd.grad(loss, inp.x, torch.tensor(2.**24))[0]
    assert not of_x(None).any() and of_x(torch.amp.GradScaler('cpu', init_scale=2.**24)).all(1).float().mean() > .9

def test_refused():
    head = linear()
    def contrast(pred, y): return F.cross_entropy(pred@pred.T, torch.arange(len(pred)))
    def of(f, x=flat_x, y=flat_y): return ChunkedLoss(f, head, 3)(x, y)
    with pytest.raises(ValueError, match='contrast in chunks does not add up'): of(contrast)
    with pytest.raises(ValueError, match='two means'): of(LabelSmoothingCrossEntropyFlat(weight=cls_w))
    with pytest.raises(ValueError, match='two means'): of(LabelSmoothingCrossEntropyFlat(), y=padded(flat_y))
    with pytest.raises(TypeError, match='cannot be cut into the 13 items'): of(nn.CrossEntropyLoss(), y=flat_y[:5])
    with pytest.raises(ValueError, match='BatchNorm1d'): ChunkedLoss(nn.CrossEntropyLoss(), nn.Sequential(nn.BatchNorm1d(5), head))
    with pytest.raises(TypeError, match='pass the module'): ChunkedLoss(nn.CrossEntropyLoss(), head.forward)
    for n in (0, 1.5, True):
        with pytest.raises(ValueError, match='n_chunks'): ChunkedLoss(nn.CrossEntropyLoss(), head, n)

def test_a_loss_that_cannot_be_called_again():
    "It is called once, on two items, and the error says what that has changed for good"
    def loss(pred, y): file.write('called'); return F.cross_entropy(pred, y)
    file = open('calls.txt', 'w')
    with pytest.raises(ValueError, match='could not be measured .each call changes file, which cannot be put back.*check_loss=False'):
        ChunkedLoss(loss, nn.Linear(width, n_cls), 3)(flat_x, flat_y)

def test_never_all_outputs():
    "The largest tensor of outputs has the positions of one chunk"
    seen = []
    class Head(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.numel())
            return out
    head = Head(width, n_cls)
    for f in (nn.CrossEntropyLoss(), masked):
        seen.clear()
        ChunkedLoss(f, head, 4)(torch.randn(4096, width).requires_grad_(), torch.randint(n_cls, (4096,))).backward()
        assert max(seen[-4:]) == 1024*n_cls and (len(seen) == 4 or f is masked)
        assert max(seen) == 1024*n_cls

class Uncertain(nn.Module):
    "A loss that learns its own weight"
    def __init__(self): super().__init__(); self.log_var = nn.Parameter(torch.zeros(()))
    def forward(self, pred, y): return F.cross_entropy(pred, y)*torch.exp(-self.log_var) + self.log_var
class Frozen(Uncertain):
    def __init__(self): super().__init__(); self.log_var.requires_grad_(False)

@pytest.mark.parametrize('trains', ['all', 'input', 'head', 'none'])
def test_what_would_get_no_gradient(trains):
    "The loss depends on something that is neither the head's input nor a parameter of it"
    head,body = linear().requires_grad_(trains in ('all', 'head')),nn.Linear(width, width)
    x = flat_x.clone().requires_grad_(trains in ('all', 'input'))
    def regularized(pred, y): return F.cross_entropy(pred, y) + body.weight.pow(2).sum()
    def masked_by(pred, y): return F.cross_entropy(pred, y)*body(flat_x).detach().mean()
    def of(f): return ChunkedLoss(f, head, 3)(x, flat_y)
    with pytest.raises(ValueError, match=r'Uncertain in chunks depends on loss_func.log_var, of shape \(\)'): of(Uncertain())
    with pytest.raises(ValueError, match=r'regularized in chunks depends on a tensor that is not .*of shape \(5, 5\)'): of(regularized)
    for f in (Frozen(), masked_by): assert rel_err(of(f), f(head(x), flat_y)) < 1e-6
    body.requires_grad_(False)
    assert rel_err(of(regularized), regularized(head(x), flat_y)) < 1e-6
    with torch.no_grad(): assert rel_err(of(u := Uncertain()), u(head(x), flat_y)) < 1e-6
    assert head.weight.grad is None and x.grad is None

def test_regularized_head():
    "What the loss reads of the head's own parameters gets its gradient"
    head = linear()
    def decayed(pred, y): return F.cross_entropy(pred, y) + .1*head.weight.pow(2).sum()
    check(decayed, head, flat_x, flat_y, n=3, tol=1e-6)

@pytest.mark.filterwarnings('ignore:.*weight_norm. is deprecated')
def test_weight_norm():
    "With hooks and with parametrizations"
    for norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        check(nn.CrossEntropyLoss(), norm(linear()), flat_x, flat_y, n=3, tol=1e-6)

def unbiased(): return nn.Linear(width, n_cls, bias=False)            # the gradient of its bias would be 0

@pytest.mark.parametrize('loss_func,head,x,n_parts', [
    (nn.CrossEntropyLoss(), unbiased, text_x, 3), (partial(F.cross_entropy), unbiased, text_x, 3),
    (CrossEntropyLossFlat(flatten=False), unbiased, text_x, 3),
    (CrossEntropyLossFlat(flatten=False), conv, pixels_x, 3), (nn.CrossEntropyLoss(), conv, pixels_x, 18),
    (nn.BCEWithLogitsLoss(), linear, text_x, 24)])
def test_soft_targets(loss_func, head, x, n_parts):
    "The dimension of the classes is not cut, whatever the head's outputs are"
    torch.manual_seed(1)
    y = torch.rand_like((h := head())(x))
    check(loss_func, h, x, y, n=24, tol=2e-6)
    assert len(cut_batch(HeadInput(x, h), (y,), 24, LossInfo(loss_func))) == n_parts

# ---- losses of one's own, whose outputs are so large that they are measured in groups of items
n_big = 8000
def losses_of(pred, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction='none').view_as(y)
def unpadded(pred, y): return (losses_of(pred, y)*(y != 0)).sum()/(y != 0).sum()
def mean_of_texts(pred, y): return ((losses_of(pred, y)*(y != 0)).sum(1)/(y != 0).sum(1).clamp(min=1)).mean()
def flat_unpadded(pred, y): return unpadded(pred[None], y[None])
def root(pred, y): return (losses_of(pred, y)*(y != 0)).sum()/(y != 0).sum(1).float().sqrt().sum()

def texts(holes):
    "16 texts of 20 words, of which some have zeros at the end"
    torch.manual_seed(1)
    y = torch.randint(1, n_big, (16, 20))
    for i,k in holes.items(): y[i,20-k:] = 0
    return torch.randn(16, 20, 8),y

holes = {'rare': {14: 1}, 'at the end': {i: 15 for i in range(10, 16)},
         'alike in groups': {i: 5*(i//4) for i in range(16)}, 'empty': {**{i: 20 for i in range(4)}, 9: 3}}
@pytest.mark.parametrize('f', [unpadded, mean_of_texts])
@pytest.mark.parametrize('name', holes)
@pytest.mark.parametrize('n', [4, 8, 16])
def test_all_items_are_measured(f, name, n):
    "Targets that do not count, wherever they are, and the rules that fit all items are told apart by those that differ"
    x,y = texts(holes[name])
    check(f, nn.Linear(8, n_big), x, y, n=n, tol=4e-6)

def test_rare_positions():
    x,y = texts({11: 3})
    check(flat_unpadded, nn.Linear(8, n_big), x.flatten(0, 1), y.flatten(), n=8, tol=4e-6)

@pytest.mark.parametrize('k', [2, 4])
def test_chunks_in_which_nothing_counts(k):
    "Their loss is NaN, also where it is measured, on fewer items"
    for seed in range(12):
        torch.manual_seed(seed)
        check(flat_unpadded, nn.Linear(8, 3), torch.randn(16, 8), torch.randint(3, (16,)).sort().values, n=k, tol=2e-6)

# ---- what follows from no rule of the targets is measured, chunk by chunk
def each(pred, y): return F.cross_entropy(pred, y, reduction='none')
def by_floor(k): return lambda pred, y: (each(pred, y)*(y > 3)).sum()/(y > 3).sum().clamp(min=k)
def by_more(k): return lambda pred, y: (each(pred, y)*(y > 3)).sum()/((y > 3).to(pred.dtype).sum() + k)
def of_the_unsure(pred, y):
    unsure = pred.detach().softmax(1).amax(1) < .3
    return (each(pred, y)*unsure).sum()/unsure.sum()
def by_effective_numbers(pred, y):
    w = (1-.9)/(1-.9**torch.arange(1, n_cls+1, dtype=pred.dtype))
    return (each(pred, y)*w[y]).sum()/w[y].sum()
def positives(pred, y): return each(pred, y).sum()/(y == 1).sum()
by_no_rule = {'class weights': weighted, 'floor 1': by_floor(1), 'floor 5': by_floor(5), 'eps': by_more(1e-6), 'one more': by_more(1),
              'the unsure': of_the_unsure, 'effective numbers': by_effective_numbers, 'all by positives': positives}

@pytest.mark.parametrize('dtype,tol', [(torch.float32, 3e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize('n', [8, 3, 40])
@pytest.mark.parametrize('name', by_no_rule)
def test_by_no_rule(name, n, dtype, tol):
    "In batches that come one after the other, also where nothing counts in most chunks; validation leaves no trace"
    loss_func,head = by_no_rule[name],linear().to(dtype)
    loss = ChunkedLoss(loss_func, head, n)
    for seed in range(24):
        torch.manual_seed(seed)
        x,y = torch.randn(40, width, dtype=dtype),torch.randint(n_cls, (40,))
        y = y.sort().values if seed%3 else y
        whole = computed(lambda x, y: loss_func(head(x), y), x, head, y)
        with torch.no_grad(): assert rel_err(loss(x, y), whole[0]) < tol
        for a,b in zip(computed(loss, x, head, y), whole): assert a.dtype == b.dtype and rel_err(a, b) < tol, seed

def test_by_no_rule_where_nothing_counts():
    "As one loss does: NaN where that divides by nothing, and gradients of zero"
    head,x,y = linear(),flat_x,flat_y.clamp(max=3)
    for f,value in ((by_floor(1), 0.), (of_the_unsure, None)):
        loss = ChunkedLoss(f, head, 4)
        computed(loss, torch.randn(40, width), head, torch.arange(40)%n_cls)
        found,*grads = computed(loss, x if value == 0. else 1e4*x, head, y)
        assert found == value if value == 0. else found.isnan()
        assert not any(g.any() for g in grads)

class Parts:
    "It keeps what it is made of"
    def __call__(self, pred, y):
        self.main,self.n = by_floor(5)(pred, y),float(len(y))
        return self.main

def test_values_of_a_loss_that_is_measured():
    f,head,y = Parts(),linear(),torch.arange(40)%n_cls
    loss = ChunkedLoss(f, head, 8)
    for seed in range(3):
        x = torch.randn(40, width)
        loss(x.requires_grad_(), y).backward()
        assert rel_err(f.main, by_floor(5)(head(x), y)) < 2e-6 and f.n == 40.

def test_by_no_rule_in_large():
    "Each group of items by itself could be a mean over items"
    x,y = texts(holes['alike in groups'])
    check(root, nn.Linear(8, n_big), x, y, n=4, tol=3e-6)

def test_a_loss_that_changes():
    "What it divides by is seen in each chunk"
    head,k = linear(),0
    def loss_func(pred, y): return (each(pred, y)*(y != 3)).sum()/((y != 3).sum() + k)
    loss,y = ChunkedLoss(loss_func, head, 4),torch.arange(40)%n_cls
    for k in (0, 0, 2, 2, 5):
        x = torch.randn(40, width)
        for a,b in zip(computed(loss, x, head, y), computed(lambda x, y: loss_func(head(x), y), x, head, y)): assert rel_err(a, b) < 2e-6

@pytest.mark.parametrize('n', [2, 4, 8, 16])
@pytest.mark.parametrize('f', [unpadded, mean_of_texts])
def test_memory_of_measuring(f, n):
    "Some six times the outputs of a chunk, or eight times those of four items"
    x,y = texts(holes['rare'])
    head,outputs = nn.Linear(8, n_big),4*16*20*n_big
    grads = x.nbytes + sum(p.nbytes for p in head.parameters())
    loss = ChunkedLoss(f, head, n)
    with PeakMemory() as memory: torch.autograd.grad(loss(x.clone().requires_grad_(), y), [*head.parameters()])
    assert memory.peak < outputs*max(6.25*16//n, 8*4)/16 + grads + 2**18

class Blind:
    "It cannot be called with a part of the items"
    def __call__(self, pred, y): return F.cross_entropy(pred[torch.arange(13)], y)
class Counting(nn.Module):
    "Each call counts less than the one before"
    def __init__(self): super().__init__(); self.calls = 0
    def forward(self, pred, y):
        self.calls += 1
        return F.cross_entropy(pred, y)/self.calls
class Decaying:
    reduction = 'sum'
    def __init__(self, head): self.head = [head]
    def __call__(self, pred, y): return F.cross_entropy(pred, y, reduction='sum') + self.head[0].weight.detach().pow(2).sum()

@pytest.mark.parametrize('make,match', {
    'blind': (lambda head: Blind(), 'Blind cannot be called with a chunk of the outputs .IndexError'),
    'counts': (lambda head: Counting(), 'once for each chunk. Counting changes itself'),
    'decays': (Decaying, 'once for each chunk. Decaying is a sum')}.values(), ids=['blind','counts','decays'])
def test_what_cannot_be_measured_is_refused(make, match):
    head = linear()
    loss = ChunkedLoss(make(head), head, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match=match): loss(flat_x.clone().requires_grad_(), flat_y)

@pytest.mark.parametrize('always', [True, 'always'])
def test_what_does_not_count_shows_late(always):
    x,y = texts({})
    x,y,head = x[:,:4],y[:,:4]%n_cls + 1,nn.Linear(8, n_cls+2)
    loss = ChunkedLoss(unpadded, head, 4, check_loss=always)
    for _ in range(30): loss(x.clone().requires_grad_(), y)
    y[2,2:] = 0
    for _ in range(3):
        inp = x.clone().requires_grad_()
        a,b = (torch.autograd.grad(f(inp), inp)[0] for f in (lambda o: loss(o, y), lambda o: unpadded(head(o), y)))
        assert rel_err(a, b) < 2e-6

def test_heads_that_change_at_each_call():
    "Found in the first batch, before `backward`; not in evaluation, and not with a single chunk"
    norm = nn.utils.parametrizations.spectral_norm
    for head,n in ((norm(linear()).eval(), 3), (norm(linear()), 1)):
        ChunkedLoss(nn.CrossEntropyLoss(), head, n)(flat_x.clone().requires_grad_(), flat_y)
    loss = ChunkedLoss(nn.CrossEntropyLoss(), norm(linear()), 3)
    with torch.no_grad(): loss(flat_x, flat_y)
    with pytest.raises(ValueError, match='The head changes its buffers parametrizations.weight.0._u.* at each call'):
        loss(flat_x.clone().requires_grad_(), flat_y)
