"Which cases run where: conftest.py has the rules"
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
import pytest
from conftest import fewest, function, is_long, is_slow, on_first_device, one_of_each, rows_of

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

@pytest.mark.long
def test_each_case_runs_in_test_or_in_check(monkeypatch):
    """`make test` has one case of each test that is not slow. The tests of `make check` have no case in common with it, and both
    together have each row of each list of `make cases`, but of those that are long"""
    quick,rest,every = (cases(monkeypatch, **env) for env in (dict(QUICK='1'), dict(REST='1'), {}))
    def rows(cases): return {(function(i), row) for i in cases.values() if not is_long(i) for row in rows_of(i)}
    both = {**quick, **rest}
    assert len(both) == len(quick) + len(rest)
    assert {f for f,_ in rows(both)} == {f for f,_ in rows(every)}
    assert {r for r in rows(every) if r[0] != r[1]} - rows(both) == {*()}
    left_out = every.keys() - both.keys()
    assert not any(map(is_long, both.values())) and all(on_first_device(every[k]) or is_long(every[k]) for k in left_out)
    assert 1000 < len(left_out) < len(both) and len(quick) < len(rest)
    assert Counter(map(function, quick.values())) == Counter({function(i) for i in every.values() if on_first_device(i) and not is_slow(i)})

def case(name, *lists, **params):
    "As pytest makes one of a test with these lists of parameters"
    marks = [SimpleNamespace(args=(names,)) for names in lists]
    return SimpleNamespace(nodeid=f'{name}[{params}]', callspec=SimpleNamespace(params=params), iter_markers=lambda _: marks)

def test_each_value_occurs_in_few_cases():
    items = [case('test', 'a', 'b', a=a, b=b) for a in range(3) for b in 'xy']
    alone = SimpleNamespace(nodeid='test_alone', iter_markers=lambda _: [])
    few = [*fewest([*items, alone])]
    assert [(i.callspec.params['a'], i.callspec.params['b']) for i in few[:3]] == [(0, 'x'), (1, 'y'), (2, 'x')]
    assert few[3:] == [alone]

def test_each_row_of_each_list_occurs():
    "Those of lists that name several parameters, too; all cases of one list are taken"
    listed = [(a, b) for a in range(6) for b in 'xy'][:-1]
    items = [case('test', 'a, b', 'c', ['d'], a=a, b=b, c=c, d=d, device='cpu') for a,b in listed for c in range(9) for d in range(2)]
    few = [*fewest(items)]
    assert {r for i in few for r in rows_of(i)} == {r for i in items for r in rows_of(i)} and len(few) == len(listed)
    assert [*fewest(items, few[:4])] == few[4:]
    one = [case('one', 'a, b', a=a, b=b) for a,b in listed]
    assert [*fewest(one)] == one and [*fewest(one, one[2:])] == one[:2]
    assert one_of_each([*few, *one]) == [few[0], one[0]]
