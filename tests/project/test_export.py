"What `make test` finds wrong with generated files"
from pathlib import Path
import pytest
pytest.importorskip('nbdev', reason='Modules are made with nbdev')
from fastcore.nbio import mk_cell, nb2str, new_nb
import export

root = Path(__file__).resolve().parents[2]
quick = ()

@pytest.fixture(scope='module')
def project():
    "A project with one module, as it is after an export"
    cells = ['#| default_exp adder', '#| export\ndef add(a, b): return a+b', 'assert add(1, 2)==3']
    nbs = {'nbs/index.ipynb': [mk_cell('# Title', 'markdown')], 'nbs/api/00_adder.ipynb': map(mk_cell, cells)}
    files = {f: (root/f).read_text(encoding='utf-8') for f in ('pyproject.toml', 'fastaccum/__init__.py')}
    return export.exported({**files, **{f: nb2str(new_nb(list(cs))) for f,cs in nbs.items()}})

def test_up_to_date(project):
    assert {'README.md', 'fastaccum/adder.py', 'fastaccum/_modidx.py'} < set(project)
    assert 'def add(a, b)' in project['fastaccum/adder.py']
    assert export.complaints(project)==[]

def test_out_of_date(project):
    def changed(f, old, new): return {**project, f: project[f].replace(old, new)}
    module,nb = 'fastaccum/adder.py','nbs/api/00_adder.ipynb'
    for files,f,msg in [(changed(module, 'a+b', 'a-b'), module, '+def add(a, b): return a+b'),
                        (changed(nb, '"execution_count": null', '"execution_count": 7'), nb, 'make export'),
                        ({**project, 'fastaccum/old.py': ''}, 'fastaccum/old.py', 'no notebook makes it'),
                        ({k: v for k,v in project.items() if k!='README.md'}, 'README.md', 'is missing')]:
        complaint, = export.complaints(files)
        assert f in complaint and msg in complaint
