"Settings for all tests: one thread (models are tiny), no windows, and what training saves goes to a temporary folder"
import gc, os, re, signal, sys
from collections import Counter, defaultdict
from itertools import permutations
from pathlib import Path
import matplotlib, pytest, torch
import devices
from fastaccum.core import FastaccumWarning
from fastaccum.precision.callback import AMPMode, can_compute_in
matplotlib.use('Agg')
torch.set_num_threads(1)
sys.path += [str(f) for f in Path(__file__).parent.iterdir() if f.is_dir()]   # some tests use what is defined in another folder's

@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)

# a shell that starts the tests in the background has Ctrl-C ignored, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

@pytest.fixture(autouse=True)
def short_warnings(monkeypatch):
    "A warning has one sentence of what, one of what to write, and one link; it may quote others in parentheses"
    long = []
    def check(self, text):
        UserWarning.__init__(self, text)
        words,_,link = re.sub(r'\([^()]*\)', '', text).rpartition(' ')
        if len(re.findall(r'[.!?] +[A-Z`]', words)) > 1 or not link.startswith('https://fastaccum.github.io/'): long.append(text)
    monkeypatch.setattr(FastaccumWarning, '__init__', check)
    yield
    assert long == []

# --- devices

# What trains through `learner` of reference.py; on a machine with a GPU there may be no W&B
with_wandb = 'test_checkpoint_wandb','test_wandb'
numeric = ('test_exact', 'test_microbatch', 'test_coupled', 'test_properties', 'test_precision', 'test_scaler',
           'test_steps', 'test_epoch_ends', 'test_checkpoint', 'test_toolbox', 'test_exact_batchnorm', *with_wandb)
on_gpu = {*numeric, 'test_accelerator'} - {*with_wandb}

@pytest.fixture(autouse=True)
def device(request):
    "Where the test trains"
    name = getattr(request, 'param', devices.names[0])
    if why := devices.cannot(name, request.node.originalname): pytest.skip(f'{name}: {why}')
    yield devices.use(name)
    devices.use(devices.names[0])

def pytest_runtest_setup(item):
    "Looked at here: a file of tests that computes gradients while it is imported could not be forked for `make mutants`"
    if item.get_closest_marker('fp16') and not can_compute_in('cpu', AMPMode.FP16): pytest.skip('this CPU cannot compute in fp16')

def pytest_generate_tests(metafunc):
    names = devices.names[:1] if 'QUICK' in os.environ else devices.names
    if metafunc.module.__name__ in numeric: metafunc.parametrize('device', names, indirect=True)

def pytest_ignore_collect(collection_path):
    if devices.GPU and collection_path.suffix == '.py' and collection_path.stem not in on_gpu: return True

# --- which cases

# They take longest: begun first, so that no worker is left with one of them at the end
longest = ('test_kill', 'test_site', 'test_checkpoint_files', 'test_accelerator', 'test_soak', 'test_bench',
           'test_package', 'test_distributed')

def pytest_collection_modifyitems(config, items):
    """All cases run; on the simulated device each tenth of a test, unless `ALL_CASES=1` is given. `QUICK=1`, as in
    `make test`, trains on the CPU alone, and leaves out what is `slow`, and cases of which each value was there.
    `REST=1`, as in `make check`, is what `QUICK=1` leaves out, but cases of which each value was there beside two of
    each other list"""
    items.sort(key=lambda i: i.module.__name__ not in longest)
    first = [*filter(on_first_device, items)]
    quick = {*fewest(values_of, (i for i in first if not is_slow(i)))}
    every = 'ALL_CASES' in os.environ
    keep = items if every else [*fewer_simulated(items)]
    if 'REST' in os.environ:
        left_out = {*first} - {*fewest(partners_of, first, quick, n_partners)}
        keep = [i for i in keep if i not in quick and (every or i not in left_out)]
    if 'QUICK' in os.environ: keep = [i for i in items if i in quick]
    config.hook.pytest_deselected(items=[*{*items} - {*keep}])
    items[:] = keep

def pytest_collection_finish(session):
    "Each time memory runs out garbage is collected: not among all that was imported"
    gc.collect()
    gc.freeze()

def on_first_device(item):
    return not hasattr(item, 'callspec') or item.callspec.params.get('device', devices.names[0]) == devices.names[0]

def is_slow(item):
    "Marked as `slow`. In a file that is `slow`, a test or a case may be marked as `quick`"
    own = {m.name for m in item.own_markers}
    return 'slow' in own or 'quick' not in own and item.get_closest_marker('slow') is not None

def function(item): return item.nodeid.partition('[')[0]

n_partners = 2

def fewest(has, items, taken=(), n=1):
    """Few cases of each test with which all keys occur that `has` finds in its cases, with `n` of their partners if they have as
    many, beside those that are `taken`: the next is always the one with most that is new"""
    tests = {}
    for i in items: tests.setdefault(function(i), []).append((i, has(i)))
    for cases in tests.values():
        known = defaultdict(set)
        for i,found in cases:
            if i in taken: add(known, found)
        while cases := [(i, new) for i,found in cases if (new := [o for o in found if is_new(known, *o, n)])]:
            best,found = max(cases, key=lambda case: len(case[1]))
            yield best
            add(known, found)

def add(known, found):
    for key,partner in found: known[key].add(partner)

def is_new(known, key, partner, n): return len(known[key]) < n and partner not in known[key]

def values_of(item):
    return [((name, repr(value)), '') for name,value in item.callspec.params.items()] if hasattr(item, 'callspec') else [('', '')]

def partners_of(item):
    """Each value that a case takes from a list of its test, and another list, with the value that it takes from that. One list
    alone is taken whole"""
    values = [*values_of_lists(item)]
    if len(values) < 2: return [(item.nodeid, '')]
    return [((own, names), other) for own,(names,other) in permutations(values, 2)]

def values_of_lists(item):
    "Of each `parametrize`, and each fixture with parameters, names and what a case takes; the device is not asked for"
    left = {name: repr(value) for name,value in item.callspec.params.items() if name != 'device'} if hasattr(item, 'callspec') else {}
    for mark in item.iter_markers('parametrize'):
        names = mark.args[0].split(',') if isinstance(mark.args[0], str) else mark.args[0]
        names = tuple(map(str.strip, names))
        yield names,tuple(map(left.pop, names))
    yield from left.items()

def fewer_simulated(items):
    n = Counter()
    for i in items:
        simulated = '[sim' in i.name
        if not simulated or n[function(i)]%10 == 0: yield i
        n[function(i)] += simulated
