"The lines of the tables on home and *By question* are programs: each trains a small set, in the steps that its row promises"
import re
from pathlib import Path
import pytest
pytest.importorskip('fastcore.nbio', reason='nbdev brings a fastcore that reads notebooks')
from fastcore.nbio import read_nb
from fastaccum.all import *
from reference import *

nbs = Path(__file__).resolve().parents[2]/'nbs'

def lines(page):
    "The rows of its tables with a line to write, as (what you have, the line)"
    rows = re.findall(r'(?m)^\| (.*?) \| (.*?) \|', '\n'.join(c.source for c in read_nb(nbs/f'{page}.ipynb').cells))
    return [(have, line) for have,write in rows for line in re.findall(r'`(bs=[^`]*)`', write)]

home,more = lines('index'),lines('questions')
n = 512

class Block(nn.Module):
    def __init__(self, norm): super().__init__(); self.norm,self.l = norm(8),nn.Linear(8, 8)
    def forward(self, x): return x + self.l(torch.tanh(self.norm(x)))
def net(norm): return nn.Sequential(nn.Sequential(nn.Linear(6, 8), Block(norm), Block(norm)), nn.Linear(8, 4))
def with_head(): return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)))
class Text(nn.Module):
    def __init__(self): super().__init__(); self.e,self.l = nn.Embedding(20, 8, padding_idx=0),nn.Linear(8, 20)
    def forward(self, x): return self.l(torch.tanh(self.e(x)))
def contrast(pred, y): return F.cross_entropy(F.normalize(pred)@F.normalize(pred.detach()).T/.1, torch.arange(len(pred)))
def texts():
    x = torch.randint(1, 20, (n, 24))
    x[torch.arange(24)[None] >= torch.randint(2, 24, (n, 1))] = 0
    return Data(x, x.roll(-1, 1).where(x != 0, -100))

set_seed(0)
rows = Data(torch.randn(n, 6), torch.arange(n)%4)
weighted = CrossEntropyLossFlat(weight=tensor([1., 2, 3, 4]))

def task(line):
    "Data, model and loss of who needs this line: what is uneven about them shows in the weights"
    if 'tokens' in line: return texts(),Text(),CrossEntropyLossFlat(ignore_index=-100)
    if "'batchnorm'" in line: return rows,net(nn.BatchNorm1d),contrast
    if "'head'" in line: return rows,with_head(),weighted
    return rows,net(nn.LayerNorm),contrast if 'coupled=True' in line else weighted

def fit(task, bs, *cbs, opt_func=partial(SGD, mom=.9)):
    data,model,loss = task
    learn = learner(data, bs, *cbs, StepLogger(), model=model, loss_func=loss, opt_func=opt_func)
    learn.fit(1, .05)
    return learn

@pytest.mark.parametrize('line', dict.fromkeys(line for _,line in home+more))
def test_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                    # checkpoints go there
    args,of = eval(f'dict({line})'),task(line)
    set_seed(0)
    ours = fit(of, args['bs'], *L(args['cbs']), **dict(opt_func=Adam) if 'ScaleLR' in line else {})      # its rule is Adam's
    sizes = ours.step_logger.to_df()['items'].tolist()
    acc = getattr(ours, 'gradient_accumulation', None)
    if acc is None: assert sizes == [args['bs']]*(n//args['bs']) and 'ScaleLR' in line
    elif not acc.constant: assert sizes[0] == 64 and sum(sizes) == n
    elif acc.unit == 'tokens': assert all(ours.step_logger.to_df()['tokens'][:-1] >= acc.accum_bs) and 1 < len(sizes) and sum(sizes) == n
    else:
        target = args['bs'] if acc.per_loader_batch else acc.accum_bs
        assert sizes == [target]*(n//target) and target in (64, 256)
        set_seed(0)
        assert rel_err(weights(ours.model), weights(fit(of, target).model)) < 1e-5

def test_tables():
    "Seven rows on home, each with a line; elsewhere a row without one says what to write instead"
    assert len(home) == 7 == len({have for have,_ in home}) and len(more) > 12
