"""The methods of `Learner` that fastaccum replaces: they stay fastai's at heart, however often and in whatever order
modules are loaded again"""
import os, subprocess, sys
from pathlib import Path
import pytest
from fastai.basics import Learner
import fastaccum.all, fastaccum.loop.learner

root = Path(__file__).resolve().parents[2]
METHODS = 'fit','_do_fit','validation_context','_do_epoch_validate','save','load','export'

@pytest.mark.parametrize('name', METHODS)
def test_replaced_once(name):
    method = getattr(Learner, name)
    assert method.of_fastai.__module__.startswith('fastai.') and not hasattr(method.of_fastai, 'of_fastai')
    assert method.__module__ == 'fastaccum.loop.learner' and method.__doc__

code = '''
import importlib, random, sys, warnings
warnings.simplefilter('ignore')
import torch; torch.set_num_threads(1)
from fastai.basics import *
from fastai.test_utils import synth_learner
import fastaccum.all
order = {order!r}
def losses(*cbs):
    set_seed(0, reproducible=True)
    learn = synth_learner(n_trn=4, cbs=cbs, path=Path({tmp!r}))
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    learn.save('m'); learn.load('m')
    with learn.no_bar(): learn.validate()
    return [float(l) for l in learn.recorder.losses],[p.detach().clone() for p in learn.model.parameters()]
def same(a, b): return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))
plain,ours = losses(),losses(fastaccum.all.GradientAccumulation(32))
old = fastaccum.all.GradientAccumulation(32)
for _ in range(2):
    names = sorted(n for n in sys.modules if n.split('.')[0] == 'fastaccum')
    if order == 'reversed': names.reverse()
    if order == 'shuffled': random.Random(1).shuffle(names)
    for n in names: importlib.reload(sys.modules[n])
    assert same(losses(), plain)
    assert same(losses(importlib.import_module('fastaccum.all').GradientAccumulation(32)), ours)
assert same(losses(old), ours)      # one from before
print('trained')
'''

@pytest.mark.slow
@pytest.mark.parametrize('order', ['sorted','reversed','shuffled'])
def test_loaded_again(order, tmp_path):
    "Twice: a plain Learner and one with accumulation train as before, also with a callback that is older than the modules"
    env = dict(os.environ, PYTHONPATH=str(root), OMP_NUM_THREADS='1')
    res = subprocess.run([sys.executable, '-c', code.format(order=order, tmp=str(tmp_path))], env=env,
                         capture_output=True, text=True, timeout=300)
    assert res.stdout.split() == ['trained'], res.stdout + res.stderr[-3000:]
