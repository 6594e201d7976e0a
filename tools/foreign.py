"""Do the fits of fastai's own notebooks come out the same when they are accumulated? `make foreign`, or with
FASTAI=path/to/a/checkout

A notebook runs in a process of its own, without network, on the data of `foreign_data.py`. Just before each of its fits
the process is copied (`os.fork`), so that all fits start alike, random numbers included:

- each a step: the fit as it is, beside the same with `GradientAccumulation(accum_bs=1)`, with which every loader batch
is a step
- micro-batches: the fit with dropout off and BatchNorm frozen, which see micro-batches by their nature, and without
fastai's
  MixedPrecision, which ours refuses, beside the same in micro-batches
- loader batches: the same in loader batches of a quarter, which accumulate to the old batch, with
`exact_sentence_encoder` in text classifiers

Weights (by the distance that they moved), optimizer state, learning rates, losses, tables and predictions must agree.
Each is then

- exact: they do, or are off no more than training carries a rounding error of the gradients
- told: they do not, and a warning says so (or one of the notebook's own callbacks fails after a warning)
- refused: an error says why
- bug: anything else, unless `EXPLAINED` says why it differs

or it cannot be compared: fastai fails too, its fit does not repeat itself (random) or is chaotic (a rounding error
changes it by a tenth), or it draws at random or keeps state for each
loader batch. Then the whole notebook runs once more with `GradientAccumulation(accum_bs=1)` on every Learner, for the
cells' own tests. With prefixes after the path, as `18a 20`, only these notebooks run."""
import functools, inspect, io, os, pickle, random, re, signal, subprocess, sys, tempfile, traceback, warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
import foreign_data

REPO,SKIP = 'https://github.com/fastai/fastai',{'cpp', 'cuda', 'multicuda'}  # Directives of cells that do not run
LEFT_OUT = {'09c_vision.widgets': 'it needs ipywidgets, and trains nothing', '20b_tutorial.distributed': 'it starts processes of its own',
            '70c_callback.captum': 'it needs captum', '70d_callback.comet': 'it needs comet_ml'}
TIMEOUT,FIT_TIMEOUT = 3600,100 # Seconds a notebook, seconds of the processor a fit
STOPPED = 'stopped',f'took more than {FIT_TIMEOUT} seconds, or ended its process'
LARGE = 100_000  # A model with more parameters is fitted for fewer epochs
EXACT = 1e-4
GENERAL = 'BatchNorm:','is smaller than a loader batch'  # warnings that are no reason for a difference
WAYS = 'each a step','micro-batches','loader batches'
SMALLER = re.compile(r'((?:Resize|RandomResizedCrop|RandomCrop|CropPad)\(|\b(?:size|bs) *= *)\d{3}\b')  # 32 pixels or items, for speed
# Notebook, a part of the cell's source, how what is found begins, and why that is right
ONE_ROW = 'losses inf off, learning rates inf off'
EXPLAINED = (
    ('13a_learner', 'class TestTrainEvalCallback', 'AssertionError: Exception occured in `TestTrainEvalCallback`',
     'it expects every loader batch to be a step'),
    ('13a_learner', 'def _get_learn()', 'AssertionError: Exception occured in `TestRecorderCallback`',
     'it expects every loader batch to be a row'),
    ('15_callback.hook', 'class TstCallback', 'AssertionError: Exception occured in `TstCallback`',
     'it compares what a hook sees, one micro-batch and its part of the gradient, with the loader batch'),
    ('17_callback.tracker', 'lr=100', ONE_ROW,
     'it diverges: the squares of a loader batch of 16 add up to infinity one step before those of 4'),
    ('18a_callback.training', 'ShortEpochCallback(', ONE_ROW,
     'it ends the epoch before the Recorder sees the last batch; with ours the row of that step is there'),
    ('18a_callback.training', 'ShortEpochCallback(', 'weights', 'it ends the epoch after two loader batches, whatever their size'),
    ('24_vision.gan', 'learn.fit(1, 2e-4, wd=0.)', ('losses', 'tables'),
     'not a comparison: its critic, of weights clipped to .01 and with BatchNorm frozen, answers '
     'all pictures alike; losses of 1e-11 are rounding errors'),
    ('70a_callback.tensorboard', 'TensorBoardCallback(', 'weights',
     'it traces the model in training mode on one loader batch, of which BatchNorm keeps statistics'),
)

# -- In the process that runs a notebook: one fit ------------------------------------------------------------------
def forked(f, *args, limit=FIT_TIMEOUT):
    "What `f` returns in a copy of this process, which nothing here notices; None if it ends otherwise, or takes too long"
    (get,put),state = os.pipe(),random.getstate()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(get)
            random.setstate(state)  # which Python draws anew in a copy
            signal.setitimer(signal.ITIMER_PROF, limit)  # of the processor, however busy the machine is
            with open(put, 'wb') as out: pickle.dump(f(*args), out)
            code = 0
        except BaseException: traceback.print_exc(file=sys.__stderr__)
        finally: os._exit(code)
    os.close(put)
    with open(get, 'rb') as out: res = out.read()
    _,status = os.waitpid(pid, 0)
    return None if status else pickle.loads(res)

def leaves(o, key=''):
    "The numbers in a state, each with the name that it has there"
    if isinstance(o, dict):
        for k,v in o.items(): yield from leaves(v, k if isinstance(k, str) else key)
    elif isinstance(o, (list, tuple)) or type(o).__name__=='L':
        for v in o: yield from leaves(v, key)
    elif hasattr(o, 'detach') or isinstance(o, (int, float)): yield key,o

def flat(numbers):
    import torch
    numbers = [torch.as_tensor(o).detach().flatten().double() for o in numbers]
    return torch.cat(numbers) if numbers else torch.zeros(0)

def weights(learn): return flat(learn.model.parameters())

def predictions(learn): # Of the first batch to validate with
    import torch
    try:
        b = learn.dls.valid.one_batch()
        n = getattr(learn.dls, 'n_inp', max(1, len(b)-1))
        with torch.no_grad(): return flat(o for _,o in leaves(learn.model.eval()(*b[:n])))
    except Exception: return flat([])

def outcome(learn, start): # Name -> what a fit has made
    rec,by_name = vars(getattr(learn, 'recorder', learn)),{}
    for k,o in leaves(learn.opt.state_dict()): by_name.setdefault(f'optimizer {k}', []).append(o)
    return {'weights': weights(learn) - start, 'losses': flat(rec.get('losses', [])), 'learning rates': flat(rec.get('lrs', [])),
            'tables': flat(o for _,o in leaves(list(rec.get('values', [])))), **{k: flat(o) for k,o in by_name.items()},
            'predictions': predictions(learn)}

def fitted(learn, fit, change=None, cb=None): # (outcome or None, warnings, error or None, is it a refusal?)
    from bench.clients import ours, sentence
    if change: change()
    start,error,refused = weights(learn),None,False
    with warnings.catch_warnings(record=True) as said, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter('always')
        try:
            if cb: learn.add_cb(cb)
            fit()
        except Exception as e: error,refused = f'{type(e).__name__}: {sentence(e)}',ours(e)
    return (None if error else outcome(learn, start)),[sentence(w.message) for w in said],error,refused

def off(a, b) -> float: # Norm of the difference over that of `a`
    if a.shape!=b.shape or not a.isfinite().equal(b.isfinite()): return float('inf')
    a,b = (o[a.isfinite()] for o in (a, b))
    return ((a-b).norm()/a.norm().clamp(min=1e-30)).item()

def until_divergence(a, b): # Losses of two fits, until they are 1.1 times the first: a net that diverges multiplies rounding errors
    n = next((i for i,loss in enumerate(a) if loss > 1.1*a[0]), len(a)) if a.shape==b.shape else None
    return a[:n],b[:n]

def differences(a, b): # Name -> by how much
    both = {k: (a[k], b[k]) for k in a if k in b}
    if 'losses' in both: both['losses'] = until_divergence(*both['losses'])
    return {k: off(*both[k]) if k in both else float('inf') for k in {**a, **b}}

# (result, what is said); `repeated()` is the plain fit again, `rounded(seed)` with other last bits
def verdict(plain, ours, repeated, rounded):
    (a,before,*_),(b,said,error,refused) = plain,ours
    new = [o for o in said if o not in before and not any(part in o for part in GENERAL)]
    if error: return ('refused' if refused else 'told' if new else 'bug'),(error if refused or not new else f'{error}: {new[0]}')
    wrong = {k: v for k,v in differences(a, b).items() if not v <= EXACT}
    says = ', '.join(f'{k} {v:.1g} off' for k,v in wrong.items())
    if not wrong: return 'exact',''
    again,results = repeated(),[rounded(seed) for seed in range(6)]
    if not again or again[2] or any(v for v in differences(a, again[0]).values()):
        return 'random',f"{says}, and fastai's fit does not repeat itself"
    found = [differences(a, res[0]) for res in results if res and res[0]]
    far = {k: max((of.get(k, 0) for of in found), default=0) for k in wrong}
    if any(v > 10*far[k] for k,v in wrong.items()): return ('told',f'{says}: {new[0]}') if new else ('bug',says)
    return ('exact' if all(far[k] < .1 for k in wrong) else 'chaotic'),f'{says}, as after rounding errors'

def beside(learn, fit, plain, change=None, **kwargs): # The verdict on the plain fit beside that with our callback
    from bench.clients import Rounded
    from fastaccum.accumulation.callback import GradientAccumulation
    if plain and plain[2]: return 'fails',plain[2]
    ours = plain and forked(fitted, learn, fit, change, GradientAccumulation(**kwargs))
    if not ours: return STOPPED
    if not any(plain[0][k].any() for k in ('weights', 'losses')): return 'no training',''
    return verdict(plain, ours, lambda: forked(fitted, learn, fit), lambda seed: forked(fitted, learn, fit, None, Rounded(seed)))

def settle(learn):
    "Dropout off, BatchNorm with the statistics of one batch: with those that it begins with, a net of random weights explodes"
    import torch
    from bench.clients import Still
    norms = [m for m in learn.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if norms:
        for m in norms: m.momentum = m.reset_running_stats()
        b,model = learn.dls.train.one_batch(),learn.model.train()
        with torch.no_grad():
            if hasattr(model, 'critic'): model.generator(b[0]),model.critic(b[1])
            else: model(*b[:getattr(learn.dls, 'n_inp', max(1, len(b)-1))])
    learn.add_cb(Still())

def not_cut(learn, cbs): # Why this fit cannot be made of smaller loader batches, None if it can
    from fastai.callback.mixup import MixHandler
    from fastai.data.load import DataLoader
    from fastai.text.data import LMDataLoader
    dl = learn.dls.train
    if not isinstance(dl, DataLoader) or dl.n is None: return 'not a loader that fastai can cut'
    if isinstance(dl, LMDataLoader): return 'a loader batch goes on where the last one ended'
    if any(isinstance(cb, MixHandler) or 'mix' in type(cb).__name__.lower() for cb in [*learn.cbs, *cbs]):
        return 'mixes the items of a loader batch at random'

def cut(dl, bs):
    "Smaller batches with the items in the order that the large ones have them"
    whole,get_idxs = dl.bs,dl.get_idxs
    def idxs():
        dl.bs = whole
        try: return list(get_idxs())
        finally: dl.bs = bs
    dl.get_idxs,dl.bs = idxs,bs

def still_ways(learn, fit, cbs): # Way -> (result, what is said); `cbs` are given to the fit
    from fastai.callback.fp16 import MixedPrecision
    from fastai.data.load import DataLoader
    from fastai.text.data import LMDataLoader
    from fastai.vision.augment import RandTransform
    dl,batch = learn.dls.train,getattr(learn.dls.train, 'after_batch', None)
    if isinstance(dl, DataLoader) and dl.bs and dl.n and not isinstance(dl, LMDataLoader):
        dl.drop_last,bs = False,min(dl.bs, max(2, dl.n//4))  # a few steps, of whole quarters
        dl.bs = bs - (bs%4 if bs>4 else 0)
        if hasattr(batch, 'fs'): batch.fs = type(batch.fs)(f for f in batch.fs if not isinstance(f, RandTransform))
    settle(learn)
    learn.remove_cb(MixedPrecision)  # fastai's, which ours refuses
    bs = getattr(dl, 'bs', None) or getattr(dl, 'batch_size', None) or 1
    if bs < 2: return {way: ('single items', '') for way in WAYS[1:]}
    plain,why = forked(fitted, learn, fit),not_cut(learn, cbs)
    return {'micro-batches': beside(learn, fit, plain, accum_bs=bs, micro_batch_size=-(-bs//3)),
            'loader batches': ('not compared', why) if why else forked(loader_batches, learn, fit, bs, plain, limit=0) or STOPPED}

def loader_batches(learn, fit, bs, plain): # (result, what is said)
    from fastaccum.accumulation.text import exact_sentence_encoder, lossy_encoder
    if lossy_encoder(learn.model): # fastai's reads a text in another way beside other texts
        exact_sentence_encoder(learn)
        plain = forked(fitted, learn, fit)
    return beside(learn, fit, plain, lambda: cut(learn.dls.train, max(1, bs//4)), accum_bs=bs)

def all_ways(learn, fit, cbs): # Way -> (result, what is said); changes nothing here
    as_it_is = beside(learn, fit, forked(fitted, learn, fit), accum_bs=1)
    still = forked(still_ways, learn, fit, cbs, limit=0)
    return {'each a step': as_it_is, **(still or {way: STOPPED for way in WAYS[1:]})}

# -- In the process that runs a notebook: its cells ----------------------------------------------------------------
def shorter(learn, fit, call, cbs):
    "The fit, of two epochs or twenty steps of `lr_find` if the model is large"
    from fastai.callback.schedule import LRFinder
    finders = [cb for cb in cbs if isinstance(cb, LRFinder)]
    if sum(p.numel() for p in learn.model.parameters()) > LARGE:
        for cb in finders: cb.num_it = min(cb.num_it, 20)
        if not finders: call.arguments['n_epoch'] = min(call.arguments['n_epoch'], 2)
    return fit(*call.args, **call.kwargs)

def watch(learner, fits, ours):
    "Have every fit compared just before it runs; with `ours`, give every Learner our callback instead"
    from fastcore.basics import listify
    init,fit = learner.__init__,learner.fit
    @functools.wraps(init)
    def new_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.add_cb(ours(accum_bs=1))
    @functools.wraps(fit)
    def new_fit(self, *args, **kwargs):
        learner.fit = fit  # not those within a fit
        try:
            call = inspect.signature(fit).bind(self, *args, **kwargs)
            cbs = listify(call.arguments.get('cbs'))
            fits.append(all_ways(self, functools.partial(shorter, self, fit, call, cbs), cbs))
            return fit(self, *args, **kwargs)
        finally: learner.fit = new_fit
    if ours: learner.__init__ = new_init
    else: learner.fit = new_fit

def run_notebook(fn, kind, data): # Cell -> its source, its error, is that a refusal of ours, and the ways of each fit in it
    "What `#|export` cells make comes from the module, so that only one `Learner` is there"
    foreign_data.offline(data)
    from importlib import import_module
    from execnb.shell import CaptureShell
    from nbdev.process import NBProcessor
    from fastai.learner import Learner
    from fastai.torch_core import set_seed
    from bench.clients import ours
    from fastaccum.accumulation.callback import GradientAccumulation  # always: fastai's ProgressCallback, which comes with it, adds itself
    fits,res = [],{}
    watch(Learner, fits, GradientAccumulation if kind=='ours' else None)
    shell = CaptureShell(fn, mpl_format=None)
    for cell in NBProcessor(fn, rm_directives=False, process=True).nb.cells:
        flags = getattr(cell, 'directives_', None) or {}
        if cell.cell_type!='code' or 'false' in flags.get('eval', ()) or flags.keys() & SKIP or 'pip install' in cell.source: continue
        if 'default_exp' in flags: shell.user_ns.update(vars(import_module(f"fastai.{flags['default_exp']}")))
        if flags.keys() & {'default_exp', 'export', 'exporti', 'exports'}: continue
        set_seed(0, reproducible=True)
        fits.clear()
        shell.run(SMALLER.sub(r'\g<1>32', cell.source))
        error = shell.exc and f'{type(shell.exc).__name__}: {shell.exc}'
        res[cell.idx_] = cell.source, error, bool(error) and ours(shell.exc), list(fits)
    return res

# -- In the process that sums up -----------------------------------------------------------------------------------
def result(fn, kind, data):
    "Run one notebook in a process of its own, at home in a folder that goes"
    with tempfile.TemporaryDirectory() as tmp:
        env = os.environ | dict(PYTHONPATH=str(Path(__file__).resolve().parent.parent), OMP_NUM_THREADS='1', MPLBACKEND='Agg',
                                WANDB_MODE='offline', IN_TEST='1', HOME=tmp)
        out = Path(tmp)/'out'
        subprocess.run([sys.executable, __file__, '--run', fn, kind, data, out], cwd=fn.parent, env=env, timeout=TIMEOUT, check=True,
                       capture_output=True)
        return pickle.loads(out.read_bytes())

def skipped(error): # Why a cell does not run in fastai, in a word or two
    kind,_,what = error.partition(': ')
    return {'NoData': f'no data {what}', 'ModuleNotFoundError': what, 'NameError': 'follows a skipped cell'}.get(kind, kind)

def reason(name, source, said):
    return next((why for nb,part,begins,why in EXPLAINED if nb==name and part in source and said.startswith(begins)), None)

def compare(name, cells, ours): # Counts of cells and of fits
    "Print what a notebook's two runs say"
    skips = Counter(skipped(e) for _,e,*_ in cells.values() if e)
    total = Counter(cells=len(cells)-skips.total(), skipped=skips.total())
    ways,lines = {way: Counter() for way in WAYS},[]
    for i,(source,error,_,fits) in cells.items():
        for n,fit in enumerate(fits):
            for way,(res,said) in fit.items():
                why = res=='bug' and reason(name, source, said)
                ways[way]['explained' if why else res] += 1
                if said: lines.append(f'  cell {i}, fit {n}, {way}: {res}: {said}' + (f'; explained: {why}' if why else ''))
                if res=='bug' and not why: lines.append(source)
        _,new,refused,_ = ours[i]
        if new and not error:
            why = reason(name, source, new)
            follows = new.startswith('NameError') and total['cells refused']
            what = 'cells refused' if refused or follows else 'cells explained' if why else 'cells that fail'
            total[what] += 1
            lines.append(f'  cell {i} with our callback: {what}: {" ".join(new.split())[:300]}' + (f'; explained: {why}' if why else ''))
            if what=='cells that fail': lines.append(source)
    print(f'{name}: {total["cells"]} cells,', *(f'{n} skipped ({why}),' for why,n in skips.items()),
          sum(len(f) for *_,f in cells.values()), 'fits')
    for way,n in ways.items():
        if n: print(f'  {way}:', counted(n))
        total.update({(way, k): v for k,v in n.items()})
    for line in dict.fromkeys(lines): print(line, flush=True)
    return total

def counted(counts): return ', '.join(f'{n} {what}' for what,n in sorted(counts.items(), key=lambda o: -o[1]))

def checkout(tmp):
    "A clone of the version that is installed"
    from fastai import __version__
    subprocess.run(['git', 'clone', '-q', '--depth', '1', '--branch', __version__, REPO, tmp], check=True)
    return Path(tmp)

def main(path=None, *names):
    with tempfile.TemporaryDirectory() as tmp, tempfile.TemporaryDirectory() as data:
        fastai,total = Path(path).resolve() if path else checkout(tmp),Counter()
        for fn in sorted((fastai/'nbs').glob('[0-9]*.ipynb')):
            if 'earner' not in fn.read_text(encoding='utf-8') or not fn.name.startswith(names or ''): continue
            if fn.stem in LEFT_OUT:
                print(f'{fn.stem}: left out, as {LEFT_OUT[fn.stem]}')
                continue
            try: total += compare(fn.stem, *(result(fn, kind, data) for kind in ('fits', 'ours'))) + Counter(notebooks=1)
            except subprocess.SubprocessError as e:
                total['notebooks not run'] += 1
                print(f'{fn.stem}: not run, {e}\n{(e.stderr or b"").decode()[-500:]}', flush=True)
    print('All:', counted({k: n for k,n in total.items() if isinstance(k, str)}))
    for way in WAYS: print(f'  {way}:', counted({k[1]: n for k,n in total.items() if k[0]==way}))
    if total['cells that fail'] or total['notebooks not run'] or any(total[way, 'bug'] for way in WAYS): sys.exit(1)

if __name__=='__main__':
    if sys.argv[1:2]!=['--run']: main(*sys.argv[1:])
    else: Path(sys.argv[5]).write_bytes(pickle.dumps(run_notebook(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))))
