"A loop of one's own: `GradientAccumulator` measures what micro-batches of its loss count, as `GradientAccumulation` does"
import warnings
import pytest, torch, torch.nn.functional as F
from reference import grads, rel_err
from test_measured import batch_of, coded, codes, cut, dtype, exact, found, limit
from fastaccum.core.accumulator import GradientAccumulator
from fastaccum.core.warnings import FastaccumWarning

class Loop:
    "A linear model whose outputs are those of the test, and a loop that accumulates"
    def __init__(self, loss_func, whole):
        torch.manual_seed(0)
        self.f,self.whole,self.n = loss_func,whole,len(whole[0])
        self.model = torch.nn.Linear(whole[0].shape[1], whole[0].shape[1])
        self.acc = GradientAccumulator(self.model.parameters(), self.n, loss_func=loss_func)

    def add(self, part):
        x,*yb = part
        pred = self.model(x)
        self.acc.add(self.f(pred, *yb), len(x), pred=pred, yb=tuple(yb)).backward()

    def step(self, sizes):
        "(how far the gradient is off from that of one loss of all outputs, the loss, that one loss)"
        self.model.zero_grad()
        for part in cut(self.whole, sizes): self.add(part)
        assert self.acc.ready
        return self.compare(self.acc.finish())

    def compare(self, loss):
        ours = grads(self.model).clone()
        self.model.zero_grad()
        one = self.f(self.model(self.whole[0]), *self.whole[1:])
        one.backward()
        return rel_err(ours, grads(self.model)),loss.item(),one.item()

@pytest.fixture
def told():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always', FastaccumWarning)
        yield [] if told is None else told

@pytest.mark.parametrize('name', [n for n in exact if n != 'columns'])
def test_exact(name, dtype, told):
    "Also in the first step, with a first micro-batch in which nothing counts"
    f,make = exact[name]
    torch.manual_seed(0)
    loop = Loop(f, batch_of(make))
    for sizes in ((7,), (1, 9)):
        off,ours,one = loop.step(sizes)
        assert off < limit[dtype] and ours == pytest.approx(one, rel=limit[dtype])
    assert [str(w.message) for w in told] == []

def test_exact_once_there_is_a_reference(told):
    "Items that count only beside others get the gradients that they have there, and a loss beside `loss_func` stays"
    torch.manual_seed(0)
    term = torch.nn.Parameter(torch.ones(()))
    loop = Loop(coded, batch_of(codes))
    loop.step((7,))
    assert len(told) == 1 and 'are left out' in str(told[0].message)
    assert loop.step((7,))[0] < 1e-5
    x,y = loop.whole[0][:7],loop.whole[1][:7]
    loop.acc.params = [*loop.acc.params, term]
    for part in cut(loop.whole, (7,)):
        pred = loop.model(part[0])
        loop.acc.add(loop.f(pred, part[1]) + 2*term, len(pred), pred=pred, yb=part[1]).backward()
    loop.acc.finish()
    assert term.grad.item() == pytest.approx(2, rel=1e-5)

def test_known_losses_are_not_called():
    "PyTorch's: also class weights, and a sum, which adds up"
    calls = []
    for loss in (F.mse_loss, torch.nn.CrossEntropyLoss(weight=torch.tensor([1., 2, 5])), torch.nn.CrossEntropyLoss(reduction='sum')):
        if isinstance(loss, torch.nn.Module): loss.register_forward_hook(lambda *_: calls.append(1))
        kind = 'squares' if loss is F.mse_loss else 'class_weights'
        loop = Loop(loss, batch_of(exact[kind][1]))
        off,ours,one = loop.step((7,))
        assert off < 1e-5 and ours == pytest.approx(one, rel=1e-5)
    assert len(calls) == 2*8            # 7 micro-batches and the whole

@pytest.mark.parametrize('name', ['dice','rmse','hardest_half','noisy','capped'])
def test_no_mean_is_told_once(name, told):
    f,make = found[name]
    torch.manual_seed(0)
    loop = Loop(f, batch_of(make))
    for _ in range(3): loop.step((7,))
    message, = {str(w.message) for w in told}
    assert len(told) == 1 and name in message and 'to `add`' in message and 'micro_batch_size' not in message

def test_goes_on_from_a_state(dtype):
    f,make = exact['floor_5']
    torch.manual_seed(0)
    loop = Loop(f, batch_of(make))
    loop.step((7,))
    state = loop.acc.state_dict()
    other = Loop(f, loop.whole)
    other.acc.load_state_dict(state)
    assert other.acc.state_dict()['measured']['references'] is state['measured']['references']              # no reference yet
    for part in cut(loop.whole, (7,)): other.add(part)
    torch.testing.assert_close(other.acc._weights[1], loop.acc.closed.weights[1], rtol=0, atol=0)       # in the same unit
    assert other.compare(other.acc.finish())[0] < limit[dtype]

def test_steps_that_are_thrown_away(dtype, told):
    "Back to an earlier record, or to nothing: what was measured since does not count"
    f,make = exact['positives']
    torch.manual_seed(0)
    loop = Loop(f, batch_of(make))
    parts = cut(loop.whole, (9,))
    for part in parts[:2]: loop.add(part)
    record,before = loop.acc.so_far,[p.grad.clone() for p in loop.model.parameters()]
    loop.add(parts[3])
    loop.acc.rollback(record)
    for p,g in zip(loop.model.parameters(), before): p.grad = g
    for part in parts[2:]: loop.add(part)
    assert loop.compare(loop.acc.finish())[0] < limit[dtype]
    loop.add(parts[0])
    loop.acc.reset()
    assert loop.step((7,))[0] < limit[dtype] and not told

def test_errors():
    acc = GradientAccumulator([], 8, loss_func=exact['positives'][0])
    with pytest.raises(ValueError, match='call add.loss, n_items, pred=pred, yb=y.'): acc.add(torch.ones(()), 4)
    with pytest.raises(ValueError, match='weight='): GradientAccumulator([], 8, reduce=print, loss_func=exact['positives'][0])
    acc.add(torch.ones((), requires_grad=True), 4, weight=3)             # told what it averaged over, it does not look
    assert acc.mean()[1] == 3
