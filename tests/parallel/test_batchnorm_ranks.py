"""`coupled='batchnorm'` over several ranks: BatchNorm sees the loader batch of all ranks, and weights, running
statistics and losses are those of one process"""
import os, signal, time, warnings
from functools import partial
import pytest, torch, torch.distributed as dist, torch.nn.functional as F
from quick import over_ranks, run_over
pytest.importorskip('greenlet')
from fastai.basics import (
    Adam, Callback, CancelBatchException, CancelFitException, CrossEntropyLossFlat, DataLoaders, Learner, SGD, ifnone, nn, set_seed, tensor)
from fastai.callback.all import BnFreeze, GradientClip, MixUp
from fastai.metrics import accuracy
import fastaccum.parallel.shares as shares_module
from fastaccum.all import (
    DataParallel, FullyShard, GradientAccumulation, GradientAccumulationSchedule, LocalSGD, MixedPrecision,
    TrainingCheckpoint, launch)
from fastaccum.checkpoint.folder import CheckpointFolder
from bench.comm import CommCounter
from test_joint_validation import Contrast, quiet, started
from test_shares import PowerCut, Work, close, with_other_ranks

three = 'without_items', 'shares', 'first_without_items', 'measured'
pytestmark = pytest.mark.slow      # all start processes
def rank(): return dist.get_rank() if dist.is_initialized() else 0
def world(): return dist.get_world_size() if dist.is_initialized() else 1

# --- models
class Net(nn.Module):
    "Convolutions with a residual connection, and BatchNorm of two and of one dimension; there may be a layer that the loss leaves out"
    def __init__(self, norm=nn.BatchNorm2d, unused=False):
        super().__init__()
        torch.manual_seed(1)
        self.stem,self.n,self.a,self.n2,self.n3,self.out = (
            nn.Conv2d(3, 6, 3), norm(6), nn.Conv2d(6, 6, 3, padding=1), norm(6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.unused = norm(6) if unused else None
    def forward(self, x):
        x = F.relu(self.n(self.stem(x)), inplace=True)
        if self.unused is not None: self.unused(x)
        x = F.relu(x + self.n2(self.a(x)))
        return self.out(self.n3(x.mean((2, 3))))

passes = []
class Keeps(Net):
    """Keeps an activation between two layers: from its fourth loader batch on, and on the last rank only, in a place
    that it has not used before"""
    def __init__(self): super().__init__(); self.n_calls,self.box,self.out = 0,{},nn.Linear(6, 4)
    def forward(self, x):
        self.n_calls += self.training
        if self.training: passes.append(len(x))
        x = self.kept = self.n(self.stem(x))
        if self.n_calls > 3 and rank() == world()-1: self.box['x'] = x
        y = self.n2(self.a(x))
        return self.out(self.n3((y + self.box.get('x', self.kept)).relu().mean((2, 3))))

def unet():
    "Of fastai's `unet_learner`, with its hooks"
    from fastai.vision.learner import create_unet_model
    def body(pretrained): return nn.Sequential(*[nn.Sequential(nn.Conv2d(i, 4, 3, 2, 1), norm(4), nn.ReLU()) for i in (3, 4)], nn.Flatten())
    torch.manual_seed(1)
    return create_unet_model(body, 3, (6, 6), pretrained=False, cut=2)

def data(n, n_valid=23):
    g = torch.Generator().manual_seed(n)
    return torch.randn(n+n_valid, 3, 6, 6, generator=g).double(), torch.randint(3, (n+n_valid,), generator=g)

parts = (3, 5, 2)                                  # items of a rank's micro-batches
def learner(n=69, y=None, loss=None, model=None, bs=16, cbs=(), dp=DataParallel, shares=None, dtype=torch.float64,
            opt_func=SGD, acc=GradientAccumulation, order=None, num_workers=0, metrics=True, **kwargs):
    set_seed(3)
    x,targets = data(n)
    x,y,model = x.to(dtype),ifnone(y, targets),ifnone(model, Net()).to(dtype)
    dls = DataLoaders.from_dsets([*zip(x[:n], y[:n])], [*zip(x[n:], y[n:])], bs=bs, drop_last=False, num_workers=num_workers, device='cpu')
    acc = acc(**{**dict(micro_batch_size=parts[rank()], coupled='batchnorm'), **kwargs})
    return Learner(dls, model, ifnone(loss, nn.CrossEntropyLoss()), opt_func=opt_func, lr=.05,
                   metrics=accuracy if metrics else None, path='.',
                   cbs=[acc, dp(shares=shares) if shares else dp(), *cbs])

class Rows(Callback):
    run_valid = False
    def __init__(self): self.all = []
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
    def after_batch(self):
        ranks = self.learn.data_parallel.brings_ranks
        if ranks is not None: self.all.append(list(ranks.row))

def state(learn): return {k: v.detach().clone() for k,v in learn.model.state_dict().items()}
def fitted(learn, fit=lambda l: l.fit(2)):
    learn.add_cb(rows := Rows())
    with quiet(learn):
        learn.validate()
        fit(learn)
    rec = learn.recorder
    return dict(state=state(learn), none=[p.grad is None for p in learn.model.parameters()],
                losses=tensor([float(o) for o in rec.losses]).double(), values=[list(v)[1:-1] for v in rec.values],
                preds=learn.get_preds()[0], again=list(learn.validate()), rows=rows.all, passes=len(passes))

# --- what is trained
def ignored(y):
    y = y.clone()
    y[torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < .5] = -100
    return y
def weighted(): return nn.CrossEntropyLoss(weight=tensor([.1, 1., 5.]).double())
norm = nn.BatchNorm2d
fixed = {1: None, 2: [3, 1], 3: [1, 5, 2]}
def settings():
    y = data(69)[1]
    torch.manual_seed(0)
    res = dict(
        ragged=dict(),
        without_items=dict(n=50),
        carried=dict(n=38, bs=9, accum_bs=30, remainder='carry', fit=lambda l: l.fit(3)),
        several=dict(accum_bs=40, remainder='drop', cbs=[GradientClip(.05)]),
        shares=dict(shares=fixed[world()]),
        first_without_items=dict(shares={1: None, 2: (.02, 1.5), 3: [.02, 1, 1]}[world()]),
        measured=dict(shares='auto', micro_batch_size=8, fit=lambda l: l.fit(4)),
        class_weights=dict(loss=weighted(), accum_bs=40),
        ignored=dict(y=ignored(y), accum_bs=40),
        contrast=dict(loss=Contrast()),
        adam=dict(opt_func=Adam, fit=lambda l: l.fit_one_cycle(2, 1e-2)),
        schedule=dict(acc=lambda **kw: GradientAccumulationSchedule(16, 48, finish=1., **kw)),
        no_affine=dict(model=Net(partial(norm, affine=False))),
        cumulative=dict(model=Net(partial(norm, momentum=None))),
        unet=dict(model=unet(), y=torch.randint(3, (92, 6, 6)), loss=CrossEntropyLossFlat(axis=1), metrics=False),
        synced=dict(model=nn.SyncBatchNorm.convert_sync_batchnorm(Net())),
        unused=dict(model=Net(unused=True), n=50),
        keeps=dict(model=Keeps(), n=38, bs=9),
        frozen=dict(cbs=[BnFreeze()], fit=lambda l: (l.model.n.requires_grad_(False), l.fit(2))),
        workers=dict(num_workers=2),
        lr_find=dict(fit=lambda l: (l.lr_find(num_it=9, show_plot=False), l.fit(1))),
        fp32=dict(dtype=torch.float32),
        fp16=dict(dtype=torch.float32, cbs=[MixedPrecision(init_scale=2.**10)]))
    return {k: res[k] for k in run_over(world(), res, three)}

def trained(name, n=69, fit=lambda l: l.fit(2), **kw):
    passes.clear()
    if name == 'measured':
        shares_module.clock = work = Work(1., 3., 2.)
        kw['model'] = Net()
        kw['model'].register_forward_hook(work.count)
    return fitted(learner(n, **kw), fit)
def all_equal():
    warnings.filterwarnings('error', message='BatchNorm')          # what a rank has is nothing to warn of
    warnings.filterwarnings('ignore', message='BatchNorm: .* (16|9) items at a time')   # all of a loader batch, where a step has several
    return {name: trained(name, **kw) for name,kw in settings().items()}

def whole_batches(): return fitted(learner(coupled=False, micro_batch_size=None, accum_bs=16))
def micro_batches():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return fitted(learner(coupled=False, accum_bs=16))
def alone(): return dict(equal=all_equal(), whole=whole_batches(), micro=micro_batches())

# --- what it sends
class Counts(Callback):
    "Messages of each loader batch"
    run_valid,order = False,70
    def before_train(self): self.mode,self.calls = CommCounter().__enter__(),[]
    def before_batch(self): self.before = self.mode.calls
    def after_batch(self): self.calls.append(self.mode.calls-self.before)
    def after_train(self): self.mode.__exit__(None, None, None)
def cost():
    res = {}
    for name,kw in dict(two=dict(n=96), four=dict(n=96, micro_batch_size=4), coupled=dict(n=96, coupled=True)).items():
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            learn = learner(**kw, cbs=[c := Counts()])
            with quiet(learn): learn.fit(1)
        res[name] = c.calls
    return res

# --- checkpoints
def longer(*cbs): return learner(50, accum_bs=32, micro_batch_size=3, opt_func=Adam, metrics=False, cbs=cbs)
def resumed(name):
    fit = lambda *cbs: fitted(longer(*cbs), lambda l: l.fit(3))
    CheckpointFolder.in_use.clear()
    whole = fit(TrainingCheckpoint(f'{name}_whole', 1))
    CheckpointFolder.in_use.clear()
    try: fit(TrainingCheckpoint(name, 1), PowerCut(5))
    except OSError: pass
    else: raise AssertionError('it was not interrupted')
    CheckpointFolder.in_use.clear()
    return whole,fit(TrainingCheckpoint(name, 1))
def stopped():
    "For another number of ranks"
    whole = fitted(longer(), lambda l: l.fit(3))
    CheckpointFolder.in_use.clear()
    try: fitted(longer(TrainingCheckpoint('moved', 1), PowerCut(5)), lambda l: l.fit(3))
    except OSError: pass
    return whole
def goes_on():
    learn = longer(TrainingCheckpoint('moved', 1), Began())
    with quiet(learn): learn.fit(3)
    return dict(state=state(learn), began=learn.began.at)
class Began(Callback):
    run_valid,at = False,None
    def before_batch(self): self.at = self.at or (self.learn.epoch, self.learn.iter)

# --- errors, each on rank 1 in the model's fourth loader batch, or at an event of the second
class Odd(Net):
    def __init__(self, f): super().__init__(); self.f,self.n_calls,self.other = f,0,nn.BatchNorm1d(3)
    def forward(self, x):
        self.n_calls += self.training
        odd = self.training and world() > 1 and rank() == 1 and self.n_calls > 3
        return self.f(self, x, super().forward, self.n_calls) if odd else super().forward(x)
def boom(self, x, forward, i): raise ValueError('boom')
def late(self, x, forward, i): forward(x); raise ValueError('boom')
def ctrl_c(self, x, forward, i): os.kill(os.getpid(), signal.SIGINT); time.sleep(1)
def more(self, x, forward, i): return self.other(forward(x))
def less(self, x, forward, i): return self.out(x.mean((2, 3)).repeat(1, 2))
def another(self, x, forward, i): return self.out(self.n(self.a(self.n2(self.stem(x)))).mean((2, 3)))
def one_part(self, x, forward, i): return self.other(forward(x)) if len(x) == 2 else forward(x)
def in_backward(self, x, forward, i):
    out = forward(x)
    def fail(g): raise ValueError('boom')
    out.register_hook(fail)
    return out

class Raises(Callback):
    run_valid,order = False,30
    def __init__(self, event, ex): setattr(self, event, lambda: self.do(ex))
    def do(self, ex):
        if rank() == 1 and self.learn.train_iter == 1: raise ex

def outcome(model=None, cbs=(), n=64, **kwargs):
    "Error of a fit, and the statistics after it"
    learn = learner(n, model=model, cbs=cbs, **{**dict(micro_batch_size=3), **kwargs})
    try:
        with quiet(learn): learn.fit(1)
        res = 'trains'
    except (Exception, KeyboardInterrupt) as e: res = f'{type(e).__name__}: {e}'
    if 'Stopped' not in res: time.sleep(1)         # it lives on
    return dict(said=res, state=state(learn), tracked=int(learn.model.n.num_batches_tracked))

odd = boom, late, ctrl_c, more, less, another, one_part, in_backward
def in_model(f): return outcome(Odd(f))
def at_event(event, ex): return outcome(cbs=[Raises(event, ex())])
def too_few():
    class Small(Net):
        def forward(self, x): return self.out(self.n3(x.mean((2, 3)).repeat(1, 2)))
    return outcome(Small(), n=1, bs=8)
events = dict(ends=('before_batch', CancelFitException), left_out=('before_batch', CancelBatchException),
              predicted=('after_pred', CancelBatchException))
def failures():
    return {**{f.__name__: launch(partial(in_model, f), 2) for f in odd},
            **{k: launch(partial(at_event, *v), 2) for k,v in events.items()}, 'too_few': launch(too_few, 2)}

def refused():
    def error(**kwargs):
        try: learner(32, **{**dict(micro_batch_size=4), **kwargs}).fit(1)
        except ValueError as e: return str(e)
    return dict(local=error(dp=LocalSGD), sharded=error(dp=FullyShard),
                overlap=error(dp=partial(DataParallel, overlap=True)), mixup=error(cbs=[MixUp()]),
                auto=error(micro_batch_size='auto'))

def without_running():
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        learn = learner(64, model=Net(partial(norm, track_running_stats=False)))
        with quiet(learn): learn.fit(1)
    return [str(o.message) for o in w if 'running statistics' in str(o.message)]
def all_two(): return dict(without_running=without_running(), cost=cost(), refused=refused(), resumed=resumed('cut'))
def apart(): return dict(two=launch(all_two, 2), failures=failures())

# --- the tests
def start(f, n, folder): return started(f, n, folder, __file__)
@pytest.fixture(scope='module')
def equal(tmp_path_factory):
    "By number of ranks: of each rank"
    waits = {n: start(f, n, tmp_path_factory.mktemp('ranks')) for f,n in ((alone, 1), (all_equal, 2), (all_equal, 3))}
    (one,),*many = (wait() for wait in waits.values())
    return {**one, 1: [one['equal']], **{n: ranks for n,ranks in zip((2, 3), many)}}
@pytest.fixture(scope='module')
def others(tmp_path_factory): return start(apart, 1, tmp_path_factory.mktemp('ranks'))()[0]

def same_state(a, b, eps):
    for k,v in b.items(): close(a[k], v, eps)
def same_run(one, ranks, eps):
    for r in ranks:
        same_state(r['state'], one['state'], eps)
        for k in ('preds', 'losses', 'again'): close(r[k], one[k], max(eps, 1e-6) if k == 'again' else eps)
        for a,b in zip(r['values'], one['values']): close([float(o) for o in a], [float(o) for o in b], max(eps, 1e-6))
        assert r['none'] == one['none'] and r['rows'] == ranks[0]['rows']
        for k,v in ranks[0]['state'].items(): assert torch.equal(r['state'][k], v), k
        assert torch.equal(r['losses'], ranks[0]['losses'])
    assert len(one['losses']) > 1

@pytest.mark.parametrize('name,n', over_ranks(settings(), three))
def test_trains_as_one_process(equal, name, n):
    one,ranks = equal[1][0][name],[r[name] for r in equal[n]]
    same_run(one, ranks, {'fp32': 2e-5, 'fp16': 5e-2, 'lr_find': 1e-9, 'adam': 1e-9, 'unet': 1e-6}.get(name, 1e-12))
    rows = ranks[0]['rows']
    if name in ('without_items', 'unused', 'carried', 'first_without_items'): assert any(0 in row for row in rows)
    if name == 'measured': assert rows[0] != rows[-2]
    if name == 'keeps':                            # one loader batch goes through the model twice, on all ranks
        for r,k,i in zip(ranks, parts, range(n)): assert r['passes'] > sum(max(1, -(-row[i]//k)) for row in rows)
    if name == 'shares': assert rows[0] == {2: [12, 4], 3: [2, 10, 4]}[n]

def test_one_process_is_the_whole_batch(equal):
    "What the ranks are held against; micro-batches alone are another run, so that these tests can fail"
    one = equal[1][0]['ragged']
    same_state(one['state'], equal['whole']['state'], 1e-12)
    assert max((v-equal['micro']['state'][k]).abs().max() for k,v in one['state'].items() if 'weight' in k) > 1e-3

def test_messages(others):
    "Three for each BatchNorm, and two more, whatever the number of micro-batches. The first batch tells what outputs are"
    for r in others['two']:
        two,four,coupled = (r['cost'][k][1:] for k in ('two','four','coupled'))
        assert two and set(two) == set(four) == {coupled[0] + 3*3 + 2}

def test_resumed_bit_for_bit(others):
    for r in others['two']:
        whole,again = r['resumed']
        for k,v in whole['state'].items(): assert torch.equal(again['state'][k], v), k
        assert torch.equal(whole['losses'], again['losses']) and len(again['rows']) < len(whole['rows'])

def test_resumed_with_other_ranks(tmp_path_factory):
    first,others = with_other_ranks(start, stopped, goes_on, tmp_path_factory)
    for r in others:
        same_state(r['state'], first['state'], 1e-9)
        assert r['began'][0] > 0

@pytest.mark.parametrize('name,kind',
                         dict(boom='ValueError: boom', late='ValueError: boom', ctrl_c='SignalException',
                              one_part='ValueError: coupled', in_backward='ValueError: boom').items())
def test_a_rank_that_fails_tells_the_others(others, name, kind):
    a,b = others['failures'][name]
    assert b['said'].startswith(kind) and 'Stopped, as rank 1 failed: ' in a['said'] and kind in a['said']
    assert a['tracked'] == b['tracked'] == 3 + (name == 'in_backward')
    if name != 'in_backward': same_state(a['state'], b['state'], 0)

@pytest.mark.parametrize('name,a,b',
                         [('more', 'has left the model', "is at 'other' (3 channels, 2 dimensions, torch.float64)"),
                          ('less', "is at 'n' (6 channels, 4", 'has left the model'),
                          ('another', "is at 'n' (", "is at 'n2' (")])
def test_another_way_on_another_rank_is_an_error(others, name, a, b):
    for r in others['failures'][name]:
        assert (r['said'].startswith('ValueError') and 'the same way through the model' in r['said']
                and f'rank 0 {a}' in r['said'] and f'rank 1 {b}' in r['said'])
        assert r['tracked'] == 3

@pytest.mark.parametrize('name', ['left_out', 'predicted'])
def test_ranks_that_part_are_an_error(others, name):
    for r in others['failures'][name]: assert 'The ranks have parted' in r['said'] and 'CancelBatchException' in r['said']

def test_a_rank_that_ends_the_fit_ends_it_for_all(others):
    a,b = others['failures']['ends']
    assert a['said'] == b['said'] == 'trains' and a['tracked'] == b['tracked'] == 1
    same_state(a['state'], b['state'], 0)

def test_validation_of_one_ranks_items_is_told(others):
    for r in others['two']: assert len(r['without_running']) == 1 and 'items of one rank' in r['without_running'][0]

def test_too_few_values(others):
    for r in others['failures']['too_few']: assert 'Expected more than 1 value per channel' in r['said']

@pytest.mark.parametrize('name,names',
                         dict(local='LocalSGD does not', sharded='FullyShard does not', overlap='overlap=True',
                              mixup='MixUp', auto='pass a number').items())
def test_refused(others, name, names):
    for r in others['two']: assert "coupled='batchnorm'" in r['refused'][name] and names in r['refused'][name]

if __name__ == '__main__':
    import sys
    f,n,out = globals()[sys.argv[1]],int(sys.argv[2]),sys.argv[3]
    torch.save([f()] if n == 1 else launch(f, n), out)
