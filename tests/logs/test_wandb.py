"WandbCallback with the real SDK, offline; what it logged is read back from the run's file"
import importlib, pickle, sys
import numpy as np, pandas as pd, pytest, wandb
from fastai.tabular.all import TabularDataLoaders, TabularModel, Categorify, Normalize
from fastai.text.all import BaseTokenizer, TextBlock
import fastai.vision.all as vision
from reference import *
from fastaccum.precision.callback import MixedPrecision
from fastaccum.logs.steps import StepLogger
from fastaccum.wandb import WandbCallback, offline_history
from fastaccum.logs.wandb import histogram, offline_records

torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.randn(61, 4))
def wb(**kwargs): return WandbCallback(**{**dict(log_preds=False), **kwargs})
def close(a, b, tol=1e-6): np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=tol, atol=tol)
def col(rows, k): return [r[k] for r in rows if k in r]

@pytest.fixture(scope='module', autouse=True)
def folders(tmp_path_factory):
    "All that the SDK writes, which it decides when it starts"
    with pytest.MonkeyPatch.context() as m:
        for k in ('CACHE', 'DATA', 'CONFIG', 'ARTIFACT'): m.setenv(f'WANDB_{k}_DIR', str(tmp_path_factory.getbasetemp()/'wandb'))
        yield

@pytest.fixture(autouse=True)
def no_run_left():
    yield
    if wandb.run is not None: wandb.finish()

class Run:
    "An offline run, and after the `with` block what is in its file"
    def __enter__(self):
        self.run = wandb.init(project='test', mode='offline', dir=str(Path.cwd()), settings=wandb.Settings(silent=True, console='off'))
        return self
    def __exit__(self, *args):
        self.run.finish()
        self.folder,self.file = Path(self.run.settings.files_dir),self.run.settings.sync_file
        self.rows,self.config = offline_history(self.file),dict(self.run.config)
    def records(self, kind): return [getattr(r, kind) for r in offline_records(self.file) if r.WhichOneof('record_type')==kind]
    def artifacts(self): return {a.name: a for a in self.records('artifact')}

def train(*cbs, bs=8, n_epoch=2, **kwargs):
    with Run() as run:
        learn = learner(data, bs, *cbs, **kwargs)
        learn.fit_one_cycle(n_epoch, .05)
    return run,learn

def test_a_row_a_step():
    run,learn = train(GradientAccumulation(32), StepLogger(grad_norm=True), wb(), n_epoch=3, metrics=mae)
    rows,df = run.rows,learn.step_logger.to_df()
    assert col(rows, '_step')==list(range(6))
    close(col(rows, 'epoch'), [.5, 1, 1.5, 2, 2.5, 3])
    for theirs,ours in dict(raw_loss='loss', lr_0='lr', grad_norm='grad_norm', accum_bs='accum_bs', items='items',
                            skipped='skipped').items():
        close(col(rows, theirs), df[ours])
    close(col(rows, 'train_loss'), learn.recorder.losses)
    assert [r['_step'] for r in rows if 'mae' in r]==[1, 3, 5]
    close(col(rows, 'mae'), [v[2] for v in learn.recorder.values]); close(col(rows, 'valid_loss'), [v[1] for v in learn.recorder.values])
    assert not {'loss','lr','time'} & set(rows[1]) and all(r['train_samples_per_sec'] > 0 and 'mom_0' in r and 'wd_0' in r for r in rows)

def test_whole_and_accumulated_are_the_same_rows():
    (a,_),(b,_) = train(wb(), bs=32), train(GradientAccumulation(32), wb())
    assert len(a.rows)==len(b.rows)==4
    for r,s in zip(a.rows, b.rows):
        assert set(r)==set(s)
        for k in set(r)-{'_timestamp','_runtime','train_samples_per_sec','accum_bs'}: close(r[k], s[k], 1e-5)

def test_rows_of_loader_batches():
    "`log_accum_batch=False`: fastai's rows, and what is known of a step with the batch that closed it"
    run,_ = train(GradientAccumulation(32, log_accum_batch=False), wb(), n_epoch=1)
    close(col(run.rows, 'epoch'), np.arange(1, 9)/8)
    assert col(run.rows, 'items')==[8, 16, 24, 32, 8, 16, 24, 29] and col(run.rows, 'accum_bs')==[32, 32]

@pytest.mark.parametrize('remainder,epochs', [('step', [.5, .625]), ('drop', [.5]), ('carry', [.5])])
def test_epochs_that_were_cut_short(remainder, epochs):
    "The epoch counts as one, the metrics keep their names, and nothing is mixed up with the time"
    short = Stop('after_batch', CancelTrainException, [(0,4)], order=60)
    run,learn = train(GradientAccumulation(32, remainder=remainder), wb(), short, metrics=mae)
    first = [r for r in run.rows if r['epoch'] <= 1]
    assert col(first, 'epoch')==epochs[:-1] + [1]
    close(first[-1]['valid_loss'], learn.recorder.values[0][0]); close(first[-1]['mae'], learn.recorder.values[0][1])
    assert run.rows[-1]['epoch']==2

def test_epoch_without_a_step():
    run,_ = train(GradientAccumulation(80, remainder='carry'), wb(), n_epoch=4)
    assert col(run.rows, 'epoch')==[2, 4] and col(run.rows, 'items')==[85, 85] and len(col(run.rows, 'valid_loss'))==2

def test_cancelled_epoch_and_fit():
    with Run() as run:
        learn = learner(data, 16, wb())
        learn.fit(2, cbs=Stop('before_batch', CancelEpochException, [(0,3), (1,3)]))
        learn.fit(2, cbs=Stop('before_batch', CancelFitException, [(0,2)]))
        learn.fit(1)
    close(col(run.rows, 'epoch'), [.25,.5,1, 1.25,1.5,2, 2.25,2.5, 3.25,3.5,3.75,4])
    assert col(run.rows, '_step')==list(range(12))
    assert all(isinstance(v, (int,float)) for r in run.rows for k,v in r.items())

def test_several_fits():
    "Also after an exception, with a new callback, with rows of the user's own; lr_find and validate log nothing"
    with Run() as run:
        learn = learner(data, 16, GradientAccumulation(32), wb())
        with pytest.raises(KeyboardInterrupt): learn.fit(3, cbs=Stop('before_batch', KeyboardInterrupt, [(1,3)]))
        learn.validate(); learn.get_preds()
        learn.fine_tune(1)
        with pytest.raises(KeyboardInterrupt), learn.added_cbs(Stop('before_step', KeyboardInterrupt, [(0,1)])), learn.no_bar():
            learn.lr_find(show_plot=False, num_it=10)
        with learn.no_bar(): learn.lr_find(show_plot=False, num_it=10)
        run.run.log(dict(mine=1))
        learn.remove_cb(learn.wandb)
        learn.fit(1, cbs=wb())
    rows = [r for r in run.rows if 'mine' not in r]
    close(col(rows, 'epoch'), [.5, 1, 1.5, 2.5, 3, 3.5, 4, 4.5, 5])
    assert col(run.rows, '_step')==list(range(10))

def test_a_users_own_rows_lose_none():
    class Logs(Callback):
        order = 55
        def after_batch(self): wandb.log(dict(a=1)); wandb.log(dict(b=2))
    run,_ = train(wb(), Logs(), bs=32)
    assert len(col(run.rows, 'raw_loss'))==4 and len(col(run.rows, 'valid_loss'))==2
    assert col(run.rows, '_step')==sorted(set(col(run.rows, '_step')))

def test_a_second_run():
    "Starts from 0, with everything that a run begins with"
    learn = learner(data, 16, GradientAccumulation(32), wb(log='all'))
    for _ in range(2):
        with Run() as run: learn.fit(2)
        close(col(run.rows, 'epoch'), [.5, 1, 1.5, 2])
        assert {'gradients','parameters'} <= {k.split('/')[0] for k in run.rows[0]}
        assert run.config['GradientAccumulation']['accum_bs']==32

@pytest.mark.parametrize('log', [None, 'gradients', 'parameters', 'all'])
def test_histograms(log):
    "Of what the optimizer got: the accumulated gradient, clipped"
    class Often(WandbCallback): log_freq = 3
    Often.__name__ = 'WandbCallback'
    run,learn = train(GradientAccumulation(32), GradientClip(1e-3), Often(log=log, log_preds=False), Spy(), n_epoch=2)
    hists = [{k: v for k,v in r.items() if isinstance(v, dict)} for r in run.rows]
    names = {f'{kind}/{n}' for kind in ('gradients','parameters') if log in (kind,'all') for n,_ in learn.model.named_parameters()}
    assert [set(h) for h in hists]==[names, set(), set(), names]
    for k,h in hists[0].items():
        assert h['_type']=='histogram' and len(h['values'])==64 and sum(h['values'])==learn.model.get_parameter(k.split('/')[1]).numel()
        if k.startswith('gradients'): assert max(map(abs, h['bins'])) <= 1e-3
    if log in ('gradients', 'all'):
        assert np.isclose(max(h['bins'][-1] for k,h in hists[0].items() if k[0]=='g'), learn.spy.steps[0].grad.max().item())

def test_histogram_of_anything():
    for t in (torch.tensor([]), torch.tensor([float('nan')]), torch.ones(3), torch.tensor([1e30, -1e30]).half(), torch.arange(5)):
        assert len(histogram(t).histogram)==64

def test_config():
    learn = image_learner(GradientAccumulationSchedule(16, 32), wb(n_preds=3), opt_func=partial(Adam, wd=.1))
    with Run() as run: learn.fit(1)
    cfg = run.config
    assert cfg['GradientAccumulationSchedule']['final_accum_bs']==32 and cfg['WandbCallback']['n_preds']==3
    assert cfg['Learner']['opt_func']=='Adam(wd=0.1)' and cfg['Learner']['metrics']==['accuracy'] and cfg['batch size']==8
    assert cfg['input 1 dim 2']==3 and cfg['model parameters']==386 and cfg['frozen'] is False

def test_arguments_as_they_were_given():
    "Not what a property of the same name says, nor where an object is"
    def count(learn): return len(learn.x)
    learn = image_learner(GradientAccumulation(n_acc=32, n_items=count), MixedPrecision('bf16'), wb())
    with Run() as run: learn.fit(1)
    cfg = run.config
    assert cfg['GradientAccumulation']['n_items']=='count' and cfg['GradientAccumulation']['accum_bs']==32
    assert cfg['MixedPrecision']['amp_mode']=='bf16' and cfg['Learner']['dls']=='DataLoaders'
    with Run() as run: image_learner(GradientAccumulation(32), wb()).fit(1)
    assert run.config['GradientAccumulation']['n_items'] is None and ' at 0x' not in str(run.config)

def test_training_is_the_same():
    "Bit for bit, with dropout and shuffling, and with predictions in every epoch"
    def run(*cbs):
        dls = image_dls()
        set_seed(3)
        learn = quiet(Learner(dls, nn.Sequential(nn.Flatten(), nn.Dropout(.2), nn.Linear(3*8*8, 2)),
                              loss_func=CrossEntropyLossFlat(), cbs=cbs))
        learn.fit(2, .01)
        return weights(learn.model)
    plain = run(GradientAccumulation(16))
    with Run(): logged = run(GradientAccumulation(16), WandbCallback(log='all', log_preds_every_epoch=True))
    assert torch.equal(plain, logged)

@pytest.mark.fp16
def test_mixed_precision():
    overflow = Callback(); overflow.order = 7
    def before_backward():
        if overflow.learn.iter==2: overflow.learn.loss_grad = overflow.learn.loss_grad*float('inf')
    overflow.before_backward = before_backward
    run,_ = train(GradientAccumulation(16), MixedPrecision('fp16', init_scale=64.), wb(log='gradients'), overflow, n_epoch=1)
    assert col(run.rows, 'skipped')==[0, 1, 0, 0] and col(run.rows, 'loss_scale')==[64, 64, 32, 32]

def quiet(learn):
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

# --- predictions
def image_dls(n=40):
    rng = np.random.default_rng(0)
    set_seed(0)
    Path('images').mkdir(exist_ok=True)
    files = [Path(f'images/{"ab"[i%2]}_{i}.png') for i in range(n)]
    for i,f in enumerate(files): vision.PILImage.create(rng.integers(0, 120, (8,8,3), dtype=np.uint8) + np.uint8(100*(i%2))).save(f)
    return vision.ImageDataLoaders.from_name_func('.', files, lambda f: f[0], bs=8, num_workers=0, seed=0)

def image_learner(*cbs, **kwargs):
    return quiet(Learner(image_dls(), nn.Sequential(nn.Flatten(), nn.Linear(3*8*8, 2)), metrics=accuracy, cbs=cbs, **kwargs))

def table_steps(run): return [r['_step'] for r in run.rows if 'Prediction_Samples' in r]

def table(run):
    "The last table of predictions"
    art = [a for a in run.records('artifact') if a.type=='run_table'][-1]
    return json.loads(Path(next(e.local_path for e in art.manifest.contents if e.path.endswith('.table.json'))).read_text())

@pytest.mark.parametrize('every_epoch', [False, True])
def test_image_predictions(every_epoch):
    with Run() as run: image_learner(GradientAccumulation(16), WandbCallback(n_preds=5, log_preds_every_epoch=every_epoch)).fit(2)
    assert table_steps(run)==([1, 3] if every_epoch else [3])
    t = table(run)
    assert t['columns']==['Input image', 'Ground_Truth', 'Predictions'] and len(t['data'])==5
    for img,truth,pred in t['data']: assert img['_type']=='image-file' and {truth,pred} <= {'a','b'}

@pytest.mark.slow
def test_the_same_samples_in_every_run():
    def sample(seed):
        with Run() as run: image_learner(WandbCallback(n_preds=9, seed=seed)).fit(1)
        return [row[0]['sha256'] for row in table(run)['data']]
    assert sample(1)==sample(1)!=sample(2)

def test_own_valid_dl_with_progress_bar():
    dls = image_dls()
    with Run() as run:
        learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*8*8, 2)),
                        cbs=WandbCallback(valid_dl=dls.test_dl(dls.valid_ds.items[:3], with_labels=True)))
        learn.fit(2)
    assert len(table(run)['data'])==3
    assert not hasattr(learn, 'fetch_preds') and learn.training is False

def test_segmentation_predictions():
    files = [Path(f'{i}.png') for i in range(10)]
    for f in files: vision.PILImage.create(np.random.default_rng(0).integers(0, 255, (8,8,3), dtype=np.uint8)).save(f)
    Path('m').mkdir()
    def mask(f): vision.PILImage.create(np.eye(8, dtype=np.uint8)).convert('L').save(f'm/{f.name}'); return f'm/{f.name}'
    dls = vision.SegmentationDataLoaders.from_label_func('.', files, mask, codes=['bg', 'fg'], bs=4, num_workers=0)
    with Run() as run: quiet(Learner(dls, nn.Conv2d(3, 2, 1), loss_func=CrossEntropyLossFlat(axis=1), cbs=WandbCallback(n_preds=2))).fit(1)
    t = table(run)
    assert len(t['data'])==2 and 'masks' in t['data'][0][1]

def test_tabular_predictions():
    df = pd.DataFrame(dict(c=list('abab')*10, x=np.linspace(-1, 1, 40), y=['no','yes']*20))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['c'], cont_names=['x'], y_names='y', bs=8)
    learn = quiet(Learner(dls, TabularModel([(3,2)], 1, 2, [4], use_bn=False), loss_func=CrossEntropyLossFlat(),
                          cbs=[GradientAccumulation(16), WandbCallback(n_preds=4)]))
    with Run() as run: learn.fit(1)
    t = table(run)
    assert t['columns']==['c', 'x', 'y', 'y_pred'] and len(t['data'])==4

@pytest.mark.slow
def test_text_predictions():
    df = pd.DataFrame(dict(text=['a good one', 'a bad one'], label=['+','-'])).loc[[0,1]*10]
    block = TextBlock.from_df('text', tok=BaseTokenizer(' '), seq_len=8)
    dls = vision.DataBlock((block, vision.CategoryBlock), get_x=vision.ColReader('text'),
                           get_y=vision.ColReader('label'),
                           splitter=vision.RandomSplitter(.4, seed=0)).dataloaders(df, bs=4)
    emb = nn.Embedding(len(dls.vocab[0]), 4)
    with Run() as run:
        quiet(Learner(dls, nn.Sequential(emb, Lambda(lambda x: x.mean(1)), nn.Linear(4, 2)),
                      cbs=WandbCallback(n_preds=3))).fit(1)
    t = table(run)
    assert t['columns']==['Text', 'Target', 'Prediction'] and len(t['data'])==3 and 'one' in t['data'][0][0]

def test_predictions_that_cannot_be_had(capsys):
    "A message, and training goes on"
    run,learn = train(GradientAccumulation(32), WandbCallback())
    assert 'not able to prepare a DataLoader' in capsys.readouterr().out
    assert len(run.rows)==4 and learn.wandb.log_preds is False

# --- model and data set
@pytest.mark.parametrize('where', ['Learner', 'fit'])
def test_model(where):
    "Also with the callback given to `fit`, and with a SaveModelCallback of the user's"
    wandb_cb = wb(log_model=True, model_name='best')
    learn = learner(data, 16, GradientAccumulation(32), *([wandb_cb] if where=='Learner' else []))
    with Run() as run: learn.fit(2, cbs=None if where=='Learner' else wandb_cb)
    art = run.artifacts()['best']
    assert art.type=='model' and 'valid_loss' in json.loads(art.metadata)
    assert [e.path for e in art.manifest.contents]==['best.pth']

def test_model_of_a_save_callback():
    learn = learner(data, 16, GradientAccumulation(32), SaveModelCallback(fname='mine'), wb(log_model=True))
    with Run() as run: learn.fit(1)
    assert list(run.artifacts())==['mine']

def test_dataset(capsys):
    "A folder without its `models`, once a run"
    for f in ('set/train/1.txt', 'set/labels.csv', 'set/models/m.pth'):
        Path(f).parent.mkdir(parents=True, exist_ok=True); Path(f).write_text('x')
    with Run() as run:
        learn = learner(data, 16, wb(log_dataset='set', dataset_name='digits'))
        learn.fit(1); learn.fit(1)
    art, = run.records('artifact')
    assert (art.name, art.type)==('digits', 'dataset') and {e.path for e in art.manifest.contents}=={'labels.csv', 'train/1.txt'}
    with Run() as run:
        learn = learner(data, 16, wb(log_dataset=True))
        learn.fit(1)
        assert 'could not retrieve the dataset path' in capsys.readouterr().out
        learn.dls.path,learn.wandb._run_id = Path('set').resolve(),None
        learn.fit(1)
    assert list(run.artifacts())==['set']
    with Run(), pytest.raises(ValueError, match="log_dataset='nowhere' is not a folder"):
        learner(data, 16, wb(log_dataset='nowhere')).fit(1)

# --- errors and copies
def test_errors(monkeypatch):
    with pytest.raises(ValueError, match='wandb.init'): learner(data, 16, wb()).fit(1)
    with pytest.raises(ValueError, match="log='weights' is not one of None, 'gradients'"): learner(data, 16, wb(log='weights')).fit(1)
    learner(data, 16, wb()).validate()  # needs no run
    monkeypatch.setitem(sys.modules, 'wandb', None)
    for m in ('fastaccum.wandb', 'fastaccum.logs.wandb'): monkeypatch.delitem(sys.modules, m)
    with pytest.raises(ImportError, match="the extra 'wandb': pip install wandb"): importlib.import_module('fastaccum.wandb')

def test_copies():
    learn = learner(data, 16, GradientAccumulation(32), wb(log='all'))
    with Run(): learn.fit(1)
    for again in (pickle.loads(pickle.dumps(learn)), deepcopy(learn)):
        again.remove_cb(ProgressCallback)
        again.logger = noop
        with Run() as run: again.fit(1)
        assert len(run.rows)==2

def test_long_runs_are_read_back():
    "Records that cross the blocks of the file"
    with Run() as run:
        for i in range(300): run.run.log(dict(i=i, text='x'*(i*7)))
    assert [(r['i'], len(r['text'])) for r in run.rows]==[(i, i*7) for i in range(300)]
