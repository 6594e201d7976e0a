"""GANs: loader batches that are accumulated switch sides between steps, as the big batch does; what is frozen in the
middle of a step is an error"""
import warnings
import pytest
from reference import *
from reference import GradientAccumulation    # ours
from fastai.vision.gan import AdaptiveGANSwitcher, FixedGANSwitcher, GANDiscriminativeLR, GANLearner

x,y = torch.randn(69, 4, generator=torch.manual_seed(0)),torch.randn(69, 8, generator=torch.manual_seed(1))

def gan(bs, *cbs, switcher=None, epochs=3, train_metrics=False, **kwargs):
    "A small GAN after a fit, and fastaccum's warnings"
    set_seed(2)
    dls = DataLoaders(DataLoader(list(zip(x, y)), bs=bs), DataLoader(list(zip(x, y))[:32], bs=16), device='cpu')
    gen,crit = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)),nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    def gen_loss(fake, out, target): return F.softplus(-fake).mean() + F.mse_loss(out, target)
    def crit_loss(real, fake): return F.softplus(-real).mean() + F.softplus(fake).mean()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn = GANLearner(dls, gen, crit, gen_loss, crit_loss, switcher=switcher, opt_func=partial(SGD, mom=0.), cbs=cbs, **kwargs)
        learn.recorder.train_metrics = train_metrics
        learn.start = flat(learn)
        with learn.no_bar(), learn.no_logging(): learn.fit(epochs, .1)
    return learn,[str(w.message) for w in found if 'shadowing' not in str(w.message)]

def flat(learn): return torch.cat([p.detach().flatten().clone() for p in learn.model.parameters()])
def off(learn, whole): return float((flat(learn)-flat(whole)).norm()/(flat(whole)-whole.start).norm())

switchers = dict(fixed=lambda: FixedGANSwitcher(2, 1), every=lambda: FixedGANSwitcher(), adaptive=lambda: AdaptiveGANSwitcher(1.9, 1.4))
ways = {'loader batches': (4, dict(accum_bs=16)), 'micro-batches': (16, dict(micro_batch_size=4)),
        'both': (8, dict(accum_bs=16, micro_batch_size=3)),
        'rows of batches': (4, dict(accum_bs=16, log_accum_batch=False))}

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('switcher', switchers)
def test_switches_between_steps(way, switcher):
    bs,acc = ways[way]
    own = (GANDiscriminativeLR(2.),) if switcher == 'every' else ()
    whole,_ = gan(16, *own, switcher=switchers[switcher]())
    learn,told = gan(bs, GradientAccumulation(**acc), *own, switcher=switchers[switcher]())
    assert off(learn, whole) < 2e-6 and not told
    for mine,theirs in ((learn.gan_trainer.crit_losses, whole.gan_trainer.crit_losses),
                        (learn.gan_trainer.gen_losses, whole.gan_trainer.gen_losses)):
        assert len(mine) and np.allclose(mine, theirs, rtol=1e-5)

class Mine(Callback):
    "A switcher of the user's"
    def after_batch(self):
        if self.training: self.learn.gan_trainer.switch()
class OnceAStep(Mine): rows_of_steps_only = True

@pytest.mark.slow
def test_own_switcher():
    with pytest.raises(ValueError, match='critic.* was trained .*rows_of_steps_only = True.*micro_batch_size'):
        gan(4, GradientAccumulation(16), switcher=Mine())
    whole,_ = gan(16, switcher=Mine())
    for bs,cb,switcher in ((4, GradientAccumulation(16), OnceAStep()), (16, GradientAccumulation(micro_batch_size=4), Mine())):
        learn,told = gan(bs, cb, switcher=switcher)
        assert off(learn, whole) < 2e-6 and not told

def test_carry():
    "The validation switches to the generator: an error, if the critic has gradients that are carried over"
    carry = lambda: GradientAccumulation(16, remainder='carry')
    with pytest.raises(ValueError, match="critic.* was trained .*remainder='carry'"): gan(4, carry())
    gan(4, carry(), gen_first=True, switcher=Callback())

class Freezes(Callback):
    "A layer, from an epoch on, before or behind what accumulates"
    def __init__(self, order, opens=True): self.order,self.opens = order,opens
    def before_batch(self):
        acc = getattr(self.learn, 'gradient_accumulation', None)
        if self.training and self.epoch and (acc is None or acc.opens == self.opens): self.learn.model[0].requires_grad_(False)

@pytest.mark.parametrize('order', [0, 70])
def test_freezing(order):
    "Where a step begins it is the big batch's; later it is an error"
    data = Data(torch.randn(61, 6), torch.randn(61, 4))
    def fitted(bs, *cbs):
        learn = learner(data, bs, *cbs)
        learn.fit(3, .05)
        return flat(learn)
    assert rel_err(fitted(8, GradientAccumulation(32), Freezes(order)), fitted(32, Freezes(order))) < 1e-6
    with pytest.raises(ValueError, match='0.weight was trained'): fitted(8, GradientAccumulation(32), Freezes(order, opens=False))

@pytest.mark.parametrize('train_metrics', [False, True])
@pytest.mark.parametrize('way', [k for k in ways if k != 'rows of batches'])
def test_losses_shown(way, train_metrics):
    "`gen_loss` and `crit_loss` in the table are those of whole batches, also where validation shows the critic's last one"
    bs,acc = ways[way]
    whole,_ = gan(16, train_metrics=train_metrics)
    learn,told = gan(bs, GradientAccumulation(**acc), train_metrics=train_metrics)
    assert not told and np.allclose(learn.recorder.values, whole.recorder.values, rtol=1e-5), (learn.recorder.values, whole.recorder.values)
