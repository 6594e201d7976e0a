"The same fit by a hand-written loop, by fastaccum, and by the libraries that people come from"
import logging, tempfile
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.data.core import DataLoaders
from fastai.optimizer import OptimWrapper
from fastai.callback.fp16 import MixedPrecision as FastaiPrecision
from fastai.callback.schedule import ParamScheduler
from fastai.callback.training import GradientAccumulation as FastaiAccumulation, GradientClip
from fastaccum.all import DataParallel, GradientAccumulation, TrainingCheckpoint
from fastaccum.conformance import accumulated, mapped
from fastaccum.all import MixedPrecision
from .jobs import Memory

def hand(job):
    "The loop that everybody has written. It divides by `n_acc` also where fewer micro-batches are left"
    opt,scaler,loader = job.optimizer(job.model.parameters()),job.scaler(),job.loader()
    model,n_acc = job.model,job.n_acc//job.n_ranks
    if job.n_ranks > 1: model,loader = DistributedDataParallel(model),job.loader(sampler=DistributedSampler(loader.dataset, shuffle=False))
    sched = job.lr_at and job.scheduler(opt)
    first,skip = load(job, opt, sched)
    for epoch in range(first, job.epochs):
        for i,(x,y) in enumerate(loader, 1):
            if epoch == first and i <= skip: continue
            with job.autocast(): loss = job.loss(model(x), y)
            scaler.scale(loss/n_acc).backward()
            if i%n_acc == 0 or i == len(loader):
                if job.clip:
                    scaler.unscale_(opt)
                    nn.utils.clip_grad_norm_(job.model.parameters(), job.clip)
                scaler.step(opt)
                scaler.update()
                if sched: sched.step()
                opt.zero_grad()
                save(job, opt, sched, epoch, i)
            if job.valid and i%job.valid_every == 0:
                evaluate(job.model, job)
                job.model.train()

def evaluate(model, job):
    model.eval()
    with torch.no_grad():
        for x,y in job.valid: job.loss_func(model(x), y)

def save(job, opt, sched, epoch, i):
    "What most loops save: no random generators"
    if job.folder: torch.save(dict(place=(epoch, i), parts=[o.state_dict() for o in (job.model, opt, sched)]), Path(job.folder)/'last.pt')

def load(job, opt, sched):
    "The epoch and the number of the micro-batch after which it was saved"
    file = Path(job.folder)/'last.pt' if job.folder else None
    if file is None or not file.exists(): return 0,0
    saved = torch.load(file)
    for o,state in zip((job.model, opt, sched), saved['parts']): o.load_state_dict(state)
    return saved['place']

def mixed(job):
    return ([MixedPrecision(job.precision, **(dict(init_scale=job.init_scale) if job.precision == 'fp16' else {}))]
            if job.dtype else [])

def rate(lr, lr_at, pos): return lr*lr_at(pos)
def wrapped(optimizer, params, **_): return OptimWrapper(params, optimizer)

def fit(job, *cbs, batches=None):
    if not any(isinstance(cb, FastaiPrecision) for cb in cbs): cbs = *cbs,*mixed(job)
    if job.clip: cbs = *cbs,GradientClip(job.clip)
    if job.lr_at: cbs = *cbs,ParamScheduler(dict(lr=partial(rate, job.lr, job.lr_at)))
    if job.term: cbs = *cbs,Adds(job.term)
    if job.valid: cbs = *cbs,Validates(job.valid_every*job.micro_bs)
    if job.n_ranks > 1: cbs = *cbs,DataParallel()
    if job.folder: cbs = *cbs,TrainingCheckpoint(job.folder, every_steps=1, every_minutes=None)
    dls = DataLoaders(job.loader(batches), DataLoader([], batch_size=None) if job.folder else Memory(job.valid or []))
    dls._device = torch.device(job.device)         # fastai asks loaders that it can move
    learn = Learner(dls, job.model, loss_func=job.loss_func, opt_func=partial(wrapped, job.optimizer), cbs=cbs)
    if not job.valid: learn._do_epoch_validate = lambda *_: None
    with learn.no_bar(), learn.no_logging(): learn.fit(job.epochs, job.lr)

class Adds(Callback):
    "Adds a term of the outputs to the loss, as fastai's `RNNRegularizer` does"
    run_valid = False
    def __init__(self, term): self.term = term
    def after_loss(self): self.learn.loss_grad += self.term(self.pred)

class Validates(Callback):
    "Validates each time that so many items have come, as `learn.validate()` does it"
    order,run_valid = 70,False
    def __init__(self, every): self.every,self.n = every,0
    def after_batch(self):
        before,self.n = self.n,self.n+len(self.x)
        if self.n//self.every > before//self.every: self.learn.validate()

def whole(job): fit(job, GradientAccumulation(job.accum_bs))
def fastai(job):
    needs_gpu(job, job.precision == 'fp16')
    cannot_resume(job)
    if job.n_ranks > 1: raise NotImplementedError('needs GPUs')
    fit(job, FastaiAccumulation(job.accum_bs), *([FastaiPrecision(job.precision)] if job.dtype else []))

def cannot_resume(job):
    if job.folder: raise NotImplementedError('no resume')

def needs_gpu(job, wrong):
    if wrong and job.device == 'cpu': raise NotImplementedError(f'no {job.precision}')

def split(job, micro_batch_size=None):
    "Loader batches of `n_acc` micro-batches, which `micro_batch_size` splits again; smaller ones if they come in another order each epoch"
    if job.shuffle: return fit(job, GradientAccumulation(job.accum_bs, micro_batch_size=job.micro_bs//2))
    kinds = {*map(type, job.model.modules())}
    how = dict(exact=True) if nn.Dropout in kinds or job.n_ranks > 1 else dict(coupled='batchnorm') if nn.BatchNorm1d in kinds else {}
    fit(job, GradientAccumulation(job.accum_bs, micro_batch_size=micro_batch_size or job.micro_bs, **how), batches=accumulated(job))

def accelerate(job):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    needs_gpu(job, job.precision == 'fp16')
    AcceleratorState._reset_state(True)  # it is shared by all, and keeps the precision of the last one
    acc = Accelerator(cpu=job.device == 'cpu', gradient_accumulation_steps=job.n_acc//job.n_ranks,
                      mixed_precision=job.precision if job.dtype else 'no')
    model,opt,loader = acc.prepare(job.model, job.optimizer(job.model.parameters()), job.loader())
    sched = job.lr_at and acc.prepare(job.scheduler(opt.optimizer))
    place = Path(job.folder)/'place.pt' if job.folder else None
    first,skip = 0,0
    if place and place.exists():
        acc.load_state(job.folder)
        first,skip = torch.load(place)
        loader.set_epoch(first)
    for epoch in range(first, job.epochs):
        here = acc.skip_first_batches(loader, skip) if epoch == first and skip else loader
        for i,(x,y) in enumerate(here, 1 + (skip if epoch == first else 0)):
            with acc.accumulate(model):
                acc.backward(job.loss(model(x), y))
                if job.clip and acc.sync_gradients: acc.clip_grad_norm_(model.parameters(), job.clip)
                opt.step()
                if sched: sched.step()
                opt.zero_grad()
            if place and acc.sync_gradients:
                acc.save_state(job.folder)
                torch.save((epoch, i), place)
            if job.valid and i%job.valid_every == 0:
                evaluate(model, job)
                model.train()

def lightning(job):
    import lightning as L
    from lightning.pytorch.plugins import MixedPrecision as Plugin
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = job.model
        def training_step(self, batch, i): return job.loss(self.model(batch[0]), batch[1])
        def validation_step(self, batch, i): job.loss_func(self.model(batch[0]), batch[1])
        def configure_optimizers(self):
            opt = job.optimizer(self.parameters())
            return dict(optimizer=opt, lr_scheduler=dict(scheduler=job.scheduler(opt), interval='step')) if job.lr_at else opt
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    kind = 'cpu' if job.device == 'cpu' else 'gpu'
    scaled = job.precision == 'fp16'
    precision = (dict(plugins=[Plugin('16-mixed', job.device, job.scaler())]) if scaled
                 else dict(precision='bf16-mixed' if job.dtype else '32-true'))
    saves,last = [],None
    if job.folder:
        from lightning.pytorch.callbacks import ModelCheckpoint
        saves,last = [ModelCheckpoint(job.folder, save_last=True, every_n_train_steps=1)],Path(job.folder)/'last.ckpt'
    valid = dict(val_check_interval=job.valid_every, num_sanity_val_steps=0) if job.valid else {}
    trainer = L.Trainer(accelerator=kind, devices=job.n_ranks, max_epochs=job.epochs, accumulate_grad_batches=job.n_acc//job.n_ranks,
                        gradient_clip_val=job.clip, logger=False,
                        callbacks=saves, enable_progress_bar=False, enable_model_summary=False,
                        enable_checkpointing=bool(saves), **valid, **precision)
    trainer.fit(Module(), job.loader(), job.valid and job.loader(job.valid), ckpt_path=last if last and last.exists() else None)

def trainer(job, by_items=False):
    "`by_items`: the loss is a sum divided by `num_items_in_batch`, as in the library's own language models"
    with redirect_stdout(None): from transformers import trainer as hf  # it says when W&B is offline
    needs_gpu(job, job.precision == 'fp16')
    class Trainer(hf.Trainer):
        def get_train_dataloader(self):
            loader = (job.loader(collate_fn=lambda items: dict(zip(('x', 'labels'), default_collate(items))))
                      if job.shuffle or job.n_ranks > 1 else job.loader(batches))
            return self.accelerator.prepare(loader)
        def get_eval_dataloader(self, _=None): return self.accelerator.prepare(job.loader(named(job.valid)))
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = job.model
        def forward(self, x, labels=None):
            pred = self.model(x)
            return dict(pred=pred) if labels is None else dict(loss=job.loss(pred, labels))
    def summed(out, labels, num_items_in_batch):      # a term is added as the library's models add theirs, a mean
        loss = job.loss_func(out['pred'], labels, reduction='sum')/num_items_in_batch
        return loss + job.term(out['pred']) if job.term else loss
    def named(batches): return mapped(batches, lambda x, y: dict(x=x, labels=y))
    batches = named(job.batches)
    model = Model()
    opt = job.optimizer(model.parameters())
    sched = job.scheduler(opt)
    more = dict(save_strategy='steps', save_steps=1) if job.folder else dict(save_strategy='no')
    if job.valid: more.update(eval_strategy='steps', eval_steps=1)           # it counts steps only
    with tempfile.TemporaryDirectory() as tmp:
        args = hf.TrainingArguments(job.folder or tmp, num_train_epochs=job.epochs,
                                    per_device_train_batch_size=job.micro_bs, gradient_accumulation_steps=job.n_acc//job.n_ranks,
            use_cpu=True, bf16=job.precision == 'bf16', max_grad_norm=job.clip or 0, report_to='none', logging_strategy='no',
            logging_nan_inf_filter=False, disable_tqdm=True, remove_unused_columns=False, **more)
        t = Trainer(model, args, optimizers=(opt, sched), eval_dataset=job.valid, compute_loss_func=summed if by_items else None)
        t.remove_callback(hf.PrinterCallback)
        t.train(resume_from_checkpoint=True if job.folder and [*Path(job.folder).glob('checkpoint-*')] else None)

def composer(job):
    "It splits loader batches itself, so it gets those of whole accumulated batches"
    from composer import Trainer
    from composer.models import ComposerModel
    needs_gpu(job, job.precision == 'fp16')
    if job.folder or job.n_ranks > 1: raise NotImplementedError('not tried')
    class Model(ComposerModel):
        def __init__(self):
            super().__init__()
            self.model = job.model
        def forward(self, batch): return self.model(batch[0])
        def loss(self, outputs, batch): return job.loss(outputs, batch[1])
    model = Model()
    opt = job.optimizer(model.parameters())
    clip = []
    if job.clip:
        from composer.algorithms import GradientClipping
        clip = [GradientClipping(clipping_type='norm', clipping_threshold=job.clip)]
    valid = {}
    if job.valid:      # it counts loader batches, which are steps here
        from composer import Evaluator
        valid = dict(eval_dataloader=Evaluator(label='valid', dataloader=job.loader(job.valid),
                                               device_eval_microbatch_size=job.micro_bs), eval_interval='1ba')
    Trainer(model=model, **valid, train_dataloader=job.loader(accumulated(job)), max_duration=f'{job.epochs}ep',
            optimizers=opt, schedulers=job.lr_at and job.scheduler(opt),
            step_schedulers_every_batch=True, device_train_microbatch_size=job.micro_bs, algorithms=clip,
            device=job.device, precision='fp32',
            progress_bar=False, log_to_console=False).fit()

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
