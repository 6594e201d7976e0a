"critical_batch over two ranks: its branches train on the items that one process trains on"
import io, sys
from contextlib import redirect_stdout
import pytest, torch
from fastai.basics import DataLoader, DataLoaders, Learner, SGD, nn
from fastaccum.all import DataParallel, GradientAccumulation, ScaleLR, critical_batch, launch
from test_joint_validation import started

pytestmark = pytest.mark.slow       # all start processes of two ranks

def learner(**kwargs):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=g).double()
    y = x.sum(1, keepdim=True).tanh()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    rows = list(zip(x, y))
    dls = DataLoaders(DataLoader(rows[:256], bs=16, shuffle=True), DataLoader(rows[256:], bs=16), device='cpu')
    return Learner(dls, model, nn.MSELoss(), opt_func=SGD, lr=.1, cbs=[GradientAccumulation(32), DataParallel(**kwargs)])

kinds = dict(even={}, uneven=dict(shares=[3, 1]))
def table(shares, world):
    learn,said = learner(**({} if world == 1 else shares)),io.StringIO()
    with redirect_stdout(said): res = critical_batch(learn, [16, 64], n_items=200, n_seeds=2, scale_lr=ScaleLR('linear'))
    return res.to_dict('list'),said.getvalue()

@pytest.mark.parametrize('kind', kinds)
def test_the_table_of_one_process(results, kind):
    one,said = results[1][0][kind]
    ranks,says = zip(*[rank[kind] for rank in results[2]])
    assert 'critical_batch' in said and says[0].count('\n') == said.count('\n') and not says[1]
    assert one['items'] == [208, 208] and one['steps'] == [13, 4]      # whole loader batches, and a last step of what is left
    for other in ranks:
        assert (other['accum_bs'], other['items'], other['steps']) == (one['accum_bs'], one['items'], one['steps'])
        for k in 'loss','loss_std': assert other[k] == pytest.approx(one[k], rel=1e-6)
    assert ranks[0] == ranks[1]

# --- the runs
def runs(world): return {kind: table(shares, world) for kind,shares in kinds.items()}

def both(n): return {n: launch(runs, n, n) if n > 1 else [runs(1)]}

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    waits = [started(both, n, tmp_path_factory.mktemp(f'ranks{n}'), __file__) for n in (1, 2)]
    return {n: res for wait in waits for n,res in wait().items()}

if __name__ == '__main__': torch.save(both(int(sys.argv[2])), sys.argv[3])
