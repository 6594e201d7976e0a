"""Run all clients, each in a process of its own, and write `bench/clients.json`. `python -m bench.clients tsai timm` runs only these"""
import json, subprocess, sys
from datetime import date
from importlib import import_module, metadata
from pathlib import Path
from . import OUT, run

# Package -> the module here with its `cases()`
CLIENTS = {'tsai': 'tsai', 'fasterai': 'fasterai', 'fastMONAI': 'fastmonai', 'self-supervised': 'self_supervised', 'timm': 'timm',
           'pytorch-metric-learning': 'metric_learning', 'segmentation-models-pytorch': 'segmentation', 'monai': 'monai', 'kornia': 'kornia',
           'pytorch-optimizer': 'pytorch_optimizer'}

def version(package):
    try: return metadata.version(package)
    except metadata.PackageNotFoundError: return None

def one(package): # In a process of its own
    res = dict(package=package, version=version(package), date=str(date.today()), rows=[], error=None,
               beside={k: version(k) for k in ('fastai', 'torch')})
    try: cases = import_module(f'bench.clients.of_{CLIENTS[package]}').cases()
    except Exception as e:
        res['error'] = f'{type(e).__name__}: {e}'[:300]
        print(res['error'], flush=True)
    else: res['rows'] = run(cases)
    return res

if __name__ == '__main__':
    if sys.argv[1:2] == ['--one']:
        res = one(sys.argv[2])
        Path(sys.argv[3]).write_text(json.dumps(res))
        sys.exit()
    all_results = json.loads(OUT.read_text()) if OUT.exists() else {}
    for package in sys.argv[1:] or CLIENTS:
        print(f'-- {package}', flush=True)
        part = OUT.with_suffix('.part')
        subprocess.run([sys.executable, '-W', 'ignore', '-m', 'bench.clients', '--one', package, str(part)], check=True)
        all_results[package] = json.loads(part.read_text())
        part.unlink()
        OUT.write_text(json.dumps({k: all_results[k] for k in CLIENTS if k in all_results}, indent=1) + '\n')
    bugs = [(k, r['case'], r['way']) for k,res in all_results.items() for r in res['rows'] if r['result'] == 'bug']
    for bug in bugs: print('BUG', *bug)
    sys.exit(bool(bugs))
