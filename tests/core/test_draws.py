"What a model draws for a whole batch, in parts of it: drawn once, kept as bits, and nothing else is looked at"
import random, threading, pytest, torch, torch.nn.functional as F
from collections import Counter
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from fastaccum.core.draws import Bits, Draw, DrawFacts, Draws
from fastaccum.core.private import drawn_by

def mlp(): return nn.Sequential(nn.Linear(6, 16), nn.Dropout(.3), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(.2), nn.Linear(8, 3))
class Encoder(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.m = nn.Sequential(*[nn.TransformerEncoderLayer(d, 4, 4*d, .1, batch_first=True) for _ in range(2)])
    def forward(self, x): return self.m(x).mean(1)

def run(model, x, sizes, facts=None):
    "The outputs of all parts, and the `Draws`"
    draws = Draws(model, model, (x,), len(x), sizes, DrawFacts() if facts is None else facts)
    return torch.cat([draws.call(i, model, part) for i,part in enumerate(x.split(sizes))]),draws

@pytest.mark.parametrize('n', range(1, 10))
def test_small_batches(n):
    model,x = mlp().double(),torch.randn(n, 6).double()
    torch.manual_seed(1)
    whole,end = model(x),torch.get_rng_state()
    for size in range(1, n+1):
        torch.manual_seed(1)
        out,_ = run(model, x, [size]*(n//size) + [n%size]*(n%size > 0))
        torch.testing.assert_close(out, whole)
        assert torch.equal(torch.get_rng_state(), end)

class Counted(TorchDispatchMode):
    "How often PyTorch computes each operator"
    def __init__(self): super().__init__(); self.counts = Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))

# -- once
def test_nothing_is_drawn_twice():
    model,x,facts = mlp(),torch.randn(16, 6),DrawFacts()
    run(model, x, [2]*8, facts)
    with Counted() as seen: out,_ = run(model, x, [2]*8, facts)
    assert seen.counts[torch.ops.aten.bernoulli_.float] == 2
    with Counted() as seen: torch.cat([model(part) for part in x.split(2)])
    assert seen.counts[torch.ops.aten.bernoulli_.float] == 16

def test_only_what_draws_is_seen(monkeypatch):
    model,x,facts = mlp(),torch.randn(16, 6),DrawFacts()
    run(model, x, [2]*8, facts)
    asked,draw = [],Draws.draw
    monkeypatch.setattr(Draws, 'draw', lambda self, func, *args: asked.append(func) or draw(self, func, *args))
    run(model, x, [2]*8, facts)
    assert asked == [torch.ops.aten.bernoulli_.float]*16

def test_what_draws_nothing_computes_the_same():
    model,x,facts = mlp().eval(),torch.randn(16, 6),DrawFacts()
    run(model, x, [2]*8, facts)
    with Counted() as plain: torch.cat([model(part) for part in x.split([2]*8)])
    with Counted() as seen: _,draws = run(model, x, [2]*8, facts)
    more = seen.counts - plain.counts
    assert draws.is_quiet and {f.overloadpacket for f in more} <= {torch.ops.aten.detach}    # a look at the generators

def activations(f, without):
    "Bytes that autograd saves, but for those of the tensors `without`"
    saved,others = {},{t.untyped_storage().data_ptr() for t in without}
    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): out = f()
    assert out.requires_grad
    return sum(s.nbytes() for p,s in saved.items() if p not in others)

def test_memory():
    "Of eight parts: bits, a fifteenth of what a part's activations take"
    model,x = Encoder(),torch.randn(32, 16, 64)
    _,draws = run(model, x, [4]*8)
    kept = sum(made.rows.bits.numel() for made in draws.kept)
    assert len(draws.kept) == 8 and kept == sum(made.rows.width for made in draws.kept)*32//8
    assert 15*kept <= activations(lambda: draws.call(1, model, x[4:8]), [x, *model.parameters()])

# -- rows
@pytest.mark.parametrize('width', [*range(1, 18), 64, 100])
def test_bits(width):
    mask = torch.rand(7, width) < .4
    bits = Bits(mask)
    assert bits.bits.numel() == 7*-(-width//8)
    for rows in (slice(None), slice(0, 3), slice(5, 7)): assert torch.equal(bits[rows].bool(), mask[rows])

@pytest.mark.parametrize('dim,each,outer', [(None, 1, 1), (0, 1, 1), (0, 6, 1), (0, 6, 3), (0, 6, 6), (1, 1, 1), (1, 4, 2), (2, 2, 1)])
def test_rows_and_back(dim, each, outer):
    shape = [3, 4, 5]
    if dim is not None: shape[dim] = each*2
    draw,n = Draw(None, tuple(shape), dim, each, outer),7
    t = torch.arange(float(torch.Size(draw.shape_of(n)).numel())).view(draw.shape_of(n))
    rows = draw.by_items(t, n)
    assert rows.shape[0] == (1 if dim is None else n)
    assert torch.equal(draw.as_drawn(rows, n), t)
    if dim is None: return
    of_item = t.unflatten(dim, (outer, n, each//outer)).select(dim+1, 4)
    assert torch.equal(draw.as_drawn(rows[4:5], 1), of_item.flatten(dim, dim+1))

# -- told
class Late(nn.Module):
    "It begins to draw without a switch"
    def __init__(self, f, always=0): super().__init__(); self.a,self.f,self.n,self.always = nn.Linear(6, 6),f,0,always
    def forward(self, x):
        x = self.a(x)
        for _ in range(self.always): x = F.dropout(x, .2)
        return self.f(x) if self.n else x

@pytest.mark.parametrize('always', [0, 2])
@pytest.mark.parametrize('f', [lambda x: F.dropout(x, .3), lambda x: x*torch.rand(len(x), 1), lambda x: x*random.random()],
                         ids=['dropout', 'rand', 'python'])
def test_begins_to_draw(f, always):
    model,x,facts = Late(f, always),torch.randn(8, 6),DrawFacts()
    run(model, x, [4, 4], facts)
    model.n = 1
    with pytest.raises(ValueError, match='has begun to draw|number depends on the items'): run(model, x, [4, 4], facts)

@pytest.mark.parametrize('at', [0, 1])
def test_a_part_that_draws_more(at):
    model,x,facts = Late(lambda x: F.dropout(x, .3), 2),torch.randn(8, 6),DrawFacts()
    run(model, x, [4, 4], facts)
    draws = Draws(model, model, (x,), 8, [4, 4], facts)
    with pytest.raises(ValueError, match='number depends on the items'):
        for i,part in enumerate(x.split(4)):
            model.n = int(i == at)
            draws.call(i, model, part)

def test_recomputing_that_begins_later():
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.m,self.n = mlp(),0
        def forward(self, x): return checkpoint(self.m, x, use_reentrant=False) if self.n else self.m(x)
    model,x,facts = Model(),torch.randn(8, 6),DrawFacts()
    def step():
        draws = Draws(model, model, (x,), 8, [4, 4], facts)
        for i,part in enumerate(x.split(4)):
            loss = draws.call(i, model, part).sum()
            with draws.again(i): loss.backward()
    step()
    assert [*facts.recomputes.values()] == [False]
    model.n = 1
    with pytest.raises(ValueError, match='number depends on the items'): step()

# -- who is asked
def ones(func, args, kwargs): return args[0].fill_(1)
def is_seen(p=.5): return bool((F.dropout(torch.ones(99), p) == 1/(1-p)).all())

def test_only_within():
    assert not is_seen()
    with drawn_by(ones):
        assert is_seen()
        with drawn_by(lambda func, args, kwargs: args[0].zero_()): assert not F.dropout(torch.ones(9), .5).any()
        assert is_seen()
    assert not is_seen()
    with pytest.raises(KeyError), drawn_by(ones): raise KeyError
    assert not is_seen()

def test_other_threads_draw_on_their_own():
    found = []
    with drawn_by(ones):
        t = threading.Thread(target=lambda: found.append(is_seen()))
        t.start()
        t.join()
    assert found == [False]

def test_what_the_maker_calls_is_not_seen():
    asked = []
    def make(func, args, kwargs):
        asked.append(func)
        assert not is_seen()
        return func(*args, **kwargs)
    with drawn_by(make): torch.rand(3)
    assert len(asked) == 1

def test_an_error_leaves_nothing_behind():
    class Fails(nn.Module):
        def __init__(self): super().__init__(); self.m,self.n = mlp(),0
        def forward(self, x):
            if self.n and len(x) == 4: raise KeyError('planted')
            return self.m(x)
    model,x,facts = Fails(),torch.randn(8, 6),DrawFacts()
    run(model, x, [4, 4], facts)
    model.n = 1
    with pytest.raises(KeyError): run(model, x, [4, 4], facts)
    model.n = 0
    assert not is_seen()
    torch.manual_seed(1)
    whole = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(run(model, x, [4, 4], facts)[0], whole)
