"How far the gradient of a step was off from that of one loss of all its outputs: in rows of the steps where it was measured"
import pytest
from bench.measure import SyncCounter
from reference import *
from test_steps import rows
from fastaccum.core.warnings import FastaccumWarning
from fastaccum.logs.steps import StepLogger

torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.randn(61, 4))
def masked(pred, y): return ((pred-y).square()*(y > 0)).sum()/(y > 0).sum()
def centred(pred, y): return (pred-pred.mean(0)-y).square().mean()

def trained(loss_func, *cbs, n_epoch=3, **kwargs):
    learn = learner(data, 8, GradientAccumulation(16, **kwargs), *cbs)
    learn.loss_func = loss_func
    learn.fit(n_epoch, .01)
    return learn

def test_of_a_mean():
    "Rounding, in some steps; the others have no value, and a checkpoint has them all"
    df = rows(learn := trained(masked, StepLogger()))
    off = df.grad_off.dropna()
    assert 2 <= len(off) < len(df) and off.max() < 1e-5 and df.grad_off.notna()[0]
    (again := StepLogger()).load_state_dict(learn.step_logger.state_dict())
    assert again.to_df().equals(df)

@pytest.mark.filterwarnings('ignore::fastaccum.core.warnings.FastaccumWarning')
def test_of_what_is_no_mean():
    "The largest is what the warning and loss_rule say"
    learn = trained(centred, StepLogger(), check_loss='always')
    off = rows(learn).grad_off
    assert off.notna().any() and off.max() > .01
    assert f'{off.max():.2%} off' in learn.gradient_accumulation.loss_rule

def test_of_known_losses(): assert 'grad_off' not in rows(trained(nn.MSELoss(), StepLogger()))

def test_reads():
    "It costs no reading from the device"
    def reads(*cbs):
        with SyncCounter() as syncs: trained(masked, *cbs, n_epoch=1)
        return syncs.n
    assert reads() == reads(StepLogger())

def test_weights_and_biases():
    pytest.importorskip('wandb')
    from test_wandb import Run, wb
    with Run() as run: learn = trained(masked, wb(), StepLogger(), n_epoch=1)
    logged = [r.get('grad_off') for r in run.rows if 'raw_loss' in r]
    assert [v is not None for v in logged] == rows(learn).grad_off.notna().tolist()
