"Weights that change between the micro-batches of a step: told once, with the figure; what changes them once a step is silent"
import warnings
import pytest
from reference import *
from reference import GradientAccumulation    # ours
from fastaccum.accumulation.witnesses.weights import ChangedWeights
from fastaccum.core.warnings import FastaccumWarning
from fastaccum.memory.activations import ActivationCheckpointing
from fastaccum.precision.callback import MixedPrecision

torch.manual_seed(0)
data = Data(torch.randn(64, 6), torch.arange(64)%4)
ways = {'loader batches': (8, dict(accum_bs=16)), 'split': (16, dict(micro_batch_size=3)),
        'coupled': (8, dict(accum_bs=16, micro_batch_size=4, coupled=True))}

class ClipsWeights(Callback):
    "As for a critic of a Wasserstein GAN"
    run_valid = False
    def after_batch(self):
        for p in self.learn.model.parameters(): p.data.clamp_(-.05, .05)
class Mutates(Callback):
    "Noise on the weights"
    run_valid = False
    def before_batch(self):
        with torch.no_grad():
            for p in self.learn.model.parameters(): p.add_(torch.randn_like(p), alpha=.01)
class Rounds(Callback):
    "Goes forward and backward with rounded weights, and steps from those that it has saved"
    run_valid = False
    def save(self): self.kept = [p.detach().clone() for p in self.learn.model.parameters()]
    def before_batch(self):
        self.save()
        for p in self.learn.model.parameters(): p.data.copy_((p.data*4).round()/4)
    def before_step(self):
        for p,k in zip(self.learn.model.parameters(), self.kept): p.data.copy_(k)
class Quantizes(Callback):
    "For the forward and backward pass, at each of them"
    run_valid = False
    def before_batch(self):
        self.kept = [p.detach().clone() for p in self.learn.model.parameters()]
        for p in self.learn.model.parameters(): p.data = (p.data*4).round()/4
    def after_backward(self):
        for p,k in zip(self.learn.model.parameters(), self.kept): p.data = k
class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student,self.teacher = mlp(),mlp().requires_grad_(False)
    def forward(self, x): return self.student(x) + self.teacher(x)
class Follows(Callback):
    run_valid = False
    def after_batch(self):
        for p,q in zip(self.learn.model.teacher.parameters(), self.learn.model.student.parameters()): p.data.lerp_(q.data, .1)

def train(cb, way, model=None, n_epoch=2, **kwargs):
    bs,acc = ways[way]
    learn = learner(data, bs, GradientAccumulation(**acc), *L(cb), model=model, loss_func=CrossEntropyLossFlat(), **kwargs)
    learn.fit(n_epoch, .1)
    return learn

@pytest.mark.parametrize('cb,way,model', [
    (ClipsWeights, 'loader batches', None), (ClipsWeights, 'coupled', None), (Quantizes, 'split', None),
    (Mutates, 'loader batches', None), (Follows, 'loader batches', Teacher)])
def test_told_once(cb, way, model):
    with pytest.warns(FastaccumWarning, match=fr'{cb.__name__} changed weights .*by [\d.e-]+ times.*`before_step`') as told:
        train(cb(), way, model and model())
    assert len(told) == 1

@pytest.mark.parametrize('name', ('list', 'dict'))
def test_told_of_saved_weights(name):
    class Names(Rounds):
        def save(self):
            super().save()
            if name == 'dict': self.named,self.kept = dict(enumerate(self.kept)),[]
        def before_step(self):
            self.kept = self.kept or [*self.named.values()]
            super().before_step()
    with pytest.warns(FastaccumWarning, match=r'Names saves weights with each loader batch.*by 0\.\d+ times.*opens:`') as told:
        train(Names(), 'loader batches')
    assert len(told) == 1
    class InTime(Rounds):
        def before_batch(self):
            if self.learn.gradient_accumulation.opens: super().before_batch()
    ours,whole = train(InTime(), 'loader batches'),learner(data, 16, Rounds(), loss_func=CrossEntropyLossFlat())
    whole.fit(2, .1)
    assert rel_err(weights(ours.model), weights(whole.model)) < 1e-6

class Remembers(Callback):
    "The weights of the step before, and the gradients so far"
    def before_batch(self): self.grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.learn.model.parameters()]
    def after_batch(self): self.last = [p.detach().clone() for p in self.learn.model.parameters()]
class AtTheStep(Callback):
    def after_step(self):
        for p in self.learn.model.parameters(): p.data.mul_(.9)
class Once(Callback):
    def before_batch(self):
        if self.learn.training and self.learn.gradient_accumulation.opens: AtTheStep.after_step(self)
class Clamps(Callback):
    "The second time it changes nothing"
    def before_batch(self):
        for p in self.learn.model.parameters(): p.data.clamp_(-.1, .1)
class Swaps(Callback):
    "Averaged weights in validation, here within a step, too"
    within = False
    def before_validate(self):
        self.kept = [p.detach().clone() for p in self.learn.model.parameters()]
        self._put([p/2 for p in self.kept])
    def after_validate(self): self._put(self.kept)
    def _put(self, ws):
        for p,w in zip(self.learn.model.parameters(), ws): p.data.copy_(w)
    def after_batch(self):
        if self.learn.training and self.learn.iter == 0: self.learn.validate()

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('cb', (AtTheStep, Once, Clamps, Swaps, Remembers, lambda: [Clamps(), ActivationCheckpointing(nn.Linear)],
                                lambda: [Clamps(), MixedPrecision('bf16')]))
def test_silent(cb, way): train(cb(), way, n_epoch=1)

def test_no_look_without_listeners():
    "And none later than in the first steps, but for each fiftieth"
    looks = []
    class Counts(Callback):
        def after_pred(self): looks.append(any(w.due for w in self.learn.gradient_accumulation.witnesses.all if type(w) is ChangedWeights))
        after_pred.__module__ = 'fastaccum.of_a_test'                    # a listener of ours
        run_valid = False
    train(Counts(), 'loader batches', n_epoch=1)
    assert looks == [False]*8
    train([Counts(), Clamps()], 'loader batches')
    assert looks[8:] == [True]*6 + [False]*10

def test_lr_find():
    learn = learner(data, 8, GradientAccumulation(16), Clamps(), loss_func=CrossEntropyLossFlat())
    learn.lr_find(num_it=5, show_plot=False)
