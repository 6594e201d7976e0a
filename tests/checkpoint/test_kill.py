"A script is killed with SIGKILL again and again, and started again each time: it ends as the one that was left alone"
import os, random, select, signal, subprocess, sys, time
from pathlib import Path
import fresh, pytest, torch

script = [sys.executable, '-W', 'ignore', str(Path(__file__).with_name('kill_script.py'))]
env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(p for p in sys.path if p)}
pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')

class Server:
    "Starts the script in a new process, in a folder"
    def __init__(self):
        self.p = fresh.start(script[-1], 'serve', env=env)
    def start(self, folder):
        self.p.stdin.write(f'{folder}\n')
        self.pid = int(self.p.stdout.readline())
    def ended(self, seconds=None):
        "Did it end by itself within so many seconds?"
        if seconds is not None and not select.select([self.p.stdout], [], [], seconds)[0]: return False
        self.status = int(self.p.stdout.readline().split()[1])
        assert self.status in (0, signal.SIGKILL), 'the script failed'
        return True
    def kill(self):
        "Was it in time?"
        try: os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError: pass                               # it has just ended
        self.ended()
        return self.status == signal.SIGKILL

@pytest.fixture(scope='module')
def server():
    s = Server()
    yield s
    s.p.stdin.close(); s.p.wait(); s.p.stdout.close()

@pytest.fixture(scope='module')
def alone(server, tmp_path_factory):
    "What the script makes if nobody disturbs it"
    folder = tmp_path_factory.mktemp('left')/'alone'
    folder.mkdir()
    server.start(folder)                                              # once it has imported everything
    t = time.monotonic()
    server.ended()
    server.seconds = time.monotonic() - t
    return result(folder)

def result(folder): return torch.load(folder/'result.pt'),set((folder/'rows').read_text().splitlines())

def check_same(a, b):
    (a,rows_a),(b,rows_b) = a,b
    for k,v in a['model'].items(): assert torch.equal(v, b['model'][k]), k
    assert torch.equal(a['losses'], b['losses']) and a['lrs'] == b['lrs'] and a['values'] == b['values']
    assert rows_a == rows_b   # rows after a checkpoint come again, identical

@pytest.mark.slow
@pytest.mark.parametrize('n_kills', [2, int(os.environ.get('N_KILLS', 15))])
def test_killed(server, alone, tmp_path, n_kills):
    checkpoints,rand,n,n_runs,in_write = tmp_path/'models'/'checkpoint',random.Random(0),0,0,0
    while n < n_kills or n_runs == 0:
        server.start(tmp_path)
        killed = not server.ended(rand.uniform(0, server.seconds/3) if n < n_kills else None)
        if killed:
            until = time.monotonic() + (server.seconds if n%2 else 0) # every second kill is to meet a write
            while time.monotonic() < until and not list(checkpoints.glob('*.tmp')): time.sleep(.0005)
            killed = server.kill()
        if killed: n,in_write = n+1,in_write + bool(list(checkpoints.glob('*.tmp')))
        else:
            check_same(result(tmp_path), alone)
            assert not checkpoints.exists() and [f.name for f in checkpoints.with_name('checkpoint-finished').iterdir()] == ['2-end.pt']
            n_runs += 1
            for f in 'result.pt','rows': (tmp_path/f).unlink()        # the next run starts anew
    print(f'{n} kills in {n_runs} runs, {in_write} of them while a checkpoint was being written')

@pytest.mark.long
def test_fresh_processes(alone, tmp_path):
    "Two processes from scratch; the first is told to stop"
    rows = tmp_path/'rows'
    p = subprocess.Popen(script, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    while not rows.exists() or rows.stat().st_size < 500: time.sleep(.01)
    p.send_signal(signal.SIGTERM)
    assert 'SIGTERM; the fit is saved at the next step' in p.communicate()[0] and p.returncode == 0
    assert 'continues in epoch' in subprocess.run(script, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    check_same(result(tmp_path), alone)

# -- At every write ----------------------------------------------------------------------------------------------
class Writes:
    def __init__(self, tmp):
        self.p,self.tmp,self.n = fresh.start(Path(__file__).with_name('kill_at_writes.py'), env=env),tmp,0
    def folder(self):
        self.n += 1
        (self.tmp/str(self.n)).mkdir()
        return self.tmp/str(self.n)
    def run(self, folder, at=-1, background=False):
        self.p.stdin.write(f'{folder} {at} {background}\n')
        return int(self.p.stdout.readline())

def wanted(seen):
    "The operations of the first save, of one in the middle, and of all from the last on; a save begins with the manifest"
    saves = [i for i,s in enumerate(seen) if s == 'before save']
    spans = [(0, saves[1]), (saves[len(saves)//2], saves[len(saves)//2+1]), (saves[-1], len(seen))]
    return sorted({i for a,b in spans for i in range(a, b)})

@pytest.mark.slow
@pytest.mark.parametrize('background', [False, True])
def test_killed_at_every_write(background, tmp_path):
    "Before, in or after file operations of the first, a middle and the last save, and of `finish`: each fourth place"
    from fastaccum.checkpoint.digests import first_difference
    writes = Writes(tmp_path)
    alone,whole = writes.folder(),writes.folder()
    assert writes.run(alone, 'alone') == 0 and writes.run(whole, -1, background) == 0
    want,seen = torch.load(alone/'result.pt'),(whole/'operations').read_text().splitlines()
    digests = whole/'models/checkpoint-finished'
    assert (all(map(torch.equal, torch.load(whole/'result.pt'), want))
            and {s.split()[1] for s in seen} == {'mkdir', 'rmdir', 'replace', 'unlink', 'fsync', 'save', 'write_text'})
    tried = wanted(seen)[::5 if background else 4]
    for at in tried:
        folder = writes.folder()
        assert writes.run(folder, at, background) == signal.SIGKILL, seen[at]
        assert writes.run(folder, -1, background) == 0, seen[at]
        models = folder/'models'
        assert first_difference(models/'checkpoint-finished', digests) is None
        assert all(map(torch.equal, torch.load(folder/'result.pt'), want)), seen[at]
        assert (not (models/'checkpoint').exists() and sorted(f.name for f in (models/'checkpoint-finished').iterdir())
                == ['2-end.pt', 'digests.jsonl']), seen[at]
    writes.p.stdin.close(); writes.p.wait(); writes.p.stdout.close()
    print(f'{len(tried)} kills, at {len(seen)} operations')
