"Settings for all tests: one thread (models are tiny), no windows, and what training saves goes to a temporary folder"
import os, signal
from collections import defaultdict
import matplotlib, pytest, torch
import devices
matplotlib.use('Agg')
torch.set_num_threads(1)

@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)

# a shell that starts the tests in the background has Ctrl-C ignored, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

# --- devices

# What trains through `learner` of reference.py; on a machine with a GPU there may be no W&B
with_wandb = 'test_checkpoint_wandb','test_wandb'
numeric = ('test_exact', 'test_microbatch', 'test_coupled', 'test_properties', 'test_precision', 'test_scaler', 'test_steps', 'test_epoch_ends', 'test_checkpoint', 'test_toolbox', *with_wandb)
on_gpu = {*numeric, 'test_accelerator'} - {*with_wandb}
in_full = 'test_toolbox',   # every case on the simulated device too

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

# They take longest: begun first, so that no worker is left with one of them at the end
slow = 'test_kill', 'test_site', 'test_checkpoint_files', 'test_accelerator', 'test_soak', 'test_bench', 'test_package'

def pytest_collection_modifyitems(config, items):
    "Of each test the simulated device, which is slow, gets a few cases, spread over its parameters; with `ALL_CASES=1` all of them"
    items.sort(key=lambda i: i.module.__name__ not in slow)
    if os.environ.get('ALL_CASES'): return
    cases = defaultdict(list)
    for i in items:
        if '[sim' in i.name and i.module.__name__ not in in_full: cases[i.parent,i.originalname].append(i)
    few = {c for cs in cases.values() for c in cs[::-(-len(cs)//3)]}
    out = [i for c in cases.values() for i in c if i not in few]
    config.hook.pytest_deselected(items=out)
    out = set(out)
    items[:] = [i for i in items if i not in out]
