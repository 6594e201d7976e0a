"Training metrics, rows of cancelled batches, class weights in float64, and `one_batch` by hand"
import pytest
from reference import *
from reference import GradientAccumulation    # ours
from fastai.callback.progress import CSVLogger
from fastaccum.logs.steps import StepLogger
from test_silent import moved

torch.manual_seed(0)
y = torch.where(torch.rand(61) < .5, -100, torch.arange(61)%4)
data = Data(torch.randn(61, 6), y)
ways = {'loader batches': (8, dict(accum_bs=32)), 'split': (32, dict(micro_batch_size=7)),
        'both': (16, dict(accum_bs=32, micro_batch_size=5))}
def valid_accuracy(pred, y):
    ok = y >= 0
    return (pred.argmax(-1) == y)[ok].float().mean()

def trained(bs, *cbs, of=data, remainder='step', **kwargs):
    learn = learner(of, bs, *cbs, loss_func=CrossEntropyLossFlat(ignore_index=-100), opt_func=partial(SGD, mom=0.),
                    metrics=[valid_accuracy, AccumMetric(valid_accuracy, flatten=False), mse_of], **kwargs)
    learn.recorder.train_metrics = True
    learn.fit(2, .05)
    return learn
def mse_of(pred, y): return pred.pow(2).mean()

@pytest.mark.parametrize('way', ways)
def test_train_metrics_with_ignored_targets(way):
    "They weigh as in the big batch"
    bs,acc = ways[way]
    whole,learn = trained(32),trained(bs, GradientAccumulation(**acc))
    assert np.allclose([*map(list, learn.recorder.values)], [*map(list, whole.recorder.values)], atol=1e-6)

class Losses(Metric):
    "The loss that a metric sees, and that of the loader batch whose prediction it sees"
    value = 0.
    def __init__(self): self.seen = []
    def reset(self): pass
    def accumulate(self, learn): self.seen.append((learn.loss.item(), learn.loss_func(learn.pred, learn.y).item()))

def test_a_metric_sees_the_loss_of_its_batch():
    "Also at a step, whose row has the loss of all its items"
    learn = learner(data, 8, GradientAccumulation(24), loss_func=CrossEntropyLossFlat(ignore_index=-100), metrics=Losses())
    learn.recorder.train_metrics = True
    learn.fit(1, .05)
    seen,own = zip(*learn.metrics[0].seen)
    assert len(seen) >= 8 and np.allclose(seen, own, atol=1e-6)

@pytest.mark.parametrize('remainder', remainders)
def test_all_items_of_an_epoch_are_measured(remainder):
    counts = []
    note = On('before_validate', lambda l: counts.append(l.recorder.metrics[2].count), order=-20, training=None)
    learn = trained(8, GradientAccumulation(32, remainder=remainder), note)
    assert counts == [61, 61] and not learn.one_batch.rows.kept

def test_metrics_after_an_interrupted_fit():
    learn = learner(data, 8, GradientAccumulation(32), Stop('after_batch', CancelFitException, [(0, 1)], order=90),
                    loss_func=CrossEntropyLossFlat(), metrics=mse_of)
    learn.recorder.train_metrics = True
    learn.fit(1)
    learn.fit(1)
    assert len(learn.recorder.values) == 1 and not learn.one_batch.rows.kept

def test_predictions_of_several_lengths():
    "Sentences of other lengths cannot be joined: they are measured batch by batch"
    items = [(torch.randn(2 + i//8%2, 6), torch.ones(2 + i//8%2, dtype=torch.long)) for i in range(32)]
    learn = learner(items, 8, GradientAccumulation(16), loss_func=CrossEntropyLossFlat(), metrics=mse_of, valid=items[:8])
    learn.recorder.train_metrics = True
    learn.fit(1)
    assert len(learn.recorder.losses) == 2 and learn.recorder.values[0][1] > 0

@pytest.mark.parametrize('event', ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_step'))
def test_cancelled_batch_has_its_row(event):
    """As fastai gives it one, if it would have been a step: of its own loss, or of the one before if it has none, be this
    nothing, an earlier batch's or the validation's. A callback may cancel before or after the accumulation hears of the batch"""
    def rows(order, *cbs):
        learn = learner(data, 8, *cbs, Stop(event, CancelBatchException, [(0, 0), (0, 2), (1, 0)], order), CSVLogger(), StepLogger(),
                        loss_func=CrossEntropyLossFlat(), opt_func=partial(SGD, mom=0.), valid=Data(data.x[:8], y[:8]))
        learn.fit_one_cycle(2, .05)
        table,steps = learn.csv_logger.read_log().iloc[:, :3],learn.step_logger.to_df()[['epoch','loss','lr']]
        return learn.recorder.losses,learn.recorder.lrs,[list(v)[:2] for v in learn.recorder.values],table,steps,weights(learn.model)
    for order in (3, 20):
        whole = rows(order)
        # between these events its loss is not that of all micro-batches
        split = [dict(micro_batch_size=3)]*(event in ('before_batch', 'after_step'))
        for acc in (dict(accum_bs=8), dict(micro_batch_size=8), dict(accum_bs=8, log_accum_batch=False), *split):
            *tables,w = rows(order, GradientAccumulation(**acc))
            assert all(np.allclose(a, b) for a,b in zip(tables, whole)) and rel_err(w, whole[-1]) < 1e-6

@pytest.mark.parametrize('acc', (dict(accum_bs=16), dict(micro_batch_size=3)))
def test_row_of_an_epoch_cut_short(acc):
    "That of fastai, which has no training loss then. `recorder.losses` has the last step, too, whose row fastai leaves out"
    def rows(bs, pct, *cbs):
        learn = learner(data, bs, *cbs, ShortEpochCallback(pct), CSVLogger(), opt_func=SGD,
                        loss_func=CrossEntropyLossFlat(ignore_index=-100))
        learn.fit(2, .05)
        return [*map(list, learn.recorder.values)],learn.recorder.losses,learn.csv_logger.read_log().iloc[:, :2]
    values,losses,table = rows(8 if 'accum_bs' in acc else 16, .6 if 'accum_bs' in acc else .5, GradientAccumulation(**acc))
    whole,fewer,fastais = rows(16, .5)
    assert np.allclose(table, fastais, rtol=1e-5)
    assert np.allclose(values, whole, rtol=1e-5) and len(values[0]) == 1
    assert np.allclose(losses[:2], fewer[:2], rtol=1e-5) and (len(losses), len(fewer)) == (6, 4)

@pytest.mark.parametrize('event', ('before_batch', 'after_loss'))
def test_cancelled_part_has_none(event):
    learn = learner(data, 8, GradientAccumulation(32), Stop(event, CancelBatchException, [(0, 2)]), loss_func=CrossEntropyLossFlat())
    learn.fit(1, .05)
    assert len(learn.recorder.losses) == 2

def test_loss_of_a_cancelled_batch():
    "That of the micro-batches which were back-propagated. Weights of a type of fastai's stay in one tensor, as on a device"
    class Third(Callback):
        "Cancels the third of four micro-batches"
        order,n = 70,0
        def before_batch(self): self.learn.yb = TensorCategory(self.y),
        def before_backward(self):
            self.n += 1
            if self.n == 3: raise CancelBatchException()
        def after_cancel_batch(self): self.of_two,self.stacked = self.learn.loss.item(),self.learn.gradient_accumulation.weights.stacked
    x,y = data.batch(range(8))[0],tensor([0, -100, 1, 2, 3, 0, 1, 2])
    learn = learner(Data(x, y), 8, GradientAccumulation(8, micro_batch_size=2), Third(), loss_func=CrossEntropyLossFlat())
    learn.fit(1, 0.)
    assert learn.third.stacked.tolist() == [1, 2, 2, 2]
    assert learn.third.of_two == pytest.approx(F.cross_entropy(learn.model(x[:4]), y[:4]).item(), rel=1e-6)

class Weighted(nn.Module):
    "Class weights in float32, whatever the model computes in"
    def __init__(self):
        super().__init__()
        self.weight = torch.tensor([.1, 1.3, 3.7, 10.1])
    def forward(self, pred, y): return F.cross_entropy(pred, y, weight=self.weight.to(pred.dtype))

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('pixels', (False, True))
def test_float32_class_weights_in_float64(way, pixels):
    bs,acc = ways[way]
    y = torch.randint(4, (61, 3)) if pixels else torch.randint(4, (61,))
    of = Data(torch.randn(61, 3, 6).double() if pixels else torch.randn(61, 6).double(), y)
    model = mlp().double()
    if pixels: model = nn.Sequential(*model, Transposed())
    def run(bs, *cbs):
        learn = learner(of, bs, *cbs, model=model, loss_func=Weighted(), opt_func=partial(SGD, mom=0.))
        learn.remove_cbs([CastToTensor, Recorder])         # it takes no float64
        learn.fit(2, .05)
        return learn
    whole,learn = run(32),run(bs, GradientAccumulation(**acc))
    assert 'class' in learn.gradient_accumulation.loss_rule
    start = learner(of, 8, model=model)
    a,b,s = (weights(m).double() for m in (learn.model, whole.model, start.model))
    assert (a-b).norm()/(b-s).norm() < 1e-13

class Transposed(nn.Module):
    def forward(self, x): return x.transpose(1, 2)

@pytest.mark.parametrize('acc', (dict(accum_bs=8), dict(accum_bs=16), dict(micro_batch_size=4), dict(micro_batch_size='auto')))
def test_one_batch_by_hand(acc):
    "Without a fit, and without its events"
    def by_hand(*cbs):
        learn = learner(data, 8, *cbs, loss_func=CrossEntropyLossFlat(ignore_index=-100), opt_func=partial(SGD, mom=0.), lr=.1)
        learn.remove_cbs([TrainEvalCallback, Recorder])
        learn.create_opt()
        learn.model.train()
        learn.training = True
        a,b = (data.batch(range(i, i+8)) for i in (0, 8))
        if acc.get('accum_bs') == 16 and not cbs: learn.one_batch(0, data.batch(range(16)))
        else: learn.one_batch(0, a); learn.one_batch(1, b)
        return weights(learn.model)
    assert rel_err(by_hand(GradientAccumulation(**acc)), by_hand()) < 1e-6

def test_by_hand_in_mid_epoch():
    "The first batch looks up what an epoch looks up, whatever its number, here that the Learner has a backward pass of its own"
    learn = learner(data, 8, GradientAccumulation(8), loss_func=CrossEntropyLossFlat(), lr=.1)
    learn.remove_cbs([TrainEvalCallback, Recorder])
    learn.create_opt()
    learn.training,called = True,[]
    learn._backward = lambda: called.append(learn.loss_grad.backward())
    learn.one_batch(3, data.batch(range(8)))
    assert called == [None]
