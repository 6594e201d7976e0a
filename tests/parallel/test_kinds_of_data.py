"FullyShard where a rank has no item of a loader batch, with each kind of data that fastai takes: all that one process computes"
import sys
from contextlib import redirect_stdout
from io import StringIO
import numpy as np, pandas as pd, pytest, torch
from fastai.basics import (
    CategoryBlock, CrossEntropyLossFlat, DataBlock, DataLoader, DataLoaders, Datasets, IndexSplitter, Learner, SGD, nn, range_of)
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import LMDataLoader, TensorText
from fastai.vision.data import ImageBlock
from fastaccum.all import FullyShard, GradientAccumulation, launch
from test_joint_validation import quiet, started

pytestmark = pytest.mark.long       # all start processes of two ranks

# 17 items in loader batches of 8: the last one has a single item
n_train,n_valid,bs = 33,17,8
def rows():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n_train+n_valid, 5, generator=g)
    return list(zip(x, (x.sum(1) > 0).long()))
def mlp(n_in=5): return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, 2))

def of_dls(dls, model=None, loss=None):
    torch.manual_seed(1)
    return Learner(dls, mlp() if model is None else model(), loss or CrossEntropyLossFlat(), opt_func=SGD, lr=.1)

def lists(): return of_dls(DataLoaders.from_dsets(rows()[:n_train], rows()[n_train:], bs=bs, drop_last=False, device='cpu'))
def plain(): return of_dls(DataLoaders(DataLoader(rows()[:n_train], bs=bs), DataLoader(rows()[n_train:], bs=bs), device='cpu'))
def pytorch():
    loaders = [torch.utils.data.DataLoader(o, batch_size=bs) for o in (rows()[:n_train], rows()[n_train:])]
    return of_dls(DataLoaders(*loaders, device='cpu'))
def datasets():
    items = rows()
    dsets = Datasets(range_of(items), [[lambda i: items[i][0]], [lambda i: items[i][1]]],
                     splits=[range(n_train), range(n_train, len(items))])
    return of_dls(dsets.dataloaders(bs=bs, drop_last=False, device='cpu'))

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(10)
    def forward(self, a, b): return self.layers(torch.cat([a, b], 1))
def two_inputs():
    items = rows()
    dsets = Datasets(range_of(items), [[lambda i: items[i][0]], [lambda i: items[i][0]*2], [lambda i: items[i][1]]], n_inp=2,
                     splits=[range(n_train), range(n_train, len(items))])
    return of_dls(dsets.dataloaders(bs=bs, drop_last=False, device='cpu'), TwoInputs)

class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(7)
    def forward(self, cats, conts): return self.layers(torch.cat([cats.float(), conts], 1))
def tabular():
    df = pd.DataFrame(torch.stack([x for x,_ in rows()]).numpy(), columns=list('abcde')).assign(y=[int(y) for _,y in rows()])
    df = df.assign(cat=(df.a > 0).astype(str), other=(df.b > 1).astype(str))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, Normalize], cat_names=['cat','other'], cont_names=list('abcde'),
                                     y_names='y', y_block=CategoryBlock(), valid_idx=list(range(n_train, len(df))), bs=bs, device='cpu')
    return of_dls(dls, Columns)

class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20))
    def forward(self, x): return self.layers(x)
def language():
    g = torch.Generator().manual_seed(0)
    train,valid = ([TensorText(torch.randint(20, (n,), generator=g)) for n in (200, 100, 85)] for _ in range(2))       # 385 words
    dls = DataLoaders(LMDataLoader(train, bs=8, seq_len=16), LMDataLoader(valid, bs=1, seq_len=16, shuffle=False), device='cpu')
    return of_dls(dls, Letters)

class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(48)
    def forward(self, x): return self.layers(x.flatten(1)/255)
def images():
    g = np.random.RandomState(0)
    pictures = [g.randint(0, 256, (4, 4, 3), dtype=np.uint8) for _ in range(n_train+n_valid)]
    block = DataBlock((ImageBlock, CategoryBlock), get_x=lambda i: pictures[i], get_y=lambda i: 'ab'[int(pictures[i].mean() > 127)],
                      splitter=IndexSplitter(range(n_train, n_train+n_valid)))
    return of_dls(block.dataloaders(list(range(n_train+n_valid)), bs=bs, drop_last=False, device='cpu'), Pixels)

kinds = lists,plain,pytorch,datasets,two_inputs,tabular,language,images

# --- the runs
def outcome(kind):
    learn = kind()
    learn.add_cbs([GradientAccumulation(16), FullyShard()])
    for dl in learn.dls.loaders: dl.shuffle = False
    with quiet(learn), redirect_stdout(StringIO()):
        learn.lr_find(num_it=5, show_plot=False, suggest_funcs=())
        learn.fit(2)
        rec = learn.recorder
        res = dict(losses=[[float(o) for o in row] for row in rec.values], steps=[float(o) for o in rec.losses])
        preds = learn.get_preds(dl=learn.dls.valid if kind is pytorch else None)[0]
        if kind in (tabular, images): learn.show_results(max_n=2)
    return dict(res, preds=torch.as_tensor(preds))

def runs():
    return {kind.__name__: outcome(kind) for kind in kinds}

def both(n): return {n: launch(runs, n) if n > 1 else [runs()]}

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    waits = [started(both, n, tmp_path_factory.mktemp(f'ranks{n}'), __file__) for n in (1, 2)]
    return {n: res for wait in waits for n,res in wait().items()}

@pytest.mark.parametrize('kind', [f.__name__ for f in kinds])
def test_one_process(results, kind):
    one,(a,b) = results[1][0][kind],[rank[kind] for rank in results[2]]
    for ours in (a, b):
        assert len(ours['losses']) == 2
        for k in ('losses','steps'):
            torch.testing.assert_close(torch.tensor(ours[k]), torch.tensor(one[k]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours['preds'], one['preds'], rtol=1e-5, atol=1e-6)

if __name__ == '__main__': torch.save(both(int(sys.argv[2])), sys.argv[3])
