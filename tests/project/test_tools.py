"What the contributors' tools decide by: `make mutants`, `make foreign`"
import pytest, torch
import foreign, mutants

def test_undecorated():
    "The same code, with nothing that mutmut leaves out"
    code = '''
from contextlib import contextmanager
@contextmanager
def ten(
    n # A number
):
    yield 10*n
class A:
    @property
    def x(self): return self._x
    @x.setter
    def x(self, v): self._x = v
    @property
    def y(self):
        "Twice x"
        return 2*self.x
    @staticmethod
    def z(): return 3
'''
    new,ns = mutants.undecorated(code),{}
    assert new.count('@')==2 and '@x.setter' in new and '@staticmethod' in new   # a setter needs its property
    exec(new, ns)
    a = ns['A']()
    a.x = 4
    with ns['ten'](2) as n: assert (n, a.x, a.y, a.z())==(20, 4, 8, 3)

@pytest.mark.parametrize('old,new,words', (
    ("raise ValueError('too large')", "raise ValueError('XXtoo largeXX')", True),
    ("raise ValueError('too large')", "raise ValueError('TOO LARGE')", True),
    ("raise ValueError('too large')", "raise ValueError(None)", False),
    ("state['scale']", "state['XXscaleXX']", False),
    ("x < y", "x <= y", False)))
def test_words(old, new, words): assert mutants.only_words(old, new) is words

def test_modules_have_tests():
    for m in mutants.MODULES: assert mutants.ROOT.joinpath(f'fastaccum/{mutants.MODULES[m].split()[0]}.py').exists() and 'test' in mutants.config(m)
    assert {m for m,*_ in mutants.EQUIVALENT} <= set(mutants.MODULES)

def test_difference():
    def cell(error=None, *fits): return 'code', error, [tuple(map(torch.tensor, f)) for f in fits]
    fit,near,far = ([1.,2.], [.5,float('nan')]), ([1.,2+1e-7], [.5,float('nan')]), ([1.,2.001], [.5,float('nan')])
    for plain,ours in ((cell(), cell()), (cell(None, fit), cell(None, near)), (cell('E: 1'), cell('E: 2')), (cell('E: 1'), cell())):
        assert foreign.difference(plain, ours) is None
    assert foreign.difference(cell(), cell('E: 1'))=='E: 1'
    assert foreign.difference(cell(None, fit), cell())=='0 fits instead of 1'
    assert foreign.difference(cell(None, fit), cell(None, far)).startswith('weights 0.00045 off')
    assert foreign.difference(cell(None, fit), cell(None, ([1.,2.], [.5])))=='losses and metrics inf off'
    assert foreign.difference(cell(None, fit), cell(None, ([1.,2.], [.5,1.])))=='losses and metrics inf off'
