"A run that is interrupted and started again is the run that nobody interrupted: to the last bit"
import os, pickle, shutil, signal, sys, threading
from collections import Counter
from contextlib import contextmanager
import fresh, pytest
from quick import quickly
import torch.utils.data as torch_data
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.data.all import ItemTransform, TfmdDL
from reference import *
from fastaccum.checkpoint.callback import *
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.core.memory import StorageFollower
from fastaccum.precision.callback import MixedPrecision

torch.manual_seed(0)
x = torch.randn(61, 6)
data = Data(x, (x@torch.randn(6, 4)).tanh())

class Stateless(Callback):
    "Checkpoints keep no attribute of it"
    in_checkpoint = False

class Interrupt(Stateless):
    "Raises `ex` at `event` of the training batch `at` (epoch, i), before or after the checkpoint of that batch"
    run_valid = False
    def __init__(self, at, ex=RuntimeError, order=2000, event='batch_ended'):
        self.at,self.ex,self.order = at,ex,order
        setattr(self, event, self._raise)
    def _raise(self):
        if (self.learn.epoch,self.learn.iter) == self.at: raise self.ex('interrupted')

class Seen(Callback):
    "The training batches that came"
    run_valid = False
    def __init__(self): self.batches = {}
    def before_batch(self): self.batches[f'{self.learn.epoch} {self.learn.iter}'] = self.learn.xb[0].sum().item()

def new_process(): CheckpointFolder.in_use.clear()

@pytest.fixture(autouse=True)
def one_process():
    new_process()
    yield
    new_process()

class Noise(ItemTransform):
    split_idx = 0
    def encodes(self, o): return (o[0] + torch.randn(6)*random.random(), o[1])
class BatchNoise(ItemTransform):
    split_idx = 0
    def encodes(self, o): return (o[0]*(1+torch.rand(1)+np.random.rand()), o[1])

def fastai_dl(d, batch_size, **kwargs):
    return TfmdDL(d, bs=batch_size, shuffle=True, after_item=[Noise()], after_batch=[BatchNoise()],
                  **{**dict(num_workers=0), **kwargs})
def torch_dl(d, batch_size, **kwargs): return torch_data.DataLoader(d, batch_size=batch_size, shuffle=True, **kwargs)
def weighted(d, batch_size):
    return torch_data.DataLoader(d, batch_size=batch_size,
                                 sampler=torch_data.WeightedRandomSampler(
                                     torch.arange(1., 1+len(d)), 50, generator=torch.Generator().manual_seed(1)))
class OwnDL(DataLoader):
    "An order of its own"
    def get_idxs(self): return list(np.random.permutation(self.n))

def net(): return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 4))
class Branches(nn.Module):
    "Each batch uses one of two heads: the other's parameters have no gradient at first"
    def __init__(self): super().__init__(); self.heads,self.n = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]),0
    def forward(self, x): return self.heads[int(x.sum() > 2.5)](x)

fp16 = pytest.param(dict(cbs=lambda: [MixedPrecision(init_scale=2.**10, growth_interval=5)]), id='fp16',
                    marks=pytest.mark.fp16)
cases = [fp16, *(pytest.param(v, id=k) for k,v in dict(
    plain=dict(),
    accumulation=dict(cbs=lambda: [GradientAccumulation(24)]),
    carry=dict(cbs=lambda: [GradientAccumulation(24, remainder='carry')]),
    schedule=dict(cbs=lambda: [GradientAccumulationSchedule(8, 40, micro_batch_size=3)]),
    rows_of_batches=dict(cbs=lambda: [GradientAccumulation(24, log_accum_batch=False)]),
    everything=dict(cbs=lambda: [GradientAccumulationSchedule(8, 40), MixedPrecision(), MixUp()]),
    adam=dict(opt_func=Adam), lookahead=dict(opt_func=ranger), torch_adam=dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)),
    no_gradient=dict(model=Branches(), opt_func=partial(Adam, wd=.1)),
    torch_loader=dict(dl_type=torch_dl), sampler=dict(dl_type=weighted),
    drop_last=dict(dl_type=partial(fastai_dl, drop_last=True)), own_order=dict(dl_type=OwnDL),
    torch_generator=dict(dl_type=lambda d, batch_size: torch_dl(d, batch_size, generator=torch.Generator().manual_seed(5))),
    trackers=dict(cbs=lambda: [SaveModelCallback(), EarlyStoppingCallback(patience=2, min_delta=.003),
                               ReduceLROnPlateau(min_delta=.004)], fit=lambda l: l.fit(5, .05)),
    train_metrics=dict(cbs=lambda: [GradientAccumulation(24)], metrics=[mae, AccumMetric(mse)], train_metrics=True),
    flat=dict(fit=lambda l: l.fit_flat_cos(4, .05)), slices=dict(fit=lambda l: l.fit_one_cycle(4, slice(.001, .05))),
).items())]

def make(case, *cbs):
    case = dict(case)
    case.pop('fit', None)
    train_metrics,seen = case.pop('train_metrics', False),Seen()
    set_seed(0)
    learn = learner(data, 8, *[cb for cb in case.pop('cbs', list)()], *cbs, seen, **{**dict(model=net(), dl_type=fastai_dl), **case})
    learn.recorder.train_metrics = train_metrics
    return learn

def run(case, *cbs, stop=None):
    learn = make(case, *cbs, *([stop] if stop else []))
    fit = case.get('fit', lambda l: l.fit_one_cycle(4, .05))
    if stop is None: fit(learn)
    else:
        with pytest.raises(stop.ex): fit(learn)
    return learn

def test_eq_bits(a, b):
    "Everything of two Learners is equal"
    assert torch.equal(weights(a.model), weights(b.model))
    for k,v in a.model.state_dict().items(): assert torch.equal(v, b.model.state_dict()[k]), k
    ra,rb = a.recorder,b.recorder
    assert len(ra.losses) == len(rb.losses) and torch.equal(torch.stack(ra.losses), torch.stack(rb.losses))
    assert ra.lrs == rb.lrs and ra.iters == rb.iters and [list(v) for v in ra.values] == [list(v) for v in rb.values]
    assert getattr(ra, 'hps', None) == getattr(rb, 'hps', None)
    assert [dict(h) for h in a.opt.hypers] == [dict(h) for h in b.opt.hypers]
    assert a.seen.batches == b.seen.batches
test_eq_bits.__test__ = False

@pytest.mark.parametrize('case', quickly(['plain','everything','schedule','fp16','torch_loader','torch_generator'], cases))
def test_bit_identical(case):
    whole = run(case)
    for at in (0, 3),(0, 5),(1, 4),(2, 5):     # the 2nd from the 1st's checkpoint, and so on; some in the same epoch, some in a later one
        learn = run(case, TrainingCheckpoint(every_steps=2), stop=Interrupt(at))
        assert len(learn.recorder.losses) < len(whole.recorder.losses)
        new_process()
    test_eq_bits(run(case, TrainingCheckpoint(every_steps=2)), whole)

@pytest.mark.parametrize('at', [(0, 0), (0, 7), (1, 0), (3, 7)])
@pytest.mark.parametrize('event,order', [('batch_ended', 2000), ('after_batch', 2000), ('before_step', 0), ('after_pred', 0)])
def test_any_moment(at, event, order):
    case = dict(cbs=lambda: [GradientAccumulation(16)])
    whole = run(case)
    run(case, TrainingCheckpoint(every_steps=1),
        stop=Interrupt(at if event != 'before_step' else (at[0], at[1]|1), event=event, order=order))
    new_process()
    test_eq_bits(run(case, TrainingCheckpoint(every_steps=1)), whole)

def test_in_validation():
    class Fails(Callback):
        run_train = False
        def after_batch(self):
            if self.learn.epoch == 1 and not self.learn.training: raise RuntimeError('interrupted')
    whole = run({})
    with pytest.raises(RuntimeError): run({}, TrainingCheckpoint(every_steps=8), Fails())
    new_process()
    test_eq_bits(run({}, TrainingCheckpoint(every_steps=8)), whole)

@pytest.mark.slow
def test_workers():
    "Augmentation of whole batches is in the main process, whatever loads the items"
    case = dict(dl_type=lambda d, batch_size: TfmdDL(d, bs=batch_size, shuffle=True, num_workers=2, after_batch=[BatchNoise()]))
    for case in case,dict(dl_type=partial(torch_dl, num_workers=2)):
        whole = run(case)
        run(case, TrainingCheckpoint(every_steps=2), stop=Interrupt((1, 4)))
        new_process()
        test_eq_bits(run(case, TrainingCheckpoint(every_steps=2)), whole)
        new_process(); shutil.rmtree('models/checkpoint')

@pytest.mark.parametrize('dl_type', [partial(DataLoader, shuffle=True), torch_dl], ids=['fastai', 'torch'])
def test_loads_nothing_again(dl_type):
    class Counted(Data):
        loaded = 0
        def __getitem__(self, i): Counted.loaded += 1; return super().__getitem__(i)
    d = Counted(torch.randn(800, 6), torch.randn(800, 4))
    def new(*cbs): return learner(d, 8, TrainingCheckpoint(every_steps=10), *cbs, dl_type=dl_type, valid=data)
    with pytest.raises(RuntimeError): new(Interrupt((0, 89))).fit(1)
    new_process(); Counted.loaded = 0
    new().fit(1)
    assert Counted.loaded == 80

@pytest.mark.slow
def test_same_process():
    "After an exception `fit` on the same Learner, or on a new one, goes on"
    whole = run({})
    stop = Interrupt((1, 4))
    learn = run({}, TrainingCheckpoint(every_steps=2), stop=stop)
    stop.at = None
    learn.fit_one_cycle(4, .05)
    test_eq_bits(learn, whole)
    learn.fit_one_cycle(4, .05)        # it is done: this one is the next
    assert not torch.equal(weights(learn.model), weights(whole.model))
    learn.training_checkpoint.finish()
    run({}, TrainingCheckpoint(every_steps=2), stop=Interrupt((1, 4)))
    test_eq_bits(run({}, TrainingCheckpoint(every_steps=2)), whole)

def script(learn, *, at=None, stop=None, log=None):
    "Two stages, with something between them"
    if stop is not None: learn.add_cb(stop)
    log = {} if log is None else log
    log['lr'] = learn.lr_find(show_plot=False, num_it=20).valley
    learn.freeze_to(0)
    learn.fit_one_cycle(2, log['lr'])
    learn.save('stage1')
    log['preds'] = learn.get_preds()[0]
    log['rand'] = torch.rand(1).item(),random.random()
    learn.fit(2, .01)
    return learn

@pytest.mark.parametrize('at,n', quickly([((1, 4), 1), ((1, 7), 2)], [((0, 5), 0), ((1, 4), 0), ((0, 0), 1), ((1, 4), 1), ((1, 7), 2)]))
def test_several_fits(at, n):
    "`n` fits of the script are finished when it stops"
    want,got = {},{}
    whole = script(make({}), log=want)
    class Late(Interrupt):
        def before_fit(self): self.fits = getattr(self, 'fits', -1) + 1
        def _raise(self):
            if self.fits > n: super()._raise()
            if n == 0 and self.fits == 0: super()._raise()
    with pytest.raises(RuntimeError): script(make({}, TrainingCheckpoint(every_steps=3)), stop=Late(at))
    new_process()
    learn = script(make({}, TrainingCheckpoint(every_steps=3)), log=got)
    assert got['lr'] == want['lr'] and torch.equal(got['preds'], want['preds']) and got['rand'] == want['rand']
    test_eq_bits(learn, whole)

exits = '''
import os, signal, sys
from reference import *
from fastaccum.checkpoint.callback import *
sys.stdout = sys.stderr = open('log', 'w')
for how in ['normal', 'error', 'Ctrl-C', 'SIGTERM', '_exit', 'exit']:
    first = os.fork()
    if not first:
        os.mkdir(how); os.chdir(how)
        learn = learner(Data(torch.randn(16, 6), torch.randn(16, 4)), 4, TrainingCheckpoint())
        learn.fit(1)
        break
    os.waitpid(first, 0)
if first: sys.exit()
if how == 'error': 1/0
if how == 'Ctrl-C': raise KeyboardInterrupt
if how == 'SIGTERM': os.kill(os.getpid(), signal.SIGTERM)
if how == '_exit': os._exit(1)
if how == 'exit': sys.exit(1)
'''

@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_ends():
    "A script that does not end normally after a fit goes on behind it; the code of `sys.exit` cannot be known"
    # no simulated device: it cannot fork
    r = fresh.run('-c', exits, env={**os.environ, 'DEVICE': 'cpu', 'PYTHONPATH': os.pathsep.join(p for p in sys.path if p)})
    assert r.returncode == 0, r.stderr
    folders = {how.name: [p.name for p in (how/'models').iterdir()] for how in Path().iterdir() if how.is_dir()}
    done,goes_on = ['checkpoint-finished'],['checkpoint']
    assert folders == dict(normal=done, exit=done, error=goes_on, _exit=goes_on, SIGTERM=goes_on, **{'Ctrl-C': goes_on})

def test_gradients_that_lr_find_leaves():
    "Zeros, by which fastai decays weights that are frozen afterwards: also where a restart skips the `lr_find` that has ended"
    def train(stop=None):
        set_seed(0)
        learn = learner(data, 8, TrainingCheckpoint(every_steps=1000), model=net(), dl_type=fastai_dl, opt_func=partial(Adam, wd=.1),
                        splitter=lambda m: L(m[:2], m[2:]).map(params))
        learn.lr_find(show_plot=False, num_it=10)
        frozen = learn.model[0].weight.detach().clone()
        learn.freeze()
        if stop: learn.add_cb(stop)
        learn.fit(1, .05)
        return learn,frozen
    whole,frozen = train()
    assert not torch.equal(host(frozen), host(whole.model[0].weight))          # it was decayed
    shutil.rmtree('models'); new_process()
    with pytest.raises(RuntimeError, match='stopped'): train(On('before_fit', throw(RuntimeError('stopped')), training=None))
    new_process()
    assert torch.equal(weights(train()[0].model), weights(whole.model))

@pytest.mark.parametrize('ok', [True, False])
def test_end_of_notebook(ok, monkeypatch):
    "When its kernel is shut down"
    import IPython
    monkeypatch.setattr('fastaccum.checkpoint.folder.IN_IPYTHON', True)
    monkeypatch.setattr(IPython, 'get_ipython', lambda: SimpleNamespace(last_execution_succeeded=ok))
    run({}, TrainingCheckpoint()).training_checkpoint.folder._at_exit()
    assert [p.name for p in Path('models').iterdir()] == ['checkpoint-finished' if ok else 'checkpoint']

@pytest.mark.slow
def test_two_learners():
    "Cross validation: each Learner has its fits in the run"
    def cross(stop=None):
        res = []
        for fold in range(3):
            learn = make({}, TrainingCheckpoint(every_steps=3))
            nn.init.constant_(learn.model[0].bias, fold)
            if stop and fold == 1: learn.add_cb(Interrupt((1, 4)))
            learn.fit_one_cycle(2, .05)
            res.append(learn)
        return res
    whole = cross()
    whole[0].training_checkpoint.finish()
    with pytest.raises(RuntimeError): cross(True)
    new_process()
    for a,b in zip(cross(), whole): test_eq_bits(a, b)

@pytest.mark.slow
def test_refused():
    case = dict(cbs=lambda: [GradientAccumulation(24)])
    run(case, TrainingCheckpoint(every_steps=2), stop=Interrupt((1, 4)))
    def refused(what, case=case, fit=lambda l: l.fit_one_cycle(4, .05), learn=None):
        new_process()
        learn = learn or make(case, TrainingCheckpoint())
        before = weights(learn.model)
        with pytest.raises(ValueError, match=what): fit(learn)
        assert torch.equal(weights(learn.model), before)
    refused('epochs: 4 in the checkpoint, 5 now', fit=lambda l: l.fit_one_cycle(5, .05))
    refused('Fit 1: lr 0.05 in the checkpoint, 0.06 now. Undo', fit=lambda l: l.fit_one_cycle(4, .06))
    refused('lr a schedule up to 0.05 in the checkpoint, 0.06 now', fit=lambda l: l.fit(4, .06))
    refused('gradient_accumulation.accum_bs: 24 in the checkpoint, 32 now', dict(cbs=lambda: [GradientAccumulation(32)]))
    refused('gradient_accumulation', {})
    refused('GradientAccumulationSchedule', dict(cbs=lambda: [GradientAccumulationSchedule(24, 32)]))
    refused('mixed_precision: None', dict(cbs=lambda: [GradientAccumulation(24), MixedPrecision('bf16')]))
    refused('optimizer', dict(**case, opt_func=Adam))
    refused(r"model's 0.weight: \(16, 6\) torch.float32 in the checkpoint, \(12, 6\)",
            dict(**case, model=nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 4))))
    refused('nothing in the checkpoint', dict(**case, model=nn.Sequential(*net(), nn.Linear(4, 4))))
    refused('batch size: 8 in the checkpoint, 4 now', learn=learner(data, 4, TrainingCheckpoint(), GradientAccumulation(24), model=net()))
    refused('items: 61 in the checkpoint, 8 now',
            learn=learner(Data(torch.randn(8, 6), torch.randn(8, 4)), 8, TrainingCheckpoint(), GradientAccumulation(24),
                          model=net()))
    with pytest.MonkeyPatch.context() as m:
        m.setattr('fastaccum.__version__', '0.0.0')
        refused(r'fastaccum: .* in the checkpoint, 0.0.0 now')
    new_process()
    run(case, TrainingCheckpoint(resume=False))

def test_refused_precision():
    bf16 = dict(cbs=lambda: [MixedPrecision('bf16')])
    whole = run(bf16)
    for n,cb in enumerate([MixedPrecision('bf16'), MixedPrecision()]):   # a callback that has trained says the same of itself
        learn = make(dict(cbs=lambda: [cb]), TrainingCheckpoint(every_steps=2), *([Interrupt((1, 4))] if n == 0 else []))
        says = 'interrupted' if n == 0 else 'amp_mode: bf16 in the checkpoint, fp16 now'
        with pytest.raises((RuntimeError, ValueError), match=says): learn.fit_one_cycle(4, .05)
        new_process()
    test_eq_bits(run(bf16, TrainingCheckpoint(every_steps=2)), whole)

def test_own_all_batches(monkeypatch):
    "A library's, which may load batches in its own way: the rest of an interrupted epoch would go without it"
    def all_batches(self):
        self.n_iter = len(self.dl)
        for i,b in enumerate(self.dl): self.one_batch(i, b)
    monkeypatch.setattr(Learner, 'all_batches', all_batches)
    learner(data, 8, GradientAccumulation(24)).fit(1)          # it calls the batch loop
    with pytest.raises(ValueError, match=f'an all_batches of its own, from {__name__}'): learner(data, 8, TrainingCheckpoint()).fit(1)

def test_refused_before_training():
    def refused(what, *cbs, **kwargs):
        with pytest.raises(ValueError, match=what): learner(data, 8, TrainingCheckpoint(), *cbs, **kwargs).fit(1)
    refused('batch sampler', dl_type=lambda d, batch_size: torch_data.DataLoader(d, batch_sampler=[[0, 1], [2, 3]]))
    class Odd(torch_data.Sampler):
        def __iter__(self): return iter([1, 3])
        def __len__(self): return 2
    refused('its sampler is a Odd', dl_type=lambda d, batch_size: torch_data.DataLoader(d, batch_size, sampler=Odd()))
    class Bad(Callback):
        def state_dict(self): return dict(f=print)
        def load_state_dict(self, s): pass
    with pytest.raises(TypeError, match='cannot be part of a checkpoint'): learner(data, 8, TrainingCheckpoint(), Bad()).fit(1)

def checkpoints(): return sorted(Path('models/checkpoint').glob('*.pt'), key=lambda p: (p.name.endswith('end.pt'), p.name))

@pytest.mark.parametrize('damage', quickly(['flipped', 'malicious'], ['cut', 'empty', 'flipped', 'garbage', 'malicious']))
@pytest.mark.parametrize('finished', [False, True])
def test_damaged(damage, finished):
    case = dict(cbs=lambda: [GradientAccumulation(24)])
    whole = run(case)
    run(case, TrainingCheckpoint(every_steps=2), stop=None if finished else Interrupt((2, 4)))
    older,newest = checkpoints()
    b = newest.read_bytes()
    weight = b.find(torch.load(newest)['model']['0.weight'].numpy().tobytes())
    if damage == 'cut': newest.write_bytes(b[:len(b)//2])
    if damage == 'empty': newest.write_bytes(b'')
    if damage == 'flipped': newest.write_bytes(b[:weight] + bytes([b[weight]^1]) + b[weight+1:])
    if damage == 'garbage': newest.write_bytes(os.urandom(len(b)))
    if damage == 'malicious':
        class Evil:
            def __reduce__(self): return os.mkdir, ('owned',)
        torch.save(dict(settings=Evil()), newest)
    new_process()
    with pytest.warns(UserWarning, match=f'{newest.name} is damaged'): learn = run(case, TrainingCheckpoint(every_steps=2))
    test_eq_bits(learn, whole)
    assert not Path('owned').exists()
    new_process()
    for p in checkpoints(): p.write_bytes(b'')
    with pytest.warns(UserWarning, match='is damaged'): test_eq_bits(run(case, TrainingCheckpoint()), whole)    # from the start

@pytest.mark.parametrize('append', [False, True])
def test_csv(append):
    "The rows of all processes, each once"
    def rows():
        res = [l.rsplit(',', 1)[0] for l in Path('history.csv').read_text().splitlines()]   # but for the time
        Path('history.csv').unlink()
        return res
    def script(stop=None, *cbs):
        learn = make({}, CSVLogger(append=append), *cbs, *([stop] if stop else []))
        learn.fit(1, .05); learn.fit_one_cycle(4, .05)
    script()
    whole = rows()
    assert len(whole) == (7 if append else 5)
    for at in (1, 4),(3, 7):       # rows after the checkpoint are there, and come again
        with pytest.raises(RuntimeError): script(Interrupt(at), TrainingCheckpoint(every_steps=11))
        new_process()
    script(None, TrainingCheckpoint())
    assert rows() == whole

@pytest.mark.parametrize('how', [dict(), dict(every_epoch=1), dict(at_end=True), dict(reset_on_fit=False)], ids=str)
def test_saved_models(how):
    "The files of `SaveModelCallback` and where the last one is"
    case = dict(cbs=lambda: [SaveModelCallback(**how)], fit=lambda l: (l.fit(2, .05), l.fit(4, .3)))
    def saved(learn):
        res = {f.name: weights(load_into(f)) for f in Path('models').glob('*.pth')}
        for f in Path('models').glob('*.pth'): f.unlink()
        return res,learn.save_model.last_saved_path
    def load_into(f):
        model = net()
        model.load_state_dict(torch.load(f))
        return model
    whole = run(case)
    files,last = saved(whole)
    for at in (1, 4),(2, 2),(3, 5):
        run(case, TrainingCheckpoint(every_steps=3), stop=Interrupt(at))
        new_process()
    learn = run(case, TrainingCheckpoint(every_steps=3))
    test_eq_bits(learn, whole)
    assert learn.save_model.best == whole.save_model.best
    again,last_again = saved(learn)
    assert last_again == last and again.keys() == files.keys() and all(torch.equal(again[k], files[k]) for k in files)

def test_keep():
    for keep in 1,3:
        run({}, TrainingCheckpoint(every_steps=2, keep=keep), stop=Interrupt((1, 6)))
        assert [p.name for p in checkpoints()] == [f'1-{i:09d}.pt' for i in (10, 12, 14)][-keep:]
        new_process(); shutil.rmtree('models/checkpoint')

def test_cannot_save(capfd):
    whole = run({})
    Path('models').write_text('a file, where the folder would be')
    with pytest.warns(UserWarning, match='could not save.*Training continues') as w:
        test_eq_bits(run({}, TrainingCheckpoint(every_steps=8)), whole)
    assert len([m for m in w if 'could not save' in str(m.message)]) == 5      # 4 and the end: one each
    new_process(); Path('models').unlink()
    resource = pytest.importorskip('resource', reason='Windows has no such limits')
    soft,hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))                # as if the disk were full
    try:
        with pytest.warns(UserWarning, match='could not save') as w: test_eq_bits(run({}, TrainingCheckpoint(every_steps=8)), whole)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (len([m for m in w if 'could not save' in str(m.message)]) == 5
            and {f.name for f in Path('models/checkpoint').iterdir()} <= {'training_checkpoint.lock'})

class Signal(Stateless):
    run_valid = False
    def __init__(self, sig, at, n=1): self.sig,self.at,self.n = sig,at,n
    def before_batch(self):
        if (self.learn.epoch,self.learn.iter) == self.at:
            for _ in range(self.n): signal.raise_signal(self.sig)

@pytest.mark.parametrize('sig', ['SIGTERM', 'SIGUSR1', 'SIGINT'])
def test_signals(sig):
    if not hasattr(signal, sig): pytest.skip(f'no {sig} on Windows')
    case,used = dict(cbs=lambda: [GradientAccumulation(24)]),(signal.SIGTERM, getattr(signal, sig), signal.SIGINT)
    whole,handlers = run(case),[signal.getsignal(s) for s in used]
    ended = []
    learn = make(case, TrainingCheckpoint(), Signal(getattr(signal, sig), (1, 3)), Callback(after_fit=lambda self: ended.append(1)))
    if sig == 'SIGINT':
        with pytest.raises(KeyboardInterrupt): learn.fit_one_cycle(4, .05)
    else: learn.fit_one_cycle(4, .05)
    assert ended and [signal.getsignal(s) for s in used] == handlers
    assert len(checkpoints()) == 1 and len(learn.recorder.losses) == 5     # at the end of the accumulated batch that was under way
    learn.validate(); learn.get_preds()                                    # it is usable
    if sig != 'SIGINT':
        n = len(learn.recorder.losses)
        learn.fit(1)                                                       # no other fit here
        assert len(learn.recorder.losses) == n
        new_process()
    learn = run(case, TrainingCheckpoint())
    test_eq_bits(learn, whole)

def test_ctrl_c_twice():
    learn = make(dict(cbs=lambda: [GradientAccumulation(24)]), TrainingCheckpoint(), Signal(signal.SIGINT, (1, 3), 2))
    with pytest.raises(KeyboardInterrupt): learn.fit_one_cycle(4, .05)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not checkpoints()
    learn.fit(1)

def test_other_thread():
    learn,errors = make({}, TrainingCheckpoint()),[]
    def fit():
        try: learn.fit(1)
        except Exception as e: errors.append(e)
    t = threading.Thread(target=fit); t.start(); t.join()
    assert not errors

def test_plain_learner_and_others():
    "Without accumulation; in `fit(cbs=)`; pickled, copied, exported; removed"
    learn = make({}, TrainingCheckpoint(every_steps=3))
    pickle.loads(pickle.dumps(learn.training_checkpoint.__class__(every_steps=3)))
    learn.fit(1); deepcopy(learn); learn.validate()
    learn.remove_cb(TrainingCheckpoint)
    assert 'one_batch' not in vars(learn)
    learn.fit(1)
    whole = run({})
    for stop in Interrupt((1, 5)),None:
        learn = make({}, *([stop] if stop else []))
        try: learn.fit_one_cycle(4, .05, cbs=TrainingCheckpoint('given', every_steps=3))
        except RuntimeError: new_process()
    test_eq_bits(learn, whole)

@contextmanager
def counted(module, *functions):
    "Counts how often they are called"
    calls = Counter()
    with pytest.MonkeyPatch.context() as m:
        for f in functions:
            old = getattr(module, f)
            m.setattr(module, f, lambda *a, _old=old, _f=f, **k: (calls.update([_f]), _old(*a, **k))[1])
        yield calls

def test_nothing_between_saves():
    "A step that does not save asks for no state"
    from fastaccum.checkpoint.state import LearnerState, RandomNumbers
    with counted(LearnerState, 'take') as calls, counted(RandomNumbers, 'take') as draws: make({}, TrainingCheckpoint()).fit(2)
    assert calls['take'] == draws['take'] == 2           # what can be saved at all, before the fit; and the end

def test_short_way():
    "What a save calls of the package; a data set, a callback or an item more calls a few more"
    import fastaccum
    root,seen = os.path.dirname(fastaccum.__file__)+os.sep,[]
    def note(frame, event, arg):
        code = frame.f_code
        if event == 'call' and code.co_filename.startswith(root) and not code.co_name.startswith('<'): seen.append(code.co_name)
    class Traces(Stateless):
        order,run_valid = 2000,False
        def after_batch(self):
            seen.clear(); sys.setprofile(note)
            try: self.learn.training_checkpoint.now.save_batch()
            finally: sys.setprofile(None)
    run(dict(model=nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), fit=lambda l: l.fit(1)),
        GradientAccumulation(24), TrainingCheckpoint(every_minutes=None), Traces())
    assert 50 < len(seen) < 720

def test_cost():
    "A checkpoint is one `torch.save` of what a plain one holds, and one wait each for the file and its folder; nothing is copied"
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 4))
    learn = learner(Data(torch.randn(16, 1000), torch.randn(16, 4)), 8, TrainingCheckpoint(every_minutes=None), model=model, opt_func=Adam)
    class Measure(Callback):
        order,run_valid = 2000,False
        def after_batch(self):
            cb,plain = self.learn.training_checkpoint,Path('plain.pt')
            torch.save(dict(model=self.learn.model.state_dict(), opt=self.learn.opt.state_dict()), plain)
            with counted(torch, 'save') as saves, counted(os, 'fsync') as waits, StorageFollower() as mem: cb.now.save_batch()
            ours = max(cb.folder.files, key=os.path.getmtime)
            assert saves['save'] == 1 and waits['fsync'] == 2
            # the generators' states are 10,000 of it
            assert plain.stat().st_size > 12e6 and ours.stat().st_size < plain.stat().st_size + 50_000
            assert mem.peak < 50_000
    learn.add_cb(Measure())
    learn.fit(1)
    assert len(learn.recorder.losses) == 2

@pytest.mark.parametrize('order', [999, 3000])
def test_whatever_the_order(order):
    "The state of a callback in a checkpoint is that of the checkpoint's batch, also if it comes last"
    class Counts(Callback):
        run_valid = False
        def __init__(self): self.n,self.order = 0,order
        def after_batch(self): self.n += 1; self.learn.model[0].weight.data.mul_(1+1e-3*self.n)
    case = dict(cbs=lambda: [Counts()])
    whole = run(case)
    run(case, TrainingCheckpoint(every_steps=1), stop=Interrupt((1, 3)))
    new_process()
    learn = run(case, TrainingCheckpoint(every_steps=1))
    assert learn.counts.n == whole.counts.n
    test_eq_bits(learn, whole)
