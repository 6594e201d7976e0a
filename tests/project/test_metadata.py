"Some values of `settings.ini` must stand in other files too: here they are held equal"
import os, re, shutil, subprocess, sys
from configparser import ConfigParser
from pathlib import Path
import pytest, yaml
import fastaccum, bump, release

if sys.version_info >= (3,11): import tomllib
else: import tomli as tomllib  # comes with pytest

root = Path(__file__).resolve().parents[2]
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
toml = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))

def test_version(): assert fastaccum.__version__==cfg['version']

def test_pyproject():
    proj = toml['project']
    assert (proj['name'], proj['description'])==(cfg['lib_name'], cfg['description'])
    site = f"{cfg['doc_host']}{cfg['doc_baseurl']}/"
    assert proj['urls']==dict(Repository=cfg['git_url'], Documentation=site, Changelog=f'{site}changelog.html',
                              Issues=f"{cfg['git_url']}/issues")

def from_yaml(f): return yaml.safe_load((root/f).read_text(encoding='utf-8'))

def test_pythons():
    jobs,pythons = from_yaml('.github/workflows/test.yml')['jobs'],cfg['pythons'].split()
    assert pythons[0]==cfg['min_python']
    assert jobs['test']['strategy']['matrix']=={'os': ['ubuntu-latest', 'macos-latest'], 'python': pythons}
    assert jobs['windows']['steps'][1]['with']['python-version'] in pythons
    assert from_yaml('.github/workflows/release.yml')['jobs']['smoke']['strategy']['matrix']['python']==[pythons[0], pythons[-1]]
    assert [(o['versions'], o['python'])
            for o in jobs['versions']['strategy']['matrix']['include']]==[
                ('lowest', pythons[0]), ('newest', pythons[-1])]

def test_lower_bounds():
    "The lowest versions that are promised are those that are tested"
    reqs = ' '.join(cfg[k] for k in ('requirements', 'all_requirements'))
    pins = re.findall(r'(?m)^([\w-]+)==(.+)$', (root/'tests/lowest.txt').read_text(encoding='utf-8'))
    assert sorted(pins)==sorted(re.findall(r'(?:^| )([\w-]+)>=([\w.]+)', reqs)) and len(pins)==len(reqs.split())

def test_install_lines():
    "fastaccum is on no index yet, so nothing that is printed or shown installs it from there"
    found = (root.glob(f'{folder}/**/*.{ext}') for folder in ('fastaccum','nbs','examples') for ext in ('py','ipynb'))
    files = [root/'README.md', root/'CHANGELOG.md', *(f for fs in found for f in fs)]
    lines = [line for f in files for line in f.read_text(encoding='utf-8').splitlines() if 'pip install' in line]
    assert len(lines) > 9 and [o for o in lines if 'fastaccum' in o.split('pip install')[1] and 'git+' not in o] == []

def test_makefile():
    "Every target that `make help`, the README or a workflow speaks of exists"
    makefile = (root/'Makefile').read_text(encoding='utf-8')
    targets = set(re.findall(r'(?m)^([a-z]+):', makefile))
    assert targets=={'help', *re.search(r'\.PHONY: (.*)', makefile)[1].split()}
    for f in ('README.md', '.ci/run', '.github/workflows/test.yml', '.github/workflows/docs.yml'):
        used = set(re.findall(r'\bmake ([a-z]+)(?: </dev/null)?$', (root/f).read_text(encoding='utf-8'), re.M))
        assert used and used <= targets, f

def planned(folder, *args, installed=()):
    "What `make` would do in `folder`, which gets the files that an installation depends on, and the stamps of what is `installed`"
    for f in ('Makefile', 'settings.ini', 'setup.py', 'pyproject.toml'): shutil.copy(root/f, folder)
    if installed: (folder/'.venv').mkdir()
    for f in installed: (folder/'.venv'/f).touch()
    env = {k: v for k,v in os.environ.items() if k not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'DEVICE')}
    return subprocess.run(['make', '-n', *args], cwd=folder, env=env, capture_output=True, text=True, check=True).stdout

needs_make = pytest.mark.skipif(not shutil.which('make'), reason='needs make')

@needs_make
@pytest.mark.parametrize('there,target,installed', [
    ([], 'demo', ['.']), ([], 'test', ['.', "'.[dev]'"]), (['.package'], 'demo', []),
    (['.package'], 'test', ["'.[dev]'"]), (['.package', '.installed'], 'demo', []),
    (['.package', '.installed'], 'test', [])])
def test_what_make_installs(tmp_path, there, target, installed):
    "The demo takes the package alone, and targets come in any order"
    assert re.findall(r'pip install -e (\S+)', planned(tmp_path, target, installed=there))==installed

@needs_make
@pytest.mark.parametrize('target', ['demo', 'test', 'cases', 'bench', 'pages', 'snippets', 'mutants', 'docs', 'export', 'readme', 'bump'])
def test_make_with_a_python_that_is_given(tmp_path, target):
    "It is used as it is: nothing is installed, and no environment is made"
    todo = planned(tmp_path, target, f'PYTHON={sys.executable}')
    assert sys.executable in todo or target in ('demo', 'pages')
    assert 'pip install' not in todo and '.venv/' not in todo.replace(str(Path(sys.executable).parent), '')

def test_pre_commit():
    "The hooks need nothing but what `make` has installed, and see what they are for"
    hooks = [h for r in from_yaml('.pre-commit-config.yaml')['repos'] for h in r['hooks'] if r['repo']=='local']
    files = ['nbs/index.ipynb', 'nbs/api/core/01_accumulator.ipynb', 'fastaccum/all.py', 'README.md']
    assert {h['entry']: [bool(re.search(h['files'], f)) for f in files] for h in hooks}=={
        '.venv/bin/nbdev-clean': [True, True, False, False], '.venv/bin/python tools/export.py': [True]*4}
    assert all((root/f).exists() for f in [*files, 'tools/export.py'])

def test_issue_templates():
    forms = {f.name: from_yaml(f) for f in (root/'.github/ISSUE_TEMPLATE').glob('*.yml')}
    assert [o['url'] for o in forms.pop('config.yml')['contact_links']]==[toml['project']['urls']['Documentation']]
    assert {'bug.yml', 'idea.yml'} <= {*forms}
    for name,form in forms.items():
        assert {'name','description','body'} <= {*form}, name
        ids = [o['id'] for o in form['body'] if o['type']!='markdown']
        assert ids and len(ids)==len(set(ids)), name

def test_changelog():
    "It begins with what a user of this version reads: one page, not the history of its development"
    first = (root/'CHANGELOG.md').read_text(encoding='utf-8').split('\n## ')[1]
    assert re.match(rf"{re.escape(cfg['version'])}(, \d+ \w+ \d{{4}})?\n", first)
    assert len(first) < 5000, f'{len(first)} characters: say what a user gets, and leave out how it came about'

@pytest.mark.parametrize('changes,says', [
    ({}, ''),
    ({'settings.ini': ('1.2.3', '1.2.4'), 'CHANGELOG.md': ('1.2.3', '1.2.4')}, 'The tag is v1.2.3, the version 1.2.4'),
    ({'CHANGELOG.md': (', 1 May 2027', '')}, 'the day of the release'),
    ({'CHANGELOG.md': ('New.', 'New, not released yet.')}, 'CHANGELOG.md says'),
    ({'README.md': ('pip', 'It is not on PyPI yet')}, 'README.md says')])
def test_ready_for_release(tmp_path, changes, says):
    "Nothing is built for a tag that is not the version, or with texts of before"
    texts = {'settings.ini': '[DEFAULT]\nversion = 1.2.3\n',
             'CHANGELOG.md': '# Changelog\n\n## 1.2.3, 1 May 2027\n\nNew.\n\n## 1.2.2\n\nnot released yet\n',
             'README.md': 'pip'}
    for f,text in texts.items(): (tmp_path/f).write_text(text.replace(*changes.get(f, ('', ''))))
    found = release.wrong(tmp_path, 'v1.2.3')
    assert len(found) == bool(says) and says in ''.join(found)

def test_release_of_this_checkout():
    "What is left to do for the version that is here is what CONTRIBUTING.md says"
    assert not [o for o in release.wrong(root, f"v{cfg['version']}") if o.startswith('The tag')]

@pytest.mark.parametrize('part,new', [('patch','1.2.4'), ('minor','1.3.0'), ('major','2.0.0')])
def test_bumped(part, new): assert bump.bumped('1.2.3', part)==new

def test_bump(tmp_path):
    for f in bump.places:
        (tmp_path/f).parent.mkdir(exist_ok=True)
        (tmp_path/f).write_bytes((root/f).read_bytes())
    old,new = bump.bump(tmp_path)
    assert old==cfg['version'] and new!=old
    for f in bump.places: assert (tmp_path/f).read_text()==(root/f).read_text().replace(old, new, 1)
    with pytest.raises(ValueError, match='major, minor, patch'): bump.bump(tmp_path, 'huge')
    (tmp_path/'fastaccum/__init__.py').write_text('__version__ = "9.9.9"\n')
    with pytest.raises(ValueError, match='differ'): bump.bump(tmp_path)
