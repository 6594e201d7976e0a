"What a callback prints: its name, and the arguments that it was given"
import copy, importlib, inspect, pickle
from functools import partial
from pathlib import Path
import numpy as np, pytest, torch
from torch import nn
from torch.nn import Linear, ReLU
from fastai.basics import Callback, L
from fastai.callback.schedule import SchedCos, SchedExp
import fastaccum.all
from fastaccum.all import *
from fastaccum.loop import LoopCallback
from torch.nn import Linear, ReLU
from reference import learner, mlp
from test_microbatch import data
WandbCallback = pytest.importorskip('fastaccum.wandb').WandbCallback if importlib.util.find_spec('wandb') else None

def measure(learn): return 1
def is_block(m): return True

public = {n: o for n in fastaccum.all.__all__ if isinstance(o := getattr(fastaccum.all, n), type) and issubclass(o, Callback)}
if WandbCallback: public['WandbCallback'] = WandbCallback
calls = [
    'GradientAccumulation()', 'GradientAccumulation(256)', 'GradientAccumulation(256, micro_batch_size=32)',
    'GradientAccumulation(accum_bs=256)', 'GradientAccumulation(n_acc=16, log_accum_batch=False)',
    "GradientAccumulation(64, micro_batch_size='auto', remainder='drop', grad_device='cpu', grad_dtype=torch.float32)",
    'GradientAccumulation(micro_batch_size=32, exact=True)',
    'GradientAccumulation(64, normalize=False, weight=measure, check_loss=False)', 'GradientAccumulation(64, n_items=measure)',
    "GradientAccumulation(micro_batch_size=8, coupled='batchnorm', activations='device')",
    "GradientAccumulation(4096, unit='words', count=measure, pad_idx=1)", "GradientAccumulation(64, micro_batch_tokens=2048)",
    'GradientAccumulationSchedule(16, 64)',
    "GradientAccumulationSchedule(16, 64, start=0.0, finish=2, schedule=SchedExp, remainder='carry')",
    'GradientAccumulationSchedule(16, 64, log_accum_batch=False, micro_batch_size=8, normalize=False, weight=measure, n_items=measure)',
    "GradientAccumulationSchedule(16, 64, check_loss='always', grad_dtype=torch.float32, grad_device='cpu')",
    "GradientAccumulationSchedule(16, 64, micro_batch_size=8, coupled='batchnorm', activations='device')",
    "GradientAccumulationSchedule(1024, 4096, unit='words', count=measure, pad_idx=1)",
    'GradientAccumulationSchedule(16, 64, micro_batch_tokens=2048)', 'GradientAccumulationSchedule(16, 64, micro_batch_size=8, exact=True)',
    'AdaptiveGradientAccumulation(16, 256)',
    'AdaptiveGradientAccumulation(16, max_accum_bs=256, beta=0.9, monotone=False, micro_batch_size=4)',
    'MixedPrecision()', "MixedPrecision('bf16', device='cpu')", 'MixedPrecision(init_scale=1024.0, patience=3)',
    'MixedPrecision(AMPMode.BF16)',
    'StepLogger()', 'StepLogger(True)', 'StepLogger(grad_norm=True, clipped_norm=True, speed=True, memory=True, times=True)',
    'TrainingCheckpoint()',
    "TrainingCheckpoint('run', every_steps=100, every_minutes=None, keep=3, resume=False, background=True, digest=True)",
    'GradientNoiseScale()', 'GradientNoiseScale(beta=0.9, every=4)', "ScaleLR('sqrt')", "ScaleLR('linear', bs=64, half_life=True)",
    'ActivationCheckpointing()', 'ActivationCheckpointing(is_block, selective=True)', 'ActivationCheckpointing([Linear, ReLU])',
    'ActivationOffload(min_bytes=0)', 'Compile()', "Compile(mode='default', backend=measure)",
    'ChunkedHead()', "ChunkedHead(4, head='1')", 'LargestFirst()', "LargestFirst('epoch')", 'LargestFirst(batch=measure)',
    'DataParallel()', 'DataParallel(bucket_mb=2.5, overlap=True, timeout=60)', "DataParallel(shares=[3, 1])",
    'SkipSpikes()', 'SkipSpikes(4.5, 50, beta=0.9, patience=3)',
    'LocalSGD()', 'LocalSGD(16, warmup_steps=3, outer_lr=0.7, timeout=60)',
    "FullyShard(sync='keep', units=[Linear], offload=True, timeout=60)",
    "WandbCallback()",
    "WandbCallback('all', False, True, log_model=True, model_name='best', log_dataset=True, dataset_name='x', n_preds=9)",
    'WandbCallback(seed=1, reorder=False)']
of_class = {n: [c for c in calls if c.startswith(f'{n}(')] for n in public}

@pytest.mark.parametrize('call', [c for cs in of_class.values() for c in cs])
def test_arguments(call):
    "As they were given, also of copies, and after a fit has changed what they say"
    cb = eval(call)
    assert repr(cb) == repr(L(cb))[1:-1] == call and str(cb) == f'{cb}' == call.split('(')[0]
    for other in (copy.copy(cb), copy.deepcopy(cb), pickle.loads(pickle.dumps(cb))): assert repr(other) == call

def bound(name, call):
    "The arguments in a call"
    sig = inspect.signature(public[name].__init__)
    return eval(call, {**globals(), name: lambda *args, **kwargs: {*sig.bind(None, *args, **kwargs).arguments}})

def test_all_arguments():
    "Each of every callback is in a call above, but a loader, which `test_other_values` has"
    for name,cls in public.items():
        own = {n for n,p in inspect.signature(cls.__init__).parameters.items() if p.kind != p.VAR_KEYWORD} - {'self','valid_dl'}
        assert own <= set().union(*(bound(name, c) for c in of_class[name])), name

def test_defaults_are_left_out():
    assert repr(GradientAccumulation(256, None, True, remainder='step')) == 'GradientAccumulation(256)'
    assert repr(GradientAccumulation(64, None, False)) == 'GradientAccumulation(64, None, False)'
    assert repr(MixedPrecision(amp_mode='fp16', device=None)) == 'MixedPrecision()'
    # an epoch is no fraction
    assert repr(GradientAccumulationSchedule(16, 64, 0., 1)) == 'GradientAccumulationSchedule(16, 64, 0.0, 1)'

def test_other_values():
    "Nothing long, nothing that would be read from a device"
    class Own(LoopCallback):
        def __init__(self, a=None, *more, b=(), **kwargs): pass
    class Odd:
        def __repr__(self): raise RuntimeError
    big = torch.zeros(1000, 30)
    assert repr(Own(big, nn.Parameter(big), np.zeros((2, 3)))) == 'Own(Tensor(1000, 30), Parameter(1000, 30), ndarray(2, 3))'
    assert repr(Own(mlp(), mlp, Odd(), partial(measure, 1), SchedCos(0, 1), learner(data, 8).dls)) == (
        'Own(Sequential(...), mlp, Odd(...), partial(measure), _Annealer(...), DataLoaders(...))')
    assert repr(Own(a='x'*200, b=[*range(200)], c={i: i for i in range(200)})).count('...') == 3
    assert len(repr(Own(a='x'*200, b=[*range(200)], c={i: i for i in range(200)}))) < 250
    if WandbCallback: assert repr(WandbCallback(valid_dl=learner(data, 8).dls.valid)) == 'WandbCallback(valid_dl=DataLoader(...))'
    assert repr(Own(Path('a'), float('inf'), torch.device('cpu'), lambda: 1)).replace('Posix', '').replace('Windows', '') == (
        "Own(Path('a'), inf, device(type='cpu'), <lambda>)")

def test_in_a_learner():
    "`learn.cbs` shows them, and the names in tables of other libraries stay"
    learn = learner(data, 8, GradientAccumulation(32, micro_batch_size=4), StepLogger(), loss_func=nn.CrossEntropyLoss())
    assert 'GradientAccumulation(32, micro_batch_size=4)' in repr(learn.cbs) and 'StepLogger()' in repr(learn.cbs)
    learn.fit(1)
    assert repr(learn.gradient_accumulation) == 'GradientAccumulation(32, micro_batch_size=4)'

def test_checkpoints_do_not_keep_them():
    "Nor compare them: a checkpoint of an earlier version is one of the same run"
    learn = learner(data, 8, GradientAccumulation(32), ActivationCheckpointing(nn.Linear), ChunkedHead(2),
                    TrainingCheckpoint(every_steps=1),
                    loss_func=nn.CrossEntropyLoss())
    learn.fit(1)
    for f in Path('models').rglob('*.pt'): assert '_given' not in str(torch.load(f, weights_only=False))
    assert [*Path('models').rglob('*.pt')]
