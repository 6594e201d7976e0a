"The conversion of the home page's notebook to README.md"
from pathlib import Path
import pytest
pytest.importorskip('nbdev', reason='README.md is made with nbdev')
from fastcore.nbio import mk_cell, new_nb, write_nb
import readme

root = Path(__file__).resolve().parents[2]

def out(text=None, **data):
    "An output that was printed, or one that was shown"
    if text: return dict(output_type='stream', name='stdout', text=text)
    return dict(output_type='execute_result', metadata={}, execution_count=None, data={k.replace('_', '/'): v for k,v in data.items()})

def md(src): return mk_cell(src, 'markdown')
def code(src, *outputs): return mk_cell(src, outputs=list(outputs))

@pytest.fixture
def convert(tmp_path):
    "Make the README of a notebook with these cells, without its head"
    def _f(*cells, title=md('# Title\n\n> Subtitle')):
        (tmp_path/'nbs').mkdir(exist_ok=True)
        (tmp_path/'pyproject.toml').write_text((root/'pyproject.toml').read_text())
        write_nb(new_nb([title, *cells]), tmp_path/'nbs/index.ipynb')
        res = readme.readme(tmp_path)
        readme.write(tmp_path)
        assert (tmp_path/'README.md').read_text()==res==readme.readme(tmp_path)  # the same at every run
        head = f'{readme.warning}\n\n# Title\n\n> Subtitle\n'
        assert res.startswith(head)
        return res[len(head):].strip('\n')
    return _f

def test_up_to_date(): assert (root/'README.md').read_text(encoding='utf-8')==readme.readme(root)

def test_front_matter(convert):
    assert convert(md('text'))==convert(md('text'), title=md('# Title\n\n> Subtitle\n\n- key: value'))=='text'
    for kind in 'raw','markdown': assert convert(title=mk_cell('---\ntitle: Title\ndescription: Subtitle\n---', kind))==''
    assert convert(md('# Not a title\n\n> quote'))=='# Not a title\n\n> quote'

def test_code(convert):
    assert convert(code('x = 1\nx', out(text_plain='1')))=='```python\nx = 1\nx\n```\n\n```text\n1\n```'
    assert convert(code('print("```")', out('```\n')))=='````python\nprint("```")\n````\n\n````text\n```\n````'
    assert convert(code('x = 1'), code('', out()))=='```python\nx = 1\n```'

@pytest.mark.parametrize('directive,expected', [
    ('hide', ''), ('include: false', ''), ('echo: false', 'res'), ('hide_input', 'res'), ('output: false', 'src'),
    ('hide_output', 'src'), ('eval: false', 'src res'), ('echo: true', 'src res'), ('code-fold: show', 'src res')])
def test_directives(convert, directive, expected):
    parts = dict(src='```python\nf()\n```', res='```text\n2\n```')
    assert convert(code(f'#| {directive}\nf()', out('2\n')))=='\n\n'.join(parts[p] for p in expected.split())

def test_asis(convert): assert convert(code('#| output: asis\n#| echo: false\nf()', out('**bold**\n')))=='**bold**'

def test_outputs(convert):
    def shown(*outputs): return convert(code('#| echo: false\nf()', *outputs))
    assert shown(out('\x1b[31mred\x1b[0m\n 10%\r100%\n'))=='```text\nred\n100%\n```'
    assert shown(out(text_markdown='**b**', text_plain='b'))=='**b**'
    assert shown(dict(output_type='stream', name='stderr', text='a warning'))==''
    assert shown(dict(output_type='error', ename='ValueError', evalue='too big', traceback=[]))=='```text\nValueError: too big\n```'
    html = '\n<style>\n x {}\n</style>\n<table border="1" class="dataframe">\n  <tr>\n  </tr>\n\n</table>'
    assert shown(out(text_html=html, text_plain='a table'))=='<table>\n  <tr>\n  </tr>\n</table>'
    assert shown(out(text_html='<progress></progress>', text_plain='<IPython.core.display.HTML object>'))==''

def test_figure(convert):
    fig = out(image_png='iVBORw0KGgo=', text_plain='<Figure size 640x480 with 1 Axes>')
    with pytest.raises(ValueError, match='nbs/images'): convert(code('plot()', fig))
    assert convert(code('#| output: false\nplot()', fig))=='```python\nplot()\n```'

@pytest.mark.parametrize('to,expected', [
    ('images/a.png', 'https://raw.githubusercontent.com/fastaccum/fastaccum/main/nbs/images/a.png'),
    ('api/accumulation/01_callback.ipynb', 'https://fastaccum.github.io/fastaccum/api/accumulation/callback.html'),
    ('./tutorials/small_gpu.ipynb#lr', 'https://fastaccum.github.io/fastaccum/tutorials/small_gpu.html#lr'),
    ('../LICENSE', 'https://github.com/fastaccum/fastaccum/blob/main/LICENSE'),
    ('../bench/README.md#speed', 'https://github.com/fastaccum/fastaccum/blob/main/bench/README.md#speed'),
    *[(same, same) for same in ('https://x.org/a.png', 'mailto:a@b.org', '#install', '/abs.png')]])
def test_links(convert, to, expected):
    for s in ('a [b]({}) c', 'a ![b]({}) c', '[![b]({})](https://x.org)', 'the [`code`]({} "title")',
              '<img src="{}" width=3>', '<source srcset="{}">'):
        assert convert(md(s.format(to)))==s.format(expected)

@pytest.mark.parametrize('src', ['a `fs[0](images/a.png)` b', '```python\nfs[0](images/a.png)\n```'])
def test_code_is_left_alone(convert, src): assert convert(md(src))==src
