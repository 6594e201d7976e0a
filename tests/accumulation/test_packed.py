"Packed texts are cut where a text begins"
import pytest, torch
from fastcore.test import test_close as close, test_eq as eq
from torch.utils.data import DataLoader as TorchLoader
from reference import *
from fastaccum.accumulation.packed import find_packed, texts_of
from fastaccum.logs.steps import StepLogger

g = torch.Generator().manual_seed(3)
texts = [torch.randint(3, 30, (n,), generator=g) for n in torch.randint(3, 12, (36,), generator=g).tolist()]
def joined(ts): return torch.cat([*ts])
def positions(ts): return joined(torch.arange(len(t)) for t in ts)
def before(ts): return tensor([0, *map(len, ts)]).cumsum(0).int()
def targets(ts): return joined(torch.cat([t[1:], tensor([-100])]) for t in ts)

class Reader(nn.Module):
    "Each token sees the mean of the tokens of its text so far; `text` says which tokens are of one text"
    def __init__(self, apart=True):
        super().__init__()
        self.emb,self.out,self.apart = nn.Embedding(30, 8),nn.Linear(8, 30),apart
    def read(self, ids, text):
        sees = torch.ones(ids.shape[-1], ids.shape[-1], device=ids.device).tril().to(self.out.weight.dtype)
        if self.apart: sees = sees*(text[...,None,:] == text[...,:,None])
        return self.out((sees @ self.emb(ids)/sees.sum(-1, keepdim=True)).tanh())

class InRows(Reader):
    def forward(self, ids, position_ids): return self.read(ids, (position_ids == 0).cumsum(-1))

class Flat(Reader):
    "As attention of variable length takes them: no dimension of rows, and the tokens before each text"
    def forward(self, ids, cu_seqlens, max_seqlen=None):
        places = torch.arange(len(ids))
        return self.read(ids, torch.searchsorted(cu_seqlens.long(), places, right=True))

class Dict(InRows):
    def forward(self, b): return super().forward(b['input_ids'], b['position_ids'])

def rows(k):
    "`k` texts in each row"
    def pack(ts):
        ts = [ts[i:i+k] for i in range(0, len(ts), k)]
        most = max(sum(map(len, o)) for o in ts)
        def wide(f, pad): return torch.stack([F.pad(f(o), (0, most-sum(map(len, o))), value=pad) for o in ts])
        return wide(joined, 0),wide(positions, 0),wide(targets, -100)
    return pack

def one_row(ts): return joined(ts)[None],positions(ts)[None],targets(ts)[None]
def flat(ts): return joined(ts),before(ts),targets(ts)
def flat_with_length(ts): return joined(ts),before(ts),tensor(12),targets(ts)
def of_dict(ts): return dict(input_ids=joined(ts)[None], position_ids=positions(ts)[None]),targets(ts)[None]
def flat_positions(ts): return joined(ts),positions(ts),targets(ts)
ways = dict(one_row=(one_row, InRows), rows=(rows(4), InRows), flat=(flat, Flat), flat_with_length=(flat_with_length, Flat),
            dict=(of_dict, Dict), flat_positions=(flat_positions, InRows))

def packed_learner(way, *cbs, n=12, loss_func=None, model=None):
    collate,kind = ways[way]
    set_seed(0)
    dls = DataLoaders(*[TorchLoader(texts, n, collate_fn=collate) for _ in range(2)])
    model = kind() if model is None else model
    learn = Learner(dls, model, ifnone(loss_func, CrossEntropyLossFlat()), SGD, cbs=[*cbs])
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def weights(learn): return nn.utils.parameters_to_vector(learn.model.parameters()).detach()

def off(a, b, start): return float((weights(a)-weights(b)).norm()/(weights(b)-start).norm())

class Calls(Callback):
    order = 7
    def before_fit(self):
        self.shapes = []
        self.handle = self.learn.model.register_forward_pre_hook(self.note)
    def note(self, model, xb):
        if model.training: self.shapes.append([*(xb[0]['input_ids'] if isinstance(xb[0], dict) else xb[0]).shape])
    def after_fit(self): self.handle.remove()

@pytest.mark.parametrize('weight', [None, 'classes'])
@pytest.mark.parametrize('way', ways)
def test_the_step_of_the_whole_row(way, weight):
    "Weights, losses and the loss of the validation are those of uncut rows, and no micro-batch has more tokens than asked for"
    loss_func = CrossEntropyLossFlat(weight=torch.linspace(.1, 3, 30)) if weight else None
    calls = Calls()
    whole = packed_learner(way, loss_func=loss_func)
    cut = packed_learner(way, GradientAccumulation(micro_batch_tokens=30), calls, loss_func=loss_func)
    start = weights(whole)
    for learn in (whole, cut): learn.fit(2, .5)
    assert off(cut, whole, start) < 3e-6
    close(whole.recorder.losses, cut.recorder.losses, 1e-6)
    assert all(abs(a/b-1) < 3e-6 for a,b in zip(whole.recorder.values[-1], cut.recorder.values[-1]))
    assert len(calls.shapes) >= 2*3*3 and all(torch.Size(s).numel() <= 30 for s in calls.shapes)

@pytest.mark.parametrize('way', ways)
def test_predictions(way):
    "Those of `get_preds`, and what metrics of the training see, are of the whole loader batch"
    whole,cut = packed_learner(way),packed_learner(way, GradientAccumulation(micro_batch_tokens=30))
    for learn in (whole, cut):
        learn.recorder.train_metrics = True
        learn.metrics = L(mk_metric(lambda pred, *yb: float(pred.flatten().cumsum(0).mean())))
        learn.fit(1, .5)
    assert all(abs(a/b-1) < 3e-6 for a,b in zip(whole.recorder.values[-1], cut.recorder.values[-1]))

@pytest.mark.parametrize('way', ['one_row', 'rows', 'flat'])
@pytest.mark.parametrize('unit,n', [('items', 12), ('tokens', 90)])
def test_counts(way, unit, n):
    "Texts are what `accum_bs` counts, or the tokens of them that the loss counts"
    log = StepLogger()
    learn = packed_learner(way, GradientAccumulation(n, unit=unit, micro_batch_tokens=20), log, n=4)
    learn.fit(1, .1)
    counted = [len(t)-1 for t in texts] if unit == 'tokens' else [1]*36
    batches = [sum(counted[i:i+4]) for i in range(0, 36, 4)]
    steps = [0]
    for i,b in enumerate(batches):
        steps[-1] += b
        if steps[-1] >= n and i+1 < len(batches): steps.append(0)
    eq(len(learn.recorder.losses), len(steps))
    logged = log.to_df()
    if unit == 'tokens': eq([*logged['tokens']], steps)
    else: eq([*logged['items']], steps)
    assert logged['items'].sum() == 36

@pytest.mark.parametrize('way', ['one_row', 'rows', 'flat'])
def test_steps_of_several_rows(way):
    "Twelve texts in rows of four, each cut, make the step of twelve texts"
    whole = packed_learner(way)
    cut = packed_learner(way, GradientAccumulation(12, micro_batch_tokens=15), n=4)
    start = weights(whole)
    for learn in (whole, cut): learn.fit(2, .5)
    assert off(cut, whole, start) < 3e-6

def test_out_of_memory():
    "With 'auto' the number of tokens is halved"
    class Full(InRows):
        def forward(self, ids, position_ids):
            if self.training and ids.shape[1] > 40: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(ids, position_ids)
    whole,cut = packed_learner('one_row'),packed_learner('one_row', GradientAccumulation(micro_batch_tokens='auto'), model=None)
    cut.model.__class__ = Full
    start = weights(whole)
    for learn in (whole, cut): learn.fit(2, .5)
    assert off(cut, whole, start) < 3e-6 and cut.gradient_accumulation.micro_bs <= 80

def test_model_that_reads_texts_together():
    learn = packed_learner('one_row', GradientAccumulation(micro_batch_tokens=30), model=InRows(apart=False))
    with pytest.warns(UserWarning, match='reads packed texts together') as w: learn.fit(1, .1)
    eq(sum('reads packed' in str(o.message) for o in w), 1)

def own_loss(pred, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten())

def test_loss_that_is_not_known():
    learn = packed_learner('one_row', GradientAccumulation(micro_batch_tokens=30), loss_func=own_loss)
    with pytest.raises(ValueError, match='what the loss averages over has to be known'): learn.fit(1, .1)
    def tokens(learn): return (learn.y != -100).sum()
    learn = packed_learner('one_row', GradientAccumulation(micro_batch_tokens=30, weight=tokens), loss_func=own_loss)
    whole = packed_learner('one_row', loss_func=own_loss)
    start = weights(whole)
    for o in (learn, whole): o.fit(1, .1)
    assert off(learn, whole, start) < 3e-6

def test_term_of_a_callback():
    class Term(Callback):
        def after_loss(self): self.learn.loss_grad = self.loss_grad + self.pred.pow(2).mean()
    learn = packed_learner('one_row', GradientAccumulation(micro_batch_tokens=30), Term())
    with pytest.raises(ValueError, match='which a callback puts in its place'): learn.fit(1, .1)

def test_tensor_without_tokens():
    def with_mask(ts): return (*one_row(ts)[:2], torch.ones(1, 1, 4, 4), targets(ts)[None])
    class Masked(InRows):
        def forward(self, ids, position_ids, mask): return super().forward(ids, position_ids)
    ways['mask'] = with_mask,Masked
    try:
        learn = packed_learner('mask', GradientAccumulation(micro_batch_tokens=30))
        with pytest.raises(TypeError, match='has no place for each token'): learn.fit(1, .1)
    finally: del ways['mask']

def test_error_in_a_micro_batch():
    def fails(pred, y):
        if pred.shape[1] < 25: raise ValueError('wrong')
        return pred.mean()
    learn = packed_learner('one_row', GradientAccumulation(micro_batch_tokens=30, weight=lambda learn: 1), loss_func=fails)
    with pytest.raises(ValueError, match=r'wrong.*with \d of the loader batch.s 12 items, as micro_batch_tokens cuts packed texts'):
        learn.fit(1, .1)

@pytest.mark.parametrize('positions,alone,expected', [
    ([0, 1, 2, 0, 1], True, [(0, 3), (3, 5)]), ([2, 3, 4, 2, 3], True, [(0, 3), (3, 5)]), ([0, 1, 0], True, [(0, 2), (2, 3)]),
    ([0, 1, 0, 1, 0], False, [(0, 2), (2, 5)]), ([0, 1, 2, 0, 0, 0], True, [(0, 6)]), ([1, 1, 1, 0, 1, 2], True, [(0, 6)]),
    ([0, 0, 0, 0], False, [(0, 4)]), ([0, 0], True, [(0, 1), (1, 2)]), ([0, 1, 2, 3], True, [(0, 4)]),
    ([0, 1, 0, 0, 1, 0, 0], True, [(0, 2), (2, 3), (3, 7)])])
def test_where_texts_begin(positions, alone, expected): eq(texts_of(positions, alone), expected)

ids = torch.randint(3, 9, (3, 8))
@pytest.mark.parametrize('named', [
    dict(input_ids=ids), dict(input_ids=ids, position_ids=torch.arange(8).expand(3, 8)), dict(ids=ids, turn=tensor([0, 1, 0])),
    dict(ids=ids, char=tensor([0, 1, 2, 0, 1, 0, 1, 2]).expand(3, 8)), dict(ids=ids, position_ids=torch.zeros(3, 8).long()),
    dict(ids=ids, position_ids=tensor([[0, 1, 2, 3, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 2, 3, 4]])),
    dict(ids=ids, position_ids=torch.rand(3, 8)), dict(ids=ids, position_ids=torch.arange(24).view(3, 1, 8))])
def test_what_is_not_packed(named): assert find_packed(named) is None

class Masked(Reader):
    "Padding is masked, and positions say nothing of it"
    def forward(self, ids, position_ids):
        sees = (ids != 0).float()[:,None].expand(-1, ids.shape[1], -1).tril()
        return self.out((sees @ self.emb(ids)/sees.sum(-1, keepdim=True).clamp(min=1)).tanh())

@pytest.mark.parametrize('at_end', [True, False])
def test_padded_texts_with_positions(at_end):
    "Positions of 0 on the padding are no texts: the items are the rows, whose padding is trimmed"
    def pack(ts):
        most = max(map(len, ts))
        def wide(t, pad): return F.pad(t, (0, most-len(t)) if at_end else (most-len(t), 0), value=pad)
        columns = ts,[torch.arange(len(t)) for t in ts],[torch.cat([t[1:], tensor([-100])]) for t in ts]
        return tuple(torch.stack([wide(t, pad) for t in column]) for column,pad in zip(columns, (0, 0, -100)))
    ways['padded'] = pack,Masked
    try:
        log,calls = StepLogger(),Calls()
        whole = packed_learner('padded')
        cut = packed_learner('padded', GradientAccumulation(12, micro_batch_tokens=24, pad_idx=0), log, calls, n=4)
        start = weights(whole)
        for learn in (whole, cut): learn.fit(2, .5)
    finally: del ways['padded']
    assert off(cut, whole, start) < 3e-6 and log.to_df()['items'].tolist() == [12]*6
    assert min(s[1] for s in calls.shapes) < 9

def test_texts_of_one_token_on_the_way():
    "A batch of them changes nothing for the others"
    short = [t[:1] if 4 <= i%12 < 8 else t for i,t in enumerate(texts)]
    def fitted(n, *cbs):
        dls = DataLoaders(*[TorchLoader(short, n, collate_fn=one_row) for _ in range(2)])
        set_seed(0)
        learn = Learner(dls, InRows(), CrossEntropyLossFlat(), SGD, cbs=[*cbs])
        start = weights(learn)
        with learn.no_bar(), learn.no_logging(): learn.fit(1, .5)
        return learn,start
    calls = Calls()
    (whole,start),(cut,_) = fitted(12),fitted(12, GradientAccumulation(micro_batch_tokens=16), calls)
    assert off(cut, whole, start) < 3e-6 and max(s[1] for s in calls.shapes) <= 16

def test_padding_and_packed_texts_are_looked_at_each():
    "A model that sees padding and reads texts together is warned of both, in a fit with loader batches of both kinds"
    left = iter(range(99))
    def turns(ts):
        if next(left)%2: return one_row(ts)
        columns = ts,[torch.arange(len(t)) for t in ts],[torch.cat([t[1:], tensor([-100])]) for t in ts]
        return tuple(nn.utils.rnn.pad_sequence(column, True, pad) for column,pad in zip(columns, (0, 0, -100)))
    class Both(InRows):
        def forward(self, ids, position_ids): return super().forward(ids, position_ids) + self.emb(ids).mean()
    set_seed(0)
    dls = DataLoaders(*[TorchLoader(texts, 9, collate_fn=turns) for _ in range(2)])
    learn = Learner(dls, Both(), CrossEntropyLossFlat(), SGD, cbs=[GradientAccumulation(micro_batch_tokens=30, pad_idx=0)])
    with pytest.warns(UserWarning) as w, learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
    for what in ('does not mask padding', 'reads packed texts together'): eq(sum(what in str(o.message) for o in w), 1)

class Backwards(InRows):
    "Reads what follows, of other texts, too"
    def forward(self, ids, position_ids):
        sees = torch.ones(ids.shape[-1], ids.shape[-1]).triu()
        return self.out((sees @ self.emb(ids)/sees.sum(-1, keepdim=True)).tanh())

def test_model_that_reads_the_text_after():
    learn = packed_learner('one_row', GradientAccumulation(micro_batch_tokens=30), model=Backwards())
    with pytest.warns(UserWarning, match='reads packed texts together'): learn.fit(1, .1)

def test_the_look_needs_no_more_memory():
    "It is at as many tokens as a micro-batch may have"
    class Full(InRows):
        def forward(self, ids, position_ids):
            if ids.shape[1] > 12: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(ids, position_ids)
    learn = packed_learner('one_row', GradientAccumulation(micro_batch_tokens=12), model=Full())
    learn.fit(1, .1)

class WithMask(Reader):
    "A mask says what each token sees"
    def forward(self, ids, position_ids, sees):
        sees = sees.float().view(-1, *sees.shape[-2:])
        return self.out((sees @ self.emb(ids)/sees.sum(-1, keepdim=True)).tanh())

@pytest.mark.parametrize('shape', [(), (1,), (1, 1)])
def test_masks_of_two_dimensions(shape):
    def pack(ts):
        ids,pos,y = one_row(ts)
        text = (pos == 0).cumsum(1)[0]
        sees = (text[:,None] == text[None]).tril()
        return ids,pos,sees[(None,)*len(shape)],y
    ways['mask'] = pack,WithMask
    try:
        whole,cut = packed_learner('mask'),packed_learner('mask', GradientAccumulation(micro_batch_tokens=30))
        start = weights(whole)
        for learn in (whole, cut): learn.fit(1, .5)
    finally: del ways['mask']
    assert off(cut, whole, start) < 3e-6

class Normed(InRows):
    def __init__(self): super().__init__(); self.norm = nn.BatchNorm1d(30)
    def forward(self, ids, position_ids): return self.norm(super().forward(ids, position_ids).transpose(1, 2)).transpose(1, 2)

def test_batchnorm():
    learn = packed_learner('one_row', GradientAccumulation(micro_batch_tokens=30), model=Normed())
    with pytest.warns(UserWarning, match='BatchNorm: 1 layer sees .* freeze BatchNorm'): learn.fit(1, .1)

@pytest.mark.slow
def test_a_hugging_face_model():
    "With sdpa, which reads each text by itself by its position_ids; labels are shifted by the model"
    transformers = pytest.importorskip('transformers')
    from fastaccum.hugging_face import hf_learner
    def collate(ts):
        labels = joined(torch.cat([tensor([-100]), t[1:]]) for t in ts)
        return dict(input_ids=joined(ts)[None], position_ids=positions(ts)[None], labels=labels[None])
    def fitted(n, *cbs):
        set_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, n_positions=12, n_embd=16, n_layer=1, n_head=2,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.))
        learn = hf_learner(DataLoaders(*[TorchLoader(texts, n, collate_fn=collate) for _ in range(2)]), model, opt_func=SGD, cbs=[*cbs])
        start = weights(learn)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
        return learn,start
    whole,start = fitted(12)
    for n,kwargs in ((12, {}), (4, dict(accum_bs=12))):
        cut,_ = fitted(n, GradientAccumulation(micro_batch_tokens=25, **kwargs))
        assert off(cut, whole, start) < 5e-6
