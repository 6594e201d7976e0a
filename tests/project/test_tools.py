"What the contributors' tools decide by: `make mutants`"
import pytest
import mutants

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
    for m in mutants.MODULES:
        assert (mutants.ROOT.joinpath(f'fastaccum/{mutants.MODULES[m].split()[0]}.py').exists()
                and 'test' in mutants.config(m))
    assert {m for m,*_ in mutants.EQUIVALENT} <= set(mutants.MODULES)
