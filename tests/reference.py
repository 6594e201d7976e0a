"The reference of the tests: the same items as one batch, in loops written by hand; and Learners whose steps are written down"
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
import torch.nn as nn
from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.training import GradientAccumulation as FastaiAccumulation
from fastaccum.accumulation.callback import GradientAccumulation, GradientAccumulationSchedule
from fastaccum.accumulation.remainder import policies
from fastaccum.core.accumulator import GradientAccumulator, loss_weight
from fastaccum.loop.batch_loop import *
import devices
from devices import host

# --- vectors
def flat(tensors): return torch.cat([host(t).to_dense().flatten() for t in tensors])
def weights(model): return flat(model.parameters())
def grads(model): return flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())
def rel_err(a, b):
    "Norm of `a-b` relative to the norm of `b`"
    a,b = host(a).double(),host(b).double()
    return float((a-b).norm()/(b.norm() or 1))

def double(o):
    "A copy of a model, loss or tensor in float64, on the host"
    if isinstance(o, Tensor): return host(o).double() if o.is_floating_point() else host(o)
    if isinstance(o, (tuple,list)): return tuple(map(double, o))
    if isinstance(o, dict): return {k: double(v) for k,v in o.items()}
    if isinstance(o, partial): return partial(o.func, **double(o.keywords))
    if isinstance(getattr(o, 'func', None), nn.Module):              # fastai's `BaseLoss`, which computes in float32 anyway
        o = copy(o)
        o.func = devices.to_host(o.func)
    if not isinstance(o, nn.Module): return o                        # a function
    return devices.to_host(o).double()

# --- the reference
def big_batch(model, w, loss_func, x, y):
    "Gradient and loss of one batch at the weights `w`, in float64"
    model = double(model)
    nn.utils.vector_to_parameters(w.double(), model.parameters())
    model.zero_grad()
    loss = double(loss_func)(model(double(x)), *double(y))
    if loss.isnan(): return torch.zeros_like(w), 0.  # nothing to learn from
    loss.backward()
    return grads(model),loss.item()

def train(model, loss_func, opt_func, batches, lr, clip=None):
    "Weights after a step on each of `batches`; the loop that everybody has written"
    opt = opt_func(list(model.parameters()), lr=lr)
    for x,*y in batches:
        loss_func(model(x), *y).backward()
        if clip is not None: nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return weights(model)

_before = 'before_batch','after_pred','after_loss','before_backward'
_no_step = *_before,'after_backward','before_step'
remainders = [*policies]      # all of them: a test that goes through them holds for one that is added, too

def fate(remainder, n, accum_bs):
    "What becomes of `n` items left at the end of an epoch: of the three that stand here by name, and of another policy what it says"
    return remainder if remainder in ('step','drop','carry') else policies[remainder](n, accum_bs).name.lower()

def accumulated(sizes, accum_bs, remainder='step', n_epoch=1, stop=None):
    """The loader batches `(epoch, i)` of each step. `accum_bs` may be a function of the first of them. `stop`, an
    event, an exception and the loader batches at which a callback raises it: before `backward` the loader batch does
    not count; before the step the accumulated batch goes on"""
    event,ex,at = stop or (None,None,())
    steps,taken = [],[]
    def n_items(): return sum(sizes[i] for _,i in taken)
    def target(): return accum_bs(*taken[0]) if callable(accum_bs) else accum_bs
    def full(): return n_items() >= target()
    def becomes(): return fate(remainder, n_items(), target()) if taken else None
    for epoch in range(n_epoch):
        for i in range(len(sizes)):
            hit = (epoch,i) in at
            if not (hit and event in _before): taken.append((epoch,i))
            closes = bool(taken) and (full() or (i==len(sizes)-1 and becomes()=='step'))
            if event in ('before_step','after_step'): hit = hit and closes
            if closes and not (hit and event in _no_step and ex not in (CancelBackwardException, CancelStepException)):
                if not (hit and ex is CancelStepException): steps.append(taken)
                taken = []
            if hit and ex in (CancelTrainException, CancelEpochException): break
            if hit and ex not in (CancelBatchException, CancelBackwardException, CancelStepException): return steps
        if becomes()=='step' or (becomes()=='drop' and full()): steps.append(taken); taken = []
        if becomes()=='drop': taken = []
    return steps

# --- Learners
class Spy(Callback):
    "Writes down what the optimizer gets: `steps`, each with the weights before it, the gradient, and what went through `backward` for it"
    order,run_valid = 12,False
    def before_fit(self):
        self.steps,self.pending,opt = [],[],self.learn.opt
        if opt is not None and 'step' not in vars(opt): opt.step = partial(self._step, opt.step)

    def after_pred(self):
        micro = (self.learn.epoch,self.learn.iter),self.learn.xb,self.learn.yb
        self.learn.pred.register_hook(lambda g: self.pending.append(micro))

    def _step(self, step):
        batches,xs,ys = zip(*self.pending)
        self.steps.append(SimpleNamespace(weights=weights(self.learn.model), grad=grads(self.learn.model),
                                          lr=self.learn.opt.hypers[-1]['lr'],
                                          batches=list(dict.fromkeys(batches)), xs=xs, ys=ys, n_items=sum(map(find_bs, xs))))
        self.pending = []
        step()

class Stop(Callback):
    "Raises `ex` at `event` of the loader batches `at` (epoch, i), in training, and not again if `once`"
    run_valid = False
    def __init__(self, event, ex, at, order=20, once=True):
        self.order,self.ex,self.at,self.once = order,ex,set(at),once
        setattr(self, event, self._raise)
    def _raise(self):
        batch = self.learn.epoch,self.learn.iter
        if batch not in self.at: return
        if self.once: self.at.remove(batch)
        raise self.ex('stopped')

class Data:
    "Items in their order. `y` is a tuple of targets; `x` may be a dict"
    def __init__(self, x, *y): self.x,self.y = x,y
    def __len__(self): return len(first(self.x.values()) if isinstance(self.x, dict) else self.x)
    def __getitem__(self, i): return (self._pick(self.x, i), *[t[i] for t in self.y])
    def _pick(self, x, i): return {k: v[i] for k,v in x.items()} if isinstance(x, dict) else x[i]
    def sizes(self, bs): return [min(bs, len(self)-i) for i in range(0, len(self), bs)]
    def batch(self, ids): return self[torch.as_tensor(ids)]
    def steps(self, bs, steps):
        "The items of the loader batches of each step"
        return [self.batch([j for _,i in s for j in range(i*bs, min(len(self), (i+1)*bs))]) for s in steps]

def no_gradients(learn): return not grads(learn.model).any()

def mlp(n_in=6, n_out=4, n_hid=8):
    return nn.Sequential(nn.Linear(n_in, n_hid), nn.Tanh(), nn.Linear(n_hid, n_out))

def learner(data, bs, *cbs, model=None, loss_func=None, opt_func=partial(SGD, mom=.9), dl_type=DataLoader, valid=None, seed=0, **kwargs):
    "A quiet Learner on `data` in its order, without progress bar. The same arguments give the same weights"
    set_seed(seed)
    model = devices.now.put(mlp() if model is None else deepcopy(model))
    dls = DataLoaders(dl_type(data, batch_size=bs), DataLoader(ifnone(valid, data), bs=64), device=devices.now.device)
    dls.n_inp,dls._device = 1,devices.now.device  # fastai forgets the device if PyTorch's loaders cannot go there
    learn = Learner(dls, model, loss_func=devices.now.put(loss_func or MSELossFlat()), opt_func=opt_func, cbs=cbs, **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def check(learn, data, bs, steps, tol=1e-6):
    "Every step had the gradient of its loader batches as one batch, and every row their loss. Returns the largest error"
    spy,rec,worst = learn.spy,learn.recorder,0.
    assert len(spy.steps)==len(steps), f'{len(spy.steps)} steps instead of {len(steps)}: {[s.batches for s in spy.steps]}, not {steps}'
    smooth = 0.
    for k,(s,(x,*y)) in enumerate(zip(spy.steps, data.steps(bs, steps))):
        g,loss = big_batch(learn.model, s.weights, learn.loss_func, x, y)
        err = rel_err(s.grad, g)
        assert err < tol, f'step {k} of {len(steps)}: its gradient is {err:.1e} off that of batches {steps[k]}'
        worst,smooth = max(worst, err),.98*smooth+.02*loss
        if len(rec.losses)==len(steps): assert abs(rec.losses[k]-smooth/(1-.98**(k+1))) < 1e-5*max(1, abs(loss)), f'row {k}: a wrong loss'
    return worst

def check_own(learn, merge=partial(torch.cat, dim=0), tol=1e-6):
    "Every step had the gradient of what went through `backward` for it, as one batch"
    for s in learn.spy.steps:
        x,y = merge([xb[0] for xb in s.xs]),[merge(ts) for ts in zip(*s.ys)]
        err = rel_err(s.grad, big_batch(learn.model, s.weights, learn.loss_func, x, y)[0])
        assert err < tol, f'the gradient of a step with {s.batches} is {err:.1e} off'

class On(Callback):
    "Calls `f(learn)` at `event` in training (`training=None`: always); only the times that are in `calls`, counted from 0"
    def __init__(self, event, f, calls=None, order=20, training=True):
        self.order,self.f,self.calls,self.at,self.n = order,f,calls,training,-1
        setattr(self, event, self._call)
    def _call(self):
        if self.at not in (None, self.learn.training): return
        self.n += 1
        if self.calls is None or self.n in self.calls: self.f(self.learn)

def throw(ex):
    def f(*_): raise ex
    return f

__all__ = [n for n in globals() if not n.startswith(('_', 'test'))]  # fastcore's `test_eq` and the like are no tests
