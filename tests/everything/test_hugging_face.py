"Hugging Face models, made of a config: all ways of accumulation end with the weights of a plain loop that takes the model's own loss"
import tempfile, pytest
from contextlib import suppress
from reference import *
transformers = pytest.importorskip('transformers')
from torch.utils.data import DataLoader as TorchLoader, IterableDataset
from fastaccum.all import ActivationCheckpointing, ChunkedHead, GradientAccumulator, GradientNoiseScale, StepLogger, TrainingCheckpoint
from fastaccum.all import hf_learner
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
@pytest.mark.slow
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

@pytest.mark.slow
@pytest.mark.parametrize('kind', models)
def test_dropout(kind):
    whole,exact = train(kind, 20, p=.2),train(kind, 20, GradientAccumulation(micro_batch_size=7, exact=True), p=.2)
    other = train(kind, 20, GradientAccumulation(micro_batch_size=7), p=.2)
    assert off(exact, whole.model, kind) < 4e-6 < 1e-2 < off(other, whole.model, kind)

@pytest.mark.slow
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

@pytest.mark.slow
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

@pytest.mark.slow
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

# -- what the loss is
def shifts(m, kind='causal', bs=4): return hf_learner(loaders(kind, bs), m).dls.train.collate_fn.shifts
def zero_head(m):
    nn.init.zeros_(m.lm_head.weight)
    return m
@pytest.mark.parametrize('change', [lambda m: m.bfloat16(), zero_head, lambda m: zero_head(m).bfloat16()])
def test_an_untrained_model_shifts(change):
    "All losses are about the logarithm of the number of words"
    assert shifts(change(model('llama')))

@pytest.mark.slow
def test_given_loss():
    "With shift_labels=True it is the run of the loss that is found"
    runs = []
    for given in ({}, dict(loss_func=CrossEntropyLossFlat(), shift_labels=True), dict(loss_func=CrossEntropyLossFlat())):
        learn = hf_learner(loaders('causal', 20), model('causal'), opt_func=SGD, **given)
        with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
        runs.append(weights(learn.model))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])

class NoLoss(transformers.BertForTokenClassification):
    "It takes no labels"
    def forward(self, input_ids=None, attention_mask=None): return super().forward(input_ids, attention_mask=attention_mask)
def test_model_without_a_loss():
    "With a given one it trains as the model that has it"
    runs = []
    for m,given in ((model('tags'), {}), (NoLoss(bert(0., num_labels=3)), dict(loss_func=CrossEntropyLossFlat()))):
        m.load_state_dict(model('tags').state_dict())
        learn = hf_learner(loaders('tags', 20), m, opt_func=SGD, cbs=GradientAccumulation(micro_batch_size=7), **given)
        with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
        runs.append(weights(learn.model))
    assert torch.equal(*runs)
    with pytest.raises(TypeError, match='no loss and logits'): hf_learner(loaders('tags', 20), NoLoss(bert(0., num_labels=3)))

class OwnLoss(transformers.BertForSequenceClassification):
    "`f(logits, labels, training)`"
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None: out.loss = self.f(out.logits, labels, self.training)
        return out
own = {
    'class weights': lambda p, y, _: F.cross_entropy(p, y, weight=tensor([1., 2., 5.])),
    'smoothing in training': lambda p, y, training: F.cross_entropy(p, y, label_smoothing=.1*training),
    'a term': lambda p, y, _: F.cross_entropy(p, y) + .1*p.square().mean(),
    'the plain one': lambda p, y, _: F.cross_entropy(p, y)}
@pytest.mark.parametrize('bs', [1, 4])
@pytest.mark.parametrize('name', own)
def test_own_losses(name, bs):
    "Also with one item in a batch, or items of one class first, which do not show the weights; what `forward` passes on is not lost"
    OwnLoss.f = staticmethod(own[name])
    ds = sorted(items('classes'), key=lambda o: int(o['labels']))
    dls = DataLoaders(*[TorchLoader(ds, bs, collate_fn=Collate('classes'))]*2)
    make = partial(hf_learner, dls, OwnLoss(bert(0., num_labels=3)))
    if name == 'the plain one': assert make().model.input_names == ['input_ids', 'attention_mask']
    else:
        with pytest.raises(ValueError, match='pass loss_func'): make()

def test_experts_in_half_precision():
    m = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, head_dim=16,
                                                                   output_router_logits=True, router_aux_loss_coef=.005)).bfloat16()
    with pytest.raises(ValueError, match='shift_labels=True'): hf_learner(loaders('causal', 4), m)

def test_half_weights():
    "Without accumulation, too"
    learn = hf_learner(loaders('causal', 20), model('causal').bfloat16(), opt_func=SGD)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
    assert learn.recorder.values[0][0] > 0

class WithPlaces(Collate):
    def __call__(self, items):
        res = super().__call__(items)
        return res | dict(position_ids=torch.arange(res['input_ids'].shape[1]).flip(0).expand_as(res['input_ids']).contiguous())
@pytest.mark.slow
def test_lora():
    "Inputs that peft passes on reach the model, and its blocks can be recomputed"
    peft = pytest.importorskip('peft')
    def adapted():
        set_seed(0)
        return peft.get_peft_model(model('llama'), peft.LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM',
                                                                   init_lora_weights=False))
    def run(bs, *cbs):
        dls = DataLoaders(*[TorchLoader(items('causal'), bs, collate_fn=WithPlaces('causal'))]*2)
        learn = hf_learner(dls, adapted(), opt_func=SGD, cbs=cbs)
        with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
        return learn
    by_hand = adapted()
    opt = torch.optim.SGD(by_hand.parameters(), .1)
    for b in TorchLoader(items('causal'), 20, collate_fn=WithPlaces('causal')):
        del b['number']
        by_hand(**b).loss.backward()
        opt.step()
        opt.zero_grad()
    want,start = weights(by_hand),weights(adapted())
    for bs,cbs in ((4, [GradientAccumulation(20)]), (20, [GradientAccumulation(micro_batch_size=7), ActivationCheckpointing()])):
        learn = run(bs, *cbs)
        assert learn.model.input_names == ['input_ids', 'attention_mask', 'position_ids']
        assert (weights(learn.model)-want).norm() < 4e-6*(want-start).norm()

class Draws(Collate):
    "A collator with a generator of its own"
    def __init__(self, kind): self.kind,self.g = kind,torch.Generator().manual_seed(0)
    def __call__(self, items): torch.rand(1, generator=self.g); torch.rand(1); return super().__call__(items)
def test_generators_are_not_moved():
    collate,m = Draws('tags'),model('tags', .1)
    g,here = collate.g.get_state(),torch.get_rng_state()
    dls = DataLoaders(*[TorchLoader(items('tags'), 4, collate_fn=collate)]*2)
    hf_learner(dls, m)
    assert torch.equal(collate.g.get_state(), g) and torch.equal(torch.get_rng_state(), here)

# -- errors
class AddsLater(Collate):
    def __call__(self, items):
        res = super().__call__(items)
        return res if len(res['input_ids']) != 8 else res | dict(token_type_ids=torch.ones_like(res['input_ids']))
def test_more_inputs_later():
    learn = hf_learner(DataLoaders(*[TorchLoader(items('tags'), 16, collate_fn=AddsLater('tags'))]*2), model('tags'), opt_func=SGD)
    with pytest.raises(ValueError, match='this batch has .*token_type_ids'), learn.no_bar(), learn.no_logging(): learn.fit(1)

def test_decoders_by_what_they_do():
    "This one has no method that makes decoder_input_ids, but makes them itself"
    config = transformers.M2M100Config(vocab_size=N_WORDS, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                                       decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=40,
                                       pad_token_id=0, decoder_start_token_id=0)
    with pytest.raises(ValueError, match='without its labels'):
        hf_learner(loaders('causal', 4), transformers.M2M100ForConditionalGeneration(config))

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
    with pytest.raises(ValueError, match="had .*attention_mask.*this batch has"), learn.no_bar(), learn.no_logging(): learn.fit(1)
