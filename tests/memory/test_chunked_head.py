"""The head in chunks: a Learner trains, validates, predicts, saves and resumes as without it, and the model never
returns all outputs in training"""
import pytest
from quick import quickly
from contextlib import nullcontext
from reference import *
from fastai.callback.mixup import CutMix, MixUp
from fastai.metrics import LossMetric
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.conformance import check_callback
from fastaccum.logs.steps import StepLogger
from fastaccum.memory.activations import ActivationCheckpointing, ActivationOffload, Compile
from fastaccum.memory.chunks import ChunkedHead
from fastaccum.batch_size.noise import GradientNoiseScale
from fastaccum.precision.callback import MixedPrecision
from fastaccum.core.chunks import HeadInput
from fastaccum.core.memory import PeakMemory
from fastaccum.core import FastaccumWarning
from test_checkpoint import Interrupt, new_process
from test_fastai import applications, quiet

n_words,width = 11,8
class NextWord(nn.Module):
    "A small transformer; its first layers are a group of their own"
    def __init__(self, tied=False, dropout=0.):
        super().__init__()
        self.emb = nn.Embedding(n_words, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(width, n_words)
        if tied: self.head.weight = self.emb.weight
    def forward(self, x): return self.head(self.block(self.emb(x)))

def splitter(m): return [params(m.emb), params(m.block), params(m.head)]

torch.manual_seed(0)
words = torch.randint(n_words, (20, 7))
def next_words(ignored=True):
    y = words[:,1:].clone()
    if ignored: y[3:9,2:] = -100
    return Data(words[:,:-1], y)
pixels = Data(torch.randn(20, 3, 4, 5), torch.randint(n_words, (20, 4, 5)))
def conv_net(): return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, n_words, 1))

def text(*cbs, loss_func=None, model=NextWord, data=None, bs=8, **kwargs):
    set_seed(0)
    return learner(data or next_words(), bs, *cbs, model=model(), loss_func=loss_func or CrossEntropyLossFlat(),
                   **{'splitter': splitter, 'lr': .1, **kwargs})
def segment(*cbs, loss_func=None, bs=8, **kwargs):
    set_seed(0)
    return learner(pixels, bs, *cbs, model=conv_net(), loss_func=loss_func or CrossEntropyLossFlat(axis=1), lr=.1, **kwargs)

class Returned(Callback):
    """Does the model return no outputs in training, and in the fit's validation? By a hook: a callback that listens to
    batches might read them"""
    def before_fit(self): self.train,self.valid,self.hook = [],[],self.model.register_forward_hook(self.look)
    def look(self, model, xb, out):
        (self.train if model.training else self.valid).append(
            isinstance(out[0] if isinstance(out, tuple) else out, HeadInput))
    def after_fit(self): self.hook.remove()

def same(a, b, tol=1e-6):
    assert rel_err(weights(a.model), weights(b.model)) < tol
    assert rel_err(tensor(a.recorder.losses), tensor(b.recorder.losses)) < tol*10
    if len(a.recorder.values): assert rel_err(tensor(a.recorder.values), tensor(b.recorder.values)) < tol*10

def classify(*cbs, bs=8, **kwargs):
    set_seed(0)
    return learner(Data(torch.randn(20, 6), torch.randint(n_words, (20,))), bs, *cbs, model=mlp(n_out=n_words),
                   loss_func=CrossEntropyLossFlat(), lr=.1, **kwargs)

def masked(pred, y): return (F.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction='none')*(y != 3).flatten()).sum()/(y != 3).sum()
def floored(pred, y):
    "No rule of the targets says what it divides by"
    counts = (y < 3).flatten()
    return (F.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction='none')*counts).sum()/counts.sum().clamp(min=9)
def weighted(pred, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten(), torch.arange(1., n_words+1).to(pred))
acc = GradientAccumulation
def by_no_rule(loss_func, *cbs): return text, cbs, dict(loss_func=lambda: loss_func, data=lambda: next_words(False))
setups = {
    'plain':          (text, [], {}),
    'tied':           (text, [], dict(model=partial(NextWord, tied=True))),
    'split':          (text, [lambda: acc(16, micro_batch_size=3)], {}),
    'one item':       (text, [lambda: acc(8, micro_batch_size=1)], {}),
    'class weights':  (text, [lambda: acc(16, micro_batch_size=3)],
                       dict(loss_func=lambda: CrossEntropyLossFlat(weight=torch.arange(1., n_words+1)))),
    'smoothing':      (text, [lambda: acc(16, micro_batch_size=3)], dict(loss_func=lambda: CrossEntropyLossFlat(label_smoothing=.1))),
    'sum':            (text, [lambda: acc(16, micro_batch_size=3)], dict(loss_func=lambda: CrossEntropyLossFlat(reduction='sum'), lr=.001)),
    'own loss':       (text, [lambda: acc(16, micro_batch_size=3)], dict(loss_func=lambda: masked, data=lambda: next_words(False))),
    'own, one step':  (text, [], dict(loss_func=lambda: masked, data=lambda: next_words(False))),
    'floor':          by_no_rule(floored, lambda: acc(16, micro_batch_size=3)),
    'floor, one step':by_no_rule(floored),
    'floor, one item':by_no_rule(floored, lambda: acc(8, micro_batch_size=1)),
    'floor, batches': by_no_rule(floored, lambda: acc(16)),
    'floor, noise':   by_no_rule(floored, lambda: acc(16, micro_batch_size=3), GradientNoiseScale),
    'own weights':    by_no_rule(weighted, lambda: acc(16, micro_batch_size=5)),
    'logged':         (text, [lambda: acc(16, micro_batch_size=3), StepLogger], {}),
    'noise scale':    (text, [lambda: acc(16, micro_batch_size=3), GradientNoiseScale], {}),
    'recomputed':     (text, [lambda: acc(16), lambda: ActivationCheckpointing(nn.TransformerEncoderLayer)], {}),
    'offload':        (text, [ActivationOffload], {}),
    'clip':           (text, [lambda: acc(16), GradientClip], {}),
    'segmentation':   (segment, [lambda: acc(16, micro_batch_size=3)], {}),
    'weighted pixels':(segment, [lambda: acc(16)],
                       dict(
                           loss_func=lambda: CrossEntropyLossFlat(
                               axis=1, weight=torch.arange(1., n_words+1), ignore_index=2))),
    'mixup':          (classify, [lambda: MixUp(.4)], {}),
    'cutmix':         (lambda *cbs: learner(Data(torch.randn(20, 3, 4, 4), torch.randint(n_words, (20,))), 8, *cbs,
                                            model=nn.Sequential(*conv_net()[:2], nn.Flatten(), nn.Linear(96, n_words)),
                                            loss_func=CrossEntropyLossFlat(), lr=.1), [lambda: acc(16), CutMix], {}),
    'mixup, split':   (classify, [lambda: acc(16, micro_batch_size=4), lambda: MixUp(.4)], {})}

@pytest.mark.parametrize('name', quickly([*setups][::3], setups))
def test_same_run(name):
    "As without it, to rounding; and in training the model returns no outputs"
    make,cbs,kwargs = setups[name]
    def run(*more):
        set_seed(0)
        learn = make(*(cb() for cb in cbs), *more, **{k: v() if callable(v) and k != 'model' else v for k,v in kwargs.items()})
        set_seed(1)
        before = weights(learn.model).clone()
        learn.fit_one_cycle(3)
        assert rel_err(weights(learn.model), before) > 1e-3
        return learn
    whole,chunked = run(),run(ChunkedHead(4), Returned())
    same(chunked, whole, 3e-6)
    assert all(chunked.returned.train) and all(chunked.returned.valid) and chunked.returned.valid
    assert not any('forward' in vars(m) for m in chunked.model.modules())
    assert type(chunked.loss_func) is type(whole.loss_func)

def test_float64():
    def run(*cbs):
        set_seed(0)
        learn = learner(Data(pixels.x.double(), *pixels.y), 8, acc(16, micro_batch_size=3), *cbs,
                        model=conv_net().double(), loss_func=nn.CrossEntropyLoss(), lr=.1)
        learn.remove_cbs([Recorder])           # which cannot take a loss in float64
        learn.fit(3)
        return weights(learn.model)
    assert rel_err(run(ChunkedHead(4)), run()) < 1e-12

@pytest.mark.parametrize('amp,tol', [('bf16', 2e-2), ('fp16', 3e-3)])
@pytest.mark.parametrize('k', [None, 3])
def test_half_precision(amp, tol, k):
    def run(*cbs):
        learn = text(acc(16, micro_batch_size=k), MixedPrecision(amp), *cbs)
        learn.fit(3)
        return learn
    whole,chunked,start = run(),run(ChunkedHead(4), Returned()),weights(text().model)
    assert rel_err(weights(chunked.model)-start, weights(whole.model)-start) < tol*5
    assert rel_err(tensor(chunked.recorder.losses), tensor(whole.recorder.losses)) < tol and all(chunked.returned.train)
    if amp == 'fp16': assert chunked.mixed_precision.scaler.n_overflows == whole.mixed_precision.scaler.n_overflows

def test_overflow_is_noticed():
    "Inside a chunk, where the gradients get the loss scale: the step is skipped, and the scale falls"
    learn = text(acc(16), MixedPrecision('fp16', init_scale=2.**24), ChunkedHead(4))
    learn.fit(3)
    assert learn.mixed_precision.scaler.n_overflows and weights(learn.model).isfinite().all()

def test_freeze_and_groups():
    "Layer groups, discriminative rates, a frozen body and a frozen head"
    def run(*cbs):
        learn = text(*cbs)
        learn.freeze()
        learn.fit(1)
        learn.freeze_to(-2)
        learn.fit(1, slice(.01, .1))
        learn.unfreeze()
        learn.model.head.weight.requires_grad_(False)
        learn.fit(1, slice(.001, .1))
        return learn
    same(run(ChunkedHead(4)), run())

def test_readers_of_predictions():
    "Metrics, training metrics and callbacks get all outputs, and nothing else changes"
    class Reads(Callback):
        def before_fit(self): self.seen = []
        def after_batch(self): self.seen.append((self.training, self.learn.pred.detach().clone()))
    def run(*cbs, **kwargs):
        learn = segment(*cbs, metrics=foreground_acc, **kwargs)
        learn.recorder.train_metrics = True
        learn.fit(2)
        return learn
    for more in ([], [lambda: acc(16, micro_batch_size=3)]):
        whole,chunked = (run(*(c() for c in more), Reads(), *cbs) for cbs in ([], [ChunkedHead(4), Returned()]))
        same(chunked, whole)
        assert len(whole.reads.seen) == len(chunked.reads.seen) and all(chunked.returned.train) and not any(chunked.returned.valid)
        for (a,x),(b,y) in zip(chunked.reads.seen, whole.reads.seen): assert a == b and rel_err(x, y) < 1e-5

def test_readers_in_after_pred():
    "An error that says what to write, and what it says works"
    class Reads(Callback):
        def after_pred(self): self.hits = self.pred.argmax(-1) == self.y
    class Asks(Callback):
        run_valid = False
        def after_pred(self): self.shape = self.learn.pred.outputs().shape
    with pytest.raises(AttributeError, match="'argmax' does not find them.*read `learn.pred` in `after_batch`"):
        text(ChunkedHead(4), Reads()).fit(1)
    learn,plain = text(ChunkedHead(4), Asks()),text()
    for l in (learn, plain): l.fit(1)
    assert learn.asks.shape[-1] == n_words
    same(learn, plain)

def test_looks_as_accumulation_does():
    "Whether a loss of one's own is measured is said there; a rule that shows late is told with its place"
    for check_loss in (True, False, 'always'):
        learn = text(ChunkedHead(4), acc(8, check_loss=check_loss), Own())
        learn.fit(1)
        assert learn.own.seen == (check_loss is not False, check_loss == 'always', True)
class Own(Callback):
    run_valid = False
    def after_batch(self):
        chunked = self.learn.loss_func.chunked
        self.seen = chunked.rule.checks,chunked.rule.always,chunked.where == f'epoch {self.epoch}, batch {self.iter}'

class Keeps(nn.Module):
    "Keeps a part of the loss, and a number that cannot be put together"
    def forward(self, pred, y):
        loss = CrossEntropyLossFlat()(pred, y)
        self.twice,self.most = loss.detach()*2,pred.detach().amax()
        return loss

@pytest.mark.parametrize('name', ['twice', 'most'])
def test_values_that_a_loss_keeps(name):
    "Those of all chunks are put together for fastai's `LossMetrics`, or it is told that they are not"
    def run(*cbs):
        learn = text(*cbs, loss_func=Keeps(), metrics=LossMetric(name))
        learn.recorder.train_metrics = True
        learn.fit(2)
        return learn.recorder.values[-1]
    if name == 'twice': assert list(run(ChunkedHead(4))) == pytest.approx(list(run()), rel=1e-6)
    else:
        with pytest.warns(UserWarning,
                          match='reads `most` of the loss after a batch, and with ChunkedHead it is the value of the last chunk'):
            run(ChunkedHead(4))

def test_predictions():
    "Outside of a fit, and in the middle of it, the model is the plain one"
    class Asks(Callback):
        "In validation's place, and by hand"
        order,run_valid = 30,False
        def after_batch(self):
            if self.iter: return
            with torch.no_grad(): assert self.model(self.x).shape[-1] == n_words
            self.preds = self.learn.get_preds()[0]
    learn = text(ChunkedHead(4), acc(16), Asks())
    learn.fit(1)
    assert learn.asks.preds.shape == (20,6,n_words)
    assert learn.get_preds(with_loss=True)[2].shape == (20,)
    plain = text()
    plain.model.load_state_dict(learn.model.state_dict())
    assert learn.validate()[0] == pytest.approx(plain.validate()[0], rel=1e-6)

def test_lr_find():
    a,b = (text(acc(16), *cbs).lr_find(num_it=12, show_plot=False) for cbs in ([], [ChunkedHead(3)]))
    assert a.valley == pytest.approx(b.valley, rel=1e-4)

def test_save_load_export(tmp_path):
    dls = Datasets(range(20), [[lambda i: words[i,:-1]], [lambda i: words[i,1:]]],
                   splits=[range(16), range(16, 20)]).dataloaders(bs=8, device='cpu')
    def make(*cbs):
        set_seed(0)
        return quiet(Learner(dls, NextWord(), loss_func=CrossEntropyLossFlat(), lr=.1, path=tmp_path, cbs=cbs))
    learn = make(ChunkedHead(4))
    class Saves(Callback):
        order,run_valid = 30,False
        def after_batch(self): self.learn.save('now'); self.copy = deepcopy(self.model); torch.save(self.model, 'whole.pt')
        def after_fit(self): self.learn.remove_cb(self)
    learn.add_cb(Saves())
    saves = learn.saves
    learn.fit(1)
    learn.export('now.pkl')
    assert list(learn.model.state_dict()) == list(NextWord().state_dict())
    loaded = load_learner(tmp_path/'now.pkl')
    assert type(loaded.loss_func) is CrossEntropyLossFlat and rel_err(weights(loaded.model), weights(learn.model)) == 0
    for model in (saves.copy, torch.load('whole.pt', weights_only=False)): assert model.train()(words).shape[-1] == n_words
    fresh = make()
    fresh.load('now')
    assert rel_err(weights(fresh.model), weights(learn.model)) == 0
    fresh.add_cb(ChunkedHead(4))
    fresh.fit(1)

@pytest.mark.long
def test_compiled():
    "The compiler takes a head that returns its input"
    def run(*cbs):
        torch._dynamo.reset()
        learn = text(Compile(backend='aot_eager'), *cbs)
        learn.fit(1)
        return learn
    same(run(ChunkedHead(4)), run())

def test_as_the_big_batch():
    "By the check that anybody may run on a callback"
    for result in check_callback(partial(ChunkedHead, 2)): assert result.exact, result

@pytest.mark.slow
@pytest.mark.parametrize('loss_func', [None, floored])
@pytest.mark.parametrize('with_head', [True, False])
def test_resume(with_head, loss_func):
    "To the bit; and a run may go on without it"
    def run(*cbs, head=True):
        learn = text(acc(8, micro_batch_size=3), *cbs, *([ChunkedHead(4)] if head else []), model=partial(NextWord, dropout=.1),
                     loss_func=loss_func, data=next_words(loss_func is None))
        set_seed(2)
        return learn
    whole = run(TrainingCheckpoint('whole', every_steps=1))
    whole.fit(2)
    with pytest.raises(RuntimeError, match='interrupted'): run(TrainingCheckpoint('cut', every_steps=1), Interrupt((1,1))).fit(2)
    new_process()
    learn = run(TrainingCheckpoint('cut', every_steps=1), head=with_head)
    learn.fit(2)
    assert rel_err(weights(learn.model), weights(whole.model)) <= (0 if with_head else 1e-6)

def test_after_an_error():
    "All is as before, whatever ended the fit"
    for ex in (RuntimeError, KeyboardInterrupt, CancelFitException):
        learn = text(ChunkedHead(4), On('after_pred', throw(ex('stopped')), [1]))
        loss_func = learn.loss_func
        with nullcontext() if ex is CancelFitException else pytest.raises(ex): learn.fit(1)
        assert learn.loss_func is loss_func and 'forward' not in vars(learn.model.head) and learn.model(words).shape[-1] == n_words
        learn.fit(1)

def test_a_changed_loss():
    "What a callback writes to the loss arrives there, and a loss that it puts in its place counts"
    def change(learn): learn.loss_func.alpha = 2.
    class Scaled:
        alpha = 1.
        def __call__(self, pred, y): return self.alpha*F.cross_entropy(pred, y)
    def run(*cbs):
        learn = segment(On('before_batch', change, [1]), *cbs, loss_func=Scaled())
        learn.fit(1)
        return learn
    same(run(ChunkedHead(2)), run())

class Rising:
    least = 5.
    def __call__(self, pred, y):
        counts = (y < 3).flatten()
        return (F.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction='none')*counts).sum()/counts.sum().clamp(min=self.least)
class Rise(Callback):
    def before_epoch(self): self.learn.loss_func.least = 5. + 20*self.learn.epoch

@pytest.mark.parametrize('k', [None, 3])
def test_a_floor_that_rises(k):
    "From one epoch to the next: in training and validation, which is in one piece without it"
    def run(*cbs):
        learn = text(*([] if k is None else [acc(16, micro_batch_size=k)]), Rise(), *cbs, loss_func=Rising(), data=next_words(False))
        learn.fit(3)
        return learn
    with warnings.catch_warnings():
        warnings.simplefilter('error', FastaccumWarning)
        same(run(ChunkedHead(4)), run(), 3e-6)

def test_two_fits():
    learn,plain = text(ChunkedHead(4)),text()
    for l in (learn, plain): l.fit(1); l.fit(1)
    same(learn, plain)
    for l in (learn, plain): l.remove_cbs([cb for cb in l.cbs if isinstance(cb, ChunkedHead)]); l.fit(1)
    same(learn, plain)

class ManyWords(nn.Module):
    def __init__(self, n=2000):
        super().__init__()
        self.emb,self.body,self.head = nn.Embedding(n, 16),nn.Linear(16, 16),nn.Linear(16, n)
    def forward(self, x): return self.head(self.body(self.emb(x)).tanh())

class Peak(Callback):
    "The most memory of each batch, as PyTorch allocates it"
    order,reads_pred = -100,False
    def before_fit(self): self.peaks = []
    def before_batch(self): self.memory = PeakMemory().__enter__()
    def after_batch(self):
        self.memory.__exit__(None, None, None)
        self.peaks.append(self.memory.peak)

def many_words(*cbs, valid=2):
    torch.manual_seed(0)
    words = torch.randint(2000, (48, 33))
    return text(*cbs, Peak(), model=ManyWords, data=Data(words[:,:-1], words[:,1:]), bs=16, splitter=trainable_params, opt_func=SGD,
                valid=Data(words[:valid,:-1], words[:valid,1:]))

@pytest.mark.slow
def test_memory_and_its_forecast():
    """The outputs take a part of what they took: of a chunk, with their softmax and two gradients, beside the gradients
    of the head. `memory_advice` knows it"""
    outputs,grads = 4*16*32*2000,4*(16*2000+2000)
    for n in (1, 2, 4, 16):
        learn = many_words(*[ChunkedHead(n)]*(n > 1))
        forecast = learn.memory_advice()
        learn.fit(2)
        peak = max(learn.peak.peaks)
        assert 3*outputs/n < peak < 4.1*outputs/n + 4*grads + 2**18, (n, peak, outputs, grads)
        assert forecast.peak == pytest.approx(peak + forecast.grads, abs=2*grads + 2**18) and forecast.cost(forecast.now).when == 'training'

def test_memory_of_validation():
    "The same where only the loss is asked for; all outputs with a metric of them"
    outputs = 4*48*32*2000
    of_loss,of_outputs = many_words(ChunkedHead(16), valid=48),many_words(ChunkedHead(16), valid=48)
    of_outputs.metrics = L(mk_metric(accuracy))
    for learn in (of_loss, of_outputs): learn.fit(1)
    assert of_loss.peak.peaks[-1] < .3*outputs < outputs < of_outputs.peak.peaks[-1]

class Transposed(NextWord):
    def forward(self, x): return super().forward(x).transpose(1, 2)
class Scaled(NextWord):
    def forward(self, x): return super().forward(x)*2
class Hidden(NextWord):
    def __init__(self): super().__init__(); self.last = nn.Linear(n_words, n_words)
    def forward(self, x): return self.last(super().forward(x))
class Both(NextWord):
    def forward(self, x):
        h = self.block(self.emb(x))
        return self.head(h),h

refused = {
    'transposed': (dict(model=Transposed, loss_func=nn.CrossEntropyLoss), {}, AttributeError, "'transpose' does not find them"),
    'scaled':     (dict(model=Scaled), {}, TypeError, 'choose as head the layer'),
    'not last':   (dict(model=Hidden), dict(head='head'), TypeError, 'linear does not find them'),
    'no name':    (dict(), dict(head='decoder'), ValueError, 'no such module'),
    'outputs':    (dict(model=Both, loss_func=lambda: lambda pred, y: CrossEntropyLossFlat()(pred[0], y)), {},
                   ValueError, 'several outputs'),
    'coupled':    (dict(cbs=lambda: acc(micro_batch_size=4, coupled=True)), {}, ValueError, 'with coupled the loss compares'),
    'compares':   (dict(loss_func=lambda: lambda pred, y: F.cross_entropy(pred[:,0]@pred[:,0].T, torch.arange(len(y)))),
                   {}, ValueError, 'could not be measured .*without chunks'),
    'two means':  (dict(loss_func=lambda: LabelSmoothingCrossEntropyFlat(weight=torch.ones(n_words))), {}, ValueError, 'two means')}

@pytest.mark.parametrize('name', refused)
def test_refused(name):
    kwargs,args,ex,message = refused[name]
    made = {k: v if k == 'model' else v() for k,v in kwargs.items()}
    learn = text(ChunkedHead(**args), *L(made.pop('cbs', None)), **made)
    loss_func = learn.loss_func
    with pytest.raises(ex, match=message): learn.fit(1)
    assert learn.loss_func is loss_func and 'forward' not in vars(learn.model.head)

def test_hooks_are_refused():
    learn = text(ChunkedHead())
    with hook_output(learn.model.head), pytest.raises(ValueError, match='has hooks'): learn.fit(1)
    hook = learn.model.head.register_full_backward_pre_hook(lambda m, grads: (grads[0]*2,))
    with pytest.raises(ValueError, match='has hooks'): learn.fit(1)
    hook.remove()
    learn.fit(1)

def test_hook_of_the_input():
    "A hook that changes what the head gets"
    def run(*cbs):
        learn = text(*cbs)
        learn.model.head.register_forward_pre_hook(lambda m, args: (args[0]*2,))
        learn.fit(2)
        return learn
    same(run(ChunkedHead(4)), run())

class WithAux(NextWord):
    def forward(self, x):
        h = self.block(self.emb(x))
        self.aux = h.pow(2).mean()
        return self.head(h)
def with_aux(learn, pred, y): return CrossEntropyLossFlat()(pred, y) + .1*learn.model.aux
def with_decay(learn, pred, y): return CrossEntropyLossFlat()(pred, y) + .1*sum(p.pow(2).sum() for p in learn.model.parameters())
class Decoder(nn.Module):
    "Reads the embedding's weight, which is no parameter of its own"
    def __init__(self, emb): super().__init__(); self.emb = [emb]
    def forward(self, x): return F.linear(x, self.emb[0].weight)
class Decoded(NextWord):
    def __init__(self): super().__init__(); self.head = Decoder(self.emb)
def with_loss(f): return lambda learn: setattr(learn, 'loss_func', partial(f, learn))
def with_head(norm): return lambda learn: norm(learn.model.head)
lost = {'aux': (WithAux, with_loss(with_aux), 'emb.weight|block'),
        'decay': (NextWord, with_loss(with_decay), 'emb.weight|block'),
        'decoder': (Decoded, noop, 'model.emb.weight, of shape .11, 8.'),
        'weight_norm': (NextWord, with_head(nn.utils.weight_norm), 'head.weight_'),
        'spectral_norm': (NextWord, with_head(nn.utils.spectral_norm), 'head.weight_orig')}

@pytest.mark.filterwarnings('ignore:.*weight_norm. is deprecated')
@pytest.mark.parametrize('k', [None, 3])
@pytest.mark.parametrize('name', lost)
def test_no_gradient_is_lost(name, k):
    "What the loss depends on without the head's input is found before anything is stepped"
    model,change,match = lost[name]
    learn = text(ChunkedHead(4, head='head'), acc(8, micro_batch_size=k), model=model)
    change(learn)
    before = weights(learn.model).clone()
    with pytest.raises(ValueError, match=f'in chunks depends on .*({match})'): learn.fit(1)
    assert torch.equal(weights(learn.model), before)

def test_term_in_a_callback():
    "As the message says"
    class Aux(Callback):
        run_valid = False
        def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + .1*self.learn.model.aux
    whole = text(model=WithAux)
    whole.loss_func = partial(with_aux, whole)
    chunked = text(ChunkedHead(4), Aux(), model=WithAux)
    for learn in (whole, chunked): set_seed(1); learn.fit(2)
    assert rel_err(weights(chunked.model), weights(whole.model)) < 1e-6

def test_two_are_refused():
    learn = text(ChunkedHead(2), ChunkedHead(3))
    with pytest.raises(ValueError, match='2 ChunkedHead callbacks'): learn.fit(1)
    assert 'forward' not in vars(learn.model.head)

class Unused(NextWord):
    def forward(self, x): return F.linear(self.block(self.emb(x)), self.head.weight, self.head.bias)

@pytest.mark.parametrize('k', [None, 3])
def test_head_that_is_not_called(k):
    "One warning, after the first training batch"
    learn = text(ChunkedHead(4), acc(16, micro_batch_size=k), model=Unused)
    with pytest.warns(UserWarning, match="ChunkedHead does nothing.*'head'.*Pass head=") as found: learn.fit(2)
    assert len([w for w in found if 'does nothing' in str(w.message)]) == 1

@pytest.mark.slow
@pytest.mark.parametrize('name', ['language', pytest.param('unet', marks=pytest.mark.long)])
def test_application(name):
    "fastai's language model, whose decoder is tied to its embedding, and its U-Net"
    def run(*cbs):
        set_seed(0)
        learn = quiet(applications[name](cbs=[*cbs, acc(16)]))
        set_seed(1)
        learn.fit_one_cycle(1, 1e-3)
        return learn
    whole,chunked = run(),run(ChunkedHead(4), Returned())
    assert all(chunked.returned.train)
    assert rel_err(weights(chunked.model), weights(whole.model)) < 1e-5
    assert list(chunked.recorder.values[-1]) == pytest.approx(list(whole.recorder.values[-1]), rel=1e-4)
    assert chunked.validate()[0] == pytest.approx(whole.validate()[0], rel=1e-4)
    if name == 'unet':
        assert rel_err(chunked.get_preds()[0], whole.get_preds()[0]) < 1e-3
        assert chunked.predict(chunked.dls.valid_ds[0][0])[0].shape == whole.predict(whole.dls.valid_ds[0][0])[0].shape
        chunked.show_results()
    else: assert chunked.predict('Return the', 3, temperature=1.).startswith('Return the')
