"What a checkpoint of a model of 300 MB takes, beside `torch.save` of the same content to the same disk in the same round"
import os, shutil, statistics, sys, tempfile, time
from pathlib import Path
import torch
from torch import nn
from fastaccum.checkpoint import files
from fastaccum.checkpoint.folder import CheckpointFolder

def state(megabytes=300):
    "Weights of a model of this size"
    return dict(model=nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(megabytes//4)]).state_dict())

def seconds(f, *args, **kwargs):
    start = time.perf_counter()
    f(*args, **kwargs)
    return time.perf_counter()-start

def one_round(folder, state, done) -> dict: # Seconds of each part, and of a checkpoint in the foreground and in the background
    "The order of a checkpoint: the file is written, forced to the disk, and the one before it removed"
    plain,res = folder.path.with_name('plain.pt'),{}
    os.sync()
    res['torch.save'] = seconds(torch.save, state, plain)
    res['force to disk'] = seconds(files._force_to_disk, plain)
    res['remove'] = seconds(os.unlink, plain)
    os.sync()
    res['checkpoint'] = seconds(folder.save, state, 1, 2*done, keep=1)
    os.sync()
    res['background, wait'] = seconds(folder.save, state, 1, 2*done+1, keep=1, background=True)
    res['background, rest'] = seconds(folder.wait)
    assert [f.name for f in folder.files] == [f'1-{2*done+1:09d}.pt']
    return res

def memory_of_copy(state) -> float: # Relative to the size of the state
    "Memory that stays in use after a save in the background"
    kept = files.copied(state)[1]
    return sum(t.nbytes for ts in kept.values() for t in ts)/sum(t.nbytes for t in state['model'].values())

def run(rounds=7, megabytes=300, where=None) -> dict: # Medians, as ratios to `torch.save`
    a_state,top = state(megabytes),Path(tempfile.mkdtemp(dir=where))
    folder = CheckpointFolder(top/'checkpoint')
    folder.path.mkdir()
    rows = [one_round(folder, a_state, done) for done in range(rounds+1)][1:]     # the first one makes the memory for the copy
    shutil.rmtree(top)
    return dict({k: statistics.median(r[k]/r['torch.save'] for r in rows) for k in rows[0]}, memory=memory_of_copy(a_state))

if __name__ == '__main__':
    torch.set_num_threads(1)
    for k,v in run(where=(sys.argv[1:] or [None])[0]).items(): print(f'{k:18s} {v:5.2f}')
