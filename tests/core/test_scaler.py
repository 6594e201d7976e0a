"""The loss scaler: scripted overflow sequences against tables, equality with torch's, host syncs, saved state"""
import copy, io, pickle, random, warnings
from math import inf
import pytest, torch
from torch import nn
from bench.measure import SyncCounter
from fastaccum.core.scaler import DynamicLossScaler
from fastaccum.core.warnings import FastaccumWarning

class Task:
    "A parameter whose gradient is 1, or inf in a step that shall overflow"
    def __init__(self, opt_func=torch.optim.SGD, **kwargs):
        self.p = nn.Parameter(torch.ones(3))
        self.opt = opt_func([self.p], **{'lr':.1, **kwargs})

    def backward(self, scaler, overflow):
        self.opt.zero_grad()
        scaler.scale((self.p*(inf if overflow else 1.)).sum()).backward()

    def step(self, scaler, overflow):
        self.backward(scaler, overflow)
        scaler.step(self.opt)
        scaler.update()

def play(scaler, overflows, task=None):
    "A step for each character, `x` overflows; the scale after each step"
    task,scales = task or Task(),[]
    for c in overflows:
        task.step(scaler, c=='x')
        scales.append(scaler.get_scale())
    return scales

def cpu_scaler(**kwargs): return DynamicLossScaler(**{'device':'cpu', 'init_scale':8., 'growth_interval':3, **kwargs})

# Each row: does the step overflow (x)? | scale, good steps in a row, overflows in all after it
tables = dict(
    default=(dict(), '''
        .   8 1 0
        .   8 2 0
        .  16 0 0
        x   8 0 1
        .   8 1 1
        .   8 2 1
        x   4 0 2
        x   2 0 3
        .   2 1 3
        .   2 2 3
        .   4 0 3
        .   4 1 3'''),
    hysteresis_2=(dict(hysteresis=2), '''
        x   8 0 1
        .   8 1 1
        x   8 0 2
        x   4 0 3
        x   4 0 4
        x   2 0 5
        .   2 1 5
        .   2 2 5
        x   2 0 6
        .   2 1 6
        .   2 2 6
        .   4 0 6
        x   4 0 7
        x   2 0 8'''),
    hysteresis_3=(dict(hysteresis=3), '''
        x   8 0 1
        x   8 0 2
        .   8 1 2
        x   8 0 3
        x   8 0 4
        x   4 0 5
        x   4 0 6
        x   4 0 7
        x   2 0 8'''),
    bounds=(dict(min_scale=4., max_scale=16.), '''
        .   8 1 0
        .   8 2 0
        .  16 0 0
        .  16 1 0
        .  16 2 0
        .  16 0 0
        x   8 0 1
        x   4 0 2
        x   4 0 3
        x   4 0 4
        .   4 1 4
        .   4 2 4
        .   8 0 4'''),
    bounds_between_powers=(dict(init_scale=5., min_scale=3., max_scale=11., growth_interval=1), '''
        .  10 0 0
        .  11 0 0
        x 5.5 0 1
        x   3 0 2
        x   3 0 3
        .   6 0 3'''),
    factors=(dict(growth_factor=4., backoff_factor=.25, growth_interval=1), '''
        .  32 0 0
        x   8 0 1
        x   2 0 2
        x   1 0 3
        .   4 0 3'''))

@pytest.mark.parametrize('fused', (False, True))
@pytest.mark.parametrize('name', tables)
def test_scripted(name, fused):
    kwargs,table = tables[name]
    scaler,task = cpu_scaler(**kwargs),Task(fused=fused)
    used = [kwargs.get('init_scale', 8.)]
    rows = [row.split() for row in table.split('\n') if row.strip()]
    for i,(c,scale,good,overflows) in enumerate(rows, 1):
        before = task.p.detach().clone()
        task.step(scaler, c=='x')
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (float(scale), int(good)), f'row {i}'
        assert (scaler.n_steps, scaler.n_overflows) == (i, int(overflows)), f'row {i}'
        assert scaler.last_skipped == (None if fused else c=='x') and scaler.found_inf.item() == (c=='x'), f'row {i}'
        torch.testing.assert_close(task.p.detach(), before if c=='x' else before-.1)
        used.append(float(scale))
    assert scaler.history() == dict(scale=used[:-1], skipped=[c=='x' for c,*_ in rows])

@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('growth,backoff', ((2.,.5), (1.3,.7)))
def test_equals_torch(seed, growth, backoff):
    "Bit for bit, when bounds and hysteresis are out of the way"
    overflows = ''.join(random.Random(seed).choices('x.', (1,4), k=400))
    kwargs = dict(device='cpu', init_scale=1000., growth_factor=growth, backoff_factor=backoff, growth_interval=4)
    ours,theirs = DynamicLossScaler(**kwargs, min_scale=2.**-126, max_scale=inf),torch.amp.GradScaler(**kwargs)
    ours_p,theirs_p = Task(torch.optim.AdamW),Task(torch.optim.AdamW)
    assert play(ours, overflows, ours_p) == play(theirs, overflows, theirs_p)
    assert ours_p.p.equal(theirs_p.p)
    assert theirs.state_dict().items() <= ours.state_dict().items()

def test_powers_of_two():
    overflows = ''.join(random.Random(0).choices('x.', (1,4), k=300))
    assert all(s.hex().startswith('0x1.0000000000000p') for s in play(cpu_scaler(patience=10**6), overflows))

# --- patience

# `raises`: at which step, counted from 1
@pytest.mark.parametrize('fused', (False, True))
@pytest.mark.parametrize('overflows,kwargs,raises', (
    ('x'*9,                dict(),                            6),   # backs off at 8, 4 and 2; then three at 1
    ('x'*9,                dict(min_scale=8.),                3),
    ('.'*10 + 'x'*9,       dict(min_scale=8., max_scale=8.), 13),
    ('xxxxx.xx.xxx',       dict(growth_interval=99),         12),   # a good step starts the count again
    ('xx.xx.xx.xx.'*5,     dict(growth_interval=99),         None),
    ('x'*19,               dict(hysteresis=3),               12),   # three at each of 8, 4, 2
    ('x'*9,                dict(init_scale=.1, min_scale=.1), 3),   # no float32 number
    ('xxx',                dict(min_scale=8., patience=1),    1),
    ('x'*300,              dict(patience=250),              253),
))
def test_patience(overflows, kwargs, raises, fused):
    scaler,task = cpu_scaler(**{'patience':3, **kwargs}),Task(fused=fused)
    def run():
        for c in overflows: task.step(scaler, c=='x')
    if raises is None: run()
    else:
        with pytest.raises(FloatingPointError, match=f'^{scaler.patience} overflows in a row .* min_scale={scaler.min_scale}'): run()
    assert scaler.n_steps == (raises or len(overflows))
    assert scaler.n_overflows == overflows[:raises].count('x')

def test_patience_message():
    with pytest.raises(FloatingPointError) as e: play(cpu_scaler(patience=2), 'xxxxx')
    for hint in ('inputs', 'targets', 'loss', 'learning rate', 'bf16', 'lower min_scale', 'Clipping does not help'):
        assert hint in str(e.value)

def test_patience_after_error():
    "Who catches the error and goes on has a consistent scaler, and the full patience again"
    scaler,task = cpu_scaler(init_scale=1., patience=3),Task()
    for n in (3, 6):
        with pytest.raises(FloatingPointError): play(scaler, 'xxx', task)
        assert scaler.n_steps == n
    assert play(scaler, '....', task) == [1,1,2,2]

def test_may_give_up():
    "Only where one more overflow would be one too many; an update without a step is none"
    scaler = cpu_scaler(init_scale=1., patience=3)
    for c,expected in zip('x.xx.xx', (False, False, False, True, False, False, True)):
        play(scaler, c)
        assert scaler.may_give_up is expected
    scaler = cpu_scaler(init_scale=1., patience=3)
    play(scaler, 'x')
    scaler.update(1.)
    assert not scaler.may_give_up and not cpu_scaler(enabled=False, patience=1).may_give_up and cpu_scaler(patience=1).may_give_up

# --- host syncs

# no plain Adam: it reads its own step counter, which lies on the host
@pytest.mark.parametrize('opt_func,fused,per_step', ((torch.optim.SGD,False,1), (torch.optim.SGD,True,0),
                                                     # None: PyTorch 2.8's own reads once
                                                     (torch.optim.AdamW,True,0), (torch.optim.Adagrad,True,None)))
def test_syncs(opt_func, fused, per_step):
    scaler,task,theirs = cpu_scaler(hysteresis=2),Task(opt_func, fused=fused),torch.amp.GradScaler('cpu')
    for s in (scaler, theirs): task.step(s, False)  # makes the optimizer's state
    for i,c in enumerate('..x.xx..xxxx....'):
        counts = []
        for s in (scaler, theirs):
            with SyncCounter() as scale: task.backward(s, c=='x')
            with SyncCounter() as step: s.step(task.opt)
            with SyncCounter() as update: s.update()
            counts.append((scale.n, step.n, update.n))
        assert counts == [(0, counts[1][1] if per_step is None else per_step, 0)]*2, f'step {i}: {counts}'
    with SyncCounter() as free: scaler.n_steps, scaler.last_skipped, scaler.found_inf
    assert free.n == 0
    with SyncCounter() as read: scaler.history(), scaler.n_overflows
    assert read.n == 1

def test_syncs_of_patience():
    "Fused: one read in `patience` steps. Else: none as long as an error is impossible, then hardly any"
    def syncs(overflows, fused, **kwargs):
        scaler,task,n = cpu_scaler(**kwargs),Task(fused=fused),[]
        for c in overflows:
            task.backward(scaler, c=='x')
            scaler.step(task.opt)
            with SyncCounter() as update:
                try: scaler.update()
                except FloatingPointError: pass
            n.append(update.n)
        return n
    assert syncs('.'*100, True) == ([0]*24+[1])*4
    assert sum(syncs('.'*100 + 'x'*24 + '.'*100, False)) == 0
    assert sum(syncs('x'*41, False, init_scale=2.**16)) == 2   # 16 times backed off, 25 at the smallest scale
    assert sum(syncs('x'*40, False, init_scale=2.**16)) == 1

# --- in a loop

def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

@pytest.mark.parametrize('opt_kwargs', (dict(), dict(fused=True), dict(foreach=True)), ids=('plain','fused','foreach'))
@pytest.mark.parametrize('opt_func', (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad))
@pytest.mark.parametrize('clip', (None, .05))
def test_equals_unscaled(opt_func, opt_kwargs, clip):
    "Scales are powers of two: the steps that are taken are those of a loop without a scaler, to the bit"
    def train(scaled, overflow_at=()):
        model,scaler = make_net(),cpu_scaler(init_scale=2.**10, enabled=scaled)
        opt = opt_func(model.parameters(), lr=.1, **opt_kwargs)
        for i in range(20):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
            opt.zero_grad()
            if i in overflow_at and not scaled: continue
            scaler.scale(model(x).square().mean()*(inf if i in overflow_at else 1)).backward()
            if clip:
                scaler.unscale_(opt)
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                assert i or norm > clip  # it does clip
                if scaled: assert scaler.found_inf.item() == (i in overflow_at)
            scaler.step(opt)
            scaler.update()
        return nn.utils.parameters_to_vector(model.parameters()).detach()
    assert train(True, (3, 4, 11)).equal(train(False, (3, 4, 11)))

def test_several_optimizers():
    "Each skips for itself, the scale backs off once"
    scaler,good,bad = cpu_scaler(),Task(),Task()
    scaler.scale(good.p.sum() + (bad.p*inf).sum()).backward()
    assert scaler.step(good.opt) is None and scaler.last_skipped is False and scaler.found_inf.item() == 0
    scaler.step(bad.opt)
    assert scaler.last_skipped is True and scaler.found_inf.item() == 1
    scaler.update()
    assert scaler.last_skipped is True and scaler.found_inf.item() == 1
    assert (scaler.get_scale(), scaler.n_steps, scaler.n_overflows) == (4, 1, 1)
    assert good.p.lt(1).all() and bad.p.eq(1).all()

def test_fused_next_to_plain():
    "What one optimizer hides, the other may tell"
    scaler,plain,fused = cpu_scaler(),Task(),Task(fused=True)
    for overflow,known in ((False,None), (True,True)):
        plain.backward(scaler, overflow)
        fused.backward(scaler, False)
        for t in (plain, fused): scaler.step(t.opt)
        scaler.update()
        assert scaler.last_skipped is known

def test_several_outputs():
    scaler,p = cpu_scaler(),nn.Parameter(torch.ones(2))
    a,(b,) = scaler.scale([p.sum(), (p.mean(),)])
    assert (a.item(), b.item()) == (16, 8)

@pytest.mark.parametrize('value,skipped', ((1.,False), (inf,True), (float('nan'),True)))
def test_sparse(value, skipped):
    emb,scaler = nn.Embedding(5, 3, sparse=True),cpu_scaler()
    before = emb.weight.detach().clone()
    opt = torch.optim.SparseAdam(emb.parameters(), lr=.1)
    scaler.scale((emb(torch.tensor([1,1,4]))*value).sum()).backward()
    scaler.unscale_(opt)
    if not skipped: assert emb.weight.grad.to_dense()[1].tolist() == [2,2,2]
    scaler.step(opt)
    scaler.update()
    assert scaler.last_skipped is skipped and emb.weight.equal(before) is skipped

def test_returns_what_the_optimizer_returns():
    scaler,task = cpu_scaler(),Task()
    task.opt.step = lambda extra, also: (extra, also)
    for overflow,expected in ((False,('yes', 1)), (True,None)):
        task.backward(scaler, overflow)
        assert scaler.step(task.opt, 'yes', also=1) == expected
        scaler.update()

def test_disabled():
    scaler,task = cpu_scaler(enabled=False),Task()
    loss = task.p.sum()
    assert scaler.scale(loss) is loss
    scaler.unscale_(task.opt)
    assert play(scaler, '..', task) == [1,1]
    scaler.reset_step()
    assert (scaler.n_steps, scaler.n_overflows, scaler.last_skipped, scaler.found_inf) == (0, 0, False, None)
    assert scaler.state_dict() == {} and scaler.history() == dict(scale=[], skipped=[])
    scaler.load_state_dict({})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()

def test_before_first_step():
    scaler = cpu_scaler()
    assert (scaler.get_scale(), scaler.n_steps, scaler.n_overflows, scaler.last_skipped, scaler.found_inf) == (8, 0, 0, None, None)
    with pytest.raises(AssertionError, match='scale'): scaler.update()
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match='No inf checks'): scaler.update()

def test_new_scale():
    scaler,task = cpu_scaler(max_scale=64.),Task()
    play(scaler, '.', task)
    for new,expected in ((32.,32), (1000.,64), (torch.tensor(2.),2)):
        scaler.update(new)
        assert scaler.get_scale() == expected
    assert scaler.n_steps == 1 and scaler.last_skipped is False
    task.backward(scaler, True)
    scaler.step(task.opt)
    scaler.update(4.)
    assert (scaler.get_scale(), scaler.n_steps, scaler.n_overflows, scaler.last_skipped) == (4, 2, 1, True)

def test_reset_step():
    scaler,task = cpu_scaler(),Task()
    task.backward(scaler, True)
    scaler.unscale_(task.opt)   # and then an exception
    with pytest.raises(RuntimeError, match='already'): scaler.unscale_(task.opt)
    scaler.reset_step()
    assert play(scaler, '...', task) == [8,8,16] and scaler.n_steps == 3 and scaler.n_overflows == 0

@pytest.mark.slow
def test_long_history():
    "Rows that are put together on the device come out as they went in"
    scaler,task = cpu_scaler(init_scale=2.**10, patience=10**6),Task(torch.optim.SGD, lr=0.)
    overflows = ''.join(random.Random(1).choices('x.', (1,4), k=2500))
    for i,c in enumerate(overflows):
        task.step(scaler, c=='x')
        assert len(scaler._record._rows) == i%1023+1   # 1024 become one
    h = scaler.history()
    assert h['skipped'] == [c=='x' for c in overflows] and scaler.n_overflows == overflows.count('x')
    assert h['scale'] == [2.**10] + play(cpu_scaler(init_scale=2.**10, patience=10**6), overflows)[:-1]
    assert scaler.history() == h

def test_device():
    "The scale and the trackers lie where the first loss does, and `found_inf` beside the scale"
    scaler = cpu_scaler()
    scaler._lazy_init_scale_growth_tracker(torch.device('meta'))
    scaler._per_optimizer_states[1] = dict(found_inf_per_device=dict(cpu=torch.zeros(())))
    assert all(t.is_meta for t in (scaler._scale, scaler._growth_tracker, scaler._overflow_tracker, scaler.found_inf))

def test_defaults_are_torchs():
    ours,theirs = DynamicLossScaler('cpu'),torch.amp.GradScaler('cpu')
    for get in ('get_scale', 'get_growth_factor', 'get_backoff_factor', 'get_growth_interval'):
        assert getattr(ours, get)() == getattr(theirs, get)()

# --- saved state

def through_file(state):
    f = io.BytesIO()
    torch.save(state, f)
    f.seek(0)
    return torch.load(f, weights_only=True)

def by_state(scaler, **kwargs):
    new = cpu_scaler(**kwargs)
    new.load_state_dict(through_file(scaler.state_dict()))
    return new

def by_state_in_use(scaler, **kwargs):
    new = cpu_scaler(**kwargs)
    play(new, 'x.xx')
    new.load_state_dict(scaler.state_dict())
    return new

@pytest.mark.parametrize('copied',
                         (by_state, by_state_in_use, lambda s,**kw: copy.deepcopy(s),
                          lambda s,**kw: pickle.loads(pickle.dumps(s))),
                         ids=('state', 'state_in_use', 'deepcopy', 'pickle'))
@pytest.mark.parametrize('cut', range(12))
def test_resume(cut, copied):
    kwargs,overflows = dict(hysteresis=2, patience=3, min_scale=2.),'x.xx...xxxxx'+'....xxxx'
    whole = cpu_scaler(**kwargs)
    scales = play(whole, overflows)
    scaler = cpu_scaler(**kwargs)
    assert play(scaler, overflows[:cut]) == scales[:cut]
    scaler = copied(scaler, **kwargs)
    assert play(scaler, overflows[cut:]) == scales[cut:]
    assert scaler.state_dict() == whole.state_dict()

def test_resume_patience():
    "Overflows in a row are counted across a resume"
    for cut in range(1, 5):
        scaler = cpu_scaler(init_scale=1., patience=5)
        play(scaler, 'x'*cut)
        scaler = by_state(scaler, patience=5)
        play(scaler, 'x'*(4-cut))
        with pytest.raises(FloatingPointError): play(scaler, 'x')

def test_copies_keep_the_history():
    scaler = cpu_scaler()
    play(scaler, '..x.')
    assert not any(isinstance(v, torch.Tensor) for v in scaler.__getstate__().values())   # a GPU's pickle loads without one
    for new in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert new.history() == scaler.history() and new.last_skipped is False
        play(new, 'x')
    assert scaler.n_steps == 4
    new.load_state_dict(scaler.state_dict())
    assert new.history() == dict(scale=[], skipped=[]) and new.n_overflows == 1

def test_state_of_torch():
    theirs,ours = torch.amp.GradScaler('cpu', init_scale=2.**30, growth_interval=5),cpu_scaler()
    play(theirs, '...')
    ours.load_state_dict(theirs.state_dict())
    assert play(ours, '.') == [2.**24] and (ours.n_steps, ours.n_overflows) == (1, 0)   # within our bounds
    assert ours._get_growth_tracker() == 4 and ours.get_growth_interval() == 5
    patient = cpu_scaler(hysteresis=2)
    patient.load_state_dict(theirs.state_dict())
    assert play(patient, 'xx') == [2.**24,2.**23]
    theirs.load_state_dict(ours.state_dict())   # and the other way
    assert theirs.get_scale() == 2.**24
    with pytest.raises(RuntimeError, match='empty'): ours.load_state_dict({})

def test_settings_stay():
    "A run that ended at `min_scale` can be resumed with a lower one; a smaller hysteresis holds at once"
    scaler = cpu_scaler(hysteresis=5, min_scale=4., patience=9)
    play(scaler, 'xxxx')
    new = by_state(scaler, hysteresis=2, min_scale=.25, patience=3)
    assert play(new, 'x') == [4] and (new.hysteresis, new.min_scale, new.patience) == (2, .25, 3)

# --- errors

good = dict(init_scale=1024., growth_factor=2., backoff_factor=.5, growth_interval=100, min_scale=1., max_scale=2.**20,
            hysteresis=1, patience=9)

@pytest.mark.parametrize('bad,error,message', (
    (dict(init_scale=2.**30),      ValueError, r'init_scale=1073741824.0 must be .* within min_scale=1.0 and max_scale=1048576.0'),
    (dict(init_scale=.5),          ValueError, 'init_scale=0.5 must be .* widen'),
    (dict(init_scale=inf, max_scale=inf), ValueError, 'init_scale=inf must be finite'),
    (dict(init_scale=float('nan')), ValueError, 'init_scale=nan'),
    (dict(growth_factor=1.),       ValueError, 'growth_factor=1.0 must be above 1'),
    (dict(growth_factor=inf),      ValueError, 'growth_factor=inf'),
    (dict(backoff_factor=1.),      ValueError, 'backoff_factor=1.0 must be between 0 and 1'),
    (dict(backoff_factor=0.),      ValueError, 'backoff_factor=0.0 must be between 0 and 1'),
    (dict(growth_interval=0),      ValueError, 'growth_interval=0 must be at least 1'),
    (dict(hysteresis=0),           ValueError, 'hysteresis=0 must be at least 1'),
    (dict(patience=0),             ValueError, 'patience=0 must be at least 1'),
    (dict(min_scale=0.),           ValueError, r'min_scale=0.0 must be finite and at least 2\*\*-126'),
    (dict(min_scale=-1.),          ValueError, 'min_scale=-1.0 must be'),
    (dict(min_scale=2.**-126.5),   ValueError, 'min_scale=.* must be finite and at least'),
    (dict(min_scale=inf, max_scale=inf), ValueError, 'min_scale=inf must be finite'),
    (dict(max_scale=.5),           ValueError, 'max_scale=0.5 must be at least min_scale=1.0'),
    (dict(max_scale=float('nan')), ValueError, 'max_scale=nan'),
    (dict(init_scale='big'),       TypeError,  "init_scale='big' must be a number, not a str"),
    (dict(min_scale=None),         TypeError,  'min_scale=None must be a number'),
    (dict(growth_interval=2.5),    TypeError,  'growth_interval=2.5 must be an integer'),
    (dict(hysteresis=True),        TypeError,  'hysteresis=True must be an integer'),
    (dict(patience=3.),            TypeError,  'patience=3.0 must be an integer'),
))
@pytest.mark.parametrize('enabled', (True, False))
def test_errors(bad, error, message, enabled):
    for ok in (dict(), dict(min_scale=2.**-126)): DynamicLossScaler('cpu', **good|ok, enabled=enabled)
    with pytest.raises(error, match=message): DynamicLossScaler('cpu', **good|bad, enabled=enabled)

def test_imports_no_fastai():
    import ast, fastaccum.core.scaler as m
    with open(m.__file__, encoding='utf-8') as f: tree = ast.parse(f.read())
    roots = {(n.module if isinstance(n, ast.ImportFrom) else a.name).split('.')[0]
             for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    ours = {'private', 'checks', 'spelling', 'warnings'}       # which import torch at most
    assert roots <= {'__future__', 'array', 'functools', 'math', 'numbers', 'torch', *ours}

# --- a GPU, where there is one

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('fused', (False, True))
def test_cuda(fused):
    "The same table on a GPU, and no sync in `scale` and `update` that torch itself would notice"
    scaler,p = DynamicLossScaler('cuda', init_scale=8., growth_interval=3, hysteresis=2),nn.Parameter(torch.ones(3, device='cuda'))
    opt,scales = torch.optim.AdamW([p], fused=fused),[]
    for c in 'x.xxxx...':
        opt.zero_grad()
        torch.cuda.set_sync_debug_mode('error')
        try: scaler.scale((p*(inf if c=='x' else 1.)).sum()).backward()
        finally: torch.cuda.set_sync_debug_mode('default')
        scaler.step(opt)
        torch.cuda.set_sync_debug_mode('error')
        try: scaler.update()
        finally: torch.cuda.set_sync_debug_mode('default')
        scales.append(scaler.get_scale())
    assert scales == [8,8,8,4,4,2,2,2,4] and scaler.n_overflows == 5
    assert pickle.loads(pickle.dumps(scaler)).history() == scaler.history()

@pytest.mark.parametrize('scale', [2**15, 2.**15, True, None])
def test_a_scale_in_the_place_of_the_device(scale):
    with pytest.raises(TypeError, match="^device is .*: pass the type of the device .* init_scale="): DynamicLossScaler(scale)

def test_a_device_that_does_not_exist():
    with pytest.raises(ValueError, match="^device='gpu': .*'cuda'"): DynamicLossScaler('gpu')
    assert DynamicLossScaler(torch.device('cpu', 0)).is_enabled()

def test_off_without_an_accelerator(monkeypatch):
    "In our words, and not in PyTorch's"
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        scaler = DynamicLossScaler('cuda')
        DynamicLossScaler('cuda', enabled=False)
    assert [type(w.message) for w in said] == [FastaccumWarning] and not scaler.is_enabled()
    assert "DynamicLossScaler('cpu')" in str(said[0].message) and 'enabled=False' in str(said[0].message)
