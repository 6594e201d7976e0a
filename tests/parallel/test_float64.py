"A model in float64 over three ranks: the weights are those of one process to 1e-12, whatever the loss averages over"
import sys, warnings
from contextlib import suppress
from tempfile import TemporaryDirectory
import pytest, torch
from fastai.basics import Callback, DataLoader, DataLoaders, Learner, MSELossFlat, SGD, nn, set_seed
from fastaccum.all import DataParallel, FullyShard, GradientAccumulation, TrainingCheckpoint, launch
from test_joint_validation import quiet, started, weights

def own(p, y): return (p-y).pow(2).mean()
def hard(p, y):
    "A mean over the errors that are large: no rule of targets fits it"
    error = (p-y).pow(2)
    return error[error.detach() > .5].mean()
def floor(p, y): return (p-y).pow(2).mul(y > 1).sum()/(y > 1).sum().clamp(min=5)
def balanced(p, y):
    w = 1 + 4*(y == 0)
    return (w*nn.functional.cross_entropy(p, y, reduction='none')).sum()/w.sum()
def by_size(p, y): return own(p, y) if len(p) < 15 else own(p, y).sqrt()
numbers = dict(mse=nn.MSELoss(), l1=nn.L1Loss(), huber=nn.HuberLoss(), bce=nn.BCEWithLogitsLoss(), sum=nn.MSELoss(reduction='sum'), own=own,
               hard=hard, floor=floor)
classes = dict(ce=nn.CrossEntropyLoss(), weighted=nn.CrossEntropyLoss(weight=torch.tensor([.1, 1, 5.3], dtype=torch.float64)),
               ignored=nn.CrossEntropyLoss(ignore_index=1), smooth=nn.CrossEntropyLoss(label_smoothing=.1), balanced=balanced)
losses = numbers | classes
all_losses = losses | dict(flat=MSELossFlat(), by_size=by_size)
kinds = dict(whole=(DataParallel, {}), micro=(DataParallel, dict(micro_batch_size=3)), overlap=(lambda: DataParallel(overlap=True), {}),
             coupled=(DataParallel, dict(micro_batch_size=3, coupled=True)), sharded=(FullyShard, {}))

def trained(loss, ranks=None, **kwargs):
    torch.manual_seed(0)
    x = torch.randn(53, 5, dtype=torch.float64)
    y = torch.randn(53, 1, dtype=torch.float64) if loss not in classes else torch.randint(3, (53,))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3 if loss in classes else 1)).double()
    dls = DataLoaders(*[DataLoader(list(zip(x, y)), bs=19) for _ in range(2)], device='cpu')
    cbs = [GradientAccumulation(25, **kwargs), *([ranks()] if ranks else [])]
    learn = Learner(dls, model, all_losses[loss], opt_func=SGD, lr=.001 if loss == 'sum' else .1, cbs=cbs, path='.')
    with quiet(learn): learn.fit(2)
    return torch.cat([p.full_tensor().detach().flatten() for p in learn.model.parameters()]) if ranks is FullyShard else weights(learn)

measured = 'hard','floor','balanced'                      # beside items of one of the ranks
few = 'mse','weighted','own',*measured
cases = [(kind, loss) for kind in kinds for loss in losses
         if kind == 'micro' or loss in few and (kind != 'coupled' or loss not in measured)]

def noticed():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        trained('by_size', DataParallel, micro_batch_size=3)
    return [str(w.message) for w in seen]

class HardOnes:
    "Of items with losses above `cut`, but of 3 at least: with a high one nothing counts beside the reference items of some ranks"
    def __call__(self, p, y):
        losses = nn.functional.cross_entropy(p, y, reduction='none')
        return losses[losses.detach() > self.cut].sum()/(losses > self.cut).sum().clamp(min=3)

class Cuts(Callback):
    def before_epoch(self): self.learn.loss_func.cut = [1.2, .8, 1.6][self.epoch]

def cut(*ranks):
    set_seed(1)
    y,x = torch.randint(4, (48,)),torch.randn(48, 6).double()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    dls = DataLoaders(*[DataLoader(list(zip(x, y)), bs=24) for _ in range(2)], device='cpu')
    learn = Learner(dls, model, HardOnes(), opt_func=SGD, lr=.1, cbs=[GradientAccumulation(24), Cuts(), *ranks], path='.')
    with quiet(learn): learn.fit(3)
    return weights(learn)

class Stop(Callback):
    order = 80
    def after_batch(self):
        if self.training and (self.epoch, self.iter) == (1, 5): raise KeyboardInterrupt

def saved(folder, *cbs):
    "Weights of a fit with checkpoints after each step"
    set_seed(0)
    x,y = torch.randn(48, 5, dtype=torch.float64),torch.randn(48, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    dls = DataLoaders(*[DataLoader(list(zip(x, y)), bs=4, shuffle=True) for _ in range(2)], device='cpu')
    cbs = [GradientAccumulation(8), DataParallel(), TrainingCheckpoint(every_steps=1), *cbs]
    learn = Learner(dls, model, hard, opt_func=SGD, lr=.1, cbs=cbs, path=folder)
    with quiet(learn), suppress(KeyboardInterrupt): learn.fit(3)
    return weights(learn)

def resumed():
    "Of a fit in one go, of one that was stopped, and of its rest"
    with TemporaryDirectory() as folder:
        whole = saved(f'{folder}/whole')
        return whole,saved(f'{folder}/cut', Stop()),saved(f'{folder}/cut')

def runs():
    res = {(kind, loss): trained(loss, kinds[kind][0], **kinds[kind][1]) for kind,loss in cases}
    return res | dict(noticed=noticed(), resumed=resumed(), cut=cut(DataParallel()))
def in_one(): return {loss: trained(loss) for loss in losses} | dict(cut=cut())
def both(n): return launch(runs, n) if n > 1 else in_one()

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    waits = [started(both, n, tmp_path_factory.mktemp(f'ranks{n}'), __file__) for n in (1, 3)]
    return [wait() for wait in waits]

@pytest.mark.slow       # starts three ranks
@pytest.mark.parametrize('kind, loss', cases)
def test_one_process(results, kind, loss):
    one,ranks = results
    for rank in ranks: assert float((rank[kind, loss]-one[loss]).norm()/one[loss].norm()) < 1e-12

@pytest.mark.slow
def test_branch_on_the_size(results):
    "No rank has as many items as a step: they are copied"
    assert any('by_size is' in m for rank in results[1] for m in rank['noticed'])

@pytest.mark.slow
def test_loss_that_changes(results):
    for rank in results[1]: torch.testing.assert_close(rank['cut'], results[0]['cut'], rtol=1e-9, atol=1e-12)

@pytest.mark.slow
def test_resumed(results):
    "The ranks go on beside the same items, to the last bit"
    for rank in results[1]:
        whole,cut,rest = rank['resumed']
        assert torch.equal(rest, whole) and not torch.equal(cut, whole)

def test_flattened_losses():
    "fastai's flattened losses make float32 of float64: each batch is rounded by the loss itself, as much in one piece as in several"
    float64,whole,split = trained('mse'),trained('flat'),trained('flat', micro_batch_size=3)
    assert MSELossFlat()(*torch.randn(2, 4, 1, dtype=torch.float64)).dtype == torch.float32
    off = [float((w-float64).norm()/float64.norm()) for w in (whole, split)]
    assert 1e-11 < min(off) and max(off) < 1e-7 and max(off) < 5*min(off)

if __name__ == '__main__': torch.save(both(int(sys.argv[2])), sys.argv[3])
