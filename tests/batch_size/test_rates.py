"ScaleLR: the scaled values are used and recorded, and only then; a ramp's schedule"
import pytest
from reference import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.loop.batch_loop import LoopCallback
from fastaccum.precision.callback import MixedPrecision
from fastaccum.batch_size.rates import *
from fastaccum.logs.steps import StepLogger

torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.randn(61, 4))
events = 'after_backward', 'before_step', 'after_step', 'after_batch', 'after_train', 'after_epoch'
hypers = 'lr', 'mom', 'sqr_mom'

def scaled(*cbs, rule='sqrt', bs=8, n=8, **kwargs):
    kwargs = dict(dict(opt_func=Adam), **kwargs)
    return learner(data, n, *cbs, ScaleLR(rule, bs=bs, half_life=True), **kwargs)
def now(learn): return [[h[k] for k in hypers] for h in learn.opt.hypers]
def times(k, lr=1e-2, mom=.9, sqr_mom=.99, rule=.5): return [lr*k**rule, mom**k, sqr_mom**k]

class Used(Callback):
    "Writes down what the optimizer steps with"
    order = 1001
    def before_step(self): self.steps.append(now(self.learn))
    def before_fit(self):
        if not hasattr(self, 'steps'): self.steps = []

def test_used_and_recorded():
    "At the step, in the Recorder, in StepLogger and in the schedule's record; yours in between"
    seen = []
    watch = On('before_batch', lambda l: seen.append(now(l)), order=1000)
    learn = scaled(GradientAccumulation(32), StepLogger(), Used(), watch)
    learn.fit_one_cycle(2, 1e-2)
    plain = learner(data, 8, GradientAccumulation(32), StepLogger(), opt_func=Adam)
    plain.fit_one_cycle(2, 1e-2)
    want = [times(4, lr, mom) for lr,mom in zip(plain.recorder.lrs, plain.recorder.hps['mom'])]
    np.testing.assert_allclose([s[0] for s in learn.used.steps], want, rtol=1e-12)
    np.testing.assert_allclose(learn.recorder.lrs, [w[0] for w in want])
    np.testing.assert_allclose(learn.step_logger.to_df().lr, [w[0] for w in want])
    np.testing.assert_allclose(learn.recorder.hps['mom'], [w[1] for w in want])
    assert {s[0][2] for s in seen}=={.99} and seen[0][0][0]==plain.recorder.lrs[0]

@pytest.mark.parametrize('make', [lambda: GradientAccumulation(32), lambda: GradientAccumulation(32, log_accum_batch=False),
                                  lambda: GradientAccumulation(32, remainder='drop'), lambda: GradientAccumulation(32, remainder='carry'),
                                  lambda: GradientAccumulation(32, micro_batch_size=4)])
def test_same_as_by_hand(make):
    "As if the numbers had been written into the optimizer: the same weights, the same rows"
    learn,hand = scaled(make()),learner(data, 8, make(), opt_func=partial(Adam, mom=.9**4, sqr_mom=.99**4))
    learn.fit(2, 1e-2); hand.fit(2, 2e-2)
    assert rel_err(weights(learn.model), weights(hand.model)) < 1e-6
    assert learn.recorder.lrs==pytest.approx(hand.recorder.lrs) and now(learn)==[[1e-2, .9, .99]]

@pytest.mark.parametrize('ex', [CancelBatchException, CancelStepException, CancelTrainException, CancelEpochException,
                                CancelFitException, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize('event', events)
def test_put_back(event, ex):
    "Whatever ends the step, its batch, epoch or fit; and never while a callback of the epoch looks"
    if ex is CancelBatchException and event in ('after_batch', 'after_train', 'after_epoch'): pytest.skip('fastai does not catch it there')
    if ex is CancelStepException and event!='before_step': pytest.skip('fastai does not catch it there')
    bad = On(event, throw(ex('stopped')), calls=[3 if event in ('after_backward', 'after_batch') else 0], training=None)
    seen = []
    learn = scaled(GradientAccumulation(32), bad, On('before_epoch', lambda l: seen.append(now(l)), order=-20, training=None), Used())
    try: learn.fit(2, 1e-2)
    except (KeyboardInterrupt, ValueError, CancelEpochException, CancelTrainException): pass
    assert now(learn)==[[1e-2, .9, .99]] and all(s==now(learn) for s in seen)
    learn.remove_cb(bad)
    learn.fit(1, 1e-3)
    np.testing.assert_allclose(learn.used.steps[-1], [times(4, 1e-3)])
    assert now(learn)==[[1e-3, .9, .99]]

def test_callbacks_of_one_fit():
    "Given to a fit that an exception ends"
    learn = learner(data, 8, GradientAccumulation(32), opt_func=Adam)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 1e-2, cbs=[ScaleLR('linear'), On('after_step', throw(KeyboardInterrupt()))])
    assert now(learn)==[[1e-2, .9, .99]]

def test_groups():
    "A rate for each group, of fine_tune; and a torch optimizer"
    split = lambda m: [list(m[0].parameters()), list(m[2].parameters())]
    for opt_func in (Adam, partial(OptimWrapper, opt=torch.optim.AdamW)):
        runs = [learner(data, 8, GradientAccumulation(32), Used(), *cbs, splitter=split, opt_func=opt_func)
                for cbs in ((), [ScaleLR('linear', half_life=True)])]
        for l in runs: l.fine_tune(2, 1e-2)
        a,b = [np.array(l.used.steps) for l in runs]
        assert a.shape==(6, 2, 3) and (a[-1,0,0] < a[-1,1,0]/50)
        np.testing.assert_allclose(b, np.stack([4*a[...,0], a[...,1]**4, a[...,2]**4], -1), rtol=1e-6)

def test_flat_cos_and_schedule():
    "k follows the schedule; the rate's own schedule goes on beneath"
    def make(): return GradientAccumulationSchedule(16, 48, finish=1.)
    runs = [learner(data, 8, make(), StepLogger(), *cbs, opt_func=Adam) for cbs in ((), [ScaleLR('linear')])]
    for l in runs: l.fit_flat_cos(4, 1e-2)
    a,b = [l.step_logger.to_df() for l in runs]
    np.testing.assert_allclose(b.lr, a.lr*b.accum_bs/16)
    assert b.accum_bs.nunique() > 3

def test_lr_find():
    "The rates that it tries are the ones used"
    learn = scaled(GradientAccumulation(32), Used())
    with learn.no_bar(): learn.lr_find(num_it=12, show_plot=False)
    assert [s[0][0] for s in learn.used.steps]==pytest.approx(learn.recorder.lrs)
    assert learn.recorder.lrs[0]==pytest.approx(1e-7) and {s[0][1] for s in learn.used.steps}=={.9}
    learn.fit(1, 1e-2)
    np.testing.assert_allclose(learn.used.steps[-1], [times(4)])

def test_others_that_set_the_rate():
    "During a step: in multiples, or to what the next one takes"
    learn = scaled(GradientAccumulation(32), Used(), On('after_step', lambda l: l.opt.set_hyper('lr', l.opt.hypers[0]['lr']/2)))
    learn.fit(2, 1e-2)
    assert [s[0][0] for s in learn.used.steps]==pytest.approx([2e-2, 1e-2, .5e-2, .25e-2])
    learn = scaled(GradientAccumulation(32), Used(), On('before_step', lambda l: l.opt.set_hyper('lr', 3e-3), order=50))
    learn.fit(1, 1e-2)
    assert [s[0][0] for s in learn.used.steps]==pytest.approx([6e-3]*2)

@pytest.mark.fp16
def test_skipped_steps():
    learn = scaled(GradientAccumulation(32), MixedPrecision('fp16', init_scale=2.**60, max_scale=2.**60), StepLogger(), Used())
    learn.fit(8, 1e-2)
    df = learn.step_logger.to_df()
    assert df.skipped.any() and df.lr.tolist()==pytest.approx([2e-2]*len(df)) and now(learn)==[[1e-2, .9, .99]]

def test_checkpoint(capsys):
    "What is saved is yours, and what goes on is scaled"
    whole = scaled(GradientAccumulation(16), Used())
    whole.fit(2, 1e-2)
    learn = scaled(GradientAccumulation(16), Used(), TrainingCheckpoint(every_steps=1),
                   On('before_batch', throw(KeyboardInterrupt()), calls=[10]))
    with pytest.raises(KeyboardInterrupt): learn.fit(2, 1e-2)
    CheckpointFolder.in_use.clear()
    again = scaled(GradientAccumulation(16), Used(), TrainingCheckpoint(every_steps=1))
    again.fit(2, 1e-2)
    assert weights(again.model).equal(weights(whole.model)) and again.used.steps[-1]==whole.used.steps[-1]
    assert 'continues in epoch 1' in capsys.readouterr().out

def test_validate_amid_a_fit():
    learn = scaled(GradientAccumulation(16), Used(), On('after_step', lambda l: l.validate(), calls=[0]))
    learn.fit(2, 1e-2)
    assert all(s[0]==times(2) for s in learn.used.steps) and len(learn.used.steps) > 3 and now(learn)==[[1e-2, .9, .99]]

@pytest.mark.parametrize('kw,msg',
                         [(dict(rule='root'), "rule='root'"), (dict(rule='sqrt', bs=0), 'bs=0'),
                          (dict(rule='sqrt', bs=1.5), 'bs=1.5'), (dict(rule='sqrt', bs=True), 'bs=True')])
def test_arguments(kw, msg):
    with pytest.raises(ValueError, match=msg): ScaleLR(**kw)

def test_unknown_loader():
    batches = torch.utils.data.DataLoader(data, batch_sampler=[[0, 1, 2], [3, 4]])
    def make(*cbs): return Learner(DataLoaders(batches, batches), mlp(), loss_func=MSELossFlat(), cbs=cbs)
    with pytest.raises(ValueError, match='does not say how many items'): make(GradientAccumulation(4), ScaleLR('sqrt')).fit(1)
    learn = make(GradientAccumulation(4), ScaleLR('linear', bs=2))
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    assert learn.recorder.lrs==pytest.approx([2e-3])

def test_tidy():
    "Called once whatever ends a fit, also in a fit within `fine_tune`"
    class Count(LoopCallback):
        n = 0
        def tidy(self): self.n += 1
    learn = learner(data, 8, Count())
    learn.fine_tune(1); assert learn.count.n==2
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=On('after_pred', throw(KeyboardInterrupt())))
    assert learn.count.n==3

@pytest.mark.parametrize('decay', [SchedCos(1., .1), SchedExp(5., .5), SchedLin(1, 0),
                                   combine_scheds([.5, .5], [SchedNo(1, 1), SchedLin(1, .25)]),
                                   lambda pos: .5**int(4*pos)])
def test_ramp(decay):
    "start*decay(0)/decay(pos), up to final; a decay to 0 is no division by it"
    acc = GradientAccumulationSchedule(8, 64, start=0., finish=1., schedule=batch_ramp(decay))
    for i in range(101):
        now = decay(i/100)
        assert acc.size_at(i, 100, 1)==(64 if i==100 or not now else round(min(64, 8*decay(0.)/float(now))))
    plan = acc.plan(4, dl=learner(data, 8).dls.train)
    assert sum(plan)==4*61 and len(plan)+acc.saved_steps(4, dl=learner(data, 8).dls.train)==32

def test_ramp_errors():
    with pytest.raises(TypeError, match='pass a function'): batch_ramp(.1)
    with pytest.raises(ValueError, match='begins with'): batch_ramp(SchedLin(0, 1))
