"`make foreign`: what it says of a made-up notebook, and of made-up outcomes"
import json, sys
import pandas as pd, pytest, torch
import foreign, foreign_data

# Exact; wrong and silent; fails in fastai too; without data; refused; draws at random for each loader batch
CELLS = '''from fastai.basics import *
from fastai.callback.training import GradientAccumulation
from fastai.data.external import untar_data
from fastai.test_utils import *
---
learn = synth_learner(n_trn=4)
learn.fit(2)
---
class Counts(Callback):
    "Multiplies the gradient by how many backward passes there were"
    def before_fit(self): self.n = 0
    def after_backward(self): self.n += 1
    def before_step(self):
        for p in self.learn.model.parameters(): p.grad *= self.n
        self.n = 0
synth_learner(n_trn=4, cbs=Counts()).fit(2)
---
class Fails(Callback):
    def before_batch(self): raise ValueError('always')
synth_learner(n_trn=4, cbs=Fails()).fit(2)
---
untar_data('https://files.fast.ai/unknown.tgz')
---
synth_learner(n_trn=4).fit(1, cbs=GradientAccumulation(32))
---
class Random(Callback):
    "Draws from each of the generators of random numbers"
    def before_batch(self): self.learn.xb = (self.x*(random.random() + np.random.rand() + torch.rand(1)),)
synth_learner(n_trn=4, cbs=Random()).fit(1)
'''

def notebook(path):
    cells = [dict(cell_type='code', id=f'c{i}', metadata={}, outputs=[], execution_count=None, source=o)
             for i,o in enumerate(CELLS.split('---\n'))]
    path.write_text(json.dumps(dict(cells=cells, nbformat=4, nbformat_minor=5, metadata={})))
    return path

@pytest.mark.slow
@pytest.mark.skipif(sys.platform!='linux', reason='the tool copies its process')
def test_notebook(tmp_path, capsys):
    nb = notebook(tmp_path/'99_made_up.ipynb')
    cells,ours = (foreign.result(nb, kind, tmp_path) for kind in ('fits', 'ours'))
    found = [[[res for res,_ in fit.values()] for fit in fits] for *_,fits in cells.values()]
    assert found==[[], [['exact']*3], [['exact','bug','bug']], [['fails']*3], [], [['refused']*3], [['exact','exact','bug']]]
    total = foreign.compare(nb.stem, cells, ours)
    assert (total['loader batches','exact'], total['loader batches','bug'], total['cells'], total['skipped'],
            total['cells refused'])==(1, 2, 5, 2, 1)
    out = capsys.readouterr().out
    assert '1 skipped (no data unknown)' in out and 'class Counts' in out and 'callbacks are attached' in out

def test_rounded():
    "The yardstick draws from random numbers of its own: else all that draws at random would look as far off as it likes"
    from bench.clients import Rounded
    from fastai.test_utils import synth_learner
    learn = synth_learner()
    learn.add_cb(rounded := Rounded())
    rounded.before_fit()
    learn.model.a.grad = torch.ones(1)
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    rounded.before_step()
    assert torch.equal(torch.rand(3), want) and 0 < abs(learn.model.a.grad-1) < 1e-6

def outcome(**values): return {k: torch.tensor(v) for k,v in values.items()}, [], None, False

def test_verdict():
    plain = outcome(weights=[1.,2.], losses=[.5,float('nan')])
    near,far = outcome(weights=[1.,2+1e-6], losses=[.5,float('nan')]),outcome(weights=[1.,2.01], losses=[.5,float('nan')])
    wild = outcome(weights=[1.,4.], losses=[.5,float('nan')])
    def verdict(ours, rounded=near, repeated=plain): return foreign.verdict(plain, ours, lambda: repeated, lambda seed: rounded)[0]
    assert verdict(near)=='exact' and verdict(far)=='bug'
    assert verdict(far, far)=='exact' and verdict(far, wild)=='chaotic' and verdict(far, None)=='bug'   # as far as rounding errors lead
    assert verdict(far, far, near)=='random'                                                           # fastai's own differs too
    assert verdict((far[0], ['it is off'], None, False))=='told'
    assert verdict((far[0], ['BatchNorm sees micro-batches'], None, False))=='bug'                     # no reason for it
    assert verdict((None, [], 'ValueError: no', True))=='refused' and verdict((None, [], 'ValueError: no', False))=='bug'
    for ours in (outcome(weights=[1.,2.]), outcome(weights=[1.,2.], losses=[.5]),
                 outcome(weights=[1.,2.], losses=[.5,.5])):
        assert verdict(ours)=='bug'
    lr_find = [foreign.differences({'losses': torch.tensor([1.,.9,*o])}, {'losses': torch.tensor([1.,.9,*p])})['losses']
               for o,p in [((5.,90.), (5.,91.)), ((.8,5.), (.7,5.)), ((5.,90.), (5.,))]]
    assert lr_find[0]==0 and lr_find[1]>.05 and lr_find[2]==float('inf')     # what a net that diverges does does not count

def test_leaves():
    state = dict(state=[dict(sqr_avg=torch.ones(2), step=3)], hypers=[dict(lr=.1, decouple=True)], name='Adam', none=None)
    assert [k for k,_ in foreign.leaves(state)]==['sqr_avg', 'step', 'lr', 'decouple']

def test_cut(tmp_path):
    "The same items in the same order, though the large loader shuffles"
    from fastai.data.load import DataLoader
    from copy import deepcopy
    large = DataLoader(list(range(22)), bs=8, shuffle=True)
    small = deepcopy(large)
    foreign.cut(small, 2)
    for _ in range(2):   # each epoch shuffles anew
        big,cut = list(large),list(small)
        assert ([*map(len, big)], [*map(len, cut)])==([8,8,6], [2]*11)
        assert torch.cat(big).tolist()==torch.cat(cut).tolist()

def test_data(tmp_path):
    with pytest.raises(foreign_data.NoData, match='unknown'): foreign_data.make('https://files.fast.ai/unknown.tgz', tmp_path)
    path = foreign_data.make('https://files.fast.ai/oxford-iiit-pet.tgz', tmp_path)
    assert len(list((path/'images').glob('*_*.jpg')))==112
    df = pd.read_csv(foreign_data.make('https://files.fast.ai/adult_sample.tgz', tmp_path)/'adult.csv')
    assert len(df)>10_000 and df.salary.nunique()==2 and df['education-num'].isna().any()
