"""On a GPU: items or tokens per second and the peak of memory, at equal effective batch

One step is one effective batch, whoever takes it: at once ('big batch'), or in micro-batches. The batches are on the
device already. A clock is read after `synchronize`; the first steps warm up. What has no memory for the big batch is
left empty."""
import gc, time
from functools import partial
from typing import NamedTuple
import torch, torch.nn.functional as F
from torch import nn
from fastaccum.conformance import accumulated
from fastaccum.core.memory import PeakMemory, backend, free_memory, is_out_of_memory
from . import peers
from .jobs import ClassesFirst, Job

class Model(NamedTuple):
    "What is trained: how to make it and `n` items for it, the items of a micro-batch, micro-batches of a step, and what is counted"
    make:callable
    data:callable
    micro_bs:int
    n_acc:int
    unit:str
    per_item:int=1    # Units of an item

def resnet50():
    from torchvision.models import resnet50
    return resnet50(num_classes=1000)

def transformer(d=768, n_layer=12, n_token=32000, length=512):
    layer = partial(nn.TransformerEncoderLayer, d, d//64 or 1, 4*d, dropout=0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(n_token, d), *[layer() for _ in range(n_layer)], nn.Linear(d, n_token), ClassesFirst())

def images(n, size=224, n_cls=1000): return torch.randn(n, 3, size, size), torch.randint(n_cls, (n,))
def tokens(n, n_token=32000, length=512): return torch.randint(n_token, (n, length)), torch.randint(n_token, (n, length))

MODELS = {'resnet50': Model(resnet50, images, 32, 8, 'images/s'),
          'transformer, 12 blocks': Model(transformer, tokens, 8, 8, 'tokens/s', 512)}
def big_batch(job): peers.hand(job.fresh(batches=accumulated(job), n_acc=1))
RUNS = {'big batch': (big_batch, 'torch'), 'hand-written loop': (peers.hand, 'torch'),
        'fastai GradientAccumulation': (peers.fastai, 'fastai'), 'Accelerate': (peers.accelerate, 'accelerate'),
        'Lightning': (peers.lightning, 'lightning'), 'fastaccum, whole loader batches': (peers.whole, 'fastaccum'),
        'fastaccum, loader batches split': (peers.split, 'fastaccum'),
        "fastaccum, 'auto'": (partial(peers.split, micro_batch_size='auto'), 'fastaccum')}
PRECISIONS = 'fp32','bf16','fp16'

def make_job(model, precision, device, n_steps):
    torch.manual_seed(0)
    x,y = (t.to(device) for t in model.data(model.micro_bs*model.n_acc))
    batches = list(zip(x.split(model.micro_bs), y.split(model.micro_bs)))*n_steps  # the same items in each step
    return Job(model.make().to(device), batches, n_acc=model.n_acc, precision=precision, lr=.001, device=device, loss_func=F.cross_entropy)

def synchronize(device):
    mod = backend(device)
    if hasattr(mod, 'synchronize'): mod.synchronize()

def measure(run, a_job, warm=2) -> dict|None: # Seconds of a step, and bytes; `None` if it does not fit
    ticks = []
    def tick():
        synchronize(a_job.device)
        ticks.append(time.perf_counter())
    fresh = a_job.fresh(on_step=tick)
    try:
        with PeakMemory(a_job.device) as mem: run(fresh)
    except RuntimeError as e:
        if not is_out_of_memory(e): raise
        return None
    finally:
        del fresh
        gc.collect()
        free_memory(a_job.device)
    return dict(s=(ticks[-1]-ticks[warm-1])/(len(ticks)-warm), peak=mem.peak)

def run(device, models=MODELS, precisions=PRECISIONS, n_steps=7) -> list: # One dict a model, precision and peer
    rows = []
    for name,model in models.items():
        for precision in precisions:
            a_job = make_job(model, precision, device, n_steps)
            for label,(f,needs) in RUNS.items():
                if not peers.find_spec(needs): continue
                m = measure(f, a_job) or {}
                per_s = model.per_item*model.micro_bs*model.n_acc/m['s'] if m else None
                rows.append(dict(model=name, precision=precision, peer=label, unit=model.unit, per_s=per_s, peak=m.get('peak')))
                print(f"  {name}, {precision}, {label}: {per_s or 0:.0f} {model.unit}, {(m.get('peak') or 0)/2**20:.0f} MiB", flush=True)
    return rows
