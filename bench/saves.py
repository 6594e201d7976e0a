"What a checkpoint of a model of 200 MB takes: how long training waits for it, and how long the file is written"
import shutil, statistics, tempfile, time
from pathlib import Path
import torch
from torch import nn
from fastaccum.checkpoint.folder import CheckpointFolder

def state(megabytes=200):
    "Weights of a model of this size"
    return dict(model=nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(megabytes//4)]).state_dict())

def timed(state, background, rounds) -> list: # For each save, seconds that training waits, and until the file is there
    folder,res = CheckpointFolder(Path(tempfile.mkdtemp())/'checkpoint'),[]
    for done in range(rounds+1):      # the first one makes the memory for the copy
        start = time.perf_counter()
        folder.save(state, 1, done, keep=1, background=background)
        waited = time.perf_counter()-start
        folder.wait()
        res.append((waited, time.perf_counter()-start))
        assert [f.name for f in folder.files] == [f'1-{done:09d}.pt']
    shutil.rmtree(folder.path.parent)
    return res[1:]

def run(rounds=5, megabytes=200) -> list: # One dict each for both kinds
    a_state,rows = state(megabytes),[]
    for background in (False, True):
        waited,written = zip(*timed(a_state, background, rounds))
        rows.append(dict(background=background, megabytes=megabytes, wait=statistics.median(waited), written=statistics.median(written)))
    return rows

if __name__ == '__main__':
    torch.set_num_threads(1)
    for r in run(): print(f"background={r['background']}: training waits {r['wait']:.3f} s, the file of {r['megabytes']} MB is there after {r['written']:.3f} s")
