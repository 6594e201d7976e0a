"Weights in 4 bits that adapters adapt: all ways of accumulation end with the adapters of whole batches"
import tempfile, pytest
from contextlib import suppress
from importlib.util import find_spec
from reference import *
transformers = pytest.importorskip('transformers')
from torch.utils.data import DataLoader as TorchLoader
from fastaccum.all import ActivationCheckpointing, GradientNoiseScale, StepLogger, TrainingCheckpoint
from fastaccum.all import hf_learner
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
missing = [m for m in ('peft','bitsandbytes') if find_spec(m) is None]        # they take long to import
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing, reason=f'needs {missing}'),
              pytest.mark.filterwarnings('ignore:`is_gradient_checkpointing` is deprecated:FutureWarning')]
N_WORDS = 60

def saved_model(path, seed=0):
    config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=N_WORDS,
                                      max_position_embeddings=40)
    set_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path

@pytest.fixture(scope='module')
def folder(tmp_path_factory): return saved_model(tmp_path_factory.mktemp('llama'))

def model(folder, p):
    import peft
    bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.float32)
    base = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=bits, device_map='cpu')
    # in the first validation bitsandbytes lays out weights anew on CPUs with AVX512-BF16, for layers of 64 inputs or more
    for m in base.modules():
        if hasattr(m, 'support_avx512bf16_for_cpu'): m.support_avx512bf16_for_cpu = False
    set_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=p, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM'))

def texts(n=40):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, N_WORDS, (int(torch.randint(3, 12, (), generator=g)),), generator=g) for _ in range(n)]

def collate(texts):
    ids,labels = (nn.utils.rnn.pad_sequence(texts, True, value) for value in (0, -100))
    return dict(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels)

def train(folder, bs, *cbs, p=0., fit=lambda l: l.fit(2, .5), path=None):
    dls = DataLoaders(*[TorchLoader(texts(), n, collate_fn=collate) for n in (bs, 20)])
    learn = hf_learner(dls, model(folder, p), opt_func=SGD, cbs=cbs, path=path or tempfile.mkdtemp())
    set_seed(2)
    with learn.no_bar(), learn.no_logging(): fit(learn)
    return learn

def adapters(m): return flat(p for p in m.parameters() if p.requires_grad)
def off(learn, whole, start): return rel_err(adapters(learn.model)-adapters(start), adapters(whole.model)-adapters(start))

ways = {
    'accumulated': (4, lambda: [GradientAccumulation(20)], 0.),
    'split': (20, lambda: [GradientAccumulation(micro_batch_size=7), StepLogger()], 0.),
    'exact': (20, lambda: [GradientAccumulation(micro_batch_size=7, exact=True)], .2),
    'recomputed': (20, lambda: [GradientAccumulation(micro_batch_size=7), ActivationCheckpointing()], 0.),
    'noise scale': (4, lambda: [GradientAccumulation(20), GradientNoiseScale()], 0.)}
@pytest.mark.parametrize('way', ways)
def test_way(folder, way):
    bs,cbs,p = ways[way]
    whole = train(folder, 20, p=p)
    assert off(train(folder, bs, *cbs(), p=p), whole, model(folder, p)) < 4e-6

def stopping(folder, path, *cbs):
    def fit(learn):
        with suppress(KeyboardInterrupt): learn.fit(2, .5)
    return train(folder, 4, GradientAccumulation(20), TrainingCheckpoint(every_steps=1), *cbs, p=.1, fit=fit, path=path)

class Stop(Callback):
    def after_batch(self):
        if self.training and self.learn.train_iter == 7: raise KeyboardInterrupt

def test_resume(folder, tmp_path):
    "A fit that ends in the middle goes on with the same adapters, and the weights in 4 bits are as they were"
    whole,stopped = stopping(folder, tmp_path/'whole'),stopping(folder, tmp_path/'stopped', Stop())
    before = adapters(stopped.model)
    again = stopping(folder, tmp_path/'stopped')
    assert torch.equal(adapters(again.model), adapters(whole.model)) and not torch.equal(before, adapters(whole.model))
    for a,b in zip(again.model.parameters(), whole.model.parameters()): assert torch.equal(a, b)

def test_other_weights(folder, tmp_path):
    "What bitsandbytes does not read from a saved state has to be there; nothing is restored then"
    stopping(folder, tmp_path, Stop())
    def fit(learn):
        with pytest.raises(ValueError, match='does not read .*absmax.* from a saved state'): learn.fit(2, .5)
    other = saved_model(tmp_path/'other', seed=5)
    learn = train(other, 4, GradientAccumulation(20), TrainingCheckpoint(every_steps=1), p=.1, fit=fit, path=tmp_path)
    for a,b in zip(learn.model.parameters(), model(other, .1).parameters()): assert torch.equal(a, b)
