"A checkpoint from a stranger: data, and nothing else"
import json
import pytest
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.tracker import SaveModelCallback
from reference import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.files import OwnFiles, read_checkpoint, write_checkpoint
from fastaccum.checkpoint.folder import CheckpointFolder

torch.manual_seed(0)
items = [(x, x.sum()[None].tanh()) for x in torch.randn(24, 4)]

class Stop(Callback):
    order,run_valid = 2000,False
    def batch_ended(self):
        if (self.learn.epoch,self.learn.iter) == (0, 3): raise RuntimeError('stopped')

def fit(*cbs):
    CheckpointFolder.in_use.clear()
    Path('run').mkdir(exist_ok=True)
    set_seed(0)
    learn = Learner(DataLoaders(*[DataLoader(items, bs=4) for _ in range(2)]), nn.Linear(4, 1), MSELossFlat(), opt_func=SGD, path='run',
                    cbs=[CSVLogger(), SaveModelCallback(), TrainingCheckpoint(every_steps=1), *cbs])
    learn.remove_cb(ProgressCallback)
    with learn.no_bar(): learn.fit(2, .1)
    return learn

def test_paths_are_the_scripts():
    "What a file says of names of files, of `learn.path` or of a `CSVLogger` is not read"
    with pytest.raises(RuntimeError, match='stopped'): fit(Stop())
    victim = Path('victim.csv')
    victim.write_text('mine')
    for file in Path('run/models/checkpoint').glob('*.pt'):
        state = read_checkpoint(file)
        away = str(victim.resolve())
        state['more'].update(path=('path', 'PosixPath', [away]), model_dir=away, dls=7)
        state['learner']['path'] = away
        for i,(name,s) in enumerate(state['callbacks']):
            if name == 'csv_logger':
                state['callbacks'][i] = (
                    name,{**s, 'attrs': dict(fname=away, append=True, path=('path', 'PosixPath', [away])), 'state': {}})
            if name == 'save_model': s['attrs'].update(fname=away, learn=3)
        if not any(name == 'save_model' and 'fname' in s['attrs'] for name,s in state['callbacks']): raise AssertionError
        write_checkpoint(state, file)
    learn = fit()
    assert (learn.path == Path('run') and str(learn.csv_logger.fname) == 'history.csv'
            and learn.save_model.fname == 'model' and victim.read_text() == 'mine')
    assert [str(f) for f in Path('.').iterdir() if f.name.startswith('victim')] == ['victim.csv']

def changed_in_mid_epoch(**entries):
    "Resume from checkpoints of which somebody has changed these entries, or left out (None)"
    shutil.rmtree('run', ignore_errors=True)
    with pytest.raises(RuntimeError, match='stopped'): fit(Stop())
    for file in Path('run/models/checkpoint').glob('*.pt'):
        state = {k: v for k,v in {**read_checkpoint(file), **entries}.items() if v is not None}
        write_checkpoint(state, file)
    fit()

def entries_in_mid_epoch():
    with pytest.raises(RuntimeError, match='stopped'): fit(Stop())
    return [*read_checkpoint(next(iter(Path('run/models/checkpoint').glob('*.pt'))))]

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Since the checkpoint, callbacks have changed')       # Stop is gone
def test_each_entry_is_asked_for():
    "An entry that is not there, or a text in its place, is an error that names it: nothing is filled in, nothing left out"
    for k in entries_in_mid_epoch():
        if k == 'file': continue                              # its mark, by which a lost manifest is made up for
        wrong = 'the checkpoint does not say which items are left' if k == 'drawn' else f'has no `{k}`'
        with pytest.raises(ValueError, match=wrong): changed_in_mid_epoch(**{k: None})
        with pytest.raises(ValueError, match=f"`{k}` is 'hi', and .* belongs there"): changed_in_mid_epoch(**{k: 'hi'})
    with pytest.raises(ValueError, match='has no `model`'): changed_in_mid_epoch(model=None, frozen_idx=None, opt=None)

def test_manifest():
    "Names that lead out of the folder are not its files"
    folder = Path('run')
    folder.mkdir()
    for name in ('other.pt', 'other.jsonl'): Path(name).write_text('{"training_checkpoint": 1, "mine": 1}')
    names = ['../other.pt', '../other.jsonl', str(Path('other.jsonl').resolve()), '..', '', 7, None, ['x'], 'C:\\other.jsonl']
    for wrong in (dict(files=names, finished=names), dict(files='../other.pt'), dict(run='../..', files=7),
                  dict(run=[1], made='yes', finished=3)):
        (folder/OwnFiles.manifest).write_text(json.dumps(dict(training_checkpoint=1, **{**dict(run='abc'), **wrong})))
        own = OwnFiles(folder)
        assert own.listed == set() and not own.finished and own.run.isalnum() and own.made is False
        own.remove(); own.finish()
    assert Path('other.pt').exists() and Path('other.jsonl').exists()

def test_manifest_that_names_files_of_others():
    "Those that are no files of a run's, by their names or by what is in them, stay"
    folder,names = Path('run'),['backup.tar.tmp', 'model.pt', 'log.jsonl', 'notes.txt']
    folder.mkdir()
    for name in names: (folder/name).write_text('mine')
    (folder/OwnFiles.manifest).write_text(json.dumps(dict(training_checkpoint=1, run='tar', made=True, files=names, finished=names)))
    own = OwnFiles(folder)
    own.remove(); own.finish(names)
    assert sorted(f.name for f in folder.iterdir()) == sorted(names)

def told_of_manifest(text):
    "Does a folder with this manifest, and a checkpoint that names its run, tell of it? The names of its checkpoints"
    folder = Path('told')
    own = OwnFiles(folder)
    own.run = 'abc'
    own.write(dict(a=1), '1-end.pt')
    if text is not None: (folder/OwnFiles.manifest).write_text(text)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        files = CheckpointFolder(folder).files
    shutil.rmtree(folder)
    return ['is damaged or was changed' in str(x.message) for x in w],[f.name for f in files]

def test_manifest_that_was_changed_is_told():
    "And the checkpoints are used all the same, as each names its run"
    wrong = [dict(files={'a': [1]}), dict(run=5), dict(finished='a'), dict(made=1), dict(mine=1), dict(files=[], digest='00000000')]
    for more in wrong:
        text = json.dumps({**dict(training_checkpoint=1, run='abc'), **more})
        assert told_of_manifest(text) == ([True], ['1-end.pt']), more
    assert told_of_manifest('{"training_checkpoint": 1, "ru') == ([True], ['1-end.pt'])
    assert told_of_manifest(None) == told_of_manifest('{"training_checkpoint": 1, "run": "abc"}') == ([], ['1-end.pt'])

def test_links():
    "A `.tmp` that is a link is replaced, not followed"
    folder,mine = Path('run'),Path('mine')
    folder.mkdir(); mine.write_text('{"training_checkpoint": 1, "mine": 1}')
    own = OwnFiles(folder)
    for name in (f'1-end.pt.{own.run}.tmp', own._manifests[0]): (folder/name).symlink_to(mine.resolve())
    own.write(dict(step=1), '1-end.pt')
    assert mine.read_text() == '{"training_checkpoint": 1, "mine": 1}' and read_checkpoint(folder/'1-end.pt')['step'] == 1
