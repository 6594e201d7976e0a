"The short form of soak.py"
from soak import run, summary
from pathlib import Path

def test_soak():
    "Over 500 steps and several fits: no more tensors, no slower steps, no warning twice"
    res = summary(*run(500, Path.cwd()))
    assert res['steps'] >= 500 and res['last_loss'] < res['first_loss']
    assert res['tensors'][3] < res['tensors'][1] + 100   # the Recorder of fastai keeps a tensor for each step of a fit
    assert res['median_ms'][3] < 1.5*res['median_ms'][0]
    assert res['memory_mib'][3] < res['memory_mib'][1] + 20
    assert all(n==1 for n in res['warnings'].values()), res['warnings']
