"The GitHub workflows: two linters, which need no network"
import shutil, subprocess, sysconfig
from pathlib import Path
import pytest
from test_metadata import root

files = sorted((root/'.github/workflows').glob('*.yml'))

def lint(tool, *args):
    "Run one of the environment's programs; its exit code, and what it said"
    exe = shutil.which(tool, path=sysconfig.get_path('scripts'))
    if exe is None: pytest.skip(f"{tool} is not installed: pip install -e '.[dev]'")
    res = subprocess.run([exe, *map(str, args)], capture_output=True, text=True, timeout=120)
    return res.returncode, res.stdout + res.stderr

def schema(*files): return lint('check-jsonschema', '--builtin-schema', 'vendor.github-workflows', *files)
def audit(*files): return lint('zizmor', '--offline', '--no-progress', '--config', root/'.github/zizmor.yml', *files)

def test_files(): assert [f.stem for f in files]==['docs', 'test']

def test_schema():
    code,said = schema(*files)
    assert code==0, said

def test_audit():
    "No expression that a stranger could write is run, no permission is given that is not needed, no action can be exchanged"
    code,said = audit(*files)
    assert code==0, said

@pytest.mark.parametrize('check,old,new,says', [
    (schema, 'runs-on: ubuntu-latest', 'run-on: ubuntu-latest', 'run-on'),
    (schema, 'timeout-minutes: 45', 'timeout-minutes: soon', 'timeout-minutes'),
    (audit, 'run: make docs', 'run: make docs ${{ github.head_ref }}', 'template-injection'),
    (audit, 'actions/deploy-pages@v4', 'someone/deploy-pages@v4', 'unpinned-uses'),
    (audit, '        with:\n          persist-credentials: false\n', '', 'artipacked')])
def test_mistakes_are_found(tmp_path, check, old, new, says):
    text = (root/'.github/workflows/docs.yml').read_text(encoding='utf-8')
    assert old in text
    (tmp_path/'docs.yml').write_text(text.replace(old, new), encoding='utf-8')
    code,said = check(tmp_path/'docs.yml')
    assert code!=0 and says in said, said
