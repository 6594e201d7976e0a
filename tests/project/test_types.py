"The public names as type checkers see them"
import ast, inspect, subprocess, sys
from pathlib import Path
import pytest
import fastaccum.all, fastaccum.wandb

root = Path(__file__).resolve().parents[2]

@pytest.mark.slow
def test_mypy():
    "Signatures agree with what is in them; typed_user.py is right, but for the lines that are marked as wrong"
    pytest.importorskip('mypy', reason="Types are checked with mypy: pip install -e '.[dev]'")
    res = subprocess.run([sys.executable, '-m', 'mypy'], cwd=root, capture_output=True, text=True, timeout=300)
    assert res.returncode==0, res.stdout + res.stderr

def functions():
    "name -> function, of all that users call"
    for o in [*(getattr(fastaccum.all, n) for n in fastaccum.all.__all__), *(getattr(fastaccum.wandb, n) for n in fastaccum.wandb.__all__)]:
        if inspect.isfunction(o): yield o.__qualname__,o
        elif inspect.isclass(o): yield from ((f.__qualname__, f) for f in vars(o).values() if inspect.isfunction(f))

def test_none():
    "A default of None is in the type too. mypy is not asked: its error for that is also the one for much in bodies that is right"
    wrong = [(name,k,p.annotation) for name,f in functions() for k,p in inspect.signature(f).parameters.items()
             if p.default is None and p.annotation is not p.empty and 'None' not in str(p.annotation)]
    assert not wrong

def test_all_names_are_used():
    user = ast.parse((root/'tests/project/typed_user.py').read_text(encoding='utf-8'))
    assert not {*fastaccum.all.__all__, 'WandbCallback'} - {n.id for n in ast.walk(user) if isinstance(n, ast.Name)}
