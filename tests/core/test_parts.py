"What splits a batch and keeps its state, without a Learner"
import random
from collections import namedtuple
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch
import numpy as np, pytest, torch
from torch import nn, tensor
from torch.utils._pytree import tree_leaves
from fastcore.foundation import L
from fastaccum.core.microbatch import join_items, map_tensors, part_sizes, split_batch, split_items
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
    joined = join_items(parts)
    assert joined['a'].tolist()==[0, 0, 1, 1, 2, 2] and joined['b'][0].tolist()==[0, 1, 2] and joined['b'][1:]==('name', 0)
    assert join_items([tensor([1, 2])]).tolist()==[1, 2] and join_items([tensor(1)]).tolist()==[1]
    pair = namedtuple('Pair', 'a b')
    assert map_tensors(torch.neg, pair(tensor(1), [tensor(2)]))==pair(tensor(-1), [tensor(-2)])
    assert map_tensors(torch.add, [tensor(1), 'x'], [tensor(2), 'y'])==[tensor(3), 'x']

def mixer(lam): return SimpleNamespace(yb1=(torch.arange(5)*10,), lam=lam)

def test_split_batch():
    "Inputs, targets and MixUp's other targets are those of the part; `lam` too, if there is one an item"
    mixers = [mixer(torch.arange(5)/10), mixer(tensor([.3])), mixer(tensor(.5))]
    parts = split_batch((torch.arange(5), torch.arange(5)+1), (torch.arange(5)+2,), 5, 2, mixers)
    seen = [[t.tolist() for t in tree_leaves(p)] for p in parts]
    half = pytest.approx(.5)
    def row(*items):
        more = [*items],[o+1 for o in items],[o+2 for o in items],[10*o for o in items]
        return [*more, pytest.approx([o/10 for o in items]), more[3], pytest.approx([.3]), more[3], half]
    assert seen==[row(0, 1), row(2, 3), row(4)]

def test_as_many_inputs_as_items():
    x = torch.arange(2)
    assert [[t.tolist() for t in xb] for xb,_,_ in split_batch((x, x+1), (x,), 2, 1)]==[[[0], [1]], [[1], [2]]]

def test_without_targets():
    "Nor items in one of the inputs"
    assert [(len(xb[0]), xb[1], yb, mixed) for xb,yb,mixed in split_batch((torch.arange(5), 'name'), (), 5, 2)]==[(n, 'name', (), ()) for n in (2, 2, 1)]

def test_lists_of_items():
    "One object an item; tensors that are no items: of other lengths, or without dimensions. Lists of fastcore too"
    rows = [torch.ones(n) for n in (3, 1, 2)]
    assert [[len(t) for t in p] for p in split_items(rows, 2, 3)]==[[3, 1], [2]]
    assert split_items(letters := L(*'abc'), 2, 3)==[letters[:2], letters[2:]]
    assert [p.map(len) for p in split_items(L(torch.ones(3), torch.ones(3)), 2, 3)]==[[2, 2], [1, 1]]
    assert [type(t) for t in map_tensors(torch.neg, L(tensor(1), 'a'))]==[torch.Tensor, str]
    with pytest.raises(TypeError, match=r'^Cannot split a set'): split_items({1, 2}, 1, 2)

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
