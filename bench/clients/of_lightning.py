"Lightning: the tests of its trainer, its accumulation scheduler, its precision plugins and its callbacks"
from functools import partial
import torch, torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from fastai.basics import Callback, CancelFitException, Learner
import fastai.callback.schedule  # noqa: F401 (`Learner.lr_find`)
from fastai.callback.training import ShortEpochCallback
from fastai.optimizer import OptimWrapper
from fastaccum.accumulation.callback import GradientAccumulation, GradientAccumulationSchedule
from fastaccum.core.accumulator import GradientAccumulator
from fastaccum.logs.steps import StepLogger
from fastaccum.precision.callback import MixedPrecision
from . import BS, flat
from .claims import Claim, Conformance, Steps, batches, by_hand, learner, net, refused, same, tensor, values, x, y

READ = dict(name='Lightning', version='2.6.2', commit='7f0c3436cd3f6ad3753125672024fc415cbcb414', date='2026-07-20',
            folder='tests/tests_pytorch')
labels = ('Lightning',)
scheduler = 'callbacks/test_gradient_accumulation_scheduler.py: '

# -- Steps
class CountedSGD(torch.optim.SGD):
    "Counts how often gradients are set to zero"
    n = 0
    def zero_grad(self, *args, **kwargs):
        self.n += 1
        super().zero_grad(*args, **kwargs)

class FromFirstBatch(Callback):
    "Counts from there on: fastaccum also sets gradients to zero when a fit begins"
    order = 90
    def before_fit(self): self.opt.opt.n = 0

def zeroed(n_acc):
    def train(bs, cbs):
        learn = learner(bs, [*cbs, FromFirstBatch()], opt_func=partial(OptimWrapper, opt=CountedSGD))
        return values(learn, zeros=lambda l: l.opt.opt.n)
    return same(f'Gradients are set to zero once a step: {n_acc} loader batches a step',
                scheduler+'test_trainer_accumulate_grad_batches_zero_grad',
                train, big=4*n_acc, micro=3)

def by_epoch(factors):
    "As many loader batches a step as the epoch says"
    def ours(**kwargs):
        size = lambda pos: 4*factors[min(int(4*pos + 1e-9), 3)]
        learn = learner(4, [GradientAccumulationSchedule(4*factors[0], 4*factors[-1], 0, 1., schedule=size, **kwargs)])
        return dict(moved=values(learn, lambda l: l.fit(4, .1))['moved'], steps=tensor(len(learn.recorder.losses)))
    def big():
        steps = [b for f in factors for b in batches(4*f, 1)]
        return dict(moved=by_hand(steps), steps=tensor(len(steps)))
    return Claim(f'Another number of loader batches a step in each epoch: {factors}',
                 scheduler+'test_trainer_accumulate_grad_batches_with_callback', big,
                 {'loader batches': ours, 'loader batches, split': lambda: ours(micro_batch_size=3)})

class Changes(Callback):
    "Whether the weights have changed after each loader batch"
    order,run_valid = 90,False
    def before_fit(self): self.now,self.changed = flat(self.model),[]
    def after_batch(self):
        before,self.now = self.now,flat(self.model)
        self.changed.append(not self.now.equal(before))
def changing(cbs, bs=4): return values(learner(bs, [*cbs, Changes()]), changes=lambda l: l.changes.changed)
def changes_at_steps(): return {**changing([], BS), 'changes': tensor(2*[*2*[0, 0, 0, 1], 0, 0, 1])}

class MaxSteps(Callback):
    "Ends the fit after four steps"
    run_valid,order = False,90
    def before_fit(self): self.n = 0
    def after_step(self): self.n += 1
    def after_batch(self):
        if self.n >= 4: raise CancelFitException
def four_steps(bs, cbs): return values(learner(bs, [*cbs, MaxSteps()]), lambda l: l.fit(9, .1))

def backwards(cbs, bs=4):
    "How many backward passes there are"
    learn,n = learner(bs, cbs),[]
    learn.model[0].weight.register_hook(lambda g: n.append(1))
    return values(learn, backwards=lambda l: len(n))

def planned():
    "64 loader batches of an item: how many steps there are to be, and how many there are"
    xs,ys = torch.ones(64, 6),torch.zeros(64, dtype=torch.long)
    res = []
    for n in (2, 3):
        learn = learner(1, [GradientAccumulation(n)], x=xs, y=ys)
        res.append(len(learn.gradient_accumulation.plan(1)))
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        res.append(len(learn.recorder.losses))
    return dict(steps=tensor(res))

def logged(cbs, bs): return values(learner(bs, [*cbs, StepLogger()]), items=lambda l: [*l.step_logger.rows['items']])

class CountingLearner(Learner):
    "Has a step of its own"
    n = 0
    def _step(self):
        self.n += 1
        super()._step()
def own_step(bs, cbs): return values(learner(bs, cbs, cls=CountingLearner), steps=lambda l: l.n)

# -- Epochs, validation, rates
def short(cbs, bs, **kwargs): return values(learner(bs, cbs, **kwargs), lambda l: l.fit(4, .1))

def rates_tried(bs, cbs):
    learn = learner(bs, cbs)
    return values(learn, lambda l: l.lr_find(num_it=20, show_plot=False))

def averaged(bs, cbs):
    "An average of the weights that moves once a step"
    learn = learner(bs, cbs)
    mean = AveragedModel(learn.model)
    def move(learn):
        if learn.stepped is not False: mean.update_parameters(learn.model)
    learn.add_cb(Steps(move if cbs else lambda learn: mean.update_parameters(learn.model)))
    return values(learn, mean=lambda l: flat(mean.module))

# -- fp16
class ClipValue(Callback):
    "Clips each number of the gradient, and keeps the gradient as it was"
    run_valid,order = False,11
    def before_fit(self): self.norms = []
    def before_step(self):
        ps = list(self.model.parameters())
        self.norms.append(float(torch.cat([p.grad.flatten() for p in ps]).norm()))
        nn.utils.clip_grad_value_(ps, .01)

def scaled(*cbs, bs=BS):
    learn = learner(bs, [*cbs, MixedPrecision(init_scale=1024.), ClipValue()])
    return dict(moved=values(learn)['moved'], norms=tensor(learn.clip_value.norms))

def scaled_by_hand():
    model,norms = net(),[]
    start,opt,scaler = flat(model),torch.optim.SGD(model.parameters(), lr=.1),torch.amp.GradScaler('cpu', init_scale=1024.)
    for xb,yb in batches(BS):
        with torch.autocast('cpu', torch.float16): pred = model(xb)
        scaler.scale(F.cross_entropy(pred.float(), yb)).backward()
        scaler.unscale_(opt)
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        nn.utils.clip_grad_value_(model.parameters(), .01)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return dict(moved=flat(model)-start, norms=tensor(norms))

# -- Manual optimization
def own_loop():
    "A loop of one's own, which steps when it wants to: after the first three loader batches, after the next five, after the rest"
    model,parts = net(),batches(4, 1)
    start,opt = flat(model),torch.optim.SGD(model.parameters(), lr=.1)
    for group in (parts[:3], parts[3:8], parts[8:]):
        acc = GradientAccumulator(model.parameters(), sum(len(xb) for xb,_ in group))
        for xb,yb in group: acc.add(F.cross_entropy(model(xb), yb), len(xb)).backward()
        acc.finish()
        opt.step()
        opt.zero_grad()
    return dict(moved=flat(model)-start)

class Manual(Learner):
    "Steps itself"
    def _do_one_batch(self):
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        self.opt.step()
        self.opt.zero_grad()

def fits(*cbs, **kwargs): return lambda: values(learner(4, [cb() for cb in cbs], **kwargs))
def with_lbfgs(bs, cbs): return values(learner(bs, cbs, opt_func=partial(OptimWrapper, opt=torch.optim.LBFGS)))

def cases():
    claim = partial(Conformance, peers=labels)
    acc = partial(GradientAccumulation, BS)
    return [
        *map(zeroed, (1, 2, 3)), by_epoch([1, 2, 2, 4]), by_epoch([2, 2, 1, 1]),
        refused('An accumulation schedule with a size of 0', scheduler+'test_invalid_values_for_grad_accum_scheduler',
                partial(GradientAccumulationSchedule, 0, 4)),
        refused('An accumulation schedule with a size that is a string',
                scheduler+'test_invalid_values_for_grad_accum_scheduler', partial(GradientAccumulationSchedule, 2, '2')),
        refused('An accumulation schedule from a negative epoch on',
                scheduler+'test_invalid_keys_for_grad_accum_scheduler', partial(GradientAccumulationSchedule, 2, 4, -3, 1)),
        refused('An accumulation schedule from an epoch on that is a string',
                scheduler+'test_invalid_keys_for_grad_accum_scheduler', partial(GradientAccumulationSchedule, 2, 4, '2', 1)),
        refused('Accumulation is set twice', scheduler+'test_raises_when_accumulate_grad_batches_with_callback',
                fits(acc, partial(GradientAccumulationSchedule, 4, 16))),
        refused('Accumulation of a training that steps itself',
                'trainer/test_config_validator.py: test_trainer_manual_optimization_config', fits(acc, cls=Manual)),
        Claim('A training that steps itself may accumulate',
              'trainer/optimization/test_manual_optimization.py: test_manual_optimization_and_accumulated_gradient',
              lambda: dict(moved=by_hand([(x[:12], y[:12]), (x[12:32], y[12:32]), (x[32:], y[32:])])), {'own loop': own_loop}),
        same('A step of the user\'s own is called once for each accumulated batch',
             scheduler+'test_warn_if_model_has_overridden_optimization_hooks', own_step),
        claim('The loader batches that end an epoch make a step, though they are fewer',
              'trainer/test_trainer.py: test_gradient_accumulation_scheduling_last_batch', 'remainder'),
        Claim('Weights change with the loader batch that completes a step, and with no other',
              'trainer/test_trainer.py: test_gradient_accumulation_scheduling_last_batch',
              changes_at_steps, {'loader batches': lambda: changing([acc()])}),
        same('Training ends after so many steps, not loader batches',
             'trainer/test_trainer.py: test_trainer_max_steps_accumulate_batches', four_steps),
        Claim('One backward pass for each loader batch',
              'trainer/optimization/test_backward_calls.py: test_backward_count_with_grad_accumulation',
              lambda: {**backwards([], BS), 'backwards': tensor(22)}, {'loader batches': lambda: backwards([acc()])}),
        same('One backward pass for each loader batch, with an optimizer that calls a closure (LBFGS)',
             'trainer/optimization/test_backward_calls.py: test_backward_count_with_closure', with_lbfgs),
        Claim('The number of steps is known before training',
              'trainer/properties/test_estimated_stepping_batches.py: test_num_stepping_batches_accumulate_gradients',
              lambda: dict(steps=tensor([32, 32, 22, 22])), {'loader batches': planned}),
        Claim('A row of the log for each step', 'loggers/test_tensorboard.py: test_tensorboard_with_accumulated_gradients',
              lambda: {**logged([GradientAccumulation(BS)], BS), **values(learner(BS)), 'items': tensor(2*[16, 16, 10])},
              {'micro-batches': lambda: logged([acc(micro_batch_size=6)], BS), 'loader batches': lambda: logged([acc()], 4)}),
        claim('A validation in the middle of an accumulated batch keeps its gradients',
              'loops/test_loops.py: test_validation_during_gradient_accumulation_window', 'validation'),
        Claim('An epoch of a few loader batches, always the same', 'trainer/flags/test_overfit_batches.py: test_overfit_basic',
              lambda: short([], BS, x=x[:28], y=y[:28]), {'loader batches': lambda: short([acc(), ShortEpochCallback(.5)], 4)}),
        same('The search for a rate makes a step with each rate',
             'tuner/test_lr_finder.py: test_accumulation_and_early_stopping', rates_tried),
        same('An average of the weights moves once a step', 'callbacks/test_weight_averaging.py, test_stochastic_weight_avg.py', averaged),
        claim('Gradients are clipped once, when they are complete', 'models/test_cpu.py', 'clipping'),
        Claim('fp16: gradients are unscaled once, and then clipped by value',
              'plugins/test_amp_plugins.py: test_amp_gradient_unscale', scaled_by_hand,
              {'micro-batches': lambda: scaled(acc(micro_batch_size=6)), 'loader batches': lambda: scaled(acc(), bs=4)}, tol=3e-3),
        claim('fp16: a step that overflows is skipped, and no other',
              'plugins/test_amp_plugins.py: test_amp_skip_optimizer', 'precision skip'),
        claim('An error ends a fit in the middle of an accumulated batch: the next fit begins with zero gradients',
              'loops/test_loops.py: test_loop_state_on_exception', 'exception'),
        claim('A run goes on in the middle of an epoch (there: with a warning)',
              'loops/test_training_epoch_loop.py: test_resume_mid_epoch_warning', 'resume')]
