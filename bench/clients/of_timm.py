"timm: models, losses, schedulers in a Learner"
import timm, torch
from functools import partial
from timm import loss as L
from timm.scheduler import CosineLRScheduler
from torch import nn
from fastai.basics import Callback
from . import Case
from .data import conv_net, make, numbers, whole_numbers

x,y = numbers(32, 3, 32, 32),whole_numbers(4, 32)
small,labels = numbers(60, 1, 8, 8),whole_numbers(4, 60)
soft = numbers(60, 4, seed=2).softmax(1)
bits = (numbers(60, 4, seed=3) > 0).float()

class Scheduled(Callback):
    "timm's scheduler, moved after each step"
    run_valid = False
    def before_fit(self):
        stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=.05)        # fastai's optimizer has groups of another form
        self.steps,self.group,self.sched = 0,stand_in.param_groups[0],CosineLRScheduler(stand_in, t_initial=10)
    def after_step(self):
        self.steps += 1
        self.sched.step_update(self.steps)
        self.sched.step(self.steps)
        self.learn.opt.set_hyper('lr', self.group['lr'])

def cases():
    names = 'resnet18', 'mobilenetv3_small_050', 'efficientnet_b0', 'convnext_atto', 'vit_tiny_patch16_224'
    def net(name):
        size = dict(img_size=32, patch_size=8) if 'vit' in name else {}
        return timm.create_model(name, num_classes=4, **size)
    losses = dict(LabelSmoothingCrossEntropy=(L.LabelSmoothingCrossEntropy, labels),
                  SoftTargetCrossEntropy=(L.SoftTargetCrossEntropy, soft),
                  BinaryCrossEntropy=(partial(L.BinaryCrossEntropy, smoothing=0.), bits),
                  AsymmetricLossMultiLabel=(L.AsymmetricLossMultiLabel, bits),
                  AsymmetricLossSingleLabel=(L.AsymmetricLossSingleLabel, labels))
    return [*(Case(name, make(x, y, partial(net, name), nn.CrossEntropyLoss), lr=.01) for name in names),
            *(Case(k, make(small, t, lambda: conv_net(4), f)) for k,(f,t) in losses.items()),
            Case('CosineLRScheduler', make(small, labels, lambda: conv_net(4), nn.CrossEntropyLoss), lambda: [Scheduled()])]
