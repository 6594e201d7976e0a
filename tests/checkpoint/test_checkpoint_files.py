"Checkpoints touch only files that they wrote, whatever a run ends with; a disk that is full or read-only stops nothing"
import errno, json, multiprocessing, os, pathlib, random, signal, sys, threading, zipfile
import fresh, pytest
from quick import quickly
from reference import *
from fastai.callback.tracker import SaveModelCallback
from test_checkpoint import Interrupt, data, make, new_process, one_process, run, test_eq_bits
from fastaccum.checkpoint.callback import *
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.checkpoint.files import OwnFiles, lock_name, read_checkpoint, run_of, write_checkpoint


names = ['best.pth', '1-mine.pt', '1-000000004.pt', '1-000000008.pt', '1-end.pt', '2-end.pt', '0-end.pt', 'x.tmp',
         '1-end.pt.0123abcd.tmp', 'config.yaml', 'notes.txt', 'digests.jsonl',
         'training_checkpoint.txt', '.hidden', 'sub/1-end.pt', 'sub/a.txt']

def make_tree(folder):
    "Foreign files of all names, one of them a checkpoint of another run under a new name"
    for n in names: (folder/n).parent.mkdir(parents=True, exist_ok=True); (folder/n).write_bytes(n.encode()*50)
    own = OwnFiles(folder.parent/'elsewhere')
    own.write(dict(a=1), '1-end.pt').rename(folder/'1-000000012.pt')
    shutil.rmtree(folder.parent/'elsewhere')
    return tree(folder)

def tree(folder):
    return {p.relative_to(folder).as_posix(): (p.read_bytes(), p.stat().st_mtime_ns)
            for p in folder.rglob('*') if p.is_file()}

def check_tree(folder, before):
    now = tree(folder)
    assert {k: v for k,v in now.items() if k in before} == before
    return sorted(now.keys() - before.keys() - {f for f in now if Path(f).name == lock_name})

def train(fname, *cbs, stop=None, fits=1, **kwargs):
    learn = make({}, TrainingCheckpoint(fname, every_steps=4, keep=1, **kwargs), *cbs, *([stop] if stop else []))
    for _ in range(fits): learn.fit_one_cycle(2, .05)
    return learn

@pytest.mark.parametrize('fname', ['run1', '.', '..'])
@pytest.mark.parametrize('background', [False, True])
def test_foreign_files(fname, background):
    "In a folder of the user's, in `models`, in the whole project"
    folder = (Path('models')/fname).resolve()
    before = make_tree(folder)
    with pytest.raises(RuntimeError): train(fname, stop=Interrupt((1, 3)), background=background)
    learn_folder = first(CheckpointFolder.in_use.values()); learn_folder.wait()
    ours = check_tree(folder, before)
    assert len(ours) == 2 and 'training_checkpoint.json' in ours
    new_process()
    learn = train(fname, fits=2, background=background)
    learn.training_checkpoint.folder.wait()
    assert len(check_tree(folder, before)) == 3                    # two ends, and the manifest
    learn.training_checkpoint.finish()
    finished = folder.with_name(f'{folder.name}-finished')
    assert check_tree(folder, before) == [] or fname == '..'       # there the `-finished` of others is inside
    end, = finished.iterdir()
    assert end.name.startswith('2-end-') and 'batch' not in read_checkpoint(end)     # `2-end.pt` was taken
    shutil.rmtree(finished)

@pytest.mark.slow
def test_folder_of_saved_models():
    "`SaveModelCallback(fname='run1/best')`, next to `TrainingCheckpoint('run1')`"
    learn = train('run1', SaveModelCallback(fname='run1/best'))
    best = Path('models/run1/best.pth').read_bytes()
    learn.training_checkpoint.finish()
    assert [p.name for p in Path('models/run1').iterdir()] == ['best.pth'] and Path('models/run1/best.pth').read_bytes() == best
    train('run1', SaveModelCallback(fname='run1/best')).training_checkpoint.finish()
    assert ([p.name for p in Path('models/run1').iterdir()] == ['best.pth']
            and [p.name for p in Path('models/run1-finished').iterdir()] == ['1-end.pt'])

@pytest.mark.slow
def test_finished_folder_of_the_user():
    "Whose files are in `...-finished` stay too"
    before = make_tree(Path('models/checkpoint-finished').resolve())
    for _ in range(2):
        train('checkpoint').training_checkpoint.finish()
        ours, = check_tree(Path('models/checkpoint-finished').resolve(), before)
        assert ours.startswith('1-end-')

endings = '''
import os, signal, sys, multiprocessing
from test_checkpoint_files import *
how = sys.argv[1]
class End(Interrupt):
    def _raise(self):
        if (self.learn.epoch,self.learn.iter) != (1, 3): return
        if how == 'error': 1/0
        if how == 'Ctrl-C': os.kill(os.getpid(), signal.SIGINT)
        if how == 'kill': os.kill(os.getpid(), signal.SIGKILL)
        if how == 'SIGTERM': os.kill(os.getpid(), signal.SIGTERM)
        if how == 'early': raise CancelFitException
def job(): train('run1', stop=End((1, 3)))
if __name__ == '__main__':
    if how in ('fork', 'spawn'):
        p = multiprocessing.get_context(how).Process(target=job)
        p.start(); p.join()
        assert p.exitcode == 0
    else: job()
'''

def script(*args, code=endings):
    Path('script.py').write_text(code)
    env = {**os.environ, 'DEVICE': 'cpu', 'PYTHONPATH': os.pathsep.join(p for p in sys.path if p)}   # no simulated device: it cannot fork
    return fresh.run('script.py', *args, env=env)

@pytest.mark.slow
@pytest.mark.parametrize('how', ['normal', 'error', 'Ctrl-C', 'kill', 'SIGTERM', 'fork', 'spawn'])
def test_endings(how):
    before = make_tree(Path('models/run1').resolve())
    first_run = script(how)
    ours = check_tree(Path('models/run1').resolve(), before)
    complete = how in ('normal', 'fork', 'spawn')
    assert bool(ours) != complete and Path('models/run1-finished').exists() == complete, first_run.stderr
    if how in ('fork', 'Ctrl-C'):                        # the next start trains anew, or goes on
        text = script('normal').stdout
        assert (('continues in epoch' in text) == (not complete) and 'was finished' not in text
                and check_tree(Path('models/run1').resolve(), before) == [])

failed_child = '''
import multiprocessing, sys
from pathlib import Path
from test_checkpoint_files import train
def job(end):
    train('run1')
    if end == 'error': raise ValueError('x')
    sys.exit(end)
if __name__ == '__main__':
    for how,end,complete in (('spawn', 'error', False), ('fork', 'error', False), ('fork', 1, False), ('fork', 0, True)):
        p = multiprocessing.get_context(how).Process(target=job, args=(end,))
        p.start(); p.join()
        assert Path('models/run1-finished').exists() == complete and Path('models/run1').exists() != complete, (how, end)
'''

@pytest.mark.slow
def test_failed_child():
    "A child process that ends with an error, or `sys.exit(1)`, is to go on"
    run = script(code=failed_child)
    assert run.returncode==0, run.stderr

@pytest.mark.slow
def test_message_at_exit():
    "It asks only where a callback ended the last fit"
    end = 'the run is complete after 1 fit; its end is run1-finished/1-end.pt.'
    out = script('normal').stdout
    assert end in out and 'too early' not in out
    shutil.rmtree('models')
    out = script('early').stdout
    assert (end in out and 'A callback ended fit 1 in epoch 1 of 2. Did the run end too early?' in out
            and f"move run1-finished/1-end.pt back to {Path('models/run1').resolve()}." in out)
    Path('models/run1').mkdir()
    Path('models/run1-finished/1-end.pt').rename('models/run1/1-end.pt')
    assert 'fit 1 was finished; its end state is loaded' in script('normal').stdout

def flipped(data, *places):
    data = bytearray(data)
    for i in places: data[i//8] ^= 1 << i%8
    return bytes(data)

def test_flipped_bits():
    "One or two flipped bits, and bursts, at random places of a file, also in what is about its parts: each is noticed"
    state,file,rand = dict(w=torch.randn(40), more=dict(lr=.1, names=['a'])),Path('1-end.pt'),random.Random(0)
    write_checkpoint(dict(state, file='fastaccum.TrainingCheckpoint run=abc file=1-end.pt.'), file)
    whole = file.read_bytes()
    n,directory = 8*len(whole),8*whole.index(b'PK\1\2')
    assert torch.equal(read_checkpoint(file)['w'], state['w']) and n < 40_000
    places = [(i,) for i in rand.sample(range(n), 300)] + [rand.sample(range(n), 2) for _ in range(300)] + [
        rand.sample(range(directory, n), 2) for _ in range(300)]
    places += [range(i, i+rand.randint(3, 200)) for i in rand.sample(range(n-200), 100)] + [(i,) for i in range(n-8*80, n)]
    for where in places:
        file.write_bytes(flipped(whole, *where))
        assert run_of(file) in ('abc', None)
        with pytest.raises(Exception, match='wrong checksum'): read_checkpoint(file)
    for end in rand.sample(range(len(whole)-22), 100):
        file.write_bytes(whole[:end])
        with pytest.raises(zipfile.BadZipFile): read_checkpoint(file)

def test_no_digest():
    "A file of an older version has none; the checksums of its parts are looked at"
    torch.save(dict(w=torch.arange(100.)), 'old.pt')
    whole = Path('old.pt').read_bytes()
    assert torch.equal(read_checkpoint('old.pt')['w'], torch.arange(100.))
    Path('old.pt').write_bytes(flipped(whole, 8*whole.index(torch.arange(50., 52).numpy().tobytes())))
    with pytest.raises(zipfile.BadZipFile, match='wrong checksum of'): read_checkpoint('old.pt')

@pytest.mark.slow
def test_flipped_manifest():
    "A manifest that was damaged is as one that is lost: the run's files are known by their marks"
    own,rand = OwnFiles(Path('run')),random.Random(0)
    own.write(dict(a=1), '1-end.pt')
    file = own.path/own.manifest
    whole = file.read_bytes()
    old = OwnFiles(own.path)
    for where in [(i,) for i in range(200, 8*len(whole))] + [rand.sample(range(200, 8*len(whole)), 2) for _ in range(300)]:
        file.write_bytes(flipped(whole, *where))
        now = OwnFiles(own.path)
        assert ((now.run,now.names(r'.*\.pt')) == (own.run,['1-end.pt']) and now.listed <= old.listed
                and not now.finished), (where,file.read_bytes())
    text = json.loads(whole)
    del text['digest']
    file.write_text(json.dumps(text))          # of an older version
    assert OwnFiles(own.path).listed == old.listed > {'1-end.pt'}

@pytest.mark.slow
def test_damaged_newest(capsys):
    "The one before it is used, with one warning; also where the damaged part says what the fit began with"
    whole = run({})
    for at in (None, b'fastaccum.beginning'):
        shutil.rmtree('models', ignore_errors=True)
        run({}, TrainingCheckpoint(every_steps=4), stop=Interrupt((2, 4)))
        new_process()
        newest = sorted(Path('models/checkpoint').glob('*.pt'))[-1]
        data = newest.read_bytes()
        newest.write_bytes(flipped(data, 8*(len(data)//2 if at is None else data.index(at)) + 3))
        with pytest.warns(UserWarning, match='is damaged .*wrong checksum.* uses the one before it') as w:
            learn = run({}, TrainingCheckpoint(every_steps=4))
        assert len([x for x in w if 'damaged' in str(x.message)]) == 1
        test_eq_bits(learn, whole)
        new_process()

def failing(monkeypatch, name, error, when=lambda *a: True):
    "The function `name` of os, or `torch.save`, fails as on a read-only or broken disk"
    module = torch if name == 'save' else os
    real = getattr(module, name)
    def fails(*args, **kwargs):
        if when(*args): raise error
        return real(*args, **kwargs)
    replace_in(monkeypatch, module, name, fails)

def replace_in(monkeypatch, module, name, f):
    monkeypatch.setattr(module, name, f)
    accessor = getattr(pathlib, '_NormalAccessor', None)       # Python 3.10: its `Path` has these functions from the beginning
    if module is os and hasattr(accessor, name): monkeypatch.setattr(accessor, name, staticmethod(f))

read_only = OSError(errno.EROFS, 'Read-only file system')
def in_models(*args):
    return any('/models/' in str(a.raw.file.name if hasattr(a, 'raw') else a) for a in args if hasattr(a, 'raw')
               or isinstance(a, (str,os.PathLike)))

@pytest.mark.parametrize('name', quickly(['replace','save'], ['mkdir', 'replace', 'fsync', 'unlink', 'save']))
def test_failing_operations(name, monkeypatch):
    "Training goes on, with one warning a save at most; what was good stays; afterwards it can be resumed, or starts anew"
    whole = run({})
    run({}, TrainingCheckpoint(every_steps=4), stop=Interrupt((1, 3)))
    new_process()
    good = {p: p.read_bytes() for p in Path('models/checkpoint').glob('*.pt')}
    with pytest.MonkeyPatch.context() as m:
        failing(m, name, read_only, (lambda *a: True) if name == 'fsync' else in_models)
        if name == 'unlink': replace_in(m, os, 'rmdir', os.unlink)
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter('always')
            learn = run({}, TrainingCheckpoint(every_steps=4))
            test_eq_bits(learn, whole)
            saves = 1+(32-12)//4
            n = len([x for x in w if 'could not save' in str(x.message)])
            assert n == (saves if name in ('replace', 'fsync', 'save') else 0), n
            if n: assert all(p.read_bytes() == b for p,b in good.items())
            learn.training_checkpoint.finish()
            told = [x for x in w if 'could not move the end of the run' in str(x.message)]
        assert len(told) == (name in ('mkdir', 'replace', 'unlink'))
    new_process()
    test_eq_bits(run({}, TrainingCheckpoint(every_steps=4)), whole)      # from what there is

@pytest.mark.slow
def test_full_disk(monkeypatch):
    "The last good checkpoint stays, and the next start goes on from it"
    whole = run({})
    run({}, TrainingCheckpoint(every_steps=4), stop=Interrupt((1, 3)))
    new_process()
    good = {p: p.read_bytes() for p in Path('models/checkpoint').glob('*.pt')}
    resource = pytest.importorskip('resource', reason='Windows has no such limits')
    soft,hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
    try:
        for background in (False, True):
            with pytest.warns(UserWarning, match='could not save') as w:
                run({}, TrainingCheckpoint(every_steps=4, background=background), stop=Interrupt((3, 4)))
                for f in CheckpointFolder.in_use.values(): f.wait()
            assert len([x for x in w if 'could not save' in str(x.message)]) == 4
            assert ({p: p.read_bytes() for p in Path('models/checkpoint').glob('*') if p.suffix == '.pt'} == good
                    and not list(Path('models/checkpoint').glob('*.tmp')))
            new_process()
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    test_eq_bits(run({}, TrainingCheckpoint(every_steps=4)), whole)

def test_background():
    "The run is the same; training waits for a copy, not for the file"
    whole,began,gate,writes = run({}),threading.Event(),threading.Event(),[]
    real = torch.save
    def slow(state, file, *args, **kwargs):
        if hasattr(file, 'raw'):         # a file, not the test of what can be saved
            writes.append(threading.current_thread() is threading.main_thread())
            began.set()
            assert gate.wait(60)
        return real(state, file, *args, **kwargs)
    class Open(Callback):
        "The file may only be written two steps after the save began"
        run_valid,order = False,3000
        def state_dict(self): return {}
        def load_state_dict(self, s): pass
        def after_batch(self):
            if (self.learn.epoch,self.learn.iter) != (0, 5): return
            assert began.wait(60)              # the thread may be late
            gate.set()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch, 'save', slow)
        learn = run({}, TrainingCheckpoint(every_steps=4, background=True), Open())
        learn.training_checkpoint.folder.wait()
    test_eq_bits(learn, whole)
    assert len(writes) == 9 and not any(writes)
    new_process()
    shutil.rmtree('models/checkpoint')
    run({}, TrainingCheckpoint(every_steps=4, background=True), stop=Interrupt((2, 4)))
    for f in CheckpointFolder.in_use.values(): f.wait()
    new_process()
    test_eq_bits(run({}, TrainingCheckpoint(every_steps=4, background=True)), whole)

@pytest.mark.slow
def test_timer_goes_on_through_validation():
    "`validate` and `get_preds` in a callback do not put off the next checkpoint"
    class Looks(Callback):
        def after_epoch(self):
            if not hasattr(self.learn, 'looking'):
                self.learn.looking = True
                with self.learn.no_logging(): self.learn._with_events(lambda: self.learn._do_epoch_validate(), 'fit', CancelFitException)
                del self.learn.looking
    learn = make({}, TrainingCheckpoint(every_steps=12), Looks())
    saves = []
    old = CheckpointFolder.save
    with pytest.MonkeyPatch.context() as m:
        m.setattr(CheckpointFolder, 'save', lambda self, state, fit, done, *a: (saves.append(done), old(self, state, fit, done, *a)))
        learn.fit(4, .01)
    assert saves[:2] == [12, 24]
