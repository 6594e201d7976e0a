"""Training without what Windows lacks: a fresh process, from which it is taken away, fits, saves and resumes, and `launch` is an error

PyTorch and fastai are imported before: what they use on Windows is theirs to test"""
import os, subprocess
from pathlib import Path
import fresh, pytest

root = Path(__file__).resolve().parents[2]
code = '''
import multiprocessing.context, os, signal, sys
from fastai.basics import *
import filelock, torch.distributed.launcher.api
for o,names in ((os, 'fork forkpty pread pwrite getuid geteuid getpgid killpg setsid fchmod O_NOFOLLOW O_CLOEXEC O_DIRECTORY'),
                (signal, 'SIGHUP SIGQUIT SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGTSTP pthread_sigmask')):
    for name in names.split():
        if hasattr(o, name): delattr(o, name)
multiprocessing.context._concrete_contexts.pop('fork', None)
sys.modules.update(dict.fromkeys(('fcntl', 'resource', 'pwd', 'grp')))       # importing them is an error
from fastaccum.all import *
from fastaccum.checkpoint import folder
assert folder.fcntl is None

def fit(*cbs):
    torch.manual_seed(0)
    dls = DataLoaders(*[DataLoader(list(zip(torch.randn(64, 4), torch.randn(64, 1))), bs=8) for _ in range(2)], device='cpu')
    learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss(), opt_func=SGD, lr=.1, cbs=[GradientAccumulation(16, micro_batch_size=4), *cbs])
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    return learn.model.weight.detach().clone()

class Stop(Callback):
    order = 80
    def after_batch(self):
        if self.training and self.learn.train_iter == 14: raise KeyboardInterrupt

def stopped():
    try: fit(TrainingCheckpoint(every_steps=2), Stop())
    except KeyboardInterrupt: pass
    path, = folder._locks
    assert (path/folder.lock_name).exists() and any(path.glob('*.pt'))

def resumed():
    return torch.equal(fit(TrainingCheckpoint(every_steps=2)), fit())
'''

def start(more, where):
    env = {**os.environ, 'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1'}
    return fresh.start('-c', code+more, cwd=where, env=env, stderr=subprocess.STDOUT)

def said(more, where):
    p = start(more, where)
    res = p.communicate(timeout=120)[0]
    assert p.returncode == 0, res
    return res

@pytest.mark.slow
def test_fit_save_and_resume(tmp_path):
    out = said('''
stopped()
folder.CheckpointFolder.in_use.clear()          # a new process
print('same:', resumed())
try: launch(fit, 2)
except RuntimeError as e: print(e)
''', tmp_path)
    assert 'fit 1 continues in epoch 1, after 4 of 8 batches' in out and 'same: True' in out
    assert 'no `os.fork`: write a script, and start it with torchrun' in out

@pytest.mark.slow
def test_lock(tmp_path):
    "It keeps another process away, and ends with its own, however that ends"
    first = start("stopped(); print('has it', flush=True); sys.stdin.read()", tmp_path)
    try:
        while 'has it' not in (line := first.stdout.readline()): assert line, 'ended'
        out = said('''
try: resumed()
except RuntimeError as e: print(e)
''', tmp_path)
        assert 'Another process trains with the checkpoints in' in out
    finally:
        first.kill()
        first.wait()
    assert 'same: True' in said("print('same:', resumed())", tmp_path)
