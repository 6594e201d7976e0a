"Loader batches that are split: exact steps, what callbacks see, memory; and sizes that are found by running out of it"
import gc, random, warnings, pytest
from quick import quickly
from collections import namedtuple, OrderedDict
from reference import *
from test_exact import Mixed, case, cases, cls_w, empty_cases, mixed_cases, mixed_loss
from test_precision import elementwise
from bench.measure import SyncCounter
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.training import BnFreeze
from fastai.losses import *
from fastai.text.models.awdlstm import AWD_LSTM
from fastaccum.loop.events import _batch_events as inner
from fastaccum.accumulation.fitting import too_big
from fastaccum.accumulation.witnesses.module_hooks import HookRows
from fastaccum.core.memory import PeakMemory, StorageFollower
from fastaccum.core.microbatch import part_sizes, split_items
import fastaccum.precision.callback

Acc = GradientAccumulation

torch.manual_seed(0)
data = Data(torch.randn(64, 6), torch.randint(4, (64,)))
ragged = Data(data.x[:61], data.y[0][:61])
ce = nn.CrossEntropyLoss()

def batches_of(data, bs): return [data.batch(range(i, min(len(data), i+bs))) for i in range(0, len(data), bs)]

# --- split_items

x,s = torch.arange(10.).view(5, 2),tensor(3.)
Pair = namedtuple('Pair', 'a b')
parts = {  # name: batch of 5 items, its second part of 2
    'tensor':           (x, x[2:4]),
    'fastai tensor':    (TensorImage(x), TensorImage(x[2:4])),
    'tuple':            ((x, x[:,0]), (x[2:4], x[2:4,0])),
    'list':             ([x, x[:,0]], [x[2:4], x[2:4,0]]),
    'dict':             ({'a': x, 'b': x[:,0]}, {'a': x[2:4], 'b': x[2:4,0]}),
    'ordered dict':     (OrderedDict(b=x, a=x), OrderedDict(b=x[2:4], a=x[2:4])),
    'namedtuple':       (Pair(x, [x]), Pair(x[2:4], [x[2:4]])),
    'nested':           (({'a': [x, (x,)]}, x), ({'a': [x[2:4], (x[2:4],)]}, x[2:4])),
    'shared':           ((x, 3, .5, True, 'name', b'bytes', None, s, len), (x[2:4], 3, .5, True, 'name', b'bytes', None, s, len)),
    'shared in a dict': ({'a': x, 'scale': s, 'mode': 'train'}, {'a': x[2:4], 'scale': s, 'mode': 'train'}),
    'strings':          ((x, list('vwxyz')), (x[2:4], ['x', 'y'])),
    'numbers':          ((x, (1, 2, 3, 4, 5)), (x[2:4], (3, 4))),
    'of many lengths':  ((x, [torch.ones(n) for n in (3, 5, 1, 2, 4)]), (x[2:4], [torch.ones(1), torch.ones(2)])),
    'scalars':          ((x, [tensor(float(i)) for i in range(5)]), (x[2:4], [tensor(2.), tensor(3.)])),
    'boxes':            ((x, [{'boxes': torch.ones(n, 4), 'label': n} for n in (2, 0, 5, 1, 3)]),
                         (x[2:4], [{'boxes': torch.ones(n, 4), 'label': n} for n in (5, 1)])),
    'five tensors':     ((x, [x]*5), (x[2:4], [x[2:4]]*5)),
    'five, one shared': ((x, x, 'a', s, x), (x[2:4], x[2:4], 'a', s, x[2:4])),
}

def alike(a, b):
    "Of the same types and values"
    if type(a) is not type(b): return False
    if isinstance(a, dict): return list(a)==list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (tuple,list)): return len(a)==len(b) and all(map(alike, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a is b or a==b

@pytest.mark.parametrize('name', parts)
def test_split_items(name):
    b,second = parts[name]
    res = split_items(b, 2, 5)
    assert len(res)==3 and alike(res[1], second)
    for n in (5, 7): assert alike(split_items(b, n, 5), [b])

bad_parts = {
    'other length':  ((x, torch.ones(3)), r'shape \(3,\).*5 items'),
    'in a dict':     ({'a': x, 'b': [torch.ones(4, 2)]}, r'shape \(4, 2\).*5 items'),
    'packed':        ((x, nn.utils.rnn.pack_sequence([x])), 'PackedSequence'),
    'array':         ((x, np.zeros(5)), 'ndarray'),
    'set':           ((x, {1, 2}), 'set'),
}

@pytest.mark.parametrize('name', bad_parts)
def test_cannot_split(name):
    b,msg = bad_parts[name]
    with pytest.raises(TypeError, match=msg): split_items(b, 2, 5)

def test_few_items():
    "A batch of as many items as it has inputs"
    x = torch.ones(2, 3)
    for xb in ((x, s), (x, 'name'), (x, None), [x, 2.], (x, {'a': x, 'b': s})): assert alike(split_items(xb, 1, 2)[1][0], x[1:]), xb

# --- every step is the step of its items as one batch

splits = {  # items, loader batch, micro-batch, accum_bs
    'none':    (64, 16, 2, None), 'none, 5': (61, 16, 5, None), 'same':    (61, 16, 2, 16), 'between': (61, 16, 5, 24),
    'twice':   (61, 16, 5, 32),   'four':    (64, 16, 2, 64),   'more':    (49, 16, 3, 64), 'one':     (33, 16, 1, 32)}

def check_exact(split, data, loss_func, n_epoch=2, lr=.1, acc={}, **kwargs):
    "A fit that splits its loader batches takes the big batches' steps"
    _,bs,k,accum_bs = splits[split]
    learn = learner(data, bs, Acc(accum_bs, micro_batch_size=k, **acc), Spy(), loss_func=loss_func, **kwargs)
    learn.fit(n_epoch, lr)
    check(learn, data, bs, accumulated(data.sizes(bs), accum_bs or 1, n_epoch=n_epoch))
    return learn

def check_case(name, split, **kwargs):
    data,model,loss_func = case(name, splits[split][0])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', 'accum_bs=.* is more than')
        check_exact(split, data, loss_func, model=model, lr=.01/(64 if 'sum' in name else 1), **kwargs)

two_sums = 'weight 0, all three'  # its smoothing counts targets without weight; test_exact has it, in larger micro-batches

@pytest.mark.parametrize('split', ['none', 'four'])
@pytest.mark.parametrize('name', [c for c in cases if c != two_sums])
def test_losses(name, split): check_case(name, split, n_epoch=1)

@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('name', ['mse', 'class weights', 'ignored, smoothing', 'pixels, ignored', 'own', 'sum, ignored'])
def test_sizes(name, split): check_case(name, split)

@pytest.mark.parametrize('accum_bs', [None, 256, 512, 1024])
def test_large(accum_bs):
    "Unequal numbers of words in loader batches of 256 items"
    torch.manual_seed(0)
    y = torch.randint(4, (1024, 9)).where(torch.arange(9) < torch.randint(10, (1024, 1)), -100)
    data = Data(torch.randn(1024, 9, 6), y)
    learn = learner(data, 256, Acc(accum_bs, micro_batch_size=32), Spy(), loss_func=CrossEntropyLossFlat())
    learn.fit(1, .1)
    check(learn, data, 256, accumulated(data.sizes(256), accum_bs or 1))

@pytest.mark.parametrize('empty', [range(2, 4), range(0, 4), range(16, 32), range(14, 18), range(64)], ids=str)
@pytest.mark.parametrize('name', empty_cases)
def test_without_valid_targets(name, empty):
    loss_func,weight = empty_cases[name]
    data,model,_ = case('ignored', 64)
    data.y[0][list(empty)] = -100
    for split in ('none', 'twice'):
        n = splits[split][0]
        learn = check_exact(split, Data(data.x[:n], data.y[0][:n]), loss_func, lr=.01, acc=dict(weight=weight), model=model)
        assert weights(learn.model).isfinite().all() and tensor(learn.recorder.losses).isfinite().all()

def word_mean(pred, y): return (F.cross_entropy(pred, y, reduction='none')).sum()/(y >= 0).sum().clamp(min=1)
own_weights = {'device': lambda learn: (learn.y >= 0).sum(), 'host': lambda learn: int((learn.y >= 0).sum()),
               'float': lambda learn: (learn.y >= 0).sum().item()/7}

@pytest.mark.parametrize('split', ['none', 'between', 'four'])
@pytest.mark.parametrize('w', own_weights)
def test_own_weight(w, split):
    data,model,_ = case('ignored', splits[split][0])
    check_exact(split, data, word_mean, lr=.01, acc=dict(weight=own_weights[w]), model=model)

class Before(Callback):
    "The gradient of the last micro-batch of a step, before it is divided by what the step's weights add up to"
    run_valid = False
    def after_backward(self): self.grad = grads(self.learn.model)

@pytest.mark.parametrize('k', [None, 5])
@pytest.mark.parametrize('name', ['mse', 'class weights', 'pixels', 'ignored', 'l1'])
def test_range(name, k):
    "Until then it is no larger than at the end, nor much smaller: half precision can hold it"
    data,model,loss_func = case(name, 64)
    for accum_bs in (16, 64):
        learn = learner(data, 16, Acc(accum_bs if k is None else None, micro_batch_size=k), Before(), Spy(),
                        model=model, loss_func=loss_func)
        learn.fit(1, .01)
        assert .2 < learn.before.grad.norm()/learn.spy.steps[-1].grad.norm() < 1.7

def pair_loss(pred, y, z): return F.cross_entropy(pred, y) + .3*F.mse_loss(pred, z)

def test_several_targets():
    torch.manual_seed(0)
    data = Data(torch.randn(61, 6), torch.randint(4, (61,)), torch.randn(61, 4))
    check_exact('twice', data, pair_loss)

@pytest.mark.parametrize('split', ['none', 'between', 'twice'])
def test_not_normalized(split):
    "The gradients of the micro-batches' own losses, added up"
    n,bs,k,accum_bs = splits[split]
    data,model,loss_func = case('ignored, weights', n)
    data.y[0][8:16,0] = 0
    learn = learner(data, bs, Acc(accum_bs, micro_batch_size=k, normalize=False), Spy(), model=model, loss_func=loss_func)
    learn.fit(1, .001)
    steps = accumulated(data.sizes(bs), accum_bs or 1)
    assert len(learn.spy.steps)==len(steps)
    for s,ids in zip(learn.spy.steps, steps):
        micros = [m.tolist() for _,i in ids for m in torch.arange(i*bs, min(n, (i+1)*bs)).split(part_sizes(min(n, (i+1)*bs) - i*bs, k))]
        ref = sum(big_batch(model, s.weights, loss_func, data.batch(m)[0], data.batch(m)[1:])[0] for m in micros if m)
        assert rel_err(s.grad, ref) < 1e-6

@pytest.mark.parametrize('mixer', [MixUp, CutMix])
@pytest.mark.parametrize('name', mixed_cases)
def test_mixed(name, mixer):
    "MixUp and CutMix mix the loader batch: the same inputs, and the same steps, as without splitting"
    loss_func,target = mixed_cases[name]
    torch.manual_seed(1)
    data = Data(torch.randn(61, 6, 5, 5), target()[:61])
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    def fit(k):
        mix = mixer(.8)
        learn = learner(data, 16, Acc(32, micro_batch_size=k), Spy(), mix, Mixed(mix), model=model, loss_func=loss_func)
        own = learn.loss_func
        learn.fit(2, .1)
        assert learn.loss_func is own
        return learn
    whole,split = fit(None),fit(3)
    steps = accumulated(data.sizes(16), 32, n_epoch=2)
    assert len(whole.spy.steps)==len(split.spy.steps)==len(steps)
    for a,b in zip(whole.mixed.batches, split.mixed.batches): assert alike(a, b)
    for s,w,ids in zip(split.spy.steps, whole.spy.steps, steps):
        x,y,y1,lam = map(torch.cat, zip(*[split.mixed.batches[4*e+i] for e,i in ids]))
        ref,_ = big_batch(model, s.weights, mixed_loss(loss_func), x, (y, y1, lam))
        assert rel_err(s.grad, ref) < 2e-6 and rel_err(s.grad, w.grad) < 2e-5
    assert tensor(split.recorder.losses).allclose(tensor(whole.recorder.losses), rtol=1e-5)

# --- any structure of inputs

class Unpacks(nn.Module):
    "Takes what `unpack` makes one tensor"
    def __init__(self, unpack): super().__init__(); self.unpack,self.body = unpack,mlp()
    def forward(self, *xb): return self.body(self.unpack(*xb))

def lists(x): return [o[:i%5+1] for i,o in enumerate(x)]  # of many lengths
def join(b): return torch.cat([b[k] for k in 'ab'], 1)
def pair(x): return {'a': x[:,:3], 'b': x[:,3:]}
inputs = {  # name: loader batch made of `x`, and `x` made of it
    'two':               (lambda x: (x[:,:3], x[:,3:]),                       lambda a, b: torch.cat([a, b], 1)),
    'dict':              (lambda x: (pair(x),),                               join),
    'nested':            (lambda x: ([(x[:,:3],), {'b': [x[:,3:]]}],),        lambda o: torch.cat([o[0][0], o[1]['b'][0]], 1)),
    'shared':            (lambda x: (x, tensor(2.), None, 'half'),            lambda x, two, none, half: x*two*.5),
    'with a scalar':     (lambda x: (x, tensor(1.)),                          lambda x, one: x*one),
    'dict with shared':  (lambda x: ({**pair(x), 'scale': 1., 'n': tensor(1)},), lambda b: join(b)*b['scale']*b['n']),
    'objects':           (lambda x: (x, lists(x)),                            lambda x, l: x + 0*sum(o.sum() for o in l) + 0*x[:len(l)]),
    'a tuple and lists': (lambda x: ((x, tensor(1.)), lists(x)),              lambda xs, l: xs[0]*xs[1] + 0*xs[0][:len(l)]),
    'TensorImage':       (lambda x: (TensorImage(x),),                        noop),
}

@pytest.mark.parametrize('k', [1, 5])
@pytest.mark.parametrize('name', inputs)
def test_inputs(name, k):
    "The last loader batch has 2 items"
    pack,unpack = inputs[name]
    torch.manual_seed(0)
    data = Data(torch.randn(34, 6), torch.randn(34, 4))
    learn = learner(data, 16, Acc(32, micro_batch_size=k), Spy(), before_batch_cb(lambda self, xb, yb: (pack(*xb), yb)),
                    model=Unpacks(unpack))
    learn.fit(1, .1)
    learn.model.unpack = noop
    check(learn, data, 16, accumulated(data.sizes(16), 32))

def test_inputs_that_cannot_be_split():
    learn = learner(data, 16, Acc(micro_batch_size=4), before_batch_cb(lambda self, xb, yb: ((*xb, torch.ones(3)), yb)),
                    model=Unpacks(lambda x, y: x))
    with pytest.raises(TypeError, match=r'\(3,\) into micro-batches: the batch has 16 items. Leave out micro_batch_size'): learn.fit(1)
    assert no_gradients(learn)

@pytest.mark.parametrize('k', [4, 'auto'])
def test_state_between_calls(k):
    "Any loader, also one that does not tell its batch size"
    text = torch.randint(50, (64, 5))
    for dls in (None, DataLoaders(*[batches_of(Data(text, text), 16)]*2)):
        learn = learner(Data(text, text), 16, Acc(micro_batch_size=k), ModelResetter(), loss_func=ce)
        learn.model,learn.dls = AWD_LSTM(50, 4, 6, 1),ifnone(dls, learn.dls)
        with pytest.raises(ValueError, match='ModelResetter'): learn.fit(1)
        assert no_gradients(learn)

@pytest.mark.parametrize('frozen,cb,warns', [(False, [], 1), (True, [], 1), (False, [BnFreeze()], 1), (True, [BnFreeze()], 0)])
@pytest.mark.filterwarnings('default:BatchNorm.:fastaccum.core.warnings.FastaccumWarning')
def test_frozen_batchnorm_gives_no_warning(frozen, cb, warns, recwarn):
    "Its statistics are not those of the micro-batch, so the step is exact. `BnFreeze` alone, or weights alone, do not freeze it"
    def trained(*cbs):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        if frozen: net[1].requires_grad_(False)
        learn = learner(data, 16, *cbs, *cb, model=net, loss_func=ce)
        learn.fit(2)
        return weights(learn.model)
    whole,parts = trained(),trained(Acc(16, micro_batch_size=4))
    assert sum('BatchNorm' in str(w.message) for w in recwarn)==warns
    assert (rel_err(parts, whole) < 1e-5) == (not warns)

@pytest.mark.parametrize('bad', [0, -1, 2.5, '8', True, 'Auto', [4]])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match='micro_batch_size='): Acc(32, micro_batch_size=bad)

# --- what callbacks and metrics see

class Watch(Callback):
    "Writes down events, with the items of the batch then"
    run_valid = False
    def __init__(self, order): self.order,self.calls = order,[]
for ev in inner: setattr(Watch, ev, lambda self, ev=ev: self.calls.append((ev, len(self.learn.xb[0]), len(self.learn.yb[0]))))

@pytest.mark.parametrize('order', [-20, 100])
def test_events(order):
    "Once a loader batch, once a micro-batch, once a step"
    watch = Watch(order)
    learner(ragged, 16, Acc(32, micro_batch_size=5), watch, loss_func=ce).fit(1)
    def whole(ev, n): return [(ev, n, n)]
    def micros(n): return [(ev, k, k) for k in part_sizes(n, 5) for ev in ('after_pred','after_loss','before_backward','after_backward')]
    def step(n): return whole('before_step', n) + whole('after_step', n)
    expected = [whole('before_batch', n) + micros(n) + step(n)*closes + whole('after_batch', n)
                for n,closes in [(16,0),(16,1),(16,0),(13,1)]]
    assert watch.calls==sum(expected, [])

class After(Callback):
    "Writes down what there is after each training batch, before anybody else sees it; the batch is the one before it"
    order,run_valid = -5,False
    def __init__(self): self.preds,self.losses = [],[]
    def before_batch(self): self.batch = self.learn.xb,self.learn.yb
    def after_loss(self): assert self.learn.loss.requires_grad
    def after_batch(self):
        assert self.learn.xb is self.batch[0] and self.learn.yb is self.batch[1] and not self.learn.loss.requires_grad
        self.preds.append(self.learn.pred); self.losses.append(self.learn.loss.item())

@pytest.mark.parametrize('train_metrics', [False, True])
def test_batch_is_put_back(train_metrics):
    learn = learner(ragged, 16, Acc(32, micro_batch_size=5, log_accum_batch=False), Spy(), After(), loss_func=ce, metrics=accuracy)
    learn.recorder.train_metrics = train_metrics
    learn.fit(1)
    for i,(x,y) in enumerate(batches_of(ragged, 16)):
        pred,loss = learn.after.preds[i],learn.after.losses[i]
        assert abs(big_batch(learn.model, learn.spy.steps[i//2].weights, ce, x, (y,))[1]-loss) < 1e-6
        assert pred.shape==(len(x),4) and not pred.requires_grad   # `After` may read it

class Rows(Metric):
    "All predictions and targets, in their order"
    def reset(self): self.sum = 0.
    def accumulate(self, learn):
        self.sum += float(
            (learn.pred.detach().softmax(-1)[range_of(learn.y),learn.y]*torch.arange(1, len(learn.y)+1)).sum())
    @property
    def value(self): return self.sum

def close(a, b, tol=1e-5):
    return torch.allclose(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), rtol=tol,
                          atol=1e-7)

@pytest.mark.parametrize('log', [True, False])
@pytest.mark.parametrize('accum_bs', [None, 16, 40])
def test_training_metrics(accum_bs, log):
    "Accuracy, perplexity (of `learn.loss`) and one that minds the order, as without splitting"
    def fit(k):
        learn = learner(ragged, 16,
                        Acc(16 if k is None and accum_bs is None else accum_bs, micro_batch_size=k,
                            log_accum_batch=log), loss_func=ce, metrics=[accuracy, Perplexity(), Rows()])
        learn.recorder.train_metrics = True
        learn.fit(2, .1)
        return learn.recorder
    a,b = fit(None),fit(5)
    assert close([list(v) for v in a.values], [list(v) for v in b.values]) and close(a.losses, b.losses)
    if not log: assert len(b.losses)==8

@pytest.mark.parametrize('event,ex',
                         [('after_pred', CancelBatchException), ('before_backward', CancelBackwardException),
                          ('before_step', CancelStepException)])
def test_training_metrics_of_a_cancelled_batch(event, ex):
    "The rest of the epoch counts"
    learn = learner(data, 16, Acc(16, micro_batch_size=4), At(event, ex(), 2), loss_func=ce, metrics=accuracy)
    learn.recorder.train_metrics = True
    learn.fit(1)
    assert len(learn.recorder.values[0])==4 and 0 <= learn.recorder.values[0][1] <= 1

class HardOnly(Callback):
    "Counts words with a large loss only, as a training script for segmentation may"
    order,run_valid = 20,False
    def after_pred(self): self.learn.yb = (hard_only(self.learn.pred, self.learn.y),)

def hard_only(pred, y): return torch.where(F.cross_entropy(pred, y, reduction='none') > 1.4, y, -100)
def hard_loss(pred, y): return F.cross_entropy(pred, hard_only(pred, y))

@pytest.mark.parametrize('k', [None, 16, 5, 'auto'])
def test_targets_that_depend_on_predictions(k):
    data,model,_ = case('ignored', 61)
    learn = learner(data, 16, Acc(32, micro_batch_size=k), Spy(), HardOnly(), model=model, loss_func=ce)
    learn.fit(1, .1)
    learn.loss_func = hard_loss
    check(learn, data, 16, accumulated(data.sizes(16), 32))

class Several(nn.Module):
    "Predictions that are not one tensor"
    def __init__(self, pack): super().__init__(); self.body,self.pack = mlp(),pack
    def forward(self, x): return self.pack(self.body(x))

Output = namedtuple('Output', 'logits aux')
outputs = {  # what the model makes of its logits, and how to get them back
    'tuple':    (lambda p: (p, p[:,:2]),                     lambda o: o[0]),
    'list':     (lambda p: [p, p],                           lambda o: o[1]),
    'dict':     (lambda p: {'a': p, 'b': {'c': p}},          lambda o: o['b']['c']),
    'with mean': (lambda p: (p, p.mean()),                   lambda o: o[0]),
    'with None': (lambda p: (p, None, 3),                    lambda o: o[0]),
    'namedtuple': (lambda p: Output(p, p.mean()),            lambda o: o.logits),
}

@pytest.mark.parametrize('name', outputs)
def test_metrics_of_several_predictions(name):
    pack,get = outputs[name]
    def loss(pred, y): return F.cross_entropy(get(pred), y)
    def acc(pred, y): return accuracy(get(pred), y)
    model = Several(pack)
    def fit(k):
        learn = learner(ragged, 16, Acc(16, micro_batch_size=k), model=model, loss_func=loss, metrics=acc)
        learn.recorder.train_metrics = True
        learn.fit(1, .1)
        return learn.recorder
    a,b = fit(None),fit(5)
    assert close(list(a.values[0]), list(b.values[0])) and close(a.losses, b.losses)

class Sizes(nn.Module):
    "Writes down how many items it is called with"
    def __init__(self): super().__init__(); self.body,self.calls = mlp(),[]
    def forward(self, x): self.calls.append((self.training, len(x))); return self.body(x)

def test_validation_is_split():
    learn = learner(data, 16, Acc(micro_batch_size=4), valid=ragged, model=Sizes(), loss_func=ce, metrics=accuracy)
    learn.fit(1)
    valid = [(False, k) for _,y in learn.dls.valid for k in part_sizes(len(y), 4)]
    assert learn.model.calls==[(True, 4)]*16 + valid
    for f in (learn.validate, learn.get_preds): learn.model.calls.clear(); f(); assert learn.model.calls==valid
    assert len(learn.get_preds()[0])==61

def test_mixup_switched_off():
    "What is left from the last mixed batch does not matter"
    mix = MixUp()
    def off(self): mix.run = self.learn.epoch==0
    learn = learner(ragged, 16, Acc(32, micro_batch_size=5), Spy(), mix, Callback(before_epoch=off), loss_func=CrossEntropyLossFlat())
    learn.fit(2, .1)
    learn.spy.steps = learn.spy.steps[2:]
    learn.recorder.losses = []
    check(learn, ragged, 16, accumulated(ragged.sizes(16), 32))

# --- with other callbacks: as without splitting

def fits(run, *cbs, model=None, data=data, accum_bs=32, ks=(None,8), **kwargs):
    "A Learner that `run`s for each micro-batch size"
    res = []
    for k in ks:
        learn = learner(data, 16, Acc(accum_bs, micro_batch_size=k), *[cb() for cb in cbs], model=model, loss_func=ce, **kwargs)
        run(learn)
        res.append(learn)
    return res

def alike_runs(a, b, tol=1e-6):
    return (rel_err(weights(a.model), weights(b.model)) < tol
            and close(a.recorder.losses, b.recorder.losses, max(tol, 1e-5)) and a.recorder.lrs==b.recorder.lrs)

runs = {
    'fit_one_cycle':  lambda l: l.fit_one_cycle(3, .1),
    'flat_cos':       lambda l: l.fit_flat_cos(2, .1),
    'lr_find':        lambda l: l.lr_find(num_it=20, stop_div=False, show_plot=False),
    'clip':           lambda l: l.fit(2, .5, cbs=GradientClip(.1)),
    'freeze':         lambda l: (l.freeze(), l.fit(1, .1), l.unfreeze(), l.fit(1, .1)),
    'two fits':       lambda l: (l.fit(1, .1), l.fit(1, .1)),
    'adam':           lambda l: (setattr(l, 'opt_func', Adam), l.fit(2, .01)),
    'ema of losses':  lambda l: l.fit(1, .1, cbs=[CSVLogger(), SaveModelCallback()]),
}

@pytest.mark.parametrize('accum_bs', [16, 32])
@pytest.mark.parametrize('run', runs)
def test_run(run, accum_bs):
    a,b = fits(runs[run], accum_bs=accum_bs, splitter=lambda m: [list(m[0].parameters()), list(m[2].parameters())])
    assert alike_runs(a, b, 1e-5 if run=='adam' else 1e-6)
    assert len(b.recorder.losses)

@pytest.mark.parametrize('clip', [None, .1])
@pytest.mark.parametrize('amp', ['to_fp16', 'to_bf16'])
def test_mixed_precision(amp, clip):
    "With a model that autocast leaves alone only the loss scale is at work: exact"
    kwargs = dict(init_scale=2.**10) if amp=='to_fp16' else {}
    a,b = fits(lambda l: (getattr(l, amp)(**kwargs), l.fit(3, .1, cbs=L(clip).map(GradientClip))), model=elementwise)
    assert alike_runs(a, b) and not torch.equal(weights(a.model), weights(elementwise))
    a,b = fits(lambda l: (getattr(l, amp)(**kwargs), l.fit(3, .1)))
    assert alike_runs(a, b, .02)

@pytest.mark.parametrize('steps', [1, 3])
def test_overflow(steps):
    "A step that overflows in one micro-batch is skipped as a whole"
    class Overflow(Callback):
        order = 9
        def before_batch(self): self.n = 0
        def before_backward(self):
            if (self.learn.iter, self.n)==(1, 1): self.learn.loss_grad = self.learn.loss_grad*1e38
            self.n += 1
    learn, = fits(lambda l: (l.to_fp16(init_scale=2.**10), l.fit(1, .1)), Overflow, Spy, ks=[4])
    assert len(learn.spy.steps)==1 and learn.mixed_precision.scaler.n_overflows==1 and weights(learn.model).isfinite().all()

# --- memory

class Around(Callback):
    "Runs each training batch in a new `context()`"
    order,run_valid = -100,False
    def __init__(self, context): self.context,self.all = context,[]
    def before_batch(self): self.all.append(self.context().__enter__())
class AroundEnd(Callback):
    order,run_valid,reads_pred = 200,False,False
    def after_batch(self): self.learn.around.all[-1].__exit__(None, None, None)

class Classifier(nn.Module):
    "A transformer, with a class for each of its 16 words"
    def __init__(self, n_cls=4):
        super().__init__()
        self.inp,self.out = nn.Linear(6, 16),nn.Linear(16, n_cls)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0., batch_first=True), 2)
    def forward(self, x): return self.out(self.body(self.inp(x))).transpose(1, 2)

def conv_net():
    return nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

nets = {'conv net': (conv_net(), (6,12,12), (), 4), 'transformer': (Classifier(), (16,6), (16,), 4),
        'words': (Classifier(300), (16,6), (16,), 300)}

def peak(net, bs, k, accum_bs=64, metrics=None):
    "The most memory that a loader batch takes, without parameters, their gradients (from the second one on) and the batch itself"
    model,x,y,n_cls = nets[net]
    torch.manual_seed(0)
    data = Data(torch.randn(192, *x), torch.randint(n_cls, (192, *y)))
    learn = learner(data, bs, Acc(accum_bs, micro_batch_size=k), Around(PeakMemory), AroundEnd(), model=model,
                    loss_func=ce, metrics=metrics, valid=Data(data.x[:1], data.y[0][:1]))
    learn.recorder.train_metrics = metrics is not None
    learn.fit(1, .01)
    return max(m.peak for m in learn.around.all[1:])

@pytest.mark.slow
@pytest.mark.parametrize('net', nets)
def test_memory(net):
    "8x8 items take an eighth of what 1x64 do, as much as loader batches of 8"
    whole,split,small = peak(net, 64, None),peak(net, 64, 8),peak(net, 8, None)
    print(f'{net}: {split/whole*8:.4f} {small/whole*8:.4f} {peak(net, 64, 8, 128)/split:.4f}')
    assert split/whole < 1.05/8
    assert abs(split/small-1) < .02
    assert peak(net, 64, 8, 128)/split < 1.01

def test_memory_of_predictions():
    "They are kept for training metrics only, without what made them"
    plain,kept,whole = peak('conv net', 64, 8),peak('conv net', 64, 8, metrics=accuracy),peak('conv net', 64, None)
    assert plain < kept < plain + 64*4*4*3 < whole/4

# --- host syncs

sync_cases = {'mse': (MSELossFlat(), torch.randn(64, 4)), 'ignored': (CrossEntropyLossFlat(weight=cls_w), data.y[0]), 'CE': (ce, data.y[0])}

@pytest.mark.parametrize('amp,opt,most', [('to_fp32', SGD, 1), ('to_bf16', SGD, 1), ('to_fp16', SGD, 1), ('to_fp32', Adam, 1)])
@pytest.mark.parametrize('k', [2, None, 'auto'])
@pytest.mark.parametrize('name', sync_cases)
def test_syncs(name, k, amp, opt, most):
    "None in a micro-batch, one in a step"
    loss_func,y = sync_cases[name]
    learn = learner(Data(data.x, y), 16, Acc(32, micro_batch_size=k), Around(SyncCounter), AroundEnd(), loss_func=loss_func, opt_func=opt)
    getattr(learn, amp)()
    learn.fit(2, .01)
    assert [sum(c.sites.values()) for c in learn.around.all]==[0, most]*4

# --- 'auto': sizes found by running out of memory

full = {'by type': torch.OutOfMemoryError('full'), 'by message': RuntimeError('HIP out of memory. Tried to allocate'),
        'on the host': MemoryError('full')}

class Norm(nn.BatchNorm1d):
    "BatchNorm that can do with one item"
    def forward(self, x):
        return (super().forward(x) if len(x) > 1
                else F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias))

class Scarce(nn.Module):
    """Runs out of memory with more than `limit(i)` items in loader batch i, at 'start' or 'middle' of forward, or 'back' in the middle of
    backward. `calls`: loader batch and items of each call; `begun`: loader batch, gradients and live memory each time one begins (again)"""
    def __init__(self, limit, where='middle', error=full['by type'], first=None, last=None, noise=.1):
        super().__init__()
        self.limit,self.where,self.error,self.noise,self.calls,self.begun,self.follower = limit,where,error,noise,[],[],None
        self.first = ifnone(first, nn.Sequential(nn.Linear(6, 8), Norm(8), nn.Dropout(.3)))
        self.last = ifnone(last, nn.Sequential(nn.Tanh(), nn.Linear(8, 4)))

    def begin(self, i): self.i,self.begins = i,True
    def check(self, where, n):
        if not self.training or where!=self.where or n <= self.limit(self.i): return
        self.begins = True
        raise deepcopy(self.error)

    def forward(self, x):
        if self.training:
            if self.begins:
                self.begun.append((self.i, [p.grad is not None for p in self.parameters()], self.follower
                                   and self.follower.live))
            self.begins = False
            self.calls.append((self.i, len(x)))
        self.check('start', len(x))
        if self.training: x = x*(1 + self.noise*(random.random() + np.random.rand()))
        h = self.first(x)
        self.check('middle', len(x))
        if h.requires_grad: h.register_hook(lambda g: self.check('back', len(x)))
        return self.last(h)

class Count(Callback):
    "Tells the model which loader batch it is, of all epochs; `sizes`: the micro-batch size of each"
    order,run_valid = -5,False
    def __init__(self, sizes=None): self.sizes,self.n_begun = sizes,-1
    def before_fit(self): self.learn.loss_func.check = self.learn.model.check  # for `ScarceLoss`
    def before_batch(self):
        self.n_begun += 1
        self.learn.model.begin(self.n_begun)
        if self.sizes is not None: self.learn.gradient_accumulation.micro_batch_size = self.sizes[min(self.n_begun, len(self.sizes)-1)]

class ScarceLoss(nn.CrossEntropyLoss):
    "Runs out of memory when the model says so"
    def forward(self, pred, y):
        self.check('loss', len(y))
        return super().forward(pred, y)

def state(learn):
    "All that training has changed, to the bit"
    scale = learn.mixed_precision.scaler.state_dict() if hasattr(learn, 'mixed_precision') else None
    return (weights(learn.model).clone(), [b.clone() for b in learn.model.buffers()], tensor(learn.recorder.losses),
            torch.get_rng_state(), random.random(), np.random.rand(), scale)

def auto(model, sizes=None, accum_bs=32, data=ragged, amp='to_fp32', cbs=None, loss_func=None, remainder='step',
         fit=lambda l: l.fit(2, .1), weight=None, **kwargs):
    "A Learner that trained with 'auto', or with known `sizes` of micro-batches for each loader batch of 16 items"
    learn = learner(data, 16,
                    Acc(accum_bs, micro_batch_size='auto' if sizes is None else sizes[0], remainder=remainder,
                        weight=weight), Count(sizes), *L(cbs and cbs()), model=model,
                    loss_func=ifnone(loss_func, ce), dl_type=partial(DataLoader, shuffle=True), **kwargs)
    learn.dls.train.rng.seed(0)
    getattr(learn, amp)()
    if sizes is not None: learn.model.limit = lambda i: 1000
    fit(learn)
    return learn

def nearly_alike(a, b):
    if isinstance(a, (tuple,list)): return len(a)==len(b) and all(map(nearly_alike, a, b))
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6) if isinstance(a, Tensor) and a.is_floating_point() else alike(a, b)

def check_auto(sizes, model, same=alike, **kwargs):
    "'auto' ends with micro-batches of these sizes, and does what they do, to the bit"
    (found,a),(known,b) = [(l, state(l)) for l in (auto(model, s, **kwargs) for s in (None, sizes))]
    for o,p in zip(a, b): assert same(o, p)
    for i in range_of(sizes):
        x,y = ([n for j,n in l.model.calls if j==i] for l in (found,known))
        assert x[-len(y):]==y
    return found,known

limits = {  # largest number of items that fit in each loader batch, sizes that are found
    'from the start': (lambda i: 5,                 [4]*8),
    'later':          (lambda i: 16 if i < 4 else 9, [16]*4 + [8]*4),
    'in the second of a step': (lambda i: 16 if i < 1 else 9, [16] + [8]*7),
    'ever less':      (lambda i: [16, 15, 8, 7, 7, 3, 2, 1][i], [16, 8, 8, 8, 4, 2, 2, 1]),
    'one item':       (lambda i: 1,                 [1]*8),
    'enough':         (lambda i: 16,                [16]*8),
}

# it runs out while it is measured, too
@pytest.mark.filterwarnings('ignore:What ScarceLoss averages over could not be measured .OutOfMemoryError')
@pytest.mark.parametrize('accum_bs', [None, 32, 48])
@pytest.mark.parametrize('where', ['start', 'middle', 'back', 'loss'])
@pytest.mark.parametrize('limit', quickly(['later', 'ever less', 'one item'], limits))
def test_auto(limit, where, accum_bs):
    "Dropout, BatchNorm, random numbers of Python and numpy, the order of the items in the next epoch, losses: all as with known sizes"
    f,sizes = limits[limit]
    same = nearly_alike if where == 'loss' else alike               # what was measured in smaller groups adds up to rounding
    check_auto(sizes, Scarce(f, where), same, accum_bs=accum_bs, loss_func=ScarceLoss())

@pytest.mark.parametrize('error', full)
@pytest.mark.parametrize('amp', ['to_fp16', 'to_bf16'])
@pytest.mark.parametrize('where', ['middle', 'back'])
def test_auto_mixed_precision(where, amp, error):
    f,sizes = limits['ever less']
    check_auto(sizes, Scarce(f, where, full[error]), amp=amp)

def at_calls(*calls):
    "A limit: memory runs out in the forward passes of these numbers, for no reason"
    n = iter(range(10**6))
    return lambda i: 0 if next(n) in calls else 1000

@pytest.mark.parametrize('calls,sizes', [((0,), [8]*8), ((1,), [16] + [8]*7), ((0,5), [8]*2 + [4]*6), ((0,2,5), [2]*8), ((7,), [16]*7+[7])])
@pytest.mark.parametrize('where', ['middle', 'back'])
def test_auto_in_any_micro_batch(where, calls, sizes):
    check_auto(sizes, Scarce(at_calls(*calls), where))

class Shifts(nn.Module):
    "A buffer that is made anew, a frozen weight, one that gets no gradient, and sparse gradients"
    def __init__(self):
        super().__init__()
        self.emb,self.out,self.unused = nn.Embedding(10, 8, sparse=True),nn.Linear(6, 8),nn.Linear(2, 2)
        self.out.bias.requires_grad_(False)
        self.register_buffer('mean', torch.zeros(8))
    def forward(self, x):
        h = self.out(x) + self.emb((x.sum(1).abs()*3).long().clamp(max=9))
        if self.training: self.mean = .9*self.mean + .1*h.detach().mean(0)
        return h - self.mean

@pytest.mark.filterwarnings('ignore:The model changes its buffers first.mean in each forward pass')
@pytest.mark.parametrize('where', ['middle', 'back'])
@pytest.mark.parametrize('limit', ['from the start', 'ever less', 'in the second of a step'])
def test_auto_unusual_models(limit, where):
    f,sizes = limits[limit]
    check_auto(sizes, Scarce(f, where, first=Shifts()), opt_func=partial(OptimWrapper, opt=torch.optim.SGD))

def two_groups(m): return [list(m.first.parameters()), list(m.last.parameters())]

class Freeze(Callback):
    def before_fit(self): self.learn.opt.freeze_to(1)

@pytest.mark.parametrize('where,cb', [('middle', Freeze), ('start', Freeze), ('middle', None), ('back', None)])
def test_auto_gradients_that_are_none(where, cb):
    "They are none when the loader batch begins again"
    f,sizes = limits['from the start']
    begun = {}
    for i,has_grad,_ in check_auto(sizes, Scarce(f, where), cbs=cb, splitter=two_groups)[0].model.begun:
        assert begun.setdefault(i, has_grad)==has_grad
    assert not any(begun[0]) and any(begun[7])

def wide(limit, where): return Scarce(limit, where, first=nn.Linear(6, 512), last=nn.Sequential(nn.Tanh(), nn.Linear(512, 4)))

@pytest.mark.parametrize('where', quickly(['middle', 'back'], ['start', 'middle', 'back', 'loss']))
@pytest.mark.parametrize('amp', ['to_fp32', 'to_fp16'])
def test_auto_memory(amp, where, monkeypatch):
    """What the failed attempt took is free when the next begins. Gradients are copied in loader batches that go on with
    a step, and only then"""
    model = wide(limits['ever less'][0], where)
    monkeypatch.setattr(HookRows, '_few', lambda self, t: None)     # a witness keeps some rows of what the model's hook gets
    with StorageFollower() as f:
        class Follow(Callback):
            def before_fit(self): self.learn.model.follower = f
        learn = auto(model, cbs=Follow, amp=amp, loss_func=ScarceLoss())
    first,size = {},sum(4*p.numel() for p in model.parameters())
    # measuring keeps a prediction, and a witness a sample of the weights, which is much of so small a model
    for i,_,live in learn.model.begun: assert abs(first.setdefault(i, live)-live) < .2*size, (i, first[i], live)
    assert len(learn.model.begun)==12
    for i in (3,5,7): assert abs(first[i]-first[i-1]-size) < .2*size
    assert abs(first[6]-first[2]) < .2*size

class ScarceCallback(Callback):
    order = 20
    def after_loss(self): self.learn.model.check('callback', len(self.learn.y))

def auto_with(where=('middle','back'), first=None, limit='ever less', **kwargs): return L(where), first, limit, kwargs

limits_with = {**limits, 'ever less, of 16': (limits['ever less'][0], [16, 8, 8, 4, 4, 2, 2, 1])}   # 13 items fit in parts of 7 and 6

cases_auto = {
    'one cycle':        dict(fit=lambda l: l.fit_one_cycle(2, .1)),
    'lr_find':          dict(fit=lambda l: l.lr_find(num_it=4, show_plot=False), limit='from the start'),
    'clip':             dict(cbs=lambda: GradientClip(.1)),
    'mixup':            dict(cbs=MixUp, loss_func=CrossEntropyLossFlat()),
    'cutmix':           dict(cbs=CutMix, loss_func=CrossEntropyLossFlat(),
                             data=Data(torch.randn(61, 6, 4, 4), ragged.y[0]),
                             first=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 8))),
    'training metrics': dict(
        cbs=lambda: Callback(before_fit=lambda self: setattr(self.learn.recorder, 'train_metrics', True)),
        metrics=accuracy),
    'carry':            dict(accum_bs=40, remainder='carry'),
    'ignored targets':  dict(data=Data(data.x, data.y[0].where(torch.arange(64)%7 > 1, -100)), limit='ever less, of 16'),
    'own weight':       dict(data=Data(data.x, data.y[0].where(torch.arange(64)%7 > 1, -100)),
                             weight=own_weights['host'], limit='from the start'),
    'in a callback':    dict(cbs=ScarceCallback, where='callback'),
}

@pytest.mark.slow
@pytest.mark.parametrize('name', cases_auto)
def test_auto_with(name):
    where,first,limit,kwargs = auto_with(**cases_auto[name])
    f,sizes = limits_with[limit]
    for w in where:
        a,b = check_auto(sizes, Scarce(f, w, first=first), **kwargs)
        assert [list(v) for v in a.recorder.values]==[list(v) for v in b.recorder.values]

def test_auto_tells_each_change_once(capsys):
    auto(Scarce(limits['ever less'][0]))
    out = capsys.readouterr().out
    assert [out.count(f'out of memory, going on with micro-batches of {n} items') for n in (8, 4, 2, 1)]==[1]*4 and len(out.splitlines())==4

class MicroSizes(Callback):
    "What a log of the steps is told"
    order,run_valid = 30,False
    def before_fit(self): self.all = []
    def after_step(self): self.all.append(self.learn.gradient_accumulation.step_values['micro_bs'])

@pytest.mark.parametrize('k,expected', [(5, [5]*4), (100, [100]*4)])
def test_step_values(k, expected):
    learn = learner(ragged, 16, Acc(16, micro_batch_size=k), MicroSizes(), loss_func=ce)
    learn.fit(1)
    assert learn.micro_sizes.all==expected

def test_auto_step_values():
    assert auto(Scarce(limits['ever less'][0]), accum_bs=None, cbs=MicroSizes).micro_sizes.all==limits['ever less'][1]

class Resized(Callback):
    "Small, large, small images"
    def before_batch(self):
        if self.learn.epoch!=1: self.learn.xb = (self.learn.x[...,:2],)

class Images(nn.Module):
    "Holds 100 pixels"
    def __init__(self): super().__init__(); self.body,self.calls = nn.Linear(6, 4),[]
    def forward(self, x):
        if self.training:
            self.calls.append(len(x))
            if x[:,0].numel() > 70: raise torch.OutOfMemoryError('full')
        return self.body(x.flatten(2).mean(-1))

def test_auto_remembers_each_shape():
    torch.manual_seed(0)
    data = Data(torch.randn(32, 6, 4, 4), torch.randint(4, (32,)))
    learn = learner(data, 16, Acc(micro_batch_size='auto'), Resized(), MicroSizes(), model=Images(), loss_func=ce)
    learn.fit(3)
    small,large = [16, 8, 8, 8, 8],[16, 8, 4, 4, 4, 4, 4, 4, 4, 4]
    assert learn.model.calls==small + large + [8]*4
    assert learn.micro_sizes.all==[8, 8, 4, 4, 8, 8]
    learn.fit(1)
    assert learn.model.calls[-4:]==[8]*4

def test_auto_tries_more_where_memory_can_be_read(monkeypatch):
    "At the start of the next fit, where there may be more of it now. (On a CPU, whose free memory nobody reads, the size stays)"
    learn = learner(data, 16, Acc(micro_batch_size='auto'), Count(), model=Scarce(lambda i: 5 if i < 4 else 9), loss_func=ce)
    learn.fit(1)
    monkeypatch.setattr('fastaccum.accumulation.callback.available_bytes', lambda device: 2**30)
    learn.fit(1)
    monkeypatch.undo()
    learn.fit(1)
    assert [[n for i,n in learn.model.calls if i==begin] for begin in (0,4,8)]==[[16, 8, 4, 4, 4, 4], [16, 8, 8], [8, 8]]

@pytest.mark.parametrize('error', full)
@pytest.mark.parametrize('where', ['start', 'middle', 'back', 'loss'])
def test_auto_one_item_too_big(where, error):
    learn = learner(data, 16, Acc(micro_batch_size='auto'), Count(), model=Scarce(lambda i: 0, where, full[error]), loss_func=ScarceLoss())
    with pytest.raises(torch.OutOfMemoryError, match='Not even one item fits.*to_bf16.*checkpointing') as e: learn.fit(1)
    assert 'full' in str(e.value) or 'HIP' in str(e.value)
    assert e.value.__context__ is None  # it would keep what the last attempt took
    assert [n for _,n in learn.model.calls]==[16, 8, 4, 2, 1]
    learn.model.limit = lambda i: 100
    learn.fit(1)
    assert len(learn.recorder.losses)==4

def test_too_big_tells_the_peak(monkeypatch):
    "Where the allocator counts"
    assert 'GiB' not in str(too_big('full'))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda: 3*2**29)
    assert '(1.5 GiB were in use at most)' in str(too_big('full'))

class InPlace(nn.Module):
    "Changes its input"
    def __init__(self): super().__init__(); self.body = mlp()
    def forward(self, x):
        if len(x) > 4: x.mul_(.5); raise torch.OutOfMemoryError('full')
        return self.body(x)

def test_auto_input_changed_in_place():
    learn = learner(data, 16, Acc(micro_batch_size='auto'), model=InPlace(), loss_func=ce)
    with pytest.raises(RuntimeError, match='changed it in place.*full'): learn.fit(1)

others = [ValueError('memory'), RuntimeError('mat1 and mat2 shapes cannot be multiplied'),
          RuntimeError('CUDA error: device-side assert'), KeyError('out of memory'), KeyboardInterrupt()]

@pytest.mark.parametrize('error', others, ids=repr)
@pytest.mark.parametrize('where', ['start', 'back'])
def test_other_errors(where, error):
    "They pass as they are, at once"
    learn = learner(data, 16, Acc(micro_batch_size='auto'), Count(), model=Scarce(lambda i: 0, where, error), loss_func=ce)
    with pytest.raises(type(error)) as e: learn.fit(1)
    assert str(e.value)==str(error) and len(learn.model.calls)==1

def test_out_of_memory_elsewhere():
    "In validation, a callback's own work, the step: not caught"
    def fail(*args, **kwargs): raise torch.OutOfMemoryError('full')
    for event in ('before_validate', 'before_batch', 'after_batch', 'before_step'):
        learn = learner(data, 16, Acc(micro_batch_size='auto'), Callback(**{event: fail}), loss_func=ce)
        with pytest.raises(torch.OutOfMemoryError, match=fr'`{event}`:\n\tfull') as e: learn.fit(1)
        assert 'Not even one' not in str(e.value)
    class Evaluated(nn.Linear):
        def forward(self, x): return super().forward(x) if self.training else fail()
    with pytest.raises(torch.OutOfMemoryError, match='^full'):
        learner(data, 16, Acc(micro_batch_size='auto'), model=Evaluated(6, 4), loss_func=ce).fit(1)

# --- a micro-batch that is cancelled, or fails

class At(Callback):
    "Raises `ex` at `event` of one micro-batch, counted from 0, of the loader batch `batch`, once"
    order,run_valid = 20,False
    def __init__(self, event, ex, micro, batch=1):
        self.event,self.ex,self.at = event,ex,(batch,micro)
        for ev in ('after_pred', event): setattr(self, ev, partial(self.act, ev))
    def before_batch(self): self.n = -1
    def act(self, ev):
        self.n += ev=='after_pred'
        if ev!=self.event or self.ex is None or (self.learn.iter, self.n)!=self.at: return
        ex,self.ex = self.ex,None
        raise ex

def items(*parts): return [i for a,b in parts for i in range(a, b)]
stopped = {  # event, exception, micro-batch (of 2 items, in the second loader batch of 16): items of each step
    'batch, after_pred 3':       ('after_pred', CancelBatchException, 3,         [items((0,16)), items((16,22), (32,48)), items((48,64))]),
    'batch, after_pred 0':       ('after_pred', CancelBatchException, 0,         [items((0,16)), items((32,48)), items((48,64))]),
    'batch, after_loss 7':       ('after_loss', CancelBatchException, 7,         [items((0,16)), items((16,30), (32,48)), items((48,64))]),
    'batch, before_backward 3':  ('before_backward', CancelBatchException, 3,    [items((0,16)), items((16,22), (32,48)), items((48,64))]),
    'batch, after_backward 3':   ('after_backward', CancelBatchException, 3,     [items((0,16)), items((16,24), (32,48)), items((48,64))]),
    'batch, after_backward 7':   ('after_backward', CancelBatchException, 7,     [items((0,16)), items((16,48)), items((48,64))]),
    'backward 3':                ('before_backward', CancelBackwardException, 3, [items((0,16)), items((16,22), (24,48)), items((48,64))]),
    'backward 7':                ('before_backward', CancelBackwardException, 7, [items((0,16)), items((16,30), (32,48)), items((48,64))]),
    'train, after_pred 3':       ('after_pred', CancelTrainException, 3,         [items((0,16)), items((16,22))]),
    'train, after_pred 0':       ('after_pred', CancelTrainException, 0,         [items((0,16))]),
    'train, after_backward 3':   ('after_backward', CancelTrainException, 3,     [items((0,16)), items((16,24))]),
    'epoch, after_pred 3':       ('after_pred', CancelEpochException, 3,         [items((0,16)), items((16,22))]),
    'fit, after_pred 3':         ('after_pred', CancelFitException, 3,           [items((0,16))]),
}

def check_items(learn, data, steps):
    "Every step had the gradient of these items"
    assert len(learn.spy.steps)==len(steps)
    for s,ids in zip(learn.spy.steps, steps):
        x,*y = data.batch(ids)
        ref,_ = big_batch(learn.model, s.weights, learn.loss_func, x, y)
        assert rel_err(s.grad, ref) < 1e-6

@pytest.mark.parametrize('k,accum_bs', [(2, 16), (2, None), ('auto', 16)])
@pytest.mark.parametrize('name', stopped)
def test_cancelled(name, k, accum_bs):
    "What was back-propagated counts, once; the step comes with the items that make it full"
    event,ex,micro,steps = stopped[name]
    learn = learner(data, 16, Acc(accum_bs, micro_batch_size=k), Spy(), Count(), At(event, ex(), micro), After(),
                    model=Scarce(lambda i: 2, 'start', first=nn.Linear(6, 8), noise=0), loss_func=ce)
    learn.fit(1, .1)
    learn.model.limit = lambda i: 100
    check_items(learn, data, steps)
    assert no_gradients(learn) and learn.gradient_accumulation.n_items==0

@pytest.mark.parametrize('ex', [ValueError('bad'), KeyboardInterrupt(), CancelFitException()], ids=repr)
@pytest.mark.parametrize('event', ['after_pred', 'after_backward'])
def test_next_fit(event, ex):
    "It begins anew, whatever ended the last one"
    learn = learner(data, 16, Acc(32, micro_batch_size=2), Spy(), At(event, ex, 3), loss_func=ce)
    try: learn.fit(1, .1)
    except (ValueError, KeyboardInterrupt): pass
    learn.fit(1, .1)
    check_items(learn, data, [range(32), range(32, 64)])

def test_error_in_a_part():
    "A loss that needs all items of the batch fails in a micro-batch: its error says so, once"
    def pairs(pred, y): return F.cross_entropy(pred, y) + pred[torch.arange(16)].mean()
    for bs in (16, 17):
        learn = learner(Data(data.x[:34], data.y[0][:34]), bs, Acc(micro_batch_size=5), loss_func=pairs)
        says = r"out of (range|bounds).*\(In micro-batch 1 of 4, with [45] of the loader batch's 1[67] items. A loss.*coupled=True"
        with pytest.raises(IndexError, match=says) as e: learn.fit(1)
        assert str(e.value).count('In micro-batch')==1
    learn = learner(data, 8, Acc(), loss_func=pairs)
    with pytest.raises(IndexError) as e: learn.fit(1)
    assert 'In micro-batch' not in str(e.value)
