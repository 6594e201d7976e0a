"A validation or predictions in the middle of a batch leave the training as it was"
import pytest
from fastai.callback.progress import ProgressCallback
from reference import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.precision.callback import MixedPrecision
from quick import quickly

torch.manual_seed(0)
items = [(x, x.sum()[None].tanh()) for x in torch.randn(48, 4)]

class Looks(Callback):
    "Calls `what` in the training batch `at`, at an event"
    def __init__(self, what, event, at=(5, 8)): self.what,self.at = what,at; setattr(self, event, self.look)
    def look(self):
        learn = self.learn
        if not learn.training or learn.iter not in self.at or getattr(self, 'inside', False): return
        self.inside,modes,dl = True,[m.training for m in learn.model.modules()],learn.dl
        self.what(learn)
        self.inside = False
        assert learn.training and learn.dl is dl and [m.training for m in learn.model.modules()] == modes

class Batches(Callback):
    run_valid = False
    def __init__(self): self.sums = []
    def after_batch(self): self.sums.append((self.learn.training, self.learn.xb[0].sum().item()))

def train(*cbs):
    set_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(.3), nn.Linear(8, 1))
    learn = Learner(DataLoaders(DataLoader(items, bs=4, shuffle=True), DataLoader(items[:20], bs=4)), net,
                    MSELossFlat(), opt_func=SGD, metrics=mae, cbs=[Batches(), *cbs])
    with learn.no_logging(), learn.no_bar(): learn.fit(2, .1)
    return learn

looks = dict(validate=lambda l: l.validate(), get_preds=lambda l: l.get_preds(),
             train_preds=lambda l: l.get_preds(ds_idx=0), with_loss=lambda l: l.get_preds(with_loss=True),
             own_loader=lambda l: l.get_preds(dl=DataLoader(items[:9], bs=3)), twice=lambda l: (l.validate(), l.get_preds()))
setups = dict(plain=lambda: [GradientAccumulation(4)], accumulation=lambda: [GradientAccumulation(12)],
              micro=lambda: [GradientAccumulation(8, micro_batch_size=2)],
              bf16=lambda: [MixedPrecision('bf16')], checkpoint=lambda: [TrainingCheckpoint()])

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward',
                                   'before_step', 'after_step', 'after_batch'])
@pytest.mark.parametrize('what', looks)
@pytest.mark.parametrize('setup', quickly(['micro','checkpoint'], setups))
def test_undisturbed(setup, what, event):
    plain,looked = train(*setups[setup]()),train(*setups[setup](), Looks(looks[what], event))
    assert looked.batches.sums == plain.batches.sums and all(training for training,_ in plain.batches.sums)
    assert torch.equal(weights(looked.model), weights(plain.model))
    assert (looked.recorder.losses == plain.recorder.losses
            and [list(v) for v in looked.recorder.values] == [list(v) for v in plain.recorder.values])
