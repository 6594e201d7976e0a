"The same fit by a hand-written loop, by fastaccum, and by the libraries that people come from"
import logging, tempfile
from contextlib import redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple
import torch
from torch import nn
from fastai.learner import Learner
from fastai.data.core import DataLoaders
from fastai.optimizer import OptimWrapper
from fastai.callback.fp16 import MixedPrecision as FastaiPrecision
from fastai.callback.training import GradientAccumulation as FastaiAccumulation
from fastaccum.accumulation import GradientAccumulation
from fastaccum.precision import MixedPrecision
from .jobs import Memory

def hand(job):
    "The loop that everybody has written. It divides by `n_acc` also where fewer micro-batches are left"
    opt,scaler = job.optimizer(job.model.parameters()),torch.amp.GradScaler(job.device, enabled=job.precision == 'fp16')
    for i,(x,y) in enumerate(job.batches, 1):
        with job.autocast(): loss = job.loss_func(job.model(x), y)
        scaler.scale(loss/job.n_acc).backward()
        if i%job.n_acc == 0 or i == len(job.batches):
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

def fit(job, *cbs, batches=None):
    if job.precision != 'fp32' and not any(isinstance(cb, FastaiPrecision) for cb in cbs): cbs = *cbs,MixedPrecision(job.precision)
    dls = DataLoaders(job.loader(batches or job.batches), Memory([]))
    dls._device = torch.device(job.device)         # fastai asks loaders that it can move
    learn = Learner(dls, job.model, loss_func=job.loss_func, opt_func=lambda params, **_: OptimWrapper(params, job.optimizer), cbs=cbs)
    learn._do_epoch_validate = lambda: None
    with learn.no_bar(), learn.no_logging(): learn.fit(1, job.lr)

def whole(job): fit(job, GradientAccumulation(job.accum_bs))
def fastai(job): fit(job, FastaiAccumulation(job.accum_bs), *([FastaiPrecision(job.precision)] if job.dtype else []))

def joined(job):
    "Loader batches of `n_acc` micro-batches each"
    return [tuple(map(torch.cat, zip(*job.batches[i:i+job.n_acc]))) for i in range(0, len(job.batches), job.n_acc)]

def split(job, micro_batch_size=None):
    "Loader batches of `n_acc` micro-batches, which `micro_batch_size` splits again"
    fit(job, GradientAccumulation(job.accum_bs, micro_batch_size=micro_batch_size or job.micro_bs), batches=joined(job))

def accelerate(job):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)  # it is shared by all, and keeps the precision of the last one
    acc = Accelerator(cpu=job.device == 'cpu', gradient_accumulation_steps=job.n_acc, mixed_precision=job.precision if job.dtype else 'no')
    model,opt,loader = acc.prepare(job.model, job.optimizer(job.model.parameters()), job.loader(job.batches))
    for x,y in loader:
        with acc.accumulate(model):
            acc.backward(job.loss_func(model(x), y))
            opt.step()
            opt.zero_grad()

def lightning(job):
    import lightning as L
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = job.model
        def training_step(self, batch, i): return job.loss_func(self.model(batch[0]), batch[1])
        def configure_optimizers(self): return job.optimizer(self.parameters())
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    L.Trainer(accelerator='cpu' if job.device == 'cpu' else 'gpu', devices=1, max_epochs=1, accumulate_grad_batches=job.n_acc, logger=False, enable_progress_bar=False,
              enable_model_summary=False, enable_checkpointing=False, precision=dict(bf16='bf16-mixed', fp16='16-mixed').get(job.precision, '32-true'),
              ).fit(Module(), job.loader(job.batches))

def trainer(job, by_items=False):
    "`by_items`: the loss is a sum divided by `num_items_in_batch`, as in the library's own language models"
    with redirect_stdout(None): from transformers import trainer as hf  # it says when W&B is offline
    class Trainer(hf.Trainer):
        def get_train_dataloader(self): return self.accelerator.prepare(job.loader([dict(x=x, labels=y) for x,y in job.batches]))
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = job.model
        def forward(self, x, labels=None):
            pred = self.model(x)
            return dict(pred=pred) if labels is None else dict(loss=job.loss_func(pred, labels))
    def summed(out, labels, num_items_in_batch): return job.loss_func(out['pred'], labels, reduction='sum')/num_items_in_batch
    model = Model()
    opt = job.optimizer(model.parameters())
    with tempfile.TemporaryDirectory() as tmp:
        args = hf.TrainingArguments(tmp, num_train_epochs=1, per_device_train_batch_size=job.micro_bs, gradient_accumulation_steps=job.n_acc,
            use_cpu=True, bf16=job.precision == 'bf16', max_grad_norm=0, report_to='none', save_strategy='no', logging_strategy='no',
            logging_nan_inf_filter=False, disable_tqdm=True, remove_unused_columns=False)
        t = Trainer(model, args, optimizers=(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.)), compute_loss_func=summed if by_items else None)
        t.remove_callback(hf.PrinterCallback)
        t.train()

class Peer(NamedTuple):
    label:str
    run:callable
    needs:str             # Packages, its own first; it is left out if one is not installed
    precisions:tuple=('fp32', 'bf16') # In which `run` can compute on a CPU

    @property
    def title(self): return self.label if self.needs in ('torch', 'fastaccum') else f'{self.label} {version(self.needs.split()[0])}'

PEERS = {p.run.__name__: p for p in (
    Peer('hand-written loop', hand, 'torch'),
    Peer('fastaccum, loader batches split', split, 'fastaccum', ('fp32', 'bf16', 'fp16')),
    Peer('fastaccum, whole loader batches', whole, 'fastaccum', ('fp32', 'bf16', 'fp16')),
    Peer('fastai GradientAccumulation', fastai, 'fastai', ('fp32',)),  # its MixedPrecision is for 'cuda'
    Peer('Accelerate', accelerate, 'accelerate'),
    Peer('Lightning', lightning, 'lightning'),
    Peer('Hugging Face Trainer', trainer, 'transformers accelerate'))}

def installed(precision='fp32'):
    "The peers that can take part"
    return {k: p for k,p in PEERS.items() if precision in p.precisions and all(map(find_spec, p.needs.split()))}
