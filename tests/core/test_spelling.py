"What other libraries call an argument or a method: an error that says what to write here"
import inspect, re
from pydoc import locate
import pytest
from reference import *
from fastai.callback.core import Callback
from fastaccum import all as names
from fastaccum.all import *
from fastaccum.core.spelling import _arguments, _likes, _methods

def takes(cls):
    "All arguments, those that it passes on included"
    ours = [c for c in cls.__mro__ if '__init__' in vars(c) and c.__module__.startswith('fastaccum.')]
    return {p for c in ours for p in inspect.signature(c).parameters}

rows = [(cls, k) for cls,row in _arguments.items() for k in row]
@pytest.mark.parametrize('cls,name', rows, ids=map('-'.join, rows))
def test_arguments(cls, name):
    "The error gives what was passed, and names arguments that there are"
    cls = getattr(names, cls)
    assert name not in takes(cls)
    with pytest.raises(TypeError) as e: cls(**{name: 'given'})
    text = str(e.value)
    assert text.startswith(f"{name}='given' ") and text.endswith('.') and re.search('write|leave it out', text)
    written = {*re.findall(r'write (\w+)=', text)} - {'bs'}
    given_to = GradientAccumulation if 'of GradientAccumulation' in text else cls
    assert written <= takes(given_to), written

class OfMine(LocalSGD): pass

class Picks(GradientAccumulation):
    "Takes a name of another library's itself"
    def __init__(self, **kwargs): super().__init__(kwargs.pop('steps')*16, **kwargs)

def test_a_class_of_the_users_takes_what_it_likes(): assert Picks(steps=4, remainder='drop').accum_bs == 64

@pytest.mark.parametrize('make,says', [
    (lambda: OfMine(sync_every=4), 'period=4'), (lambda: LocalSGD(find_unused_parameters=True), 'leave it out'),
    (lambda: AdaptiveGradientAccumulation(32, 64, accum_steps=2), 'accum_bs=2*16'),
    (lambda: GradientAccumulationSchedule(32, 64, microbatch_size=2), 'micro_batch_size=2'),
    (lambda: MixedPrecision(loss_scale=8.), 'init_scale=8.0'),
    (lambda: LocalSGD(periods=4), "unexpected keyword argument 'periods'"),
    (lambda: DynamicLossScaler(growth=2.), "unexpected keyword argument 'growth'")])
def test_whoever_has_the_class(make, says):
    with pytest.raises(TypeError) as e: make()
    assert says in str(e.value)

made = dict(GradientAccumulator=lambda: GradientAccumulator([nn.Parameter(torch.ones(1))], 4),
            DynamicLossScaler=lambda: DynamicLossScaler('cpu'))
@pytest.mark.parametrize('cls,name', [(cls, k) for cls,row in _methods.items() for k in row])
def test_methods(cls, name):
    o = made[cls]()
    assert not hasattr(o, name)
    with pytest.raises(AttributeError) as e: getattr(o, name)
    called, = re.findall(r'(?:call|read) (\w+)', str(e.value))[:1] or ['finish']
    assert hasattr(o, called) and f"has no attribute '{name}': " in str(e.value)

@pytest.mark.parametrize('cls', _likes)
def test_what_pytorch_has_for_the_same(cls):
    why,*others = _likes[cls]
    cls = getattr(names, cls)
    for name in {n for o in others for n,p in inspect.signature(locate(o)).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}:
        with pytest.raises(TypeError) as e: cls(**{name: 1})
        assert f'{name}=1 ' in str(e.value) and (why in str(e.value) or 'here' in str(e.value) or 'Learner' in str(e.value))

def test_signatures_of_accelerate():
    pytest.importorskip('accelerate')
    from accelerate.local_sgd import LocalSGD as Accelerates
    from accelerate.utils import GradientAccumulationPlugin
    for cls,other,without in ((GradientAccumulation, GradientAccumulationPlugin, ()),
                              (LocalSGD, Accelerates, ('accelerator','model','enabled'))):
        known = takes(cls).union(*[_arguments.get(c.__name__, ()) for c in cls.__mro__])
        assert {*inspect.signature(other).parameters} - {*without} <= known, other

# What others call it, by the class that has it: these names are there, and are errors here
others = {
    'transformers.TrainingArguments': {
        GradientAccumulation: ['gradient_accumulation_steps', 'per_device_train_batch_size'], StepLogger: ['logging_steps'],
        TrainingCheckpoint: ['save_steps', 'save_total_limit', 'output_dir', 'resume_from_checkpoint'],
        ActivationCheckpointing: ['gradient_checkpointing', 'gradient_checkpointing_kwargs']},
    'lightning.pytorch.Trainer': {
        GradientAccumulation: ['accumulate_grad_batches'], StepLogger: ['log_every_n_steps'], MixedPrecision: ['precision']},
    'lightning.pytorch.callbacks.ModelCheckpoint': {
        TrainingCheckpoint: ['every_n_train_steps', 'train_time_interval', 'dirpath', 'filename', 'monitor', 'mode', 'save_top_k',
                             'save_last']},
    'accelerate.Accelerator': {GradientAccumulation: ['gradient_accumulation_steps'], MixedPrecision: ['mixed_precision']}}
@pytest.mark.slow
@pytest.mark.parametrize('other', others)
def test_signatures_of_trainers(other):
    pytest.importorskip(other.split('.')[0])
    there = {*inspect.signature(locate(other)).parameters}
    for cls,found in others[other].items():
        assert {*found} <= there and {*found} <= {*_arguments[cls.__name__]}, cls

def test_it_is_still_the_class():
    "Its signature, texts, name, and what fastai makes of it"
    acc = GradientAccumulation(64)
    assert 'theirs' not in inspect.signature(GradientAccumulation).parameters and acc.accum_bs == 64
    assert GradientAccumulation.__init__.__name__ == '__init__' and pickle.loads(pickle.dumps(acc)).accum_bs == 64
    scaler = deepcopy(DynamicLossScaler('cpu', init_scale=8.))
    assert scaler.get_scale() == 8 and pickle.loads(pickle.dumps(scaler)).get_scale() == 8

def test_errors_of_a_property_stay():
    "They are not taken for a name that is not there"
    class Mine(DynamicLossScaler):
        @property
        def wrong(self): return [].missing
    with pytest.raises(AttributeError, match="'list' object has no attribute 'missing'"): Mine('cpu').wrong
