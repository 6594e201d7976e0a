"The notebooks in `examples`, which install fastaccum themselves, run from top to bottom; without network they make their own pictures"
from pathlib import Path
import fastai.vision.all, pytest
pytest.importorskip('fastcore.nbio', reason='nbdev brings a fastcore that reads notebooks')
from fastcore.nbio import read_nb

root = Path(__file__).resolve().parents[2]
install = '!pip install -q git+https://github.com/fastaccum/fastaccum'

@pytest.mark.slow
def test_from_the_course(monkeypatch):
    def offline(*args, **kwargs): raise OSError('no network')
    monkeypatch.setattr(fastai.vision.all, 'untar_data', offline)
    cells = [c.source for c in read_nb(root/'examples'/'kaggle.ipynb').cells if c.cell_type == 'code']
    assert cells[0] == install and not any('!pip' in c for c in cells[1:])
    names = {}
    for c in cells[1:]: exec(c, names)
    learn,memory = names['learn'],names['memory']
    assert learn.step_logger.to_df()['items'].tolist() == [64]*8 and learn.dls.one_batch()[0].shape == (64, 3, 32, 32)
    assert memory[4] < memory[1]
