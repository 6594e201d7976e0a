"A step whose gradient is far above those before it is skipped, as one that overflows in fp16: weights, optimizer and schedules see none"
import tempfile, pytest
from contextlib import suppress
from reference import *
from fastaccum.all import DataParallel, FullyShard, MixedPrecision, SkipSpikes, StepLogger, TrainingCheckpoint, launch

N = 96          # 12 loader batches of 8, six steps of 16 in an epoch

class Wrong(Callback):
    "Targets of some steps of the fit, from 1, are too large"
    run_valid,order = False,-1
    def __init__(self, steps, factor=1000.): self.steps,self.factor = steps,factor
    def before_batch(self):
        if self.learn.train_iter//2 + 1 in self.steps: self.learn.yb = (self.factor*self.y,)

class Seen(Callback):
    "Which steps were taken"
    run_valid,order = False,20
    def before_fit(self): self.stepped,self.events = [],[]
    def after_step(self): self.stepped.append(self.learn.stepped)
    def after_cancel_step(self): self.events.append('cancelled')

def make(*cbs, opt_func=partial(SGD, mom=.9), bs=8, acc=None, path=None):
    set_seed(0)
    x = torch.randn(N, 6)
    y = x@torch.randn(6, 1) + .1*torch.randn(N, 1)
    dls = DataLoaders(DataLoader([*zip(x, y)], bs=bs, shuffle=True), DataLoader([*zip(x, y)], bs=N), device='cpu')
    learn = Learner(dls, nn.Linear(6, 1), loss_func=nn.MSELoss(), opt_func=opt_func, path=path or tempfile.mkdtemp(),
                    cbs=[ifnone(acc, GradientAccumulation(16)), *cbs])
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def train(*cbs, n_epoch=8, **kwargs):
    learn = make(*cbs, **kwargs)
    learn.fit(n_epoch, .05)
    return learn

class LeavesOut(Callback):
    "The same by hand: an event before the step cancels it after zeroing the gradients"
    order,run_valid = 10.4,False
    def __init__(self, steps): self.steps,self.n = steps,0
    def before_step(self):
        self.n += 1
        if self.n not in self.steps: return
        for p in self.model.parameters(): p.grad.zero_()

def test_skips():
    learn = train(SkipSpikes(), Wrong([25, 40]), Seen(), StepLogger())
    spikes,df = learn.skip_spikes,learn.step_logger.to_df()
    assert spikes.skipped == [25, 40] == df.step[df.skipped].tolist()
    assert [i+1 for i,o in enumerate(learn.seen.stepped) if not o] == [25, 40] and learn.seen.events == ['cancelled']*2
    assert len(df) == 48 and df.spike_limit[:20].isna().all() and df.spike_limit[20:].max() < 1000
    assert np.isfinite(learn.recorder.values[-1]).all() and learn.recorder.values[-1][1] < .3

def test_is_the_run_without_these_steps():
    "Plain SGD: a step without gradient changes nothing"
    ours,by_hand = train(SkipSpikes(), Wrong([30]), opt_func=SGD),train(Wrong([30]), LeavesOut([30]), opt_func=SGD)
    assert torch.equal(weights(ours.model), weights(by_hand.model))
    assert ours.recorder.losses == by_hand.recorder.losses

def test_no_spikes():
    "Where none is, the run is the same to the bit, with clipping, too"
    for cbs in ([], [GradientClip(.5)]): assert torch.equal(weights(train(SkipSpikes(), *cbs).model), weights(train(*cbs).model))

def test_after_patience_it_goes_on():
    "The targets stay large: after five spikes in a row they are what is usual"
    learn = train(SkipSpikes(), Wrong(range(25, 100), 20.))
    assert learn.skip_spikes.skipped == [*range(25, 30)]

def test_warmup(): assert train(SkipSpikes(warmup=30), Wrong([25])).skip_spikes.skipped == []

@pytest.mark.parametrize('split', [None, {}, dict(exact=True)])
@pytest.mark.parametrize('nan', [float('nan'), float('inf')])
def test_not_finite(split, nan):
    acc,bs = (None, 8) if split is None else (GradientAccumulation(micro_batch_size=5, **split), 16)
    learn = train(SkipSpikes(), On('before_batch', lambda l: setattr(l, 'yb', (nan*l.y,)) if l.train_iter == 3 else None), acc=acc, bs=bs)
    assert learn.skip_spikes.skipped == [2 if split is None else 4] and torch.isfinite(weights(learn.model)).all()

@pytest.mark.fp16
def test_loss_scale():
    "It is unscaled, and an overflow is the scale's"
    scale = MixedPrecision('fp16', init_scale=4.)
    learn = train(SkipSpikes(), Wrong([30, 40], 50.), scale, StepLogger(),
                  On('before_backward', lambda l: setattr(l, 'loss_grad', l.loss_grad*float('inf')) if l.train_iter == 70 else None))
    df = learn.step_logger.to_df()
    assert learn.skip_spikes.skipped == [30, 40] and df.step[df.skipped].tolist() == [30, 36, 40]
    assert [i+1 for i,s in enumerate(scale.scaler.history()['skipped']) if s] == [35] and len(scale.scaler.history()['scale']) == 46
    assert abs(learn.skip_spikes.norms[20] - train(SkipSpikes()).skip_spikes.norms[20]) < .05*learn.skip_spikes.norms[20]

def test_without_accumulation():
    learn = make(SkipSpikes(), On('before_batch', lambda l: setattr(l, 'yb', (1000*l.y,)) if l.train_iter == 40 and l.training else None))
    learn.remove_cb(learn.gradient_accumulation)
    learn.fit(5, .05)
    assert learn.skip_spikes.skipped == [41]

def test_fits_and_validations():
    "Each fit begins anew; a validation leaves what the last one found, and lr_find skips nothing"
    learn = train(SkipSpikes(), Wrong([25]))
    learn.validate()
    assert learn.skip_spikes.skipped == [25] and len(learn.skip_spikes.norms) == 48
    learn.skip_spikes.plot()
    learn.lr_find(num_it=30, show_plot=False)
    learn.fit(1, .01)
    assert learn.skip_spikes.skipped == [] and len(learn.skip_spikes.norms) == 6

@pytest.mark.slow
def test_resume(tmp_path):
    "In the middle of an epoch, after a spike"
    def saved(name, *cbs):
        learn = make(SkipSpikes(), Wrong([25, 27]), TrainingCheckpoint(every_steps=1), *cbs, path=tmp_path/name)
        with suppress(KeyboardInterrupt): learn.fit(8, .05)
        return learn
    whole = saved('a')
    saved('b', Stop('after_batch', KeyboardInterrupt, [(4, 2)]))
    learn = saved('b')
    assert torch.equal(weights(learn.model), weights(whole.model)) and whole.skip_spikes.skipped == [25, 27] == learn.skip_spikes.skipped
    assert learn.skip_spikes.norms == whole.skip_spikes.norms and learn.skip_spikes.limits == whole.skip_spikes.limits

def test_cancelled_steps():
    "A step that another callback cancels before it is due goes on accumulating, and is no spike"
    def cancel(l):
        if l.train_iter == 51: raise CancelStepException
    learn = train(SkipSpikes(), On('before_step', cancel, order=30))
    assert learn.skip_spikes.skipped == [] and len(learn.skip_spikes.norms) == 47

@pytest.mark.slow
@pytest.mark.parametrize('remainder', ['step', 'carry'])
def test_the_end_of_an_epoch(remainder):
    "A step on a few items has a larger norm, and is taken; the norms of the others are judged without it"
    def make(*cbs):
        set_seed(0)
        x = torch.randn(258, 20)
        y = x@torch.randn(20, 1) + .1*torch.randn(258, 1)
        y[-2:] += 30
        dls = DataLoaders(*[DataLoader([*zip(x, y)], bs=64) for _ in range(2)], device='cpu')
        acc = GradientAccumulation(64, remainder=remainder)
        learn = Learner(dls, nn.Linear(20, 1), loss_func=nn.MSELoss(), opt_func=SGD, cbs=[acc, *cbs])
        with learn.no_bar(), learn.no_logging(): learn.fit(40, .05)
        return learn
    learn = make(SkipSpikes(sigma=3))
    spikes = learn.skip_spikes
    assert spikes.skipped == [] and torch.equal(weights(learn.model), weights(make().model))
    if remainder == 'step':
        rest,others = spikes.norms[24::5],np.median(spikes.norms[20:])
        assert max(rest) > 3*others and all(x == float('inf') for x in spikes.limits[24::5]) and max(spikes.limits[25::5]) < min(rest)

# -- ranks
kinds = dict(joint=DataParallel, sharded=FullyShard)
def of_ranks(kind):
    learn = train(SkipSpikes(), Wrong([25]), StepLogger(grad_norm=True), *([kinds[kind]()] if kind else []))
    w = [p.full_tensor() if hasattr(p, 'full_tensor') else p for p in learn.model.parameters()]
    norms = learn.skip_spikes.norms
    np.testing.assert_allclose(learn.step_logger.to_df().grad_norm, norms, rtol=1e-6)
    return learn.skip_spikes.skipped,torch.cat([p.detach().flatten() for p in w]),norms
def runs(): return {k: of_ranks(k) for k in kinds}
def both(n): return launch(runs, n) if n > 1 else of_ranks(None)

@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    from test_joint_validation import started
    waits = [started(both, n, tmp_path_factory.mktemp(f'ranks{n}'), __file__) for n in (1, 2)]
    return [wait() for wait in waits]

@pytest.mark.slow       # starts two ranks
@pytest.mark.parametrize('kind', kinds)
def test_ranks(ranks, kind):
    "They skip together, the step that one process skips"
    (skipped,w,norms),many = ranks
    for rank in many:
        assert rank[kind][0] == skipped == [25]
        assert (rank[kind][1]-w).norm() < 1e-5*w.norm()
        np.testing.assert_allclose(rank[kind][2], norms, rtol=1e-4)

if __name__ == '__main__':
    import sys
    torch.set_num_threads(1)
    torch.save(both(int(sys.argv[2])), sys.argv[3])
