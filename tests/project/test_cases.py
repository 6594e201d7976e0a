"Which cases run where: conftest.py has the rules"
import os
from pathlib import Path
import pytest
from quick import quickly

tests = Path(__file__).resolve().parents[1]

class Collected:
    def pytest_collection_finish(self, session): self.ids = [i.nodeid for i in session.items]

def cases(monkeypatch, path, **env):
    "The cases that pytest runs with these variables, in this process, which has imported what they need"
    for name in ('QUICK', 'REST', 'ALL_CASES'): monkeypatch.delenv(name, raising=False)
    for name,value in env.items(): monkeypatch.setenv(name, value)
    seen = Collected()
    assert pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', '-n0', str(tests/path)], plugins=[seen]) == 0
    return seen.ids

@pytest.mark.parametrize('path', quickly(['core/test_scaler.py'], ['core/test_scaler.py', '']))
def test_each_case_runs_in_test_or_in_check(monkeypatch, path):
    "`make test` and the tests of `make check` have no case in common, and both together have those of `make cases`"
    quick,rest,every = (cases(monkeypatch, path, **env) for env in (dict(QUICK='1'), dict(REST='1'), {}))
    assert sorted(quick + rest) == sorted(every) == sorted({*every})
    assert len(quick) > 20 and len(rest) > len(quick)/4
