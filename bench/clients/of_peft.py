"peft: adapters of small transformers models, made of a config; and these models without adapters"
from functools import partial
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import nn
from torch.utils import data
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from fastai.basics import SGD, CrossEntropyLossFlat, DataLoaders, Learner
from fastaccum.hugging_face import hf_learner, shifted
from . import Case
from .data import loaders, whole_numbers

n,length,vocab = 60,12,40
texts,classes = whole_numbers(vocab-1, n, length) + 1,whole_numbers(3, n)
lengths = whole_numbers(length-3, n, seed=1) + 4
mask = (torch.arange(length) < lengths[:,None]).long()
labels = texts.where(mask > 0, -100)

# Their attention has dropout that is no module
def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0., bos_token_id=None,
                                      eos_token_id=None))
def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                        max_position_embeddings=32))
def bert():
    return BertForSequenceClassification(BertConfig(vocab_size=vocab, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                                    intermediate_size=32, max_position_embeddings=32, num_labels=3,
                                                    attention_probs_dropout_prob=0.))
def adapted(model, config): return lambda: get_peft_model(model(), config)

class Logits(nn.Module):
    "Of a model that takes tuples, without those of prompts"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x, mask):
        logits = self.model(input_ids=x, attention_mask=mask).logits
        return logits if logits.dim() == 2 else logits[:,-x.shape[1]:]

def of_dicts(bs, model, y):
    items = [dict(input_ids=a, attention_mask=m, labels=b) for a,m,b in zip(texts, mask, y)]
    dls = DataLoaders(data.DataLoader(items, batch_size=bs), data.DataLoader(items[:16], batch_size=16), device='cpu')
    return hf_learner(dls, model(), opt_func=SGD)

def of_tuples(bs, model, y):
    dls = loaders(bs, texts, mask, shifted(y) if y is labels else y)
    dls.train.n_inp = dls.valid.n_inp = 2
    return Learner(dls, Logits(model()), loss_func=CrossEntropyLossFlat(), opt_func=SGD)

def cases():
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_dropout=.1, target_modules=['c_attn','c_proj'], fan_in_fan_out=True)
    dora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, use_dora=True, target_modules=['q_proj','v_proj'])
    saved = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=['query','value'])
    ia3 = IA3Config(task_type=TaskType.CAUSAL_LM, target_modules=['k_proj','v_proj','down_proj'], feedforward_modules=['down_proj'])
    models = {'GPT-2': (gpt2, labels), 'Llama': (llama, labels), 'BERT classifier': (bert, classes),
              'GPT-2, LoRA': (adapted(gpt2, lora), labels), 'Llama, DoRA': (adapted(llama, dora), labels),
              'Llama, IA3': (adapted(llama, ia3), labels), 'BERT classifier, LoRA': (adapted(bert, saved), classes)}
    prompts = adapted(gpt2, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))
    return [*(Case(f'{k}, {how}', partial(f, model=m, y=y), lr=10. if 'IA3' in k else .1) for k,(m,y) in models.items()
              for how,f in (('hf_learner', of_dicts), ('Learner', of_tuples))),
            Case('GPT-2, prompt tuning, Learner', partial(of_tuples, model=prompts, y=labels), lr=10.)]
