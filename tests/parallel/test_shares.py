"""Ranks that take unequal parts of each loader batch train as one process does, also while the parts move to the speeds
that they measure"""
import shutil, warnings
from functools import partial
import pytest, torch, torch.distributed as dist
import fastaccum.parallel.shares as module
from fastai.basics import Adam, Callback, DataLoaders, Learner, SGD, ifnone, nn, np, set_seed, tensor
from fastai.callback.training import BnFreeze
from fastai.losses import LabelSmoothingCrossEntropyFlat
from fastai.metrics import accuracy
from fastaccum.all import DataParallel, FullyShard, GradientAccumulation, GradientAccumulationSchedule, LocalSGD, TrainingCheckpoint, launch
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.parallel.fully_shard import whole
from bench.comm import CommCounter
from quick import over_ranks, run_over
from test_joint_validation import (
    Contrast, class_weights, data, detection, fitted as validated, ignored, mlp, own_weights, quiet, rare, started,
    token_loss)

pytestmark = pytest.mark.slow      # all start processes
three = 'sgd', 'own', 'coupled', 'micro_batches', 'few_items'
def rank(): return dist.get_rank() if dist.is_initialized() else 0
def world(): return dist.get_world_size() if dist.is_initialized() else 1

# --- made-up speeds: each item that goes through the model in training takes a rank so long
class Work:
    def __init__(self, *seconds): self.seconds,self.now,self.looks = seconds,0.,0
    def __call__(self, device): self.looks += 1; return self.now
    def count(self, model, xb, out):
        if model.training and torch.is_grad_enabled(): self.now += len(xb[0])*self.seconds[rank()]

def learner(x, y, loss, model=None, n_valid=23, bs=16, accum=32, cbs=(), dp=DataParallel, shares=None, work=None,
            double=False, opt_func=SGD, acc=None,
            num_workers=0, **kwargs):
    set_seed(3)
    model,n = ifnone(model, mlp()),len(x)-n_valid
    if double: model,x = model.double(),x.double()
    if work is not None: model.register_forward_hook(work.count); module.clock = work
    dls = DataLoaders.from_dsets([*zip(x[:n], y[:n])], [*zip(x[n:], y[n:])], bs=bs, drop_last=False, num_workers=num_workers, device='cpu')
    acc = GradientAccumulation(accum, **kwargs) if acc is None else acc()
    return Learner(dls, model, loss, opt_func=opt_func, lr=.05, metrics=accuracy if loss is ce else None, path='.',
                   cbs=[acc, dp(shares=shares), *cbs])

def fitted(learn, n_epoch):
    with quiet(learn):
        learn.validate()
        learn.fit(n_epoch)
    rec,ranks = learn.recorder,learn.data_parallel.brings_ranks
    return dict(weights=torch.cat([p.detach().flatten() for p in whole(dict(learn.model.named_parameters())).values()]),
                losses=tensor([float(o) for o in rec.losses]),
                values=[list(v) for v in rec.values], preds=learn.get_preds()[0], row=ranks and ranks.dl.rows[0])

class Rows(Callback):
    "What each rank takes of each loader batch"
    run_valid = False
    def __init__(self): self.all = []
    def after_batch(self):
        ranks = self.learn.data_parallel.brings_ranks
        if ranks is not None: self.all.append(list(ranks.row)); assert len(self.learn.x) == max(1, ranks.n_own)

ce = nn.CrossEntropyLoss()
def settings():
    x,y = data(97)
    xs,ys = data(81, seq=7)
    return dict(
        sgd=dict(x=x, y=y, loss=ce),
        adam64=dict(x=x, y=y, loss=ce, double=True, opt_func=Adam),
        class_weights=dict(x=x, y=y, loss=nn.CrossEntropyLoss(weight=class_weights)),
        tokens=dict(x=xs, y=ys, loss=token_loss),
        ignored=dict(x=x, y=ignored(y), loss=nn.CrossEntropyLoss()),
        own=dict(x=x, y=y, loss=own_weights),
        counted=dict(x=x, y=rare(y), loss=detection, weight=lambda learn: ((learn.y > 0).sum(), 1)),
        sums=dict(x=x, y=y, loss=nn.CrossEntropyLoss(reduction='sum'), opt_func=partial(SGD, mom=0.)),
        coupled=dict(x=x, y=y, loss=Contrast(), coupled=True, micro_batch_size=2),
        micro_batches=dict(x=x, y=y, loss=ce, micro_batch_size=(3, 5, 4)[rank()]),
        every_batch=dict(x=x, y=y, loss=ce, accum=1, micro_batch_size=5),
        carry=dict(x=x, y=y, loss=ce, accum=40, remainder='carry'),
        drop=dict(x=x, y=y, loss=ce, accum=40, remainder='drop'),
        schedule=dict(x=x, y=y, loss=ce, acc=lambda: GradientAccumulationSchedule(16, 48, 0, 1.)),
        one_item=dict(x=x[:44], y=y[:44], loss=ce, bs=1, accum=8),
        few_items=dict(x=x, y=y, loss=ce, bs=3),
        workers=dict(x=x, y=y, loss=ce, num_workers=2))

def to_run():
    made = settings()
    return {k: made[k] for k in run_over(world(), made, three)}

# in the second list rank 0 has no items
fixed = {1: [None], 2: [[3, 1], (.02, 1.5)], 3: [[1, 5, 2]]}
speeds = 1., 3., 2.                                # seconds an item

def with_shares(): return {name: [fitted(learner(**kw, shares=s), 2) for s in fixed[world()]] for name,kw in to_run().items()}
def other_ways():
    x,y = data(97)
    return dict(
        overlap=fitted(learner(x, y, ce, shares=[3, 1] if world() == 2 else None,
                               dp=partial(DataParallel, overlap=True, bucket_mb=1e-4)), 2),
                sharded=fitted(learner(x, y, ce, shares=[3, 1] if world() == 2 else None, dp=FullyShard), 2),
                sharded_parts=fitted(learner(x[:96+23], y[:96+23], ce, micro_batch_size=12,
                                             shares=[3, 1] if world() == 2 else None, dp=partial(FullyShard, 'last')),
                                             2))

def without_items():
    "Rank 0 has no item of the last loader batch of the validation, which is computed whole: the losses of the epochs, and around them"
    x,y = data(74, 17)
    losses = dict(smoothed=dict(loss=LabelSmoothingCrossEntropyFlat(weight=class_weights)),
                  coupled=dict(loss=Contrast(), coupled=True, micro_batch_size=4))
    return {k: validated(lambda: learner(x, y, n_valid=17, shares=[1, 3] if world() == 2 else None, **kw), 2)[0] for k,kw in losses.items()}

def norms():
    "BatchNorm's statistics after loader batches of equal size; weights do not change, so that those before are the same"
    x,y = data(64)
    res = {}
    for s in ([3, 1], [1, 50], [50, 1]):
        learn = learner(x, y, ce, mlp(norm=True), acc=lambda: GradientAccumulation(16), shares=s if world() == 2 else None)
        with quiet(learn): learn.fit(3, 0.)
        res[str(s)] = dict(buffers=[b.clone() for b in learn.model.buffers()], loss=learn.recorder.values[-1][1])
    return res

def measured():
    "With made-up speeds; a step for each loader batch, so that the shares move often"
    res = {}
    for name,kw in to_run().items():
        if name in ('every_batch', 'carry', 'drop', 'schedule') or name == 'workers' and world() == 3: continue
        learn = learner(**{**kw, 'accum': kw.get('bs', 16)}, shares='auto', work=Work(*speeds), cbs=[rows := Rows()])
        res[name] = dict(fitted(learn, 4), rows=rows.all)
    return res

# --- memory
class Small(nn.Module):
    "More than 3 items do not fit the memory of rank 1, from some pass on"
    def __init__(self, begin): super().__init__(); self.net,self.begin,self.n = mlp(),begin,0
    def forward(self, x):
        self.n += self.training
        if world() == 2 and rank() == 1 and self.training and len(x) > 3 and self.n > self.begin:
            raise torch.OutOfMemoryError('CUDA out of memory.')
        return self.net(x)

def memory():
    x,y = data(160)
    res = {}
    for name,begin in dict(first=0, later=30).items():
        learn = learner(x, y, ce, Small(begin), accum=16, micro_batch_size='auto', shares='auto', work=Work(1., 1.), cbs=[rows := Rows()])
        res[name] = dict(fitted(learn, 8), rows=rows.all)
    return res

# --- what it costs
class Counts(Callback):
    "Messages of each step, and how often the clock is read in it"
    run_valid,order = False,70
    def __init__(self): self.steps = []
    def before_train(self): self.mode = CommCounter().__enter__()
    def before_batch(self):
        if self.iter == 0: self._next()
    def _next(self): self.before = self.mode.calls,module.clock.looks
    def after_step(self):
        self.steps.append((self.mode.calls-self.before[0], module.clock.looks-self.before[1]))
        self._next()
    def after_train(self): self.mode.__exit__(None, None, None)

def cost():
    x,y = data(160)
    res = {}
    for bs,name in ((16, 'few'), (8, 'many')):
        learn = learner(x, y, ce, bs=bs, accum=16, micro_batch_size=bs//4, shares='auto', work=Work(*speeds), cbs=[counts := Counts()])
        fitted(learn, 6)
        res[name] = counts.steps
    return res

# --- checkpoints
class PowerCut(Callback):
    order,run_valid = 1001,False
    def __init__(self, done): self.done = done
    def batch_ended(self):
        if self.learn.train_iter == self.done: raise OSError('the power is out')

def resumed(done, before, after, fname, work=True, n_epoch=6, **kwargs):
    "A whole training with the shares `before`, and one that is interrupted, and goes on with the shares `after`"
    x,y = data(97)
    def train(shares, *cbs):
        CheckpointFolder.in_use.clear()            # as in a new process
        kw = dict(work=Work(*speeds)) if work else {}
        learn = learner(x, y, ce, double=True, opt_func=Adam, accum=16, shares=shares, cbs=cbs, **kw, **kwargs)
        with quiet(learn):
            try: learn.fit(n_epoch)
            except OSError: return
        if cbs: learn.training_checkpoint.finish()
        return dict(weights=torch.cat([p.detach().flatten() for p in learn.model.parameters()]),
                    losses=tensor([float(o) for o in learn.recorder.losses]),
                    rows=learn.data_parallel.brings_ranks.dl.rows[0], settled=learn.data_parallel.state_dict()['settled'])
    res = [train(before)]
    train(before, TrainingCheckpoint(fname, 1), PowerCut(done))
    return [*res, train(after, TrainingCheckpoint(fname, 1))]

def checkpoints():
    res = dict(same=resumed(9, [3, 1], [3, 1], 'same'), workers=resumed(9, [3, 1], [3, 1], 'workers', num_workers=2),
               other=resumed(9, [3, 1], (1, 2.5), 'other'),
               settled=resumed(40, 'auto', 'auto', 'settled', n_epoch=7), moving=resumed(9, 'auto', 'auto', 'moving'),
               fixed_then=resumed(9, [1, 3], 'auto', 'fixed_then'))
    return res

def stopped():
    "For another number of ranks"
    x,y = data(97)
    learn = lambda *cbs: learner(x, y, ce, double=True, opt_func=Adam, accum=16, shares='auto', work=Work(*speeds), cbs=cbs)
    res = fitted(learn(), 5)
    CheckpointFolder.in_use.clear()
    try:
        with quiet(l := learn(TrainingCheckpoint('moved', 1), PowerCut(12))): l.fit(5)
    except OSError: pass
    return res

def goes_on():
    x,y = data(97)
    learn = learner(x, y, ce, double=True, opt_func=Adam, accum=16, shares='auto', work=Work(*speeds),
                    cbs=[TrainingCheckpoint('moved', 1), Began()])
    with quiet(learn): learn.fit(5)
    return dict(weights=torch.cat([p.detach().flatten() for p in learn.model.parameters()]), began=learn.began.at)

class Began(Callback):
    run_valid,at = False,None
    def before_batch(self): self.at = self.at or (self.learn.epoch, self.learn.iter)

# --- errors
def refused():
    x,y = data(97)
    def error(**kwargs):
        try: learner(x, y, ce, **kwargs)
        except ValueError as e: return str(e)
    return dict(number=error(shares=[1, 2, 3]), zero=error(shares=[1, 0]), negative=error(shares=[1, -2]),
                nan=error(shares=[1, float('nan')]), kind=error(shares='even'), array=error(shares=np.array([3, 1])),
                local=error(shares=[3, 1], dp=LocalSGD), sharded=error(shares='auto', dp=FullyShard),
                overlap=error(shares='auto', dp=partial(DataParallel, overlap=True)),
                parts=fit_error(shares=[3, 1], dp=FullyShard, micro_batch_size=4))

def fit_error(call=lambda l: l.fit(1), **kwargs):
    x,y = data(97)
    learn = learner(x, y, ce, **kwargs, cbs=[began := Began()])
    try:
        with quiet(learn): call(learn)
    except Exception as e: return f'{type(e).__name__}: {e}',began.at
def told_of_batchnorm():
    x,y = data(96)
    def notices(n_epoch=1, **kwargs):
        learn = learner(x, y, ce, mlp(norm=True), **{**dict(accum=16), **kwargs})
        if kwargs.get('cbs'): learn.model[1].requires_grad_(False)
        with warnings.catch_warnings(record=True) as w, quiet(learn):
            warnings.simplefilter('always')
            learn.fit(n_epoch)
        return [str(o.message) for o in w if str(o.message).startswith('BatchNorm')]
    return dict(shares=notices(shares=[7, 1]), twice=notices(2, accum=32), frozen=notices(cbs=[BnFreeze()]),
                exact=notices(micro_batch_size=4, coupled='batchnorm'),
                local=notices(dp=LocalSGD), local_accumulates=notices(dp=LocalSGD, accum=32), sharded=notices(dp=FullyShard))
def lists_differ(): return fit_error(shares=([3, 1], [1, 3])[rank()])
def kinds_differ(): return fit_error(shares=('auto', None)[rank()])
def differ_in_validation(): return fit_error(lambda l: l.validate(), shares=([3, 1], [1, 3])[rank()])
def sharded_differ(): return fit_error(shares=([3, 1], [1, 3])[rank()], dp=FullyShard)
differ = lists_differ, kinds_differ, differ_in_validation, sharded_differ

# --- in few processes, as each imports all anew
def all_equal():
    return dict(fixed=with_shares(), auto=measured(),
                **(dict(memory=memory(), without_items=without_items(), norms=norms(), **other_ways()) if world() < 3
                   else {}))
def one_and_two(): return {1: [all_equal()], 2: launch(all_equal, 2)}
def all_two(): return dict(cost=cost(), checkpoints=checkpoints(), refused=refused(), norms=told_of_batchnorm())
def apart(): return dict(two=launch(all_two, 2), differ={f.__name__: launch(f, 2) for f in differ})

def start(f, n, folder): return started(f, n, folder, __file__)
@pytest.fixture(scope='module')
def equal(tmp_path_factory):
    waits = [start(f, n, tmp_path_factory.mktemp('ranks')) for f,n in ((one_and_two, 1), (all_equal, 3))]
    (few,),three = (wait() for wait in waits)
    return {**few, 3: three}
@pytest.fixture(scope='module')
def others(tmp_path_factory): return start(apart, 1, tmp_path_factory.mktemp('ranks'))()[0]
@pytest.fixture(scope='module')
def two(others): return others['two']

def close(a, b, eps): torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double(), rtol=eps, atol=eps)
def same_run(one, ranks, eps=1e-6):
    for r in ranks:
        for k in ('weights', 'losses', 'preds'): close(r[k], one[k], eps)
        for a,b in zip(r['values'], one['values']): close([float(o) for o in a[1:-1]], [float(o) for o in b[1:-1]], max(eps, 1e-6))
        assert (torch.equal(r['weights'], ranks[0]['weights']) and torch.equal(r['losses'], ranks[0]['losses'])
                and r['row'] == ranks[0]['row'])
    assert len(one['losses']) > 1

@pytest.mark.parametrize('name,n', over_ranks(settings(), three))
def test_shares_train_as_one_process(equal, name, n):
    for i,shares in enumerate(fixed[n]):
        ranks = [r['fixed'][name][i] for r in equal[n]]
        same_run(equal[1][0]['fixed'][name][0], ranks, 1e-12 if name == 'adam64' else 1e-6)
        if name not in ('one_item', 'few_items'):
            assert ranks[0]['row'] == {(3, 1): [12, 4], (.02, 1.5): [0, 16], (1, 5, 2): [2, 10, 4]}[tuple(shares)]

@pytest.mark.parametrize('name', ['overlap', 'sharded', 'sharded_parts'])
def test_other_ways_take_shares(equal, name):
    same_run(equal[1][0][name], ranks := [r[name] for r in equal[2]])
    assert ranks[0]['row'] == [12, 4]

@pytest.mark.parametrize('name', ['smoothed', 'coupled'])
def test_a_validation_goes_on_without_items_of_rank_0(equal, name):
    one,*ranks = [r['without_items'][name] for r in equal[1]+equal[2]]
    k = 1 if name == 'smoothed' else None          # no weight makes its training exact, as a warning says
    for r in ranks:
        assert r == ranks[0] and len(r) == 4
        close(r[:k], one[:k], 2e-6)
        assert tensor(r).isfinite().all()

@pytest.mark.parametrize('shares', ['[3, 1]', '[1, 50]', '[50, 1]'])
def test_statistics_count_the_items_of_a_rank(equal, shares):
    "Means are those of one process, and variances, too, if one rank has all items"
    one,*ranks = [r['norms'][shares] for r in equal[1]+equal[2]]
    for r in ranks:
        (mean,var,n),(mean1,var1,n1) = r['buffers'],one['buffers']
        assert n == n1 == 12
        close(mean, mean1, 1e-6)
        if shares != '[3, 1]': close(var, var1, 1e-6); close(r['loss'], one['loss'], 1e-6)
        assert all(torch.equal(a, b) for a,b in zip(r['buffers'], ranks[0]['buffers']))

@pytest.mark.parametrize('name,n', over_ranks([k for k in settings() if k not in ('every_batch', 'carry', 'drop', 'schedule')], three))
def test_measured_shares_train_as_one_process(equal, name, n):
    if name == 'workers' and n == 3: return
    same_run(equal[1][0]['auto'][name], ranks := [r['auto'][name] for r in equal[n]], 1e-12 if name == 'adam64' else 1e-6)
    rows = ranks[0]['rows']
    assert all(r['rows'] == rows for r in ranks)
    if name in ('one_item', 'few_items'): return
    full = [row for row in rows if sum(row) == 16]
    assert full[0] == {2: [8, 8], 3: [6, 5, 5]}[n] and full[-1] == {2: [12, 4], 3: [9, 3, 4]}[n]
    assert all(a[0] <= b[0] for a,b in zip(full, full[1:])) and len({tuple(row) for row in full}) > 2     # bit by bit, and not back

@pytest.mark.parametrize('when', ['first', 'later'])
def test_a_rank_without_memory_gets_less(equal, when):
    "Until the times show that it is as fast with smaller micro-batches"
    same_run(equal[1][0]['memory'][when], ranks := [r['memory'][when] for r in equal[2]])
    rows = ranks[0]['rows']
    least = min(range(len(rows)), key=lambda i: rows[i][1])
    assert all(r['rows'] == rows for r in ranks) and rows[0] == rows[-1] == [8, 8] and rows[least] == [9, 7]
    assert (least < 8) == (when == 'first')

def test_cost_of_measuring(two):
    "One more message in five steps, and three looks at the clock a step, however many micro-batches it has; none when all has settled"
    for r in two:
        for name,steps in r['cost'].items():
            calls,looks = zip(*steps)
            end = max(i for i,n in enumerate(looks) if n)+1
            assert end%5 == 0 and 15 <= end < len(steps)-5, name
            assert max(looks) <= 3 and set(calls[:end:5]) <= {2} and calls[4:end:5] == (3,)*(end//5) and sum(calls) == 2*len(steps) + end//5

def bits(a, b): return torch.equal(a['weights'], b['weights']) and torch.equal(a['losses'], b['losses'])
@pytest.mark.parametrize('name', ['same', 'workers', 'settled'])
def test_resumed_bit_for_bit(two, name):
    for r in two:
        first,again = r['checkpoints'][name]
        assert (bits(first, again) and first['rows'] == again['rows'] == [12, 4]
                and first['settled'] == again['settled'] == (name == 'settled'))

@pytest.mark.parametrize('name,row', dict(other=[5, 11], moving=[12, 4], fixed_then=[12, 4]).items())
def test_resumed_with_other_shares(two, name, row):
    for r in two:
        first,again = r['checkpoints'][name]
        for k in ('weights','losses'): close(again[k], first[k], 1e-12)
        assert again['rows'] == row

def with_other_ranks(start, stopped, goes_on, tmp_path_factory):
    "What the first of two ranks gives that are `stopped`, and what all give of the one rank and the three that go on from their checkpoint"
    folder = tmp_path_factory.mktemp('two')
    first = start(stopped, 2, folder)()[0]
    to = {n: tmp_path_factory.mktemp('other') for n in (1, 3)}
    for n in to: shutil.copytree(folder/'models', to[n]/'models')
    return first,[r for wait in [start(goes_on, n, to[n]) for n in to] for r in wait()]

def test_resumed_with_other_ranks(tmp_path_factory):
    first,others = with_other_ranks(start, stopped, goes_on, tmp_path_factory)
    for r in others:
        close(r['weights'], first['weights'], 1e-12)
        assert r['began'] == (1, 5)

def test_refused(two):
    says = dict(number='there are 2 ranks', zero='above 0', negative='above 0', nan='above 0', kind='above 0',
                array='pass a list', local='leave out shares=', sharded='wait for each other',
                overlap='overlap=True', parts='different numbers of micro-batches')
    for r in two:
        for k,text in says.items(): assert text in str(r['refused'][k]), k

def test_told_of_batchnorm(two):
    "It sees the items of a rank. Rank 0 says so, unless they are all that its step has; where no line is exact, it names none"
    for r,res in enumerate(o['norms'] for o in two):
        assert {k: len(msgs) for k,msgs in res.items()} == {k: int(not r and k not in ('exact', 'frozen', 'local')) for k in res}
    res = {k: msgs[0] for k,msgs in two[0]['norms'].items() if msgs}
    assert 'sees 14 items at a time, and a step has 16' in res['shares']
    assert "write GradientAccumulation(micro_batch_size=14, coupled='batchnorm')" in res['shares']
    assert 'sees 8 items at a time, and a step has 32' in res['twice'] and 'load 32 items at a time' in res['twice']
    assert all('freeze BatchNorm' in res[k] for k in ('local_accumulates', 'sharded'))

@pytest.mark.parametrize('f', [f.__name__ for f in differ])
def test_shares_that_differ_are_an_error_before_anything_is_trained(others, f):
    (a,began),(b,also) = others['differ'][f]
    assert ('Stopped, as rank 1 failed: ValueError' in a and b.startswith('ValueError') and 'shares=' in a
            and 'on rank 0' in b and began is also is None)

if __name__ == '__main__':
    import sys
    f,n,out = globals()[sys.argv[1]],int(sys.argv[2]),sys.argv[3]
    torch.save([f()] if n == 1 else launch(f, n), out)
