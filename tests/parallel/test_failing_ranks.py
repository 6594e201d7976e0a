"""A rank that fails tells the others, also where its process lives on; and what FullyShard does at its ends"""
import multiprocessing, re, sys, time
from concurrent.futures import ProcessPoolExecutor
import pytest, torch, torch.distributed as dist
from fastai.basics import Callback, CancelBatchException, CancelFitException, Datasets, Learner, nn
from fastai.learner import load_learner
from fastaccum.all import DataParallel, FullyShard, GradientAccumulation, LocalSGD, launch
from fastaccum.parallel import processes
from test_joint_validation import data, learner, mlp, quiet, started

pytestmark = pytest.mark.slow      # the others start processes of two ranks

@pytest.mark.quick
def test_signals_that_windows_lacks(monkeypatch):
    for s in ('SIGHUP', 'SIGQUIT'): monkeypatch.delattr(processes.signal, s, raising=False)
    with processes._signals_kept(): pass

@pytest.mark.quick
def test_offload_needs_ranks():
    "It would do nothing"
    learn = learner(*data(), nn.CrossEntropyLoss(), dp=lambda: FullyShard(offload=True))
    with quiet(learn), pytest.raises(ValueError, match='offload=True.* one rank'): learn.fit(1)

class At(Callback):
    order,run_valid = 30,False
    def __init__(self, ranks, event, f): self.ranks,self.f,self.since = ranks,f,2*(event != 'before_fit'); setattr(self, event, self.do)
    def do(self):
        if dist.get_rank() in self.ranks and self.learn.train_iter >= self.since: self.f()

def boom(): raise ValueError('boom')
def stop(): raise CancelFitException

def fit(dp, *cbs, model=None, n_epoch=2):
    "The error of a fit, if there is one, else its Learner"
    try:
        learn = learner(*data(), nn.CrossEntropyLoss(), model, bs=8, dp=dp, cbs=cbs)
        with quiet(learn): learn.fit(n_epoch)
    except Exception as e: return f'{type(e).__name__}: {e}'
    return learn

def living_on(ranks, event='after_loss', dp=DataParallel):
    "The processes catch the error and go on, so that the others learn of it by a message, not by a lost connection"
    first = fit(dp, At(ranks, event, boom))
    again = fit(dp)
    if len(ranks) == 1: time.sleep(5)
    return first,again if isinstance(again, str) else 'trains'

class Normed(nn.Sequential):
    def __init__(self): torch.manual_seed(1); super().__init__(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

def buffers(dp):
    "After a fit that one rank ends in its first epoch"
    return [b.clone() for b in fit(dp, At([1], 'after_batch', stop), model=Normed()).model.buffers()]

class Leaves(nn.Module):
    "Rank 1 leaves out a layer, from its `since`-th pass on: one that FSDP gathers alone, or one that it gathers with others"
    def __init__(self, out, since=0, in_training=True):
        super().__init__()
        torch.manual_seed(1)
        self.blocks,self.aux,self.head = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)]),nn.Linear(5, 5),nn.Linear(5, 3)
        self.out,self.since,self.in_training,self.n = out,since,in_training,0
    def forward(self, x):
        self.n += 1
        leaves = dist.get_rank() == 1 and self.n > self.since and self.training <= self.in_training
        for name,m in dict(block0=self.blocks[0], block1=self.blocks[1], block2=self.blocks[2], aux=self.aux).items():
            if not leaves or name != self.out: x = x+m(x)
        return self.head(x)

def exported():
    x,y = data()
    dsets = Datasets(range(len(x)), [[x.__getitem__], [y.__getitem__]], splits=(range(64), range(64, len(x))))
    learn = Learner(dsets.dataloaders(bs=8, device='cpu'), Normed(), nn.CrossEntropyLoss(),
                    cbs=[GradientAccumulation(16), FullyShard()], path='.')
    with quiet(learn): learn.fit(1)
    before = learn.validate()
    learn.export('sharded.pkl')
    dist.barrier()
    again = load_learner('sharded.pkl')
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    learn.model.eval()
    same = torch.allclose(again.model.eval()(x), learn.model(x), atol=1e-6)
    kinds = {type(o).__name__ for o in (again.model, *again.model.parameters())}
    after = learn.validate()
    with quiet(learn): learn.fit(1)
    return same,kinds,list(before) == list(after)

def all_two():
    res = dict(all=living_on([0, 1]), buffers={dp.__name__: buffers(dp) for dp in (DataParallel, FullyShard, LocalSGD)},
               exported=exported())
    return res

class InValidation(Callback):
    order = 30
    def __init__(self, event): setattr(self, event, lambda: boom() if dist.get_rank() == 1 else None)

def validates(call, dp=DataParallel, event='after_loss'):
    "A validation alone fails on rank 1, whose process lives on. Before, rank 0 alone has failed in one of its own, and the ranks go on"
    learn,rank = learner(*data(), nn.CrossEntropyLoss(), bs=8, dp=dp),dist.get_rank()
    with quiet(learn):
        if rank == 0 and dp is DataParallel:
            try: learn.get_preds(dl=[(torch.zeros(2, 7), torch.zeros(2))])     # of this rank alone
            except RuntimeError: pass
        learn.validate()
        learn.add_cb(InValidation(event))
        try:
            for _ in range(2): getattr(learn, call)()  # after a validation no rank waits for another, until the next one
        except Exception as e: res = f'{type(e).__name__}: {e}'
    if rank == 1: time.sleep(5)
    return res

def one(): return living_on([1])
def early(): return living_on([0], 'before_fit')
def sharded(): return living_on([1], 'after_loss', FullyShard)
def sharded_early(): return living_on([0], 'before_batch', FullyShard)
def validate(): return validates('validate')
def get_preds(): return validates('get_preds')
def after_validation(): return validates('validate', event='after_validate')
def validate_sharded(): return validates('validate', FullyShard)

def message(f, n):
    try: launch(f, n)
    except RuntimeError as e: return str(e)

def fails_first():
    "Rank 1 fails, and rank 0 as its connection is lost"
    if dist.get_rank() == 1: boom()
    time.sleep(.2)
    dist.barrier()
def cannot_be_pickled(): return (lambda: 0) if dist.get_rank() else 0
def messages(): return message(fails_first, 2),message(cannot_be_pickled, 2)

def cancel(): raise CancelBatchException
# PyTorch would abort these, or wait for ever. What the error names, and where the ranks part
parting = dict(
    between=("batch 6: .*'blocks.1'", lambda: fit(FullyShard, model=Leaves('block1', 6))),
    with_others=("batch 0: 'aux' was called", lambda: fit(FullyShard, model=Leaves('aux'))),
    validation=("'blocks.2'", lambda: fit(FullyShard, model=Leaves('block2', in_training=False))),
    cancelled=("the end of the batch", lambda: fit(FullyShard, At([1], 'before_backward', cancel))))
def parts(name): return parting[name][1]()

fails = [(one, 2, 1), (one, 3, 1), (early, 2, 0), (sharded, 2, 1), (sharded, 3, 1), (sharded_early, 2, 0)]
in_validation = validate, get_preds, after_validation, validate_sharded
def failures():
    "What each comes to, by name and number of ranks; two at once, as most wait"
    import torch.distributed.fsdp          # here once, not in each process of the pool
    todo = [(f, n) for f,n,_ in fails] + [(f, 2) for f in in_validation]
    with ProcessPoolExecutor(2, multiprocessing.get_context('fork')) as pool:
        jobs = {(f.__name__, n): pool.submit(launch, f, n) for f,n in todo}
        jobs |= {k: pool.submit(launch, parts, 2, k) for k in parting}
        return {k: job.result() for k,job in jobs.items()}

@pytest.fixture(scope='module')
def results(tmp_path_factory): return started(all_two, 2, tmp_path_factory.mktemp('ranks'), __file__)()

@pytest.fixture(scope='module')
def failed(tmp_path_factory): return started(failures, 1, tmp_path_factory.mktemp('failed'), __file__)()[0]

@pytest.mark.parametrize('f,n,failing', fails, ids=['one', 'one of three', 'early', 'sharded', 'sharded, one of three', 'sharded, early'])
def test_a_rank_that_fails_tells_the_others(failed, f, n, failing):
    for r,(error,again) in enumerate(failed[f.__name__,n]):
        assert 'boom' in error
        assert error.startswith('ValueError') if r == failing else f'Stopped, as rank {failing} failed: ValueError' in error
        assert 'start all ranks again' in again

@pytest.mark.parametrize('f', in_validation)
def test_a_rank_that_fails_in_a_validation_alone_tells_the_others(failed, f):
    other,own = failed[f.__name__,2]
    assert own.startswith('ValueError') and 'Stopped, as rank 1 failed: ValueError' in other

def test_an_error_on_all_ranks_leaves_the_group_as_it_is(results):
    for r in results: assert 'boom' in r['all'][0] and r['all'][1] == 'trains'

@pytest.mark.parametrize('dp', ['DataParallel', 'FullyShard', 'LocalSGD'])
def test_statistics_are_equal_after_a_cancelled_fit(results, dp):
    a,b = [r['buffers'][dp] for r in results]
    assert len(a) == 3 and all(torch.equal(x, y) for x,y in zip(a, b))

def test_a_sharded_model_is_exported_whole(results):
    for r in results: assert r['exported'] == (True, {'Normed', 'Parameter'}, True)

@pytest.mark.parametrize('case', parting)
def test_other_layers_on_another_rank_are_an_error(failed, case):
    for r in failed[case]: assert 'go through different layers' in r and re.search(parting[case][0], r), r

def imported(): return {*sys.modules}
def test_ranks_import_nothing_anew(monkeypatch):
    "What all of them need is imported before they are forked, and there for the next `launch`"
    monkeypatch.delitem(sys.modules, 'torch.distributed.fsdp', raising=False)
    assert all(modules <= imported() for modules in launch(imported, 2))

def test_the_first_error_is_shown(tmp_path):
    (first,result), = started(messages, 1, tmp_path, __file__)()
    assert first.startswith('Rank 1 failed: ValueError: boom')
    assert result.startswith('Rank 1 failed: TypeError: What the function returned, a function, cannot be pickled')

if __name__ == '__main__':
    f,n,out = globals()[sys.argv[1]],int(sys.argv[2]),sys.argv[3]
    torch.save([f()] if n == 1 else launch(f, n), out)
