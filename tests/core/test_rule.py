"`LossRule`: what it looks up, the weights of micro-batches at once, and when it looks"
from functools import partial
from types import SimpleNamespace
import numpy as np, pytest, torch, torch.nn as nn, torch.nn.functional as F
from torch import tensor
from fastai.losses import BaseLoss, CrossEntropyLossFlat, FocalLoss, LabelSmoothingCrossEntropy
from torch.nn.utils.rnn import pack_sequence
from fastaccum.core.losses import (LossInfo, LossRule, _item_weights, _options, _passing, _targets, _valid, at_least,
                                   count_items, ignore_empty,
                                   is_known, loss_weight, mixer_of, n_items, unwrapped)
from fastaccum.core.probe import LossProbe

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
    rule = rule_of(loss, LossProbe)
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
    rule.look_up(rule.info.loss_func, False); assert rule.probe is None
    info = rule.info
    rule.look_up(info.loss_func, False); assert rule.info is info
    rule.look_up(info.loss_func, True); assert rule.info is not info and rule.probe is not None

def test_looks_up_the_probe_too():
    "Options of a known loss may make it one that is measured"
    loss = nn.CrossEntropyLoss()
    rule = rule_of(loss, LossProbe)
    loss.ignore_index = 3
    rule.look_up(loss); assert str(rule) == "valid targets (not 3) (known: PyTorch's or fastai's own)"
    loss.reduction = 'none'
    rule.look_up(loss); assert rule.probed and rule.measuring and not rule.probe.known
    loss.reduction = 'mean'
    probe = rule.probe
    rule.look_up(loss); assert rule.probe is probe                                 # it is measured now

def test_looks_inside():
    flat = CrossEntropyLossFlat()
    rule = rule_of(flat, LossProbe)
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

def test_forgets_with_other_class_weights():
    class Weighted:
        def __call__(self, pred, t): return F.cross_entropy(pred, t, weight=self.weight)
    loss = Weighted()
    loss.weight = cw
    rule,pred = rule_of(loss, LossProbe),torch.randn(8, 3)
    rule.due(); rule.measure(pred, (y,), 8)
    assert rule.info.class_weight is cw and rule.info.over == 'classes' and not rule.measuring
    probe,info = rule.probe,rule.info
    rule.look_up(loss); assert rule.info is info
    loss.weight = cw.flip(0)
    rule.look_up(loss); assert rule.probe is probe and rule.measuring and not rule.info.measured
    flat = BaseLoss(nn.MSELoss)
    flat.func = own
    rule.look_up(flat); assert rule.probe is not probe and rule.probed
    probe = rule.probe
    rule.look_up(flat); assert rule.probe is probe
    flat.func = lambda pred, t: own(pred, t)
    rule.look_up(flat); assert rule.probe is not probe                             # the same wrapper, another loss in it

def test_sure():
    assert rule_of(own).sure is True and rule_of(nn.MSELoss(), LossProbe).sure is True
    rule = rule_of(own, LossProbe)
    assert rule.sure is False
    rule.due(); rule.measure(torch.randn(1, 3), (torch.randn(1, 3),), 1); assert rule.sure is False      # a single item cannot tell
    rule.due(); rule.measure(torch.randn(4, 3), (torch.randn(4, 3),), 4); assert rule.sure is True

def test_adopts():
    "A rank with single items takes over what another one has measured, and weighs those by it"
    torch.manual_seed(0)
    pred,holes = torch.randn(8, 3),tensor([0, -1, 2, 0, -1, 2, 1, 1])
    other,rule = rule_of(valid, LossProbe),rule_of(valid, LossProbe)
    other.due(); other.measure(pred, (holes,), 8)
    rule.due(); rule.measure(pred[1:2], (holes[1:2],), 1)
    assert [float(w) for w in rule.adopt(other.info.as_dict())] == [0] and rule.info is rule.probe.rule
    assert rule.info.key == other.info.key and rule.info.ignore_index == -1 and 'measured by another process' in str(rule)

class Mix:
    def __init__(self, old): self.old_lf = old
    def lf(self, pred, t): return self.old_lf(pred, t)

def test_mixers():
    mix = Mix(nn.CrossEntropyLoss(weight=cw))
    rule = rule_of(mix.lf, LossProbe)
    assert rule.info.over == 'elements' and rule.info.loss_func is mix.old_lf and not rule.probed and not rule.info.inexact
    assert mixer_of(mix.lf) is mix and mixer_of(own) is None and mixer_of([].append) is None
    assert LossInfo(LabelSmoothingCrossEntropy()).inexact and not LossInfo(LabelSmoothingCrossEntropy()).plain_mean().inexact

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
    rule.times.next = 10**9
    rule.begin_epoch(); at = rule.times.next - rule.times.n
    assert 1 <= at <= 490                                                            # as many as the last epoch had
    always = rule_of(own, LossProbe, always=True)
    for i in range(30):
        assert always.due()
        always.measure(p, (t,), 4)

class Script:
    "A probe that finds `rules`, one at each look"
    known,open,left_out,was_sure,change,moves = False,False,False,False,None,None
    def __init__(self, *rules): self.rules,self.calls,self.rule = [*rules],[],rules[0]
    def look(self, *args, **kwargs): self.calls.append((args, kwargs)); self.rule = self.rules.pop(0)
    def take_change(self): return self.change
    def left_out_message(self, n): return f'{n} left out'
    def moves_message(self): return self.moves
    def take_news(self): pass
    def changed_message(self, *args): return args

info = LossInfo(own)
other = info.measure('elements')

def scripted(*rules):
    rule = LossRule()
    rule.probe,rule.info,rule.probed = Script(*rules),rules[0],True
    return rule,rule.probe

def randoms(rule, at):
    "The ranges that are drawn from; what is drawn is one end of them"
    ranges = []
    def draw(*ends): ranges.append(ends); return ends[at]
    rule.times._random = SimpleNamespace(randint=draw, uniform=draw)
    return ranges

def test_first_looks():
    "At the first 8 micro-batches, later ever more rarely"
    rule,_ = scripted(info)
    rule.times.next = 11
    assert [rule.due() for _ in range(12)] == [True]*8 + [False]*2 + [True]*2
    rule.always = True;                        rule.times.next = 99; assert rule.due()
    rule.always,rule.measuring = False,True;                    assert rule.due()
    rule.measuring = False;                                     assert not rule.due()

@pytest.mark.parametrize('at,n,next', [(0, 1, 2), (0, 3, 5), (1, 10, 25), (0, 100, 150), (1, 100, 250)])
def test_next_look(at, n, next):
    rule,_ = scripted(info, info)
    ranges,rule.times.n = randoms(rule, at),n
    rule.measure(None, None, 4)
    assert ranges == [(.5, 1.5)] and rule.times.next == next

def test_looks_in_each_epoch():
    rule,_ = scripted(info)
    ranges,rule.times.next = randoms(rule, 1),99
    rule.begin_epoch(); assert rule.times.next == 1 and ranges == [(1, 1)]                # no epoch before it
    rule.times.next = 99
    for _ in range(5): rule.due()
    rule.begin_epoch(); assert rule.times.next == 10 and ranges[1:] == [(1, 5)]
    for _ in range(3): rule.due()
    rule.begin_epoch(); assert rule.times.next == 10 and ranges[2:] == [(1, 3)]           # 11 would be later
    rule,_ = scripted(info)
    ranges = randoms(rule, 1)
    for _ in range(5): rule.due()
    rule.begin_epoch(); assert ranges == [(1, 5)]                                    # what went before the first epoch counts, too
    assert LossRule().times._random.random() == LossRule().times._random.random()                # at the same places in each run

@pytest.mark.parametrize('change,gap,before,seen,was_sure,says', [
    (None, False, 0, 0, False, False), (None, True, 0, 0, False, False), (None, False, 1, 1, False, False),
    (None, False, 1, 0, False, False),
    (.5, False, 0, 0, False, False), (.5, True, 0, 0, False, True), (.5, False, 1, 1, False, True), (.5, True, 1, 1, True, True),
    (None, False, 0, 0, True, False), (None, True, 0, 0, True, True), (None, False, 1, 1, True, False), (None, False, 1, 0, True, True),
    (0., True, 0, 0, False, True)])
def test_says_what_could_not_be_corrected(change, gap, before, seen, was_sure, says):
    "A change is told if micro-batches that were not looked at may have been weighted wrongly; a rule that was measured, if it goes"
    rule,probe = scripted(*[info]*seen, other)
    rule.info = info
    for i in range(seen): rule.times.n += 1; rule.measure(None, (torch.ones(4, 3),), 4, before=i, where='earlier')
    rule.times.n += 1 + gap
    probe.change,probe.was_sure = change,was_sure
    late = rule.measure(None, (torch.ones(2, 3),), 2, before=before, where='now')
    assert late == ([12] if before and seen and not gap else None) and rule.news == [(info, change, 'earlier' if seen else '', 'now')]*says

def test_measures_what_it_is_given():
    rule,probe = scripted(*[info]*4)
    rule.measure('pred', 'yb', 4, 0, 'loss', 'losses', 'shown', 'where')
    assert probe.calls == [(('pred', 'yb', 4), dict(loss='loss', losses='losses', shown='shown', where='where'))] and not rule.news
    rule.measure('pred', 'yb', 4); assert probe.calls[1] == (('pred', 'yb', 4), dict(loss=None, losses=None, shown=None, where=''))
    probe.left_out,probe.moves = True,'it moves'
    rule.measure(None, None, 5); assert rule.news == ['5 left out']
    probe.left_out = False
    rule.measure(None, None, 5, before=1); assert rule.news[1:] == ['it moves']     # with one micro-batch a step it is as always

def test_end():
    rule = rule_of(own, LossProbe)
    rule.end(); assert rule.measuring is False and rule.probe.open is False and rule.message is None    # it was not looked at
    rule = rule_of(own, LossProbe)
    rule.due(); rule.measure(torch.randn(1, 3), (torch.randn(1, 3),), 1)
    rule.end(); assert 'could not be measured (it has seen a single item)' in rule.message

def test_passes_over():
    "A micro-batch that is all of a step. If the step is cancelled, and goes on, it gets its weight"
    rule = rule_of(valid, LossProbe)
    rule.pass_over((tensor([1, -1, -1, 2]),), 4)
    assert str(rule).startswith('not looked at') and rule.probe.rules.seen == [] and rule.message is None
    assert rule.due()
    assert rule.measure(torch.randn(4, 3), (tensor([1, -1, 0, 2]),), 4, before=1) == [2]
    assert 'not looked at' not in str(rule) and not rule.news
    rule = rule_of(valid, LossProbe)
    for before in 0,1: rule.due(); rule.measure(torch.randn(4, 3), (tensor([1, -1, 0, 2]),), 4, before=before)
    rule.due(); rule.due()
    assert rule.measure(torch.randn(4, 3), (tensor([1, 1, 0, 2]),), 4, before=2) is None               # those before were others
    assert len(rule._earlier) == 1
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
    rule,probe = scripted(info)
    probe.sum_message = lambda *args: args
    assert rule.sum_message(3, 5) is None
    rule.info = info.measure('items', reduction='sum')
    assert rule.sum_message(3, 5) == (3, 5)
    rule.probed = False; assert rule.sum_message(3, 5) is None

# --- what is known

def test_names():
    info = LossInfo(nn.CrossEntropyLoss(weight=cw))
    assert str(info) == 'class weights of the valid targets (not -100)' and str(info.measure('items')) == 'items'
    assert str(LossInfo(nn.CrossEntropyLoss())) == 'valid targets (not -100)'
    assert str(info.measure('valid', ignore_index=None, class_weight=None)) == 'valid targets'
    assert str(info.measure('valid', ignore_index=None, target=1, class_weight=None)) == 'valid targets (of target 1)'
    assert str(info.measure('valid', target=1, class_weight=None)) == 'valid targets (not -100, of target 1)'
    assert (str(info.measure('mask', target=1, channel=2)) == 'the sum of target 1, column 2'
            and str(info.measure('mask', target=0)) == 'the sum of the target')
    assert (str(info.measure('elements')) == 'elements of the target'
            and str(LossInfo(nn.MSELoss(reduction='sum'))) == 'nothing: it is a sum')
    count = info.measure('count', test=('in 0 to', 5), floor=1)
    assert str(count) == 'the number of targets in 0 to 5 in the target, at least 1'
    assert str(count.measure('count', target=1, channel='row', shifted=True)) == \
        'the number of targets in 0 to 5 in target 1, by row without its first column, at least 1'
    assert str(info.measure('valid', shifted=True)) == 'valid targets (not -100, of the target without its first column)'

rules = [info.measure(**{**dict(over='valid', ignore_index=float('nan')), **kw}) for kw in (
    {}, dict(over='count'), dict(reduction='sum'), dict(ignore_index=0), dict(target=1), dict(channel=1), dict(class_weight=cw),
    dict(class_weight=cw.clone()), dict(test=('>', 0)), dict(shifted=True), dict(floor=1))]
def test_keys():
    "Two rules are the same if nothing differs, a NaN neither"
    assert (len({r.key for r in rules}) == len(rules)
            and all(r.measure(**r.as_dict()|dict(class_weight=r.class_weight)).key == r.key for r in rules))
    assert rules[0].measure('valid', ignore_index=float('nan')).key == rules[0].key
    assert rules[-1].key[:-1] == rules[-1].measure('valid', floor=.5).key[:-1]        # the floor is measured for all others alike

def test_rule_for_another_process():
    w = cw.clone().requires_grad_()
    rule = info.measure('valid', ignore_index=3, target=1, channel=2, test=('>', 0), floor=.5, shifted=True, class_weight=w).as_dict()
    assert torch.equal(rule['class_weight'], cw) and not rule['class_weight'].requires_grad
    rule['class_weight'] = None
    assert rule == dict(over='valid', reduction='mean', ignore_index=3, target=1, channel=2, test=('>', 0), floor=.5,
                        shifted=True, class_weight=None)
    assert rules[0].as_dict()['class_weight'] is None and list(rules[0].as_dict()) == list(rule)

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
    assert _item_weights(half, y).dtype is torch.float32 and _item_weights(half, y)[2] == 0          # an ignored target counts nothing
    assert _item_weights(LossInfo(nn.CrossEntropyLoss(weight=tensor([2.]))), tensor([0, -100])).tolist() == [2, 0]
    assert _item_weights(LossInfo(nn.CrossEntropyLoss(weight=cw.double())), y).dtype is torch.float64
    assert _item_weights(LossInfo(nn.CrossEntropyLoss(weight=cw.to(torch.float8_e4m3fn).bfloat16())), y).dtype is torch.float32
    assert _item_weights(LossInfo(nn.CrossEntropyLoss()), ()) == 1
    assert _item_weights(LossInfo(nn.CrossEntropyLoss()), 'text') == 1 and _item_weights(LossInfo(F.mse_loss), (torch.ones(2, 3, 4),)) == 12

@pytest.mark.parametrize('test,rows', [(('>', 1), [0, 1, 2]), (('>=', 1), [1, 2, 2]), (('==', 1), [1, 1, 0]), (('in 0 to', 1), [3, 1, 0])])
def test_counts(test, rows):
    counts = LossInfo(own).measure('count', test=test, floor=1)
    t = tensor([[0, 1, 0], [1, -1, 2], [3, -1, 2]])
    assert _item_weights(counts, t, torch.float64).tolist() == rows and not _item_weights(counts, t, torch.float64).is_floating_point()

def test_counts_by():
    "A column, a row, an item: what counts is their largest element"
    t = tensor([[[0, 1], [2, 0], [3, 3]], [[0, 0], [0, 0], [0, 1]]])
    by = lambda channel, of=t: _item_weights(LossInfo(own).measure('count', channel=channel, test=('>', 0), floor=1), of).tolist()
    assert by(None) == [4, 1] and by(0) == [2, 0] and by(1) == [2, 1] and by('row') == [3, 1] and by('item') == [1, 1]
    assert by('item', t-1) == [1, 0] and by('row', t-1) == [2, 0]
    assert _passing(t, LossInfo(own).measure('count', channel='row', test=('>', 0))).shape == (2, 3)

def test_sum_of_a_mask():
    mask,t = LossInfo(own).measure('mask'),tensor([[[.1, 1.], [.2, 0.]], [[0., 0.], [0., 2.]]])
    assert _item_weights(mask, t).tolist() == pytest.approx([1.3, 2.]) and _item_weights(mask, t).dtype is torch.float32
    assert _item_weights(mask.measure('mask', channel=1), t).tolist() == [1, 2]
    assert _item_weights(mask, t, torch.float64).tolist() == [sum(t.double()[0].flatten().tolist()), 2]

def test_shifted():
    t = tensor([[1, 2, -100], [-100, 1, 1]])
    assert _item_weights(LossInfo(own).measure('valid', shifted=True, target=1), (torch.ones(2), t)).tolist() == [1, 2]

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
    (4, 9, (4, False), (4, False)), (1, 4, (1, False), (1, False)), (3, 4, (3, False), (3, False)), (3, 3, (3, True), (3, True))])
def test_counts_views(x, y, views, plain):
    "One of the two may have several rows of each item; one item of many rows is none of them"
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
