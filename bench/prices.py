"""What `exact=True` costs: an MLP, a ResNet, a transformer and an LSTM in micro-batches, without the word and with it

`python -m bench.prices` takes some minutes on one core and writes prices.json, which the guide *Any GPU* shows. `MODELS` is the
table: what the word takes depends on what a model draws and normalizes, and on its loss.

Time is the processor's for a step, the fastest of all rounds; each round has all ways, one after the other. Memory is what
PyTorch's profiler sees allocated at once in a step, as on the page *Benchmarks*: gradients count, weights and the batch do not."""
import io, json, warnings
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from typing import NamedTuple
import pandas as pd, torch, torch.nn.functional as F
from fastai.vision.models.xresnet import xresnet18
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
def resnet(p=.2): return xresnet18(n_out=10, p=p)
def transformer(p=.1):
    layers = [nn.TransformerEncoderLayer(64, 4, 256, p, 'gelu', batch_first=True, norm_first=True) for _ in range(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 64)), nn.Flatten(), nn.Linear(64, 10))

def rows(n): return torch.randn(n, 512),torch.randint(10, (n,))
def pictures(n): return torch.randn(n, 3, 32, 32),torch.randint(10, (n,))
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

def row(name, bs=BS, size=SIZE, n_steps=2, rounds=2) -> dict:
    found = [{way: measure(MODELS[name], way, bs, size, n_steps) for way in WAYS} for _ in range(rounds)]
    res = dict(model=name, **{way: {k: min(o[way][k] for o in found) for k in ('s', 'peak')} for way in WAYS})
    print(f"{name}: {', '.join(f'{k} {v:.2f}' for k,v in times(res).items())}", flush=True)
    return res

def run(**kwargs) -> list: return [row(name, **kwargs) for name in MODELS]

def main():
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    from .__main__ import machine, versions
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), rows=run())
    FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')

# -- What is shown
def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def times(r) -> dict: # Relative to micro-batches without the word, and to one piece
    return {k: r['exact=True']['s']/r[k]['s'] for k in ('micro-batches', 'in one piece')}

def table(rows) -> pd.DataFrame:
    def mib(r, way): return f"{r[way]['peak']/2**20:.1f}"
    return pd.DataFrame([{'': r['model'], 'exact=True takes': MODELS[r['model']].takes,
                          'times the time of micro-batches': f"{times(r)['micro-batches']:.2f}",
                          'of one piece': f"{times(r)['in one piece']:.2f}", 'MiB in one piece': mib(r, 'in one piece'),
                          'in micro-batches': mib(r, 'micro-batches'), 'exact=True': mib(r, 'exact=True')} for r in rows]).set_index('')

if __name__ == '__main__': main()
