"""What becomes of the items left at the end of an epoch: one more policy is one object and its name, and no item is lost without a word

The other tests go through all of `policies`; here another one is added to them."""
import pytest
from reference import *
from test_checkpoint import Interrupt, new_process, one_process
from test_epoch_ends import data61, fit_and_check, learner61
from fastaccum.accumulation.remainder import Fate, Remainder, policies
from fastaccum.checkpoint.callback import TrainingCheckpoint

class AtLeastHalf(Remainder):
    "Step if half an accumulated batch is there, or more"
    may = Fate.STEP,Fate.DROP
    def choose(self, n, accum_bs): return Fate.STEP if 2*n >= accum_bs else Fate.DROP

class CarryFew(Remainder):
    "Carry a quarter of an accumulated batch or less over to the next epoch, drop up to a half, step on more"
    may = tuple(Fate)
    def choose(self, n, accum_bs): return Fate.CARRY if 4*n <= accum_bs else Fate.DROP if 2*n < accum_bs else Fate.STEP

of_tests = dict(half=AtLeastHalf(), few=CarryFew())

@pytest.fixture(params=[*policies, *of_tests])
def remainder(request, monkeypatch):
    for name,policy in of_tests.items(): monkeypatch.setitem(policies, name, policy)
    return request.param

@pytest.mark.parametrize('n', [61, 45, 40, 36, 32])
@pytest.mark.parametrize('split', [None, 5])
def test_plan_and_steps(n, split, remainder):
    "The plan, the steps, their gradients and rows are those of the policy"
    data = Data(data61.x[:n], data61.y[0][:n])
    learn = learner61(remainder=remainder, data=data, micro_batch_size=split)
    steps = accumulated(data.sizes(8), 32, remainder, 3)
    assert learn.gradient_accumulation.plan(3) == [sum(data.sizes(8)[i] for _,i in step) for step in steps]
    fit_and_check(learn, steps)

@pytest.mark.parametrize('pct', [.2, .6, .9])
def test_short_epochs(pct, remainder):
    stop = 'after_batch',CancelTrainException,[(e, math.ceil(pct*8)) for e in range(3)]
    fit_and_check(learner61(ShortEpochCallback(pct), remainder=remainder), accumulated(data61.sizes(8), 32, remainder, 3, stop))

class Taken(Callback):
    "Items of the loader batches"
    order,run_valid = -5,False
    def before_fit(self): self.n = 0
    def after_batch(self): self.n += len(self.learn.yb[0])

@pytest.mark.parametrize('n,pct', [(61, 1), (45, 1), (36, 1), (61, .6)])
def test_no_item_is_lost(n, pct, remainder, capsys):
    "A policy that does not say that it may drop items steps on all of them, or a message tells what is left of the fit"
    learn = learner61(Taken(), ShortEpochCallback(pct), remainder=remainder, data=Data(data61.x[:n], data61.y[0][:n]))
    learn.fit(3, .01)
    stepped = sum(step.n_items for step in learn.spy.steps)
    told = re.search(r'ended with (\d+) of', capsys.readouterr().out)
    lost = learn.taken.n - stepped - (int(told[1]) if told else 0)
    assert lost == 0 or lost > 0 and policies[remainder].may_drop

@pytest.mark.parametrize('planted', [Fate.STEP, Fate.DROP, Fate.CARRY], ids=lambda f: f.name)
@pytest.mark.parametrize('name', ['step', 'drop', 'carry'])
def test_a_wrong_policy_is_found(name, planted, monkeypatch):
    "The checks above can fail: a policy that does something else than its name says"
    if planted.name.lower() == name: return
    monkeypatch.setitem(policies, name, type('Planted', (Remainder,), dict(may=(planted,)))())
    with pytest.raises(AssertionError): test_plan_and_steps(61, None, name)

def test_gradients_that_are_cleared_without_a_word_are_found(remainder, monkeypatch, capsys):
    "An end of the epoch that clears what the policy keeps"
    if policies[remainder].may_drop: return
    end = GradientAccumulation._end_epoch
    def planted(self):
        if self.n_items: self.clear()
        end(self)
    monkeypatch.setattr(GradientAccumulation, '_end_epoch', planted)
    for check in (lambda: test_short_epochs(.6, remainder), lambda: test_no_item_is_lost(61, .6, remainder, capsys)):
        with pytest.raises(AssertionError): check()

def trained(*cbs, remainder, stop_at=None):
    set_seed(0)
    data = Data(data61.x[:45], data61.y[0][:45])
    learn = learner61(*cbs, Interrupt(stop_at), remainder=remainder, data=data, opt_func=partial(SGD, mom=.9))
    learn.fit_one_cycle(3, .05)
    return learn

@pytest.mark.parametrize('at', [(0, 4), (1, 2), (2, 5)])
def test_resume(at, remainder):
    "A fit that goes on from a checkpoint has the weights and rates of one that was not interrupted"
    whole = trained(remainder=remainder)
    with pytest.raises(RuntimeError, match='interrupted'): trained(TrainingCheckpoint(every_steps=1), remainder=remainder, stop_at=at)
    new_process()
    learn = trained(TrainingCheckpoint(every_steps=1), remainder=remainder)
    assert torch.equal(weights(learn.model), weights(whole.model))
    assert learn.recorder.lrs == whole.recorder.lrs

def test_the_name_is_all_that_is_needed(remainder):
    "A schedule, the errors before training and the plan of rates take it, and messages name it"
    acc = GradientAccumulationSchedule(16, 64, remainder=remainder)
    assert acc.plan(4, DataLoader(data61, bs=8)) and remainder in repr(acc) + 'step'
    with pytest.raises(ValueError, match=f"'nothing' is not one of .*'{remainder}'"): GradientAccumulation(32, remainder='nothing')

def test_fates_that_are_not_declared():
    class Forgets(Remainder):
        may = Fate.STEP,
        def choose(self, n, accum_bs): return Fate.DROP
    with pytest.raises(ValueError, match='Forgets says .*DROP.* of 3 items left with accum_bs=8'): Forgets()(3, 8)

def test_never_a_step(monkeypatch):
    "Any policy that would drop each epoch is an error before training"
    monkeypatch.setitem(policies, 'half', AtLeastHalf())
    with pytest.raises(ValueError, match="remainder='half' with accum_bs=200 would never step.*Use 'step' or 'carry'"):
        learner61(accum_bs=200, remainder='half').fit(1)
