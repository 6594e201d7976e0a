"Two runs never share a folder, and a restart at once is never refused; a disk that is nearly full gets the newest checkpoint"
import errno, multiprocessing, os, re, shutil, signal, subprocess, sys, time
from contextlib import suppress
from math import inf
import pytest, torch
from reference import *
from test_checkpoint import Interrupt, data, make, new_process, one_process, run, test_eq_bits
from test_checkpoint_files import failing, in_models, read_only
from fastaccum.checkpoint.callback import *
from fastaccum.checkpoint import files, folder as folders
from fastaccum.checkpoint.files import lock_name, read_checkpoint
from fastaccum.checkpoint.folder import CheckpointFolder, lock, unlock

pytestmark = pytest.mark.slow
no_locks = pytest.mark.skipif(folders.fcntl is None, reason='no locks on Windows')

# --- one run at a time
class Say(Callback):
    "Say that the fit has begun, with workers or without, and go on for ever"
    run_valid = False
    def state_dict(self): return {}
    def load_state_dict(self, s): pass
    def after_batch(self):
        if self.learn.iter == 2: print('trains', flush=True); time.sleep(200)

def other(code, *args):
    "A process that has said a line"
    env = {**os.environ, 'DEVICE': 'cpu', 'PYTHONPATH': os.pathsep.join(p for p in sys.path if p)}
    p = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', code, *map(str, args)], env=env, stdout=subprocess.PIPE, text=True)
    return p,p.stdout.readline()

holds = '''
import sys, time
from pathlib import Path
from fastaccum.checkpoint.folder import lock
lock(Path(sys.argv[1])); print('has it', flush=True); time.sleep(200)'''

with_workers = '''
from test_one_run import *
learn = make(dict(dl_type=lambda d, batch_size: TfmdDL(d, bs=batch_size, shuffle=True, num_workers=2)),
             TrainingCheckpoint(every_steps=1), Say())
real = os.fork
def told():
    pid = real()
    if pid: print(pid, end=' ', flush=True)
    return pid
os.fork = told
learn.fit(2)'''

@no_locks
def test_another_process_is_refused():
    whole,path = run({}),(Path.cwd()/'models'/'checkpoint').resolve()
    p,said = other(holds, path)
    try:
        with pytest.raises(RuntimeError,
                           match=f'process {p.pid} on .* trains with the checkpoints in .*checkpoint.*other'):
            run({}, TrainingCheckpoint())
        run({}, TrainingCheckpoint('other'))
    finally: p.kill(); p.wait()
    test_eq_bits(run({}, TrainingCheckpoint()), whole)                # at once

def workers_of(pid): return [int(p) for f in Path(f'/proc/{pid}/task').glob('*/children') for p in f.read_text().split()]

@no_locks
@pytest.mark.skipif(not Path('/proc/self/task').exists(), reason='finds the workers in /proc')
def test_orphaned_workers_hold_no_lock():
    p,said = other(with_workers)
    while said and 'trains' not in said: said = p.stdout.readline()
    assert 'trains' in said
    orphans = workers_of(p.pid)
    path = (Path.cwd()/'models'/'checkpoint').resolve()
    try:
        for w in orphans: os.kill(w, signal.SIGSTOP)                  # they would end when they notice
        assert len(orphans) >= 2
        with pytest.raises(RuntimeError, match=f'process {p.pid} on'): lock(path)
        p.kill(); p.wait()
        for w in orphans: os.kill(w, 0)                               # they live
        lock(path)
    finally:
        for w in orphans:
            with suppress(ProcessLookupError): os.kill(w, signal.SIGKILL)
        p.kill(); unlock(path, False)

@no_locks
def test_a_fork_holds_no_lock():
    "A process that is forked after the lock lives on, its parent is killed"
    path = Path.cwd()/'a'
    p,said = other(holds.replace('print(', "import os; child = os.fork() or time.sleep(200); print(child, "), path)
    child = int(said.split()[0])
    try:
        with pytest.raises(RuntimeError, match='trains with the checkpoints'): lock(path)
        p.kill(); p.wait()
        os.kill(child, 0)
        lock(path)
    finally: os.kill(child, signal.SIGKILL); p.kill(); unlock(path, True)
    assert not path.exists()

@pytest.mark.quick
def test_no_false_refusal():
    "Two fits, a Learner that is deleted, cells that are executed again, a fit that an error ended, a module that is loaded again"
    whole = run({})
    learn = make({}, TrainingCheckpoint(every_steps=4))
    learn.fit(1); learn.fit(1)
    del learn
    for _ in range(2): make({}, TrainingCheckpoint(every_steps=4)).fit(1)
    new_process()
    run({}, TrainingCheckpoint('again', every_steps=4), stop=Interrupt((1, 3)))
    new_process()                                                     # as a module that is loaded again has it
    test_eq_bits(run({}, TrainingCheckpoint('again', every_steps=4)), whole)
    shutil.rmtree('models/again')                                     # by the user, to train anew
    new_process()
    test_eq_bits(run({}, TrainingCheckpoint('again', every_steps=4)), whole)
    assert (Path('models/again')/lock_name).exists() == (folders.fcntl is not None)
    first(cb for cb in CheckpointFolder.in_use.values() if cb.path.name == 'again').finish()
    assert not Path('models/again').exists()

def _child(q, *args):
    try: lock(*args); q.put('ok')
    except RuntimeError as e: q.put(str(e))

@no_locks
@pytest.mark.parametrize('how', ['fork', 'spawn'])
def test_a_child_of_the_process_is_of_its_run(how):
    "As with `launch` in a notebook that has trained"
    path = (Path.cwd()/'a').resolve()
    lock(path)
    context = multiprocessing.get_context(how)
    q = context.Queue()
    p = context.Process(target=_child, args=(q, path))
    p.start()
    assert q.get(timeout=60) == 'ok'
    p.join(); unlock(path, True)

def test_a_fit_that_saves_nothing_leaves_no_folder():
    code = "from test_one_run import *\nprint(flush=True)\nrun({}, TrainingCheckpoint(), stop=Interrupt((0, 0)))"
    p,_ = other(code)
    assert p.wait() == 0 and not Path('models/checkpoint').exists()

@pytest.mark.quick
@no_locks
def test_file_systems_without_locks(monkeypatch):
    whole = run({})
    def no(*args): raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(folders.fcntl, 'lockf', no)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        for _ in range(2): new_process(); test_eq_bits(run({}, TrainingCheckpoint(every_steps=4)), whole)
    assert len([x for x in w if 'cannot be locked' in str(x.message)]) == 1

def test_windows(monkeypatch):
    monkeypatch.setattr(folders, 'fcntl', None)
    whole = run({})
    test_eq_bits(run({}, TrainingCheckpoint(every_steps=4)), whole)
    path = (Path.cwd()/'models'/'checkpoint').resolve()
    assert (path/lock_name).exists()              # by `filelock`; test_windows.py tries what it keeps away
    folders.unlock(path, made=False)
    assert not (path/lock_name).exists()

@no_locks
def test_a_lock_that_was_lost_is_taken_again():
    "Whoever opens and closes the file drops it; and each save takes it again"
    path = (Path.cwd()/'models'/'checkpoint').resolve()
    folder = CheckpointFolder.at(path)
    (path/lock_name).read_bytes()
    p,said = other(holds, path)
    assert said
    with pytest.warns(UserWarning, match=f'could not save .*process {p.pid} on .* trains with'): folder.save(dict(a=1), 1, 4, 2)
    p.kill(); p.wait()
    folder.save(dict(a=1), 1, 4, 2)
    assert [f.name for f in folder.files] == ['1-000000004.pt']

# --- a disk that is nearly full
class SmallDisk:
    "Room for so many bytes in a folder. Writing fails as on a full disk, also in the middle of the file"
    def __init__(self, monkeypatch, path, size):
        self.path,self.size,real = path,size,files._Digesting.write
        def write(digesting, b):
            digesting.file.flush()
            if len(b) > self.free():
                digesting.file.write(b[:self.free()])
                raise OSError(errno.ENOSPC, 'No space left on device')
            return real(digesting, b)
        monkeypatch.setattr(files._Digesting, 'write', write)
        monkeypatch.setattr(shutil, 'disk_usage', lambda p: SimpleNamespace(free=self.free(), total=size, used=0))
    def free(self): return max(0, self.size-sum(f.stat().st_size for f in self.path.glob('*.pt*')))

def state(i): return dict(done=i, w=torch.full((100_000,), float(i)))       # 400 kB
def on_disk(folder): return sorted(f.name for f in folder.path.glob('*.pt*'))

@pytest.mark.quick
@pytest.mark.parametrize('background', [False, True])
@pytest.mark.parametrize('room,keep,kept', [(3.5, 2, 2), (2.4, 2, 2), (1.4, 2, 1), (1.4, 1, 1), (2.4, 3, 2)])
def test_a_small_disk_gets_the_newest(monkeypatch, tmp_path, background, room, keep, kept):
    "Checkpoints go only where the room is needed"
    folder = CheckpointFolder(tmp_path/'run')
    SmallDisk(monkeypatch, folder.path, int(room*4e5))
    lows = []
    real = folder.own.remove
    monkeypatch.setattr(folder.own, 'remove', lambda keep=(): (real(keep), lows.append(len(on_disk(folder)))))
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        for i in range(1, 7):
            folder.save(state(i), 1, i, keep, background)
            folder.wait()
            assert read_checkpoint(folder.files[-1])['done'] == i and on_disk(folder) == [f.name for f in folder.files]
            assert len(folder.files) == min(i, kept)
    assert ['room for one checkpoint only' in str(x.message) for x in w] == [True]*(room < 2)     # told once
    assert (min(lows) == 0) == (room < 2)

@pytest.mark.parametrize('quota', [False, True])
def test_the_last_good_checkpoint_stays_where_nothing_makes_room(monkeypatch, tmp_path, quota):
    folder = CheckpointFolder(tmp_path/'run')
    folder.save(state(1), 1, 1, 2)
    if quota:                                      # the disk has room, and who may use it is not told
        def save(*args): raise OSError(errno.EDQUOT, 'Disk quota exceeded')
        monkeypatch.setattr(torch, 'save', save)
    else: SmallDisk(monkeypatch, folder.path, 700_000)
    with pytest.warns(UserWarning) as w: folder.save(dict(w=torch.zeros(200_000)), 1, 2, 2)
    text, = [str(x.message) for x in w]
    assert str(folder.path) in text and re.search(r'disk is full: [\d,.]+ MB are free in .* needs 0\.[89] MB', text)
    assert on_disk(folder) == ['1-000000001.pt'] and read_checkpoint(folder.files[0])['done'] == 1

@pytest.mark.parametrize('fits,done', [(1, 1), (2, inf)])
def test_an_end_that_could_not_be_saved(monkeypatch, tmp_path, capsys, fits, done):
    "The last words are true of what is on the disk: the middle of fit 1, the end of fit 1 of 2"
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder.at(tmp_path/'run')
    folder.save(state(1), 1, done, 1)
    last = folder.files[-1].name
    SmallDisk(monkeypatch, folder.path, 500_000)
    with pytest.warns(UserWarning, match='disk is full'): folder.save(dict(w=torch.zeros(200_000)), fits, inf, 1)
    folder.fit_ended(fits, False)
    folder._at_exit()
    out = capsys.readouterr().out
    assert f'its end could not be saved; the last checkpoint that could is run-finished/{last}.' in out and 'its end is' not in out
    assert (tmp_path/'run-finished'/last).exists()

def test_ends_of_earlier_fits_stay(monkeypatch, tmp_path):
    "The next start loads them; and what a killed run has left half-written goes first"
    folder = CheckpointFolder(tmp_path/'run')
    folder.save(state(1), 1, inf, 2)
    folder.save(state(2), 2, 1, 2)
    tmp = folder.path/f'2-000000002.pt.{folder.own.run}.tmp'
    tmp.write_bytes(b'x'*400_000)
    folder.own.listed.add(tmp.name); folder.own.note()
    folder = CheckpointFolder(tmp_path/'run')
    SmallDisk(monkeypatch, folder.path, int(3.4*4e5))
    folder.save(state(3), 2, 3, 2)
    assert on_disk(folder) == ['1-end.pt', '2-000000001.pt', '2-000000003.pt']
    folder.save(state(4), 2, 4, 2)
    assert on_disk(folder) == ['1-end.pt', '2-000000003.pt', '2-000000004.pt']

def test_a_run_on_a_small_disk_resumes(monkeypatch):
    whole = run({})
    path = (Path.cwd()/'models'/'checkpoint').resolve()
    run({}, TrainingCheckpoint(every_steps=4), stop=Interrupt((0, 5)))
    new_process()
    one = max(f.stat().st_size for f in path.glob('*.pt'))
    SmallDisk(monkeypatch, path, int(2.5*one)+2**16)
    run({}, TrainingCheckpoint(every_steps=4), stop=Interrupt((3, 2)))
    assert len(list(path.glob('*.pt'))) == 2 and not list(path.glob('*.tmp'))
    new_process()
    test_eq_bits(run({}, TrainingCheckpoint(every_steps=4)), whole)

# --- digests
@pytest.mark.parametrize('name', ['replace', 'mkdir', 'open'])
def test_digests_in_a_folder_that_cannot_be_written(name, monkeypatch):
    "One warning says what and why; training goes on"
    whole = run({})
    with pytest.MonkeyPatch.context() as m, warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        if name == 'open':
            real = open
            def fails(file, *args, **kwargs):
                if str(file).endswith('.jsonl'): raise read_only
                return real(file, *args, **kwargs)
            m.setattr('builtins.open', fails)
        else: failing(m, name, read_only, in_models)
        learn = run({}, TrainingCheckpoint(every_minutes=1000, digest=True))
    told = [str(x.message) for x in w if re.search('no digests of this fit|digests of a step', str(x.message))]
    assert len(told) == 1 and 'Read-only file system' in told[0] and 'models/checkpoint' in told[0] and 'raining continues' in told[0]
    test_eq_bits(learn, whole)
