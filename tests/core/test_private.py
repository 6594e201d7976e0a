"What is used of PyTorch's private parts: all of it stands in one room, and a part that is missing or changed is an error before training"
import re
from pathlib import Path
import pytest, torch
from torch import nn
from fastaccum.all import *
from fastaccum.core import private
from fastaccum.core.host import HostGradients

root = Path(__file__).resolve().parents[2]

@pytest.fixture(autouse=True)
def looked_at_anew():
    private.check_parts.cache_clear()
    yield
    private.check_parts.cache_clear()

# What makes a callback that needs the part
makers = dict(accumulation=lambda: GradientAccumulation(64), grad_device=lambda: GradientAccumulation(64, grad_device='cpu'),
              batchnorm=lambda: GradientAccumulation(64, micro_batch_size=8, coupled='batchnorm'),
              exact=lambda: GradientAccumulation(micro_batch_size=8, exact=True), scaler=lambda: DynamicLossScaler('cpu'),
              chunks=lambda: ChunkedLoss(nn.CrossEntropyLoss(), nn.Linear(4, 3)))

@pytest.mark.parametrize('feature', private.needs)
def test_all_there(feature):
    private.check_parts(feature)
    makers[feature]()

# Where a part stands, and what then fails
missing = [(torch._C._autograd, '_get_sequence_nr', 'accumulation'), (torch.autograd, '_unsafe_preserve_version_counter', 'accumulation'),
           (torch._C, 'DisableTorchFunctionSubclass', 'accumulation'), (torch._C, 'DisableTorchFunctionSubclass', 'chunks'),
           (torch._C, '_current_graph_task_id', 'grad_device'), (torch._C._autograd, '_top_saved_tensors_default_hooks', 'batchnorm'),
           (torch._C._autograd, '_pop_saved_tensors_default_hooks', 'batchnorm'), (torch._C, '_len_torch_dispatch_stack', 'batchnorm'),
           (torch._C._autograd, '_push_saved_tensors_default_hooks', 'batchnorm'), (torch, '_amp_update_scale_', 'scaler'),
           (torch._C, '_dispatch_tls_set_dispatch_key_included', 'exact')]
@pytest.mark.parametrize('where, name, feature', missing)
def test_missing(monkeypatch, where, name, feature):
    monkeypatch.delattr(where, name)
    with pytest.raises(RuntimeError, match='needs .*, which PyTorch .* lacks or has changed: install an older PyTorch') as e:
        makers[feature]()
    assert name in str(e.value) or feature == 'batchnorm' and 'saved-tensor hooks' in str(e.value)

# Another meaning of a part
changed = [('number_of', lambda node: 0, 'accumulation'), ('gradient_dtype', lambda node, i: None, 'batchnorm'),
           ('top_hooks', lambda: None, 'batchnorm'), ('same_version', lambda t: torch.no_grad(), 'accumulation'),
           ('update_scale', lambda *args: None, 'scaler'), ('in_backward', lambda: True, 'grad_device'),
           ('plain_tensors', torch.no_grad, 'chunks'), ('drawn_by', lambda f: torch.no_grad(), 'exact')]
@pytest.mark.parametrize('name, f, feature', changed)
def test_changed(monkeypatch, name, f, feature):
    monkeypatch.setattr(private, name, f)
    with pytest.raises(RuntimeError, match='lacks or has changed: install an older PyTorch .*, or a newer fastaccum, or leave out'):
        makers[feature]()

def test_oldest():
    "The message names the lower bound"
    assert f"({re.search('torch>=([0-9.]+)', (root/'settings.ini').read_text(encoding='utf-8'))[1]} is the oldest" in message()

def message():
    with pytest.MonkeyPatch.context() as m, pytest.raises(RuntimeError) as e:
        m.setattr(private, 'same_version', None)
        private.check_parts('accumulation')
    return str(e.value)

def test_without_them_elsewhere(monkeypatch):
    "What does not need a part works without it"
    monkeypatch.delattr(torch._C._autograd, '_push_saved_tensors_default_hooks')
    monkeypatch.delattr(torch, '_amp_update_scale_')
    GradientAccumulation(64)

inner = r'torch\._C\b|torch\.autograd\._|torch\._amp_|\b_sequence_nr\b|\b_input_metadata\b|_execution_engine'
def test_in_one_room():
    found = {f.relative_to(root/'fastaccum').as_posix() for f in (root/'fastaccum').rglob('*.py')
             if re.search(inner, f.read_text(encoding='utf-8'))}
    assert found == {'core/private.py'}

def test_unscale():
    grads,found = [torch.tensor([2., 4.])],torch.zeros(1)
    private.unscale(grads, found, torch.tensor([.5]))
    assert grads[0].tolist() == [1, 2] and found.item() == 0
    private.unscale([torch.tensor([float('inf')])], found, torch.tensor([.5]))
    assert found.item() == 1

def test_in_backward():
    seen,ended = [],[]
    x = torch.ones(2, requires_grad=True)
    def look(g):
        seen.append(private.in_backward())
        private.after_backward(lambda: ended.append(True))
    x.register_hook(look)
    x.sum().backward()
    assert seen == ended == [True] and not private.in_backward()
