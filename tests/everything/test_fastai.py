"fastai around accumulation: logs, training policies, lr_find, callbacks, applications, copies and exported files"
import inspect, pickle, subprocess, sys, pytest, cloudpickle
from functools import lru_cache
import pandas as pd
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import AWD_LSTM, BaseTokenizer, TextBlock, Tokenizer, awd_lstm_lm_config, language_model_learner
from fastai.vision.all import ImageBlock, MaskBlock, PILImage, PILMask, resnet18, squeezenet1_1, unet_learner, vision_learner
from reference import *

torch.manual_seed(0)
data,valid = [Data(torch.randn(n, 6), torch.randint(4, (n,))) for n in (192, 61)]
data61 = Data(*[t[:61] for t in (data.x, *data.y)])
ce = CrossEntropyLossFlat()
def two_groups(model): return [list(model[0].parameters()), list(model[2].parameters())]

def pair(*cbs, data=data, n=64, k=4, acc=GradientAccumulation, **kwargs):
    "The same Learner with loader batches of `n`, and with `k` to an accumulated batch"
    kwargs = {'valid': valid, 'loss_func': ce, 'metrics': accuracy, **kwargs}
    return [learner(data, bs, *[cb() for cb in cbs], *own, **kwargs) for bs,own in ((n, []), (n//k, [acc(n)]))]

def assert_same(whole, acc, tol=1e-5):
    "Learning rates, losses, validation and weights of two runs are equal"
    for f in (lambda l: l.recorder.lrs, lambda l: l.recorder.losses, lambda l: l.recorder.values):
        a,b = [tensor(f(l)).float() for l in (acc, whole)]
        assert a.shape==b.shape and torch.allclose(a, b, rtol=tol, atol=tol)
    assert rel_err(weights(acc.model), weights(whole.model)) < tol

# --- whole runs are equal

runs = {'fit': lambda l: l.fit(3, .1), 'fit_one_cycle': lambda l: l.fit_one_cycle(3, .1),
        'fit_flat_cos': lambda l: l.fit_flat_cos(3, .1), 'fit_sgdr': lambda l: l.fit_sgdr(2, 1, .1),
        'discriminative': lambda l: l.fit_one_cycle(3, slice(.01, .1)), 'fine_tune': lambda l: l.fine_tune(2, .1, freeze_epochs=2),
        'two fits': lambda l: (l.fit_one_cycle(1, .1), l.fit_one_cycle(2, .05)),
        'reset_opt': lambda l: (l.fit(1, .1), l.fit(1, .05, reset_opt=True))}
opts = {'SGD': partial(SGD, mom=.9), 'Adam': partial(Adam, wd=.1), 'AdamW': partial(OptimWrapper, opt=torch.optim.AdamW)}

@pytest.mark.parametrize('opt', opts)
@pytest.mark.parametrize('run', runs)
def test_whole_runs(run, opt):
    whole,acc = pair(opt_func=opts[opt], splitter=two_groups)
    for l in (whole, acc): runs[run](l)
    assert_same(whole, acc)
    if 'cycle' in run: assert_hps(whole, acc)

def assert_hps(whole, acc):
    for k,v in whole.recorder.hps.items(): assert np.allclose(v, acc.recorder.hps[k], rtol=1e-6)

@pytest.mark.parametrize('cb', [partial(GradientClip, .05), partial(EarlyStoppingCallback, patience=1, min_delta=.5),
                                partial(ReduceLROnPlateau, patience=1, min_delta=.5), SaveModelCallback,
                                TerminateOnNaNCallback, FetchPredsCallback, CollectDataCallback, BnFreeze],
                                ids=lambda c: getattr(c, 'func', c).__name__)
def test_callbacks(cb):
    whole,acc = pair(cb)
    for l in (whole, acc): l.fit_one_cycle(4, .1)
    assert_same(whole, acc)
    if hasattr(acc, 'early_stopping'): assert len(acc.recorder.values)==2

def test_drop_in():
    "The ways in which fastai's callback is called"
    for args,kwargs in (((64,), {}), ((), dict(n_acc=64)), ((), {})):
        ours,fastais = [learner(data, 16, cb(*args, **kwargs), loss_func=ce) for cb in (GradientAccumulation, FastaiAccumulation)]
        for l in (ours, fastais): l.fit_one_cycle(2, .1)
        assert rel_err(weights(ours.model), weights(fastais.model)) < .02
        assert len(ours.recorder.losses)==192*2/(64 if args or kwargs else 32) and len(fastais.recorder.losses)==24
    ours,fastais = [learner(data, 16, cb, loss_func=ce) for cb in (GradientAccumulation(64, log_accum_batch=False), FastaiAccumulation(64))]
    for l in (ours, fastais): l.fit(2, .1)
    assert_same(fastais, ours)              # divisible, equal items: there fastai's is right too

def test_n_acc():
    "fastai's name for `accum_bs`, also where loader batches are split; not both names"
    for cb in (GradientAccumulation(n_acc=64, micro_batch_size=4), GradientAccumulation(64, micro_batch_size=4)):
        learn = learner(data, 16, cb, Spy(), loss_func=ce)
        learn.fit(1, .1)
        assert learn.gradient_accumulation.items==learn.gradient_accumulation.accum_bs==64 and len(learn.spy.steps)==3
    for n_acc in (32, 64):
        with pytest.raises(ValueError,
                           match=f'accum_bs=64 and n_acc={n_acc} are the same argument: pass accum_bs alone'):
            GradientAccumulation(64, n_acc)
    with pytest.raises(TypeError, match='a float'): GradientAccumulation(n_acc=2.5, micro_batch_size=4)

def test_only_in_one_fit():
    "`fit(cbs=...)`: afterwards the Learner is as it was"
    learn = learner(data, 16, Spy(), loss_func=ce)
    learn.fit(1, cbs=GradientAccumulation(64))
    assert len(learn.spy.steps)==3
    assert not hasattr(learn, 'gradient_accumulation') and 'one_batch' not in vars(learn) and learn.stepped is None
    learn.fit(1)
    assert len(learn.spy.steps)==12

def test_without_recorder():
    learn = learner(data61, 8, GradientAccumulation(32), Spy(), loss_func=ce)
    learn.remove_cb(Recorder)
    learn.fit(2)
    assert len(learn.spy.steps)==4

# --- one row a step

def test_recorder():
    learn = learner(data61, 8, GradientAccumulation(32), loss_func=ce, valid=valid)
    learn.fit(4)
    rec = learn.recorder
    assert len(rec.losses)==len(rec.lrs)==8 and rec.iters==[2,4,6,8] and len(rec.values)==4
    for kw in (dict(), dict(show_epochs=True), dict(with_valid=False, log=True)): rec.plot_loss(skip_start=0, **kw)
    assert learn.loss is None and learn.stepped is False   # the last batch was of the validation

@pytest.mark.parametrize('kwargs', [dict(), dict(remainder='drop'), dict(micro_batch_size=3), dict(log_accum_batch=False)], ids=str)
def test_train_metrics(kwargs):
    "Every item counts, and metrics of the loss see each batch's own"
    learn = learner(data61, 8, GradientAccumulation(32, **kwargs), loss_func=ce, metrics=[accuracy, Perplexity()])
    learn.recorder.train_metrics = True
    learn.fit(1, 0.)
    with torch.no_grad(): pred = learn.model(data61.x)
    res = dict(zip(learn.recorder.metric_names[1:], learn.recorder.values[0]))
    for kind in ('train', 'valid'):
        assert res[f'{kind}_accuracy']==pytest.approx(accuracy(pred, data61.y[0]).item(), rel=1e-5)
        assert res[f'{kind}_perplexity']==pytest.approx(ce(pred, data61.y[0]).exp().item(), rel=1e-5)

def test_rows_of_each_batch():
    "`log_accum_batch=False`: the rows that fastai gives, with each loader batch's own loss"
    plain,acc = [learner(data61, 8, *cbs, loss_func=ce) for cbs in ([], [GradientAccumulation(32, log_accum_batch=False)])]
    for l in (plain, acc): l.fit(2, 0.)
    assert_same(plain, acc)

def test_csv(capsys):
    learn = learner(data61, 8, GradientAccumulation(32), CSVLogger(), loss_func=ce, metrics=accuracy)
    learn.fit(3)
    log = learn.csv_logger.read_log()
    assert list(log.columns)==['epoch','train_loss','valid_loss','accuracy','time'] and len(log)==3 and not log.isna().any().any()
    assert log.train_loss[2]==pytest.approx(learn.recorder.losses[-1].item(), rel=1e-4)

@pytest.mark.parametrize('remainder', ['step', 'carry'])
def test_progress(remainder, capsys):
    "The bar moves with loader batches, also before there is a loss to show; the graph's validation points lie on the step axis"
    learn = learner(data61, 8, GradientAccumulation(100, remainder=remainder), loss_func=ce)
    learn.add_cbs([ProgressCallback, ShowGraphCallback])
    with learn.no_bar(): learn.remove_cb(ShowGraphCallback) or learn.fit(1)
    learn.add_cb(ShowGraphCallback)
    learn.fit(4)
    assert learn.show_graph.nb_batches==([1,2,3,4] if remainder=='step' else [1,1,2])
    assert '100.00%' in capsys.readouterr().out

def read_events(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(path))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()['scalars']}

@pytest.mark.parametrize('remainder', ['step', 'carry'])
def test_tensorboard(remainder, tmp_path):
    "One row a step, on an axis of micro-batches; none before there is one"
    accum_bs = 32 if remainder=='step' else 100
    learn = learner(data61, 8, GradientAccumulation(accum_bs, remainder=remainder),
                    TensorBoardCallback(tmp_path/'tb', log_preds=False), loss_func=ce, metrics=accuracy)
    learn.fit(3)
    log = read_events(tmp_path/'tb')
    at = [4,8,12,16,20,24] if remainder=='step' else [13]       # loader batches done when it closed
    assert [s for s,_ in log['lr_0']]==[s for s,_ in log['mom_0']]==at
    assert [v for s,v in log['train_loss'] if s in at][:len(at)]==pytest.approx([l.item() for l in learn.recorder.losses])
    assert [s for s,_ in log['valid_loss']]==[s for s,_ in log['accuracy']]==[8,16,24]

# --- lr_find

def found(learn, **kwargs):
    "Suggestion of `lr_find`, and the weights and optimizer state that it must have left as they were"
    learn.add_cb(Spy())
    before = weights(learn.model)
    with learn.no_bar(): res = learn.lr_find(show_plot=False, **kwargs)
    assert torch.equal(before, weights(learn.model)) and no_gradients(learn)
    assert not hasattr(learn, 'lr_finder')
    return res

@pytest.mark.slow
@pytest.mark.parametrize('num_it', [100, 37])
def test_lr_find(num_it):
    "One step a learning rate; the same as with whole batches"
    whole,acc = pair()
    lrs = [found(l, num_it=num_it) for l in (whole, acc)]
    assert lrs[0]==pytest.approx(lrs[1], rel=1e-4)
    assert len(acc.spy.steps)==len(acc.recorder.lrs)==len(acc.recorder.losses) <= num_it
    assert torch.allclose(tensor(whole.recorder.losses), tensor(acc.recorder.losses), rtol=1e-4)
    assert np.allclose(whole.recorder.lrs, acc.recorder.lrs) and np.allclose([s.lr for s in acc.spy.steps], acc.recorder.lrs)
    for l in (whole, acc): l.fit_one_cycle(2, .1)            # and training goes on as if nothing had been
    assert_same(whole, acc)

@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('accum_bs', [8, 20, 61])
def test_lr_find_with_few_items(accum_bs, remainder):
    "Many epochs of 61 items, until every learning rate was tried"
    learn = learner(data61, 8, GradientAccumulation(accum_bs, remainder=remainder), loss_func=ce)
    found(learn, stop_div=False, suggest_funcs=None)
    assert len(learn.spy.steps)==len(learn.recorder.lrs)==100
    assert learn.recorder.lrs[-1]==pytest.approx(10*1e8**-.01) and learn.recorder.lrs[0]==pytest.approx(1e-7)

def test_lr_find_with_schedule():
    "Schedules do not move: every learning rate is tried with the first size"
    learn = learner(data61, 8, GradientAccumulationSchedule(16, 61, finish=1.), loss_func=ce)
    found(learn, stop_div=False)
    assert len(learn.spy.steps)==100 and {len(s.batches) for s in learn.spy.steps}=={2}
    learn.fit(4)
    assert [sum(data61.sizes(8)[i] for _,i in s.batches) for s in learn.spy.steps]==learn.gradient_accumulation.plan(4)

def test_lr_find_without_known_sizes():
    dls = [torch.utils.data.DataLoader(data61, batch_sampler=torch.utils.data.BatchSampler(range(61), 8, False)) for _ in range(2)]
    learn = Learner(DataLoaders(*dls), mlp(), loss_func=ce, cbs=GradientAccumulation(32))
    learn.remove_cb(ProgressCallback)
    found(learn, stop_div=False)
    assert len(learn.spy.steps)==100

@pytest.mark.parametrize('bad', ['nan', 'inf'])
def test_lr_find_ends_at_a_loss_that_is_not_finite(bad):
    class Diverges(nn.Module):
        def forward(self, pred, y): return ce(pred, y) + (float(bad) if n_calls.append(1) or len(n_calls) > 83 else 0.)
    n_calls = []
    learn = learner(data61, 8, GradientAccumulation(32, check_loss=False), loss_func=Diverges())   # the probe would count too
    found(learn)
    assert len(learn.spy.steps)==21 and tensor(learn.recorder.losses).isfinite().all()  # 10 epochs have 20 steps in 80 loader batches

@pytest.mark.filterwarnings('ignore:What <lambda> averages over could not be measured')
def test_terminate_on_nan():
    "A loss that is not finite ends the training; a micro-batch without valid targets does not"
    y = data61.y[0].clone()
    y[8:16] = -100
    for loss_func,weight in ((ce, None), (ce, lambda learn: (learn.y >= 0).sum())):
        learn = learner(Data(data61.x, y), 8, GradientAccumulation(32, weight=weight), TerminateOnNaNCallback(), Spy(),
                        loss_func=loss_func, valid=data61)
        learn.fit(2)
        assert len(learn.spy.steps)==4
    learn = learner(data61, 8, GradientAccumulation(32), TerminateOnNaNCallback(), Spy(),
                    loss_func=lambda pred, y: ce(pred, y)*float('nan'))
    learn.fit(2)
    # as without accumulation: whether its items count beside others is known at the end of the step
    assert len(learn.spy.steps)==1 and no_gradients(learn)

def test_loss_that_is_not_finite():
    "It does not spoil the smooth loss of later rows"
    def spike(pred, y): return ce(pred, y) + (float('inf') if n_calls.append(1) or len(n_calls)==2 else 0.)
    n_calls = []
    learn = learner(data61, 8, GradientAccumulation(32), loss_func=spike)
    learn.fit(2, 0.)
    assert tensor(learn.recorder.losses[1:]).isfinite().all() and learn.recorder.losses[-1] < 3

# --- copies and files

copies = {'deepcopy': deepcopy, 'pickle': lambda l: pickle.loads(pickle.dumps(l)),
          'cloudpickle': lambda l: pickle.loads(cloudpickle.dumps(l))}

@pytest.mark.parametrize('how', copies)
@pytest.mark.parametrize('when', ['fresh', 'trained'])
def test_copy(how, when):
    "A copy trains on its own, like the original"
    learn = learner(data, 16, GradientAccumulation(64), GradientClip(.1), loss_func=ce)
    if when!='fresh': learn.fit_one_cycle(1, .1)
    copy = copies[how](learn)
    assert (copy.one_batch.learn is copy is copy.gradient_accumulation.learn
            and copy.gradient_accumulation is not learn.gradient_accumulation)
    before = weights(learn.model)
    copy.fit_one_cycle(2, .1)
    assert torch.equal(weights(learn.model), before) and len(copy.recorder.losses)==6
    learn.fit_one_cycle(2, .1)
    assert torch.equal(weights(learn.model), weights(copy.model))
    copy.remove_cb(copy.gradient_accumulation)
    assert 'one_batch' not in vars(copy) and 'one_batch' in vars(learn)

@pytest.mark.parametrize('how', copies)
def test_copy_of_callback(how):
    "Callbacks of a Learner and on their own"
    for acc in (GradientAccumulation(64, remainder='carry'), GradientAccumulationSchedule(16, 64, finish=1.)):
        on_its_own = copies[how](acc)
        attached = copies[how](learner(data, 16, acc, loss_func=ce).gradient_accumulation)
        for cb in (on_its_own, attached): assert (cb.plan(2, acc.learn.dls.train), cb.remainder)==(acc.plan(2), acc.remainder)
        assert on_its_own.learn is None and attached.learn.gradient_accumulation is attached

def test_save_and_load():
    a,b = [learner(data, 16, GradientAccumulation(64), loss_func=ce, opt_func=Adam, seed=i) for i in range(2)]
    a.fit(1, .01)
    a.save('half')
    b.load('half')
    for l in (a, b): l.fit(1, .01)
    assert torch.equal(weights(a.model), weights(b.model))

# --- applications

def in_order(dls):
    "The training items in their order, all of them"
    dls.train.shuffle,dls.train.drop_last = False,False
    return dls

def rows(n=40): return pd.DataFrame(dict(a=np.arange(n)%3, b=np.sin(np.arange(n)), y=np.arange(n)%2)).astype(dict(a=str, y=str))

def tabular(bs=8):
    return in_order(TabularDataLoaders.from_df(rows(), '.', [Categorify, FillMissing, Normalize], ['a'], ['b'], 'y',
                                               valid_idx=range(32, 40), bs=bs))

@lru_cache
def images(n=24):
    rng = np.random.default_rng(0)
    noise = lambda hi,*shape: rng.integers(0, hi, shape).astype(np.uint8)
    return [(PILImage.create(noise(255, 32, 32, 3)), 'cat' if i%3 else 'dog', PILMask.create(noise(3, 32, 32)),
             ['cat','dog'][i%2:]) for i in range(n)]

def vision(block, y, bs=4):
    block = DataBlock(blocks=(ImageBlock, block), get_x=ItemGetter(0), get_y=ItemGetter(y), splitter=IndexSplitter(range(16, 24)))
    return in_order(block.dataloaders(images(), bs=bs, num_workers=0))

def language(bs=8):
    docs = [inspect.getdoc(f) for f in vars(str).values() if callable(f) and inspect.getdoc(f)]
    block = DataBlock(blocks=TextBlock(Tokenizer(BaseTokenizer(), rules=[]), is_lm=True, seq_len=16),
                      get_x=ColReader('text'), splitter=RandomSplitter(.2, seed=0))
    return block.dataloaders(pd.DataFrame(dict(text=docs)), bs=bs, num_workers=0)

def language_model(**kwargs):
    config = {**awd_lstm_lm_config, 'emb_sz': 12, 'n_hid': 16, 'n_layers': 2}
    return language_model_learner(language(), AWD_LSTM, config=config, pretrained=False, drop_mult=.1, metrics=Perplexity(), **kwargs)

applications = {
    'tabular':  lambda **kw: tabular_learner(tabular(), layers=[8], metrics=accuracy, **kw),
    'vision':   lambda **kw: vision_learner(vision(CategoryBlock, 1), squeezenet1_1, pretrained=False, metrics=accuracy,
                                            loss_func=CrossEntropyLossFlat(weight=tensor([1.,2.])), **kw),
    'unet':     lambda **kw: unet_learner(vision(MaskBlock(list('abc')), 2), resnet18, pretrained=False,
                                          loss_func=CrossEntropyLossFlat(axis=1, weight=tensor([1.,2.,3.])), **kw),
    'language': language_model}

def quiet(learn):
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

@pytest.mark.slow
@pytest.mark.parametrize('name', applications)
def test_application(name):
    "Training, validation, predictions and pictures of fastai's applications"
    learn = quiet(applications[name](cbs=GradientAccumulation(16)))
    learn.fit_one_cycle(1, 1e-3)
    assert len(learn.recorder.losses)==len(learn.gradient_accumulation.plan(1)) and tensor(learn.recorder.losses).isfinite().all()
    if name in ('vision','unet'): learn.fine_tune(1)
    valid_loss = learn.recorder.values[-1][1]
    assert learn.validate()[0]==pytest.approx(valid_loss, rel=1e-4)
    if name=='language': return               # fastai has no `get_preds` and no pictures for it
    preds,targets = learn.get_preds()
    assert len(preds)==len(targets)==8 and preds.isfinite().all()
    learn.show_results()

@pytest.mark.parametrize('k', [None, 3])
@pytest.mark.parametrize('block,y,loss_func', [
    (CategoryBlock, 1, CrossEntropyLossFlat(weight=tensor([1.,3.]))),
    (CategoryBlock, 1, LabelSmoothingCrossEntropyFlat()), (CategoryBlock, 1, FocalLossFlat()),
    (MaskBlock(list('abc')), 2, CrossEntropyLossFlat(axis=1, weight=tensor([1.,2.,4.]), ignore_index=1)),
    (MultiCategoryBlock, 3, BCEWithLogitsLossFlat())],
    ids=['class weights', 'label smoothing', 'focal', 'masks', 'multi-label'])
def test_typed_targets(block, y, loss_func, k):
    "Batches of fastai's tensor types, through real loaders"
    n_out = 3 if y==2 else 2
    head = [] if y==2 else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    learns = []
    for bs,cbs in ((16, []), (4 if k is None else 8, [GradientAccumulation(16, micro_batch_size=k)])):
        set_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, n_out, 3, padding=1), *head)
        learns.append(quiet(Learner(vision(block, y, bs), model, loss_func=loss_func, opt_func=SGD, cbs=cbs)))
        learns[-1].fit(3, .5)
    whole,acc = learns
    assert rel_err(weights(acc.model), weights(whole.model)) < 2e-5 and len(acc.recorder.losses)==3
    assert rel_err(tensor(acc.recorder.losses), tensor(whole.recorder.losses)) < 2e-6

@pytest.mark.slow
def test_tensorboard_with_all_it_has(tmp_path):
    learn = quiet(
        applications['vision'](cbs=[GradientAccumulation(16),
                                    TensorBoardCallback(tmp_path/'tb', trace_model=True, log_preds=True)]))
    learn.fit(1)
    assert len(read_events(tmp_path/'tb')['lr_0'])==1

without_fastaccum = '''
import sys
class Blocked:
    def find_spec(self, name, *args):
        if name.split('.')[0]=='fastaccum': raise ModuleNotFoundError(f'No module named {name}')
sys.meta_path.insert(0, Blocked())
from fastai.tabular.all import *
learn = load_learner('export.pkl')
print([type(cb).__name__ for cb in learn.cbs])
with learn.no_bar(): print(learn.predict(pd.Series(dict(a='1', b=.5)))[2].tolist())
'''

@pytest.mark.slow
def test_export():
    "The exported file loads where fastaccum is not installed; the Learner keeps its callbacks"
    learn = quiet(applications['tabular'](cbs=[GradientAccumulationSchedule(8, 32), GradientClip()]))
    learn.fit(1, .1)
    pred = learn.predict(pd.Series(dict(a='1', b=.5)))[2].tolist()
    learn.export()
    assert learn.gradient_accumulation.learn is learn and learn.one_batch.learn is learn
    run = subprocess.run([sys.executable, '-W', 'ignore', '-c', without_fastaccum], capture_output=True, text=True)
    assert run.returncode==0, run.stderr
    cbs,loaded_pred = map(eval, run.stdout.strip().splitlines())
    assert cbs==['TrainEvalCallback', 'Recorder', 'CastToTensor', 'GradientClip'] and loaded_pred==pytest.approx(pred)
    learn.fit(1, .1)                          # and it can go on
    assert len(learn.recorder.losses)==len(learn.gradient_accumulation.plan(1))
