"""Bring all that is generated up to date: `make export`

With `--check` do it in a copy, and say what would change (part of `make test`)."""
import difflib, re, subprocess, sys, sysconfig, tempfile
from pathlib import Path
from fastcore.nbio import read_nb, write_nb
from readme import write as write_readme

sources = ['pyproject.toml', 'README.md', 'nbs/llms.txt', 'nbs/**/*.ipynb', 'fastaccum/**/*.py']

def told(text):
    "The warnings for users in what a cell wrote to stderr, without the file and the line. Progress, logs and warnings for developers go"
    return ''.join(f'{o}\n' for o in re.findall(r'(?m)^(?:\S.*?:\d+: )?((?:User|Fastaccum)Warning: .*)', text))

def keep_warnings(fn):
    "Of what the cells of a notebook wrote to stderr, leave the warnings: the page shows them"
    nb = read_nb(fn)
    errs = [(c, o) for c in nb.cells if c.cell_type == 'code' for o in c.outputs if o.output_type == 'stream' and o.name == 'stderr']
    texts = [(c, o, ''.join(o.text), told(''.join(o.text))) for c,o in errs]
    for c,o,_,text in texts:
        o.text = text.splitlines(keepends=True)
        if not text: c.outputs.remove(o)
    if any(old != new for *_,old,new in texts): write_nb(nb, fn)

def export(root):
    "Clean the notebooks, make the modules, make README.md: cleaning first, as it gives new cells the id a module quotes"
    bin = Path(sysconfig.get_path('scripts'))
    for fn in sorted((root/'nbs').rglob('*.ipynb')):
        if '.ipynb_checkpoints' not in fn.parts: keep_warnings(fn)
    for cmd in ('nbdev-clean', 'nbdev-export'): subprocess.run([bin/cmd], cwd=root, check=True)
    write_readme(root)

def contents(root):
    "Path -> text of every file that `export` reads or writes"
    files = {f.relative_to(root) for pattern in sources for f in root.glob(pattern)}
    return {f.as_posix(): (root/f).read_text(encoding='utf-8') for f in sorted(files) if '.ipynb_checkpoints' not in f.parts}

def exported(files):
    "`files` as they are after an export. Modules are left out first, so that those no notebook makes are missing then"
    with tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp).resolve()
        for f,text in files.items():
            if f.endswith('.py') and f != 'fastaccum/__init__.py': continue
            (root/f).parent.mkdir(parents=True, exist_ok=True)
            (root/f).write_text(text, encoding='utf-8')
        export(root)
        return contents(root)

def complaint(f, old, new, n_lines=30):
    "What is wrong with the file `f`, and what to do"
    if new is None: return f'{f}: no notebook makes it. Delete it, or bring its notebook back.'
    if old is None: return f'{f}: is missing. Run `make export`.'
    diff = difflib.unified_diff(old.splitlines(), new.splitlines(), f, f'{f} after `make export`', n=1, lineterm='')
    return '\n'.join([*list(diff)[:n_lines], f'{f}: is out of date. Run `make export`.'])

def complaints(files):
    "What an export would change in `files`"
    new = exported(files)
    return [complaint(f, files.get(f), new.get(f)) for f in sorted({*files, *new}) if files.get(f)!=new.get(f)]

def main():
    root = Path(__file__).resolve().parent.parent
    if '--check' not in sys.argv: return export(root)
    files = contents(root)
    wrong = complaints(files)
    if wrong: sys.exit('\n\n'.join(wrong))
    print(f'Notebooks are clean, modules and README.md are up to date ({len(files)} files).')

if __name__=='__main__': main()
