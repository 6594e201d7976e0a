"""The same training over two processes: ranks.py trains, once over two ranks and once in one process; here the results are compared"""
import os, subprocess, sys
from pathlib import Path
import fresh
import pytest, torch
from fastaccum.parallel.ranks import Head
from quick import quickly

script = Path(__file__).with_name('ranks.py')
torchrun = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--rdzv-backend', 'c10d',
            '--rdzv-endpoint', '127.0.0.1:0', '--local-addr', '127.0.0.1']
env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(script.parents[2])}

def start(*args, more={}, **kwargs):
    return checked(subprocess.run([*map(str, args)], env={**env, **more}, capture_output=True, text=True, timeout=600, **kwargs))

def checked(r):
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-6000:]
    return r.stdout

quick = 'ragged',      # with QUICK
pytestmark = pytest.mark.slow

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "`results(name)`: of one process, rank 0 and rank 1"
    one,two = tmp_path_factory.mktemp('one'),tmp_path_factory.mktemp('two')
    names = quick if 'QUICK' in os.environ else ()
    if names: checked(fresh.run(script, one, *names, env={**env, 'TWO': str(two)}))   # the ranks are forks, which need not import all
    else:
        checked(fresh.run(script, one, env=env))
        start(*torchrun, script, two, more=dict(OTHER=str(one)))
        checked(fresh.run(script, one, 'goes_on', env={**env, 'OTHER': str(two)}))
    return lambda name: [torch.load(f, weights_only=False) for f in (one/f'{name}_0.pt', two/f'{name}_0.pt', two/f'{name}_1.pt')]

def close(a, b, eps=1e-6):
    a,b = (torch.as_tensor(o, dtype=torch.float64).flatten() for o in (a, b))
    assert a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=eps, atol=eps)

def same_run(one, a, b, eps=1e-6):
    "Equal to one process; the ranks to the last bit"
    assert torch.equal(a['weights'], b['weights']) and torch.equal(a['losses'], b['losses'])
    assert a['lrs'] == b['lrs'] and a['epochs'] == b['epochs'] == one['epochs']
    close(a['weights'], one['weights'], eps)
    close(a['losses'], one['losses'], eps)
    close(a['lrs'], one['lrs'], 1e-12)
    assert len(a['losses']) > 1

# values: epoch, train_loss, valid_loss, ...
def same_values(one, a, b, eps=1e-6):
    for va,vb in zip(a['values'], b['values']): assert va[1:] == vb[1:]
    close([list(v) for v in a['values']], [list(v) for v in one['values']], eps)

equal = ['ragged', 'rank_without_items', 'more_ranks_than_items', 'class_weights', 'label_smoothing', 'tokens',
         'chunked', 'chunked_measured', 'chunked_early', 'unit_tokens', 'rows_by_length', 'positives', 'no_positives', 'sum_loss',
         'micro_batches', 'per_loader_batch', 'overlap', 'one_cycle',
         'drop', 'carry', 'schedule', 'layer_groups', 'unused', 'fine_tune', 'early_stopping', 'several_fits',
         'short_epoch', 'after_an_exception', 'distrib_ctx', 'lr_find',
         'out_of_memory_forward_first', 'out_of_memory_forward_last', 'out_of_memory_backward_first',
         'out_of_memory_backward_last', 'cancelled_step', 'fp16_without_overflow', 'coupled', 'coupled_every_batch', 'coupled_stacked',
         'coupled_single']
@pytest.mark.parametrize('name', quickly(quick, equal))
def test_equals_one_process(results, name):
    runs = results(name)
    same_run(*runs, eps=3e-3 if 'fp16' in name else 1e-6)

def test_tokens_of_all_ranks(results):
    one,a,b = results('unit_tokens')
    assert a['rows'] == b['rows'] == one['rows'] and len({tuple(row) for row in one['rows']}) > 3

@pytest.mark.parametrize('name', quickly(quick, ['ragged', 'rank_without_items', 'drop', 'early_stopping', 'distrib_ctx']))
def test_validation_loss_equals_one_process(results, name): same_values(*results(name))

def test_adam_in_float64(results): same_run(*results('adam64'), eps=1e-12)

def test_unused_parameters_stay_without_gradient(results):
    for r in results('unused'): assert r['none'] == [False]*4 + [True]*2

def test_two_messages_per_step(results):
    _,a,b = results('traffic')
    for r in (a, b):
        assert {calls for rows in (r['few'], r['many']) for calls,_ in rows} == {2}
        assert {size for rows in (r['few'], r['many']) for _,size in rows} == {r['few'][0][1]}  # whatever the number of micro-batches
        assert r['limit']-8*len(Head._fields) < r['few'][0][1] <= r['limit']

@pytest.mark.parametrize('name', ['fp16', 'shard_fp16_overflow'])
def test_overflow_on_one_rank_skips_on_all(results, name):
    _,a,b = results(name)
    assert a['history'] == b['history'] and sum(a['history']['skipped']) == 1
    assert torch.equal(a['weights'], b['weights'])

def test_metrics(results):
    one,a,b = results('metrics')
    same_run(one, a, b)
    same_values(one, a, b)
    close(a['rows'], one['rows'])
    assert list(a['items']) == list(b['items']) == list(one['items'])
    assert a['again'] == b['again'] and a['of_train'] == b['of_train']
    close(a['again'], one['again'])
    close(a['of_train'], one['of_train'])
    assert a['csv'] and not b['csv']

def test_weighted_validation_is_equal_on_the_ranks(results):
    _,a,b = results('weighted_validation')
    assert [v[1:] for v in a['values']] == [v[1:] for v in b['values']]

def test_predictions_are_complete_and_in_order(results):
    one,a,b = results('predictions')
    x,y = one['data']
    for r in (a, b):
        assert torch.equal(r['inputs'], x[97:]) and torch.equal(r['targets'], y[97:])
        for k in ('preds','losses','of_train','few'): close(r[k], one[k])
        assert r['sizes'] == [1, 2, 3]

def test_lr_find_leaves_all_as_it_was(results):
    one,a,b = results('lr_find')
    for r in (one, a, b): assert r['restored'] and r['left'] == 0
    assert a['found'] == b['found']
    close(a['found'], one['found'])

def test_batchnorm_statistics_are_averaged(results):
    one,a,b = results('batchnorm')
    assert torch.equal(a['weights'], b['weights'])
    for x,y,z in zip(a['buffers'], b['buffers'], one['buffers']):
        assert torch.equal(x, y)
        close(x, z, .3)                            # its micro-batches are smaller than those of one process
    assert [v[1:] for v in a['values']] == [v[1:] for v in b['values']]

def test_a_rank_that_ends_the_fit_ends_it_for_all(results):
    _,a,b = results('cancelled_fit')
    assert torch.equal(a['first']['weights'], b['first']['weights']) and torch.equal(a['weights'], b['weights'])
    assert len(a['first']['losses']) == len(b['first']['losses']) == 3  # 7 batches of 16, 3 to a step, and one at the end of the epoch
    assert len(a['losses']) == 3

@pytest.mark.parametrize('name', ['cancelled_batch', 'cancelled_closing_batch', 'cancelled_micro_batch', 'cancelled_short_batch'])
def test_a_rank_may_leave_out_a_batch(results, name):
    one,a,b = results(name)
    assert torch.equal(a['weights'], b['weights']) and len(a['losses']) == len(b['losses']) == len(one['losses'])
    assert not torch.allclose(a['weights'], one['weights'], atol=1e-6)

@pytest.mark.parametrize('name,left_out', [('cancelled_micro_batch', 4), ('cancelled_short_batch', 2)])
def test_ranks_count_alike_what_one_of_them_leaves_out(results, name, left_out):
    one,a,b = results(name)
    assert a['items'] == b['items'] and len(a['items']) == len(one['items'])
    assert sum(one['items'])-sum(a['items']) == left_out

def test_carried_items_count(results):
    one,a,b = results('carried_items')
    assert a['items'] == b['items'] == one['items']

def test_ranks_that_part_are_an_error(results):
    for r in results('cancelled_epoch')[1:]: assert 'The ranks have parted' in r['error']

def test_all_is_restored(results):
    one,*ranks = results('after_an_exception')
    assert all(r['restored'] for r in ranks)
    for r in results('distrib_ctx'):
        assert r['ends'] == ('Sequential', ['TrainEvalCallback', 'Recorder', 'CastToTensor', 'GradientAccumulation'],
                             True)
    for r in results('distrib_ctx_exception')[1:]:
        assert (r['model'], r['loaders']) == ('Sequential', ['TfmdDL', 'TfmdDL'])
        assert r['cbs'] == ['TrainEvalCallback', 'Recorder', 'CastToTensor', 'GradientAccumulation']

def test_local_sgd_sends_weights_once_a_period(results):
    _,a,b = results('local_traffic')
    assert a == b
    assert [calls for calls,_ in a[1]] == [2]*16
    assert [calls for calls,_ in a[4]] == [0, 0, 0, 2]*4
    # a head, and the weights
    assert 0 < sum(size for _,size in a[4])*4 == sum(size for _,size in a[1]) == 16*(a['size'] + 8*len(Head._fields))

@pytest.mark.parametrize('name', ['local_batchnorm', 'local_fp16', 'local_cancelled'])
def test_local_sgd_ends_with_equal_weights(results, name):
    one,a,b = results(name)
    assert torch.equal(a['weights'], b['weights']) and not torch.equal(a['losses'], b['losses'])
    assert [v[1:] for v in a['values']] == [v[1:] for v in b['values']]
    assert not torch.allclose(a['weights'], one['weights'], atol=1e-6)
    if name == 'local_fp16': assert (a['skipped'], b['skipped']) == (0, 1)
    for x,y in zip(a.get('buffers', []), b.get('buffers', [])): assert torch.equal(x, y)

def identical(a, b):
    "To the last bit"
    if isinstance(a, torch.Tensor): assert torch.equal(a, b)
    elif isinstance(a, (list,tuple,dict)):
        assert len(a) == len(b)
        for k in a if isinstance(a, dict) else range(len(a)): identical(a[k], b[k])
    else: assert a == b or a != a and b != b

resumed = ['checkpoint', 'checkpoint_of_torch_loader', 'checkpoint_at_signal', 'checkpoint_in_background',
           'checkpoint_of_a_finished_fit', 'checkpoint_of_shards']
@pytest.mark.parametrize('name', resumed)
def test_interrupted_and_resumed(results, name):
    "Each rank has what it would have had: weights, optimizer, BatchNorm's statistics, random numbers, metrics, what a callback counts"
    _,a,b = runs = results(name)
    for r in runs[1:] if name == 'checkpoint_at_signal' else runs: identical(*r['ends'])
    assert torch.equal(a['ends'][1]['weights'], b['ends'][1]['weights'])
    assert a['interrupted'] == b['interrupted'] < len(a['ends'][1]['losses']) and a['began'] == b['began'] != (0, 0)

def test_one_file_for_all_ranks(results):
    one,a,b = results('checkpoint')
    assert a['files'] == b['files'] == ['cut2-finished'] and one['files'] == ['cut1-finished']
    assert a['ends'][1]['sum'] != b['ends'][1]['sum'] and not torch.equal(a['ends'][1]['random'][0], b['ends'][1]['random'][0])

def test_rank_0_has_the_clock(results):
    "It asks at each step, and what it asks for is done after the next"
    _,a,b = results('checkpoint_by_the_clock')
    assert a['saved'] == b['saved'] == [2, 4, 6, 8, 10, 12]

@pytest.mark.parametrize('kind', ['parallel', 'sharded'])
def test_another_number_of_ranks_goes_on(results, kind):
    whole,a,b = (r[kind] for r in results('stopped'))
    from_two,*from_one = (r[kind] for r in results('goes_on'))
    for r in (a, b, from_two, *from_one):
        close(r['weights'], whole['weights'], 1e-9)
        close(r['losses'], whole['losses'])
        assert r['lrs'] == whole['lrs'] and r['epochs'] == whole['epochs']
    for r in (from_two, *from_one): assert r['began'] == (1, 3)
    assert torch.equal(from_one[0]['weights'], from_one[1]['weights'])

@pytest.mark.parametrize('time', range(5 if os.environ.get('ALL_CASES') else 1))
def test_torchrun_starts_it_anew(results, tmp_path, time):
    "A rank kills itself; in the second attempt one fails when all is trained, which is not trained again"
    checked(fresh.run(script, tmp_path, 'elastic', env={**env, 'RESTARTS': '2'}))
    assert sorted(f.name for f in tmp_path.glob('attempt*')) == [f'attempt_{i}_{r}' for i in range(3) for r in range(2)]
    ends = [torch.load(tmp_path/f'elastic_{r}.pt', weights_only=False)['ends'][0] for r in range(2)]
    for end,r in zip(ends, results('checkpoint')[1:]):
        identical(end['weights'], r['ends'][0]['weights']); identical(end['losses'], r['ends'][0]['losses'])
    assert [f.name for f in (tmp_path/'models').iterdir()] == ['elastic-finished']

@pytest.mark.parametrize('name', ['noise', 'noise_one_micro_batch', 'noise_class_weights', 'noise_overlap', 'noise_fp16'])
def test_noise_is_that_of_one_process(results, name):
    "Which has the same micro-batches"
    one,a,b = results(name)
    assert a['estimate'] == b['estimate'] and a['estimate'][-1] >= 3
    for k in ('x','y'): close(a[k], one[k], 2e-2 if 'fp16' in name else 1e-4)
    same_run(one, a, b, eps=3e-3 if 'fp16' in name else 1e-6)

def test_adaptive_sizes_are_those_of_one_process(results):
    one,a,b = results('adaptive')
    same_run(one, a, b)
    assert a['changes'] == b['changes'] == one['changes'] and len(a['changes']) > 1

def test_only_rank_0_writes_and_shows(results):
    _,a,b = results('loggers')
    assert b == dict(out='', csv=False, tensorboard=0, wandb=0, rows=[], scalars={})
    assert a['csv'] and a['tensorboard'] and a['wandb']
    assert 'epoch' in a['out'] and len(a['out']) > 100

def test_what_rank_0_logs_is_of_the_whole_step(results):
    "W&B's rows and TensorBoard's scalars, norms of gradients, items and metrics included, are those of one process"
    one,a,_ = results('loggers')
    times = {'_timestamp', '_runtime', 'train_samples_per_sec'}
    assert len(a['rows']) == len(one['rows']) == 6 and {'grad_norm', 'items', 'raw_loss', 'lr_0'} <= a['rows'][0].keys()
    for x,y in zip(a['rows'], one['rows']):
        assert x.keys() == y.keys()
        for k in x.keys()-times: close(x[k], y[k])
    assert a['scalars'].keys() == one['scalars'].keys() >= {'loss', 'grad_norm', 'items', 'train_loss', 'valid_loss'}
    for k,v in a['scalars'].items(): close(v, one['scalars'][k])

sharded = dict(shard_adam=1e-5, shard_adamw_of_torch=1e-5, shard_each_batch=1e-6, shard_micro_batches=1e-6,
               shard_class_weights=1e-6, shard_sum_loss=1e-6, shard_offload=1e-6, shard_fp16=3e-3, shard_lr_find=1e-5)
@pytest.mark.parametrize('name', sharded)
def test_sharded_equals_one_process(results, name):
    one,a,b = results(name)
    same_run(one, a, b, eps=sharded[name])
    assert [v[1:] for v in a['values']] == [v[1:] for v in b['values']]
    if name == 'shard_fp16': assert a['history'] == b['history']

def test_sharded_models_are_saved_whole(results):
    one,a,b = results('shard_saved')
    assert a['kinds'] == {'Tensor'}
    for x,y,z in zip(one['weights'], a['weights'], b['weights']):
        assert torch.equal(y, z)
        close(y, x, 1e-5)

def test_traffic_of_sharding(results):
    "One step of 8 micro-batches: how often the weights and gradients are sent"
    _,a,b = results('shard_traffic')
    times = lambda r,sync,op: round(r[sync][op]/r['size'])
    for r in (a, b):
        assert [times(r, s, 'reduce_scatter') for s in ('every','last','keep')] == [8, 1, 1]
        assert [times(r, s, 'allgather') for s in ('every','last','keep')] == [16, 16, 1]

def test_sharded_refused(results):
    says = dict(auto="micro_batch_size='auto'", uneven='different numbers of micro-batches', carry="remainder='carry'",
                late='has an optimizer', chunks='FullyShard no longer has its weights')
    for r in results('shard_refused')[1:]:
        for k,text in says.items(): assert text in r[k], k

@pytest.fixture(scope='module')
def failures(tmp_path_factory):
    folder = tmp_path_factory.mktemp('failures')
    checked(fresh.run(script, folder, 'failures', env=env))
    return torch.load(folder/'failures_0.pt')

@pytest.mark.parametrize('failing', [0, 1])
def test_the_others_say_which_rank_failed_and_why(failures, failing):
    ranks = failures[f'rank_{failing}_fails']
    assert [code for code,_ in ranks] == [1, 1]
    assert f'Stopped, as rank {failing} failed: ValueError: ' in ranks[1-failing][1] and 'boom' in ranks[1-failing][1]
    assert 'ValueError: ' in ranks[failing][1] and 'Stopped' not in ranks[failing][1]

def test_a_frozen_rank_is_noticed(failures):
    (code,error),(killed,_) = failures['rank_1_freezes']
    assert 'Stopped, as rank 1 is gone, or did not answer in time' in error and code == 1 and killed == -9

def test_a_killed_rank_is_noticed(failures):
    (code,error),(killed,_) = failures['rank_1_is_killed']
    assert 'Stopped, as rank 1 is gone, or did not answer in time' in error and code == 1 and killed == -9

def test_refused(results):
    says = dict(alone='add DataParallel()', nothing='add `GradientAccumulation', normalize='normalize=False',
                metric='(Largest)', overlap="micro_batch_size='auto'", two='2 parallel callbacks are attached',
                checkpoint='with LocalSGD each rank has', noise='with DataParallel', sharded_noise='with DataParallel',
                alone_saved='add DataParallel()', count='n_items=',
                rows_by_length='all ranks go through the model equally often', rows_overlap='overlap=True sends gradients')
    for r in results('refused')[1:]:
        for k,text in says.items(): assert text in r[k], k

@pytest.mark.parametrize('name,names',
                         dict(local='LocalSGD does not', head='of the head', overlap='overlap=True', mixup='MixUp',
                              auto='pass a number').items())
def test_what_coupled_cannot_do_over_ranks(results, name, names):
    for r in results('coupled_errors')[1:]: assert 'coupled=' in r[name] and names in r[name]
