"A processed notebook as a page in markdown"
import base64, importlib, posixpath, re, textwrap, yaml
from pathlib import Path
from fastcore.nbio import cell_frontmatter, read_nb
from nbdev.config import nbpath2html
from nbdev.processors import _default_exp
from readme import fence, terminal
from apidoc import contents, described

pictures = {'image/svg+xml': 'svg', 'image/png': 'png', 'image/jpeg': 'jpg'}

def page_path(file):
    "api/10_accumulation.ipynb, a file in nbs -> api/accumulation.md; ../CHANGELOG.md -> changelog.md"
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
_links = re.compile(r'^(`{3,}).*?^\1|`[^`\n]+`|(?P<pre>\]\(|\b(?:src|href)=")(?P<to>[^)"\s]+)', re.M | re.S)

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

def folded(line, width=108):
    "A line of words that is longer than a page is wide, in several"
    return line if len(line)<=width or re.search(r'\S\s{2,}\S', line) else '\n'.join(textwrap.wrap(line, width, subsequent_indent='    ', break_long_words=False, break_on_hyphens=False))

def printed(text):
    "What a cell printed, set apart from its source"
    text = '\n'.join(map(folded, terminal(text).split('\n')))
    return fence(text, ' { .text .out }') if text else ''

def streams(outputs):
    "`outputs` with those that were printed one after the other as one"
    res = []
    for o in outputs:
        if o.output_type=='stream' and o.name!='stdout': continue
        if o.output_type=='stream' and res and res[-1].output_type=='stream': res[-1].text = ''.join(res[-1].text) + ''.join(o.text)
        else: res.append(o)
    return res

def html(text):
    "An HTML output without progress bars and styles of its own"
    text = re.sub(r'(?s)<style.*?</style>|<script.*?</script>|<progress.*?</progress>| border="1" class="dataframe"', '', text)
    if not re.search(r'<(table|img|svg|details|pre)\b', text): return ''
    return '<div class="out-html" markdown="0">\n' + re.sub(r'\n\s*\n', '\n', text).strip() + '\n</div>'

class Page:
    "The page of a processed notebook; `write` puts it, and the pictures in it, below `out`"
    def __init__(self, nb_path, proc, out, cfg):
        self.name,self.out,self.cfg = nb_path.relative_to(proc).as_posix(),out,cfg
        self.nb,self.path = read_nb(nb_path),page_path(self.name)
        self.source = read_nb(cfg.nbs_path/self.name)
        self.title,self.description = title(self.nb)
        self.section = self.title                       # the last heading, which says what a picture shows

    def write(self):
        dst = self.out/self.path
        dst.parent.mkdir(parents=True, exist_ok=True)
        dst.write_text(self.markdown(), encoding='utf-8')

    def markdown(self):
        exp = _default_exp(self.source)
        parts = ['---\n' + yaml.safe_dump(dict(title=self.title, description=self.description or self.title)) + '---', f'# {self.title}']
        if self.description: parts.append(f'{self.description}\n{{ .subtitle }}')
        if exp:
            lib = self.cfg.lib_path.name
            parts += [f'`from {lib}.{exp} import *`', linked(contents(importlib.import_module(f'{lib}.{exp}')), self.name, self.cfg)]
        for i,cell in enumerate(self.nb.cells): parts += [linked(p, self.name, self.cfg) for p in self.cell(cell, i)]
        return '\n\n'.join(filter(None, parts)) + '\n'

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
        src = fence(cell.source.strip('\n'), cell.metadata.get('language') or 'python')
        if 'code-fold' in d:
            src = f'???{"+" if d["code-fold"]=="show" else ""} quote "{d.get("code-summary", "Code").strip(chr(34))}"\n\n' + re.sub(r'(?m)^(?=.)', ' '*4, src)
        res = [] if d.get('echo')=='false' else [src]
        if d.get('output')!='false': res += [self.output(o, f'{i}_{j}', d.get('output')=='asis') for j,o in enumerate(streams(cell.get('outputs', [])))]
        return res

    def output(self, o, name, asis):
        if o.output_type=='stream': return ''.join(o.text) if asis else printed(''.join(o.text))
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
        attrs = ' .figure' + ' .wide'*(width > 640) + (f' width={width}' if width else '')
        return f'![{self.section}: figure]({posixpath.relpath(f, posixpath.dirname(self.path) or ".")}){{{attrs} }}'
