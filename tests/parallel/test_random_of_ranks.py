"""Random numbers over several ranks: each rank draws its own, and the order of the items is that of one process"""
import pytest, torch, torch.distributed as dist
from fastai.basics import Callback, DataLoaders, Learner, SGD, Transform, TfmdDL, nn, np, random, set_seed, tensor
from fastaccum.all import DataParallel, GradientAccumulation, TrainingCheckpoint, launch
from fastaccum.checkpoint.folder import CheckpointFolder
from test_joint_validation import quiet, started, weights

pytestmark = pytest.mark.slow      # all start processes of two ranks
def data(n=40):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=g)
    return [*zip(x, x.sum(1, keepdim=True))]

class Draws(Transform):
    "An augmentation, with each of the three generators"
    def __init__(self): self.drawn = []
    def encodes(self, b):
        self.drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
        return b

class Masks(nn.Dropout):
    def forward(self, x):
        out = super().forward(x)
        if self.training: masks.append((out != 0).tolist())
        return out
masks = []

class Stop(Callback):
    "An error on all ranks, after a batch"
    order = 1001
    def batch_ended(self):
        if self.learn.training and self.learn.train_iter == 4: raise OSError('the power is out')

def learner(dls, drop, *cbs):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), Masks(drop), nn.Linear(16, 1))
    return Learner(dls, model, nn.MSELoss(), opt_func=SGD, lr=.05, path='.', cbs=[GradientAccumulation(16), DataParallel(), *cbs])

def fastai_loaders():
    dls = DataLoaders(TfmdDL(data(), bs=8, shuffle=True, num_workers=0, after_item=Draws()),
                      TfmdDL(data(16), bs=8, num_workers=0), device='cpu')
    return dls

def drawn():
    "With a seed, three times: from start to end, until the power is out, and from there"
    ends = []
    for fname,cbs in (('whole', []), ('cut', [Stop()]), ('cut', [])):
        masks.clear()
        CheckpointFolder.in_use.clear()
        set_seed(7)
        learn = learner(dls := fastai_loaders(), .5, TrainingCheckpoint(fname, 1), *cbs)
        set_seed(7)
        with quiet(learn):
            try: learn.fit(2)
            except OSError: continue
        learn.training_checkpoint.finish()
        ends.append((weights(learn), [*masks], dls.train.after_item.fs[0].drawn, torch.rand(()).item()))
    return ends

def torch_loaders():
    "Training in the order that a PyTorch loader draws, in two epochs, with a validation between them"
    set_seed(7)
    dl = lambda n, **kwargs: torch.utils.data.DataLoader(data(n), batch_size=8, **kwargs)
    learn = learner(DataLoaders(dl(40, shuffle=True), dl(16), device='cpu'), 0.)
    with quiet(learn): learn.fit(3)
    return weights(learn),torch.rand(()).item()

def both(): return drawn(),torch_loaders()

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    waits = [started(both, n, tmp_path_factory.mktemp(f'ranks{n}'), __file__) for n in (1, 2)]
    return [wait() for wait in waits]

def test_each_rank_draws_its_own_numbers(results):
    (one,),(a,b) = ([drawn for drawn,_ in r] for r in results)
    (_,masks_a,drawn_a,_),(_,masks_b,drawn_b,_) = a[0],b[0]
    assert torch.equal(a[0][0], b[0][0])
    same = [x == y for m,n in zip(masks_a, masks_b) for r,s in zip(m, n) for x,y in zip(r, s)]
    assert .35 < sum(same)/len(same) < .65         # as by chance
    assert not any(x in {y for row in drawn_b for y in row} for row in drawn_a for x in row)
    assert drawn_a[0] == one[0][2][0]              # rank 0 draws as one process does

def test_they_resume(results):
    for (drawn,_) in (o for r in results for o in r):
        whole,again = drawn
        assert torch.equal(whole[0], again[0]) and whole[3] == again[3]
        assert whole[1][-len(again[1]):] == again[1] and len(again[1]) < len(whole[1])

def test_the_order_of_a_pytorch_loader_is_that_of_one_process(results):
    (one,),(a,b) = ([torch_ for _,torch_ in r] for r in results)
    for r in (a, b): torch.testing.assert_close(r[0], one[0], rtol=1e-5, atol=1e-6)
    assert a[1] == one[1]                          # and so are the random numbers afterwards

if __name__ == '__main__':
    import sys
    f,n,out = globals()[sys.argv[1]],int(sys.argv[2]),sys.argv[3]
    torch.save([f()] if n == 1 else launch(f, n), out)
