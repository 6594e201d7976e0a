"What `make test` runs of a test that takes long: conftest.py has the rules"
import pytest

def quickly(quick, names):
    "`names`, or tuples of several parameters, of which `make test` runs those in `quick`"
    assert {*quick} <= {*names}, quick
    marks = {n: pytest.mark.quick if n in quick else pytest.mark.slow for n in names}
    return [pytest.param(*(n if isinstance(n, tuple) else (n,)), marks=mark) for n,mark in marks.items()]
