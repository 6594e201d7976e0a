"Ranks whose weights part - by a step that is cancelled on one of them, or by whatever else - say so within an epoch"
import sys
from functools import partial
import pytest, torch, torch.distributed as dist
from fastai.basics import Adam, Callback, CancelStepException, CancelTrainException, DataLoader, DataLoaders, Learner, nn
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
def faster(learn): learn.opt.set_hyper('lr', .02)
def unfreeze(learn): learn.model[0].requires_grad_(True)
def skip(learn): raise CancelTrainException

# An epoch has eight loader batches of 16 items, two of which make a step
events = dict(cancelled=('before_step', 3, cancel), last=('before_step', 7, cancel), nudged=('after_step', 1, nudge),
              scaled=('after_batch', 4, scale))
more = dict(faster=('before_step', 3, faster), unfrozen=('after_batch', 1, unfreeze), skipped=('before_batch', 0, skip))
found = {'cancelled': "at 'step' (epoch 1, batch 5)", 'last': 'epoch 1, batch 7',
         'nudged': "('2.weight' is", 'scaled': 'epoch 1, batch 7 (they are'}
shards,warm,local = FullyShard,partial(LocalSGD, 2, warmup_steps=100),partial(LocalSGD, 2)
# Where each rank has other weights: by event, how, and what is said
others = dict(cancelled=(shards, 'have parted'), faster=(shards, "('lr' is 0.01 and 0.02)"), nudged=(warm, "('2.weight' is"),
              scaled=(local, '(they are'), unfrozen=(local, "('number of trained parameters' is 2 and 4)"))

def fit(event=None, ranks=(1,), dp=DataParallel, half=False, frozen=False, **kwargs):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(138, 5, generator=g)
    items = list(zip(x.bfloat16() if half else x, torch.randint(3, (138,), generator=g)))
    dls = DataLoaders(DataLoader(items[:128], bs=16), DataLoader(items[128:], bs=16), device='cpu')
    torch.manual_seed(1+dist.get_rank())           # the weights are those of rank 0
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    if half: model = model.bfloat16()
    model[0].requires_grad_(not frozen)
    cbs = [At(*(events | more)[event], ranks)] if event else []
    learn = Learner(dls, model, lambda p, y: nn.functional.cross_entropy(p.float(), y), opt_func=Adam, lr=1e-2,
                    cbs=[GradientAccumulation(32, **kwargs), dp(), *cbs], path='.')
    try:
        with quiet(learn): learn.fit(3)
    except RuntimeError as e: return str(e)
    return len(learn.recorder.losses)

def runs():
    res = {(event, 'one'): fit(event) for event in events}
    res |= {(event, 'all'): fit(event, (0, 1)) for event in events}
    res |= {(event, 'other'): fit(event, dp=dp, frozen=dp is local) for event,(dp,_) in others.items()}
    res |= {(event, 'local'): fit(event, dp=LocalSGD) for event in ('cancelled','skipped')}
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

@pytest.mark.parametrize('event', others)
def test_told_where_weights_are_not_compared(results, event):
    for rank in results: assert others[event][1] in str(rank[event, 'other']), rank[event, 'other']

def test_local_steps(results):
    "A rank may leave out steps, even all of an epoch: the others wait for it at the next average"
    assert [rank['cancelled', 'local'] for rank in results] == [12, 12]
    assert [rank['skipped', 'local'] for rank in results] == [12, 8]

@pytest.mark.parametrize('event', events)
def test_on_all_ranks(results, event):
    "Nothing parts; a step that is cancelled on all ranks goes on accumulating"
    assert [rank[event, 'all'] for rank in results] == [12, 12]

@pytest.mark.parametrize('kind', faultless)
def test_none(results, kind): assert [rank[kind, 'none'] for rank in results] == [12, 12]

if __name__ == '__main__': torch.save(both(int(sys.argv[2])), sys.argv[3])
