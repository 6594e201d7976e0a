"""`python -m bench` measures all and writes results.json; with names (`python -m bench speed syncs`) only these, and writes nothing.
`python -m bench --cases 'own loss' detection` measures these cases of exactness, and puts their rows into results.json.
`python -m bench --device cuda` measures on a GPU and writes results_cuda.json.
`python -m bench --against PATH` times this code and that of another checkout in turn."""
import json, os, platform, sys, time, warnings
from contextlib import suppress
from datetime import date
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
import torch
from . import report

PARTS = dict(exact='Exactness: the distance to the weights of training in big batches',
             syncs='Host syncs: per micro-batch, and per step beyond these',
             memory='Memory: peak of live activations, MiB',
             speed='Speed: processor time per micro-batch, us, and beyond the hand-written loop',
             comm='Communication: per step of 8 micro-batches on each of two ranks',
             coupled='A loss over the whole batch: time relative to the split batch, peak of live activations in MiB, '
                     'error of the gradient')
PACKAGES = 'torch', 'fastai', 'fastcore', 'accelerate', 'lightning', 'transformers'
BY_HAND = 'mosaicml',    # Composer: see exact.py

def machine() -> dict:
    cpu,system = platform.processor() or platform.machine(),platform.platform(terse=True)
    with suppress(OSError): cpu = next((l.split(':')[1].strip() for l in open('/proc/cpuinfo') if l.startswith('model name')), cpu)
    with suppress(OSError): system = platform.freedesktop_os_release()['PRETTY_NAME']
    return dict(cpu=cpu, cores=os.cpu_count(), os=system)

def versions() -> dict:
    import fastaccum    # here, as `--against` starts processes that import this file first
    res = dict(python=platform.python_version())
    for p in (*PACKAGES, *BY_HAND):
        with suppress(PackageNotFoundError): res[p] = version(p)
    return dict(**res, fastaccum=fastaccum.__version__)

def measure(part):
    print(f'\n{PARTS[part]}', flush=True)
    start,rows = time.time(),import_module(f'.{part}', __package__).run()
    print(f'\n{getattr(report, part)(rows).to_string()}\n({time.time()-start:.0f} s)', flush=True)
    return rows

def on_gpu(device):
    "Speed and memory of real models on a GPU, and the overhead per micro-batch there; in a file of its own"
    from . import gpu, speed
    mod = getattr(torch, device, None)
    if mod is None or not mod.is_available(): sys.exit(f'This PyTorch ({torch.__version__}) sees no {device} device.')
    print(f'On {mod.get_device_name()}', flush=True)
    res = dict(date=date.today().isoformat(), machine=dict(machine(), gpu=mod.get_device_name()), versions=versions(),
               gpu=gpu.run(device), speed=speed.run(device))
    print(f"\n{report.gpu(res['gpu']).to_string()}\n\n{report.speed(res['speed']).to_string()}\n{report.about(res)}")
    file = report.gpu_file(device)
    file.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
    print(f'Wrote {os.path.relpath(file)}, which the page Benchmarks shows.')

def add_cases(*cases):
    "Cases of exactness that are new, or that a peer was not there for. Their rows have the date, and versions that have changed"
    from . import exact
    res,now = report.results(),versions()
    lacking = [k for k in (*PACKAGES, *BY_HAND) if k in res['versions'] and k not in now]
    if lacking: sys.exit(f"Install {', '.join(lacking)} first.")
    others = {k: now[k] for k in (*PACKAGES, *BY_HAND) if k in now and now[k] != res['versions'].get(k)}
    torch.set_num_threads(1)
    rows = exact.run(cases)
    if others: rows = [r | dict(measured=dict(date=date.today().isoformat(), versions=others)) for r in rows]
    print(report.exact(rows).to_string())
    write(res | dict(exact=exact.merged(res['exact'], rows)))

def write(res):
    report.FILE.write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
    print(f'Wrote {os.path.relpath(report.FILE)}, which the page Benchmarks is made of.')

def main(names=()):
    warnings.simplefilter('ignore')          # the libraries' own
    if list(names[:1]) == ['--device']: return on_gpu(names[1])
    if list(names[:1]) == ['--cases']: return add_cases(*names[1:])
    if list(names[:1]) == ['--against']: return import_module('.against', __package__).main(*names[1:])
    wrong = set(names)-set(PARTS)
    if wrong: sys.exit(f"{', '.join(wrong)}: the parts are {', '.join(PARTS)}.")
    torch.set_num_threads(1)
    res = dict(date=date.today().isoformat(), machine=machine(), versions=versions(), **{part: measure(part) for part in names or PARTS})
    print(f'\n{report.about(res)}')
    if not names: write(res)

if __name__ == '__main__': main(sys.argv[1:])
