"Accumulated batches that are full when they have so many tokens"
import pytest, torch, torch.nn.functional as F
from fastai.text.data import TensorText
from reference import *
from fastaccum.batch_size.noise import GradientNoiseScale
from fastaccum.batch_size.rates import ScaleLR, batch_ramp
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.logs.steps import StepLogger

pad,n_words = 1,12
def padded(texts, first=False, value=pad):
    most = max(map(len, texts))
    return torch.stack([F.pad(t, (most-len(t), 0) if first else (0, most-len(t)), value=value) for t in texts])

def some_texts(n=46, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = (1 + 20*torch.rand(n, generator=g)**3).long()
    return [torch.randint(2, n_words, (int(k),), generator=g) for k in lengths]
texts = some_texts()
lengths = [len(t) for t in texts]

class Batches(DataLoader):
    "A loader of texts, in their order if not told otherwise, padded batch by batch"
    def __init__(self, pairs, bs=4, first=False, **kwargs): super().__init__(pairs, bs=bs, **kwargs); self.first = first
    def create_batch(self, b):
        xs,ys = zip(*b)
        return padded(xs, self.first),(padded(ys, self.first, -100) if ys[0].dim() else torch.stack(ys))
    def batch(self, ids): return self.create_batch([self.dataset[i] for i in ids])
    def ids(self, i): return [*range(i*self.bs, min(self.n, (i+1)*self.bs))]

class Words(nn.Module):
    "Says something of each word"
    def __init__(self): super().__init__(); self.emb,self.out = nn.Embedding(n_words, 6, padding_idx=pad),nn.Linear(6, n_words)
    def forward(self, x): return self.out(self.emb(x).tanh())

class Texts(Words):
    "Says something of each text: the mean over its words"
    def forward(self, x):
        mask = (x != pad)[...,None]
        return self.out((self.emb(x).tanh()*mask).sum(1)/mask.sum(1))

language,classes = [(t, t.roll(-1)) for t in texts],[(t, t[0]%5) for t in texts]
kinds = dict(language=(Words, language, False), classes=(Texts, classes, False), classes_padded_first=(Texts, classes, True))

def text_learner(kind, *cbs, double=False, loss_func=None, pairs=None, spy=True, **kwargs):
    Model,known,first = kinds[kind]
    set_seed(0)
    dl = Batches(ifnone(pairs, known), first=first, **kwargs)
    model = Model().double() if double else Model()
    learn = Learner(DataLoaders(dl, dl, device='cpu'), model, ifnone(loss_func, CrossEntropyLossFlat()), SGD, cbs=[*cbs, *[Spy()]*spy])
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def check_steps(learn, tol=1e-6):
    "Each step had the gradient of its texts in one batch"
    dl = learn.dls.train
    for s in learn.spy.steps:
        x,y = dl.batch([i for _,b in s.batches for i in dl.ids(b)])
        assert rel_err(s.grad, big_batch(learn.model, s.weights, learn.loss_func, x, (y,))[0]) < tol

def in_batches(lengths, bs=4): return [sum(lengths[i:i+bs]) for i in range(0, len(lengths), bs)]

@pytest.mark.parametrize('remainder', ['step','drop','carry'])
@pytest.mark.parametrize('k', [None, 3])
@pytest.mark.parametrize('kind', kinds)
def test_steps(kind, k, remainder):
    logger = StepLogger()
    learn = text_learner(kind, GradientAccumulation(60, unit='tokens', remainder=remainder, micro_batch_size=k), logger)
    if remainder == 'drop': learn.add_cb(On('before_train', lambda learn: learn.spy.pending.clear()))
    learn.fit(2, .1)
    expected = accumulated(in_batches(lengths), 60, remainder, 2)
    assert [s.batches for s in learn.spy.steps] == expected and len(learn.recorder.losses) == len(expected) > 4
    check_steps(learn)
    df,dl = logger.to_df(),learn.dls.train
    assert df.tokens.tolist() == [sum(lengths[j] for _,i in s for j in dl.ids(i)) for s in expected]
    assert df['items'].tolist() == [sum(len(dl.ids(i)) for _,i in s) for s in expected] and set(df.accum_bs) == {60}

def test_float64():
    learn = text_learner('language', GradientAccumulation(60, unit='tokens', micro_batch_size=3), double=True, loss_func=nn_loss)
    learn.fit(1, .1)
    check_steps(learn, 1e-12)
def nn_loss(pred, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten())
nn_loss.ignore_index = -100

def test_ignored_targets_are_no_tokens():
    "And a loader batch without any is one token"
    pairs = [(t, t.new_full(t.shape, -100) if i < 8 else t) for i,t in enumerate(texts)]
    learn = text_learner('language', GradientAccumulation(60, unit='tokens'), StepLogger(), pairs=pairs)
    learn.fit(1, .1)
    check_steps(learn)
    counted = [1, 1, *in_batches(lengths)[2:]]
    assert [s.batches for s in learn.spy.steps] == (steps := accumulated(counted, 60))
    assert learn.step_logger.to_df().tokens.tolist() == [sum(counted[i] for _,i in s) for s in steps]

def test_schedule():
    acc = GradientAccumulationSchedule(20, 100, finish=1., schedule=batch_ramp(SchedLin(1, .2)), unit='tokens')
    learn = text_learner('classes', acc, StepLogger())
    learn.fit(3, .1)
    n_iter,counted = len(learn.dls.train),in_batches(lengths)
    assert [s.batches for s in learn.spy.steps] == accumulated(counted, lambda e, i: acc.size_at(e*n_iter+i, n_iter, 3), n_epoch=3)
    check_steps(learn)
    assert learn.step_logger.to_df().accum_bs.is_monotonic_increasing

def test_each_loader_batch():
    learn = text_learner('classes', GradientAccumulation(micro_batch_size=2, unit='tokens'), StepLogger())
    learn.fit(1, .1)
    df = learn.step_logger.to_df()
    assert df.tokens.tolist() == df.accum_bs.tolist() == in_batches(lengths)

def test_own_count():
    "In its own unit, which is a column"
    def seconds(learn): return (learn.x != pad).sum()/2
    learn = text_learner('classes', GradientAccumulation(30, unit='seconds', count=seconds, micro_batch_size=3), StepLogger())
    learn.fit(1, .1)
    counted = [n//2 for n in in_batches(lengths)]
    assert learn.step_logger.to_df().seconds.tolist() == [sum(counted[i] for _,i in s) for s in accumulated(counted, 30)]
    check_steps(learn)

def test_rows_of_loader_batches():
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens', log_accum_batch=False))
    learn.fit(1, .1)
    assert len(learn.recorder.losses) == len(learn.dls.train)

def test_cancelled_batches():
    "They do not count"
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens'), StepLogger(), Stop('after_pred', CancelBatchException, [(0, 1), (0, 5)]))
    learn.fit(1, .1)
    expected = accumulated(in_batches(lengths), 60, stop=('after_pred', CancelBatchException, [(0, 1), (0, 5)]))
    df,dl = learn.step_logger.to_df(),learn.dls.train
    assert df.tokens.tolist() == [sum(lengths[j] for _,i in s for j in dl.ids(i)) for s in expected]
    assert df['items'].tolist() == [sum(len(dl.ids(i)) for _,i in s) for s in expected]

def test_no_plan():
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens'))
    for what in (learn.gradient_accumulation.plan, learn.gradient_accumulation.plot):
        with pytest.raises(ValueError, match='accum_bs counts tokens, and how many a loader batch has is not known'): what()

def test_lr_find():
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens'))
    before = weights(learn.model)
    learn.lr_find(num_it=12, show_plot=False)
    assert len(learn.recorder.lrs) == 12 and torch.equal(weights(learn.model), before)

def test_scale_lr():
    "By tokens, if it is told of how many"
    acc = GradientAccumulation(60, unit='tokens')
    with pytest.raises(ValueError, match='accum_bs counts tokens.*ScaleLR'): text_learner('classes', acc, ScaleLR('linear')).fit(1)
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens'), ScaleLR('linear', bs=20))
    learn.fit(1, .1)
    assert {round(s.lr, 7) for s in learn.spy.steps} == {.3}
    learn = text_learner('classes', GradientAccumulationSchedule(20, 60, unit='tokens', finish=0), ScaleLR('linear'))
    learn.fit(1, .1)
    assert {round(s.lr, 7) for s in learn.spy.steps} == {.3}

def test_noise_scale():
    "In tokens: that in items, times the tokens of an item"
    def b_simple(**kwargs):
        set_seed(0)
        x = torch.randint(2, n_words, (64, 5))
        learn = Learner(DataLoaders(dl := [(x[i:i+8], x[i:i+8,0]) for i in range(0, 64, 8)], dl, device='cpu'), Texts(), CrossEntropyLossFlat(),
                        SGD, cbs=[GradientAccumulation(micro_batch_size=2, **kwargs), GradientNoiseScale()])
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .01)
        return learn.gradient_noise_scale.estimate()
    items,tokens = b_simple(),b_simple(unit='tokens')
    assert tokens.b_simple == pytest.approx(5*items.b_simple, rel=1e-4) and tokens.n_steps == 16

@pytest.mark.parametrize('epoch', [0, 1])
def test_resumed_in_the_middle_of_an_accumulated_batch(epoch):
    def make(*cbs):
        acc = GradientAccumulation(60, unit='tokens', micro_batch_size=3, remainder='carry')
        return text_learner('language', acc, TrainingCheckpoint(every_steps=1), StepLogger(), *cbs, spy=False, shuffle=True)
    def run(learn):
        CheckpointFolder.in_use.clear()                              # as in a new process
        learn.fit(2, .1)
        return learn
    def stop(learn):
        if learn.epoch == epoch and learn.iter > 3 and learn.gradient_accumulation.n_items: raise KeyboardInterrupt
    whole = make()
    whole.remove_cb(whole.training_checkpoint)
    run(whole)
    with pytest.raises(KeyboardInterrupt): run(make(On('before_batch', stop, order=7)))
    again = run(make())
    assert torch.equal(weights(again.model), weights(whole.model))
    assert again.step_logger.to_df().equals(whole.step_logger.to_df())

@pytest.mark.parametrize('kwargs,says', [
    (dict(unit='words'), 'pass count='), (dict(unit='lr'), "unit='lr'"), (dict(unit='a word'), "unit='a word'"), (dict(count=len), 'name it'),
    (dict(unit='tokens', count=3), 'count is 3'), (dict(unit='tokens', pad_idx='0'), 'pad_idx is')])
def test_wrong_arguments(kwargs, says):
    for make in (lambda **kw: GradientAccumulation(64, **kw), lambda **kw: GradientAccumulationSchedule(16, 64, **kw)):
        with pytest.raises((TypeError,ValueError), match=says): make(**kwargs)

def test_unknown_padding():
    class Unknown(Texts):
        def __init__(self): super().__init__(); self.emb.padding_idx = None
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens'))
    learn.model = Unknown()
    with pytest.raises(ValueError, match='which token is padding is not known.*pad_idx'): learn.fit(1)
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens', pad_idx=pad), StepLogger())
    learn.model = Unknown()
    learn.fit(1)
    assert learn.step_logger.to_df().tokens.sum() == sum(lengths)

def test_no_tokens():
    learn = learner(Data(torch.randn(32, 6), torch.randn(32, 4)), 8, GradientAccumulation(16, unit='tokens'))
    with pytest.raises(ValueError, match='neither targets nor inputs of this Learner are rows of tokens'): learn.fit(1)
