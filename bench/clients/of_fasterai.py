"fasterai: distillation, regularization, sparse and pruned nets"
from torch import nn
from fastai.basics import set_seed
from fasterai.core.all import *
from fasterai.distill.all import *
from fasterai.distill import losses as L
from fasterai.regularize.all import RegularizeCallback
from fasterai.sparse.all import SparsifyCallback
from . import Case
from .data import conv_net, make, numbers, whole_numbers

x,y = numbers(60, 1, 8, 8),whole_numbers(4, 60)

def teacher():
    set_seed(7)
    return conv_net(4)

def distil(loss, **kwargs): return lambda: [KnowledgeDistillationCallback(teacher(), loss, **kwargs)]

def cases():
    make_case = lambda name, cbs, **kwargs: Case(name, make(x, y, lambda: conv_net(4), nn.CrossEntropyLoss), cbs, **kwargs)
    layers = dict(activations_student='model.0', activations_teacher='0')
    return [make_case('distillation, SoftTarget', distil(L.SoftTarget)), make_case('distillation, Logits', distil(L.Logits)),
            make_case('distillation, Mutual', distil(L.Mutual)),
            make_case('features, FitNet', distil(L.FitNet, **layers)), make_case('features, Attention', distil(L.Attention, **layers)),
            make_case('RegularizeCallback', lambda: [RegularizeCallback(large_final, 'filter')]),
            make_case('SparsifyCallback', lambda: [SparsifyCallback(30, 'weight', 'local', large_final, one_cycle)])]
