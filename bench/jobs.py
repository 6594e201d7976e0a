"What is measured: small models with data ready in memory, and the fit that every peer gets"
from dataclasses import dataclass
from functools import partial
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from fastaccum import conformance
from fastaccum.conformance import ClassesFirst

class Blocks(nn.Sequential):
    "Blocks that keep their activations for backward, or compute them again there"
    checkpointing = False
    def forward(self, x):
        for block in self: x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x

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

@dataclass
class Job(conformance.Job):
    "A fit of one epoch: SGD without momentum, a step every `n_acc` micro-batches, no validation, no logs, no files"
    n_acc:int=8
    lr:float=.01
    fused:bool=False       # The optimizer's step in one kernel, which skips it by itself when fp16 overflows

    def loader(self, batches=None): return Memory(self.batches if batches is None else batches)

    def optimizer(self, params, **_): return super().optimizer(params, fused=self.fused)

def job(model:str, n_micro:int, micro_bs:int, **kwargs):
    "A `Job` for one of `MODELS`, always with the same weights and data"
    torch.manual_seed(0)
    make,data,*loss_func = MODELS[model]
    device = kwargs.get('device', 'cpu')
    x,y = (t.to(device) for t in data(n_micro*micro_bs))
    return Job(make().to(device), list(zip(x.split(micro_bs), y.split(micro_bs))), **dict(zip(['loss_func'], loss_func)), **kwargs)
