"A processed notebook as a page in markdown"
import ast, base64, posixpath, re, textwrap, yaml
from pathlib import Path
from fastcore.nbio import cell_frontmatter, mk_cell, read_nb
from nbdev.config import nbpath2html
from nbdev.processors import _default_exp
from readme import fence, terminal
from widths import fitted
from apidoc import calls, contents, described, details, head, is_face, is_public, lead, module_of, overview, public, several, table

pictures = {'image/svg+xml': 'svg', 'image/png': 'png', 'image/jpeg': 'jpg'}

def page_path(file):
    "api/core/01_accumulator.ipynb, a file in nbs -> api/core/accumulator.md; ../CHANGELOG.md -> changelog.md"
    return Path(file).name.lower() if file.startswith('../') else nbpath2html(Path(file)).with_suffix('.md').as_posix()

def is_page(file):
    "Does `file` of the repository become a page?"
    return file.startswith('nbs/') and file.endswith('.ipynb') or file.endswith('.md') and '/' not in file and file!='README.md'

def title(nb):
    "Title and description of a notebook, from its first cell"
    for cell in nb.cells:
        if cell.cell_type=='raw' and (head := cell_frontmatter(cell.source)): return head.get('title', ''),head.get('description', '')
        m = re.match(r'# (.+?)\s*$(?:\s*^> (.+?)\s*$)?', cell.source, re.M)
        if cell.cell_type=='markdown' and m: return m[1],m[2] or ''
    raise ValueError('a notebook without a title: begin with a markdown cell `# Title`')

# -- Links -------------------------------------------------------------------------------------------------------
# Code is matched first and left alone
_links = re.compile(r'^(`{3,}).*?^\1|`[^`\n]+`|(?P<pre>\]\(|\b(?:src|srcset|href)=")(?P<to>[^)"\s]+)', re.M | re.S)

_auto = re.compile(r'\[(`[^`\n]+`)\]\(https?://[^)\s]*\)')

def relative(to, nb, cfg):
    "Where a link in the notebook `nb` leads to in the site: pages of ours are relative, files of the repository are at GitHub"
    path,sep,anchor = to.partition('#')
    here = posixpath.dirname(page_path(nb))
    if path.startswith(cfg.doc_url): return posixpath.relpath(path[len(cfg.doc_url):].replace('.html', '.md'), here or '.') + sep + anchor
    if not path or re.match(r'\w+:|/', path): return to
    path = posixpath.normpath(posixpath.join('nbs', posixpath.dirname(nb), path))
    if not (cfg.config_path/path).exists(): return to  # the check of links complains
    if is_page(path): return posixpath.relpath(page_path(posixpath.relpath(path, 'nbs')), here or '.') + sep + anchor
    if path.startswith('nbs/images/'): return posixpath.relpath(path[4:], here or '.')
    return f'{cfg.git_url}/blob/{cfg.branch}/{path}{sep}{anchor}'

def linked(text, nb, cfg):
    "`text` with its links made relative. Code that nbdev made a link is code again in headings, in links, and without a place in the site"
    text = re.sub(r'(?m)^#.*', lambda m: _auto.sub(r'\1', m[0]), text)
    text = re.sub(rf'\[([^][\n]*){_auto.pattern}([^][\n]*)\]\(', r'[\1\2\3](', text)
    text = re.sub(rf'\[(`[^`]+`)\]\(({re.escape(cfg.doc_url)}[^)]*#[^)]*)\)', lambda m: m[0] if m[2] in described else m[1], text)
    return _links.sub(lambda m: m['pre'] + relative(m['to'], nb, cfg) if m['to'] else m[0], text)

# -- Cells -------------------------------------------------------------------------------------------------------
def callouts(text):
    "Quarto's callouts as admonitions"
    def admonition(m):
        head = re.match(r'\s*#+ +(.*)\n?', m[2])
        body = m[2][head.end():] if head else m[2]
        quoted = f' "{head[1]}"' if head else ''
        return f'!!! {m[1]}{quoted}\n\n' + re.sub(r'(?m)^(?=.)', ' '*4, body.strip('\n'))
    return re.sub(r'(?ms)^:{3,} *\{ *\.callout-(\w+)[^}\n]*\}\n(.*?)^:{3,} *$', admonition, text)

def folded(line, width=92):
    "A line of words that is longer than a page is wide, in several"
    return (line if len(line)<=width or re.search(r'\S\s{2,}\S', line)
            else '\n'.join(textwrap.wrap(line, width, subsequent_indent='    ', break_long_words=False,
                                         break_on_hyphens=False)))

def printed(text):
    "What a cell printed, set apart from its source"
    text = '\n'.join(map(folded, terminal(text).split('\n')))
    return fence(text, ' { .text .out }') if text else ''

def streams(outputs):
    "`outputs` with those that were printed one after the other as one. Of stderr, warnings are left: see `export`"
    res = []
    for o in outputs:
        if o.output_type=='stream' and res and res[-1].output_type=='stream' and o.name==res[-1].name:
            res[-1].text = ''.join(res[-1].text) + ''.join(o.text)
        else: res.append(o)
    return res

def html(text):
    "An HTML output without progress bars and styles of its own"
    text = re.sub(r'(?s)<style.*?</style>|<script.*?</script>|<progress.*?</progress>| border="1" class="dataframe"', '', text)
    if not re.search(r'<(table|img|svg|details|pre)\b', text): return ''
    text = re.sub(r'<td>([\d.,%±e+ -]+)</td>', r'<td><span class="number">\1</span></td>', text)
    return '<div class="out-html" markdown="0">\n' + re.sub(r'\n\s*\n', '\n', text).strip() + '\n</div>'

def is_typed(cell):
    "Does a reader see this code, and may run it?"
    d = cell.directives
    return bool(cell.source.strip()) and not (d.get('echo') == 'false' or d.get('eval') == 'false' or d.get('include') == 'false')

def shown_code(cell):
    "The code in the output of a cell"
    texts = (''.join(o.data.get('text/markdown', '')) for o in cell.outputs if 'data' in o)
    return [src for text in texts for src in re.findall(r'(?ms)^```python\n(.*?)^```', text)]

# -- What is folded ----------------------------------------------------------------------------------------------
def fold(summary, text, kind='info'):
    "`text` below a line that opens it"
    return f'??? {kind} "{summary}"\n\n' + re.sub(r'(?m)^(?=.)', ' '*4, text)

def _checks(node):
    "Does a statement only check something?"
    call = getattr(getattr(node, 'value', None), 'func', None)
    return isinstance(node, ast.Assert) or isinstance(node, ast.Expr) and getattr(call, 'id', '').startswith('test_')

def split_checks(src):
    "`src` without the checks at its end, and these"
    try: nodes = ast.parse(src).body
    except SyntaxError: return src,''                     # a shell command, a magic
    n = next((i for i,node in enumerate(reversed(nodes)) if not _checks(node)), len(nodes))
    if not n: return src,''
    lines = src.split('\n')
    first = nodes[-n].lineno-1
    if n < len(nodes) and nodes[-n-1].end_lineno > first: return src,''   # on the line of what it checks
    while first and lines[first-1].lstrip().startswith('#'): first -= 1
    return '\n'.join(lines[:first]).rstrip(),'\n'.join(lines[first:])

class Page:
    "The page of a processed notebook; `write` puts it, and the pictures in it, below `out`"
    def __init__(self, nb_path, proc, out, cfg):
        self.name,self.out,self.cfg = nb_path.relative_to(proc).as_posix(),out,cfg
        self.nb,self.path = read_nb(nb_path),page_path(self.name)
        self.source = read_nb(cfg.nbs_path/self.name)
        self.title,self.description = title(self.nb)
        self.section = self.title                       # the last heading, which says what a picture shows
        exp = _default_exp(self.source)
        self.mod = module_of(exp) if exp else None
        self.internal = self.mod is not None and not is_public(self.mod)
        self.n_front = self.split_front() if self.mod and not self.internal else 0
        first = lead(self.mod) if self.mod else None
        self.about = (head(first[1], first[0], 2), details(first[1], first[0])) if first else ()    # all pages may link to it

    def split_front(self):
        "How many cells end with the first example; the words after an example in words become a cell of their own"
        for i,cell in enumerate(self.nb.cells):
            if cell.cell_type == 'code' and not calls(cell) and is_typed(cell): return i+1
            shown = cell.cell_type == 'markdown' and re.search(r'(?ms)^```(?:python|sh)\n.*?^```$', cell.source)
            if not shown: continue
            rest = cell.source[shown.end():].strip()
            cell.source = cell.source[:shown.end()]
            if rest: self.nb.cells.insert(i+1, mk_cell(rest, 'markdown'))
            return i+1
        return 0

    def write(self):
        dst = self.out/self.path
        dst.parent.mkdir(parents=True, exist_ok=True)
        dst.write_text(self.markdown(), encoding='utf-8')

    def markdown(self):
        meta = dict(title=self.title, description=self.description or self.title)
        if self.path == 'index.md': meta['hide'] = ['toc']    # room for a picture and a table
        parts = ['---\n' + yaml.safe_dump(meta) + '---', f'# {self.title}']
        if self.description: parts.append(f'{self.description}\n{{ .subtitle }}')
        if self.mod: parts += self.beginning()
        else: parts.append(self.notebook())
        for summary,cells in self.blocks():
            text = self.text(cells)
            parts.append(fold(summary, text) if summary and text else text)
        if self.mod and is_face(self.mod): parts.append(self.rooms())
        return '\n\n'.join(filter(None, parts)) + '\n'

    def text(self, cells):
        "Markdown of numbered cells"
        return '\n\n'.join(filter(None, (linked(p, self.name, self.cfg) for cell,i in cells for p in self.cell(cell, i))))

    def beginning(self):
        """The beginning of a page of the API. On those for users: the signature, an example, and the parameters of what the page is about,
        for the first screen; a table of names where it has several"""
        about = [linked(o, self.name, self.cfg) for o in self.about]
        names = overview() if self.path == 'api/all.md' else '' if about and not several(self.mod) else contents(self.mod)
        code = any(c.cell_type == 'code' and not calls(c) and is_typed(c) for c in self.nb.cells)
        return [f'`from {self.mod.__name__} import *`'*bool(self.mod.__all__), *about[:1], self.text(self.example()),
                *about[1:], linked(names, self.name, self.cfg), self.notebook(),
                fold('Imports of the examples', fence(self.imports(), 'python'), 'quote') if code else '']

    def example(self):
        "The numbered cells with which a page for users begins: all to its first example"
        return list(zip(self.nb.cells[:self.n_front], range(self.n_front)))

    def rooms(self):
        "The pages of a face's folder: those for users, and what these are made of"
        rows = [],[]
        for f in sorted((self.cfg.nbs_path/self.name).parent.glob('*.ipynb')):
            nb,here = read_nb(f),f.relative_to(self.cfg.nbs_path).as_posix()
            if here == self.name: continue
            (name,what),to = title(nb),Path(page_path(here)).name
            rows[not is_public(module_of(_default_exp(nb)))].append([f'[{name}]({to})', what])
        return '\n\n'.join(f'## {head}\n\n{table(["Page", "What for"], r)}' for head,r in zip(('Pages','What it is made of'), rows) if r)

    def notebook(self):
        "Where the notebook of this page is, for those who want to run it"
        at = f'nbs/{self.name}'
        colab = self.cfg.git_url.replace('https://github.com', 'https://colab.research.google.com/github')
        links = [f'[notebook at GitHub]({self.cfg.git_url}/blob/{self.cfg.branch}/{at})',
                 f'[download]({Path(self.name).name}){{ download }}',
                 f'[open in Colab]({colab}/blob/{self.cfg.branch}/{at})']
        if not self.mod or is_public(self.mod): links[-1] += f' (there, first `!pip install git+{self.cfg.git_url}`)'
        return ' · '.join(links) + '\n{ .notebook data-search-exclude }'

    def helpers(self, cell):
        "Names of the helpers that a cell describes on a page for users; nothing where one of them is for users too"
        names = [ast.unparse(c.args[0]) for c in calls(cell)]
        return names if self.mod and names and is_public(self.mod) and set(names) <= set(public(self.mod)[1]) else []

    def blocks(self):
        """The cells with their numbers, in the order of the page, as (summary, cells). What has a summary is folded: a helper with the code
        that shows it; a section of helpers only, below *Internals* at the end, where sections go that have this name in the notebook"""
        sections = [[]]
        for o in [*zip(self.nb.cells, range(len(self.nb.cells)))][self.n_front:]:
            if o[0].cell_type == 'markdown' and re.match(r'## ', o[0].source): sections.append([])
            sections[-1].append(o)
        head = lambda cells: re.match(r'## *(.*)', cells[0][0].source)[1] if cells else ''
        inner = [s for s in sections[1:] if not head(s).startswith('Internals') and any(self.helpers(c) for c,_ in s)
                 and all(self.helpers(c) for c,_ in s if calls(c))]
        front = [s for s in sections if not any(s is o for o in inner)]
        front[1:] = sorted(front[1:], key=lambda s: head(s).startswith('Internals'))
        for cells in front: yield from self.folded(cells)
        if inner and not any(head(s).startswith('Internals') for s in front[1:]): yield '',[(mk_cell('## Internals', 'markdown'), -1)]
        for cells in inner: yield f'{head(cells)}: {", ".join(n for c,_ in cells for n in self.helpers(c))}',cells

    def folded(self, cells):
        "The cells of a section, helpers and what shows them folded"
        names,group = [],[]
        for cell,i in cells:
            mine = self.helpers(cell)
            if group and (cell.cell_type == 'markdown' or calls(cell) and not mine):
                yield ', '.join(names),group
                names,group = [],[]
            if mine or group: names += mine; group.append((cell, i))
            else: yield '',[(cell, i)]
        if group: yield ', '.join(names),group

    def imports(self):
        "What the module and the notebook import, and the module's names that the examples use: for one who types an API page's examples"
        nodes,src = [],'\n'.join(c.source for c in self.nb.cells if c.cell_type == 'code' and not calls(c))
        for c in self.source.cells:
            if c.cell_type != 'code' or not {'export', 'exporti', 'hide'} & set(c.directives): continue
            nodes += ast.parse(re.sub(r'(?m)^\s*[%!].*', '', c.source)).body
        lines = dict.fromkeys(ast.unparse(n) for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)))
        own = {getattr(t, 'name', getattr(t, 'id', '')) for n in nodes for t in [n, *getattr(n, 'targets', [])]} - {*self.mod.__all__}
        own = sorted(n for n in own & set(re.findall(r'\w+', src)) if hasattr(self.mod, n))
        lines = [l for l in lines if not re.search('__future__|showdoc|import nbdev| as _own$', l)]
        lines += [f'from {self.mod.__name__} import *']*bool(self.mod.__all__) + [
            f'from {self.mod.__name__} import {", ".join(own)}']*bool(own)
        return '\n'.join(lines)

    def snippets(self):
        "What a reader types, from the top of the page to its end: the code that is shown, also as the output of a cell that is not"
        code = [c for _,cells in [('', self.example()), *self.blocks()] for c,_ in cells if c.cell_type == 'code' and not calls(c)]
        cells = [src for c in code for src in ([c.source] if is_typed(c) else shown_code(c))]
        return [self.imports(), *cells] if self.mod and cells else cells

    def cell(self, cell, i):
        "Markdown of a cell, in parts"
        if cell.cell_type=='code': return self.code(cell, i)
        if cell.cell_type=='raw' or cell.source.startswith('<!-- WARNING'): return []
        cell.remove_directives()
        heads = re.findall(r'(?m)^#{2,4} +(.+?)(?: *\{.*)?$', cell.source)
        if heads: self.section = re.sub(r'[`*]|\]\([^)]*\)|\[', '', heads[-1])
        return [callouts(cell.source.strip())]

    def code(self, cell, i):
        d = cell.directives
        if d.get('include')=='false': return []
        cell.remove_directives()
        src,checks = cell.source.strip('\n'),''
        if not self.mod and 'code-fold' not in d: src,checks = split_checks(src)
        src = fence(fitted(src), cell.metadata.get('language') or 'python')
        if 'code-fold' in d:
            src = fold(d.get('code-summary', 'Code').strip('"'), src, 'quote')
        res = [] if d.get('echo')=='false' else [src]
        self.draws_plots = not re.search(r'show_batch|show_results|show_image|imshow', cell.source)
        if d.get('output')!='false':
            res += [self.output(o, f'{i}_{j}', d.get('output')=='asis')
                    for j,o in enumerate(streams(cell.get('outputs', [])))]
        if checks and d.get('echo') != 'false': res.append(fold('Checked', fence(fitted(checks), 'python'), 'quote'))
        return res

    def output(self, o, name, asis):
        if o.output_type=='stream': return ''.join(o.text) if asis and o.name=='stdout' else printed(''.join(o.text))
        if o.output_type=='error': return printed(f'{o.ename}: {o.evalue}')
        data = {k: ''.join(v) if isinstance(v, (list,str)) else v for k,v in o.data.items()}
        for mime in pictures:
            if mime in data: return self.picture(data[mime], mime, name, o.get('metadata', {}).get(mime, {}).get('width'))
        if data.get('text/markdown', '').startswith('```html'): del data['text/markdown']  # fastprogress quotes its table
        if 'text/markdown' in data: return data['text/markdown']
        if 'text/html' in data: return html(data['text/html'])
        plain = data.get('text/plain', '')
        return '' if plain.startswith('<IPython.core.display') else printed(plain)

    def picture(self, data, mime, name, width):
        "Save a picture next to the page; `width` is that at which it is shown"
        f = Path(self.path).with_suffix('').as_posix() + f'_files/{name}.{pictures[mime]}'
        (self.out/f).parent.mkdir(parents=True, exist_ok=True)
        data = data.encode() if mime.endswith('xml') else base64.b64decode(data)
        (self.out/f).write_bytes(data)
        width = width or (int.from_bytes(data[16:20], 'big') if mime=='image/png' else 0)
        attrs = ' .figure' + ' .plot'*self.draws_plots + ' .wide'*(width > 640) + (f' width={width}' if width else '')
        return f'![{self.section}: figure]({posixpath.relpath(f, posixpath.dirname(self.path) or ".")}){{{attrs} }}'
