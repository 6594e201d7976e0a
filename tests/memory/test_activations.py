"Recomputed, offloaded and compiled: exact together with all else, and gone after the fit; memory foretold"
import pickle, random
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
import numpy as np, pytest, torchvision.models as tv
from reference import *
from fastai.layers import ResBlock
import fastaccum.memory.advice
from fastai.text.all import AWD_LSTM, get_language_model

from fastai.vision.models.xresnet import xresnet18
from fastaccum.memory.activations import ActivationCheckpointing, ActivationOffload, Compile
from fastaccum.memory.activations import Recompute, find_blocks
from fastaccum.core.memory import PeakMemory
from fastaccum.precision.callback import MixedPrecision
from quick import quickly

pytestmark = pytest.mark.filterwarnings('ignore:Compile.backend=.eager.., PyTorch.s backend for debugging')

class Net(nn.Module):
    "Attention, dropout and BatchNorm, in blocks; `draw` is one more source of random numbers"
    def __init__(self, d=16, n=3, dropout=.1, draw=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 2, 2*d, dropout, batch_first=True) for _ in range(n))
        self.norm,self.head,self.draw = nn.BatchNorm1d(d),nn.Linear(d, 4),draw
    def forward(self, x):
        for l in self.layers: x = l(x)
        return self.head(self.norm(x.mean(1)))

data = Data(torch.randn(22, 5, 16), torch.arange(22)%4)

def fit(*cbs, model=Net, data=data, bs=8, n_epoch=2, **kwargs):
    "All of the model's state after a fit"
    set_seed(0)
    learn = learner(data, bs, *cbs, model=model(), loss_func=nn.CrossEntropyLoss(), lr=.05, **kwargs)
    set_seed(1)
    learn.fit(n_epoch)
    learn.remove_cbs(cbs)
    return {k: v.clone() for k,v in learn.model.state_dict().items()}

def same(a, b): return a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)

# -- Recomputed ---------------------------------------------------------------------------------------------------
images = Data(torch.randn(6, 3, 32, 32), torch.arange(6)%4)
nets = {'resnet18': 8, 'convnext_tiny': 18, 'swin_t': 12, 'efficientnet_b0': 16, 'densenet121': 58, 'regnet_y_400mf': 16}
vit = partial(tv.VisionTransformer, 32, 8, 2, 2, 16, 32, dropout=.1, num_classes=4)

@pytest.mark.parametrize('name', quickly([], ['vit', *nets], ['convnext_tiny', 'efficientnet_b0', 'densenet121', 'regnet_y_400mf']))
def test_nets(name):
    "Blocks are found, and weights and statistics are the same to the last bit"
    make = vit if name=='vit' else partial(getattr(tv, name), num_classes=4)
    assert len(find_blocks(make())) == nets.get(name, 2)
    run = partial(fit, model=make, data=images, bs=3, n_epoch=1)
    precision = [MixedPrecision('bf16')] if name in ('vit','resnet18') else []
    assert same(run(ActivationCheckpointing(), *precision), run(*precision))

@pytest.mark.slow
def test_other_nets():
    assert type(find_blocks(xresnet18())[0]).__name__ == 'ResBlock'
    assert type(find_blocks(get_language_model(AWD_LSTM, 20))[0]).__name__ == 'WeightDropout'
    for m in (nn.Linear(2, 2), mlp(), tv.alexnet()):
        with pytest.raises(ValueError, match='No blocks found'): find_blocks(m)

class Draws(nn.Module):
    "Random numbers that are not PyTorch's, and a buffer that decides what is computed"
    def __init__(self, d=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, d), nn.Tanh())
        self.register_buffer('scale', torch.ones(1, 1))
    def forward(self, x):
        self.scale *= 1.1
        return self.body(x)*self.scale*random.random() + np.random.rand()*x

def test_other_state():
    "Random numbers of Python and NumPy, and buffers that are changed in place, are what they were"
    make = lambda: nn.Sequential(Draws(), Draws(), nn.Flatten(), nn.Linear(80, 4))
    assert same(fit(ActivationCheckpointing(), model=make), fit(model=make))

def test_own_forward():
    "A block whose `forward` was replaced by the user has that one after the fit"
    m = Net()
    own = m.layers[0].forward = partial(nn.TransformerEncoderLayer.forward, m.layers[0])
    learn = learner(data, 8, ActivationCheckpointing(), loss_func=nn.CrossEntropyLoss())
    learn.model = m
    inside = []
    learn.add_cb(On('after_pred', lambda l: inside.append([type(o.forward).__name__ for o in m.layers])))
    learn.fit(1)
    assert inside[0] == ['Recompute']*3 and m.layers[0].forward is own and 'forward' not in vars(m.layers[1])

tools = {'checkpointing': ActivationCheckpointing, 'offload': lambda: ActivationOffload(0), 'compile': lambda: Compile(backend='eager')}

@pytest.mark.slow
@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError, CancelFitException])
@pytest.mark.parametrize('event', ['before_epoch', 'after_pred', 'before_validate', 'after_epoch'])
def test_gone(event, ex):
    "Whatever ends the fit, and wherever: the model is as before, copies that were made in it are plain"
    set_seed(0)
    learn = learner(data, 8, *(f() for f in tools.values()), model=Net(), loss_func=nn.CrossEntropyLoss())
    names,keys,twins = [n for n,_ in learn.model.named_modules()],list(learn.model.state_dict()),[]
    def end(learn):
        twins.extend((deepcopy(learn.model), pickle.loads(pickle.dumps(learn.model))))
        raise ex('stopped')
    learn.add_cb(On(event, end, training=None))
    try: learn.fit(1)
    except ex: pass
    for m in (learn.model, *twins):
        assert ([n for n,_ in m.named_modules()]==names and list(m.state_dict())==keys and isinstance(m, Net)
                and m._compiled_call_impl is None)
        assert not any(isinstance(vars(c).get('forward'), Recompute) for c in m.modules())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    learn.remove_cb(On)
    learn.fit(1)

@pytest.mark.slow
def test_fits_in_a_row():
    "lr_find and fine_tune: each fit in its own context"
    learn = learner(data, 8, *(f() for f in tools.values()), GradientAccumulation(16, micro_batch_size=4), model=Net(),
                    loss_func=nn.CrossEntropyLoss())
    with learn.no_bar(): learn.lr_find(num_it=6, show_plot=False)
    learn.fine_tune(1)
    assert learn.get_preds()[0].shape == (22,4)

# -- Compiled -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kwargs',
                         [dict(mode='reduce-overhead'), dict(mode='max-autotune'),
                          dict(options={'triton.cudagraphs': True}), dict(backend='cudagraphs')])
def test_no_cuda_graphs(kwargs):
    "PyTorch accumulates wrong gradients in them: an error before training, however the model was compiled"
    with pytest.raises(ValueError, match='CUDA graphs.*max-autotune-no-cudagraphs'): fit(GradientAccumulation(8), Compile(**kwargs))
    if 'backend' in kwargs: return
    with pytest.raises(ValueError, match='CUDA graphs'): fit(GradientAccumulation(8), model=lambda: torch.compile(Net(), **kwargs))

class Wrong(nn.Linear):
    def forward(self, x): return super().forward(x[...,1:])

def test_own_errors(recwarn):
    "A shape that does not fit is the model's own error, not the compiler's"
    wrong = lambda: nn.Sequential(nn.Flatten(), Wrong(80, 4))
    with pytest.raises(RuntimeError, match='shapes cannot be multiplied'): fit(Compile(backend='eager'), model=wrong)
    assert not [w for w in recwarn if 'Compile' in str(w.message)]

@pytest.mark.slow
def test_no_compiler(monkeypatch, tmp_path, recwarn):
    "PyTorch's own compiler, where there is none for C++"
    torch._dynamo.reset()
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
    monkeypatch.setattr(torch._inductor.config.cpp, 'cxx', ('/no/compiler',))
    assert same(fit(Compile(), model=partial(Net, n=1)), fit(model=partial(Net, n=1)))
    assert len([w for w in recwarn if 'Compile: torch.compile failed' in str(w.message)]) == 1

# -- Validation ---------------------------------------------------------------------------------------------------
class Sizes(nn.Module):
    "Notes how many items it is given"
    def __init__(self): super().__init__(); self.body,self.seen = Net(),[]
    def forward(self, x): self.seen.append(len(x)); return self.body(x)

@pytest.mark.parametrize('size', [3, 'auto', None])
def test_validation_is_split(size):
    "The same predictions, losses and metrics from micro-batches, in the fit and outside of it; with and without targets"
    def get(k):
        set_seed(0)
        return learner(data, 11, GradientAccumulation(11, micro_batch_size=k), model=Sizes(),
                       loss_func=nn.CrossEntropyLoss(), metrics=[accuracy, Perplexity()])
    learn,whole = get(size),get(None)
    most = max if size == 3 else (lambda o: 3)
    learn.validate(); whole.validate()
    for o in (learn, whole): o.model.seen.clear()
    assert np.allclose(learn.validate(), whole.validate(), rtol=1e-6)
    assert most(learn.model.seen) == 3 and max(whole.model.seen) == 22
    for kw in ({}, dict(dl=DataLoader(Data(data.x), bs=22))):
        (p,*_),(q,*_) = learn.get_preds(**kw),whole.get_preds(**kw)
        assert torch.allclose(p, q, atol=1e-6)
    learn.model.seen.clear()
    learn.fit(1)
    assert most(learn.model.seen) == 3

# -- Sums in fp32 -------------------------------------------------------------------------------------------------
class Weights(Callback):
    "The gradient that the optimizer gets, and the float64 sum of the same micro-gradients"
    order = 12
    def before_fit(self):
        self.sum,self.p = 0.,self.learn.model[0].weight
        self.hook = self.p.register_hook(self.add)
    def add(self, g): self.sum = self.sum+g.double()
    def before_step(self): self.grad = self.p.grad.clone()
    def after_step(self): self.hook.remove()

wide = partial(GradientAccumulation, grad_dtype=torch.float32)
def half(): return nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
halves = Data(torch.randn(1024, 32).bfloat16(), torch.arange(1024)%4)

@pytest.mark.parametrize('native', [True, False])
def test_sums(native, monkeypatch):
    "256 micro-batches; where PyTorch has no `grad_dtype` too"
    if not native: monkeypatch.setattr('fastaccum.core.grads.hasattr', lambda o, k: False, raising=False)
    def error(f):
        learn = learner(halves, 256, f(1024, micro_batch_size=4), spy:=Weights(), model=half(),
                        loss_func=nn.CrossEntropyLoss(), valid=Data(halves.x[:4], halves.y[0][:4]))
        learn.fit(1)
        assert all(p.grad is None for p in learn.model.parameters()) or f is GradientAccumulation
        if hasattr(spy.p, 'grad_dtype'): assert spy.p.grad_dtype is torch.bfloat16
        return rel_err(spy.grad, spy.sum),rel_err(spy.sum.float(), spy.sum)
    (off,rounded),(plain,_) = error(wide),error(GradientAccumulation)
    assert off < max(1e-8, 1.5*rounded) and plain > 5e-3      # hardly more than the exact sum loses that is rounded to fp32 once

torch_opts = {k: partial(OptimWrapper, opt=partial(f, **kw))
              for k,f,kw in (('AdamW', torch.optim.AdamW, {}), ('AdamW fused', torch.optim.AdamW, dict(fused=True)),
              ('SGD', torch.optim.SGD, dict(momentum=.9)), ('SGD fused', torch.optim.SGD, dict(fused=True)))}
all_opts = {**{f.__name__: f for f in (SGD, RMSProp, Adam, RAdam, QHAdam, Larc, Lamb, ranger)}, **torch_opts}

@pytest.mark.parametrize('opt', all_opts)
def test_optimizers_step(opt):
    "With sums in fp32; they are clipped as such, whatever the optimizer takes"
    kinds = []
    look = On('before_step', lambda l: kinds.append({p.grad.dtype for p in l.model.parameters()}), order=15)
    learn = learner(halves, 256, wide(512), GradientClip(1.), look, model=half(), loss_func=nn.CrossEntropyLoss(),
                    opt_func=all_opts[opt], lr=.05,
                    valid=Data(halves.x[:4], halves.y[0][:4]))
    before = weights(learn.model)
    learn.fit(2)
    assert kinds == [{torch.float32}]*4 and not torch.equal(weights(learn.model), before) and weights(learn.model).isfinite().all()
    assert all(p.grad is None for p in learn.model.parameters())
    learn.fit(1)

def test_other_dtypes():
    for dtype in (torch.float64, torch.float16, 'float32'):
        with pytest.raises(ValueError, match='pass torch.float32'): GradientAccumulation(8, grad_dtype=dtype)

# -- Foretold -----------------------------------------------------------------------------------------------------
opts = dict(SGD=partial(SGD, mom=.9), Adam=Adam, AdamW=partial(OptimWrapper, opt=torch.optim.AdamW), Lamb=Lamb)
class Residual(nn.Module):
    def __init__(self, d): super().__init__(); self.body = nn.Sequential(nn.Linear(d, 4*d), nn.GELU(), nn.Linear(4*d, d))
    def forward(self, x): return x+self.body(x)
foreseen = dict(transformer=(partial(Net, n=2), (5,16)), mlp=(lambda: nn.Sequential(Residual(64), Residual(64), nn.Linear(64, 4)), (64,)),
                convs=(lambda: nn.Sequential(*[ResBlock(1, 3 if i==0 else 8, 8) for i in range(3)],
                                             nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), (3,8,8)))

@pytest.mark.slow
@pytest.mark.parametrize('opt', opts)
@pytest.mark.parametrize('net', foreseen)
def test_foretold(net, opt):
    "The forecast is within 1% of a fit's peak, plain, in bf16, recomputed, and split"
    make,shape = foreseen[net]
    d = Data(torch.randn(64, *shape), torch.arange(64)%4)
    ways = dict(plain=[], bf16=[MixedPrecision('bf16')], recomputed=[ActivationCheckpointing()],
                both=[MixedPrecision('bf16'), ActivationCheckpointing()])
    if opt == 'AdamW': ways['split'] = [GradientAccumulation(micro_batch_size=8)]
    for way,cbs in ways.items():
        learn = learner(d, 32, *cbs, model=make(), loss_func=CrossEntropyLossFlat(), opt_func=opts[opt], valid=Data(*d[:32]))
        foretold = learn.memory_advice().peak
        with PeakMemory() as real: learn.fit(1)
        learn.remove_cbs(cbs)
        assert abs(foretold/real.peak-1) < .01, (way, foretold, real.peak)

class Recurrent(nn.Module):
    def __init__(self, layer): super().__init__(); self.layer,self.out = layer(6, 6),nn.Linear(6, 6)
    def forward(self, x):
        y = self.layer(x)
        return self.out(y[0] if isinstance(y, tuple) else y)

@pytest.mark.parametrize('layer', [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_keep_nothing(layer):
    "They overwrite what their matrix products have computed, so what is kept selectively would be something else"
    torch.manual_seed(0)
    net,x = nn.Sequential(Recurrent(layer), Recurrent(layer)).double(),torch.randn(4, 6).double()
    grads = []
    for recomputed in (nullcontext(), ActivationCheckpointing(selective=True).recomputed(net)):
        net.zero_grad()
        with recomputed: net(x).square().sum().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    for a,b in zip(*grads): assert torch.equal(a, b)
