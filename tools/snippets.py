"""Type the pages for users from top to bottom, each in a process of its own: `make snippets`

What is typed is what a reader sees, in the order of the page: hidden cells do not run, and no setting of the tests holds. With `REST=1`, as
in `make check`, only pages are typed whose snippets need a name that may come from a hidden cell: typing the others would do again what
they do as notebooks.

There is one page more at once than processors, each with one thread, as some wait for their own processes. A page that fails, or does not
end, is an error; one that takes longer than a minute is named, and so is a warning that the page does not show. Neither is an error, as
both can be the machine's, too.

The processes are forks of one that has imported what most pages import, which takes longer than most pages."""
import ast, atexit, builtins, importlib, multiprocessing, os, re, runpy, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

limit = 60  # seconds for a page, of a processor that nobody else uses: what is counted is the time of the process
imported = 'torch', 'pandas', 'matplotlib.pyplot', 'sklearn.datasets', 'fastai.vision.all', 'torch.distributed.fsdp'

# No windows; at the end its own seconds, and those of processes that it started, in a file
begin = '''import atexit, matplotlib, os
matplotlib.use("Agg")
atexit.register(lambda: open({used!r}, "w").write(str(sum(os.times()[:4]))))'''

def typed(page, used):
    "The snippets of a page as a script that says which one failed; `used` is the file for its seconds"
    lines = [f'exec({begin.format(used=used)!r}, {{}})', '_file = None']
    lines += [f'exec(compile({plain(src)!r}, "snippet {i}", "exec"))' for i,src in enumerate(page.snippets())]
    return '\n'.join(lines)

def stands_alone(snippets):
    "Do they need no name from a cell that is hidden? Wherever they bind a name, it is theirs"
    used,bound = set(),{*vars(builtins)}
    for node in (node for src in snippets for node in ast.walk(ast.parse(plain(src)))):
        if isinstance(node, ast.Name): (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg): bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)): bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for o in node.names: bound |= names_of(node.module) if o.name == '*' else {(o.asname or o.name).split('.')[0]}
    return used <= bound

def names_of(module):
    "What `from module import *` brings"
    m = importlib.import_module(module)
    return {*getattr(m, '__all__', (k for k in vars(m) if k[0] != '_'))}

def plain(src):
    "Without directives, magics and shell commands"
    return re.sub(r'(?m)^\s*(#\||%|!).*\n?', '', src)

def run(page, root, n=10):
    "(seconds of a processor, what went wrong, warnings that the page does not show) for one page"
    from export import told                     # here, as the pages' processes import this file
    with tempfile.TemporaryDirectory() as tmp, tempfile.TemporaryDirectory() as own:
        script,used,said = (Path(own)/f for f in ('typed.py', 'used', 'said'))
        script.write_text(typed(page, used.as_posix()), encoding='utf-8')
        p = multiprocessing.get_context('forkserver').Process(target=type_in, args=(str(script), tmp, str(said), str(root)))
        p.start()
        p.join(n*limit)
        if p.is_alive(): p.kill(); p.join(); return n*limit,'did not end',[]
        text = said.read_text(errors='replace')
        why = '\n'.join(text.strip().split('\n')[-12:]) if p.exitcode else ''
        return float(used.read_text()) if used.exists() else 0.,why,not_shown(told(text).splitlines(), page)

def not_shown(warnings, page):
    "Those of `warnings` that no output of the page has, whatever figures are in them"
    def words(text): return re.sub(r'\d+', '0', re.sub(r'^(User|Fastaccum)Warning: ', '', text))
    shown = words('\n'.join(''.join(o.text) for c in page.source.cells for o in c.get('outputs', []) if o.output_type == 'stream'))
    return [w for w in warnings if words(w) not in shown]

def type_in(script, cwd, said, root):
    "Run `script` in the folder `cwd`, as `python script` would; what it says goes to the file `said`"
    os.chdir(cwd)
    multiprocessing.set_start_method(None, force=True)      # the machine's own way, not this process's
    sys.path[0],sys.argv = root,[script]
    with open(said, 'wb') as err, open(os.devnull, 'wb') as out: os.dup2(err.fileno(), 2); os.dup2(out.fileno(), 1)
    try: runpy.run_path(script, run_name='__main__')
    finally: atexit._run_exitfuncs()             # a process of `multiprocessing` leaves them out

def warm_up(root):
    "Begin the process that the pages' processes are forks of; it imports while this one reads the pages"
    os.environ.pop('IN_TEST', None)
    os.environ.update(PYTHONPATH=str(root), WANDB_MODE='offline', OMP_NUM_THREADS='1')
    forkserver.set_forkserver_preload(list(imported))
    forkserver.ensure_running()

def main():
    import apidoc, pages
    from nbdev.config import get_config
    cfg = get_config()
    root = cfg.config_path
    warm_up(root)
    proc = apidoc.proc_nbs()
    wrong,wanted,n_cpus = [],sys.argv[1:],os.cpu_count() or 1
    todo = [pages.Page(f, proc, Path(tempfile.gettempdir()), cfg) for f in sorted(proc.rglob('*.ipynb'))]
    def runs_as_notebook(p): return p.internal or 'REST' in os.environ and stands_alone(p.snippets())
    def is_wanted(p): return any(w in p.path for w in wanted) if wanted else not runs_as_notebook(p)
    todo = [p for p in todo if p.snippets() and is_wanted(p)]
    with ThreadPoolExecutor(n_cpus+1) as pool:
        for page,(used,trouble,unseen) in zip(todo, pool.map(lambda p: run(p, root), todo)):
            print(f'{page.path:40} {used:5.1f} s  {"FAILS" if trouble else "is long" if used > limit else ""}', flush=True)
            for warning in unseen: print(f'    not on the page: {warning}', flush=True)
            if trouble: wrong.append(f'{page.path}: {trouble}')
    if wrong: sys.exit('\n\n'.join(wrong))

if __name__=='__main__': main()
