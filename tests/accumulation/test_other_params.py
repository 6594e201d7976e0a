"Parameters with gradients that the Learner's optimizer does not have: a second optimizer, a loss's own centers"
import pytest
from reference import *
from reference import GradientAccumulation    # ours

data = Data(torch.randn(61, 6, generator=torch.manual_seed(0)), torch.arange(61)%4)
plain = partial(SGD, mom=0.)
ways = {'loader batches': (8, dict(accum_bs=32)), 'split': (32, dict(micro_batch_size=7)),
        'both': (16, dict(accum_bs=32, micro_batch_size=5)), 'auto': (8, dict(accum_bs=32, micro_batch_size='auto'))}

class Second(Callback):
    "Steps an optimizer of its own, every so many steps"
    run_valid = False
    def __init__(self, params, every=1, set_to_none=True, event='after_step'):
        self.params,self.every,self.none,self.n = params,every,set_to_none,0
        setattr(self, event, self._step)
    def before_fit(self):
        if self.learn.opt is not None: self.mine = torch.optim.SGD(self.params(self.learn), lr=.1, momentum=.5)
    def _step(self):
        self.n += 1
        if self.n%self.every: return
        self.mine.step()
        self.mine.zero_grad(set_to_none=self.none)

class CenterLoss(nn.Module):
    "Cross entropy, and the distance to each class's own center, which learns"
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.ones(4, 4))
    def forward(self, pred, y): return F.cross_entropy(pred, y) + .1*(pred-self.centers[y]).pow(2).sum(1).mean()

def start(model): return flat([*model.parameters()]).clone()
def compared(way, second, loss_func=None, only_head=True, **kwargs):
    bs,acc = ways[way]
    def trained(bs, *cbs):
        f = deepcopy(loss_func) if loss_func is not None else nn.CrossEntropyLoss(ignore_index=3)
        learn = learner(data, bs, *cbs, second(), loss_func=f, opt_func=plain, **kwargs,
                        splitter=(lambda m: [list(m[0].parameters())]) if only_head else trainable_params)
        both = lambda: (torch.cat([weights(learn.model), flat(getattr(f, 'parameters', list)())]) if loss_func is not None
                        else weights(learn.model))
        before = both()
        learn.fit(3, .1)
        return both().double(),before
    (a,_),(b,before) = trained(bs, GradientAccumulation(**acc)),trained(32)
    assert (b-before).norm() > 1e-3
    return float((a-b).norm()/(b-before).norm())

@pytest.mark.parametrize('event', ('before_step', 'after_step'))
@pytest.mark.parametrize('none', (True, False))
@pytest.mark.parametrize('way', ways)
def test_two_optimizers(way, none, event):
    "Ignored targets and a remainder: no divisor is known when the accumulated batch begins"
    assert compared(way, partial(Second, lambda l: l.model[2].parameters(), set_to_none=none, event=event)) < 2e-6

@pytest.mark.parametrize('way', ways)
def test_second_steps_every_other_step(way):
    "What its parameters have from the step before is not rescaled again"
    assert compared(way, partial(Second, lambda l: l.model[2].parameters(), every=2)) < 2e-6

@pytest.mark.parametrize('way', ways)
def test_centers_of_the_loss(way):
    assert compared(way, partial(Second, lambda l: l.loss_func.parameters()), loss_func=CenterLoss(), only_head=False) < 2e-6

def test_dropped_remainder_is_dropped():
    "Gradients of both optimizers begin the next epoch as they were"
    left = []
    learn = learner(data, 8, GradientAccumulation(32, remainder='drop'), Second(lambda l: l.model[2].parameters()),
                    loss_func=nn.CrossEntropyLoss(),
                    opt_func=plain, splitter=lambda m: [list(m[0].parameters())])
    learn.add_cb(
        On('before_train',
           lambda l: left.append([p.grad is not None and bool(p.grad.any()) for p in l.model.parameters()]),
           training=None))
    learn.fit(3, .1)
    assert not any(map(any, left))

def test_unfrozen_layers_are_looked_up():
    "What the optimizer has is not among the others, frozen or not"
    learn = learner(data, 8, GradientAccumulation(32), loss_func=nn.CrossEntropyLoss(), opt_func=plain,
                    splitter=lambda m: [list(m[0].parameters()), list(m[2].parameters())])
    learn.create_opt()
    learn.freeze(); learn.fit(1); assert learn.gradient_accumulation.params.others == []
    learn.unfreeze(); learn.fit(1); assert learn.gradient_accumulation.params.others == []
