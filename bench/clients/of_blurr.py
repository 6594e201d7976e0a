"blurr's way (1.0.5, which wants PyTorch before 2.0): batches have dicts, and a callback takes the loss from the model's output"
from functools import partial
import torch
from torch import nn
from fastai.basics import SGD, Callback, CrossEntropyLossFlat, Learner
from . import Case
from .data import loaders
from .of_peft import bert, classes, gpt2, labels, mask, texts

class BaseModelWrapper(nn.Module):
    "A model of dicts, which passes on what the model takes"
    def __init__(self, model):
        super().__init__()
        self.hf_model = model
    def forward(self, x): return self.hf_model(**{k: v for k,v in x.items() if k in ('input_ids','attention_mask','labels')})

class ModelOutput(Callback):
    "Puts the labels into the dict, and takes logits and loss from what the model returns"
    def __init__(self, own_loss): self.own_loss = own_loss
    def before_batch(self):
        if self.own_loss: self.learn.xb = ({**self.learn.xb[0], 'labels': self.learn.yb[0]},)
    def after_pred(self):
        out = self.learn.pred
        self.out_loss = out.loss
        self.learn.pred = out.logits
        if self.own_loss: self.learn.loss_grad,self.learn.loss = out.loss,out.loss.clone()
    def after_loss(self):
        if self.own_loss: self.learn.loss_grad,self.learn.loss = self.out_loss,self.out_loss.clone()

class ModelsOwn:
    "A loss function that returns the loss that the model has computed"
    def __init__(self): self.learn = None
    def __call__(self, pred, *yb): return self.learn.model_output.out_loss

def of(bs, model, y, loss_func):
    items = [dict(input_ids=a, attention_mask=m) for a,m in zip(texts, mask)]
    learn = Learner(loaders(bs, items, y), BaseModelWrapper(model()), loss_func=loss_func(), opt_func=SGD)
    if isinstance(learn.loss_func, ModelsOwn): learn.loss_func.learn = learn
    return learn

def next_tokens(learn): return (learn.yb[0][:,1:] != -100).sum()

def cases():
    own,other = (lambda: [ModelOutput(True)]),(lambda: [ModelOutput(False)])
    res = []
    for name,model,y,weight in (('GPT-2', gpt2, labels, next_tokens), ('BERT classifier', bert, classes, None)):
        for how,f in (('loss of the model', CrossEntropyLossFlat), ('a loss function that returns it', ModelsOwn)):
            res.append(Case(f'{name}, {how}', partial(of, model=model, y=y, loss_func=f), own, lr=.1))
            if weight: res.append(Case(f'{name}, {how}, weight=', partial(of, model=model, y=y, loss_func=f), own, lr=.1,
                                       acc=dict(weight=weight)))
    return [*res, Case('BERT classifier, loss function', partial(of, model=bert, y=classes, loss_func=CrossEntropyLossFlat), other, lr=.1)]
