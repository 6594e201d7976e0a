"Forward hooks see whole loader batches in validation, or it is told"
import warnings
import pytest
from reference import *
from fastai.callback.hook import ActivationStats, hook_output
from fastai.vision.models.unet import DynamicUnet
from fastaccum.all import *

torch.manual_seed(0)
data = Data(torch.randn(64, 6), torch.randn(64, 4))

def hooked(learn, run):
    "How many items the hook kept each time"
    kept = []
    hook = learn.model[0].register_forward_hook(lambda m, i, o: kept.append(len(o)) if not m.training else None)
    run(learn)
    hook.remove()
    return kept

@pytest.mark.parametrize('run', [lambda l: l.fit(1), lambda l: l.validate(), lambda l: l.get_preds()], ids=['fit', 'validate', 'get_preds'])
@pytest.mark.parametrize('acc', [dict(), dict(coupled=True)], ids=str)
def test_hooks_see_all_items(run, acc):
    def learn(*cbs): return learner(data, 16, *cbs)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert hooked(learn(GradientAccumulation(micro_batch_size=4, **acc)), run) == hooked(learn(), run) == [64]

def test_hook_output_keeps_all_features():
    learn = learner(data, 16, GradientAccumulation(micro_batch_size=4))
    with hook_output(learn.model[0]) as hook: learn.validate()
    torch.testing.assert_close(hook.stored, learn.model[0](data.x).detach())

def test_without_hooks_in_micro_batches():
    class Counts(nn.Sequential):
        sizes = []
        def forward(self, x): self.sizes.append(len(x)); return super().forward(x)
    learn = learner(data, 16, GradientAccumulation(micro_batch_size=4), model=Counts(nn.Linear(6, 4)))
    learn.validate()
    assert learn.model.sizes[-16:] == [4]*16

class Full(nn.Module):
    "Room for 16 items"
    def __init__(self): super().__init__(); self.body = mlp()
    def __getitem__(self, i): return self.body[i]
    def forward(self, x):
        if len(x) > 16: raise torch.OutOfMemoryError('full')
        return self.body(x)

def test_too_large_is_told():
    learn = learner(data, 16, GradientAccumulation(micro_batch_size=4), model=Full())
    with pytest.warns(UserWarning, match='validation batch of 64 items.*micro-batches of 4.*val_bs') as seen:
        assert hooked(learn, lambda l: l.fit(2)) == [4]*32
    assert sum('validation batch' in str(w.message) for w in seen) == 1

def test_activation_stats_are_told():
    "With the argument that is to be left out"
    learn = learner(data, 16, GradientAccumulation(micro_batch_size=4), ActivationStats())
    with pytest.warns(UserWarning, match='ActivationStats looks at the model with hooks.* leave out micro_batch_size,'): learn.fit(1)
    learn = learner(data, 16, GradientAccumulation(micro_batch_tokens=64), ActivationStats())
    with pytest.warns(UserWarning, match='leave out micro_batch_tokens,'), pytest.raises(ValueError, match='To count tokens'): learn.fit(1)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*hooks')
        learner(data, 16, GradientAccumulation(32), ActivationStats()).fit(1)

def test_a_unet_has_its_own_hooks():
    from fastaccum.core.watch import hooks_of_others
    body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
    net = DynamicUnet(body, 2, (16, 16))
    assert any(m._forward_hooks for m in net.modules()) and not hooks_of_others(net)
    with hook_output(net): assert hooks_of_others(net)
