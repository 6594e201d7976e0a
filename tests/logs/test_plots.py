"Pictures: whole in a file, nothing on the lines"
import pytest
from reference import *
from fastaccum.batch_size import GradientNoiseScale
from fastaccum.memory import *
from fastaccum.precision.callback import MixedPrecision
from fastaccum.logs.steps import StepLogger
import matplotlib.pyplot as plt

@pytest.fixture
def watched():
    "A Learner with all that can be drawn, and steps of two sizes"
    torch.manual_seed(0)
    x = torch.randn(61, 6)
    data = Data(x, x @ torch.randn(6, 4))
    learn = learner(data, 8, GradientAccumulation(24, micro_batch_size=4), GradientNoiseScale(), StepLogger(grad_norm=True, times=True),
                    MixedPrecision(init_scale=2.**10))
    learn.fit(2)
    return learn

drawn = dict(steps=lambda l: l.step_logger.plot(), epochs=lambda l: l.step_logger.plot(['items'], x='epoch'),
             times=lambda l: l.step_logger.plot_times(),
             noise=lambda l: l.gradient_noise_scale.plot(), scale=lambda l: l.mixed_precision.plot(),
             sizes=lambda l: l.gradient_accumulation.plot(2),
             memory=lambda l: l.memory_advice().plot())

@pytest.mark.slow
@pytest.mark.parametrize('name', drawn)
def test_a_plot_is_whole_in_a_file(watched, name):
    "No label is cut off by `savefig`, no legend lies on the lines, and steps are whole numbers"
    fig = np.ravel(drawn[name](watched))[0].figure
    fig.canvas.draw()
    width,height = fig.canvas.get_width_height()
    shown = [ax for ax in fig.axes if ax.axison]
    legends = [*fig.legends, *[ax.get_legend() for ax in shown if ax.get_legend()]]
    assert shown and legends
    texts = [t for ax in shown for t in (ax.xaxis.label, ax.title) if t.get_text()]
    for o in [*texts, *legends]:
        box = o.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, o
    for ax in shown:
        assert not any(ax.get_window_extent().overlaps(o.get_window_extent()) for o in legends)
        if 'step' in ax.get_xlabel(): assert all(t == int(t) for t in ax.get_xticks())
    plt.close(fig)

def test_what_is_drawn(watched):
    "Columns that change, the noise scale in one panel, items from 0"
    axs = {ax.get_title(): ax for ax in watched.step_logger.plot().flat if ax.axison}
    assert {'items','loss','grad_norm','noise_scale'} <= {*axs} and not {'micro_bs','lr','noise_low','noise_high'} & {*axs}
    assert axs['items'].get_ylim()[0] == 0 and len(axs['noise_scale'].collections) == 1
    assert np.ravel(watched.step_logger.plot(['lr']))[0].get_title() == 'lr'       # if it is asked for
    plt.close('all')
