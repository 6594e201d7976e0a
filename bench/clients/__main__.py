"""Run all clients, and the claims of other libraries, each in a process of its own, and write `bench/clients.json`.
`python -m bench.clients tsai timm` runs only these"""
import json, subprocess, sys
from datetime import date
from importlib import import_module, metadata
from pathlib import Path
from .. import report
from . import OUT, claims, results, run

# Package -> the module here with its `cases()`
CLIENTS = {'tsai': 'tsai', 'fasterai': 'fasterai', 'fastMONAI': 'fastmonai', 'self-supervised': 'self_supervised', 'timm': 'timm',
           'pytorch-metric-learning': 'metric_learning', 'segmentation-models-pytorch': 'segmentation',
           'monai': 'monai', 'kornia': 'kornia',
           'pytorch-optimizer': 'pytorch_optimizer', 'opacus': 'opacus', 'peft': 'peft',
           'SAM': 'sam', 'preference losses': 'preference', 'blurr': 'blurr'}         # ways of training, in cases of our own
# Libraries whose tests and examples were read; `of_` them has their claims. They need not be installed
READ = 'accelerate','lightning','transformers'

def version(package):
    try: return metadata.version(package)
    except metadata.PackageNotFoundError: return None

def one(package): # In a process of its own
    res = dict(package=package, version=version(package), date=str(date.today()), rows=[], error=None,
               beside={k: version(k) for k in ('fastai', 'torch')})
    try:
        module = import_module(f'bench.clients.of_{CLIENTS.get(package, package)}')
        cases = module.cases()
    except Exception as e:
        res['error'] = f'{type(e).__name__}: {e}'[:300]
        print(res['error'], flush=True)
        return res
    if package in READ:
        return res | dict(version=module.READ['version'], read=module.READ,
                          measured=report.results()['versions'][package], rows=claims.run(cases))
    return res | dict(rows=run(cases))

def merge(package, res): # Into the file, next to what others have written there
    found = {**(results() if OUT.exists() else {}), package: res}
    OUT.write_text(json.dumps({k: found[k] for k in sorted(found, key=[*CLIENTS, *READ].index)}, indent=1) + '\n')

if __name__ == '__main__':
    if sys.argv[1:2] == ['--one']:
        Path(sys.argv[3]).write_text(json.dumps(one(sys.argv[2])))
        sys.exit()
    for package in sys.argv[1:] or [*CLIENTS, *READ]:
        print(f'-- {package}', flush=True)
        part = OUT.with_suffix('.part')
        subprocess.run([sys.executable, '-W', 'ignore', '-m', 'bench.clients', '--one', package, str(part)], check=True)
        merge(package, json.loads(part.read_text()))
        part.unlink()
    bugs = [(k, r['case'], r['way']) for k,res in results().items() for r in res['rows'] if r['result'] == 'bug']
    for bug in bugs: print('BUG', *bug)
    sys.exit(bool(bugs))
