"With exact=True a run is that of whole loader batches in plain fastai, whatever the model draws, normalizes or compares"
import random, tempfile, weakref, pytest
from contextlib import suppress
from reference import *
from fastai.callback.mixup import CutMix, MixUp
from fastai.text.models.awdlstm import AWD_LSTM
from fastaccum.all import ActivationCheckpointing, ChunkedHead, Compile, GradientNoiseScale, MixedPrecision, TrainingCheckpoint

N,BS = 50,20          # the last loader batch has 10 items
sizes = [1, 7, 16, BS]

def ce(*more): return nn.CrossEntropyLoss(*more)
def focal(p, y): return ((1-F.softmax(p, 1).gather(1, y[:,None])).squeeze(1)**2*F.cross_entropy(p, y, reduction='none')).mean()
def ntxent(out, y):
    a,b = (F.normalize(t, dim=1) for t in (out if isinstance(out, tuple) else out.chunk(2)))
    return F.cross_entropy(a@b.T/.2, torch.arange(len(a), device=a.device))
class Noisy(nn.Module):
    "A loss that draws"
    def forward(self, p, y): return F.cross_entropy(p + .3*torch.randn_like(p), y)

def net(*layers): return nn.Sequential(nn.Linear(12, 24), *layers, nn.Linear(24, 4))
class Calls(nn.Module):
    "`f(hidden, self)` between two layers, in training, twice"
    def __init__(self, f): super().__init__(); self.a,self.b,self.c,self.f = nn.Linear(12, 24),nn.Linear(24, 24),nn.Linear(24, 4),f
    def forward(self, x):
        h = self.a(x)
        if self.training: h = self.f(h)
        h = F.dropout(self.b(h).relu(), .2, self.training)
        return self.c(self.f(h) if self.training else h)
def drop_path(h): return h*(torch.rand(len(h), *[1]*(h.dim()-1), dtype=h.dtype, device=h.device) < .7)/.7
class Images(nn.Module):
    def __init__(self, *between, last=()):
        super().__init__()
        self.a,self.b,self.between,self.last = nn.Conv2d(3, 8, 3),nn.Conv2d(8, 8, 3),nn.ModuleList(between),nn.ModuleList(last)
        self.head = nn.Linear(128, 4)
    def forward(self, x):
        x = self.a(x)
        for m in self.between: x = m(x).relu()
        x = self.b(x)
        for m in self.last: x = m(x)
        return self.head(x.flatten(1))
class Rows(nn.Module):
    "Dropout for rows of an item one after the other (`outer`: all first rows before all second ones)"
    def __init__(self, outer):
        super().__init__()
        self.a,self.d,self.h,self.outer = nn.Linear(12, 12),nn.Dropout(.3),nn.Linear(12, 4),outer
    def forward(self, x):
        n,t,c = x.shape
        h = self.a((x.transpose(0, 1) if self.outer else x).reshape(t*n, c)).relu()
        h = self.d(self.d(h))
        return self.h(h.view(t, n, c).mean(0) if self.outer else h.view(n, t, c).mean(1))
class Frames(nn.Module):
    "Channels of frames are dropped, those of an item one after the other (`outer`: all first frames before all second ones)"
    def __init__(self, outer):
        super().__init__()
        self.a,self.b,self.d,self.h,self.outer = nn.Conv2d(3, 4, 3),nn.Conv2d(4, 4, 3),nn.Dropout2d(.3),nn.Linear(64, 4),outer
    def forward(self, x):
        n,t = x.shape[:2]
        h = (x.transpose(0, 1) if self.outer else x).flatten(0, 1)
        h = self.d(self.b(self.d(self.a(h)).relu())).flatten(1)
        return self.h(h.view(t, n, -1).mean(0) if self.outer else h.view(n, t, -1).mean(1))
class Trf(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__(); self.e,self.h = nn.TransformerEncoderLayer(12, 3, 20, .1, batch_first=batch_first),nn.Linear(12, 4)
        self.first = batch_first
    def forward(self, x): return self.h(self.e(x).mean(1) if self.first else self.e(x.transpose(0, 1)).mean(0))
class Attend(nn.Module):
    def __init__(self): super().__init__(); self.a,self.h = nn.Linear(12, 36),nn.Linear(12, 4)
    def forward(self, x):
        for _ in range(2):
            q,k,v = self.a(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=.2*self.training).transpose(1, 2).flatten(2)
        return self.h(x.mean(1))
class Weights(nn.Module):
    "`nn.MultiheadAttention` that returns its weights: heads are in the rows of items"
    def __init__(self):
        super().__init__()
        self.m,self.h = nn.MultiheadAttention(12, 3, dropout=.3, batch_first=True),nn.Linear(12, 4)
    def forward(self, x): return self.h(self.m(x, x, x)[0].mean(1))
class Rnn(nn.Module):
    def __init__(self, cls):
        super().__init__()
        self.l,self.d,self.h = cls(12, 10, 3, dropout=.4, batch_first=True),nn.Dropout(.2),nn.Linear(10, 4)
    def forward(self, x): return self.h(self.d(self.l(x)[0][:,-1]))
class Awd(nn.Module):
    def __init__(self):
        super().__init__()
        self.m,self.h = AWD_LSTM(20, 10, 12, 2, hidden_p=.2, input_p=.3, embed_p=.2, weight_p=.3),nn.Linear(10, 4)
    def forward(self, x):
        self.m.reset()
        return self.h(self.m(x)[:,-1])
class Views(nn.Module):
    def __init__(self, cat):
        super().__init__()
        self.m = nn.Sequential(nn.Linear(12, 24), nn.Dropout(.3), nn.ReLU(), nn.Dropout(.2), nn.Linear(24, 8))
        self.cat = cat
    def forward(self, x): return self.m(torch.cat([x, x+.1])) if self.cat else (self.m(x), self.m(x+.1))
class PyRandom(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b,self.d = nn.Linear(12, 12),nn.Linear(12, 4),nn.Dropout(.3)
    def forward(self, x): return self.b(self.d(self.d(self.a(x))*(1+random.random()+(np.random.rand() if self.training else 0))))
class PyOnly(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(12, 12),nn.Linear(12, 4)
    def forward(self, x): return self.b(self.a(x)*(1+random.random()))
class Frozen(nn.Module):
    "A part stays in evaluation mode"
    def __init__(self): super().__init__(); self.a,self.b,self.c = nn.Linear(12, 12),nn.Dropout(.5),net(nn.Dropout(.3), nn.Dropout(.2))
    def forward(self, x):
        self.b.eval()
        return self.c(self.b(self.a(x)))

vec,img,seq = (12,),(3,8,8),(5,12)
cases = {  # model, shape of an item, loss
    'dropout': (lambda: net(nn.Dropout(.5), nn.ReLU(), nn.Linear(24, 24), nn.Dropout(.2, inplace=True)), vec, ce()),
    'no draws': (lambda: net(nn.ReLU()), vec, ce()),
    'all dropped': (lambda: net(nn.Dropout(1.), nn.Linear(24, 24), nn.Dropout(.2)), vec, ce()),
    'own loss': (lambda: net(nn.Dropout(.5), nn.ReLU(), nn.Dropout(.2)), vec, focal),
    'a loss that draws': (lambda: net(nn.Dropout(.5), nn.Dropout(.2)), vec, Noisy()),
    'class weights': (lambda: net(nn.Dropout(.5), nn.Dropout(.2)), vec, ce(tensor([.1, 3., 1., .4]))),
    'alpha': (lambda: net(nn.AlphaDropout(.2), nn.SELU(), nn.AlphaDropout(.1)), vec, ce()),
    'feature alpha': (lambda: Images(nn.FeatureAlphaDropout(.2), nn.FeatureAlphaDropout(.1)), img, ce()),
    'dropout1d': (lambda: nn.Sequential(nn.Conv1d(5, 6, 3), nn.Dropout1d(.3), nn.Dropout1d(.2), nn.Flatten(), nn.Linear(60, 4)), seq, ce()),
    'dropout2d': (lambda: Images(nn.Dropout2d(.3, inplace=True), nn.Dropout2d(.2)), img, ce()),
    'dropout3d': (lambda: nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Dropout3d(.3), nn.Conv3d(3, 4, (1, 3, 3)), nn.Dropout3d(.2),
                                        nn.Flatten(), nn.Linear(144, 4)), img, ce()),
    'rand': (lambda: Calls(drop_path), vec, ce()),
    'randn': (lambda: Calls(lambda h: h + .1*torch.randn(h.shape, dtype=h.dtype)), vec, ce()),
    'randn_like': (lambda: Calls(lambda h: h + .1*torch.randn_like(h)), vec, ce()),
    'rand_like': (lambda: Calls(lambda h: h*torch.rand_like(h)), vec, ce()),
    'randint': (lambda: Calls(lambda h: h*torch.randint(3, (len(h), 1))), vec, ce()),
    'randint_like': (lambda: Calls(lambda h: h*torch.randint_like(h, 1, 3)), vec, ce()),
    'bernoulli_': (lambda: Calls(lambda h: h*torch.empty_like(h).bernoulli_(.7)), vec, ce()),
    'uniform_': (lambda: Calls(lambda h: h*h.new_empty(len(h), 1).uniform_(.5, 1)), vec, ce()),
    'normal_': (lambda: Calls(lambda h: h+torch.zeros_like(h).normal_(0, .1)), vec, ce()),
    'normal': (lambda: Calls(lambda h: h+torch.normal(0., .1, h.shape, dtype=h.dtype)), vec, ce()),
    'transformer': (Trf, seq, ce()),
    'items second': (lambda: Trf(False), seq, ce()),
    'attention': (Attend, seq, ce()),
    'heads in rows': (Weights, seq, ce()),
    'lstm': (lambda: Rnn(nn.LSTM), seq, ce()),
    'gru': (lambda: Rnn(nn.GRU), seq, ce()),
    'awd-lstm': (Awd, None, ce()),
    'channels last': (lambda: Images(nn.Dropout(.3), nn.Dropout2d(.2)).to(memory_format=torch.channels_last), img, ce()),
    'no items': (lambda: Calls(lambda h: h*torch.rand(24, dtype=h.dtype)), vec, ce()),
    'rows of items': (lambda: Rows(False), seq, ce()),
    'time before items': (lambda: Rows(True), seq, ce()),
    'frames': (lambda: Frames(False), (2,3,8,8), ce()),
    'frames before items': (lambda: Frames(True), (2,3,8,8), ce()),
    'in evaluation mode': (Frozen, vec, ce()),
    'two views': (lambda: Views(False), vec, ntxent),
    'views in rows': (lambda: Views(True), vec, ntxent),
    'batchnorm': (lambda: Images(nn.BatchNorm2d(8), nn.Dropout2d(.3), last=[nn.BatchNorm2d(8), nn.Dropout(.2)]), img, ce()),
    'batchnorm, drop path': (lambda: net(nn.Dropout(.2), nn.BatchNorm1d(24), nn.ReLU(), Calls2(), nn.BatchNorm1d(24)), vec, ce()),
    'batchnorm alone': (lambda: net(nn.BatchNorm1d(24), nn.ReLU()), vec, ce()),
    'python and numpy': (PyRandom, vec, ce()),
    'python alone': (PyOnly, vec, ce())}
class Calls2(nn.Module):
    def forward(self, h): return drop_path(h) if self.training else h

class Watch(Callback):
    "The losses in full precision"
    order,run_valid = 70,False
    def before_fit(self): self.losses = []
    def after_batch(self): self.losses.append(float(self.learn.loss.detach()))

def run(name, k=None, *cbs, dtype=torch.float64, acc=None, fit=lambda l: l.fit(2, .05), path=None):
    make,shape,loss = cases[name] if isinstance(name, str) else name
    set_seed(1)
    x = torch.randint(20, (N, 6)) if shape is None else torch.randn(N, *shape, dtype=dtype)
    y = torch.randint(4, (N,))
    model = make().to(dtype)
    if isinstance(loss, nn.Module): loss = deepcopy(loss).to(dtype)
    mine = () if k is None else (GradientAccumulation(micro_batch_size=k, exact=True, **(acc or {})),)
    set_seed(2)
    data = [*zip(x, y)]
    dls = DataLoaders(DataLoader(data, bs=BS, shuffle=True), DataLoader(data[:40], bs=20), device='cpu')
    learn = Learner(dls, model, loss_func=loss, opt_func=partial(Adam, eps=1e-3), cbs=[*mine, *cbs, Watch()],
                    path=path or tempfile.mkdtemp())
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    learn.start = weights(model)
    set_seed(3)
    fit(learn)
    learn.random = torch.get_rng_state(),random.random(),np.random.rand()
    return learn

def same_run(learn, whole, tol=1e-9):
    far = (weights(whole.model)-whole.start).norm()
    assert far > 0
    assert (weights(learn.model)-weights(whole.model)).norm() <= tol*far
    for a,b in zip(learn.model.buffers(), whole.model.buffers()): torch.testing.assert_close(a, b, rtol=tol, atol=tol)
    for p,q in zip(learn.opt.all_params(), whole.opt.all_params()):
        for key,v in q[3].items():
            if isinstance(v, Tensor): torch.testing.assert_close(p[3][key], v, rtol=100*tol, atol=tol)
            else: assert p[3][key] == v
    np.testing.assert_allclose(learn.watch.losses, whole.watch.losses, rtol=tol, atol=tol)
    np.testing.assert_allclose(np.array(learn.recorder.values), np.array(whole.recorder.values), rtol=max(tol, 1e-6), atol=1e-6)
    assert len(learn.recorder.losses) == len(whole.recorder.losses)
    np.testing.assert_allclose(np.array(learn.recorder.losses), np.array(whole.recorder.losses), rtol=max(tol, 1e-5), atol=1e-6)
    assert torch.equal(learn.random[0], whole.random[0]) and learn.random[1:] == whole.random[1:]

@pytest.fixture(autouse=True)
def in_double(monkeypatch):
    "fastai's average of losses is one of float32"
    def accumulate(self, learn):
        self.count += 1
        self.val = torch.lerp(to_detach(learn.loss.mean()).double(), self.val.double(), self.beta)
    monkeypatch.setattr(AvgSmoothLoss, 'accumulate', accumulate)

@pytest.mark.filterwarnings('ignore:.*changes nothing here')
@pytest.mark.parametrize('name', cases)
def test_run(name):
    whole = run(name)
    for k in sizes: same_run(run(name, k), whole)

def test_without_the_word_it_is_another_run():
    "These tests can fail"
    whole,learn = run('dropout'),run('dropout')
    same_run(learn, whole, 1e-12)
    other = run('dropout', None, GradientAccumulation(micro_batch_size=7))
    assert moved_apart(other, whole) > .01

def moved_apart(learn, whole): return (weights(learn.model)-weights(whole.model)).norm()/(weights(whole.model)-whole.start).norm()

@pytest.mark.parametrize('name', ['dropout', 'transformer', 'lstm', 'batchnorm', 'own loss'])
def test_float32(name): same_run(run(name, 7, dtype=torch.float32), run(name, dtype=torch.float32), 1e-4)

# -- what it takes
@pytest.mark.parametrize('name,says', [('dropout', 'the losses of micro-batches are averaged'), ('own loss', 'one loss over all items'),
                                       ('batchnorm', 'wait for each other at each BatchNorm')])
def test_says_what_it_takes(name, says, capsys):
    learn = run(name, 7)
    assert capsys.readouterr().out.count(says) == 1
    assert says in learn.gradient_accumulation.loss_rule

calls = Counter()
class Counted(nn.Module):
    def __init__(self, *layers): super().__init__(); self.m = net(*layers)
    def forward(self, x):
        calls['n'] += 1
        return self.m(x)

def n_calls(learn_by, *layers):
    calls.clear()
    return learn_by((lambda: Counted(*layers), vec, ce())),calls['n']

@pytest.mark.parametrize('layers,more', [((nn.ReLU(),), 0), ((nn.Dropout(.3), nn.Dropout(.2)), 1)])
def test_looks_once_and_only_if_the_model_draws(layers, more):
    "The first micro-batch is called again; the calls with two or three items, which tell where items are, leave no trace"
    learn,n = n_calls(lambda case: run(case, 7), *layers)
    plain,n_plain = n_calls(lambda case: run(case, None, GradientAccumulation(micro_batch_size=7)), *layers)
    assert n - n_plain == more
    if not more: same_run(learn, plain, 1e-12)

class Lives(torch.autograd.Function):
    "`seen` gets something that lives as long as the graph"
    @staticmethod
    def forward(ctx, x, seen):
        ctx.it = Callback()
        seen.append(weakref.ref(ctx.it))
        return x.clone()
    @staticmethod
    def backward(ctx, g): return g,None

class Graphs(nn.Module):
    "How many graphs of earlier calls live when it is called?"
    def __init__(self, *layers):
        super().__init__()
        self.m,self.d,self.h = nn.Sequential(*layers),nn.Dropout(.3),nn.Linear(12, 4)
    def forward(self, x):
        Graphs.live.append(sum(r() is not None for r in Graphs.seen))
        return self.h(self.d(self.m(Lives.apply(x.requires_grad_(), Graphs.seen))))

@pytest.mark.parametrize('layers,n', [((nn.Linear(12, 12),), 1), ((nn.Linear(12, 12), nn.BatchNorm1d(12)), 3)], ids=['', 'batchnorm'])
def test_the_graph_of_the_first_look_goes_first(layers, n):
    "The first part, or all where they wait for each other, are called again: no more memory than without the look"
    Graphs.live,Graphs.seen = [],[]
    run((lambda: Graphs(*deepcopy(layers)), vec, ce()), 7)
    assert Graphs.live[:n] == [*range(n)] and Graphs.live[n] == 0, Graphs.live

# -- beside
class Probability(Callback):
    "Dropout that grows from 0, and pauses"
    def before_batch(self):
        for m in self.learn.model.modules():
            if isinstance(m, nn.Dropout): m.p = .1*self.iter; m.train(self.training and self.epoch+self.iter != 2)

def test_probabilities_that_change(): same_run(run('dropout', 7, Probability()), run('dropout', None, Probability()))

class TakesFew(nn.Module):
    most = 10**6
    def __init__(self, m): super().__init__(); self.m = m
    def forward(self, x):
        out = self.m(x)
        if self.training and len(x) > TakesFew.most: raise torch.OutOfMemoryError('CUDA out of memory. planted')
        return out

@pytest.mark.parametrize('name', ['dropout', 'transformer', 'own loss', 'batchnorm'])
def test_out_of_memory(name, monkeypatch, capsys):
    make,shape,loss = cases[name]
    case = lambda: TakesFew(make()),shape,loss
    whole = run(case)
    monkeypatch.setattr(TakesFew, 'most', 6)
    same_run(run(case, 'auto'), whole)
    assert 'going on with micro-batches of 5 items' in capsys.readouterr().out

class Blocks(nn.Module):
    "Two blocks, which PyTorch recomputes"
    def __init__(self, **how):
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.ms,self.h = nn.ModuleList(nn.TransformerEncoderLayer(12, 3, 20, .1, batch_first=True) for _ in range(2)),nn.Linear(12, 4)
        self.how = how
    def forward(self, x):
        x = self.a(x)
        for m in self.ms: x = torch.utils.checkpoint.checkpoint(m, x, **self.how) if self.how else m(x)
        return self.h(x.mean(1))

@pytest.mark.parametrize('loss', [ce(), focal], ids=['mean', 'own'])
@pytest.mark.parametrize('how', [{}, dict(use_reentrant=False), dict(use_reentrant=True)])
def test_recomputation(how, loss):
    whole = run((Blocks, seq, loss))
    same_run(run((partial(Blocks, **how), seq, loss), 7, *[] if how else [ActivationCheckpointing(nn.TransformerEncoderLayer)]), whole)

def test_recomputation_without_the_random_state_is_an_error():
    with pytest.raises(ValueError, match='number depends on the items'):
        run((partial(Blocks, use_reentrant=False, preserve_rng_state=False), seq, ce()), 7)

@pytest.mark.parametrize('mixer', [MixUp, CutMix])
def test_mixed(mixer):
    case = lambda: nn.Sequential(Images(nn.Dropout2d(.3), nn.Dropout(.2))),img,CrossEntropyLossFlat()
    same_run(run(case, 7, mixer(), dtype=torch.float32), run(case, None, mixer(), dtype=torch.float32), 1e-4)

@pytest.mark.parametrize('fit', [lambda l: l.fit_one_cycle(2, .05), lambda l: l.fit_flat_cos(2, .05), lambda l: l.fine_tune(1, .01),
                                 lambda l: l.lr_find(num_it=8, show_plot=False)], ids=['one cycle', 'flat cos', 'fine tune', 'lr_find'])
def test_fits(fit):
    if 'lr_find' in fit.__code__.co_names:
        a,b = run('dropout', 7, fit=fit),run('dropout', fit=fit)
        np.testing.assert_allclose(a.watch.losses, b.watch.losses, rtol=1e-9)
        assert torch.equal(a.random[0], b.random[0])
    else: same_run(run('dropout', 7, fit=fit), run('dropout', fit=fit))

class Undecided(nn.Module):
    "It draws in validation, too"
    def __init__(self): super().__init__(); self.m,self.h = nn.Linear(12, 12),nn.Linear(12, 4)
    def forward(self, x): return self.h(F.dropout(F.dropout(self.m(x), .3), .2))

def test_draws_in_validation(): same_run(run((Undecided, vec, ce()), 7), run((Undecided, vec, ce())))

def test_half_precision():
    fit = lambda l: l.to_bf16().fit(2, .05)
    whole,learn = run('dropout', fit=fit, dtype=torch.float32),run('dropout', 7, fit=fit, dtype=torch.float32)
    assert moved_apart(learn, whole) < .02
    assert torch.equal(learn.random[0], whole.random[0])

@pytest.mark.fp16
@pytest.mark.parametrize('name', ['dropout', 'own loss', 'batchnorm'])
def test_loss_scale(name):
    "An overflow comes at the same step, and skips it"
    def scaled(k):
        inf = On('before_backward', lambda l: setattr(l, 'loss_grad', l.loss_grad*float('inf')) if l.epoch == 1 and l.iter == 0 else None)
        return run(name, k, MixedPrecision('fp16', init_scale=2.**8), inf, dtype=torch.float32)
    whole,learn = scaled(None),scaled(7)
    history = [l.mixed_precision.scaler.history() for l in (whole, learn)]
    assert [*history[0]['skipped']] == [*history[1]['skipped']] == [False]*3 + [True] + [False]*2
    assert [*history[0]['scale']] == [*history[1]['scale']]
    assert moved_apart(learn, whole) < .02
    assert torch.equal(learn.random[0], whole.random[0])

@pytest.mark.parametrize('name', ['dropout', 'own loss', 'batchnorm', 'lstm'])
def test_validation_in_mid_epoch(name):
    "The fit goes on as if nothing had happened"
    def validate(l):
        dl = l.dl
        l.validate()
        l.dl,l.training = dl,True
        l.model.train()
    fit = lambda l: l.fit(2, .05, cbs=On('after_batch', validate, [1, 3], order=80))
    same_run(run(name, 7, fit=fit), run(name))

def test_resume(tmp_path):
    "In the middle of an epoch"
    def fit(l):
        with suppress(KeyboardInterrupt): l.fit(2, .05)
    def saved(name, *cbs): return run('dropout', 7, TrainingCheckpoint(every_steps=1), *cbs, fit=fit, path=tmp_path/name)
    whole = saved('a')
    stopped = saved('b', Stop('after_batch', KeyboardInterrupt, [(1, 1)]))
    assert not torch.equal(weights(stopped.model), weights(whole.model))
    learn = saved('b')
    assert torch.equal(weights(learn.model), weights(whole.model)) and torch.equal(learn.random[0], whole.random[0])

# -- told
class Given(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b,self.g = nn.Linear(12, 12),nn.Linear(12, 4),torch.Generator()
    def forward(self, x): return self.b(self.a(x) + torch.randn(len(x), 12, generator=self.g))
hidden = torch.Generator()
def some(h): return h if h.sum() > 0 else h*torch.rand(len(h), 1)

told = {
    'poisson': (lambda h: h*torch.poisson(h.detach().exp()), 'torch.poisson'),
    'multinomial': (lambda h: h*torch.multinomial(h.detach().softmax(1), 1), 'torch.multinomial'),
    'bernoulli of a tensor': (lambda h: h*torch.bernoulli(h.detach().sigmoid()), 'torch.bernoulli'),
    'rrelu': (lambda h: F.rrelu(h, training=True), 'torch.rrelu_with_noise'),
    'items in another order': (lambda h: h[torch.randperm(len(h))], 'torch.randperm'),
    'sorted items': (lambda h: F.dropout(h[h.detach().sum(1).argsort()], .3), 'not clear'),
    'as many as are positive': (lambda h: h + torch.rand(int((h > 0).sum())).mean(), 'depends on the items'),
    "Python's for each item": (lambda h: h*torch.tensor([random.random() for _ in h])[:,None], 'of Python or NumPy'),
    'rows of items': (lambda h: h*torch.rand(2*len(h), 1).view(-1, 2).mean(1, keepdim=True), 'not clear'),
    'a hidden generator': (lambda h: h*torch.rand(len(h), 1, generator=hidden)*torch.rand(1), 'generator of its own')}

@pytest.mark.parametrize('name', told)
def test_told(name):
    f,says = told[name]
    with pytest.raises(ValueError, match=says): run((lambda: Calls(lambda h, *_: f(h)), vec, ce()), 7, dtype=torch.float32)

@pytest.mark.parametrize('acc,cbs,says', [
    (dict(accum_bs=40), (), r'bs=256.*micro_batch_size=32, exact=True'), (dict(accum_bs=20, remainder='drop'), (), 'bs=256'),
    ({}, (GradientNoiseScale,), 'compares'), ({}, (ChunkedHead,), 'ChunkedHead'), ({}, (Compile,), 'compiled')])
def test_refused_before_training(acc, cbs, says):
    with pytest.raises(ValueError, match=says): run('dropout', 7, *[c() for c in cbs], acc=acc)

def test_a_generator_of_the_model_is_refused():
    with pytest.raises(ValueError, match='random generator of its own'): run((Given, vec, ce()), 7)

@pytest.mark.parametrize('kwargs,says', [
    (dict(exact=True), r'micro_batch_size=32, exact=True'), (dict(exact='yes', micro_batch_size=4), 'pass True'),
    (dict(exact=1, micro_batch_size=4), 'pass True'), (dict(exact=True, micro_batch_size=4, normalize=False), 'normalize=False'),
    (dict(exact=True, micro_batch_size=4, coupled=True), 'leave out coupled'),
    (dict(exact=True, micro_batch_tokens=64), 'micro_batch_size')])
def test_wrong_arguments(kwargs, says):
    with pytest.raises(ValueError, match=says): GradientAccumulation(**kwargs)
