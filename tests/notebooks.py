"The notebooks' own assertions as tests of the modules that are there; `make mutants` runs them, `make test` has nbdev-test for this"
import json, re
from importlib import import_module
from pathlib import Path
import pytest

NBS = sorted((Path(__file__).resolve().parent.parent/'nbs/api').rglob('*.ipynb'))

@pytest.mark.filterwarnings('always')   # as in a notebook, where a cell may assert a warning
@pytest.mark.parametrize('nb', NBS, ids=lambda f: f.stem)
def test_notebook(nb, monkeypatch):
    "What `#| export` cells define comes from the module"
    monkeypatch.setenv('IN_TEST', '1')  # else the last cell exports
    cells = [''.join(c['source']) for c in json.loads(nb.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code']
    flags = [set(re.findall(r'^#\s*\|\s*(\w+)', c, re.M)) for c in cells]
    module, = re.findall(r'^#\s*\|\s*default_exp\s+(\S+)', '\n'.join(cells), re.M)
    names = {k: v for k,v in vars(import_module(f'fastaccum.{module}'.removesuffix('.__init__'))).items()
             if not k.startswith('__')} | {'__name__': '__main__'}
    for cell,f in zip(cells, flags):
        if not f & {'default_exp', 'export', 'exporti', 'exports', 'eval'}: exec(cell, names)
