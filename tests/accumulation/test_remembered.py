"What a model keeps from call to call, sets in its first one, or scales by what stands in a batch: told once, without a call of the model"
from collections import deque
import pytest
from reference import *
from reference import GradientAccumulation    # ours
from fastaccum.core.warnings import FastaccumWarning

torch.manual_seed(0)
data = Data(torch.randn(64, 6), torch.arange(64)%4)
tokens = Data(torch.arange(64)%7, torch.arange(64)%4)
ways = {'loader batches': (8, dict(accum_bs=16)), 'split': (16, dict(micro_batch_size=3))}

class Net(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x):
        if self.training: self.keep(x.detach())
        return self.net(x)

# --- what remembers
class Counts(Net):
    calls = 0
    def keep(self, x): self.calls += 1
class Anneals(Net):
    def __init__(self): super().__init__(); self.temperature = 1.
    def keep(self, x): self.temperature -= .01
class Fifo(Net):
    def __init__(self): super().__init__(); self.bank = torch.zeros(40, 6)
    def keep(self, x): self.bank = torch.cat((self.bank, x))[-40:]
class Grows(Net):
    "The newest first"
    def __init__(self): super().__init__(); self.bank = torch.zeros(0, 6)
    def keep(self, x): self.bank = torch.cat((x, self.bank))
class Writes(Net):
    def __init__(self): super().__init__(); self.bank,self.at = torch.zeros(40, 6),0
    def keep(self, x): self.bank[:len(x)] = x
class Lists(Net):
    def __init__(self): super().__init__(); self.bank = []
    def keep(self, x): self.bank.append(x.mean(0))
class Deques(Lists):
    def __init__(self): super().__init__(); self.bank = deque(maxlen=20)
class Dicts(Lists):
    def __init__(self): super().__init__(); self.bank = {}
    def keep(self, x): self.bank[len(self.bank)] = x

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('model', (Counts, Anneals, Fifo, Grows, Writes, Lists, Deques, Dicts))
def test_remembers(model, way):
    k = next(k for k in ('calls', 'temperature', 'bank') if hasattr(model(), k))
    bs,acc = ways[way]
    learn = learner(data, bs, GradientAccumulation(**acc), model=model(), loss_func=CrossEntropyLossFlat())
    with pytest.warns(FastaccumWarning, match=fr'remembers its calls in `{k}`.*`after_step`') as told: learn.fit(2)
    assert len(told) == 1
    learner(data, 16, GradientAccumulation(16), model=model(), loss_func=CrossEntropyLossFlat()).fit(1)      # one call a step

# --- what does not
class Leaves(Net):
    "For others: features, an average, the number of items; and counts items"
    def __init__(self): super().__init__(); self.items = 0
    def keep(self, x):
        self.features,self.load,self.n,self.all = x,x.mean(0),len(x),[x, x.mean(0)]
        self.items += len(x)
        self.is_called = True
class Caches(Net):
    "Tables that are made anew, and a size that grows once"
    def __init__(self): super().__init__(); self.most = 0
    def keep(self, x):
        self.mask,self.most = torch.ones(20, 6),max(self.most, 20)
        self.table = torch.arange(20)
class Collects(Net):
    "For a callback, which takes it away"
    def __init__(self): super().__init__(); self.features = []
    def keep(self, x): self.features.append(x)
class Takes(Callback):
    def after_batch(self):
        if self.training: self.learn.model.features.clear()

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('model,cb', [(Leaves, None), (Caches, None), (Collects, Takes)])
def test_keeps_for_others(model, cb, way):
    bs,acc = ways[way]
    learner(data, bs, GradientAccumulation(**acc), *([cb()] if cb else []), model=model(), loss_func=CrossEntropyLossFlat()).fit(2)

def test_nothing_is_held():
    "What a model keeps lives no longer than without the look"
    import weakref
    class Watched(Leaves):
        refs = []
        def keep(self, x):
            assert all(r() is None for r in self.refs[:-1])
            super().keep(x + 1)
            self.refs.append(weakref.ref(self.features))
    learner(data, 8, GradientAccumulation(16), model=Watched(), loss_func=CrossEntropyLossFlat()).fit(1)
    assert len(Watched.refs) == 8

# --- the first call
class ActNorm(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.bias,self.flag = nn.Parameter(torch.zeros(6)),flag
        if flag == 'buffer': self.register_buffer('is_set', torch.tensor(False))
        else: self.is_set = False
    def forward(self, x):
        if self.training and not self.is_set:
            self.bias.data.copy_(-x.mean(0))
            self.is_set = torch.tensor(True) if self.flag == 'buffer' else True
        return x + self.bias
class MaxNorm(nn.Linear):
    "Keeps its weights small, at each call"
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, .3)
        return super().forward(x)

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('flag', ('number', 'buffer'))
def test_first_call(flag, way):
    bs,acc = ways[way]
    model = nn.Sequential(ActNorm(flag), mlp())
    learn = learner(data, bs, GradientAccumulation(**acc), model=model, loss_func=CrossEntropyLossFlat())
    n = 8 if bs == 8 else 3
    with pytest.warns(FastaccumWarning, match=f'sets the weights of 0 from the items of its first call, {n} here') as told: learn.fit(2)
    assert len(told) == 1
    learner(data, 16, GradientAccumulation(16), model=model, loss_func=CrossEntropyLossFlat()).fit(1)
    model(data.x)
    learner(data, bs, GradientAccumulation(**acc), model=model, loss_func=CrossEntropyLossFlat()).fit(1)

def test_weights_that_stay_small():
    learner(data, 8, GradientAccumulation(16), model=nn.Sequential(MaxNorm(6, 8), nn.Linear(8, 4)), loss_func=CrossEntropyLossFlat()).fit(1)

# --- embeddings
@pytest.mark.parametrize('frozen', (False, True))
@pytest.mark.parametrize('way', ways)
def test_scaled_embeddings(way, frozen):
    bs,acc = ways[way]
    def train(bs, **acc):
        model = nn.Sequential(nn.Embedding(7, 6, scale_grad_by_freq=True).requires_grad_(not frozen), mlp())
        learner(tokens, bs, GradientAccumulation(**acc), model=model, loss_func=CrossEntropyLossFlat()).fit(2)
    train(16, accum_bs=16)
    if frozen: return train(bs, **acc)
    with pytest.warns(FastaccumWarning, match='embedding 0 has scale_grad_by_freq=True') as told: train(bs, **acc)
    assert len(told) == 1
