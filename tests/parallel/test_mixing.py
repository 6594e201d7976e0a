"MixUp and CutMix over two ranks: each mixes what a rank has, and a rank that cannot is told before training"
import sys
import pytest, torch
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, SGD, nn
from fastai.callback.all import CutMix, MixUp
from fastaccum.all import DataParallel, FullyShard, GradientAccumulation, launch
from test_joint_validation import quiet, started

pytestmark = pytest.mark.slow       # all start processes of two ranks
callbacks = MixUp,CutMix
ranks = DataParallel,FullyShard
# items of an epoch, of a loader batch, and shares of the ranks. 34: the last rank has none of the last loader batch's two items
trains = (34, 16, None),(40, 16, (3, 1))
told = {(33, 16, None): 'a loader batch of 1 is split into [1, 0]', (32, 16, (15, 1)): 'a loader batch of 16 is split into [15, 1]',
        (32, 2, None): 'a loader batch of 2 is split into [1, 1]'}

class Before(CrossEntropyLossFlat):
    "Counts its calls in training"
    calls = 0
    def __call__(self, pred, *yb):
        if pred.requires_grad: Before.calls += 1
        return super().__call__(pred, *yb)

def outcome(cb, dp, n, bs, shares):
    g = torch.Generator().manual_seed(0)
    items = list(zip(torch.randn(n+10, 3, 4, 4, generator=g), torch.randint(3, (n+10,), generator=g)))
    dls = DataLoaders(DataLoader(items[:n], bs=bs), DataLoader(items[n:], bs=10), device='cpu')
    torch.manual_seed(1)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), Before(), opt_func=SGD, lr=.1,
                    cbs=[GradientAccumulation(16), dp(shares=shares and list(shares)), cb()])
    Before.calls = 0
    try:
        with quiet(learn): learn.fit(2)
    except ValueError as e: return str(e),Before.calls
    return [float(o) for o in learn.recorder.losses]

cases = [(cb, dp, case) for cb in callbacks for dp in ranks for case in (*trains, *told)]
def name(cb, dp, case): return f'{cb.__name__} {dp.__name__} {case}'
def runs(): return {name(cb, dp, case): outcome(cb, dp, *case) for cb,dp,case in cases}
def both(n): return launch(runs, n)

@pytest.fixture(scope='module')
def results(tmp_path_factory): return started(both, 2, tmp_path_factory.mktemp('ranks'), __file__)()

@pytest.mark.parametrize('cb,dp,case', cases, ids=[name(*o) for o in cases])
def test_single_items(results, cb, dp, case):
    a,b = [rank[name(cb, dp, case)] for rank in results]
    assert a == b
    if case in trains: assert len(a) == 6 and torch.tensor(a).isfinite().all()
    else: assert told[case] in a[0] and cb.__name__ in a[0] and a[1] == 0

if __name__ == '__main__': torch.save(both(int(sys.argv[2])), sys.argv[3])
