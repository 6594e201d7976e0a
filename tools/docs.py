"""Build the site from the notebooks: `make docs`, then open _docs/index.html

Notebooks become markdown in _md (pages.py, apidoc.py), Zensical makes the site of it, and every link is checked. What
was built replaces _docs only if nothing is wrong with it."""
import html, json, re, shutil, subprocess, sys, sysconfig, yaml
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from latex2mathml.converter import convert as mathml
from nbdev.config import get_config
import apidoc, messages, pages
from menu import folders, menu, names, words

# -- The menu ----------------------------------------------------------------------------------------------------
def entries(titles, pages): return [{titles[p]: p} for p in pages]

def by_folder(titles, all_titles):
    """The menu for `titles`, path -> title of pages of the package: the overview; each folder's face, and its pages in the
    order of their notebooks; what is in no folder"""
    where = {p: p.rpartition('/')[0] for p in titles}
    def mine(place): return [p for p in titles if where[p] == place]
    def section(place):
        face = f'{place}/index.md'
        name = all_titles.get(face, place.rpartition('/')[2])
        return {name: [face]*(face in titles) + entries(titles, [p for p in mine(place) if p != face])}
    places = [o for o in dict.fromkeys([*folders, *where.values()]) if o != 'api' and mine(o)]
    overview = [p for p in mine('api') if p == 'api/all.md']
    alone = [p for p in mine('api') if p not in overview]
    return entries(titles, overview) + [section(o) for o in places] + entries(titles, alone)

def pages_of(place):
    "All pages that a part of the menu names"
    if isinstance(place, str): return [place]
    return [p for part in (place.values() if isinstance(place, dict) else place) for p in pages_of(part)]

def navigation(titles, internal=()):
    """The menu for `titles`, path -> title of all pages in the order of their notebooks; `internal`: those of the
    package that are not for users"""
    titles = {p: names.get(p[:-3], t) for p,t in titles.items()}
    def those(paths): return [f'{p}.md' for p in paths if f'{p}.md' in titles]
    placed = those(pages_of(menu))
    left = [p for p in titles if p not in placed]
    def below(folder): return [p for p in left if p.startswith(folder)]
    package = {p: titles[p] for p in below('api/')}
    def entry(name, place):
        if not place: return entries(titles, [p for p in left if p not in package and not p.startswith('tutorials/')])
        if isinstance(place, dict):
            mine = [e for group,paths in place.items()
                    for e in entry(group, paths)] + entries(titles, below('tutorials/'))
        elif isinstance(place, list): mine = entries(titles, those(place)) + entry('Internals', 'internals')*('internals' in place)
        elif place == 'api/': mine = by_folder({p: t for p,t in package.items() if p not in internal}, titles)
        elif place == 'internals': mine = by_folder({p: t for p,t in package.items() if p in internal}, titles)
        else: return [{name: p} for p in those([place])]
        return [{name: mine}] if mine else []
    return [e for name,place in menu.items() for e in entry(name, place)]

# -- Notebooks to markdown ---------------------------------------------------------------------------------------
def llms_txt(cfg, nbs):
    "All pages, in markdown, for language models (llmstxt.org)"
    lines = [f'- [{p.title}]({cfg.doc_url}{Path(p.path).with_suffix(".html.md")}): {p.description}' for p in nbs]
    return f'# {cfg.lib_path.name}\n\n> {cfg.description}\n\n## Docs\n\n' + '\n'.join(lines) + '\n'

def write_markdown(cfg, md):
    "Write what Zensical needs to the folder `md`; returns the paths of the pages"
    out,root = md/'docs',cfg.config_path
    shutil.rmtree(md, ignore_errors=True)
    (out/'assets').mkdir(parents=True)
    proc = apidoc.proc_nbs()
    nbs = [pages.Page(f, proc, out, cfg) for f in sorted(proc.rglob('*.ipynb'))]
    titles = {p.path: p.title for p in nbs}
    for p in nbs:
        p.write()
        shutil.copy(cfg.nbs_path/p.name, (out/p.path).parent)     # to download
    for f in filter(lambda f: pages.is_page(f.name), root.iterdir()):
        titles[f.name.lower()] = f.stem.capitalize()
        (out/f.name.lower()).write_text(pages.linked(f.read_text(encoding='utf-8'), f'../{f.name}', cfg), encoding='utf-8')
    shutil.copytree(cfg.nbs_path/'images', out/'images')
    for f in ('extra.css', 'iframe-worker.js', 'search-order.js'): shutil.copy(root/'tools'/f, out/'assets')
    (out/'llms.txt').write_text(llms_txt(cfg, nbs), encoding='utf-8')
    conf = yaml.safe_load((root/'mkdocs.yml').read_text(encoding='utf-8'))
    conf.update(site_name=cfg.lib_path.name, site_url=cfg.doc_url, site_description=cfg.description, docs_dir='docs',
                site_dir='site', nav=navigation(titles, {p.path for p in nbs if p.internal}))
    (md/'mkdocs.yml').write_text(yaml.safe_dump(conf, sort_keys=False), encoding='utf-8')
    return list(titles)

# -- Markdown to the site ----------------------------------------------------------------------------------------
def formula(m):
    "LaTeX as MathML, which browsers draw without a script or a font"
    return mathml(html.unescape(m['inline'] or m['block']), display='inline' if m['inline'] else 'block')

_formula = re.compile(r'<(span|div) class="arithmatex">\\(?:\((?P<inline>.*?)\\\)|\[(?P<block>.*?)\\\])</\1>', re.S)

# As Zensical writes a line of code, and a table of a page; those that cells show are written in another way
_line = re.compile(r'<span id="line-\d+-\d+">(?=(?:<span[^>]*>)*( *))')
_table = re.compile(r'<table>\n<thead>\n<tr>\n(?P<head>.*?)</thead>.*?</table>', re.S)

def indented(m):
    """The beginning of a line of code that knows how far it is indented: where it is too long for the screen, it goes
    on at the right of that"""
    return f'<span class="line" style="--at: {len(m[1])}ch">'

def labelled(m):
    "A table each of whose cells knows the head of its column, as phones show a row as a block; one of figures stays as it is"
    heads = [html.escape(html.unescape(re.sub('<.*?>', '', h)).strip()) for h in re.findall(r'<th[^>]*>(.*?)</th>', m['head'], re.S)]
    rows = [re.findall(r'<td([^>]*)>(.*?)</td>', r, re.S) for r in re.findall(r'<tr>(.*?)</tr>', m[0].partition('</thead>')[2], re.S)]
    if is_numeric([text for row in rows for _,text in row[1:]]): return m[0]
    def row(cells): return ''.join(f'<td{attrs} data-head="{head}">{text}</td>\n' for head,(attrs,text) in zip(heads, cells))
    body = ''.join(f'<tr>\n{row(r)}</tr>\n' for r in rows)
    return f'<table data-rows>\n<thead>\n<tr>\n{m["head"]}</thead>\n<tbody>\n{body}</tbody>\n</table>'

def is_numeric(texts):
    "Are most of these numbers?"
    filled = [t for t in texts if t.strip()]
    return 2*sum(bool(re.fullmatch(r'[\d.,%±e \-]+', t)) for t in filled) > len(filled)

def finished(page):
    "The HTML of a page as it is published"
    return _table.sub(labelled, _line.sub(indented, _formula.sub(formula, page)))

def with_source(page):
    "The repository and its issues at the end of the header"
    url = get_config().git_url
    links = f'<a href="{url}">GitHub</a> <a href="{url}/issues">Issues</a>'
    return re.sub(r'(<div class="md-header__source">)\s*(</div>)', rf'\1{links}\2', page)

def build(md):
    "Make the site of the markdown in `md`; returns its folder"
    if sys.version_info < (3,11): sys.exit('The site needs Python 3.11 or newer, as Zensical does, which makes it.')
    zensical = Path(sysconfig.get_path('scripts'))/'zensical'
    subprocess.run([zensical, 'build', '--clean', '--strict'], cwd=md, check=True)
    site = md/'site'
    for f in site.rglob('*.html'): f.write_text(with_source(finished(f.read_text(encoding='utf-8'))), encoding='utf-8')
    rank(site)
    # `Docs:` in a module's docstring
    for f in (md/'docs').rglob('*.md'): shutil.copy(f, (site/f.relative_to(md/'docs')).with_suffix('.html.md'))
    return site

# -- Search ------------------------------------------------------------------------------------------------------
def ranked(items):
    """Entries of the search's index with a `tier`, by which tools/search-order.js lists them: guides, what is public, and
    after all others internals, and messages that are not typed whole; and with the other words that users type. A helper
    has its name in its text, not in its title, as a match in a title comes before others"""
    helpers = {f'api/{m.replace(".", "/")}.html#{n.partition(".")[0].lower()}': m for m,names in apidoc.helpers().items() for n in names}
    inner = {f'api/{m.replace(".", "/")}.html' for m in apidoc.modules() if not apidoc.is_public(apidoc.module_of(m))}
    def entry(o):
        page,_,anchor = o['location'].partition('#')
        mod,others = helpers.get(f'{page}#{anchor.partition(".")[0]}'),words.get(o['location'].replace('.html', ''), '')
        if mod: o = {**o, 'title': f'Helpers of {mod}', 'text': f"<code>{o['title']}</code> {o['text']}"}
        if others: o = {**o, 'words': others, 'text': f"{o['text']} <p>Other words: {others}</p>"}
        public = page.startswith(('api/', 'changelog', 'contributing', 'benchmarks'))
        return {**o, 'tier': 2 if mod or page in inner or o['title'].startswith('Internals') else int(public)}
    found = {o['location']: o for o in items}
    def message(text, section):
        place = found[f'troubleshooting.html#{section}']
        return {**place, 'text': f'<p>{html.escape(text, quote=False)}</p>', 'tier': 3}
    return sorted([*map(entry, items), *(message(*o) for o in messages.messages().items())], key=lambda o: o['tier'])

def rank(site):
    "Put the search's index in order, for the server and for the disk"
    js,index = site/'search.js',json.loads((site/'search.json').read_text(encoding='utf-8'))
    before = js.read_text(encoding='utf-8')
    head = before[:before.index('{')]
    index['items'] = ranked(index['items'])
    text = json.dumps(index, ensure_ascii=False, separators=(',', ':'))
    (site/'search.json').write_text(text, encoding='utf-8')
    js.write_text(head + text + before[before.rindex('}')+1:], encoding='utf-8')

def wrong_words(site):
    "Places in tools/menu.py that the folder `site` does not have, a line for each"
    found = {o['location'].replace('.html', '') for o in json.loads((site/'search.json').read_text(encoding='utf-8'))['items']}
    return [f'tools/menu.py: `words` for {place}, but the site has no such place' for place in sorted(words.keys() - found)]

# -- Links -------------------------------------------------------------------------------------------------------
class Links(HTMLParser):
    "Anchors of a page, where it links to, and what it loads"
    def __init__(self, text):
        super().__init__()
        self.anchors,self.links,self.loads = {''},set(),set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        d = dict(attrs)
        self.anchors |= {d[k] for k in ('id', 'name') if d.get(k)}
        if tag=='a' and d.get('href'): self.links.add(d['href'])
        if tag=='link' and d.get('rel')!='canonical': self.loads.add(d.get('href'))
        self.loads |= {d[k] for k in ('src', 'srcset') if d.get(k)}

def wrong_links(site, published=' '):
    "What is wrong with the links in the folder `site`, a line for each; `published` is the address that the site will have"
    found = {f.resolve(): Links(f.read_text(encoding='utf-8')) for f in site.rglob('*.html') if f.name!='404.html'}
    res = []
    for f,page in found.items():
        for to in page.links|page.loads:
            url = urlsplit(to)
            if url.scheme or url.netloc:
                if to.startswith(published): res.append(f'{f.relative_to(site)}: {to} is a page of the site, link to its notebook')
                if to in page.loads and url.scheme!='data': res.append(f'{f.relative_to(site)}: loads {to} from another host')
                continue
            target = (f.parent/unquote(url.path)).resolve() if url.path else f
            if target.is_dir(): target = target/'index.html'
            if not target.exists(): res.append(f'{f.relative_to(site)}: {to} leads nowhere')
            elif target in found and unquote(url.fragment) not in found[target].anchors:
                res.append(f'{f.relative_to(site)}: no such anchor, {to}')
    return sorted(res)

def main():
    cfg = get_config()
    md = cfg.config_path/'_md'
    write_markdown(cfg, md)
    site = build(md).resolve()
    wrong = wrong_links(site, cfg.doc_url) + wrong_words(site)
    if wrong: sys.exit('\n'.join(['The site was not replaced:', *wrong]))
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(site, cfg.doc_path)
    print(f'Open {(cfg.doc_path/"index.html").relative_to(cfg.config_path)}')

if __name__=='__main__': main()
