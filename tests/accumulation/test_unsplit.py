"Where `micro_batch_size` splits no loader batch, one warning says what that means, unless every step is as it was asked for"
import warnings
import pytest
from fastaccum.all import *
from fastaccum.accumulation.witnesses.unsplit import UnsplitBatches
from fastaccum.loop.ranks import OneRank
from reference import *

rows = Data(torch.randn(64, 6), torch.arange(64)%4)
class Unsized:
    "A loader that does not say how large its batches are"
    def __init__(self, sizes): self.batches = [(torch.randn(n, 6), torch.arange(n)%4) for n in sizes]
    def __iter__(self): return iter(self.batches)
    def __len__(self): return len(self.batches)

def told(acc, bs=16, val_bs=4, sizes=None):
    "The warnings of two fits"
    learn = learner(rows, bs, acc, loss_func=nn.CrossEntropyLoss())
    learn.dls.loaders[1] = DataLoader(rows, bs=val_bs)
    if sizes: learn.dls.loaders[0] = Unsized(sizes)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always', FastaccumWarning)
        for _ in range(2): learn.fit(2, .01)
    return [str(w.message).partition(' http')[0] for w in found if w.category is FastaccumWarning]

nothing = ("{} changes nothing here: loader batches have {} items, so none is split, and each is a step of its own. For larger steps load "
           "as many items as a step should have, such as bs={}.")
part = ("coupled={!r} computes the loss over {} items at a time, and a step has more: loader batches have {} items, so "
        "micro_batch_size={} splits none. Load all items of a step at a time{}.")

@pytest.mark.parametrize('kwargs', [dict(micro_batch_size=16), dict(micro_batch_size=32), dict(micro_batch_size=16, coupled=True),
                                    dict(micro_batch_size=16, coupled='batchnorm')])
def test_nothing_accumulates(kwargs):
    acc = GradientAccumulation(**kwargs)
    assert told(acc) == [nothing.format(repr(acc), 16, 64)]

@pytest.mark.parametrize('kwargs,size', [
    (dict(accum_bs=64), ' (bs=64)'), (dict(n_acc=40), ' (bs=40)'), (dict(accum_bs=64, micro_batch_size=20), ' (bs=64)'),
    (dict(accum_bs=64, coupled='2'), ' (bs=64)'), (dict(accum_bs=8, unit='rows', count=lambda learn: 4), '')])
def test_coupled_sees_a_part(kwargs, size):
    kwargs = {**dict(micro_batch_size=16, coupled=True), **kwargs}
    assert told(GradientAccumulation(**kwargs)) == [part.format(kwargs['coupled'], 16, 16, kwargs['micro_batch_size'], size)]

def test_largest_batch_of_an_unknown_loader():
    text, = told(GradientAccumulation(micro_batch_size=16), sizes=[8, 12, 6])
    assert 'loader batches have 12 items' in text

@pytest.mark.parametrize('bs,kwargs,more', [
    (16, dict(micro_batch_size=8), {}), (16, dict(micro_batch_size=8, coupled=True), {}),
    (16, dict(accum_bs=64, micro_batch_size=8, coupled=True), {}),      # the loss sees what the loader gives
    (16, dict(accum_bs=64, micro_batch_size=16), {}), (16, dict(accum_bs=64, micro_batch_size=32), {}),     # exact, whatever is split
    (16, dict(accum_bs=16, micro_batch_size=16), {}), (16, dict(accum_bs=16, micro_batch_size=16, coupled=True), {}),   # so are its steps
    (16, dict(micro_batch_size='auto', coupled=True), {}),                                                  # all fit
    (16, dict(micro_batch_size=16), dict(val_bs=32)),                                                       # validation is split
    (128, dict(micro_batch_size=64, coupled=True), {}),                                                     # an epoch is a batch
    (16, dict(micro_batch_size=16), dict(sizes=[8, 12, 20])), (16, dict(accum_bs=64, micro_batch_size=16, coupled='batchnorm'), {})])
def test_says_nothing(bs, kwargs, more): assert told(GradientAccumulation(**kwargs), bs, **more) == []

def test_says_nothing_on_several_ranks(monkeypatch):
    "There the loss, or the step, has the items of all of them"
    monkeypatch.setattr(OneRank, 'world', 2)
    cb = learner(rows, 16, GradientAccumulation(micro_batch_size=16, coupled=True)).gradient_accumulation
    witness = UnsplitBatches(cb)
    witness.before_epoch()
    assert not witness.due
