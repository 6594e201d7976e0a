"The GitHub workflows: two linters, which need no network"
import shutil, subprocess, sysconfig
import pytest, yaml
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

def test_files(): assert [f.stem for f in files]==['docs', 'release', 'test']

def test_schema():
    code,said = schema(*files)
    assert code==0, said

def test_audit():
    "No expression that a stranger could write is run, no permission is given that is not needed, no action can be exchanged"
    code,said = audit(*files)
    assert code==0, said

def jobs(name): return yaml.safe_load((root/f'.github/workflows/{name}.yml').read_text(encoding='utf-8'))['jobs']

def comes_after(jobs, name):
    "The jobs without which job `name` does not run"
    needs = jobs[name].get('needs', [])
    needs = [needs] if isinstance(needs, str) else needs
    return {*needs, *(o for n in needs for o in comes_after(jobs, n))}

@pytest.mark.parametrize('workflow,job,before', [('docs', 'docs', {'tests'}), ('release', 'publish', {'tests', 'build', 'smoke'})])
def test_only_what_passed_is_published(workflow, job, before):
    "And only the job that publishes may do so"
    all_jobs = jobs(workflow)
    assert comes_after(all_jobs, job) == before and all_jobs['tests'] == {'uses': './.github/workflows/test.yml'}
    may_publish = [n for n,o in all_jobs.items() if o.get('permissions', {}).get('id-token') == 'write']
    assert may_publish == [job] and not {'if', 'continue-on-error'} & {k for n in [job, *before] for k in all_jobs[n]}

def test_what_is_released():
    "The files are those that were linted and tried, for the tag that is the version"
    does = {n: [s.get('run') or s['uses'].partition('@')[0] for s in o.get('steps', [])] for n,o in jobs('release').items()}
    order = ['python tools/release.py "$GITHUB_REF_NAME"', 'python -m build', 'twine check --strict dist/*',
             'check-wheel-contents dist/*.whl', 'actions/upload-artifact']
    assert [s for s in does['build'] if s in order] == order
    assert {'empty/bin/pip install dist/*.whl', 'empty/bin/fastaccum-demo'} <= {*does['smoke']}
    assert does['publish'] == ['actions/download-artifact', 'pypa/gh-action-pypi-publish']
