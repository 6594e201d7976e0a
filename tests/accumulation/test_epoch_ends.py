"Which items share a step: at the end of epochs, after exceptions and cancelled batches, between fits, and with schedules"
import itertools, random, pytest
from quick import quickly
from fastai.callback.data import WeightedDL
from fastai.text.data import SortedDL
from reference import *
from fastai.callback.schedule import SchedCos, SchedExp, SchedLin, SchedNo, SchedPoly, combine_scheds

torch.manual_seed(0)
data61 = Data(torch.randn(61, 6), torch.randn(61, 4))

def fit_and_check(learn, steps, n_epoch=3, bs=8, n_rows=None):
    "Train, and find the gradients and rows of `steps`; nothing is left afterwards"
    learn.fit(n_epoch, .01)
    check(learn, learn.dls.train.dataset, bs, steps)
    assert no_gradients(learn)
    if n_rows!=0: assert len(learn.recorder.losses)==len(learn.recorder.lrs)==(n_rows or len(steps))

def learner61(*cbs, bs=8, accum_bs=32, remainder='step', micro_batch_size=None, data=data61, **kwargs):
    return learner(data, bs, GradientAccumulation(accum_bs, remainder=remainder, micro_batch_size=micro_batch_size), Spy(), *cbs, **kwargs)

# --- the end of an epoch

@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('n', [61, 64, 32, 31, 33, 8, 5], ids=lambda n: f'{n} items')
@pytest.mark.parametrize('accum_bs', [32, 20, 8, 100])
def test_remainder(accum_bs, n, remainder):
    "Also an epoch of exactly one accumulated batch (32 items), and one of less"
    data = Data(data61.x.repeat(2, 1)[:n], data61.y[0].repeat(2, 1)[:n])
    steps = accumulated(data.sizes(8), accum_bs, remainder, 3)
    learn = learner61(accum_bs=accum_bs, remainder=remainder, data=data)
    if steps or remainder=='carry': fit_and_check(learn, steps)
    else:
        with pytest.raises(ValueError, match='would never step'): learn.fit(3)

def test_messages(capsys):
    "What 'carry' has left at the end of the fit is cleared with a message"
    learner61(remainder='carry').fit(1)
    assert 'ended with 29 of 32 items' in capsys.readouterr().out
    learner61(remainder='carry', accum_bs=61).fit(1)
    assert capsys.readouterr().out==''

@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('pct', [.1, .3, .375, .5, .75, .9])
def test_short_epoch(pct, remainder):
    "`ShortEpochCallback` ends an epoch anywhere: between steps, or with one"
    stop = 'after_batch',CancelTrainException,[(e, math.ceil(pct*8)) for e in range(3)]
    fit_and_check(learner61(ShortEpochCallback(pct), remainder=remainder), accumulated(data61.sizes(8), 32, remainder, 3, stop))

def test_left_overs_are_clipped():
    learn = learner61(ShortEpochCallback(.7), GradientClip(.01))
    learn.fit(2)
    assert [s.n_items for s in learn.spy.steps]==[32,24]*2 and all(s.grad.norm()==pytest.approx(.01, rel=1e-3) for s in learn.spy.steps)

def test_short_epoch_rows_of_each_batch():
    "`log_accum_batch=False`: fastai's rows"
    ours,fastais = [learner(data61, 8, ShortEpochCallback(.7), cb)
                    for cb in (GradientAccumulation(32, log_accum_batch=False), FastaiAccumulation(32))]
    for l in (ours, fastais): l.fit(2)
    assert len(ours.recorder.losses)==len(fastais.recorder.losses)==12

# --- exceptions of fastai

step_events = 'before_step','after_step'
all_events = 'before_batch','after_pred','after_loss','before_backward','after_backward',*step_events,'after_batch'
stops = [*[(CancelBatchException, e) for e in all_events[:-1]], (CancelBackwardException, 'before_backward'),
         (CancelStepException, 'before_step'),
         *[(ex, e) for ex in (CancelTrainException, CancelEpochException, CancelFitException) for e in all_events]]

@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('ex,event', stops, ids=lambda o: getattr(o, '__name__', o))
def test_cancel(ex, event, remainder):
    """A callback raises `ex` at `event`, in a middle, a closing and the last loader batch, before ours and after: each with
    one of two policies for the remainder"""
    orders = (3, 20) if event!='after_batch' else (3, 55)
    first = (stops.index((ex, event)) + [*remainders].index(remainder))%2
    for order,i in [*itertools.product(orders, (1, 3, 7))][first::2]:
        at = {(epoch,i) for epoch in range(2)}
        steps = accumulated(data61.sizes(8), 32, remainder, 2, (event, ex, at))
        skipped = ex is CancelStepException and sum(len(s) for s in steps) < 16
        learn = learner61(Stop(event, ex, at, order), remainder=remainder)
        try:
            fit_and_check(learn, steps, 2, n_rows=0)
            if not skipped and ex is not CancelFitException: assert len(learn.recorder.losses)==len(steps), 'one row a step'
            fit_and_check(learn, accumulated(data61.sizes(8), 32, remainder), 1)
        except AssertionError as e: raise AssertionError(f'order {order}, batch {i}: {e}') from e
        except BaseException as e: raise RuntimeError(f'order {order}, batch {i}: {type(e).__name__} {e}') from e

def test_skipped_step_gives_a_row():
    learn = learner61(Stop('before_step', CancelStepException, [(0,3)]))
    fit_and_check(learn, accumulated(data61.sizes(8), 32, n_epoch=3)[1:], n_rows=6)

@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('ex', [CancelBatchException, CancelTrainException, CancelEpochException, CancelStepException])
def test_always_refused(ex, remainder):
    "A callback that never lets the last step of an epoch be: no error, and whatever steps later is exact"
    learn = learner61(Stop('before_step', ex, [(0,7), (1,7)], once=False), remainder=remainder)
    learn.fit(3, .01)
    if remainder!='drop' and ex is not CancelStepException: check(learn, data61, 8, [s.batches for s in learn.spy.steps])
    assert no_gradients(learn) and len(learn.spy.steps) >= 3

@pytest.mark.parametrize('ex', [CancelBatchException, CancelBackwardException, CancelTrainException])
@pytest.mark.parametrize('event', ['after_pred', 'before_backward', 'after_backward'])
def test_cancel_a_micro_batch(event, ex):
    "What of a split loader batch was back-propagated counts, the rest does not"
    if ex is CancelBackwardException and event!='before_backward': return
    for nth in (2, 5, 9, 12):                 # loader batches of 16 items are 4 micro-batches
        calls = iter(range(1, 99))
        def stop(cb):
            if cb.training and next(calls)==nth: raise ex
        learn = learner61(Callback(**{event: stop}), bs=16, micro_batch_size=5)
        learn.fit(2, .01)
        check_own(learn)
        n_items = [s.n_items for s in learn.spy.steps]
        assert (sum(n_items) < 122 or event=='after_backward') and n_items[-2:]==[32,29] and len(learn.recorder.losses)==len(n_items)

def test_cancelled_step_without_valid_targets():
    "The accumulated batch goes on although all its targets were ignored so far"
    data = Data(data61.x, torch.where(torch.arange(61) < 32, -100, 1))
    learn = learner61(Stop('before_step', CancelBatchException, [(0,3)]), data=data, loss_func=nn.CrossEntropyLoss())
    learn.fit(1, .01)
    check(learn, data, 8, [[(0,i) for i in range(5)], [(0,i) for i in range(5, 8)]])

# --- what other callbacks see

class Watch(Callback):
    "What may be read from `before_batch` on, and after the step"
    order,run_valid = 60,False
    def before_fit(self): self.seen,self.steps = [],[]
    def before_batch(self):
        acc = self.learn.gradient_accumulation
        self.seen.append((acc.opens, acc.closes, acc.n_items, acc.accum_bs))
    def after_batch(self): self.steps.append(self.learn.stepped)

def test_state():
    learn = learner61(Watch(), Stop('before_step', CancelStepException, [(0,3)]))
    learn.fit(1)
    assert learn.watch.seen==[(i%4==0, i%4==3, i%4*8, 32) for i in range(8)]
    assert learn.watch.steps==[False]*7+[True]

@pytest.mark.parametrize('order', [0, 20])
def test_targets_of_a_callback(order):
    "Targets that only a callback makes (an autoencoder's), before ours or after"
    class Autoencoder(Callback):
        def before_batch(self): self.learn.yb = self.learn.xb
    Autoencoder.order = order
    learn = learner(Data(data61.x), 8, GradientAccumulation(32), Autoencoder(), Spy(), model=mlp(n_out=6))
    learn.fit(2, .01)
    check(learn, Data(data61.x, data61.x), 8, accumulated(data61.sizes(8), 32, n_epoch=2))

def test_fewer_items():
    "A callback, after ours, that leaves out items"
    class Half(Callback):
        order,run_valid = 20,False
        def before_batch(self): self.learn.xb,self.learn.yb = (self.learn.x[::2],),(self.learn.y[::2],)
    learn = learner61(Half(), accum_bs=10)
    learn.fit(1, .01)
    assert [s.n_items for s in learn.spy.steps]==[12,12,7]
    check_own(learn)

def test_loader_that_ends_early():
    "A loader with fewer batches than its length says"
    class Short(DataLoader):
        def __len__(self): return 10
    learn = learner(data61, 8, GradientAccumulation(32), Spy(), dl_type=Short)
    fit_and_check(learn, accumulated(data61.sizes(8), 32, n_epoch=2), 2)

def test_switched_off():
    "`run=False` for a fit: fastai's own loop"
    learn,plain = learner61(),learner(data61, 8)
    learn.gradient_accumulation.run = False
    for l in (learn, plain): l.fit(1, .1)
    assert torch.equal(weights(learn.model), weights(plain.model)) and len(learn.recorder.losses)==8

def test_no_epochs(): learner61().fit(0)

def test_methods_that_change():
    "A method that a callback gets after a first fit is called in the next one"
    calls,cb = [],Callback()
    learn = learner61(cb)
    learn.fit(1)
    cb.before_batch = lambda: calls.append(cb.training)
    learn.fit(1)
    assert calls.count(True)==8

class OwnLoop(Learner):
    def _do_one_batch(self): raise NotImplementedError

def test_learner_with_its_own_loop():
    "It cannot have ours too"
    dls = DataLoaders(DataLoader(data61, bs=8), DataLoader(data61, bs=8))
    with pytest.raises(TypeError, match='_do_one_batch'): OwnLoop(dls, mlp(), loss_func=nn.MSELoss(), cbs=GradientAccumulation(32)).fit(1)

# --- exceptions that end the fit

class Boom(RuntimeError): pass

@pytest.mark.parametrize('event', quickly(['model', *all_events[::2]], ['model', *all_events]))
@pytest.mark.parametrize('ex', [Boom, KeyboardInterrupt])
def test_exception(event, ex):
    """Nothing of a fit that an error or Ctrl-C ended gets into the next one, whether our callback stays, is taken off,
    or was only there for that fit"""
    calls = []
    kinds = [*itertools.product((None, 3), (2, 6) if event not in step_events else (1, 2), ('stays', 'removed', 'only in that fit'))]
    for k,nth,how in kinds[[Boom, KeyboardInterrupt].index(ex)::2]:            # k: in micro-batches, with one of which the exception comes
        def boom(*args):
            calls.append(1)
            if len(calls)==nth and learn.training: raise ex('boom')
        calls.clear()
        acc = GradientAccumulation(32, micro_batch_size=k)
        learn = learner(data61, 8, Spy(), *([acc] if how!='only in that fit' else []))
        stopper = Callback(**{event: boom}) if event!='model' else Callback()
        hook = learn.model.register_forward_pre_hook(boom) if event=='model' else None
        stopper.run_valid = False
        with pytest.raises(ex): learn.fit(1, .01, cbs=[stopper]+([acc] if how=='only in that fit' else []))
        if hook: hook.remove()
        if how=='removed': learn.remove_cb(acc)
        learn.spy.pending = []
        learn.fit(1, .01)
        steps = accumulated(data61.sizes(8), 32 if how=='stays' else 1)
        try: check(learn, data61, 8, steps)
        except AssertionError as e: raise AssertionError(f'micro_batch_size={k}, call {nth}, {how}: {e}') from e

def test_fits_in_a_row():
    "Each fit counts anew, after `CancelFitException` and with 'carry' too"
    learn = learner61(remainder='carry')
    for n_epoch in (1, 2, 1): fit_and_check(learn, accumulated(data61.sizes(8), 32, 'carry', n_epoch), n_epoch)
    learn.fit(1, cbs=Stop('after_backward', CancelFitException, [(0,1)]))
    assert no_gradients(learn)
    fit_and_check(learn, accumulated(data61.sizes(8), 32, 'carry', 2), 2)

def test_start_epoch():
    learn = learner61()
    learn.fit(3, .01, start_epoch=1)
    check(learn, data61, 8, [s for s in accumulated(data61.sizes(8), 32, n_epoch=3) if s[0][0]>0])

# --- plans

class Items(Callback):
    "The items of each step; of each loader batch whether it opened an accumulated batch, and the `accum_bs` of that"
    order,run_valid = 60,False
    def before_fit(self): self.n_items,self.batches = [],[]
    def before_batch(self): self.batches.append((self.learn.gradient_accumulation.opens, self.learn.gradient_accumulation.accum_bs))
    def after_step(self): self.n_items.append(self.learn.gradient_accumulation.items)

loaders = {'fastai': DataLoader, 'drop_last': partial(DataLoader, drop_last=True), 'PyTorch': torch.utils.data.DataLoader,
    'sampler': lambda data, batch_size: torch.utils.data.DataLoader(
        data, batch_size, sampler=torch.utils.data.SubsetRandomSampler(range(5, 50))),
    'WeightedDL': lambda data, batch_size: WeightedDL(data, bs=batch_size, wgts=range(1, 62)),
    'SortedDL': partial(SortedDL, sort_func=lambda o: o[1].sum().item())}

@pytest.mark.parametrize('name', loaders)
def test_plan_of_loaders(name):
    acc = GradientAccumulation(20)
    learn = learner(data61, 8, acc, Items(), Spy(), dl_type=loaders[name])
    plan = acc.plan(2)
    learn.fit(2, .01)
    assert learn.items.n_items==plan==[s.n_items for s in learn.spy.steps]
    check_own(learn)

def random_schedule(r):
    "Arguments of a schedule, and the number of items, loader batch and epochs"
    n,bs,n_epoch = r.randint(20, 70),r.randint(1, 12),r.randint(1, 6)
    sizes = [r.randint(bs, n) for _ in range(2)]
    start,finish = sorted((r.random(), r.random()))
    if r.random() < .4: start,finish = sorted((r.randint(0, n_epoch), r.randint(0, n_epoch)))
    elif r.random() < .3: start,finish = 0,r.choice([1., finish])
    sched = r.choice([SchedCos, SchedLin, SchedExp, SchedNo, partial(SchedPoly, power=2),
                      combine_scheds([.4,.6], [SchedLin(*sizes), SchedCos(*sizes[::-1])])])
    return (dict(start_accum_bs=sizes[0], final_accum_bs=sizes[1], start=start, finish=finish, schedule=sched,
                 remainder=r.choice(remainders)),n,bs,n_epoch)

@pytest.mark.filterwarnings('ignore:finish=1 is an epoch')
@pytest.mark.parametrize('seed', quickly(range(20), range(60)))
def test_plan(seed):
    "What `plan` says is what training does"
    kwargs,n,bs,n_epoch = random_schedule(random.Random(seed))
    data = Data(torch.randn(n, 6), torch.randn(n, 4))
    acc = GradientAccumulationSchedule(**kwargs)
    drop_last = seed%3==0
    learn = learner(data, bs, acc, Items(), dl_type=partial(DataLoader, drop_last=drop_last))
    plan = acc.plan(n_epoch)
    assert plan==GradientAccumulationSchedule(**kwargs).plan(n_epoch, learn.dls.train), 'the same without a Learner'
    learn.fit(n_epoch, .01)
    assert learn.items.n_items==plan and len(learn.recorder.losses)==len(plan)
    assert sum(plan)<=n*n_epoch and (drop_last or kwargs['remainder']!='step' or sum(plan)==n*n_epoch)

@pytest.mark.parametrize('remainder', remainders)
def test_position(remainder):
    "Sizes follow the number of loader batches that are done, from `start` to `finish`, at the first loader batch of each accumulated batch"
    learn = learner(data61, 8, GradientAccumulationSchedule(10, 50, start=.2, finish=.8, schedule=SchedLin, remainder=remainder), Items())
    learn.fit(5)
    assert len(learn.items.batches)==40 and len({b for b in learn.items.batches if b[0]}) > 5
    for done,(opens,size) in enumerate(learn.items.batches):
        if opens: expected = round(10+40*min(1, max(0, (done/40-.2)/.6)))
        assert size==expected
    assert learn.items.batches[0]==(True,10) and size==50

@pytest.mark.parametrize('points,same',
                         [(dict(start=1, finish=3), dict(start=.25, finish=.75)),
                          (dict(start=0, finish=4), dict(start=0., finish=1.)),
                          (dict(start=1, finish=.5), dict(start=.25, finish=2))])
def test_epochs_are_fractions(points, same):
    a,b = [GradientAccumulationSchedule(8, 48, **kw) for kw in (points, same)]
    dl = DataLoader(data61, bs=8)
    assert a.plan(4, dl)==b.plan(4, dl) and len(set(a.plan(4, dl))) > 3

def test_skipped_steps_move_the_schedule():
    cbs = [GradientAccumulationSchedule(8, 48, finish=1., schedule=SchedLin), Items()]
    learn = learner(data61, 8, *cbs, Stop('before_step', CancelStepException, [(0,i) for i in range(8)], once=False))
    plan = cbs[0].plan(4)
    for _ in range(2):                        # and it starts anew with each fit
        learn.fit(4)
        assert learn.items.n_items==plan

def test_schedule_is_exact():
    learn = learner(data61, 8, GradientAccumulationSchedule(8, 48, finish=1.), Spy())
    learn.fit(4, .01)
    assert [sum(data61.sizes(8)[i] for _,i in s.batches) for s in learn.spy.steps]==learn.gradient_accumulation.plan(4)
    check(learn, data61, 8, [s.batches for s in learn.spy.steps])
