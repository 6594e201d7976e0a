"The short form of soak.py"
import fresh, json, os, pytest
pytest.importorskip('resource', reason='Windows does not say how much memory a process takes')
from soak import *

STEPS,MAX_BLOCKS = 500,1.2   # some blocks are left of each fit: up to .9 a step on a busy machine
pytestmark = pytest.mark.slow

class Leak(Callback):
    "Keeps something of each step"
    run_valid = False
    def __init__(self, make): self.make,self.kept = make,[]
    def after_step(self): self.kept.append(self.make())

class Calls(Callback):
    "How many functions, those written in C too, each step calls: what takes longer with every step calls more of them"
    order,run_valid = 2001,False
    def __init__(self): self.seen,self.at = Counter(),[]
    def before_fit(self):
        seen = self.seen
        def count(frame, event, arg): seen[event] += 1
        sys.setprofile(count)
    def after_batch(self):
        if self.learn.one_batch.closed: self.at.append(self.seen['call']+self.seen['c_call'])
    def after_fit(self): sys.setprofile(None)

in_its_own_process = f"""import json
from soak import *
print(json.dumps(summary(*run({STEPS}, Path.cwd())), default=float))
"""

@pytest.mark.long
def test_soak():
    "Over 500 steps and several fits: no more objects and tensors, no warning twice. What other tests left would be counted, too"
    p = fresh.run('-c', in_its_own_process, env={**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))})
    assert p.returncode == 0, p.stderr
    res = json.loads(p.stdout.splitlines()[-1])
    assert res['steps'] >= STEPS and res['last_loss'] < res['first_loss']
    assert res['tensors_per_step']==0 and res['blocks_per_step'] < MAX_BLOCKS, res
    assert res['mib'][-1] < res['mib'][1] + 20
    assert all(n==1 for n in res['warnings'].values()), res['warnings']

@pytest.mark.parametrize('make,name,least',
                         [(lambda: [bytes(100)], 'blocks', MAX_BLOCKS), (lambda: torch.zeros(25), 'tensors', 1)],
                         ids=['bytes','tensors'])
def test_would_notice(make, name, least):
    "A list of 100 bytes a step: `test_soak` would fail, even if it were shorter"
    meter,*_ = run(STEPS//3, Path.cwd(), Leak(make))
    assert per_step(meter, name) >= least

class Slow(Leak):
    "Looks at all that it has kept"
    def after_step(self):
        super().after_step()
        for o in self.kept: len(o)

@pytest.mark.parametrize('cbs,same', [((), True), ((Slow(bytes),), False)], ids=['ours','would notice'])
def test_calls(cbs, same):
    "The last steps call no more functions than the first"
    calls = Calls()
    run(150, Path.cwd(), calls, *cbs, n_fits=5)
    first,*_,last = [np.median(q) for q in np.array_split(np.diff(calls.at), 4)]
    assert (last <= 1.01*first) == same, (first, last)
