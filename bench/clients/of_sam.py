"SAM, sharpness-aware minimization (arXiv:2010.01412): pytorch_optimizer's, and callbacks as they are written for fastai"
from functools import partial
import torch
from pytorch_optimizer import SAM
from torch import nn
from fastai.basics import SGD, Callback, CancelStepException, OptimWrapper
from . import Case
from .data import conv_net, make, numbers, whole_numbers

x,y = numbers(60, 1, 8, 8),whole_numbers(4, 60)
rho = .5

class Sharpness(Callback):
    "Goes uphill by `rho`, and takes the gradient from there"
    run_valid = False
    def ascend(self):
        self.ps = [p for p in self.learn.model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in self.ps]).norm()
        with torch.no_grad():
            self.moved = [p.grad*(rho/(norm + 1e-12)) for p in self.ps]
            for p,e in zip(self.ps, self.moved): p.add_(e)
            for p in self.ps: p.grad.zero_()
    def again(self): self.learn.loss_func(self.learn.model(*self.learn.xb), *self.learn.yb).backward()
    def descend(self):
        with torch.no_grad():
            for p,e in zip(self.ps, self.moved): p.sub_(e)

class SharpStep(Sharpness):
    "Once a step"
    def before_step(self): self.ascend(); self.again(); self.descend()

class SharpGradient(Sharpness):
    "After each backward pass"
    def after_backward(self): self.ascend(); self.again(); self.descend()

class SharpPass(Sharpness):
    "Before the backward pass, which adds nothing then"
    def before_backward(self):
        self.learn.loss_grad.backward()
        self.ascend(); self.again(); self.descend()
        self.learn.loss_grad = self.learn.loss_grad.detach().requires_grad_()

class TwoSteps(Callback):
    "The two steps that the optimizer has for loops that call the model twice"
    run_valid = False
    def before_step(self):
        opt = self.learn.opt.opt
        opt.first_step(zero_grad=True)
        self.learn.loss_func(self.learn.model(*self.learn.xb), *self.learn.yb).backward()
        opt.second_step()
        raise CancelStepException

class Closure(Callback):
    "Gives the optimizer a closure"
    run_valid = False
    def before_step(self):
        def again():
            loss = self.learn.loss_func(self.learn.model(*self.learn.xb), *self.learn.yb)
            loss.backward()
            return loss
        self.learn.opt.opt.step(again)
        raise CancelStepException

def cases():
    def two_steps(params, **hypers): return SAM(params, torch.optim.SGD, rho=rho, **hypers)
    def of(name, cb=None, opt_func=SGD):
        return Case(name, make(x, y, lambda: conv_net(4), nn.CrossEntropyLoss, opt_func=opt_func), lambda: [cb()] if cb else [])
    opt = partial(OptimWrapper, opt=two_steps)
    return [of('SAM in before_step', SharpStep), of('SAM in after_backward', SharpGradient), of('SAM in before_backward', SharpPass),
            of('SAM', opt_func=opt), of('SAM, two steps in before_step', TwoSteps, opt), of('SAM, closure in before_step', Closure, opt)]
