"Transformers: the tests of its Trainer"
import tempfile
from contextlib import suppress
from functools import partial
import torch, torch.nn.functional as F
from torch import nn
from fastai.basics import Callback, DataLoaders, Learner, SGD
from fastai.callback.schedule import ParamScheduler, SchedLin
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from torch.utils.data import DataLoader
from fastaccum.accumulation.callback import GradientAccumulation
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.conformance import Interrupted
from fastaccum.logs.steps import StepLogger
from fastaccum.memory.activations import ActivationCheckpointing
from fastaccum.parallel import DataParallel
from . import BS, flat
from .claims import Claim, Conformance, OnlyFits, alike, both, by_hand, learner, net, of_words, same, tensor, values, x, y
from .data import numbers

# Single files were read, each at a commit of its own, which the claims name
READ = dict(name='Transformers', version=None, commit=None, date=None, folder='tests/trainer')
labels = ('Hugging Face Trainer','... with num_items_in_batch')
trainer = 'test_trainer.py: '
checkpointing = 'test_trainer_checkpointing.py (22c22fa): '

# -- Weights, losses, steps
def linear(bs, cbs):
    "AdamW, whose rate falls to zero"
    learn = learner(bs, [*cbs, ParamScheduler(dict(lr=SchedLin(.01, 0)))],
                    opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), x=x[:32], y=y[:32])
    return values(learn, lambda l: l.fit(3, .01))

def joint_words(): return of_words(4, [GradientAccumulation(BS), DataParallel()])

def own_loss(pred, y):
    "A loss of the user's own, over the words that are there"
    return F.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction='sum', ignore_index=-100)/(y != -100).sum()
def of_own_loss(bs, cbs): return of_words(bs, cbs, own_loss)
def smoothed(bs, cbs): return of_words(bs, cbs, CrossEntropyLossFlat(label_smoothing=.1))

def steps_of(n, epochs):
    def ours(**kwargs):
        learn = learner(4, [GradientAccumulation(20, **kwargs), StepLogger()], x=torch.ones(n, 6), y=torch.zeros(n, dtype=torch.long))
        with learn.no_bar(), learn.no_logging(): learn.fit(epochs)
        return dict(items=tensor([*learn.step_logger.rows['items']]))
    return Claim(f'The steps have all items of {n}, in {epochs} epoch{"s"*(epochs > 1)}',
                 trainer+'test_num_batches_in_training_with_gradient_accumulation',
                 lambda: dict(items=tensor(epochs*([20]*6 + [3]*(n == 123)))),
                 {'loader batches': ours, 'loader batches, split': partial(ours, micro_batch_size=3)})

# -- Loader batches of other lengths
class PerNumber(nn.Module):
    "The same net for each number of a sequence, or of a list of sequences"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, x): return [self(o) for o in x] if isinstance(x, list) else self.net(x[...,None])[...,0]

def lengths(): return [(numbers(4, s, seed=s), numbers(4, s, seed=s+50)) for s in (3, 17, 8, 1, 12, 5, 19, 2)]
def squared(preds, ys): return sum((p-t).pow(2).sum() for p,t in zip(preds, ys))/sum(t.numel() for t in ys)
def dynamic(**kwargs):
    parts = lengths()
    dls = DataLoaders(DataLoader(parts, batch_size=None), DataLoader(parts[:2], batch_size=None))
    dls._device = torch.device('cpu')
    learn = Learner(dls, PerNumber(), loss_func=nn.MSELoss(), opt_func=SGD, cbs=GradientAccumulation(BS, **kwargs))
    return dict(moved=values(learn)['moved'])
def dynamic_by_hand():
    parts = lengths()
    groups = [([xb for xb,_ in parts[i:i+4]], [yb for _,yb in parts[i:i+4]]) for i in (0, 4)]
    return dict(moved=by_hand(2*groups, PerNumber, squared))

# -- Stop and go on
class Stops(Callback):
    "An error after the given loader batch of the fit"
    order,run_valid = 1001,False
    def __init__(self, at): self.at = at
    def batch_ended(self):
        if self.train_iter == self.at: raise Interrupted('stopped')

def resumed(model=net, at=6, bs=4, **kwargs):
    "A run that an error ends, most often in the middle of an accumulated batch, and another one that goes on"
    with tempfile.TemporaryDirectory() as folder:
        def new(*cbs):
            CheckpointFolder.in_use.clear()      # as in a new process
            return learner(bs, [GradientAccumulation(BS, **kwargs),
                                TrainingCheckpoint(every_steps=1, every_minutes=None), *cbs], model=model, path=folder)
        start,seen = flat(model()),[]
        with suppress(Interrupted): values(new(Stops(at)))
        learn = new(Each(seen))
        return dict(values(learn), moved=flat(learn.model)-start, seen=tensor(len(seen)))
def whole(left, model=net): # `left`: loader batches of the second run, after those of its last complete step
    return {**values(learner(BS, model=model)), 'seen': tensor(left)}

class Each(Callback):
    "Notes each loader batch"
    run_valid = False
    def __init__(self, seen): self.seen = seen
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
    def before_batch(self): self.seen.append(1)

def frozen():
    model = net()
    model[0].requires_grad_(False)
    return model
def small(): return OnlyFits(net(), 5)

def recomputed(bs, cbs): return values(learner(bs, [*cbs, *([ActivationCheckpointing(nn.Linear)] if cbs else [])]))

def cases():
    claim = partial(Conformance, peers=labels)
    return [
        same('Half the batch, and twice the accumulation: the same weights (AdamW, a rate that falls)',
             trainer+'test_gradient_accumulation', linear),
        same('The logged losses of sentences of different lengths are the big batch\'s',
             trainer+'test_gradient_accumulation_loss_alignment_with_model_loss', of_words),
        claim('Each token counts alike (`num_items_in_batch`)',
              trainer+'test_gradient_accumulation_loss_alignment_with_model_loss', 'tokens'),
        same('Each token counts alike, with a loss of the user\'s own',
             trainer+'test_gradient_accumulation_loss_alignment_with_loss_func', of_own_loss),
        *(steps_of(n, epochs) for epochs in (1, 2) for n in (123, 120)),
        claim('The last loader batch has fewer items', trainer+'test_num_batches_in_training_with_gradient_accumulation', 'ragged end'),
        claim('What an epoch leaves over makes a step of its own',
              trainer+'test_num_batches_in_training_with_gradient_accumulation', 'two epochs'),
        same('Label smoothing, where padding does not count', 'test_trainer_utils.py (08d4e4f): test_label_smoothing', smoothed),
        Claim('Loader batches of different lengths',
              'test_trainer_evaluation.py (0941546), of evaluation', dynamic_by_hand,
              {'loader batches': dynamic, 'loader batches, split': lambda: dynamic(micro_batch_size=3)}),
        Claim('Each token counts alike on two devices (`average_tokens_across_devices`)', 'distributed/scripts/loss_averaging.py (0d7e95d)',
              lambda: alike(of_words(BS, [])), {'two ranks': lambda: both(joint_words)}),
        claim('A run goes on in the middle of an epoch, with a loader of the user\'s own that shuffles',
              checkpointing+'test_can_resume_training', 'resume'),
        Claim('A run goes on from the middle of an accumulated batch',
              checkpointing+'test_resume_training_with_gradient_accumulation', lambda: whole(18),
              {'loader batches': resumed, 'loader batches, split': lambda: resumed(micro_batch_size=3)}),
        Claim('A run with frozen parameters goes on from the middle of an accumulated batch',
              checkpointing+'test_resume_training_with_frozen_params', lambda: whole(18, frozen),
              {'loader batches': lambda: resumed(frozen)}),
        Claim('A run goes on whose micro-batch size was found when memory ran out',
              checkpointing+'test_auto_batch_size_with_resume_from_checkpoint', lambda: whole(4),
              {'micro-batches': lambda: resumed(small, at=2, bs=BS, micro_batch_size='auto')}),
        claim('A step that overflows in fp16 is skipped, and no other', 'test_trainer_optimizer_skip.py (44065bf)', 'precision skip'),
        same('Activations are recomputed', trainer+'test_gradient_checkpointing', recomputed),
        claim('Gradients are clipped once, when they are complete', trainer+'test_mixed_fp16', 'clipping'),
        claim('The rate moves once a step', 'test_trainer_optimizer_skip.py (44065bf)', 'schedules')]
