"FullyShard notices in its first step if gradients are not added up over the ranks as they should be, whatever the cause"
import sys
from functools import partial
import pytest, torch
from fastai.basics import Callback, DataLoader, DataLoaders, Learner, SGD, nn
import fastaccum.parallel.fully_shard as fully_shard
from fastaccum.all import FullyShard, GradientAccumulation, launch
from test_joint_validation import quiet, started

pytestmark = pytest.mark.slow       # starts two ranks

scale_grads = fully_shard.scale_grads
# What is planted: a factor of the gradients. FSDP averages over two ranks: without its 2 a mean is left of the sum
wrong = dict(mean=.5, sum_for_mean=2., factor=1.05)
# Each is right: (what the factor is, arguments of accumulation, of FullyShard, and of the Learner)
right = dict(plain=({}, {}, {}), micro=(dict(micro_batch_size=3), dict(sync='last'), {}),
             keep=(dict(micro_batch_size=3), dict(sync='keep'), {}),
             drop=(dict(remainder='drop'), {}, {}), carry=(dict(accum_bs=60, remainder='carry'), {}, {}),
             sums=({}, {}, dict(loss_func=nn.MSELoss(reduction='sum'))), offload=({}, dict(offload=True), {}),
             tied=({}, {}, dict(model='tied')), cancelling=({}, {}, dict(model='cancelling')))

class Halved(Callback):
    "A callback may change what each backward pass leaves"
    def after_backward(self):
        for p in self.learn.model.parameters(): p.grad.mul_(.5)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first,self.second = nn.Linear(5, 5),nn.Linear(5, 5)
        self.second.weight,self.second.bias = self.first.weight,self.first.bias
    def forward(self, x): return self.second(self.first(x).tanh())[:, :1]

class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1))
    def forward(self, x): return x+self.by

def cancelling():
    "Softmax does not see what is added to all its inputs: that gradient is rounding"
    return nn.Sequential(nn.Linear(5, 3), Shift(), nn.Softmax(1))

models = dict(mlp=lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), tied=Tied, cancelling=cancelling)

def fit(factor=1., acc={}, shard={}, cbs=(), loss_func=nn.MSELoss(), model='mlp'):
    "Where the sums were found to be right, or the error"
    torch.manual_seed(0)
    items = list(zip(torch.randn(97, 5), torch.randn(97, 1)))
    dls = DataLoaders(*[DataLoader(items, bs=16) for _ in range(2)], device='cpu')
    learn = Learner(dls, models[model](), loss_func, opt_func=SGD, lr=1e-3,
                    cbs=[GradientAccumulation(**{'accum_bs': 40, **acc}), FullyShard(**shard), *cbs], path='.')
    fully_shard.scale_grads = lambda params, by: scale_grads(params, by*factor)
    found = []
    has_seen = fully_shard.SumWitness._has_seen
    def noted(self, *args):
        res = has_seen(self, *args)
        if res: found.append(learn.iter)
        return res
    fully_shard.SumWitness._has_seen = noted
    with quiet(learn):
        try: learn.fit(1)
        except RuntimeError as e: return str(e)
        finally: fully_shard.SumWitness._has_seen = has_seen
    return found

def all_right(): return {k: fit(acc=acc, shard=shard, **more) for k,(acc,shard,more) in right.items()} | dict(changed=fit(cbs=[Halved()]))
def both(n): return dict(right=launch(all_right, n), **{k: launch(partial(fit, v), n) for k,v in wrong.items()})

@pytest.fixture(scope='module')
def results(tmp_path_factory): return started(both, 2, tmp_path_factory.mktemp('ranks'), __file__)()

@pytest.mark.parametrize('name', wrong)
def test_wrong(results, name):
    for rank in results[name]:
        assert "With FullyShard, the gradient of '2.bias' is not the sum of what the ranks have computed" in rank
        assert f'{wrong[name]:.4g} times as long' in rank and 'use DataParallel' in rank

# The step comes with the third loader batch, or with the fourth
at_first = {k: [2] for k in right if k != 'cancelling'} | dict(carry=[3])
@pytest.mark.parametrize('name', at_first)
def test_right(results, name):
    "Seen in the first step"
    for rank in results['right']: assert rank[name] == at_first[name]

def test_rounding_alone(results):
    for rank in results['right']: assert rank['cancelling'] in ([], [2])

def test_changed_by_a_callback(results):
    for rank in results['right']: assert rank['changed'] == [2]         # compared, and void

if __name__ == '__main__': torch.save(both(int(sys.argv[2])), sys.argv[3])
