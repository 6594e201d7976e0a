"""An accelerator in Python, for tests on machines without one: `torch.device('sim')`

Every operator runs on the CPU underneath, so a model trained on it comes out as on the CPU, to the last bit (but for
convolutions and attention, for which PyTorch picks other kernels: 1e-4). What a GPU has and a CPU lacks is played out
in Python, and can be counted:

- Tensors of two devices in one operator are an error.
- What makes the host wait is counted, with its place in the source: `waits`.
- Copies and operators can be written down in their order: `trace`.
- The bytes of all storages that live are followed: `memory`. Past a limit operators raise `torch.OutOfMemoryError`, in
forward and in backward.
- Random numbers come from a generator of the device's own.
- Autocast to float16 and bfloat16 works as on the CPU.

    import simulated
    simulated.move(model)                         # before the optimizer is made
    with simulated.waits as waits: train(model)   # then print(waits.sites)
    with simulated.limit(2**20): train(model)     # runs out past 1 MiB

Unlike a GPU it has one device (PyTorch's guard for backends in Python knows no second), one stream and no cache, and
what an operator takes and gives back within itself is not seen. Subclasses of tensors, fastai's for one, lose their
class on the way to it, and `torch.load` puts its tensors back on it whatever `map_location` says.

Import it only where it is used: from then on PyTorch takes it for the machine's accelerator."""
from .counting import Memory, Trace, Waits, limit, memory, trace, waits
from .tensor import SimTensor, device, move, raw
