"Numbers without dimensions that the model returns or keeps, and that are a part of the loss: exact, or told without `coupled`"
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import Callback
from fastaccum.all import GradientAccumulation
import test_check
from test_check import exact_or_told, items, off

class Experts(nn.Module):
    "Two experts; of each item the better one answers. `kind` of the number: a load balance, a mean over items, or one of the weights alone"
    def __init__(self, kind, keep, noise=0., drop=0.):
        super().__init__()
        self.gate,self.experts,self.kind,self.keep,self.noise = (
            nn.Linear(6, 2),nn.ModuleList(nn.Linear(6, 3) for _ in range(2)),kind,keep,noise)
        self.scale,self.drop = nn.Parameter(torch.tensor(.5)),nn.Dropout(drop)
    def forward(self, x):
        p = (self.gate(x) + self.noise*self.training*torch.randn(len(x), 2)).softmax(1)
        out = self.drop(torch.stack([e(x) for e in self.experts], 1)*p[...,None]).sum(1)
        if self.kind == 'balance': term = 2*(p.mean(0)*F.one_hot(p.argmax(1), 2).float().mean(0)).sum()
        if self.kind == 'mean': term = p.square().sum(1).mean()
        if self.kind == 'scale': term = self.scale.exp()
        if self.keep: self.term = term; return out
        return out,term

class Add(Callback):
    "Adds the number that the model keeps"
    order = 30
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad + self.learn.model.term

def loss_of(kind):
    def loss(out, y):
        if isinstance(out, tuple): return F.cross_entropy(out[0]*out[1], y) if kind == 'scale' else F.cross_entropy(out[0], y) + out[1]
        return F.cross_entropy(out, y)
    return loss

def run(kind, keep, monkeypatch, accumulated=32, **kw):
    monkeypatch.setattr(test_check.nn, 'Sequential', lambda *_: Experts(kind, keep, **kw))
    x,y = items()
    return off(lambda: loss_of(kind), x, y, cbs=lambda: [Add()] if keep else [], lr=.1)

@pytest.mark.parametrize('keep', [True, False])
def test_load_balance(keep, monkeypatch):
    d,told,_ = run('balance', keep, monkeypatch)
    assert (d > 1e-3 and len(told) == 1 and '%' in told[0] and 'coupled=True' in told[0]
            and ("'term'" if keep else 'in output 1') in told[0]), (d, told)

@pytest.mark.parametrize('keep', [True, False])
@pytest.mark.parametrize('kind', ['mean', 'scale'])
def test_exact_ones_are_silent(kind, keep, monkeypatch):
    d,told,_ = run(kind, keep, monkeypatch)
    assert d < 1e-5 and not told, (d, told)

@pytest.mark.parametrize('kind', ['balance', 'mean', 'scale'])
@pytest.mark.parametrize('random', [dict(noise=1.), dict(drop=.5)])
def test_random_numbers(kind, random, monkeypatch):
    "A mean is not told for its noise"
    _,told,_ = run(kind, False, monkeypatch, **random)
    told = [t for t in told if 'number' in t]
    assert len(told) == (kind == 'balance'), told

def test_it_leaves_no_trace(monkeypatch):
    "Weights, random numbers and what the model keeps are those of a run without it"
    from fastaccum.accumulation.witnesses.terms import ModelsTerms
    ends = []
    for on in (True, False):
        if not on: monkeypatch.setattr(ModelsTerms, 'before_backward', lambda self, micro: None)
        *_,learn = run('balance', True, monkeypatch, noise=1., drop=.5)
        ends.append([*learn.model.parameters(), learn.model.term, torch.rand(3)])
    assert all(torch.equal(a, b) for a,b in zip(*ends))

def test_one_micro_batch_a_step(monkeypatch):
    "Then the number is the big batch's"
    monkeypatch.setattr(test_check.nn, 'Sequential', lambda *_: Experts('balance', False))
    d,told,_ = off(lambda: loss_of('balance'), *items(), micro=32, lr=.1)
    assert d < 1e-5 and not told
