"The short form of soak.py"
import pytest
from soak import *

class Leak(Callback):
    "Keeps something of each step"
    run_valid = False
    def __init__(self, make): self.make,self.kept = make,[]
    def after_step(self): self.kept.append(self.make())

def test_soak():
    "Over 500 steps and several fits: no more objects and tensors, no slower steps, no warning twice"
    res = summary(*run(500, Path.cwd(), n_fits=5))
    assert res['steps'] >= 500 and res['last_loss'] < res['first_loss']
    assert res['tensors_per_step']==0 and res['blocks_per_step'] < .7   # some are left of each fit, such as the names of its files
    assert res['mib'][-1] < res['mib'][1] + 20
    assert res['median_ms'][3] < 1.5*res['median_ms'][0]
    assert all(n==1 for n in res['warnings'].values()), res['warnings']

@pytest.mark.parametrize('make,name', [(lambda: bytes(100), 'blocks'), (lambda: torch.zeros(25), 'tensors')], ids=['bytes','tensors'])
def test_would_notice(make, name):
    "100 bytes a step"
    meter,*_ = run(120, Path.cwd(), Leak(make), n_fits=4)
    assert per_step(meter, name) >= 1
