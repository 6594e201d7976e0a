"What is measured: small models with data ready in memory, and the fit that every peer gets"
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

class Blocks(nn.Sequential):
    "Blocks that keep their activations for backward, or compute them again there"
    checkpointing = False
    def forward(self, x):
        for block in self: x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x

class ClassesFirst(nn.Module):
    "Where cross entropy wants the classes of a sequence"
    def forward(self, x): return x.transpose(1, 2)

def mlp(): return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

def conv_net():
    def conv(): return nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
    blocks = [nn.Sequential(*conv(), *conv()) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), Blocks(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

def transformer(n_token=64, d=64):
    layers = [nn.TransformerEncoderLayer(d, 4, 4*d, dropout=0, batch_first=True, norm_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(n_token, d), Blocks(*layers), nn.Linear(d, n_token), ClassesFirst())

def vectors(n): return torch.randn(n, 32), torch.randint(10, (n,))
def images(n):  return torch.randn(n, 3, 32, 32), torch.randint(10, (n,))
def numbers(n): return torch.randn(n, 32), torch.randn(n, 10)
def tokens(n, length=64): return torch.randint(64, (n, length)), torch.randint(64, (n, length))
def padded(n):
    "Texts of 1 to 64 tokens; what pads them does not count"
    x,y = tokens(n)
    for o in y: o[torch.randint(1, 65, ()):] = -100
    return x, y

MODELS = {'MLP 32-64-10': (mlp, vectors), 'MLP, squared error': (mlp, numbers, F.mse_loss), 'conv net': (conv_net, images),
          'transformer': (transformer, tokens), 'transformer, padded': (transformer, padded),
          'transformer, 256 tokens': (transformer, partial(tokens, length=256))}

class Memory(list):
    "Batches in memory as a loader: what fastai and the Trainer ask a loader for"
    drop_last,device,n_inp = False,torch.device('cpu'),1
    def __init__(self, batches):
        super().__init__(batches)
        sizes = [len(next(iter(b.values())) if isinstance(b, dict) else b[0]) for b in batches]
        self.bs,self.n,self.dataset = max(sizes, default=1),sum(sizes),range(sum(sizes))

def nothing(): pass

@dataclass
class Job:
    "A fit of one epoch: SGD without momentum, a step every `n_acc` micro-batches, no validation, no logs, no files"
    model:nn.Module
    batches:list           # Micro-batches (x, y)
    n_acc:int=8            # Micro-batches of an accumulated batch
    precision:str='fp32'   # or 'bf16', 'fp16': autocast
    fused:bool=False       # The optimizer's step in one kernel, which skips it by itself when fp16 overflows
    loss_func:callable=F.cross_entropy
    lr:float=.01
    accum_bs:int=None      # Items of an accumulated batch, default those of `n_acc` whole micro-batches
    loader:callable=Memory # Makes what peers iterate over
    device:str='cpu'       # Where the model and the batches are
    on_step:callable=nothing # Called after each step of the optimizer, gradients still there

    def __post_init__(self):
        self.micro_bs = len(self.batches[0][0])
        self.accum_bs = self.accum_bs or self.n_acc*self.micro_bs

    def fresh(self, **kwargs): return replace(self, model=deepcopy(self.model), **kwargs)

    def optimizer(self, params, **_):
        opt = torch.optim.SGD(params, lr=self.lr, fused=self.fused)
        opt.register_step_post_hook(lambda *_: self.on_step())
        return opt

    @property
    def dtype(self): return dict(bf16=torch.bfloat16, fp16=torch.float16).get(self.precision)
    def autocast(self): return torch.autocast(self.device, self.dtype) if self.dtype else nullcontext()

def job(model:str, n_micro:int, micro_bs:int, **kwargs):
    "A `Job` for one of `MODELS`, always with the same weights and data"
    torch.manual_seed(0)
    make,data,*loss_func = MODELS[model]
    device = kwargs.get('device', 'cpu')
    x,y = (t.to(device) for t in data(n_micro*micro_bs))
    return Job(make().to(device), list(zip(x.split(micro_bs), y.split(micro_bs))), **dict(zip(['loss_func'], loss_func)), **kwargs)
