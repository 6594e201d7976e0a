"Generated data, models and Learners for clients that bring losses, callbacks and optimizers"
import torch
from torch import nn
from fastai.basics import SGD, DataLoader, DataLoaders, Learner, partial

def loaders(bs, *columns, n_valid=16):
    items = list(zip(*columns))
    return DataLoaders(DataLoader(items, bs=bs), DataLoader(items[:n_valid], bs=n_valid), device='cpu')

def numbers(*shape, seed=0): return torch.randn(*shape, generator=torch.manual_seed(seed))
def whole_numbers(high, *shape, seed=0): return torch.randint(high, shape, generator=torch.manual_seed(seed))

def conv_net(out, dim=2, head=True):
    "A convolutional net: `out` numbers an item, or without a head `out` channels at each position"
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[dim]
    body = [conv(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), conv(8, 8 if head else out, 3, padding=1)]
    pool = {2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dim]
    return nn.Sequential(*body, *([pool(1), nn.Flatten(), nn.Linear(8, out)] if head else []))

def learner(bs, x, y, model, loss_func, opt_func=SGD, **kwargs):
    return Learner(loaders(bs, x, y), model(), loss_func=loss_func(), opt_func=opt_func, **kwargs)

def make(x, y, model, loss_func, **kwargs): return partial(learner, x=x, y=y, model=model, loss_func=loss_func, **kwargs)
