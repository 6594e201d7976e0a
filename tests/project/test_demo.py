"`make demo` end to end, with few epochs"
import os, re, subprocess, sys
from configparser import ConfigParser
from pathlib import Path
from pkgutil import resolve_name
import pytest

root = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

@pytest.fixture(scope='module')
def demo(tmp_path_factory):
    "The folder in which the demo ran, and what it printed"
    cwd = tmp_path_factory.mktemp('demo')
    env = {**os.environ, 'PYTHONPATH': str(root), 'MPLBACKEND': 'Agg', 'PYTHONIOENCODING': 'utf-8'}
    res = subprocess.run([sys.executable, '-m', 'fastaccum.demo', '--epochs', '2'], cwd=cwd, env=env,
                         capture_output=True, text=True, timeout=300)
    assert res.returncode == 0, res.stderr
    return cwd, res.stdout

def rows(out):
    "name -> (accuracy, steps, fewest items, most items, difference to (a), MiB)"
    pat = r'^\((\w)\).*?([\d.]+)%\s+(\d+)\s+(\d+) to (\d+)\s+([\d.e-]+)?\s+([\d.]+) MiB'
    return {m[1]: [float(v or 0) for v in m.groups()[1:]] for m in re.finditer(pat, out, re.M)}

def test_table(demo):
    (acc_a,*a), (acc_b,*b), (_,*c), (_,*d) = (rows(demo[1])[k] for k in 'abcd')
    assert a[:3] == b[:3] == [12, 157, 256]
    assert c[:3] == [11, 256, 285]                  # the remainder ran into the next epoch
    assert d[1] >= 29 and d[2] == 512
    assert acc_a == acc_b > 50
    assert b[3] < 1e-5 < 1e-3 < c[3]
    assert a[4]/b[4] == pytest.approx(8, rel=.1)
    assert b[4] == c[4] == d[4]

def test_verdict(demo): assert '(b) is (a): the same 12 steps' in demo[1] and '(c) is not: 11 steps' in demo[1]

def test_files(demo):
    cwd,out = demo
    png = cwd/'demo'/'demo.png'
    assert png.read_bytes()[:4] == b'\x89PNG' and str(png.relative_to(cwd)) in out
    assert [p.name for p in cwd.iterdir()] == ['demo']

def test_wandb(demo):
    pytest.importorskip('wandb')
    cwd,out = demo
    run, = cwd.glob('demo/wandb/offline-run-*')
    from fastaccum.wandb import offline_history
    assert offline_history(run/f"run-{run.name.split('-')[-1]}.wandb") and str(run.relative_to(cwd)) in out

def test_without_wandb(monkeypatch, capsys, tmp_path):
    from fastaccum.demo import wandb_offline
    monkeypatch.setitem(sys.modules, 'wandb', None)
    monkeypatch.delitem(sys.modules, 'fastaccum.wandb', raising=False)
    with wandb_offline(tmp_path) as cbs: assert cbs == []
    assert 'not installed' in capsys.readouterr().out

@pytest.mark.quick
def test_console_script():
    cfg = ConfigParser(); cfg.read(root/'settings.ini', encoding='utf-8')
    name,target = cfg['DEFAULT']['console_scripts'].split('=')
    from fastaccum.demo import main
    assert name == 'fastaccum-demo' and resolve_name(target) is main
