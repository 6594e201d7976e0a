"The largest batch before the first step: what it finds, and that it changes nothing"
import gc, pytest, warnings
from reference import *
from torch.utils.data import DataLoader as TorchDL
from fastai.text.data import LMDataLoader, SortedDL
from fastaccum.accumulation.fitting import FittingSize
from fastaccum.all import AdaptiveGradientAccumulation, GradientNoiseScale, LargestFirst, StepLogger, TrainingCheckpoint

Acc = partial(GradientAccumulation, micro_batch_size='auto')

# --- the training is the same
class Noisy(nn.Module):
    "BatchNorm, dropout, a generator of its own, and a state that it keeps in an attribute and in a list"
    def __init__(self):
        super().__init__()
        self.body,self.seen,self.last,self.rng = (
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(.2), nn.Linear(8, 4)),[],0.,
            np.random.default_rng(0))
    def forward(self, x):
        self.seen.append(len(x))
        self.last = self.last + x.detach().mean()
        return self.body(x) + .1*self.last + self.rng.normal()

class Listens(Callback):
    "Writes down what comes, and scales it"
    def __init__(self): self.batches,self.n = [],0
    def before_batch(self): self.batches.append(self.x.tolist())
    def after_pred(self):
        self.n += 1
        self.learn.pred = self.pred*(1 + 1/self.n)

def batch_of(dl): return torch.randn(16, 6),torch.randint(4, (16,))
data = Data(torch.randn(44, 6), torch.randint(4, (44,)))
setups = dict(
    auto=lambda: [Acc(16)], split=lambda: [Acc(16, micro_batch_size=3)], whole=lambda: [GradientAccumulation(16)],
    coupled=lambda: [Acc(micro_batch_size=3, coupled=True)],
    carry=lambda: [Acc(12, remainder='carry')], schedule=lambda: [GradientAccumulationSchedule(8, 24, micro_batch_size='auto')],
    adaptive=lambda: [AdaptiveGradientAccumulation(16, 32, micro_batch_size=4)],
    noise=lambda: [Acc(16), GradientNoiseScale(), StepLogger()],
    mixed=lambda: [Acc(16), MixUp()], checkpoints=lambda: [Acc(16), TrainingCheckpoint(every_steps=2)])
loaders = dict(fastai=partial(DataLoader, shuffle=True), torch=partial(TorchDL, shuffle=True),
               generator=lambda *args, **kwargs: TorchDL(*args, shuffle=True,
                   generator=torch.Generator().manual_seed(1), **kwargs))

def trained(setup, *cbs, loader='fastai', amp='to_fp32'):
    set_seed(0)
    learn = learner(data, 8, *setups[setup](), *cbs, model=Noisy(), loss_func=CrossEntropyLossFlat(),
                    dl_type=loaders[loader], opt_func=Adam)
    getattr(learn, amp)().add_cb(listens := Listens())
    set_seed(1)
    learn.fit(2, .05)
    rows = learn.step_logger.rows if hasattr(learn, 'step_logger') else []
    noise = learn.gradient_noise_scale.estimate() if hasattr(learn, 'gradient_noise_scale') else None
    return dict(weights=weights(learn.model), buffers=[b.clone() for b in learn.model.buffers()],
                losses=tensor(learn.recorder.losses), random=[torch.rand(2), np.random.rand(), random.random()],
                seen=learn.model.seen, heard=(listens.batches, listens.n), rows=len(rows), noise=str(noise),
                steps=learn.opt.state[first(learn.model.parameters())]['step'])

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('setup,loader,amp,batch',
                         [(s, ['fastai','torch','generator'][i%3], ['to_fp32','to_fp16','to_bf16'][i%3],
                           ['first','epoch',batch_of][i%3]) for i,s in enumerate(setups)])
def test_training_is_the_same(setup, loader, amp, batch):
    a,b = (trained(setup, *cbs, loader=loader, amp=amp) for cbs in ([], [LargestFirst(batch)]))
    for k in a: assert str(a[k])==str(b[k]) and (not isinstance(a[k], Tensor) or torch.equal(a[k], b[k])), k

def test_order_of_a_language_model():
    "Its loader cuts up the texts anew at each shuffle"
    def order(*cbs):
        set_seed(0)
        texts = L((torch.arange(i, i+10+i%3),) for i in range(12))
        dls = DataLoaders(LMDataLoader(texts, bs=2, seq_len=7, shuffle=True), [])
        learn = Learner(dls, nn.Embedding(40, 40), loss_func=CrossEntropyLossFlat(),
                        cbs=[GradientAccumulation(4), listens:=Listens(), *cbs])
        with learn.no_bar(), learn.no_logging(): learn.fit(2)
        return listens.batches
    assert order()==order(LargestFirst())==order(LargestFirst('epoch'))

# --- what it finds
def test_sizes_of_other_shapes():
    "They start with as many elements, and no more than the batch has"
    fit,x = FittingSize(),torch.zeros(64, 40)
    fit.settle(x, 64)
    assert [fit.of(torch.zeros(64, n), 64) for n in (10, 40, 80)]==[64, 64, 64], 'nothing was split'
    fit.sizes = {((torch.Size([40]), torch.float32),): 16}
    fit.settle(x, 64)
    again = FittingSize()
    again.load_state_dict(fit.state_dict())
    for f in (fit, again): assert [f.of(torch.zeros(64, n), 64) for n in (5, 30, 40, 80, 4000)]==[64, 21, 16, 8, 1]
    fit.forget()
    assert fit.of(x, 64)==64
    again.load_state_dict(dict(micro_bs=3, fits=[], room='many'))
    assert again.of(x, 64)==64

if not devices.GPU: import simulated
on_sim = pytest.mark.skipif(bool(devices.GPU), reason='needs the simulated accelerator')

class Words(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.words,self.body,self.head = (nn.Embedding(20, d),
                                          nn.Sequential(nn.Linear(d, 4*d), nn.Tanh(), nn.Linear(4*d, d)),
                                          nn.Linear(d, 2))
    def forward(self, x): return self.head(self.body(self.words(x)).mean(1))

def on_device(*cbs, lengths=(4, 12, 6, 30), **kwargs):
    devices.use('sim')
    g = torch.Generator().manual_seed(0)
    batches = [(devices.now.put(torch.randint(20, (16, n), generator=g)),
                devices.now.put(torch.randint(2, (16,), generator=g))) for n in lengths]
    learn = learner(data, 16, *cbs, model=Words(), loss_func=nn.CrossEntropyLoss(), dl_type=lambda *_, **__: batches, **kwargs)
    learn.dls.valid = []
    return learn

def peak_of(learn):
    gc.collect()
    simulated.memory.reset_peak()
    before = simulated.memory.live
    learn.fit(1)
    return simulated.memory.peak-before

def failures(n_bytes, learn):
    "How often memory ran out before the first batch of a fit, and later, with `n_bytes` beyond what is there now"
    learn.add_cb(On('before_train', lambda l: counts.append(simulated.memory.n_failed), order=999))
    gc.collect()
    counts = [simulated.memory.n_failed]
    with simulated.limit(simulated.memory.live + n_bytes): learn.fit(1)
    return [b-a for a,b in zip(counts, [*counts[1:], simulated.memory.n_failed])]

@pytest.mark.slow
@on_sim
@pytest.mark.parametrize('opt_func',
                         [Adam, partial(OptimWrapper, opt=torch.optim.AdamW)],
                         ids=['Adam', 'AdamW'])
def test_runs_out_at_the_beginning_only(opt_func):
    "A few bytes are missing for the largest batch whole, with the gradients of the one before and the optimizer's state"
    room = peak_of(on_device(Acc(32), opt_func=opt_func)) - 4096
    assert failures(room, learn := on_device(Acc(32), LargestFirst('epoch'), opt_func=opt_func))==[1, 0]
    assert learn.gradient_accumulation.fitting.room==8*30
    assert failures(room, plain := on_device(Acc(32), opt_func=opt_func))==[0, 1]
    assert rel_err(weights(learn.model), weights(plain.model)) < 1e-6

@on_sim
@pytest.mark.slow
def test_what_fits_is_not_split():
    "After each step this optimizer gives up its gradients"
    make = lambda *cbs: on_device(Acc(16), *cbs, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
    assert failures(peak_of(make()) + 1024, make(LargestFirst('epoch')))==[0, 0]

@on_sim
@pytest.mark.slow
def test_each_phase_tries():
    "With unfrozen layers memory holds less"
    learn = on_device(Acc(16), LargestFirst('epoch'), opt_func=Adam, splitter=lambda m: [params(m.body), params(m.head)])
    learn.freeze()
    room = peak_of(learn) + 4096
    assert failures(room, learn)==[0, 0]
    learn.unfreeze()
    counts = failures(room, learn)
    assert counts[0] and not counts[1]

@on_sim
def test_nothing_stays():
    "On the device"
    def batch(dl): return devices.now.put(torch.zeros(16, 30).long()),devices.now.put(torch.zeros(16).long())
    learn = on_device(Acc(16), LargestFirst(batch),
                      On('before_train', lambda l: lives.append(simulated.memory.live), order=997),
                      On('before_train', lambda l: lives.append(simulated.memory.live), order=999))
    gc.collect()
    lives = []
    learn.fit(1)
    assert lives[0]==lives[1]

@pytest.mark.parametrize('k,says',
                         [pytest.param('auto', 'Not even one item fits', marks=pytest.mark.slow),
                          (8, "LargestFirst tried a batch of 8 items with 56 numbers, and memory ran out.*"
                              "micro_batch_size='auto'.*full"),
                          (None, "micro_batch_size='auto'")])
def test_too_large(k, says):
    class Full(nn.Linear):
        def forward(self, x):
            if self.training: raise torch.OutOfMemoryError('full')
            return super().forward(x)
    learn = learner(data, 8, GradientAccumulation(16, micro_batch_size=k), LargestFirst(), model=Full(6, 4),
                    loss_func=CrossEntropyLossFlat())
    with pytest.raises(torch.OutOfMemoryError, match=says): learn.fit(1)
    assert no_gradients(learn) and learn.largest_first.elements is None

class Clips(Callback):
    "At each micro-batch: wrong, and told"
    def after_backward(self): nn.utils.clip_grad_norm_(self.model.parameters(), .01)

def no_rule(pred, y): return F.cross_entropy(pred, y)*len(y)**.5

def test_warnings_are_left_to_the_training():
    def told(*cbs):
        with warnings.catch_warnings(record=True) as res:
            warnings.simplefilter('always')
            learner(data, 8, GradientAccumulation(16, micro_batch_size=3), Clips(), *cbs, loss_func=no_rule).fit(1)
        return [str(w.message) for w in res]
    assert len(told())==2 and told()==told(LargestFirst())

def test_other_gradients_and_hooks():
    "Parameters that the optimizer does not have keep theirs, and none keeps a hook"
    def look(learn):
        assert (learn.model[2].weight.grad==1).all() and learn.model[2].bias.grad is None
        assert not any(p._backward_hooks for p in learn.model.parameters())
    learn = learner(data, 8, GradientAccumulation(16, micro_batch_size=3), Clips(), LargestFirst(),
                    On('before_train', look, order=999), loss_func=CrossEntropyLossFlat(),
                    splitter=lambda m: [params(m[0])])
    learn.model[2].weight.grad = torch.ones_like(learn.model[2].weight)
    with pytest.warns(UserWarning, match='changed gradients'): learn.fit(1)
    assert learn.largest_first.elements

def test_number_that_fits_says_so(capsys):
    learner(data, 8, GradientAccumulation(16, micro_batch_size=3), LargestFirst(), loss_func=CrossEntropyLossFlat()).fit(1)
    assert capsys.readouterr().out=='LargestFirst: a batch of 8 items with 56 numbers fits memory in micro-batches of 3.\n'

class Once:
    "Gives its items once"
    def __init__(self): self.items = iter([(torch.randn(6), 0)]*8)
    def __iter__(self): return self
    def __next__(self): return next(self.items)

def test_refuses():
    with pytest.raises(ValueError, match="batch='largest': pass 'first'"): LargestFirst('largest')
    with pytest.raises(ValueError, match='needs an accumulation callback'): learner(data, 8, LargestFirst()).fit(1)
    learn = learner(data, 8, Acc(16), LargestFirst(), loss_func=CrossEntropyLossFlat())
    learn.dls.loaders[0] = DataLoader(Once(), bs=4, n=8)
    with pytest.raises(ValueError, match='would take items from the Once'): learn.fit(1)
    learn.largest_first.batch = lambda dl: (torch.randn(4, 6), torch.zeros(4).long())
    learn.fit(1)
    assert len(learn.recorder.losses)==1

def test_larger_batch_is_told():
    batches = [(torch.randn(4, n, 6).mean(1), torch.randint(4, (4,))) for n in (1, 1)] + [(torch.randn(5, 6), torch.randint(4, (5,)))]
    make = lambda *how: learner(data, 4, Acc(4), LargestFirst(*how), loss_func=CrossEntropyLossFlat(), dl_type=lambda *_, **__: batches)
    with pytest.warns(UserWarning, match='A batch of 35 numbers came, and LargestFirst tried one of 28') as told: make().fit(2)
    assert sum('LargestFirst' in str(w.message) for w in told)==1
    make('epoch').fit(1)
