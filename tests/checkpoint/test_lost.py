"Whatever a run depends on is in its checkpoint, or is named before the first batch"
import os, random, threading
import pytest
import torch.utils.data as torch_data
from fastai.callback.progress import ProgressCallback
from reference import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from quick import quickly


torch.manual_seed(0)
items = [(x, x.sum()[None].tanh()) for x in torch.randn(24, 4)]
class Items:
    def __init__(self, make=lambda i: items[i]): self.make = make
    def __len__(self): return 24
    def __getitem__(self, i): return self.make(i)

# --- what is saved: each of these is half of a Learner's arguments
class CountingLoss(nn.Module):
    def __init__(self): super().__init__(); self.n = 0
    def forward(self, p, y): self.n += 1; return (p-y).square().mean()*(1 + self.n/10)
class CountingObject:
    def __init__(self): self.n,self.seen = 0,[]
    def __call__(self, p, y): self.n += 1; self.seen.append(self.n); return (p-y).square().mean()*(1 + sum(self.seen)/100)
class HasObject(nn.Module):
    def __init__(self): super().__init__(); self.inner = CountingObject()
    def forward(self, p, y): return self.inner(p, y)
class Method:
    def __init__(self): self.n,self.ema = 0,torch.zeros(1)
    def loss(self, p, y):
        self.n += 1; self.ema = .9*self.ema + .1*(p-y).detach().abs().mean()
        return (p-y).square().mean()*(self.n/10 + self.ema.sum())
def counting_closure():
    n = 0
    def loss(p, y):
        nonlocal n
        n += 1
        return (p-y).square().mean()*(1+n/10)
    return loss
def drawing_closure():
    g = torch.Generator().manual_seed(3)
    draw = lambda: torch.rand(1, generator=g)
    return lambda p, y: (p-y).square().mean()*(1+draw())

class Plain(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(4, 1)
    def forward(self, x): return self.lin(x)
class Tensors(Plain):
    def __init__(self): super().__init__(); self.t = torch.zeros(4)
    def forward(self, x):
        if self.training: self.t = .9*self.t + x.detach().mean(0)
        return self.lin(x+self.t)
class InPlace(Plain):
    def __init__(self): super().__init__(); self.t = torch.zeros(4)
    def forward(self, x):
        if self.training: self.t += x.detach().mean(0)
        return self.lin(x+self.t)
class Lists(Plain):
    def __init__(self): super().__init__(); self.seen = []
    def forward(self, x):
        if self.training: self.seen.append(len(self.seen)/10)
        return self.lin(x*sum(self.seen))
class Dicts(Plain):
    def __init__(self): super().__init__(); self.seen = dict(n=0, t=torch.zeros(1))
    def forward(self, x): self.seen['n'] += 1; self.seen['t'] = self.seen['t'] + .1; return self.lin(x*(self.seen['n']/10 + self.seen['t']))
class Arrays(Plain):
    def __init__(self): super().__init__(); self.a = np.zeros(4)
    def forward(self, x): self.a += .1; return self.lin(x+torch.from_numpy(self.a).float())
class Objects(Plain):
    def __init__(self): super().__init__(); self.o = Method()
    def forward(self, x): self.o.n += 1; return self.lin(x*self.o.n/10)
class Draws(Plain):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.noise = lambda x: x+torch.randn(x.shape, generator=g)
    def forward(self, x): return self.lin(self.noise(x) if self.training else x)
class Hooked(Plain):
    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(5)
        self.lin.register_forward_pre_hook(lambda m, x: (x[0]*rng.random(),))
class Bag(nn.Module):
    def __init__(self): super().__init__(); self.emb,self.lin = nn.EmbeddingBag(10, 3, sparse=True),nn.Linear(3, 1)
    def forward(self, x): return self.lin(self.emb((x.abs()*3).long().clamp(max=9)))
class Embeds(Bag):
    def __init__(self): super().__init__(); self.emb = nn.Embedding(10, 3, sparse=True)
    def forward(self, x): return self.lin(self.emb((x.abs()*3).long().clamp(max=9)).mean(1))

def fastai_dl(make=None, **kwargs): return lambda: DataLoader(Items(make() if make else items.__getitem__), bs=4, shuffle=True, **kwargs)
def torch_dl(make=None, **kwargs):
    return lambda: torch_data.DataLoader(Items(make() if make else items.__getitem__), batch_size=4, shuffle=True,
                                         **kwargs)
def drawing_item():
    rng = random.Random(4)
    return lambda i: (items[i][0]*rng.random(), items[i][1])
def counting_item():
    class Counts:
        n = 0
        def __call__(self, i): self.n += 1; return items[i][0]*self.n/10,items[i][1]
    return Counts()

sgd = partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.))
saved = {
    **{f.__name__: dict(loss=f) for f in (CountingLoss, CountingObject, HasObject, counting_closure, drawing_closure)},
    'method': dict(loss=lambda: Method().loss),
    'partial': dict(loss=lambda: partial(Method().loss)),
    'partial_object': dict(loss=lambda: partial(CountingObject())),
    'flat': dict(loss=lambda: BaseLoss(CountingLoss, flatten=False)),
    **{f.__name__: dict(model=f) for f in (Tensors, InPlace, Lists, Dicts, Arrays, Objects, Draws, Hooked)},
    **{f'{dl.__name__} {f.__name__}': dict(dl=dl(f)) for dl in (fastai_dl, torch_dl) for f in (drawing_item, counting_item)},
    'bag': dict(model=Bag, opt=sgd), 'embedding': dict(model=Embeds, opt=sgd),
    'persistent': dict(dl=torch_dl(num_workers=2, persistent_workers=True)), 'workers': dict(dl=torch_dl(num_workers=2))}

class Stop(Callback):
    order,run_valid = 2000,False
    def __init__(self, fit, at): self.fit,self.at,self.fits = fit,at,0
    def before_train(self): self.fits += self.learn.epoch == 0
    def batch_ended(self):
        if self.fits == self.fit and (self.learn.epoch,self.learn.iter) == self.at: raise RuntimeError('stopped')
class Seen(Callback):
    run_valid = False
    def __init__(self): self.batches = []
    def before_batch(self): self.batches.append(self.learn.x.sum().item())

def train(loss=lambda: F.mse_loss, model=Plain, dl=fastai_dl(), opt=SGD, stop=None, save=True, cbs=()):
    CheckpointFolder.in_use.clear()
    set_seed(0)
    learn = Learner(DataLoaders(dl(), fastai_dl()(), device=devices.names[0]), model(), loss(), opt_func=opt, path='.',
                    cbs=[Seen(), *cbs, *([TrainingCheckpoint(every_steps=1)] if save else []),
                         *([Stop(*stop)] if stop else [])])
    learn.remove_cb(ProgressCallback)
    with learn.no_logging():
        def fits(): learn.fit(3, .05); learn.fit(2, .05)
        if stop:
            with pytest.raises(RuntimeError, match='stopped'): fits()
        else: fits()
    return learn

@pytest.mark.parametrize('case', quickly(['CountingLoss','Hooked','fastai_dl counting_item'], saved))
@pytest.mark.filterwarnings('ignore:Since the checkpoint, the code of the run has changed. `stop.')
def test_saved(case):
    "Stopped in the second epoch, in the third, in the second fit: it ends as the run that nobody stopped"
    case = saved[case]
    whole = train(**case, save=False)
    for stop in (1, (1, 1)),(1, (2, 0)),(2, (0, 3)): train(**case, stop=stop)
    again = train(**case)
    assert again.seen.batches == whole.seen.batches
    for a,b in zip(again.model.parameters(), whole.model.parameters()): assert torch.equal(a, b)

# --- what is named
def noise(x): return x[0]+torch.randn(4),x[1]
def calls(x): return noise(x)
class Noisy:
    def __len__(self): return 24
    def __getitem__(self, i): return items[i][0]*random.random(),items[i][1]
class Reads(Noisy):
    "Opens its file when it is asked: no state"
    def __init__(self): self.file = None
    def __getitem__(self, i):
        if self.file is None: self.file = open(os.devnull)
        return items[i]
class Queue(Plain):
    def __init__(self): super().__init__(); self.q = iter(range(10**6))
    def forward(self, x): self.q = iter([*self.q][:100]); return self.lin(x)
class Tokens(Plain):
    "Holds what cannot be saved, and does not change it"
    def __init__(self):
        super().__init__()
        self.file,self.lock,self.names = open(os.devnull),threading.Lock(),{i: str(i) for i in range(100)}

def report(ds=items, model=Plain, **kwargs):
    learn = Learner(DataLoaders(DataLoader(ds, bs=4, **kwargs), fastai_dl()(), device='cpu'), model(), F.mse_loss,
                    opt_func=SGD, path='.', cbs=TrainingCheckpoint())
    learn.create_opt()
    learn.training_checkpoint.given.record(learn, learn.cbs)
    return learn.training_checkpoint.report()

def test_named():
    for kwargs in (dict(after_item=noise), dict(after_item=calls), dict(ds=Noisy()),
                   dict(after_item=lambda x: (x[0]*np.random.rand(), x[1])), dict(after_item=Pipeline([noise]))):
        assert [*report(**kwargs, num_workers=2).values()] == [
            'draws random numbers in worker processes, which cannot be saved; with num_workers=0 they can'], kwargs
        assert report(**kwargs) == {}
    assert (report(model=Queue) == {'model..q': 'a list_iterator cannot be saved'}
            or report(model=Queue) == {'model..q': 'a range_iterator cannot be saved'})

def test_no_alarm():
    for kwargs in (dict(), dict(num_workers=2), dict(ds=Reads(), num_workers=2), dict(ds=Reads()), dict(model=Tokens),
                   dict(after_item=lambda x: (torch.tensor(x[0]), x[1]), num_workers=2)):
        assert report(**kwargs) == {}, kwargs
