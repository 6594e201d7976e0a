"""What `exact=True` costs: an MLP, a ResNet, a transformer and an LSTM in micro-batches, without the word and with it

`python -m bench.prices` takes ten minutes on one core and writes prices.json, which the guide *Any GPU* shows. `MODELS` is the
table: what the word takes depends on what a model draws and normalizes, and on its loss.

Time is the processor's for a step, the fastest of four, relative to that of the other way in the same round; of nine rounds the
median, with the quartiles, as other work on the machine makes rounds slower and not ways. Memory is what
PyTorch's profiler sees allocated at once in a step, as on the page *Benchmarks*, the median too, as now and then it misses a block:
gradients count, weights and the batch do not."""
import io, json, random, warnings
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple
import pandas as pd, torch, torch.nn.functional as F
from fastai.vision.models.xresnet import ResBlock, XResNet
from torch import nn
from fastaccum.all import GradientAccumulation
from .jobs import Job
from .peers import fit
from .toolbox import Clock, sequences

FILE = Path(__file__).with_suffix('.json')
BS,SIZE = 64,8       # items of a loader batch, which is a step, and of a micro-batch

# -- What is trained
class Model(NamedTuple):
    make:callable
    data:callable
    loss:callable=F.cross_entropy
    takes:str=''       # what exact=True takes

class Lstm(nn.Module):
    def __init__(self, p=.3):
        super().__init__()
        self.rnn,self.out = nn.LSTM(64, 128, 2, dropout=p, batch_first=True),nn.Linear(128, 10)
    def forward(self, x): return self.out(self.rnn(x)[0][:,-1])

def mlp(p=.2): return nn.Sequential(*[o for _ in range(4) for o in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(p))], nn.Linear(512, 10))
def resnet(p=.2): return XResNet(ResBlock, 1, [2, 2, 2, 2], p, n_out=10, widen=.25)      # of a quarter of a ResNet-18's channels
def transformer(p=.1):
    layers = [nn.TransformerEncoderLayer(64, 4, 256, p, 'gelu', batch_first=True, norm_first=True) for _ in range(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 64)), nn.Flatten(), nn.Linear(64, 10))

def rows(n): return torch.randn(n, 512),torch.randint(10, (n,))
def pictures(n): return torch.randn(n, 3, 64, 64),torch.randint(10, (n,))
def texts(n): return sequences(n, 32)
def own_loss(p, y): return F.cross_entropy(p, y, reduction='none').pow(1.1).mean()

MODELS = {
    'MLP': Model(mlp, rows, takes='masks'),
    'transformer': Model(transformer, texts, takes='masks'),
    'LSTM': Model(Lstm, texts, takes='masks'),
    'transformer, without dropout': Model(lambda: transformer(0.), texts, takes='nothing'),
    'transformer, without dropout, a loss of its own': Model(lambda: transformer(0.), texts, own_loss, 'one loss'),
    'transformer, a loss of its own': Model(transformer, texts, own_loss, 'masks, one loss'),
    'ResNet, without dropout': Model(lambda: resnet(0.), pictures, takes='BatchNorm of all items'),
    'ResNet': Model(resnet, pictures, takes='masks, BatchNorm of all items')}

# -- What is measured
WAYS = {'in one piece': lambda size: (), 'micro-batches': lambda size: (GradientAccumulation(micro_batch_size=size),),
        'exact=True': lambda size: (GradientAccumulation(micro_batch_size=size, exact=True),)}

def measure(model, way, bs, size, n_steps) -> dict: # Seconds of a step, and bytes
    torch.manual_seed(0)
    m = model.make()
    clock = Clock(m.parameters(), at=1)
    with redirect_stdout(io.StringIO()):
        fit(Job(m, [model.data(bs)]*(n_steps+4), n_acc=1, loss_func=model.loss, on_step=clock), *WAYS[way](size))
    return dict(s=clock.seconds, peak=clock.peak)

def row(name, bs=BS, size=SIZE, n_steps=4, rounds=9) -> dict:
    "Medians of all rounds; in each one all ways run, in another order each time, and are compared with each other"
    ratios,peaks = {'micro-batches': [], 'in one piece': []},{way: [] for way in WAYS}
    for i in range(rounds):
        ways = [*WAYS]
        random.Random(i).shuffle(ways)
        found = {way: measure(MODELS[name], way, bs, size, n_steps) for way in ways}
        for k in ratios: ratios[k].append(found['exact=True']['s']/found[k]['s'])
        for way,o in found.items(): peaks[way].append(o['peak'])
    res = dict(model=name, times={k: quartiles(v) for k,v in ratios.items()}, peaks={way: round(median(v)) for way,v in peaks.items()})
    print(f"{name}: {', '.join(f'{k} {b:.2f} ({a:.2f} to {c:.2f})' for k,(a,b,c) in res['times'].items())}", flush=True)
    return res

def quartiles(v): return [round(q, 4) for q in quantiles(v, n=4, method='inclusive')]

def run(**kwargs) -> list: return [row(name, **kwargs) for name in MODELS]

def main():
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    from .__main__ import machine, versions
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), rows=run())
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')

# -- What is shown
def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def table(rows) -> pd.DataFrame:
    def mib(r, way): return f"{r['peaks'][way]/2**20:.1f}"
    return pd.DataFrame([{'': r['model'], 'exact=True takes': MODELS[r['model']].takes,
                          'times the time of micro-batches': f"{r['times']['micro-batches'][1]:.2f}",
                          'of one piece': f"{r['times']['in one piece'][1]:.2f}", 'MiB in one piece': mib(r, 'in one piece'),
                          'in micro-batches': mib(r, 'micro-batches'), 'exact=True': mib(r, 'exact=True')} for r in rows]).set_index('')

if __name__ == '__main__': main()
