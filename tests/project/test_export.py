"What `make test` finds wrong with generated files"
from pathlib import Path
import pytest
pytest.importorskip('nbdev', reason='Modules are made with nbdev')
from fastcore.nbio import mk_cell, nb2str, new_nb, read_nb, write_nb
import export

root = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

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

def test_warnings(tmp_path):
    "A page shows the warnings for users that its cells give, and nothing else of stderr; what was kept stays"
    own,others = 'FastaccumWarning: a [loss]: 3% off','UserWarning: no GPU'
    err = "Epoch 0:  50%|\n/a b/c.py:30: FutureWarning: old\n  f()\n" \
          f"""/tmp/k_1/2.py:3: {own}\n  learn.fit(1)\n/lib/t.py:5: {others}\n  g()\nwandb: done\n"""
    def stream(name, text): return dict(output_type='stream', name=name, text=text)
    cells = [mk_cell('f()', outputs=[stream('stdout', '1\n'), stream('stderr', err)]),
             mk_cell('g()', outputs=[stream('stderr', 'wandb: done')])]
    fn = tmp_path/'a.ipynb'
    for _ in range(2):
        write_nb(new_nb(cells), fn)
        export.keep_warnings(fn)
        cells = read_nb(fn).cells
        assert [[(o.name, ''.join(o.text)) for o in c.outputs]
                for c in cells] == [[('stdout', '1\n'), ('stderr', f'{own}\n{others}\n')], []]

@pytest.mark.parametrize('page', ['api/accumulation/01_callback', 'tutorials/many_devices'])
def test_nbdev_runs_no_cell(page, monkeypatch):
    "nbdev's own `nbdev-docs` and `nbdev-proc-nbs` come to the end of a page whose cells mix imports and code, or fail one by one"
    from nbdev.processors import FilterDefaults
    monkeypatch.chdir(root)                # where its settings are
    nb = read_nb(root/f'nbs/{page}.ipynb')
    last = [c.source for c in nb.cells if c.cell_type == 'markdown'][-1]
    FilterDefaults()(nb)
    assert [c.source for c in nb.cells if c.cell_type == 'markdown'][-1][:40] == last[:40]
