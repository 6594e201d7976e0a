"""The code of two checkouts in one run: `python -m bench --against PATH [model ...]`

Two processes, one with the fastaccum of `PATH` ("old"), one with this one ("new"); both run the jobs of this `bench`. They take turns: each
fit of the one is followed by the same fit of the other, in another order each round, so that what else the machine does meets both. Both
keep the memory that they have freed: whether glibc returns it to the system after each use depends on what a process did before, and
costs a convolution up to a third of its time."""
import gc, importlib.util, multiprocessing, os, random, sys, warnings
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
import pandas as pd, torch

PEERS = 'hand', 'split', 'whole'
# bytes; glibc reads them when a process starts
KEEP_MEMORY = dict(MALLOC_MMAP_THRESHOLD_='4294967296', MALLOC_TRIM_THRESHOLD_='17179869184')
HERE = Path(__file__).resolve().parent.parent

def use(path):
    "In a new process: import fastaccum from `path`"
    sys.path.insert(0, str(path))
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    import fastaccum
    assert Path(fastaccum.__file__).resolve().is_relative_to(path)
    # The jobs are made with this checkout's `conformance`
    spec = importlib.util.spec_from_file_location('fastaccum.conformance', HERE/'fastaccum/conformance.py')
    sys.modules[spec.name] = fastaccum.conformance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fastaccum.conformance)

@lru_cache(1)
def job_of(case):
    from .jobs import job
    from .speed import MICRO_BS
    return job(case.model, case.n_acc*case.steps, MICRO_BS, n_acc=case.n_acc, precision=case.precision)

def fit(case, peer):
    from .peers import PEERS
    from .speed import time_fit
    return time_fit(PEERS[peer], job_of(case), case.steps)

def verdict(old, new):
    "By the quartiles"
    return 'overlap' if old['low'] <= new['high'] and new['low'] <= old['high'] else 'faster' if new['high'] < old['low'] else 'slower'

def compare(case, pools): # One row a peer; us of processor time per micro-batch beyond the hand-written loop
    from .speed import overhead
    peers,times = [p for p in PEERS if p in case.peers],{}
    for i in range(-1, case.rounds):      # the first warms up
        shuffled = random.Random(i).sample
        for p,k in ((p, k) for p in shuffled(peers, len(peers)) for k in shuffled(list(pools), 2)):
            t = pools[k].submit(fit, case, p).result()
            if i >= 0: times.setdefault((p, k), []).append(t)
        if i < 0:
            for pool in pools.values(): pool.submit(gc.freeze).result()
    for pool in pools.values(): pool.submit(gc.unfreeze).result()
    def row(p):
        old,new = (overhead(times[p, k], times['hand', k], 'cpu') for k in ('old', 'new'))
        change = overhead(times[p, 'new'], times[p, 'old'], 'cpu')
        def shown(o): return '{over:+.0f} ({low:+.0f} to {high:+.0f})'.format(**o)
        return dict(model=case.model, precision=case.precision, n_acc=case.n_acc, peer=p, old=shown(old), new=shown(new),
                    quartiles=verdict(old, new), change=shown(change))
    return [row(p) for p in peers if p != 'hand']

def run(path, cases):
    path,spawn,rows = Path(path).resolve(),multiprocessing.get_context('spawn'),[]
    if not (path/'fastaccum').is_dir(): sys.exit(f'There is no fastaccum in {path}: pass the path of a checkout.')
    with ProcessPoolExecutor(1, spawn, use, [path]) as old, ProcessPoolExecutor(1, spawn, use, [HERE]) as new:
        for case in cases: rows += compare(case, dict(old=old, new=new))
    return pd.DataFrame(rows)

def main(path, *models):
    from .speed import CASES
    os.environ.update(KEEP_MEMORY)
    print('us of processor time per micro-batch, beyond the hand-written loop: median (quartiles). `change`: new minus old, of each round')
    print(run(path, [c for c in CASES if not models or c.model in models]).to_string(index=False))
