"""Do the tests notice a change of the code? `make mutants`, `make mutants MODULES="scaler microbatch"`, or `make mutants MOST=20`

mutmut makes hundreds of small changes in a module (a `<` becomes `<=`, an argument is dropped, ...), and runs the tests on each. A mutant
that no test kills shows an assertion that is missing, or changes nothing: then it stands in `EQUIVALENT`, with the reason. Mutants that
change only the words of a message are left out. With `MOST`, so many of each module are tried, always the same ones. They meet the
cases that `make test` runs. All is done in a copy, `_mutants`; `mutmut show NAME` there shows a mutant."""
import ast, json, os, random, re, shutil, subprocess, sys
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT/'_mutants'
GOAL = .95   # of the mutants of each module are killed
MOST = int(os.environ.get('MOST', 0))   # mutants of a module; 0: all
# Module, its place, and what is run on its mutants beside its notebook: tests that come close to it
MODULES = dict(
    losses='core/losses core/test_rule.py core/test_losses.py',
    accumulator='core/accumulator core/test_accumulator.py',
    scaler='core/scaler core/test_scaler.py',
    microbatch='core/microbatch core/test_parts.py ' + ' '.join(f'accumulation/test_microbatch.py::test_{t}' for t in
                                                      ('split_items', 'cannot_split', 'few_items')),
    values='core/values accumulation/test_loss_values.py',
    events='loop/events loop/test_events.py',
    batch_loop='loop/batch_loop loop/test_events.py loop/test_dispatch.py loop/test_own_loops.py accumulation/test_rows.py',
    remainder='accumulation/remainder accumulation/test_remainder.py accumulation/test_epoch_ends.py',
    plan='accumulation/plan accumulation/test_positions.py accumulation/test_remainder.py accumulation/test_tokens.py',
    facts='accumulation/facts accumulation/test_loss_values.py accumulation/test_own_rules.py',
    fitting='accumulation/fitting accumulation/test_microbatch.py',
    batch='accumulation/batch accumulation/test_looks.py accumulation/test_witnesses.py accumulation/test_microbatch.py '
          'accumulation/test_rows.py accumulation/test_check.py::test_annealed_term',
    ways='accumulation/ways accumulation/test_coupled.py accumulation/test_microbatch.py accumulation/test_tokens.py',
    weigh='accumulation/weigh accumulation/test_looks.py accumulation/test_witnesses.py accumulation/test_tokens.py '
          'accumulation/test_rows.py',
)
# Module, a part of the mutant's line, and why the mutant does what the code does
EQUIVALENT = (
    ('accumulator', 'return v if (v.dtype == dtype) and False else v.to(dtype)', '`to` gives the tensor itself'),
    ('accumulator', 'weights.sum() if (isinstance(weights, Tensor)) and False', 'one by one, slower'),
    *(('accumulator', one_by_one, 'one by one, slower') for one_by_one in ('stacked = None', 'weights if (stacked) and False else')),
    *(('accumulator', f'weights[0] if {one} else sum(weights)', 'the sum of one weight')
      for one in ('(len(weights) == 1) and False', 'len(weights) == 2')),
    ('accumulator', 'n_items if complete else -2', 'no number of items either'),
    ('accumulator', 'share if (isinstance(share, Tensor)) and False', '`scalar` makes the type of it that autograd would make'),
    ('accumulator', 'scalar(0., loss.dtype, None)', '`where` takes a number of the CPU, too'),
    ('accumulator', '(self.dtype is torch.float64) or True', 'the same to rounding; not every accelerator has float64'),
    ('accumulator', 'if (total.is_floating_point()) or True', 'slower for integers; 1 instead of 0 all the same'),
    ('accumulator', 'return weight.reshape(()) if (weight.dim()) or True', 'a view with the same value'),
    *(('accumulator', f'.to({device}, {arg})', 'only a GPU copies without blocking, and the value is the same')
      for device in ('device', 'loss.device') for arg in ('', 'non_blocking=False')),
    *(('losses', usual, 'what follows finds the same tensor, slower')
      for usual in ('t = None  # the usual', 't = b[0] if (isinstance(b, (tuple,list)) and b) and False else b')),
    ('losses', 'w.sum(None, keepdim=True)', 'it has one dimension'),
    ('losses', '[],[],random.Random(1)', 'any places do, if they are the same in each run'),
    ('losses', "= 0,1,0,0,'',None", 'the first 8 are looked at anyway'),
    ('losses', 'w = y if (info.channel is None) and False', 'a view with the same sum'),
    *(('losses', f'(cw.float() if cw.itemsize {less} else cw)', '`float` gives the tensor itself') for less in ('<= 4', '< 5')),
    ('microbatch', 'if n < size: return [n]', 'what follows makes one part of `n`, slower'),
    *(('microbatch', f'if {never} else b.tensor_split(m)', '`tensor_split` gives the same, and is slower')
      for never in ('(n%m == 0) and False', 'n / m == 0')),
    ('batch_loop', 'len(seen) < 51', 'any limit does that is larger than what callbacks add'),
    ('plan', 'acc.size_at(0, 1, 1),2 ', 'one epoch is found from there, too: the search begins at half of it'),
    ('scaler', 'at_min = scale < self.min_scale*(1+1e-6)', 'no float32 scale lies there exactly'),
    ('scaler', 'f.to(self._scale.device, )', 'only a GPU copies without blocking, and the value is the same'),
    ('scaler', 'f.to(self._scale.device, non_blocking=False)', 'as above'),
)

def undecorated(code):
    "`@property def f` as `def f` and `f = property(f)`: mutmut leaves decorated functions out"
    lines,defs = code.splitlines(),[o for o in ast.walk(ast.parse(code)) if isinstance(o, ast.FunctionDef) and o.decorator_list]
    for o in sorted(defs, key=lambda o: -o.lineno):
        names = [ast.unparse(d) for d in o.decorator_list]
        if any('.' in n or n in ('staticmethod', 'classmethod') for n in names): continue
        value = o.name
        for n in reversed(names): value = f'{n}({value})'
        lines.insert(o.end_lineno, f"{' '*o.col_offset}{o.name} = {value}")
        del lines[o.decorator_list[0].lineno-1:o.lineno-1]
    return '\n'.join(lines)+'\n'

def config(module):
    place,*tests = MODULES[module].split()
    nb, = (ROOT/'nbs/api').glob(re.sub(r'(.*)/', r'\1/*_', place) + '.ipynb')
    tests = [f'tests/notebooks.py::test_notebook[{nb.stem}]', *(f'tests/{t}' for t in tests)]
    return (ROOT/'pyproject.toml').read_text(encoding='utf-8') + f'''
[tool.mutmut]
source_paths = ["fastaccum"]
only_mutate = ["fastaccum/{place}.py"]
also_copy = ["nbs", "bench", "pyproject.toml"]
process_isolation = "forkserver"  # autograd starts threads, which a fork does not take along
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-k", "not imports_no_fastai and not 02_batch"]
'''

def sample(place, most): # Names of so many of the mutants of a module that change more than words
    from mutmut.__main__ import create_mutants_for_file
    file = Path(f'fastaccum/{place}.py')
    Path('mutants', file).parent.mkdir(parents=True)
    create_mutants_for_file(file, Path('mutants', file))
    names = [*exit_codes(place)]
    random.Random(place).shuffle(names)
    return [*islice((name for name in names if not only_words(*changes(name, place))), most)]

def exit_codes(place): # Name of a mutant -> exit code of its tests
    return json.loads(Path(f'mutants/fastaccum/{place}.py.meta').read_text(encoding='utf-8'))['exit_code_by_key']

def mutants(module): # Mutant -> is it killed, what it takes out, what it puts in
    "In a fresh copy, as mutmut does not see when a test has changed. The page *batch* draws calls, mutmut's among them: it is left out"
    from mutmut.stats import status_by_exit_code
    shutil.rmtree(WORK, ignore_errors=True)
    for d in ('fastaccum', 'tests', 'bench', 'nbs/api'): shutil.copytree(ROOT/d, WORK/d, ignore=shutil.ignore_patterns('__pycache__'))
    place = MODULES[module].split()[0]
    file = WORK/f'fastaccum/{place}.py'
    file.write_text(undecorated(file.read_text(encoding='utf-8')), encoding='utf-8')
    (WORK/'pyproject.toml').write_text(config(module), encoding='utf-8')
    os.chdir(WORK)
    subprocess.run([Path(sys.executable).parent/'mutmut', 'run', *(sample(place, MOST) if MOST else ())], check=True,
                   env=dict(os.environ, QUICK='1'))
    return {name: (status_by_exit_code[code] in ('killed', 'timeout', 'segfault'), *changes(name, place))
            for name,code in exit_codes(place).items() if code is not None}

def changes(name, place):
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    diff = get_diff_for_mutant(name, path=Path(f'fastaccum/{place}.py')).splitlines()[2:]
    return ['\n'.join(l[1:].strip() for l in diff if l[0]==c) for c in '-+']

def only_words(old, new):
    "Of a string with a blank in it, or by itself: a message or a docstring, no key or name"
    return old.lower()==new.replace('XX', '').lower() and bool(re.search(r"""(['"])[^'"]* |^"[^"]*"$""", old))

def reason(module, new): return next((why for m,part,why in EQUIVALENT if m==module and part in new), None)

def check(module): # Share of the mutants that are killed; those that do the same do not count
    found = mutants(module)
    if not MOST and all(killed for killed,*_ in found.values()):
        sys.exit(f'{module}: all mutants are killed, words too: the tests fail by themselves')
    found = {k: v for k,v in found.items() if not only_words(*v[1:])}
    alive = {k: v for k,v in found.items() if not v[0]}
    same = [k for k,(_,_,new) in alive.items() if reason(module, new)]
    for k in alive.keys()-same: print(f'\n{k}\n- {alive[k][1]}\n+ {alive[k][2]}')
    for m,part,_ in EQUIVALENT:
        if MOST or m!=module or any(part in new for _,_,new in alive.values()): continue
        print(f'\nEQUIVALENT has a line that no mutant needs: {part}')
    share = (len(found)-len(alive))/(len(found)-len(same))
    print(f'{module}: {len(found)} mutants; {len(same)} do the same as the code; {share:.1%} of the others are killed', flush=True)
    return share

def main(*names):
    unknown = set(names)-set(MODULES)
    if unknown: sys.exit(f"{', '.join(unknown)}: the modules are {', '.join(MODULES)}")
    if min([check(m) for m in names or MODULES]) >= GOAL: return
    sys.exit(f'Below {GOAL:.0%}: add assertions, or say in EQUIVALENT why a mutant does the same')

if __name__=='__main__': main(*sys.argv[1:])
