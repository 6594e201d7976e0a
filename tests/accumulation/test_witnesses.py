"Witnesses look and warn, and change nothing: without them every fit is the same to the last bit"
import ast, os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import pytest, torch, torch.nn as nn
from quick import quickly
from fastai.basics import Callback, tensor
from fastai.losses import LabelSmoothingCrossEntropy
import fits
from fastaccum.accumulation import witnesses
from fastaccum.all import DataParallel, GradientAccumulation, TrainingCheckpoint, launch
from fastaccum.accumulation.witnesses.witness import Witness, Witnesses, events
from fastaccum.accumulation.witnesses.added import AddedLoss
from fastaccum.accumulation.witnesses.inexact import InexactLoss
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.core.losses import LossRule

# The number of micro-batches that each kind of warning needs is in tests of their own: here it is enough that some are given
told_in = {'smoothing, class weights', 'own sum', 'lockstep, own buffers', 'penalty of activations', 'penalty, tokens', 'rates',
           'gradients', 'hooks', 'weights', 'buffers', 'terms', 'text classifier', 'head', 'lockstep', 'batchnorm', 'whole step each'}

in_short = ['whole', 'items', 'coupled', 'head', 'tokens', 'lockstep, own buffers', 'smoothing, class weights', 'own sum',
            'penalty of activations', 'penalty, tokens', 'rates', 'gradients', 'hooks', 'weights', 'buffers', 'batchnorm', 'terms', 'fp16',
            'cancelled']

@pytest.mark.parametrize('name', quickly(in_short, fits.kinds))
def test_a_fit_is_the_same_without_them(name, monkeypatch):
    "Numbers, errors, and random numbers after it. Their warnings are gone, others stay"
    seen = fits.fitted(fits.kinds[name])
    monkeypatch.setattr(witnesses, 'kinds', [])
    unseen = fits.fitted(fits.kinds[name])
    assert set(fits.differs(seen, unseen)) <= {'told'} and set(unseen['told']) <= set(seen['told'])
    assert (unseen['told'] != seen['told']) == (name in told_in)
    assert seen['losses'] or seen['error']

class Interrupt(Callback):
    order = 2000
    def after_batch(self):
        if self.learn.training and self.learn.train_iter == 6: raise OSError('the power is out')

def resumed(folder):
    def make(*cbs):
        CheckpointFolder.in_use.clear()
        return fits.learner(fits.classes, fits.drop(), fits.own_weights, GradientAccumulation(32, micro_batch_size=6),
                            fits.ChangesGradients(), TrainingCheckpoint(folder/'run', every_steps=1), *cbs)
    assert 'the power is out' in fits.fitted(lambda: make(Interrupt()))['error']
    return fits.fitted(make)

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::fastaccum.core.warnings.FastaccumWarning')
def test_a_resumed_fit(tmp_path, monkeypatch):
    seen = resumed(tmp_path/'seen')
    monkeypatch.setattr(witnesses, 'kinds', [])
    unseen = resumed(tmp_path/'unseen')
    assert fits.differs(seen, unseen) in ([], ['told']) and len(seen['losses']) > 4

# Two ranks
cases = dict(items=dict(loss=fits.own_weights, cbs=[fits.Penalty()]),
             coupled=dict(loss=fits.contrast, coupled=True, weight=lambda learn: len(learn.y)),
             lockstep=dict(model=fits.norm, loss=nn.CrossEntropyLoss(), coupled='batchnorm'))
def of_rank(model=fits.mlp, loss=None, cbs=(), **kwargs):
    acc = GradientAccumulation(32, micro_batch_size=3, **kwargs)
    return fits.fitted(lambda: fits.learner(fits.classes, model(), loss, acc, DataParallel(), *cbs))
def of_ranks(): return {name: of_rank(**kwargs) for name,kwargs in cases.items()}

@pytest.mark.slow
def test_ranks(tmp_path):
    "In a process of their own, which has not gone backward"
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(map(str, Path(__file__).resolve().parents[1:3]))}
    run = subprocess.run([sys.executable, __file__, tmp_path/'out.pt'], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    for seen,unseen in zip(*torch.load(tmp_path/'out.pt', weights_only=False)):
        for name in cases:
            assert set(fits.differs(seen[name], unseen[name])) <= {'told'}
            assert seen[name]['error'] is None and len(seen[name]['losses']) > 3

# --- what they cost, and may do
class Counts(Witness):
    n = 0
    def before_batch(self, batch): Counts.n += 1

def test_not_due_costs_nothing(monkeypatch):
    "Whoever is not due is not called. Of a plain fit nobody is, after the first loader batch that was split"
    n_looks = []
    class Looks(Callback):
        def after_backward(self): n_looks.append(len(self.learn.gradient_accumulation.batch.looks))
        reads_pred = False
    monkeypatch.setattr(witnesses, 'kinds', [*witnesses.kinds, Counts])
    learn = fits.learner(fits.classes, fits.mlp(), nn.CrossEntropyLoss(), GradientAccumulation(32, micro_batch_size=8), bs=8)
    learn.add_cb(Looks())
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert Counts.n == 0 and n_looks[0] > 0 and learn.gradient_accumulation.witnesses.looks(None) == []

class Due(Witness):
    due,seen = True,[]
    def before_batch(self, batch): self.seen.append(type(self))
class LooksAtWhole(Due): looks_at_whole = True

@pytest.mark.parametrize('kwargs,all_look', [
    (dict(accum_bs=8), False), (dict(accum_bs=16), True), (dict(accum_bs=8, remainder='drop'), False), (dict(micro_batch_size=4), True),
    (dict(micro_batch_size=8, coupled=True), False), (dict(micro_batch_size=4, coupled=True), True)])
def test_of_a_whole_step(kwargs, all_look, monkeypatch):
    "In one piece it is the big batch itself: only those that say so look at it"
    monkeypatch.setattr(witnesses, 'kinds', [Due, LooksAtWhole])
    monkeypatch.setattr(Due, 'seen', [])
    learn = fits.learner([t[:16] for t in fits.classes], fits.mlp(), nn.CrossEntropyLoss(), GradientAccumulation(**kwargs), bs=8)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert Due.seen == ([Due, LooksAtWhole] if all_look else [LooksAtWhole])*2

class Rules(Witness):
    heard = []
    def new_rule(self): self.heard.append((self.cb.facts.replaced is not None, self.cb.rule.by is not None))

def test_a_replaced_loss_is_another_rule(monkeypatch):
    "They hear of it at once, before it is measured"
    monkeypatch.setattr(witnesses, 'kinds', [Rules])
    monkeypatch.setattr(Rules, 'heard', [])
    learn = fits.kinds['replaced']()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert Rules.heard[:2] == [(False, False), (True, False)]

def test_numbers_are_read_at_once():
    heard,all_ = [],Witnesses(None)
    for v in (torch.tensor(True), torch.tensor(2.5), torch.tensor(3)): all_.ask(v, heard.append)
    assert heard == []
    all_.read(); assert heard == [1, 2.5, 3]
    all_.read(); assert len(heard) == 3

def test_events():
    "Only those that define one hear it"
    class A(Witness):
        def opens(self, batch): self.heard = batch
    cb = SimpleNamespace(learn=None, loop=None)
    all_ = Witnesses(cb, [A, Witness])
    all_.call('opens', 5)
    assert all_.all[0].heard == 5 and {ev: len(fs) for ev,fs in all_.heard.items()} == {ev: int(ev == 'opens') for ev in events}

folder = Path(witnesses.__file__).parent
def test_one_a_file_and_all_in_the_list():
    "In the list, in the table of the page, and each with a page of its own"
    names = [n.name for f in sorted(folder.glob('*.py')) for n in ast.parse(f.read_text(encoding='utf-8')).body
             if isinstance(n, ast.ClassDef) and n.name != 'SomeSteps' and {getattr(b, 'id', '') for b in n.bases} & {'Witness','SomeSteps'}]
    assert sorted(names) == sorted(k.__name__ for k in witnesses.kinds) and len({k.__module__ for k in witnesses.kinds}) == len(names)
    page = (Path(__file__).resolve().parents[2]/'nbs/api/accumulation/witnesses/index.ipynb').read_text(encoding='utf-8')
    assert all(f'[`{name}`](' in page for name in names)

# --- parts of single ones
def witness(kind, rule, yb, **kwargs):
    learn = SimpleNamespace(yb=yb, model=None)
    return kind(SimpleNamespace(learn=learn, loop=None, rule=rule, weight=None, **kwargs))

def rule_of(loss_func):
    rule = LossRule()
    rule.look_up(loss_func)
    return rule

cw,y = torch.tensor([1., 2., 4.]),torch.tensor([0, 2, -100, 1])
@pytest.mark.parametrize('loss,yb,found', [(LabelSmoothingCrossEntropy(), y.clamp(min=0), False), (LabelSmoothingCrossEntropy(), y, True),
                                           (LabelSmoothingCrossEntropy(weight=cw), y.clamp(min=0), True)])
def test_inexact(loss, yb, found):
    w = witness(InexactLoss, rule_of(loss), (yb,))
    w.new_rule(); assert w.due
    w.after_batch(None); assert bool(w.found) == found
    w.learn.yb = (y.clamp(min=0),)
    w.after_batch(None); assert bool(w.found) == found                # once is enough

def test_exact_is_not_due():
    w = witness(InexactLoss, rule_of(nn.CrossEntropyLoss()), (y,))
    w.new_rule()
    assert not w.due

def own(pred, y): return pred.mean()
@pytest.mark.parametrize('loss,batches,off', [
    (own, [((None,), 2), ((None,), 3)], [0, 0]),
    (nn.CrossEntropyLoss(), [((torch.ones(2, 3).long(),), 2), ((torch.ones(3, 2).long(),), 3)], [0, 0]),
    (nn.CrossEntropyLoss(), [((tensor([1, 1]), torch.ones(0)), 2), ((tensor([1, 1, -100, -100]),), 4)], [0, .5]),
    (nn.CrossEntropyLoss(weight=cw), [((tensor([0, 0]),), 2), ((tensor([0, 0, 0]),), 3), ((tensor([1, 1]),), 2)], [0, 0, 1]),
    (nn.CrossEntropyLoss(), [((tensor([-100]),), 1), ((tensor([1]),), 1)], [0, 1])])
def test_uneven(loss, batches, off):
    w = witness(AddedLoss, rule_of(loss), None)
    for (yb,n),o in zip(batches, off):
        w.learn.yb = yb
        assert w._uneven(n) == pytest.approx(o)

if __name__ == '__main__':
    seen = launch(of_ranks, 2)
    witnesses.kinds = []
    torch.save((seen, launch(of_ranks, 2)), sys.argv[1])
