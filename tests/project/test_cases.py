"Which cases run where: conftest.py has the rules"
from pathlib import Path
from types import SimpleNamespace
import pytest
from conftest import fewest, function, on_first_device, pairs_of, values_of

tests = Path(__file__).resolve().parents[1]

class Collected:
    def pytest_collection_finish(self, session): self.items = [*session.items]

def cases(monkeypatch, **env):
    "The cases that pytest runs with these variables, in this process, which has imported what they need"
    for name in ('QUICK', 'REST', 'ALL_CASES'): monkeypatch.delenv(name, raising=False)
    for name,value in env.items(): monkeypatch.setenv(name, value)
    seen = Collected()
    assert pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', '-n0', str(tests)], plugins=[seen]) == 0
    return {i.nodeid: i for i in seen.items}

@pytest.mark.slow
def test_each_case_runs_in_test_or_in_check(monkeypatch):
    "`make test` and the tests of `make check` have no case in common, and both together have each pair of values of `make cases`"
    quick,rest,every = (cases(monkeypatch, **env) for env in (dict(QUICK='1'), dict(REST='1'), {}))
    def pairs(cases): return {(function(i), pair) for i in cases.values() for pair in pairs_of(i)}
    assert not quick.keys() & rest.keys() and pairs({**quick, **rest}) == pairs(every)
    left_out = every.keys() - quick.keys() - rest.keys()
    assert all(on_first_device(every[k]) for k in left_out) and 1000 < len(left_out) < len(rest)
    assert len(quick) > 1000 and len(rest) > len(quick)/4

def case(name, *lists, **params):
    "As pytest makes one of a test with these lists of parameters"
    marks = [SimpleNamespace(args=(names,)) for names in lists]
    return SimpleNamespace(nodeid=f'{name}[{params}]', callspec=SimpleNamespace(params=params), iter_markers=lambda _: marks)

def test_each_value_occurs_in_few_cases():
    items = [case('test', 'a', 'b', a=a, b=b) for a in range(3) for b in 'xy']
    alone = SimpleNamespace(nodeid='test_alone')
    few = [*fewest(values_of, [*items, alone])]
    assert [(i.callspec.params['a'], i.callspec.params['b']) for i in few[:3]] == [(0, 'x'), (1, 'y'), (2, 'x')]
    assert few[3:] == [alone]

def test_each_pair_of_values_occurs_in_few_cases():
    "What stands in one list is not taken apart, and all cases of two lists are pairs"
    listed = [(0, 'x'), (0, 'y'), (1, 'x')]
    items = [case('test', 'a, b', 'c', ['d'], a=a, b=b, c=c, d=d, device='cpu') for a,b in listed for c in range(3) for d in range(3)]
    few = [*fewest(pairs_of, items)]
    assert 9 <= len(few) <= 10 and set().union(*map(pairs_of, few)) == set().union(*map(pairs_of, items))
    assert [*fewest(pairs_of, items, few[:4])] == few[4:]
    two = [case('two', 'a, b', 'c', a=a, b=b, c=c) for a,b in listed for c in range(3)]
    assert [*fewest(pairs_of, two)] == two and [*fewest(pairs_of, two, two[2:])] == two[:2]
