"How exact is your trainer? What the cases notice, the command, and what it says about a script that it cannot measure"
import json, os, re, subprocess, sys
from dataclasses import replace
from pathlib import Path
import pytest, torch
from torch import nn
from fastaccum import conformance
from fastaccum.conformance import CASES, Batches, Interrupted, ProtocolError, accumulated, big_batch, check, mapped

root = Path(__file__).resolve().parents[2]
HEAD = 'from torch.nn.utils import clip_grad_norm_\n'

def page_loops():
    "The two loops that the tutorial shows: one that fails, one that passes"
    cells = json.loads((root/'nbs/tutorials/how_exact.ipynb').read_text(encoding='utf-8'))['cells']
    sources = [''.join(c['source']) for c in cells]
    return [HEAD + s.split('\nprint(')[0] for s in sources if 'def train(job)' in s]

def run(tmp_path, code):
    "`python -m fastaccum.conformance my_loop.py` in a process of its own"
    (tmp_path/'my_loop.py').write_text(code, encoding='utf-8')
    env = os.environ | dict(PYTHONPATH=str(root), PYTHONWARNINGS='ignore')
    return subprocess.run([sys.executable, '-m', 'fastaccum.conformance', 'my_loop.py'], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=120)

def loop(*, divide=lambda job, i: job.n_acc, micro=lambda job: None, step=lambda job, opt: opt.step(), clean=True, at_end=True):
    "A loop with parts to be replaced"
    def train(job):
        opt,n = job.optimizer(job.model.parameters()),0
        if clean: opt.zero_grad()
        for _ in range(job.epochs):
            for i,(x,y) in enumerate(job.loader(), 1):
                n += 1
                (job.loss(job.model(x), y)/divide(job, i)).backward()
                micro(job)
                if n == job.n_acc or (at_end and i == len(job.loader())):
                    step(job, opt)
                    opt.zero_grad()
                    n = 0
    return train

# -- What is noticed
def test_twenty_three_cases(): assert len(CASES)==23

without_resume = [k for k in CASES if k not in ('resume','two ranks')]       # which big batches in one process do not show

def test_big_batches_are_exact(): assert all(r.off==0 and r.steps==r.expected for r in check(big_batch, without_resume))

def clip_each(job): nn.utils.clip_grad_norm_(job.model.parameters(), job.clip)
def halved(job, opt):
    for g in opt.param_groups: g['lr'] *= .5
    opt.step()
@pytest.mark.parametrize('case,wrong,right', [
    ('remainder', loop(), loop(divide=lambda job, i: min(job.n_acc, len(job.batches)))),
    ('remainder', loop(at_end=False), None),
    ('two epochs', loop(divide=lambda job, i: 1 if i == 3 else 2, at_end=False), loop(divide=lambda job, i: 1 if i == 3 else 2)),
    ('several fits', loop(clean=False), loop()),
    ('clipping', loop(micro=clip_each), loop(step=lambda job, opt: (clip_each(job), opt.step()))),
    ('clipping', loop(), None),
    ('schedules', loop(), None),
    ('schedules', loop(step=halved), None),
    ('any size', loop(divide=lambda job, i: job.accum_bs/job.micro_bs), loop())])
def test_noticed(case, wrong, right):
    "A mistake is seen in the case that is about it, and the loop without it passes"
    r, = check(wrong, [case])
    assert not r.exact and r.off > .01
    if right: assert check(right, [case])[0].exact

@pytest.mark.parametrize('name', without_resume)
def test_one_item_is_noticed(name):
    "One item of a step's that counts twice"
    def twice(job):
        big_batch(
            replace(job, batches=mapped(accumulated(job), lambda x, y: (torch.cat([x[:1], x]), torch.cat([y[:1], y]))),
                    n_acc=1))
    r, = check(twice, [name])
    assert r.off > 10*CASES[name].tol

def scaled(job):
    "(optimizer, loss scaler) after the backward pass of each big batch"
    opt,scaler = job.optimizer(job.model.parameters()),job.scaler()
    for x,y in accumulated(job):
        with job.autocast(): loss = job.loss_func(job.model(x), y)
        scaler.scale(loss).backward()
        yield opt,scaler

def fp16(*, skip):
    "Training in fp16 that steps on what overflowed, zeroes it first, or skips the step"
    def train(job):
        for opt,scaler in scaled(job):
            if skip == 'zero':
                for p in job.model.parameters(): p.grad.nan_to_num_(0., 0., 0.)
            if skip == 'not':
                for p in job.model.parameters(): p.grad /= job.init_scale
                opt.step()
            else: scaler.step(opt); scaler.update()
            opt.zero_grad()
    return train

def test_overflow():
    "A step that is not skipped makes the weights not finite; one with some of its gradients is another step"
    not_skipped,zeroed,skipped = (check(fp16(skip=o), ['precision skip'])[0] for o in ('not', 'zero', 'skip'))
    assert str(not_skipped)=='not finite' and not_skipped.steps==3
    assert zeroed.steps==3 and skipped.exact and skipped.steps==2

def clips(*, early):
    "Training in big batches that clips before it unscales, or after it"
    def train(job):
        for opt,scaler in scaled(job):
            if early: clip_each(job)
            scaler.unscale_(opt)
            if not early: clip_each(job)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return train

@pytest.mark.parametrize('early', [False, True])
def test_clipping_with_a_loss_scale(early):
    "Without a scale there is nothing to notice"
    assert [r.exact for r in check(clips(early=early), ['clipping', 'fp16 clipping'])]==[True, not early]

def test_the_same_for_everybody():
    "Data and weights depend on no one's random numbers, and use none of theirs"
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a,b = CASES['tokens'].job(),(torch.rand(3), CASES['tokens'].job())[1]
    assert (all(x.equal(y) for (x,_),(y,_) in zip(a.batches, b.batches))
            and conformance.flat_weights(a.model).equal(conformance.flat_weights(b.model)))
    torch.set_rng_state(state)
    CASES['tokens'].job()
    assert torch.get_rng_state().equal(state)

def test_interrupted_batches():
    batches = Batches(range(4), 2)
    seen = []
    with pytest.raises(Interrupted):
        for b in batches: seen.append(b)
    assert seen==[0, 1] and batches[3]==3 and list(Batches(range(3)))==[0, 1, 2]

@pytest.mark.slow
def test_needs_no_fastai():
    "Nor do the two processes"
    code = """if True:
        import sys; sys.modules['fastai'] = None
        from fastaccum.conformance import check
        def train(job):
            opt = job.optimizer(job.model.parameters())
            for x,y in job.loader(): (job.loss(job.model(x), y)/job.n_acc).backward()
            opt.step()
        print(*check(train, ['two ranks', 'clipping']), sep=', ')"""
    env = os.environ | dict(PYTHONPATH=str(root))
    res = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=120)
    assert re.fullmatch(r'each process trains on all items, \d+%\n', res.stdout), res.stderr

# -- The command
@pytest.mark.slow
def test_loops_of_the_page(tmp_path, capsys):
    fails,passes = page_loops()
    res = run(tmp_path, fails)
    assert res.returncode==1 and '6 of 20 are exact.' in res.stdout and not res.stderr
    assert 'tokens: Does each token count alike' in res.stdout and 'clipping:' not in res.stdout
    code,out = command(tmp_path, capsys, passes)
    assert code==1 and '17 of 20 are exact.' in out.out and not out.err

def command(tmp_path, capsys, code, *args):
    "The same in this process, which is faster: exit code, and what was printed"
    (tmp_path/'my_loop.py').write_text(code, encoding='utf-8')
    return conformance.main([str(tmp_path/'my_loop.py'), *args]), capsys.readouterr()

def test_one_case(tmp_path, capsys):
    code,out = command(tmp_path, capsys, page_loops()[0], '--case', 'clipping', '--case', 'any size')
    assert code==0 and '2 of 2 are exact.' in out.out and 'tokens' not in out.out
    with pytest.raises(SystemExit): conformance.main(['x.py', '--case', 'clip'])
    assert "invalid choice: 'clip'" in capsys.readouterr().err

def test_left_out_and_failed(tmp_path, capsys):
    code,out = command(tmp_path, capsys, "def train(job): raise NotImplementedError('no clipping')", '--case', 'clipping')
    assert code==0 and 'left out' in out.out and 'no clipping' in out.out and '0 of 0' in out.out
    code,out = command(tmp_path, capsys, "def train(job): job.nothing_like_it", '--case', 'clipping')
    assert code==1 and 'failed' in out.out and "AttributeError: 'Job' object has no attribute 'nothing_like_it'" in out.out
    assert 'my_loop.py", line 1, in train' in out.err

ZEROES_FIRST = '''def train(job):
    opt = job.optimizer(job.model.parameters())
    for x,y in job.loader():
        job.loss_func(job.model(x), y).backward()
        opt.zero_grad(); opt.step()'''
@pytest.mark.parametrize('code,says', [
    ('x = 1', 'has no function `train`'),
    ('train = 3', 'has no function `train`'),
    ('def train(): pass', 'cannot be called with one argument'),
    ('def train(job, steps): pass', 'cannot be called with one argument'),
    ('def train(job) pass', 'cannot be imported: SyntaxError'),
    ('import no_such_module_at_all', "No module named 'no_such_module_at_all'"),
    ('def train(job): big(job.fresh())\nfrom fastaccum.conformance import big_batch as big', 'Train job.model itself, not a copy of it'),
    (ZEROES_FIRST, 'zero the gradients after the step, not before it'),
    ('import torch\ndef train(job):\n    for p in job.model.parameters(): p.data += 1', 'Make the optimizer with job.optimizer')])
def test_script_that_cannot_be_measured(tmp_path, capsys, code, says):
    code,out = command(tmp_path, capsys, code, '--case', 'remainder')
    assert code==2 and says in out.err and not out.out

def test_file(tmp_path, capsys):
    assert conformance.main([str(tmp_path/'none.py')])==2 and 'there is no such file' in capsys.readouterr().err
    (tmp_path/'a.txt').write_text('')
    assert conformance.main([str(tmp_path/'a.txt')])==2 and 'is not a Python file' in capsys.readouterr().err

def test_arguments():
    with pytest.raises(ValueError, match='clip: the cases are ragged end, any size'): check(big_batch, ['clip'])
    with pytest.raises(TypeError, match='pass a function of a Job'): check(None)
    with pytest.raises(ProtocolError): check(lambda job: big_batch(job.fresh()), ['tokens'])

def test_random_numbers_stay_as_they_were():
    "A case draws, and seeds PyTorch where a step begins"
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert [r.off for r in check(big_batch, ['dropout'])] == [0.]
    assert torch.equal(torch.get_rng_state(), before)
