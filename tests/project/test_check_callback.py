"`check_callback`: callbacks that are right with accumulation, and what it says of those that are not"
import pytest, torch
from torch import nn
from fastai.basics import Callback, DataLoader, DataLoaders, Learner, SGD, set_seed
from fastai.callback.schedule import ParamScheduler, SchedLin
from fastai.callback.training import GradientClip
from fastaccum.conformance import check_callback

pytestmark = pytest.mark.filterwarnings('ignore')      # what the accumulation itself notices

class ClipsSteps(Callback):
    def before_step(self): nn.utils.clip_grad_norm_(self.learn.model.parameters(), .05)
class EMA(Callback):
    run_valid = False
    def before_fit(self): self.avg = [p.detach().clone() for p in self.learn.model.parameters()]
    def after_batch(self):
        if self.learn.stepped is not False: torch._foreach_lerp_(self.avg, [p.detach() for p in self.learn.model.parameters()], .1)
class Rates(Callback):
    "A schedule of its own, a step at a time"
    def before_train(self): self.i = 0
    def before_batch(self):
        acc = getattr(self.learn, 'gradient_accumulation', None)
        if self.training and (acc is None or acc.opens):
            self.i += 1
            self.learn.opt.set_hyper('lr', .1/self.i)
class Reads(Callback):
    def after_loss(self): self.last = self.learn.loss.item()
class L2(Callback):
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad + .1*sum(p.pow(2).sum() for p in self.learn.model.parameters())

right = dict(steps=ClipsSteps, ema=EMA, rates=Rates, l2=L2, fastais=lambda: GradientClip(.1),
             scheduled=lambda: ParamScheduler(dict(lr=SchedLin(.1, .01))), none=Callback)
@pytest.mark.parametrize('name', right)
def test_right(name):
    for r in check_callback(right[name]): assert r.exact and str(r)==f'{r.way}: exact', r

class Clips(Callback):
    def after_backward(self): nn.utils.clip_grad_norm_(self.learn.model.parameters(), .05)
class Zeroes(Callback):
    def before_batch(self): self.learn.opt.zero_grad()
class Decays(Callback):
    run_valid = False
    def after_batch(self):
        with torch.no_grad():
            for p in self.learn.model.parameters(): p *= .99
class EachBatch(EMA):
    def after_batch(self): torch._foreach_lerp_(self.avg, [p.detach() for p in self.learn.model.parameters()], .1)
class RatesEach(Callback):
    n = 0
    def before_batch(self):
        if self.training: self.n += 1; self.learn.opt.set_hyper('lr', .1/self.n)
class LastBatch(Callback):
    "SAM with what is left in `xb`"
    def before_step(self):
        self.learn.opt.zero_grad()
        self.learn.loss_func(self.learn.model(*self.learn.xb), *self.learn.yb).backward()

@pytest.mark.parametrize('cb,event,what,ways',
                         [(Clips, 'after_backward', 'gradients', 'both'),
                          (Zeroes, 'before_batch', 'gradients', 'loader batches'),
    (Decays, 'after_batch', 'weights', 'loader batches'), (EachBatch, 'after_batch', 'avg', 'loader batches'),
    (RatesEach, 'before_batch', 'rates', 'loader batches'),
    (LastBatch, 'before_step', 'gradients', 'loader batches')])
def test_wrong(cb, event, what, ways):
    for r in check_callback(cb):
        if ways not in ('both', r.way): assert r.exact, r; continue
        assert not r.exact and (r.event, r.what)==(event, what) and r.step <= 2 and event in str(r), r
        assert (r.off < 1e-5)==(what == 'avg')

def test_own_learner():
    made = []
    def learner(bs, cbs):
        set_seed(3)
        items = list(zip(torch.randn(24, 3), torch.randn(24, 1)))
        made.append(bs)
        return Learner(DataLoaders(DataLoader(items, bs=bs), DataLoader(items, bs=8), device='cpu'), nn.Linear(3, 1),
                       loss_func=nn.MSELoss(), opt_func=SGD, cbs=cbs)
    state = torch.get_rng_state()
    assert all(r.exact for r in check_callback(ClipsSteps, learner, bs=8, epochs=1))
    assert made==[8, 2, 8] and torch.get_rng_state().equal(state)
