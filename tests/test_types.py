"The public names as type checkers see them"
import ast, subprocess, sys
from pathlib import Path
import pytest
import fastaccum.all

root = Path(__file__).resolve().parent.parent

def test_mypy():
    "Signatures agree with what is in them; typed_user.py is right, but for the lines that are marked as wrong"
    pytest.importorskip('mypy', reason="Types are checked with mypy: pip install -e '.[dev]'")
    res = subprocess.run([sys.executable, '-m', 'mypy'], cwd=root, capture_output=True, text=True, timeout=300)
    assert res.returncode==0, res.stdout + res.stderr

def test_all_names_are_used():
    user = ast.parse((root/'tests/typed_user.py').read_text(encoding='utf-8'))
    assert not {*fastaccum.all.__all__, 'WandbCallback'} - {n.id for n in ast.walk(user) if isinstance(n, ast.Name)}
