"""The notebooks of the package read top-down: a promise, what is public and how it works, and only then what it is made of

`debts` lists the pages that do not pass yet; one that passes must leave the list."""
import ast, builtins, json, re, subprocess, sys
from itertools import pairwise
from pathlib import Path
import pytest
pytest.importorskip('fastcore.nbio', reason='nbdev brings a fastcore that reads notebooks')
from fastcore.nbio import mk_cell, read_nb
from test_house import public_names, read
from test_metadata import needs_make

api = Path(__file__).resolve().parents[2]/'nbs'/'api'
pages = {f.relative_to(api).with_suffix('').as_posix(): read_nb(f) for f in sorted(api.rglob('*.ipynb'))}
most = 5    # cells in a row that define something, with nothing to see in between

# Pages with a cell of more than 100 lines, which is one concept all the same
one_concept = {'core/01_accumulator': 'public: type checkers see only what stands in the class',
               'core/05_scaler': "public, and in the place of the methods of PyTorch's class",
               'precision/01_callback': 'one fit, in the order of its events'}

debts = dict(promise=set(), long_lines=set(),
             long_cells=set(one_concept),
             in_a_row=set(), public_first=set(), not_shown=set(), mocked=set())

def is_exported(cell): return bool(re.match(r'#\| *exporti?\b', cell.source))
def is_visible(cell):
    return (cell.cell_type == 'code'
            and not re.search(r'^#\| *(hide|export|exporti|default_exp|eval: *false|include: *false)\b', cell.source,
                              re.M))
def is_typed(cell): return is_visible(cell) and not re.search(r'^#\| *echo: *false', cell.source, re.M)
def parsed(cell): return ast.parse(re.sub(r'(?m)^\s*[%!].*', '', cell.source)).body
def definitions(cell): return [o for o in parsed(cell) if isinstance(o, (ast.FunctionDef,ast.ClassDef))] if is_exported(cell) else []

# -- The checks: what is wrong with the cells of a page ----------------------------------------------------------
def promise(cells, public):
    "A page begins with its title and one sentence of promise"
    return [] if cells and re.match(r'# \S.*\n\n> \S.*$', cells[0].source.rstrip()) else ['no promise']

def long_lines(cells, public): return [l for c in cells if is_exported(c) for l in c.source.splitlines() if len(l) > 140]

def long_cells(cells, public):
    "A cell shows one concept: (its first name, its lines) where it has more than 100, which only a class with many methods may need"
    found = [(c, len([l for l in c.source.splitlines() if l[:2] != '#|'])) for c in cells if is_exported(c)]
    return [(definitions(c)[0].name if definitions(c) else '', n) for c,n in found if n > 100]

def in_a_row(cells, public):
    "Names of cells that follow each other, with nothing to see in between"
    runs = [[]]
    for c in cells:
        if definitions(c): runs[-1].append(definitions(c)[0].name)
        elif is_visible(c): runs.append([])
    return [run for run in runs if len(run) > most]

def needed_by(o):
    "Names that Python needs when it defines `o`: of its base classes and decorators"
    return {n.id for part in [*getattr(o, 'bases', []), *o.decorator_list] for n in ast.walk(part) if isinstance(n, ast.Name)}

def is_for_learner(o): return isinstance(o, ast.FunctionDef) and bool(o.args.args) and ast.unparse(o).count('self: Learner') > 0

def public_first(cells, public):
    "Helpers that come before the first public name of their page, which does not need them to be defined"
    found = [o for c in cells for o in definitions(c)]
    first = next((o for o in found if o.name in public or is_for_learner(o)), None)
    return [o.name for o in found[:found.index(first)] if o.name not in needed_by(first)] if first else []

def not_shown(cells, public):
    "Public names that no visible cell of their page uses"
    shown = '\n'.join(c.source for c in cells if is_visible(c))
    return [o.name for c in cells for o in definitions(c) if o.name in public and not re.search(rf'\b{o.name}\b', shown)]

def mocked(cells, public):
    "Examples with a namespace or a mock where a real `Learner` belongs"
    return [o for c in cells if not is_exported(c) and c.cell_type == 'code'
            for o in re.findall(r'learn\w* *= *(SimpleNamespace|Mock|MagicMock)\(', c.source)]

checks = [promise, long_lines, long_cells, in_a_row, public_first, not_shown, mocked]

@pytest.mark.slow
@pytest.mark.parametrize('check', checks, ids=lambda c: c.__name__)
def test_pages(check):
    names = public_names(read())
    found = {page: wrong for page,nb in pages.items() if (wrong := check(nb.cells, names))}
    assert {page: wrong for page,wrong in found.items() if page not in debts[check.__name__]} == {}
    assert debts[check.__name__] <= found.keys(), 'no longer a debt: take it from the list'

@pytest.mark.parametrize('check,src,wrong', [
    (promise, ['# A\n\n> What for'], 0), (promise, ['# A'], 1),
    (long_lines, ['#| export\na = ' + '1'*136], 0), (long_lines, ['#| exporti\na = ' + '1'*137], 1),
    (long_cells, ['#| export\ndef f():' + '\n    a = 1'*99], 0), (long_cells, ['#| exporti\ndef f():' + '\n    a = 1'*100], 1),
    (in_a_row, ['#| export\ndef f(): pass']*5, 0), (in_a_row, ['#| exporti\ndef f(): pass']*6, 1),
    (in_a_row, ['#| export\ndef f(): pass', 'f()']*6, 0),
    (in_a_row, ['#| export\ndef f(): pass', '#| hide\nf()']*6, 1), (in_a_row, ['#| export\nimport a']*6, 0),
    (public_first, ['#| export\nclass A: pass', '#| exporti\ndef f(): pass'], 0),
    (public_first, ['#| exporti\ndef f(): pass', '#| export\nclass A: pass'], 1),
    (public_first, ['#| exporti\ndef f(): pass'], 0), (public_first, ['#| exporti\nclass B: pass', '#| export\nclass A(B): pass'], 0),
    (not_shown, ['#| export\nclass A: pass', 'A()'], 0), (not_shown, ['#| export\nclass A: pass', '#| hide\nA()'], 1),
    (not_shown, ['#| exporti\ndef f(): pass'], 0),
    (mocked, ['learn = SimpleNamespace(opt=1)'], 1), (mocked, ['learn = synth_learner()'], 0)])
def test_the_checks_can_fail(check, src, wrong):
    assert len(check([mk_cell(s, 'markdown' if s[:2] == '# ' else 'code') for s in src], {'A'})) == wrong

@needs_make
def test_each_notebook_runs_in_test_or_in_pages():
    "`make test` runs those without slow cells, `make pages` the others, with all of their cells"
    def taken(target):
        said = subprocess.check_output(['make', '-n', target, f'PYTHON={sys.executable}'], cwd=api.parents[1], text=True)
        flags,which = re.search(r"nbdev-test --n-workers \d (--flags slow )?--path-re '(.*)'", said).groups()
        return bool(flags),{f for f in api.parent.rglob('*.ipynb') if re.search(which, str(f))}
    def has_slow(f): return any(c.cell_type == 'code' and re.search(r'^#\| *slow', c.source, re.M) for c in read_nb(f).cells)
    every = {*api.parent.rglob('*.ipynb')}
    slow = {*filter(has_slow, every)}
    assert taken('test') == (False, every - slow) and taken('pages') == (True, slow)
    assert 10 < len(slow) < len(every)/2

def in_text(nb): return [src for c in nb.cells if c.cell_type == 'markdown' for src in re.findall(r'(?ms)^```python\n(.*?)^```', c.source)]

def lacks(src, known):
    "Names that code reads and nobody defines, but for those of which a comment says that they are the reader's own"
    nodes = [*ast.walk(ast.parse(src))]
    made = {getattr(n, 'name', getattr(n, 'arg', getattr(n, 'id', ''))) for n in nodes if not isinstance(getattr(n, 'ctx', None), ast.Load)}
    imported = {(a.asname or a.name).partition('.')[0] for n in nodes if isinstance(n, (ast.Import,ast.ImportFrom)) for a in n.names}
    own = {w for told in re.findall(r'# with your own ([^;\n]*)', src) for w in re.findall(r'\w+', told)}
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - made - imported - own - known

def test_code_in_text_runs_or_is_a_sketch():
    "A reader has its names from fastai's imports and ours, from the page's cells, or is told to put in their own"
    import fastai.tabular.all, fastai.text.all, fastai.vision.all, fastaccum.all
    known = {*dir(builtins)}.union(*(dir(m) for m in (fastai.tabular.all, fastai.text.all, fastai.vision.all, fastaccum.all)))
    found = {f.stem: read_nb(f) for f in api.parent.rglob('*.ipynb')}
    defined = {f: {o.name for c in nb.cells if is_exported(c) for o in definitions(c)} for f,nb in found.items()}
    assert sum(len(in_text(nb)) for nb in found.values()) > 20
    assert {f: wrong for f,nb in found.items() if (wrong := [w for src in in_text(nb) if (w := lacks(src, known|defined[f]))])} == {}
    assert lacks('learn = Learner(dls, model)   # with your own dls; or not', {'Learner'}) == {'model'}
    assert lacks('import a\ndef f(x): return x + a.b\nf(y)', set()) == {'y'}

def test_no_gpu_has_run_it():
    "As long as home says so, the pages of GPUs do"
    names = 'index', 'tutorials/any_gpu', 'tutorials/many_devices', 'tutorials/mixed_precision'
    said = {n: 'no GPU has run it yet' in '\n'.join(c.source for c in read_nb(api.parent/f'{n}.ipynb').cells) for n in names}
    assert len({*said.values()}) == 1, said

def test_no_output_below_a_sketch():
    "What a hidden cell prints does not look as if the code before it in the text had printed it"
    pairs = [pair for f in api.parent.rglob('*.ipynb') for pair in pairwise(read_nb(f).cells)]
    below = [b for a,b in pairs if a.cell_type == 'markdown' and a.source.rstrip().endswith('```') and b.cell_type == 'code']
    assert [c.source for c in below if c.outputs and not is_typed(c)] == []

def draws(cell):
    "Does a page show a picture that this cell draws? `show_results` of a table, and a picture that the cell closes or saves, are none"
    return (is_visible(cell) and bool(re.search(r'plt\.subplots|\.plot_\w+\(|show_results\([^)]*figsize', cell.source))
            and 'redirect_stdout' not in cell.source)

def test_pictures_are_there():
    "Executed with MPLBACKEND=Agg, a page loses them"
    cells = [(f.stem, c) for f in api.parent.rglob('*.ipynb') for c in read_nb(f).cells if draws(c)]
    assert len(cells) > 20
    assert [(page, c['id']) for page,c in cells if not any('image/png' in o.get('data', {}) for o in c.outputs)] == []

def versions(outputs):
    "Library -> its versions in what `outputs` print"
    found,names = {},{'pytorch': 'torch', 'composer': 'mosaicml'}
    libraries = 'python|torch|pytorch|fastai|fastcore|accelerate|lightning|transformers|composer|mosaicml|fastaccum'
    for name,v in re.findall(rf'(?<![\w-])({libraries}) (\d+\.\d+\.\d+)', outputs.lower()):
        found.setdefault(names.get(name, name), set()).add(v)
    return found

@pytest.mark.slow
def test_one_version():
    "All pages were made with the same versions, but for what has its date and its own versions beside it"
    texts = [json.dumps(c.outputs) for f in api.parent.rglob('*.ipynb') for c in read_nb(f).cells if c.cell_type == 'code']
    dated = r'run on [\d-]+ with fastai [\d.]+ and PyTorch [\d.]+|\w+: \d{4}-\d\d-\d\d, (\w+ [\d.]+(, )?)+'
    found = versions(re.sub(dated, '', '\n'.join(texts)))
    assert {'torch', 'fastai', 'lightning'} <= found.keys()
    assert {name: vs for name,vs in found.items() if len(vs) > 1} == {}
    assert versions('torch 2.9.0, PyTorch 2.9.1 or newer; tft-torch 1.0.0') == {'torch': {'2.9.0', '2.9.1'}}

def test_guides_begin_in_short():
    "The line to write, when, and what it costs stand before any explanation"
    from menu import menu
    groups = menu['First steps'], *menu['Tutorials'].values()
    heads = {p: re.search(r'(?m)^## (.*)', '\n'.join(c.source for c in read_nb(api.parent/f'{p}.ipynb').cells)) for g in groups for p in g}
    assert len(heads) > 15 and {p for p,m in heads.items() if m[1] != 'In short'} == set()
