"""The same learning rate: fastai's schedules move as in a fit of plain fastai whose loader has the accumulated batches.
Elsewhere the position in training goes by loader batches"""
import pytest, torch.utils.data as torch_data
from reference import *
from fastai.callback.schedule import ParamScheduler, SchedCos, SchedLin, combine_scheds
from fastaccum.core import FastaccumWarning
from fastaccum.checkpoint.callback import CheckpointFolder, TrainingCheckpoint
from fastaccum.precision.callback import MixedPrecision

torch.manual_seed(0)
def items(n): return Data(torch.randn(n, 6), torch.randn(n, 4).tanh())
data = items(80)                     # loader batches of 8, steps of 32: 32, 32, 16 in an epoch
few = Data(data.x[:8], data.y[0][:8])
names = 'lr','mom','wd'

class Rates(Callback):
    "What the optimizer steps with, and the position when a loader batch begins"
    order,run_valid = 90,False
    def __init__(self): self.rates,self.positions = [],[]
    def before_batch(self): self.positions.append(self.learn.pct_train)
    def before_step(self): self.rates.append([[h.get(k) for k in names] for h in self.learn.opt.hypers])

def halves(model): return [params(model[0]), params(model[2])]

def trained(fit, bs, *cbs, d=data, opt_func=partial(SGD, mom=.9, wd=.01), **kwargs):
    learn = learner(d, bs, *cbs, Rates(), opt_func=opt_func, valid=few, splitter=halves, **kwargs)
    learn.start = weights(learn.model)
    fit(learn)
    return learn

def same(ours, plain, weights_too=True):
    "The rates of each step, and the weights within 1e-5 of the distance moved; at the end the position is 1"
    a,b = (torch.tensor(l.rates.rates, dtype=torch.float64) for l in (ours, plain))
    assert a.shape == b.shape, (a.shape, b.shape)
    assert (a-b).abs().max() < 1e-9, (a-b).abs().amax((1, 2))
    if not weights_too: return
    off = (weights(ours.model)-weights(plain.model)).norm()/(weights(plain.model)-plain.start).norm()
    assert off < 1e-5, f'{off:.1e}'
    assert abs(ours.pct_train-1) < 1e-9
    assert [h['mom'] for h in ours.opt.hypers] == pytest.approx([h['mom'] for h in plain.opt.hypers]), 'what the next fit begins with'

def decay(l): l.fit(3, .1, cbs=ParamScheduler(dict(wd=SchedLin(.3, 0.), mom=SchedCos(.5, .95))))
def jumps(l):
    l.fit(
        2, .1, cbs=ParamScheduler(
            dict(lr=combine_scheds([.25, .25, .5], [SchedLin(.1, .1), SchedLin(.02, .02), SchedLin(.2, .01)]))))
fits = dict(one_cycle=lambda l: l.fit_one_cycle(3, .1), discriminative=lambda l: l.fit_one_cycle(2, slice(.01, .1)),
            flat_cos=lambda l: l.fit_flat_cos(2, .1),
            sgdr=lambda l: l.fit_sgdr(2, 1, .1), wd=decay, jumps=jumps, fine_tune=lambda l: l.fine_tune(2, .1),
            one_epoch=lambda l: l.fit_one_cycle(1, .1),
            twice=lambda l: (l.fit_one_cycle(1, .1), l.fit(1, .05)), start_epoch=lambda l: l.fit_one_cycle(3, .1, start_epoch=1))

def told(recwarn):
    "Python and other libraries may warn at any time, as of a file that nobody has closed"
    return [str(w.message) for w in recwarn if issubclass(w.category, FastaccumWarning)]

@pytest.mark.parametrize('fit', fits)
@pytest.mark.parametrize('remainder', ['step', 'drop'])
def test_big_batch(fit, remainder, recwarn):
    plain = trained(fits[fit], 32, dl_type=partial(DataLoader, drop_last=remainder=='drop'))
    same(trained(fits[fit], 8, GradientAccumulation(32, remainder=remainder)), plain)
    assert told(recwarn) == []

@pytest.mark.parametrize('n,bs,accum_bs', [(77, 8, 32), (61, 5, 30), (100, 7, 14), (33, 32, 64), (80, 8, 40)])
@pytest.mark.parametrize('remainder', ['step', 'drop'])
def test_sizes(n, bs, accum_bs, remainder):
    if remainder=='drop' and n < accum_bs: return
    d = items(n)
    same(trained(fits['one_cycle'], bs, GradientAccumulation(accum_bs, remainder=remainder), d=d),
         trained(fits['one_cycle'], accum_bs, d=d, dl_type=partial(DataLoader, drop_last=remainder=='drop')))

@pytest.mark.parametrize('n_epoch,n', [(2, 80), (3, 80), (3, 40), (1, 72)])
def test_carry(n_epoch, n):
    "The accumulated batches go on across the epochs, so the big batch's run is one epoch with the items of all"
    d = items(n)
    joined = Data(d.x.repeat(n_epoch, 1), d.y[0].repeat(n_epoch, 1))
    plain = trained(lambda l: l.fit_one_cycle(1, .1), 32, d=joined, dl_type=partial(DataLoader, drop_last=True))
    same(trained(lambda l: l.fit_one_cycle(n_epoch, .1), 8, GradientAccumulation(32, remainder='carry'), d=d), plain)

@pytest.mark.parametrize('more', [dict(micro_batch_size=3), dict(micro_batch_size='auto'), dict(log_accum_batch=False), {}], ids=str)
@pytest.mark.parametrize('loader', [DataLoader, torch_data.DataLoader])
def test_ways(more, loader):
    same(trained(fits['one_cycle'], 8, GradientAccumulation(32, **more), dl_type=loader), trained(fits['one_cycle'], 32))

def test_loader_batches_of_the_size():
    for cbs in ([GradientAccumulation(micro_batch_size=5)], [GradientAccumulation(32, micro_batch_size=5)], [GradientAccumulation(32)]):
        same(trained(fits['one_cycle'], 32, *cbs), trained(fits['one_cycle'], 32))

class Own(Callback):
    "A schedule of one's own, which sets the rate at every loader batch"
    run_valid = False
    def before_batch(self): self.opt.set_hyper('lr', .1*(1-self.pct_train))
def test_own_schedule():
    fit = lambda l: l.fit(3, .1, cbs=Own())
    same(trained(fit, 8, GradientAccumulation(32)), trained(fit, 32))

def test_short_epochs():
    "ShortEpochCallback cuts both in the second of three steps, or after it"
    fit = lambda l: l.fit_one_cycle(2, .1, cbs=ShortEpochCallback(.33, short_valid=False))
    same(trained(fit, 8, GradientAccumulation(32), d=items(96)), trained(fit, 32, d=items(96)), weights_too=False)

def test_cut_short():
    stop = lambda at: On('after_batch', throw(CancelFitException), [at], order=50)
    same(trained(fits['one_cycle'], 8, GradientAccumulation(32), stop(13)), trained(fits['one_cycle'], 32, stop(3)), weights_too=False)

def test_lr_find():
    lrs = []
    for bs,cbs in ((8, [GradientAccumulation(32)]), (32, [])):
        learn = learner(data, bs, *cbs, valid=few)
        learn.lr_find(num_it=20, stop_div=False, show_plot=False)
        lrs.append(learn.recorder.lrs)
    assert lrs[0] == pytest.approx(lrs[1], rel=1e-9)

@pytest.mark.fp16
def test_skipped_steps_move():
    "A step that fp16 skips moves the schedule, as in fastai"
    inf = On('after_loss', lambda l: setattr(l, 'loss_grad', l.loss_grad*float('inf')), [5])
    ours = trained(fits['one_cycle'], 8, GradientAccumulation(32), MixedPrecision('fp16', init_scale=2.**8), inf)
    same(ours, trained(fits['one_cycle'], 32), weights_too=False)
    assert sum(ours.mixed_precision.scaler.history()['skipped'])==1

@pytest.mark.parametrize('how', ['validate', 'get_preds'])
def test_validation_in_mid_epoch(how):
    def validate(l):
        dl = l.dl
        getattr(l, how)()
        l.dl,l.training = dl,True
        l.model.train()
    seen = On('after_batch', validate, [1, 6, 13], order=80)
    same(trained(fits['one_cycle'], 8, GradientAccumulation(32), seen), trained(fits['one_cycle'], 32))

# --- resume
@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('at', [3, 10, 17])
def test_resumed(remainder, at, capsys):
    def fit(*cbs):
        CheckpointFolder.in_use.clear()
        return trained(fits['one_cycle'], 8, GradientAccumulation(32, remainder=remainder), TrainingCheckpoint('c', 1), *cbs)
    with pytest.raises(RuntimeError): fit(On('batch_ended', throw(RuntimeError('power')), [at], order=2000))
    again = fit()
    assert 'continues in epoch' in capsys.readouterr().out
    again.training_checkpoint.finish()
    CheckpointFolder.in_use.clear()
    whole = trained(fits['one_cycle'], 8, GradientAccumulation(32, remainder=remainder))
    assert torch.equal(weights(again.model), weights(whole.model)) and again.rates.positions == whole.rates.positions

class Grows(Callback):
    "The third loader batch of each epoch has 8 items more than the loader says"
    run_valid = False
    def before_batch(self):
        if self.iter==2: self.learn.xb,self.learn.yb = (torch.cat([self.x]*2),),(torch.cat([self.y]*2),)

def test_resumed_off_plan():
    "After other steps than planned the rest of the epoch goes by loader batches, also in a process that has not seen why"
    def fit(*cbs):
        CheckpointFolder.in_use.clear()
        return trained(fits['one_cycle'], 8, GradientAccumulation(32), Grows(), TrainingCheckpoint('c', 1), *cbs)
    with pytest.raises(RuntimeError): fit(On('batch_ended', throw(RuntimeError('power')), [16], order=2000))
    again = fit()
    again.training_checkpoint.finish()
    CheckpointFolder.in_use.clear()
    whole = trained(fits['one_cycle'], 8, GradientAccumulation(32), Grows())
    assert torch.equal(weights(again.model), weights(whole.model)) and again.rates.positions == whole.rates.positions

# --- where the plan does not hold
def by_batches(learn, n_iter=10, n_epoch=3):
    assert learn.rates.positions == pytest.approx([k/(n_iter*n_epoch) for k in range(n_iter*n_epoch)], abs=1e-9)
    assert abs(learn.pct_train-1) < 1e-9

class Unknown(torch_data.IterableDataset):
    def __len__(self): return 80
    def __iter__(self): return iter(zip(data.x, data.y[0]))

def sampled(d, batch_size): return torch_data.DataLoader(d, batch_sampler=[range(i, i+batch_size) for i in range(0, len(d), batch_size)])
@pytest.mark.parametrize('name', ['n_items', 'batch_sampler', 'iterable', 'schedule'])
def test_not_known(name, recwarn):
    "By loader batches, without a word"
    acc = GradientAccumulation(32, n_items=lambda l: len(l.x)) if name=='n_items' else GradientAccumulation(32)
    if name=='schedule': acc = GradientAccumulationSchedule(16, 48, finish=1.)
    loader = dict(batch_sampler=sampled,
                  iterable=lambda d, batch_size: torch_data.DataLoader(
                      Unknown() if d is data else d, batch_size=batch_size))
    learn = trained(fits['one_cycle'], 8, acc, dl_type=loader.get(name, DataLoader))
    by_batches(learn)
    assert told(recwarn) == []

def test_several_rows_an_item(recwarn):
    "Each item has four views, so each loader batch has all rows of a step: the plan, which counts items, is left at the first of them"
    crops = lambda b: (torch.cat([o[0] for o in b]), torch.cat([o[1] for o in b]))
    d = [(data.x[i:i+4], data.y[0][i:i+4]) for i in range(0, 80, 4)]
    loader = lambda _, batch_size: torch_data.DataLoader(d, batch_size=batch_size, collate_fn=crops)
    ours = trained(fits['one_cycle'], 8, GradientAccumulation(32), dl_type=loader)     # 32, 32, 16 rows
    same(ours, trained(fits['one_cycle'], 32))
    assert told(recwarn) == []

@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('event,ex,at',
                         [('before_batch', CancelBatchException, {(0, 2), (1, 9), (2, 0)}),
                          ('before_step', CancelStepException, {(0, 3), (2, 3)}),
                          ('after_pred', CancelBatchException, {(1, i) for i in range(10)}),
    ('after_batch', CancelTrainException, {(0, 5), (2, 1)}), ('before_batch', CancelEpochException, {(1, 0)}),
    ('after_step', CancelBatchException, {(0, 7)})])
def test_cancelled(event, ex, at, remainder):
    "The position only grows, and never passes the end of the epoch"
    learn = trained(fits['one_cycle'], 8, GradientAccumulation(32, remainder=remainder), Stop(event, ex, at))
    pos = learn.rates.positions
    assert pos == sorted(pos) or remainder != 'step'
    assert 0 <= min(pos) and max(pos) < 1 and learn.pct_train <= 1+1e-9

def test_other_size_in_mid_fit():
    "A callback sets another size: from an epoch's beginning on it is the plan; in mid-epoch the rest of the epoch goes by loader batches"
    def grow(at): return On('before_batch', lambda l: setattr(l.gradient_accumulation, 'accum_bs', 16), [at], order=1)
    ours = trained(fits['one_cycle'], 8, GradientAccumulation(32), grow(10))
    def accumulated_by(l): return [k for k,(a,b) in enumerate(zip(l.rates.positions, l.rates.positions[1:])) if a != b]
    assert max(ours.rates.positions) < 1 and ours.rates.positions == sorted(ours.rates.positions)
    assert accumulated_by(ours)[-4:] == [21, 23, 25, 27]

def test_more_batches_than_promised():
    class Long(torch_data.DataLoader):
        def __len__(self): return super().__len__()-2
    learn = trained(fits['one_cycle'], 8, GradientAccumulation(32), dl_type=Long)
    assert len(learn.rates.positions)==30

def test_added_in_mid_fit():
    "From the next epoch on by plan"
    add = On('after_batch', lambda l: l.add_cb(GradientAccumulation(32)), [4], order=1)
    learn = trained(fits['one_cycle'], 8, add)
    assert learn.rates.positions[10:20] == pytest.approx([1/3]*4 + [1/3+1/9]*4 + [1/3+2/9]*2)
