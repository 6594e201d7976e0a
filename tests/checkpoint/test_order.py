"The order of the items of an epoch: drawn again where that is sure, kept where it is not; a save costs what the model and the batch need"
import os
import pytest
from quick import quickly
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.all import TfmdDL
from fastai.text.data import SortedDL
from reference import *
from test_checkpoint import Interrupt, OwnDL, counted, data, make, new_process, one_process, run, test_eq_bits
from fastaccum.checkpoint import loaders
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.files import read_checkpoint, write_checkpoint

def of(cls, **kwargs): return lambda d, batch_size: cls(d, bs=batch_size, shuffle=True, num_workers=0, **kwargs)
class Curriculum(Callback):
    "Changes the weights within an epoch"
    run_valid = False
    def after_batch(self):
        wgts = self.learn.dl.wgts*np.random.rand(61)
        self.learn.dl.wgts = wgts/wgts.sum()

drawn = dict(fastai=dict(dl_type=of(TfmdDL)), sorted=dict(dl_type=of(SortedDL, res=[(i*7)%13 for i in range(61)])),
             partial=dict(dl_type=of(PartialDL, partial_n=40)), in_turn=dict(dl_type=lambda d, batch_size: DataLoader(d, bs=batch_size)))
kept = dict(weighted=dict(dl_type=of(WeightedDL, wgts=np.arange(1., 62)), cbs=lambda: [Curriculum()]),
            own=dict(dl_type=OwnDL),
            given=dict(dl_type=lambda d, batch_size: DataLoader(d, bs=batch_size, get_idxs=lambda: list(np.random.permutation(61)))))

def files(): return sorted(Path('models/checkpoint').glob('*.pt'))

@pytest.mark.parametrize('name', quickly(['fastai','sorted','weighted'], {**drawn, **kept}))
def test_order(name):
    "Stopped twice in one epoch: it ends as the run that nobody stopped"
    case = {**drawn, **kept}[name]
    whole = run(case)
    for at in (1, 2),(1, 4):
        run(case, TrainingCheckpoint(every_steps=1), stop=Interrupt(at))
        new_process()
        state = read_checkpoint(files()[-1])
        assert ('drawn' in state, 'order' in state) == (name in drawn, name in kept)
    test_eq_bits(run(case, TrainingCheckpoint(every_steps=1)), whole)

@pytest.mark.slow
def test_older_files():
    "They have the rest of the order, as numbers"
    case = drawn['sorted']
    whole,orders = run(case),[]
    class Notes(Callback):
        run_valid = False
        def __init__(self): pass
        def before_batch(self): orders.append(list(self.learn.dl._DataLoader__idxs))
    run(case, Notes(), TrainingCheckpoint(every_steps=1), stop=Interrupt((1, 4)))
    new_process()
    for f in files():
        state = read_checkpoint(f)
        del state['drawn']
        write_checkpoint(dict(state, order=tensor([int(i) for i in orders[-1][state['batch']*8:]])), f)
    run(case, Notes(), TrainingCheckpoint(every_steps=1), stop=Interrupt((1, 6)))      # and once more from such an epoch
    new_process()
    assert 'order' in read_checkpoint(files()[-1])
    test_eq_bits(run(case, Notes(), TrainingCheckpoint(every_steps=1)), whole)

def test_another_order():
    "Another version of Python or NumPy would train other items: that is an error, and nothing was loaded"
    case = drawn['fastai']
    run(case, TrainingCheckpoint(every_steps=1, keep=1), stop=Interrupt((1, 4)))
    new_process()
    state = read_checkpoint(files()[-1])
    state['drawn']['some'] = state['drawn']['some'].flip(0)
    write_checkpoint(state, files()[-1])
    learn = make(case, TrainingCheckpoint(every_steps=1))
    before = weights(learn.model)
    with pytest.raises(ValueError, match='`drawn` gives the items in another order.*Nothing was loaded'): learn.fit_one_cycle(4, .05)
    assert torch.equal(weights(learn.model), before)

class Many:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.ones(6),torch.ones(4)

class Saves(Callback):
    "Saves after the first batches of an epoch, and ends the fit"
    order,run_valid,in_checkpoint = 2000,False,False
    def __init__(self): self.sizes = []
    def after_batch(self):
        now = self.learn.training_checkpoint.now
        now.save_batch()
        self.sizes.append(os.path.getsize(now.folder.files[-1]))
        if self.learn.iter == 2: raise CancelFitException()

def save(n, cls=DataLoader, **kwargs):
    learn = learner(Many(n), 8, Saves(), TrainingCheckpoint(f'of_{cls.__name__}_{n}', every_minutes=None, resume=False),
                    dl_type=of(cls, **kwargs), valid=data)
    with counted(loaders, 'numbers') as calls: learn.fit(2)
    return learn.saves.sizes,calls['numbers']

@pytest.mark.slow
def test_cost_of_the_order():
    "A save of a million items is as large as one of ten thousand, and makes no numbers of their order; a kept order becomes numbers once"
    small,_ = save(10_000)
    large,calls = save(1_000_000)
    assert len(large) == 3 and calls == 0 and max(large)-min(small) < 2000
    sizes,calls = save(10_000, WeightedDL, wgts=np.ones(10_000))
    assert calls == 1 and 80_000 < sizes[0]-sizes[-1] + 80_000 < 81_000
