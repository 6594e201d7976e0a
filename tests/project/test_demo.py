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
    pat = r'^\((\w)\).*?([\d.]+)%\s+(\d+)\s+(\d+) to (\d+)\s+([\d.e-]+)?\s+([\d.]+) (?:MiB|KiB)'
    return {m[1]: [float(v or 0) for v in m.groups()[1:]] for m in re.finditer(pat, out, re.M)}

def test_table(demo):
    a,b,c,d,e,f = (rows(demo[1])[k] for k in 'abcdef')
    for same in (b, c, d):
        assert same[:4] == a[:4] and same[4] < 1e-5 # accuracy too
    assert a[0] > 50 and a[1:4] == [12, 157, 256]
    assert e[1:4] == [11, 256, 285] and e[4] > 1e-3 # the remainder ran into the next epoch
    assert f[2] >= 29 and f[3] == 512
    assert 6.5 < a[5]/b[5] < 8.5 and b[5] == d[5]

def test_verdict(demo):
    assert '(b), (c) and (d) are (a): the same 12 steps' in demo[1] and '(e) is not: 11 steps' in demo[1]

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
