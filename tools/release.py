"""Is this the version that a tag names, and does the changelog say so? The workflow `release` asks before it builds:
`python tools/release.py v0.1.0`"""
import re, sys
from configparser import ConfigParser
from pathlib import Path

def wrong(root, tag):
    "What has to be done before `tag` can be released, a line for each"
    ini = ConfigParser(delimiters=['='])
    ini.read(root/'settings.ini', encoding='utf-8')
    version = ini['DEFAULT']['version']
    first = (root/'CHANGELOG.md').read_text(encoding='utf-8').split('\n## ')[1]
    res = []
    if tag != f'v{version}': res.append(f'The tag is {tag}, the version {version}: `make bump`, or tag v{version}.')
    if not re.match(rf'{re.escape(version)}, \d+ \w+ \d{{4}}\n', first):
        res.append(f'CHANGELOG.md begins with the section `{first.splitlines()[0]}`: '
                   f'write `{version}, 1 January 2027`, with the day of the release.')
    if 'not released yet' in first: res.append('CHANGELOG.md says that this version is not released yet.')
    if 'not on PyPI yet' in (root/'README.md').read_text(encoding='utf-8'):
        res.append('README.md says that fastaccum is not on PyPI yet: see nbs/index.ipynb.')
    return res

if __name__=='__main__': sys.exit('\n'.join(wrong(Path(__file__).resolve().parent.parent, sys.argv[1])) or None)
