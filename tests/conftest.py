"Settings for all tests: one thread (models are tiny), no windows, and what training saves goes to a temporary folder"
import os, signal, sys
from collections import Counter, defaultdict
from pathlib import Path
import matplotlib, pytest, torch
import devices
matplotlib.use('Agg')
torch.set_num_threads(1)
sys.path += [str(f) for f in Path(__file__).parent.iterdir() if f.is_dir()]   # some tests use what is defined in another folder's

@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)

# a shell that starts the tests in the background has Ctrl-C ignored, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

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

def pytest_generate_tests(metafunc):
    if metafunc.module.__name__ in numeric: metafunc.parametrize('device', devices.names, indirect=True)

def pytest_ignore_collect(collection_path):
    if devices.GPU and collection_path.suffix == '.py' and collection_path.stem not in on_gpu: return True

# --- which cases

# They take longest: begun first, so that no worker is left with one of them at the end
slow = 'test_kill', 'test_site', 'test_checkpoint_files', 'test_accelerator', 'test_soak', 'test_bench', 'test_package', 'test_distributed'
in_full = 'test_toolbox',   # every case on the simulated device too
sweeps = 'test_robust',     # each setup goes through each test: quickly, each of both occurs once

def pytest_collection_modifyitems(config, items):
    """With `QUICK=1`, as `make test` runs them, each value of each parameter of a test occurs, but not with every value
    of the others; what is marked as `slow` does not, and of a file that says what is `quick` only that. Without, all
    cases are run, of those on the simulated device a few; with `ALL_CASES=1` all of these too"""
    items.sort(key=lambda i: i.module.__name__ not in slow)
    tests = defaultdict(list)
    for i in items:
        sim = '[sim' in i.name and i.module.__name__ not in in_full
        if not is_quick or quick(i): tests[i.parent, is_quick and (sim or i.module.__name__ in sweeps) or i.originalname, sim].append(i)
    keep = {i for (_,_,sim),cases in tests.items() for i in (some_simulated if sim else each_value_once if is_quick else list)(cases)}
    config.hook.pytest_deselected(items=[i for i in items if i not in keep])
    items[:] = [i for i in items if i in keep]

is_quick = 'QUICK' in os.environ

def quick(item):
    names = getattr(item.module, 'quick', None)
    return not item.get_closest_marker('slow') and (names is None or item.name in names or item.originalname in names)

def some_simulated(cases):
    "Three cases of a test, which runs on the CPU, too; or five of a file. They are spread over all"
    return cases if 'ALL_CASES' in os.environ else cases[::-(-len(cases)//(5 if is_quick else 3))]

def each_value_once(cases):
    "A few of `cases` in which each value of each parameter occurs, with ever other ones of the others"
    params = lambda i: {'test': i.originalname, **(i.callspec.params if hasattr(i, 'callspec') else {})}
    values = {i: [(k, repr(v)) for k,v in params(i).items()] for i in cases}
    left,seen,few = {v for vs in values.values() for v in vs},Counter(),[]
    while left:
        few.append(max(cases, key=lambda i: (sum(v in left for v in values[i]), -sum(seen[v] for v in values[i]))))
        seen.update(values[few[-1]])
        left -= {*values[few[-1]]}
    return few
