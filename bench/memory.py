"""Peak of live activations: 64 items at once, and in 8 micro-batches of 8

Every storage is followed from the operator that makes it to its end, so the figures are the same on every machine.
Weights and data are from before the fit; gradients, which are as large as the weights however many items there are, are
left out too."""
from fastaccum.all import GradientAccumulation
from fastaccum.core.memory import StorageFollower
from .jobs import Blocks, job
from .peers import fit, hand, whole

class Activations(StorageFollower):
    "Follows all that is made but the gradients of `model`"
    def __init__(self, model):
        super().__init__()
        for p in model.parameters(): p.register_post_accumulate_grad_hook(self.leave_out)

    def leave_out(self, p):
        key = p.grad.untyped_storage()._cdata
        self.live -= self.sizes.get(key, 0)
        self.sizes[key] = 0

def split(job): fit(job, GradientAccumulation(micro_batch_size=8))

# Items of a loader batch, and who trains with them
RUNS = {'1x64': (64, whole), '1x64 hand': (64, hand), '8x8 hand': (8, hand), '8x8 whole': (8, whole), '8x8 split': (64, split)}

def peak(run, a_job, checkpointing) -> int: # Bytes
    a_job = a_job.fresh()
    for m in a_job.model.modules():
        if isinstance(m, Blocks): m.checkpointing = checkpointing
    with Activations(a_job.model) as seen: run(a_job)
    return seen.peak

def run() -> list: # One dict a model, precision, and with checkpointing or without
    def row(model, precision, checkpointing):
        peaks = {k: peak(f, job(model, 64//bs, bs, n_acc=64//bs, precision=precision), checkpointing) for k,(bs,f) in RUNS.items()}
        return dict(model=model, precision=precision, checkpointing=checkpointing, **peaks)
    return [row(m, p, c) for m in ('conv net', 'transformer, 256 tokens') for p in ('fp32', 'bf16') for c in (False, True)]
