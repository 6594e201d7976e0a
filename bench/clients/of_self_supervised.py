"self_supervised: callbacks whose losses compare the items of a batch, with coupled=True"
from torch import nn
from fasttransform import Pipeline
from fastai.losses import MSELossFlat
from self_supervised.vision.barlow_twins import BarlowTwins, BarlowTwinsModel
from self_supervised.vision.byol import BYOL, BYOLModel
from self_supervised.vision.moco import MOCO, MoCoModel
from self_supervised.vision.simclr import SimCLR, SimCLRModel
from self_supervised.vision.swav import SWAV, SwAVModel
from . import Case
from .data import conv_net, make, numbers

x,y = numbers(64, 1, 12, 12),numbers(64, 1)
def data_of(k): return (x, y) if k == 'MOCO' else (x[:60], y[:60])       # whose queue takes batches of one size
# Views without random numbers, so that runs can be compared
def as_it_is(x): return x
def mirrored(x): return x.flip(-1)
views = Pipeline(as_it_is, split_idx=0),Pipeline(mirrored, split_idx=0)
def mlp(n, out): return nn.Sequential(nn.Linear(n, 16), nn.ReLU(), nn.Linear(16, out))
def encoder(): return conv_net(8)

def cases():
    nets = dict(SimCLR=lambda: SimCLRModel(encoder(), mlp(8, 8)), BarlowTwins=lambda: BarlowTwinsModel(encoder(), mlp(8, 8)),
                MOCO=lambda: MoCoModel(encoder(), mlp(8, 8)), BYOL=lambda: BYOLModel(encoder(), mlp(8, 8), mlp(8, 8)))
    cbs = dict(SimCLR=lambda: [SimCLR(views)], BarlowTwins=lambda: [BarlowTwins(views)], MOCO=lambda: [MOCO(views, 32)],
               BYOL=lambda: [BYOL(views)])
    res = [Case(k, make(*data_of(k), nets[k], MSELossFlat), cbs[k], acc=dict(coupled=True), ways=('micro-batches',), lr=.01) for k in nets]
    res += [Case(f'{k}, not coupled', make(*data_of(k), nets[k], MSELossFlat), cbs[k], lr=.01) for k in nets]
    return [*res, Case('SWAV', make(*data_of('SWAV'), lambda: SwAVModel(encoder(), mlp(8, 8), nn.Linear(8, 12, bias=False)), MSELossFlat),
                       lambda: [SWAV([*views], (0, 1), K=None)], acc=dict(coupled=True), ways=('micro-batches',), lr=.01)]
