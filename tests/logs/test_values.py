"""Every value that loggers read is a row of a table: `of_step` and `on_request` of `logs/steps`, `of_row` of `logs/wandb`

What holds for one holds for all: each test goes through the tables, and so through a row that is added."""
from types import SimpleNamespace
import pytest
from quick import quickly
from bench.measure import SyncCounter
from reference import *
from test_steps import rows
from fastaccum.accumulation.arguments import taken_columns
from fastaccum.logs import steps
from fastaccum.logs.steps import StepLogger, Value, of_step, on_request

torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.randn(61, 4))
arguments = sorted({v.argument for v in on_request} - {None})
events = 'before_step','after_step','after_batch'

@pytest.fixture(autouse=True)
def memory_is_recorded(monkeypatch):
    "A CPU has no record of its memory"
    fake = SimpleNamespace(reset_peak_memory_stats=lambda d: None, max_memory_allocated=lambda d: 2**20)
    monkeypatch.setattr(steps, 'backend', lambda d: fake)

def trained(*cbs, n_epoch=2, **asked):
    learn = learner(data, 8, GradientAccumulation(16), *cbs, StepLogger(**asked))
    learn.fit(n_epoch, .01)
    return learn
all_asked = dict.fromkeys(arguments, True)

# --- columns
def wrong_columns(values, learn):
    "Names of the values that are not a number in each row, or that no event brings"
    df,n = rows(learn),len(learn.recorder.losses)
    def is_right(v):
        if v.event not in events or v.name not in df: return False
        return len(df[v.name]) == n and df[v.name].dtype.kind in 'bif' and np.isfinite(df[v.name].astype(float)).all()
    return [v.name for v in values if not is_right(v)]

def test_columns():
    "With all arguments, all of them; each argument brings its own, and none but those that are always logged"
    assert wrong_columns(of_step + on_request, trained(**all_asked)) == []
    always = {'step','fit','epoch', *(v.name for v in of_step), *(v.name for v in on_request if v.argument is None)}
    for argument in arguments:
        assert {*rows(trained(**{argument: True}, n_epoch=1))} == always | {v.name for v in on_request if v.argument == argument}
    assert {*rows(trained(n_epoch=1))} == always

def test_names():
    "No two values have one, and no unit of an accumulated batch may be called like one that is always logged"
    names = [v.name for v in of_step + on_request] + ['step','fit','epoch']
    assert len(names) == len({*names})
    always = {*names} - {'items'} - {v.name for v in on_request if v.argument}
    assert always <= {*taken_columns}, 'accumulation/arguments has a list of these names, too'

def test_saved():
    "A checkpoint has all of them"
    learn = trained(**all_asked)
    again = StepLogger(**all_asked)
    again.load_state_dict(learn.step_logger.state_dict())
    assert again.to_df().equals(rows(learn))

def test_weights_and_biases():
    "Its rows have the same values and, once more, those of its own table"
    pytest.importorskip('wandb')
    from test_wandb import Run, wb
    from fastaccum.logs.wandb import of_row
    with Run() as run: learn = trained(wb(), **all_asked)
    of_steps,df = [r for r in run.rows if 'raw_loss' in r],rows(learn)
    assert len(of_steps) == len(df)
    for v in of_row: assert all(math.isfinite(r[v.name]) for r in of_steps), v.name
    for v in of_step + on_request:
        if v.name in ('loss','lr'): continue                # W&B calls them raw_loss and lr_0
        np.testing.assert_allclose([float(r[v.name]) for r in of_steps], df[v.name].astype(float), rtol=1e-6)

# --- the host reads nothing
def reads(*cbs, n_epoch, logger=True, **asked):
    learn = learner(data, 8, GradientAccumulation(16), *([StepLogger(**asked)] if logger else []), *cbs)
    with SyncCounter() as syncs: learn.fit(n_epoch, .01)
    return syncs.n

def reads_of_an_epoch(**kwargs): return reads(n_epoch=3, **kwargs) - reads(n_epoch=2, **kwargs)

@pytest.mark.parametrize('argument', [None, *arguments])
def test_no_host_read(argument):
    "As many as without a logger"
    asked = {argument: True} if argument else {}
    assert reads_of_an_epoch(**asked) == reads_of_an_epoch(logger=False)

@pytest.mark.slow
def test_no_host_read_in_a_row_of_wandb():
    "One transfer a row, whatever is logged"
    pytest.importorskip('wandb')
    from test_wandb import Run, wb
    def counted(**asked):
        with Run(): return reads(wb(), n_epoch=3, **asked) - reads(wb(), n_epoch=2, **asked)
    assert counted(**all_asked) == counted()

# --- the checks find what is wrong with a row
planted = {
    'read at the step': Value('planted', 'before_step', lambda log: next(log.learn.model.parameters()).grad.norm().item()),
    'read after it': Value('planted', 'after_step', lambda log: float(next(log.learn.model.parameters()).detach().norm())),
    'read with the batch': Value('planted', 'after_batch', lambda log: log.learn.loss.tolist()),
    'copied': Value('planted', 'after_batch', lambda log: log.learn.loss.detach().cpu())}

@pytest.mark.parametrize('where', quickly(['read at the step','copied'], planted))
def test_a_host_read_is_found(where, monkeypatch):
    before = reads_of_an_epoch()
    monkeypatch.setattr(steps, 'on_request', [*on_request, planted[where]])
    assert reads_of_an_epoch() >= before + 4
    with pytest.raises(AssertionError): test_no_host_read(None)

def test_a_host_read_of_every_logger_is_found(monkeypatch):
    monkeypatch.setattr(steps, 'of_step', [*of_step, Value('planted', 'after_batch', lambda learn: learn.loss.item())])
    with pytest.raises(AssertionError): test_no_host_read(None)

@pytest.mark.parametrize('value', [
    Value('planted', 'after_epoch', lambda log: 1), Value('planted', 'after_step', lambda log: None),
    Value('planted', 'after_step', lambda log: 1. if log.learn.iter > 4 else None), Value('planted', 'after_step', lambda log: math.nan)])
def test_a_wrong_column_is_found(value, monkeypatch):
    monkeypatch.setattr(steps, 'on_request', [*on_request, value])
    assert wrong_columns([value], trained()) == ['planted']

@pytest.mark.parametrize('event', events)
def test_a_row_is_enough(event, monkeypatch):
    "What is added to the table is logged, whenever in a step it is there"
    monkeypatch.setattr(steps, 'on_request', [*on_request, Value('added', event, lambda log: torch.tensor(log.learn.iter))])
    learn = trained()
    assert wrong_columns([steps.on_request[-1]], learn) == []
    assert rows(learn).added.tolist() == [1, 3, 5, 7]*2
