"Warnings: their class, the line to which they point, and the page"
import ast, json, re, sys, warnings
from contextlib import ExitStack
import fresh
import pytest
from reference import *
from fastaccum.all import *
from fastaccum.core.warnings import warn

data = Data(torch.randn(64, 6), torch.randn(64, 4))
def sums(pred, y): return (pred-y).pow(2).sum()/50

def get_learner(accum_bs, *cbs, **kwargs):
    return learner(data, 8, GradientAccumulation(accum_bs), *cbs, splitter=lambda m: L(m[0], m[2]).map(params), **kwargs)

# Each warns, and returns the line to which the warning points: the innermost that is not a library's
def line(): return sys._getframe(1).f_lineno

def called(): warn('off', 'index.html'); return line()

def from_pythons_library():
    with ExitStack() as stack: stack.callback(warn, 'off', 'index.html'); here = line()
    return here

def before_a_fit(): learn = get_learner(4); learn.fit(1, .1); return line()
def in_a_batch(): learn = get_learner(16, loss_func=sums); learn.fit(1, .1); return line()
def after_an_epoch(): learn = get_learner(100); learn.fit(1, .1); return line()
def in_a_schedule(): learn = get_learner(100); learn.fine_tune(1, .1); return line()
def in_lr_find(): learn = get_learner(4); learn.lr_find(num_it=5, show_plot=False); return line()
def of_another_callback(): learn = get_learner(16); learn.fit(1, .1, cbs=ScaleLR('linear', bs=8, half_life=True)); return line()

def in_a_function_of_the_users():
    def train(learn): learn.fit(1, .1); return line()
    return train(get_learner(4))


@pytest.mark.parametrize('f', [called, from_pythons_library, before_a_fit, in_a_batch, after_an_epoch, in_a_schedule,
                               in_lr_find, of_another_callback, in_a_function_of_the_users],
                         ids=lambda f: f.__name__)
def test_points_to_the_users_line(f):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        here = f()
    own = [w for w in seen if w.category is FastaccumWarning]
    assert own and {(w.filename, w.lineno) for w in own} == {(__file__, here)}

def test_can_be_filtered():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', 'accum_bs=.* is smaller', FastaccumWarning)
        get_learner(4).fit(1, .1)
        warnings.simplefilter('ignore', FastaccumWarning)
        get_learner(100).fit(1, .1)

def test_without_a_users_line():
    "In a thread of a library's there is none"
    code = 'import threading; from fastaccum.core.warnings import warn; ' \
           't = threading.Thread(target=warn, args=["off"]); t.start(); t.join()'
    res = fresh.run('-c', 'import warnings; warnings.simplefilter("default"); ' + code)
    assert 'threading.py' in res.stderr and 'FastaccumWarning: off' in res.stderr

# --- the page

root = Path(__file__).resolve().parents[2]

def syntax():
    "All nodes of the package"
    files = [f for f in (root/'fastaccum').rglob('*.py') if f.name != '_modidx.py']
    return [n for f in files for n in ast.walk(ast.parse(f.read_text(encoding='utf-8')))]

def calls():
    "The calls of `warn` and `warn_once` in the package"
    return [n for n in syntax() if isinstance(n, ast.Call) and getattr(n.func, 'id', getattr(n.func, 'attr', None)) in ('warn','warn_once')]

def pages_of(call): return [o.value for n in call.args[1:2] for o in ast.walk(n) if isinstance(o, ast.Constant)]

def slug(heading): return re.sub(r'[-\s]+', '-', re.sub(r'[^\w\s-]', '', heading.lower()).strip())

def headings(page):
    "The anchors of a page; None if there is no such page"
    folder,_,name = page.removesuffix('.html').rpartition('/')
    found = [f for f in (root/'nbs'/folder).glob('*.ipynb') if re.sub(r'^\d+_', '', f.stem) == name]
    if not found: return None
    cells = json.loads(found[0].read_text(encoding='utf-8'))['cells']
    return {slug(h) for c in cells if c['cell_type'] == 'markdown' for h in re.findall(r'(?m)^#+ (.*)', ''.join(c['source']))}

@pytest.mark.slow
def test_pages_of_warnings():
    "Each warning has a link, to a page and a heading that exist"
    found = calls()
    assert len(found) > 30
    assert [ast.unparse(n) for n in found if len(n.args) < 2] == []
    values = [n.value for n in syntax() if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    pages = {v for v in values if re.fullmatch(r'[\w/]+\.html(#\S*)?', v)}
    assert {p for n in found for p in pages_of(n)} <= pages
    def exists(page, anchor): return (found := headings(page)) is not None and (not anchor or anchor in found)
    assert [p for p in pages if not exists(*p.partition('#')[::2])] == []

def test_has_the_link():
    with pytest.warns(FastaccumWarning) as seen: get_learner(4).fit(1, .1)
    link = 'https://fastaccum.github.io/fastaccum/troubleshooting.html#the-remainder-steps-with-fewer-items-or-more'
    assert str(seen[0].message).endswith(link)
