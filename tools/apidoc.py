"""What the site says about a symbol: heading, source link, signature, docstring, table of parameters, methods

nbdev puts `show_doc(symbol)` where a symbol is exported. Here these become markdown, with the symbols as the exported
modules have them: no cell of a notebook is run."""
import ast, importlib, inspect, nbdev.serve, re, textwrap
from enum import Enum, EnumMeta
from functools import lru_cache
from pathlib import Path
from fastai.callback.core import Callback
from fastcore.docments import DocmentText, docments, empty
from nbdev import processors
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from menu import folders
from widths import fitted

lib = get_config(Path(__file__).resolve().parent.parent).lib_path

def code(s): return f'`{s}`' if s else ''

def row(*cells): return '| ' + ' | '.join(re.sub(r'\s*\n\s*', ' ', c) for c in cells) + ' |'

def table(head, rows): return '\n'.join([row(*head), row(*['---']*len(head)), *(row(*r) for r in rows)]) if rows else ''

def type_name(anno, value=empty):
    "What an annotation is called; nothing for the type of a default `value` that says less than the value does"
    if anno in (empty, None, type(None),
                'None') or type(value) is anno and anno not in (int, float, bool, str, tuple, list, dict):
        return ''
    return anno if isinstance(anno, str) else inspect.formatannotation(anno).replace('typing.', '').replace('torch.', '')

_address = re.compile(r'<[\w.]*?(\w+) object at 0x\w+>')  # in the repr of an object: another one in every build

def default(v): return '' if v is empty else getattr(v, '__name__', _address.sub(r'\1()', repr(v)))

described = set()  # addresses of the symbols that have a place in the site: nbdev gives all symbols one

def full_name(sym): return f'{sym.__module__}.{sym.__qualname__}'

def anchor(sym, name):
    described.add(NbdevLookup().doc(full_name(sym)))
    return f'#{name.lower()}'

def source(sym):
    "Address of the line where `sym` begins (nbdev knows the line of names that no other library has, only)"
    return NbdevLookup()[full_name(sym)][2] + f'#L{inspect.getsourcelines(sym)[1]}'

def linkify(md, names=()):
    "`md` with links for code, but for `names`: what a symbol calls its own parameters and attributes"
    return re.sub(r'\[(`(\w+)`)\]\([^)]*\)', lambda m: m[1] if m[2] in names else m[0], NbdevLookup().linkify(md) or '')

# -- Symbols -----------------------------------------------------------------------------------------------------
def first_line(sym): return (inspect.getdoc(sym) or '').partition('\n')[0]

# Methods and properties of public classes that only other modules call: the source explains them, no page does
called_by_modules = {
    'GradientAccumulation': 'so_far opens cancelled auto splits step_values size_at epoch_plan during_fit apart '
                            'warn_of_loss keeps train_batch give_up_batch is_done predict constant',
    'GradientAccumulationSchedule': 'size_at', 'AdaptiveGradientAccumulation': 'size_at plan',
    'GradientNoiseScale': 'rank_sums summed_over_ranks',
    'GradientAccumulator': 'so_far rollback settled counted set_target count_for_all correct add_once once revise divide '
                           'reopen least_divisor',
    'LossRule': 'is_sum declares_sum may_be_nan key',
    'DynamicLossScaler': 'may_give_up reset_step',
    'WandbCallback': 'log_predictions', 'BatchLoop': 'begin_epoch extra_step table lr_finder fire around fit',
    'ActivationCheckpointing': 'recomputed', 'ActivationOffload': 'mover', 'Compile': 'cuda_graphs during_fit',
    'ChunkedHead': 'during_fit in_chunks scale defers only_loss after_backward',
    'HostGradients': 'follow', 'MemoryAdvice': 'cost', 'DataParallel': 'many errors_told',
    'FullyShard': 'exporting sharding', 'MixedPrecision': 'predict opt opt_step undo_step skip_step has_scale', 'SkipSpikes': 'skips'}

def own(cls):
    "name -> method or property with a docstring that `cls` itself has, without what is private, and what only modules call"
    get = lambda v: v.__func__ if isinstance(v, (classmethod,staticmethod)) else v
    inner = called_by_modules.get(cls.__name__, '').split()
    members = {k: get(v) for k,v in vars(cls).items() if not k.startswith('_') and k not in inner}
    return {k: v for k,v in members.items() if (inspect.isfunction(v) or isinstance(v, property)) and v.__doc__}

def signature(sym, name):
    "`name(...)` as it would be called: in one line if it fits, else a line for each parameter, unless these are many"
    if inspect.isclass(sym) and sym.__init__ is Callback.__init__: return f'{name}()'  # whose arguments stand for its methods
    named = re.compile(r':(NoneType|function|builtin_function_or_method)\b|:[\w.]+(?==<)')
    params = [_address.sub(r'\1()', named.sub('', o)) for o,_ in DocmentText(sym, docstring=False).params]
    to,theirs = delegated(sym)
    if to is not None: params = [*(o for o in params if re.match(r'\w*', o)[0] not in theirs and o not in ('*','**kwargs')), '**kwargs']
    if not inspect.isclass(sym) and params[:1]==['self']: params = params[1:]
    one = f'{name}({", ".join(params)})'
    if len(one) <= 88: return one
    lines = (params if len(params) <= 8
             else textwrap.wrap(', '.join(p.replace(' ', '\0') for p in params), 84, break_long_words=False,
                                break_on_hyphens=False))
    return f'{name}(\n    ' + ',\n    '.join(l.replace('\0', ' ').removesuffix(',') for l in lines) + '\n)'

def delegated(sym):
    "The class to whose arguments the `**kwargs` of a class go, as fastcore's `delegates` has it, and the names of these arguments"
    if not inspect.isclass(sym): return None,()
    init = vars(sym).get('__init__')
    to = getattr(sym, '__delwrap__', getattr(init, '__delwrap__', None))
    if to is None: return None,()
    own = inspect.unwrap(init).__code__
    own = own.co_varnames[:own.co_argcount + own.co_kwonlyargcount]
    to = to if inspect.isclass(to) else next(c for c in sym.__mro__ if vars(c).get('__init__') is to)
    return to,[k for k in inspect.signature(sym).parameters if k not in own]

def groups_of(sym):
    "Title -> names of arguments, by the comments `# -- title` in a signature"
    if not inspect.isclass(sym) or '__init__' not in vars(sym): return {}
    title,groups = None,{}
    try: lines = inspect.getsource(sym.__init__).partition('\n    ):')[0].splitlines()
    except (OSError,TypeError): return {}      # no file holds it, as that of a dataclass
    for line in lines:
        if found := re.match(r' *# -- (.*)', line): title = found[1]
        elif title and (found := re.match(r' *\**(\w+) *[:=]', line)): groups.setdefault(title, []).append(found[1])
    return groups

def parameters(sym):
    "Tables of what `sym` takes and returns, if that is documented: one for each group of arguments"
    dm = {k: v for k,v in docments(sym, full=True, args_kwargs=True).items() if k!='self'}
    to,theirs = delegated(sym)
    dm = {k: v for k,v in dm.items() if k not in theirs and (to is None or k != 'kwargs')}
    text = lambda o: '' if o.get('docment', empty) in (empty, None) else linkify(o['docment'], dm)
    if not any(text(o) for o in dm.values()): return ''
    ret = dm.pop('return', None)
    rows = [[code(k), linkify(code(type_name(o['anno'], o['default']))), code(default(o['default'])), text(o)] for k,o in dm.items()]
    if ret and not inspect.isclass(sym) and (text(ret) or type_name(ret.get('anno', empty))):
        rows.append(['*returns*', linkify(code(type_name(ret['anno']))), '', text(ret)])
    if to is not None: rows.append([code('**kwargs'), '', '', f'The other arguments of {link(to.__name__, to)}'])
    head = ['Parameter', 'Type', 'Default', 'What it is']
    used = [i for i in range(4) if any(r[i] for r in rows)]
    def part(rows): return table([head[i] for i in used], [[r[i] for i in used] for r in rows])
    groups = groups_of(sym)
    grouped = {code(k) for names in groups.values() for k in names}
    def titled(title, names): return f'**{title[:1].upper()}{title[1:]}**\n\n{part([r for r in rows if r[0] in map(code, names)])}'
    parts = [titled(*o) for o in groups.items()]
    return '\n\n'.join(filter(None, [*parts, part([r for r in rows if r[0] not in grouped])]))

def attributes(cls, name):
    if issubclass(cls, Enum): return table(['Member', 'Value'], [[code(f'{name}.{m.name}'), code(repr(m.value))] for m in cls])
    props = {k: p for k,p in own(cls).items() if isinstance(p, property)}
    rows = [[f'`{k}`{{ {anchor(p.fget, f"{name}.{k}")} }}', ' '.join(p.__doc__.split())] for k,p in props.items()]
    return linkify(table(['Attribute', 'What it is'], rows), props)

def package(mod): return mod.__name__.partition('.')[0]

def module_of(exp):
    "The module of a notebook with `#| default_exp exp`, as users import it: 'core.__init__' is the face of the folder, fastaccum.core"
    return importlib.import_module(f'{lib.name}.{exp}'.removesuffix('.__init__'))

def modules():
    "Names of the package's modules without the package's own: 'core.accumulator'. `all` and faces of folders only hand names on"
    paths = sorted(f.relative_to(lib).with_suffix('') for f in lib.rglob('*.py') if f.stem[0] != '_')
    return ['.'.join(p.parts) for p in paths if p.parts != ('all',)]

def is_described(o): return inspect.isclass(o) or inspect.isfunction(inspect.unwrap(o)) if callable(o) else False     # cached functions too

def is_face(mod): return hasattr(mod, '__path__')

@lru_cache
def faces():
    "Face -> its public names: `all`, and those of the folders. A module in no folder is its own face, but for what only a command runs"
    names = ['all', *sorted(f.parent.name for f in lib.glob('*/__init__.py')), *(m for m in modules() if '.' not in m and m != 'demo')]
    return {m: module_of(m).__all__ for m in names}

def public(mod):
    "Names of the module `mod` for users, which are those that a face hands on; and its other names"
    users = {n for names in faces().values() for n in names}
    names = [n for n in mod.__all__ if not n.startswith('_') and is_described(getattr(mod, n))]
    main = [n for n in names if n in users]
    return main,[n for n in names if n not in main]

def is_public(mod):
    "Is the page of `mod` for users, with names of theirs or something for fastai's classes? The others say what these are made of"
    return bool(public(mod)[0] or patched(mod))

def helpers():
    "Module -> names that have a place on its page, and are not for users"
    return {m: public(module_of(m))[1] for m in modules()}

def head(sym, name, level):
    "The beginning of a description: heading, link to the source, signature (of a property its name), what it is for"
    called = signature
    if isinstance(sym, property): sym,called = sym.fget,lambda _, name: name
    kind = 'class' if inspect.isclass(sym) else 'method' if '.' in name else 'function'
    parts = [f'{"#"*level} {name} {{ {anchor(sym, name)} .api .{kind} }}', f'[source]({source(sym)}){{ .src data-search-exclude }}']
    if callable(sym) and not isinstance(sym, EnumMeta): parts.append(f'```python\n{called(sym, name)}\n```')
    return '\n\n'.join([*parts, linkify(inspect.getdoc(sym).partition('\n\n')[0])])

def details(sym, name, methods=True):
    "What else is said of it, its parameters, and the attributes of a class"
    sym = getattr(sym, 'fget', sym)
    parts = [linkify(inspect.getdoc(sym).partition('\n\n')[2]), '' if isinstance(sym, EnumMeta) else parameters(sym),
             attributes(sym, name) if inspect.isclass(sym) and methods else '']
    return '\n\n'.join(filter(None, parts))

def methods_of(sym, name, level, skip=()):
    "The methods of a class but those in `skip`, which have a place of their own"
    if not inspect.isclass(sym): return ''
    return '\n\n'.join(describe(m, f'{name}.{k}', level) for k,m in own(sym).items() if inspect.isfunction(m) and f'{name}.{k}' not in skip)

def describe(sym, name, level=3, methods=True, skip=()):
    "All about `sym`, with its methods but those in `skip`"
    parts = [head(sym, name, level), details(sym, name, methods), methods_of(sym, name, level+1, skip) if methods else '']
    return '\n\n'.join(filter(None, parts))

def patched(mod):
    "Name -> what `mod` adds to classes of fastai, such as `Learner.to_fp16`"
    names = [n.removeprefix(f'{mod.__name__}.') for n in importlib.import_module(f'{package(mod)}._modidx').d['syms'].get(mod.__name__, {})]
    split = [n.split('.') for n in names if '.' in n and '._' not in n and n.split('.')[0] not in names]
    return {f'{cls}.{m}': inspect.getattr_static(getattr(mod, cls), m) for cls,m in split}

def lead(mod):
    "Name and symbol with which the page of `mod` begins: the first in the source of those for users; nothing where these stand elsewhere"
    users = {n: getattr(mod, n) for n in public(mod)[0] if getattr(mod, n).__module__ == mod.__name__} | patched(mod)
    line = lambda n: inspect.getsourcelines(getattr(users[n], 'fget', users[n]))[1]
    return min(((n, users[n]) for n in users), key=lambda o: line(o[0]), default=None)

def several(mod): return len(public(mod)[0]) + len(patched(mod)) > 1

def is_lead(mod, name): return (lead(mod) or [''])[0] == name

def link(name, sym):
    "`name` as a link to where `sym` is described; nbdev knows functions and classes, but no namedtuples made by a call"
    where = NbdevLookup().doc(full_name(getattr(sym, 'fget', sym)))
    return f'[`{name}`]({where})' if where else f'`{name}`'

def listed(symbols):
    "Table of `symbols`, name -> symbol"
    return table(['Name', 'What for'], [[link(n, o), linkify(first_line(o))] for n,o in symbols.items()])

def contents(mod):
    "Table of the names of the module `mod` for users, then what else it has"
    main,rest = public(mod)
    others = f'{"It is made of" if main else "Internals:"} {", ".join(link(n, getattr(mod, n)) for n in rest)}.' if rest else ''
    return '\n\n'.join(filter(None, [listed({n: getattr(mod, n) for n in main} | patched(mod)), others]))

def overview():
    "Tables of all that is for users, by what it is: callbacks first"
    order = {f.removeprefix('api/'): i for i,f in enumerate(folders)}
    users = {n: getattr(module_of(m), n) for m in sorted(faces(), key=lambda m: order.get(m, len(order))) for n in faces()[m]}
    users = {n: o for n,o in users.items() if is_described(o)}
    given = {k: o for m in modules() for k,o in patched(module_of(m)).items() if k.startswith('Learner.')}
    callbacks = {n: o for n,o in users.items() if inspect.isclass(o) and issubclass(o, Callback) and n != 'LoopCallback'}
    alone = set(module_of('all').__all__) - callbacks.keys()
    groups = {'Callbacks': callbacks, 'What a `Learner` gets': given,
              'Functions and other classes': {n: o for n,o in users.items() if n in alone},
              'Imported from a folder or module of the package': {n: o for n,o in users.items() if n not in callbacks and n not in alone}}
    return '\n\n'.join(f'## {head}\n\n{listed(names)}' for head,names in groups.items())

# -- nbdev's pipeline --------------------------------------------------------------------------------------------
def calls(cell, name='show_doc'):
    "The calls of `name` in a cell"
    if cell.cell_type!='code' or not cell.source: return []
    return [t.value for t in cell.parsed_() or [] if isinstance(t, ast.Expr) and getattr(getattr(t.value, 'func', None), 'id', '')==name]

class shown_docs(processors.Processor):
    "In place of nbdev's `exec_show_docs`: what `show_doc` and `show_source` give, of the modules as they are now, with no cell run"
    def begin(self):
        exp = next((c.directives_['default_exp'] for c in self.nb.cells if 'default_exp' in (c.directives_ or {})), 'all')
        self.mod = module_of(exp)
        self.described = [ast.unparse(t.args[0]) for c in self.nb.cells for t in calls(c)]
        self.names = {}
        imports = [t for c in self.nb.cells if c.cell_type=='code' for t in c.parsed_() or [] if isinstance(t, ast.ImportFrom)]
        for t in imports:
            if t.module.startswith(f'{package(self.mod)}.'): self.names.update(vars(importlib.import_module(t.module)))
        self.names.update(vars(self.mod))                # and, before these, what the notebook imports from the package

    def cell(self, cell):
        docs = [self.doc(t) for t in calls(cell)] + [self.source(t) for t in calls(cell, 'show_source')]
        if docs:
            shown = dict(output_type='display_data', metadata={}, data={'text/markdown': '\n\n'.join(docs)})
            cell.outputs = processors.mk_cell('', outputs=[shown]).outputs

    def doc(self, call):
        name = ast.unparse(call.args[0])
        if is_lead(self.mod, name):
            text = methods_of(eval(name, self.names), name, 4, self.described)
            return f'### Methods of {name}\n\n{text}' if text else ''
        level = next((ast.literal_eval(k.value) for k in call.keywords if k.arg=='title_level'),
                     4 if '.' in name and name.split('.')[0] in self.described else 3)
        return describe(eval(name, self.names), name, level, name in public(self.mod)[0], self.described)

    def source(self, call):
        sym = eval(ast.unparse(call.args[0]), self.names)
        # a method that is patched in is shown as one that stands in its class
        code = re.sub(r'^@patch\n(def \w+\(self):\w+', r'\1', textwrap.dedent(inspect.getsource(sym)).strip())
        return f'```python\n{fitted(code)}\n```\n\n[source]({source(sym)}){{ .src data-search-exclude }}'

def defined(cell): return [t.name for t in cell.parsed_() or [] if isinstance(t, (ast.FunctionDef,ast.ClassDef))]

def keep_internals(cell):
    "nbdev leaves `#| exporti` cells out. Here their source is part of the page, folded, as it is all that is said of internals"
    if cell.cell_type!='code' or 'exporti' not in cell.directives_ or not defined(cell): return
    del cell.directives_['exporti']
    cell.source = f'#| eval: false\n#| code-fold: true\n#| code-summary: "Code of {", ".join(defined(cell))}"\n{cell.source}'

class DocsFilter(nbdev.serve.FilterDefaults):
    def base_procs(self): return [keep_internals, *(shown_docs if p.__name__=='exec_show_docs' else p for p in super().base_procs())]

def proc_nbs():
    "nbdev's, with the processor above; returns the folder of the processed notebooks"
    nbdev.serve.FilterDefaults = DocsFilter
    return nbdev.serve.proc_nbs(n_workers=0, force=True)
