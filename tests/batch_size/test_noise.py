"The gradient noise scale: against the gradients of the micro-batches one by one, in float64; what must not change it; what comes after it"
import math, pytest
from reference import *
from bench.measure import SyncCounter
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.core.microbatch import *
from fastaccum.batch_size.noise import AdaptiveGradientAccumulation, GradientNoiseScale, fieller, noise_and_signal
from fastaccum.precision.callback import MixedPrecision
from fastaccum.logs.steps import StepLogger
import fastaccum.accumulation.callback

torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.randn(61, 4))
classes = Data(torch.randn(61, 6), torch.randint(4, (61,)))
padded = torch.randint(4, (61, 5))
for i in range(61): padded[i, 1+i%5:] = -100
padded[3:6] = -100                                   # items without a target
tokens = Data(torch.randn(61, 5, 6), padded)
class Tokens(Module):
    def __init__(self): self.lin = nn.Linear(6, 4)
    def forward(self, x): return self.lin(x).transpose(1, 2)

def true_weight(kind, y):
    if kind == 'elements': return y.numel()
    if kind == 'classes': return class_weight[y].sum().item()
    return (y != -100).sum().item()
class_weight = tensor([.1, 1., 3., .5])

def estimates(w, gs, n_items):
    "T in items and y, from weights and gradients of the micro-batches of a step"
    W,s = sum(w),sum(wi*wi for wi in w)
    if len(w) < 2: return math.nan,math.nan
    G = sum(wi*g for wi,g in zip(w, gs))/W
    t = sum((wi*g)@(wi*g) - wi*wi*G@G for wi,g in zip(w, gs))/(W - s/W)
    return float(t*n_items/W),float(G@G - t/W)

def truth(learn, kind):
    "T and y of each step, from the gradients of its micro-batches one by one"
    res = []
    for s in learn.spy.steps:
        w = [true_weight(kind, y) for y, in s.ys]
        gs = [big_batch(learn.model, s.weights, learn.loss_func, x, [y])[0] for (x,),(y,),wi in zip(s.xs, s.ys, w) if wi]
        w = [wi for wi in w if wi]
        res.append(estimates(w, gs, s.n_items))
    return res

def measured(learn):
    rows = learn.gradient_noise_scale.rows
    return list(zip(rows['x'], rows['y']))
def same(a, b, tol=1e-4): np.testing.assert_allclose(np.array(a), np.array(b), rtol=tol, atol=1e-7)

cases = dict(elements=(data, MSELossFlat(), mlp()), classes=(classes, CrossEntropyLossFlat(weight=class_weight), mlp()),
             tokens=(tokens, nn.CrossEntropyLoss(), Tokens()))
def make(kind, *cbs, n=8, **kwargs):
    d,loss,model = cases[kind]
    return learner(d, n, *cbs, Spy(), loss_func=loss, model=model, **kwargs)

@pytest.mark.parametrize('kind', cases)
@pytest.mark.parametrize('kw', [dict(accum_bs=32), dict(accum_bs=30, micro_batch_size=3), dict(micro_batch_size=3),
                                dict(accum_bs=20, remainder='carry'), dict(accum_bs=20, remainder='drop')],
                         ids=lambda kw: ' '.join(f'{k}={v}' for k,v in kw.items()))
def test_exact(kind, kw):
    "Uneven micro-batches, padded tokens, class weights, micro-batches without weight"
    learn = make(kind, GradientAccumulation(**kw), GradientNoiseScale())
    if kw.get('remainder')=='drop': learn.add_cb(On('after_train', lambda l: l.spy.pending.clear()))
    learn.fit(2, 1e-2)
    want = truth(learn, kind)
    assert len(measured(learn))==len(want)
    for got,w in zip(measured(learn), want):
        if math.isfinite(w[0]): same(got, w)
        else: assert not math.isfinite(got[0])
    n = sum(math.isfinite(w[0]) for w in want)
    assert learn.gradient_noise_scale.estimate().n_steps==n > 1

@pytest.mark.parametrize('bs,k', [(2, 64), (8, 32)])
def test_class_weights(bs, k, n_runs=200, n_steps=60, dim=20):
    """Which classes are in a micro-batch decides its weight: the interval holds as often as with equal weights. Classes
    differ in their mean, too"""
    g = torch.Generator().manual_seed(0)
    p,mu = torch.tensor([.6, .2, .12, .08]).double(),torch.randn(4, dim, generator=g).double()
    w = 1/p/len(p)
    mu += torch.eye(dim)[0]/2 - (p*w)@mu                       # their weighted mean is the true gradient
    trace,true = float((p*w**2)@((mu-mu.mean(0)).square().sum(1) + dim)),.25
    m,xs = torch.zeros(n_runs, 5).double(),0.
    for _ in range(n_steps):
        of = torch.multinomial(p, n_runs*k*bs, True, generator=g).view(n_runs, k, bs)
        W,v = w[of].sum(2),(w[of][...,None]*mu[of]).sum(2)
        v += w[of].square().sum(2, keepdim=True).sqrt()*torch.randn(n_runs, k, dim, generator=g).double()
        mean = v.sum(1)/W.sum(1)[:,None]
        x,y = noise_and_signal(v.square().sum((1, 2)), W.square().sum(1), W.sum(1), mean.square().sum(1), k*bs)
        m,xs = torch.lerp(torch.stack([x, y, x*x, y*y, x*y], 1), m, .95),xs + x.mean()/n_steps
    b,low,high,*_ = fieller(m, torch.full((n_runs,), n_steps).double(), .95).unbind(-1)
    assert float(xs)==pytest.approx(trace, rel=.05) and float(b.median())==pytest.approx(trace/true, rel=.1)
    assert .84 < ((low <= trace/true) & (trace/true <= high)).double().mean() < .96

def test_clipping_does_not_matter():
    learn = make('elements', GradientAccumulation(32), GradientNoiseScale(), GradientClip(1e-3))
    learn.fit(1, 0.)
    plain = make('elements', GradientAccumulation(32), GradientNoiseScale()); plain.fit(1, 0.)
    assert measured(learn)==measured(plain)

@pytest.mark.fp16
def test_loss_scale_does_not_matter():
    "Any scale gives the same; steps that overflow do not count"
    runs = []
    for scale in (1., 2.**10, 2.**14):
        learn = make('elements', GradientAccumulation(32), GradientNoiseScale(), MixedPrecision('fp16', init_scale=scale))
        learn.fit(2, 0.); runs.append(measured(learn))
    same(runs[0], runs[1], 1e-2); same(runs[2], runs[1], 1e-2); same(runs[1], truth(learn, 'elements'), 5e-2)
    class Overflow(Callback):
        order = 7
        def before_backward(self):
            if self.learn.iter==2: self.learn.loss_grad = self.learn.loss_grad*float('inf')
    learn = make('elements', GradientAccumulation(32), GradientNoiseScale(), MixedPrecision('fp16', init_scale=2.**8),
                 Overflow(), StepLogger())
    learn.fit(3, 0.)
    assert (learn.gradient_noise_scale.estimate().n_steps==3==(~learn.step_logger.to_df().skipped).sum()
            and math.isfinite(learn.gradient_noise_scale.estimate().trace))

class OutOfMemory(Callback):
    "Memory for 4 items: runs out in the forward pass, or amid backward, after another micro-batch went through"
    order = 50
    def __init__(self, amid): self.amid,self.n = amid,0
    def after_pred(self):
        if len(self.learn.pred) <= 4 or self.learn.iter < 2: return
        self.n += 1
        if self.n%2 and self.amid: return                   # the first micro-batch fits
        if not self.amid: raise torch.OutOfMemoryError('CUDA out of memory')
        h = self.learn.model[0].weight.register_hook(self._fail)
        self.handles = getattr(self, 'handles', []) + [h]
    def _fail(self, g):
        for h in self.handles: h.remove()
        self.handles = []
        raise torch.OutOfMemoryError('CUDA out of memory')

@pytest.mark.parametrize('amid', [False, True])
def test_restarts_do_not_matter(amid):
    "'auto' begins a loader batch again in smaller parts: what the first attempt measured is forgotten"
    acc = GradientAccumulation(32, micro_batch_size='auto')
    learn = make('elements', acc, GradientNoiseScale(), OutOfMemory(amid), n=16)
    if amid: acc.fitting.sizes[((torch.Size([6]), torch.float32),)] = 8    # as found before
    learn.fit(1, 1e-2)
    assert learn.out_of_memory.n > 1
    # the attempts that failed are in the Spy's list, so the truth comes from the sizes that went through in the end
    final = make('elements', GradientAccumulation(32), GradientNoiseScale(), n=16); final.fit(1, 1e-2)
    assert rel_err(weights(learn.model), weights(final.model)) < 1e-5
    for (x,y),s,whole in zip(measured(learn), final.spy.steps, measured(final)):
        parts = []
        for i,((xb,),(yb,)) in enumerate(zip(s.xs, s.ys)):
            parts += list(
                zip(*(o.tensor_split(-(-len(o)//(4 if s.batches[i][1] >= 2 else 8 if amid else 16)))
                      for o in (xb, yb))))
        gs,w = [big_batch(final.model, s.weights, final.loss_func, a, [b])[0] for a,b in parts],[b.numel() for _,b in parts]
        same([x], [estimates(w, gs, s.n_items)[0]])

def test_cancelled():
    "A micro-batch that was cancelled is no part of it; a step that was cancelled goes on"
    cancel = On('before_backward', throw(CancelBackwardException()), calls=[2])
    learn = make('elements', GradientAccumulation(32), GradientNoiseScale(), cancel)
    learn.fit(1, 1e-2)
    got = measured(learn)
    learn.spy.steps[0].xs = [x for i,x in enumerate(learn.spy.steps[0].xs) if i!=2]
    assert len(got)==2
    same(got[1:], truth(learn, 'elements')[1:])
    learn = make('elements', GradientAccumulation(16), GradientNoiseScale(), Stop('before_step', CancelStepException, [(0,1)]))
    learn.fit(1, 1e-2)
    assert all(math.isfinite(x) for x,_ in measured(learn)) and learn.gradient_noise_scale.estimate().n_steps >= 3

def test_no_hooks_are_left():
    def hooks(learn): return sum(len(p._backward_hooks or ()) for p in learn.model.parameters())
    for at in ('after_backward', 'before_step', 'after_step', 'after_batch'):
        learn = make('elements', GradientAccumulation(32), GradientNoiseScale(), On(at, throw(KeyboardInterrupt()), calls=[1]))
        with pytest.raises(KeyboardInterrupt): learn.fit(1)
        assert not hooks(learn), at
    learn = make('elements', GradientAccumulation(32))
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=[GradientNoiseScale(), On('after_backward', throw(KeyboardInterrupt()))])
    assert not hooks(learn)
    learn.fit(1, 1e-2, cbs=GradientNoiseScale())
    assert not hooks(learn)

def test_training_is_the_same():
    "It only looks"
    runs = [make('tokens', GradientAccumulation(20), *cbs) for cbs in ((), [GradientNoiseScale()], [GradientNoiseScale(every=2)])]
    for l in runs: l.fit_one_cycle(2, 1e-2)
    for l in runs[1:]: assert weights(l.model).equal(weights(runs[0].model)) and l.recorder.losses==runs[0].recorder.losses

def test_every():
    runs = [make('elements', GradientAccumulation(16), GradientNoiseScale(every=k)) for k in (1, 3)]
    for l in runs: l.fit(3, 1e-2)
    assert measured(runs[1])==measured(runs[0])[::3]

def test_validate_lr_find_and_fits():
    "`validate` amid a fit changes nothing; lr_find measures nothing; each fit averages anew"
    learn = make('elements', GradientAccumulation(16), GradientNoiseScale())
    with learn.no_bar(): learn.lr_find(show_plot=False, num_it=8)
    assert not len(learn.gradient_noise_scale.rows) and learn.gradient_noise_scale.estimate()[1:3]==(0, math.inf)
    learn.fit(2, 1e-2)
    n = learn.gradient_noise_scale.estimate().n_steps
    learn.validate(); learn.get_preds()
    assert learn.gradient_noise_scale.estimate().n_steps==n==8
    learn.fit(1, 1e-2)
    assert learn.gradient_noise_scale.estimate().n_steps==4 and len(learn.gradient_noise_scale.rows)==12

def test_frozen_and_sparse():
    "Only what trains counts"
    class Sparse(Module):
        def __init__(self): self.emb,self.lin,self.frozen = nn.Embedding(9, 6, sparse=True),nn.Linear(6, 4),nn.Linear(4, 4)
        def forward(self, x): return self.frozen(self.lin(self.emb(x).mean(1)))
    ids = Data(torch.randint(9, (61, 3)), torch.randn(61, 4))
    model = Sparse()
    model.frozen.requires_grad_(False)
    learn = learner(ids, 8, GradientAccumulation(32), GradientNoiseScale(), Spy(), model=model,
                    opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    learn.fit(1, 1e-2)
    dense = deepcopy(model); dense.emb.sparse = False
    same_run = learner(ids, 8, GradientAccumulation(32), GradientNoiseScale(), model=dense,
                       opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    same_run.fit(1, 1e-2)
    same(measured(learn), measured(same_run))

def test_columns():
    learn = make('elements', GradientAccumulation(16), GradientNoiseScale(), StepLogger())
    learn.fit(2, 1e-2)
    df,est = learn.step_logger.to_df(),learn.gradient_noise_scale.estimate()
    assert df[['noise_scale', 'noise_low', 'noise_high']].iloc[-1].tolist()==pytest.approx(est[:3])
    assert ((df.noise_low <= df.noise_scale).all() and (df.noise_scale <= df.noise_high).all()
            and (df.noise_low[0], df.noise_high[0])==(0, math.inf))
    learn.gradient_noise_scale.plot()

def test_no_syncs():
    "The host waits for no more than without, until somebody asks"
    def count(*cbs):
        learn = make('tokens', GradientAccumulation(16), *cbs)
        learn.remove_cb(Spy)
        learn.fit(1)                                         # what happens once
        with SyncCounter() as syncs: learn.fit(2)
        return syncs.n
    assert count(GradientNoiseScale(), StepLogger())==count(StepLogger())

def fresh(*cbs): return make('elements', *cbs, TrainingCheckpoint(every_steps=1))
@pytest.mark.parametrize('cbs', [lambda: [GradientAccumulation(16), GradientNoiseScale()],
                                 lambda: [AdaptiveGradientAccumulation(16, 48)]], ids=['measured', 'adaptive'])
def test_resume(cbs, monkeypatch):
    "As if nothing had happened: averages, sizes, weights"
    # so that sizes change early
    monkeypatch.setattr('fastaccum.batch_size.noise.fieller', lambda m, n, beta, z=.5: fieller(m, n, beta, z))
    whole = make('elements', *cbs()); whole.fit(3, 1e-2)
    learn = fresh(*cbs(), On('before_batch', throw(KeyboardInterrupt()), calls=[10]))
    with pytest.raises(KeyboardInterrupt): learn.fit(3, 1e-2)
    CheckpointFolder.in_use.clear()
    again = fresh(*cbs())
    again.fit(3, 1e-2)
    assert weights(again.model).equal(weights(whole.model)) and measured(again)==measured(whole)
    assert again.gradient_noise_scale.estimate()==whole.gradient_noise_scale.estimate()
    if hasattr(whole.gradient_accumulation, 'changes'): assert again.gradient_accumulation.changes==whole.gradient_accumulation.changes!=[]

# --- What it says of itself
def test_tokens_are_counted_in_items():
    "An item with all its elements the same is one item, not four"
    col = torch.randn(64, 1)
    runs = []
    for width in (1, 4):
        d = Data(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), col.repeat(1, width))
        model = nn.Linear(6, width, bias=False); model.weight.data.zero_()
        learn = learner(d, 8, GradientAccumulation(32), GradientNoiseScale(), model=model)
        learn.fit(2, 0.); runs.append(learn.gradient_noise_scale.estimate().b_simple)
    assert runs[0]==pytest.approx(runs[1], rel=1e-4)

errors = [([GradientNoiseScale()], 'add GradientAccumulation'), ([GradientAccumulation(8), GradientNoiseScale()], 'micro_batch_size=4'),
          ([GradientAccumulation(micro_batch_size=8), GradientNoiseScale()], 'micro_batch_size=4'),
          ([GradientAccumulation(32, normalize=False), GradientNoiseScale()], 'normalize=False'),
          ([AdaptiveGradientAccumulation(8, 64)], 'micro_batch_size=4'),
          ([GradientAccumulation(32), GradientNoiseScale(), GradientNoiseScale()],
           '2 GradientNoiseScale callbacks are attached')]
@pytest.mark.parametrize('cbs,msg', errors)
def test_errors_before_training(cbs, msg):
    learn = learner(data, 8, *cbs)
    before = weights(learn.model)
    with pytest.raises(ValueError, match=msg): learn.fit(1)
    assert weights(learn.model).equal(before)

def test_arguments():
    for kw in (dict(beta=1.), dict(beta=-.1), dict(beta='x'), dict(every=0), dict(every=1.5)):
        with pytest.raises(ValueError, match=f'{first(kw)}='): GradientNoiseScale(**kw)
    with pytest.raises(ValueError, match='swap'): AdaptiveGradientAccumulation(64, 32)
    with pytest.raises(TypeError, match='accum_bs'): AdaptiveGradientAccumulation(8, 64.)
    with pytest.raises(ValueError, match='train first'): GradientNoiseScale().plot()
    with pytest.raises(ValueError, match="mean='sum'|reduction='mean'"):
        learner(data, 8, GradientAccumulation(32), GradientNoiseScale(), loss_func=nn.MSELoss(reduction='sum')).fit(1)

# --- Adaptive
def test_adaptive():
    "Sizes are what `changes` says, from the steps before; a new fit begins anew; nothing is left behind"
    learn = make('classes', AdaptiveGradientAccumulation(16, 48, beta=.5, log_accum_batch=False), StepLogger())
    learn.fit(8, 1e-3)
    changes,sizes = learn.gradient_accumulation.changes,learn.step_logger.to_df().accum_bs.tolist()
    assert sizes[0]==16 and sizes==sorted(sizes) and max(sizes) <= 48
    for a,b in zip(changes, changes[1:]): assert a.after==b.before
    assert all(c.before < c.after <= 2*c.before and c.low > c.before for c in changes)
    learn.fit(1, 1e-3)
    df = learn.step_logger.to_df()
    assert df.accum_bs[df.fit==2].iloc[0]==16
    learn.remove_cb(learn.gradient_accumulation)
    assert not hasattr(learn, 'gradient_noise_scale')
    with pytest.raises(ValueError, match='no plan'): AdaptiveGradientAccumulation(16, 48).plan(2)

def test_adaptive_for_one_fit():
    learn = make('classes')
    learn.fit(1, 1e-3, cbs=AdaptiveGradientAccumulation(16, 48))
    assert not hasattr(learn, 'gradient_noise_scale') and not hasattr(learn, 'gradient_accumulation')
    learn.fit(1, 1e-3)
