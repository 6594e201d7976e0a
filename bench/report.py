"The tables and the picture of what was measured"
import json
from pathlib import Path
import matplotlib.pyplot as plt
import pandas as pd

FILE = Path(__file__).parent/'results.json'

def results(): return json.loads(FILE.read_text(encoding='utf-8'))

def gpu_file(device): return FILE.with_name(f'results_{device}.json')
def on_gpus():
    "What was measured on GPUs: from the type of each device to its results"
    return {f.stem.removeprefix('results_'): json.loads(f.read_text(encoding='utf-8')) for f in sorted(FILE.parent.glob('results_*.json'))}

def about(res):
    "When, where and with which versions of other libraries: of fastaccum's own, the date says which"
    machine = ', '.join(f'{v} {k}' if k == 'cores' else v for k,v in res['machine'].items())
    return f"{res['date']}, {machine}. {_named(res['versions'])}.{_added(res.get('exact', ()))}"

def _named(versions): return ', '.join(f'{k} {v}' for k,v in versions.items() if k != 'fastaccum')

def _added(rows):
    "The cases that were measured later with other versions"
    added = {r['case']: r['measured'] for r in rows if 'measured' in r}
    return ''.join(f" {case[0].upper()}{case[1:]}: {o['date']}, {_named(o['versions'])}." for case,o in added.items())

def _table(rows, column, cell):
    "Peers in rows, what `column` says in columns"
    cells = {}
    for r in rows: cells.setdefault(column(r), {})[r['peer']] = cell(r)
    return pd.DataFrame(cells).reindex(dict.fromkeys(r['peer'] for r in rows)).fillna('')

def speed(rows, *models):
    "Processor time of a micro-batch, in us: the hand-written loop's own, and what the others take beyond it; of all `models`, or of some"
    rows = [r for r in rows if not models or r['model'] in models]
    def column(r): return r['model'],f"{r['precision']}, {r['n_acc']} a step"
    def cell(r):
        return (f"{r['cpu']['us']:.0f}" if r['peer'].startswith('hand')
                else '{over:+.0f} ({low:+.0f} to {high:+.0f})'.format(**r['cpu']))
    return _table(rows, column, cell)

def gpu(rows):
    "Peers in rows: how much they train in a second, and their peak of memory in GiB"
    def cell(r): return 'does not fit' if r['per_s'] is None else f"{r['per_s']:.0f} ({r['peak']/2**30:.2f} GiB)"
    return _table(rows, lambda r: (f"{r['model']}, {r['unit']}", r['precision']), cell)

def memory(rows):
    "Peaks in MiB, and the last of them in eighths of the first"
    def shown(r):
        peaks = {k: f'{v/2**20:.1f}' for k,v in r.items() if k[0].isdigit()}
        head = {'model': r['model'], 'precision': r['precision'], 'checkpointing': 'yes' if r['checkpointing'] else 'no'}
        return head | peaks | {'eighths': f'{eighths(r):.3f}'}
    return pd.DataFrame(map(shown, rows)).set_index('model').rename_axis(None)

def eighths(row): return 8*row['8x8 split']/row['1x64']

def syncs(rows):
    "Host syncs per micro-batch, and per step beyond these"
    def column(r): return r['precision'] + (', fused optimizer' if r['fused'] else '')
    return _table(rows, column, lambda r: f"{r['micro_batch']:g} and {r['step']:g}")

def exact(rows, cases=None):
    """How far the weights are off those of training in big batches; in all `cases`, or in the first five, the second,
    the third, the fourth or the others: a page has no room for more"""
    from fastaccum.conformance import CASES   # here, as `--against` starts processes that import this file first
    names = list(CASES)
    wanted = dict(first=names[:5], second=names[5:10], third=names[10:16], fourth=names[16:20], fifth=names[20:]).get(cases, names)
    return _table([r for r in rows if r['case'] in wanted], lambda r: r['case'], lambda r: str(result(r)))

def result(row):
    from fastaccum.conformance import Result
    return Result(**{k: v for k,v in row.items() if k not in ('peer', 'measured')})

def comm(rows):
    """What two ranks send for a step, in multiples of the gradients' size, and what each keeps between steps and takes
    at most, in bytes a weight"""
    def shown(r):
        return {'': r['peer'], 'messages': f"{r['calls']:g}", 'KB': f"{r['bytes']/1000:.0f}",
                'times the gradients': f"{r['bytes']/4/r['parameters']:.2f}",
                          'bytes kept a weight': f"{r['kept']/r['parameters']:.1f}",
                          'and at most': '' if r.get('peak') is None else f"{r['peak']:.1f}"}
    return pd.DataFrame(map(shown, rows)).set_index('')

def coupled(rows):
    "Time relative to the split batch, peak in MiB, and how far the gradient is off"
    def shown(r):
        off = 'exact' if r['off'] < 1e-6 else f"{r['off']:.0%}" if r['off'] > .01 else f"{r['off']:.0e}"
        return {'model': r['model'], 'loss over': r['peer'],
                'time': '{median:.2f} ({low:.2f} to {high:.2f})'.format(**r['time']), 'MiB': f"{r['peak']/2**20:.1f}",
                'gradient off by': off}
    return pd.DataFrame(map(shown, rows)).set_index(['model', 'loss over']).rename_axis([None, None])

def plot(rows, model, n_acc=8):
    "Overhead of each peer, a panel for each precision"
    rows = [r for r in rows if r['model'] == model and r['n_acc'] == n_acc and not r['peer'].startswith('hand')]
    names = list(dict.fromkeys(r['peer'] for r in rows))[::-1]
    fig,axs = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout='constrained')
    for ax,precision in zip(axs, ('fp32', 'bf16')):
        for r in rows:
            if r['precision'] != precision: continue
            o,i = r['cpu'],names.index(r['peer'])
            ax.barh(i, o['over'], xerr=[[o['over']-o['low']], [o['high']-o['over']]],
                    color='tab:blue' if 'fastaccum' in r['peer'] else 'silver')
            ax.text(max(o['over'], o['high'], 0), i, f"  {o['over']:.0f}", va='center')
        ax.set_title(f'{model}, {precision}')
        ax.set_yticks(range(len(names)), names)
        ax.margins(x=.12)
        ax.spines[['top', 'right']].set_visible(False)
    fig.supxlabel('us per micro-batch beyond the hand-written loop', size='medium')
    return fig
