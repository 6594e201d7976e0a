"With exact=True a run over several ranks is plain fastai's in one process, whatever is drawn at random"
import io, random, sys
from contextlib import redirect_stdout
from functools import partial
import pytest, torch, torch.nn.functional as F
from fastai.basics import (
    Adam, Callback, CancelBatchException, DataLoaders, Learner, SGD, Tensor, TfmdDL, Transform, nn, np, num_distrib,
    rank_distrib, set_seed, tensor, to_detach)
from fastai.callback.all import MixUp
from fastai.learner import AvgSmoothLoss
from fastai.vision.all import Brightness, RandomErasing, TensorImage, aug_transforms
from fastaccum.all import DataParallel, FullyShard, GradientAccumulation, LocalSGD, StepLogger, TrainingCheckpoint, launch
from fastaccum.checkpoint.folder import CheckpointFolder
from quick import over_ranks, run_over
from test_joint_validation import quiet, started, weights

pytestmark = pytest.mark.slow      # all start processes of two ranks or three
three = 'dropout', 'batchnorm', 'own_loss', 'rare', 'texts', 'ranks_without_items'

def focal(p, y): return ((1-F.softmax(p, 1).gather(1, y[:,None])).squeeze(1)**2*F.cross_entropy(p, y, reduction='none')).mean()
def net(*layers, n=12): return nn.Sequential(nn.Linear(n, 24), *layers, nn.Dropout(.2), nn.Linear(24, 4))
def each(p, y): return F.cross_entropy(p, y, reduction='none')
def by_class(p, y): return F.cross_entropy(p, y, torch.arange(1., 5.).to(p))
def rare(p, y): return (each(p, y)*(y == 0)).sum()/(y == 0).sum()           # NaN in a micro-batch, or on a rank, without any
def root(p, y): return each(p, y).mean().sqrt()
class Temperature(nn.Module):
    "Has gradients of its own"
    def __init__(self): super().__init__(); self.t = nn.Parameter(torch.ones((), dtype=torch.float64))
    def forward(self, p, y): return each(p*self.t, y).mean() + self.t**2
def compares(p, y): return F.cross_entropy(p@p.T, torch.arange(len(p)))
class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.l,self.h = nn.LSTM(12, 10, 3, dropout=.4, batch_first=True),net(n=10)
    def forward(self, x): return self.h(self.l(x)[0][:,-1])
class Second(nn.Module):
    "Items in the second dimension"
    def __init__(self): super().__init__(); self.e,self.h = nn.TransformerEncoderLayer(12, 3, 20, .1),nn.Linear(12, 4)
    def forward(self, x): return self.h(self.e(x.transpose(0, 1)).mean(0))
class Rows(nn.Module):
    "Dropout for rows of items, all first rows before all second ones"
    def __init__(self): super().__init__(); self.a,self.d,self.h = nn.Linear(12, 12),nn.Dropout(.3),nn.Linear(12, 4)
    def forward(self, x):
        n,t,c = x.shape
        return self.h(self.d(self.a(x.transpose(0, 1).reshape(t*n, c)).relu()).view(t, n, c).mean(0))
class Coin(nn.Module):
    "Draws from Python and NumPy, and a mask over weights"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(12, 24),net(n=24)
    def forward(self, x):
        if not self.training: return self.b(self.a(x))
        return self.b(F.linear(x, F.dropout(self.a.weight, .3), self.a.bias)*(1+random.random()+np.random.rand()))
class Words(nn.Module):
    "Words of texts, padded with 0"
    def __init__(self): super().__init__(); self.e,self.d,self.h = nn.Embedding(9, 12),nn.Dropout(.3),net()
    def forward(self, x): return self.h((self.d(self.e(x))*(x > 0)[...,None]).sum(1))

class Jitter(Transform):
    "Draws from all three generators, for an item or for a batch"
    split_idx = 0
    def encodes(self, x:Tensor):
        if not x.is_floating_point(): return x
        return x + torch.rand(len(x), *[1]*(x.dim()-1), dtype=x.dtype) + random.random() + np.random.rand()

class Items(list): split_idx = 0       # of the training

class Cancels(Callback):
    "A batch, on one rank or on all"
    def __init__(self, ranks=None): self.ranks = ranks
    def before_batch(self):
        if self.learn.training and self.learn.iter == 1 and rank_distrib() in (self.ranks or range(9)): raise CancelBatchException

def padded(items):
    width = max(len(x) for x,_ in items)
    return [(F.pad(x, (0, width-len(x))), y) for x,y in items]

def loaders(n, kind='rows', bs=16, n_valid=6, num_workers=0, as_torch=False, **kwargs):
    g = torch.Generator().manual_seed(n)
    shape = dict(rows=(12,), pictures=(3, 8, 8), sequences=(5, 12), images=(3, 8, 8)).get(kind)
    def item():
        if kind == 'texts': x = torch.randint(1, 9, (int(torch.randint(1, 8, (), generator=g)),), generator=g)
        else: x = torch.rand(*shape, generator=g).double()
        x = TensorImage(x.float()) if kind == 'pictures' else x
        return x,int(torch.randint(4, (), generator=g))
    def dl(k, **more): return TfmdDL(Items(item() for _ in range(k)), bs=bs, num_workers=num_workers, device='cpu', **more)
    valid = {k: v for k,v in kwargs.items() if k in ('before_batch','after_batch')}
    if as_torch:
        def dl(k, **more): return torch.utils.data.DataLoader([item() for _ in range(k)], bs, **more)
    return DataLoaders(dl(n, shuffle=True, **kwargs), dl(n_valid, **valid), device='cpu')

def run(model, loss=None, n=40, n_epoch=2, opt=SGD, dp=DataParallel, cbs=(), both=(), plain=None, **kwargs):
    "Losses, weights, and the random numbers that come next. In one process: plain fastai"
    of_data = 'kind','bs','n_valid','after_item','after_batch','before_batch','num_workers','drop_last','as_torch'
    data = {k: kwargs.pop(k) for k in of_data if k in kwargs}
    set_seed(5)
    plain = num_distrib() < 2 if plain is None else plain
    own = () if plain else (GradientAccumulation(exact=True, **{'micro_batch_size': 3, **kwargs}), dp(), *cbs)
    dls = loaders(n, **data)
    model = model() if data.get('kind') == 'pictures' else model().double()
    learn = Learner(dls, model, loss or nn.CrossEntropyLoss(), opt_func=opt, lr=.1, cbs=[*own, *both], path='.')
    set_seed(7)
    with redirect_stdout(io.StringIO()), quiet(learn): learn.fit(n_epoch)
    values = [list(v) for v in learn.recorder.values]
    return values,[float(o) for o in learn.recorder.losses],weights(learn),torch.rand(1).item(),random.random(),np.random.rand()

conv = lambda *last: nn.Sequential(nn.Conv2d(3, 8, 3), *last, nn.ReLU(), nn.Dropout2d(.2), nn.Flatten(), nn.Linear(288, 4))
cases = dict(
    dropout = partial(run, net),
    adam = partial(run, net, opt=Adam),
    lstm = partial(run, Rnn, kind='sequences'),
    items_second = partial(run, Second, kind='sequences'),
    rows = partial(run, Rows, kind='sequences'),
    python = partial(run, Coin),
    own_loss = partial(run, net, focal),
    by_class = partial(run, net, by_class),
    rare = partial(run, net, rare, n=48),
    root = partial(run, net, root),
    temperature = partial(run, net, Temperature()),
    compares = partial(run, net, compares),
    batchnorm = partial(run, lambda: conv(nn.BatchNorm2d(8)), kind='images'),
    ranks_without_items = partial(run, net, n=33),
    batchnorm_without_items = partial(run, lambda: conv(nn.BatchNorm2d(8)), kind='images', n=34),
    single_items = partial(run, net, n=35),
    shares = partial(run, net, dp=partial(DataParallel, shares='auto')),
    overlap = partial(run, net, dp=partial(DataParallel, overlap=True)),
    as_large = partial(run, net, micro_batch_size=16),
    auto = partial(run, net, micro_batch_size='auto'),
    no_transforms = partial(run, conv, kind='images'),
    item_transforms = partial(run, conv, kind='images', after_item=[Jitter()]),
    workers = partial(run, conv, kind='images', after_item=[Jitter()], num_workers=2),
    batch_transforms = partial(run, conv, kind='images', after_batch=[Jitter()]),
    augmented = partial(run, conv, kind='pictures', after_batch=[*aug_transforms(size=8), RandomErasing(p=.7)]),
    dropped = partial(run, conv, kind='images', after_item=[Jitter()], drop_last=True),
    in_validation = partial(run, conv, kind='pictures', after_batch=[Brightness()], n_valid=33),
    torch_loader = partial(run, net, as_torch=True, n_valid=33),
    few_items = partial(run, net, bs=8),
    texts = partial(run, Words, kind='texts', before_batch=padded),
    cancelled = partial(run, net, opt=Adam, both=[Cancels()]),
    logged = partial(run, net, cbs=[StepLogger()]))

def outcomes(n): return {k: f() for k,f in cases.items() if k in run_over(n, cases, three)}

# --- a mean takes no second pass
class Counts(Callback):
    "Steps without a second pass, and calls of the model"
    def before_fit(self): self.calls,self.hook = 0,self.learn.model.register_forward_hook(self.count)
    def count(self, module, *_): self.calls += module.training
    def after_fit(self):
        self.hook.remove()
        self.found = self.learn.gradient_accumulation.facts.forecasts.n_right,self.calls
def counted(loss):
    cb = Counts()
    run(net, loss, cbs=[cb])
    return cb.found
passes = dict(focal=focal, by_class=by_class, root=root, temperature=Temperature(), compares=compares)
of_a_fit,looks = 2*(3+3+2),3      # 16, 16 and 8 items: micro-batches of each rank, in two epochs; the first one shows what the model draws

# --- resumed
class Stop(Callback):
    order = 1001
    def __init__(self, at): self.at = at
    def batch_ended(self):
        if self.learn.training and self.learn.train_iter == self.at: raise OSError('the power is out')

def saved(fname, *cbs):
    "A run of two epochs of 3 loader batches, or what is left of it. With `Stop(4)` it ends after 4 of them"
    CheckpointFolder.in_use.clear()
    cbs = [TrainingCheckpoint(fname, 1), *cbs]
    try: return run(conv, kind='images', after_batch=[Jitter()], after_item=[Jitter()], plain=False, cbs=cbs)
    except OSError: return None

# --- what does not work is told
class Tosses(Callback):
    def before_batch(self):
        if self.learn.training and self.learn.data_parallel.rank == 1: torch.rand(1)

class TossInValidation(nn.Module):
    def __init__(self): super().__init__(); self.net = net()
    def forward(self, x): return F.dropout(self.net(x), .5, True)

def told(model=net, **kwargs):
    try: run(model, **kwargs)
    except (ValueError,RuntimeError) as e: return str(e)
wrong = dict(
    toss = (dict(cbs=[Tosses()]), 'the ranks have drawn different random numbers by epoch 0, batch 0'),
    in_validation = (dict(model=TossInValidation), 'in a validation, the model, a metric or a callback draws'),
    mixup = (dict(cbs=[MixUp()]), 'MixUp and CutMix mix the items of each rank'),
    sharded = (dict(dp=FullyShard), 'these ranks draw random numbers of their own'),
    local = (dict(dp=LocalSGD), 'these ranks draw random numbers of their own'))

def in_double(self, learn):
    "fastai's stops at losses in float64"
    self.count += 1
    self.val = torch.lerp(to_detach(learn.loss.mean()).double(), self.val.double(), self.beta)

def all_of(n):
    AvgSmoothLoss.accumulate = in_double
    res = dict(cases=outcomes(n))
    if n == 3: res['again'] = saved('fewer')
    if n != 2: return res
    cancelled = run(net, cbs=[Cancels([1])])
    res['whole'],res['cut'],res['again'] = saved('whole'),saved('cut', Stop(4)),saved('cut')
    res['passes'] = {k: counted(loss) for k,loss in passes.items()}
    return {**res, 'cancelled': cancelled, 'told': {k: told(**kwargs) for k,(kwargs,_) in wrong.items()}}

def cut(): saved('fewer', Stop(4))

def both(n):
    if n == 1: return [all_of(1)]
    if n == 3: launch(cut, 2)
    return launch(all_of, n, n)

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    waits = {n: started(both, n, tmp_path_factory.mktemp(f'ranks{n}'), __file__) for n in (1, 2, 3)}
    return {n: wait() for n,wait in waits.items()}

def close(a, b, tol): return bool(torch.allclose(tensor(a).double(), tensor(b).double(), rtol=tol, atol=tol))

@pytest.mark.parametrize('name,n', over_ranks([*cases], three))
def test_the_run_is_that_of_one_process(results, name, n):
    one,tol = results[1][0]['cases'][name],1e-4 if name in ('augmented', 'in_validation') else 1e-9
    for rank in results[n]:
        values,losses,w,*numbers = rank['cases'][name]
        assert numbers == [*one[3:]]
        assert close(w, one[2], tol) and close(losses, one[1], 1e-5)       # fastai smooths them in float32
    for a,b in zip(results[n][0]['cases'][name][0], one[0]): assert close(a, b, 1e-5)

@pytest.mark.parametrize('name', passes)
def test_a_mean_takes_no_second_pass(results, name):
    "Nor does a function of one"
    for rank in results[2]:
        n_right,calls = rank['passes'][name]
        if name == 'compares': assert n_right == 0 and calls >= 2*of_a_fit
        else: assert n_right == 6 and calls <= of_a_fit + looks

def test_the_transforms_count(results):
    losses = [results[1][0]['cases'][k][1] for k in ('no_transforms', 'item_transforms', 'workers', 'batch_transforms', 'augmented')]
    assert not any(close(a, b, 1e-3) for i,a in enumerate(losses) for b in losses[:i])

def test_it_resumes(results):
    for rank in results[2]:
        assert rank['cut'] is None
        assert torch.equal(rank['whole'][2], rank['again'][2]) and rank['whole'][3:] == rank['again'][3:]

def test_it_resumes_over_more_ranks(results):
    whole = results[2][0]['whole']
    for rank in results[3]: assert close(rank['again'][2], whole[2], 1e-9) and rank['again'][3:] == whole[3:]

def test_a_batch_that_a_rank_cancels(results):
    a,b = [rank['cancelled'] for rank in results[2]]
    assert a[3:] == b[3:] and torch.equal(a[2], b[2])

@pytest.mark.parametrize('name', wrong)
def test_what_does_not_work_is_told(results, name):
    for rank in results[2]: assert wrong[name][1] in rank['told'][name]

if __name__ == '__main__':
    if sys.argv[1] == 'both': torch.save(both(int(sys.argv[2])), sys.argv[3])
