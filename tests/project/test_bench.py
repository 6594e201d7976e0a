"The benchmarks: everybody trains the same, the arithmetic, and the promises that the results file must keep"
import json, math, os, re, shutil, subprocess, sys
from functools import partial
from pathlib import Path
import pandas as pd
import pytest
from reference import rel_err, weights
import torch
from fastai.basics import Callback
from fastai.test_utils import synth_learner
from torch import nn
from bench import (
    against, batchnorm, chunks, clients, contrastive, coupled, exact, gpu, growth, memory, peers, prices, report, shares,
    small_batches, speed, syncs, tokens, toolbox)
from bench.clients import data
from bench.__main__ import BY_HAND, PACKAGES, main
from bench.jobs import job
from bench.peers import PEERS
from fastaccum.conformance import CASES, check

pytestmark = pytest.mark.slow
ours = PEERS['split'],PEERS['whole']
results = report.results()
def is_ours(row): return row['peer'].startswith('fastaccum')

# -- Everybody trains the same -----------------------------------------------------------------------------------
def trained(peer, model='MLP 32-64-10', **kwargs):
    ticks,a_job = [],job(model, 24, 4, **kwargs).fresh(on_step=lambda: ticks.append(1))
    peer.run(a_job)
    assert len(ticks)==3
    return weights(a_job.model)

@pytest.mark.parametrize('precision,tol', [('fp32', 1e-6), ('bf16', 1e-3)])
def test_same_training(precision, tol):
    before,hand = weights(job('MLP 32-64-10', 24, 4).model),trained(PEERS['hand'], precision=precision)
    assert rel_err(hand, before) > 1e-3
    for p in ours: assert rel_err(trained(p, precision=precision), hand) < tol, p.label

def test_same_training_by_elements():
    for p in ours: assert rel_err(trained(p, 'MLP, squared error'), trained(PEERS['hand'], 'MLP, squared error')) < 1e-6, p.label

def test_same_training_of_padded_texts():
    "The hand-written loop weighs every micro-batch alike, so it is another training"
    hand,whole,split = (trained(PEERS[k], 'transformer, padded') for k in ('hand', 'whole', 'split'))
    assert rel_err(split, whole) < 1e-6 < 1e-5 < rel_err(whole, hand)

def test_fastai_trains_the_same(): assert rel_err(trained(PEERS['fastai']), trained(PEERS['hand'])) < 1e-6

def test_same_job():
    "A job is made anew for each fit: nobody trains what another has trained"
    a_job = job('MLP 32-64-10', 8, 4)
    before = weights(a_job.model)
    PEERS['whole'].run(a_job.fresh())
    assert weights(a_job.model).equal(before) and weights(job('MLP 32-64-10', 8, 4).model).equal(before)

# -- Speed -------------------------------------------------------------------------------------------------------
def test_overhead():
    "The median of the differences of each round, not the difference of the medians"
    times,hand = [dict(cpu=t) for t in (110, 300, 125, 160, 130)],[dict(cpu=t) for t in (100, 200, 120, 100, 90)]
    assert speed.overhead(times, hand, 'cpu')==dict(us=130, over=40, low=7.5, high=80)
    assert speed.overhead(times[:1], hand[:1], 'cpu')==dict(us=110, over=10, low=10, high=10)

def test_clock(monkeypatch):
    "From the first to the last step, per micro-batch; setting up does not count"
    now = [0.]
    def run(a_job):
        now[0] += 9
        for _ in range(3): now[0] += .004; a_job.on_step()
        now[0] += 9
    monkeypatch.setattr(speed, 'CLOCKS', dict(cpu=lambda: now[0]))
    peer = PEERS['hand']._replace(run=run)
    assert speed.time_fit(peer, job('MLP 32-64-10', 24, 4, n_acc=8), 3)['cpu']==pytest.approx(500)
    with pytest.raises(AssertionError, match='3 steps instead of 4'): speed.time_fit(peer, job('MLP 32-64-10', 24, 4), 4)

@pytest.mark.long
def test_against(tmp_path, monkeypatch):
    "Each process has its own code, which may be older than what the jobs are made with"
    shutil.copytree(against.HERE/'fastaccum', tmp_path/'fastaccum')
    (tmp_path/'fastaccum/conformance.py').unlink()
    with open(tmp_path/'fastaccum/accumulation/callback.py', 'a') as f: f.write("open('loaded', 'a').write('once ')")
    rows = against.run(tmp_path, [speed.Case('MLP, squared error', 2, 3, 3, peers=('hand', 'split', 'whole'))])
    assert rows.peer.tolist()==['split', 'whole'] and (tmp_path/'loaded').read_text()=='once '
    with pytest.raises(SystemExit, match='no fastaccum in'): main(['--against', str(tmp_path/'none')])

# -- Counted, so the same on every machine -----------------------------------------------------------------------
def test_memory():
    big,small = (memory.peak(f, job('conv net', 64//bs, bs, n_acc=64//bs), False)
                 for bs,f in (memory.RUNS[k] for k in ('1x64', '8x8 split')))
    assert abs(8*small/big-1) < .05

def test_checkpointing_saves_memory():
    bs,run = memory.RUNS['8x8 hand']
    plain,saved = (memory.peak(run, job('transformer', 1, bs, n_acc=1), c) for c in (False, True))
    assert saved < .6*plain

def test_gradients_do_not_count():
    a_job = job('MLP 32-64-10', 1, 1, n_acc=1)
    assert memory.peak(PEERS['hand'].run, a_job, False) < sum(p.nbytes for p in a_job.model.parameters())

def test_syncs():
    "The counter sees fastai's; ours has the one that the file has"
    assert syncs.syncs(PEERS['fastai'])==dict(micro_batch=1, step=0)
    for fused in (False, True): assert syncs.syncs(PEERS['split'], precision='fp16', fused=fused)==dict(micro_batch=0, step=1)

def test_exact():
    "The hand-written loop in the cases that it gets wrong, and fastai in those in which it takes no step"
    hand = {r.case: r for r in check(PEERS['hand'].run)}
    assert [k for k,r in hand.items() if r.exact]==[
        'any size', 'clipping', 'schedules', 'momentum', 'precision skip', 'fp16 clipping', 'validation']
    assert all(.1 < r.off < 2 for k,r in hand.items() if not r.exact and k != 'two ranks')
    theirs = check(PEERS['fastai'].run, ['remainder', 'two epochs', 'precision skip'])
    assert [(str(r), r.steps, r.expected) for r in theirs]==[('no step', 0, 1), ('33%', 3, 4), ('no fp16', 0, 2)]

@pytest.mark.parametrize('peer', ours, ids=lambda p: p.run.__name__)
def test_ours_are_exact(peer):
    # it sees loader batches
    for r in check(peer.run, [k for k in CASES if k != 'two ranks']):
        assert r.exact or (peer.run.__name__, r.case) in [('whole', 'BatchNorm'), ('whole', 'dropout')], (r.case, r.off, r.error)

def test_two_ranks():
    "In a process of its own: this one may have computed gradients in threads, which its forks would lack"
    code = """if True:
        import warnings; warnings.simplefilter('ignore')
        from bench.peers import PEERS
        from fastaccum.conformance import check
        print([str(check(PEERS[k].run, ['two ranks'])[0]) for k in ('split', 'hand')])"""
    env = os.environ | dict(PYTHONPATH=str(Path(__file__).resolve().parents[2]))
    res = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=240)
    split,hand = eval(res.stdout.splitlines()[-1])
    assert split=='exact' and re.fullmatch(r'\d\d%', hand)

def test_failing_peer_is_no_figure(monkeypatch):
    def fails(job): raise RuntimeError('of its own')
    monkeypatch.setattr(exact, 'runs', lambda: {'a peer': fails})
    with pytest.raises(RuntimeError, match='a peer, remainder(.|\\n)*of its own'): exact.run(['remainder'])

def test_coupled():
    "The loss of the whole batch, in less memory than it; split it is another one"
    off = {k: coupled.off(f, 'transformer') for k,f in coupled.RUNS.items()}
    assert off['batch at once']==0 and off['split'] > .1 and off['split, coupled=True'] < 1e-12
    peaks = [memory.peak(coupled.RUNS[k], coupled.make('transformer'), False) for k in ('batch at once', 'split, coupled=True')]
    assert peaks[1] < peaks[0]/2
    rows = coupled.times('conv net', rounds=1, steps=2)
    assert list(rows)==list(coupled.RUNS) and rows['split']['median']==1 and all(r['median'] > 0 for r in rows.values())

# -- The results file --------------------------------------------------------------------------------------------
def test_results_are_of_all():
    names = [k for k in results['versions'] if k not in BY_HAND]
    assert names==['python', *PACKAGES, 'fastaccum'] and all(results['versions'].values())
    assert set(results['machine'])=={'cpu', 'cores', 'os'} and all(results['machine'].values())
    def key(r): return r['model'],r['precision'],r['n_acc'],r['peer']
    assert {key(r) for r in results['speed']}=={(c.model, c.precision, c.n_acc, PEERS[k].label) for c in speed.CASES
                                                for k in c.peers if c.precision in PEERS[k].precisions}
    assert {r['peer'] for r in results['exact']} > {p.label for p in PEERS.values()}
    assert {r['peer'] for r in results['syncs']}=={p.label for p in PEERS.values()}
    assert {(r['precision'], r['fused']) for r in filter(is_ours, results['syncs'])}=={
        ('fp32', False), ('bf16', False), ('fp16', False), ('fp16', True)}
    peers_tried = {r['peer'] for r in results['exact']}
    assert {(r['peer'], r['case']) for r in results['exact']}=={(peer, case) for peer in peers_tried for case in CASES}
    assert [(r['model'], r['peer']) for r in results['coupled']]==[(m, k) for m in coupled.MODELS for k in coupled.RUNS]

def test_results_of_the_tutorials():
    assert [(r['way'], len(r['accuracy'])) for r in batchnorm.results()['rows']]==[(k, len(batchnorm.SEEDS)) for k in batchnorm.WAYS]
    sizes = {(r['norm'], r['k'], len(r['accuracy'])) for r in batchnorm.results()['sizes']['rows']}
    assert sizes=={(norm, k, len(batchnorm.SEEDS)) for norm in ('batch','head') for k in batchnorm.SIZES}
    runs = {(r['way'], r['seed']) for r in contrastive.results()['rows']}
    assert runs=={*((k, s) for k in ('not trained', *contrastive.WAYS) for s in contrastive.SEEDS), ('pixels', 0)}
    assert {(r['lengths'], r['way']) for r in tokens.results()['rows']}=={(k, way) for k in ('wide', 'narrow') for way in tokens.WAYS}

def test_results_of_small_batches():
    "Every size is tuned, sees the same items, and its best rate is no end of its grid; what it costs is of all cases"
    runs = pd.DataFrame(small_batches.results()['rows'])
    assert [k for k,_ in runs.groupby(['task','size','how'])]==sorted(
        (t, n, how) for t,sizes in small_batches.SIZES.items() for n in sizes for how in small_batches.HOW)
    assert (runs.groupby('task')['items'].nunique()==1).all()
    for _,of in runs.groupby(['task','size','how']):
        grid,(best,) = of[of.seed.isin(small_batches.TUNING)],of[of.seed.isin(small_batches.SEEDS)].times.unique()
        assert {*grid.times} >= {*small_batches.GRID} and len(of)==len(small_batches.SEEDS) + len(small_batches.TUNING)*grid.times.nunique()
        assert min(grid.times) < best < max(grid.times)
    assert [(r['task'], r['bs'], r['size'])
            for r in small_batches.results()['costs']]==[(t, *c) for t in small_batches.TASKS
                for c in small_batches.cost_cases(t)]

@pytest.mark.parametrize('best', [1/16, 1, 8])
def test_tuning_goes_on_at_the_ends(monkeypatch, best):
    "Beyond the grid until the best rate is within it; the score is of seeds that did not choose it"
    monkeypatch.setattr(small_batches, 'score',
                        lambda name, size, how, times, seed: dict(
                            times=times, seed=seed, score=abs(math.log2(times/best)) + seed/100, seconds=0))
    rows = small_batches.tuned(('characters', 4, 'same half-life in items'))
    tried = {r['times'] for r in rows if r['seed'] in small_batches.TUNING}
    assert tried=={*small_batches.GRID} | {1/16: {1/8, 1/16, 1/32}, 1: set(), 8: {8, 16}}[best]
    assert [(r['times'], r['seed']) for r in rows[-len(small_batches.SEEDS):]]==[(best, s) for s in small_batches.SEEDS]

def test_small_batches_take_the_same_items(monkeypatch):
    "In loader batches, or accumulated; a step takes the memory of a loader batch"
    monkeypatch.setitem(small_batches.TASKS, 'digits', small_batches.TASKS['digits']._replace(n_epoch=1))
    runs = [small_batches.score('digits', n, 'same half-life in items', 1, 0) for n in (8, 64, 256)]
    assert [(r['steps'], r['items']) for r in runs]==[(180, 1437), (23, 1437), (6, 1437)]
    one,small,accumulated,large = (small_batches.peak('characters', *c) for c in ((1, 1), (4, 4), (4, 64), (64, 64)))
    assert one < .5*small and accumulated < 1.05*small and small < .2*large

def test_results_in_chunks():
    "All outputs at once take more memory than chunks of them, and the gradients are the same"
    rows = {r['name']: r for r in chunks.results()['rows']}
    assert len(rows) > 3 and all(r['off'] < 1e-5 for r in rows.values())
    assert rows['ChunkedLoss, 8 chunks']['peak'] < .3*rows['all outputs at once']['peak']

def test_ranks_of_different_speeds():
    "A step takes what the speeds allow, to 10%"
    rows = shares.results()['rows']
    assert [tuple(r['ms']) for r in rows]==list(shares.MS)
    for r,gain in zip(rows, shares.table(rows)['the speeds allow']):
        assert r['even']/r['auto'] > .9*float(gain), r
        assert sum(r['row'])==shares.BS and abs(r['row'][0]/r['row'][1] - r['ms'][1]/r['ms'][0]) < .15*r['ms'][1]/r['ms'][0], r

def test_what_the_same_run_costs():
    "As the pages say: what needs nothing pays nothing, masks take little, and only BatchNorm keeps the activations of all items"
    rows = {r['model']: r for r in prices.results()['rows']}
    assert [*rows] == [*prices.MODELS]
    times = {k: r['times']['micro-batches'][1] for k,r in rows.items()}
    assert times['transformer, without dropout'] < 1.1 and max(times.values()) < 1.65
    for k in ('MLP', 'transformer', 'LSTM'): assert times[k] < 1.35
    for k,r in rows.items():
        waits = 'BatchNorm' in prices.MODELS[k].takes
        assert (r['peaks']['exact=True'] > 1.2*r['peaks']['micro-batches']) == waits, k

def test_prices_are_measured():
    found = prices.row('MLP', bs=16, size=4, n_steps=2, rounds=2)
    assert all(low > 0 for low,_,_ in found['times'].values()) and [*found['peaks']] and min(found['peaks'].values()) > 0

def test_toolbox():
    "The file has all tools; they are measured, and what saves memory does"
    rows = {tuple(r['names']): r for r in toolbox.results()['rows']}
    assert set(rows)=={(), *(p for p in toolbox.pairs() if 'fp16' not in p)}, 'run `python -m bench.toolbox` again'
    for k in ('split', 'checkpointing', '... selective', 'bf16'): assert rows[k,k]['peak'] < .8*rows[()]['peak']
    assert rows['split','checkpointing']['peak'] < .1*rows[()]['peak']
    plain,both = (toolbox.measure(names, toolbox.transformer, partial(toolbox.sequences, length=48), 8, n_steps=1)
                  for names in ((), ('split', 'checkpointing')))
    assert both['s'] > 0 and both['peak'] < .8*plain['peak']

def test_tables():
    def row(peer, case, off, steps=1, note=''): return dict(peer=peer, case=case, off=off, steps=steps, expected=1, note=note)
    table = report.exact([row('a', 'tokens', 1e-7), row('a', 'clipping', 1., 0), row('b', 'tokens', 2e-6),
                          row('b', 'clipping', None, 0, 'no clipping')])
    assert table.to_dict('list')=={'tokens': ['exact', '2.0e-06'], 'clipping': ['no step', 'no clipping']}
    table = report.speed(results['speed'], 'MLP 32-64-10')
    assert table.shape==(7, 4) and (table.iloc[3:, 2:]=='').all(axis=None)   # these do not take part in the second case

def test_about():
    "Cases that were measured later with other versions have these, and their date"
    res = dict(date='2026-01-01', machine=dict(cpu='x', cores=2), versions=dict(torch='1', fastai='2', fastaccum='0'),
               exact=[dict(case='tokens'), dict(case='pairs', measured=dict(date='2026-02-02', versions=dict(torch='3')))])
    assert report.about(res)=='2026-01-01, x, 2 cores. torch 1, fastai 2. Pairs: 2026-02-02, torch 3.'

def test_merged():
    "New cases come to their places, and what was measured again takes the place of what was there"
    def row(peer, case, off=0.): return dict(peer=peer, case=case, off=off)
    rows = [row('a', 'ragged end'), row('a', 'BatchNorm', None), row('b', 'ragged end')]
    new = [row('a', 'tokens'), row('a', 'BatchNorm', .5), row('c', 'tokens')]
    assert exact.merged(rows, new) == [row('a', 'ragged end'), row('a', 'tokens'), row('a', 'BatchNorm', .5), row('b', 'ragged end'),
                                       row('c', 'tokens')]

# -- On a GPU ----------------------------------------------------------------------------------------------------
def test_gpu_runs():
    "Everybody trains the effective batch in as many steps; what does not fit is left empty"
    small = {'MLP': gpu.Model(lambda: job('MLP 32-64-10', 1, 1).model, lambda n: job('MLP 32-64-10', 1, n).batches[0], 4, 4, 'items/s', 2)}
    rows = gpu.run('cpu', small, ('fp32', 'bf16'), n_steps=3)
    assert {r['peer']
            for r in rows if r['precision']=='fp32'} >= {'big batch', 'hand-written loop',
                'fastai GradientAccumulation', "fastaccum, 'auto'"}
    assert all(r['per_s'] > 0 and r['peak'] > 0 and r['unit']=='items/s' for r in rows)
    def full(job): raise torch.OutOfMemoryError('full')
    assert gpu.measure(full, gpu.make_job(small['MLP'], 'fp32', 'cpu', 3)) is None
    assert 'does not fit' in report.gpu([dict(rows[0], per_s=None)]).to_string()

@pytest.mark.parametrize('precision,tol', [('fp32', 1e-6), ('bf16', 1e-3)])
def test_gpu_runs_train_the_same(precision, tol):
    small = gpu.Model(lambda: job('MLP 32-64-10', 1, 1).model, lambda n: job('MLP 32-64-10', 1, n).batches[0], 4, 4, 'items/s')
    def trained(run):
        a_job = gpu.make_job(small, precision, 'cpu', 3).fresh(lr=.1)
        run(a_job)
        return weights(a_job.model)
    hand = trained(peers.hand)
    for label in ('fastaccum, whole loader batches', 'fastaccum, loader batches split', "fastaccum, 'auto'"):
        assert rel_err(trained(gpu.RUNS[label][0]), hand) < tol, label

# -- Clients of fastai -------------------------------------------------------------------------------------------
def client_case(loss_func=nn.MSELoss(), **kwargs):
    x,y = data.numbers(32, 6),data.numbers(32, 4, seed=1)
    return clients.Case('a case', data.make(x, y, lambda: nn.Linear(6, 4), lambda: loss_func), epochs=1, **kwargs)

def spread(pred, y): return (pred-y).std()
def sixteen(pred, y): return (pred-y)[torch.arange(16)].pow(2).mean()
def fails(pred, y): raise RuntimeError('not this one')

class Biased(Callback):
    "Moves the weights after each micro-batch"
    def after_loss(self): self.model.bias.data.mul_(1.1)

@pytest.mark.parametrize('loss_func,kwargs,expected', [
    (nn.MSELoss(), {}, 'exact'), (spread, {}, 'told'), (spread, dict(acc=dict(coupled=True)), 'exact'),
    (sixteen, {}, 'refused'), (fails, {}, 'fails'),
    (nn.MSELoss(), dict(cbs=lambda: [Biased()]), 'told'), (nn.MSELoss(), dict(acc=dict(weight=lambda learn: 1)), 'bug')])
def test_results_of_clients(loss_func, kwargs, expected):
    what,off,said = clients.result(client_case(loss_func, **kwargs), 'micro-batches')
    assert what==expected
    assert off is None if what in ('refused', 'fails') else off < 1e-5 if what=='exact' else off > clients.EXACT
    assert (what=='told')==any(w in said for w in ('std','spread','changed weights'))
    assert ('In micro-batch' in said)==(what=='refused')

def test_rounded():
    "The yardstick draws from random numbers of its own: else all that draws at random would look as far off as it likes"
    learn = synth_learner()
    learn.add_cb(rounded := clients.Rounded())
    rounded.before_fit()
    learn.model.a.grad = torch.ones(1)
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    rounded.before_step()
    assert torch.equal(torch.rand(3), want) and 0 < abs(learn.model.a.grad-1) < 1e-6

def test_no_client_has_a_bug():
    rows = [r for o in clients.results().values() for r in o['rows']]
    assert len(rows) > 200 and not [r for r in rows if r['result']=='bug']
    assert {r['result'] for r in rows} <= {'exact', 'told', 'refused', 'fails'}
    assert all(r['off'] < clients.EXACT or 'rounding error' in r['said'] for r in rows if r['result']=='exact')

# -- The pages show the results that are in the file -------------------------------------------------------------
nbs = Path(__file__).resolve().parents[2]/'nbs'
made = r"(?:report|toolbox|chunks|growth)\.(?:speed|memory|exact|syncs|comm|coupled|(?:\w+_)?table)\([^()]*\)"

def outputs_of(page):
    "The last line of each cell that makes a table of the results, its html, and all markdown of the page"
    cells = json.loads((nbs/page).read_text(encoding='utf-8'))['cells']
    def shown(cell, kind): return ''.join(''.join(o['data'].get(kind, '')) for o in cell.get('outputs', []) if 'data' in o)
    calls = [(re.search(made, ''.join(c['source']).splitlines()[-1]), shown(c, 'text/html')) for c in cells if c['source']]
    return [(call[0], html) for call,html in calls if call and html],'\n'.join(shown(c, 'text/markdown') for c in cells)

def in_cells(html): return re.findall(r'<t[hd][^>]*>(.*?)</t[hd]>', html)

@pytest.mark.parametrize('page,n', [('benchmarks.ipynb', 10), ('tutorials/how_exact.ipynb', 5)])
def test_pages_show_these_results(page, n):
    "Else: run the page again"
    tables,words = outputs_of(page)
    names = dict(report=report, toolbox=toolbox, chunks=chunks, res=results, tools=toolbox.results(), of_chunks=chunks.results(),
                 growth=growth, grown=growth.results())
    assert len(tables)==n and f'Measured: {report.about(results)}' in words
    for call,html in tables: assert in_cells(html)==in_cells(eval(call, names)._repr_html_()), call
