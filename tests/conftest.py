"Settings for all tests: one thread (models are tiny), no windows, and what training saves goes to a temporary folder"
import gc, os, re, signal, sys
from collections import Counter
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
    """All cases run; on the simulated device each hundredth of a test, unless `ALL_CASES=1` is given. `QUICK=1`, as in
    `make test`, takes the first case of each test that is not `slow`, on the CPU alone. `REST=1`, as in `make check`, is
    what `QUICK=1` leaves out, but what is `long`, and cases of several lists of which each row was there"""
    items.sort(key=lambda i: i.module.__name__ not in longest)
    first = [*filter(on_first_device, items)]
    quick = {*one_of_each(i for i in first if not is_slow(i))}
    every = 'ALL_CASES' in os.environ
    keep = items if every else [*fewer_simulated(items)]
    if 'REST' in os.environ:
        short = [i for i in first if not is_long(i)]
        left_out = {*first} - {*fewest(short, quick)}
        keep = [i for i in keep if i not in quick and (every or i not in left_out and not is_long(i))]
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
    "Marked as `slow`, as it takes more than a second. In a file that is `slow`, a test or a case may be marked as `quick`"
    own = {m.name for m in item.own_markers}
    return 'slow' in own or is_long(item) or 'quick' not in own and item.get_closest_marker('slow') is not None

def is_long(item):
    "Takes longer than it is worth at each commit: smaller cases of its kind run, or it is a tool that is run by hand"
    return item.get_closest_marker('long') is not None

def function(item): return item.nodeid.partition('[')[0]

def fewest(items, taken=()):
    """Few cases of each test with which each row of its lists occurs, beside those that are `taken`: the next is always the one with
    most that is new"""
    tests = {}
    for i in items: tests.setdefault(function(i), []).append((i, {*rows_of(i)}))
    for cases in tests.values():
        known = set().union(*[found for i,found in cases if i in taken])
        while cases := [(i, found-known) for i,found in cases if found-known]:
            best,new = max(cases, key=lambda case: len(case[1]))
            yield best
            known |= new

def rows_of(item):
    "Of each `parametrize`, and each fixture with parameters, names and what a case takes; the device is not asked for"
    left = {name: repr(value) for name,value in item.callspec.params.items() if name != 'device'} if hasattr(item, 'callspec') else {}
    rows = []
    for mark in item.iter_markers('parametrize'):
        names = mark.args[0].split(',') if isinstance(mark.args[0], str) else mark.args[0]
        names = tuple(map(str.strip, names))
        rows.append((names, tuple(map(left.pop, names))))
    return [*rows, *left.items()] or [item.nodeid]

def one_of_each(items):
    "The first case of each test"
    firsts = {}
    for i in items: firsts.setdefault(function(i), i)
    return [*firsts.values()]

def fewer_simulated(items):
    n = Counter()
    for i in items:
        simulated = '[sim' in i.name
        if not simulated or n[function(i)]%100 == 0: yield i
        n[function(i)] += simulated
