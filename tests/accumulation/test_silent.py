"Cases in which an accumulated step was, without a word, not the big batch's: each against the big batch's run, or plain fastai's"
import subprocess, sys, warnings
import pytest
from reference import *
from fastai.callback.mixup import MixUp
from fastai.callback.fp16 import MixedPrecision as FastaiPrecision
from fastai.callback.rnn import ModelResetter
from fastaccum.all import *
import fastaccum.precision.callback as precision

ce = CrossEntropyLossFlat()
torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.arange(61)%4)
masked = Data(data.x, torch.where(torch.arange(61)%3==0, -100, torch.arange(61)%4))
values = Data(data.x, torch.randn(61, 4))
cw = torch.tensor([.1, 1., 3., 10.])

def moved(learn, whole, start):
    "Distance of the weights of two runs, over the distance that one of them moved"
    a,b,s = (weights(m).double() for m in (learn.model, whole.model, start))
    assert (b-s).norm() > 1e-3*s.norm(), 'nothing was trained'
    return float((a-b).norm()/(b-s).norm())

def same(of, loss_func, *cbs, model=None, acc=None, tol=2e-6, n_epoch=2, bs=8, **kwargs):
    "Loader batches of 8 that accumulate to 32 train as loader batches of 32 do, also if these are split"
    start = mlp() if model is None else model
    whole = learner(of, 32, *[c() for c in cbs], model=start, loss_func=deepcopy(loss_func), **kwargs)
    whole.fit(n_epoch, .05)
    res = []
    for bs,acc_args in ((bs, dict(accum_bs=32)), (32, dict(micro_batch_size=7)), (16, dict(accum_bs=32, micro_batch_size=5))):
        learn = learner(of, bs, GradientAccumulation(**{**acc_args, **(acc or {})}), *[c() for c in cbs], model=start,
                        loss_func=deepcopy(loss_func), **kwargs)
        learn.fit(n_epoch, .05)
        off = moved(learn, whole, start)
        assert off < tol, f'bs={bs}, {acc_args}: {off:.1e} off'
        res.append(learn)
    return res[0]

# --- 6: the loss's divisor is measured
class Focal(nn.CrossEntropyLoss):
    "Keeps class weights, but its mean goes over items"
    def forward(self, pred, y):
        l = F.cross_entropy(pred, y, weight=self.weight, reduction='none')
        return ((1-(-l).exp())**2*l).mean()
class PerItem(nn.MSELoss):
    def __init__(self): super().__init__(reduction='sum')
    def forward(self, pred, y): return super().forward(pred, y)/len(y)
class Own:
    "An object that keeps a loss as `func`, and takes its mean over items"
    def __init__(self): self.func = nn.MSELoss()
    def __call__(self, pred, y): return (pred-y).pow(2).sum(1).mean()
def valid_mean(pred, y):
    ok = y >= 0
    return F.cross_entropy(pred[ok], y[ok], reduction='sum')/ok.sum().clamp(min=1)
class MeanOutside(Callback):
    "The mean of unreduced losses, over the valid targets"
    order = 5
    def after_loss(self):
        if not self.training: return
        self.learn.loss_grad = self.learn.loss_grad.sum()/(self.learn.y >= 0).sum()
        self.learn.loss = self.learn.loss_grad.clone()

measured = {'focal, class weights': (data, Focal(weight=cw), 'valid'), 'sum over items': (values, PerItem(), 'items'),
            'own object': (values, Own(), 'items'),
            'valid targets': (masked, valid_mean, 'valid'),
            'half': (values, lambda p, y: F.mse_loss(p, y)/2, 'items'),
            'a sum': (values, lambda p, y: (p-y).pow(2).sum()/50, 'sum')}

@pytest.mark.parametrize('name', measured)
def test_measured(name):
    of,loss_func,over = measured[name]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        if over == 'sum':
            learn = learner(of, 8, GradientAccumulation(32), loss_func=loss_func)
            with pytest.warns(UserWarning, match='is a sum, not a mean.*4 times'): learn.fit(1, .01)
            assert 'sum' in learn.gradient_accumulation.loss_rule
            return
        learn = same(of, loss_func)
    assert over in learn.gradient_accumulation.loss_rule and 'measured' in learn.gradient_accumulation.loss_rule

def test_mean_outside():
    same(masked, nn.CrossEntropyLoss(reduction='none'), MeanOutside)

@pytest.mark.parametrize('k', [1, 2])
def test_measured_with_single_items(k):
    "Pairs are looked at; what the first item was weighed by is mended"
    start = mlp()
    whole = learner(masked, 32, model=start, loss_func=valid_mean)
    split = learner(masked, 32, GradientAccumulation(micro_batch_size=k), model=start, loss_func=valid_mean)
    for l in (whole, split): l.fit(1, .05)
    assert moved(split, whole, start) < 2e-6

def test_probes_end():
    "At most 8 looks, none later; functions are called at most three times more in a look; `check_loss=False` looks not at all"
    calls = []
    def loss_func(pred, y): calls.append(len(y)); return F.cross_entropy(pred, y, ignore_index=-100)
    many = Data(torch.randn(640, 6), torch.arange(640)%4)
    for check in (True, False):
        calls.clear()
        learner(many, 8, GradientAccumulation(16, check_loss=check), loss_func=loss_func, valid=Data(many.x[:8], many.y[0][:8])).fit(1, .01)
        assert len(calls) <= 81 + (8*6 if check else 0) and (check or len(calls)==81)

def clip_like(pred, y): return F.cross_entropy(pred@pred.T, torch.arange(len(pred)))
def test_coupling_warns():
    "Once, with figures, and it names the way out; training goes on"
    learn = learner(data, 8, GradientAccumulation(32), loss_func=clip_like)
    with pytest.warns(UserWarning, match=r'%.*weight=') as seen: learn.fit(2, .01)
    assert sum('weight=' in str(w.message) for w in seen)==1 and len(learn.recorder.losses)==4

def test_cannot_be_measured():
    def loss_func(pred, y):
        if len(y) not in (8, 5): raise RuntimeError('8 or 5 items, please')
        return F.cross_entropy(pred, y)
    learn = learner(data, 8, GradientAccumulation(32), loss_func=loss_func, valid=Data(data.x[:8], data.y[0][:8]))
    with pytest.warns(UserWarning, match='could not be measured'): learn.fit(1, .01)
    assert len(learn.recorder.losses)==2

def test_probe_leaves_no_trace():
    "Dropout of the model and random numbers of the data are those of a run in which nothing is measured"
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(.5), nn.BatchNorm1d(16), nn.Linear(16, 4))
    runs = []
    for check in (True, False):
        learn = learner(data, 8, GradientAccumulation(32, check_loss=check), model=model, loss_func=lambda p, y: F.cross_entropy(p, y))
        torch.manual_seed(3); learn.fit(2, .05)
        runs.append([*learn.model.state_dict().values(), torch.rand(3)])
    assert torch.equal(*(run.pop() for run in runs))
    for ours,plain in zip(*runs): torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)

# --- 7: what is looked up is what holds now
class SwapLoss(Callback):
    order = 20
    def before_train(self): self.learn.loss_func = nn.CrossEntropyLoss(weight=cw)
class SwapWeights(Callback):
    def before_batch(self):
        f = self.learn.loss_func
        if self.training and self.epoch==1: getattr(f, 'func', f).weight = cw
class InPlace(Callback):
    "Changes targets after the prediction"
    def after_pred(self):
        if self.training: self.learn.y[self.learn.x[:,0] > .5] = -100

def test_loss_replaced(): same(masked, nn.MSELoss(), SwapLoss, valid=Data(masked.x[:2], torch.zeros(2, 4)))
@pytest.mark.parametrize('loss', [nn.CrossEntropyLoss, CrossEntropyLossFlat])
def test_weights_changed(loss): same(data, loss(weight=torch.ones(4)), SwapWeights)
def test_targets_in_place():
    for k in (None, 5):
        fresh = lambda: Data(data.x, data.y[0].clone())
        start = mlp()
        whole,split = (learner(fresh(), 32, *cbs, InPlace(), model=start, loss_func=nn.CrossEntropyLoss())
                       for cbs in ((), (GradientAccumulation(32, micro_batch_size=k),)))
        for l in (whole, split): l.fit(1, .05)
        assert moved(split, whole, start) < 2e-6

class AddLater(Callback):
    "Adds accumulation in the middle of a fit"
    def __init__(self, event, at): self.event,self.at = event,at; setattr(self, event, self._add)
    def _add(self):
        now = self.learn.epoch,self.learn.__dict__.get('iter', 0)
        if now==self.at and not hasattr(self.learn, 'gradient_accumulation') and self.training:
            self.learn.add_cb(GradientAccumulation(32))

@pytest.mark.parametrize('event,at', [('before_epoch', (1, 7)), ('after_batch', (0, 3)), ('after_batch', (0, 7))])
def test_added_in_mid_fit(event, at):
    learn = learner(masked, 8, AddLater(event, at), Spy(), loss_func=ce)
    if event=='before_epoch':
        learn.add_cb(On('after_train', lambda l: hasattr(l, 'gradient_accumulation')
                        or l.add_cb(GradientAccumulation(32)), [0]))
    learn.fit(2, .05)
    check_own(learn)
    assert [s.n_items for s in learn.spy.steps][-2:]==[32, 29]

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_backward', 'before_step', 'after_step'])
def test_added_in_mid_batch(event):
    "The batch that is under way goes on as it began: none of its items are lost"
    learn = learner(masked, 8, StepLogger(), AddLater(event, (0, 2)), loss_func=ce)
    plain = learner(masked, 8, loss_func=ce)
    seen = []
    for l in (learn, plain): l.add_cb(On('after_batch', lambda l: seen.append(weights(l.model)), [2], order=90)); l.fit(1, .05)
    assert torch.equal(*seen) and learn.step_logger.to_df()['items'].tolist()[3:]==[32, 5]

def test_new_optimizer_and_unfrozen():
    "`create_opt` in before_epoch; a frozen group that is unfrozen in mid-fit"
    def splitter(m): return [list(m[0].parameters()), list(m[2].parameters())]
    class Thaw(Callback):
        def before_epoch(self):
            if self.epoch==1: self.learn.create_opt(); self.learn.unfreeze()
    runs = []
    start = mlp()
    for bs,cbs in ((32, ()), (8, (GradientAccumulation(32),))):
        learn = learner(masked, bs, *cbs, Thaw(), model=start, loss_func=ce, splitter=splitter)
        learn.freeze(); learn.fit(2, .05)
        runs.append(learn)
    assert moved(runs[1], runs[0], start) < 2e-6

# --- 8: validation inside an epoch
class Inside(Callback):
    "Validates in mid-epoch"
    def __init__(self, event, how, order=20, at=(2, 5)): self.how,self.order,self.at = how,order,at; setattr(self, event, self._go)
    def _go(self):
        learn = self.learn
        if not self.training or learn.iter not in self.at: return
        if self.how=='validate': learn.validate()
        elif self.how=='get_preds': learn.get_preds()
        else: learn._do_epoch_validate()

@pytest.mark.parametrize('k', [None, 3])
@pytest.mark.parametrize('how', ['validate', 'get_preds', '_do_epoch_validate'])
@pytest.mark.parametrize('event', ['before_batch', 'after_backward', 'before_step', 'after_batch'])
def test_validation_inside(event, how, k):
    def run(*cbs):
        logger = StepLogger()
        learn,steps = learner(masked, 8, GradientAccumulation(32, micro_batch_size=k), logger, *cbs, loss_func=ce),[]
        learn.add_cb(On('before_step', lambda l: steps.append(l.gradient_accumulation.items), order=90))
        learn.recorder.train_metrics,learn.metrics = True,accuracy
        seen = []
        learn.add_cb(
            On('after_batch',
               lambda l: seen.append((l.epoch, l.iter, l.n_iter, l.train_iter, round(l.pct_train, 6), len(l.xb[0]))),
               order=90))
        learn.fit_one_cycle(2, .05)
        return learn,logger.to_df(),seen,steps
    (a,rows_a,seen_a,_),(b,rows_b,seen_b,steps) = run(),run(Inside(event, how))
    assert steps==[32, 29]*2
    assert torch.equal(weights(a.model), weights(b.model)) and seen_a==seen_b
    assert rows_a.equals(rows_b) and a.recorder.losses==b.recorder.losses and a.recorder.lrs==b.recorder.lrs
    assert [r[:-1] for r in a.recorder.values]==[r[:-1] for r in b.recorder.values]

others = {'early stopping': partial(EarlyStoppingCallback, patience=1, min_delta=.5), 'best weights': SaveModelCallback,
          'csv': CSVLogger, 'schedule': Callback,
          'short': partial(ShortEpochCallback, .6)}
@pytest.mark.parametrize('name', others)
def test_validation_inside_with(name):
    "Callbacks that began with the fit do not hear that another one begins and ends; those of the validation do"
    heard = []
    class Hears(Callback):
        def before_fit(self): heard.append('before_fit')
        def after_fit(self): heard.append('after_fit')
    class Within(Callback):
        def after_step(self):
            learn = self.learn
            res,short = learn.validate(cbs=Hears()),learn._do_epoch_validate(dl=learn.dls.train)
            assert len(res)==2
    def run(*cbs):
        learn = learner(masked, 8, GradientAccumulation(32), others[name](), *cbs, loss_func=ce, metrics=accuracy)
        learn.fit_one_cycle(3, .05)
        return learn
    a,b = run(),run(Within())
    assert torch.equal(weights(a.model), weights(b.model)) and a.recorder.losses==b.recorder.losses and a.recorder.values==b.recorder.values
    assert a.recorder.hps==b.recorder.hps and heard==['before_fit', 'after_fit']*len(b.recorder.losses)

# --- 9: items are counted from the inputs
class Boxes(Data):
    "Detection: targets are boxes, three an item on average"
    def batch(self, ids): raise NotImplementedError
def test_items_from_inputs():
    def loss_func(pred, boxes): return (pred.mean() - boxes.mean())**2
    class Flat(Callback):
        def before_batch(self): self.learn.yb = (torch.ones(3*len(self.learn.xb[0]), 4),)
    learn = learner(values, 8, GradientAccumulation(32, check_loss=False), Flat(), Spy(), loss_func=loss_func)
    learn.gradient_accumulation.order = 30
    with pytest.warns(UserWarning, match='n_items='): learn.fit(1, .01)
    assert [s.n_items for s in learn.spy.steps]==[32, 29]

def test_n_items():
    "What only the user knows"
    learn = learner(values, 8, GradientAccumulation(16, n_items=lambda learn: 2*len(learn.xb[0])), Spy(), loss_func=nn.MSELoss())
    learn.fit(1, .01)
    assert [s.n_items for s in learn.spy.steps]==[8]*7 + [5]

def test_empty_first_target():
    learn = learner(Data(data.x, torch.zeros(61, 0), values.y[0]), 8, GradientAccumulation(32),
                    loss_func=lambda p, empty, y: F.mse_loss(p, y))
    learn.fit(1, .01)
    assert len(learn.recorder.losses)==2

# --- 10: fp64
def test_double():
    double_data = Data(masked.x.double(), masked.y[0])
    start = mlp().double()
    for loss_func in (nn.CrossEntropyLoss(weight=cw.double()), nn.CrossEntropyLoss()):
        whole,*others = [learner(double_data, bs, *cbs, model=start, loss_func=loss_func) for bs,cbs in
                         ((61, ()), (8, [GradientAccumulation(61)]), (61, [GradientAccumulation(micro_batch_size=7)]),
                          (61, [GradientAccumulation(61, micro_batch_size=7)]))]
        for l in (whole, *others):
            l.add_cb(Spy())
            l.remove_cb(Recorder)            # which cannot take a float64 loss
            l.fit(1, .05)
        for l in others: assert rel_err(l.spy.steps[0].grad, whole.spy.steps[0].grad) < 2e-15

# --- 11: even micro-batches
def test_even():
    sizes = []
    learn = learner(Data(data.x[:50], data.y[0][:50]), 50, GradientAccumulation(micro_batch_size=7),
                    On('after_pred', lambda l: sizes.append(len(l.y))), loss_func=ce)
    learn.fit(1)
    assert sizes==[7, 7, 6, 6, 6, 6, 6, 6]
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    # BatchNorm raises on a single item
    learner(Data(data.x[:50], data.y[0][:50]), 50, GradientAccumulation(micro_batch_size=7), model=model,
            loss_func=ce).fit(1)

# --- 12: the prediction of a split batch
class Reads(Callback):
    def after_batch(self): self.pred = self.learn.pred
class SaysNo(Reads): reads_pred = False
class Mine(CSVLogger):
    "Of a class that does not read it"
    after_batch = Reads.after_batch
@pytest.mark.filterwarnings('ignore:You are shadowing an attribute .pred.')
def test_pred_is_kept():
    for cb,there in ((Reads(), True), (SaysNo(), False), (Mine(), True)):
        learn = learner(data, 32, GradientAccumulation(micro_batch_size=7), cb, loss_func=ce, valid=Data(data.x[:0], data.y[0][:0]))
        learn.fit(1)
        assert (cb.pred is not None and cb.pred.shape==(29, 4)) == there

# --- 13: what can be split, and what is refused
def test_outside_a_fit():
    learn = learner(data, 8, GradientAccumulation(16), MixUp(), loss_func=ce)
    with learn:
        learn.epoch,learn.training,learn.dl = 0,True,learn.dls.train
        b = learn.dls.one_batch()
        learn._split(b)
        learn('before_train')
        learn('before_batch')                       # as in fastai's notebook of MixUp
        learn.n_iter = 8
        learn.create_opt()
        learn.one_batch(0, b)
        assert learn.gradient_accumulation.n_items==8

def test_two_learners():
    cb = GradientAccumulation(32)
    a = learner(data, 8, cb, loss_func=ce)
    with pytest.raises(ValueError, match='attached to another Learner'): learner(data, 8, cb, loss_func=ce)
    assert a.gradient_accumulation is cb and cb.learn is a
    a.remove_cb(cb)
    learner(data, 8, cb, loss_func=ce).fit(1)

def test_patched_learner(monkeypatch):
    def _do_grad_opt(self): raise NotImplementedError
    monkeypatch.setattr(Learner, '_do_grad_opt', _do_grad_opt)
    with pytest.raises(TypeError, match='_do_grad_opt of its own'): learner(data, 8, GradientAccumulation(32), loss_func=ce).fit(1)

def test_language_models_are_refused():
    with pytest.raises(ValueError, match='keeps state'):
        learner(data, 8, GradientAccumulation(32, micro_batch_size=4), ModelResetter(), loss_func=ce).fit(1)

# --- 14: fastai's MixedPrecision
def test_channels_last_is_ours():
    learn = learner(data, 8, GradientAccumulation(32, micro_batch_size=4), loss_func=ce).to_channelslast()
    assert type(learn.mixed_precision) is MixedPrecision and type(learn.channels_last).__name__=='ChannelsLast'
    learn.fit(1)
    assert learn.scaler is learn.mixed_precision.scaler and not torch.is_autocast_enabled('cpu')

def test_fastai_precision_is_refused():
    with pytest.raises(ValueError, match="fastai's MixedPrecision is attached"):
        learner(data, 8, GradientAccumulation(32), FastaiPrecision(), loss_func=ce).fit(1)
    with pytest.warns(UserWarning, match="fastai's MixedPrecision"):
        learner(data, 8, StepLogger(), FastaiPrecision('bf16'), loss_func=ce).fit(1)

@pytest.mark.parametrize('fast', [True, False])
def test_slow_fp16(fast, monkeypatch):
    monkeypatch.setattr(precision, 'has_fast_fp16', lambda: fast)
    learn = learner(data, 8, MixedPrecision(), loss_func=ce)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        learn.fit(1); learn.fit(1)
    assert sum('to_bf16' in str(w.message) for w in seen)==(not fast)

# --- 15: imports in the wrong order
def test_fastais_accumulation_beside_ours():
    with pytest.warns(UserWarning, match="fastai's GradientAccumulation"):
        learner(data, 8, StepLogger(), FastaiAccumulation(32), loss_func=ce).fit(1)

@pytest.mark.slow
def test_lazy_names():
    code = "import sys, fastaccum as fa; assert 'torch' not in sys.modules; " \
           "print(fa.GradientAccumulation(256).accum_bs); fa.StepLogger; fa.nothing"
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert run.stdout=='256\n' and "no attribute 'nothing'" in run.stderr

def test_drop_last():
    with pytest.raises(TypeError, match="remainder='drop'"): GradientAccumulation(32, drop_last=True)

def test_iterable_dataset():
    "PyTorch's loader does not say how many items a stream has: it is counted while it trains"
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self): return iter([(torch.ones(1), torch.zeros(1))]*8)
        def __len__(self): return 8
    dl = torch.utils.data.DataLoader(Stream(), batch_size=2)
    acc = GradientAccumulation(5)
    learn = Learner(DataLoaders(dl, dl), nn.Linear(1, 1), F.mse_loss, cbs=acc)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert (len(learn.recorder.losses), acc.items)==(2, 2)
    with pytest.raises(ValueError, match='not known before training'): acc.plan()

# --- 16: after errors; nothing to step on
def test_attributes_after_keep_one():
    ours = GradientAccumulation(32)
    learn = learner(data, 8, ours, loss_func=ce)
    with pytest.raises(ValueError, match='Keep one'): learn.fit(1, cbs=GradientAccumulation(16))
    assert learn.gradient_accumulation is ours
    with pytest.raises(ValueError, match='Keep one'): learn.fit(1, cbs=FastaiAccumulation(16))
    learn.fit(1)
    assert learn.gradient_accumulation is ours

def test_dropped_parameter_stays_without_gradient():
    "One that only the dropped remainder used"
    class Two(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(6, 4),nn.Linear(6, 4)
        def forward(self, x): return self.a(x) + (self.b(x) if len(x)==5 else 0)
    learn = learner(data, 8, GradientAccumulation(32, remainder='drop'), model=Two(), loss_func=ce,
                    valid=Data(data.x[:8], data.y[0][:8]), opt_func=partial(SGD, wd=.1))
    before = learn.model.b.weight.clone()
    learn.fit(2, .1)
    assert learn.model.b.weight.grad is None and torch.equal(learn.model.b.weight, before) and learn.model.a.weight.grad is not None

@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward', 'after_backward'])
@pytest.mark.parametrize('k', [None, 4])
def test_accumulation_removed_on_the_way(event, k):
    "The batch would be half weighed"
    learn = learner(data, 8, GradientAccumulation(32, micro_batch_size=k),
                    On(event, lambda l: l.remove_cb(GradientAccumulation), calls=[2]), loss_func=ce)
    with pytest.raises(RuntimeError, match='removed while a loader batch'): learn.fit(1, .05)

@pytest.mark.parametrize('event', ['before_batch', 'after_batch'])
def test_accumulation_removed_between_batches(event):
    "From there on plain fastai; what was accumulated is cleared"
    learn = learner(data, 8, GradientAccumulation(16),
                    On(event, lambda l: l.remove_cb(GradientAccumulation), calls=[1 if event == 'after_batch' else 2]),
                    loss_func=ce)
    learn.fit(1, .05)
    assert len(learn.recorder.losses) == 1+6 and learn.recorder.iters[-1] == 7
