"""The devices that the numeric tests train on. `DEVICE=cuda make test` (or xpu, mps) takes that one instead of the CPU
and the simulated one

The fixture `device` (conftest.py) sets `now`; what reference.py makes goes there, and what it reads comes back to the
host."""
from __future__ import annotations
import os
from copy import copy, deepcopy
from functools import partial
import torch
from torch import nn, Tensor

GPU = os.environ.get('DEVICE', '')
if not GPU: import simulated   # whose threads of autograd do not survive a fork: DEVICE=cpu does without
names = [GPU] if GPU else ['cpu', 'sim']
# Its tests compare numbers in float32
torch.backends.cudnn.allow_tf32 = False

# Tests that a device cannot run, and why
_host = 'it feeds the model itself, with tensors of the host, or asks for what the CPU does'
_simulated = 'the simulated device has no sparse tensors, no classes of tensors, files of its own, and no forks'
_cannot = {
    _host: (
        'test_computes_in test_call_within_a_call test_exception_at test_exception_in test_gives_up test_refuses '
        'test_device_cannot test_training_metrics '
        'test_auto_memory test_auto_tries_more_where_memory_can_be_read test_cost test_memory test_memory_of_predictions').split(),
    _simulated: (
        'test_sparse test_auto_unusual_models test_batch_is_put_back test_cancelled test_damaged test_killed test_fit '
        'test_ends').split()}

def cannot(name, test) -> str|None: # Why the device of that name cannot run it
    return next((why for why,tests in _cannot.items() if test in tests and (name != 'cpu' if why is _host else name == 'sim')), None)

class Device:
    "Where tests train"
    def __init__(self, name): self.name,self.device = name,torch.device(name)
    def __repr__(self): return self.name

    @property
    def backend(self): return getattr(torch, self.name)

    def put(self, o):
        "A model, loss, or tensor, there. A loss without tensors stays the same object"
        if self.name == 'cpu': return o
        if isinstance(o, Tensor): return o.to(self.device)
        if isinstance(o, partial): return partial(self.put(o.func), *o.args, **{k: self.put(v) for k,v in o.keywords.items()})
        if isinstance(o, nn.Module): return self.move(deepcopy(o)) if holds_tensors(o) else o
        if isinstance(getattr(o, 'func', None), nn.Module) and holds_tensors(o.func):  # fastai's `BaseLoss`
            o = copy(o)
            o.func = self.put(o.func)
        return o

    def move(self, module):
        for m in module.modules():           # fastai's losses keep weights as plain attributes
            for k,v in vars(m).items():
                if isinstance(v, Tensor): setattr(m, k, v.to(self.device))
        return simulated.move(module, self.device) if self.name == 'sim' else module.to(self.device)

def holds_tensors(module):
    return any(isinstance(o, Tensor) for m in module.modules() for d in (vars(m), m._parameters, m._buffers)
               for o in d.values())

def host(t):
    "A tensor on the host; nothing counts that"
    return simulated.raw(t) if t.device.type == 'sim' else t.detach().cpu()

def to_host(module):
    "A copy of `module` on the host"
    module = deepcopy(module)
    for m in module.modules():
        for k,v in vars(m).items():
            if isinstance(v, Tensor): setattr(m, k, host(v))
    return simulated.move(module, 'cpu') if now.name == 'sim' else module.cpu()

def use(name):
    "Train there from now on"
    global now
    now = Device(name)
    return now

use(names[0])
