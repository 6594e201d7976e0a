"""Type every page of the site from top to bottom, each in a process of its own: `make snippets`

What is typed is what a reader sees, in the order of the page: hidden cells do not run, and no setting of the tests holds. There are as many
pages at once as processors, each with as many threads as the machine gives. A page that fails, or takes longer than a minute, is named."""
import os, re, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

limit = 60  # seconds for a page, of a processor that nobody else uses: what is counted is the time of the process
hidden = 'OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'IN_TEST'

# No windows; at the end its own seconds, and those of processes that it started, in a file
begin = '''import atexit, matplotlib, os
matplotlib.use("Agg")
atexit.register(lambda: open({used!r}, "w").write(str(sum(os.times()[:4]))))'''

def typed(page, used):
    "The snippets of a page as a script that says which one failed; `used` is the file for its seconds"
    return '\n'.join([f'exec({begin.format(used=used)!r}, {{}})', '_file = None', *(
        f'exec(compile({src!r}, "snippet {i}", "exec"))' for i,src in enumerate(map(plain, page.snippets())))])

def plain(src):
    "Without directives, magics and shell commands"
    return re.sub(r'(?m)^\s*(#\||%|!).*\n?', '', src)

def run(page, root, n=10):
    "(seconds of a processor, what went wrong) for one page"
    env = {k: v for k,v in os.environ.items() if k not in hidden} | {'PYTHONPATH': str(root), 'WANDB_MODE': 'offline'}
    with tempfile.TemporaryDirectory() as tmp, tempfile.TemporaryDirectory() as own:
        script,used = Path(own)/'typed.py',Path(own)/'used'
        script.write_text(typed(page, used.as_posix()), encoding='utf-8')
        try: res = subprocess.run([sys.executable, script], cwd=tmp, env=env, capture_output=True, text=True, timeout=n*limit)
        except subprocess.TimeoutExpired: return n*limit,'did not end'
        return float(used.read_text()) if used.exists() else 0.,'\n'.join(res.stderr.strip().split('\n')[-12:]) if res.returncode else ''

def main():
    import apidoc, pages
    from nbdev.config import get_config
    cfg = get_config()
    proc,root = apidoc.proc_nbs(),cfg.config_path
    wrong,wanted,n_cpus = [],sys.argv[1:],os.cpu_count() or 1
    todo = [pages.Page(f, proc, Path(tempfile.gettempdir()), cfg) for f in sorted(proc.rglob('*.ipynb'))]
    todo = [p for p in todo if p.snippets() and (not wanted or any(w in p.path for w in wanted))]
    with ThreadPoolExecutor(n_cpus) as pool:
        for page,(used,trouble) in zip(todo, pool.map(lambda p: run(p, root), todo)):
            print(f'{page.path:40} {used:5.1f} s  {"FAILS" if trouble else ""}', flush=True)
            if trouble: wrong.append(f'{page.path}: {trouble}')
            elif used > n_cpus*limit: wrong.append(f'{page.path}: takes {used:.0f} s of a processor')
    if wrong: sys.exit('\n\n'.join(wrong))

if __name__=='__main__': main()
