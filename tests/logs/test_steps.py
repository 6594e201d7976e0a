"StepLogger: one row per accumulated batch that closed; its values stay on the device until they are read"
import pickle
from pathlib import Path
import pandas as pd, pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from fastai.callback.tensorboard import TensorBoardCallback
from reference import *
from fastaccum.precision.callback import MixedPrecision  # after fastai's of the same names
from fastaccum.logs.steps import StepLogger, StepTable, of_step, to_host
from fastaccum.loop.optimizers import grad_norm

torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.randn(61, 4))
BASE = ['step', 'fit', 'epoch', *(v.name for v in of_step if v.name != 'skipped'), 'skipped']

def rows(learn): return learn.step_logger.to_df()
def close(a, b, tol=1e-6): np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=tol, atol=tol)
fp16 = pytest.mark.fp16

def test_rows():
    "The accumulated loss, the items, and the learning rate of every step, as the reference has them"
    learn = learner(data, 8, GradientAccumulation(32), StepLogger(), Spy())
    learn.fit_one_cycle(2, .1)
    df,steps = rows(learn),accumulated(data.sizes(8), 32, n_epoch=2)
    assert list(df)==BASE
    assert df['items'].tolist()==[32, 29, 32, 29] and set(df.accum_bs)=={32} and df.step.tolist()==[1, 2, 3, 4]
    close(df.epoch, [.5, 1, 1.5, 2])
    close(df.lr, [s.lr for s in learn.spy.steps])
    close(df.loss, [big_batch(learn.model, s.weights, learn.loss_func, x, y)[1] for s,(x,*y) in zip(learn.spy.steps, data.steps(8, steps))])
    assert not df.skipped.any() and df.skipped.dtype==bool and df.step.dtype==int

def test_grad_norm_is_the_true_one():
    "Before clipping, of the whole accumulated batch; on request"
    learn = learner(data, 8, GradientAccumulation(20), GradientClip(1e-3), StepLogger(grad_norm=True))
    before = []
    learn.add_cb(Callback()); learn.callback.order = 10.7
    learn.callback.before_step = lambda: before.append(grads(learn.model).norm())
    learn.fit(2)
    close(rows(learn).grad_norm, before)
    assert min(before) > 1e-2

def test_grad_norm_of_sparse_and_missing_gradients():
    emb,rest,frozen = nn.Embedding(9, 3, sparse=True),nn.Linear(3, 2),nn.Linear(2, 2)
    rest(emb(torch.tensor([1, 1, 4]))).square().sum().backward()
    norm = grad_norm([p for m in (emb, rest, frozen) for p in m.parameters()])
    close(norm, torch.cat([p.grad.to_dense().flatten() for m in (emb, rest) for p in m.parameters()]).norm())
    assert grad_norm(frozen.parameters())==0

def test_without_accumulation():
    "Every batch that made a step is a row; one that was cancelled is none"
    learn = learner(data, 16, StepLogger(), Stop('after_pred', CancelBatchException, [(0,1), (1,1)]))
    learn.fit(2)
    assert rows(learn)['items'].tolist()==[16, 16, 13]*2 and list(rows(learn))==BASE
    assert learner(data, 16).fit(1) is None  # and fastai's loop is untouched

def test_whole_and_accumulated_are_the_same_rows():
    "Also with the rows of loader batches in the Recorder"
    runs = [learner(data, bs, *cbs, StepLogger(grad_norm=True)) for bs,cbs in
            ((32, ()), (8, [GradientAccumulation(32)]), (8, [GradientAccumulation(32, log_accum_batch=False)]))]
    for l in runs: l.fit_one_cycle(2, .05)
    for l in runs[1:]: close(rows(l).drop(columns='accum_bs'), rows(runs[0]).drop(columns='accum_bs'), 1e-5)

@pytest.mark.parametrize('remainder,items', [('step', [32,8]*2), ('drop', [32]*2), ('carry', [32,32])])
def test_short_epochs(remainder, items):
    "A step that no batch closed has its row too"
    short = Stop('after_batch', CancelTrainException, [(0,4), (1,4)], order=30)
    learn = learner(data, 8, GradientAccumulation(32, remainder=remainder), StepLogger(), short)
    learn.fit(2)
    assert rows(learn)['items'].tolist()==items
    assert rows(learn).epoch.iloc[0]==.5 and rows(learn).epoch.iloc[-1] <= 2

def test_several_fits():
    "Rows go on; an epoch that was cut short counts as one; lr_find and validate leave none"
    learn = learner(data, 16, GradientAccumulation(32), StepLogger(grad_norm=True))
    with pytest.raises(KeyboardInterrupt): learn.fit(3, cbs=Stop('before_batch', KeyboardInterrupt, [(1,3)]))
    learn.validate()
    learn.fine_tune(1)
    n = len(rows(learn))
    with learn.no_bar(): learn.lr_find(show_plot=False, num_it=10)
    with pytest.raises(KeyboardInterrupt), learn.added_cbs(Stop('before_step', KeyboardInterrupt, [(0,1)])), learn.no_bar():
        learn.lr_find(show_plot=False, num_it=10)
    assert len(rows(learn))==n
    learn.fit(1)
    df = rows(learn)
    assert df.fit.tolist()==[1]*3 + [2]*2 + [3]*2 + [4]*2
    close(df.epoch, [.5, 1, 1.5, 2.5, 3, 3.5, 4, 4.5, 5])
    assert df.step.tolist()==list(range(1, 10))

def test_cancelled_steps_are_marked():
    learn = learner(data, 8, GradientAccumulation(16), StepLogger(), Stop('before_step', CancelStepException, [(0,3), (1,3)]))
    learn.fit(2)
    assert rows(learn).skipped.tolist()==[False, True, False, False]*2

@fp16
def test_overflow():
    "The loss scale, the skipped step, and the unscaled norm"
    class Overflow(Callback):
        order = 7
        def before_backward(self):
            if self.learn.iter==2: self.learn.loss_grad = self.learn.loss_grad*float('inf')
    learn = learner(data, 16, GradientAccumulation(32), MixedPrecision('fp16', init_scale=2.**10), StepLogger(grad_norm=True), Overflow())
    learn.fit(2)
    df = rows(learn)
    assert df.skipped.tolist()==[False, True]*2
    assert df.loss_scale.tolist()==[2.**10, 2.**10, 2.**9, 2.**9]
    assert np.isfinite(df.grad_norm[::2]).all() and not np.isfinite(df.grad_norm[1::2]).any()
    assert df.grad_norm[0] < 10

class Mine(Callback):
    "Offers values on the device, which it changes in place, from the second epoch on"
    def __init__(self): self.count = torch.zeros(1, dtype=torch.int64)
    @property
    def step_values(self): return dict(mine=self.count, host=self.learn.epoch*10) if self.learn.epoch else {}
    def after_step(self): self.count += 1

def test_own_values():
    learn = learner(data, 32, StepLogger(), Mine())
    learn.fit(3)
    df = rows(learn)
    assert df.mine[2:].tolist()==[3, 4, 5, 6] and df.host[2:].tolist()==[10, 10, 20, 20]
    assert df.mine[:2].isna().all()

class Reads(TorchDispatchMode):
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

def test_no_sync():
    def reads(*cbs):
        learn = learner(data, 8, GradientAccumulation(16), *cbs)
        with Reads() as r: learn.fit(3)
        return r.n
    assert reads(StepLogger(grad_norm=True), Mine())==reads()

def test_columns():
    "Many rows, mixed kinds of values, and one transfer per column"
    t = StepTable()
    for i in range(3000): t.append(dict(i=i, v=torch.tensor(i/2) if i%2 else i/2, flag=torch.tensor([i > 5]), nan=float('nan')))
    assert len(t)==3000 and set(t.cols)=={'i','v','flag','nan'}
    assert (t['v']==np.arange(3000)/2).all() and t['i'].dtype==int and t['flag'].dtype==bool and t['flag'].sum()==2994
    assert np.isnan(t['nan']).all()
    assert sum(len(c) for cols in t.cols.values() for c in cols.values()) <= 5*4100

def test_to_host():
    with Reads() as r: vals = to_host(dict(a=1, b=torch.tensor(2.5), c=torch.tensor([3]), d=True, e=None, f=torch.tensor(1e-45)))
    assert vals==dict(a=1, b=2.5, c=3, d=1, e=None, f=torch.tensor(1e-45).item()) and type(vals['c']) is int

def test_copies():
    "Pickles, deep copies, exports; without a Learner and with"
    learn = learner(data, 16, GradientAccumulation(32), StepLogger(grad_norm=True))
    learn.fit(1)
    df = rows(learn)
    for again in (pickle.loads(pickle.dumps(learn)), deepcopy(learn)):
        again.remove_cb(ProgressCallback)
        again.logger = noop
        again.fit(1)
        assert len(rows(again))==4 and rows(again)[:2].equals(df)
    assert rows(learn).equals(df)

def test_export():
    learn = learner(data, 16, GradientAccumulation(32), StepLogger())
    learn.dls = Datasets(list(range(64)), [[lambda i: data.x[i%61]], [lambda i: data.y[0][i%61]]]).dataloaders(bs=16)
    learn.fit(1)
    learn.export('learn.pkl')
    assert len(rows(learn))==2 and not any(cb.name=='step_logger' for cb in load_learner('learn.pkl').cbs)

def test_plot():
    learn = learner(data, 8, GradientAccumulation(16), StepLogger(grad_norm=True),
                    Stop('before_step', CancelStepException, [(0,3)], once=False))
    with pytest.raises(ValueError, match='no rows yet'): learn.step_logger.plot()
    learn.fit(1); learn.fit(1)
    axs = learn.step_logger.plot()
    assert [ax.get_title() for ax in axs.flat]==['items', 'loss', 'grad_norm']      # the learning rate does not change
    assert [t.get_text() for t in axs[0].figure.legends[0].get_texts()]==['accum_bs', 'skipped']
    assert axs.flat[1].lines[1].get_xdata().tolist()==[2, 6]
    assert [ax.get_xlabel() for ax in learn.step_logger.plot(['loss', 'lr'], x='epoch')]==['epoch']*2

def test_tensorboard():
    "Next to what fastai writes, on its axis"
    learn = learner(data, 8, GradientAccumulation(32), StepLogger(grad_norm=True),
                    TensorBoardCallback('runs', trace_model=False, log_preds=False), Mine())
    learn.fit(2, .01)
    events = EventAccumulator('runs').Reload()
    df = rows(learn)
    for k in ('loss', 'items', 'accum_bs', 'grad_norm', 'skipped'):
        got = events.Scalars(k)
        close([e.value for e in got], df[k])
        assert [e.step for e in got]==[4, 8, 12, 16]
    assert [e.value for e in events.Scalars('mine')]==[3, 4]
    assert [e.step for e in events.Scalars('train_loss')]==[4, 8, 12, 16]
