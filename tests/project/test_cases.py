"Which cases run where: conftest.py has the rules"
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
import pytest
from conftest import add, fewest, function, n_partners, on_first_device, partners_of, values_of

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
    """`make test` and the tests of `make check` have no case in common, and both together have each value of `make cases` beside two
    of each other list, or as many as it is beside there"""
    quick,rest,every = (cases(monkeypatch, **env) for env in (dict(QUICK='1'), dict(REST='1'), {}))
    def partners(cases):
        found = defaultdict(set)
        for i in cases.values(): add(found, [((function(i), key), partner) for key,partner in partners_of(i)])
        return {key: min(n_partners, len(known)) for key,known in found.items()}
    assert not quick.keys() & rest.keys() and partners({**quick, **rest}) == partners(every)
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

def test_each_value_is_beside_two_of_each_other_list():
    "Or beside all, where these are fewer, of a list that names several parameters too. All cases of one list are taken"
    listed = [(a, b) for a in range(6) for b in 'xy'][:-1]
    items = [case('test', 'a, b', 'c', ['d'], a=a, b=b, c=c, d=d, device='cpu') for a,b in listed for c in range(9) for d in range(2)]
    def found(cases):
        known = defaultdict(set)
        for i in cases: add(known, partners_of(i))
        return known
    few,every = [*fewest(partners_of, items, n=n_partners)],found(items)
    assert all(len(found(few)[key]) >= min(2, len(known)) for key,known in every.items()) and len(few) < 35 < len(items)/4
    assert [*fewest(partners_of, items, few[:4], n_partners)] == few[4:]
    one = [case('one', 'a, b', a=a, b=b) for a,b in listed]
    assert [*fewest(partners_of, one, n=n_partners)] == one and [*fewest(partners_of, one, one[2:], n_partners)] == one[:2]
