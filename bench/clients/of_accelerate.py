"Accelerate: its gradient-sync tests, and the examples of `examples/by_feature`"
from functools import partial
import torch, torch.nn.functional as F
from fastai.basics import Callback
from fastai.callback.tracker import EarlyStoppingCallback
from fastai.metrics import accuracy
from fastai.optimizer import OptimWrapper
from fastaccum.accumulation.callback import GradientAccumulation
from fastaccum.core.accumulator import GradientAccumulator
from fastaccum.parallel import DataParallel, LocalSGD
from ..comm import CommCounter
from . import BS, flat
from .claims import (
    CLOSE, Claim, Conformance, N, OnlyFits, Steps, alike, batches, both, by_hand, distance, learner, measured, net,
    next_words, of_words, same, tensor, values, words, x, y)

READ = dict(name='Accelerate', version='1.15.0.dev0', commit='16cb6eb80dd9aa8b4df1a63ef57863e455d53b83', date='2026-07-24', folder=None)
labels = ('Accelerate',)
sync = 'src/accelerate/test_utils/scripts/test_sync.py: '
example = 'examples/by_feature/{}.py'.format

def words_of(moved, big): # What a loop with Accelerate gives
    off = distance(dict(moved=moved), dict(moved=big))
    return 'exact' if off < CLOSE else f'{off:.0%} off'

# -- A schedule that moves at each step
adamw = partial(torch.optim.AdamW, lr=.01)
def root(i): return i**.65
def scheduled(bs, cbs, model=net):
    rates = []
    def move(learn):
        learn.opt.set_hyper('lr', .01*root(len(rates)+2))
        rates.append(learn.opt.hypers[0]['lr'])
    learn = learner(bs, [*cbs, Steps(move)], opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), model=model, x=x[:32], y=y[:32])
    def fit(l): l.fit(2, .01*root(1))
    return values(learn, fit, moves=lambda l: rates)

def loop(n_acc, model, train): # The loop of the documentation, in plain Accelerate
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)
    acc = Accelerator(cpu=True, gradient_accumulation_steps=n_acc)
    opt = adamw(model.parameters())
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: root(i+1))
    start = flat(model)
    model,opt,sched = acc.prepare(model, opt, sched)
    for _ in range(2):
        loader = acc.prepare(torch.utils.data.DataLoader([*zip(x[:32], y[:32])], train))
        for xb,yb in loader:
            with acc.accumulate(model):
                acc.backward(F.cross_entropy(model(xb), yb))
                opt.step()
                sched.step()
                opt.zero_grad()
    return flat(model)-start

def their_schedule(): return 'Accelerate: ' + words_of(loop(4, net(), 4), scheduled(BS, [])['moved'])

# -- Memory runs out
def fitting(bs, cbs): return scheduled(bs, cbs, lambda: OnlyFits(net(), 5) if cbs else net())
def their_size():
    "The example: train again with smaller batches until they fit, and accumulate as many as fit into the size that was asked for"
    from accelerate.utils import find_executable_batch_size
    tried = []
    @find_executable_batch_size(starting_batch_size=BS)
    def train(batch_size):
        tried.append(batch_size)
        loop(BS//batch_size, OnlyFits(net(), 5), batch_size)
    train()
    return f'Accelerate: batches of {tried[-1]}, {BS//tried[-1]} of them a step, are steps of {tried[-1]*(BS//tried[-1])} items, not {BS}'

# -- Words
def counted_words():
    "The loop of the example, which counts the words of a step itself"
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)
    acc,model = Accelerator(cpu=True, gradient_accumulation_steps=4),net()
    start,opt = flat(model),torch.optim.SGD(model.parameters(), lr=.1)
    model,opt = acc.prepare(model, opt)
    parts = batches(4, 1, words, next_words)
    for group in 2*[parts[:4], parts[4:8], parts[8:]]:
        n = sum((yb != -100).sum() for _,yb in group)
        for xb,yb in group: acc.backward(F.cross_entropy(model(xb).flatten(0, 1), yb.flatten(), reduction='sum')/n*4)
        opt.step()
        opt.zero_grad()
    return flat(model)-start
def their_words():
    return (f"{measured(labels, 'tokens')}; the example's loop, which counts the tokens itself: "
            f"{words_of(counted_words(), of_words(BS, [])['moved'])}")

# -- Loops of one's own
def forwards_first():
    "Forward passes of all micro-batches, then all backward passes"
    model = net()
    acc,opt,start = GradientAccumulator(model.parameters(), N),torch.optim.SGD(model.parameters(), lr=.1),flat(model)
    for _ in range(3):
        for loss in [acc.add(F.cross_entropy(model(xb), yb), len(xb)) for xb,yb in batches(5, 1)]: loss.backward()
        acc.finish()
        opt.step()
        opt.zero_grad()
    return dict(moved=flat(model)-start)

# -- Two ranks
class Messages(Callback):
    "How many messages each loader batch sends"
    order,run_valid = 70,False
    def before_fit(self): self.n = []
    def before_train(self): self.mode = CommCounter().__enter__()
    def before_batch(self): self.before = self.mode.calls
    def after_batch(self): self.n.append(self.mode.calls-self.before)
    def after_train(self): self.mode.__exit__(None, None, None)

def silent():
    "Messages of the loader batches that do not close a step; whether those that do send some, and all of them as many"
    learn = learner(4, [GradientAccumulation(BS), DataParallel(), Messages()])
    res,closing,silent = values(learn),set(),0
    for i,n in enumerate(learn.messages.n):
        if i%11 in (3, 7, 10): closing.add(n)
        else: silent += n
    return {**res, 'messages': tensor([silent, len(closing) == 1 and min(closing) > 0])}

def metrics(*cbs, bs=BS):
    learn = learner(bs, cbs, metrics=accuracy)
    learn.dls[1].n = 15                                # one rank has an item more than the other
    return values(learn, valid=lambda l: [*l.validate()])
def joint_metrics(): return metrics(GradientAccumulation(BS), DataParallel(), bs=4)

def local():
    return dict(moved=values(learner(4, [GradientAccumulation(BS), LocalSGD(2)], x=x[:32], y=y[:32]))['moved'])
def local_by_hand():
    "Each rank steps on its halves of four loader batches; averages after each second step, and at the end of an epoch"
    models = net(),net()
    start,opts = flat(models[0]),[torch.optim.SGD(m.parameters(), lr=.1) for m in models]
    for _ in range(2):
        for step in range(2):
            for rank,(m,opt) in enumerate(zip(models, opts)):
                at = [BS*step + 4*i + 2*rank + j for i in range(4) for j in range(2)]
                opt.zero_grad()
                F.cross_entropy(m(x[at]), y[at]).backward()
                opt.step()
        with torch.no_grad():
            for ps in zip(*(m.parameters() for m in models)):
                mean = sum(ps)/2
                for p in ps: p.copy_(mean)
    return dict(moved=flat(models[0])-start)

# -- Other callbacks
def stopped(bs, cbs):
    learn = learner(bs, [*cbs, EarlyStoppingCallback(min_delta=.02, patience=1)])
    return values(learn, lambda l: l.fit(30, .1), epochs=lambda l: len(l.recorder.values))

def tracked(bs, cbs): return values(learner(bs, cbs), table=lambda l: [v for row in l.recorder.values for v in row])

def folds(bs, cbs):
    "Four folds, each with a Learner of its own, and the mean of what they predict"
    res,preds = {},[]
    for i in range(4):
        train = torch.arange(N)%4 != i
        learn = learner(bs, [type(cb)(cb.accum_bs, micro_batch_size=cb.micro_batch_size) for cb in cbs], x=x[train], y=y[train])
        res |= {f'{k} {i}': v for k,v in values(learn).items()}
        with learn.no_bar(): preds.append(learn.get_preds(dl=learn.dls.valid)[0])
    return {**res, 'mean': sum(preds)/4}

def profiled(bs, cbs):
    "How often a profiler sees the optimizer step"
    learn = learner(bs, cbs, opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof: res = values(learn)
    return dict(res, steps=tensor(sum(e.count for e in prof.key_averages() if e.key.startswith('Optimizer.step'))))

def cases():
    claim = partial(Conformance, peers=labels)
    return [
        claim('Accumulated loader batches give the gradient of the whole batch', sync+'test_gradient_accumulation', 'any size'),
        claim('So do the fewer loader batches that end an epoch', sync+'test_gradient_accumulation', 'two epochs'),
        claim('The last loader batch has fewer items', example('gradient_accumulation'), 'ragged end'),
        same('The schedule moves once a step (AdamW, LambdaLR)',
             sync+'test_gradient_accumulation_with_opt_and_scheduler', scheduled, theirs=their_schedule),
        Claim('No message before the last micro-batch, and then the gradient of one process', sync+'test_distributed_sync',
              lambda: alike({**values(learner(BS)), 'messages': tensor([0, 1])}), {'two ranks': lambda: both(silent)}),
        Claim('Several forward passes, then their backward passes', sync+'test_distributed_sync_multiple_fwd',
              lambda: dict(moved=by_hand([(x, y)]*3)), {'own loop': forwards_first}),
        claim('A loop over another loader inside that of training changes nothing', sync+'test_dataloader_break', 'validation'),
        same('Each token counts alike in batches of different lengths',
             example('gradient_accumulation_for_autoregressive_models'), of_words, theirs=their_words),
        same('If memory runs out, smaller batches are accumulated to the size that was asked for',
             example('automatic_gradient_accumulation'), fitting,
             micro='auto', small=None, theirs=their_size),
        same('Training stops early in the same epoch', example('early_stopping'), stopped),
        same('A tracker gets the losses of the big batch', example('tracking'), tracked),
        claim('A run that is stopped in the middle of an epoch goes on with the items that are left', example('checkpointing'), 'resume'),
        same('Cross validation: each fold, and the mean of their predictions', example('cross_validation'), folds),
        same('A profiler sees the steps of the big batch', example('profiler'), profiled),
        Claim('Metrics over all ranks count each item once', example('multi_process_metrics'), lambda: alike(metrics()),
              {'two ranks': lambda: both(joint_metrics)}),
        Claim('Local SGD: ranks step on accumulated batches of their own, and average their weights', example('local_sgd'),
              lambda: alike(local_by_hand()), {'two ranks': lambda: both(local)})]
