"Which cases run where: conftest.py has the rules"
from pathlib import Path
from types import SimpleNamespace
import pytest
from conftest import with_new_values

tests = Path(__file__).resolve().parents[1]

class Collected:
    def pytest_collection_finish(self, session): self.ids = [i.nodeid for i in session.items]

def cases(monkeypatch, **env):
    "The cases that pytest runs with these variables, in this process, which has imported what they need"
    for name in ('QUICK', 'REST', 'ALL_CASES'): monkeypatch.delenv(name, raising=False)
    for name,value in env.items(): monkeypatch.setenv(name, value)
    seen = Collected()
    assert pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', '-n0', str(tests)], plugins=[seen]) == 0
    return seen.ids

@pytest.mark.slow
def test_each_case_runs_in_test_or_in_check(monkeypatch):
    "`make test` and the tests of `make check` have no case in common, and both together have those of `make cases`"
    quick,rest,every = (cases(monkeypatch, **env) for env in (dict(QUICK='1'), dict(REST='1'), {}))
    assert sorted(quick + rest) == sorted(every) == sorted({*every})
    assert len(quick) > 1000 and len(rest) > len(quick)/4

def test_each_value_occurs_in_few_cases():
    items = [SimpleNamespace(nodeid=f'test[{a}-{b}]', callspec=SimpleNamespace(params=dict(a=a, b=b))) for a in range(3) for b in 'xy']
    alone = SimpleNamespace(nodeid='test_alone')
    assert [i.nodeid for i in with_new_values([*items, alone])] == ['test[0-x]', 'test[1-y]', 'test[2-x]', 'test_alone']
