"""Trainings for test_distributed.py: `torchrun --nproc-per-node 2 tests/parallel/ranks.py FOLDER` runs all over two
ranks, `python tests/parallel/ranks.py FOLDER` in one process

Each function is one. What it returns is saved, with the name of the function and the rank, for the test of the same
name."""
import io, os, shutil, signal, socket, sys, time, warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
torch.set_num_threads(1)
from fastai.basics import *
from fastai.callback.all import *
from fastai.metrics import accuracy, F1Score, mse
from torch.utils._pytree import tree_leaves
from fastaccum.all import *
from bench.comm import CommCounter
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.parallel.processes import start_group, stop_group
from fastaccum.parallel.ranks import Head

many = start_group(timeout=60)
rank,world = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
cases = {}
def case(f): cases[f.__name__] = f; return f

# --- what is trained
def data(n, n_out=1, n_valid=23, seq=None):
    g = torch.Generator().manual_seed(n)
    shape = (n+n_valid, 5) if seq is None else (n+n_valid, seq, 5)
    x = torch.randn(*shape, generator=g)
    y = (x@torch.randn(5, 1, generator=g)).sigmoid() if n_out == 1 else torch.randint(n_out, shape[:-1], generator=g)
    return x,y

def mlp(n_out=1):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, n_out))

def learner(x, y, model=None, loss=None, bs=16, accum=40, n_valid=23, cbs=(), dp=None, opt_func=SGD, double=False,
            metrics=None, acc=None, **kwargs):
    model = ifnone(model, mlp())
    if double: model,x,y = model.double(),x.double(),y.double() if y.is_floating_point() else y
    n = len(x)-n_valid
    set_seed(3)
    dls = DataLoaders.from_dsets(list(zip(x[:n], y[:n])), list(zip(x[n:], y[n:])), bs=bs, drop_last=False, num_workers=0, device='cpu')
    acc = ifnone(acc, GradientAccumulation(accum, **kwargs))
    return Learner(dls, model, ifnone(loss, nn.MSELoss()), opt_func=opt_func, lr=.1,
                   cbs=[acc, ifnone(dp, DataParallel()), *cbs], metrics=metrics, path=folder)

def state(learn, **more):
    rec = learn.recorder
    return dict(losses=torch.tensor([float(o) for o in rec.losses]), lrs=rec.lrs, values=[list(v) for v in rec.values],
                epochs=len(rec.values),
                weights=torch.cat([p.detach().flatten() for p in get_model(learn.model).parameters()]), **more)

def run(*args, n_epoch=2, fit=None, more=lambda l: {}, **kwargs):
    learn = learner(*args, **kwargs)
    with learn.no_logging(): (fit or (lambda l: l.fit(n_epoch)))(learn)
    return state(learn, **more(learn))

class On(Callback):
    "Do something at an event, on one rank"
    run_valid = False
    def __init__(self, event, f, only=1, order=30):
        self.order = order; setattr(self, event, lambda: f(self.learn) if rank == only and many else None)

class Traffic(Callback):
    "Collectives and bytes of each step"
    run_valid,order = False,70
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
    def before_fit(self): self.rows = []
    def before_train(self): self.mode = CommCounter().__enter__()
    def before_batch(self):
        if self.iter == 0: self._next()            # without the order of the items
    def _next(self): self.before = self.mode.calls,self.mode.bytes
    def after_step(self):
        self.rows.append((self.mode.calls-self.before[0], self.mode.bytes-self.before[1]))
        self._next()
    def after_train(self): self.mode.__exit__(None, None, None); self.by_kind = self.mode.by_kind

# --- equal to one process
ce = nn.CrossEntropyLoss
@case
def ragged(): return run(*data(97))
@case
def rank_without_items(): return run(*data(81))
@case
def more_ranks_than_items(): return run(*data(21), bs=1, accum=8)
@case
def class_weights(): return run(*data(97, 3), model=mlp(3), loss=ce(weight=torch.tensor([.1, 1, 5])))
@case
def label_smoothing(): return run(*data(97, 3), model=mlp(3), loss=ce(weight=torch.tensor([.1, 1, 5]), label_smoothing=.1))
@case
def chunked():
    x,y = data(60, 3, seq=7)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < .5] = -100
    return run(x, y, model=mlp(3), loss=CrossEntropyLossFlat(), bs=8, accum=20, micro_batch_size=3, cbs=[ChunkedHead(2)])
def chunked_own(**kwargs):
    "No rule of the targets says what it divides by; where few count, a chunk is below the floor"
    x,y = data(97, 3)
    def loss(p, t): return (F.cross_entropy(p, t, reduction='none')*(t == 1)).sum()/(t == 1).sum().clamp(min=4)
    return run(x, y, model=mlp(3), loss=loss, bs=8, accum=20, micro_batch_size=3, cbs=[ChunkedHead(2)], **kwargs)
@case
def chunked_measured(): return chunked_own()
@case
def chunked_early(): return chunked_own(dp=DataParallel(overlap=True, bucket_mb=1e-4))
@case
def tokens():
    x,y = data(60, 3, seq=7)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < .5] = -100
    y[:20] = -100                                  # batches without a single target
    return run(x, y, model=mlp(3), loss=lambda p, t: F.cross_entropy(p.flatten(0, 1), t.flatten()), bs=8, accum=20,
               weight=lambda learn: (learn.y != -100).sum())
@case
def unit_tokens():
    "All ranks close at the same loader batch, also those that a rank has no items of, or no tokens"
    x,y = data(61, 3, seq=7)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < .5] = -100
    y[:9] = -100
    logger = StepLogger()
    return run(x, y, model=mlp(3), loss=CrossEntropyLossFlat(), bs=4, accum=60, unit='tokens', cbs=[logger],
               more=lambda learn: dict(rows=logger.to_df()[['items','tokens']].values.tolist()))
class WordsOfTexts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.emb,self.out = nn.Embedding(9, 6, padding_idx=0),nn.Linear(6, 3)
    def forward(self, x): return self.out(self.emb(x).tanh().sum(1)/(x > 0).sum(1, keepdim=True))

def texts(n=70):
    "Of 1 to 15 words, padded"
    g = torch.Generator().manual_seed(n)
    lengths = (1+14*torch.rand(n, generator=g)**2).long()
    x = torch.randint(1, 9, (n, 15), generator=g)
    return x*(torch.arange(15) < lengths[:,None]),torch.randint(3, (n,), generator=g)
@case
def rows_by_length():
    "Each rank has other micro-batches"
    return run(*texts(), model=WordsOfTexts(), loss=ce(), bs=16, accum=100, unit='tokens', micro_batch_tokens=(40, 25)[rank])
@case
def positives():
    "Focal-like, divided by the number of positive targets; many micro-batches have none"
    x,y = data(97, 2)
    def loss(p, t): return F.binary_cross_entropy_with_logits(p[:,0], t.float(), reduction='sum')/(t > 0).sum().clamp(min=1)
    y[torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < .6] = 0
    return run(x, y, loss=loss, micro_batch_size=2)
@case
def no_positives():
    "The second of three steps has no gradients; in the others, items count beside the positives of others"
    x,y = data(97, 2)
    def loss(p, t):
        each = F.binary_cross_entropy_with_logits(p[:,0], t.float(), reduction='sum')
        return each/t.sum() if t.any() else each*0
    y = (torch.arange(len(y))%5 == 0).long()
    y[40:80] = 0
    def fit(learn):
        learn.dls.train.shuffle = False
        learn.fit(2)
    return run(x, y, loss=loss, micro_batch_size=2, fit=fit)
@case
def sum_loss(): return run(*data(97), loss=nn.MSELoss(reduction='sum'), fit=lambda l: l.fit(2, 1e-3))
@case
def micro_batches(): return run(*data(97), micro_batch_size=(3, 5)[rank])
@case
def per_loader_batch(): return run(*data(97), accum=None, micro_batch_size=4)
@case
def overlap(): return run(*data(97), dp=DataParallel(overlap=True, bucket_mb=1e-4), micro_batch_size=3)
@case
def adam64(): return run(*data(97), double=True, opt_func=Adam, fit=lambda l: l.fit_one_cycle(2, 1e-2))
@case
def one_cycle(): return run(*data(96), fit=lambda l: l.fit_one_cycle(3, .1), cbs=[GradientClip(.05)])
@case
def drop(): return run(*data(97), remainder='drop')
@case
def carry(): return run(*data(97), remainder='carry', n_epoch=3)
@case
def schedule(): return run(*data(97), acc=GradientAccumulationSchedule(16, 64, 0, 1.), n_epoch=3)
@case
def layer_groups(): return run(*data(97), fit=lambda l: (l.freeze_to(0), l.fit(1, .1), l.fit(1, slice(.01, .1))))

class Branches(nn.Module):
    "Each rank uses other parameters, and nobody uses the last; one process uses both"
    def __init__(self): super().__init__(); torch.manual_seed(1); self.a,self.b,self.c = (nn.Linear(5, 1) for _ in range(3))
    def forward(self, x): return torch.where(x[:,:1] > 0, self.a(x), self.b(x)) if not many else (self.a, self.b)[rank](x)
@case
def unused():
    "The halves of each batch have items of one kind"
    x,y = data(64, n_valid=8)
    x[:,0] = torch.where(torch.arange(len(x))%8 < 4, 1, -1)
    learn = learner(x, y, Branches(), bs=8, accum=16, n_valid=8)
    learn.dls.train.shuffle = False
    with learn.no_logging(): learn.fit(2)
    return state(learn, none=[p.grad is None for p in learn.model.parameters()])

@case
def fine_tune():
    learn = learner(*data(97), model=nn.Sequential(mlp(8), nn.Linear(8, 1)))
    learn.splitter = lambda m: [params(m[0]), params(m[1])]
    with learn.no_logging(): learn.fine_tune(2, .1)
    return state(learn)

# --- traffic
@case
def traffic():
    big = lambda: nn.Sequential(nn.Linear(5, 300), nn.Linear(300, 1))
    res = {}
    for bs,name in ((32, 'few'), (4, 'many')):
        learn = learner(*data(128), model=big(), bs=bs, accum=64, micro_batch_size=4,
                        cbs=[Traffic(), TrainingCheckpoint(f'traffic{world}'), GradientNoiseScale()])
        with learn.no_logging(): learn.fit(1)
        learn.training_checkpoint.finish()
        res[name] = learn.traffic.rows
    ps = list(learn.model.parameters())
    return dict(res, limit=sum(p.numel()*4 for p in ps) + 4*len(ps) + 8*len(Head._fields))

# --- mixed precision
@case
def fp16():
    def overflow(learn):
        if learn.train_iter == 5: learn.loss_grad = learn.loss_grad*float('inf')
    learn = learner(*data(97), cbs=[MixedPrecision(init_scale=2.**10, growth_interval=3), On('after_loss', overflow)])
    with learn.no_logging(): learn.fit(3)
    return state(learn, history=learn.mixed_precision.scaler.history(), overflowed=True)

@case
def fp16_without_overflow():
    return run(*data(97), cbs=[MixedPrecision(init_scale=2.**10, growth_interval=3)])

# --- out of memory on one rank
class OneRankIsSmall(nn.Module):
    "More than 3 items do not fit the memory of rank 1, in the forward or the backward pass"
    def __init__(self, model, where, begin): super().__init__(); self.model,self.where,self.begin,self.n = model,where,begin,0
    def forward(self, x):
        self.n += 1
        p = self.model(x)
        if not (many and rank == 1 and self.training and len(x) > 3 and self.n > self.begin): return p
        if self.where == 'forward': raise torch.OutOfMemoryError('CUDA out of memory.')
        def fail(g): raise torch.OutOfMemoryError('CUDA out of memory.')
        p.register_hook(fail)
        return p
def _small(where, begin): return run(*data(97), model=OneRankIsSmall(mlp(), where, begin), micro_batch_size='auto')
@case
def out_of_memory_forward_first(): return _small('forward', 0)
@case
def out_of_memory_forward_last(): return _small('forward', 2)
@case
def out_of_memory_backward_first(): return _small('backward', 0)
@case
def out_of_memory_backward_last(): return _small('backward', 2)

# --- validation, predictions, callbacks
@case
def metrics():
    x,y = data(97, 3)
    learn = learner(x, y, mlp(3), ce(), metrics=[accuracy, F1Score(average='macro')], cbs=[StepLogger(), CSVLogger(f'history{rank}.csv')])
    learn.recorder.train_metrics = True
    learn.fit(2)
    res = state(learn)
    return dict(res, rows=learn.step_logger.rows['loss'], items=learn.step_logger.rows['items'], csv=(folder/f'history{rank}.csv').exists(),
                 again=[float(o) for o in learn.validate()], of_train=[float(o) for o in learn.validate(ds_idx=0)])
@case
def weighted_validation():
    return run(*data(97, 3), model=mlp(3), loss=ce(weight=torch.tensor([.1, 1, 5])))
@case
def predictions():
    x,y = data(97)
    learn = learner(x, y)
    with learn.no_logging(): learn.fit(1)
    inp,p,t,loss = learn.get_preds(with_input=True, with_loss=True)
    sizes = [learn.get_preds(dl=learn.dls.test_dl([(x[0], y[0])]*n))[0].shape[0] for n in (1, 2, 3)]
    few = learn.get_preds(dl=[learn.dls.valid.one_batch()])[0]
    mine = learn.get_preds(dl=learn.dls.test_dl([(x[0], y[0])]))[0] if rank == 0 else None  # by itself
    return dict(inputs=inp, preds=p, targets=t, losses=loss, of_train=learn.get_preds(ds_idx=0, reorder=True)[0],
                sizes=sizes, few=few, data=(x, y))
@case
def lr_find():
    learn = learner(*data(97), cbs=[StepLogger()])
    before = torch.cat([p.detach().flatten() for p in learn.model.parameters()]).clone()
    with learn.no_logging(): found = learn.lr_find(num_it=20, show_plot=False)
    if many: dist.barrier()
    after = torch.cat([p.detach().flatten() for p in learn.model.parameters()])
    return dict(state(learn), found=found.valley, restored=torch.equal(before, after), left=len(list((folder/'models').glob('tmp*'))))
@case
def early_stopping():
    learn = learner(*data(97), cbs=[EarlyStoppingCallback(min_delta=10, patience=1), SaveModelCallback(fname=f'best{world}')])
    with learn.no_logging(): learn.fit(9)
    return state(learn)
@case
def batchnorm():
    m = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    learn = learner(*data(96), model=m)
    with learn.no_logging(): learn.fit(2)
    return state(learn, buffers=[b.clone() for b in m.buffers()])
@case
def several_fits(): return run(*data(97), fit=lambda l: (l.fit(1), l.validate(), l.fit(1, .05)))
@case
def short_epoch(): return run(*data(97), cbs=[ShortEpochCallback(.6)])

# --- ends
@case
def cancelled_fit():
    def stop(learn):
        if learn.train_iter == 8: raise CancelFitException
    learn = learner(*data(97), cbs=[On('after_batch', stop)])
    with learn.no_logging(): learn.fit(4)
    first = state(learn)
    with learn.no_logging(): learn.fit(1)          # and on
    return dict(state(learn), first=first)
@case
def cancelled_batch():
    def skip(learn):
        if learn.train_iter == 2: raise CancelBatchException
    return run(*data(97), cbs=[On('before_batch', skip, order=-1)])
@case
def cancelled_closing_batch():
    def skip(learn):
        if learn.train_iter == 2: raise CancelBatchException
    return run(*data(97), cbs=[On('after_pred', skip)])
@case
def cancelled_micro_batch():
    "Rank 1 has counted one of two micro-batches"
    class Second(Callback):
        run_valid,order = False,30
        def before_batch(self): self.n = 0
        def after_pred(self):
            self.n += 1
            if many and rank == 1 and self.learn.train_iter == 1 and self.n == 2: raise CancelBatchException
    return run(*data(96), bs=16, micro_batch_size=4, cbs=[Second(), StepLogger()],
               more=lambda l: dict(items=list(l.step_logger.rows['items'])))
@case
def cancelled_short_batch():
    "Every batch is a step; rank 1 leaves out the last one, of another size, before it is planned"
    def skip(learn):
        if learn.train_iter == 6: raise CancelBatchException
    return run(*data(100), accum=16, cbs=[On('before_batch', skip, order=-1), StepLogger()],
               more=lambda l: dict(items=list(l.step_logger.rows['items'])))
@case
def carried_items():
    return run(*data(97), remainder='carry', n_epoch=3, cbs=[StepLogger()], more=lambda l: dict(items=list(l.step_logger.rows['items'])))
class SkipSecondStep(Callback):
    "On all ranks: the accumulated batch goes on"
    def before_fit(self): self.n = 0
    def before_step(self):
        self.n += 1
        if self.n == 2: raise CancelStepException
@case
def cancelled_step(): return run(*data(160), cbs=[SkipSecondStep()], n_epoch=1)
@case
def cancelled_epoch():
    def stop(learn):
        if learn.train_iter == 4: raise CancelTrainException
    learn = learner(*data(97), cbs=[On('after_batch', stop)])
    try:
        with learn.no_logging(): learn.fit(1)
    except RuntimeError as e: return dict(error=str(e))
    return dict(error='none')
@case
def after_an_exception():
    class Fails(Callback):
        def after_loss(self):
            if self.learn.train_iter == 3: raise KeyError('on all ranks')
    learn = learner(*data(97))
    dls = list(learn.dls.loaders)
    try: learn.fit(1, cbs=Fails())
    except KeyError: pass
    same = all(a is b for a,b in zip(dls, learn.dls.loaders))
    learn.model.load_state_dict(mlp().state_dict())
    with learn.no_logging(): learn.fit(1)
    return state(learn, restored=same)

# --- fastai's door
@case
def distrib_ctx():
    learn = learner(*data(97))
    learn.remove_cb(learn.data_parallel)
    dls = list(learn.dls.loaders)
    with learn.distrib_ctx(cpu=True, sync_bn=False) if many else nullcontext(), learn.no_logging():
        learn.fit(1)
        learn.fit(1)
    ends = type(learn.model).__name__,[type(cb).__name__ for cb in learn.cbs],all(a is b for a,b in zip(dls, learn.dls.loaders))
    return state(learn, ends=ends)
@case
def distrib_ctx_exception():
    class Fails(Callback):
        def after_loss(self):
            if self.learn.train_iter == 3: raise KeyError('on all ranks')
    learn = learner(*data(97))
    learn.remove_cb(learn.data_parallel)
    try:
        with learn.distrib_ctx(cpu=True, sync_bn=False) if many else nullcontext(): learn.fit(1, cbs=Fails())
    except KeyError: pass
    return dict(model=type(learn.model).__name__, cbs=[type(cb).__name__ for cb in learn.cbs],
                loaders=[type(dl).__name__ for dl in learn.dls.loaders])

# --- failures
def fork(f, r, port, timeout):
    "A rank that runs `f`: its process, and the file with its error"
    errors = folder/f'errors_{port}_{r}'
    pid = os.fork()
    if pid: return pid,errors
    global many,rank,world
    os.environ.update(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE='True')
    os.dup2(os.open(errors, os.O_CREAT|os.O_WRONLY), 2)
    try:
        many,rank,world = start_group(timeout),r,2
        f()
    except Exception: sys.excepthook(*sys.exc_info()); stop_group(); os._exit(1)   # as Python does at its end
    os._exit(0)

def without_agent(f, stops=(), timeout=60):
    """Exit code and error of two ranks, neither of which is ended when the other fails. This process has their store,
    as torchrun's agent does"""
    with socket.create_server(('127.0.0.1', 0)) as listens:
        port = listens.getsockname()[1]
        ranks = [fork(f, r, port, timeout) for r in range(2)]      # before the store, whose thread a fork would not take along
        store = dist.TCPStore('127.0.0.1', port, is_master=True, wait_for_workers=False, master_listen_fd=listens.detach())
    res = []
    for r,(pid,errors) in enumerate(ranks):        # those that stop come last
        if r in stops: os.kill(pid, signal.SIGKILL)
        res.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), errors.read_text()))
    return res

def in_forks(names, to):
    "What torchrun runs over two ranks, here without importing all again: their results go to the folder `to`"
    def ranks():
        global folder
        folder = to
        main(names)
    for code,errors in without_agent(ranks): assert code == 0, errors

def in_agent(names, n):
    "What `torchrun --max-restarts n` runs over two ranks, with its agent in this process, whose forks they are in each attempt"
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method='fork', max_restarts=n, monitor_interval=.1,
                          run_id='ranks', rdzv_backend='c10d', rdzv_endpoint='127.0.0.1:0', local_addr='127.0.0.1')
    elastic_launch(config, as_rank)(names)

def as_rank(names):
    global many,rank,world
    many = start_group(timeout=60)
    rank,world = dist.get_rank(),dist.get_world_size()
    try: main(names)
    except Exception: sys.excepthook(*sys.exc_info()); raise       # as Python does at the end of a script

def failures():
    def at_5(f, only):
        def do(learn):
            if learn.train_iter == 5: f()
        return lambda: run(*data(97), cbs=[On('after_batch', do, only=only)])
    def boom(): raise ValueError('boom')
    def me(s): return lambda: os.kill(os.getpid(), s)
    return dict(rank_0_fails=without_agent(at_5(boom, 0)), rank_1_fails=without_agent(at_5(boom, 1)),
                rank_1_freezes=without_agent(at_5(me(signal.SIGSTOP), 1), stops=[1], timeout=3),
                rank_1_is_killed=without_agent(at_5(me(signal.SIGKILL), 1)))

# --- Local SGD
@case
def local_traffic():
    res = {}
    for period in (1, 4):
        learn = learner(*data(128), bs=8, accum=8, cbs=[Traffic()], dp=LocalSGD(period))
        with learn.no_logging(): learn.fit(1)
        res[period] = learn.traffic.rows if many else []
    return dict(res, size=sum(p.numel()*4 for p in learn.model.parameters()))
@case
def local_batchnorm():
    m = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    learn = learner(*data(96), model=m, dp=LocalSGD(4))
    with learn.no_logging(): learn.fit(2)
    return state(learn, buffers=[b.clone() for b in m.buffers()])
@case
def local_fp16():
    "Rank 1 alone skips a step"
    def overflow(learn):
        if learn.train_iter == 5: learn.loss_grad = learn.loss_grad*float('inf')
    learn = learner(*data(96), accum=16, dp=LocalSGD(4, warmup_steps=2),
                    cbs=[MixedPrecision(init_scale=2.**10), On('after_loss', overflow)])
    with learn.no_logging(): learn.fit(2)
    return state(learn, skipped=sum(learn.mixed_precision.scaler.history()['skipped']))
@case
def local_cancelled():
    def stop(learn):
        if learn.train_iter == 8: raise CancelFitException
    learn = learner(*data(97), accum=16, cbs=[On('after_batch', stop)], dp=LocalSGD(3))
    with learn.no_logging(): learn.fit(4)
    return state(learn)

# --- checkpoints
class PowerCut(Callback):
    "An error on all ranks, after a batch of the fit"
    order,run_valid = 1001,False
    def __init__(self, done): self.done = done
    def batch_ended(self):
        if self.learn.train_iter == self.done: raise OSError('the power is out')

def restart(): CheckpointFolder.in_use.clear()     # as in a new process

def trained(learn, fit):
    with learn.no_logging():
        try: fit(learn)
        except OSError as e: assert 'the power is out' in str(e)
    learn.random = torch.get_rng_state(),tensor(random.getstate()[1]),tensor(np.random.get_state()[1].astype(int))
    return learn

def interrupted(make, fname, fit=lambda l: l.fit(3), end=lambda: PowerCut(9), every_steps=2, **kwargs):
    "A whole training, one that goes on where another was interrupted, and where that was"
    checkpoint = lambda: TrainingCheckpoint(fname, every_steps, **kwargs)
    whole = trained(make(), fit)
    restart()
    first = trained(make(checkpoint(), end()), fit)
    restart()
    again = trained(make(checkpoint(), began := Began()), fit)
    again.training_checkpoint.finish()
    return whole,again,dict(interrupted=len(first.recorder.losses), began=began.at)

class Began(Callback):
    "Where the training goes on"
    run_valid,at = False,None
    def before_batch(self): self.at = self.at or (self.learn.epoch, self.learn.iter)

class Noisy(ItemTransform):
    split_idx = 0
    def encodes(self, o): return o[0] + torch.randn(5)*.1, o[1]

def noisy(*cbs, dp=DataParallel, **kwargs):
    """Dropout, augmentation, BatchNorm, training metrics and a callback that counts: each rank has its own; fp16, a
    schedule of fastai's, one that grows"""
    x,y = data(100)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(.3), nn.Linear(8, 1))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn = learner(x, y, model,
                        cbs=[MixedPrecision(init_scale=2.**10, growth_interval=3), StepLogger(), Counts(), *cbs],
                        acc=GradientAccumulationSchedule(16, 48, 0, 1.), metrics=mse, dp=dp(), **kwargs)
    learn.dls.train.after_item = Pipeline([Noisy()])
    learn.recorder.train_metrics = True
    torch.manual_seed(10+rank)
    return learn

class Counts(Callback):
    run_valid = False
    def __init__(self): self.sum = 0.
    def after_batch(self): self.sum += float(self.learn.x.sum())

def ends(*learns):
    return [dict(state(l), buffers=[b.clone() for b in l.model.buffers()],
                 opt=[t for t in tree_leaves(l.opt.state_dict()) if isinstance(t, Tensor)],
                 rows=l.step_logger.to_df()[['loss','items','lr']].values.tolist(), sum=l.counts.sum, random=l.random) for l in learns]
@case
def checkpoint():
    whole,again,more = interrupted(noisy, f'cut{world}', one_cycle_fit)
    if many: dist.barrier()                        # rank 0 has written
    files = sorted(f.name for f in (folder/'models').glob(f'cut{world}*'))
    return dict(more, ends=ends(whole, again), files=files)
@case
def checkpoint_of_torch_loader():
    x,y = data(97)
    def make(*cbs):
        learn = learner(x, y, cbs=cbs)
        dl = torch.utils.data.DataLoader(list(zip(x[:97], y[:97])), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
        learn.dls = DataLoaders(dl, learn.dls.valid, device='cpu')
        return learn
    whole,again,more = interrupted(make, f'torch{world}')
    return dict(more, ends=[state(whole), state(again)])
@case
def checkpoint_at_signal():
    "Rank 1 alone gets the signal; its clock, or that of rank 0, asks for nothing"
    if not many: return {}
    stop = lambda: On('after_batch', lambda l: os.kill(os.getpid(), signal.SIGTERM) if l.train_iter == 5 else None)
    whole,again,more = interrupted(noisy, 'signal', end=stop, every_steps=None)
    return dict(more, ends=ends(whole, again))
@case
def checkpoint_by_the_clock():
    "Rank 0's clock is always due, that of the others never"
    if not many: return {}
    from fastaccum.checkpoint.fit import CheckpointedFit
    saved,save_batch = [],CheckpointedFit.save_batch
    def noted(self): saved.append(self.learn.train_iter); save_batch(self)
    learn = learner(*data(96), bs=16, accum=16, cbs=[TrainingCheckpoint('clock', every_minutes=(1e-9, 99)[rank])])
    CheckpointedFit.save_batch = noted
    try: trained(learn, lambda l: l.fit(2))
    finally: CheckpointedFit.save_batch = save_batch
    learn.training_checkpoint.finish()
    return dict(saved=saved)
@case
def checkpoint_in_background():
    whole,again,more = interrupted(noisy, f'background{world}', end=lambda: PowerCut(12), background=True)
    return dict(more, ends=ends(whole, again))
@case
def checkpoint_of_a_finished_fit():
    "The second of two fits fails; the first is not trained again, on any rank"
    def fits(learn): learn.fit(1, .1); learn.fit(2, .05)
    whole,again,more = interrupted(noisy, f'two_fits{world}', fits, lambda: PowerCut(10))
    return dict(more, ends=ends(whole, again))

def plain_adam(*cbs, dp=DataParallel): return learner(*data(97), opt_func=Adam, double=True, cbs=cbs, dp=dp())
def one_cycle_fit(learn): learn.fit_one_cycle(3, 1e-2)
kinds = dict(parallel=plain_adam, sharded=partial(plain_adam, dp=FullyShard))
@case
def stopped():
    "A training that stops in its second epoch, for another number of ranks"
    res = {}
    for name,make in kinds.items():
        res[name] = whole_state(trained(make(), one_cycle_fit))
        restart()
        trained(make(TrainingCheckpoint(f'stopped_{name}', 1), PowerCut(10)), one_cycle_fit)
    return res
@case
def goes_on():
    "In another folder another number of ranks has stopped"
    if not other: return {}
    res = {}
    for name,make in kinds.items():
        if rank == 0: shutil.copytree(Path(other)/f'models/stopped_{name}', folder/f'models/moved_{name}')
        if many: dist.barrier()
        restart()
        learn = trained(make(TrainingCheckpoint(f'moved_{name}', 1), began := Began()), one_cycle_fit)
        res[name] = dict(whole_state(learn), began=began.at)
    return res
@case
def checkpoint_of_shards():
    whole,again,more = interrupted(partial(plain_adam, dp=partial(FullyShard, 'keep')), f'shards{world}', one_cycle_fit)
    return dict(more, ends=[whole_state(whole), whole_state(again)])

def elastic():
    "torchrun starts the ranks anew twice: rank 1 kills itself in the second epoch; then it fails when all is trained"
    attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
    (folder/f'attempt_{attempt}_{rank}').touch()
    kill = On('after_batch', lambda l: os.kill(os.getpid(), signal.SIGKILL) if l.train_iter == 9 and attempt == 0 else None)
    learn = noisy(TrainingCheckpoint('elastic', 2), kill, began := Began())
    trained(learn, one_cycle_fit)
    if attempt == 1 and rank == 1: raise RuntimeError('at the very end')
    return dict(ends=ends(learn), began=began.at)

# --- the noise of the gradient
def measured(*args, cbs=(), noise={}, **kwargs):
    learn = learner(*args, cbs=[GradientNoiseScale(**noise), *cbs], **kwargs)
    with learn.no_logging(): learn.fit(3)
    rows = learn.gradient_noise_scale.rows
    return state(learn, x=rows['x'], y=rows['y'], estimate=tuple(learn.gradient_noise_scale.estimate()))
@case
def noise(): return measured(*data(81), micro_batch_size=4)
@case
def noise_one_micro_batch(): return measured(*data(96), accum=16, micro_batch_size=8)
@case
def noise_class_weights():
    return measured(*data(96, 3), model=mlp(3), loss=ce(weight=torch.tensor([.1, 1, 5])), micro_batch_size=4,
                    noise=dict(every=2))
@case
def noise_overlap(): return measured(*data(96), micro_batch_size=4, dp=DataParallel(overlap=True, bucket_mb=1e-4), cbs=[GradientClip(.05)])
@case
def noise_fp16(): return measured(*data(96), micro_batch_size=4, cbs=[MixedPrecision(init_scale=2.**10, growth_interval=3)])
@case
def adaptive():
    import fastaccum.batch_size.noise as module
    fieller = module.fieller
    module.fieller = lambda m, n, beta: fieller(m, n, beta, z=.1)  # so that sizes change early
    try:
        learn = learner(*data(81, 3), mlp(3), ce(), acc=AdaptiveGradientAccumulation(16, 64, micro_batch_size=4))
        with learn.no_logging(): learn.fit(6)
    finally: module.fieller = fieller
    return state(learn, changes=[(c.before, c.after) for c in learn.gradient_accumulation.changes])

# --- loggers
@case
def loggers():
    import wandb
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from fastaccum.wandb import WandbCallback, offline_history
    out,here = io.StringIO(),folder/f'logs{rank}'
    here.mkdir()
    rows,scalars = [],{}
    if rank == 0: run = wandb.init(mode='offline', dir=here, settings=wandb.Settings(console='off', silent=True))
    cbs = [TensorBoardCallback(here/'tensorboard', trace_model=False, log_preds=False), WandbCallback(log_preds=False),
           CSVLogger(f'logs{rank}/history.csv'), ProgressCallback(), ShowGraphCallback(), StepLogger(grad_norm=True)]
    learn = learner(*data(97), cbs=cbs)
    with redirect_stdout(out): learn.fit(2); learn.validate(); learn.get_preds()
    if rank == 0:
        wandb.finish()
        rows = offline_history(run.settings.sync_file)
        events = EventAccumulator(str(here/'tensorboard')).Reload()
        scalars = {k: [(s.step, s.value) for s in events.Scalars(k)] for k in events.Tags()['scalars']}
    return dict(out=out.getvalue(), csv=(here/'history.csv').exists(), rows=rows, scalars=scalars,
                tensorboard=len(list(here.glob('tensorboard/events*'))),
                wandb=len(list(here.glob('wandb/offline-run*'))))

# --- fully sharded
def whole_state(learn):
    from fastaccum.parallel.fully_shard import whole
    return dict(losses=torch.tensor([float(o) for o in learn.recorder.losses]), lrs=learn.recorder.lrs,
                values=[list(v) for v in learn.recorder.values], epochs=len(learn.recorder.values),
                weights=torch.cat([p.flatten() for p in whole(dict(learn.model.named_parameters())).values()]).detach())
def sharded(*args, sync='every', n_epoch=2, lr=.1, more=lambda l: {}, fs={}, **kwargs):
    learn = learner(*args, dp=FullyShard(sync, **fs), **kwargs)
    with learn.no_logging(): learn.fit(n_epoch, lr)
    return dict(whole_state(learn), **more(learn))
@case
def shard_adam(): return sharded(*data(97), opt_func=Adam, sync='keep')
@case
def shard_adamw_of_torch(): return sharded(*data(97), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
@case
def shard_each_batch(): return sharded(*data(97), accum=16, sync='last')
@case
def shard_micro_batches(): return sharded(*data(96), micro_batch_size=3, sync='last', cbs=[GradientClip(.05)])
@case
def shard_class_weights(): return sharded(*data(97, 3), model=mlp(3), loss=ce(weight=torch.tensor([.1, 1, 5])))
@case
def shard_sum_loss(): return sharded(*data(97), loss=nn.MSELoss(reduction='sum'), accum=16, lr=1e-3)
@case
def shard_offload(): return sharded(*data(97), fs=dict(offload=many))
@case
def shard_fp16():
    return sharded(*data(97), cbs=[MixedPrecision(init_scale=2.**10, growth_interval=3)],
                   more=lambda l: dict(history=l.mixed_precision.scaler.history()))
@case
def shard_fp16_overflow():
    def overflow(learn):
        if learn.train_iter == 5: learn.loss_grad = learn.loss_grad*float('inf')
    return sharded(*data(97), cbs=[MixedPrecision(init_scale=2.**10), On('after_loss', overflow)],
                   more=lambda l: dict(history=l.mixed_precision.scaler.history()))
@case
def shard_lr_find():
    learn = learner(*data(97), dp=FullyShard(), opt_func=Adam)
    with learn.no_logging():
        found = learn.lr_find(num_it=20, show_plot=False)
        learn.fit(1)
    return dict(whole_state(learn), found=found.valley)
@case
def shard_saved():
    "Half of the training sharded, then saved, and loaded in a new Learner: sharded, and plain"
    from fastaccum.parallel.fully_shard import whole
    x,y = data(97)
    learn = learner(x, y, dp=FullyShard(), opt_func=Adam, cbs=[SaveModelCallback(fname=f'shard_best{world}')])
    with learn.no_logging(): learn.fit(1)
    learn.save(f'shard{world}')
    again = learner(x, y, dp=FullyShard('keep'), opt_func=Adam)
    with again.no_logging(): again.fit(1)          # other weights than those of the file
    again.load(f'shard{world}')
    file = torch.load(folder/f'models/shard{world}.pth', weights_only=False)
    plain = learner(x, y, opt_func=Adam)
    plain.load(f'shard{world}')
    plain.save(f'plain{world}')
    if many: dist.barrier()
    third = learner(x, y, dp=FullyShard(), opt_func=Adam)
    third.load(f'plain{world}')
    for l in (again, plain, third):
        with l.no_logging(): l.fit(1)
    return dict(kinds={type(t).__name__ for t in tree_leaves(file) if isinstance(t, Tensor)},
                weights=[torch.cat([p.flatten() for p in whole(dict(l.model.named_parameters())).values()]).detach()
                         for l in (again, plain, third)])
@case
def shard_traffic():
    "One step of 8 micro-batches, and the largest parts of the memory"
    res = {}
    for sync in ('every', 'last', 'keep'):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 1))
        x,y = torch.randn(64+8, 64),torch.randn(64+8, 1)
        learn = learner(x, y, model, bs=64, accum=64, micro_batch_size=4, n_valid=8, dp=FullyShard(sync), cbs=[Traffic()])
        with learn.no_logging(): learn.fit(1)
        res[sync] = learn.traffic.by_kind if many else {}
    return dict(res, size=sum(p.numel()*4 for p in nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 1)).parameters()))
@case
def shard_refused():
    if not many: return {}
    x,y = data(32)
    def error(**kwargs):
        try: learner(x, y, dp=FullyShard(kwargs.pop('sync', 'every')), **kwargs).fit(1)
        except ValueError as e: return str(e)
    def late():
        learn = learner(x, y)
        learn.create_opt()
        learn.remove_cb(learn.data_parallel)
        try: learn.add_cb(FullyShard())
        except ValueError as e: return str(e)
    return dict(auto=error(micro_batch_size='auto'), uneven=error(bs=9, micro_batch_size=4),
                carry=error(sync='last', remainder='carry'), late=late(), chunks=error(cbs=[ChunkedHead(2)]))

# --- a loss that compares the items of all ranks
class TwoViews(nn.Module):
    "A scale that is learnt, as CLIP's, which the loss gets as a number; another that the loss itself has"
    def __init__(self):
        super().__init__()
        self.net,self.log_scale = mlp(4),nn.Parameter(torch.zeros(()))
    def forward(self, x): return self.net(x),self.net(x+1),self.log_scale.exp()

class Contrast(nn.Module):
    def forward(self, pred, y):
        a,b,scale = pred
        logits = scale*a@b.T+y.float()[None]*.1                # targets of all items, too
        return F.cross_entropy(logits, torch.arange(len(a)))

def contrasted(**kwargs): return run(*data(97, 3), model=TwoViews(), loss=Contrast(), micro_batch_size=(3, 5)[rank], coupled=True, **kwargs)
@case
def coupled(): return contrasted()
@case
def coupled_every_batch(): return contrasted(accum=16, cbs=[GradientClip(.05)])
class Stacked(nn.Module):
    "All first views, then all second ones, and the rows of each item together"
    def __init__(self): super().__init__(); self.net = mlp(4)
    def forward(self, x):
        a,b = self.net(x),self.net(x+1)
        return torch.cat((a, b)),torch.stack((a, b), 1).flatten(0, 1)
class OfStacked(nn.Module):
    def forward(self, pred, y):
        (a,b),c = pred[0].chunk(2),pred[1][1::2]
        return F.cross_entropy(a@b.T + c@b.T + y.float()[None]*.1, torch.arange(len(a)))
@case
def coupled_stacked(): return run(*data(97, 3), model=Stacked(), loss=OfStacked(), micro_batch_size=(3, 16)[rank], coupled=True)
@case
def coupled_single(): return run(*data(97, 3), model=Stacked(), loss=OfStacked(), micro_batch_size=4, coupled=True, bs=3, accum=9)
@case
def coupled_errors():
    if not many: return {}
    def error(dp=None, coupled=True, cbs=(), k=4, **kwargs):
        try: learner(*data(32, 3), model=mlp(3), loss=ce(), dp=dp, micro_batch_size=k, coupled=coupled, cbs=cbs, **kwargs).fit(1)
        except ValueError as e: return str(e)
    return dict(local=error(LocalSGD()), head=error(coupled='head'), overlap=error(DataParallel(overlap=True)),
                mixup=error(cbs=[MixUp()]), auto=error(k='auto'))

# --- errors
@case
def refused():
    if not many: return {}
    x,y = data(32)
    def error(f):
        try: f()
        except (ValueError, TypeError) as e: return str(e)
    class Largest(Metric):
        def reset(self): pass
    def alone(): learn = learner(x, y); learn.remove_cb(learn.data_parallel); learn.fit(1)
    def saved_alone(): learn = learner(x, y, cbs=[TrainingCheckpoint()]); learn.remove_cb(learn.data_parallel); learn.fit(1)
    def nothing(): learn = learner(x, y); learn.remove_cb(learn.gradient_accumulation); learn.fit(1)
    return dict(alone=error(alone), nothing=error(nothing),
                normalize=error(lambda: learner(x, y, normalize=False).fit(1)),
                metric=error(lambda: learner(x, y, metrics=Largest()).fit(1)),
                overlap=error(lambda: learner(x, y, dp=DataParallel(overlap=True), micro_batch_size='auto').fit(1)),
                two=error(lambda: learner(x, y, cbs=[DataParallel()]).fit(1)),
                checkpoint=error(lambda: learner(x, y, cbs=[TrainingCheckpoint()], dp=LocalSGD()).fit(1)),
                noise=error(lambda: learner(x, y, micro_batch_size=4, cbs=[GradientNoiseScale()],
                                            dp=LocalSGD()).fit(1)),
                sharded_noise=error(lambda: learner(x, y, micro_batch_size=4, cbs=[GradientNoiseScale()],
                                                    dp=FullyShard()).fit(1)), alone_saved=error(saved_alone),
                rows_by_length=error(lambda: learner(*texts(), model=WordsOfTexts(), loss=ce(), micro_batch_tokens=40,
                                                     dp=FullyShard()).fit(1)),
                rows_overlap=error(lambda: learner(*texts(), model=WordsOfTexts(), loss=ce(), micro_batch_tokens=40,
                                                   dp=DataParallel(overlap=True)).fit(1)),
                                                   count=error(lambda: learner(x, y, n_items=lambda learn: 3).fit(1)))

def main(names):
    for name in names or cases:
        if many: dist.barrier()
        start = time.time()
        res = (cases.get(name) or globals()[name])()
        torch.save(res, folder/f'{name}_{rank}.pt')
        if os.environ.get('RANKS_TIMES'): print(f'{name} {rank} {time.time()-start:.1f}', flush=True)
    stop_group()

if __name__ == '__main__':
    folder,other = Path(sys.argv[1]),os.environ.get('OTHER')
    defaults.callbacks = [cb for cb in defaults.callbacks if cb is not ProgressCallback]
    if 'RESTARTS' in os.environ: in_agent(sys.argv[2:], int(os.environ['RESTARTS'])); sys.exit()
    if 'TWO' in os.environ: in_forks(sys.argv[2:], Path(os.environ['TWO']))
    main(sys.argv[2:])
