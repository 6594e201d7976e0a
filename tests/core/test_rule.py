"`LossRule`: what it looks up, the weights of micro-batches at once, and when it looks"
from functools import partial
from types import SimpleNamespace
import numpy as np, pytest, torch, torch.nn as nn, torch.nn.functional as F
from torch import tensor
from fastai.losses import BaseLoss, CrossEntropyLossFlat, FocalLoss, LabelSmoothingCrossEntropy
from torch.nn.utils.rnn import pack_sequence
from fastaccum.core.losses import (LookTimes, LossInfo, LossRule, _options, _targets, _valid, at_least, count_items, ignore_empty, is_known,
                                   ignored_values, item_weights, loss_weight, mixer_of, n_items, rules_of, unwrapped)

cw = tensor([.5, 2., 7.])
y = tensor([0, 2, -100, 1, 1, -100, 2, 0])

def rule_of(loss, *args, **kw):
    rule = LossRule(*args, **kw)
    rule.look_up(loss)
    return rule

# --- all weights at once

sizes = [8], [4, 4], [3, 3, 2], [2, 2, 2, 1, 1], [2, 2, 2, 2], [1]*8, [5, 3]
@pytest.mark.parametrize('sizes', sizes)
@pytest.mark.parametrize('loss,yb', [
    (nn.CrossEntropyLoss(), y), (nn.CrossEntropyLoss(weight=cw), y),
    (nn.CrossEntropyLoss(ignore_index=1), y.clamp(min=0)), (nn.CrossEntropyLoss(), y[:,None].expand(8, 5)),
    (nn.CrossEntropyLoss(weight=cw), torch.stack([y, y.roll(1), y.roll(3)], 1)), (F.mse_loss, torch.ones(8, 3)),
    (nn.TripletMarginLoss(), torch.ones(8, 3)),
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

def test_weight():
    rule = rule_of(nn.CrossEntropyLoss(weight=cw))
    assert rule.weight(tensor([0, 2]), 2) == 7.5 and rule.weight(tensor([0, 2]), 2, torch.float64).dtype is torch.float64
    assert rule_of(own).weight((None,), 5) == 5 and rule_of(nn.L1Loss(reduction='sum')).weight(torch.ones(3), 3) is None

def test_weights_of_another_target():
    rule = LossRule()
    rule.info = LossInfo(F.mse_loss).measure('elements', target=1)
    yb = torch.ones(4),torch.ones(6, 2)
    assert rule.weights(yb, [4]) == ([12], None) and rule.weights(yb, [2, 2]) == ([4, 4], None)      # a target with other rows
    assert rule.weight(yb, 4) == 12
    rule.info = LossInfo(F.mse_loss).measure('valid', target=1, ignore_index=0)
    assert rule.weights((torch.ones(4), tensor([[1, 0, 2]]*4)), [3, 1]) == ([6, 2], 12)
    rule.info = LossInfo(F.mse_loss).measure('valid', target=0, ignore_index=0)
    assert rule.weights(((tensor(1.), tensor([1, 0, 2])), torch.ones(3, 3)), [3]) == ([2], 3)       # the first is in a tuple

# --- looking up

def test_looks_up_what_has_changed():
    loss = nn.CrossEntropyLoss()
    rule = rule_of(loss, True)
    info = rule.info
    rule.look_up(loss); assert rule.info is info                       # nothing has changed
    for change in (lambda: setattr(loss, 'ignore_index', 3), lambda: setattr(loss, 'reduction', 'sum'),
                   lambda: setattr(loss, 'label_smoothing', .1),
                   lambda: setattr(loss, 'weight', cw)):
        change()
        rule.look_up(loss); assert rule.info is not info
        info = rule.info
        rule.look_up(loss); assert rule.info is info
    assert (info.ignore_index, info.reduction, info.class_weight is cw, rule.is_sum, rule.may_be_nan) == (3, 'sum', True, True, True)
    rule.look_up(nn.CrossEntropyLoss()); assert rule.info is not info and not rule.is_sum and not rule.may_be_nan
    info = rule.info
    rule.look_up(rule.info.loss_func, False); assert not rule.probed
    info = rule.info
    rule.look_up(info.loss_func, False); assert rule.info is info
    rule.look_up(info.loss_func, True); assert rule.info is not info

def test_looks_inside():
    flat = CrossEntropyLossFlat()
    rule = rule_of(flat, True)
    info = rule.info
    rule.look_up(flat); assert rule.info is info
    flat.func = nn.CrossEntropyLoss(ignore_index=1)
    rule.look_up(flat); assert rule.info.ignore_index == 1
    rule.look_up(F.mse_loss); info = rule.info
    rule.look_up(F.mse_loss); assert rule.info is info
    mse = nn.MSELoss()
    mse.func = own                                                                # a module's attribute is no loss inside
    rule.look_up(mse); info = rule.info
    rule.look_up(mse); assert rule.info is info and info.func is mse
    other = partial(F.cross_entropy, ignore_index=2)
    rule.look_up(other); assert rule.info.ignore_index == 2 and rule.info.func is F.cross_entropy and rule.info.options is None

def test_options():
    assert _options(F.mse_loss) == () and _options(CrossEntropyLossFlat()) is None
    def f(p, t): pass
    f.on = 1
    assert _options(f) is None
    assert _options(nn.CrossEntropyLoss(weight=cw)) != _options(nn.CrossEntropyLoss(weight=cw.clone())) != _options(nn.CrossEntropyLoss())
    assert _options(nn.CrossEntropyLoss()) == _options(nn.CrossEntropyLoss())
    smooth = LabelSmoothingCrossEntropy(weight=cw)                                 # it is no buffer there
    before,smooth.weight = _options(smooth),cw.clone()
    assert _options(smooth) != before

def own(pred, t): return ((pred-t)**2).sum(1).mean()

class Mix:
    def __init__(self, old): self.old_lf = old
    def lf(self, pred, t): return self.old_lf(pred, t)

def test_mixers():
    mix = Mix(nn.CrossEntropyLoss(weight=cw))
    rule = rule_of(mix.lf, True)
    assert rule.info.over == 'elements' and rule.info.loss_func is mix.old_lf and not rule.probed and not rule.info.inexact
    assert mixer_of(mix.lf) is mix and mixer_of(own) is None and mixer_of([].append) is None
    assert LossInfo(LabelSmoothingCrossEntropy()).inexact and not LossInfo(LabelSmoothingCrossEntropy()).plain_mean().inexact

# --- when it looks

def randoms(times, at):
    "The ranges that are drawn from; what is drawn is one end of them"
    ranges = []
    def draw(*ends): ranges.append(ends); return ends[at]
    times._random = SimpleNamespace(randint=draw, uniform=draw)
    return ranges

def test_first_looks():
    "At the first 8 micro-batches, later ever more rarely"
    times = LookTimes()
    times.next = 11
    assert [times.due() for _ in range(12)] == [True]*8 + [False]*2 + [True]*2
    times.next = 99
    assert times.due(always=True) and not times.due()

@pytest.mark.parametrize('at,n,next', [(0, 1, 2), (0, 3, 5), (1, 10, 25), (0, 100, 150), (1, 100, 250)])
def test_next_look(at, n, next):
    times = LookTimes()
    ranges,times.n = randoms(times, at),n
    times.looked()
    assert ranges == [(.5, 1.5)] and times.next == next

def test_looks_in_each_epoch():
    times = LookTimes()
    ranges,times.next = randoms(times, 1),99
    times.begin_epoch(); assert times.next == 1 and ranges == [(1, 1)]                    # no epoch before it
    times.next = 99
    for _ in range(5): times.due()
    times.begin_epoch(); assert times.next == 10 and ranges[1:] == [(1, 5)]
    for _ in range(3): times.due()
    times.begin_epoch(); assert times.next == 10 and ranges[2:] == [(1, 3)]               # 11 would be later
    assert LookTimes()._random.random() == LookTimes()._random.random()                   # at the same places in each run

# --- what is known

def test_names():
    info = LossInfo(nn.CrossEntropyLoss(weight=cw))
    assert str(info) == 'class weights of the valid targets (not -100)' and str(info.measure('items')) == 'items'
    assert str(LossInfo(nn.CrossEntropyLoss())) == 'valid targets (not -100)'
    assert str(info.measure('valid', ignore_index=None, class_weight=None)) == 'valid targets'
    assert str(info.measure('valid', ignore_index=None, target=1, class_weight=None)) == 'valid targets (of target 1)'
    assert str(info.measure('valid', target=1, class_weight=None)) == 'valid targets (not -100, of target 1)'
    assert str(info.measure('mask', target=1)) == 'the sum of target 1' and str(info.measure('mask', target=0)) == 'the sum of the target'
    assert (str(info.measure('elements')) == 'elements of the target'
            and str(LossInfo(nn.MSELoss(reduction='sum'))) == 'nothing: it is a sum')
    assert str(info.measure('valid', shifted=True)) == 'valid targets (not -100, of the target without its first column)'

def test_measures_the_unknown():
    rule = rule_of(own, True)
    assert rule.probed and str(rule) == 'items (assumed)'
    rule.use(('elements', 0, False, None)); assert str(rule) == 'elements of the target (measured)'
    info = rule.info
    rule.look_up(own); assert rule.info is info                                    # what was found stays
    rule.use(('elements', 0, False, None)); assert rule.info is info
    rule.use(None); assert rule.info is rule.declared
    rule.look_up(own, check=False); assert not rule.probed and str(rule) == 'items'
    rule.use(('elements', 0, False, None)); assert rule.info.over == 'items'       # its options are believed
    rule = rule_of(nn.MSELoss(), True); assert not rule.probed and 'known' in str(rule) and rule.key == 'elements mean'
    assert str(LossRule()) == repr(LossRule()) == 'not looked up yet: nothing was trained' and LossRule().key == ''

def test_other_options():
    "A loss of one's own is asked again if its class weights are others, or another one stands in its wrapper"
    class Weighted:
        weight = cw
        def __call__(self, pred, t): return F.cross_entropy(pred, t, weight=self.weight)
    loss = Weighted()
    rule = rule_of(loss, True)
    declared = rule.declared
    rule.use(('classes', 0, False, -100)); assert rule.info.class_weight is cw
    rule.look_up(loss); assert rule.declared is declared and rule.info is not declared
    loss.weight = cw.flip(0)
    rule.look_up(loss); assert rule.declared is rule.info is not declared
    flat = BaseLoss(nn.MSELoss)
    flat.func = own
    rule.look_up(flat); declared = rule.declared
    rule.look_up(flat); assert rule.declared is declared
    flat.func = lambda pred, t: own(pred, t)
    rule.look_up(flat); assert rule.declared is not declared
    loss = nn.CrossEntropyLoss()
    rule.look_up(loss); assert not rule.probed
    loss.reduction = 'none'
    rule.look_up(loss); assert rule.probed                                         # another one takes the mean

def test_rules_of():
    overs = lambda rules: [rule[0] for rule in rules]
    assert overs(rules_of(LossInfo(own), (torch.rand(4, 3),))) == ['items', 'elements', 'mask', 'sum']
    assert overs(rules_of(LossInfo(own), (y,))) == ['valid', 'items', 'mask', 'sum']
    two = y[:,None].expand(8, 2),torch.rand(8) > .5
    assert overs(rules_of(LossInfo(own), two)) == [*['valid']*2, 'items', 'elements', *['mask']*2, 'sum']
    weighted = LossInfo(nn.CrossEntropyLoss(weight=cw))
    assert overs(rules_of(weighted, (y,)))[0] == 'classes'
    assert 'classes' not in overs(rules_of(weighted, (y+1,)))                       # there is a class without a weight
    ignored = ignored_values((y,), [(y != 2)[:,None]*torch.ones(8, 3)])
    assert ignored == [2] and {rule[3] for rule in rules_of(LossInfo(own), (y,), ignored)} == {-100, 2, None}

@pytest.mark.parametrize('over,may', [('items', False), ('elements', False), ('valid', True), ('mask', True), ('classes', True)])
def test_measured(over, may):
    info = LossInfo(LabelSmoothingCrossEntropy(reduction='sum')).measure(over)
    assert (info.nan_if_empty, info.inexact, info.reduction, info.measured, info.over) == (may, False, 'mean', True, over)

def test_defaults():
    assert (LossInfo(own).reduction, LossInfo(own).ignore_index, LossInfo(own).class_weight,
            LossInfo(own).over) == ('mean', -100, None, 'items')
    assert LossInfo(partial(partial(F.nll_loss, ignore_index=1), ignore_index=2)).ignore_index == 2
    assert LossInfo(LabelSmoothingCrossEntropy()).over == LossInfo(FocalLoss()).over == 'elements'
    assert LossInfo(nn.CrossEntropyLoss(label_smoothing=.1)).nan_if_empty is True and LossInfo(nn.CrossEntropyLoss()).nan_if_empty is False

def test_unwrapped():
    flat = BaseLoss(nn.MSELoss)
    flat.func = partial(F.nll_loss, ignore_index=1, reduction='sum')
    assert unwrapped(partial(flat, ignore_index=2)) == (F.nll_loss, dict(ignore_index=2, reduction='sum'))
    assert unwrapped(F.nll_loss) == (F.nll_loss, {})

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
    assert item_weights(half, y).dtype is torch.float32 and item_weights(half, y)[2] == 0          # an ignored target counts nothing
    assert item_weights(LossInfo(nn.CrossEntropyLoss(weight=tensor([2.]))), tensor([0, -100])).tolist() == [2, 0]
    assert item_weights(LossInfo(nn.CrossEntropyLoss(weight=cw.double())), y).dtype is torch.float64
    assert item_weights(LossInfo(nn.CrossEntropyLoss(weight=cw.to(torch.float8_e4m3fn).bfloat16())), y).dtype is torch.float32
    assert item_weights(LossInfo(nn.CrossEntropyLoss()), ()) == 1
    assert item_weights(LossInfo(nn.CrossEntropyLoss()), 'text') == 1 and item_weights(LossInfo(F.mse_loss), (torch.ones(2, 3, 4),)) == 12

def test_sum_of_a_mask():
    mask,t = LossInfo(own).measure('mask'),tensor([[[.1, 1.], [.2, 0.]], [[0., 0.], [0., 2.]]])
    assert item_weights(mask, t).tolist() == pytest.approx([1.3, 2.]) and item_weights(mask, t).dtype is torch.float32
    assert item_weights(mask, t, torch.float64).tolist() == [sum(t.double()[0].flatten().tolist()), 2]

def test_shifted():
    t = tensor([[1, 2, -100], [-100, 1, 1]])
    assert item_weights(LossInfo(own).measure('valid', shifted=True, target=1), (torch.ones(2), t)).tolist() == [1, 2]

def test_targets(): assert [t.tolist() for t in _targets((None, tensor(1.), [tensor([2]), 'a'], {'b': tensor([[3]])}))] == [[2], [[3]]]

def test_at_least():
    assert [at_least(f, w) for f,w in ((None, 0), (1, 0), (1, 2), (.5, 0))] == [0, 1, 2, .5]
    assert at_least(1, tensor([0., 1., 3.])).tolist() == [1, 1, 3] and at_least(None, tensor([0.])).tolist() == [0]

@pytest.mark.parametrize('weight,kept', [(0., 0.), (.25, 1.), (1., 1.), (7., 1.)])
def test_ignore_empty(weight, kept):
    x = torch.ones(3, requires_grad=True)
    out = x*1
    ignore_empty((out, 'name', torch.ones(2), {'a': x*2}), tensor(weight))
    out.sum().backward()
    assert x.grad.tolist() == [kept]*3

# --- items

@pytest.mark.parametrize('xb,yb,expected', [
    ((torch.ones(4, 3),), (torch.ones(4),), (4, True)), ((torch.ones(4, 3),), (), (4, True)),
    ((torch.ones(4, 3),), (torch.ones(5),), (4, False)),
    ((torch.ones(4, 3), torch.ones(4, 2)), (torch.ones(4),), (4, True)),
    ((), (torch.ones(3),), (3, True)), ((torch.tensor(1.), torch.ones(4, 2)), (torch.tensor(2.),), (4, True)),
    (({'a': torch.ones(6)},), (torch.ones(6, 2),), (6, True)),
    ((None, torch.ones(4)), (None,), (4, True)), (torch.ones(4, 2), torch.ones(4), (4, True)),
    ([torch.ones(4, 2)], [torch.ones(4)], (4, True)),
    ((torch.ones(4, 3),), (1,), (4, True)), ((torch.ones(2, 3).numpy(),), (torch.ones(2),), (2, True))])
def test_count_items(xb, yb, expected): assert count_items(xb, yb) == expected

rows = lambda *ns: [torch.ones(n, 2) for n in ns]
@pytest.mark.parametrize('xb,yb,expected', [
    # columns, or items
    ((rows(5, 5, 5),), rows(3), (3, True)), ((rows(5, 5, 5),), rows(5), (5, True)),
    ((rows(5, 5, 5),), rows(7), (5, False)),
    ((rows(5, 4),), rows(7), (2, False)), ((rows(2, 4, 6),), rows(2), (3, False)), ((['a', 1],), (), (2, True)),
    ((rows(2, 3),), rows(2), (2, True)), (({'a': 1, 'b': rows(3, 3)},), rows(2), (2, True)),
    (({'a': rows(3, 4)},), rows(3), (2, False)), (({'a': torch.ones(5)},), rows(1), (5, False)),
    ((pack_sequence([torch.ones(3), torch.ones(2), torch.ones(2), torch.ones(1)]),), (), (4, True)),
    ((np.ones((3, 2)),), rows(3), (3, True)),
    ((np.array(1.), np.ones(2)), (), (2, True)), (([rows(3, 3), rows(3, 4)],), rows(3), (2, False)),
    (([rows(3, 3), rows(3, 3)],), rows(3), (3, True))])
def test_counts_lists(xb, yb, expected): assert count_items(xb, tuple(yb)) == expected

@pytest.mark.parametrize('x,y,views,plain', [(4, 8, (4, True), (4, False)), (8, 4, (4, True), (8, False)), (2, 6, (2, True), (2, False)),
    (4, 9, (4, False), (4, False)), (1, 4, (1, True), (1, False)), (3, 4, (3, False), (3, False)), (3, 3, (3, True), (3, True))])
def test_counts_views(x, y, views, plain):
    "One of the two may have several rows of each item"
    xb,yb = tuple(rows(x)),tuple(rows(y))
    assert count_items(xb, yb, True) == views and count_items(xb, yb) == plain
    assert count_items(xb, (), True) == (x, True)

class Known:
    "Knows what lists hold; here always `n` items"
    def __init__(self, n): self.n,self.asked = n,[]
    def look(self, *args): self.asked.append(args); return self.n

def test_asks_what_lists_hold():
    xb,yb,lists = (rows(5, 5, 5),),(tensor([1, 2, 3]),),Known(3)
    assert count_items(xb, yb, lists=lists, bs=lambda: 3) == (3, True) and count_items(xb, yb, lists=lists) == (3, True)
    assert all(a is b for a,b in zip(lists.asked[0][:2], (xb, yb))) and [bs for *_,bs in lists.asked] == [3, None]
    assert count_items(xb, yb, lists=Known(5)) == (5, False) and count_items(xb, lists=Known(5)) == (5, True)
    assert count_items(xb, (tensor([1]*5),), lists=Known(None)) == (5, True)
    lists = Known(3)
    assert count_items((torch.ones(4),), (torch.ones(4),), lists=lists) == (4, True) and not lists.asked       # the usual case
    with pytest.raises(TypeError, match='of a tuple: use tensors'): count_items((1, 'a'))

def test_n_items():
    assert [n_items(b)
            for b in (torch.ones(3), (torch.ones(4), torch.ones(5)), [tensor(1.), torch.ones(2)],
                      ((), torch.ones(6)))] == [3, 4, 2, 6]
    for b,kind in (((), 'tuple'), (tensor(1.), 'Tensor'), ('a', 'str')):
        with pytest.raises(TypeError, match=f'the items of a {kind} without tensors: pass the number of items'): n_items(b)
