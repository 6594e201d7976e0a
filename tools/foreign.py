"""Run the tests of fastai's own notebooks on our loop: `make foreign`, or `make foreign FASTAI=path/to/a/checkout`

Each notebook runs twice, in fresh processes and from the same seeds: as it is, and with `GradientAccumulation(accum_bs=1)` on every
Learner, with which every loader batch is a step, as in fastai. Which cells fail, the losses, the metrics and the weights after each fit
must be the same; where they are not, `EXPLAINED` says why. With prefixes after the path, as `18a 20`, only these notebooks run."""
import functools, os, pickle, subprocess, sys, tempfile
from collections import Counter
from pathlib import Path

REPO,FLAGS = 'https://github.com/fastai/fastai','slow cpp cuda multicuda'.split()  # fastai's own tests skip cells with these
TIMEOUT = 1800 # Seconds a notebook
# Notebook, a part of the cell's source, and why the cell differs
EXPLAINED = (
    ('18a_callback.training', 'ShortEpochCallback(',
     'it ends the epoch before the Recorder sees the last batch; with ours the row of that step is there'),
    ('18a_callback.training', 'GradientAccumulation(n_acc', "fastai's accumulation beside ours is an error"),
    ('18a_callback.training', 'cbs=fp16)', "fastai's mixed precision beside our accumulation is an error, which names ours"),
    ('18a_callback.training', 'cbs=[GradientClip,fp16])', "fastai's mixed precision beside our accumulation is an error, which names ours"),
)

# -- In the process that runs a notebook -------------------------------------------------------------------------
def watch(learner, fits, ours):
    "Have every Learner note in `fits` what a fit made of it; with `ours`, give it our callback"
    import torch
    init,fit = learner.__init__,learner.fit
    @functools.wraps(init)
    def new_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.add_cb(ours(accum_bs=1))
    @functools.wraps(fit)
    def new_fit(self, *args, **kwargs):
        try: return fit(self, *args, **kwargs)
        finally:
            weights = [p.detach().cpu().flatten().double() for p in self.model.parameters()]
            rec = vars(getattr(self, 'recorder', self))
            rows = [torch.tensor([*map(float, row)]) for row in [rec.get('losses', []), *rec.get('values', [])]]
            fits.append([torch.cat(o) if o else torch.zeros(0) for o in (weights, rows)])
    learner.fit = new_fit
    if ours: learner.__init__ = new_init

def run_notebook(fn, kind): # Cell -> its source, its error, and (weights, losses and metrics) after each fit in it
    "What `#|export` cells make comes from the module, so that only one `Learner` is there"
    from importlib import import_module
    from execnb.shell import CaptureShell
    from nbdev.test import nb_test_cells
    from nbdev.process import NBProcessor
    from fastai.learner import Learner
    from fastai.torch_core import set_seed
    from fastaccum.accumulation.callback import GradientAccumulation  # always: fastai's ProgressCallback, which comes with it, adds itself
    fits,res = [],{}
    watch(Learner, fits, GradientAccumulation if kind=='ours' else None)
    shell = CaptureShell(fn, mpl_format=None)
    for cell in nb_test_cells(fn, FLAGS):
        flags = cell.directives_
        if 'default_exp' in flags: shell.user_ns.update(vars(import_module(f"fastai.{flags['default_exp']}")))
        if flags.keys() & {'default_exp', 'export', 'exporti', 'exports'}: continue
        set_seed(0, reproducible=True)
        fits.clear()
        shell.run(cell.source)
        error = shell.exc and f'{type(shell.exc).__name__}: {shell.exc}'
        res[cell.idx_] = cell.source, error, list(fits)
    return res

# -- In the process that compares --------------------------------------------------------------------------------
def result(fastai, fn, kind):
    "Run one notebook in a process of its own"
    env = os.environ | dict(PYTHONPATH=str(Path(__file__).resolve().parent.parent), OMP_NUM_THREADS='1', MPLBACKEND='Agg',
                            WANDB_MODE='offline', IN_TEST='1')
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp)/'out'
        subprocess.run([sys.executable, __file__, '--run', fn, kind, out], cwd=fn.parent, env=env, timeout=TIMEOUT, check=True,
                       capture_output=True)
        return pickle.loads(out.read_bytes())

def off(a, b) -> float: # Norm of the difference over that of `a`
    if a.shape!=b.shape or not a.isfinite().equal(b.isfinite()): return float('inf')
    a,b = (o[a.isfinite()] for o in (a, b))
    return ((a-b).norm()/a.norm().clamp(min=1e-30)).item()

def difference(plain, ours, tol=1e-6):
    "How a cell differs, None if it does not. Where it fails in fastai already, only the fits count"
    (_,e1,f1),(_,e2,f2) = plain,ours
    if e2 and not e1: return e2
    if len(f1)!=len(f2) and not e1: return f'{len(f2)} fits instead of {len(f1)}'
    wrong = [(what, off(x, y)) for a,b in zip(f1, f2) for what,x,y in zip(('weights', 'losses and metrics'), a, b)]
    return ', '.join(f'{what} {by:.2g} off' for what,by in wrong if by > tol) or None

def reason(name, source): return next((why for nb,part,why in EXPLAINED if nb==name and part in source), None)

def compare(name, plain, ours): # Cells that run in fastai, fits, cells that differ, and those of them without a known reason
    "Print what a notebook's two runs say"
    failed = Counter(e.split(':')[0] for _,e,_ in plain.values() if e)
    n = sum(len(fits) for *_,fits in plain.values())
    print(f'{name}: {len(plain)-failed.total()} cells and {n} fits', *(f'{n} fail in fastai too ({e})' for e,n in failed.items()),
          sep=', ', flush=True)
    differ = {i: d for i in plain if (d := difference(plain[i], ours[i]))}
    for i,d in differ.items():
        source = plain[i][0]
        print(f'  cell {i}: {" ".join(d.split())[:200]}\n    {reason(name, source) or "NOT EXPLAINED:" + chr(10) + source}')
    return Counter(cells=len(plain)-failed.total(), fits=n, differ=len(differ), unexplained=sum(not reason(name, plain[i][0]) for i in differ))

def checkout(tmp):
    "A clone of the version that is installed"
    from fastai import __version__
    subprocess.run(['git', 'clone', '-q', '--depth', '1', '--branch', __version__, REPO, tmp], check=True)
    return Path(tmp)

def main(path=None, *names):
    with tempfile.TemporaryDirectory() as tmp:
        fastai,total = Path(path).resolve() if path else checkout(tmp),Counter()
        for fn in sorted((fastai/'nbs').glob('[0-9]*.ipynb')):
            if 'earner' not in fn.read_text(encoding='utf-8') or not fn.name.startswith(names or ''): continue
            try: total += compare(fn.stem, *(result(fastai, fn, kind) for kind in ('plain', 'ours'))) + Counter(notebooks=1)
            except subprocess.SubprocessError as e:
                total['not run'] += 1
                print(f'{fn.stem}: not run, {e}\n{(e.stderr or b"").decode()[-500:]}', flush=True)
    print(', '.join(f'{total[k]} {k}' for k in ('notebooks', 'cells', 'fits', 'differ', 'unexplained', 'not run')))
    if total['unexplained'] or total['not run']: sys.exit(1)

if __name__=='__main__':
    if sys.argv[1:2]!=['--run']: main(*sys.argv[1:])
    else: Path(sys.argv[4]).write_bytes(pickle.dumps(run_notebook(Path(sys.argv[2]), sys.argv[3])))
