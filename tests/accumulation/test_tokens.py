"Accumulated batches that are full when they have so many tokens"
import io, math, re, warnings
from contextlib import redirect_stdout
import pytest, torch, torch.nn.functional as F
from fastai.text.data import TensorText
from fastcore.test import test_close as close
from reference import *
from fastaccum.accumulation.lengths import Cut
from fastaccum.batch_size.noise import GradientNoiseScale
from fastaccum.batch_size.rates import ScaleLR, batch_ramp
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.folder import CheckpointFolder
from fastaccum.logs.steps import StepLogger
from fastaccum.memory import advice as _  # `learn.memory_advice`
from fastaccum.memory.largest import LargestFirst

# The reference is `micro_batch_size` of a whole loader batch
pytestmark = pytest.mark.filterwarnings('ignore:.* changes nothing here')

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
    def __init__(self, dataset, bs=4, first=False, **kwargs): super().__init__(dataset, bs=bs, **kwargs); self.first = first
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

@pytest.mark.parametrize('remainder', remainders)
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
def nn_loss(pred, y): return F.cross_entropy(pred.flatten(0, -2), y.flatten())
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
    "All weights of a step are known before it: the gradients are not rescaled after it"
    planned = []
    class Planned(Callback):
        def after_step(self): planned.append(self.learn.gradient_accumulation.acc.closed.planned)
    learn = text_learner('classes', GradientAccumulation(micro_batch_size=2, unit='tokens'), StepLogger(), Planned())
    learn.fit(1, .1)
    df = learn.step_logger.to_df()
    assert df.tokens.tolist() == df.accum_bs.tolist() == planned == in_batches(lengths)

def test_own_count():
    "In its own unit, which is a column"
    def millis(learn): return 500*(learn.x != pad).sum().float()         # whole numbers may be floats
    learn = text_learner('classes', GradientAccumulation(15000, unit='millis', count=millis, micro_batch_size=3), StepLogger())
    learn.fit(1, .1)
    counted = [500*n for n in in_batches(lengths)]
    assert learn.step_logger.to_df().millis.tolist() == [sum(counted[i] for _,i in s) for s in accumulated(counted, 15000)]
    check_steps(learn)

@pytest.mark.parametrize('count,says', [
    (lambda learn: .9, 'count= returns 0.9.*Count milliseconds'), (lambda learn: torch.full((len(learn.x),), 1.9), 'count= returns 1.9'),
    (lambda learn: [1.]*3 + [math.nan], 'count= returns nan'), (lambda learn: math.inf, 'count= returns inf'),
    (lambda learn: None, 'count= returns None: return a whole number'), (lambda learn: 'ten', 'count= returns a str')])
@pytest.mark.parametrize('kwargs', [{}, dict(micro_batch_tokens=20)], ids=str)
def test_fractions_are_refused(count, says, kwargs):
    "They would be cut off: 18 batches of 1.9 s counted as 18 s"
    learn = text_learner('classes', GradientAccumulation(30, unit='seconds', count=count, **kwargs))
    before = weights(learn.model)
    with pytest.raises(ValueError, match=says): learn.fit(1, .1)
    assert torch.equal(weights(learn.model), before)

def test_whole_numbers_as_floats():
    "With micro-batches by length, too"
    def run(count):
        learn = text_learner('classes', GradientAccumulation(60, unit='words', count=count, micro_batch_tokens=20), StepLogger())
        learn.fit(1, .1)
        check_steps(learn)
        return learn.step_logger.to_df().words.tolist()
    def words(learn): return (learn.x != pad).sum(1)
    steps = accumulated(in_batches(lengths), 60)
    expected = [sum(in_batches(lengths)[i] for _,i in s) for s in steps]
    assert run(words) == run(lambda learn: words(learn).float()) == expected

def test_rows_of_loader_batches():
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens', log_accum_batch=False))
    learn.fit(1, .1)
    assert len(learn.recorder.losses) == len(learn.dls.train)

def test_cancelled_batches():
    "They do not count"
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens'), StepLogger(),
                         Stop('after_pred', CancelBatchException, [(0, 1), (0, 5)]))
    learn.fit(1, .1)
    expected = accumulated(in_batches(lengths), 60, stop=('after_pred', CancelBatchException, [(0, 1), (0, 5)]))
    df,dl = learn.step_logger.to_df(),learn.dls.train
    assert df.tokens.tolist() == [sum(lengths[j] for _,i in s for j in dl.ids(i)) for s in expected]
    assert df['items'].tolist() == [sum(len(dl.ids(i)) for _,i in s) for s in expected]

class Loads:
    "A dataset that counts how often an item is read"
    def __init__(self, items): self.items,self.n = items,0
    def __len__(self): return len(self.items)
    def __getitem__(self, i): self.n += 1; return self.items[i]

@pytest.mark.parametrize('remainder', remainders)
@pytest.mark.parametrize('shuffle', [False, True])
def test_plan(shuffle, remainder):
    "It is what training does in its first epoch, and in all if nothing shuffles. Computing it changes neither this nor the Learner"
    def make(acc): return text_learner('classes', acc, StepLogger(), pairs=data, shuffle=shuffle)
    def fit(learn, n): learn.fit(n, .1); return learn.step_logger.to_df().tokens.tolist()
    data,n = Loads(classes),1 if shuffle else 2
    acc = GradientAccumulation(60, unit='tokens', remainder=remainder)
    reference = fit(make(GradientAccumulation(60, unit='tokens', remainder=remainder)), n)
    learn,data.n = make(acc),0
    state,before = torch.get_rng_state(),vars(learn).copy()
    with redirect_stdout(out := io.StringIO()): plan = acc.plan(n)
    assert plan == reference and data.n == len(texts) and len(plan) > 1
    assert torch.equal(torch.get_rng_state(), state) and vars(learn) == before
    said = out.getvalue()
    assert '12 loader batches were loaded to count their tokens' in said and ('estimate' in said) == shuffle
    assert acc.plan(n) == plan and data.n == len(texts)                  # an epoch is loaded once
    assert fit(learn, n) == reference

def test_plan_of_a_schedule():
    acc = GradientAccumulationSchedule(20, 100, unit='tokens', finish=1.)
    learn = text_learner('language', acc, StepLogger())
    plan,saved,ax = acc.plan(3),acc.saved_steps(3),acc.plot(3)
    assert ax.get_ylabel() == 'tokens' and ax.get_legend_handles_labels()[1] == ['tokens in a step', 'accum_bs']
    learn.fit(3, .1)
    assert learn.step_logger.to_df().tokens.tolist() == plan
    assert saved == len(accumulated(in_batches(lengths), 20, n_epoch=3)) - len(plan) > 0

def test_plan_of_an_own_count():
    acc = GradientAccumulation(15000, unit='millis', count=lambda learn: 500*(learn.x != pad).sum())
    learn = text_learner('classes', acc, StepLogger())
    plan = acc.plan()
    learn.fit(1, .1)
    assert learn.step_logger.to_df().millis.tolist() == plan

def test_plan_with_loaders_of_pytorch():
    "Also with a batch sampler, whose loader does not tell sizes"
    def collate(b): return padded([x for x,_ in b]),torch.stack([y for _,y in b])
    batches,acc = [range(0, 30), range(30, 33), range(33, 46)],GradientAccumulation(60, unit='tokens')
    dl = torch.utils.data.DataLoader(classes, batch_sampler=batches, collate_fn=collate)
    learn = text_learner('classes', acc, StepLogger())
    learn.dls.loaders[0] = dl
    with redirect_stdout(out := io.StringIO()): plan = acc.plan()
    learn.fit(1, .1)
    assert learn.step_logger.to_df().tokens.tolist() == plan and 'an estimate' in out.getvalue()

def test_plan_of_loaders_that_come_and_go():
    "What was counted is remembered for a loader, not for the place in memory that the next one gets; a copy of the callback has none of it"
    learn = text_learner('classes', acc := GradientAccumulation(60, unit='tokens'))
    def plan(n):
        return acc.plan(dl=torch.utils.data.DataLoader(classes[n:n+8], batch_size=4,
                                                       collate_fn=lambda b: (
                                                           padded([x for x,_ in b]), torch.stack([y for _,y in b]))))
    for n in range(38): assert sum(plan(n)) == sum(lengths[n:n+8])
    assert acc.plan(dl=[(padded(texts[:4]), torch.arange(4)), (padded(texts[4:6]), torch.arange(2))]) == [sum(lengths[:6])]
    assert deepcopy(acc.epoch_counts).found == {} != acc.epoch_counts.found

@pytest.mark.parametrize('shuffle', [False, True])
@pytest.mark.parametrize('kind', ['LMDataLoader','SortedDL'])
def test_plan_without_loading(kind, shuffle):
    "fastai's loaders of texts know their lengths"
    from fastai.text.data import LMDataLoader, SortedDL, pad_input
    items = [(TensorText(t), y) for t,y in classes]
    if kind == 'SortedDL': dl = SortedDL(data := Loads(items), bs=4, shuffle=shuffle, before_batch=partial(pad_input, pad_idx=pad))
    else: dl = LMDataLoader(data := Loads([(t,) for t,_ in items]), lens=lengths, bs=3, seq_len=7, shuffle=shuffle, cache=1000)
    def make(acc):
        learn = text_learner('language' if kind == 'LMDataLoader' else 'classes', acc, StepLogger())
        learn.dls.loaders[0] = dl
        return learn
    learn = make(acc := GradientAccumulation(40, unit='tokens'))
    data.n = 0
    state = np.random.get_state()[1].copy()
    with redirect_stdout(out := io.StringIO()): plan = acc.plan()
    assert data.n < 20 and (state == np.random.get_state()[1]).all()
    estimate = 'GradientAccumulation: the loader shuffles, so the plan is an estimate: epochs have other batches of tokens.\n'
    assert out.getvalue() == (estimate if shuffle else '')
    learn.fit(1, .1)
    assert learn.step_logger.to_df().tokens.tolist() == plan

def test_plan_loads_what_the_loader_does_not_know():
    "Texts that a transform cuts"
    from fastai.text.data import SortedDL, pad_input
    def cut(b): return pad_input([(t[:5], y) for t,y in b], pad_idx=pad)
    dl = SortedDL([(TensorText(t), y) for t,y in classes], bs=4, before_batch=cut)
    learn = text_learner('classes', acc := GradientAccumulation(40, unit='tokens'), StepLogger())
    learn.dls.loaders[0] = dl
    plan = acc.plan()
    learn.fit(1, .1)
    assert learn.step_logger.to_df().tokens.tolist() == plan

def test_no_plan():
    learn = text_learner('classes', acc := GradientAccumulation(60, unit='tokens'))
    learn.add_cb(On('before_batch', lambda learn: acc.plan(), order=7))
    with pytest.raises(ValueError, match='ask for the plan before or after the fit'): learn.fit(1)
    learn.dls.loaders[0] = DataLoader(iter(classes), bs=4)
    with pytest.raises(ValueError, match='take the items of an epoch from the list_iterator'): acc.plan()
    with pytest.raises(ValueError, match='add the callback to a Learner, which loads'):
        GradientAccumulation(60, unit='tokens').plan(dl=learn.dls.valid)

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
        learn = Learner(DataLoaders(dl := [(x[i:i+8], x[i:i+8,0]) for i in range(0, 64, 8)], dl, device='cpu'), Texts(),
                        CrossEntropyLossFlat(),
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
    (dict(unit='words'), 'pass count='), (dict(unit='lr'), "unit='lr'"), (dict(unit='a word'), "unit='a word'"),
    (dict(count=len), 'name it'),
    (dict(unit='tokens', count=3), 'count is 3'), (dict(unit='tokens', pad_idx='0'), 'pad_idx is')])
def test_wrong_arguments(kwargs, says):
    for make in (lambda **kw: GradientAccumulation(64, **kw), lambda **kw: GradientAccumulationSchedule(16, 64, **kw)):
        with pytest.raises((TypeError,ValueError), match=says): make(**kwargs)

def test_unknown_padding():
    class Unknown(Texts):
        def __init__(self): super().__init__(); self.emb.padding_idx = None
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens'))
    learn.model = Unknown()
    with pytest.raises(ValueError, match='hich token is padding is not known.*pad_idx'): learn.fit(1)
    learn = text_learner('classes', GradientAccumulation(60, unit='tokens', pad_idx=pad), StepLogger())
    learn.model = Unknown()
    learn.fit(1)
    assert learn.step_logger.to_df().tokens.sum() == sum(lengths)

def test_no_tokens():
    learn = learner(Data(torch.randn(32, 6), torch.randn(32, 4)), 8, GradientAccumulation(16, unit='tokens'))
    with pytest.raises(ValueError, match='neither targets nor inputs of this Learner are rows of tokens'): learn.fit(1)

# --- micro-batches of so many tokens, as padded
class Attention(nn.Module):
    "A transformer that masks padding. per_word: says something of each word"
    def __init__(self, per_word=False, masks=True):
        super().__init__()
        self.per_word,self.masks,self.shapes = per_word,masks,[]
        self.emb,self.out = nn.Embedding(n_words, 8, padding_idx=pad),nn.Linear(8, n_words)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)
    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        mask = x == pad
        h = self.layer(self.emb(x), src_key_padding_mask=mask if self.masks else None)
        if self.per_word: return self.out(h)
        keep = (~mask)[...,None]
        return self.out((h*keep).sum(1)/keep.sum(1) if self.masks else h.mean(1))

class Packed(nn.Module):
    "An LSTM with packed input"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.out,self.shapes = (nn.Embedding(n_words, 6, padding_idx=pad),
                                                  nn.LSTM(6, 7, batch_first=True),nn.Linear(7, n_words),[])
    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        seq = nn.utils.rnn.pack_padded_sequence(self.emb(x), (x != pad).sum(1).cpu(), batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(seq)[1][0][-1])

masked = dict(transformer=(Attention, classes, False), transformer_padded_first=(Attention, classes, True), packed=(Packed, classes, False),
              every_word=(partial(Attention, per_word=True), language, False),
              every_word_padded_first=(partial(Attention, per_word=True), language, True))

def masked_learner(name, *cbs, double=True, **kwargs):
    Model,pairs,first = masked[name]
    set_seed(0)
    dl,model = Batches(pairs, first=first, bs=16),Model()
    learn = Learner(DataLoaders(dl, dl, device='cpu'), model.double() if double else model, nn_loss, SGD, cbs=[*cbs, Spy()], **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

@pytest.mark.parametrize('unit', ['items','tokens'])
@pytest.mark.parametrize('name', masked)
def test_steps_of_rows_by_length(name, unit):
    "Exact, and no micro-batch has more tokens than said, but for a single row"
    learn = masked_learner(name, GradientAccumulation(32 if unit == 'items' else 150, unit=unit, micro_batch_tokens=48))
    learn.model.shapes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1, .1)
    assert len(learn.spy.steps) > 1
    check_steps(learn, 1e-12)
    shapes = learn.model.shapes
    assert all(n*w <= 48 or n == 1 for n,w in shapes) and len({w for _,w in shapes}) > 5

def test_whole_run_is_that_of_rows():
    "In float32, with validation: losses, metrics, predictions"
    def run(*cbs):
        learn = masked_learner('every_word', *cbs, double=False, metrics=accuracy_of_words)
        learn.recorder.train_metrics = True
        learn.fit(2, .1)
        return learn
    whole,ours = run(GradientAccumulation(32)),run(GradientAccumulation(32, micro_batch_tokens=60))
    for a,b in zip(whole.recorder.values, ours.recorder.values): close(list(a), list(b), 1e-5)
    close(weights(whole.model), weights(ours.model), 1e-5)
    (a,ya),(b,yb) = whole.get_preds(), ours.get_preds()
    for p,q,y in zip(a, b, ya): close(p[y != -100], q[y != -100], 1e-5)
def accuracy_of_words(pred, y): return (pred.argmax(-1) == y)[y != -100].float().mean()

def test_order_of_the_loader():
    "What comes after a loader batch sees its rows in the loader's order"
    preds = []
    def after_batch(learn): preds.append((learn.iter, learn.xb[0], learn.yb[0], learn.pred))
    def run(**kwargs):
        preds.clear()
        learn = masked_learner('transformer', GradientAccumulation(16, **kwargs), On('after_batch', after_batch))
        learn.fit(1, 0.)
        return list(preds)
    for (i,x,y,p),(j,x2,y2,p2) in zip(run(), run(micro_batch_tokens=48)):
        assert i == j and torch.equal(x, x2) and torch.equal(y, y2)
        close(p, p2, 1e-10)

def test_trimmed_into_one_micro_batch():
    "A loader batch that fits once its padding is trimmed: what comes after it sees predictions of all places, in the loader's order"
    seen = []
    def after_batch(learn): seen.append((learn.iter, learn.xb[0], learn.yb[0], learn.pred))
    def run(**kwargs):
        seen.clear()
        short = [(t[:5], t[:5].roll(-1)) for t in texts[:12]]
        dl = Batches(short, bs=4)
        dl.create_batch = lambda b: [F.pad(t, (0, 12-t.shape[1]), value=v) for t,v in zip(padded_pair(b), (pad, -100))]
        set_seed(0)
        learn = Learner(DataLoaders(dl, dl, device='cpu'), Words().double(), nn_loss, SGD, metrics=accuracy_of_words,
                        cbs=[GradientAccumulation(4, **kwargs), On('after_batch', after_batch)])
        learn.recorder.train_metrics,learn.logger = True,noop
        learn.remove_cb(ProgressCallback)
        learn.fit(1, 0.)
        return list(seen),[*learn.recorder.values[0]]
    (whole,values),(trimmed,same) = run(),run(micro_batch_tokens=24)     # 4 texts of 12 places, of which they need 5
    assert len(whole) == 3 and same == pytest.approx(values)
    for (i,x,y,p),(j,x2,y2,p2) in zip(whole, trimmed):
        assert i == j and torch.equal(x, x2) and torch.equal(y, y2) and p.shape == p2.shape
        for a,b in zip(p, p2): close(a[:5], b[:5], 1e-10)
def padded_pair(b): return padded([x for x,_ in b]),padded([y for _,y in b], value=-100)

def padding_first(x): return x.gather(1, (x != pad).long().argsort(dim=1, stable=True))

@pytest.mark.parametrize('change', [lambda x, y: (padding_first(x), y), lambda x, y: (x[:-3], y[:-3])], ids=['moved','fewer'])
def test_batch_that_a_callback_changes(change):
    def changed(learn): x,y = change(learn.x, learn.y); learn.xb,learn.yb = (x,),(y,)
    def grads_of(**kwargs):
        learn = masked_learner('transformer', GradientAccumulation(60, unit='tokens', **kwargs), On('before_batch', changed))
        learn.fit(1, .1)
        return [s.grad for s in learn.spy.steps]
    for a,b in zip(grads_of(), grads_of(micro_batch_tokens=48), strict=True): assert rel_err(a, b) < 1e-12

def test_values_for_the_items_of_a_loss():
    "What a callback gives the loss for each item follows the rows"
    class Weighted(nn.Module):
        def forward(self, pred, y): return (F.cross_entropy(pred, y, reduction='none')*self.w).mean()
    def weigh(learn): learn.loss_func.w = learn.xb[0].sum(1).double()/50
    def run(**kwargs):
        learn = masked_learner('transformer', GradientAccumulation(16, check_loss=False, **kwargs),
                               On('before_batch', weigh, training=None))
        learn.loss_func = Weighted()
        learn.fit(1, .1)
        return weights(learn.model)
    close(run(), run(micro_batch_tokens=48), 1e-10)

def test_values_that_a_loss_keeps():
    "A step of two loader batches has the values of both, in the loader's order"
    class Keeps(nn.Module):
        def forward(self, pred, y):
            losses = F.cross_entropy(pred, y, reduction='none')
            self.losses = losses.detach()
            return losses.mean()
    kept = []
    def keep(learn):
        if learn.gradient_accumulation.closes: kept.append(learn.loss_func.losses)
    def run(accum, **kwargs):
        kept.clear()
        learn = masked_learner('transformer', GradientAccumulation(accum, **kwargs), On('after_batch', keep))
        learn.loss_func = Keeps()
        learn.fit(1, 0.)
        return torch.cat(kept)
    close(run(16), run(32, micro_batch_tokens=48), 1e-10)

@pytest.mark.parametrize('name', ['transformer','every_word'])
def test_padding_that_is_not_masked_is_told(name):
    learn = masked_learner(name, GradientAccumulation(32, micro_batch_tokens=48))
    learn.model.masks = False
    before = weights(learn.model)
    with pytest.warns(UserWarning, match=r'does not mask padding.*change by [\d.]+% when they are padded to') as told: learn.fit(2, .1)
    assert len([w for w in told if 'mask padding' in str(w.message)]) == 1

@pytest.mark.filterwarnings('ignore:The model changes its buffers n in each forward pass')
def test_trial_leaves_no_trace():
    "Trying whether padding is masked changes neither buffers nor random numbers"
    class Trace(Attention):
        def __init__(self): super().__init__(); self.drop = nn.Dropout(.3); self.register_buffer('n', torch.zeros(()))
        def forward(self, x): self.n += 1; return self.drop(super().forward(x))
    def run(tried):
        learn = masked_learner('transformer', GradientAccumulation(32, micro_batch_tokens=48))
        learn.model = (set_seed(0), Trace().double())[1]
        if not tried: learn.add_cb(On('before_train', lambda learn: setattr(learn.gradient_accumulation.facts.wide, 'tried', {Cut})))
        learn.fit(1, .1)
        return weights(learn.model),learn.model.n
    (a,n),(b,m) = run(True),run(False)
    assert torch.equal(a, b) and n == m

def test_auto_halves_tokens():
    class Small(Attention):
        room = 90
        def forward(self, x):
            if x.numel() > self.room: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(x)
    learn = masked_learner('transformer', GradientAccumulation(32, micro_batch_tokens='auto'), StepLogger())
    learn.model = (set_seed(0), Small().double())[1]
    with redirect_stdout(out := io.StringIO()): learn.fit(1, .1)
    learn.model.room = math.inf
    check_steps(learn, 1e-12)
    assert re.search(r'going on with micro-batches of \d+ tokens', out.getvalue()) and max(n*w for n,w in learn.model.shapes[-30:]) > 45
    assert learn.step_logger.to_df().micro_tokens.max() <= 90

@pytest.mark.filterwarnings("ignore:accum_bs=1000000 is more than")
def test_one_sync_for_each_loader_batch():
    "However many micro-batches there are, and with fastai's text type, which a callback of fastai's takes away"
    from bench.measure import SyncCounter
    def n_syncs(n, most, make):
        pairs = [(TensorText(t), TensorText(u)) for t,u in (language*3)[:n]] if make else (language*3)[:n]
        learn = text_learner('language', GradientAccumulation(10**6, unit='tokens', micro_batch_tokens=most), pairs=pairs, bs=8, spy=False)
        learn.dls.loaders[1] = DataLoader([], bs=8)
        with SyncCounter() as syncs: learn.fit(1, .1)
        return sum(v for k,v in syncs.sites.items() if k.startswith('accumulation/'))
    for typed in (False, True):
        few = n_syncs(48, 60, typed)
        assert n_syncs(96, 60, typed) == few+6 and n_syncs(48, 25, typed) == few

@pytest.mark.parametrize('most,says', [
    (48, r"micro_batch_tokens='auto'\), or a smaller number"), ('auto', 'before_train`:\n\tNot even one')])
def test_the_largest_batch_does_not_fit(most, says):
    "`LargestFirst` says what to write: it goes with the argument that is there"
    learn = masked_learner('transformer', GradientAccumulation(32, micro_batch_tokens=most), LargestFirst())
    def full(*_): raise torch.OutOfMemoryError('full')
    learn.model.register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError, match=says): learn.fit(1, .1)

@pytest.mark.parametrize('kwargs,says', [
    (dict(micro_batch_size=4), 'micro_batch_size=4'), (dict(n_items=len), 'n_items'), (dict(micro_batch_tokens=0), 'micro_batch_tokens=0'),
    (dict(coupled=True), 'coupled=True')])
def test_not_with_tokens(kwargs, says):
    with pytest.raises(ValueError, match=says): GradientAccumulation(64, **{**dict(micro_batch_tokens=64), **kwargs})

def test_lists_are_refused():
    x,y = padded(texts[:8]),torch.zeros(8, dtype=torch.long)
    class Named(Texts):
        def forward(self, x, names): return super().forward(x)
    batches = [(x, [str(i) for i in range(8)], y)]
    dls = DataLoaders(batches, batches, device='cpu')
    dls.n_inp = 2
    learn = Learner(dls, Named(), CrossEntropyLossFlat(), SGD, cbs=GradientAccumulation(micro_batch_tokens=20))
    with learn.no_bar(), pytest.raises(TypeError, match='a loader batch has a str'): learn.fit(1)

def test_no_memory_advice():
    "Shapes do not tell how long texts are"
    with pytest.raises(ValueError, match='the lengths of texts, which micro_batch_tokens sorts by, are values'):
        masked_learner('transformer', GradientAccumulation(micro_batch_tokens=64)).memory_advice()

def check_told_once(learn, reference, told, off):
    "And the weights are off by more than `off`"
    with pytest.warns(UserWarning, match=told) as ws: learn.fit(2, .1)
    reference.fit(2, .1)
    assert rel_err(weights(learn.model), weights(reference.model)) > off
    assert len([w for w in ws if re.search(told, str(w.message))]) == 1

class Places(Callback):
    "A term that averages over rows and places, padding included, as RNNRegularizer's"
    order,run_valid = 5,False
    def after_pred(self): self.learn.pred,self.h = self.pred
    def after_loss(self): self.learn.loss_grad = self.loss_grad + 5*self.h.pow(2).mean()

class WithOutputs(Attention):
    def forward(self, x):
        mask,keep = x == pad,(x != pad)[...,None]
        h = self.layer(self.emb(x), src_key_padding_mask=mask)
        pred = self.out((h*keep).sum(1)/keep.sum(1))
        return (pred,h.masked_fill(~keep, 0)) if self.training else pred

def test_term_of_a_callback_is_told():
    "It sees trimmed texts. With weight= and by rows nothing is told, and by rows it is exact"
    def run(**kwargs):
        learn = masked_learner('transformer', GradientAccumulation(**kwargs), Places())
        learn.model = (set_seed(0), WithOutputs().double())[1]
        return learn
    told = r'callback \(Places\) has changed the loss .* micro_batch_tokens .* Use micro_batch_size'
    check_told_once(run(micro_batch_tokens=48), whole := run(micro_batch_size=16), told, .01)
    (rows := run(micro_batch_size=3)).fit(2, .1)
    run(micro_batch_tokens=48, weight=lambda learn: len(learn.x)).fit(1, .1)
    run(micro_batch_tokens=10000).fit(1, .1)                             # nothing is trimmed
    assert rel_err(weights(rows.model), weights(whole.model)) < 1e-12

@pytest.mark.parametrize('exact', [False, True])
def test_text_classifiers_are_refused(exact):
    "Before training: fastai's encoder reads chunks. Batches in tokens are those of rows"
    from test_encoder import lens, make
    def run(*cbs, **kwargs):
        learn = make(*cbs, exact=exact, **kwargs)
        learn.fit(1, .1)
        return weights(learn.model)
    refused = make(GradientAccumulation(micro_batch_tokens=30), exact=exact)
    before = weights(refused.model)
    with pytest.raises(ValueError,
                       match="has fastai's SentenceEncoder.*Use micro_batch_size for it.*unit='tokens' works"):
        refused.fit(1, .1)
    assert torch.equal(weights(refused.model), before)
    if exact: close(run(GradientAccumulation(sum(lens), unit='tokens'), bs=5), run(), 1e-5)

class Normed(Attention):
    def __init__(self): super().__init__(); self.norm = nn.BatchNorm1d(n_words)
    def forward(self, x): return self.norm(super().forward(x))

def test_batchnorm_is_told():
    "But not if BnFreeze keeps it from training"
    from fastai.callback.training import BnFreeze
    def run(*cbs, frozen=False, **kwargs):
        learn = masked_learner('transformer', GradientAccumulation(**kwargs), *cbs)
        learn.model = (set_seed(0), Normed().double())[1]
        learn.model.norm.requires_grad_(not frozen)
        return learn
    told = r"BatchNorm: 1 layer sees \d+ items at a time, .*micro_batch_size=\d+, coupled='batchnorm'"
    check_told_once(run(micro_batch_tokens=48), run(micro_batch_size=16), told, .01)
    whole,ours = run(BnFreeze, frozen=True, micro_batch_size=16),run(BnFreeze, frozen=True, micro_batch_tokens=48)
    for learn in (whole, ours): learn.fit(2, .1)
    close(weights(ours.model), weights(whole.model), 1e-10)

class Featured(Attention):
    "With an input beside the texts: features, or how much each word counts"
    def __init__(self): super().__init__(); self.of_features = nn.Linear(1, n_words)
    def forward(self, x, f): return super().forward(x) + self.of_features(f[...,None].flatten(1, -2)).tanh().sum(1)

class WithMask(Attention):
    "Weighs words with an attention mask"
    def forward(self, x):
        x,mask = x['ids'],x['attention_mask']
        h = self.layer(self.emb(x), src_key_padding_mask=mask == 0)*mask[...,None]
        return self.out(h.sum(1)/mask.sum(1, keepdim=True))

def learner_of_batches(batches, model, *cbs, n_inp=2):
    set_seed(0)
    dls = DataLoaders(batches, batches, device='cpu')
    dls.n_inp = n_inp
    learn = Learner(dls, model().double(), CrossEntropyLossFlat(), SGD, cbs=cbs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def test_features_as_many_as_tokens():
    """In the first batch they cannot be told from numbers of tokens: refused before anything is wrong. (n, 1, features)
    is exact, and so is another number"""
    x,y = padded(texts[:16]),torch.arange(16)%5
    features = torch.randn(16, x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    def run(*fs, **kwargs):
        learn = learner_of_batches([(x,f,y) for f in fs], Featured, GradientAccumulation(**kwargs))
        learn.fit(2, .1)
        return weights(learn.model)
    with pytest.raises(TypeError, match=r'float64 and shape \(16, \d+\) is as wide.*use micro_batch_size\.$'):
        run(features, micro_batch_tokens=48)
    for fs in ([features[:,None]], [features[:,1:]], [features[:,1:], features]):
        close(run(*fs, micro_batch_tokens=48), run(*fs, micro_batch_size=16), 1e-10)

class Coded(Attention):
    "With codes beside the texts: a column has a meaning of its own"
    def __init__(self): super().__init__(); self.of_codes = nn.Embedding(40, n_words)
    def forward(self, x, codes, *types):
        places = torch.arange(codes.shape[1], device=x.device)
        return super().forward(x + sum(t for t in types)) + self.of_codes((3*codes + places)%40).mean(1)

class Columns(Coded):
    "Needs all its codes"
    def __init__(self, n=19): super().__init__(); self.of_codes = nn.Linear(n, n_words)
    def forward(self, x, codes): return Attention.forward(self, x) + self.of_codes(codes.double()).tanh()

@pytest.mark.parametrize('first_is_wide', [True, False])
@pytest.mark.parametrize('types', [False, True])
@pytest.mark.parametrize('model', [Coded, Columns])
def test_codes_as_many_as_tokens(model, types, first_is_wide):
    "Integers, which are tokens or features: what trimming them changes says it, and the widths of other batches. Exact, without a word"
    if types and model is Columns: return
    groups = [texts[:16], texts[16:32], [t[:7] for t in texts[32:]]]
    W = max(map(len, groups[0]))
    batches = []
    for i,g in enumerate(groups if first_is_wide else groups[::-1]):
        x = padded(g)
        codes = torch.randint(5, (len(x), W), generator=torch.Generator().manual_seed(i))
        batches.append((x, codes, *[torch.zeros_like(x)]*types, torch.arange(len(x))%5))
    def run(**kwargs):
        make = partial(Columns, W) if model is Columns else model
        learn = learner_of_batches(batches, make, GradientAccumulation(**kwargs), n_inp=2+types)
        learn.fit(2, .1)
        return weights(learn.model)
    close(run(micro_batch_tokens=48), run(micro_batch_size=16), 1e-10)

class Pairs(Attention):
    "Compares two texts"
    def mean(self, x):
        keep = (x != pad)[...,None]
        return (self.emb(x).tanh()*keep).sum(1)/keep.sum(1)
    def forward(self, a, b): return self.out(self.mean(a)*self.mean(b))

@pytest.mark.parametrize('first', [False, True])
def test_pairs_of_texts_that_are_always_as_wide(first):
    "Padded to a fixed width, and the second text is short where the first is shortest: the row that loses most shows that it is no mask"
    batches = []
    for i in range(2):
        a = sorted(texts[16*i:16*i+16], key=len)
        b = [t[:1] if len(t) < 4 else t.repeat(18)[:18-k%5] for k,t in enumerate(a)]
        whole = texts[27].repeat(18)[:18]
        x,z = (padded([*ts, whole], first) for ts in (a, b))
        batches.append((x, z, torch.arange(17)%5))
    def run(**kwargs):
        learn = learner_of_batches(batches, Pairs, GradientAccumulation(**kwargs))
        learn.fit(2, .1)
        return weights(learn.model)
    close(run(micro_batch_tokens=48), run(micro_batch_size=17), 1e-10)

class CodesFirst(Coded):
    def forward(self, codes, x): return super().forward(x, codes)

def test_codes_before_texts():
    "fastai's type tells which the texts are"
    batches = []
    for i,n in enumerate((16, 14)):
        x = padded(texts[i*16:i*16+n])
        codes = torch.randint(5, (n, 9), generator=torch.Generator().manual_seed(i))
        batches.append((codes, TensorText(x), torch.arange(n)%5))
    def run(**kwargs):
        learn = learner_of_batches(batches, CodesFirst, GradientAccumulation(60, **kwargs), StepLogger())
        learn.fit(2, .1)
        return weights(learn.model),learn.step_logger.to_df()
    (a,df),(b,_) = run(unit='tokens', micro_batch_tokens=48),run(unit='tokens')
    close(a, b, 1e-10)
    assert df.tokens.sum() == 2*(sum(lengths[:16]) + sum(lengths[16:30]))

def test_wide_inputs_that_do_not_fit():
    "If neither way is right, it is said"
    class Both(Coded):
        def forward(self, x, codes): return super().forward(x, codes) + x.shape[1]/50
    x,y = padded(texts[:16]),torch.arange(16)%5
    codes = torch.randint(5, x.shape, generator=torch.Generator().manual_seed(0))
    def run(model, n_inp=2): return learner_of_batches([(x, codes, y)], model, GradientAccumulation(micro_batch_tokens=48), n_inp=n_inp)
    with pytest.warns(UserWarning, match='does not mask padding'): run(Both).fit(1, .1)
    class Strict(Columns):
        def forward(self, x, codes):
            if x.shape[1] != self.of_codes.in_features: raise ValueError('another number of words')
            return super().forward(x, codes)
    with pytest.raises(TypeError, match=r'int64 and shape \(16, \d+\) is as wide'): run(partial(Strict, x.shape[1])).fit(1, .1)

def test_padding_is_tried_in_each_epoch():
    "A head of zeros says nothing of padding at first"
    def run():
        learn = masked_learner('transformer', GradientAccumulation(32, micro_batch_tokens=48))
        learn.model.masks = False
        for p in learn.model.out.parameters(): nn.init.zeros_(p)
        return learn
    run().fit(1, .1)
    with pytest.warns(UserWarning, match='does not mask padding') as told: run().fit(3, .1)
    assert len([w for w in told if 'mask padding' in str(w.message)]) == 1

def test_error_in_a_micro_batch():
    "Says where, and nothing of coupled, which does not go with micro_batch_tokens"
    learn = masked_learner('transformer', GradientAccumulation(micro_batch_tokens=48, check_loss=False))
    def loss(pred, y): raise RuntimeError('no loss')
    learn.loss_func = loss
    with pytest.raises(RuntimeError,
                       match=r"no loss(.|\n)*In micro-batch 1 of \d+, with \d+ of the loader batch's 16 items, in 1\d of 1\d places") as e:
        learn.fit(1)
    assert 'coupled' not in str(e.value)

class ClassesFirst(Attention):
    def forward(self, x): return super().forward(x).transpose(1, 2)

def test_classes_before_tokens():
    "Predictions (n, classes, tokens) are put together again, in validation and for metrics"
    def run(**kwargs):
        learn = masked_learner('every_word', GradientAccumulation(32, **kwargs),
                               metrics=lambda pred, y: accuracy_of_words(pred.transpose(1, 2), y))
        learn.recorder.train_metrics = True
        learn.model,learn.loss_func = (set_seed(0), ClassesFirst(per_word=True).double())[1],nn.CrossEntropyLoss()
        learn.fit(2, .1)
        return learn
    whole,ours = run(),run(micro_batch_tokens=48)
    close(weights(whole.model), weights(ours.model), 1e-10)
    for a,b in zip(whole.recorder.values, ours.recorder.values): close(list(a), list(b), 1e-6)

class Translates(Attention):
    "Says something of each word of another text, which it sees as inputs, too"
    def __init__(self): super().__init__(); self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0., batch_first=True)
    def forward(self, x, before):
        mask = x == pad
        h = self.layer(self.emb(x), src_key_padding_mask=mask)
        return self.out(self.decoder(self.emb(before), h, memory_key_padding_mask=mask))

@pytest.mark.parametrize('widths', [(15, 15, 9), (9, 15, 17), (15, 18, 17)])
def test_translations(widths):
    "Targets are of another text, which may be as wide"
    batches = []
    for i,w in enumerate(widths):
        others = [(t.repeat(20)[:1 + (7*j + i)%w]) for j,t in enumerate(texts[16*i:16*i+16])]
        others[0] = others[0].repeat(20)[:w]
        y = padded(others, value=-100)
        batches.append((padded(texts[16*i:16*i+16]), y.masked_fill(y == -100, pad).roll(1), y))
    assert [b[0].shape[1] for b in batches] == [15, 18, 17]
    def run(**kwargs):
        learn = learner_of_batches(batches, Translates, GradientAccumulation(**kwargs))
        learn.loss_func = nn_loss
        learn.fit(2, .1)
        return weights(learn.model)
    close(run(micro_batch_tokens=48), run(micro_batch_size=16), 1e-10)

@pytest.mark.parametrize('kwargs,says', [(dict(accum_bs=5000, remainder='drop'), 'an epoch has 212 tokens, and all of them are dropped'),
                                         (dict(accum_bs=2), 'a step takes whole ones: each is a step')])
def test_sizes_that_do_not_fit_are_told(kwargs, says):
    learn = text_learner('classes', GradientAccumulation(unit='tokens', **kwargs), spy=False)
    with pytest.warns(UserWarning, match=says) as told: learn.fit(2, .1)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        text_learner('classes', GradientAccumulation(60, unit='tokens', remainder='drop')).fit(2, .1)
        text_learner('classes', GradientAccumulationSchedule(2, 60, unit='tokens')).fit(2, .1)

def test_noise_scale_by_length_is_refused():
    "Texts of like lengths are no random samples: where labels depended on lengths, the estimate was six times too large"
    learn = masked_learner('transformer', GradientAccumulation(60, unit='tokens', micro_batch_tokens=48), GradientNoiseScale())
    with pytest.raises(ValueError, match='GradientNoiseScale takes the micro-batches of a step for random samples'): learn.fit(1)

class MixLabels(Callback):
    "Mixes the label of a text with that of another one, as MixUp does"
    run_valid = False
    def before_train(self): self.old_lf,self.learn.loss_func = self.learn.loss_func,self.lf
    def after_train(self): self.learn.loss_func = self.old_lf
    def before_batch(self):
        order = torch.arange(len(self.y)).flip(0)
        self.lam = torch.linspace(.5, 1, len(self.y))
        self.yb1 = tuple(y[order] for y in self.yb)
    def lf(self, pred, *yb):
        if not self.training: return self.old_lf(pred, *yb)
        with NoneReduce(self.old_lf) as lf:
            a,b = (lf(pred, *ys).view(len(pred), -1).mean(1) for ys in (self.yb1, yb))
            return torch.lerp(a, b, self.lam).mean()

def test_mixed_labels():
    "The tuple of other targets follows the rows. Those of each token are refused: another text may be longer"
    def run(name, **kwargs):
        learn = masked_learner(name, GradientAccumulation(32, **kwargs), MixLabels())
        learn.loss_func = CrossEntropyLossFlat()
        learn.fit(2, .1)
        return weights(learn.model)
    close(run('transformer', micro_batch_tokens=48), run('transformer'), 1e-6)
    with pytest.raises(TypeError, match='targets of another text'): run('every_word', micro_batch_tokens=48)

@pytest.mark.parametrize('dtype', [torch.float64, torch.long, torch.bool])
def test_attention_mask(dtype):
    x,y = padded(texts[:16]),torch.arange(16)%5
    def run(**kwargs):
        learn = learner_of_batches([(dict(ids=x, attention_mask=(x != pad).to(dtype)),y)], WithMask,
                                   GradientAccumulation(**kwargs), n_inp=1)
        learn.fit(2, .1)
        return weights(learn.model)
    close(run(micro_batch_tokens=48), run(micro_batch_size=16), 1e-10)
