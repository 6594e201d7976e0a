"""Many kinds of fit: their weights, losses and warnings, to be compared bit by bit

`python tests/accumulation/fits.py OUT.pkl` writes those of the checkout in PYTHONPATH, and `python tests/accumulation/fits.py A.pkl B.pkl`
compares two: after a change that should change no number, compare with the commit before it. `test_witnesses.py` compares fits with and
without witnesses."""
import pickle, sys, tempfile, warnings
from functools import partial
import torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import *
from fastai.callback.mixup import MixUp
from fastai.callback.progress import ProgressCallback
from fastai.callback.rnn import rnn_cbs
from fastai.text.all import AWD_LSTM, awd_lstm_clas_config, get_text_classifier
from fastaccum.all import *

G,ce = GradientAccumulation,nn.CrossEntropyLoss

# --- data
class Items(torch.utils.data.Dataset):
    def __init__(self, *ts): self.ts = ts
    def __len__(self): return len(self.ts[0])
    def __getitem__(self, i): return tuple(t[i] for t in self.ts)

def data(n=74, kind='classes'):
    torch.manual_seed(0)
    x = torch.randn(n, 8)
    y = dict(classes=lambda: torch.randint(3, (n,)), ignored=lambda: torch.randint(3, (n,)).where(torch.rand(n) > .3, -100),
             rare=lambda: (torch.rand(n, 3) > .97).float(), floats=lambda: torch.randn(n, 3))[kind]()
    return x,y
classes = data()

def texts(n=60, w=24):
    torch.manual_seed(0)
    x = torch.randint(1, 20, (n, w))
    ends = torch.randint(2, w, (n,))
    x[torch.arange(w)[None] >= ends[:,None]] = 0
    return x,x.roll(-1, 1).where(x != 0, -100)

# --- models
def mlp(*more):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.ReLU(), nn.Linear(16, 3))
def drop(): return mlp(nn.Dropout(.3))
def norm(*more): return mlp(nn.BatchNorm1d(16), *more)
def with_head():
    return nn.Sequential(mlp(nn.Dropout(.2)), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))

class SmallDevice(nn.Module):
    "A model on a device with room for `most` items"
    def __init__(self, most): super().__init__(); self.most = most
    def forward(self, x):
        if self.training and len(x) > self.most: raise torch.OutOfMemoryError('CUDA out of memory.')
        return x
class CountsCalls(nn.Module):
    def __init__(self): super().__init__(); self.register_buffer('calls', torch.zeros(3)); self.l = nn.Linear(16, 16)
    def forward(self, x):
        self.calls += 1
        return self.l(x)
class Term(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x):
        out = self.net(x)
        self.balance = (out.mean(0)**2).sum()
        return out
class Text(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.e,self.l = nn.Embedding(20, 8, padding_idx=0),nn.Linear(8, 20)
    def forward(self, x): return self.l(torch.tanh(self.e(x)))
def classifier():
    "fastai's, almost without dropout (with none at all AWD_LSTM fails)"
    torch.manual_seed(1)
    config = {k: 1e-9 if k.endswith('_p') else v for k,v in awd_lstm_clas_config.items()}
    return get_text_classifier(AWD_LSTM, 20, 3, seq_len=7, config={**config, 'emb_sz': 8, 'n_hid': 8, 'n_layers': 1, 'pad_token': 0})

# --- losses
def floored(p, y): return F.binary_cross_entropy_with_logits(p, y, reduction='sum')/y.sum().clamp(min=1)
def own_mean(p, y): return F.cross_entropy(p, y, reduction='none').mean()
def own_weights(p, y):
    w = tensor([.2, 1., 3.])[y]
    return (F.cross_entropy(p, y, reduction='none')*w).sum()/w.sum()
def own_sum(p, y): return F.cross_entropy(p, y, reduction='sum')/100
def contrast(p, y):
    z = F.normalize(p, dim=1)
    return F.cross_entropy(z@z.T/.1, (y[:,None] == y[None]).float().argmax(1))
def per_token(p, y): return F.cross_entropy(p.transpose(1, 2), y)
class Keeps(nn.Module):
    def forward(self, p, y):
        self.ce,self.l2 = F.cross_entropy(p, y),(p**2).mean()
        self.rows = (p**2).sum(1)
        return self.ce + .1*self.l2

# --- callbacks
class Penalty(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + 1e-2*(self.learn.pred**2).mean()
class ActivationPenalty(Callback):
    "A term that does not depend on the outputs"
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + 1e-2*self.learn.model[0](self.learn.x).square().mean()
class Replaces(Callback):
    def after_loss(self): self.learn.loss_grad = F.cross_entropy(self.learn.pred, self.learn.y, label_smoothing=.1)
class ChangesRates(Callback):
    def before_batch(self): self.learn.opt.set_hyper('lr', .1/(1+self.learn.train_iter))
class ChangesGradients(Callback):
    def after_backward(self): nn.utils.clip_grad_norm_(self.learn.model.parameters(), .01)
class ChangesWeights(Callback):
    def after_batch(self):
        for p in self.learn.model.parameters(): p.data.clamp_(-.1, .1)
class ReadsValue(Callback):
    def after_batch(self): self.seen = self.learn.loss_func.ce
class NewTargets(Callback):
    def after_pred(self): self.learn.yb = (self.learn.yb[0].clone(),)
class Cancels(Callback):
    def before_backward(self):
        if self.learn.iter == 2: raise CancelBatchException()

# --- Learners
def learner(xy, model, loss, *cbs, lr=.1, bs=16, **kwargs):
    x,y = xy
    dls = DataLoaders(DataLoader(Items(x, y), bs=bs), DataLoader(Items(x[:20], y[:20]), bs=bs), device='cpu')
    learn = Learner(dls, model, loss_func=loss, opt_func=partial(SGD, mom=.9), lr=lr, cbs=cbs, path=tempfile.mkdtemp(), **kwargs)
    if hasattr(learn, 'progress'): learn.remove_cb(ProgressCallback)
    return learn
def hooked(learn):
    learn.model[0].weight.register_hook(lambda g: g.clamp(-.01, .01))
    return learn
def with_term():
    model = Term()
    return learner(classes, model, lambda p, y: F.cross_entropy(p, y) + model.balance, G(32, micro_batch_size=8))
def double():
    return learner((classes[0].double(), classes[1]), mlp().double(), ce(weight=tensor([.1, 1., 4.]).double()), G(40, micro_batch_size=6))
def labelled():
    y = torch.randint(3, (60,), generator=torch.Generator().manual_seed(1))
    return learner((texts()[0], y), classifier(), CrossEntropyLossFlat(), G(300, unit='tokens', micro_batch_size=5), *rnn_cbs())

cw = tensor([.1, 1., 4.])
kinds = {
    # whole loader batches, and micro-batches of items
    'whole': lambda: learner(classes, drop(), ce(), G(40)),
    'whole step each': lambda: learner(classes, drop(), ce(), G(micro_batch_size=16)),
    'items': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=5)),
    'items one': lambda: learner(classes, drop(), ce(), G(micro_batch_size=1)),
    'n_items': lambda: learner(classes, drop(), ce(), G(32, n_items=lambda l: len(l.x), micro_batch_size=6)),
    'float64': double,
    # what a loss averages over
    'class weights': lambda: learner(classes, drop(), ce(weight=cw), G(40, micro_batch_size=6)),
    'ignored': lambda: learner(data(kind='ignored'), drop(), ce(), G(40, micro_batch_size=2)),
    'smoothing, class weights': lambda: learner(classes, mlp(), LabelSmoothingCrossEntropyFlat(weight=cw), G(40, micro_batch_size=6)),
    'elements': lambda: learner(data(kind='floats'), mlp(), MSELossFlat(), G(40, micro_batch_size=6)),
    'measured': lambda: learner(classes, mlp(), own_mean, G(40, micro_batch_size=6)),
    'measured weights': lambda: learner(classes, mlp(), own_weights, G(40, micro_batch_size=6)),
    'check_loss=False': lambda: learner(classes, mlp(), own_weights, G(40, micro_batch_size=6, check_loss=False)),
    'always': lambda: learner(classes, mlp(), own_weights, G(40, micro_batch_size=6, check_loss='always')),
    'no rule': lambda: learner(classes, mlp(), contrast, G(32, micro_batch_size=6)),
    'floored': lambda: learner(data(kind='rare'), mlp(), floored, G(40, micro_batch_size=4)),
    'floored, rare': lambda: learner(data(160, 'rare'), mlp(), floored, G(40, micro_batch_size=2)),
    'sum': lambda: learner(classes, mlp(), ce(reduction='sum'), G(40, micro_batch_size=6), lr=.001),
    'own sum': lambda: learner(classes, mlp(), own_sum, G(40, micro_batch_size=6)),
    'none': lambda: learner(classes, mlp(), ce(reduction='none'), G(40, micro_batch_size=6)),
    'no mean': lambda: learner(classes, mlp(), ce(), G(40, micro_batch_size=6, normalize=False)),
    'weight=': lambda: learner(data(kind='ignored'), mlp(), ce(), G(40, micro_batch_size=6, weight=lambda l: (l.y != -100).sum())),
    'weight= floor': lambda: learner(data(kind='rare'), mlp(), floored, G(40, micro_batch_size=6, weight=lambda l: (l.y.sum(), 1))),
    # the end of an epoch, and a size that grows
    'drop': lambda: learner(classes, drop(), ce(), G(40, micro_batch_size=6, remainder='drop')),
    'carry': lambda: learner(classes, drop(), ce(), G(40, micro_batch_size=6, remainder='carry')),
    'schedule': lambda: learner(classes, drop(), ce(), GradientAccumulationSchedule(16, 48, finish=1., micro_batch_size=6)),
    # one loss for all parts
    'coupled': lambda: learner(classes, drop(), contrast, G(micro_batch_size=6, coupled=True)),
    'coupled, several': lambda: learner(classes, drop(), contrast, G(32, micro_batch_size=6, coupled=True)),
    'head': lambda: learner(classes, with_head(), ce(), G(32, micro_batch_size=6, coupled='head')),
    'lockstep': lambda: learner(classes, norm(), ce(), G(32, micro_batch_size=6, coupled='batchnorm')),
    'lockstep, dropout': lambda: learner(classes, norm(nn.Dropout(.2)), ce(), G(micro_batch_size=5, coupled='batchnorm')),
    'lockstep, own buffers': lambda: learner(classes, norm(CountsCalls()), ce(), G(32, micro_batch_size=6, coupled='batchnorm')),
    # texts
    'tokens': lambda: learner(texts(), Text(), per_token, G(32, micro_batch_tokens=96)),
    'tokens, unit': lambda: learner(texts(), Text(), CrossEntropyLossFlat(), G(300, unit='tokens', micro_batch_tokens=60)),
    'unit tokens': lambda: learner(texts(), Text(), CrossEntropyLossFlat(), G(300, unit='tokens', micro_batch_size=5)),
    'tokens, auto': lambda: learner(texts(), Text(), CrossEntropyLossFlat(), G(32, micro_batch_tokens='auto')),
    'text classifier': labelled,
    # memory runs out
    'auto': lambda: learner(classes, nn.Sequential(SmallDevice(5), drop()), ce(), G(32, micro_batch_size='auto')),
    'auto, coupled': lambda: learner(classes, nn.Sequential(SmallDevice(5), drop()), contrast, G(micro_batch_size='auto', coupled=True)),
    # what callbacks do
    'mixup': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), MixUp(.4)),
    'mixup, own loss': lambda: learner(classes, drop(), CrossEntropyLossFlat(), G(32, micro_batch_size=6), MixUp(.4)),
    'penalty': lambda: learner(classes, drop(), ce(weight=cw), G(32, micro_batch_size=6), Penalty()),
    'penalty of activations': lambda: learner(classes, drop(), ce(weight=cw), G(32, micro_batch_size=6), ActivationPenalty()),
    'penalty, measured': lambda: learner(classes, drop(), own_weights, G(32, micro_batch_size=6), Penalty()),
    'penalty, tokens': lambda: learner(texts(), Text(), per_token, G(32, micro_batch_tokens=96), Penalty()),
    'replaced': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), Replaces()),
    'new targets': lambda: learner(data(kind='ignored'), drop(), ce(), G(32, micro_batch_size=6), NewTargets()),
    'rates': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), ChangesRates()),
    'gradients': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), ChangesGradients()),
    'hooks': lambda: hooked(learner(classes, drop(), ce(), G(32, micro_batch_size=6))),
    'weights': lambda: learner(classes, drop(), ce(), G(32), ChangesWeights()),
    'buffers': lambda: learner(classes, mlp(CountsCalls()), ce(), G(32, micro_batch_size=6)),
    'batchnorm': lambda: learner(classes, norm(), ce(), G(32, micro_batch_size=6)),
    'terms': with_term,
    'values': lambda: learner(classes, drop(), Keeps(), G(32, micro_batch_size=6), ReadsValue()),
    'values, whole': lambda: learner(classes, drop(), Keeps(), G(32), ReadsValue()),
    'cancelled': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), Cancels()),
    'metrics': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), metrics=accuracy, train_bn=True),
    'noise': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), GradientNoiseScale(every=1)),
    # half precision
    'bf16': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), MixedPrecision('bf16', device='cpu')),
    'fp16': lambda: learner(classes, drop(), ce(), G(32, micro_batch_size=6), MixedPrecision('fp16', device='cpu')),
    'fp16, coupled': lambda: learner(classes, drop(), contrast, G(32, micro_batch_size=6, coupled=True),
                                     MixedPrecision('fp16', device='cpu')),
}

# --- what a fit leaves
def fitted(make):
    "Weights, losses, warnings and the error of a fit of two epochs, and the state of the random numbers after it"
    set_seed(0)
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        learn = make()
        set_seed(0)
        try:
            with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, .1)
            error = None
        except Exception as e: error = f'{type(e).__name__}: {str(e)[:300]}'
    rec = learn.recorder
    return dict(weights=[t.detach().clone() for t in (*learn.model.parameters(), *learn.model.buffers())],
                losses=[float(o) for o in rec.losses], values=[list(v) for v in rec.values], random=torch.get_rng_state(), error=error,
                rule=learn.gradient_accumulation.loss_rule, told=sorted({str(w.message) for w in ws if w.category is FastaccumWarning}))

def differs(a, b):
    "What of two fits is not the same to the last bit"
    def same(u, v):
        if isinstance(u, Tensor): return u.shape == v.shape and bool(((u == v) | (u != u) & (v != v)).all())
        if isinstance(u, (list,tuple)): return len(u) == len(v) and all(map(same, u, v))
        return u == v or (u != u and v != v)
    return [k for k in a if not same(a[k], b[k])]

if __name__ == '__main__':
    torch.set_num_threads(1)
    if len(sys.argv) == 2: pickle.dump({name: fitted(make) for name,make in kinds.items()}, open(sys.argv[1], 'wb'))
    else:
        a,b = (pickle.load(open(f, 'rb')) for f in sys.argv[1:])
        found = {name: differs(a[name], b[name]) for name in a}
        for name,what in found.items():
            if what: print(f'{name}: {", ".join(what)}')
        print(f'{sum(not o for o in found.values())} of {len(a)} fits are the same to the bit')
