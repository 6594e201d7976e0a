"how_exact names the causes for which a step is not the big batch's, and nothing else"
import gc, itertools, pytest, threading
from reference import *
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.rnn import ModelResetter
from fastaccum.all import ActivationCheckpointing, LargestFirst, how_exact
from fastaccum.batch_size.exactness import Causes

BS,N = 16,96          # a step takes three loader batches
loss,callbacks,compares,norm,draws,last = ('what the loss averages over', 'callbacks', 'what the loss compares', 'BatchNorm', 'draws',
                                           'last batch')

def ntxent(out, y):
    "It compares the halves of the outputs of all items"
    a,b = (F.normalize(t, dim=1) for t in out.chunk(2, 1))
    return F.cross_entropy(a@b.T/.2, torch.arange(len(a), device=a.device))

class MeanOfMeans(Callback):
    "An accumulation by hand: the mean of the means of `m` loader batches, or of as many as the epoch has left"
    order = -5
    def __init__(self, m=3): self.m = m
    def before_backward(self): self.learn.loss_grad = self.learn.loss_grad/min(self.m, self.n_iter - self.iter//self.m*self.m)
    def before_step(self):
        if (self.iter+1)%self.m and self.iter+1 < self.n_iter: raise CancelBatchException

class Center(Callback):
    "Items depend on the others in their loader batch"
    def before_batch(self): self.learn.xb = (self.xb[0]-self.xb[0].mean(0),)

class Term(Callback):
    "A mean over items is added to the loss: no cause"
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + .1*self.pred.pow(2).mean()

class Functional(nn.Module):
    def forward(self, x): return F.dropout(F.dropout(x, .3, self.training), .2)

weighted = nn.CrossEntropyLoss(weight=tensor([.1, 3., 1., .5]))
# What each cause is planted by
planted = {loss: dict(loss_func=weighted), callbacks: dict(cbs=[Center]), compares: dict(loss_func=ntxent),
           norm: dict(layers=[lambda: nn.BatchNorm1d(24)]), draws: dict(layers=[lambda: nn.Dropout(.3), lambda: nn.Dropout(.2)]),
           last: dict(n=70)}

def make(acc=MeanOfMeans, *causes, layers=(), cbs=(), n=N, loss_func=None, bs=BS):
    for cause in causes:
        plant = planted[cause]
        layers,cbs,n = [*layers, *plant.get('layers', ())],[*cbs, *plant.get('cbs', ())],plant.get('n', n)
        loss_func = plant.get('loss_func', loss_func)
    set_seed(1)
    data = [*zip(torch.randn(n, 12), torch.randint(4, (n,)))]
    model = nn.Sequential(nn.Linear(12, 24), *[make() for make in layers], nn.Tanh(), nn.Linear(24, 4))
    dls = DataLoaders(DataLoader(data, bs=bs, shuffle=True), DataLoader(data, bs=bs), device='cpu')
    learn = Learner(dls, model, loss_func=deepcopy(loss_func) or nn.CrossEntropyLoss(), cbs=[acc(), *[cb() for cb in cbs]])
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def causes(learn): return {*learn.how_exact().table.index}
def theirs(): return FastaiAccumulation(3*BS)
def ours(): return GradientAccumulation(3*BS)

# -- what it names
pairs = [(), *[(c,) for c in planted], *itertools.combinations(planted, 2)]

@pytest.mark.parametrize('names', [p for p in pairs if not {loss, compares} <= {*p}], ids=' and '.join)
def test_planted(names):
    "Alone and in pairs (a Learner has one loss)"
    assert causes(make(MeanOfMeans, *names)) == {*names}

@pytest.mark.parametrize('name', [callbacks, compares, norm, draws])
def test_planted_beside_ours(name):
    "fastaccum weights what is a mean, and the last batch"
    assert causes(make(ours, name, loss, last) if name != compares else make(ours, name, last)) == {name}

def test_all_at_once(): assert causes(make(MeanOfMeans, *[c for c in planted if c != compares])) == {*planted}-{compares}

@pytest.mark.parametrize('acc', [ours, theirs, MeanOfMeans, lambda: GradientAccumulation(micro_batch_size=5)])
def test_nothing_to_tell(acc):
    exact = make(acc).how_exact()
    assert exact.is_exact and exact.total < 5e-7
    assert f"Your step is that of the big batch to {max(exact.total, exact.rounding):.0e}." in str(exact)

def test_plain():
    "A step is a loader batch, and the big batch it is, whatever the model has"
    exact = make(noop_cb, norm, draws, callbacks, loss, last).how_exact()
    assert exact.is_exact and exact.total == 0 and exact.n_items == BS

def noop_cb(): return Callback()

@pytest.mark.parametrize('layer', [lambda: Bernoulli(), lambda: Sees(1.), lambda: Drawn()], ids=['bernoulli', 'sees', 'NumPy'])
def test_plain_whatever_the_model_does(layer):
    "Nothing is asked of it that only the big batch in parts needs"
    exact = make(noop_cb, layers=[layer]).how_exact()
    assert exact.is_exact and exact.total == 0

class Drawn(nn.Module):
    def forward(self, x): return x*torch.from_numpy(np.random.rand(*x.shape)).float()

def test_theirs_in_one_loader_batch():
    "8 items in a loader batch of 16: it divides by 8"
    exact = make(lambda: FastaiAccumulation(8)).how_exact()
    assert [*exact.table.index][:1] == [loss] and 'its gradient is 2 times as large' in str(exact) and abs(exact.total-1) < 1e-6

def test_largest_first():
    "It takes loader batches before the first step, which are none of it"
    assert causes(make(lambda: GradientAccumulation(micro_batch_size=5), cbs=[LargestFirst])) == set()

def test_what_is_no_cause():
    assert causes(make(ours, cbs=[Term, GradientClip])) == set()
    assert causes(make(lambda: FastaiAccumulation(40), cbs=[Term, GradientClip])) == {loss}

@pytest.mark.parametrize('n_acc,off', [(100, .28), (128, 0.)])
def test_fastais_own(n_acc, off):
    "100 items in loader batches of 32: it divides by 100, and the step has 128"
    exact = make(lambda: FastaiAccumulation(n_acc), n=256, bs=32).how_exact()
    assert exact.n_items == 128 and abs(exact.total-off) < 1e-6
    if not off: return
    assert [*exact.table.index] == [loss]
    assert 'its gradient is 1.28 times as large' in str(exact) and 'GradientAccumulation(128)' in str(exact)

def test_no_step_at_the_end_of_an_epoch():
    exact = make(theirs, n=70).how_exact()
    assert [*exact.table.index] == [last] and 'no step' in exact.table.why[last]
    assert 'but for the one at the end of an epoch' in str(exact)
    assert causes(make(lambda: GradientAccumulation(3*BS, remainder='carry'), n=70)) == {last}
    assert causes(make(lambda: GradientAccumulation(3*BS, remainder='drop'), n=70)) == set()

def test_arguments_that_weigh():
    assert causes(make(lambda: GradientAccumulation(3*BS, normalize=False))) == {loss}
    assert causes(make(lambda: GradientAccumulation(3*BS, weight=lambda l: 1.+float(l.yb[0][0])))) == {loss}

def test_mixup():
    exact = make(ours, cbs=[MixUp], loss_func=CrossEntropyLossFlat()).how_exact()
    assert [*exact.table.index] == [callbacks] and 'MixUp' in exact.table.why[callbacks]

@pytest.mark.parametrize('how,left', [({}, {norm, draws}), (dict(coupled='batchnorm'), {draws}), (dict(exact=True), set())])
def test_what_is_removed_is_not_told(how, left):
    "Each line that it gives removes its cause"
    learn = make(lambda: GradientAccumulation(micro_batch_size=BS, **how), norm, draws, bs=3*BS)
    assert causes(learn) == left

@pytest.mark.parametrize('name,acc,kwargs', [
    (loss, ours, {}), (last, ours, {}), (callbacks, lambda: GradientAccumulation(micro_batch_size=BS), dict(bs=3*BS)),
    (compares, lambda: GradientAccumulation(micro_batch_size=BS, coupled=True), dict(bs=3*BS))])
def test_cures(name, acc, kwargs):
    "The other lines remove theirs, too"
    exact = make(MeanOfMeans, name).how_exact()
    line = f'bs={3*BS} and GradientAccumulation(micro_batch_size={BS}' if kwargs else f'GradientAccumulation({3*BS})'
    assert exact.table.remove[name].startswith(line)
    assert causes(make(acc, name, **kwargs)) == set()

def test_functional_draws(): assert causes(make(theirs, layers=[Functional, lambda: nn.BatchNorm1d(24)])) == {draws, norm}

def test_half_precision():
    "What is within rounding, which is measured, is not told"
    assert causes(make(ours).to_bf16()) == set()
    exact = make(ours, norm).to_bf16().how_exact()
    assert exact.rounding > 1e-4 and [*exact.table.index] == [norm]

def test_distances():
    "A step by hand"
    learn = make(MeanOfMeans, loss)
    exact = learn.how_exact()
    xs,ys = zip(*Causes(learn).batches)
    def grad(parts):
        learn.model.zero_grad()
        for x,y in parts: (learn.loss_func(learn.model(x), y)/len(parts)).backward()
        return grads(learn.model)
    big = grad([(torch.cat(xs), torch.cat(ys))])
    off = rel_err(grad([*zip(xs, ys)]), big)
    assert off > .01 and abs(exact.total-off) < 1e-6 and abs(exact.table.distance[loss]-off) < 1e-6

class Bernoulli(nn.Module):
    "What it draws depends on the items, so `exact=True` cannot draw it"
    def forward(self, x): return x*torch.bernoulli(x.detach().sigmoid()) if self.training else x

def test_what_exact_cannot_draw_is_left_out_and_said():
    exact = make(lambda: FastaiAccumulation(40), norm, layers=[Bernoulli]).how_exact()
    assert [*exact.table.index] == [loss, norm] and 'without what is drawn' in str(exact) and 'torch.bernoulli' in str(exact)
    assert not make(ours, layers=[Bernoulli]).how_exact().is_exact                      # it is not known

class Masks(nn.Module):
    def forward(self, x): return x*(torch.rand(len(x), 1) < .7) if self.training else x

def test_a_mask_on_the_outputs():
    "Where nothing is drawn, they are there"
    assert causes(make(theirs, layers=[lambda: nn.Dropout(.2), Masks])) == {draws}

class Writes(Callback):
    "Into the loader batch, as CutMix does"
    def before_batch(self): self.learn.xb[0].mul_(2.)

def test_a_callback_that_writes_into_batches(): assert causes(make(ours, cbs=[Writes])) == set()

def test_cutmix():
    learn = make(ours, loss_func=CrossEntropyLossFlat())
    learn.model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    set_seed(1)
    data = [*zip(torch.randn(N, 1, 3, 4), torch.randint(4, (N,)))]
    learn.dls = DataLoaders(DataLoader(data, bs=BS), DataLoader(data, bs=BS), device='cpu')
    assert causes(learn.add_cb(CutMix())) == {callbacks}

class Texts(nn.Module):
    "`sees`: does padding change what it says of the other tokens?"
    def __init__(self, sees):
        super().__init__()
        self.e,self.h = nn.Embedding(20, 8, padding_idx=0),nn.Linear(8, 5)
        self.sees = sees
    def forward(self, x):
        h = self.e(x)
        return self.h(h + h.mean(1, keepdim=True) if self.sees else h)

def padded(items):
    n = max(len(x) for x,_ in items)
    return tuple(torch.stack([F.pad(t, (0, n-len(t)), value=v) for t in ts]) for ts,v in zip(zip(*items), (0, -100)))

@pytest.mark.parametrize('acc,sees,named', [(ours, False, set()), (theirs, False, {loss}), (ours, True, {'padding'})])
def test_texts_of_different_lengths(acc, sees, named):
    "The big batch is padded as the loader pads"
    set_seed(0)
    data = [(torch.randint(1, 20, (n,)), torch.randint(5, (n,))) for n in range(3, 3+N)]
    dl = torch.utils.data.DataLoader(data, BS, collate_fn=padded)
    learn = Learner(DataLoaders(dl, dl, device='cpu'), Texts(sees), loss_func=CrossEntropyLossFlat(), cbs=acc())
    assert causes(learn) == named

@pytest.mark.parametrize('bs', [32, 16])
@pytest.mark.parametrize('sees', [False, True])
def test_texts_that_are_cut_to_those_of_a_micro_batch(sees, bs):
    set_seed(0)
    data = [(torch.randint(1, 20, (k%17+3,)), torch.randint(5, (k%17+3,))) for k in range(64)]
    dl = torch.utils.data.DataLoader(data, bs, collate_fn=padded)
    acc = GradientAccumulation(32, micro_batch_tokens=80, pad_idx=0)
    exact = Learner(DataLoaders(dl, dl, device='cpu'), Texts(sees), loss_func=CrossEntropyLossFlat(), cbs=acc).how_exact()
    assert [*exact.table.why] == ['texts are padded to the longest of a micro-batch']*sees and exact.is_exact != sees

class Sees(nn.Module):
    "Items see each other, somewhat"
    def __init__(self, c): super().__init__(); self.c = c
    def forward(self, x): return x - self.c*x.mean(0)

class Attends(nn.Module):
    def forward(self, x): return x + .2*(x@x.T/5).softmax(-1)@x

@pytest.mark.parametrize('acc', [theirs, ours, lambda: GradientAccumulation(3*BS, micro_batch_size=1)])
@pytest.mark.parametrize('layer', [lambda: Sees(1.), lambda: Sees(.3), lambda: Sees(.01), Attends], ids=['1', '.3', '.01', 'attention'])
def test_items_that_see_each_other(layer, acc):
    "No micro-batches can be exact: it is not taken for rounding, however little it is"
    exact = make(acc, layers=[layer]).how_exact()
    assert not exact.is_exact and [*exact.table.index] == ['something else'] and 'items see each other' in str(exact)
    assert "is not known" in str(exact)
    whole = make(lambda: FastaiAccumulation(3*BS), layers=[layer], bs=3*BS).how_exact()       # it takes the big batch
    assert whole.is_exact and whole.total == 0

class Bias(nn.Module):
    "Items with other outputs than their neighbours', but not because of these"
    def forward(self, x): return x + torch.arange(len(x))[:,None]/len(x)*0 + x.flip(1)

def test_items_that_do_not(): assert make(ours, layers=[Bias]).how_exact().is_exact

def test_a_model_that_keeps_state():
    a,b = make(ours),make(noop_cb)
    for learn in (a, b):
        learn.model.reset = noop
        learn.add_cb(ModelResetter())
    with pytest.raises(ValueError, match='keeps state'): a.how_exact()
    assert b.how_exact().total == 0

def test_recomputation_stays():
    "In the big batch of a model with BatchNorm, recomputation would not do"
    assert causes(make(ours, norm, cbs=[lambda: ActivationCheckpointing(nn.Tanh)])) == {norm}
    assert causes(make(ours, draws, cbs=[lambda: ActivationCheckpointing(nn.Tanh)])) == {draws}

# -- two Learners
@pytest.mark.slow
def test_two_learners():
    a = make(theirs, norm, draws)
    assert how_exact(a, make(ours, norm, draws)).is_exact
    pair = how_exact(a, make(lambda: FastaiAccumulation(40), norm, draws))
    assert [*pair.table.index] == [loss] and abs(pair.table.distance[loss]-.2) < 1e-5
    assert pair.table.why[loss].startswith('the second: ')
    b = make(lambda: GradientAccumulation(micro_batch_size=BS, coupled='batchnorm'), norm, draws, bs=3*BS)
    assert [*how_exact(a, b).table.index] == [norm]
    b = make(lambda: GradientAccumulation(micro_batch_size=BS, exact=True), norm, draws, bs=3*BS)
    pair = how_exact(a, b)
    assert [*pair.table.index] == [norm, draws] and 'apart' in str(pair)

def test_two_learners_from_the_weights_of_the_first():
    a,b = make(theirs),make(ours)
    with torch.no_grad():
        for p in b.model.parameters(): p.add_(1.)
    before = weights(b.model)
    assert how_exact(a, b).is_exact and torch.equal(weights(b.model), before)

def test_learners_that_train_something_else():
    assert 'the big batches' in how_exact(make(ours), make(ours, loss)).table.index
    with pytest.raises(ValueError, match='different shapes'): how_exact(make(ours), make(ours, layers=[lambda: nn.Linear(24, 24)]))
    b = make(ours)
    b.model[0].requires_grad_(False)
    with pytest.raises(ValueError, match='frozen'): how_exact(make(ours), b)
    with pytest.raises(ValueError, match='48 items, the second one'): how_exact(make(ours), make(noop_cb))

# -- no trace
class Counts(Callback):
    "Notes, and writes to the model's weights"
    def __init__(self): self.n,self.log = 0,[]
    def before_batch(self):
        self.n += 1
        self.log.append(self.n)
        with torch.no_grad(): self.learn.model[0].weight.mul_(1.001)

def test_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = make(theirs, norm, draws, callbacks, last, cbs=[Counts])
    learn.path = tmp_path
    learn.fit(1)
    learn.add_cbs([SaveModelCallback(), CSVLogger()])
    learn.model[0].weight.grad.fill_(3.)
    def state():
        opt = [(k, deepcopy(v)) for s in learn.opt.state.values() for k,v in s.items()]
        rng = torch.get_rng_state(),random.getstate(),np.random.get_state()[1],learn.dls.train.rng.getstate()
        return [deepcopy(learn.model.state_dict()), opt, [p.grad.clone() for p in learn.model.parameters()], rng,
                deepcopy(learn.opt.hypers), [*learn.cbs], learn.counts.n, [*learn.counts.log], [*learn.recorder.losses],
                [*learn.dls.loaders], [m.training for m in learn.model.modules()], [p.requires_grad for p in learn.model.parameters()],
                {*vars(learn)}, [*tmp_path.iterdir()]]
    before = state()
    learn.how_exact()
    for a,b in zip(before, state()): torch.testing.assert_close(a, b, rtol=0, atol=0) if tensors(a) else same(a, b)

@pytest.mark.parametrize('replaced', [lambda f: f, lambda f: lambda *args: f(*args)], ids=['method','function'])
def test_no_trace_in_a_model_whose_forward_was_replaced(replaced):
    learn = make(ours, norm)
    learn.model.forward = replaced(learn.model.forward)
    before = deepcopy(learn.model.state_dict())
    assert not learn.how_exact().is_exact
    for k,v in learn.model.state_dict().items(): assert torch.equal(v, before[k]), k

def test_lazy_layers():
    learn = make(ours)
    learn.model = nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match='how_exact: the model has lazy layers'): learn.how_exact()
    learn.validate()
    assert causes(learn) == {norm}

def tensors(o): return isinstance(o, (dict,list)) and any(isinstance(t, Tensor) for t in (o.values() if isinstance(o, dict) else o))
def same(a, b):
    if isinstance(a, (list,tuple)): assert len(a) == len(b) and all(same(*o) or True for o in zip(a, b))
    elif isinstance(a, (Tensor,np.ndarray)): assert (a == b).all()
    else: assert a == b or a is b

def test_the_run_goes_on_as_if_nothing_had_happened():
    runs = []
    for looks in (0, 1):
        learn = make(ours, norm, draws, callbacks, last)
        set_seed(3)
        learn.fit(1, .01)
        if looks: learn.how_exact()
        learn.fit(1, .01)
        runs.append(weights(learn.model))
    assert torch.equal(*runs)

def test_no_more_items_at_once_than_in_training():
    seen = Counter()
    class Watch(nn.Module):
        def forward(self, x):
            seen[len(x)] += 1
            return x
    causes(make(lambda: GradientAccumulation(micro_batch_size=5), norm, draws, layers=[Watch], bs=20, n=100))
    assert max(seen) == 5

class Doubles(Callback):
    "To weights: each trial has those that were there before"
    def before_batch(self):
        with torch.no_grad():
            for p in self.learn.model.parameters(): p.data.mul_(2.)

class Average(Callback):
    "An average of the weights, which it moves after each batch, and a lock; a head of its own with an optimizer"
    def __init__(self): self.lock,self.head = threading.Lock(),nn.Linear(12, 2)
    def before_fit(self):
        if hasattr(self, 'own_opt'): return
        self.mean,self.own_opt = deepcopy(self.learn.model),torch.optim.Adam(self.head.parameters())
    def after_batch(self):
        if not self.training: return
        self.head(self.x).sum().backward()
        self.own_opt.step()
        for a,b in zip(self.mean.parameters(), self.learn.model.parameters()): a.data.lerp_(b.data, .5)

def test_what_callbacks_hold(tmp_path):
    learn = make(ours, cbs=[Average])
    learn.path = tmp_path
    learn.add_cb(CSVLogger())
    learn.fit(1, .1)
    avg = learn.average
    def state():
        held = [(p.detach().clone(), p.grad) for m in (avg.mean, avg.head) for p in m.parameters()]
        return held,(tmp_path/'history.csv').read_text()
    (before,file),_ = state(),learn.how_exact()
    for (a,g),(b,h) in zip(before, state()[0]): assert torch.equal(a, b) and (g is h or torch.equal(g, h))
    assert file == state()[1] and avg.lock is learn.average.lock and not avg.lock.locked()

def test_each_trial_has_the_same_weights():
    learn = make(noop_cb, cbs=[Doubles])
    before = weights(learn.model)
    assert learn.how_exact().total == 0 and torch.equal(weights(learn.model), before)

def test_what_is_kept_of_it():
    "Neither batches, nor gradients, nor the Learner"
    exact = make(ours, norm).how_exact()
    assert {type(v) for v in vars(exact).values()} == {float,int,bool,list,pd.DataFrame} and not exact.notes

if not devices.GPU: import simulated

@pytest.mark.slow
@pytest.mark.skipif(bool(devices.GPU), reason='needs the simulated accelerator')
def test_memory():
    "Gradients to compare are on the host: a device holds no more than in training"
    devices.use('sim')
    def peak(f):
        gc.collect()
        simulated.memory.reset_peak()
        before = simulated.memory.live
        f()
        return simulated.memory.peak-before
    def split():
        model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Dropout(.1), nn.ReLU(), nn.Linear(256, 4))
        x,y = devices.now.put(torch.randn(256, 64)),devices.now.put(torch.randint(4, (256,)))
        learn = learner(None, 128, GradientAccumulation(micro_batch_size=32, exact=True), model=model, loss_func=nn.CrossEntropyLoss(),
                        dl_type=lambda *_, **__: [(x[:128], y[:128]), (x[128:], y[128:])])
        learn.dls.valid = []
        return learn
    asked,trained = split(),split()
    assert peak(asked.how_exact) < peak(lambda: trained.fit(1))

# -- rejected
@pytest.mark.parametrize('factor,norm', [(0., '0'), (math.inf, 'nan|inf')])
def test_no_gradient_to_compare_with(factor, norm):
    learn = make(ours, loss_func=lambda out, y: factor*F.cross_entropy(out, y))
    with pytest.raises(ValueError, match=f'norm of a gradient is ({norm}),'): learn.how_exact()

def test_an_overflow_of_fp16_is_told():
    "The loss scale would come down over the next batches, which are others"
    learn = make(ours, loss_func=lambda out, y: 2e3*F.cross_entropy(out, y)).to_fp16(init_scale=2.**24)
    with pytest.raises(ValueError, match='loss scale'): learn.how_exact()
    assert causes(make(ours).to_fp16(init_scale=2.**8)) == set()

def test_no_step():
    with pytest.raises(ValueError, match='no step with the 96 items'): make(lambda: FastaiAccumulation(1000)).how_exact()

class Once(Callback):
    "An error for the first large loader batch"
    raised = []
    def before_batch(self):
        if len(self.x) == 3*BS and not self.raised:
            self.raised.append(1)
            raise ValueError('of mine')

def test_errors_of_others_stay():
    "They do not say that draws are unknown"
    with pytest.raises(ValueError, match='of mine'): make(ours, cbs=[Once]).how_exact()

def test_plot():
    ax = make(ours, norm).how_exact().plot()
    assert [t.get_text() for t in ax.get_yticklabels()] == [norm, 'together', 'rounding']
