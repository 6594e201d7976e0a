"""Do the quick tests pass with the lowest and the newest versions of settings.ini, and with each PyTorch between?
`make versions`

Each set of versions has an environment of its own in `.versions`, which is made once; remove it to get newer ones.
Arguments: the sets to run, default all; after `--install` they are only installed"""
import os, re, shutil, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from pathlib import Path
from time import time

root = Path(__file__).resolve().parent.parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
pythons = cfg['pythons'].split()

def can_make_environments(python, version):
    code = f'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] != "{version}")'
    return subprocess.run([python, '-c', code], capture_output=True).returncode == 0

def python_of(version):
    "A Python of this version, or None: on the path, or one of pyenv's"
    pyenv = Path(os.environ.get('PYENV_ROOT', Path.home()/'.pyenv'))/'versions'
    found = shutil.which(f'python{version}'),*map(str, sorted(pyenv.glob(f'{version}.*/bin/python')))
    return next((p for p in found if p and can_make_environments(p, version)), None)

def minors_between(versions, lowest, newest):
    "The last release of each minor version between two others, which are left out"
    numbers = sorted(tuple(map(int, v.split('.'))) for v in versions if re.fullmatch(r'\d+\.\d+\.\d+', v))
    low,high = (tuple(map(int, v.split('.')[:2])) for v in (lowest, newest))
    last = {n[:2]: n for n in numbers if low < n[:2] < high}
    return ['.'.join(map(str, n)) for n in last.values()]

def torch_versions(python):
    "What pip can install, the newest first"
    said = subprocess.run([python, '-m', 'pip', 'index', 'versions', 'torch'], capture_output=True, text=True, check=True).stdout
    return re.search('Available versions: (.*)', said)[1].split(', ')

ends = dict(lowest=(pythons[0], ['-c', str(root/'tests/lowest.txt')]),
            newest=(pythons[-1], ['--upgrade', '--upgrade-strategy', 'eager']))

def between():
    "Like `ends`, name -> version of Python, arguments for pip: one for each PyTorch between"
    version = pythons[-2]
    python = python_of(version)
    if python is None: return {'torch between': (version, [])}
    known = torch_versions(python)
    lowest = re.search(r'torch>=([\d.]+)', cfg['requirements'])[1]
    return {f'torch-{v}': (version, [f'torch=={v}']) for v in minors_between(known, lowest, known[0])}

def environment(name, version, args):
    "The Python of an environment with these versions, or None"
    python = python_of(version)
    if python is None: return None
    env = root/'.versions'/name
    own = env/('Scripts' if os.name == 'nt' else 'bin')/'python'
    wanted = '\n'.join([python, *args, *(f'{k}={v}' for k,v in cfg.items() if k.endswith('requirements'))])
    made = env/'made-with'
    if not made.exists() or made.read_text(encoding='utf-8') != wanted:
        subprocess.run([python, '-m', 'venv', '--clear', env], check=True)
        # most of what is installed is never imported, and compiling all of it takes a minute
        subprocess.run([own, '-m', 'pip', 'install', '-q', '--no-compile', *args, '-e', f'{root}[all,test]'], check=True)
        made.write_text(wanted, encoding='utf-8')
    return own

# Tests that only read the repository say the same with any version
of_text = 'cases','house','metadata','notebooks','readme','versions','workflows'

def tested(python):
    "The last line of the quick tests, and whether they passed"
    env = dict(os.environ, QUICK='1', OMP_NUM_THREADS='1', WANDB_MODE='offline', MPLBACKEND='Agg', PYTHONPATH=str(root),
               PYTHONDONTWRITEBYTECODE='')        # what is compiled once is kept
    by_file = '-n',os.environ.get('WORKERS', '2'),'--dist','loadfile','--no-loadscope-reorder'
    left_out = [f'--ignore=tests/project/test_{name}.py' for name in of_text]
    res = subprocess.run([python, '-m', 'pytest', '-q', *by_file, *left_out], cwd=root, env=env, stdout=subprocess.PIPE, text=True)
    if res.returncode: print(res.stdout[-20_000:])
    says = [line.strip('= ') for line in res.stdout.splitlines() if re.search(r'\d+ (passed|failed|errors?)\b.* in ', line)]
    return says[-1] if says else f'pytest ended with {res.returncode}', res.returncode == 0

def versions_in(python):
    code = ("import sys, importlib.metadata as m; "
            "print(sys.version.split()[0], *(m.version(p) for p in ('torch', 'fastai', 'fastcore')))")
    return subprocess.run([python, '-c', code], capture_output=True, text=True, check=True).stdout.split()

def row(name, version, made):
    "Name, versions, and what the tests say; did they fail?"
    own = made.result()
    if own is None: return (name, version, '', '', '', 'skipped: this Python is not here'),False
    begun = time()
    says,passed = tested(own)
    print(f'{name}: {says} ({(time()-begun)/60:.0f} minutes)', flush=True)
    return (name, *versions_in(own), says),not passed

def table(rows):
    rows = [('', 'Python', 'torch', 'fastai', 'fastcore', 'quick tests'), *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(cell.ljust(w) for cell,w in zip(r, widths)).rstrip() for r in rows)

def main(args):
    names = [a for a in args if a != '--install']
    sets = ends if names and set(names) <= set(ends) else dict(lowest=ends['lowest'], **between(), newest=ends['newest'])
    unknown = [n for n in names if n not in sets]
    if unknown: sys.exit(f"There is no {unknown[0]!r}: choose from {', '.join(sets)}.")
    # an installation keeps one processor busy: one after the other they would take twice as long
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = {name: pool.submit(environment, name, *sets[name]) for name in names or sets}
        if '--install' in args: sys.exit(any(env.result() is None for env in made.values()))
        rows = [row(name, sets[name][0], env) for name,env in made.items()]
    print(table(r for r,_ in rows))
    sys.exit(any(failed for _,failed in rows))

if __name__ == '__main__': main(sys.argv[1:])
