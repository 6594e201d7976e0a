"What `make test` runs of a test that takes long: conftest.py has the rules"
import os, pytest

def quickly(quick, names, long=()):
    """`names`, tuples of several parameters, or `pytest.param`s with ids, of which `make test` runs the first one in
    `quick`, and only `make cases` those in `long`"""
    params = {}
    for n in names:
        if hasattr(n, 'id'): params[n.id] = n
        else: params[n] = pytest.param(*(n if isinstance(n, tuple) else (n,)))
    assert {*quick, *long} <= {*params}, (quick, long)
    marks = {n: pytest.mark.quick if n in quick else pytest.mark.long if n in long else pytest.mark.slow for n in params}
    return [pytest.param(*p.values, id=p.id, marks=[*p.marks, marks[n]]) for n,p in params.items()]

def over_ranks(names, three):
    "Of `name,n`: each over two ranks, and over three, which takes longest: only `make cases` runs there what is not in `three`"
    return quickly([], [(name, n) for n in (2, 3) for name in names],
                   long=[(name, 3) for name in names if name not in three])

def run_over(n, names, three):
    "Those of `names` that a process of `n` ranks has to run for the cases of `over_ranks`"
    return [k for k in names if n < 3 or k in three or 'REST' not in os.environ]
