"Where fastaccum calls a user's loss a second time, to look at it: only where something accumulates, and what the loss keeps stays as it is"
import collections, warnings
import numpy as np, pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import Callback, CancelBatchException, DataLoader, DataLoaders, Learner, SGD
from fastaccum.all import GradientAccumulation, GradientAccumulationSchedule

def items(n=80, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g),torch.randint(3, (n,), generator=g)

def learner(loss_func, bs, *cbs, n=80):
    torch.manual_seed(0)
    net,data = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),list(zip(*items(n)))
    dls = DataLoaders(DataLoader(data, bs=bs), DataLoader(data[:16], bs=16), device='cpu')
    return Learner(dls, net, loss_func=loss_func, opt_func=SGD, cbs=list(cbs), metrics=[])

def fit(learn, n_epoch=3):
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, .5)
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

# --- where nothing accumulates

class Counts:
    "Its weights depend on how often it was called, which it counts where nothing can be put back"
    def __init__(self, fn): self.fn = fn
    def __call__(self, pred, y):
        with open(self.fn, 'a') as f: f.write('.')
        with open(self.fn) as f: n = len(f.read())
        return F.cross_entropy(pred, y, ignore_index=-1)/(1 + .1*n)

def calls_and_weights(name, *cbs, bs=16, n=88, loss=Counts):
    "How often the loss is called, the weights afterwards, and the Learner"
    learn = learner(loss(name), bs, *cbs, n=n)
    after = fit(learn)
    return len(open(name).read()),after,learn

alone = dict(plain={}, smaller=dict(accum_bs=10), micro=dict(micro_batch_size=16), auto=dict(micro_batch_size='auto'),
             per_loader_batch=dict(accum_bs=None, micro_batch_size=20), always=dict(check_loss='always'), rows=dict(log_accum_batch=False),
             carry=dict(remainder='carry'), drop=dict(remainder='drop'), coupled=dict(micro_batch_size=16, coupled=True))

@pytest.mark.filterwarnings('ignore:accum_bs=10')
@pytest.mark.parametrize('name', alone)
def test_nothing_accumulates(name):
    "The loss is called as often as by fastai, and the weights are the same, bit for bit, with a last short batch too"
    n = 80 if name in ('carry', 'drop') else 88
    plain,whole,_ = calls_and_weights('fastai', n=n)
    calls,ours,learn = calls_and_weights('ours', GradientAccumulation(**{'accum_bs': 16, **alone[name]}), n=n)
    assert calls == plain == 3*(-(-n//16) + 1)
    assert torch.equal(ours, whole)
    assert name == 'coupled' or learn.gradient_accumulation.loss_rule.startswith('not looked at')

def test_last_batch_is_dropped():
    calls,_,_ = calls_and_weights('ours', GradientAccumulation(16, remainder='drop'))
    assert calls == 3*(6 + 1)

class Changes(Callback):
    "Puts another loss in the place of the loss function's, or adds something to it"
    def __init__(self, f): self.f = f
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.f(self.loss_grad, self.pred)

changes = dict(replaced=lambda loss, pred: pred.pow(2).mean(0).sum(), added=lambda loss, pred: loss + .1*pred.pow(2).mean())
@pytest.mark.parametrize('kind', changes)
@pytest.mark.parametrize('loss', [lambda name: nn.CrossEntropyLoss(reduction='sum'), lambda name: nn.CrossEntropyLoss(), Counts])
def test_callbacks_change_the_loss(kind, loss):
    "Nothing is added up, so nothing is warned of"
    for name in ('fastai', 'ours'): open(name, 'w').close()
    plain,whole,_ = calls_and_weights('fastai', Changes(changes[kind]), loss=loss)
    calls,ours,_ = calls_and_weights('ours', Changes(changes[kind]), GradientAccumulation(16), loss=loss)
    assert calls == plain and torch.equal(ours, whole)

def undeclared_sum(pred, y): return F.cross_entropy(pred, y, reduction='sum')/16
def over_valid(pred, y): return F.cross_entropy(pred, y, ignore_index=0)

def test_sum():
    "One that is not declared matters only where its micro-batches are added up"
    whole,ours = (fit(learner(undeclared_sum, 16, *cbs)) for cbs in ((), (GradientAccumulation(16),)))
    assert torch.equal(ours, whole)
    with pytest.warns(UserWarning, match='is a sum, not a mean'): fit(learner(undeclared_sum, 16, GradientAccumulation(32)))

def test_first_step_of_two():
    "The first look comes with it; the steps before need no weight"
    rules = []
    class Rules(Callback):
        def after_step(self): rules.append(self.learn.gradient_accumulation.loss_rule)
    learn = learner(over_valid, 8, GradientAccumulationSchedule(8, 16, start=.5, finish=.5, schedule=lambda pos: 16), Rules())
    fit(learn, 1)
    assert [r[:14] for r in rules] == ['not looked at:']*5 + ['valid targets ']*3
    assert 'measured' in learn.gradient_accumulation.loss_rule

def test_step_is_cancelled():
    "Then the accumulated batch goes on, and the micro-batch that was to be a step of its own is weighted right"
    class Cancel(Callback):
        done = False
        def before_step(self):
            if not self.done: self.done = True; raise CancelBatchException('not yet')
    grads = []
    class Grads(Callback):
        order = 20
        def before_step(self): grads.append(torch.cat([p.grad.flatten().clone() for p in self.learn.model.parameters()]))
    learn = learner(over_valid, 16, GradientAccumulation(16), Cancel(), Grads(), n=32)
    fit(learn, 1)
    fit(learner(over_valid, 32, Grads(), n=32), 1)
    assert len(grads) == 2 and torch.allclose(*grads, rtol=1e-5, atol=1e-7)

@pytest.mark.parametrize('n_chunks,looks', [(1, 0), (4, 1)])
def test_one_chunk(n_chunks, looks):
    from fastaccum.all import ChunkedLoss
    calls,head = [],nn.Linear(6, 3)
    def loss(pred, y):
        with open('calls', 'a') as f: f.write('.')
        return F.cross_entropy(pred, y)
    x,y = items(16)
    ChunkedLoss(loss, head, n_chunks=n_chunks)(x, y).backward()
    assert (len(open('calls').read()) > n_chunks) == bool(looks)
