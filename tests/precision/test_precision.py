"Mixed precision: the type computed in, overflows, the life of the scale, exceptions, host syncs, errors"
import contextlib, pickle, re, subprocess, sys, warnings
from collections import namedtuple
from math import inf, nan
import pytest
from reference import *
from bench.measure import SyncCounter
from test_scaler import through_file
from fastai.callback.fp16 import AMPMode as FastaiAMPMode, MixedPrecision as FastaiPrecision
from fastai.vision.all import CategoryBlock, DataBlock, ImageBlock, PILImageBW
import fastaccum.precision.callback as precision
from fastaccum.precision.callback import AMPMode, MixedPrecision
from fastaccum.core.scaler import DynamicLossScaler

torch.manual_seed(0)
data = Data(torch.randn(64,6), torch.randn(64,4))
ragged = Data(data.x[:61], data.y[0][:61])
few = Data(data.x[:16], data.y[0][:16])
dtypes = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)

class Elementwise(nn.Module):
    "Has nothing that autocast would do in half precision: as scales are powers of two, its fp16 run is the unscaled run to the bit"
    def __init__(self):
        super().__init__()
        self.w,self.b = nn.Parameter(torch.randn(6,4)),nn.Parameter(torch.zeros(4))
    def forward(self, x): return (x[...,None]*self.w).tanh().sum(-2) + self.b

elementwise = Elementwise()

def fp16(scale=2.**10, **kwargs): return MixedPrecision('fp16', init_scale=scale, **kwargs)
def unscaled(): return MixedPrecision('bf16')
def exact(*cbs, bs=8, data=data, **kwargs): return learner(data, bs, *cbs, **{'model': elementwise, **kwargs})
def acc(accum_bs=32, **kwargs): return GradientAccumulation(accum_bs, **kwargs)
def same(a, b): assert weights(a.model).equal(weights(b.model)), rel_err(weights(a.model), weights(b.model))
def skipped(learn): return learn.mixed_precision.scaler.history()['skipped']
def log2_scales(learn): return [math.log2(s) for s in learn.mixed_precision.scaler.history()['scale']]

# --- 1. Really in half precision

def typed(mode, *cbs, **kwargs):
    "A Learner; what its model computes in: (training, type); what its loss does: (autocast is on, type)"
    model_seen,loss_seen = set(),set()
    def loss_func(pred, y):
        loss = F.mse_loss(pred, y)
        loss_seen.update({(torch.is_autocast_enabled('cpu'), t.dtype) for t in (pred, loss)})
        return loss
    learn = learner(data, 8, *cbs, loss_func=loss_func, **kwargs)
    learn.model[2].register_forward_hook(lambda m,x,y: model_seen.add((m.training, y.dtype)))
    return (learn if mode is None else getattr(learn, f'to_{mode}')()), model_seen, loss_seen

routes = dict(fit=lambda learn: learn.fit(1, .01), validate=lambda learn: learn.validate(), get_preds=lambda learn: learn.get_preds(),
              no_targets=lambda learn: learn.get_preds(dl=DataLoader(Data(data.x), batch_size=8)))

@pytest.mark.parametrize('route', routes)
@pytest.mark.parametrize('cbs', ([], [acc]), ids=('alone', 'accumulated'))
@pytest.mark.parametrize('mode', [None, *dtypes])
def test_computes_in(mode, cbs, route):
    learn,model_seen,loss_seen = typed(mode, *[cb() for cb in cbs])
    res = routes[route](learn)
    half = dtypes[mode or 'fp32']
    assert model_seen=={(t, half) for t in ((True, False) if route=='fit' else (False,))}
    assert loss_seen==(set() if route=='no_targets' else {(False, torch.float32)})
    assert all(p.dtype==torch.float32 and (p.grad is None or p.grad.dtype==torch.float32) for p in learn.model.parameters())
    if route in ('get_preds', 'no_targets'): assert res[0].dtype==torch.float32
    nothing_on(learn)

def nothing_on(learn):
    assert not any(torch.is_autocast_enabled(d) for d in ('cpu', 'cuda'))
    x = learn.dls.train.dataset[:2][0]
    assert learn.model(x).dtype==torch.float32

def images(*cbs):
    "A Learner of fastai's data blocks"
    blocks = DataBlock((ImageBlock(PILImageBW), CategoryBlock),
                       get_x=lambda i: np.uint8(np.arange(64).reshape(8,8)*(i%4)), get_y=lambda i: i%2,
                       splitter=lambda items: (list(range(8)), list(range(8, 16))))
    dls = blocks.dataloaders(list(range(16)), bs=4, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Sequential(nn.Conv2d(1,4,3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                       nn.Linear(4,2)), cbs=cbs, metrics=accuracy)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    seen = learn.seen = []
    learn.model[4].register_forward_hook(lambda m,x,y: seen.append(y.dtype))
    return learn

@pytest.mark.parametrize('mode', ('bf16', 'fp16'))
def test_inference(mode):
    "All that fastai calls the model for computes in half precision and leaves nothing on"
    learn = getattr(images(), f'to_{mode}')()
    learn.fit(1)
    for f in (lambda: learn.predict(np.zeros((8,8), np.uint8)), lambda: learn.show_results(max_n=2), learn.validate,
              learn.tta, learn.summary,
              lambda: learn.get_preds(with_loss=True, with_decoded=True)):
        learn.seen.clear()
        res = f()
        assert set(learn.seen)=={dtypes[mode]} and not torch.is_autocast_enabled('cpu')
        if isinstance(res, tuple): assert all(o.dtype==torch.float32 for o in res if isinstance(o, Tensor) and o.is_floating_point())

class Twice(nn.Module):
    "Makes the precision callback call it once more, when it is called for the second time"
    def __init__(self): super().__init__(); self.body,self.calls,self.by = nn.Linear(6, 4),0,None
    def forward(self, x):
        self.calls += 1
        if self.calls==2: assert self.by.predict(lambda: self.body(x)).dtype==torch.float32 and torch.is_autocast_enabled('cpu')
        return self.body(x)

@pytest.mark.parametrize('mode', ('bf16', 'fp16'))
def test_call_within_a_call(mode):
    "Autocast stays on until the outer one is done, and is off then"
    learn = learner(data, 8, MixedPrecision(mode), model=Twice())
    learn.model.by = learn.mixed_precision
    learn.fit(1, .01)
    assert learn.model.calls > 3
    nothing_on(learn)

class Hides(nn.Linear):
    "Its prediction is where `MixedPrecision` does not look for it"
    def forward(self, x): return SimpleNamespace(out=super().forward(x))

def take_out(cb): cb.learn.pred = cb.learn.pred.out

@pytest.mark.parametrize('mode', ('bf16', 'fp16'))
def test_prediction_made_by_a_callback(mode):
    seen = []
    def loss_func(pred, y): seen.append(pred.dtype); return F.mse_loss(pred, y)
    learn = learner(data, 8, MixedPrecision(mode), Callback(after_pred=take_out), model=Hides(6, 4), loss_func=loss_func, valid=data)
    learn.fit(1)
    assert set(seen)=={torch.float32} and len(seen) > len(learn.dls.train)

# --- 3. With accumulation

def poison_pred(v): return 'after_pred', lambda learn: learn.pred.register_hook(lambda g: g*v)
poisons = {'inf': poison_pred(inf), 'nan': poison_pred(nan),
           'one weight': ('after_backward', lambda learn: learn.model.w.grad[0,0].fill_(inf)),
           'loss': ('before_backward', lambda learn: setattr(learn, 'loss_grad', learn.loss_grad*inf))}
# Micro-batches of a step: 8 loader batches of 61 items, 4 a step; or 23 micro-batches, 12 a step
places = {'first': (None, 4), 'middle': (None, 5), 'last': (None, 7), 'first split': (3, 12), 'middle split': (3, 17),
          'last split': (3, 22)}
opts = {'SGD': partial(SGD, mom=.9), 'Adam': Adam, 'RAdam': RAdam, 'ranger': ranger,
        **{f'torch {o.__name__}{" fused"*f}': partial(OptimWrapper, opt=partial(o, fused=f))
           for o in (torch.optim.SGD, torch.optim.AdamW) for f in (False, True)}}

@pytest.mark.parametrize('opt', ('SGD', 'torch AdamW', 'torch AdamW fused'))
@pytest.mark.parametrize('place', places)
@pytest.mark.parametrize('poison', poisons)
def test_overflow(poison, place, opt):
    "An overflow in any micro-batch skips the second of four steps and halves the scale; all else is as if there had been three"
    (size,call),(event,f),rows = places[place],poisons[poison],[]
    def row(learn): rows.append((learn.gradient_accumulation.closes, learn.stepped, learn.gradient_accumulation.n_items))
    learn = exact(acc(micro_batch_size=size), fp16(), Spy(), On(event, f, [call]), On('after_batch', row, order=70),
                  data=ragged, opt_func=opts[opt])
    learn.fit(2, .01)
    assert skipped(learn)==[False, True, False, False] and log2_scales(learn)==[10, 10, 9, 9]
    assert [stepped for _,stepped,_ in rows]==[c and i != 7 for i,(c,_,_) in enumerate(rows)]
    assert [n for _,_,n in rows]==[8, 16, 24, 0]*4 and len(learn.recorder.losses)==len(learn.recorder.lrs)==4
    assert torch.stack(learn.recorder.losses).isfinite().all()
    steps = accumulated(ragged.sizes(8), 32, n_epoch=2)
    if opt=='SGD': check(learn, ragged, 8, steps[:1]+steps[2:])
    other = exact(acc(micro_batch_size=size), unscaled(), On('before_step', throw(CancelStepException()), [1]),
                  data=ragged, opt_func=opts[opt])
    other.fit(2, .01)
    same(learn, other)

@pytest.mark.parametrize('layout', ('alone', 'accumulated', 'split'))
@pytest.mark.parametrize('clip', (None, .05))
@pytest.mark.parametrize('opt', opts)
def test_equals_unscaled(opt, clip, layout):
    "Whatever the scale, to the bit, clipped on true values, unscaled once"
    def run(mp, clip=clip):
        cbs = {'alone': [], 'accumulated': [acc(20)], 'split': [acc(20, micro_batch_size=3)]}[layout]
        learn = exact(mp, *cbs, *([GradientClip(clip)] if clip else []), data=ragged, opt_func=opts[opt])
        learn.fit_one_cycle(2, .05)
        return learn
    ref = run(unscaled())
    for scale in (1., 2.**24):
        learn = run(fp16(scale))
        same(learn, ref)
        assert not any(skipped(learn)) and len(skipped(learn))==len(learn.recorder.losses)
    if clip: assert not weights(run(unscaled(), None).model).equal(weights(ref.model))

def test_clips_what_is_due():
    "As the loop that everybody has written"
    learn = exact(fp16(), acc(16), GradientClip(.3))
    learn.fit(1, .1)
    ref = train(deepcopy(elementwise), learn.loss_func, partial(torch.optim.SGD, momentum=.9),
                [data[i:i+16] for i in range(0, 64, 16)], .1, clip=.3)
    assert rel_err(weights(learn.model), ref) < 1e-6

def integers():
    "A linear model whose numbers are all multiples of 1/4 and small: fp16 has them exactly"
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    nn.init.constant_(model.weight, 1.)
    return Data(torch.randint(-2, 3, (61,6)).float(), torch.randint(-4, 5, (61,4))+.25), model

def test_fp16_numbers_are_exact():
    "Really computed in fp16, with numbers that it has, for 16 steps: the fp32 run to the bit"
    nums,model = integers()
    def run(*cbs):
        learn = learner(nums, 8, acc(16), *cbs, model=model, loss_func=nn.L1Loss(reduction='sum'), opt_func=SGD)
        learn.fit(4, .25)
        return learn
    ref = run()
    assert len(ref.recorder.losses)==16 and not weights(ref.model).equal(weights(model))
    for scale in (1, 4, 2**7):
        learn = run(fp16(scale))
        same(learn, ref)
        assert torch.stack(learn.recorder.losses).equal(torch.stack(ref.recorder.losses))

def test_scale_does_not_matter():
    "fp16's rounding is the same for all scales between underflow and overflow"
    runs = []
    for scale in (2.**8, 2.**10, 2.**12):
        learn = learner(data, 8, acc(16), fp16(scale))
        learn.fit(3, .1)
        runs.append(learn)
    for learn in runs[1:]: same(learn, runs[0])
    fp32 = learner(data, 8, acc(16))
    fp32.fit(3, .1)
    assert 1e-7 < rel_err(weights(learn.model), weights(fp32.model)) < 2e-3

def test_unscaled_once(monkeypatch):
    calls,unscale = [],DynamicLossScaler.unscale_
    def count(self, opt): calls.append(opt); unscale(self, opt)
    monkeypatch.setattr(DynamicLossScaler, 'unscale_', count)
    learn = exact(fp16(), acc(32, micro_batch_size=3), GradientClip(.1))
    learn.fit(2, .1)
    assert len(calls)==4

# --- Cancelled by other callbacks

layouts = dict(alone=lambda: [], accumulated=lambda: [acc(32)], split=lambda: [acc(32, micro_batch_size=5)])  # of 16, 16, 16 and 13 items
batch_events = L.split('before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch')
cancels = [(ex, ev) for ex in (CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException) for ev in batch_events]
# nothing catches CancelBatch in after_batch
cancels = [*cancels[:7], *cancels[8:], (CancelStepException, 'before_step'),
           (CancelBackwardException, 'before_backward')]

@pytest.mark.parametrize('ex,event,layout,order', [(*c, l, (5, 20)[(i+j)%2]) for i,c in enumerate(cancels) for j,l in enumerate(layouts)])
def test_cancelled(ex, event, order, layout):
    "Before unscaling and after it, where a step opens, and where it closes: as in the unscaled run"
    def run(mp):
        learn = exact(mp, *layouts[layout](), On(event, throw(ex()), (1, 2, 4), order), bs=16, data=ragged, valid=few)
        for n in (2, 1, 1): learn.fit(n, .05)
        return learn
    learn = run(fp16())
    same(learn, run(unscaled()))
    assert learn.on.n >= 4 and not any(skipped(learn))

@pytest.mark.parametrize('opt', ('SGD', 'torch SGD', 'torch AdamW fused'))
@pytest.mark.parametrize('order', (5, 20))
def test_no_gradient(opt, order):
    "Frozen parameters have none; a step without any, cancelled or not, is a step without effect, as in the unscaled run"
    for ex in (None, CancelBatchException(), CancelStepException(), CancelTrainException()):
        runs = [exact(mp, On('before_backward', throw(CancelBackwardException()), (0, 3), order), opt_func=opts[opt])
                for mp in (unscaled(), fp16())]
        for learn in runs:
            learn.model.b.requires_grad_(False)
            learn.fit(2, .05, cbs=On('before_step', throw(ex), [0]) if ex else None)
        same(*runs)
        assert learn.model.b.eq(0).all() and not any(skipped(learn))

# --- 5. Exceptions

errors = [RuntimeError('no'), KeyboardInterrupt(), torch.OutOfMemoryError('full')]
fit_events = [e for e in event.__dict__ if e.startswith(('before', 'after')) and 'cancel' not in e and e != 'after_create']

def right(learn, layout):
    "Nothing is on, and the next fit is right"
    nothing_on(learn)
    learn.fit(1, .01)
    check(learn, ragged, 16, accumulated(ragged.sizes(16), 1 if layout=='alone' else 32))

def for_exceptions(layout): return exact(*layouts[layout](), fp16(2.**16), Spy(), bs=16, data=ragged, valid=few)

@pytest.mark.parametrize('layout', layouts)
@pytest.mark.parametrize('event', fit_events)
def test_exception_at(event, layout):
    "In training, and if it is an event of batches in validation too"
    learn = for_exceptions(layout)
    for i,(ex,order) in enumerate(zip(errors, (5, 20, 20))):
        for training in (True, False) if event in batch_events else (None,):
            if training is False and event in batch_events[3:7]: continue
            with pytest.raises(type(ex)): learn.fit(2, .01, cbs=On(event, throw(ex), [int(bool(training))], order, training))
            if i==2: learn.to_fp32()   # straight away: gradients may be left, and scaled
            right(learn, layout)

def in_forward(learn, boom): learn.model.register_forward_hook(boom)
def in_loss(learn, boom):
    loss_func = learn.loss_func
    def f(pred, y): boom(); return loss_func(pred, y)
    learn.loss_func = f
def in_backward(learn, boom): learn.add_cb(On('after_pred', lambda learn: learn.pred.register_hook(boom)))
def in_step(learn, boom):
    learn.create_opt()
    learn.opt.cbs = L(lambda p, **_: boom()) + learn.opt.cbs
def in_metric(learn, boom): learn.metrics = [lambda pred, y: boom() or 0.]

@pytest.mark.filterwarnings('ignore:Memory ran out with a validation batch', 'ignore:What f averages over could not be measured')
@pytest.mark.parametrize('layout', layouts)
@pytest.mark.parametrize('place', (in_forward, in_loss, in_backward, in_step, in_metric))
def test_exception_in(place, layout):
    "In what is no callback, in its second call; in validate and get_preds too"
    learn,ex,n = for_exceptions(layout),None,iter(range(10**6))
    def boom(*_):
        if ex is not None and next(n): raise ex
    place(learn, boom)
    for e in errors:
        for f in [partial(learn.fit, 2, .01)] + [partial(learn.validate, 0),
                                                 partial(learn.get_preds, 0)]*(place in (in_forward, in_metric)):
            ex,n = e,iter(range(10**6))
            with pytest.raises(type(e)): f()
            ex = None
            right(learn, layout)

# --- 4. The life of the scale

def growing(*cbs, layout='accumulated', **kwargs):
    return exact(*layouts[layout](), fp16(growth_interval=3, **kwargs), *cbs, bs=16, data=ragged, valid=few)

def two_groups():
    "For `freeze`"
    learn = learner(data, 8, acc(16), fp16(growth_interval=3), splitter=lambda m: [params(m[0]), params(m[2])])
    return learn

fits = {'fit': lambda learn: learn.fit(2, .01), 'one cycle': lambda learn: learn.fit_one_cycle(2, .01),
        'fine_tune': lambda learn: learn.fine_tune(1, .01),
        'new optimizer': lambda learn: learn.fit(2, .01, reset_opt=True),
        'unfreeze': lambda learn: (learn.freeze(), learn.unfreeze(), learn.create_opt(), learn.fit(2, .01)),
        'cbs': lambda learn: learn.fit(1, .01, cbs=GradientClip())}

@pytest.mark.parametrize('fit', fits)
def test_one_scaler(fit):
    "The scale doubles every third step, in any fit"
    learn = two_groups()
    scaler = None
    for _ in range(3):
        fits[fit](learn)
        assert scaler is None or learn.mixed_precision.scaler is scaler
        scaler = learn.mixed_precision.scaler
    scales = log2_scales(learn)
    assert len(scales)>=12 and scales==[10+i//3 for i in range(len(scales))] and not any(skipped(learn))

def state(learn): return learn.mixed_precision.state_dict(), learn.mixed_precision.scaler.history()

# Arguments, and is it the divergence that ends it? Or what is raised in the meantime
lr_find_ends = {'all': (dict(num_it=10), False), 'divergence': (dict(start_lr=1., end_lr=1e8), True),
                'infinite': (dict(start_lr=1e10, end_lr=1e38, stop_div=False), True),
                **{repr(e): (e, False) for e in errors}}

@pytest.mark.parametrize('layout', layouts)
@pytest.mark.parametrize('end', lr_find_ends)
def test_lr_find(end, layout):
    "Leaves scale, counters and history as they were, however it ends; stops when the loss diverges"
    how,diverges = lr_find_ends[end]
    learn = growing(layout=layout)
    learn.fit(2, .01)
    before,w,n = state(learn),weights(learn.model),len(skipped(learn))
    if isinstance(how, dict):
        learn.lr_find(show_plot=False, suggest_funcs=(), **how)
        assert weights(learn.model).equal(w) and (len(learn.recorder.losses) < how.get('num_it', 100))==diverges
    else:
        with learn.added_cbs(On('after_backward', throw(how), [5])), pytest.raises(type(how)): learn.lr_find(show_plot=False)
    assert state(learn)==before
    learn.fit(1, .01)
    assert log2_scales(learn)==[10+i//3 for i in range(n+n//2)]

def test_state_dict():
    "Through a file, into a new Learner before its first fit or after one: goes on as if it had been one run"
    for late in (False, True):
        learn,other = growing(hysteresis=2),growing(hysteresis=2)
        if late: other.fit(1, .01)
        learn.fit(2, .01, cbs=On('after_pred', poisons['inf'][1], [1]))
        saved = through_file(learn.mixed_precision.state_dict())
        other.mixed_precision.load_state_dict(saved)
        other.validate()
        assert other.mixed_precision.state_dict()==saved and saved['scaler']['n_overflows']==1
        learn.fit(2, .01)
        other.fit(2, .01)
        assert log2_scales(other)[-4:]==log2_scales(learn)[-4:]
    bf16 = exact(unscaled())
    bf16.mixed_precision.load_state_dict(through_file(bf16.mixed_precision.state_dict()))
    with pytest.raises(ValueError, match="saved state is for 'fp16', but this callback computes in 'bf16'"):
        bf16.mixed_precision.load_state_dict(saved)

def test_save_and_load():
    "`Learner.save` and `load` are fastai's; the scale goes on"
    learn = growing()
    learn.fit(1, .01)
    assert set(torch.load(learn.save('x'), weights_only=False))=={'model', 'opt'}
    w = weights(learn.model)
    learn.fit(1, .01)
    learn.load('x')
    assert weights(learn.model).equal(w) and len(skipped(learn))==4
    learn.fit(1, .01)
    assert log2_scales(learn)==[10, 10, 10, 11, 11, 11]

@pytest.mark.parametrize('copied', (deepcopy, lambda learn: pickle.loads(pickle.dumps(learn))), ids=('deepcopy', 'pickle'))
def test_copies(copied):
    "A copy of the Learner goes on by itself, as the original does"
    learn = growing()
    learn.fit(1, .01)
    other = copied(learn)
    assert other.mixed_precision is not learn.mixed_precision and other.mixed_precision.learn is other and other.one_batch.learn is other
    for l in (learn, other): l.fit(2, .01)
    same(learn, other)
    assert log2_scales(other)==log2_scales(learn)==[10, 10, 10, 11, 11, 11]

in_fp32 = """
import sys
sys.modules['fastaccum'] = None
from fastai.vision.all import *
learn,dtypes = load_learner('export.pkl'),set()
learn.model[4].register_forward_hook(lambda m,x,y: dtypes.add(y.dtype))
print(*learn.predict(np.full((8,8), 100, np.uint8))[2].tolist(), dtypes)
"""

@pytest.mark.slow
def test_export():
    "The file loads where fastaccum is not installed, and predicts in fp32. The Learner that was exported goes on"
    learn = images(acc(8)).to_fp16()
    learn.fit(1)
    mp = learn.mixed_precision
    learn.export()
    assert learn.mixed_precision is mp and mp.learn is learn and type(learn.one_batch).__name__=='BatchLoop'
    learn.seen.clear()
    learn.fit(1)
    assert set(learn.seen)=={torch.float16}
    learn.model.load_state_dict(load_learner('export.pkl').model.state_dict())
    expected = learn.to_fp32().predict(np.full((8,8), 100, np.uint8))[2]
    out = subprocess.run([sys.executable, '-W', 'ignore', '-c', in_fp32], capture_output=True, text=True)
    *probs,dtype = out.stdout.split()
    assert dtype=='{torch.float32}', out.stderr[-2000:]
    assert torch.allclose(tensor([float(p) for p in probs]), expected)

# --- 6. Host syncs

@pytest.mark.parametrize('layout', layouts)
@pytest.mark.parametrize('opt', opts)
def test_syncs(opt, layout):
    "The loop has no more than fastai's, in fp16 too; `learn.stepped` waits for the device only if it is asked"
    def count(*cbs):
        learn = exact(*layouts[layout](), *cbs, bs=16, opt_func=opts[opt], valid=few)
        learn.fit(1, .01)               # makes the optimizer's state
        with SyncCounter() as syncs: learn.fit(5, .01)
        return syncs.n
    steps = 5*(4 if layout=='alone' else 2)
    fp32 = count(unscaled())
    assert fp32 <= count() and count(fp16())==fp32     # the overflow comes with the loss of the row
    watched = 0 if layout=='alone' else 2               # has the callback changed gradients? Read at the end of the first two epochs
    if 'fused' in opt: assert count(fp16(), On('after_batch', lambda learn: learn.stepped))==fp32 + steps + watched

def test_patience_with_fused():
    "The history is read once in `patience` steps"
    n = []
    for mp in (unscaled(), fp16(patience=7)):
        learn = exact(mp, bs=16, opt_func=opts['torch AdamW fused'], valid=few)
        with SyncCounter() as syncs: learn.fit(7, .01)
        n.append(syncs.n)
    assert n[1]-n[0]==4          # 28 steps

# --- 7. Logs

@pytest.mark.parametrize('layout', layouts)
def test_infinite_loss(layout):
    "One infinite loss is in no later row; the step is marked"
    spoilt = Data(ragged.x, ragged.y[0].clone())
    spoilt.y[0][20,1] = inf
    learn = exact(*layouts[layout](), fp16(), bs=16, data=spoilt, valid=few)
    learn.fit_one_cycle(3, .01)
    i = 1 if layout=='alone' else 0
    assert [j for j,s in enumerate(skipped(learn)) if s]==list(range(i, len(skipped(learn)), 4 if layout=='alone' else 2))
    assert torch.stack(learn.recorder.losses[1:]).isfinite().all() and all(np.isfinite(v[0]) for v in learn.recorder.values)
    assert len(learn.recorder.losses)==len(skipped(learn))==(12 if layout=='alone' else 6)

def test_marked():
    "In the values that loggers ask for, and in the picture"
    rows = []
    learn = exact(acc(32), fp16(), On('after_pred', poisons['inf'][1], [5]),
                  On('after_step', lambda learn: rows.append(learn.mixed_precision.step_values)))
    assert learn.mixed_precision.step_values=={}
    learn.fit(3, .01)
    assert [(r['loss_scale'].item(), r['skipped'].item()) for r in rows]==[(1024, 0), (1024, 1), *[(512, 0)]*4]
    ax = learn.mixed_precision.plot()
    scale,crosses = ax.lines
    assert list(scale.get_ydata())==[1024]*2+[512]*4 and (list(crosses.get_xdata()), list(crosses.get_ydata()))==([2], [1024])
    with pytest.raises(ValueError, match='bf16 has .* no loss scale'): exact(unscaled()).mixed_precision.plot()
    exact(fp16()).mixed_precision.plot()   # before the first step

# --- 2., 8. Patience, and 9. errors

@pytest.mark.filterwarnings('ignore:What <lambda> averages over could not be measured .its gradients are zero')
@pytest.mark.parametrize('cbs', ([], [GradientClip], [acc], [acc, GradientClip]), ids=['', 'clip', 'acc', 'acc clip'])
@pytest.mark.parametrize('opt', ('SGD', 'torch SGD', 'torch SGD fused'))
def test_gives_up(opt, cbs):
    "Names the parameter, whatever clipping made of the others, and the loss of the whole step; the next fit has the full patience"
    learn = learner(data, 8, fp16(4., patience=3),
                    On('after_backward', lambda learn: learn.model[2].weight.grad[0].fill_(nan)), *[cb() for cb in cbs],
                    opt_func=opts[opt], loss_func=lambda pred, y: (F.mse_loss(pred, y)*0 + 2.5 + 4*(pred.shape[0] != 8)))
    for _ in range(2):
        with pytest.raises(FloatingPointError) as e: learn.fit(9)
        msg = str(e.value)
        assert (re.search(r'3 overflows in a row .*min_scale=1.0', msg)
                and msg.endswith('The loss is 2.5; gradients that are not finite: 2.weight.'))
        nothing_on(learn)
    assert len(skipped(learn))==5+3 and all(skipped(learn))      # 4, 2, 1, 1, 1

def test_names_of_many():
    learn = learner(data, 8, fp16(1., patience=1),
                    model=nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)], nn.Linear(6, 4)),
                    loss_func=lambda pred, y: (pred-y).sum()*inf)
    with pytest.raises(FloatingPointError,
                       match='The loss is -?(inf|nan); .*finite: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 3 more.$'):
        learn.fit(1)

def test_loss_of_the_step():
    "Not the last micro-batch's"
    spoilt = Data(data.x, data.y[0].clone())
    spoilt.y[0][::32] = inf
    learn = learner(spoilt, 8, acc(32), fp16(1., patience=2))
    with pytest.raises(FloatingPointError, match='The loss is inf'): learn.fit(1)

def test_sparse():
    "Gradients of an embedding"
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 4))
    words = Data(torch.randint(9, (64,2)), data.y[0])
    learn = learner(words, 8, acc(16), fp16(), model=model, opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    learn.fit(1, .1)
    assert len(skipped(learn))==4 and not any(skipped(learn))
    learn = learner(words, 8, acc(16), fp16(1., patience=2), model=model,
                    opt_func=partial(OptimWrapper, opt=torch.optim.SGD), loss_func=lambda pred, y: (pred-y).sum()*inf)
    with pytest.raises(FloatingPointError, match='finite: 0.weight, 2.weight, 2.bias'): learn.fit(1)

arguments = [(dict(amp_mode='fp61'), ValueError, r"amp_mode='fp61' is not one of 'fp16', 'bf16'.*to_fp32"),
             (dict(amp_mode=None), ValueError, 'amp_mode=None'),
    (dict(amp_mode=torch.float16), ValueError, 'is not one of'),
    (dict(amp_mode='bf16', init_scale=2., patience=3), ValueError, 'leave out init_scale, patience'),
    (dict(init_scale=-1.), ValueError, 'init_scale=-1.0 must be'),
    (dict(growth_factor=.5), ValueError, 'growth_factor=0.5 must be above 1'),
    (dict(patience='x'), TypeError, "patience='x' must be an integer"), (dict(growth_intervall=3), TypeError, 'growth_intervall')]

@pytest.mark.parametrize('kwargs,error,msg', arguments)
def test_arguments(kwargs, error, msg):
    "Bad ones are refused at once"
    with pytest.raises(error, match=msg): MixedPrecision(**kwargs)
    if 'amp_mode' not in kwargs:
        with pytest.raises(error, match=msg): exact().to_fp16(**kwargs)

def test_amp_modes():
    for mode in ('fp16', AMPMode.FP16, FastaiAMPMode.FP16): assert MixedPrecision(mode).amp_mode is AMPMode.FP16
    assert MixedPrecision().amp_mode is AMPMode.FP16 and MixedPrecision('bf16').amp_mode is AMPMode.BF16

def refuses(learn, msg, **kwargs):
    "Before training"
    learn.add_cb(On('before_train', throw(AssertionError('it trains')), order=-99, training=None))
    with pytest.raises(ValueError, match=msg): learn.fit(1, **kwargs)

def test_two_precisions():
    names = ', '.join(f'{m}.MixedPrecision' for m in ('fastai.callback.fp16', 'fastaccum.precision.callback'))
    refuses(exact(FastaiPrecision(), fp16()), f'2 precision callbacks are attached: {names}. Keep one: `learn.to_fp32')
    refuses(exact(fp16(), unscaled()), '2 precision callbacks')
    refuses(exact().to_channelslast().add_cb(fp16()), '2 precision callbacks')
    refuses(exact().to_channelslast(use_amp=False).add_cbs([FastaiPrecision(), fp16()]), f'{names}.*to_channelslast.use_amp=False')
    learn = exact(fp16())
    refuses(learn, '2 precision callbacks', cbs=MixedPrecision('bf16'))
    learn.remove_cb(On)
    learn.fit(1)
    assert learn.mixed_precision.amp_mode is AMPMode.FP16

def test_refuses():
    for half in (torch.float16, torch.bfloat16):
        learn = learner(data, 8, acc(16), fp16())
        learn.model[2].to(half)
        refuses(learn, "The weight '2.weight' is in half precision already.*call `learn.model.float")
    for device in ('cuda', 'cuda:0', torch.device('mps')): refuses(exact(MixedPrecision(device=device)), "but the model is on 'cpu'")
    learn = exact(MixedPrecision(device='cpu'))
    learn.fit(1)

@pytest.mark.parametrize('able,msg',
                         (([AMPMode.BF16], "This 'cpu' device .* cannot compute in fp16. It supports bf16 and fp32"),
                          ([], 'cannot compute in fp16. It supports fp32')))
def test_device_cannot(able, msg, monkeypatch):
    monkeypatch.setattr(precision, 'can_compute_in', lambda device, mode: mode in able)
    refuses(exact(fp16()), msg)
    with pytest.raises(ValueError, match=msg): exact(fp16()).validate()

def test_can_compute_in(monkeypatch):
    "Found out by trying; autocast only warns where it does not know the type, and stays off"
    precision.can_compute_in.cache_clear()
    assert (precision.can_compute_in('cpu', AMPMode.BF16) and not precision.can_compute_in('nonsense', AMPMode.FP16)
            and not precision.can_compute_in('meta2', AMPMode.BF16))
    precision.can_compute_in.cache_clear()
    def off(*args, **kwargs):
        warnings.warn('In CPU autocast, but the target dtype is not supported. Disabling autocast.')
        return contextlib.nullcontext()
    monkeypatch.setattr(torch, 'autocast', off)
    assert not precision.can_compute_in('cpu', AMPMode.FP16)
    monkeypatch.setattr(torch, 'autocast', lambda *args, **kwargs: contextlib.nullcontext())
    assert not precision.can_compute_in('cpu', AMPMode.BF16)
    precision.can_compute_in.cache_clear()

def test_replace_each_other():
    learn = exact(FastaiPrecision())
    for to in ('to_fp16', 'to_bf16', 'to_bf16', 'to_fp16', 'to_fp32', 'to_fp32', 'to_bf16'):
        assert getattr(learn, to)() is learn
        modes = [cb.amp_mode.value for cb in learn.cbs if cb.name=='mixed_precision']
        assert modes==[to[3:]]*(to != 'to_fp32') and hasattr(learn, 'mixed_precision')==bool(modes)
        learn.fit(1)
    learn = exact().to_channelslast().to_fp16(init_scale=2.**5)
    learn.fit(1)
    assert learn.channels_last and log2_scales(learn)==[5]*8

# --- Models and optimizers

Pair = namedtuple('Pair', 'a b')
class Output(dict):
    "As Hugging Face's models return"
    def __getattr__(self, k): return self[k]

outputs = dict(tuple=(lambda o: (o, o.argmax(-1)), lambda p: p[0]), none=(lambda o: (o, None, 3, 'x'), lambda p: p[0]),
               list=(lambda o: [1, [o]], lambda p: p[1][0]),
               dict=(lambda o: dict(a=dict(b=o)), lambda p: p['a']['b']), namedtuple=(lambda o: Pair(None, o), lambda p: p.b),
               subclass=(lambda o: Output(a=o), lambda p: p.a), L=(lambda o: L(o), lambda p: p[0]))

class Returns(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.lin,self.f = nn.Linear(6, 4),f
    def forward(self, x): return self.f(self.lin(x))

@pytest.mark.filterwarnings('ignore:What loss_func averages over could not be measured .its outputs')
@pytest.mark.parametrize('size', (None, 3))
@pytest.mark.parametrize('output', outputs)
def test_outputs(output, size):
    "Any nesting: tensors become float32, all else stays"
    make,get = outputs[output]
    seen = set()
    def loss_func(pred, y):
        seen.add((type(pred), get(pred).dtype))
        return F.mse_loss(get(pred), y)
    learn = learner(data, 8, acc(16, micro_batch_size=size), fp16(), model=Returns(make), loss_func=loss_func)
    learn.fit(1, .1)
    learn.validate()
    assert seen=={(type(make(torch.ones(2,2))), torch.float32)} and len(skipped(learn))==4

def test_accumulation_later():
    "Without it, with it, without it again: each as in the unscaled run"
    runs = []
    for mp in (unscaled(), fp16()):
        learn = exact(mp)
        learn.fit(1, .05)
        learn.add_cb(acc(20))
        learn.fit(1, .05)
        learn.remove_cb(GradientAccumulation)
        learn.fit(1, .05)
        runs.append(learn)
    same(*runs)
    assert len(skipped(learn))==8+3+8

@pytest.mark.filterwarnings("ignore:fastai.s GradientAccumulation is attached")
def test_fastai_accumulation():
    "fastai's own callback next to ours: as it is without scaling"
    runs = [exact(mp, FastaiAccumulation(16), GradientClip(.1)) for mp in (unscaled(), fp16())]
    for learn in runs: learn.fit(2, .05)
    same(*runs)
    assert len(skipped(learn))==8

class Small(Elementwise):
    "Has memory for 4 items"
    def forward(self, x):
        if len(x) > 4: raise torch.OutOfMemoryError('full')
        return super().forward(x)

def test_out_of_memory():
    "Micro-batches found by memory: nothing of a try that failed is left"
    torch.manual_seed(0)
    learn = exact(acc(32, micro_batch_size='auto'), fp16(), Spy(), bs=16, data=ragged, valid=Data(data.x[:4], data.y[0][:4]), model=Small())
    learn.fit(2, .01)
    steps = accumulated(ragged.sizes(16), 32, n_epoch=2)
    learn.model.__class__ = Elementwise
    check(learn, ragged, 16, steps)
    assert log2_scales(learn)==[10]*4 and not any(skipped(learn))

def test_nothing_to_learn_from():
    "A micro-batch whose targets are all ignored is no overflow, though its loss is NaN"
    classes = Data(data.x, torch.arange(64)%4)
    classes.y[0][8:16] = -100
    for loss_func in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=tensor([1., 2., 3., 4.]), label_smoothing=.1)):
        runs = [exact(acc(32), mp, data=classes, loss_func=loss_func) for mp in (unscaled(), fp16())]
        for learn in runs: learn.fit(2, .05)
        same(*runs)
        assert skipped(learn)==[False]*4 and torch.stack(learn.recorder.losses).isfinite().all()

def test_precision_later():
    "fp32, then fp16 in one fit, then fp32"
    runs = []
    for mp in (unscaled(), fp16()):
        learn = exact(acc(20))
        for cbs in (None, mp, None): learn.fit(1, .05, cbs=cbs)
        runs.append(learn)
    same(*runs)
    assert not hasattr(learn, 'mixed_precision') and len(mp.scaler.history()['scale'])==3

def test_detached():
    "The state can be read when the callback has left, whatever ended lr_find"
    learn = growing()
    learn.fit(1, .01)
    mp,before = learn.mixed_precision,state(learn)
    with learn.added_cbs(On('after_backward', throw(KeyboardInterrupt()), [5])), pytest.raises(KeyboardInterrupt):
        learn.lr_find(show_plot=False)
    learn.to_fp32()
    assert (mp.state_dict(), mp.scaler.history())==before

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_cuda():
    "The same on a GPU: the type, an overflow, the scale"
    for mode in ('bf16', 'fp16'):
        learn,model_seen,loss_seen = typed(mode, acc(32))
        learn.model.cuda(); learn.dls.device = torch.device('cuda')
        learn.fit(2, .01, cbs=On('after_pred', poisons['inf'][1], [5]))
        assert model_seen=={(t, dtypes[mode]) for t in (True, False)}
        if mode=='fp16': assert skipped(learn)==[False, True, False, False]
        assert not torch.is_autocast_enabled('cuda')
