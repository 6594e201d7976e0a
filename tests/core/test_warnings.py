"Warnings: their class, and the line to which they point"
import subprocess, sys, warnings
from contextlib import ExitStack
import pytest
from reference import *
from fastaccum.all import *
from fastaccum.core.warnings import warn

data = Data(torch.randn(64, 6), torch.randn(64, 4))
def sums(pred, y): return (pred-y).pow(2).sum()/50

def get_learner(accum_bs, *cbs, **kwargs):
    return learner(data, 8, GradientAccumulation(accum_bs), *cbs, splitter=lambda m: L(m[0], m[2]).map(params), **kwargs)

# Each warns, and returns the line to which the warning points: the innermost that is not a library's
def line(): return sys._getframe(1).f_lineno

def called(): warn('off'); return line()

def from_pythons_library():
    with ExitStack() as stack: stack.callback(warn, 'off'); here = line()
    return here

def before_a_fit(): learn = get_learner(4); learn.fit(1, .1); return line()
def in_a_batch(): learn = get_learner(16, loss_func=sums); learn.fit(1, .1); return line()
def after_an_epoch(): learn = get_learner(100); learn.fit(1, .1); return line()
def in_a_schedule(): learn = get_learner(100); learn.fine_tune(1, .1); return line()
def in_lr_find(): learn = get_learner(4); learn.lr_find(num_it=5, show_plot=False); return line()
def of_another_callback(): learn = get_learner(16); learn.fit(1, .1, cbs=ScaleLR('linear', bs=8, half_life=True)); return line()

def in_a_function_of_the_users():
    def train(learn): learn.fit(1, .1); return line()
    return train(get_learner(4))


@pytest.mark.parametrize('f', [called, from_pythons_library, before_a_fit, in_a_batch, after_an_epoch, in_a_schedule,
                               in_lr_find, of_another_callback, in_a_function_of_the_users],
                         ids=lambda f: f.__name__)
def test_points_to_the_users_line(f):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        here = f()
    own = [w for w in seen if w.category is FastaccumWarning]
    assert own and {(w.filename, w.lineno) for w in own} == {(__file__, here)}

def test_can_be_filtered():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', 'accum_bs=.* is smaller', FastaccumWarning)
        get_learner(4).fit(1, .1)
        warnings.simplefilter('ignore', FastaccumWarning)
        get_learner(100).fit(1, .1)

def test_without_a_users_line():
    "In a thread of a library's there is none"
    code = 'import threading; from fastaccum.core.warnings import warn; ' \
           't = threading.Thread(target=warn, args=["off"]); t.start(); t.join()'
    res = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert 'threading.py' in res.stderr and 'FastaccumWarning: off' in res.stderr
