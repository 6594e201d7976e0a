"Losses of preferences, written from their papers: an item is a pair of texts, the chosen and the rejected one"
from functools import partial
import torch
import torch.nn.functional as F
from torch import nn
from . import Case
from .data import make, numbers, whole_numbers

n,length,vocab = 60,7,12
texts = whole_numbers(vocab, n, 2, length)                       # (item, chosen or rejected, place)
lengths = whole_numbers(length-2, n, 2, seed=1) + 3
texts[torch.arange(length) >= lengths[...,None]] = -100          # padding
good = whole_numbers(2, n, seed=2)                               # of KTO, which has one text an item

class LM(nn.Module):
    "Logits of the next token, of all texts of an item"
    def __init__(self, out=vocab):
        super().__init__()
        self.emb,self.rnn,self.head = nn.Embedding(vocab, 8),nn.GRU(8, 8, batch_first=True),nn.Linear(8, out)
    def forward(self, x):
        h = self.rnn(self.emb(x.clamp(min=0)).flatten(0, -3))[0]
        return self.head(h).unflatten(0, x.shape[:-1])

class WithReference(nn.Module):
    "Log probabilities of the texts, by the model that is trained and by the one that it began with, in the last dimension"
    def __init__(self):
        super().__init__()
        self.model,self.ref = LM(),LM().requires_grad_(False)
    def forward(self, x): return torch.stack([log_probs(self.model(x), x), log_probs(self.ref(x), x)], -1)

def log_probs(logits, x, mean=False):
    "Of each text: the sum, or the mean, over its tokens"
    y = x[...,1:]
    lp = logits[...,:-1,:].log_softmax(-1).gather(-1, y.clamp(min=0)[...,None])[...,0]*(y >= 0)
    return lp.sum(-1)/(y >= 0).sum(-1) if mean else lp.sum(-1)

def ratio(pred):
    "By how much the model prefers the chosen text more than its reference does"
    return (pred[:,0,0] - pred[:,1,0]) - (pred[:,0,1] - pred[:,1,1])

def dpo(pred, y, beta=.1):
    "arXiv:2305.18290"
    return -F.logsigmoid(beta*ratio(pred)).mean()

def ipo(pred, y, beta=.1):
    "arXiv:2310.12036"
    return ((ratio(pred) - 1/(2*beta))**2).mean()

def kto(pred, y, beta=1.):
    "arXiv:2402.01306: items have one text each, whose gain is compared with the mean over the batch of those of others' texts"
    gain = pred[:,0,0] - pred[:,0,1]
    base = (pred[:,1,0] - pred[:,1,1]).mean().clamp(min=0).detach()
    return (1 - torch.sigmoid(beta*torch.where(y > 0, gain-base, base-gain))).mean()

def orpo(logits, y, weight=.1):
    "arXiv:2403.07691: cross entropy of the tokens of the chosen texts, and the odds"
    lp = log_probs(logits, y, mean=True)
    odds = lp - torch.log1p(-lp.exp())
    nll = F.cross_entropy(logits[:,0,:-1].flatten(0, 1), y[:,0,1:].flatten())
    return nll - weight*F.logsigmoid(odds[:,0] - odds[:,1]).mean()

def simpo(logits, y, beta=2., gamma=1.):
    "arXiv:2405.14734"
    lp = log_probs(logits, y, mean=True)
    return -F.logsigmoid(beta*(lp[:,0] - lp[:,1]) - gamma).mean()

class Reward(LM):
    "A number for each text: that of its last place"
    def __init__(self): super().__init__(out=1)
    def forward(self, x): return super().forward(x)[...,0].gather(-1, (x >= 0).sum(-1, keepdim=True) - 1)[...,0]

def bradley_terry(pred, y):
    "arXiv:2203.02155"
    return -F.logsigmoid(pred[:,0] - pred[:,1]).mean()

def cases():
    def of(name, loss, model, y=texts, lr=.05, **kwargs): return Case(name, make(texts, y, model, lambda: loss), lr=lr, **kwargs)
    one = dict(acc=dict(coupled=True), ways=('micro-batches',))
    return [of('DPO', dpo, WithReference), of('IPO', ipo, WithReference, lr=.001),
            of('KTO, not coupled', kto, WithReference, good), of('KTO', kto, WithReference, good, **one),
            of('ORPO', orpo, LM), of('ORPO, coupled', orpo, LM, **one), of('SimPO', simpo, LM), of('Bradley-Terry', bradley_terry, Reward)]
