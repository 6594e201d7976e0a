"""Losses that divide by the number of positives, but by 1 at least, over two ranks: no step divides by too little, or by too much"""
import sys, warnings
import pytest, torch
from fastai.basics import Callback, DataLoader, DataLoaders, F, Learner, SGD, nn, noop, num_distrib
from fastaccum.all import DataParallel, FastaccumWarning, GradientAccumulation, LocalSGD, launch
from test_joint_validation import quiet, started, weights

pytestmark = pytest.mark.slow       # all start processes of two ranks
def floored(pred, y): return F.binary_cross_entropy_with_logits(pred, y, reduction='sum')/y.sum().clamp(min=1)
def positives_of(learn): return learn.y.sum(),1

def data(n, share=.02):
    "Few positives: in float64, as sums of many differ in their rounding"
    g = torch.Generator().manual_seed(2)
    return torch.randn(n, 5, generator=g).double(),(torch.rand(n, 1, generator=g) < share).double()

def learner(x, y, *cbs, bs=16, loss_func=floored):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    dls = DataLoaders(*[DataLoader(list(zip(x, y)), bs=bs) for _ in range(2)], device='cpu')
    return Learner(dls, model, loss_func, opt_func=SGD, lr=.1, cbs=cbs, path='.')

# --- a loss that two ranks share
# Loader batches of 16 items, then one of a single item, which only one rank has: 'carry' puts it before the others into a step
shares = 0.,.02,.3              # of positives
kinds = dict(each=dict(accum_bs=16), several=dict(accum_bs=40), carried=dict(accum_bs=40, remainder='carry'))
def shared(kind, share):
    acc = GradientAccumulation(**kinds[kind], micro_batch_size=3, coupled=True, weight=positives_of)
    learn = learner(*data(65, share), acc, DataParallel())
    with quiet(learn): learn.fit(3)
    return weights(learn),torch.stack(learn.recorder.losses)

@pytest.mark.parametrize('share', shares)
@pytest.mark.parametrize('kind', kinds)
def test_shared_loss(results, kind, share):
    "Loss and weights of one process"
    one,(a,b) = results[1][kind, share],[rank[kind, share] for rank in results[2]]
    for ours,theirs,other in zip(a, one, b):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert torch.equal(ours, other)

# --- each rank steps alone
class Gradients(Callback):
    "The gradient of each step beside that of the rank's own items in one piece"
    def before_fit(self): self.off = []
    def before_step(self):
        learn = self.learn
        theirs = torch.autograd.grad(floored(learn.model(learn.x), learn.y), [*learn.model.parameters()])
        ours = [p.grad for p in learn.model.parameters()]
        flat = [torch.cat([t.flatten() for t in ts]) for ts in (ours, theirs)]
        self.off.append(float((flat[0]-flat[1]).norm()/flat[1].norm()))

def alone(share, **kwargs):
    learn = learner(*data(64, share), GradientAccumulation(16, micro_batch_size=2, **kwargs), LocalSGD(100), Gradients())
    with quiet(learn): learn.fit(2)
    return learn.gradients.off

@pytest.mark.parametrize('share', shares)
@pytest.mark.parametrize('name', ['given','measured'])
def test_local_steps(results, name, share):
    for rank in results[2]:
        off = rank[name, share]
        assert len(off) == 8 and max(off) < 1e-9

# --- the first items have no positives, of which a rank may have no others
def of_positives(pred, y): return F.binary_cross_entropy_with_logits(pred, y, reduction='sum')/y.sum()
def of_three(pred, y): return F.binary_cross_entropy_with_logits(pred, y, reduction='sum')/y.sum().clamp(min=3)
def only_positives(pred, y): return (F.binary_cross_entropy_with_logits(pred, y, reduction='none')*y).sum()/y.sum()
late_losses = dict(of_positives=of_positives, of_three=of_three, only_positives=only_positives)
splits = (24, 3), (24, None), (6, None), (4, 1)       # items of a loader batch, and of a micro-batch; a step is 24

def late(loss, bs, k):
    "Weights, and what was told. In one process: in one piece"
    x,y = data(48, .4)
    y[:12] = 0
    cbs,bs = ((GradientAccumulation(24, micro_batch_size=k), DataParallel()), bs) if num_distrib() else ((GradientAccumulation(24),), 24)
    learn = learner(x, y, *cbs, bs=bs, loss_func=late_losses[loss])
    learn._do_epoch_validate = noop
    with quiet(learn), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always', FastaccumWarning)
        learn.fit(2)
    return weights(learn),[str(w.message) for w in told if issubclass(w.category, FastaccumWarning)]

@pytest.mark.parametrize('bs,k', splits)
@pytest.mark.parametrize('loss', late_losses)
def test_late_positives(results, loss, bs, k):
    "The step is exact, and nobody is told otherwise"
    for rank in results[2]:
        ours,told = rank['late', loss, bs, k]
        torch.testing.assert_close(ours, results[1]['late', loss, bs, k][0], rtol=1e-9, atol=1e-12)
        assert told == []

# --- the runs
def runs():
    res = {(kind, share): shared(kind, share) for kind in kinds for share in shares}
    res |= {('late', loss, *split): late(loss, *split) for loss in late_losses for split in splits}
    res |= {('given', share): alone(share, weight=positives_of) for share in shares}
    return res | {('measured', share): alone(share) for share in shares}

def both(n): return {n: launch(runs, n) if n > 1 else runs()}

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    waits = [started(both, n, tmp_path_factory.mktemp(f'ranks{n}'), __file__) for n in (1, 2)]
    return {n: res for wait in waits for n,res in wait().items()}

if __name__ == '__main__': torch.save(both(int(sys.argv[2])), sys.argv[3])
