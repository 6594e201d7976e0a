"""Make README.md from nbs/index.ipynb: `make readme`

nbdev's own command for this needs Quarto. A page of text, code and results does not."""
import argparse, posixpath, re, sys
from pathlib import Path
from fastcore.nbio import cell_frontmatter, md_frontmatter, read_nb
from nbdev.config import get_config, nbpath2html

warning = '<!-- Generated from nbs/index.ipynb by tools/readme.py: edit the notebook, then run `make readme` -->'
pictures = {'.png', '.jpg', '.jpeg', '.gif', '.svg', '.webp'}

# -- Links -------------------------------------------------------------------------------------------------------
# Code is matched first and left alone: `fs[0](x)` is no link
_links = re.compile(r'^```.*?^```|`[^`\n]+`|(?P<pre>\]\(|\b(?:src|srcset|href)=")(?P<to>[^)"\s]+)', re.M | re.S)

def absolute(to, cfg):
    "A link that also works on a package index's page, where relative ones lead nowhere"
    path,sep,anchor = to.partition('#')
    if not path or re.match(r'\w+:|/', path): return to
    path = Path(posixpath.normpath(posixpath.join('nbs', path)))
    if path.suffix=='.ipynb' and path.parts[0]=='nbs':
        return cfg.doc_url + nbpath2html(path.relative_to('nbs')).as_posix() + sep + anchor
    if path.suffix in pictures:
        return f"{cfg.git_url.replace('github.com', 'raw.githubusercontent.com')}/{cfg.branch}/{path.as_posix()}"
    return f'{cfg.git_url}/blob/{cfg.branch}/{path.as_posix()}{sep}{anchor}'

def linked(text, cfg):
    "`text` with its links made absolute"
    return _links.sub(lambda m: m['pre'] + absolute(m['to'], cfg) if m['to'] else m[0], text)

# -- Cells -------------------------------------------------------------------------------------------------------
def fence(text, lang):
    "`text` as a block of code, in more backticks than it has itself"
    ticks = '`'*max([3, *(len(t)+1 for t in re.findall('`{3,}', text))])
    return f'{ticks}{lang}\n{text}\n{ticks}' if text else ''

def terminal(text):
    "What a terminal shows of `text` in the end: no colours, and of a line that was rewritten the last state"
    text = re.sub(r'\x1b\[[0-9;]*[A-Za-z]', '', text).replace('\r\n', '\n')
    return '\n'.join(l.rstrip('\r').split('\r')[-1].rstrip() for l in text.split('\n')).strip('\n')

def result(out, asis):
    "Markdown for one output of a cell; `asis` means that what it prints is markdown already"
    if out.output_type=='stream':
        if out.name!='stdout': return ''
        return out.text.strip() if asis else fence(terminal(out.text), 'text')
    if out.output_type=='error': return fence(f'{out.ename}: {out.evalue}', 'text')
    if any(k.startswith('image/') for k in out.data):
        raise ValueError('README.md cannot hold the figures of a cell: save it in nbs/images and link to it, '
                         'or keep it out with `#| output: false`')
    if 'text/markdown' in out.data: return out.data['text/markdown'].strip()
    tables = re.findall(r'(?s)<table.*?</table>', out.data.get('text/html', ''))  # without progress bars and styles
    if tables: return '\n\n'.join(re.sub(r' border="1" class="dataframe"|\n\s*(?=\n)', '', t) for t in tables)
    plain = terminal(out.data.get('text/plain', ''))
    return '' if plain.startswith('<IPython.core.display') else fence(plain, 'text')

def code(cell):
    "Markdown for a code cell: its source, then its outputs, as its directives want it"
    d = cell.directives
    cell.remove_directives()
    parts = []
    if 'hide_input' not in d and d.get('echo')!='false': parts.append(fence(cell.source.strip('\n'), 'python'))
    if 'hide_output' not in d and d.get('output')!='false':
        parts += [result(o, asis=d.get('output')=='asis') for o in cell.outputs]
    return parts

# -- The page ----------------------------------------------------------------------------------------------------
def readme(root):
    "The text of README.md for the project in `root`"
    cfg,title,parts = get_config(root),{},[]
    for cell in read_nb(cfg.nbs_path/cfg.readme_nb).cells:
        head = {} if cell.cell_type=='code' or 'title' in title else cell_frontmatter(cell.source)
        if cell.cell_type=='markdown' and 'title' not in title: head = head or md_frontmatter(cell.source)
        title.update(head)
        if head or cell.cell_type=='raw' or 'hide' in cell.directives or cell.directive('include')=='false': continue
        if cell.cell_type=='code': parts += code(cell)
        else:
            cell.remove_directives()
            parts.append(linked(cell.source.strip(), cfg))
    parts = [warning, f"# {title['title']}", f"> {title['description']}" if 'description' in title else '', *parts]
    return '\n\n'.join(filter(None, parts)) + '\n'

def write(root):
    "Write README.md of the project in `root`"
    (root/'README.md').write_text(readme(root), encoding='utf-8')

def main():
    parser = argparse.ArgumentParser(description='Make README.md from nbs/index.ipynb')
    parser.add_argument('--check', action='store_true', help='write nothing; exit with 1 if README.md is out of date')
    root = Path(__file__).resolve().parent.parent
    if not parser.parse_args().check: return write(root)
    if (root/'README.md').read_text(encoding='utf-8')!=readme(root): sys.exit('README.md is out of date: run `make readme`')

if __name__=='__main__': main()
