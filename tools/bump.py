"Raise the version everywhere it stands: `make bump` for a patch, `make bump PART=minor` or `PART=major`"
import re, sys
from pathlib import Path

parts = ['major', 'minor', 'patch']
places = {'settings.ini': r'(?m)^(version *= *)(\S+)', 'fastaccum/__init__.py': r'(?m)^(__version__ *= *")([^"]+)'}

def bumped(version, part='patch'):
    "The version after `version`"
    if part not in parts: raise ValueError(f'the part to raise is one of {", ".join(parts)}, not {part!r}')
    nums,i = [int(n) for n in version.split('.')],parts.index(part)
    return '.'.join(map(str, [*nums[:i], nums[i]+1, *[0]*(2-i)]))

def bump(root, part='patch'):
    "Raise the version in the files below `root`; returns the old and the new one"
    texts = {p: (root/p).read_text(encoding='utf-8') for p in places}
    old = {p: re.search(pat, texts[p])[2] for p,pat in places.items()}
    if len(set(old.values()))>1: raise ValueError(f'the versions differ, make them equal first: {old}')
    old = old['settings.ini']
    new = bumped(old, part)
    for p,pat in places.items(): (root/p).write_text(re.sub(pat, rf'\g<1>{new}', texts[p]), encoding='utf-8')
    return old,new

if __name__=='__main__': print(*bump(Path(__file__).resolve().parent.parent, *sys.argv[1:]), sep=' -> ')
