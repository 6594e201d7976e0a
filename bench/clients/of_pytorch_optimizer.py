"pytorch_optimizer: every optimizer that it lists"
from functools import partial
import pytorch_optimizer as po
from torch import nn
from fastai.optimizer import OptimWrapper
from . import Case
from .data import conv_net, make, numbers, whole_numbers

x,y = numbers(60, 1, 8, 8),whole_numbers(4, 60)

def cases():
    res = []
    for name in sorted(po.get_supported_optimizers()):
        opt = po.load_optimizer(name)
        res.append(
            Case(name, make(x, y, lambda: conv_net(4), nn.CrossEntropyLoss, opt_func=partial(OptimWrapper, opt=opt)),
                 ways=('micro-batches',), lr=.01))
    return res
