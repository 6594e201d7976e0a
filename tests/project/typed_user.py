"""What a type checker makes of the public names. Only mypy reads this (test_types.py).

A line with `type: ignore` is wrong on purpose: mypy complains of the comment too, if it finds nothing to ignore."""
from __future__ import annotations
from typing import Any, Iterable
from typing_extensions import assert_type
import torch
from fastai.learner import Learner
from torch import Tensor, nn
from fastai.callback.schedule import SchedCos
from fastaccum.all import (ActivationCheckpointing, ActivationOffload, AMPMode, ChunkedHead, ChunkedLoss, Compile,
                           CoupledBatch, DynamicLossScaler, GradientAccumulation, GradientAccumulationSchedule, SkipSpikes,
                           GradientAccumulator, LargestFirst, MemoryAdvice, MixedPrecision, PeakMemory, StepLogger,
                           TrainingCheckpoint, loss_weight,
                           DataParallel, FullyShard, LocalSGD, launch,
                           AdaptiveGradientAccumulation,
                           GradientNoiseScale,
                           ScaleLR,
                           batch_ramp,
                           critical_batch, how_exact, HowExact, exact_sentence_encoder, hf_learner, FastaccumWarning)
from fastaccum.wandb import WandbCallback

silenced:type[UserWarning] = FastaccumWarning

def own_loop(model:nn.Module, opt:torch.optim.Optimizer, batches:Iterable[tuple[Tensor,Tensor]]) -> None:
    loss_func = nn.CrossEntropyLoss()
    acc,scaler = GradientAccumulator(model.parameters(), accum_bs=256),DynamicLossScaler('cpu', hysteresis=2)
    for xb,yb in batches:
        weight = assert_type(loss_weight(loss_func, yb), int|Tensor|None)
        loss = assert_type(acc.add(loss_func(model(xb), yb), len(xb), weight), Tensor)
        scaler.scale(loss).backward()
        if not assert_type(acc.ready, bool): continue
        assert_type(acc.finish(), Tensor)
        scaler.step(opt)
        scaler.update()
        if scaler.last_skipped: acc.reset()
    assert_type(scaler.last_skipped, bool|None)
    assert_type(scaler.found_inf, Tensor|None)
    assert_type(scaler.n_overflows, int)
    assert_type(scaler.history(), dict[Any,Any])
    scaler.load_state_dict(assert_type(scaler.state_dict(), dict[Any,Any]))
    scaler.reset_step()
    acc.load_state_dict(assert_type(acc.state_dict(), dict[Any,Any]))
    acc.reopen()
    with PeakMemory(torch.device('cpu')) as peak: model(xb)
    assert_type(peak, PeakMemory)
    print(peak.peak, peak)

def callbacks(learn:Learner) -> None:
    acc,precision,steps = (GradientAccumulation(256, micro_batch_size='auto', weight=len),MixedPrecision(AMPMode.BF16),
                           StepLogger(grad_norm=True))
    checkpoint = TrainingCheckpoint(every_steps=100, every_minutes=None)
    (GradientAccumulation(), GradientAccumulation(None, n_acc=64, micro_batch_size=8),
     GradientAccumulation(64, remainder='drop', normalize=False), GradientAccumulation(64, grad_dtype=torch.float32))
    GradientAccumulationSchedule(64, 512, start=1, finish=.5, micro_batch_size=None), MixedPrecision('fp16', device=None, init_scale=2.**10)
    learn.add_cbs([acc, precision, steps, checkpoint, WandbCallback(log_preds=False)])
    learn.to_fp16(growth_interval=500).fit_one_cycle(3)
    assert_type(acc.accum_bs, int)
    assert_type(acc.size_at(0, 10, 3), int)
    assert_type(precision.scaler, DynamicLossScaler)
    precision.load_state_dict(assert_type(precision.state_dict(), dict[Any,Any]))
    steps.to_df().loss.mean()
    acc.plan(3), acc.plot(3), precision.plot(), steps.plot()   # added to the classes by `@patch`, as `to_fp16` is: Any
    checkpoint.finish()
    learn.add_cbs([ActivationCheckpointing(nn.TransformerEncoderLayer, selective=True),
                   ActivationOffload(min_bytes=2**20), Compile(mode='reduce-overhead'), ChunkedHead(8, 'head'),
                   LargestFirst('epoch')])
    advice = MemoryAdvice(learn, gib=16)
    assert_type(advice.peak_at(8), int)
    print(advice.params, advice.grads, advice.state, advice.peak, advice.micro_batch_size, advice.table, advice.call, advice)

def ranks(learn:Learner) -> None:
    learn.add_cbs([DataParallel(bucket_mb=50, overlap=True, timeout=60), LocalSGD(8, outer_lr=.7), FullyShard('keep', offload=True)])
    assert_type(launch(len, 2, 'abc', timeout=60), list)

def wrong(model:nn.Module, loss:Tensor) -> None:
    GradientAccumulator(model.parameters(), '256')                 # type: ignore[arg-type]
    GradientAccumulator(model.parameters(), 256).add(loss)         # type: ignore[call-arg]
    GradientAccumulator(model.parameters(), 256).add(loss, 'all')  # type: ignore[arg-type]
    DynamicLossScaler(init_scale='big')                            # type: ignore[arg-type]
    DynamicLossScaler(patience=2.5)                                # type: ignore[arg-type]
    PeakMemory(0)                                                  # type: ignore[arg-type]
    GradientAccumulation('256')                                    # type: ignore[arg-type]
    GradientAccumulation(n_acc=2.5)                                # type: ignore[arg-type]
    GradientAccumulation(256, micro_batch_size=2.5)                # type: ignore[arg-type]
    GradientAccumulation(256, remainder=None)                      # type: ignore[arg-type]
    GradientAccumulation(256, micro_batchsize=8)                   # type: ignore[call-arg]
    GradientAccumulationSchedule(64)                               # type: ignore[call-arg]
    GradientAccumulationSchedule(64, 512, finish='end')            # type: ignore[arg-type]
    MixedPrecision(16)                                             # type: ignore[arg-type]
    MixedPrecision(device=0)                                       # type: ignore[arg-type]
    StepLogger('loss')                                             # type: ignore[arg-type]
    TrainingCheckpoint(every_steps=.5)                             # type: ignore[arg-type]
    TrainingCheckpoint(keep=None)                                  # type: ignore[arg-type]
    LargestFirst(16)                                               # type: ignore[arg-type]
    ChunkedHead('8')                                               # type: ignore[arg-type]
    ChunkedLoss(nn.CrossEntropyLoss(), 'head')                     # type: ignore[arg-type]
    ActivationOffload('64k')                                       # type: ignore[arg-type]
    ActivationCheckpointing(selective=1)                           # type: ignore[arg-type]
    DataParallel(bucket_mb='25')                                   # type: ignore[arg-type]
    SkipSpikes(warmup=.5)                                          # type: ignore[arg-type]
    LocalSGD(period=.5)                                            # type: ignore[arg-type]
    FullyShard(sync=True)                                          # type: ignore[arg-type]
    launch(len)                                                    # type: ignore[call-arg]
    AMPMode.FP32                                                   # type: ignore[attr-defined]

def batch_size(learn:Learner) -> None:
    learn.add_cbs([GradientNoiseScale(beta=.9, every=4), ScaleLR('sqrt', bs=64, half_life=True), AdaptiveGradientAccumulation(64, 512)])
    GradientAccumulationSchedule(64, 512, schedule=batch_ramp(SchedCos(1., .1)))
    critical_batch(learn, [64, 256], n_items=1000, n_seeds=2, force=True)
    compared:HowExact = how_exact(learn, learn)
    print(compared.table, compared.is_exact)
    exact_sentence_encoder(learn).fit(1)
    hf_learner(learn.dls, nn.Linear(1, 1), loss_func=None).fit(1)

def chunked_loop(body:nn.Module, head:nn.Linear, xb:Tensor, yb:Tensor) -> None:
    loss = ChunkedLoss(nn.CrossEntropyLoss(), head, n_chunks=8)(body(xb), yb)
    assert_type(loss, Tensor)
    loss.backward()

def coupled_loop(model:nn.Module, xb:Tensor) -> None:
    batch = CoupledBatch(model, (xb,), len(xb), 8)
    loss:Tensor = batch.outputs().sum()
    loss.backward()
    batch.backward()
