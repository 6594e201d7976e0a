"The site, built once and driven in headless Chromium: from the disk, and from below a path of a server"
import ast, html, importlib, inspect, json, os, re, shutil, subprocess, sys, threading
from functools import lru_cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit
import pytest
pytest.importorskip('zensical', reason='The site needs Zensical, and that Python 3.11')
from fastcore.docments import docments
from fastcore.nbio import mk_cell, new_nb, read_nb
from nbdev.config import get_config
import apidoc, docs, menu, messages, pages, snippets, widths

root = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow      # the others need the site

@pytest.fixture(scope='session')
def project(tmp_path_factory):
    "The folder of a project whose site is built"
    where = tmp_path_factory.mktemp('site')/'below'/'fastaccum'
    for d in ('.github', 'bench', 'examples', 'nbs', 'tools', 'tests', 'fastaccum'):
        shutil.copytree(root/d, where/d, ignore=shutil.ignore_patterns('__pycache__', 'models'))
    for f in root.iterdir():
        if f.is_file(): shutil.copy(f, where)
    env = {**os.environ, 'PYTHONPATH': str(where), 'PYTHONWARNINGS': 'ignore'}
    res = subprocess.run([sys.executable, 'tools/docs.py'], cwd=where, env=env, capture_output=True, text=True, timeout=300)
    assert res.returncode==0, res.stdout + res.stderr
    return where

@pytest.fixture(scope='session')
def site(project): return project/'_docs'

# -- Without a browser -------------------------------------------------------------------------------------------
def paths(site): return sorted(f.relative_to(site).as_posix() for f in site.rglob('*.html') if f.name!='404.html')

def test_pages(site):
    "Each notebook has a page that the menu leads to, in HTML and markdown"
    assert {'index.html', 'changelog.html', 'api/accumulation/callback.html', 'api/core/accumulator.html'} <= set(paths(site))
    menu = re.search(r'(?s)<nav class="md-nav md-nav--primary".*?</nav>\s*</div>', (site/'index.html').read_text())[0]
    llms = (site/'llms.txt').read_text()
    for p in paths(site):
        assert f'/{p}"' in menu or f'"{p}"' in menu or p=='index.html', p
        assert (site/p).with_suffix('.html.md').exists(), p
        assert f'/{p}.md)' in llms or p in ('changelog.html', 'contributing.html'), p

def test_order_of_pages():
    """The overview; each folder's face and its pages for users; what stands in no folder. What all of these are made of
    stands in one place of another part of the menu, by folder too"""
    names = ('conformance', 'all', 'core/index', 'core/accumulator', 'core/measured', 'accumulation/index',
             'accumulation/callback', 'accumulation/plan', 'new/page')
    titles = {f'api/{m}.md': m for m in names} | {'contributing.md': 'Contributing'}
    api,contributing = docs.navigation(titles, {'api/core/measured.md', 'api/accumulation/plan.md'})
    assert api=={'API reference': [
        {'all': 'api/all.md'},
        {'accumulation/index': ['api/accumulation/index.md', {'accumulation/callback': 'api/accumulation/callback.md'}]},
        {'core/index': ['api/core/index.md', {'core/accumulator': 'api/core/accumulator.md'}]},
        {'new': [{'new/page': 'api/new/page.md'}]}, {'conformance': 'api/conformance.md'}]}
    assert contributing=={'Contributing': [{'How to contribute': 'contributing.md'}, {'Internals': [
        {'accumulation/index': [{'accumulation/plan': 'api/accumulation/plan.md'}]},
        {'core/index': [{'core/measured': 'api/core/measured.md'}]}]}]}

def test_internals_are_told_from_code():
    "A page is for users if it describes what a face hands on"
    assert all(apidoc.is_public(apidoc.module_of(m))
               for m in ('all', 'core.__init__', 'core.accumulator', 'accumulation.callback', 'logs.wandb', 'wandb',
                         'conformance'))
    assert not any(apidoc.is_public(apidoc.module_of(m)) for m in ('loop.events', 'checkpoint.values', 'accumulation.plan'))
    assert (apidoc.module_of('core.__init__').__name__=='fastaccum.core'
            and 'loss_weight' in apidoc.public(apidoc.module_of('core.__init__'))[0])

def test_code_of_internals(site):
    "What `#| exporti` cells define is on the page as folded code; what a reader types does not hold it"
    for f in sorted((root/'nbs'/'api').rglob('*.ipynb')):
        cells = [c for c in read_nb(f).cells if c.cell_type=='code' and c.source.startswith('#| exporti')]
        names = [n for c in cells for n in re.findall(r'^(?:def|class) (\w+)', c.source, re.M)]
        text = (site/pages.page_path(f.relative_to(root/'nbs').as_posix())).with_suffix('.html').read_text() if names else ''
        shown = ', '.join(html.unescape(o) for o in re.findall(r'<summary>Code of (.*?)</summary>', text))
        assert set(names) <= set(re.findall(r'\w+', shown)), f.name

def symbols(mod):
    "What a module has for others: full name -> symbol; methods of classes for users, and what it adds to fastai's classes, too"
    users,parts = apidoc.public(mod)
    found = {n: getattr(mod, n) for n in users+parts if getattr(mod, n).__module__==mod.__name__}
    for n in users: found.update({f'{n}.{k}': v for k,v in apidoc.own(found[n]).items()} if inspect.isclass(found.get(n)) else {})
    return {**found, **apidoc.patched(mod)}, {*users, *apidoc.patched(mod)}

modules = apidoc.modules()

def api_page(site, name): return (site/f"api/{name.replace('.', '/')}.html").read_text()

def is_passing_on(sym):
    "The name of the class to which `__init__` passes its other arguments, if any"
    if not inspect.isclass(sym): return None
    to = getattr(sym, '__delwrap__', None) or getattr(sym.__init__, '__delwrap__', None)
    return to and to.__qualname__.partition('.')[0]

@lru_cache
def examples():
    "The code of all pages that defines nothing of the package, and is seen"
    cells = [c for f in (root/'nbs').rglob('*.ipynb') for c in read_nb(f).cells if c.cell_type=='code']
    return '\n'.join(c.source for c in cells if not {'export', 'exporti', 'hide'} & set(c.directives))

@pytest.mark.parametrize('name', modules)
def test_symbols(site, name):
    """Every symbol: heading, link to its source, signature, what it is for; parameters in a table; for users: all of
    these described, and a live example"""
    mod,text = importlib.import_module(f'fastaccum.{name}'),api_page(site, name)
    found,users = symbols(mod)
    for n,sym in found.items():
        about = re.search(rf'(?s)<(?:h[234] class="api[^>]*|code) id="{n.lower()}".*?(?=<h[234]|$)', text)
        assert about, n
        if isinstance(sym, property) and n not in users: continue            # a row of a table
        assert re.search(r'href="https://github.com/[^"]*/fastaccum/[\w/]+\.py#L\d+"', about[0]), n
        assert '<div class="highlight' in about[0] or '<th>Value</th>' in about[0], n
        assert inspect.getdoc(sym) and '<p>' in about[0].partition('</pre>')[2] or '<th>Value</th>' in about[0], n
        dm = {} if isinstance(sym, property) or '<th>Value</th>' in about[0] else docments(sym, full=True, args_kwargs=True)
        told = {k: o.docment for k,o in dm.items() if k not in ('self', 'return')}
        to = is_passing_on(sym)
        if to: assert f'#{to.lower()}"' in about[0].partition('kwargs')[2], n      # this row leads to the class that has the others
        own = sym.__init__.__code__.co_varnames if to else (*told,)
        shown = [k for k in told if k in own and k != 'kwargs']
        if any(told.values()): assert '<table' in about[0] and all(f'<code>{k}</code>' in about[0] for k in shown), n
        if n in users or n.partition('.')[0] in users: assert all(told.values()) or n in untold, (n, told)
        if n in users and n not in unshown:
            assert re.search(rf'\b{n.rpartition(".")[2]}\b', examples()), f'{n}: no example'

# What fastai leaves open, and methods that only callbacks call
untold = {'FastaccumWarning', 'LoopCallback', 'BatchLoop.forward', 'GradientAccumulation.predict', 'WandbCallback',
          'AdaptiveGradientAccumulation', 'AdaptiveGradientAccumulation.plan',
          'AMPMode', 'NoiseEstimate', 'Result', 'CallbackResult'}
# Shown only through what uses it
unshown = {'start_group', 'stop_group', 'NoiseEstimate', 'MemoryAdvice', 'CallbackResult'}

api_pages = [m for m in modules if apidoc.lead(importlib.import_module(f'fastaccum.{m}'))
             and apidoc.is_public(importlib.import_module(f'fastaccum.{m}'))]

@pytest.mark.parametrize('name', api_pages)
def test_beginning(site, name):
    """A page for users begins with a sentence, a signature, and an example of it; no internal name stands before these,
    or in the right column"""
    mod = importlib.import_module(f'fastaccum.{name}')
    about,text = apidoc.lead(mod)[0],(site/f"api/{name.replace('.', '/')}.html.md").read_text()
    front,last = text[text.index('# '):text.index('[notebook at GitHub]')],about.rpartition('.')[2]
    signature,example = [*re.finditer(r'(?ms)^```python\n(.*?)^```', front)][:2]
    assert re.match(rf'{re.escape(about)}\b', signature[1])
    assert re.search(rf'\b({last}|{re.sub("(?<!^)(?=[A-Z])", "_", last).lower()})\b', example[1]), example[1]
    words = re.sub(r'(?s)```.*?```', '', front[:example.start()])
    assert '{ .subtitle }' in words and len(words.split()) < 180, len(words.split())
    names = {n.removeprefix(f'fastaccum.{name}.') for n in importlib.import_module('fastaccum._modidx').d['syms'][f'fastaccum.{name}']}
    inner = {n for n in names if '.' not in n} - {*apidoc.public(mod)[0]}
    right = api_page(site, name).partition('md-sidebar--secondary')[2]
    headings = {html.unescape(re.sub('<.*?>', '', o)).strip()
                for o in re.findall(r'(?s)<a [^>]*class="md-nav__link"[^>]*>(.*?)</a>', right)}
    assert about in headings and not {n for n in inner if f'`{n}`' in words or n in headings}

def test_methods_that_only_modules_call(site):
    "No page describes them. The others stand in an example or a text of some page"
    classes = {n: getattr(importlib.import_module(f'fastaccum.{m}'), n) for m in modules
               for n in apidoc.public(importlib.import_module(f'fastaccum.{m}'))[0]}
    pages = {p: (site/p).read_text() for p in paths(site) if p.startswith('api/')}
    for cls,names in apidoc.called_by_modules.items():
        for n in names.split():
            assert n in vars(classes[cls]), f'{cls}.{n} does not exist'
            assert not [p for p,text in pages.items() if f'id="{cls.lower()}.{n}"' in text], f'{cls}.{n}'
    shown = '\n'.join(c.source for f in (root/'nbs').rglob('*.ipynb')
                      for c in read_nb(f).cells if not {'export', 'exporti', 'hide'} & set(c.directives))
    for name,cls in classes.items():
        if not inspect.isclass(cls): continue
        unused = [k for k in apidoc.own(cls) if not re.search(rf'\.{k}\b|`{k}\b|def {k}\b', shown)]
        assert not unused, f'{name}: {unused} are on no page: do only modules call them?'

def test_names_that_mean_something_else_elsewhere():
    "The first line of what is for users says what it is beside the other of that name, or whence it is imported"
    found = {n: apidoc.first_line(getattr(apidoc.module_of(m), n)) for m,names in apidoc.faces().items() for n in names}
    other = {'DataParallel': '`nn.DataParallel`', 'Compile': '`torch.compile`', 'launch': 'torchrun', 'WandbCallback': '`fastaccum.wandb`'}
    assert [n for n,word in other.items() if word not in found[n]] == []

def test_overview(site):
    "It lists all callbacks, before all else"
    text = (site/'api/all.html').read_text()
    tables = re.findall(r'(?s)<table.*?</table>', text)
    found = {n: getattr(apidoc.module_of(m), n) for m,names in apidoc.faces().items() for n in names}
    callbacks = {n for n,o in found.items() if inspect.isclass(o) and issubclass(o, apidoc.Callback)} - {'LoopCallback'}
    assert {'GradientAccumulation', 'WandbCallback', 'TrainingCheckpoint', 'ChunkedHead', 'DataParallel'} <= callbacks
    assert {*re.findall(r'<code>(\w+)</code></a></td>', tables[0])} == callbacks
    listed = {*re.findall(r'<code>([\w.]+)</code></a></td>', ''.join(tables))}
    assert ({n for n,o in found.items() if apidoc.is_described(o)} <= listed
            and {'Learner.to_fp16', 'Learner.stepped', 'Learner.memory_advice'} <= listed)

@pytest.mark.quick
@pytest.mark.parametrize('src,expected', [
    ('f(a)', 'f(a)'), ('!ls ' + 'x'*99, '!ls ' + 'x'*99),
    (f'f({"a"*40}, {"b"*40}, {"c"*40})', f'f({"a"*40}, {"b"*40},\n  {"c"*40})'),
    (f'x = 1   # {"a"*90}', f'# {"a"*90}\nx = 1'), (f'assert {"a"*60} and {"b"*40}', f'assert ({"a"*60}\n        and {"b"*40})'),
    (f'for {"a"*50} in b: print({"c"*50})', f'for {"a"*50} in b:\n    print({"c"*50})')])
def test_fitted(src, expected): assert widths.fitted(src)==expected

@pytest.mark.parametrize('nb', sorted(f.relative_to(root/'nbs').as_posix() for f in (root/'nbs').rglob('*.ipynb')))
def test_code_fits_its_page(nb):
    "Lines have at most 95 characters, but for texts that are longer, and one line of a page; it is the same code"
    long = []
    for c in read_nb(root/'nbs'/nb).cells:
        if c.cell_type!='code' or not pages.is_typed(c) or {'hide', 'export', 'exporti'} & set(c.directives): continue
        c.remove_directives()
        lines = [l for l in widths.fitted(c.source).split('\n') if len(l) > 95]
        long += [l for l in lines if not re.search(r'"[^"]{20,}"|\'[^\']{20,}\'', l)]
    assert len(long) <= 1, long

@pytest.mark.parametrize('nb', sorted(f.relative_to(root/'nbs').as_posix() for f in (root/'nbs').rglob('*.ipynb')))
def test_code_in_text_fits_its_page(nb):
    "It is shown as it is written"
    texts = [c.source for c in read_nb(root/'nbs'/nb).cells if c.cell_type=='markdown']
    long = [l for text in texts for src in re.findall(r'(?ms)^```\w+\n(.*?)^```', text) for l in src.split('\n') if len(l) > 95]
    assert not long

def test_no_empty_sections(site):
    for p in paths(site):
        article = re.search(r'(?s)<article.*?</article>', (site/p).read_text())[0]
        assert not re.findall(r'(?s)<h2[^>]*>[^\n]*</h2>\s*(?=<h2|</article)', article), p

def test_all_has_a_place(site):
    "What faces hand on is listed there, with a link to where it is described"
    for face,names in apidoc.faces().items():
        page = f'api/{face}/index.html' if (site/'api'/face).is_dir() else f'api/{face}.html'
        for n in names:
            if n.startswith('_') or not callable(getattr(importlib.import_module(f'fastaccum.{face}'), n)): continue
            links = re.findall(rf'<a href="([\w/.]*)#{n.lower()}"><code>{n}</code>', (site/page).read_text())
            assert (links and all(f'id="{n.lower()}"' in (site/page).parent.joinpath(l or Path(page).name).read_text()
                                  for l in links)), (face, n)

@pytest.mark.quick
@pytest.mark.parametrize('nb', sorted(f.relative_to(root/'nbs').as_posix() for f in (root/'nbs').rglob('*.ipynb')))
def test_outputs(nb):
    "What a cell prints and draws is kept in the notebook, as the site runs none"
    for c in read_nb(root/'nbs'/nb).cells:
        if c.cell_type!='code' or c.directives.get('eval')=='false' and not c.outputs or {
                'hide', 'export', 'exporti'} & set(c.directives):
            continue
        kinds = {o.output_type if o.output_type=='stream' else 'picture' for o in c.outputs if o.output_type=='stream'
                 or 'image/png' in o.get('data', {})}
        if re.search(r'^print\(', c.source, re.M): assert 'stream' in kinds, c.source
        if re.search(r'^\S.*(plt\.subplots\(|\.plot\w*\(.*;)', c.source, re.M) and 'plt.close' not in c.source:
            assert 'picture' in kinds, c.source

@pytest.mark.parametrize('leftover',
                         [r'0x[0-9a-f]{6,}', r'<progress', '\u2588', r'/(?:home|tmp|root)/', r'Traceback \(most',
                          r'site-packages', r'\x1b', r'#\| \w+'])
def test_no_leftovers(site, leftover):
    "No addresses of objects, progress bars, paths of the machine that ran the notebooks, or directives"
    for p in paths(site):
        article = re.search(r'(?s)<article.*?</article>', (site/p).read_text())[0]
        assert not re.findall('.{30}' + leftover, article), p

def test_one_head_and_unique_anchors(site):
    for p in paths(site):
        text = (site/p).read_text()
        ids = re.findall(r' id="([^"]+)"', text)
        assert text.count('<h1')==1 and len(ids)==len(set(ids)), p

def test_formulas(site):
    text = (site/'api/core/accumulator.html').read_text()
    assert '<math' in text and 'arithmatex' not in text

def test_what_pages_load(site):
    "Nothing of another host, and each picture says what it shows"
    for p in paths(site):
        loads = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"|<link rel="(?!canonical)[^>]*href="([^"]+)"',
                           (site/p).read_text())
        assert not [o for o in map(''.join, loads) if urlsplit(o).netloc], p
        assert not re.findall(r'<img(?![^>]* alt="[^"])[^>]*>', (site/p).read_text()), p

@pytest.mark.parametrize('wrong', [
    {'a [link](nowhere.md)': 'page does not exist', 'a [link](api/core/accumulator.md#no-such-place)': 'anchor does not exist'},
    {'<a href="nowhere.html">link</a>': 'nowhere.html leads nowhere', '<a href="https://example.org/a.html">link</a>': 'page of the site',
     '![picture](images/none.png)': 'none.png leads nowhere', '<img src="https://elsewhere.org/a.png">': 'another host',
     '<source srcset="images/no.png">': 'no.png leads nowhere'}], ids=['markdown', 'HTML'])
def test_wrong_links_fail(project, tmp_path, capfd, wrong):
    "Of a site of titles alone, which is soon built"
    md = tmp_path/'_md'
    shutil.copytree(project/'_md', md)
    for f in (md/'docs').rglob('*.md'):
        titles = re.findall(r'(?m)^#+ .*', f.read_text())                   # to which others may link
        f.write_text('\n\n'.join(['# Title', *titles, *(wrong if f.name=='index.md' and f.parent==md/'docs' else [])]))
    found = []
    try: found = docs.wrong_links(docs.build(md).resolve(), 'https://example.org')
    except subprocess.CalledProcessError: pass
    said = ''.join(capfd.readouterr()) + '\n'.join(found)
    assert [complaint for complaint in wrong.values() if complaint not in said]==[]

@pytest.mark.parametrize('to,expected', [
    ('api/accumulation/01_callback.ipynb#x', 'api/accumulation/callback.md#x'), ('images/demo.png', 'images/demo.png'), ('#here', '#here'),
    ('../LICENSE', 'https://github.com/fastaccum/fastaccum/blob/main/LICENSE'), ('https://x.org/a.html', 'https://x.org/a.html'),
    ('https://fastaccum.github.io/fastaccum/api/core/accumulator.html', 'api/core/accumulator.md'), ('no.ipynb', 'no.ipynb'),
    ('../CHANGELOG.md#x', 'changelog.md#x'), ('../README.md', 'https://github.com/fastaccum/fastaccum/blob/main/README.md')])
def test_links(to, expected):
    cfg = get_config(root)
    assert pages.linked(f'a [link]({to}), `[code]({to})`', 'index.ipynb', cfg)==f'a [link]({expected}), `[code]({to})`'
    if expected[:4]=='api/': assert pages.relative(f'../{to}' if to[0]=='a' else to, 'tutorials/x.ipynb', cfg)==f'../{expected}'

def test_links_of_plain_pages():
    cfg = get_config(root)
    assert pages.linked('[a](nbs/api/accumulation/01_callback.ipynb) [b](CHANGELOG.md) [c](LICENSE)', '../CONTRIBUTING.md', cfg)==(
        '[a](api/accumulation/callback.md) [b](changelog.md) [c](https://github.com/fastaccum/fastaccum/blob/main/LICENSE)')

def test_links_in_links():
    "nbdev makes links of code also where there is one, and in headings"
    cfg,auto = get_config(root),'[`Learner`](https://docs.fast.ai/learner.html#learner)'
    for text,expected in [(f'# The {auto}', '# The `Learner`'),
                          (f'a [the {auto} page](https://x.org) b', 'a [the `Learner` page](https://x.org) b'),
                          (f'{auto} (and {auto})', f'{auto} (and {auto})'), (f'[{auto}](#here)', '[`Learner`](#here)')]:
        assert pages.linked(text, 'index.ipynb', cfg)==expected

def test_header(site):
    "From every page to the repository and its issues"
    url = get_config(root).git_url
    for p in paths(site):
        header = re.search('(?s)<header.*?</header>', (site/p).read_text())[0]
        assert f'<a href="{url}">' in header and f'<a href="{url}/issues">' in header, p

def test_menu():
    "Groups in their order, what no group names after them, and pages that are not there left out"
    paths = ['api/b.md', 'api/a.md', 'benchmarks.md', 'changelog.md', 'index.md', 'new.md', 'tutorials/new.md',
             'tutorials/wandb.md', 'tutorials/many_devices.md']
    assert docs.navigation({p: p.upper() for p in paths})==[
        {'Home': 'index.md'}, {'Benchmarks': 'benchmarks.md'},
        {'Tutorials': [{'Several devices, long runs': [{'Multi-GPU': 'tutorials/many_devices.md'},
                                                       {'TUTORIALS/WANDB.MD': 'tutorials/wandb.md'}]},
                       {'TUTORIALS/NEW.MD': 'tutorials/new.md'}]},
        {'API reference': [{'API/B.MD': 'api/b.md'}, {'API/A.MD': 'api/a.md'}]}, {'NEW.MD': 'new.md'}, {'Changelog': 'changelog.md'}]

def test_all_tutorials_have_a_place():
    "Every tutorial stands in the menu, in tools/menu.py"
    assert {f'tutorials/{f.stem}' for f in (root/'nbs'/'tutorials').glob('*.ipynb')} <= {*docs.pages_of(menu.menu)}

@pytest.mark.parametrize('text,expected', [
    (':::{.callout-note}\n## Head\n\nText\n:::', '!!! note "Head"\n\n    Text'),
    (':::{.callout-tip}\nText\n\nmore\n:::', '!!! tip\n\n    Text\n\n    more')])
def test_callouts(text, expected): assert pages.callouts(text)==expected

@pytest.mark.parametrize('src,expected', [
    ('x = f()\ntest_eq(x, 1)\nassert x', ('x = f()', 'test_eq(x, 1)\nassert x')), ('x = f()\nx', ('x = f()\nx', '')),
    ('assert x', ('', 'assert x')),
    ('f(); assert x', ('f(); assert x', '')), ('x = 1\n# because\nassert x', ('x = 1', '# because\nassert x')), ('!ls', ('!ls', ''))])
def test_checks_are_split_off(src, expected): assert pages.split_checks(src)==expected

def test_snippets():
    "A page that needs what it does not show is named, with the snippet that fails"
    def wrong(*src): return snippets.run(SimpleNamespace(snippets=lambda: src, source=new_nb([])), root)[1]
    assert re.search(r'(?s)snippet 1.*NameError', wrong('x = 1', 'y'))
    assert wrong('x = 1', '!ls', '%matplotlib inline\nassert x==1')==''

@pytest.mark.parametrize('typed,alone', [
    (['import torch', 'def f(x): return torch.ones(x)', 'f(2)'], True), (['f(2)'], False), (['from os.path import *', 'join("a")'], True),
    (['from os.path import *', 'loads("1")'], False), (['import json as j', 'try: j.x\nexcept E as e: print(e)'], False)])
def test_pages_that_need_no_hidden_cell(typed, alone): assert snippets.stands_alone(typed)==alone

def test_warnings_of_snippets():
    "A warning that a page does not show is named; its figures may be others"
    out = dict(output_type='stream', name='stderr', text='UserWarning: a loss is 12% off\n')
    page = SimpleNamespace(snippets=lambda: ['import warnings', 'warnings.warn("a loss is 3% off")', 'warnings.warn("no mean")'],
                           source=new_nb([mk_cell('f()', outputs=[out])]))
    assert snippets.run(page, root)[1:] == ('', ['UserWarning: no mean'])

def folded_ids(text):
    "Anchors within blocks that are closed at first"
    class Folded(docs.HTMLParser):
        depth,found = 0,set()
        def handle_starttag(self, tag, attrs):
            self.depth += tag=='details'
            if self.depth: self.found = self.found | {dict(attrs).get('id')}
        def handle_endtag(self, tag): self.depth -= tag=='details'
    f = Folded()
    f.feed(text)
    return f.found

@pytest.mark.parametrize('name', modules)
def test_helpers_are_folded(site, name):
    "On pages for users what is for them is open, and helpers are not; sections that have helpers only come last"
    mod,text = importlib.import_module(f'fastaccum.{name}'),api_page(site, name)
    folded = folded_ids(re.search(r'(?s)<article.*?</article>', text)[0])
    users,helpers = apidoc.public(mod)
    own = lambda names: {n.lower() for n in names if getattr(mod, n).__module__==mod.__name__}
    assert not own(users) & folded
    if apidoc.is_public(mod): assert own(helpers) <= folded, own(helpers)-folded

def test_checks_on_tutorials_are_folded(site):
    for f in (site/'tutorials').glob('*.html'):
        article = re.search(r'(?s)<article.*?</article>', f.read_text())[0]
        shown = re.sub(r'(?s)<details.*?</details>', '', article)
        cells = [html.unescape(re.sub('<.*?>', '', c)).strip() for c in re.findall(r'(?s)<pre>.*?</pre>', shown)]
        assert not [c for c in cells if pages.split_checks(c)[1] and not pages.split_checks(c)[0]], f.name

def test_notebook_links(site):
    "Every page of a notebook leads to it: at GitHub, as a file, in Colab"
    for p in paths(site):
        if p in ('changelog.html', 'contributing.html'): continue
        links = docs.Links((site/p).read_text()).links
        nb, = [l for l in links if l.startswith('https://github.com/') and l.endswith('.ipynb')
               and f'/{Path(l).name}' in ''.join(o for o in links if 'colab' in o)]
        assert (root/nb.partition('/main/')[2]).exists() and ((site/p).parent/Path(nb).name).exists(), p

# What a user types, and where it should lead, as one of the first three pages
searches = {
    'resume': 'tutorials/stop_and_resume', 'out of memory': 'troubleshooting', 'remainder': 'troubleshooting',
    'distributed': 'tutorials/many_devices', 'clip': 'tutorials/bigger_batch', 'segmentation': 'recipes',
    'overflow': 'tutorials/mixed_precision', 'GradientAccumulation': 'api/accumulation/callback',
    'effective batch size': 'tutorials/bigger_batch', 'learning rate wrong after accumulation': 'tutorials/bigger_batch',
    'huggingface': 'coming_from', 'multi gpu': 'tutorials/many_devices', 'ddp': 'tutorials/many_devices',
    'how many GB': 'tutorials/fit_memory', 'memory estimate': 'tutorials/fit_memory', 'loss nan': 'tutorials/mixed_precision',
    'dropout': 'tutorials/bigger_batch', 'batch size': 'tutorials/find_batch_size', 'OOM': 'troubleshooting',
    'gradient checkpointing': 'tutorials/fit_memory', 'cite': 'index', 'glossary': 'glossary',
    'flash attention': 'tutorials/fit_memory', 'quantization': 'works_with', 'distillation': 'works_with',
    'ActivationCheckpointing': 'api/memory/activations', 'different gpus': 'tutorials/many_devices',
    'batch size in tokens': 'tutorials/token_losses', 'tokens': 'tutorials/token_losses', 'batchnorm': 'tutorials/batchnorm',
    'values': 'api/logs/steps', 'gradient_accumulation_steps': 'coming_from', 'accumulate_grad_batches': 'coming_from',
    'iters_to_accumulate': 'coming_from', 'num_items_in_batch': 'coming_from', 'AccumulateScheduler': 'coming_from',
    'transformers huggingface model fastai': 'coming_from', 'CUDA out of memory. Tried to allocate': 'troubleshooting',
    "No module named 'greenlet'": 'troubleshooting', 'is not a mean over items': 'troubleshooting',
    'batch size too big for gpu': 'troubleshooting', 'early stopping': 'tutorials/callbacks',
    'wandb steps wrong': 'troubleshooting', 'InfoNCE loss in-batch negatives': 'tutorials/contrastive',
    'triplet loss': 'tutorials/contrastive', 'dpo': 'tutorials/pairs', 'packing': 'tutorials/pairs',
    'training is slower': 'troubleshooting',
    'mixed precision': 'tutorials/mixed_precision', 'bf16': 'tutorials/mixed_precision', 'lightning': 'coming_from',
    'learning rate finder': 'tutorials/bigger_batch', 'lr_find': 'tutorials/bigger_batch',
    'accum_bs': 'api/accumulation/callback', 'class weights': 'tutorials/token_losses', 'padding': 'tutorials/token_losses',
    'gan': 'tutorials/several_models', 'simclr': 'tutorials/contrastive', 'kaggle': 'tutorials/stop_and_resume',
    'lesson 7': 'tutorials/from_the_course', 'critical batch size': 'tutorials/find_batch_size',
    'gradient noise scale': 'tutorials/find_batch_size', 'batch size schedule': 'tutorials/anneal',
    '8-bit adam': 'tutorials/optimizers', 'benchmark': 'benchmarks', 'wandb': 'tutorials/wandb',
    'checkpoint every n steps': 'tutorials/stop_and_resume', 'two learners': 'tutorials/several_models',
    'custom loss function': 'tutorials/token_losses', 'installation': 'tutorials/getting_started'}

# The warnings and errors of the package that have eight words of their own. Every seventh is pasted
@lru_cache
def pasted(): return {m: m.replace('…', '17') for m in [m for m in messages.messages() if len(re.findall(r'\w+', m)) > 7][::7]}

def test_search_index(site):
    """Guides are told from the API and both from internals, helpers do not stand in titles, other words are there, and
    the server's index is the disk's"""
    items = json.loads((site/'search.json').read_text())['items']
    assert json.loads((site/'search.js').read_text().partition('= ')[2].rstrip(';'))['items']==items
    said = {html.unescape(o['text'][3:-4]): o['location'] for o in items if o['tier']==3}
    assert said=={m: f'troubleshooting.html#{section}' for m,section in messages.messages().items()}
    items = [o for o in items if o['tier'] < 3]
    tiers = {o['location']: o['tier'] for o in items}
    guides = [t for l,t in tiers.items() if l.startswith(('tutorials/', 'recipes', 'troubleshooting', 'glossary'))]
    assert (guides and {*guides}=={0} and tiers['api/accumulation/callback.html#gradientaccumulation']==1
            and tiers['api/loop/events.html']==2)
    helpers = {f'api/{m}.html#{n.lower()}' for m,names in apidoc.helpers().items() for n in names}
    assert all(o['title'].startswith('Helpers of') and o['tier']==2 for o in items if o['location'] in helpers)
    found = {o['location'].replace('.html', ''): o for o in items if 'words' in o}
    assert found.keys()==menu.words.keys() and all(w in found[l]['words'] and w in found[l]['text'] for l,w in menu.words.items())

@pytest.mark.quick
def test_messages():
    """All sentences in a module's code but docstrings are taken, wherever they stand; those of a call that names a section
    belong there, the others to that of their module or folder"""
    code = """def f(x):
    'What a function is good for'
    if x: raise ValueError(f"x={x}: pass a number " 'above 0.')
    warn("The loss of this batch is off.", 'troubleshooting.html#the-loss-is-off')
    return 'one two', x in ('before_batch after_batch', 'a.b c.d e.f g.h')
late = 'No rule fits this loss'"""
    assert messages.in_module(ast.parse(code), 'core/scaler')=={
        'x=…: pass a number above 0.': 'overflow-in-fp16', 'The loss of this batch is off.': 'the-loss-is-off',
        'No rule fits this loss': 'overflow-in-fp16'}
    names = 'accumulation/witnesses/norms', 'accumulation/witnesses/rates', 'memory', 'memory/advice', 'batch_size/noise'
    assert [messages.section_of(n) for n in names]==[
        'batchnorm-sees-less-than-the-effective-batch', 'the-loss-is-off', 'out-of-memory', 'out-of-memory', 'an-error-before-training']

def test_messages_of_raised_errors():
    "Of the calls that warn, and of errors that are raised with a text, nine of ten hold a sentence that is found"
    def texts(node): return [messages.literal(n) for n in messages.strings(node)]
    trees = [ast.parse(f.read_text()) for f in messages.package.rglob('*.py')
             if f.relative_to(messages.package).stem not in {*messages.programs, '_modidx'}]
    nodes = [n for t in trees for n in ast.walk(t)]
    calls = [n.exc for n in nodes if isinstance(n, ast.Raise)] + [n for n in nodes if getattr(getattr(n, 'func', None), 'id', '')=='warn']
    said = [t for t in map(texts, filter(None, calls)) if any(' ' in s for s in t)]
    found = messages.messages()
    assert len(said) > 200 and sum(any(s in found for s in t) for t in said) > .9*len(said)

def test_words_for_no_place(tmp_path):
    (tmp_path/'search.json').write_text(json.dumps({'items': [{'location': l.replace('#', '.html#')} for l in [*menu.words][1:]]}))
    first, = docs.wrong_words(tmp_path)
    assert [*menu.words][0] in first

@pytest.mark.quick
def test_lines_know_their_indent():
    text = '<span id="line-3-1"><span class="k">def</span> f():\n</span><span id="line-3-2">    x\n</span>' \
           '<span id="line-3-3"><span class="w">  </span><span class="n">y</span></span>'
    done = docs.finished(text)
    assert re.findall(r'class="line" style="--at: (\d+)ch"', done)==['0', '4', '2'] and 'id=' not in done
    assert re.sub('<.*?>', '', done)==re.sub('<.*?>', '', text)

@pytest.mark.quick
def test_rows_of_words():
    "Cells have the head of their column, but for tables of figures, and those that cells show"
    def made(*rows):
        return ('<table>\n<thead>\n'
                + '</thead>\n<tbody>\n'.join('<tr>\n' + '\n'.join(f'<{t}>{c}</{t}>' for c in r) + '\n</tr>\n'
                                             for t,r in zip(('th','td'), rows)) + '</tbody>\n</table>')
    done = docs.finished(made(['', '<code>write</code>'], ['why', '<a href="#x">x</a>']))
    assert ('<table data-rows>' in done
            and '<td data-head="">why</td>\n<td data-head="write"><a href="#x">x</a></td>' in done
            and '<th><code>write</code></th>' in done)
    for text in (made(['package', 'exact', 'off'], ['scion', '12', '.5%']),
                 made(['a', 'b'], ['x', 'y']).replace('\n<thead>', '\n  <thead>')):
        assert docs.finished(text)==text

# -- In a browser ------------------------------------------------------------------------------------------------
flags = ('--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
         '--disable-component-update --disable-sync --window-size=1400,1000 --allow-file-access-from-files=false')

@pytest.fixture(scope='session')
def browser(tmp_path_factory):
    binary,driver = shutil.which('chromium') or shutil.which('google-chrome'),shutil.which('chromedriver')
    if not binary or not driver: pytest.skip('No browser: the tests of the site need chromium and chromedriver')
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in [*flags.split(), f'--user-data-dir={tmp_path_factory.mktemp("chromium")}']: options.add_argument(flag)
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL', 'performance': 'ALL'})
    driver = webdriver.Chrome(options, Service(driver))
    driver.implicitly_wait(5)
    yield driver
    driver.quit()

class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

@pytest.fixture(scope='session', params=['disk', 'server'])
def base(request, site):
    "Address of the site, without the last slash"
    if request.param=='disk': yield site.as_uri(); return
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=site.parent.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/{site.parent.name}/{site.name}'
    server.shutdown()

def wait(browser, script, *args):
    "Wait until the JavaScript expression is true; returns its value"
    from selenium.webdriver.support.ui import WebDriverWait
    return WebDriverWait(browser, 10).until(lambda b: b.execute_script(f'return {script}', *args), script)

def requests(browser):
    msgs = [json.loads(e['message'])['message'] for e in browser.get_log('performance')]
    return [m['params']['request']['url'] for m in msgs if m['method']=='Network.requestWillBeSent']

def at_width(browser, width, height=900):
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', dict(width=width, height=height, deviceScaleFactor=1, mobile=width<600))
    wait(browser, 'Math.abs(document.documentElement.clientWidth - arguments[0]) < 30', width)

stands_out = """const edge = innerWidth < 600 ? innerWidth : document.querySelector('article').getBoundingClientRect().right + 8
    const scrolls = e => e && e.tagName!='ARTICLE' && (getComputedStyle(e).overflowX!='visible' || scrolls(e.parentElement))
    const out = [...document.querySelectorAll('article *')]
        .filter(e => e.getBoundingClientRect().width && e.getBoundingClientRect().right > edge && !scrolls(e))
    return [...out.map(e => e.outerHTML.slice(0, 99)), ...(document.documentElement.scrollWidth <= innerWidth ? [] : ['the page'])]"""
cut_off = """const wide = e => e.scrollWidth > e.clientWidth+1 && getComputedStyle(e).display != 'inline'
    return [...document.querySelectorAll(`article :is(${arguments[0]})`)].flatMap(e => [e, ...e.querySelectorAll('code')])
        .filter(e => wide(e) && getComputedStyle(e).overflowX != 'visible').map(e => e.outerHTML.slice(0, 200))"""
# On a phone code wraps, while columns and figures scroll
blocks = {390: '.highlight:not(.out) pre', 1300: 'pre, table, .out-html, .md-typeset__scrollwrap, math, img, p'}

def check_widths(browser, p):
    "On a phone as on a wide screen nothing stands out of the page; there all is as wide as its place, on a phone what can wrap"
    fold = 'document.querySelectorAll("article details").forEach(d => d.open = arguments[0])'
    try:
        for width,which in blocks.items():
            at_width(browser, width)
            browser.execute_script(fold, False)
            assert browser.execute_script(stands_out)==[], (p, width)
            browser.execute_script(fold, True)
            assert browser.execute_script(cut_off, which)==[], (p, width)
    finally: browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})

internals = {f'api/{m.replace(".", "/")}.html' for m in modules if not apidoc.is_public(apidoc.module_of(m))}

def test_all_pages(browser, base, site):
    """No errors in the console, all pictures are there, nothing is asked of another host, and on screens of any width all can be
    read. Of pages that describe internals each sixteenth, of the API's other pages each third; from a server each tenth of these"""
    browser.get_log('browser'), requests(browser)
    on_disk = base==site.as_uri()
    def each(p): return 16 if p in internals else 3 if p.startswith('api/') else 1
    seen = [p for i,p in enumerate(paths(site)) if i%each(p)==0][::1 if on_disk else 10]
    for p in seen:
        browser.get(f'{base}/{p}')
        assert wait(browser, 'document.readyState=="complete" && document.querySelector("h1").innerText'), p
        broken = browser.execute_script('return [...document.images].filter(i => !i.naturalWidth || !i.alt).map(i => i.src)')
        assert broken==[], p
        if on_disk: check_widths(browser, p)
    assert browser.get_log('browser')==[]
    asked = requests(browser)
    assert len(asked) > len(seen)
    assert [u for u in asked if not u.startswith((base, 'data:', 'blob:', 'about:', 'chrome:', 'chrome-untrusted:'))]==[]

phone_pages = ['index', 'tutorials/getting_started', 'tutorials/fit_memory', 'tutorials/bigger_batch', 'works_with',
               'api/accumulation/callback']

unreachable = """return [...document.querySelectorAll('article table')].filter(t => t.offsetParent).filter(t => {
      let box = t
      const scrolled = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth
      while (box.tagName != 'ARTICLE' && !scrolled(box)) box = box.parentElement
      if (box.tagName != 'ARTICLE') box.scrollLeft = 1e6
      const cells = [...t.rows].map(r => r.cells[r.cells.length-1]).filter(c => c.offsetWidth)
      const wrong = t.matches('[data-rows]') && box.tagName != 'ARTICLE'
        || Math.max(...cells.map(c => c.getBoundingClientRect().right)) > innerWidth
      box.scrollLeft = 0
      return wrong || !cells.length
    }).map(t => t.innerText.slice(0, 80))"""
at_the_left = """return [...document.querySelectorAll('article .highlight:not(.out) .line')].filter(l => l.offsetParent).filter(l => {
      const range = document.createRange(); range.selectNodeContents(l)
      const rects = [...range.getClientRects()].filter(r => r.width > 1), top = Math.min(...rects.map(r => r.top))
      return rects.some(r => r.top > top + 8 && r.left < l.getBoundingClientRect().left + 20)
    }).map(l => l.innerText)"""
same_code = """return [...document.querySelectorAll('article .highlight:not(.out) code')]
    .filter(c => c.offsetParent && !c.closest('details'))
    .filter(c => c.innerText.trimEnd() != c.textContent.trimEnd()).map(c => c.innerText)"""
wrapped_outputs = r"""return [...document.querySelectorAll('article .highlight.out .line')]
    .filter(l => l.offsetParent && !l.textContent.trim().match(/\S\s{2,}\S|^https:\S+$/))     // a link alone is one word
    .filter(l => l.getBoundingClientRect().height > 1.5*parseFloat(getComputedStyle(l).lineHeight)).map(l => l.innerText)"""

broken_numbers = r"""return [...document.querySelectorAll('article td')]
    .filter(c => c.offsetParent && c.innerText.match(/^\s*[\d.,%±e+]+\s*$/))
    .filter(c => {
      const range = document.createRange(); range.selectNodeContents(c)
      return new Set([...range.getClientRects()].map(r => Math.round(r.top/4))).size > 1
    }).map(c => c.innerText)"""

@pytest.mark.parametrize('p', ['benchmarks', 'recipes', 'tutorials/wandb'])
def test_numbers_on_a_phone(browser, site, p):
    "No number goes on in the next line: the table can be moved"
    browser.get(f'{site.as_uri()}/{p}.html')
    try:
        at_width(browser, 390)
        assert browser.execute_script(broken_numbers)==[]
    finally: browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})

longest_line = """const lines = p => {
      const found = {}, walk = document.createTreeWalker(p, NodeFilter.SHOW_TEXT), range = document.createRange()
      for (let n; n = walk.nextNode();) for (let i = 0; i < n.length; i++) {
        range.setStart(n, i); range.setEnd(n, i+1)
        const y = Math.round(range.getBoundingClientRect().bottom/12)
        found[y] = (found[y] || 0) + 1
      }
      return Object.values(found)
    }
    return Math.max(...[...document.querySelectorAll('article > p:not(.notebook)')].flatMap(lines))"""

@pytest.mark.parametrize('p', phone_pages)
def test_on_a_phone(browser, site, p):
    """The last column of every table is reached, that of a table of words without moving it; long code goes on to the
    right of where its line begins, and is copied as it was written; on a wide screen too, where printed words are
    broken once, by the page"""
    browser.get(f'{site.as_uri()}/{p}.html')
    try:
        for width in (390, 1300):
            at_width(browser, width)
            if width==390: assert browser.execute_script(unreachable)==[]
            assert browser.execute_script('return document.querySelectorAll("article .highlight .line").length') or p=='works_with'
            assert browser.execute_script(at_the_left)==[]
            assert browser.execute_script(same_code)==[]
        assert browser.execute_script(wrapped_outputs)==[]
    finally: browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})

@pytest.mark.parametrize('typed,to', [
    ('GradientAccumulationSchedule', 'api/accumulation/callback.html#gradientaccumulationschedule'),
    ('CUDA out of memory. Tried to allocate 3.71 GiB', 'troubleshooting.html#out-of-memory')])
def test_search(browser, base, typed, to):
    browser.get(f'{base}/index.html')
    wait(browser, 'document.querySelector(".md-search__button")').click()
    frame = '[...document.querySelectorAll("*")].find(e => e.shadowRoot).shadowRoot'
    wait(browser, f'{frame}.querySelector("input")').send_keys(typed)
    path,anchor = to.split('#')
    first = f'[...{frame}.querySelectorAll("a[role=option]")].slice(0, 1)'
    wait(browser, f'{first}.some(a => a.pathname.endsWith(arguments[0]) && a.hash == arguments[1])', path, f'#{anchor}')
    browser.execute_script(f'{first}[0].click()')
    wait(browser, 'location.pathname.endsWith(arguments[0]) && location.hash == arguments[1]', path, f'#{anchor}')
    assert browser.current_url.startswith(base)

ask_worker = """const [index, queries, done] = arguments, found = []
    const worker = new Worker(JSON.parse(document.getElementById('__config').textContent).search)
    worker.onmessage = ({data}) => {
      if (data.type === 3) found.push(data.data.items.map(item => item.id))
      if (found.length === queries.length) return done(found)
      worker.postMessage({type: 2, data: {input: queries[found.length]}})
    }
    worker.postMessage({type: 0, data: index})"""

@pytest.fixture(scope='session')
def found(browser, site):
    "query -> the entries that a search lists first, as the search's own page would ask for them"
    index = json.loads((site/'search.json').read_text())
    queries = [*searches, *pasted().values()]
    browser.get(f'{site.as_uri()}/index.html')
    browser.set_script_timeout(300)
    answers = browser.execute_async_script(ask_worker, index, queries)
    return {q: [index['items'][i] for i in ids] for q,ids in zip(queries, answers)}

@pytest.mark.parametrize('query', searches)
def test_search_finds(found, query):
    "The page is among the first three"
    pages = [*dict.fromkeys(o['location'].partition('.html')[0] for o in found[query])]
    assert searches[query] in pages[:3]

@pytest.mark.parametrize('query', [q for q in searches if q.isalpha()])
def test_order_of_search(found, query):
    "What has the word in its title comes first, then the rest; of both guides, then what is public; internals after all of these"
    def place(o):
        names = re.split(r'[\s\-.,`/]+', re.sub('<.*?>', '', f"{o['title']} {o.get('words', '')}").lower())
        return o['tier'] > 1,not any(n.startswith(query.lower()) for n in names),o['tier']
    places = [*map(place, found[query])]
    assert places==sorted(places)

def test_search_finds_messages(found):
    "What fastaccum says, pasted whole, leads to a section of Troubleshooting"
    assert len(pasted()) > 20
    for text in pasted().values(): assert found[text][0]['location'].startswith('troubleshooting.html#'), text

def test_first_screen(browser, site):
    "Who opens the site sees the call, the picture and the proof without scrolling"
    browser.get(f'{site.as_uri()}/index.html')
    try:
        at_width(browser, 1300)
        wait(browser, 'document.querySelector("article img").complete')
        ends = browser.execute_script(
            'return ["pre", "img", "table"].map(s => document.querySelector(`article ${s}`).getBoundingClientRect().bottom)')
        assert max(ends) <= 900, ends
        assert browser.execute_script('return document.querySelectorAll("article table")[0].rows.length')==6
        assert 60 < browser.execute_script(longest_line) <= 90
    finally: browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})

first_screen = """const bottom = e => e ? Math.round(e.getBoundingClientRect().bottom + scrollY) : null
    const code = [...document.querySelectorAll('article .highlight')]
        .filter(e => e.offsetParent && !e.closest('details') && !e.matches('.out'))
    const sig = document.querySelector('article h2.api') ? 1 : 0
    return [sig ? bottom(code[0]) : 0, bottom(code[sig])]"""

def test_first_screen_of_api_pages(browser, site):
    "At 1300 px the signature and an example stand above 900 px, on every page for users"
    below = {}
    try:
        for name in [*api_pages[::2], 'all', 'wandb', *(f'{f}.index' for f in apidoc.faces() if (site/'api'/f).is_dir())]:
            browser.get(f'{site.as_uri()}/api/{name.replace(".", "/")}.html')
            at_width(browser, 1300)
            signature,example = browser.execute_script(first_screen)
            if not example or not signature < example <= 900: below[name] = signature,example
    finally: browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})
    assert not below

def test_parameters(browser, base):
    browser.get(f'{base}/api/accumulation/callback.html#gradientaccumulationschedule')
    shown = wait(browser, '''[...document.querySelectorAll("table")]
        .filter(t => t.offsetHeight && t.innerText.includes("start_accum_bs") && t.innerText.includes("final_accum_bs")).length''')
    assert shown

contrast = """
const lum = c => {
  const f = c.match(/[\\d.]+/g).slice(0, 3).map(v => (v /= 255) <= .03928 ? v/12.92 : ((v+.055)/1.055)**2.4)
  return .2126*f[0] + .7152*f[1] + .0722*f[2]
}
const solid = c => !/, 0\\)$/.test(c)
const back = e => { const c = getComputedStyle(e).backgroundColor; return solid(c) || !e.parentElement ? c : back(e.parentElement) }
const ratio = e => { const [a, b] = [lum(getComputedStyle(e).color), lum(back(e))].sort((a, b) => b-a); return (a+.05)/(b+.05) }
return [...document.querySelectorAll('article :is(p, li, td, th, h1, h2, h3, h4, a, code, pre span)')]
  .filter(e => e.offsetParent && e.innerText.trim() && ratio(e) < 3).map(e => e.outerHTML.slice(0, 90))"""

def test_dark_mode(browser, base):
    "It can be switched on and off; text and figures are legible in both"
    browser.get(f'{base}/api/accumulation/callback.html')
    def look():
        wait(browser, '![...document.getAnimations()].some(a => a.playState=="running")')
        return sum(map(int, re.findall(r'\d+', browser.execute_script('return getComputedStyle(document.body).backgroundColor'))[:3]))
    seen = []
    for _ in range(3):
        seen.append(look())
        assert browser.execute_script(contrast)==[]
        backs = 'return [...document.querySelectorAll("article img")].map(i => getComputedStyle(i).backgroundColor)'
        assert set(browser.execute_script(backs))=={'rgb(255, 255, 255)'}
        scheme = browser.execute_script('return document.body.dataset.mdColorScheme')
        browser.execute_script('[...document.querySelectorAll("label[for^=__palette]")].find(l => !l.hidden).click()')
        wait(browser, 'document.body.dataset.mdColorScheme != arguments[0]', scheme)
    assert abs(seen[1]-seen[0]) > 400 and seen[2]==seen[0]
