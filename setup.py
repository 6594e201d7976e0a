"Builds the package. Its metadata is in `settings.ini`."
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

root = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
lib = cfg['lib_name']

licenses = dict(apache2='Apache-2.0')
statuses = {'3': '3 - Alpha', '4': '4 - Beta', '5': '5 - Production/Stable'}
classifiers = [
    f"Development Status :: {statuses[cfg['status']]}",
    f"Intended Audience :: {cfg['audience']}",
    f"Natural Language :: {cfg['language']}",
    'Operating System :: OS Independent',
    'Programming Language :: Python :: 3 :: Only',
    *(f'Programming Language :: Python :: {p}' for p in cfg['pythons'].split()),
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Typing :: Typed',
]

setup(
    name=lib, version=cfg['version'], keywords=cfg['keywords'].split(), classifiers=classifiers,
    author=cfg['author'], author_email=cfg['author_email'], license_expression=licenses[cfg['license']],
    long_description=(root/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=find_packages(include=[lib, f'{lib}.*']), package_data={lib: ['py.typed']},
    python_requires=f">={cfg['min_python']}", install_requires=cfg['requirements'].split(),
    extras_require={k.removesuffix('_requirements'): v.split() for k,v in cfg.items() if k.endswith('_requirements')},
    # the `nbdev` entry point lets the docs of other nbdev projects link to ours
    entry_points=dict(console_scripts=cfg['console_scripts'].split(), nbdev=[f'{lib}={lib}._modidx:d']),
)
