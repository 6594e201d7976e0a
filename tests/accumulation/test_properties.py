"Random data, batches, schedules, losses and exceptions: the weights are those of a loop over the items of each step, in float64"
from functools import reduce
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from quick import quickly
from reference import *
import torch.utils.data as torch_data
from fastai.callback.schedule import ParamScheduler, SchedCos, SchedExp, SchedLin, combine_scheds
from fastaccum.precision.callback import MixedPrecision
from fastaccum.logs.steps import StepLogger

# CASES=3000 python -m pytest tests/accumulation/test_properties.py: so many of each test, others every time
def drawn(n, *strategies, also=()):
    "Test with `n` drawn examples, or, quickly and on the simulated device, with a sixth of them, and with those in `also`"
    def decorated(check):
        def of(n):
            few = settings(max_examples=int(os.environ.get('CASES', n)), derandomize='CASES' not in os.environ, deadline=None,
                           database=None, suppress_health_check=list(HealthCheck))
            return few(reduce(lambda test, o: example(o)(test), also, given(*strategies)(check)))
        tests = {k: of(k) for k in (n, n//6)}
        @pytest.mark.parametrize('n', quickly([n//6], [n, n//6]))
        def test(n, device): tests[min(tests) if device.name == 'sim' else n]()
        return test
    return decorated

torch.manual_seed(0)
pytestmark = pytest.mark.filterwarnings("ignore:accum_bs=.* is smaller than a loader batch", 'ignore:finish=1 is an epoch',
                                          'ignore:What Mse averages over could not be measured .it has seen a single item')
n_max,lr = 48,.1
xs,reals,classes = torch.randn(n_max, 3),torch.randn(n_max, 2, 4),torch.randint(4, (n_max, 2))
holes = torch.where(torch.rand(n_max, 2) < .6, -100, classes)
holes[8:14] = -100
cls_w = tensor([.1, 3., 0., .4])

class Rows(nn.Module):
    "Predictions of the shape (n,c,2). Elementwise, so that fp16 computes what fp32 does"
    def __init__(self):
        super().__init__()
        self.w,self.b = nn.Parameter(torch.randn(3, 4, 2)/2),nn.Parameter(torch.zeros(4, 2))
    def forward(self, x): return ((x[:,:,None,None]*self.w).tanh().sum(1) + self.b).tanh()

class Mse(nn.Module):
    "Of predictions (n,c,2) and targets (n,2,c); nobody knows it, so its mean goes over items"
    def forward(self, pred, y): return (pred.transpose(1, 2)-y).pow(2).mean()
def masked(pred, y): return (F.cross_entropy(pred, y.clamp(min=0), reduction='none')*(y >= 0)).sum()/(y >= 0).sum()

losses = {  # loss, targets, `weight`
    'items': (Mse(), reals, None), 'classes': (nn.CrossEntropyLoss(), classes, None), 'ignored': (nn.CrossEntropyLoss(), holes, None),
    'class weights': (nn.CrossEntropyLoss(weight=cls_w+.2, label_smoothing=.1), holes, None),
    'flat': (CrossEntropyLossFlat(axis=1, weight=cls_w), holes, None),
    'sum': (nn.CrossEntropyLoss(reduction='sum'), holes, None), 'own': (masked, holes, lambda learn: (learn.y >= 0).sum()),
    'own on the host': (masked, holes, lambda learn: int((learn.y >= 0).sum()))}

def replay(model, loss_func, steps, lrs):
    "Weights after steps of SGD: each with the sum of the gradients of its batches, which is one unless gradients are added up as they come"
    w = weights(model).double()
    for batches,lr in zip(steps, lrs): w = w - lr*sum(big_batch(model, w, loss_func, x, y)[0] for x,*y in batches)
    return w

# --- what is drawn

drawn_remainders = st.sampled_from(remainders)
micro_batches = st.one_of(st.none(), st.integers(1, 13), st.just('auto'))
sizes = st.integers(1, 40)

@st.composite
def schedules(draw):
    "Arguments of a schedule"
    a,b = (sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))) if draw(st.booleans())
           else sorted(draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))))
    return dict(start_accum_bs=draw(sizes), final_accum_bs=draw(sizes), start=a, finish=b,
                schedule=draw(st.sampled_from([SchedLin, SchedCos, SchedExp, up_and_down])))

def up_and_down(a, b): return combine_scheds([.25, .75], [SchedLin(a, b), SchedCos(b, 3)])
lr_schedule = SchedCos(1., .1)   # times `lr`

class Interrupted(Exception): pass   # by no exception of fastai's

@st.composite
def stops(draw, n_epoch, n_batches, split):
    "A callback's exception: event, type, loader batches. With micro-batches not in the middle of a loader batch"
    event = draw(st.sampled_from(['before_batch','before_step','after_step','after_batch']
                                 + ['after_pred','after_loss','before_backward','after_backward']*(not split)))
    only = dict(before_step=CancelStepException, before_backward=CancelBackwardException).get(event)   # fastai catches them nowhere else
    ex = draw(st.sampled_from([CancelTrainException, CancelEpochException, CancelFitException, Interrupted]
                              + [CancelBatchException]*(event!='after_batch') + [only]*(only is not None)))
    return event,ex,draw(st.sets(st.tuples(st.integers(0, n_epoch-1), st.integers(0, n_batches-1)), min_size=1, max_size=4))

# how large an accumulated batch is; without arguments 32, and with micro-batches as large as the loader's
accum_sizes = st.one_of(st.fixed_dictionaries(dict(accum_bs=st.integers(1, 60))), schedules(),
                        st.fixed_dictionaries(dict(n_acc=st.integers(1, 60))), st.just({}))

@st.composite
def trainings(draw):
    "Everything that a fit depends on"
    n,bs,k,loss,n_epoch = (draw(st.integers(1, n_max)),draw(st.integers(1, 12)),draw(micro_batches),
                           draw(st.sampled_from(list(losses))),draw(st.integers(1, 3)))
    plain,fp16 = loss in ('items','classes','sum'),draw(st.booleans())   # no item counts for nothing
    acc = dict(draw(accum_sizes), micro_batch_size=k, remainder=draw(drawn_remainders), log_accum_batch=draw(st.booleans()),
               normalize=not plain or draw(st.integers(0, 4)) > 0)
    return SimpleNamespace(n=n, bs=bs, n_epoch=n_epoch, loss=loss, order=draw(st.sampled_from([3, 20])), acc=acc, fp16=fp16,
        nan=draw(st.none() | st.integers(0, n-1)) if plain and fp16 else None, drop_last=draw(st.integers(0, 4))==0,
        loader=draw(st.sampled_from([DataLoader, torch_data.DataLoader])),
        one_cycle=draw(st.booleans()), stop=draw(stops(n_epoch, -(-n//bs), isinstance(k, int))) if draw(st.integers(0, 3)) else None)

def accumulation(kwargs): return (GradientAccumulationSchedule if 'start_accum_bs' in kwargs else GradientAccumulation)(**kwargs)

def size_at(c, n_iter):
    "`accum_bs` by the words of the docs: position = loader batches done of all, a float a fraction of the fit, an int an epoch"
    if 'start_accum_bs' not in c.acc: return c.acc.get('accum_bs', c.acc.get('n_acc', 1 if c.acc['micro_batch_size'] else 32))
    a,b = (v/c.n_epoch if isinstance(v, int) else v for v in (c.acc['start'], c.acc['finish']))
    first,last = c.acc['start_accum_bs'],c.acc['final_accum_bs']
    def size(epoch, i):
        pos = (epoch*n_iter+i)/(n_iter*c.n_epoch)
        return first if pos < a else last if pos >= b else round(float(c.acc['schedule'](first, last)((pos-a)/(b-a))))
    return size

def prepare(c):
    "Learner, data, items of each loader batch"
    loss_func,y,weight = losses[c.loss]
    x = xs[:c.n].clone()
    if c.nan is not None: x[c.nan] = float('nan')
    data,cb = Data(x, y[:c.n]),accumulation({**c.acc, 'weight': weight})
    more = [MixedPrecision('fp16', init_scale=2.**8)] if c.fp16 else []
    learn = learner(data, c.bs, cb, StepLogger(), *more, model=Rows(), loss_func=loss_func, opt_func=SGD,
                    valid=Data(xs[:2], y[:2]), dl_type=partial(c.loader, drop_last=c.drop_last))
    return learn,data,[s for s in data.sizes(c.bs) if s==c.bs or not c.drop_last]

def lr_of(c): return lr/(20 if c.loss=='sum' or not c.acc['normalize'] else 1)
def lrs_of(c, steps, sizes, closed):
    return [lr_of(c)*(lr_schedule(position(c, sizes, e, i, closed)) if c.one_cycle else 1) for (e,i),*_ in steps]

def position(c, sizes, e, i, closed):
    """By the words of the docs: steps begun of those planned, in the epoch, or in the fit if they cross the ends of
    epochs. `closed`: did a loader batch end a step? Once it did not go by plan, and for sizes that change, the position
    in the epoch is that of the loader batch"""
    size,carry,n = size_at(c, len(sizes)),c.acc['remainder']=='carry',len(sizes)
    ends = [] if callable(size) else [s[-1] for s in accumulated(sizes, size, c.acc['remainder'], c.n_epoch) if carry or s[-1][0]==e]
    if len(ends) in (0, n*c.n_epoch if carry else n) or any(closed[e,j]!=((e,j) in ends) for j in range(i)): return (e+i/n)/c.n_epoch
    begun = min(sum(end < (e,i) for end in ends), len(ends)-1)/len(ends)
    return begun if carry else (e+begun)/c.n_epoch

def batches_of(c, data, steps):
    "What a step's gradient is of: one batch, or, if it is not to be normalized, the micro-batches"
    if c.acc['normalize']: return [[b] for b in data.steps(c.bs, steps)]
    k = c.acc['micro_batch_size'] if isinstance(c.acc['micro_batch_size'], int) else c.bs
    def parts(i): return [data.batch(range(a, min(a+k, (i+1)*c.bs, c.n))) for a in range(i*c.bs, min((i+1)*c.bs, c.n), k)]
    return [[b for _,i in s for b in parts(i)] for s in steps]

def never_steps(c, sizes):
    "Is some accumulated batch larger than an epoch, whose left-overs are dropped?"
    size,n = size_at(c, len(sizes)),len(sizes)
    return (n and c.acc['remainder']=='drop' and sum(sizes)
            < max(size(e, i) if callable(size) else size for e in range(c.n_epoch) for i in range(n)))

# --- whole fits

once_wrong = dict(n=26, bs=2, n_epoch=1, loss='flat', order=3, fp16=False, nan=None, drop_last=False, loader=DataLoader, one_cycle=False,
    acc=dict(accum_bs=1, micro_batch_size=None, remainder='step', log_accum_batch=True, normalize=True),
    stop=('before_step', CancelBatchException, {(0, 11)}))

@pytest.mark.slow
@drawn(80, trainings(), also=[SimpleNamespace(**once_wrong)])   # a step is cancelled in which no item counts
def test_fit(c):
    "Weights, rows and items are those of the steps that should be; and again in a second fit"
    learn,data,sizes = prepare(c)
    if never_steps(c, sizes):
        with pytest.raises(ValueError, match='would never step'): learn.fit(c.n_epoch)
        return
    for stop in (c.stop, None):
        tried,before = accumulated(sizes, size_at(c, len(sizes)), c.acc['remainder'], c.n_epoch, stop),deepcopy(learn.model)
        steps = [s for s in tried if c.nan is None or c.nan//c.bs not in [i for _,i in s]]   # the others are skipped in fp16
        plan,n_rows = learn.gradient_accumulation.plan(c.n_epoch),len(learn.step_logger.rows)
        closed = {}
        cbs = [On('after_batch', lambda l: closed.update({(l.epoch,l.iter): l.one_batch.closed}), order=-20),
               *[ParamScheduler({'lr': lambda pos: lr_of(c)*lr_schedule(pos)})]*c.one_cycle]
        if stop: cbs.append(Stop(*stop, order=55 if stop[0]=='after_batch' and c.order > 3 else c.order))
        came = None
        try: learn.fit(c.n_epoch, lr_of(c), cbs=cbs)
        except Interrupted as e: came = e
        assert (came is None) or stop[1] is Interrupted
        assert rel_err(weights(learn.model),
                       replay(before, learn.loss_func, batches_of(c, data, steps),
                              lrs_of(c, steps, sizes, closed))) < 5e-6
        assert came or no_gradients(learn)
        rows = learn.step_logger.to_df()[n_rows:]
        items,expected = (rows['items'][~rows.skipped].tolist() if len(rows) else []),[sum(sizes[i] for _,i in s) for s in steps]
        # the row of a last step may be missing
        if stop and stop[1] in (CancelFitException, Interrupted):
            assert items==expected[:len(items)] and len(items) >= len(expected)-1
        else: assert items==expected
        if stop is not None: continue
        assert plan==[sum(sizes[i] for _,i in s) for s in tried] and len(rows)==len(tried)
        if c.acc['log_accum_batch']:
            assert (len(learn.recorder.losses)==len(tried)
                    and np.allclose(learn.recorder.lrs, lrs_of(c, tried, sizes, closed)))
        if c.acc['remainder']=='step': assert sum(plan)==sum(sizes)*c.n_epoch, 'every item once'

# --- odd loaders

@pytest.mark.filterwarnings("ignore:remainder='drop' with accum_bs=")
@drawn(60, st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda s: sum(s) <= n_max), st.integers(1, 40),
       drawn_remainders, micro_batches, st.sampled_from(list(losses)))
def test_odd_batches(sizes, accum_bs, remainder, k, loss):
    "Loader batches of any sizes, which no plan knows"
    loss_func,y,weight = losses[loss]
    starts = np.cumsum([0, *sizes])
    def loader(data, batch_size=None): return torch_data.DataLoader(data, batch_sampler=[range(a, b) for a,b in zip(starts, starts[1:])])
    data = Data(xs, y)
    learn = learner(data, None, GradientAccumulation(accum_bs, remainder=remainder, micro_batch_size=k, weight=weight),
                    model=Rows(), loss_func=loss_func, opt_func=SGD, dl_type=loader)
    before,steps = deepcopy(learn.model),accumulated(sizes, accum_bs, remainder, 2)
    learn.fit(2, lr/(20 if loss=='sum' else 1))
    batches = [[data.batch([j for _,i in s for j in range(starts[i], starts[i+1])])] for s in steps]
    assert rel_err(weights(learn.model), replay(before, loss_func, batches, [lr/(20 if loss=='sum' else 1)]*len(steps))) < 5e-6

# --- one Learner, whatever is done with it

def fails(learn, event):
    def boom(*_): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): learn.fit(1, lr, cbs=Callback(**{event: boom}))
def attach(learn, *cbs): learn.add_cbs([cb for cb in cbs if not hasattr(learn, cb.name)])

deeds = {
    'nothing': noop, 'validate': lambda l: l.validate(), 'get_preds': lambda l: l.get_preds(),
    'lr_find': lambda l: l.lr_find(num_it=5, show_plot=False),
    'one cycle': lambda l: l.fit_one_cycle(1, lr), 'fp16': lambda l: l.to_fp16(init_scale=2.**8),
    'bf16': lambda l: l.to_bf16(), 'fp32': lambda l: l.to_fp32(),
    'new optimizer': lambda l: l.create_opt(), 'freeze': lambda l: l.freeze(), 'unfreeze': lambda l: l.unfreeze(),
    'logger': lambda l: attach(l, StepLogger()),
    'carry': lambda l: setattr(l.gradient_accumulation, 'remainder', 'carry'),
    'step': lambda l: setattr(l.gradient_accumulation, 'remainder', 'step'),
    'size': lambda l: setattr(l.gradient_accumulation, 'accum_bs', 13),
    'split': lambda l: setattr(l.gradient_accumulation, 'micro_batch_size', 3),
    'whole': lambda l: setattr(l.gradient_accumulation, 'micro_batch_size', None),
    'again': lambda l: (a := l.gradient_accumulation) and l.remove_cb(a).add_cb(a),
    'fit without': lambda l: without(l), 'exception in before_step': lambda l: fails(l, 'before_step'),
    **{f'exception in {e}': partial(fails, event=e)
       for e in ('before_fit','after_pred','after_backward','after_step','after_batch','after_train','after_epoch')}}

def without(learn):
    "A fit while accumulation is off"
    with learn.removed_cbs(learn.gradient_accumulation): learn.fit(1, lr)

@drawn(30, st.lists(st.sampled_from(list(deeds)), min_size=1, max_size=8), st.integers(1, 8))
def test_life(names, bs):
    "Whatever was done before: the next fit is right"
    data = Data(xs[:29], classes[:29])
    learn = learner(data, bs, GradientAccumulation(10), model=Rows(), loss_func=nn.CrossEntropyLoss(), opt_func=SGD)
    for name in names:
        with learn.no_bar(): deeds[name](learn)
        acc,before = learn.gradient_accumulation,deepcopy(learn.model)
        learn.fit(1, lr)
        steps = accumulated(data.sizes(bs), acc._accum_bs, acc.remainder)
        assert rel_err(weights(learn.model),
                       replay(before, learn.loss_func, [[b] for b in data.steps(bs, steps)],
                              [lr]*len(steps))) < 5e-6, name
        assert no_gradients(learn) and len(learn.recorder.losses)==len(steps)

# --- the ground floor

@pytest.mark.filterwarnings('ignore:A micro-batch has')
@drawn(100, st.data())
def test_accumulator(data):
    "Any cuts, weights, false ends and saved states: the gradient of the weighted mean"
    n = data.draw(st.integers(1, 30))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, n), max_size=6)) - {n}), n]
    w = torch.tensor(data.draw(st.lists(st.sampled_from([0., .5, 1., 3.]), min_size=n, max_size=n)))
    on_device = data.draw(st.booleans())
    model,x,y = nn.Linear(3, 1),xs[:n],reals[:n,0,:1]
    acc = GradientAccumulator(model.parameters(), data.draw(st.integers(1, 40)))
    for a,b in zip(cuts, cuts[1:]):
        pred,weight = model(x[a:b]),w[a:b].sum()
        loss = ((pred-y[a:b]).pow(2)[:,0]*w[a:b]).sum()/weight
        acc.add(loss, b-a, weight if on_device else weight.item(), nominal=b-a, pred=pred).backward()
        if data.draw(st.integers(0, 3))==0: acc.finish(); acc.reopen()
        if data.draw(st.integers(0, 3))==0: acc.load_state_dict(deepcopy(acc.state_dict()))
    assert acc.n_items==n
    loss = acc.finish()
    ref = double(model)
    expected = ((ref(x.double())-y.double()).pow(2)[:,0]*w).sum()/w.sum() if w.sum() else (ref.weight*0).sum()
    ref.zero_grad(); expected.backward()
    g,expected_g = grads(model),grads(ref)
    assert (g-expected_g).norm() < 2e-6*max(1., expected_g.norm()), 'items have gradients of about 1, which may cancel'
    assert abs(loss.item()-expected.item()) < 1e-5*max(1, abs(expected.item())) and acc.n_items==0
