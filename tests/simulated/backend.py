"What PyTorch asks a device for: the module `torch.sim`, its random numbers, and a guard that lets errors out of `backward`"
import contextlib, ctypes
from types import SimpleNamespace
import torch
from torch.utils.backend_registration import _DummyBackendModule, _DummyDeviceGuard, _setup_privateuseone_for_python_backend
from .counting import memory, waits

_total = 2**34
def seeded(seed): return torch.Generator().manual_seed(seed).get_state()

class Backend(_DummyBackendModule):
    "`torch.sim`, with what `torch.cuda` has. Its generator draws what the CPU's would from the same seed"
    rng,_initialized = seeded(0),True       # `checkpoint` keeps the random numbers of a device that says so
    def get_rng_state(self, device=None): return self.rng.clone()
    def set_rng_state(self, state, device=None): self.rng = state.clone()
    def get_rng_state_all(self): return [self.get_rng_state()]
    def set_rng_state_all(self, states): self.set_rng_state(states[0])
    def manual_seed_all(self, seed): self.rng = seeded(seed)  # `torch.manual_seed` calls it
    manual_seed = manual_seed_all

    @contextlib.contextmanager
    def drawing(self):
        "The CPU's operators draw the device's random numbers, inside"
        old = torch.get_rng_state()
        torch.set_rng_state(self.rng)
        try: yield
        finally:
            self.rng = torch.get_rng_state()
            torch.set_rng_state(old)

    def get_amp_supported_dtype(self): return [torch.float16, torch.bfloat16]
    def set_sync_debug_mode(self, mode): waits.is_error = mode == 'error'
    def get_device_properties(self, device=None): return SimpleNamespace(name='simulated', total_memory=_total)
    def set_per_process_memory_fraction(self, fraction, device=None): memory.limit = None if fraction >= 1 else int(fraction*_total)
    def mem_get_info(self, device=None): return (memory.limit or _total)-memory.live, memory.limit or _total
    def memory_allocated(self, device=None): return memory.live
    memory_reserved = memory_allocated
    def max_memory_allocated(self, device=None): return memory.peak
    def reset_peak_memory_stats(self, device=None): memory.reset_peak()
    device = contextlib.nullcontext
    def empty_cache(self): "There is none"
    def synchronize(self, device=None): waits.hit('synchronize')

class Guard(_DummyDeviceGuard):
    """PyTorch's engine for `backward` asks the guard for its type while it unwinds from an error in Python, with the error still set; then
    no function in Python can return, and the process would end. So the first thing here is to take the error away; `let_out` raises it"""
    error = None
    def type_(self):
        _fetch(*_places)
        try: kind,e = _kind.value,_error.value
        except ValueError: return _type  # NULL: there is no error, mostly
        Guard.error = e if isinstance(e, BaseException) else kind(e)
        for o in _parts:                 # `PyErr_Fetch` handed over references: one to the traceback would keep all tensors
            with contextlib.suppress(ValueError): _drop(o.value)
        return _type

_type = torch._C._autograd.DeviceType.PrivateUse1
_fetch,_drop = ctypes.pythonapi.PyErr_Fetch,ctypes.pythonapi.Py_DecRef
_fetch.restype,_drop.argtypes = None,[ctypes.py_object]
_parts = _kind,_error,_traceback = tuple(ctypes.py_object() for _ in range(3))
_places = tuple(map(ctypes.byref, _parts))

@contextlib.contextmanager
def let_out():
    "Raise the error that `Guard` took away, in place of the engine's SystemError"
    try: yield
    except SystemError:
        e,Guard.error = Guard.error,None
        if e is None: raise
    else: return
    raise e

sim = Backend()
_setup_privateuseone_for_python_backend('sim', sim, device_guard=Guard())
