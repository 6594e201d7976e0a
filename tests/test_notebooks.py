"The notebooks of the core: each exported cell is followed by one that shows it, on lines and in classes of a size that can be read"
import ast, re
from pathlib import Path
import pytest
from fastcore.nbio import read_nb

api = Path(__file__).resolve().parent.parent/'nbs'/'api'
core = ['00_accumulator', '00_losses', '00b_probe', '03_microbatch', '05_plan', '07_events', '08_rows', '09_loop', '09a_coupled', '09b_passes',
        '10_accumulation', '11_precision']

def code_cells(nb): return [c for c in nb.cells if c.cell_type == 'code']
def is_exported(cell): return cell.source.startswith('#| export')
def is_visible(cell): return not re.search(r'^#\| *(hide|export|exporti|eval|include)\b', cell.source, re.M)
def definitions(cell): return [o for o in ast.parse(cell.source).body if isinstance(o, (ast.FunctionDef, ast.ClassDef))]

def not_shown(cells):
    "Public functions and classes that no visible cell uses before the next export; `*` stands for a next cell that is not visible"
    res = []
    for i,cell in enumerate(cells):
        names = [o.name for o in definitions(cell) if o.name[0] != '_'] if is_exported(cell) else []
        if not names: continue
        if i+1 == len(cells) or not is_visible(cells[i+1]): res.append(('*', *names)); continue
        stop = next((k for k in range(i+1, len(cells)) if is_exported(cells[k])), len(cells))
        shown = '\n'.join(c.source for c in cells[i+1:stop] if is_visible(c))
        res += [n for n in names if not re.search(rf'\b{n}\b', shown)]
    return res

def too_long(cells, line=140, cls=60):
    "Exported lines and classes that are too long"
    exported = [c for c in cells if is_exported(c)]
    lines = [l for c in exported for l in c.source.splitlines() if len(l) > line]
    return lines + [o.name for c in exported for o in definitions(c) if isinstance(o, ast.ClassDef) and o.end_lineno-o.lineno >= cls]

@pytest.mark.parametrize('name', core)
def test_shown(name): assert not_shown(code_cells(read_nb(api/f'{name}.ipynb'))) == []

@pytest.mark.parametrize('name', core)
def test_short(name): assert too_long(code_cells(read_nb(api/f'{name}.ipynb'))) == []

def test_the_checks_can_fail():
    from fastcore.nbio import mk_cell
    def cells(*src): return [mk_cell(s) for s in src]
    assert not_shown(cells('#| export\ndef f(): pass', '#| export\ndef _g(): pass', 'f()')) == [('*', 'f')]
    assert not_shown(cells('#| export\ndef f(): pass', '#| hide\nf()')) == [('*', 'f')]
    assert not_shown(cells('#| export\ndef f(): pass\ndef g(): pass', 'f()')) == ['g']
    assert not_shown(cells('#| export\ndef f(): pass\ndef _g(): pass', 'f()')) == []
    body = lambda n: '#| export\nclass A:\n' + '\n'.join(f'    a{i} = 0' for i in range(n))
    assert too_long(cells(body(59))) == [] and too_long(cells(body(60))) == ['A']
    assert too_long(cells('#| export\na = ' + '1'*136)) == [] and len(too_long(cells('#| export\na = ' + '1'*137))) == 1
