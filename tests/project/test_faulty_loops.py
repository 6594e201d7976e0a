"Forty loops with one bug each, of the kinds that users of other libraries report, and ten without: conformance tells them apart"
import inspect
from functools import partial
from pathlib import Path
import pytest, torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from bench import peers
from fastaccum.conformance import CASES, ProtocolError, accumulated, check, detection_loss, evaluate, masked_loss, own_loss, pair_loss
from fastaccum.core.accumulator import GradientAccumulator

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore:Detected call of .lr_scheduler:UserWarning')]

# -- A loop, line by line as users write it
def counted(loss_func, y):
    "What the loss averages over"
    if loss_func in (detection_loss, pair_loss): return y.sum()
    if loss_func is own_loss: return (y >= 0).sum()
    if loss_func is masked_loss: return y[..., 1].sum()
    weight = getattr(loss_func, 'keywords', {}).get('weight')
    return (y != -100).sum() if weight is None else weight[y].sum()

def saved(job): return Path(job.folder)/'last.pt' if job.folder else None

def sees_batch(job):
    "Does the model do more than each item for itself?"
    return any(isinstance(m, (nn.BatchNorm1d, nn.Dropout)) for m in job.model.modules())

def save(job, place, rng, *parts):
    if job.folder: torch.save(dict(place=place, rng=rng, parts=[o.state_dict() for o in (job.model, *parts)]), saved(job))

def load(job, loader, *parts):
    if not (job.folder and saved(job).exists()): return 0,0
    found = torch.load(saved(job))
    for o,state in zip((job.model, *parts), found['parts']): o.load_state_dict(state)
    torch.set_rng_state(found['rng'][0])
    loader.generator.set_state(found['rng'][1])
    return found['place']

def loop(job):
    if sees_batch(job): raise NotImplementedError('no BatchNorm, no dropout')
    params = [*job.model.parameters()]
    opt,scaler,loader = job.optimizer(params),job.scaler(),job.loader()
    sched = job.scheduler(opt)
    opt.zero_grad()
    place = load(job, loader, opt, sched)
    for epoch in range(place[0], job.epochs):
        rng = torch.get_rng_state(),loader.generator and loader.generator.get_state()
        total,items = 0,0
        for i,(x,y) in enumerate(loader, 1):
            if (epoch, i) <= place: continue
            with job.autocast(): loss = job.loss(job.model(x), y)
            count = counted(job.loss_func, y)
            scaler.scale(loss*(count or 1)).backward()
            total,items = total+count,items+len(x)
            if items >= job.accum_bs or i == len(loader):
                for p in params: p.grad /= total or 1
                scaler.unscale_(opt)
                if job.clip: clip_grad_norm_(params, job.clip)
                scaler.step(opt)
                scaler.update()
                sched.step()
                opt.zero_grad()
                total = items = 0
                save(job, (epoch, i), rng, opt, sched)
            if job.valid and i%job.valid_every == 0:
                evaluate(job)

LOOP = ''.join(inspect.getsource(f) for f in (counted, saved, save, load, loop))
BACKWARD,CLIP,DIVIDE = '.backward()\n','if job.clip: clip_grad_norm_(params, job.clip)\n','for p in params: p.grad /= total or 1\n'
UNSCALE,GAP = 'scaler.unscale_(opt)\n',' '*16
ZERO,AT_END = f'opt.zero_grad()\n{GAP}total',' or i == len(loader)'
def rate(job, n, i): return job.lr_at(i/(job.epochs*n)) if job.lr_at else 1
def each(line): return BACKWARD, f'.backward()\n            {line}\n'     # at each micro-batch

# Of such bugs tell, for example, issues 963 of Accelerate, 4427, 18089, 19987 and 20350 of Lightning, 5605 and 34191 of Transformers.
# The bug, the case that is about it, the text of the loop, and what is there instead; then further such pairs
FAULTS = {
    # what a micro-batch counts, and what the sum is divided by
    'does not divide': ('remainder', DIVIDE, 'pass\n'),
    'divides by the size of a full step': ('remainder', 'total or 1', 'job.accum_bs'),
    'the mean of means': ('ragged end', '= counted(job.loss_func, y)', '= torch.tensor(1)'),
    'the last micro-batch counts as a full one': ('ragged end', 'y)\n            scaler', 'y)*job.micro_bs/len(x)\n            scaler'),
    'padding counts': ('tokens', '(y != -100)', '(y == y)'),
    'labels are counted before they are shifted': ('tokens', '(y != -100)', '(y[..., 1:] != -100)'),
    'class weights do not count': ('class weights', 'weight[y].sum()', 'torch.tensor(len(y))'),
    'a loss of the user counts all targets': ('own loss', '(y >= 0).sum()', 'torch.tensor(len(y))'),
    'a micro-batch without objects counts nothing': ('detection', '(count or 1)', 'count'),
    'a micro-batch without objects has one': ('detection', 'total+count', 'total+(count or 1)'),
    # when it steps
    'steps at each micro-batch': ('remainder', 'items >= job.accum_bs', 'True'),
    'waits for one micro-batch too many': ('clipping', 'items >= job.accum_bs', 'items > job.accum_bs'),
    'drops the last micro-batches of an epoch': ('remainder', AT_END, '', 'total,items = 0,0', 'total,items = 0,0; opt.zero_grad()'),
    'carries gradients into the next epoch': ('two epochs', AT_END, '', 'total,items = 0,0', 'if epoch == place[0]: total = items = 0'),
    'counts on over the end of an epoch': ('two epochs', 'items >= job.accum_bs', '(epoch*len(loader)+i)%job.n_acc == 0'),
    'steps once more at the end of an epoch': ('momentum', ZERO, ZERO.replace('()', '(set_to_none=False)'),
                                               'evaluate(job)', 'evaluate(job)\n        opt.step()'),
    'makes a new optimizer for each epoch': ('momentum', 'total,items = 0,0', 'total,items = 0,0; opt = job.optimizer(params)'),
    # when gradients are zeroed
    'zeroes before each backward': ('remainder', 'scaler.scale(', 'opt.zero_grad(); scaler.scale('),
    'zeroes before the step': ('remainder', 'scaler.step(opt)', 'opt.zero_grad(); scaler.step(opt)'),
    'never zeroes after a step': ('clipping', ZERO, ZERO.replace('opt.zero_grad()', 'pass')),
    'begins with the gradients of a failed fit': ('several fits', 'opt.zero_grad()\n    place', 'place'),
    'begins with the count of a failed fit': ('exception', 'total,items = 0,0', "total,items = getattr(job.model, 'left', (0, 0))",
                                              'items+len(x)', 'items+len(x); job.model.left = total,items',
                                              'total = items = 0', 'total = items = 0; job.model.left = 0,0'),
    # the schedule
    'moves the schedule at each micro-batch': ('schedules', 'sched.step()', 'pass', *each('sched.step()')),
    'moves the schedule before the step': ('schedules', 'scaler.step(opt)', 'sched.step(); scaler.step(opt)', GAP+'sched.step()\n', ''),
    'the schedule is as long as there are micro-batches': ('schedules', 'job.scheduler(opt)',
                                                           'LambdaLR(opt, partial(rate, job, len(loader)))'),
    # clipping
    'clips each micro-batch': ('clipping', CLIP, 'pass\n', *each(CLIP.strip())),
    'clips before it divides': ('clipping', DIVIDE+GAP+UNSCALE+GAP+CLIP, UNSCALE+GAP+CLIP+GAP+DIVIDE),
    'clips after the step': ('clipping', CLIP, 'pass\n', 'scaler.step(opt)\n', 'scaler.step(opt)\n'+GAP+CLIP),
    'divides the largest norm, too': ('clipping', 'job.clip)\n', 'job.clip/job.n_acc)\n'),
    'clips before it unscales': ('fp16 clipping', UNSCALE+GAP+CLIP, CLIP+GAP+UNSCALE),
    # the loss scale, and precision
    'unscales at each micro-batch': ('precision skip', *each('scaler.unscale_(opt)')),
    'steps in spite of infinity': ('precision skip', 'scaler.step(opt)', 'opt.step()'),
    'leaves out what is infinite in a micro-batch': ('precision skip', *each('for p in params: p.grad.nan_to_num_(0, 0, 0)')),
    'keeps the gradients of a skipped step': ('precision skip', ZERO, ZERO.replace('opt', 'if params[0].grad.isfinite().all(): opt')),
    'sums gradients in half precision': ('ragged end', *each('for p in params: p.grad = p.grad.half().float()')),
    # validation, resume
    'stays in evaluation mode': ('validation', 'evaluate(job)', 'evaluate(job); job.model.eval()'),
    'skips steps where it has to skip micro-batches': ('resume', 'save(job, (epoch, i)', 'save(job, (epoch, i//job.n_acc)'),
    'resumes without the state of the optimizer': ('resume', 'rng, opt, sched)', 'rng, sched)', 'loader, opt, sched)', 'loader, sched)'),
    # what no case notices: a loss scale cancels, and no case draws random numbers
    'begins with a new loss scale after each step': (None, 'scaler.update()', 'scaler = job.scaler()'),
    'restores no random generator': (None, "    torch.set_rng_state(found['rng'][0])\n", '')}

def planted(name):
    "The loop with this bug"
    case,*texts = FAULTS[name]
    code = LOOP
    for old,new in zip(texts[::2], texts[1::2]):
        assert code.count(old)==1, (name, old)
        code = code.replace(old, new)
    there = dict(globals())
    exec(code, there)
    return there['loop']

of_one_process = [k for k in CASES if k != 'two ranks']

def accused(results):
    "The cases in which a loop is not exact; those that it leaves out say nothing"
    return [r.case for r in results if not r.exact and (r.off is not None or r.error)]

def noticed(name):
    case = FAULTS[name][0]
    try: return bool(accused(check(planted(name), [case] if case else of_one_process)))
    except ProtocolError: return True      # it cannot be measured, and an error says why

def test_forty_faults(): assert len(FAULTS)==40 and sum(case is not None for case,*_ in FAULTS.values())==38

@pytest.mark.parametrize('name', FAULTS)
def test_fault(name): assert noticed(name)==(FAULTS[name][0] is not None)

# -- Loops without a bug, in as many styles
def needs(wrong, what):
    if wrong: raise NotImplementedError(what)

def in_steps(gradients):
    "A loop that gets the gradients of a step from `gradients(job, params, the micro-batches of the step, the loss scale)`"
    def train(job):
        needs(sees_batch(job), 'no BatchNorm, no dropout')
        params = [*job.model.parameters()]
        opt,scaler,loader = job.optimizer(params),job.scaler(),job.loader()
        sched = job.scheduler(opt)
        for _ in range(job.epochs):
            for micro_batches in steps_of(job, loader):
                opt.zero_grad()
                gradients(job, params, micro_batches, scaler.scale)
                scaler.unscale_(opt)
                if job.clip: clip_grad_norm_(params, job.clip)
                scaler.step(opt)
                scaler.update()
                sched.step()
                if job.valid: evaluate(job)
    return train

def steps_of(job, loader):
    found = []
    for batch in loader:
        found.append(batch)
        if sum(len(x) for x,_ in found) >= job.accum_bs: yield found; found = []
    if found: yield found

def loss_sum(job, x, y):
    "The sum that the loss divides, and the number that it is divided by"
    with job.autocast(): loss = job.loss(job.model(x), y)
    n = counted(job.loss_func, y)
    return loss*(n or 1),n

def total_first(job, params, micro_batches, scale):
    "What the step averages over is known before the first forward pass"
    total = sum(counted(job.loss_func, y) for _,y in micro_batches) or 1
    for x,y in micro_batches: scale(loss_sum(job, x, y)[0]/total).backward()

def one_backward(job, params, micro_batches, scale):
    "Keeps the graphs of all micro-batches"
    sums,counts = zip(*(loss_sum(job, x, y) for x,y in micro_batches))
    scale(sum(sums)/(sum(counts) or 1)).backward()

def own_sums(job, params, micro_batches, scale):
    "Adds up in double precision, beside the gradients"
    sums,total = [torch.zeros_like(p, dtype=torch.double) for p in params],0
    for x,y in micro_batches:
        loss,n = loss_sum(job, x, y)
        torch._foreach_add_(sums, [g.double() for g in torch.autograd.grad(scale(loss), params)])
        total = total+n
    for p,g in zip(params, sums): p.grad = (g/(total or 1)).float()

def weighted_mean(job, params, micro_batches, scale):
    "A running mean: what is there already weighs less with each micro-batch"
    total = 0
    for x,y in micro_batches:
        loss,n = loss_sum(job, x, y)
        before,total = total,total+n
        for p in params:
            if p.grad is not None: p.grad *= (before or 1)/(total or 1)
        scale(loss/(total or 1)).backward()

def smaller_parts(job, params, micro_batches, scale):
    "Splits the items of the step in parts of its own, and asks for sums: some parts have no target"
    x,y = (torch.cat(o) for o in zip(*micro_batches))
    total = counted(job.loss_func, y) or 1
    for x,y in zip(x.split(3), y.split(3)):
        with job.autocast(): loss = job.loss_func(job.model(x), y, reduction='sum')
        scale(loss/total).backward()

def accumulator(job, params, micro_batches, scale):
    "fastaccum's, without fastai"
    needs(job.loss_func is detection_loss, 'a loss with two numbers')
    acc = GradientAccumulator(params, job.accum_bs)
    for x,y in micro_batches:
        loss,n = loss_sum(job, x, y)
        scale(acc.add(loss/max(n, 1), len(x), n)).backward()
    acc.finish()

def accelerate(job):
    "The recipe of its page on gradient accumulation: divides by what the step averages over, and takes back its own division"
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    needs(job.precision == 'fp16' or sees_batch(job), 'no fp16, no BatchNorm, no dropout')
    AcceleratorState._reset_state(True)      # all share it
    acc = Accelerator(cpu=True, gradient_accumulation_steps=job.n_acc)
    model,opt,loader = acc.prepare(job.model, job.optimizer(job.model.parameters()), job.loader())
    sched = job.scheduler(opt.optimizer)
    opt.zero_grad()
    for _ in range(job.epochs):
        for micro_batches in steps_of(job, loader):
            total = sum(counted(job.loss_func, y) for _,y in micro_batches) or 1
            for x,y in micro_batches: acc.backward(loss_sum(job, x, y)[0]*job.n_acc/total)
            if job.clip: acc.clip_grad_norm_(model.parameters(), job.clip)
            opt.step()
            opt.zero_grad()
            sched.step()
            if job.valid: evaluate(job)

def plain_fastai(job):
    "A Learner with big batches, and no accumulation. After `learn.validate()` in mid-epoch it would train in evaluation mode"
    needs(job.shuffle or job.valid, 'no resume, no validation in mid-epoch')
    peers.fit(job, batches=accumulated(job))

FAULTLESS = dict(divides_once=loop, fastai=plain_fastai, fastaccum=peers.split, accelerate=accelerate,
                 **{f.__name__: in_steps(f) for f in (total_first, one_backward, own_sums, weighted_mean, smaller_parts, accumulator)})

def test_ten_faultless(): assert len(FAULTLESS)==10

@pytest.mark.parametrize('name', FAULTLESS)
def test_faultless(name):
    if name == 'accelerate': pytest.importorskip('accelerate')
    results = check(FAULTLESS[name], of_one_process)
    assert accused(results)==[] and sum(r.exact for r in results) >= 14
