"The advice of `memory_advice` keeps the user's training"
from dataclasses import replace
import pytest, torch, torch.nn as nn
from fastai.basics import DataLoader, DataLoaders, Learner, SGD
from fastai.callback.schedule import SchedLin
from fastaccum.all import ActivationCheckpointing, GradientAccumulation, GradientAccumulationSchedule

def get_learner(*cbs):
    torch.manual_seed(0)
    items = list(zip(torch.randn(64, 32), torch.randint(4, (64,))))
    dls = DataLoaders(DataLoader(items, bs=16), DataLoader(items, bs=16), device='cpu')
    net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    return Learner(dls, net, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, cbs=list(cbs))

def own_weight(learn): return len(learn.y)
settings = dict(coupled=True, weight=own_weight, remainder='carry', grad_dtype=torch.float32, normalize=False, check_loss='always', log_accum_batch=False,
                n_items=lambda learn: len(learn.x))
made = {k: lambda k=k, v=v: GradientAccumulation(32, micro_batch_size=15, **{k: v}) for k,v in settings.items()}
made['schedule'] = lambda: GradientAccumulationSchedule(16, 64, finish=.9, schedule=SchedLin, micro_batch_size=15)
made['auto'] = lambda: GradientAccumulation(32, micro_batch_size='auto')

def advise(learn):
    "A memory in which micro-batches of 3 items fit"
    advice = learn.memory_advice()
    return learn.memory_advice(gib=(advice.params+advice.peak_at(3))/.9/2**30)

@pytest.mark.parametrize('setting', made)
def test_line_keeps_what_is_attached(setting):
    learn = get_learner(made[setting]())
    acc = learn.gradient_accumulation
    mine = ('n_acc','log_accum_batch','remainder','normalize','weight','check_loss','grad_dtype','coupled','_accum_bs','_n_items','start_accum_bs','final_accum_bs','finish')
    before = {k: getattr(acc, k, None) for k in mine}
    exec(advise(learn).call)
    assert learn.gradient_accumulation is acc and sum(isinstance(cb, GradientAccumulation) for cb in learn.cbs) == 1
    assert acc.micro_batch_size == 3 and {k: getattr(acc, k, None) for k in mine} == before

def test_line_for_a_plain_learner():
    "Micro-batches of its loader batches: the same training"
    runs = []
    for advised in (False, True):
        learn = get_learner()
        if advised: exec(advise(learn).call)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
        runs.append((torch.cat([p.detach().flatten() for p in learn.model.parameters()]), len(learn.recorder.losses)))
    (whole,n),(parts,m) = runs
    assert (whole-parts).norm() < 1e-6*whole.norm() and n == m == 8 and learn.gradient_accumulation.micro_batch_size == 3

class Block(nn.Module):
    def __init__(self): super().__init__(); self.layers = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 32))
    def forward(self, x): return x + self.layers(x)

def test_line_with_checkpointing():
    learn = get_learner(GradientAccumulation(32, remainder='carry'))
    learn.model = nn.Sequential(*(Block() for _ in range(8)), nn.Linear(32, 4))
    learn.create_opt()
    advice = learn.memory_advice()
    recomputed = advice.cost(replace(advice.now, recompute=ActivationCheckpointing(), size=8))[0]
    assert recomputed < advice.peak_at(8)
    small = learn.memory_advice(gib=(advice.params+recomputed)/.9/2**30)
    exec(small.call)
    assert learn.gradient_accumulation.remainder == 'carry' and any(isinstance(cb, ActivationCheckpointing) for cb in learn.cbs)
    assert learn.memory_advice(gib=small.gib).call is None
