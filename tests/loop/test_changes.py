"What changes while a fit runs: the optimizer's parameters, the callback's own settings, who listens"
import pytest, torch
import torch.nn.functional as F
from reference import *
from reference import GradientAccumulation    # ours
from fastaccum.core.losses import LossRule
from fastaccum.logs.steps import StepLogger

def classes(n): return list(zip(torch.randn(n, 6, generator=torch.manual_seed(0)), torch.arange(n)%4))

def test_new_optimizer_in_mid_fit():
    "A callback adds a layer, and makes a new optimizer: its gradients are those of the big batch, too"
    class Grows(Callback):
        order = -5                      # before the accumulated batch begins
        def before_batch(self):
            if not self.training or self.learn.train_iter*self.learn.dls.train.bs != 32: return
            torch.manual_seed(5)
            self.learn.model.append(nn.Linear(4, 4))
            self.learn.opt = None
            self.learn.create_opt()
    def trained(bs, *cbs):
        learn = learner(data, bs, Grows(), *cbs, loss_func=F.cross_entropy, opt_func=partial(SGD, mom=0.))
        learn.fit(2, .1)
        return learn
    data = classes(64)
    whole,acc = trained(32),trained(8, GradientAccumulation(32))
    assert len(acc.model)==len(whole.model) and rel_err(weights(acc.model), weights(whole.model)) < 1e-6

@pytest.mark.parametrize('k', (None, 4))
def test_not_normalized_from_the_second_batch_on(k):
    "`normalize` is asked for at each accumulated batch, also while an unknown loss is measured"
    def trained(loss_func):
        sums = On('before_batch', lambda l: setattr(l.gradient_accumulation, 'normalize', False), order=5)
        learn = learner(classes(64), 8, GradientAccumulation(16, micro_batch_size=k), sums, loss_func=loss_func)
        learn.fit(1, .05)
        return learn
    assert rel_err(weights(trained(lambda p, y: F.cross_entropy(p, y)).model), weights(trained(F.cross_entropy).model)) < 1e-6

def test_check_is_asked_each_time():
    rule = LossRule(checks=True)
    own = lambda p, y: F.mse_loss(p, y)
    for check in (True, False, True):
        rule.look_up(own, check)
        assert rule.probed is check

@pytest.mark.parametrize('k', (None, 4))
def test_heard_in_the_batch_in_which_it_came(k):
    "Nobody else listens to the event"
    seen = []
    def add(learn):
        if not seen: learn.add_cb(On('after_backward', lambda l: seen.append(l.train_iter)))
        seen.append('added')
    learn = learner(classes(32), 8, GradientAccumulation(16, micro_batch_size=k), On('before_backward', add), loss_func=F.cross_entropy)
    learn.fit(1, .05)
    assert seen[:2]==['added', 0]

def test_learn_as_a_class_attribute():
    class Mine(StepLogger): learn = None
    learn = learner(classes(32), 8, Mine(), loss_func=F.cross_entropy)
    learn.fit(1, .05)
    assert len(learn.step_logger.to_df())==4 and Mine.learn is not None

def test_own_after_batch_of_the_callback():
    "It may read the prediction, and gets it"
    acc,seen = GradientAccumulation(16, micro_batch_size=4),[]
    learn = learner(classes(32), 8, acc, loss_func=F.cross_entropy)
    acc.after_batch = lambda: seen.append(len(acc.learn.pred))
    learn.fit(1, .05)
    assert seen[:4]==[8]*4
