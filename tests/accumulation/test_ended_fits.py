"However a fit ends, no part of a gradient is left; and what was cancelled is no step"
import pytest
from reference import *
from test_microbatch import data
import torch.distributed as dist
from fastaccum.accumulation.callback import GradientAccumulationSchedule
from fastaccum.parallel import DataParallel, launch
from fastaccum.precision.callback import MixedPrecision

class Boom(Exception): pass
ce = nn.CrossEntropyLoss
def raises(ex):
    def f(*_): raise ex
    return f

class Breaks(nn.Sequential):
    "In the third loader batch, in the forward pass or amid the backward pass"
    def __init__(self, where, ex): super().__init__(*mlp()); self.where,self.ex,self.calls = where,ex,[0]
    def forward(self, x):
        self.calls[0] += self.training
        h = self[1](self[0](x))
        if self.calls[0] == 3 and self.where == 'forward': raise self.ex
        if self.calls[0] == 3 and self.where == 'backward': h.register_hook(raises(self.ex))
        return self[2](h)

class BreaksLoss(ce):
    def __init__(self, ex): super().__init__(); self.ex,self.n = ex,0
    def forward(self, pred, y):
        self.n += torch.is_grad_enabled() and pred.requires_grad
        if self.n == 3: raise self.ex
        return super().forward(pred, y)

places = ['forward','loss','backward','before_batch','after_pred','after_loss','before_backward','after_backward',
          'before_step','after_step',
          'after_batch','after_train','before_validate']
ways = {'loader batches': (8, dict(accum_bs=32)), 'split': (16, dict(accum_bs=32, micro_batch_size=5)),
        'coupled': (16, dict(micro_batch_size=5, coupled=True)),
        'drop': (8, dict(accum_bs=30, remainder='drop')), 'carry': (8, dict(accum_bs=30, remainder='carry')),
        'on the host': (8, dict(accum_bs=32, grad_device='cpu')), 'fp16': (8, dict(accum_bs=32))}

def ended(where, ex, bs, cbs, **kwargs):
    "A Learner whose fit ended there, in its third forward pass or loader batch"
    model = Breaks(where, ex)
    loss = BreaksLoss(ex) if where == 'loss' else ce()
    once = where in ('before_step','after_step','after_train','before_validate')
    at = [On(where, raises(ex), calls=[0 if once else 2], training=None)] if where in places[3:] else []
    learn = learner(data, bs, *cbs, *at, model=model, loss_func=loss, **kwargs)
    try: learn.fit(1, .1)
    except type(ex): pass
    return learn

def is_clear(learn): return all(p.grad is None or not p.grad.any() for p in learn.model.parameters())

@pytest.mark.filterwarnings('ignore:What BreaksLoss averages over could not be measured .(CancelFitException|Boom)')
@pytest.mark.parametrize('ex', [Boom('boom'), KeyboardInterrupt(), CancelFitException()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize('way', [pytest.param(w, marks=[pytest.mark.fp16]*(w == 'fp16')) for w in ways])
@pytest.mark.parametrize('where', places)
def test_no_gradient_is_left(where, way, ex):
    bs,acc = ways[way]
    learn = ended(where, ex, bs, [GradientAccumulation(**acc), *([MixedPrecision('fp16')] if way == 'fp16' else [])])
    assert is_clear(learn) and learn.gradient_accumulation.n_items == 0

@pytest.mark.parametrize('how', ['of the fit alone', 'removed', 'a schedule'])
def test_callbacks_that_go(how):
    cb = GradientAccumulationSchedule(16, 32) if how == 'a schedule' else GradientAccumulation(32)
    learn = learner(data, 8, *([] if how == 'of the fit alone' else [cb]),
                    On('after_batch', raises(Boom('boom')), calls=[2]), loss_func=ce())
    with pytest.raises(Boom): learn.fit(1, .1, cbs=cb if how == 'of the fit alone' else None)
    if how == 'removed': learn.remove_cb(cb)
    assert is_clear(learn)

def removed(event, order, acc, calls=(2,)):
    "A Learner that loses its accumulation there, by a callback of this order"
    goes = On(event, lambda l: l.remove_cb(GradientAccumulation), calls=[*calls], order=order)
    learn = learner(data, 8, GradientAccumulation(**acc), goes, loss_func=ce())
    learn.fit(2, .1)
    return learn

@pytest.mark.parametrize('acc', [dict(accum_bs=32), dict(accum_bs=32, micro_batch_size=3)], ids=['loader batches', 'split'])
@pytest.mark.parametrize('event,n', [('before_batch', 2), ('after_batch', 2), ('after_batch', 3), ('after_train', 0)])
def test_removed_by_callbacks_before_and_after_it(event, n, acc):
    "A callback that has left hears no more of the event that is on its way, nor of later ones"
    before,after = (removed(event, order, acc, [n]) for order in (-50,100))
    assert torch.equal(weights(before.model), weights(after.model)) and 'one_batch' not in vars(before)

@pytest.mark.parametrize('order', [-50, 100])
@pytest.mark.parametrize('event', ['after_pred', 'before_backward', 'after_backward'])
def test_removed_amid_a_batch(event, order):
    with pytest.raises(Exception, match='remove the callback between batches'): removed(event, order, dict(accum_bs=32))

@pytest.mark.parametrize('run', [True, False])
def test_removed_and_added_again(run):
    "What the user has set is as it was"
    cb = GradientAccumulation(32)
    learn = learner(data, 8, cb, loss_func=ce())
    cb.run = run
    with learn.removed_cbs([cb]): assert not cb.run
    assert cb.run is run and cb in learn.cbs

def test_gradients_of_others_stay():
    "What another optimizer's parameters had before the accumulated batch"
    model = nn.Sequential(*mlp(), nn.Linear(4, 4))
    learn = learner(data, 8, GradientAccumulation(32), On('after_batch', raises(Boom('boom')), calls=[2]), model=model, loss_func=ce(),
                    splitter=lambda m: [[*m[:3].parameters()]])
    for p in learn.model[3].parameters(): p.grad = torch.ones_like(p)
    with pytest.raises(Boom): learn.fit(1, .1)
    assert no_gradients(SimpleNamespace(model=learn.model[:3])) and all((p.grad == 1).all() for p in learn.model[3].parameters())

def test_a_loop_by_hand_starts_clear():
    learn = ended('after_batch', KeyboardInterrupt(), 8, [GradientAccumulation(32)])
    fresh = deepcopy(learn.model)
    for m in (learn.model, fresh.requires_grad_()):
        if m is fresh: m.zero_grad()
        ce()(m(data.x[:8]), data.y[0][:8]).backward()
    assert torch.equal(grads(learn.model), grads(fresh))

@pytest.mark.parametrize('event,ex', [('before_batch', CancelBatchException), ('after_pred', CancelBatchException),
                                      ('before_backward', CancelBackwardException)])
@pytest.mark.parametrize('acc', [dict(), dict(micro_batch_size=3), dict(micro_batch_size=3, coupled=True), dict(n_items=lambda learn: 8)])
def test_left_over_batches_that_were_cancelled_are_no_step(acc, event, ex):
    "The last loader batches of each epoch, which would be a step: no momentum moves the weights"
    learn = learner(data, 8, GradientAccumulation(24, **acc), Spy(),
                    Stop(event, ex, [(e,i) for e in range(2) for i in (6, 7)], once=False), loss_func=ce())
    learn.fit(2, .1)
    ref = learner(Data(data.x[:48], data.y[0][:48]), 8, GradientAccumulation(24), Spy(), loss_func=ce())
    ref.fit(2, .1)
    assert len(learn.spy.steps) == len(ref.spy.steps) == 4
    assert rel_err(weights(learn.model), weights(ref.model)) < 1e-6 and is_clear(learn)

def of_a_rank(ranks):
    "Is it clear there, if the fit fails on these ranks?"
    fails = On('after_batch', lambda l: raises(Boom('boom'))() if dist.get_rank() in ranks else None, calls=[2])
    learn = learner(data, 8, GradientAccumulation(32), DataParallel(), fails, loss_func=ce())
    with pytest.raises(Exception): learn.fit(1, .1)
    return is_clear(learn) and learn.gradient_accumulation.n_items == 0

@pytest.mark.slow
@pytest.mark.parametrize('ranks', [(0, 1), (1,)])
def test_on_ranks(ranks): assert launch(partial(of_a_rank, ranks), 2) == [True, True]
