"The source distribution and the wheel: what is in them, and that the wheel runs in an empty environment. Needs no network"
import ast, os, re, shutil, subprocess, sys, sysconfig, tarfile, zipfile
from email.parser import Parser
from pathlib import Path
import pytest
from test_metadata import cfg, root, toml

pytestmark = pytest.mark.slow

def python(code, *path, **kwargs):
    "Run `code` in a new process, with the folders `path` first among those it imports from; what it printed"
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, path)), 'PYTHONWARNINGS': 'ignore', 'MPLBACKEND': 'Agg'}
    res = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=300, **kwargs)
    assert res.returncode==0, res.stdout + res.stderr
    return res.stdout

@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "The wheel that is built from the source distribution, in a copy of what a clone has"
    pytest.importorskip('build', reason="Packages are built with build: pip install -e '.[dev]'")
    src = tmp_path_factory.mktemp('package')/'src'
    skip = shutil.ignore_patterns('.*', '_*', '*.egg-info', 'build', 'dist', 'demo', 'wandb', 'models')
    shutil.copytree(root, src, ignore=lambda d, names: skip(d, names) - {'__init__.py', '_modidx.py'})
    res = subprocess.run([sys.executable, '-m', 'build', '--no-isolation'], cwd=src, capture_output=True, text=True, timeout=300)
    assert res.returncode==0, res.stdout + res.stderr
    return zipfile.ZipFile(next((src/'dist').glob('*.whl')))

@pytest.fixture(scope='module')
def dist(wheel):
    "The folder that both are in"
    return Path(wheel.filename).parent

@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    "A folder with what the wheel installs"
    where = tmp_path_factory.mktemp('installed')
    wheel.extractall(where)
    return where

def test_files(wheel):
    ours = {f.relative_to(root).as_posix() for f in (root/'fastaccum').rglob('*') if f.suffix in ('.py', '.typed')}
    info = f"fastaccum-{cfg['version']}.dist-info"
    others = {f'{info}/{f}' for f in ('METADATA', 'WHEEL', 'RECORD', 'entry_points.txt', 'top_level.txt', 'licenses/LICENSE')}
    assert 'fastaccum/py.typed' in ours and set(wheel.namelist())==ours|others

def test_sdist(dist):
    "All that the wheel is built from, and nothing that a build leaves behind"
    with tarfile.open(*dist.glob('*.tar.gz')) as f: names = {n.partition('/')[2] for n in f.getnames()}
    top = {n.split('/')[0] for n in names} - {'', 'fastaccum.egg-info'}
    assert top=={'LICENSE', 'MANIFEST.in', 'PKG-INFO', 'README.md', 'fastaccum', 'pyproject.toml', 'settings.ini', 'setup.cfg', 'setup.py'}
    assert {f.relative_to(root).as_posix() for f in (root/'fastaccum').rglob('*.py')} <= names

@pytest.mark.parametrize('tool', [('twine', 'check', '--strict'), ('check-wheel-contents',)], ids=lambda t: t[0])
def test_linted(dist, tool):
    "What a package index refuses, and what does not belong in a wheel"
    exe = shutil.which(tool[0], path=sysconfig.get_path('scripts'))
    if exe is None: pytest.skip(f"{tool[0]} is not installed: pip install -e '.[dev]'")
    files = [str(f) for f in dist.iterdir() if tool[0]=='twine' or f.suffix=='.whl']
    res = subprocess.run([exe, *tool[1:], *files], capture_output=True, text=True, timeout=120)
    assert res.returncode==0, res.stdout + res.stderr

def test_clean_environment(dist, tmp_path):
    "pip installs the wheel in a new environment, which borrows only the packages it needs: all modules can be imported, and a fit runs"
    venv = tmp_path/'venv'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv], check=True, timeout=120)
    pip = [sys.executable, '-m', 'pip', '--python', venv/'bin/python', 'install', '--no-deps', '--no-index', *dist.glob('*.whl')]
    env = {k: v for k,v in os.environ.items() if k!='PYTHONPATH'} | dict(PYTHONWARNINGS='ignore', MPLBACKEND='Agg')
    res = subprocess.run(pip, env=env, capture_output=True, text=True, timeout=120)
    assert res.returncode==0, res.stdout + res.stderr
    site = next(venv.glob('lib/python*/site-packages'))
    (site/'borrowed.pth').write_text(sysconfig.get_path('purelib'))     # after its own packages; a .pth in there is not read
    code = '''
import importlib, pkgutil, sys, fastaccum
from importlib.metadata import version
for m in pkgutil.walk_packages(fastaccum.__path__, 'fastaccum.'): importlib.import_module(m.name)
from fastai.test_utils import synth_learner
from fastaccum.all import *
learn = synth_learner(cbs=[GradientAccumulation(64), StepLogger()])
with learn.no_bar(), learn.no_logging(): learn.fit(2)
print(fastaccum.__file__, version('fastaccum'), len(learn.step_logger.to_df()))'''
    res = subprocess.run([venv/'bin/python', '-c', code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert res.returncode==0, res.stderr
    file,version,steps = res.stdout.split()[-3:]
    assert Path(file).parent==site/'fastaccum' and version==cfg['version'] and int(steps) > 0
    res = subprocess.run([venv/'bin/fastaccum-demo', '--help'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert res.returncode==0 and '--epochs' in res.stdout, res.stderr

def test_wheel_metadata(wheel):
    meta = Parser().parsestr(wheel.read(f"fastaccum-{cfg['version']}.dist-info/METADATA").decode())
    expected = {'Name': cfg['lib_name'], 'Version': cfg['version'], 'Summary': cfg['description'],
                'Author': cfg['author'], 'Author-email': cfg['author_email'],
                'License-Expression': 'Apache-2.0', 'Requires-Python': f">={cfg['min_python']}",
                'Description-Content-Type': 'text/markdown'}
    assert {k: meta[k] for k in expected}==expected
    assert dict(u.split(', ') for u in meta.get_all('Project-URL'))==toml['project']['urls']
    assert meta.get_payload().strip()==(root/'README.md').read_text(encoding='utf-8').strip()
    classifiers = meta.get_all('Classifier')
    assert (
        {f'Programming Language :: Python :: {p}'
         for p in cfg['pythons'].split()}|{'Typing :: Typed', 'Operating System :: OS Independent'} <= {*classifiers})
    needs = [r.partition('; ') for r in meta.get_all('Requires-Dist')]
    assert {re.match(r'[\w-]+', r)[0] for r,_,extra in needs if not extra}=={'fastai', 'fastcore', 'torch'}
    assert {'wandb','tensorboard','distributed','bench','all','docs','dev'} <= {*meta.get_all('Provides-Extra')}

def test_readme_example(installed, tmp_path):
    "The README's code, with a smaller net and smaller pictures, where only what is in the wheel is there"
    code = re.search(r'(?s)```python\n(.*?)```', (root/'README.md').read_text(encoding='utf-8'))[1]
    for old,new in [('Resize(224)', 'Resize(32)'), ('resnet34,', 'resnet18, pretrained=False,'), ('fine_tune(5', 'fine_tune(1')]:
        assert old in code
        code = code.replace(old, new)
    out = python(f'''
from PIL import Image
import fastaccum, os
from pathlib import Path
from importlib.metadata import version
path = Path('data')
for i in range(40):
    (path/'ab'[i%2]).mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (40, 40), ('red', 'blue')[i%2]).save(path/'ab'[i%2]/f'{{i}}.png')
{code}
print(fastaccum.__file__, version('fastaccum'), len(learn.recorder.losses))''', installed, cwd=tmp_path)
    assert out.split()[-3:]==[str(installed/'fastaccum/__init__.py'), cfg['version'], '1']

def test_imports(tmp_path):
    """`fastaccum.all` adds modules of its own to fastai's import, and few others; with accelerate fastai's own
    distributed part, which imports that"""
    code = """import sys
sys.modules['accelerate'] = None
from fastai.vision.all import *
before = {*sys.modules}
from fastaccum.all import *
new = {*sys.modules} - before
print(sorted({m.split('.')[0] for m in new}), len([m for m in new if not m.startswith('fastaccum')]))"""
    packages,n = python(code, root, cwd=tmp_path).strip().split('\n')[-1].rsplit(' ', 1)
    assert set(ast.literal_eval(packages)) <= {'fastaccum', 'fastai', 'torch'} and int(n) < 20, (packages, n)

def test_without_extras(tmp_path):
    "Nothing optional is imported; what needs it says which extra to install"
    out = python('''
import sys
for o in ('wandb', 'tensorboard', 'torch.utils.tensorboard', 'accelerate'): sys.modules[o] = None
from fastaccum.all import *
from fastai.test_utils import synth_learner
synth_learner(cbs=[GradientAccumulation(32), StepLogger(grad_norm=True)]).fit(1)
try: import fastaccum.wandb
except ImportError as e: print(e)''', root, cwd=tmp_path)
    assert out.strip().endswith("the extra 'wandb': pip install wandb")
