"Communication: what two ranks send for one step of 8 micro-batches each, and what each of them keeps"
from contextlib import nullcontext
from functools import partial
import torch, torch.distributed as dist
from fastai.basics import *
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from fastaccum.all import *

class CommCounter(TorchDispatchMode):
    "Collectives from here on, and the bytes of their largest tensor: what a rank sends, or, of weights that are put together, has afterwards"
    def __init__(self): super().__init__(); self.calls,self.bytes,self.by_kind = 0,0,{}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split('::')[1].strip('_').removesuffix('_base')
        if func.namespace in ('c10d', '_c10d_functional') and name not in ('wait_tensor', 'barrier'):
            size = max((t.numel()*t.element_size() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), default=0)
            self.calls,self.bytes,self.by_kind[name] = self.calls+1,self.bytes+size,self.by_kind.get(name, 0)+size
        return func(*args, **(kwargs or {}))

WIDTH,LAYERS,ITEMS,MICRO,STEPS = 256,8,64,4,16

def _model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)], nn.Linear(WIDTH, 1))

class Count(Callback):
    "Of the steps, without the order of the items and the start of a fit"
    order = 70
    def before_train(self): self.mode = CommCounter().__enter__()
    def before_batch(self):
        if self.training and self.iter == 0: self.start = self.mode.calls,self.mode.bytes
    def after_train(self):
        self.mode.__exit__(None, None, None)
        self.calls,self.bytes = ((now-old)/STEPS for now,old in zip((self.mode.calls, self.mode.bytes), self.start))

def _kept(params, state):
    "Bytes of weights, gradients and the optimizer's state on this rank"
    local = lambda t: t.to_local() if hasattr(t, 'to_local') else t
    return sum(local(t).numel()*t.element_size() for t in [*params, *(p.grad for p in params), *state] if isinstance(t, Tensor) and t.dim())

def fastaccum_step(cb):
    x,y = torch.randn(ITEMS*STEPS, WIDTH),torch.randn(ITEMS*STEPS, 1)
    dls = DataLoaders.from_dsets(list(zip(x, y)), list(zip(x[:2], y[:2])), bs=ITEMS, num_workers=0, device='cpu')
    learn = Learner(dls, _model(), nn.MSELoss(), cbs=[GradientAccumulation(ITEMS, micro_batch_size=MICRO), cb(), Count()])
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    params = [p for ps in learn.opt.param_lists for p in ps]
    return learn.count.calls, learn.count.bytes, _kept(params, [t for p in params for t in learn.opt.state[p].values()])

def ddp_step(sync_last):
    "The loop that everybody writes: PyTorch's DDP, which sends at every micro-batch, or with `no_sync` until the last"
    model = DistributedDataParallel(_model())
    opt = torch.optim.Adam(model.parameters())
    def step():
        for i in range(ITEMS//2//MICRO):
            with model.no_sync() if sync_last and i < ITEMS//2//MICRO-1 else nullcontext(): model(torch.randn(MICRO, WIDTH)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    for _ in range(2): step()                 # DDP makes its buckets anew in an early step
    with CommCounter() as mode: step()
    params = list(model.parameters())
    return mode.calls, mode.bytes, _kept(params, [t for p in params for t in opt.state[p].values()])

WAYS = {"PyTorch DDP": partial(ddp_step, False), "PyTorch DDP, no_sync": partial(ddp_step, True), 'DataParallel': partial(fastaccum_step, DataParallel),
        'DataParallel, overlap': partial(fastaccum_step, partial(DataParallel, overlap=True)), 'LocalSGD, period 8': partial(fastaccum_step, LocalSGD),
        **{f"FullyShard, '{sync}'": partial(fastaccum_step, partial(FullyShard, sync)) for sync in ('every','last','keep')}}

def _all(): return {name: way() for name,way in WAYS.items()}

def run():
    n = sum(p.numel() for p in _model().parameters())
    return [dict(peer=name, parameters=n, calls=calls, bytes=size, kept=kept) for name,(calls,size,kept) in launch(_all, 2)[0].items()]
