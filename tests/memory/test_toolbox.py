"""Every two tools of the memory toolbox together, against a loop written by hand in PyTorch. The table is in
bench/toolbox.py: a new line there is tested here

The loop knows precision, micro-batches and sums in fp32, which change numbers. All else must change none, to the last
bit."""
import pytest
from reference import *
from bench.toolbox import TOOLS, callbacks, pairs
from fastaccum.memory.activations import Compile
from fastaccum.precision.callback import MixedPrecision


class Net(nn.Module):
    "Attention, dropout and BatchNorm, in blocks"
    def __init__(self, d=16, n=2, dropout=.1):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 2, 2*d, dropout, batch_first=True) for _ in range(n))
        self.norm,self.head = nn.BatchNorm1d(d),nn.Linear(d, 4)
    def forward(self, x):
        for l in self.layers: x = l(x)
        return self.head(self.norm(x.mean(1)))

# A step on 16 items and one on what is left, micro-batches of 3, 3 and 2: no format rounds their weights
bs,accum_bs,split = 8,16,[3,3,2]
data = Data(torch.randn(24, 5, 16), torch.arange(24)%4)

def make(names):
    half = any(TOOLS[n].half for n in names)
    set_seed(0)
    model = Net(dropout=0. if 'compile' in names else .1)
    x = data.x.bfloat16() if half else data.x
    return dict(data=Data(x, *data.y), bs=bs, model=model.bfloat16() if half else model, loss_func=nn.CrossEntropyLoss(), lr=.05)

def state(model): return {k: host(v).clone() for k,v in model.state_dict().items()}

def by_callbacks(names):
    cbs = callbacks(names, accum_bs)
    for cb in cbs:
        if isinstance(cb, Compile): torch._dynamo.reset(); cb.kwargs['backend'] = lambda gm, inputs: gm.forward
        if getattr(cb, 'micro_batch_size', None): cb.micro_batch_size = 3
    learn = learner(**make(names))
    learn.add_cbs(cbs)
    set_seed(1)
    learn.fit(1)
    return state(learn.model)

def by_hand(names):
    "An accumulated batch of two loader batches, and one of the third"
    cbs = callbacks(names, accum_bs)
    precision = first(cb for cb in cbs if isinstance(cb, MixedPrecision))
    dtype,scale = (None,1.) if precision is None else dict(bf16=(torch.bfloat16,1.), fp16=(torch.float16,2.**8))[precision.amp_mode.value]
    learn = learner(**make(names))
    model,opt = learn.model,learn.opt_func(learn.splitter(learn.model), lr=.05)
    ps = list(model.parameters())
    def predict(x):
        with torch.autocast(devices.now.name, dtype, enabled=dtype is not None): pred = model(x)
        return pred.float() if dtype else pred
    def backward(x, y, share): add(torch.autograd.grad(learn.loss_func(predict(x), y)*share*scale, ps))
    def coupled(parts, y, share):
        "One loss; then each part from the gradient of its predictions"
        preds = [predict(x) for x in parts]
        joined = torch.cat([p.detach() for p in preds]).requires_grad_()
        up, = torch.autograd.grad(learn.loss_func(joined, y)*share*scale, joined)
        for p,g in zip(preds, up.split([len(p) for p in preds])): add(torch.autograd.grad(p, ps, g))
    def add(grads):
        if cbs[0].grad_dtype is not None: grads = [g.float() for g in grads]
        for p,g in zip(ps, grads): sums[p] = sums[p]+g if p in sums else g
    def step():
        for p in ps: p.grad = None
        for p,g in sums.items():
            p.grad_dtype = g.dtype
            p.grad = g/scale
        opt.step()
        sums.clear()
    sums,sizes = {},split if cbs[0].micro_batch_size else [bs]
    set_seed(1)
    for i,(x,y) in enumerate(learn.dls.train):
        n = accum_bs if i < 2 else bs
        if cbs[0].coupled: coupled(x.split(sizes), y, len(x)/n)
        else:
            for x,y in zip(x.split(sizes), y.split(sizes)): backward(x, y, len(x)/n)
        if i: step()
    return state(model)

some = ('compile', 'compile'), ('offload', 'compile')           # compiling takes longest
def long(pair): return [pytest.mark.long]*('compile' in pair and pair not in some)
@pytest.mark.parametrize('a,b', [pytest.param(*pair, marks=long(pair)) for pair in pairs()])
def test_pair(a, b, device):
    if device.name == 'sim' and 'compile' in (a, b): pytest.skip('PyTorch does not compile tensors that are written in Python')
    ours,hand = by_callbacks((a, b)),by_hand((a, b))
    off = {k: rel_err(ours[k], hand[k]) for k in hand if not torch.equal(ours[k], hand[k])}
    if device.name in ('cpu', 'sim'): assert not off, off
    else: assert all(e < 1e-2 for e in off.values()), off   # a GPU may add in another order each time
