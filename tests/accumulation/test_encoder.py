"Text classifiers: with `exact_sentence_encoder` micro-batches are the whole batch, and fastai's own encoder is told"
import pickle, pytest
from fastai.text.all import AWD_LSTM, SortedDL, TensorText, awd_lstm_clas_config, get_text_classifier, pad_input_chunk, rnn_cbs
from fastai.text.models.core import SentenceEncoder
from reference import *
from fastaccum.accumulation.text import exact_sentence_encoder, left_out_message
from fastaccum.core.microbatch import part_sizes

bptt,lens = 7,[1, 2, 3, 6, 7, 8, 9, 13, 14, 15, 20, 22, 27, 29]
texts = [TensorText(torch.randint(2, 40, (n,), generator=torch.Generator().manual_seed(n))) for n in lens]

def classifier(exact=True, max_len=140, **kwargs):
    "fastai's, almost without dropout (with none at all AWD_LSTM fails), and without BatchNorm in its head"
    torch.manual_seed(0)
    config = {k: 1e-9 if k.endswith('_p') else v for k,v in awd_lstm_clas_config.items()}
    model = get_text_classifier(AWD_LSTM, 40, 4, seq_len=bptt,
                                config={**config, 'emb_sz': 8, 'n_hid': 12, 'n_layers': 2, **kwargs}, ps=[0.],
                                max_len=max_len)
    model[1].layers = nn.Sequential(nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 4))
    return exact_sentence_encoder(SimpleNamespace(model=model)).model if exact else model

def padded(texts): return torch.stack([o[0] for o in pad_input_chunk([(t,) for t in texts], seq_len=bptt)])
def grad(model, xs, ys):
    model.train(); model.zero_grad()
    for x,y in zip(xs, ys): (F.cross_entropy(model(x)[0], y, reduction='sum')/len(texts)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

@pytest.mark.parametrize('kw', [dict(max_len=140), dict(max_len=10), dict(bidir=True)], ids=str)
def test_micro_batches_are_the_batch(kw):
    "Gradients, in any order, split, and in loader batches that are padded on their own. fastai's are off"
    model,x,y = classifier(**kw),padded(texts[::-1]),torch.arange(14)%4
    whole = grad(model, [x], [y])
    assert rel_err(grad(model, x.split(5), y.split(5)), whole) < 1e-6
    order = torch.randperm(14)
    assert rel_err(grad(model, [x[order]], [y[order]]), whole) < 1e-6
    own = [padded(texts[::-1][i:i+5]) for i in (0, 5, 10)]
    assert {len(o[0]) for o in own} == {29, 14, 6} and rel_err(grad(model, own, y.split(5)), whole) < 1e-6
    theirs = classifier(exact=False, **{**kw, 'max_len': 140})
    assert rel_err(grad(theirs, x.split(4), y.split(4)), grad(theirs, [x], [y])) > 1e-3

@pytest.mark.parametrize('max_len', [None, 14, 140])
def test_as_fastai_alone(max_len):
    "What fastai predicts for a text without company"
    ours,theirs = (classifier(exact, max_len).eval() for exact in (True, False))
    alone = torch.cat([theirs(t[None])[0] for t in texts])
    assert rel_err(ours(padded(texts))[0].flatten(), alone.flatten()) < 1e-6

def make(*cbs, exact=False, bs=14, which=texts, model=None):
    dls = DataLoaders(
        *[SortedDL([(t,TensorCategory(len(t)%4)) for t in which], bs=bs,
                   before_batch=partial(pad_input_chunk, seq_len=bptt), num_workers=0) for _ in range(2)])
    learn = Learner(dls, model or classifier(False), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=[*rnn_cbs(), *cbs])
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return exact_sentence_encoder(learn) if exact else learn

@pytest.mark.slow
def test_learners():
    "A whole fit, validation included; nothing is told"
    runs = [make(*cbs, exact=True)
            for cbs in ([], [GradientAccumulation(micro_batch_size=4)],
                        [GradientAccumulation(14, micro_batch_size=5, coupled=True)])]
    runs += [make(GradientAccumulation(14), exact=True, bs=5)]
    for l in runs: l.fit(2, .1)
    for l in runs[1:]:
        assert (rel_err(weights(l.model), weights(runs[0].model)) < 1e-6
                and torch.stack(l.recorder.losses).allclose(torch.stack(runs[0].recorder.losses)))

told = "fastai's SentenceEncoder leaves out"
@pytest.mark.parametrize('cbs,bs,which,n', [
    # the loader batch is the big batch
    (lambda: [], 14, texts, 0), (lambda: [GradientAccumulation(14)], 14, texts, 0),
    (lambda: [GradientAccumulation(micro_batch_size=4)], 14, texts, 1), (lambda: [GradientAccumulation(14)], 7, texts, 1),
    (lambda: [GradientAccumulation(micro_batch_size='auto')], 14, texts, 0),                              # one piece fits
    (lambda: [GradientAccumulation(micro_batch_size=4)], 14, texts[:5], 0),                               # one chunk
    # 20, 22 and 27 tokens: all end in the last chunk
    (lambda: [GradientAccumulation(micro_batch_size=2)], 14, texts[10:13], 0)],
    ids=['plain', 'whole', 'split', 'loader batches', 'auto', 'one chunk', 'nothing lost'])
def test_told_once(cbs, bs, which, n, recwarn):
    learn = make(*cbs(), bs=bs, which=which)
    for _ in range(2): learn.fit(1, .1)
    assert sum(told in str(w.message) for w in recwarn) == n

def test_figures():
    "What is left out is counted as the encoder does it"
    enc = classifier(False)[0]
    seen = []
    enc.module.register_forward_pre_hook(lambda m, args: seen.append((args[0] != 1).sum().item()))
    for order in (slice(None), torch.randperm(14)):
        x = padded(texts[::-1])[order]
        for size in (14, 5):
            seen.clear()
            for part in x.split(part_sizes(14, size)): enc(part)
            n = sum(lens) - sum(seen)
            assert n and f'{n} tokens' in left_out_message(enc, x, size)

def test_weights_go_both_ways(tmp_path):
    theirs,ours = make(),make(exact=True)
    with torch.no_grad():
        for p in theirs.model.parameters(): p += .1
    for l in (theirs, ours): l.path = tmp_path
    theirs.fit(1, .1); theirs.save('m')
    ours.load('m')
    assert weights(ours.model).equal(weights(theirs.model))
    ours.fit(1, .1); ours.save('m'); theirs.load('m')
    assert weights(ours.model).equal(weights(theirs.model))
    assert exact_sentence_encoder(ours) is ours and exact_sentence_encoder(theirs) is theirs
    again = pickle.loads(pickle.dumps(ours.model))
    assert type(again[0]) is type(theirs.model[0]) is not SentenceEncoder and weights(again).equal(weights(ours.model))

# -- exact=True, with fastai's own dropout and head
def with_dropout(which, *cbs):
    "A classifier as fastai makes it"
    def made():
        torch.manual_seed(0)
        config = {**awd_lstm_clas_config, 'emb_sz': 8, 'n_hid': 12, 'n_layers': 2}
        return get_text_classifier(AWD_LSTM, 40, 4, seq_len=bptt, config=config, drop_mult=.5)
    learn = make(*cbs, model=made(), which=which)
    set_seed(1)
    learn.fit(2, .1)
    return weights(learn.model)

@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fastai's SentenceEncoder leaves out")
def test_the_same_run():
    "Of texts that fit one chunk it is plain fastai's; for longer ones how much is drawn depends on them, and an error says so"
    pytest.importorskip('greenlet')
    short = [t for t in texts if len(t) <= bptt]*4
    split = GradientAccumulation(micro_batch_size=5, exact=True)
    assert rel_err(with_dropout(short, split), with_dropout(short)) < 1e-5
    with pytest.raises(ValueError, match="as fastai's text classifiers do for texts that go on|whose number depends on the items"):
        with_dropout(texts, GradientAccumulation(micro_batch_size=5, exact=True))
