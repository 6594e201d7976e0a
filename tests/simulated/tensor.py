"Tensors of the device: each wraps one of the CPU's, on which its operators run"
import contextlib
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from .backend import let_out, sim
from .counting import memory, trace, waits

device = torch.device('sim:0')
_moves = 'aten::copy_', 'aten::_to_copy'
# Operators whose result has a shape that depends on values
_reads = 'aten::nonzero', 'aten::masked_select', 'aten::unique_dim', 'aten::_unique2', 'aten::equal', 'aten::repeat_interleave'

class _Kept:
    "What fastai would give the class of a tensor of the device, such as its copy on the host, stays as it is"
    def __init__(self, t): self.t = t
    def as_subclass(self, cls): return self.t

class SimStorage:
    "The storage of a tensor of the device: a resize is counted"
    def __init__(self, s): self.s = s
    def __getattr__(self, name): return getattr(self.s, name)
    def resize_(self, n):
        self.s.resize_(n)
        memory.resized(self.s._cdata, n)

class SimTensor(Tensor):
    "`raw` is the CPU's tensor"
    @staticmethod
    def __new__(cls, raw, requires_grad=False):
        return Tensor._make_wrapper_subclass(cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
                                             device=device, requires_grad=requires_grad)
    def __init__(self, raw, requires_grad=False):
        memory.follow(raw)
        self.raw = raw

    def __repr__(self): return f'SimTensor({self.raw})'
    def __reduce_ex__(self, protocol): return _rebuild, (self.raw.detach(), self.requires_grad)  # a file knows the device, as a GPU's

    def as_subclass(self, cls): return self  # another class would not have `raw`
    _before_cast = _Kept
    def untyped_storage(self): return SimStorage(self.raw.untyped_storage())

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.tolist: return args[0].cpu().tolist()
            if func is torch.tensor: args = tree_map(lambda o: o.item() if isinstance(o, SimTensor) else o, args)  # of a list of them
            with let_out(): return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # a class that knows what to do with this one
        if any(t not in (cls, Tensor, torch.nn.Parameter) for t in types): return NotImplemented
        kwargs,name = kwargs or {},func._schema.name
        trace.add(name)
        if name == 'aten::_local_scalar_dense': waits.hit('read')
        if name in _moves and (res := _move(func, name, args, kwargs)) is not None: return res
        if name in _reads or (name.startswith('aten::index') and _has_mask(args[1])): waits.hit(f'read for {name}')
        draws = torch.Tag.nondeterministic_seeded in func.tags
        unwrap = lambda o: _unwrap(o, name)
        with sim.drawing() if draws else contextlib.nullcontext(): res = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        if kwargs.get('device') is not None and not _made_here(kwargs): return res
        known = {id(o.raw): o for o in tree_leaves((args, kwargs)) if isinstance(o, SimTensor)}  # in-place operators return their argument
        return tree_map(lambda o: (known[id(o)] if id(o) in known else SimTensor(o)) if isinstance(o, Tensor) else o, res)

def _made_here(kwargs): return kwargs.get('device') is not None and torch.device(kwargs['device']).type == device.type
def _has_mask(index): return isinstance(index, (tuple, list)) and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in index)

def _move(func, name, args, kwargs):
    "Copies between host and device; None for those within the device"
    if name == 'aten::copy_':
        to,of,non_blocking = args[0],args[1],kwargs.get('non_blocking') or (args[2] if len(args) > 2 else False)
        if isinstance(to, SimTensor) and isinstance(of, SimTensor): return
        if not isinstance(to, SimTensor):
            trace.add('copy to the host') if non_blocking else waits.hit('copy to the host')     # as if into page-locked memory
            return to.copy_(of.raw)
        _to_device(non_blocking)
        to.raw.copy_(of)
        return to
    here = isinstance(args[0], SimTensor)
    if here and kwargs.get('device') is not None and not _made_here(kwargs):
        waits.hit('copy to the host')
        return func(args[0].raw, **{**kwargs, 'non_blocking': False})
    if not here: _to_device(kwargs.get('non_blocking'))

def _to_device(non_blocking): trace.add('copy to the device') if non_blocking else waits.hit('blocking copy to the device')

def _unwrap(o, name):
    if isinstance(o, SimTensor): return o.raw
    if isinstance(o, torch.device): return torch.device('cpu')
    index = name.startswith('aten::index') and isinstance(o, Tensor) and o.dtype in (torch.int64, torch.bool)  # a GPU copies these itself
    if isinstance(o, Tensor) and o.dim() and name not in _moves and not index:
        raise RuntimeError(
            f'Expected all tensors to be on the same device, but found at least two devices, {device} and {o.device}! (in {name})')
    return o

def _rebuild(raw, requires_grad=False): return SimTensor(raw).requires_grad_(requires_grad)
torch.serialization.add_safe_globals([_rebuild])
# with `map_location` on the device a file's storages stay on the host: `_rebuild` and `load_state_dict` take them over
torch.serialization.register_package(5, lambda storage: None, lambda storage, where: storage if where.startswith(device.type) else None)

# --- what makes tensors without getting one
_aten = torch.library.Library('aten', 'IMPL', 'PrivateUse1')
def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return SimTensor(torch.empty(size, dtype=dtype))
def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype))
def _copy_from(t, to, non_blocking=False):                      # `torch.tensor(..., device=)` and `.to(device)`
    _to_device(non_blocking)
    to.raw.copy_(getattr(t, 'raw', t))
    return to
for _name,_f in {'empty.memory_format': _empty, 'empty_strided': _empty_strided, '_copy_from': _copy_from}.items(): _aten.impl(_name, _f)

# --- autocast: products are computed in the lower type, as on a CPU or a GPU; other operators pass
_others = torch.library.Library('_', 'IMPL', 'AutocastPrivateUse1')
_others.fallback(torch.library.fallthrough_kernel)
_products = torch.library.Library('aten', 'IMPL', 'AutocastPrivateUse1')
_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
def _lower(op):
    def f(*args, **kwargs):
        dtype = torch.get_autocast_dtype(device.type)
        args = [o.to(dtype) if isinstance(o, Tensor) and o.dtype == torch.float32 else o for o in args]
        with torch._C._ExcludeDispatchKeyGuard(_autocast): return op(*args, **kwargs)
    return f
for _name in ('linear', 'mm', 'matmul', 'addmm', 'bmm', 'conv1d', 'conv2d'):
    _products.impl(_name, _lower(getattr(torch.ops.aten, _name).default))

# --- there and back
def move(model, to=device):
    """`model.to(to)`, before an optimizer has its parameters: they become tensors of another class, so others. (Never set this for good:
    fastai moves the model at each fit, and the optimizer would be left with parameters that nobody trains)"""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try: return model.to(to)
    finally: torch.__future__.set_overwrite_module_params_on_conversion(False)

def raw(t):
    "The CPU's tensor in `t`, read without being counted; any other as it is"
    t = t.detach()
    return t.raw if isinstance(t, SimTensor) else t
