"What accumulation costs: host syncs, multiplications, memory"
import pytest
from reference import *
from bench.measure import OpCounter, SyncCounter
from fastaccum.core.memory import StorageFollower
from fastai.callback.mixup import MixUp

def make(n_steps, k, *cbs, target=None, loss_func=None, bs=8, **acc):
    "A Learner whose fit has `n_steps` steps of `k` loader batches"
    torch.manual_seed(0)
    n = n_steps*k*bs
    y = torch.randn(n, 4) if target is None else target(n)
    data = Data(torch.randn(n, 6), y)
    return learner(data, bs, GradientAccumulation(k*bs, **acc), *cbs, valid=Data(data.x[:8], y[:8]), loss_func=loss_func)

def ignored(n): return torch.where(torch.arange(n)%3==0, -100, torch.arange(n)%4)
def classes(n): return torch.arange(n)%4

cases = {'host weights': {}, 'device weights': dict(target=ignored, loss_func=CrossEntropyLossFlat()),
         'class weights': dict(target=ignored, loss_func=nn.CrossEntropyLoss(weight=torch.ones(4))),
         'label smoothing': dict(target=ignored, loss_func=LabelSmoothingCrossEntropyFlat()),
         'own weight': dict(weight=lambda learn: learn.y.abs().sum()),
         'sum': dict(loss_func=nn.MSELoss(reduction='sum')), 'not normalized': dict(normalize=False),
         'split': dict(micro_batch_size=3),
         'split, device weights': dict(micro_batch_size=3, target=ignored, loss_func=CrossEntropyLossFlat()),
         'MixUp': dict(cb=MixUp, target=classes, loss_func=CrossEntropyLossFlat()), 'GradientClip': dict(cb=GradientClip),
         'carry': dict(remainder='carry')}

def counted(counter, n_steps, k, cb=None, **kwargs):
    learn = make(n_steps, k, *([cb()] if cb else []), **kwargs)
    with counter: learn.fit(1, .01)
    assert len(learn.recorder.losses)==n_steps
    return counter

def more(a, b): return {k: v for k,v in (b-a).items() if v}

@pytest.mark.filterwarnings('ignore:LabelSmoothingCrossEntropy with class weights or ignored targets is the sum of two means')
@pytest.mark.parametrize('name', cases)
def test_syncs(name):
    "None for a loader batch more; at most one for a step more"
    def sites(n_steps, k): return counted(SyncCounter(), n_steps, k, **cases[name]).sites
    base = sites(2, 4)
    assert more(base, sites(2, 8))=={}
    per_step = more(base, sites(6, 4))
    assert sum(per_step.values()) <= 4, per_step

def test_questions_to_the_loss(monkeypatch):
    "A module is slow to say what it has not: it is not asked in each loader batch which loss it is of outputs"
    def asked(k):
        learn,names,plain = make(2, k, loss_func=nn.MSELoss()),[],nn.Module.__getattr__
        with monkeypatch.context() as m:
            m.setattr(nn.Module, '__getattr__', lambda self, name: names.append((self, name)) or plain(self, name))
            learn.fit(1, .01)
        return [name for o,name in names if o is learn.loss_func].count('loss_of_outputs')
    assert 0 < asked(4)==asked(8)

def test_syncs_of_schedules():
    "Neither sizes nor learning rates ask the device (fastai computes them with tensors on the host)"
    def sites(n_iter):
        learn = make(1, n_iter)
        learn.remove_cb(GradientAccumulation)
        learn.add_cb(GradientAccumulationSchedule(16, 8*n_iter, finish=1.))
        with SyncCounter() as syncs: learn.fit_one_cycle(2, .01)
        return sum(v for k,v in syncs.sites.items() if 'callback/schedule.py' not in k),len(learn.recorder.losses)
    (a,n_steps),(b,more_steps) = sites(8),sites(16)
    assert more_steps > n_steps and b-a <= more_steps-n_steps

def test_syncs_are_counted():
    "fastai's callback waits for the device in each micro-batch"
    def sites(n_steps, k):
        learn = make(n_steps, k)
        learn.remove_cb(GradientAccumulation)
        with SyncCounter() as syncs: learn.fit(1, .01, cbs=FastaiAccumulation(k*8))
        return syncs.sites
    assert sum(more(sites(2, 4), sites(2, 8)).values()) >= 8

@pytest.mark.filterwarnings('ignore:LabelSmoothingCrossEntropy with class weights or ignored targets is the sum of two means')
@pytest.mark.parametrize('name', [n for n in cases if n!='GradientClip'])
def test_multiplications(name):
    "Gradients are multiplied once a step; not at all if host weights add up"
    calls = counted(OpCounter(), 3, 4, **cases[name]).calls
    on_device = name in ('device weights', 'class weights', 'own weight', 'split, device weights')
    assert calls['_foreach_mul_']==(3 if on_device else 0)
    assert calls['_foreach_mul']==0

def test_multiplications_of_ragged_ends():
    learn = learner(Data(torch.randn(61, 6), torch.randn(61, 4)), 8, GradientAccumulation(32))
    with OpCounter() as ops: learn.fit(2)
    assert ops.calls['_foreach_mul_']==2      # the steps of 29 items

@pytest.mark.parametrize('cancelled', [[], [1, 5]])
def test_multiplications_of_whole_batches(cancelled):
    """A loader batch that is an accumulated batch needs none, whatever its weights are. One that lacks micro-batches
    goes on with the next loader batch"""
    y = ignored(48)
    learn = learner(Data(torch.randn(48, 6), y), 16, GradientAccumulation(micro_batch_size=3),
                    On('before_backward', throw(CancelBackwardException()), cancelled),
                    loss_func=CrossEntropyLossFlat())
    with OpCounter() as ops: learn.fit(1)
    assert (ops.calls['_foreach_mul_'], len(learn.recorder.losses))==((1, 2) if cancelled else (0, 3))

# --- memory

def wide(): return nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 400), nn.Tanh(), nn.Linear(400, 4))
def sgd(ps): return SGD([list(ps)], lr=.01, mom=.9)

def peak_of_hand_written(data, bs, k, model, loss_func):
    opt,n = sgd(model.parameters()),len(data)
    with StorageFollower() as mem:
        for i in range(0, n, bs):
            x,y = data.batch(range(i, min(n, i+bs)))
            (loss_func(model(x), y)/k).backward()
            if (i//bs+1)%k==0: opt.step(); opt.zero_grad()
    return mem.peak

def peak_of_learner(data, bs, model, *cbs, loss_func):
    learn = learner(data, bs, *cbs, model=model, loss_func=loss_func, valid=Data(data.x[:2], data.y[0][:2]))
    with StorageFollower() as mem: learn.fit(1, .01)
    return mem.peak

@pytest.mark.parametrize('name', ['host weights', 'device weights', 'class weights', 'split', 'GradientClip'])
def test_memory(name):
    "Not more than a loop written by hand with the same micro-batches; no buffer of the parameters' size"
    kwargs = {'target': lambda n: torch.randn(n, 4), 'loss_func': MSELossFlat(), **cases[name]}
    torch.manual_seed(0)
    data,model = Data(torch.randn(256, 6), kwargs['target'](256)),wide()
    bs = 16 if name=='split' else 8
    acc = GradientAccumulation(64, micro_batch_size=8 if name=='split' else None)
    n_params = sum(p.nbytes for p in model.parameters())
    hand = peak_of_hand_written(data, 8, 8, wide(), kwargs['loss_func'])
    ours = peak_of_learner(data, bs, model, acc, *([kwargs['cb']()] if 'cb' in kwargs else []), loss_func=kwargs['loss_func'])
    whole = peak_of_learner(data, 64, model, loss_func=kwargs['loss_func'])
    assert ours < hand + .05*n_params and whole > hand + .2*n_params

def by_weights(p, y):
    w = 1. + (y > 0).float()
    return ((p-y).square()*w).sum()/w.sum()

def dice(p, y): return 1 - (p*y).sum()/(p.square().sum() + y.square().sum())

@pytest.mark.filterwarnings('ignore:dice is not a mean over items')
@pytest.mark.parametrize('loss,check', [(by_weights, True), (by_weights, 'always'), (dice, True)])
def test_memory_of_a_measured_loss(loss, check):
    "Inputs, here larger than all else, are not kept: neither of loader batches that went by, nor of reference items"
    class Wide:
        n_inputs = 2**14
        def __init__(self, n): self.n = n
        def __len__(self): return self.n
        def __getitem__(self, i): return torch.full((self.n_inputs,), i*1e-4),torch.full((4,), (-1.)**i)
    def peak(k, loss=loss):
        dls = DataLoaders(*[DataLoader(Wide(n), bs=8) for n in (2*8*k, 1)])
        acc = GradientAccumulation(8*k, check_loss=check)
        learn = Learner(dls, nn.Linear(Wide.n_inputs, 4), loss_func=loss, opt_func=SGD, lr=1e-6, cbs=acc)
        with StorageFollower() as mem, learn.no_bar(), learn.no_logging(): learn.fit(2)
        return mem.peak/(8*Wide.n_inputs*4)                    # in loader batches
    known = peak(8, nn.MSELoss())
    assert peak(8) < known+.1 and peak(16) < known+.1
