"Hugging Face models, made of a config: all ways of accumulation end with the weights of a plain loop that takes the model's own loss"
import tempfile, pytest
from contextlib import suppress
from reference import *
transformers = pytest.importorskip('transformers')
from torch.utils.data import DataLoader as TorchLoader, IterableDataset
from fastaccum.all import (ActivationCheckpointing, ChunkedHead, GradientAccumulator, GradientNoiseScale, StepLogger, TrainingCheckpoint, hf_learner)
transformers.logging.set_verbosity_error()
N_WORDS = 60

def bert(p, **kwargs):
    return transformers.BertConfig(**sizes, hidden_dropout_prob=p, attention_probs_dropout_prob=p, **kwargs)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=N_WORDS,
             max_position_embeddings=40)
def gpt2(p):
    return transformers.GPT2Config(vocab_size=N_WORDS, n_positions=40, n_embd=32, n_layer=2, n_head=2, resid_pdrop=p, embd_pdrop=p,
                                   attn_pdrop=p, bos_token_id=0, eos_token_id=0)
def t5(p):
    return transformers.T5Config(vocab_size=N_WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0,
                                 dropout_rate=p)
models = {
    'causal': lambda p: transformers.GPT2LMHeadModel(gpt2(p)),
    'llama': lambda p: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attention_dropout=p)),
    'masked': lambda p: transformers.BertForMaskedLM(bert(p)),
    'sequences': lambda p: transformers.T5ForConditionalGeneration(t5(p)),
    'classes': lambda p: transformers.BertForSequenceClassification(bert(p, num_labels=3)),
    'tags': lambda p: transformers.BertForTokenClassification(bert(p, num_labels=3)),
    'several': lambda p: transformers.BertForSequenceClassification(bert(p, num_labels=3, problem_type='multi_label_classification')),
    'numbers': lambda p: transformers.BertForSequenceClassification(bert(p, num_labels=1))}

def labels(kind, ids):
    if kind in ('causal', 'llama'): return ids
    if kind == 'masked': return torch.where(ids%3 == 0, ids, -100).index_copy(0, tensor(0), ids[:1])
    if kind == 'sequences': return ids.flip(0)
    if kind == 'tags': return ids%3
    return {'classes': ids[0]%3, 'several': (ids[:3]%2).float(), 'numbers': ids[0]/N_WORDS}[kind]

def items(kind, n=40):
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, N_WORDS, (int(torch.randint(3, 12, (), generator=g)),), generator=g) for _ in range(n)]
    return [dict(input_ids=ids, labels=labels(kind, ids), number=i) for i,ids in enumerate(texts)]

class Collate:
    def __init__(self, kind): self.kind = kind
    def __call__(self, items):
        def padded(k, value): return nn.utils.rnn.pad_sequence([o[k] for o in items], True, value)
        ids = padded('input_ids', 0)
        per_text = self.kind in ('classes', 'several', 'numbers')
        res = dict(input_ids=ids, attention_mask=(ids != 0).long(), number=tensor([o['number'] for o in items]),
                   labels=torch.stack([o['labels'] for o in items]) if per_text else padded('labels', -100))
        if self.kind == 'sequences': res['decoder_input_ids'] = F.pad(res['labels'][:,:-1], (1, 0)).clamp(min=0)
        return res

def loaders(kind, bs, **kwargs):
    return DataLoaders(*[TorchLoader(items(kind), n, collate_fn=Collate(kind), **kwargs) for n in (bs, 20)])

def model(kind, p=0.):
    set_seed(1)
    return models[kind](p)

def train(kind, bs, *cbs, p=0., fit=lambda l: l.fit(2, .1), path=None, **kwargs):
    learn = hf_learner(loaders(kind, bs, **kwargs), model(kind, p), opt_func=SGD, cbs=cbs, path=path or tempfile.mkdtemp())
    set_seed(2)
    with learn.no_bar(), learn.no_logging(): fit(learn)
    return learn

def by_hand(kind, bs=20):
    m = model(kind)
    opt = torch.optim.SGD(m.parameters(), .1)
    for _ in range(2):
        for b in loaders(kind, bs).train:
            del b['number']
            m(**b).loss.backward()
            opt.step()
            opt.zero_grad()
    return m

def off(learn, whole, kind):
    start = weights(model(kind))
    return float((weights(learn.model)-weights(whole)).norm()/(weights(whole)-start).norm())

ways = {
    'plain': (20, lambda: []),
    'accumulated': (4, lambda: [GradientAccumulation(20)]),
    'split': (20, lambda: [GradientAccumulation(micro_batch_size=7)]),
    'exact': (20, lambda: [GradientAccumulation(micro_batch_size=7, exact=True), StepLogger()]),
    'one loss': (20, lambda: [GradientAccumulation(micro_batch_size=7, coupled=True)]),
    'chunked': (20, lambda: [GradientAccumulation(micro_batch_size=7), ChunkedHead(3)]),
    'recomputed': (20, lambda: [GradientAccumulation(micro_batch_size=7), ActivationCheckpointing()]),
    'noise scale': (4, lambda: [GradientAccumulation(20), GradientNoiseScale()])}
texts = 'causal','llama','masked','tags'
@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('kind', models)
def test_way(kind, way):
    bs,cbs = ways[way]
    assert off(train(kind, bs, *cbs()), by_hand(kind), kind) < 4e-6

@pytest.mark.filterwarnings('ignore:accum_bs=10000 is more than')
@pytest.mark.parametrize('kind', texts)
@pytest.mark.parametrize('more', [{}, dict(unit='tokens', accum_bs=10_000)], ids=['items', 'tokens'])
def test_similar_lengths(kind, more):
    learn = train(kind, 20, GradientAccumulation(**more, micro_batch_tokens=40, pad_idx=0))
    assert off(learn, by_hand(kind, 40 if more else 20), kind) < 2e-6

@pytest.mark.parametrize('kind', models)
def test_dropout(kind):
    whole,exact = train(kind, 20, p=.2),train(kind, 20, GradientAccumulation(micro_batch_size=7, exact=True), p=.2)
    other = train(kind, 20, GradientAccumulation(micro_batch_size=7), p=.2)
    assert off(exact, whole.model, kind) < 4e-6 < 1e-2 < off(other, whole.model, kind)

@pytest.mark.parametrize('kind', models)
def test_validation(kind):
    "The loss of a validation is the model's own of the same batch"
    learn = train(kind, 20, GradientAccumulation(micro_batch_size=7))
    b = Collate(kind)(items(kind)[:20])
    del b['number']
    with torch.no_grad(): own = float(learn.model.model.eval()(**b).loss)
    dls = loaders(kind, 20)
    first = TorchLoader(items(kind)[:20], 20, collate_fn=Collate(kind))
    learn.dls.loaders[1] = hf_learner(DataLoaders(first, dls.valid), model(kind)).dls.train
    assert learn.validate()[0] == pytest.approx(own, rel=1e-5)

def test_nothing_is_disturbed():
    "Random numbers, modes of modules, and loaders are as before"
    m,dls = model('causal', .1),loaders('causal', 4, shuffle=True)
    m.transformer.h[0].eval()
    before,modes = torch.get_rng_state(),[o.training for o in m.modules()]
    learn = hf_learner(dls, m)
    assert torch.equal(torch.get_rng_state(), before) and [o.training for o in m.modules()] == modes
    assert isinstance(next(iter(dls.train)), dict) and isinstance(next(iter(learn.dls.train)), tuple)
    assert learn.model.model is m

@pytest.mark.parametrize('kwargs', [dict(shuffle=True), dict(num_workers=1), dict(num_workers=1, persistent_workers=True, shuffle=True)])
def test_resume(kwargs, tmp_path):
    def fit(l):
        with suppress(KeyboardInterrupt): l.fit(2, .1)
    def saved(name, *cbs):
        both = GradientAccumulation(20),TrainingCheckpoint(every_steps=1)
        return train('causal', 4, *both, *cbs, p=.1, fit=fit, path=tmp_path/name, **kwargs)
    whole = saved('a')
    stopped = saved('b', Stop('after_batch', KeyboardInterrupt, [(1, 5)]))
    assert not torch.equal(weights(stopped.model), weights(whole.model))
    assert torch.equal(weights(saved('b').model), weights(whole.model))

@pytest.mark.parametrize('kind', ['causal', 'classes'])
def test_half(kind):
    whole,split = (train(kind, 20, *cbs, fit=lambda l: l.to_bf16().fit(2, .1)) for cbs in ((), (GradientAccumulation(micro_batch_size=7),)))
    assert off(split, whole.model, kind) < .05

class Items(IterableDataset):
    def __len__(self): return 40
    def __iter__(self): return iter(items('causal'))
def test_data_sets_without_places():
    dls = DataLoaders(*[TorchLoader(Items(), n, collate_fn=Collate('causal')) for n in (4, 20)])
    learn = hf_learner(dls, model('causal'), opt_func=SGD, cbs=GradientAccumulation(20))
    with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
    assert off(learn, by_hand('causal'), 'causal') < 2e-6

def test_own_loss():
    learn = hf_learner(loaders('tags', 20), model('tags'), loss_func=CrossEntropyLossFlat(weight=tensor([1., 2., 3.]), ignore_index=-100),
                       opt_func=SGD, cbs=GradientAccumulation(micro_batch_size=7))
    whole = hf_learner(loaders('tags', 20), model('tags'), loss_func=learn.loss_func, opt_func=SGD)
    for l in (learn, whole):
        with l.no_bar(), l.no_logging(): l.fit(2, .1)
    assert off(learn, whole.model, 'tags') < 2e-6

@pytest.mark.parametrize('kind', ['causal', 'llama'])
def test_loop_of_ones_own(kind):
    "The model shifts its labels: the line of *Migrating* counts those that it divides by"
    m = model(kind)
    opt,acc = torch.optim.SGD(m.parameters(), .1),GradientAccumulator(m.parameters(), accum_bs=20)
    for _ in range(2):
        for b in loaders(kind, 4).train:
            del b['number']
            y = b['labels']
            acc.add(m(**b).loss, len(y), (y[:,1:] != -100).sum()).backward()
            if not acc.ready: continue
            acc.finish()
            opt.step()
            opt.zero_grad()
    want,start = weights(by_hand(kind)),weights(model(kind))
    assert (weights(m)-want).norm() < 2e-6*(want-start).norm()

# -- errors
class NoDecoder(Collate):
    def __call__(self, items): return {k: v for k,v in super().__call__(items).items() if k != 'decoder_input_ids'}
class Changes(Collate):
    def __call__(self, items): return {k: v for k,v in super().__call__(items).items() if k != 'attention_mask' or len(v) != 8}
def of(kind, collate=None, **kwargs): return DataLoaders(*[TorchLoader(items(kind), 20, collate_fn=collate or Collate(kind), **kwargs)]*2)
class NoOutput(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(3, 3)
    def forward(self, input_ids, labels=None): return {'loss': 0}

@pytest.mark.parametrize('make,says', [
    (lambda: hf_learner(of('sequences', NoDecoder('sequences')), model('sequences')), 'DataCollatorForSeq2Seq'),
    (lambda: hf_learner(of('tags'), NoOutput()), 'no loss and logits'),
    (lambda: hf_learner(DataLoaders(*[DataLoader(items('tags'), bs=4)]*2), model('tags')), 'torch.utils.data.DataLoader'),
    (lambda: hf_learner(DataLoaders(*[TorchLoader(iter_of(), 4, collate_fn=Collate('tags'))]*2), model('tags')), 'gives each item once')])
def test_errors(make, says):
    with pytest.raises((TypeError, ValueError), match=says): make()
class iter_of(IterableDataset):
    def __iter__(self): return self
    def __next__(self): raise StopIteration

def test_batches_with_other_inputs():
    dls = DataLoaders(*[TorchLoader(items('tags'), 16, collate_fn=Changes('tags'))]*2)
    learn = hf_learner(dls, model('tags'), opt_func=SGD)
    with pytest.raises(ValueError, match="had 'attention_mask'"), learn.no_bar(), learn.no_logging(): learn.fit(1)
