"""A validation over several ranks is that of one process: losses, what callbacks decide by them, and ranks that end it early"""
import os, subprocess, sys, warnings
from functools import partial
from pathlib import Path
import fresh
import pytest, torch, torch.nn.functional as F
from fastai.basics import (
    Callback, CancelValidException, CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, SGD, ifnone, nn, set_seed, tensor)
from fastai.callback.all import EarlyStoppingCallback, ProgressCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.losses import LabelSmoothingCrossEntropyFlat
from fastaccum.accumulation.remainder import policies
from fastaccum.all import ChunkedHead, DataParallel, FullyShard, GradientAccumulation, LocalSGD, StepLogger, launch
from quick import over_ranks, run_over
import torch.distributed as dist

pytestmark = pytest.mark.slow      # all start processes of two ranks or three
three = 'class_weights', 'tokens', 'failing_look', 'changed', 'sharded_split', 'own_with_penalty', 'inside'

def data(n=64, n_valid=23, n_out=3, seq=None):
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n+n_valid, *([] if seq is None else [seq]), 5, generator=g)
    return x,torch.randint(n_out, x.shape[:-1], generator=g)

def mlp(n_out=3, norm=False):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), *[nn.BatchNorm1d(8)]*norm, nn.Tanh(), nn.Linear(8, n_out))

def learner(x, y, loss, model=None, n_valid=23, bs=16, accum=32, cbs=(), dp=None, path='.', **kwargs):
    set_seed(3)
    n = len(x)-n_valid
    dls = DataLoaders.from_dsets([*zip(x[:n], y[:n])], [*zip(x[n:], y[n:])], bs=bs, drop_last=False, num_workers=0, device='cpu')
    return Learner(dls, ifnone(model, mlp()), loss, opt_func=SGD, lr=.1, path=path,
                   cbs=[GradientAccumulation(accum, **kwargs), ifnone(dp, DataParallel)(), *cbs])

def quiet(learn): learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)]); return learn.no_logging()

def weights(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def fitted(make, n_epoch=1):
    "Validation losses before, in and after a fit, and the weights"
    learn = make()
    with quiet(learn):
        before = learn.validate()[0]
        learn.fit(n_epoch)
        values = [v[1] for v in learn.recorder.values]
        after = learn.validate()[0]
    return [before, *values, after],weights(learn)

# --- losses
class_weights = tensor([.1, 1, 5])
def token_loss(p, y): return F.cross_entropy(p.flatten(0, 1), y.flatten(), ignore_index=0)
def own_weights(p, y):
    w = class_weights[y]
    return (F.cross_entropy(p, y, reduction='none')*w).sum()/w.sum()
def own_valid(p, y): return (F.cross_entropy(p, y, reduction='none')*(y != 0)).sum()/(y != 0).sum()
class Contrast(nn.Module):
    def forward(self, p, y): return F.cross_entropy(p@p.T + y.float()[None]*.1, torch.arange(len(p)))
def pairs(p, y):
    "Of 2N rows, first all first views"
    a,b = p.chunk(2)
    return F.cross_entropy(a@b.T + y.float()[None]*.1, torch.arange(len(a)))
def of_records(p, y): return pairs(torch.cat((p[0]['a'], p[0]['b'])), y)
def supervised(p, y):
    "Targets have a row for each of the outputs' rows"
    if isinstance(p, tuple): p = torch.cat(p)
    same = (y[:,None] == y[None]).float() - torch.eye(len(y))
    return -((F.log_softmax(p@p.T, 1)*same).sum(1)/same.sum(1).clamp(min=1)).mean()
def flat(p, y): return F.cross_entropy(p.flatten(0, 1), y)
def by_place(p, y): return F.cross_entropy(torch.cat(p), y) + (torch.linspace(0, 1, len(y))*y).mean()
class Views(nn.Module):
    "`how` makes an output of two views; on some `ranks`, or all, the model fails with a single item"
    def __init__(self, how=torch.cat, ranks=()): super().__init__(); self.net,self.how,self.ranks = mlp(),how,ranks
    def forward(self, x):
        if len(x) == 1 and (dist.get_rank() if dist.is_initialized() else 0) in self.ranks: raise ValueError('a single item')
        return self.how((self.net(x), self.net(x+1)))
def by_item(views): return torch.stack(views, 1).flatten(0, 1)
class Doubled(Callback):
    def __init__(self, f): self.f = f
    def before_batch(self): self.learn.yb = (self.f(self.learn.y),)
def twice(y): return torch.cat((y, y))
def detection(p, y): return F.cross_entropy(p, y, reduction='sum')/max(1, int((y > 0).sum()))
def count(learn): return (learn.y > 0).sum(),1
def rare(y): return y*(torch.arange(len(y))%17 == 0)       # in some loader batches no target is positive, and none on most ranks
def ignored(y, share=.6):
    y = y.clone()
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < share] = -100
    y[-3:] = -100                                  # a rank without a target
    return y

in_turn = dict(how=lambda views: torch.stack(views, 1), loss=flat, double=lambda y: torch.stack((y, 2-y), 1).flatten())
views = dict(
    views=dict(),
    # of one kind in all, or each has one; a rank may have none
    views_of_single_items=dict(bs=3, accum=9),
    views_of_two_items=dict(bs=2, accum=8),
    records_of_single_items=dict(how=lambda views: [dict(zip('ab', views))], loss=of_records, bs=3, accum=9),
    failing_look=dict(ranks=[1], bs=10, micro_batch_size=3),
    doubled=dict(loss=supervised, double=twice),
    doubled_items=dict(how=by_item, loss=supervised, double=lambda y: y.repeat_interleave(2)),
    doubled_apart=dict(how=tuple, loss=supervised, double=twice),
    flat=in_turn)
def of_views(x, y, how=torch.cat, ranks=(), loss=pairs, double=None, micro_batch_size=4, **kwargs):
    return learner(x, y, loss, Views(how, ranks), coupled=True, micro_batch_size=micro_batch_size,
                   cbs=[] if double is None else [Doubled(double)], **kwargs)

def cases():
    x,y = data()
    xs,ys = data(seq=7)
    return dict(
        class_weights=lambda: learner(x, y, nn.CrossEntropyLoss(weight=class_weights)),
        ignored=lambda: learner(x, ignored(y), nn.CrossEntropyLoss()),
        ignored_and_weighted=lambda: learner(x, ignored(y), CrossEntropyLossFlat(weight=class_weights)),
        own=lambda: learner(x, y, own_weights),
        tokens=lambda: learner(xs, ys, token_loss),
        detection=lambda: learner(x, rare(y), detection),
        counted=lambda: learner(x, rare(y), detection, weight=count),
        given=lambda: learner(xs, ys, token_loss, weight=lambda learn: (learn.y != 0).sum()),
        smoothed=lambda: learner(x, y, LabelSmoothingCrossEntropyFlat(weight=class_weights)),
        sums=lambda: learner(x, y, nn.CrossEntropyLoss(reduction='sum')),
        coupled=lambda: learner(x, y, Contrast(), coupled=True, micro_batch_size=4),
        **{name: partial(of_views, *data(), **kwargs) for name,kwargs in views.items()},
        regression=lambda: learner(x, x.sum(1, keepdim=True), nn.L1Loss(), mlp(1)))

# --- losses of one's own, by which a validation over ranks could be wrong
class Hard:
    "Items above `cut` count: below it all do, as in training"
    def __init__(self): self.cut,self.calls,self.last = 0.,0,None
    def __call__(self, p, y):
        each = F.cross_entropy(p.flatten(0, -2), y.flatten(), reduction='none')
        counts = (each > self.cut) & (y.flatten() != 0) if p.dim() == 3 else each > self.cut
        self.calls,self.last = self.calls+1,len(y)
        return (each*counts).sum()/counts.sum().clamp(min=1)
class Cut(Callback):
    def before_train(self): self.learn.loss_func.cut = 0.
    def before_validate(self): self.learn.loss_func.cut,self.learn.loss_func.calls = 1.1,0
class Penalty(Callback):
    "Adds something to the loss in validation, too"
    def after_loss(self): self.learn.loss = self.learn.loss + self.learn.pred.abs().mean() + self.learn.model[0].weight.norm()
class Decay(Callback):
    def after_loss(self): self.learn.loss = self.learn.loss + self.learn.model[0].weight.norm()
class Inside(nn.Module):
    "Computes the loss itself"
    def __init__(self):
        super().__init__()
        self.body = mlp()
    def forward(self, x, y): return dict(loss=F.cross_entropy(out := self.body(x), y), out=out)
def own_loss_of(out, y): return out['loss']
def padded(items):
    width = max(len(y) for _,y in items)
    return tuple(torch.stack([F.pad(t, [0]*(2*t.dim()-1) + [width-len(t)]) for t in ts]) for ts in zip(*items))
def with_loaders(learn, items, **kwargs):
    learn.dls = DataLoaders(*[DataLoader(o, bs=16, **kwargs) for o in (items[:64], items[64:])], device='cpu')
    return learn

def hard():
    "They validate after a fit whose loss says other things"
    x,y = data()
    xs,ys = data(seq=7)
    def texts(): return with_loaders(learner(xs, ys, Hard(), cbs=[Cut()]), [(a[:3+i%5], b[:3+i%5]) for i,(a,b) in enumerate(zip(xs, ys))],
                                     create_batch=padded)
    return dict(
        changed=lambda: learner(x, y, Hard(), cbs=[Cut()]),
        chunked=lambda: learner(x, y, own_valid, cbs=[ChunkedHead(n_chunks=2)]),
        texts=texts,
        # not all ranks have the last loader batch
        sharded=lambda: learner(*data(n_valid=17), Hard(), n_valid=17, bs=8, cbs=[Cut()], dp=FullyShard),
        sharded_split=lambda: learner(*data(n_valid=17), Hard(), n_valid=17, bs=8, cbs=[Cut()], dp=FullyShard, micro_batch_size=3),
        with_penalty=lambda: learner(x, y, nn.CrossEntropyLoss(weight=class_weights), cbs=[Penalty()]),
        ignored_with_penalty=lambda: learner(x, ignored(y), nn.CrossEntropyLoss(), cbs=[Decay()]),      # of all targets of a rank
        own_with_penalty=lambda: learner(x, y, Hard(), cbs=[Cut(), Penalty()]),
        inside=lambda: with_loaders(learner(x, y, own_loss_of, Inside()), [*zip(x, y, y)], n_inp=2))

def validated(make):
    "Its loss, of an untrained model and of a trained one, what the loss keeps, and warnings"
    learn = make()
    with quiet(learn), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        losses = [learn.validate()[0]]
        learn.fit(1)
        losses.append(learn.validate()[0])
    return losses,[getattr(learn.loss_func, k, None) for k in ('calls','last')],[str(w.message) for w in told]

# --- callbacks that decide by the loss
def decisions():
    x,y = data()
    cbs = [EarlyStoppingCallback(min_delta=.02, patience=2), ReduceLROnPlateau(min_delta=.05, factor=3.), SaveModelCallback()]
    learn = learner(x, y, nn.CrossEntropyLoss(weight=class_weights), cbs=cbs)
    with quiet(learn): learn.fit(20, .3)
    return dict(weights=weights(learn), lrs=learn.recorder.lrs, epochs=len(learn.recorder.values))

# --- training
def batchnorm():
    "The last loader batch has 3 items"
    x,y = data(67)
    learn = learner(x, y, nn.CrossEntropyLoss(), mlp(norm=True))
    with quiet(learn): learn.fit(1)
    return weights(learn)

def in_order(*args, **kwargs):
    learn = learner(*args, **kwargs)
    learn.dls.train.shuffle = False
    with quiet(learn): learn.fit(1)
    return dict(weights=weights(learn), losses=tensor([float(o) for o in learn.recorder.losses]))

def all_ignored():
    "The last rank has no target in the first two loader batches, of which each is a step"
    x,y = data(seq=7)
    for a in (0, 16): y[a+11:a+16] = 0
    y[11-3:16] = 0
    return in_order(x, y, token_loss, accum=16)

def items_of_steps():
    "Items of each step; 67 do not fill the last accumulated batch of 40, nor do all ranks have as many"
    res = {}
    for dp in (DataParallel, LocalSGD):
        for remainder in policies:
            x,y = data(67)
            learn = learner(x, y, nn.CrossEntropyLoss(), accum=40, dp=dp, remainder=remainder, cbs=[StepLogger()])
            with quiet(learn): learn.fit(3)
            res[dp.__name__,remainder] = list(learn.step_logger.rows['items'])
    return res

def hooked():
    "Warnings of a module's backward hook that treats items together, and of one that does not; each rank has one micro-batch or two"
    def told(accum, hook):
        x,y = data()
        learn = learner(x, y, nn.CrossEntropyLoss(), accum=accum)
        learn.model[2].register_full_backward_hook(hook)
        with quiet(learn), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter('always')
            learn.fit(1)
        return sum('The backward hook' in str(w.message) for w in found)
    hooks = lambda m, i, o: (i[0]/i[0].norm(),),lambda m, i, o: (-i[0],)
    return [[told(accum, hook) for accum in (16, 32)] for hook in hooks]

def unknown():
    "Words of the orders that nothing tells, and the error of outputs that cannot be joined, which one rank of three sees"
    def told(**kwargs):
        learn = of_views(*data(36, 12), n_valid=12, **kwargs)
        with quiet(learn), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter('always')
            learn.validate()
            try: learn.fit(2)
            except ValueError as e: return str(e)
        return [m for w in found for m in ('order could not be found','shows their order') if m in str(w.message)]
    return dict(rows=told(ranks=[0, 1, 2], micro_batch_size=3, bs=12),
                targets=told(how=tuple, loss=by_place, double=twice), flat=told(**in_turn),
                # of two items, which change places in either order
                pairs=told(how=tuple, loss=supervised, double=twice, bs=2),
                matrix=told(how=lambda views: views[0]@views[1].T, loss=lambda p, y: p.mean(), bs=4))

def all_cases():
    def run(f, made): return {k: f(made[k]) for k in run_over(dist.get_world_size() if dist.is_initialized() else 1, made, three)}
    return dict(run(fitted, cases()), **run(validated, hard()),
                **{f.__name__: f() for f in (decisions, batchnorm, all_ignored, items_of_steps, hooked, unknown)})

# --- ranks that end a validation early
class Cancel(Callback):
    "End a validation of three loader batches, of which rank 1 has two, on some ranks"
    order,run_train = 20,False
    def __init__(self, ranks, event, at): self.ranks,self.at = ranks,at; setattr(self, event, self.cancel)
    def cancel(self):
        if dist.get_rank() in self.ranks and self.learn.iter >= self.at: raise CancelValidException

def outcome(dp, do, *cbs):
    x,y = data(n_valid=17)
    learn = learner(x, y, nn.CrossEntropyLoss(), n_valid=17, bs=8, dp=dp, cbs=cbs)
    try:
        with quiet(learn): return do(learn)
    except RuntimeError as e: return str(e)

places = [(ranks, event, at) for ranks in ([0, 1], [0], [1]) for event in ('before_batch','after_pred','after_batch') for at in (0, 1, 2)]
def found(learn): return learn.lr_find(num_it=10, show_plot=False).valley,learn.validate()[0]
def hears(rank, at): return at < (3, 2)[rank]
def cancelled():
    res = {}
    for dp in (FullyShard, DataParallel):
        res[dp.__name__,'lr_find'] = outcome(dp, found)
        for place in places:
            for do in (lambda l: l.fit(1), lambda l: l.validate()):
                res.setdefault((dp.__name__, str(place)), []).append(outcome(dp, do, Cancel(*place)))
    return res

def started(f, n, folder, script=__file__):
    "Starts `f` of a script in a process with `n` ranks; returns a function that waits for what it returns"
    out = folder/f'{f.__name__}_{n}.pt'
    root = Path(__file__).parents[2]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(map(str, (root, root/'tests')))}
    process = fresh.start(script, f.__name__, n, out, env=env, cwd=folder, stderr=subprocess.STDOUT)
    def result():
        said = process.communicate(timeout=600)[0]
        assert process.returncode == 0, said[-6000:]
        return torch.load(out, weights_only=False)
    return result

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "By number of ranks: of each rank"
    waits = {n: started(all_cases, n, tmp_path_factory.mktemp('ranks')) for n in (1, 2, 3)}
    return {n: wait() for n,wait in waits.items()}

over = pytest.mark.parametrize('n', [2, 3])

@pytest.mark.parametrize('name,n', over_ranks(cases(), three))
def test_losses_are_those_of_one_process(results, name, n):
    (one,),many = ([r[name] for r in results[k]] for k in (1, n))
    for r in many:
        assert r[0] == many[0][0]
        k = 1 if name == 'smoothed' else None      # no weight makes its training exact, as a warning says
        torch.testing.assert_close(tensor(r[0][:k]), tensor(one[0][:k]), rtol=2e-6, atol=2e-6)
        if k is None: torch.testing.assert_close(r[1], one[1], rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize('name,n', over_ranks(hard(), three))
def test_losses_that_no_rule_describes(results, name, n):
    "Computed from the outputs of all ranks, once for each loader batch; or each rank's own, with a warning"
    (one,),many = ([r[name] for r in results[k]] for k in (1, n))
    for losses,*_ in many:
        torch.testing.assert_close(tensor(losses), tensor(one[0]), rtol=2e-6, atol=2e-6)
    assert many[0][1] == one[1]                    # the others may not have the last loader batch
    told = [m for m in many[0][2] if 'Each rank has computed the validation loss of its own items, up to' in m]
    assert bool(told) == (name == 'inside')

@over
def test_callbacks_decide_as_in_one_process(results, n):
    (one,),many = ([r['decisions'] for r in results[k]] for k in (1, n))
    assert 3 < one['epochs'] < 20 and len(set(one['lrs'])) > 1
    for r in many:
        assert r['epochs'] == one['epochs'] and r['lrs'] == one['lrs']
        torch.testing.assert_close(r['weights'], one['weights'], rtol=1e-4, atol=1e-5)

@over
def test_a_small_last_batch_does_not_leave_a_rank_with_one_item(results, n):
    first,*others = [r['batchnorm'] for r in results[n]]
    assert first.isfinite().all() and all(torch.equal(first, w) for w in others)

@over
@pytest.mark.parametrize('remainder', [*policies])
@pytest.mark.parametrize('dp', ['DataParallel', 'LocalSGD'])
def test_rows_count_the_items_of_all_ranks(results, n, dp, remainder):
    (one,),many = ([r['items_of_steps'][dp,remainder] for r in results[k]] for k in (1, n))
    assert one == dict(step=[48, 19]*3, drop=[48]*3, carry=[48, 51, 51, 48])[remainder]
    for r in many: assert r == one

@over
def test_a_rank_without_a_target_takes_over_the_rule(results, n):
    (one,),many = ([r['all_ignored'] for r in results[k]] for k in (1, n))
    for r in many:
        for k in one: torch.testing.assert_close(r[k], one[k], rtol=1e-5, atol=1e-6)

@over
def test_a_module_hook_that_treats_items_together_is_told(results, n): assert [r['hooked'] for r in results[n]] == [[[1, 1], [0, 0]]]*n

@over
def test_an_order_that_nothing_tells_is_warned_of_once(results, n):
    one = results[1][0]['unknown']
    for r in results[n]:
        assert r['unknown']['rows'] == ['order could not be found'] and r['unknown']['targets'] == ['shows their order']
        assert r['unknown']['flat'] == []
    assert results[n][0]['unknown']['pairs'] == ['shows their order']          # another rank may have no items
    assert one['rows'] == ['order could not be found'] and one['targets'] == []

def test_outputs_that_cannot_be_joined_are_an_error_on_all_ranks(results):
    "Of 4 items, one rank of 3 has two"
    if 3 not in results: pytest.skip('three ranks')
    for r in results[3]: assert 'a matrix of 2 by 2 numbers' in r['unknown']['matrix']

@pytest.fixture(scope='module')
def ended_early(tmp_path_factory): return started(cancelled, 2, tmp_path_factory.mktemp('cancelled'))()

@pytest.mark.long
@pytest.mark.parametrize('dp', ['FullyShard', 'DataParallel'])
def test_lr_find_ends(ended_early, dp):
    a,b = [r[dp,'lr_find'] for r in ended_early]
    assert a == b and len(a) == 2

@pytest.mark.long
@pytest.mark.parametrize('dp', ['FullyShard', 'DataParallel'])
@pytest.mark.parametrize('place', places, ids=str)
def test_a_validation_that_is_ended_early_leaves_no_message_behind(ended_early, dp, place):
    "On all ranks that have the batch: all go on. On some: an error on all"
    ranks,_,at = place
    heard = [r for r in ranks if hears(r, at)]
    for outcomes in zip(*[r[dp,str(place)] for r in ended_early]):
        parted = ['The ranks have parted' in str(res) for res in outcomes]
        assert parted[0] == parted[1]
        if not heard or heard == [r for r in (0, 1) if hears(r, at)]: assert not any(parted)
        elif heard == [1]: assert all(parted)      # rank 0 has more loader batches; the other way round, rank 1 may be at its end

if __name__ == '__main__':
    f,n,out = globals()[sys.argv[1]],int(sys.argv[2]),sys.argv[3]
    torch.save([f()] if n == 1 else launch(f, n), out)
