"What the backward pass leaves on parameters beside `.grad`, and a gradient that is computed at the step: told once"
import pytest
from reference import *
from reference import GradientAccumulation    # ours
from fastaccum.core.warnings import FastaccumWarning

torch.manual_seed(0)
data = Data(torch.randn(64, 6), torch.arange(64)%4)
ways = {'loader batches': (8, dict(accum_bs=16)), 'split': (16, dict(micro_batch_size=3))}

def train(bs, acc, keeps=None, cbs=(), reduction='mean'):
    learn = learner(data, bs, GradientAccumulation(**acc), *cbs, model=mlp(), loss_func=CrossEntropyLossFlat(reduction=reduction))
    weight = learn.model[0].weight
    if keeps: weight.register_hook(partial(keeps, weight))
    learn.fit(2)

def renews(p, g): p.kept = g.clone()
def lists(p, g): p.kept = [*getattr(p, 'kept', ()), g.clone()]

@pytest.mark.parametrize('keeps', (renews, lists))
@pytest.mark.parametrize('way', ways)
def test_gradients_beside(way, keeps):
    bs,acc = ways[way]
    with pytest.warns(FastaccumWarning, match='leaves `kept` on parameters') as told: train(bs, acc, keeps)
    assert len(told) == 1
    train(bs, {**acc, 'normalize': False}, keeps)
    train(bs, acc, keeps, reduction='sum')
    train(16, dict(accum_bs=16), keeps)
    train(bs, acc)

class Again(Callback):
    run_valid = False
    def batches(self): return [self.learn.xb[0]]
    def before_step(self):
        self.learn.opt.zero_grad()
        for x in self.batches(): self.learn.model(x).pow(2).mean().backward()

class Other(Again):
    "Other inputs"
    def batches(self): return [data.x]

class All(Again):
    "All inputs of the step"
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(self.learn.xb[0])
    def batches(self):
        res,self.seen = [*self.seen, self.learn.xb[0]],[]
        return res

def test_second_gradient():
    with pytest.warns(FastaccumWarning, match='last loader batch of 8 items, where the step has 16') as told:
        train(8, dict(accum_bs=16), cbs=[Again()])
    assert len(told) == 1
    train(16, dict(micro_batch_size=3), cbs=[Again()])
    train(8, dict(accum_bs=8), cbs=[Again()])
    train(8, dict(accum_bs=16), cbs=[Other()])
    train(8, dict(accum_bs=16), cbs=[All()])
