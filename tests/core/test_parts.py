"What splits a batch and keeps its state, without a Learner"
from dataclasses import dataclass
import random
from collections import namedtuple
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch
import numpy as np, pytest, torch
from torch import nn, tensor
from torch.utils._pytree import tree_leaves
from fastcore.foundation import L
from fastaccum.core.losses import count_items
from fastaccum.core.microbatch import Joined, Lists, join_items, map_tensors, part_sizes, rows_of, split_batch, split_items, tensors_in
from fastaccum.core.random import RandomState, Snapshot

def test_part_sizes():
    "As few as can be, as even as can be, the larger ones first; tensors and lists are cut alike"
    for n,size in product(range(1, 20), range(1, 20)):
        sizes = part_sizes(n, size)
        assert sum(sizes)==n and len(sizes)==-(-n//size) and sizes==sorted(sizes, reverse=True) and max(sizes)-min(sizes) <= 1
        parts = split_items((torch.arange(n), list(map(str, range(n)))), size)
        assert [t.tolist() for t,_ in parts]==[[int(o) for o in l] for _,l in parts] and [len(t) for t,_ in parts]==sizes

def test_join():
    "Losses without dimensions are stacked; what is no tensor is the first part's"
    parts = [{'a': tensor([i, i]), 'b': (tensor(float(i)), 'name', i)} for i in range(3)]
    joined = join_items(parts, [2, 2, 2])
    assert joined['a'].tolist()==[0, 0, 1, 1, 2, 2] and joined['b'][0].tolist()==[0, 1, 2] and joined['b'][1:]==('name', 0)
    assert join_items([tensor([1, 2])], [2]).tolist()==[1, 2] and join_items([tensor(1)], [1]).tolist()==[1]
    pair = namedtuple('Pair', 'a b')
    assert map_tensors(torch.neg, pair(tensor(1), [tensor(2)]))==pair(tensor(-1), [tensor(-2)])
    assert map_tensors(torch.add, [tensor(1), 'x'], [tensor(2), 'y'])==[tensor(3), 'x']

def mixed(lam): return [(torch.arange(5)*10,),lam]

def test_split_batch():
    "Inputs, targets and MixUp's other targets are those of the part; `lam` too, if there is one an item"
    beside = [*mixed(torch.arange(5)/10), *mixed(tensor([.3])), *mixed(tensor(.5)), *mixed(.7)]
    parts = split_batch((torch.arange(5), torch.arange(5)+1), (torch.arange(5)+2,), 5, 2, beside)
    seen = [[t.tolist() if isinstance(t, torch.Tensor) else t for t in tree_leaves(p)] for p in parts]
    half = pytest.approx(.5)
    def row(*items):
        more = [*items],[o+1 for o in items],[o+2 for o in items],[10*o for o in items]
        return [*more, pytest.approx([o/10 for o in items]), more[3], pytest.approx([.3]), more[3], half, more[3], .7]
    assert seen==[row(0, 1), row(2, 3), row(4)]

def test_as_many_inputs_as_items():
    x = torch.arange(2)
    assert [[t.tolist() for t in xb] for xb,_,_ in split_batch((x, x+1), (x,), 2, 1)]==[[[0], [1]], [[1], [2]]]

def test_without_targets():
    "Nor items in one of the inputs"
    assert [(len(xb[0]), xb[1], yb, mixed)
            for xb,yb,mixed in split_batch((torch.arange(5), 'name'), (), 5, 2)]==[
                (n, 'name', (), ()) for n in (2, 2, 1)]

def test_lists_of_items():
    "One object an item; tensors that are no items: of other lengths, or without dimensions. Lists of fastcore too"
    rows = [torch.ones(n) for n in (3, 1, 2)]
    assert [[len(t) for t in p] for p in split_items(rows, 2, 3)]==[[3, 1], [2]]
    assert split_items(letters := L(*'abc'), 2, 3)==[letters[:2], letters[2:]]
    assert [p.map(len) for p in split_items(L(torch.ones(3), torch.ones(3)), 2, 3)]==[[2, 2], [1, 1]]
    assert [type(t) for t in map_tensors(torch.neg, L(tensor(1), 'a'))]==[torch.Tensor, str]
    with pytest.raises(TypeError, match=r'^Cannot split a set'): split_items({1, 2}, 1, 2)

def test_views():
    "Several views of all items, one after the other: only where they are asked for"
    x = torch.arange(6)
    assert [tensors_in(p)[0].tolist() + tensors_in(p)[1].tolist()
            for p in split_items((x, {'a': [x]}), 2, 3, views=True)]==[[0, 1, 3, 4]*2, [2, 5]*2]
    assert [len(p[0][0]) for p in split_batch((x,), (x[:3],), 3, 2, views=True)]==[4, 2]
    with pytest.raises(TypeError, match=r'shape \(6,\).*the batch has 3 items'): split_items(x, 2, 3)
    with pytest.raises(TypeError, match=r'shape \(6,\).*the batch has 4 items'): split_items(x, 2, 4, views=True)

# --- what the lists of a fit hold

def tensors(n, *rows): return [torch.ones(rows[i%len(rows)], 2) for i in range(n)]
def looks(lists, xb, yb=(), bs=None):
    n = lists.look(xb, yb, bs)
    return n,[lists.holds_objects(b) for b in (*xb, *yb) if lists.knows(b)]

boxes = [{'boxes': torch.ones(3, 4)} for _ in range(3)]
@pytest.mark.parametrize('xb,yb,bs,n,objects', [
    ((torch.ones(3, 2),), (torch.ones(3),), None, None, []), ((tensors(3, 5),), (), None, 3, [True]), ((tensors(3, 5),), (), 5, 5, [False]),
    ((tensors(3, 5),), (torch.ones(5),), 3, 5, [False]), ((tensors(3, 5),), (torch.ones(3),), 5, 3, [True]),
    # the rows of an input count more than those of a target
    ((tensors(3, 5), torch.ones(5)), (torch.ones(3),), None, 5, [False]),
    ((tensors(3, 5), torch.ones(7)), (), None, None, []), ((tensors(3, 5), torch.ones(7)), (torch.ones(3),), 3, None, []),
    ((tensors(3, 5), tensors(5, 3)), (), 5, 5, [False, True]), ((tensors(3, 5), tensors(4, 6)), (), None, None, []),
    ((tensors(3, 4, 5),), (), 4, 3, [True]), (([1, 'a'],), (), None, None, []), (([1, 2],), (), None, 2, [True]),
    (([1, torch.ones(4)],), (), None, 4, [False]),
    ((tensors(3, 3),), (), None, 3, [True]), ((tuple(tensors(3, 3)),), (), None, 3, [False]),
    (((torch.ones(3, 1), *tensors(2, 3)),), (), None, 3, [True]),
    (((*tensors(2, 3), 'a'),), (), None, 3, [False]), ((tuple(tensors(3, 3)),), (boxes,), None, 3, [True, True]),
    ((tuple(tensors(3, 3)),), (['a']*3,), None, 3, [True, True]),
    (([],), (torch.ones(3),), None, None, []), (({'a': tensors(2, 4)},), (), None, 2, []),
    ((namedtuple('Pair', 'a b')(*tensors(2, 4)),), (), None, None, [])])
def test_lists(xb, yb, bs, n, objects): assert looks(Lists(), xb, yb, bs)==(n, objects)

def test_lists_stay():
    "What is clear in one batch holds for the others, too"
    lists = Lists()
    assert looks(lists, (tensors(3, 3),))==(3, [True])
    assert looks(lists, (tensors(3, 5),), (), 5)==(5, [False]) and looks(lists, (tensors(3, 3),))==(3, [False])
    assert looks(lists, (tensors(3, 4),))==(4, [False]) and lists.look((torch.ones(2),), ()) is None
    lists = Lists()
    looks(lists, (tensors(3, 5),)), looks(lists, (tensors(3, 5),), (), 5)                        # the first was not sure
    last = tensors(3, 7)
    assert looks(lists, (last,))==(7, [False]) and lists.knows(last) and not lists.knows(tensors(3, 7))

clear = ". Return columns in a dict or as inputs of their own; " \
        "if the list has one object for each item, load other than {n} at a time."
@pytest.mark.parametrize('make,n,form', [(list, 3, 'one object for each item'), (tuple, 4, 'columns with all items each')])
def test_lists_not_clear(make, n, form):
    lists,b = Lists(),make(tensors(n, n))
    start = f'A batch of {n} items has a list of {n} tensors with {n} rows each, which was taken for {form}, and '
    lists.look((b,), ()); assert lists.message is None                                          # nothing is split yet
    assert lists.holds_objects(b) is (make is list) and lists.message==start + 'no batch shows if this is right' + clear.format(n=n)
    lists.look((tensors(n, n+1),), (torch.ones(n if make is list else n+1),)); assert lists.message is None       # it was right
    lists = Lists()
    lists.look((b,), ()), lists.holds_objects(b), lists.look((tensors(n, n+1),), (torch.ones(n+1 if make is list else n),))
    assert lists.message==start + 'later batches show that this was wrong' + clear.format(n=n)
    lists = Lists()
    lists.look((b,), ()), lists.look((tensors(n, n+1),), (torch.ones(n+1 if make is list else n),))
    assert lists.message is None                                                                # wrong, but it was not split by that

def test_split_by_lists():
    lists,x = Lists(),tensors(3, 3)
    lists.look((x,), (torch.ones(3),)); assert [len(p) for p in split_items(x, 2, 3, lists=lists)]==[2, 1]
    lists.known[0,0] = 'columns'
    lists.look((x,), ()); assert [len(p) for p in split_items(x, 2, 3, lists=lists)]==[3, 3]
    (xb,yb,_),_ = split_batch((x,), (x,), 3, 2, lists=lists)
    assert len(xb[0])==len(yb[0])==3
    assert len(split_items(tuple(tensors(2, 3)), 2, 3, lists=lists)[0])==2                       # of another batch

# --- outputs of the parts, joined

def test_rows_of():
    assert rows_of(torch.arange(12), 1, 6, 1, 2).flatten().tolist()==[2, 3, 4, 5] and rows_of(torch.arange(12), 1, 6, 1, 2).shape==(1, 2, 2)
    assert rows_of(torch.arange(12), 2, 3, 1, 2).tolist()==[[[2, 3], [4, 5]], [[8, 9], [10, 11]]]

def test_joined():
    joined,x = Joined([2, 1]),torch.ones(2, 3, requires_grad=True)
    assert (joined.differs is None and joined.add(0, [x*2, (tensor(1.), torch.ones(4)), 'a']) is None
            and joined.has_grad==[True, False, False])
    assert not joined.template[0].requires_grad
    out,(one,rows),name = joined.add(1, [x[:1]*3, (tensor(1.)+1e-6, torch.zeros(2)), 'a'])
    assert out.tolist()==[[2]*3]*2 + [[3]*3] and rows.tolist()==[1]*4 + [0]*2 and (one, name, joined.template)==(1, 'a', None)
    assert not out.requires_grad and joined.differs.item() is False
    for values,differs in (((1., 1., 1.0001), True), ((1., 1.0001, 1.), True), ((float('nan'),)*3, False), ((1., 1., 1.000005), False)):
        joined = Joined([1]*3)
        for i,v in enumerate(values): joined.add(i, tensor(v))
        assert joined.differs.item() is differs
    with pytest.raises(ValueError): joined.add(1, (tensor(1.), tensor(1.)))

def test_cannot_be_joined():
    joined = Joined([2, 1])
    joined.add(0, (torch.ones(2), 'a'))
    with pytest.raises(ValueError, match="^coupled: the model returns 'b' beside its tensors"): joined.add(1, (torch.ones(1), 'b'))
    with pytest.raises(ValueError, match=r'^coupled: .* shape \(3, 2\) for a micro-batch of 2 items'):
        Joined([2, 1]).add(0, torch.ones(3, 2))
    for part,shape in ((torch.ones(1, 3), r'\(1, 3\)'), (torch.ones(3, 2), r'\(3, 2\)')):
        joined = Joined([2, 1])
        joined.add(0, torch.ones(4, 2))
        with pytest.raises(ValueError,
                           match=rf'^coupled: .* micro-batches of 2 and 1 items have the shapes \(4, 2\) and {shape}'):
            joined.add(1, part)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = (nn.Parameter(torch.ones(2)) for _ in 'abc')
        self.register_buffer('n', torch.zeros(()))
        self.register_buffer('none', None)

def draws(): return random.random(), np.random.rand(), torch.rand(()).item()

@pytest.mark.parametrize('gradients', (True, False))
def test_snapshot(gradients):
    "Buffers in place, also one that forward has replaced; gradients; the three generators of random numbers"
    m = Net()
    m.a.grad,m.b.grad = torch.full((2,), 3.),torch.zeros(2)
    n,grad = m.n,m.a.grad
    snap = Snapshot(m, iter(m.parameters()), gradients)
    first = draws()
    for _ in range(2):
        m.n.add_(1)
        m.n = m.n+1
        for p in m.parameters(): p.grad = torch.full((2,), 7.) if p.grad is None else p.grad.fill_(7)
        snap.restore()
        assert m.n is n and m.n==0 and m.none is None
        assert m.a.grad is grad and m.a.grad.tolist()==[3*gradients]*2 and m.b.grad.tolist()==[0, 0] and m.c.grad is None
        assert draws()==first
    assert Snapshot(nn.Module(), []).rng.device==torch.device('cpu')

def test_snapshot_of_another_device():
    "Its random numbers too: of the parameters' device, by PyTorch's module for it"
    m = nn.Linear(2, 1, device='meta')
    with patch('torch.get_device_module') as module:
        state = module.return_value.get_rng_state
        Snapshot(m, m.parameters()).restore()
        there = torch.device('meta')
        module.assert_called_with(there), state.assert_called_once_with(there)
        module.return_value.set_rng_state.assert_called_once_with(state.return_value, there)
        Snapshot(nn.ReLU(), []), state.assert_called_once()  # without parameters: the CPU's alone
        with patch.object(RandomState, '__init__', lambda self, kind: setattr(self, 'device', SimpleNamespace(type=kind))):
            assert [len(RandomState(kind)._place()) for kind in ('mps', 'cuda')]==[0, 1]

@dataclass
class Output:
    logits: torch.Tensor
    name: str = 'whole'

def test_dataclasses_are_mapped():
    "Into one of their own: the first stays as it was"
    a = Output(torch.ones(2))
    both = map_tensors(lambda *ts: torch.cat(ts), a, Output(torch.zeros(1), 'other'))
    assert (both.logits.tolist(), both.name, len(a.logits))==([1, 1, 0], 'whole', 2)

@dataclass
class Sparse:
    "Its field has the name of a method of dicts"
    values: torch.Tensor

def test_a_field_may_have_any_name(): assert count_items((Sparse(torch.ones(3, 2)),)) == (3, True)

def test_no_list_is_known_at_first(): assert not Lists().knows([torch.ones(2)])
