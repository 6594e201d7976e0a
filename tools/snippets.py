"""Type every page of the site from top to bottom, each in a process of its own: `make snippets`

What is typed is what a reader sees, in the order of the page, with as many threads as the machine gives: hidden cells do not run, and no
setting of the tests holds. A page that fails, or takes longer than a minute, is named."""
import os, re, subprocess, sys, tempfile, time
from pathlib import Path

limit = 60  # seconds for a page, of a processor that nobody else uses: what is counted is the time of the process
hidden = 'OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'IN_TEST'

def typed(page):
    "The snippets of a page as a script that says which one failed"
    return '\n'.join(['import matplotlib; matplotlib.use("Agg")', '_file = None', *(
        f'exec(compile({src!r}, "snippet {i}", "exec"))' for i,src in enumerate(map(plain, page.snippets())))])

def plain(src):
    "Without directives, magics and shell commands"
    return re.sub(r'(?m)^\s*(#\||%|!).*\n?', '', src)

def run(page, root, n=10):
    "(seconds of a processor, what went wrong) for one page"
    env = {k: v for k,v in os.environ.items() if k not in hidden} | {'PYTHONPATH': str(root), 'WANDB_MODE': 'offline'}
    with tempfile.TemporaryDirectory() as tmp:
        script = Path(tmp)/'typed.py'
        script.write_text(typed(page), encoding='utf-8')
        before = os.times()
        try: res = subprocess.run([sys.executable, script], cwd=tmp, env=env, capture_output=True, text=True, timeout=n*limit)
        except subprocess.TimeoutExpired: return n*limit,'did not end'
    after = os.times()
    used = after.children_user+after.children_system - before.children_user-before.children_system
    return used,'\n'.join(res.stderr.strip().split('\n')[-12:]) if res.returncode else ''

def main():
    import apidoc, pages
    from nbdev.config import get_config
    cfg = get_config()
    proc,root = apidoc.proc_nbs(),cfg.config_path
    wrong,wanted = [],sys.argv[1:]
    for page in [pages.Page(f, proc, Path(tempfile.gettempdir()), cfg) for f in sorted(proc.rglob('*.ipynb'))]:
        if wanted and not any(w in page.path for w in wanted) or not page.snippets(): continue
        used,trouble = run(page, root)
        print(f'{page.path:40} {used:5.1f} s  {"FAILS" if trouble else ""}', flush=True)
        if trouble: wrong.append(f'{page.path}: {trouble}')
        elif used > (os.cpu_count() or 1)*limit: wrong.append(f'{page.path}: takes {used:.0f} s of a processor')
    if wrong: sys.exit('\n\n'.join(wrong))

if __name__=='__main__': main()
