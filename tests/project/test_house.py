"""The plan of the house, as far as a program can see it: who may import and name whom, who writes what, and what is public

Each check returns the module and what is wrong there. `debts` lists modules that do not pass yet; one that passes must leave the list."""
import ast, importlib, inspect, re, subprocess, sys
from functools import cache
from pathlib import Path
import fastai, pytest
pytest.importorskip('fastcore.nbio', reason='nbdev brings a fastcore that reads notebooks')
from fastcore.nbio import read_nb

root = Path(__file__).resolve().parents[2]
# From the ground up. A folder imports from floors below its own, and from no other folder of its floor
floors = [{'core'}, {'loop'}, {'accumulation','precision','logs','checkpoint'}, {'parallel','memory','batch_size'}]
folders = [f for floor in floors for f in sorted(floor)]
# An import that the floors forbid, and why it is there
allowed = {('accumulation','parallel'): "fastai's `distrib_ctx` calls the Learner's `to_distributed`, which accumulation puts there"}
# Objects of others, which a function may write to: fastai's and PyTorch's
foreign = set('learn dl opt rec model module head p param t res'.split())
# `learn.opt.x = ...` too; what stands behind other attributes is a callback
learners_own = set('opt recorder dls model logger gather_preds loss_of_outputs'.split())
of_pytorch = set('ctx cls greenlet cell fake_l smooth_loss'.split())
as_fastai_calls_them = {'GradientAccumulation','MixedPrecision','WandbCallback'}      # to know fastai's of these names

# Modules that a check still complains about
debts = dict(imports=set(), named_above=set(), namespaces=set(), patched=set(), replaced=set(), written=set(),
             written_by_methods={'core/measured'},
             warned=set(), reads_code={'core/untouched'}, too_deep=set(), below_internals=set())

@cache
def read(path=root/'fastaccum'):
    "Module -> its syntax, for the modules that notebooks make: 'core/accumulator', 'core/__init__', 'all'"
    names = {f: f.relative_to(path).with_suffix('').as_posix() for f in sorted(path.rglob('*.py'))}
    return {m: ast.parse(f.read_text(encoding='utf-8')) for f,m in names.items() if m not in ('__init__','_modidx')}

def folder(mod): return mod.partition('/')[0] if '/' in mod else ''
def floor(mod): return next((i for i,fs in enumerate(floors) if folder(mod) in fs), len(floors))    # single modules stand on the roof
def names_of(node): return getattr(node, 'id', None) or getattr(node, 'attr', None)

# -- Who knows whom ----------------------------------------------------------------------------------------------
def imported(mod, tree):
    "What a module of the package imports, also within functions: modules of the package as 'core/accumulator', others by name"
    for n in ast.walk(tree):
        if isinstance(n, ast.Import): yield from (a.name.replace('fastaccum.', '').replace('.', '/') for a in n.names)
        if not isinstance(n, ast.ImportFrom): continue
        up = mod.split('/')[:-n.level] if n.level else []
        name = '/'.join(up + (n.module or '').split('.')).strip('/').removeprefix('fastaccum/')
        yield from (f'{name}/{a.name}'.strip('/') for a in n.names) if not n.module else [name]

def imports(trees):
    "Imports that do not lead down, and fastai in the core"
    for mod,tree in trees.items():
        for to in imported(mod, tree):
            if folder(mod) == 'core' and re.match('fastai|wandb', to): yield mod,f'imports {to}'
            if (f := to.partition('/')[0]) not in folders or f == folder(mod) or (folder(mod), f) in allowed: continue
            if floor(f'{f}/') >= floor(mod): yield mod,f'imports {to}'

def named_above(trees):
    "Classes of upper floors that a lower one names: in code, or in a string of names. A message may name them"
    where = {}
    for mod,tree in trees.items():
        for n in ast.walk(tree):
            if isinstance(n, ast.ClassDef): where.setdefault(n.name, []).append(mod)
    for mod,tree in trees.items():
        for n in ast.walk(tree):
            text = isinstance(n, ast.Constant) and isinstance(n.value, str)
            words = n.value.replace(',', ' ').split() if text else [names_of(n)] if isinstance(n, (ast.Name,ast.Attribute)) else []
            if text and not all(w.isidentifier() for w in words): continue
            for w in words:
                if not where.get(w) or text and w in as_fastai_calls_them: continue
                if all(floor(o) > floor(mod) for o in where[w]): yield mod,f'names {w}, line {n.lineno}'

# -- Who writes what ---------------------------------------------------------------------------------------------
def namespaces(trees):
    "State without a class. Values may name the type, as one that checkpoints can save"
    for mod,tree in trees.items():
        if mod in ('checkpoint/kinds','checkpoint/values'): continue
        yield from ((mod, f'SimpleNamespace, line {n.lineno}') for n in ast.walk(tree) if names_of(n) == 'SimpleNamespace')

def patches(trees):
    "(module, class, name) of what `@patch` and `@patch_to` add"
    for mod,tree in trees.items():
        for n in ast.walk(tree):
            if not isinstance(n, ast.FunctionDef): continue
            for d in n.decorator_list:
                if names_of(d.func if isinstance(d, ast.Call) else d) == 'patch' and n.args.args:
                    yield mod,ast.unparse(n.args.args[0].annotation),n.name
                if isinstance(d, ast.Call) and names_of(d.func) == 'patch_to': yield mod,ast.unparse(d.args[0]),n.name

def patched(trees):
    "Methods that an own class gets from another module, but plots. In its own notebook a class may go on in later cells"
    own = {n.name: mod for mod,tree in trees.items() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    yield from ((mod, f'{cls}.{name}') for mod,cls,name in patches(trees) for c in re.findall(r'\w+', cls)
                if own.get(c, mod) != mod and not name.startswith('plot'))

def methods_of_learner():
    "Those that fastai gives a `Learner`, in its class or with `@patch`"
    texts = [f.read_text(encoding='utf-8') for f in Path(fastai.__file__).parent.rglob('*.py')]
    trees = {i: ast.parse(text) for i,text in enumerate(texts) if re.search('self ?: ?Learner', text)}
    cls, = [n for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef) and n.name == 'Learner']
    return {n.name for n in cls.body if isinstance(n, ast.FunctionDef)} | {name for _,c,name in patches(trees) if c == 'Learner'}

# What a Learner needs stands on itself, not in its class (`tests/loop/test_learner.py`). These give fastaccum's precision
of_the_class = {'to_fp16','to_bf16','to_fp32','to_channelslast'}

def replaced(trees, own=methods_of_learner()):
    "Methods of fastai's `Learner` that are replaced in its class"
    set_to = {mod: [t.attr for n in ast.walk(tree) if isinstance(n, ast.Assign) for t in n.targets
                    if isinstance(t, ast.Attribute) and names_of(t.value) == 'Learner'] for mod,tree in trees.items()}
    found = [(mod, name) for mod,cls,name in patches(trees) if cls == 'Learner']
    found += [(mod, name) for mod,names in set_to.items() for name in names]
    yield from ((mod, f'Learner.{name}') for mod,name in found if name in own - of_the_class)

def assigned(fn):
    "The attributes that a function assigns or deletes"
    for n in ast.walk(fn):
        if isinstance(n, (ast.Assign,ast.Delete)): targets = n.targets
        elif isinstance(n, (ast.AugAssign,ast.AnnAssign)): targets = [n.target]
        elif isinstance(n, ast.Call) and names_of(n.func) in ('setattr','delattr') and n.args: targets = [ast.Attribute(n.args[0], '?')]
        else: continue
        for t in targets: yield from (o for o in (t.elts if isinstance(t, (ast.Tuple,ast.List)) else [t]) if isinstance(o, ast.Attribute))

def written(trees):
    "Functions, not methods, that write the attributes of an object of ours that they were given"
    for mod,tree in trees.items():
        for fn in tree.body:
            if not isinstance(fn, ast.FunctionDef) or any(names_of(getattr(d, 'func', d)) in ('patch','patch_to')
                    for d in fn.decorator_list):
                continue
            params = {a.arg for a in [*fn.args.posonlyargs, *fn.args.args, *fn.args.kwonlyargs]}
            for o in assigned(fn):
                path = re.findall(r'\w+', ast.unparse(o.value).split('(')[0])
                if not path or path[0] not in params: continue
                if path[0] not in foreign or path[0] == 'learn' and path[1:] and path[1] not in learners_own:
                    yield mod,f'{fn.name} writes {ast.unparse(o)}'

def warned(trees):
    """Warnings that do not go through core/warnings, which gives them their class and the user's line. `warn` alone is
    another one of fastai's `import *`"""
    for mod,tree in trees.items():
        if mod == 'core/warnings': continue
        ours = any(isinstance(n, ast.ImportFrom) and (n.module or '').endswith('warnings') and n.level for n in tree.body)
        for n in ast.walk(tree):
            name = names_of(n.func) if isinstance(n, ast.Call) else None
            if name in ('warn','warn_explicit') and (isinstance(n.func, ast.Attribute) or not ours):
                yield mod,f'{ast.unparse(n.func)}, line {n.lineno}'

of_code = re.compile(r'dis|__code__|co_\w+|getclosurevars|get_instructions')

def reads_code(trees):
    "Code that is read to find out what it does. Where no attribute and no protocol can be asked, `core/functions` reads it"
    for mod,tree in trees.items():
        if mod == 'core/functions': continue
        for n in ast.walk(tree):
            names = [a.name for a in n.names] if isinstance(n, (ast.Import,ast.ImportFrom)) else [names_of(n), getattr(n, 'value', None)]
            yield from ((mod, f'{name}, line {n.lineno}') for name in names if isinstance(name, str) and of_code.fullmatch(name))

def chain(node):
    "The names of an attribute of an attribute, from the first on: ['self', 'cb', 'acc']; None if it does not begin with a name"
    names = []
    while isinstance(node, ast.Attribute): names,node = [node.attr, *names],node.value
    return [node.id, *names] if isinstance(node, ast.Name) else None

def aliases(fn):
    "Local name -> the attribute that it stands for, as of `cb,learn = self.cb,self.learn`"
    found = {}
    for n in ast.walk(fn):
        for t in n.targets if isinstance(n, ast.Assign) else ():
            both = [o.elts if isinstance(o, (ast.Tuple,ast.List)) else [o] for o in (t, n.value)]
            for name,value in zip(*both) if len(both[0]) == len(both[1]) else ():
                if isinstance(name, ast.Name) and len(names := chain(value) or []) > 1: found[name.id] = names
    return found

def is_patch(n):
    "Is it a method that `@patch` adds to a class?"
    return isinstance(n, ast.FunctionDef) and any(names_of(getattr(d, 'func', d)) == 'patch' for d in n.decorator_list)

def written_by_methods(trees):
    "Methods that write the attributes of another object of ours, also through a local name for it"
    for mod,tree in trees.items():
        methods = [(cls.name, fn) for cls in tree.body if isinstance(cls, ast.ClassDef) for fn in cls.body]
        methods += [(ast.unparse(fn.args.args[0].annotation), fn) for fn in tree.body if is_patch(fn)]
        for cls,fn in methods:
            if isinstance(fn, ast.FunctionDef):
                known,own = aliases(fn),{a.arg for a in fn.args.args}
                for o in assigned(fn):
                    names = chain(o.value)
                    if names and names[0] in known and names[0] not in own: names = known[names[0]] + names[1:]
                    if not names or names[0] not in own or names == ['self']: continue
                    if names[-1] in foreign | learners_own | of_pytorch: continue
                    yield mod,f'{cls}.{fn.name} writes {".".join(names)}.{o.attr}'

# -- Errors ------------------------------------------------------------------------------------------------------
def takes_all(text):
    "Lines with an `except` for errors of any type that neither raises again nor says in its line why it takes them all"
    lines = text.splitlines()
    for n in ast.walk(ast.parse(text)):
        if not isinstance(n, ast.ExceptHandler) or names_of(n.type) not in (None, 'Exception', 'BaseException'): continue
        if isinstance(n.type, ast.Tuple) or '#' in lines[n.lineno-1]: continue
        if not any(isinstance(o, ast.Raise) for o in ast.walk(n)): yield n.lineno

@pytest.mark.slow
def test_errors_are_named():
    "An `except` that takes whatever comes could hide an error of our own"
    files = [f for f in sorted((root/'fastaccum').rglob('*.py')) if f.name != '_modidx.py']
    assert [f'{f.relative_to(root)}, line {i}' for f in files for i in takes_all(f.read_text(encoding='utf-8'))] == []

@pytest.mark.parametrize('line,found', [
    ('except Exception: pass', 1), ('except: pass', 1), ('except Exception: pass   # the loss may raise anything', 0),
    ('except ValueError: pass', 0),
    ('except BaseException: raise', 0), ('except (TypeError,ValueError): pass', 0)])
def test_errors_that_are_not_named_are_found(line, found):
    assert len([*takes_all(f'try: f()\n{line}')]) == found

# -- The tests ---------------------------------------------------------------------------------------------------
checks = [imports, named_above, namespaces, patched, replaced, written, written_by_methods, warned, reads_code]

# Since imports lead down only, faces too, no import of a face can run in a circle
@pytest.mark.slow
@pytest.mark.parametrize('check', checks, ids=lambda c: c.__name__)
def test_the_house(check):
    found,owed = list(check(read())),debts[check.__name__]
    assert [f'{mod}: {what}' for mod,what in found if mod not in owed] == []
    assert owed - {mod for mod,_ in found} == set(), 'no longer a debt: take it from the list'

@pytest.mark.slow
def test_core_without_fastai():
    "Also in a fresh process, whose modules anything may have imported"
    mods = [m.replace('/', '.').removesuffix('.__init__') for m in read() if folder(m) == 'core']
    code = f'import sys, {", ".join(f"fastaccum.{m}" for m in mods)}; ' \
           'print([m for m in sys.modules if m.partition(".")[0] in ("fastai","wandb")])'
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=root, capture_output=True, text=True)
    assert res.stdout.strip() == '[]', res.stdout + res.stderr

@pytest.mark.slow
def test_light_import():
    "What takes long to import is imported where it is used: nobody who does not shard or forecast waits for it"
    code = """import sys
from fastai.basics import *
before = {*sys.modules}
from fastaccum.all import *
print([m for m in ('torchvision', 'triton', 'torch._dynamo', 'torch.distributed.fsdp', 'wandb') if m in {*sys.modules} - before])"""
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=root, capture_output=True, text=True)
    assert res.stdout.strip() == '[]', res.stdout + res.stderr

def own_levels(cls): return [c.__name__ for c in cls.__mro__ if c.__module__.startswith('fastaccum.')]

def test_levels_of_inheritance():
    mods = [importlib.import_module('fastaccum.' + m.replace('/', '.').removesuffix('.__init__')) for m in read()]
    classes = {c for mod in mods for _,c in inspect.getmembers(mod, inspect.isclass) if c.__module__.startswith('fastaccum.')}
    assert {c.__name__ for c in classes if len(own_levels(c)) > 3} == debts['too_deep']

# -- What is public ----------------------------------------------------------------------------------------------
def public_names(trees):
    "What the faces give, `fastaccum.all` and `fastaccum.wandb`"
    lists = [n.value for m in ('all', 'wandb', *(f'{f}/__init__' for f in folders)) for n in trees[m].body
             if isinstance(n, ast.Assign) and names_of(n.targets[0]) == '__all__']
    return {n for names in lists for n in ast.literal_eval(names)}

def test_few_public_names(): assert len(names := public_names(read())) <= 60, sorted(names)

def test_public_names_have_a_page():
    "Each is exported on a page, before that page's Internals, with a docstring: this gives it a heading there"
    fronts,told = [],set()
    for nb in map(read_nb, (root/'nbs'/'api').rglob('*.ipynb')):
        stop = next((i for i,c in enumerate(nb.cells) if re.match('#+ *Internals', c.source)), len(nb.cells))
        fronts += [ast.parse(c.source) for c in nb.cells[:stop] if re.match(r'#\| *export\b(?!i)', c.source)]
    told = {n.name for tree in fronts for n in tree.body if isinstance(n, (ast.ClassDef,ast.FunctionDef)) and ast.get_docstring(n)}
    assert public_names(read()) - told == debts['below_internals']

def test_map():
    "The map in CONTRIBUTING.md has a row for every folder, upper floors first, and the objects that it names are there"
    rows = re.findall(r'(?m)^\|.*\]\(nbs/api/(\w+)/index\.ipynb\) \|.*\| (.*) \|$', (root/'CONTRIBUTING.md').read_text(encoding='utf-8'))
    order = [floor(f'{f}/') for f,_ in rows]
    assert {f for f,_ in rows} == set(folders) and order == sorted(order, reverse=True)
    classes = {(folder(m), n.name) for m,tree in read().items() for n in tree.body if isinstance(n, ast.ClassDef)}
    assert {(f, n) for f,objects in rows for n in re.findall(r'`(\w+)`', objects)} - {('loop', 'Learner')} <= classes

# -- How wide code is ---------------------------------------------------------------------------------------------
def long_lines(lines): return [l for l in lines if len(l) > 140]

def test_lines_fit():
    "Of tests, benchmarks, tools and examples. test_notebooks.py looks at the cells that the modules are made of"
    files = [f for folder in ('tests','bench','tools','examples') for f in (root/folder).rglob('*.py')]
    assert len(files) > 150
    assert {f.relative_to(root).as_posix() for f in files if long_lines(f.read_text(encoding='utf-8').splitlines())} == set()
    assert long_lines(['a'*140, 'a'*141]) == ['a'*141]

# -- One assignment a statement ------------------------------------------------------------------------------------
def at_once(trees):
    "Statements that assign three values or more at once, attributes among them. `load_state_dict` may: it takes all or nothing"
    for mod,tree in trees.items():
        loads = {id(o) for fn in ast.walk(tree) if isinstance(fn, ast.FunctionDef) and fn.name == 'load_state_dict' for o in ast.walk(fn)}
        for n in ast.walk(tree):
            if not isinstance(n, ast.Assign) or id(n) in loads or not isinstance(n.value, ast.Tuple) or len(n.value.elts) < 3: continue
            if any(isinstance(o, ast.Attribute) for t in n.targets for o in getattr(t, 'elts', ())): yield mod,f'line {n.lineno}'

def test_one_assignment_a_statement():
    "Three or more may be one thought, but rarely are"
    assert len(found := [*at_once(read())]) <= 29, found

# -- The checks can fail -----------------------------------------------------------------------------------------
@pytest.mark.parametrize('check,mod,src,wrong', [
    (imports, 'core/a', 'from fastai.basics import *', 1), (imports, 'core/a', 'import torch\nfrom .b import c', 0),
    (imports, 'loop/a', 'from ..core.b import c', 0),
    (imports, 'core/a', 'from ..loop.b import c', 1), (imports, 'precision/a', 'def f():\n    from ..logs import c', 1),
    (imports, 'memory/__init__', 'from ..core import c', 0),
    (imports, 'logs/a', 'from fastaccum.memory.b import c', 1), (imports, 'memory/a', 'from .. import batch_size', 1),
    (imports, 'demo', 'from .memory import c', 0),
    (named_above, 'loop/a', 'x = "Upper"', 1), (named_above, 'loop/a', 'names = "Other Upper".split()', 1),
    (named_above, 'loop/a', 'raise ValueError("Use Upper instead.")', 0),
    (named_above, 'loop/a', 'f(learn.Upper)', 1), (named_above, 'memory/a', 'Upper()', 0),
    (namespaces, 'loop/a', 'x = SimpleNamespace(a=1)', 1), (namespaces, 'checkpoint/values', 'kinds = (SimpleNamespace,)', 0),
    (patched, 'memory/a', '@patch\ndef f(self:Upper): pass', 1), (patched, 'memory/a', '@patch(as_prop=True)\ndef f(self:Upper): pass', 1),
    (patched, 'memory/a', '@patch\ndef plot(self:Upper): pass', 0), (patched, 'memory/a', '@patch\ndef f(self:Learner): pass', 0),
    (patched, 'memory/upper', '@patch\ndef f(self:Upper): pass\nclass Upper: pass', 0),
    (written_by_methods, 'loop/a', 'class A: pass\n@patch\ndef f(self:A): self.cb.n = 1', 1),
    (written_by_methods, 'loop/a', 'class A: pass\n@patch\ndef f(self:A): self.n = 1', 0),
    (replaced, 'memory/a', '@patch\ndef fit(self:Learner): pass', 1), (replaced, 'memory/a', '@patch\ndef save(self:Learner): pass', 1),
    (replaced, 'loop/learner', '@patch\ndef fit_one_cycle(self:Learner): pass', 1), (replaced, 'memory/a', 'Learner.fit = f', 1),
    (replaced, 'memory/a', '@patch\ndef own(self:Learner): pass', 0),
    (replaced, 'precision/a', '@patch\ndef to_fp16(self:Learner): pass', 0),
    (written_by_methods, 'loop/a', 'class A:\n    def f(self): self.cb.n = 1', 1),
    (written_by_methods, 'loop/a', 'class A:\n    def f(self): self.n = 1', 0),
    (written_by_methods, 'loop/a', 'class A:\n def f(self):\n  cb,learn = self.cb,self.learn\n  cb.n = learn.pred = 1', 1),
    (written_by_methods, 'loop/a', 'class A:\n    def f(self, cb): cb.n = 1', 1),
    (written_by_methods, 'loop/a', 'class A:\n    def f(self): self.opt.n = 1', 0),
    (written, 'loop/a', 'def f(acc): acc.n = 1', 1), (written, 'loop/a', 'def f(cb): cb.state.n += 1', 1),
    (written, 'loop/a', 'def f(cb): setattr(cb, "n", 1)', 1),
    (written, 'loop/a', 'def f(learn): learn.xb,learn.yb = 1,2', 0), (written, 'loop/a', 'def f(learn): learn.mixed_precision.on = 1', 1),
    (written, 'loop/a', 'def f(learn): learn.opt.n = 1', 0),
    (written, 'loop/a', 'class A:\n    def f(self): self.n = 1', 0), (written, 'loop/a', 'def f(p): p.grad = None', 0),
    (warned, 'core/a', 'import warnings\nwarnings.warn("a")', 1), (warned, 'loop/a', 'from fastai.basics import *\nwarn("a")', 1),
    (warned, 'loop/a', 'from warnings import warn\nwarn("a")', 1), (warned, 'loop/a', 'from ..core.warnings import warn\nwarn("a")', 0),
    (warned, 'loop/a', 'cb.warn_once("a")', 0),
    (reads_code, 'loop/a', 'import dis', 1), (reads_code, 'loop/a', 'from inspect import getclosurevars', 1),
    (reads_code, 'loop/a', 'f.__code__.co_names', 2), (reads_code, 'loop/a', 'getattr(f, "__code__", None)', 1),
    (reads_code, 'core/functions', 'import dis', 0), (reads_code, 'loop/a', 'raise ValueError("read its __code__")', 0),
    (reads_code, 'loop/a', 'from fastaccum.core.functions import names_of', 0),
    (at_once, 'loop/a', 'class A:\n    def f(self): self.a,self.b,n = 1,2,3', 1), (at_once, 'loop/a', 'a,b,c = 1,2,3', 0),
    (at_once, 'loop/a', 'class A:\n    def f(self): self.a,self.b = 1,2', 0),
    (at_once, 'loop/a', 'class A:\n    def load_state_dict(self, s): self.a,self.b,self.c = s["a"],s["b"],s["c"]', 0)])
def test_the_checks_can_fail(check, mod, src, wrong):
    trees = {'memory/upper': ast.parse('class Upper: pass'), mod: ast.parse(src)}
    assert len(list(check(trees))) == wrong

def test_levels_are_counted():
    mod = dict(__module__='fastaccum.core.a')
    assert len(own_levels(type('B', (type('A', (dict,), mod),), mod))) == 2
