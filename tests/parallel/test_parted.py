"Ranks whose weights part - by a step that is cancelled on one of them, or by whatever else - say so within an epoch"
import sys
import pytest, torch, torch.distributed as dist
from fastai.basics import Adam, Callback, CancelStepException, DataLoader, DataLoaders, Learner, nn
from fastaccum.all import DataParallel, FullyShard, GradientAccumulation, LocalSGD, launch
from test_joint_validation import quiet, started

pytestmark = pytest.mark.slow       # all start processes of two ranks

class At(Callback):
    "Do something in one batch of the second epoch, on some ranks"
    order,run_valid = 30,False
    def __init__(self, event, iter, do, ranks): self.iter_at,self.do_it,self.ranks = iter,do,ranks; setattr(self, event, self.act)
    def act(self):
        if self.epoch == 1 and self.iter == self.iter_at and dist.get_rank() in self.ranks: self.do_it(self.learn)

def cancel(learn): raise CancelStepException
@torch.no_grad()
def nudge(learn): learn.model[2].weight[0, 3] += 1e-3
@torch.no_grad()
def scale(learn): learn.model[0].bias *= 1.001

# An epoch has eight loader batches of 16 items, two of which make a step
events = dict(cancelled=('before_step', 3, cancel), last=('before_step', 7, cancel), nudged=('after_step', 1, nudge),
              scaled=('after_batch', 4, scale))
found = {'cancelled': "at 'step' (epoch 1, batch 5)", 'last': 'epoch 1, batch 7',
         'nudged': "('2.weight' is", 'scaled': 'epoch 1, batch 7 (they are'}

def fit(event=None, ranks=(1,), dp=DataParallel, half=False, **kwargs):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(138, 5, generator=g)
    items = list(zip(x.bfloat16() if half else x, torch.randint(3, (138,), generator=g)))
    dls = DataLoaders(DataLoader(items[:128], bs=16), DataLoader(items[128:], bs=16), device='cpu')
    torch.manual_seed(1+dist.get_rank())           # the weights are those of rank 0
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    if half: model = model.bfloat16()
    cbs = [At(*events[event], ranks)] if event else []
    learn = Learner(dls, model, lambda p, y: nn.functional.cross_entropy(p.float(), y), opt_func=Adam, lr=1e-2,
                    cbs=[GradientAccumulation(32, **kwargs), dp(), *cbs], path='.')
    try:
        with quiet(learn): learn.fit(3)
    except RuntimeError as e: return str(e)
    return len(learn.recorder.losses)

def runs():
    res = {(event, 'one'): fit(event) for event in events}
    res |= {(event, 'all'): fit(event, (0, 1)) for event in events}
    res |= {('cancelled', dp.__name__): fit('cancelled', dp=dp) for dp in (FullyShard,)}
    return res | {(k, 'none'): fit(**kwargs) for k,kwargs in faultless.items()}

faultless = dict(plain={}, half=dict(half=True), overlap=dict(dp=lambda: DataParallel(overlap=True)),
                 local=dict(dp=LocalSGD), sharded=dict(dp=FullyShard), carry=dict(remainder='carry'))
def both(n): return launch(runs, n)

@pytest.fixture(scope='module')
def results(tmp_path_factory): return started(both, 2, tmp_path_factory.mktemp('ranks'), __file__)()

@pytest.mark.parametrize('event', events)
def test_told(results, event):
    for rank in results:
        said = rank[event, 'one']
        assert isinstance(said, str) and 'parted' in said and found[event] in said, said

def test_told_of_shards(results):
    assert all('have parted' in rank['cancelled', 'FullyShard'] for rank in results)

@pytest.mark.parametrize('event', events)
def test_on_all_ranks(results, event):
    "Nothing parts; a step that is cancelled on all ranks goes on accumulating"
    assert [rank[event, 'all'] for rank in results] == [12, 12]

@pytest.mark.parametrize('kind', faultless)
def test_none(results, kind): assert [rank[kind, 'none'] for rank in results] == [12, 12]

if __name__ == '__main__': torch.save(both(int(sys.argv[2])), sys.argv[3])
