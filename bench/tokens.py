"""Texts of very different lengths: micro-batches of so many rows, and of so many tokens

`python -m bench.tokens` takes about a minute on one core and writes tokens.json, which the tutorial *Token losses*
shows. The lengths of the texts are drawn from a distribution like Zipf's; with `wide=False` they differ little. Time is
the processor's, the least of several fits."""
import json, time, warnings
from datetime import date
from pathlib import Path
import pandas as pd, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastaccum.all import *
from fastaccum.core.memory import PeakMemory
from .__main__ import machine, versions

FILE = Path(__file__).with_suffix('.json')
N_WORDS,PAD,BS,LONGEST = 200,0,64,256
WAYS = {'the whole loader batch': {}, 'micro_batch_size=8': dict(micro_batch_size=8),
        'micro_batch_tokens=512': dict(micro_batch_tokens=512)}

def lengths(n, wide=True, seed=0):
    "Of texts: most are short, a few are long; or between 3/4 of the longest and the longest"
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(n, generator=g)
    return ((4/(u+4/LONGEST)) if wide else LONGEST*(.75+.25*u)).long().clamp(2, LONGEST)

class Classifier(nn.Module):
    "A transformer that masks padding"
    def __init__(self, d=32):
        super().__init__()
        self.emb,self.out = nn.Embedding(N_WORDS, d, padding_idx=PAD),nn.Linear(d, 4)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(d, 2, 4*d, dropout=0., batch_first=True) for _ in range(2)])
    def forward(self, x):
        mask,h = x == PAD,self.emb(x)
        for layer in self.layers: h = layer(h, src_key_padding_mask=mask)
        keep = (~mask)[...,None]
        return self.out((h*keep).sum(1)/keep.sum(1))

def learner(wide, **kwargs):
    set_seed(0)
    batches = []
    for i in range(2):
        ns = lengths(BS, wide, i)
        x = torch.randint(1, N_WORDS, (BS, int(ns.max())))
        batches.append((torch.where(torch.arange(x.shape[1]) < ns[:,None], x, PAD), torch.randint(4, (BS,))))
    learn = Learner(DataLoaders(batches, [], device='cpu'), Classifier(), CrossEntropyLossFlat(), SGD,
                    cbs=GradientAccumulation(BS, **kwargs))
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def weights_after(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def measure(wide, kwargs, n_fits=4):
    learn = learner(wide, **kwargs)
    learn.fit(1, .01)
    weights,seconds = weights_after(learn),[]
    for _ in range(n_fits):
        start = time.process_time()
        learn.fit(1, .01)
        seconds.append(time.process_time()-start)
    with PeakMemory() as mem: learn.fit(1, .01)
    return weights,dict(seconds=min(seconds)/2, mib=mem.peak/2**20)

def run():
    rows = []
    for wide in (True, False):
        share = float(torch.cat([(x != PAD).flatten() for x,_ in learner(wide).dls.train]).float().mean())
        whole = None
        for name,kwargs in WAYS.items():
            weights,found = measure(wide, kwargs)
            whole = weights if whole is None else whole
            rows.append(dict(lengths='wide' if wide else 'narrow', way=name, no_padding=share,
                             off=float((weights-whole).norm()/whole.norm()), **found))
    return rows

def table(rows):
    df = pd.DataFrame(rows).rename(columns=dict(no_padding='tokens that are no padding', off='weights off by',
                                                mib='MiB', seconds='ms a loader batch'))
    df['ms a loader batch'] = (1000*df['ms a loader batch']).round().astype(int)
    df['tokens that are no padding'] = df['tokens that are no padding'].map('{:.0%}'.format)
    df['weights off by'],df['MiB'] = df['weights off by'].map('{:.0e}'.format),df['MiB'].round(1)
    return df.set_index(['lengths','tokens that are no padding','way'])

def results(): return json.loads(FILE.read_text(encoding='utf-8'))

if __name__ == '__main__':
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    rows = run()
    print(table(rows).to_string())
    FILE.write_text(json.dumps(dict(date=date.today().isoformat(), machine=machine(), versions=versions(), rows=rows),
                               indent=1)+'\n', encoding='utf-8')
