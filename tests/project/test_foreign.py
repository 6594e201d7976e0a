"`make foreign`: what it says of a made-up notebook, in which two fits are wrong"
import json, sys
import pytest
import foreign

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

@pytest.mark.long
@pytest.mark.skipif(sys.platform!='linux', reason='the tool copies its process')
def test_notebook(tmp_path, capsys):
    pytest.importorskip('execnb', reason='nbdev brings it, which runs the notebooks')
    nb = notebook(tmp_path/'99_made_up.ipynb')
    cells,ours = (foreign.result(nb, kind, tmp_path) for kind in ('fits', 'ours'))
    found = [[[res for res,_ in fit.values()] for fit in fits] for *_,fits in cells.values()]
    assert found==[[], [['exact']*3], [['exact','bug','bug']], [['fails']*3], [], [['refused']*3], [['exact','exact','bug']]]
    total = foreign.compare(nb.stem, cells, ours)
    assert (total['loader batches','exact'], total['loader batches','bug'], total['cells'], total['skipped'],
            total['cells refused'])==(1, 2, 5, 2, 1)
    out = capsys.readouterr().out
    assert '1 skipped (no data unknown)' in out and 'class Counts' in out and 'callbacks are attached' in out
