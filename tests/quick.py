"What `make test` runs of a test that takes long: conftest.py has the rules"
import pytest

def quickly(quick, names):
    "`names`, tuples of several parameters, or `pytest.param`s with ids, of which `make test` runs those in `quick`"
    params = {}
    for n in names:
        if hasattr(n, 'id'): params[n.id] = n
        else: params[n] = pytest.param(*(n if isinstance(n, tuple) else (n,)))
    assert {*quick} <= {*params}, quick
    marks = {n: pytest.mark.quick if n in quick else pytest.mark.slow for n in params}
    return [pytest.param(*p.values, id=p.id, marks=[*p.marks, marks[n]]) for n,p in params.items()]
