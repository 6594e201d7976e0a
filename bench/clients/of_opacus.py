"Opacus: gradients of single items, clipped, with noise"
from functools import partial
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils import data
from fastai.basics import DataLoaders, Learner, OptimWrapper
from . import Case
from .data import conv_net, learner, make, numbers, whole_numbers

x,y = numbers(64, 1, 8, 8),whole_numbers(4, 64)

def sampled(): return GradSampleModule(conv_net(4))

def clipped(bs, noise=0., reduction='mean'):
    "Items' gradients are clipped by the optimizer, which adds noise and divides by the number of items that it expects"
    def optimizer(params, lr, **hypers):
        return DPOptimizer(torch.optim.SGD(params, lr=lr), noise_multiplier=noise, max_grad_norm=.5, expected_batch_size=bs,
                           loss_reduction=reduction)
    return learner(bs, x, y, lambda: GradSampleModule(conv_net(4), loss_reduction=reduction),
                   partial(nn.CrossEntropyLoss, reduction=reduction), partial(OptimWrapper, opt=optimizer))

def private(bs):
    "As its guide writes it, with batches that are not drawn at random"
    net,loader = conv_net(4),data.DataLoader(data.TensorDataset(x, y), batch_size=bs)
    opt = torch.optim.SGD(net.parameters(), lr=.05)
    model,opt,loader = PrivacyEngine().make_private(module=net, optimizer=opt, data_loader=loader, noise_multiplier=.1, max_grad_norm=.5,
                                                    poisson_sampling=False)
    return Learner(DataLoaders(loader, loader, device='cpu'), model, loss_func=nn.CrossEntropyLoss(),
                   opt_func=lambda params, **hypers: OptimWrapper(opt=opt))

def cases():
    added = dict(acc=dict(normalize=False), ways=('loader batches',))
    return [Case('GradSampleModule', make(x, y, sampled, nn.CrossEntropyLoss)),
            Case('DPOptimizer', clipped), Case('DPOptimizer, normalize=False', clipped, **added),
            Case('DPOptimizer with noise, normalize=False', partial(clipped, noise=.1), **added),
            Case('DPOptimizer of sums', partial(clipped, reduction='sum'), lr=.005),
            Case('PrivacyEngine', private), Case('PrivacyEngine, normalize=False', private, **added)]
