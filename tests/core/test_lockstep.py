"Exact BatchNorm (`core/lockstep`): parts of a batch in lockstep are the batch, and what goes wrong leaves no trace"
import gc, random, sys, weakref
from collections import defaultdict, deque
import numpy as np, pytest, torch, torch.nn.functional as F, torchvision.models as tv, torchvision.ops as tv_ops
from quick import quickly
from copy import deepcopy
from functools import partial
from torch import nn
from torch.utils.checkpoint import checkpoint
pytest.importorskip('greenlet')
from fastaccum.core.lockstep import kept, room as room_of_parts
from fastaccum.core.lockstep.run import Lockstep, LockstepBatch, LockstepFacts
from fastaccum.core.lockstep.statistics import moments, pooled

# --- the reference: the same items as one batch
def flat(ts): return torch.cat([t.detach().flatten().double() for t in ts])
def grads(model): return flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())
def rel(a, b): return float((a-b).norm()/b.norm().clamp(min=1e-30))

def whole(model, x, loss):
    "A copy that has taken the batch at once"
    model = deepcopy(model)
    model.zero_grad()
    loss(model(*x)).backward()
    return model

def in_parts(model, x, loss, size=3, **kwargs):
    model = deepcopy(model)
    model.zero_grad()
    batch = LockstepBatch(model, x, len(x[0]), size, **kwargs)
    loss(batch.outputs()).backward()
    batch.backward()
    return model

def squares(out): return (out*torch.linspace(-1, 2, out.numel()).view_as(out).to(out)).square().mean()
def gentle(model):
    "Without randomness, in training"
    for m in model.modules():
        if hasattr(m, 'p') and isinstance(m.p, float): m.p = 0.
        if type(m).__name__ == 'StochasticDepth': m.p = 0.
    return model.train()

def check(model, x, loss=squares, tol=1e-12, size=3, **kwargs):
    a,b = whole(model, x, loss),in_parts(model, x, loss, size, **kwargs)
    assert rel(grads(b), grads(a)) < tol
    for (k,v),w in zip(a.named_buffers(), b.buffers()): torch.testing.assert_close(w, v, rtol=max(tol, 1e-10), atol=max(tol, 1e-10), msg=k)
    assert [p.grad is None for p in a.parameters()] == [p.grad is None for p in b.parameters()]
    return a,b

def seeded(f, *args, **kwargs):
    torch.manual_seed(0)
    return f(*args, **kwargs)

# --- small nets, one for each trap
class Body(nn.Module):
    "`f(self, x)` is its forward pass; `layers`: its modules"
    def __init__(self, f, **layers):
        super().__init__()
        self.f = f
        for k,m in layers.items(): setattr(self, k, m)
    def forward(self, *x): return self.f(self, *x)

def conv(i=4, o=4): return nn.Conv2d(i, o, 3, padding=1)
BN = nn.BatchNorm2d
class Scaled(BN):
    "A subclass with a forward of its own"
    def forward(self, x):
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        return 2*F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps)
class Functional(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(4))
    def forward(self, x): return torch.batch_norm(x, self.w, None, None, None, True, .1, 1e-5, False)

def no_grad_inside(m, x):
    x = m.a(x)
    with torch.no_grad(): t = m.n(x)
    return m.n2(x*t)
def skip(m, x):
    x = m.n(m.a(x))
    for c,n in ((m.b,m.n2), (m.c,m.n3)): x = x + n(c(F.relu(x)))
    return x
def dense(m, x):
    xs = [m.a(x)]
    for n,c in ((m.n,m.b), (m.n2,m.c)): xs.append(c(F.relu(n(torch.cat(xs, 1)))))
    return torch.cat(xs, 1)
def halves(m, x):
    a,b = m.n(m.a(x)).chunk(2, 1)
    return torch.cat([a, m.n2(b)], 1)
def later_in_place(m, x):
    x = m.a(x)
    y = m.n(m.b(x.clone()))
    x.relu_()                       # made before the meeting, changed after it
    return m.n2(x + y) + x
def twice(m, x): return m.n(m.b(m.n(m.a(x))))
def aux(m, x):
    x = m.a(x)
    return m.n(m.b(x)).mean((2, 3)) + x.mean((2, 3))
class Twice(torch.autograd.Function):
    "What a mode does not see"
    @staticmethod
    def forward(ctx, x): return 2*x
    @staticmethod
    def backward(ctx, g): return 2*g
def own_function(m, x):
    x = m.a(x)
    y = m.n(x)
    return m.n2(m.b(y) + Twice.apply(x))

three = lambda: dict(a=conv(), b=conv(), c=conv(), n=BN(4), n2=BN(4), n3=BN(4))
traps = dict(
    plain=lambda: nn.Sequential(conv(), BN(4), nn.ReLU(), conv(), BN(4)),
    on_raw_inputs=lambda: nn.Sequential(BN(4), conv()),
    on_raw_inputs_without_weights=lambda: nn.Sequential(BN(4, affine=False), conv(), BN(4)),
    not_affine_and_in_place=lambda: nn.Sequential(conv(), BN(4, affine=False), nn.ReLU(inplace=True), conv(),
                                                  BN(4, affine=False), nn.ReLU(inplace=True)),
    no_running=lambda: nn.Sequential(conv(), BN(4, track_running_stats=False), conv()),
    momentum_none=lambda: nn.Sequential(conv(), BN(4, momentum=None), conv()),
    momentum_none_twice=lambda: Body(twice, **{**three(), 'n': BN(4, momentum=None)}),
    called_twice=lambda: Body(twice, **three()),
    subclass=lambda: nn.Sequential(conv(), Scaled(4), conv()),
    functional=lambda: nn.Sequential(conv(), Functional(), conv()),
    frozen_weights=lambda: nn.Sequential(conv(), BN(4).requires_grad_(False), conv()),
    frozen_body=lambda: nn.Sequential(nn.Sequential(conv(), BN(4), conv()).requires_grad_(False), BN(4), conv()),
    eval_inside=lambda: nn.Sequential(conv(), BN(4), conv(), BN(4)),
    parametrized=lambda: nn.Sequential(conv(), nn.utils.parametrizations.weight_norm(BN(4), dim=None), conv()),
    no_grad_inside=lambda: Body(no_grad_inside, **three()), skip=lambda: Body(skip, **three()),
    dense=lambda: Body(dense, **{**three(), 'n2': BN(8), 'c': conv(8)}),
    views=lambda: Body(halves, **{**three(), 'n2': BN(2)}), later_in_place=lambda: Body(later_in_place, **three()),
    early_output=lambda: Body(aux, **three()), own_function=lambda: Body(own_function, **three()),
    group_and_batch=lambda: nn.Sequential(conv(), nn.GroupNorm(2, 4), BN(4), nn.InstanceNorm2d(4)),
    no_batchnorm=lambda: nn.Sequential(conv(), nn.ReLU(), conv()))

@pytest.mark.parametrize('size', [3, 1, 5])
@pytest.mark.parametrize('name', traps)
def test_traps(name, size):
    net = gentle(seeded(traps[name])).double()
    if name == 'eval_inside': net[1].eval()
    check(net, (torch.randn(11, 4, 5, 5).double(),), size=size)

def test_parts_alone_are_wrong():
    "What it is for, and that these tests can fail"
    net,x = seeded(traps['plain']).double(),torch.randn(12, 4, 5, 5).double()
    a,b = whole(net, (x,), squares),deepcopy(net)
    torch.stack([squares(b(p)) for p in x.split(3)]).mean().backward()
    assert rel(grads(b), grads(a)) > .05

def test_dimensions():
    x = torch.randn(7, 4).double()
    check(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double(), (x,))
    check(nn.Sequential(nn.Conv1d(4, 5, 2), nn.BatchNorm1d(5), nn.ReLU()).double(), (x.unsqueeze(2).expand(-1, -1, 6).contiguous(),))
    check(nn.Sequential(nn.Conv3d(4, 5, 2), nn.BatchNorm3d(5), nn.ReLU()).double(), (torch.randn(7, 4, 3, 3, 3).double(),))
    check(nn.Sequential(conv(), BN(4), conv()).double().to(memory_format=torch.channels_last),
          (torch.randn(7, 4, 6, 6).double().to(memory_format=torch.channels_last),))

def test_pooled_moments():
    x = torch.randn(9, 3, 4, dtype=torch.float64)*3 + 1e4
    n,mean,squares_ = pooled(*zip(*map(moments, x.split([4, 1, 4]))))
    torch.testing.assert_close(mean, x.mean((0, 2)), rtol=1e-14, atol=0)
    torch.testing.assert_close(squares_/n, x.var((0, 2), correction=0), rtol=1e-10, atol=0)

@pytest.mark.parametrize('mean', [0, 100, 1000])
def test_fp32_is_as_near_to_float64_as_the_whole_batch(mean):
    "Also far from zero, where the mean of a part is rounded by a part of the spread"
    ratios = []
    for seed in range(6):
        torch.manual_seed(seed)
        net = nn.Sequential(BN(4), *[m for _ in range(3) for m in (conv(), BN(4), nn.Tanh())])
        x = torch.randn(24, 4, 8, 8) + mean
        ref = grads(whole(deepcopy(net).double(), (x.double(),), squares))
        ratios.append(rel(grads(in_parts(net, (x,), squares)), ref)/rel(grads(whole(net, (x,), squares)), ref))
    assert np.mean(ratios) < 1.2

nets = dict(resnet18=tv.resnet18, mobilenet=tv.mobilenet_v3_small, densenet=partial(tv.DenseNet, 8, (2, 3, 2), 8),
            efficientnet=tv.efficientnet_b0,
            shufflenet=tv.shufflenet_v2_x0_5, googlenet=partial(tv.googlenet, init_weights=False), resnet50=tv.resnet50,
            densenet121=tv.densenet121)

@pytest.mark.parametrize('name', quickly([], nets, ['mobilenet', 'efficientnet', 'resnet50', 'densenet121']))
def test_torchvision(name):
    net = gentle(seeded(nets[name], num_classes=5)).double()
    def loss(out): return sum(map(squares, out)) if isinstance(out, tuple) else squares(out)
    check(net, (torch.randn(6, 3, 64, 64).double(),), loss, 1e-10, size=2)

# --- what a model keeps, and the settings that it changes
def test_unet():
    from fastai.vision.models.unet import DynamicUnet
    torch.manual_seed(0)
    net = DynamicUnet(nn.Sequential(*[nn.Sequential(nn.Conv2d(i, 4, 3, 2, 1), BN(4), nn.ReLU()) for i in (3, 4, 4)]), 3,
                      (16, 16), norm_type=None).double()
    for m in net.modules():
        if isinstance(m, nn.ReLU): m.inplace = False
    facts,x = LockstepFacts(),torch.randn(5, 3, 16, 16).double()
    ref = deepcopy_free(net, lambda: squares(net(x)).backward())
    for _ in range(2):               # the first pass looks at everything, later ones only at what changes
        got = deepcopy_free(net, lambda: run_parts(net, x, facts))
        assert rel(got, ref) < 1e-12
    assert 0 < len(facts.kept.watched) < 12

def deepcopy_free(net, f):
    "The gradients after `f`; hooks do not survive a copy"
    net.zero_grad()
    f()
    return grads(net)

def run_parts(net, x, facts, size=2):
    batch = LockstepBatch(net, (x,), len(x), size, facts=facts)
    squares(batch.outputs()).backward()
    batch.backward()

class Late(nn.Module):
    "Keeps something from the second batch on"
    def __init__(self):
        super().__init__()
        self.a,self.n,self.b,self.calls,self.late = nn.Linear(4, 4),nn.BatchNorm1d(4),nn.Linear(4, 2),0,False
    def forward(self, x):
        x = self.a(x)
        if self.late: self.kept = x
        y = self.n(x)
        return self.b(y + (self.kept if self.late else x))

def test_what_is_kept_later_is_noticed():
    net,x,facts = seeded(Late).double(),torch.randn(6, 4).double(),LockstepFacts()
    for net.late in (False, True, True):
        for m in net.modules(): m.zero_grad()
        state = deepcopy(net.state_dict())
        ref = grads(whole(net, (x,), squares)) if not hasattr(net, 'kept') else ref
        net.load_state_dict(state)
        run_parts(net, x, facts)
        assert rel(grads(net), ref) < 1e-12 and int(net.n.num_batches_tracked) == 1 + int(state['n.num_batches_tracked'])
        net.load_state_dict(state)
    assert '' in facts.kept.watched and net.kept.shape == (2, 4)      # the last part's, as after micro-batches

def compared(monkeypatch, net, x, sizes):
    "For each batch, in parts of so many items: how many objects were compared to find what modules keep?"
    counts,holds,facts = [],kept.Box.holds,LockstepFacts()
    def counted(box, content):
        counts[-1] += len(content)
        return holds(box, content)
    monkeypatch.setattr(kept.Box, 'holds', counted)
    for size in sizes:
        counts.append(0)
        run_parts(net, x, facts, size)
    monkeypatch.undo()
    return counts

def test_only_what_can_change_is_compared(monkeypatch):
    "The first part shows what changes, and the last one that nothing else has; later batches are looked at once"
    net,x = nn.Sequential(*[m for _ in range(3) for m in (conv(), BN(4), nn.ReLU())]),torch.randn(16, 4, 5, 5)
    can_change = sum(len(vars(m)) - len(vars(nn.Module())) + 4 + len(m._parameters) + len(m._buffers) for m in net.modules())
    for size in (8, 4, 2): assert compared(monkeypatch, net, x, [size]*3) == [2*4*can_change, can_change, can_change]

@pytest.mark.parametrize('i', range(5))
def test_one_part_alone_keeps_something(i):
    "Only the part with item `i` puts its activations into a list, and takes them out again behind two BatchNorms"
    def f(m, x):
        mine = m.a(x)
        if (x == 7).any(): m.box['stack'].append(mine)
        y = m.n2(m.b(m.n(mine)))
        return y + (m.box['stack'].pop() if m.box['stack'] else mine)
    net = seeded(Body, f, **three()).double()
    net.box = {'stack': []}
    x = torch.randn(5, 4, 5, 5).double()
    x[i,0,0,0] = 7
    ref = deepcopy_free(net, lambda: squares(net(x)).backward())
    facts = LockstepFacts()
    for _ in range(2): assert rel(deepcopy_free(net, lambda: run_parts(net, x, facts, 1)), ref) < 1e-12
    assert net.box == {'stack': []}

class Store: pass
def stored(put, get, **layers):
    "A net that keeps its first layer's output with `put(m, x)`, and reads it with `get(m)` behind two BatchNorms"
    def f(m, x):
        x = m.a(x)
        put(m, x)
        x = m.n2(m.b(m.n(x)))
        return x + get(m)
    net = Body(f, **three(), **layers)
    net.box,net.deque,net.hook,net.pair = {'of': {}},deque(maxlen=3),Store(),([], Store())
    net.hook.seen = defaultdict(dict)
    return net
places = dict(
    nested_dict=(lambda m, x: m.box['of'].update(x=x), lambda m: m.box['of']['x']),
    deque=(lambda m, x: m.deque.append(x), lambda m: m.deque.pop()),
    list_in_tuple=(lambda m, x: m.pair[0].append(x), lambda m: m.pair[0].pop()),
    object_in_tuple=(lambda m, x: setattr(m.pair[1], 'x', x), lambda m: m.pair[1].x),
    dict_of_object=(lambda m, x: m.hook.seen[x.device].update(x=x), lambda m: m.hook.seen[torch.device('cpu')]['x']))    # as in timm
@pytest.mark.parametrize('name', places)
def test_what_is_kept_in_containers(name):
    "Each part finds what it has put there itself"
    net,x = seeded(stored, *places[name]).double(),torch.randn(9, 4, 5, 5).double()
    ref = deepcopy_free(net, lambda: squares(net(x)).backward())
    assert rel(deepcopy_free(net, lambda: run_parts(net, x, LockstepFacts(), 3)), ref) < 1e-12

outside = {}
class OfClass(Body): kept = {}
others = dict(
    of_module=(lambda m, x: outside.update(x=x), lambda m: outside['x']),
    of_class=(lambda m, x: OfClass.kept.update(x=x), lambda m: OfClass.kept['x']),
    in_place=(lambda m, x: m.at.copy_(x.mean(0).detach()), lambda m: m.at),
    with_index=(lambda m, x: m.at.__setitem__(slice(0, 2), x[0,:2].detach()), lambda m: m.at),
    without_graph=(lambda m, x: outside.update(x=x.detach()), lambda m: outside['x']),
    behind_own_function=(lambda m, x: outside.update(x=Twice.apply(x)), lambda m: outside['x']))
@pytest.mark.parametrize('name', others)
def test_what_is_kept_elsewhere_is_refused(name):
    "One part would read what another one has put there"
    net = seeded(stored, *others[name]).double()
    net.at = torch.zeros(4, 5, 5).double()
    with pytest.raises(ValueError,
                       match="behind 'n2', a micro-batch has read activations of another one.*attributes of its modules"):
        run_parts(net, torch.randn(9, 4, 5, 5).double(), LockstepFacts(), 3)

tables = {}
alike = dict(
    to=lambda x, shape: torch.arange(shape.numel()).view(shape).to(x),
    type_as=lambda x, shape: torch.arange(shape.numel()).view(shape).type_as(x),
    like=lambda x, shape: torch.ones_like(x[0]), new=lambda x, shape: x.new_full(shape, 2.),
    expand=lambda x, shape: x.new_tensor(3.).expand_as(x[0]))
@pytest.mark.parametrize('name', alike)
@pytest.mark.parametrize('in_module', [False, True])
def test_tables_that_are_kept(name, in_module):
    "What depends on no item may be kept anywhere, also for the next batch"
    def table(m, x):
        key,x = x.shape[1:],m.n(m.a(x))
        kept = m.box if in_module else tables
        if key not in kept: kept[key] = alike[name](x, x.shape[1:])*m.a.bias.detach().mean()
        return m.n2(x + kept[key])
    net,facts,x = seeded(Body, table, **three()).double(),LockstepFacts(),torch.randn(9, 4, 5, 5).double()
    net.box = {}
    tables.clear()
    for _ in range(2):
        batch = LockstepBatch(net, (x,), 9, 3, facts=facts)
        batch.outputs()
        assert batch.message is None
    check(net, (x,))

def from_batch_to_batch(m, x):
    old,m.old = m.__dict__.get('old'),x.detach().mean((0, 2, 3))
    return m.n(m.a(x)) + (0 if old is None else old.view(1, -1, 1, 1))
def test_what_is_kept_for_the_next_batch_is_told():
    "It is that of the last part"
    net,facts,x = seeded(Body, from_batch_to_batch, **three()),LockstepFacts(),torch.randn(9, 4, 5, 5)
    told = []
    for _ in range(3):
        batch = LockstepBatch(net, (x,), 9, 3, facts=facts)
        batch.outputs()
        told.append(batch.message)
    assert told[0] is told[2] is None and 'from one batch to the next' in told[1] and "'old'" not in told[1]

def functional(m, x):
    "Swaps the layer's weights while it runs"
    return torch.func.functional_call(m.l, {k: 1.5*p for k,p in m.l.named_parameters()}, (m.a(x),))
def hooks_inside(m, x):
    seen = []
    h = m.n.register_forward_hook(lambda m, i, o: seen.append(o))
    x = m.n2(m.n(m.a(x)))
    h.remove()
    return x + seen[0]
def banked(m, x):
    "Compares items with those of the batch before"
    z = m.n(m.a(x)).mean((2, 3))
    if m.bank: z = z + m.bank[-1].T.mean(1)
    m.bank.append(z.detach())
    return z
def test_a_list_for_the_next_batch_is_told():
    net,facts,x = seeded(Body, banked, **three()),LockstepFacts(),torch.randn(9, 4, 5, 5)
    net.bank,told = [],[]
    for _ in range(2):
        batch = LockstepBatch(net, (x,), 9, 3, facts=facts)
        batch.outputs()
        told.append(batch.message)
    assert told[0] is None and 'from one batch to the next' in told[1] and len(net.bank) == 2

@pytest.mark.parametrize('f', [functional, hooks_inside])
def test_weights_and_hooks_that_are_changed_for_a_while(f):
    net = seeded(Body, f, l=nn.Sequential(conv(), BN(4), conv()), **three()).double()
    names = [n for n,_ in net.named_parameters()]
    _,b = check(net, (torch.randn(9, 4, 5, 5).double(),))
    assert [n for n,_ in b.named_parameters()] == names and not b.n._forward_hooks

def test_no_grad_and_autocast_do_not_leak():
    seen = []
    def forward(m, x):
        x = m.a(x)
        with torch.no_grad(): t = m.n(x)
        seen.append((torch.is_grad_enabled(), t.requires_grad))
        with torch.autocast('cpu', torch.bfloat16):
            u = m.n2(m.b(x))
            seen.append((torch.is_autocast_enabled('cpu'), m.b(x).dtype))
        seen.append(torch.is_autocast_enabled('cpu'))
        with torch.autograd.graph.save_on_cpu(): v = m.n3(x)
        return v + t + u.float()
    net,x = seeded(Body, forward, **three()),torch.randn(6, 4, 5, 5)
    in_parts(net, (x,), squares)
    # the parts in turns, from meeting to meeting
    assert seen == [(True, False)]*2 + [(True, torch.bfloat16), False]*2
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled('cpu')
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    net,x = seeded(traps['plain']),torch.randn(12, 4, 8, 8)
    ref = grads(whole(net, (x,), squares))
    with torch.autocast('cpu', dtype): a,b = (grads(f(net, (x,), squares)) for f in (whole, in_parts))
    assert rel(b, ref) < 1.5*rel(a, ref) + .01 and rel(b, a) < .05

@pytest.mark.parametrize('dtype', [torch.bfloat16])
def test_half_model(dtype):
    net,x = seeded(traps['plain']).to(dtype),torch.randn(12, 4, 8, 8).to(dtype)
    ref = grads(whole(deepcopy(net).double(), (x.double(),), squares))
    a,b = (grads(f(net, (x,), squares)) for f in (whole, in_parts))
    assert rel(b, ref) < 1.5*rel(a, ref) + .01

# --- what goes wrong
def state(model):
    return (torch.get_rng_state(),random.getstate(),np.random.get_state()[1].copy(),
            {k: v.clone() for k,v in model.state_dict().items()},grads(model))
def assert_same(a, b):
    assert a[0].equal(b[0]) and a[1] == b[1] and (a[2] == b[2]).all() and a[4].equal(b[4])
    for k in a[3]: assert a[3][k].equal(b[3][k]), k

def draws(): return torch.rand(1),random.random(),np.random.rand()
def depends(m, x):
    draws()
    x = m.n(m.a(x))
    return m.n3(m.c(x)) if x[0,0,0,0] > m.bound else m.n2(m.b(x))
def early_exit(m, x):
    draws()
    x = m.n(m.a(x))
    return x if x[0,0,0,0] > m.bound else m.n2(m.b(x))

class Trouble(Exception): pass
@pytest.mark.parametrize('ex', [Trouble, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit])
def test_an_exception_leaves_everything_as_it_was(ex):
    ended = []
    def forward(m, x):
        draws()
        try:
            with torch.no_grad(): x = m.n(m.a(x))
            calls.append(1)
            if len(calls) == 3: raise ex('stopped')
            return m.n2(m.b(x))
        finally: ended.append(torch.is_grad_enabled())
    net,calls = seeded(Body, forward, **three()),[]
    squares(net.b(torch.randn(2, 4, 4, 4))).backward()       # there are gradients
    batch = LockstepBatch(net, (torch.randn(9, 4, 5, 5),), 9, 3)
    before = state(net)
    with pytest.raises(ex): batch.outputs()
    assert_same(before, state(net))
    assert len(ended) == 3 and torch.is_grad_enabled()      # all parts have left at once
    assert not batch.run.parts

def test_no_graph_is_left_of_a_pass_that_ends_early():
    hidden = []
    def f(self, x):
        h = self.norm(self.a(x))
        hidden.append(weakref.ref(h.grad_fn))
        if len(hidden) == 3: raise MemoryError('planted')
        return self.b(h.relu())
    net = Body(f, a=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), b=nn.Linear(6, 2))
    with pytest.raises(MemoryError): LockstepBatch(net, (torch.randn(9, 4),), 9, 3).outputs()
    assert len(hidden) == 3 and all(h() is None for h in hidden)

@pytest.mark.parametrize('f,message', [(depends, "'n[23]'.*'n[23]'"), (early_exit, "'n2'")])
def test_another_way_through_the_model(f, message):
    net = seeded(Body, f, **three())
    x = torch.randn(9, 4, 5, 5)
    net.bound = first_values_between(net, x)
    before = state(net)
    with pytest.raises(ValueError, match=f"the same way through the model.*{message}"): LockstepBatch(net, (x,), 9, 3).outputs()
    assert_same(before, state(net))

def first_values_between(net, x):
    "A bound between the values by which the parts decide"
    vals = deepcopy(net.n).double()(deepcopy(net.a).double()(x.double()))[::3,0,0,0].sort()[0]
    return float(vals[:2].mean().detach())

def test_greenlets_are_gone():
    net,x = seeded(traps['skip']),torch.randn(6, 4, 5, 5)
    batch = LockstepBatch(net, (x,), 6, 2)
    loss = squares(batch.outputs())
    alive = [weakref.ref(p) for p in batch.run.parts]
    assert all(r().greenlet is None for r in alive)
    loss.backward(); batch.backward()
    del loss
    gc.collect()
    assert not any(r() for r in alive)

def test_graph_is_freed_without_the_collector():
    net,x = seeded(traps['plain']),torch.randn(6, 4, 5, 5)
    batch = LockstepBatch(net, (x,), 6, 2)
    loss = squares(batch.outputs())
    nodes = [weakref.ref(c.ctx) for m in batch.run.meetings for c in m.calls]
    gc.disable()
    try:
        loss.backward(); batch.backward()
        assert not any(r() for r in nodes)
    finally: gc.enable()

@pytest.mark.parametrize('reentrant', [False, True])
def test_recomputed_batchnorm_is_refused(reentrant):
    net = seeded(Body, lambda m, x: checkpoint(lambda x: m.n(m.b(x)), m.a(x), use_reentrant=reentrant), **three())
    batch = LockstepBatch(net, (torch.randn(6, 4, 5, 5),), 6, 2)
    with pytest.raises(ValueError, match='recomputed in the backward pass'):
        squares(batch.outputs()).backward()
        batch.backward()

def test_recomputation_without_batchnorm():
    net = seeded(Body, lambda m, x: m.n2(m.c(checkpoint(lambda x: m.b(F.relu(x)), m.n(m.a(x)), use_reentrant=False))), **three()).double()
    check(net, (torch.randn(6, 4, 5, 5).double(),))

def test_one_value_per_channel():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match='more than 1 value per channel'): Lockstep(net).forward([partial(net, torch.randn(1, 4))])
    check(net.double(), (torch.randn(5, 4).double(),), size=1)         # single items are enough

def test_inference_mode_inside_is_refused():
    def forward(m, x):
        with torch.inference_mode(): t = m.n(m.a(x))
        return m.b(x) + t
    with pytest.raises(ValueError, match='a mode that it enters itself'):
        LockstepBatch(seeded(Body, forward, **three()), (torch.randn(6, 4, 5, 5),), 6, 2).outputs()

def test_without_greenlet(monkeypatch):
    monkeypatch.setitem(sys.modules, 'greenlet', None)
    with pytest.raises(ImportError, match="the extra 'batchnorm': pip install greenlet"): Lockstep(BN(3))

def test_hooks_see_their_part():
    net,x,seen,got = seeded(traps['plain']),torch.randn(6, 4, 5, 5),[],[]
    net[3].register_forward_hook(lambda m, i, o: seen.append(o))
    net[0].weight.register_hook(lambda g: got.append(g.clone()))
    b = LockstepBatch(net, (x,), 6, 2)
    squares(b.outputs()).backward(); b.backward()
    assert [len(o) for o in seen] == [2, 2, 2] and len(got) == 3
    torch.testing.assert_close(sum(got), net[0].weight.grad)

def test_work_grows_linearly():
    "Each node of a residual net is passed once"
    counts = []
    for n in (4, 8):
        net = seeded(Body, lambda m, x: [x := x + m.norms[i](m.convs[i](x)) for i in range(n)][-1],
                     convs=nn.ModuleList(conv() for _ in range(n)), norms=nn.ModuleList(BN(4) for _ in range(n)))
        passed = []
        class Counted(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x.clone()
            @staticmethod
            def backward(ctx, g): passed.append(1); return g
        first = net.f
        net.f = lambda m, x: first(m, Counted.apply(m.convs[0](x)))
        b = LockstepBatch(net, (torch.randn(4, 4, 4, 4),), 4, 2)
        squares(b.outputs()).backward(); b.backward()
        counts.append(len(passed))
    assert counts == [2, 2]

@pytest.mark.slow
@pytest.mark.parametrize('name,size,n,edge', quickly([], [
    ('resnet18', 4, 16, 32), ('resnet18', 1, 16, 64), ('resnet18', 2, 24, 64), ('resnet50', 4, 16, 64)],
                                                     long=[('resnet18', 1, 16, 64), ('resnet18', 2, 24, 64), ('resnet50', 4, 16, 64)]))
def test_memory_on_the_device(name, size, n, edge):
    "At most 1.4 of ordinary micro-batches, however small they are; without the host it would be the whole batch's"
    import simulated as sim
    memory = sim.memory
    net,x = sim.move(seeded(nets[name], num_classes=5)),torch.randn(n, 3, edge, edge).to('sim')
    for p in net.parameters(): p.grad = torch.zeros_like(p)
    def peak(f):
        gc.collect()
        start = memory.live
        memory.reset_peak()
        f()
        return memory.peak - start
    def lockstep(**kwargs):
        batch = LockstepBatch(net, (x,), n, size, **kwargs)
        squares(batch.outputs()).backward()
        batch.backward()
    def parts():
        for p in x[:2*size].split(size): squares(net(p)).backward()
    facts = LockstepFacts()
    # the second batch knows how much room there is while parts wait
    micro,host,again = peak(parts),peak(partial(lockstep, facts=facts)),peak(partial(lockstep, facts=facts))
    assert facts.room.saved > 0 and max(host, again) < 1.4*micro
    if size == 2: assert peak(partial(lockstep, activations='device')) > 3*micro

def emptied(monkeypatch):
    "Counts what goes to the host while parts wait: all of it, as there is no room"
    count = []
    class Counted(room_of_parts.Emptied):
        def __init__(self, t): count.append(t.shape); super().__init__(t)
    monkeypatch.setattr(room_of_parts, 'Emptied', Counted)
    return count

def cached(m, x):
    "The first part computes a tensor that all read, and that no module keeps"
    if not m.cache: m.cache.append(torch.linspace(0, 1, 4, dtype=x.dtype, device=x.device).view(1, 4, 1, 1)+1)
    y = m.n(m.a(x))
    return m.n2(m.b(y)*m.cache[0] + y)

@pytest.mark.parametrize('name', ['skip', 'dense', 'views', 'later_in_place', 'early_output', 'own_function', 'no_grad_inside', 'cached'])
def test_what_waits_on_the_host(name, monkeypatch):
    "Parts find what they have computed as it was, also where another one reads it"
    import simulated as sim
    count = emptied(monkeypatch)
    net = gentle(seeded(traps[name] if name != 'cached' else lambda: Body(cached, **three()))).double()
    store = Shared() if name == 'cached' else None
    if store is not None: net.f = lambda m, x: cached(store.on(m), x)
    x = torch.randn(7, 4, 5, 5).double()
    ref = whole(net, (x,), squares)
    if store is not None: store.cache.clear()
    net = sim.move(deepcopy(net))
    batch = LockstepBatch(net, (x.to('sim'),), 7, 3)
    batch.run.mover.min_bytes = 0
    squares(batch.outputs()).backward()
    batch.backward()
    assert rel(flat([sim.raw(p.grad) for p in net.parameters() if p.grad is not None]),
               flat([p.grad for p in ref.parameters() if p.grad is not None])) < 1e-12
    for v,w in zip(ref.buffers(), net.buffers()): torch.testing.assert_close(sim.raw(w), v, rtol=1e-10, atol=1e-10)
    assert len(count) >= 3 and not batch.run.room.away

class Shared:
    "A cache outside of the model"
    def __init__(self): self.cache = []
    def on(self, m):
        m.__dict__['cache'] = self.cache
        return m
    def __deepcopy__(self, memo): return self

def test_what_survives_an_error_is_whole(monkeypatch):
    import simulated as sim
    count,kept = emptied(monkeypatch),[]
    def forward(m, x):
        x = m.a(x)
        kept.append(x)
        y = m.n(x)
        raise Trouble
    net = sim.move(seeded(Body, forward, **three()))
    batch = LockstepBatch(net, (torch.randn(6, 4, 5, 5).to('sim'),), 6, 2)
    batch.run.mover.min_bytes = 0
    with pytest.raises(Trouble): batch.outputs()
    assert count and len(kept) == 3
    for t in kept: assert sim.raw(t).isfinite().all() and t.untyped_storage().nbytes() == 2*4*25*4

def test_a_part_without_values():
    "BatchNorm of the rows that a mask selects, of which a part has none"
    def forward(self, x, m):
        k = m.bool()
        return self.out(torch.zeros_like(x).masked_scatter(k[:,None].expand_as(x), self.bn(x[k])))
    torch.manual_seed(0)
    model = Body(forward, bn=nn.BatchNorm1d(5), out=nn.Linear(5, 4)).double().train()
    m = torch.ones(20).long(); m[5:10] = 0
    check(model, (torch.randn(20, 5).double(), m), size=5)

def test_keywords_of_torchs_batch_norm():
    def forward(self, x):
        n = self.n
        return torch.batch_norm(input=x, weight=n.weight, bias=n.bias, running_mean=n.running_mean,
                                running_var=n.running_var, training=True, momentum=.1, eps=1e-5, cudnn_enabled=False)
    torch.manual_seed(0)
    check(Body(forward, n=BN(3)).double().train(), (torch.randn(8, 3, 4, 4).double(),))

class OwnNorm(nn.Module):
    "A BatchNorm in plain PyTorch"
    def __init__(self): super().__init__(); self.register_buffer('means', torch.zeros(6))
    def forward(self, x):
        mean = x.mean(0)
        self.means.lerp_(mean.detach(), .1)
        return x - mean

@pytest.mark.parametrize('model,names', [
    (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), OwnNorm()), '2.means'),
    (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)), '0.weight_u'),
    (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), None)])
def test_buffers_that_each_part_changes_are_told(model, names):
    torch.manual_seed(0)
    batch = LockstepBatch(model().train(), (torch.randn(8, 6),), 8, 3)
    batch.outputs()
    batch.run.clear()
    assert batch.message is None if names is None else names in batch.message and 'once for each micro-batch' in batch.message

# --- hooks on gradients of tensors
def hooked(when):
    "A hook that is no linear function, registered at this place of the model"
    def forward(m, x):
        hook = lambda g: g.sign()*g.abs().sqrt()
        x = m.a(x)
        if when == 'before': x.register_hook(hook)
        y = m.n(x)
        if when == 'after BatchNorm': x.register_hook(hook)
        z = y + x
        if when == 'after both': x.register_hook(hook)
        z = m.n2(m.b(z))
        if when == 'after two':
            handle = x.register_hook(lambda g: g*1e6)
            handle.remove()
            x.register_hook(hook)
        if when == 'on the output': y.register_hook(hook)
        return z
    return forward

@pytest.mark.parametrize('when', ['before', 'after BatchNorm', 'after both', 'after two', 'on the output'])
def test_hooks_on_tensors(when):
    x = torch.randn(7, 4, 5, 5).double()
    net = seeded(Body, hooked(when), **three()).double()
    check(net, (x,))
    net.f = hooked(None)
    plain = whole(net, (x,), squares)
    net.f = hooked(when)
    assert rel(grads(whole(net, (x,), squares)), grads(plain)) > .01       # the hook counts

@pytest.mark.parametrize('late', [False, True])
def test_retained_gradient(late):
    def forward(m, x):
        x = m.a(x)
        if not late: x.retain_grad()
        kept.append(x)
        y = m.n(x) + x
        if late: x.retain_grad()
        return m.n2(y)
    kept = []
    check(seeded(Body, forward, **three()).double(), (torch.randn(6, 4, 5, 5).double(),))
    whole_grad,*parts = [t.grad for t in kept]
    torch.testing.assert_close(torch.cat(parts), whole_grad)

@pytest.mark.parametrize('copy', [False, True])
def test_hooks_before_views_are_told(copy):
    def forward(m, x):
        x = m.a(x)
        x.register_hook(lambda g: g.clamp(-.01, .01))
        a,b = x.chunk(2, 1)
        if copy: b = b.clone()
        return m.n2(torch.cat([m.n(a), b], 1))
    net = seeded(Body, forward, **{**three(), 'n': BN(2)}).double()
    x = torch.randn(6, 4, 5, 5).double()
    batch = LockstepBatch(net, (x,), 6, 2)
    batch.outputs()
    batch.run.clear()
    assert batch.message is None if copy else 'may be called several times' in batch.message
    if copy: check(net, (x,))

# --- what looks like BatchNorm, and BatchNorm that looks like something else
class Ghost(nn.BatchNorm2d):
    "Ghost BatchNorm: statistics of a few items at a time"
    def forward(self, x): return torch.cat([super(Ghost, self).forward(p) for p in x.chunk(-(-len(x)//4))])
class GhostSlices(nn.BatchNorm2d):
    def forward(self, x): return torch.cat([super(GhostSlices, self).forward(x[i:i+2]) for i in range(0, len(x), 2)])
class EachItem(nn.Module):
    "Instance normalization, as in AdaIN"
    def forward(self, x): return F.batch_norm(x.reshape(1, -1, *x.shape[2:]), None, None, training=True).view(x.shape)
class StandardizedConv(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, F.batch_norm(self.weight.flatten(1)[None], None, None,
                                                  training=True).view_as(self.weight), self.bias)

@pytest.mark.parametrize('size', [4, 1])
@pytest.mark.parametrize('name', ['ghost', 'slices', 'each item'])
def test_other_items_are_told(name, size):
    if (name,size) == ('slices', 1): return                # a part of one item is no slice, and its model tells nothing
    norm = {'ghost': Ghost(4), 'slices': GhostSlices(4), 'each item': EachItem()}[name]
    batch = LockstepBatch(nn.Sequential(conv(), norm, conv(), BN(4)), (torch.randn(8, 4, 5, 5),), 8, size)
    batch.outputs()
    batch.run.clear()
    what = '`F.batch_norm` is called for each item by itself' if name == 'each item' else "'1' is called for some items at a time"
    assert f'in this model {what}' in batch.message

def test_all_items_are_not_told():
    "Views of other kinds: raw inputs, a half of the channels, flattened features, hooks"
    nets = [nn.Sequential(BN(4), conv()), traps['views'](), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(100)),
            nn.Sequential(conv(), nn.Flatten(), nn.Flatten(), nn.BatchNorm1d(100)),
            nn.Sequential(conv(), BN(4), nn.InstanceNorm2d(4)), nn.Sequential(StandardizedConv(4, 4, 3), BN(4))]
    for net in nets:
        for size in (3, 1):
            hook = [m.register_full_backward_hook(lambda *a: None) for m in net.modules() if isinstance(m, BN)]
            batch = LockstepBatch(net, (torch.randn(6, 4, 5, 5),), 6, size)
            batch.outputs()
            batch.run.clear()
            assert batch.message is None

def test_standardized_weights():
    "`F.batch_norm` of weights, which all parts share"
    check(nn.Sequential(StandardizedConv(4, 6, 3), BN(6), nn.ReLU(), StandardizedConv(6, 4, 3)).double(),
          (torch.randn(7, 4, 7, 7).double(),))

unseen = dict(native=lambda x, n: torch.native_batch_norm(x, n.weight, n.bias, None, None, True, .1, 1e-5)[0],
              keyword=lambda x, n: torch.native_batch_norm(x, n.weight, n.bias, None, None, training=True, momentum=.1, eps=1e-5)[0],
              operator=lambda x, n: torch.ops.aten.native_batch_norm(x, n.weight, n.bias, None, None, True, .1, 1e-5)[0],
              legit=lambda x, n: torch.ops.aten._native_batch_norm_legit.no_stats(x, n.weight, n.bias, True, .1, 1e-5)[0])
class ByHand(BN):
    "Statistics of its own, as a kernel in another language has them, and no running ones"
    def __init__(self, n): super().__init__(n, track_running_stats=False)
    def forward(self, x): return (x - x.mean((0, 2, 3), keepdim=True))*self.weight.view(1, -1, 1, 1)

@pytest.mark.parametrize('net', [lambda: nn.Sequential(ByHand(4), conv(), BN(4)),
                                 lambda: nn.Sequential(conv(), BN(4), ByHand(4)),
                                 lambda: nn.Sequential(conv(), ByHand(4), conv())])
def test_a_norm_that_computes_by_itself_is_refused(net):
    "Wherever it stands: before another one, behind it, alone"
    net = net()
    name = next(k for k,m in net.named_children() if isinstance(m, ByHand))
    with pytest.raises(ValueError, match=f"the BatchNorm '{name}' computes its statistics without"):
        LockstepBatch(net, (torch.randn(6, 4, 5, 5),), 6, 2).outputs()

@pytest.mark.parametrize('name', unseen)
def test_other_functions_are_refused(name):
    net = seeded(Body, lambda m, x: unseen[name](m.a(x), m.n), **three())
    with pytest.raises(ValueError, match='batch_norm.* computes its statistics without'):
        LockstepBatch(net, (torch.randn(6, 4, 5, 5),), 6, 2).outputs()

def test_native_batch_norm_outside_of_training():
    fixed = lambda m, x: m.n2(torch.native_batch_norm(m.a(x), m.n.weight, m.n.bias, m.n.running_mean, m.n.running_var, False, .1, 1e-5)[0])
    check(seeded(Body, fixed, **three()).double(), (torch.randn(6, 4, 5, 5).double(),))

def test_layers_that_are_left_out_at_random():
    "For each item: it works. For a micro-batch: they go other ways, which is an error"
    x = torch.randn(12, 4, 5, 5)
    def block(m, x): return m.n2(x + m.drop(m.n(m.b(x))))
    b = in_parts(Body(block, **three(), drop=tv_ops.StochasticDepth(.5, 'row')).train(), (x,), squares)
    assert grads(b).norm() > 0
    ways = iter((True, True, False, True))
    with pytest.raises(ValueError, match='the same way'):
        in_parts(Body(lambda m, x: m.n2(m.n(x) if next(ways) else x), **three()), (x,), squares)
