"`LossRule`: what it looks up, the weights of micro-batches at once, and when it looks"
from functools import partial
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from torch import tensor
from fastai.losses import BaseLoss, CrossEntropyLossFlat, LabelSmoothingCrossEntropy
from fastaccum.core.losses import LossInfo, LossRule, _item_weights, _options, _valid, count_items, ignore_empty, is_known, loss_weight, mixer_of, n_items
from fastaccum.core.probe import LossProbe

cw = tensor([.5, 2., 7.])
y = tensor([0, 2, -100, 1, 1, -100, 2, 0])

def rule_of(loss, *args, **kw):
    rule = LossRule(*args, **kw)
    rule.look_up(loss)
    return rule

# --- all weights at once

sizes = [8], [4, 4], [3, 3, 2], [2, 2, 2, 2], [1]*8, [5, 3]
@pytest.mark.parametrize('sizes', sizes)
@pytest.mark.parametrize('loss,yb', [
    (nn.CrossEntropyLoss(), y), (nn.CrossEntropyLoss(weight=cw), y), (nn.CrossEntropyLoss(ignore_index=1), y.clamp(min=0)), (nn.CrossEntropyLoss(), y[:,None].expand(8, 5)),
    (nn.CrossEntropyLoss(weight=cw), torch.stack([y, y.roll(1), y.roll(3)], 1)), (F.mse_loss, torch.ones(8, 3)), (nn.TripletMarginLoss(), torch.ones(8, 3)),
    (nn.KLDivLoss(reduction='batchmean'), torch.ones(8, 3)), (nn.CrossEntropyLoss(), torch.full((8, 3), 1/3))])
def test_weights(loss, yb, sizes):
    "They are those of the micro-batches one by one, and what they would add up to if all targets counted"
    rule = rule_of(loss)
    got,nominal = rule.weights((yb,), sizes)
    assert type(got) is list and got == pytest.approx([float(loss_weight(loss, part, len(part))) for part in yb.split(sizes)], rel=1e-6)
    assert [float(rule.weight(part, len(part))) for part in yb.split(sizes)] == pytest.approx(got, rel=1e-6)
    assert nominal == (yb.numel() if rule.info.over == 'classes' and not yb.is_floating_point() else None)

def test_weights_elsewhere():
    "On a device they stay there; in float64 if asked for"
    got,nominal = rule_of(nn.CrossEntropyLoss(weight=cw.to('meta'))).weights((y.to('meta'),), [4, 4])
    assert got.is_meta and got.shape == (2,) and nominal == 8
    tenth = torch.full((3,), .1)
    got,_ = rule_of(nn.CrossEntropyLoss(weight=tenth)).weights((tensor([0, 1, 2]),), [3], torch.float64)
    assert got == [3*float(tenth.double()[0])]
    assert loss_weight(nn.CrossEntropyLoss(weight=tenth), tensor([0]), 1, torch.float64).dtype is torch.float64
    assert loss_weight(nn.CrossEntropyLoss(weight=tenth), tensor([0]), 1).dtype is torch.float32

def test_a_target_with_other_rows():
    rule = LossRule()
    rule.info = LossInfo(F.mse_loss).measure('elements', target=1)
    assert rule.weights((torch.ones(4), torch.ones(6, 2)), [4]) == ([12], None)

# --- looking up

def test_looks_up_what_has_changed():
    loss = nn.CrossEntropyLoss()
    rule = rule_of(loss, LossProbe)
    info = rule.info
    rule.look_up(loss); assert rule.info is info                       # nothing has changed
    for change in (lambda: setattr(loss, 'ignore_index', 3), lambda: setattr(loss, 'reduction', 'sum'), lambda: setattr(loss, 'label_smoothing', .1),
                   lambda: setattr(loss, 'weight', cw)):
        change()
        rule.look_up(loss); assert rule.info is not info
        info = rule.info
        rule.look_up(loss); assert rule.info is info
    assert (info.ignore_index, info.reduction, info.class_weight is cw, rule.is_sum, rule.may_be_nan) == (3, 'sum', True, True, True)
    rule.look_up(nn.CrossEntropyLoss()); assert rule.info is not info and not rule.is_sum and not rule.may_be_nan
    info = rule.info
    rule.look_up(rule.info.loss_func, False); assert rule.probe is None
    info = rule.info
    rule.look_up(info.loss_func, False); assert rule.info is info
    rule.look_up(info.loss_func, True); assert rule.info is not info and rule.probe is not None

def test_looks_inside():
    flat = CrossEntropyLossFlat()
    rule = rule_of(flat, LossProbe)
    info = rule.info
    rule.look_up(flat); assert rule.info is info
    flat.func = nn.CrossEntropyLoss(ignore_index=1)
    rule.look_up(flat); assert rule.info.ignore_index == 1
    other = partial(F.cross_entropy, ignore_index=2)
    rule.look_up(other); assert rule.info.ignore_index == 2 and rule.info.func is F.cross_entropy and rule.info.options is None

def test_options():
    assert _options(F.mse_loss) == () and _options(CrossEntropyLossFlat()) is None
    def f(p, t): pass
    f.on = 1
    assert _options(f) is None
    assert _options(nn.CrossEntropyLoss(weight=cw)) != _options(nn.CrossEntropyLoss(weight=cw.clone())) != _options(nn.CrossEntropyLoss())
    assert _options(nn.CrossEntropyLoss()) == _options(nn.CrossEntropyLoss())

def own(pred, t): return ((pred-t)**2).sum(1).mean()

def test_probes_the_unknown():
    rule = rule_of(own, LossProbe)
    assert rule.probed and rule.measuring and rule.probe is not None and rule.message is None and 'not measured yet' in str(rule)
    probe = rule.probe
    rule.look_up(own); assert rule.probe is probe                                 # what it has learned stays
    rule.look_up(lambda pred, t: own(pred, t)); assert rule.probe is not probe
    rule.look_up(own, check=False); assert rule.probe is None and not rule.probed and not rule.measuring
    rule = rule_of(own); assert rule.probe is None and not rule.probed
    rule = rule_of(nn.MSELoss(), LossProbe); assert not rule.probed and not rule.measuring and 'known' in str(rule)
    assert str(LossRule()) == repr(LossRule()) == 'not looked up yet: nothing was trained'
    assert LossRule().key == '' and rule.key == 'elements mean'

class Mix:
    def __init__(self, old): self.old_lf = old
    def lf(self, pred, t): return self.old_lf(pred, t)

def test_mixers():
    mix = Mix(nn.CrossEntropyLoss(weight=cw))
    rule = rule_of(mix.lf, LossProbe)
    assert rule.info.over == 'elements' and rule.info.loss_func is mix.old_lf and not rule.probed and not rule.info.inexact
    assert mixer_of(mix.lf) is mix and mixer_of(own) is None and mixer_of([].append) is None
    assert LossInfo(LabelSmoothingCrossEntropy()).inexact and not LossInfo(LabelSmoothingCrossEntropy()).plain_mean().inexact

def test_inexact():
    rule = rule_of(LabelSmoothingCrossEntropy())
    rule.note((y.clamp(min=0),)); assert not rule.inexact
    rule.note((y,)); rule.note((y.clamp(min=0),)); assert rule.inexact             # once is enough
    rule = rule_of(LabelSmoothingCrossEntropy(weight=cw))
    rule.note((y.clamp(min=0),)); assert rule.inexact
    rule = rule_of(nn.CrossEntropyLoss()); rule.note((y,)); assert rule.inexact is False

# --- when it looks

def test_when():
    rule = rule_of(own, LossProbe)
    p,t,looked = torch.randn(4, 3),torch.randn(4, 3),[]
    for i in range(1, 1001):
        if i == 501: rule.begin_epoch()
        if i == 511: rule.begin_epoch()
        if rule.due(): looked.append(i); rule.measure(p, (t,), 4)
    assert looked[:8] == list(range(1, 9)) and 10 < len(looked) < 25
    assert all(.4 < (b-a)/a < 1.6 for a,b in zip(looked[8:], looked[9:]) if a < 200)
    assert any(501 <= i <= 1000 for i in looked)
    rule._next = 10**9
    rule.begin_epoch(); at = rule._next - rule._n
    assert 1 <= at <= 490                                                            # as many as the last epoch had
    always = rule_of(own, LossProbe, always=True)
    for i in range(30):
        assert always.due()
        always.measure(p, (t,), 4)

def test_end():
    rule = rule_of(own, LossProbe)
    rule.end(); assert rule.measuring is False and rule.probe.open is False and 'could not be measured' in rule.message
    LossRule().end()
    assert LossRule().message is None

def valid(pred, t): return F.cross_entropy(pred, t, ignore_index=-1)

def test_corrects_those_before():
    "The rule shows at the second micro-batch: the first one's weight is asked for"
    torch.manual_seed(0)
    pred,clean,holes = torch.randn(8, 3),tensor([0, 1, 2, 0, 1, 2, 1, 1]),tensor([0, 1, -1, -1, -1, 2, 1, 1])
    def numbers(pred, t): return F.mse_loss(pred[ok], t[ok]) if (ok := ~t.isnan()).any() else pred.sum()*0
    rule = rule_of(numbers, LossProbe)
    t = torch.randn(8, 3); nan = t.clone(); nan[:3] = float('nan')
    rule.due(); assert rule.measure(pred, (t,), 8) is None and rule.info.over == 'elements'
    rule.due(); assert [float(w) for w in rule.measure(pred, (nan,), 8, before=1)] == [24.] and rule.info.over == 'valid'
    assert not rule.news
    rule.due(); assert rule.measure(pred, (nan,), 8, before=2) is None                # nothing new
    rule = rule_of(valid, LossProbe)
    rule.due(); rule.measure(pred, (clean,), 8)
    rule.due(); assert rule.measure(pred, (holes,), 8) is None and rule.info.ignore_index == -1 and not rule.news     # a new step
    rule.due(); rule.due()
    assert rule.measure(pred, (holes,), 8, before=5) is None                          # it has not seen those before

def test_says_since_when():
    torch.manual_seed(0)
    pred,t = torch.randn(8, 3),torch.randint(3, (8,))
    def loss(p, t): return F.cross_entropy(p, t) if not loss.late else F.cross_entropy(p, t, reduction='sum')/4
    loss.late = False
    rule = rule_of(loss, LossProbe)
    for i in range(9): rule.due(); rule.measure(pred, (t,), 8, where=f'batch {i}')
    loss.late = True
    rule.due(); rule.due()
    assert rule.measure(pred, (t,), 8, where='batch 10') is None and rule.is_sum
    msg, = rule.news
    assert 'batch 10' in msg and '(batch 8)' in msg and '43.17% off' in msg and "check_loss='always'" in msg
    assert rule.sum_message(3, 3) is None                                             # small counts may look like a sum: two looks more
    while rule.measuring: rule.measure(pred, (t,), 8)
    assert '3 times' in rule.sum_message(3, 3) and rule.sum_message(1, 3) is None
    loss.reduction = 'sum'
    declared = rule_of(loss, LossProbe)
    while declared.measuring: declared.measure(pred, (t,), 8)
    assert declared.is_sum and declared.sum_message(3, 3) is None
    assert rule_of(nn.MSELoss(reduction='sum'), LossProbe).sum_message(3, 3) is None

def test_uneven():
    rule = rule_of(nn.CrossEntropyLoss(weight=cw))
    assert rule.uneven((tensor([0, 0]),), 2) == 0 and rule.uneven((tensor([0, 0, 0]),), 3) == 0
    assert rule.uneven((tensor([1, 1]),), 2) == pytest.approx(3.)
    rule = rule_of(nn.CrossEntropyLoss())
    assert rule.uneven((tensor([-100]),), 1) == 0 and rule.uneven((tensor([1]),), 1) == 1

# --- what is known

def test_names():
    info = LossInfo(nn.CrossEntropyLoss(weight=cw))
    assert str(info) == 'class weights of the valid targets (not -100)' and str(info.measure('items')) == 'items'
    assert str(LossInfo(nn.CrossEntropyLoss())) == 'valid targets (not -100)'
    assert str(info.measure('valid', target=1, class_weight=None)) == 'valid targets (not -100, of target 1)'
    assert str(info.measure('mask', target=1, channel=2)) == 'the sum of target 1, column 2' and str(info.measure('mask', target=0)) == 'the sum of the target'
    assert str(info.measure('elements')) == 'elements of the target' and str(LossInfo(nn.MSELoss(reduction='sum'))) == 'nothing: it is a sum'
    assert info.key != info.measure('valid').key and info.key == LossInfo(nn.CrossEntropyLoss(weight=cw)).key

@pytest.mark.parametrize('over,may', [('items', False), ('elements', False), ('valid', True), ('mask', True), ('classes', True)])
def test_measured(over, may):
    info = LossInfo(LabelSmoothingCrossEntropy(reduction='sum')).measure(over)
    assert (info.nan_if_empty, info.inexact, info.reduction, info.measured, info.over) == (may, False, 'mean', True, over)

def test_defaults():
    assert (LossInfo(own).reduction, LossInfo(own).ignore_index, LossInfo(own).class_weight, LossInfo(own).over) == ('mean', -100, None, 'items')
    assert LossInfo(partial(partial(F.nll_loss, ignore_index=1), ignore_index=2)).ignore_index == 2
    assert LossInfo(nn.CrossEntropyLoss(label_smoothing=.1)).nan_if_empty is True and LossInfo(nn.CrossEntropyLoss()).nan_if_empty is False

def test_known():
    loss = nn.MSELoss()
    assert is_known(loss) and is_known(BaseLoss(nn.MSELoss)) and is_known(F.mse_loss)
    loss.forward = lambda p, t: p.sum()
    assert not is_known(loss) and not is_known(loss.forward) and not is_known(nn.Linear(2, 2)) and not is_known(own)
    assert not is_known(Mix(loss).lf) and not is_known(BaseLoss(type('Own', (nn.MSELoss,), {})))

def test_valid_and_classes():
    assert _valid(y, None).all() and _valid(y, None).dtype is torch.bool
    assert _valid(tensor([156, 3], dtype=torch.uint8), -100).all()
    assert _valid(tensor([1., float('nan')]), float('nan')).tolist() == [True, False]
    half = LossInfo(nn.CrossEntropyLoss(weight=cw.half()))
    assert _item_weights(half, y).dtype is torch.float32 and _item_weights(half, y)[2] == 0          # an ignored target counts nothing
    assert _item_weights(LossInfo(nn.CrossEntropyLoss()), 'text') == 1 and _item_weights(LossInfo(F.mse_loss), (torch.ones(2, 3, 4),)) == 12

@pytest.mark.parametrize('weight,kept', [(0., 0.), (.25, 1.), (1., 1.), (7., 1.)])
def test_ignore_empty(weight, kept):
    x = torch.ones(3, requires_grad=True)
    out = x*1
    ignore_empty((out, 'name', torch.ones(2), {'a': x*2}), tensor(weight))
    out.sum().backward()
    assert x.grad.tolist() == [kept]*3

# --- items

@pytest.mark.parametrize('xb,yb,expected', [
    ((torch.ones(4, 3),), (torch.ones(4),), (4, True)), ((torch.ones(4, 3),), (), (4, True)), ((torch.ones(4, 3),), (torch.ones(5),), (4, False)),
    ((torch.ones(4, 3), torch.ones(4, 2)), (torch.ones(4),), (4, True)),
    ((), (torch.ones(3),), (3, True)), ((torch.tensor(1.), torch.ones(4, 2)), (torch.tensor(2.),), (4, True)), (({'a': torch.ones(6)},), (torch.ones(6, 2),), (6, True)),
    ((None, torch.ones(4)), (None,), (4, True)), (torch.ones(4, 2), torch.ones(4), (4, True)), ([torch.ones(4, 2)], [torch.ones(4)], (4, True)),
    ((torch.ones(4, 3),), (1,), (4, True)), ((torch.ones(2, 3).numpy(),), (torch.ones(2),), (2, True))])
def test_count_items(xb, yb, expected): assert count_items(xb, yb) == expected

def test_n_items():
    assert [n_items(b) for b in (torch.ones(3), (torch.ones(4), torch.ones(5)), [tensor(1.), torch.ones(2)], ((), torch.ones(6)))] == [3, 4, 2, 6]
    for b in ((), tensor(1.), 'a'):
        with pytest.raises(TypeError, match='pass the number of items'): n_items(b)
