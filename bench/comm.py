"Communication: what two ranks send for one step of 8 micro-batches each, and what each of them keeps"
import ctypes
from contextlib import nullcontext, suppress
from functools import partial
import torch, torch.distributed as dist
from fastai.basics import *
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from fastaccum.all import *

class CommCounter(TorchDispatchMode):
    """Collectives from here on, and the bytes of their largest tensor: what a rank sends, or, of weights that are put
    together, has afterwards"""
    def __init__(self): super().__init__(); self.calls,self.bytes,self.by_kind = 0,0,{}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split('::')[1].strip('_').removesuffix('_base')
        if func.namespace in ('c10d', '_c10d_functional') and name not in ('wait_tensor', 'barrier'):
            size = max((t.numel()*t.element_size() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), default=0)
            self.calls,self.bytes,self.by_kind[name] = self.calls+1,self.bytes+size,self.by_kind.get(name, 0)+size
        return func(*args, **(kwargs or {}))

WIDTH,LAYERS,ITEMS,MICRO,STEPS = 256,8,64,4,16
WIDE = 1024     # for memory: the weights of the smaller net are lost in what a process takes anyway

def _model(width):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)], nn.Linear(width, 1))

class Count(Callback):
    "Of the steps, without the order of the items and the start of a fit"
    order = 70
    def before_train(self): self.mode = CommCounter().__enter__()
    def before_batch(self):
        if self.training and self.iter == 0: self.start = self.mode.calls,self.mode.bytes
    def after_train(self):
        self.mode.__exit__(None, None, None)
        self.calls,self.bytes = ((now-old)/self.n_iter for now,old in zip((self.mode.calls, self.mode.bytes), self.start))

def _kept(params, state):
    "Bytes of weights, gradients and the optimizer's state on this rank"
    local = lambda t: t.to_local() if hasattr(t, 'to_local') else t
    return sum(local(t).numel()*t.element_size() for t in [*params, *(p.grad for p in params), *state] if isinstance(t, Tensor) and t.dim())

def fastaccum_step(cb, width=WIDTH, steps=STEPS):
    x,y = torch.randn(ITEMS*steps, width),torch.randn(ITEMS*steps, 1)
    dls = DataLoaders.from_dsets(list(zip(x, y)), list(zip(x[:2], y[:2])), bs=ITEMS, num_workers=0, device='cpu')
    learn = Learner(dls, _model(width), nn.MSELoss(), cbs=[GradientAccumulation(ITEMS, micro_batch_size=MICRO), cb(), Count()])
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    params = [p for ps in learn.opt.param_lists for p in ps]
    return learn.count.calls, learn.count.bytes, _kept(params, [t for p in params for t in learn.opt.state[p].values()])

def ddp_step(sync_last, width=WIDTH, steps=3):
    "The loop that everybody writes: PyTorch's DDP, which sends at every micro-batch, or with `no_sync` until the last"
    model = DistributedDataParallel(_model(width))
    opt = torch.optim.Adam(model.parameters())
    def step():
        for i in range(ITEMS//2//MICRO):
            with model.no_sync() if sync_last and i < ITEMS//2//MICRO-1 else nullcontext():
                model(torch.randn(MICRO, width)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    for _ in range(steps-1): step()           # DDP makes its buckets anew in an early step
    with CommCounter() as mode: step()
    params = list(model.parameters())
    return mode.calls, mode.bytes, _kept(params, [t for p in params for t in opt.state[p].values()])

WAYS = {"PyTorch DDP": partial(ddp_step, False), "PyTorch DDP, no_sync": partial(ddp_step, True),
        'DataParallel': partial(fastaccum_step, DataParallel),
        'DataParallel, overlap': partial(fastaccum_step, partial(DataParallel, overlap=True)),
        'LocalSGD, period 8': partial(fastaccum_step, LocalSGD),
        **{f"FullyShard, '{sync}'": partial(fastaccum_step, partial(FullyShard, sync)) for sync in ('every','last','keep')}}

def _all(): return {name: way() for name,way in WAYS.items()}

def _status(key):
    "Bytes, from Linux"
    return 1024*next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(key))

def peak(way):
    "Bytes a weight that this process takes at most, beyond what it had before; None where Linux does not count them"
    way(width=16, steps=3)                    # what is loaded once
    with suppress(AttributeError, OSError): ctypes.CDLL(None).mallopt(-3, 2**16)   # M_MMAP_THRESHOLD: what is freed is given back at once
    try:
        with open('/proc/self/clear_refs', 'w') as f: f.write('5')   # the peak begins anew
        before = _status('VmRSS')
    except OSError: return
    way(width=WIDE, steps=2)
    return (_status('VmHWM')-before)/sum(p.numel() for p in _model(WIDE).parameters())

def run():
    n = sum(p.numel() for p in _model(WIDTH).parameters())
    return [dict(peer=name, parameters=n, calls=calls, bytes=size, kept=kept,
                 peak=max(launch(peak, 2, WAYS[name]), default=None, key=lambda v: v or 0))
            for name,(calls,size,kept) in launch(_all, 2)[0].items()]
