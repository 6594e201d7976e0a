"""Do the clients of fastai, and the libraries that its users take losses, models and optimizers from, work with
accumulation? `make clients`

Each case is a Learner as the client makes it. It trains as plain fastai with the big batch, and with
`GradientAccumulation`: the big batch in micro-batches, and smaller loader batches. Dropout is off and BatchNorm is
frozen: both see micro-batches by their nature. A result is

- exact: the weights are the big batch's, to a thousandth of the distance that they moved, or to where training carries
a rounding error
- told: they are not, and a warning says so
- refused: an error before the first step says why
- fails: the client fails so without fastaccum, too
- bug: anything else

What other libraries' own tests claim of accumulation is in the same file, from `claims`; these have a `read`: which
version of their sources."""
import io, json, re, warnings
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable
import pandas as pd, torch
from torch import nn
from fastai.basics import Callback, set_seed
from fastai.callback.progress import ProgressCallback
from fastaccum.accumulation.callback import GradientAccumulation

OUT = Path(__file__).parents[1]/'clients.json'
BS = 16                # Items of the big batch
WAYS = {'micro-batches': (BS, dict(accum_bs=BS, micro_batch_size=6)), 'loader batches': (4, dict(accum_bs=BS))}
EXACT = 1e-3           # Of the distance that the weights moved

@dataclass
class Case:
    name:str                  # What is tried
    make:Callable             # make(bs): a Learner whose loader gives `bs` items at a time, unshuffled; made anew for each fit
    cbs:Callable = list       # cbs(): callbacks of the client
    ways:tuple = tuple(WAYS)  # Random numbers that are drawn for each loader batch leave only micro-batches to compare
    acc:dict = field(default_factory=dict)  # More arguments of `GradientAccumulation`
    lr:float = .05
    epochs:int = 2

class Still(Callback):
    "No dropout, and BatchNorm with the statistics that it has"
    order,run_valid = 90,False
    def before_batch(self):
        for m in self.learn.model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm) or 'Drop' in type(m).__name__: m.eval()  # fastai's and timm's own, too

class Rounded(Callback):
    "Gradients that are off by a rounding error, as those that are added up in another order: how far does training carry that?"
    def __init__(self, seed=0): self.seed = seed
    def before_fit(self): self.random = torch.Generator().manual_seed(self.seed)  # of its own: the fit's random numbers stay as they are
    def before_step(self):
        for p in self.learn.model.parameters():
            if p.grad is not None: p.grad.mul_(1 + 1e-7*torch.randn(p.shape, generator=self.random))

def flat(model): return torch.cat([p.detach().flatten().double() for p in model.parameters()])

def fitted(case, bs, *more): # Weights before and after, what was said
    set_seed(0, reproducible=True)
    learn = case.make(bs)
    learn.add_cbs([*case.cbs(), Still(), *more])
    learn.remove_cb(ProgressCallback)
    start = flat(learn.model)
    set_seed(1, reproducible=True)
    with learn.no_logging(), redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn.fit(case.epochs, case.lr)
    return start,flat(learn.model),[str(w.message) for w in said]

def result(case, way): # (result, distance or None, the sentence that says it)
    bs,kwargs = WAYS[way]
    try: start,big,before = fitted(case, BS)
    except Exception as e: return 'fails',None,sentence(e)
    moved = (big-start).norm()
    if not moved.isfinite() or moved == 0: return 'fails',None,'the weights do not move, or are not finite'
    try: _,weights,said = fitted(case, bs, GradientAccumulation(**{**kwargs, **case.acc}))
    except Exception as e: return ('refused' if ours(e) else 'bug'),None,f'{type(e).__name__}: {sentence(e)}'
    off = float((weights-big).norm()/moved)
    told = [m for m in said if m not in before and 'BatchNorm:' not in m]
    if off < EXACT: return 'exact',off,sentence(told[0]) if told else ''
    if told: return 'told',off,sentence(told[0])
    # an optimizer that computes in bfloat16 rounds once in a while to the other side
    far = max(float((fitted(case, BS, Rounded(seed))[1]-big).norm()/moved) for seed in range(8))
    return ('exact' if off < 10*far else 'bug'),off,f'Training carries a rounding error of the gradients to {far:.0e}.'

# Was an error raised by fastaccum, or does it say what a micro-batch lacks?
def ours(e):
    if 'In micro-batch' in str(e): return True
    tb = e.__traceback__
    while tb.tb_next: tb = tb.tb_next
    return 'fastaccum' in tb.tb_frame.f_globals.get('__name__', '')

def sentence(text): return re.sub(r'\s+', ' ', str(text))[:300]

def run(cases): # A row for each case and way
    rows = []
    for case in cases:
        for way in case.ways:
            what,off,said = result(case, way)
            rows.append(dict(case=case.name, way=way, result=what, off=off, said=said))
            print(f'{case.name:40} {way:15} {what:8} {"" if off is None else f"{off:.0e}":6} {said[:100]}', flush=True)
    return rows

# -- The page
KINDS = 'exact','told','refused','fails','bug'
shown = dict(zip(KINDS, ('exact','warned','an error','fails','bug')))

def results(): return json.loads(OUT.read_text())
def installed(res): return {k: o for k,o in res.items() if 'read' not in o}    # Clients
def libraries(res): return {k: o for k,o in res.items() if 'read' in o}        # Whose claims were tried

def about(res): # When, and with which versions; more than one where they were not run together
    found = {(o['date'], *o['beside'].values()) for o in res.values()}
    return '; '.join(f'run on {date} with fastai {fastai} and PyTorch {torch}' for date,fastai,torch in sorted(found))

def counts(res): return Counter(r['result'] for o in res.values() for r in o['rows'])

def in_words(res): # What the page begins with
    ours,theirs = installed(res),libraries(res)
    words = shown | dict(told='with a warning', refused='with an error', fails='fail without fastaccum, too')
    def said(n): return ', '.join(f'{n[k]} {words[k]}' for k in KINDS if n[k])
    def rows(res): return f'{sum(counts(res).values())} configurations: {said(counts(res))}'
    n_claims = len({(k, r['case']) for k,o in theirs.items() for r in o['rows']})
    *most,last = [o['read']['name'] for o in theirs.values()]
    return f"{len(ours)} clients in {rows(ours)}. {n_claims} claims of the tests of {', '.join(most)} and {last} in {rows(theirs)}"

def summary(res): # A row for each package
    def row(package, o):
        n = Counter(r['result'] for r in o['rows'])
        return dict(package=f"{package} {o['version'] or ''}".strip(), **{shown[k]: n.get(k, 0) for k in KINDS})
    return pd.DataFrame([row(k, o) for k,o in res.items()])

def first_words(said): # Of a message, without the name of the loss
    said = re.sub(r'^\w+Error: |Exception occured in .*?: ', '', said.strip())
    words = re.sub(r'\b(lf|\w+Loss)\b', 'the loss', re.split(r'[.:;] | \((?!\d)| "', said)[0])
    return words[:1].upper() + words[1:]

def others(res, what): # What was said to the cases with this result, and to which
    found = {}
    for k,o in res.items():
        for r in o['rows']:
            if r['result'] == what: found.setdefault(first_words(r['said']), {}).setdefault(k, []).append(r)
    def cases(of): return '; '.join(f"{k}: {', '.join(dict.fromkeys(r['case'] for r in rs))}" for k,rs in of.items())
    def off(of):
        offs = [r['off'] for rs in of.values() for r in rs if r['off'] is not None]
        return dict(off=' to '.join(dict.fromkeys(f'{o:.0%}' for o in (min(offs), max(offs))))) if offs else {}
    return pd.DataFrame([dict(message=said, cases=cases(of), **off(of)) for said,of in found.items()])

def worth_knowing(library): # Of claims that the library does not keep itself, or that are no exact fit here, a row each
    rows = {r['case']: r for r in library['rows']}                              # its ways have the same result
    def there(r): return r['theirs'].removeprefix(f"{library['read']['name']}: ")
    def here(r): return 'exact' if r['result'] == 'exact' else f"{shown[r['result']]}: {first_words(r['said'])}"
    return pd.DataFrame([dict(claim=k, here=here(r), there=there(r)) for k,r in rows.items()
                         if r['result'] != 'exact' or any(o[-5:] not in ('', 'exact') for o in r['theirs'].split('; '))])

def read_from(library): # Which sources were read, which version was measured, and what came of all claims
    read,rows = library['read'],library['rows']
    what = (f"version {read['version']}, commit {read['commit'][:7]} of {read['date']}" if read['commit']
            else 'single files; a commit is named where it is known')
    below = f", below `{read['folder']}`" if read['folder'] else ''
    exact = {r['case'] for r in rows if r['result'] == 'exact'}
    return (f"{len(exact)} of {len({r['case'] for r in rows})} claims are exact. Read: {what}{below}. "
            f"Measured: {read['name']} {library['measured']}. The claims were {about({'': library})}.")

def markdown(df): # A table
    def cell(v): return str(v).replace('|', '\\|').replace('<', '&lt;').replace('__', r'\_\_')
    return '\n'.join(f"| {' | '.join(row)} |"
                     for row in [[*df.columns], ['---']*len(df.columns), *([cell(v) for v in r] for r in df.values)])
