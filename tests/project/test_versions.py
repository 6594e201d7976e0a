"`make versions`: which versions of PyTorch, which Pythons, and what it says at the end. The tests in those environments are not run here"
import sys, threading
import pytest, yaml
import versions
from test_metadata import cfg, needs_make, planned, root

@pytest.fixture
def runs(monkeypatch):
    "What would run: name -> arguments for pip; only Python 3.10 and 3.13 are here, and the tests of one set fail"
    made = {}
    def environment(name, version, args):
        if version in ('3.11', '3.12'): return None
        made[name] = args
        return name
    monkeypatch.setattr(versions, 'python_of', lambda v: None if v in ('3.11', '3.12') else f'python{v}')
    monkeypatch.setattr(versions, 'environment', environment)
    monkeypatch.setattr(versions, 'tested', lambda name: ('1 failed in 2s', False) if name == 'newest' else ('2 passed in 2s', True))
    monkeypatch.setattr(versions, 'versions_in', lambda name: ['3.10.1', '2.10.0', '2.8.7', '1.8.0'])
    def run(*names):
        made.clear()
        with pytest.raises(SystemExit) as e: versions.main(names)
        return dict(made),e.value.code
    return run

def test_each_minor_between():
    known = '2.15.0 2.14.1 2.14.0 2.13.0 2.12.2 2.12.10 2.11.1 2.11.0 2.10.0 2.13.0rc1 1.13.1'.split()
    assert versions.minors_between(known, '2.11', '2.15.0') == ['2.12.10', '2.13.0', '2.14.1']
    assert versions.minors_between(known, '2.14', '2.15.0') == []

def test_pythons_that_are_not_here(runs, capsys):
    made,failed = runs()
    assert [*made] == ['lowest', 'newest'] and failed
    assert '-c' in made['lowest'] and made['lowest'][1] == str(root/'tests/lowest.txt')
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[0].split() == ['Python', 'torch', 'fastai', 'fastcore', 'quick', 'tests']
    assert lines[1].split() == ['lowest', '3.10.1', '2.10.0', '2.8.7', '1.8.0', '2', 'passed', 'in', '2s']
    assert 'torch between  3.12' in lines[2] and lines[2].endswith('skipped: this Python is not here')

def test_one_end(runs):
    assert runs('lowest') == (dict(lowest=['-c', str(root/'tests/lowest.txt')]), False)
    assert runs('newest')[1] is True and "no 'oldest': choose from lowest, " in runs('oldest')[1]

def test_installed_at_once(runs, monkeypatch):
    "As many as there are processors: none waits for the tests of another"
    both = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(versions.os, 'cpu_count', lambda: 2)
    monkeypatch.setattr(versions, 'environment', lambda name, *args: name if both.wait() < 2 else None)
    assert runs(*versions.ends)[1] is True

def test_only_installed(runs, monkeypatch):
    "Before there is time for the tests; a set whose Python is not here is none that could be tested"
    monkeypatch.setattr(versions, 'tested', None)
    assert runs('--install', 'lowest') == (dict(lowest=['-c', str(root/'tests/lowest.txt')]), False)
    assert [*runs('--install')[0]] == ['lowest', 'newest'] and runs('--install')[1]

def test_of_text():
    for name in versions.of_text: assert (root/f'tests/project/test_{name}.py').exists()

def test_pythons_of_the_ends():
    assert [v for v,_ in versions.ends.values()] == [cfg['pythons'].split()[0], cfg['pythons'].split()[-1]]

def test_python_of():
    here = '%d.%d' % sys.version_info[:2]
    assert versions.can_make_environments(sys.executable, here) and not versions.can_make_environments(sys.executable, '3.1')
    assert versions.python_of('3.1') is None

@needs_make
def test_the_same_everywhere(tmp_path):
    "The workflow runs each end by the target that a developer types"
    job = yaml.safe_load((root/'.github/workflows/test.yml').read_text(encoding='utf-8'))['jobs']['versions']
    assert job['steps'][-1]['run'] == 'make versions ONLY=${{ matrix.versions }}'
    assert [o['versions'] for o in job['strategy']['matrix']['include']] == [*versions.ends]
    assert planned(tmp_path, 'versions', 'ONLY=lowest').split()[-2:] == ['tools/versions.py', 'lowest']
    assert planned(tmp_path, 'versions', 'ONLY=lowest', 'INSTALL=1').split()[-2:] == ['--install', 'lowest']
