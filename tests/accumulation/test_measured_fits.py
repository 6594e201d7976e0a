"""Losses of one's own, against plain fastai with the big batch: every mean is exact, whatever it divides by; others are told. With
check_loss='always' no rule is trusted"""
import warnings, pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import Callback, CancelValidException, DataLoader, DataLoaders, Learner, SGD, set_seed, tensor
from fastaccum.all import FastaccumWarning, GradientAccumulation, TrainingCheckpoint

def each(p, y): return F.cross_entropy(p, y, reduction='none')
def bce(p, y): return F.binary_cross_entropy_with_logits(p, y, reduction='none')

# targets of 48 items
def classes(): return torch.randint(4, (48,))
def rare(): return torch.where(torch.rand(48) < .06, 3, torch.randint(3, (48,)))
def ignored(): return torch.where(torch.rand(48) < .3, -100, torch.randint(4, (48,)))
def boxes(): return (torch.rand(48, 4) < .15).double()
def late():
    "Most micro-batches have no positive target, the first ones none at all"
    y = boxes()
    y[:10] = y[20:24] = 0
    return y
def numbers(): return torch.randn(48, 4).double()
def shares(): return torch.rand(48, 4).double()

def class_weights(p, y):
    w = tensor([.1, 1., 2., 5.]).to(p)[y]
    return (each(p, y)*w).sum()/w.sum()
def weights_of_its_own(p, y): return F.cross_entropy(p, y, weight=tensor([1., 2., 3., 9.]).to(p))
def per_positive(p, y): return bce(p, y).sum()/y.sum().clamp(min=1)
def at_least_five(p, y): return bce(p, y).sum()/y.sum().clamp(min=5)
def plus_eps(p, y): return (bce(p, y)*y).sum()/(y.sum() + .01)
def masked(p, y):
    m = y > .2
    return ((p-y).square()*m).sum()/m.sum().clamp(min=1)
def by_index(p, y): return (p-y)[y > .2].square().mean()
def soft_mask(p, y): return ((p-1).square()*y).sum()/y.sum()
def hard_items(p, y):
    "Which items count is a matter of the outputs, each by itself"
    l = each(p, y)
    m = (l > 1.2).detach()
    return (l*m).sum()/m.sum().clamp(min=1)
def detached_weights(p, y):
    l = each(p, y)
    w = (1-torch.exp(-l.detach()))**2
    return (l*w).sum()/w.sum()
def a_sum(p, y): return each(p, y).sum()/24
def quantile(p, y): return torch.maximum(.9*(y-p), .1*(p-y)).mean()

means = [(class_weights, classes), (weights_of_its_own, rare), (per_positive, boxes), (per_positive, late), (at_least_five, boxes),
         (at_least_five, late), (plus_eps, boxes), (masked, numbers), (by_index, numbers), (soft_mask, shares), (hard_items, classes),
         (detached_weights, classes), (a_sum, classes), (quantile, numbers), (F.cross_entropy, ignored)]

def dice(p, y): return 1 - 2*(p.sigmoid()*y).sum()/(p.sigmoid().sum() + y.sum() + 1)
def rmse(p, y): return (p-y).square().mean().sqrt()
def norm(p, y): return (p-y).norm()
def mining(p, y): return each(p, y).topk(max(len(y)//2, 1)).values.mean()
def centred(p, y): return each(p-p.mean(0), y).mean()
def balanced(p, y):
    times = torch.bincount(y, minlength=4)
    return (each(p, y)/times.clamp(min=1)[y]).sum()/(times > 0).sum()
def two_divisors(p, y): return bce(p, y).mean() + .1*((p-1).square()*y).sum()/y.sum().clamp(min=1)
def attraction(p, y):
    same = (y[:,None] == y[None]).to(p).fill_diagonal_(0)
    return p.square().mean() + ((p[:,None]-p[None]).square().sum(-1)*same).sum()/len(p)
def by_size(p, y): return each(p, y).mean() if len(y) < 20 else each(p, y).topk(len(y)//2).values.mean()
def capped(p, y): return each(p, y).sum()/min(len(y), 15)
def power(p, y): return bce(p, y).sum()/(y.sum()**.9 + 1)
def by_the_largest(p, y): return (each(p, y)/each(p, y).detach().max()).mean()

others = [(dice, boxes), (rmse, numbers), (norm, numbers), (mining, classes), (centred, classes), (balanced, classes),
          (two_divisors, boxes), (attraction, classes), (by_size, classes), (capped, classes), (power, boxes), (by_the_largest, classes)]

class Losses(Callback):
    "Of the last step"
    order,run_valid = 60,False
    def after_batch(self): self.last = float(self.loss)

class NoValidation(Callback):
    def before_validate(self): raise CancelValidException

def mlp(): return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

def fit(loss, targets, *cbs, bs=24, seed=0, n_epoch=2, model=mlp):
    "Weights before and after, warnings, and the last step's loss"
    set_seed(seed)
    y = targets()
    x = torch.randn(len(y), 6).double()
    model = model().double()
    before,dl = flat(model),DataLoader(list(zip(x, y)), bs=bs)
    learn = Learner(DataLoaders(dl, dl, device='cpu'), model, loss_func=loss, opt_func=SGD, lr=.1, cbs=[*cbs, Losses(), NoValidation()])
    learn.remove_cbs([learn.progress, learn.recorder])                 # whose smooth loss is float32
    with warnings.catch_warnings(record=True) as told, learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(n_epoch)
    return before,flat(model),[str(w.message) for w in told if isinstance(w.message, FastaccumWarning)],learn.losses.last

def flat(model): return torch.cat([p.detach().flatten().clone() for p in model.parameters()])

splits = [(24, 7), (24, 1), (8, None), (2, None)]
def accumulated(mbs, check='always'): return GradientAccumulation(24, micro_batch_size=mbs, check_loss=check)

def compared(loss, targets, bs, mbs, *cbs, check='always', **kwargs):
    "(how far of the distance moved, warnings) of accumulation; its last loss is the whole batch's, where that is one loader batch"
    before,whole,_,last = fit(loss, targets, *cbs, **kwargs)
    _,ours,told,own_last = fit(loss, targets, accumulated(mbs, check), *cbs, bs=bs, **kwargs)
    off = float((ours-whole).norm()/(whole-before).norm())
    if bs == 24 and not told: assert own_last == pytest.approx(last, rel=1e-8)
    return off,told

def in_turn(losses, n):
    "Each loss with `n` of the splits, the next ones with others; every second one trusts no rule"
    def case(i, k, f, y):
        slow = [pytest.mark.slow]*(k > 0)
        return pytest.param(f, y, *splits[(n*i+k)%4], (True, 'always')[k], id=f'{f.__name__}-{y.__name__}-{k}', marks=slow)
    return [case(i, k, *o) for i,o in enumerate(losses) for k in range(n)]

@pytest.mark.parametrize('loss,targets,bs,mbs,check', in_turn(means, 2))
def test_means_are_exact(loss, targets, bs, mbs, check):
    off,told = compared(loss, targets, bs, mbs, check=check)
    assert off < 1e-9
    assert all('a_sum is a sum, not a mean' in m for m in told) and len(told) == (loss is a_sum and bs < 24)

@pytest.mark.parametrize('loss,targets,bs,mbs,check', in_turn(others, 2))
def test_others_are_told(loss, targets, bs, mbs, check):
    off,told = compared(loss, targets, bs, mbs, check=check)
    assert off > 1e-9 and len(told) == 1 and loss.__name__ in told[0]

class Trusted(Callback):
    "In which steps was the rule enough?"
    order = 60
    def before_fit(self): self.steps = []
    def before_backward(self):
        accumulation = getattr(self.learn, 'gradient_accumulation', None)
        if accumulation is None or accumulation.acc.losses: return
        self.steps.append(accumulation.facts.trust.holds)
        self.said = accumulation.loss_rule

def by_mask(p, y): return (each(p, y)*(y > 0)).sum()/(y > 0).sum().clamp(min=1)

@pytest.mark.slow
def test_a_rule_is_trusted_until_it_is_wrong():
    "It is measured in two steps, ever more rarely, and in the first step of each epoch. There it shows that the loss is another one"
    class Changing(nn.Module):
        late = False
        def forward(self, p, y): return by_mask(p, y) if self.late else F.cross_entropy(p, y)
    class Late(Callback):
        def before_epoch(self): self.learn.loss_func.late = self.learn.epoch >= 8
    trusted = Trusted()
    off,told = compared(Changing(), classes, 8, 3, trusted, n_epoch=8)
    assert off < 1e-9 and told == [] and not any(trusted.steps)           # 'always'
    off,told = compared(Changing(), classes, 8, 3, trusted, check=True, n_epoch=8)
    assert off < 1e-9 and told == [] and not any(trusted.steps[:3]) and sum(trusted.steps) >= 5 and not any(trusted.steps[::2])
    off,told = compared(Changing(), classes, 8, 3, Late(), trusted, check=True, n_epoch=12)
    assert off < 1e-9 and len(told) == 1 and '%' in told[0] and trusted.said == 'measured at each micro-batch'

def in_blocks():
    "Each step has another class, so that each by itself is a mean over items"
    return torch.arange(8).repeat_interleave(6)%4
def positives_late():
    "The first steps have none, so that a floor looks like a sum"
    return torch.cat([torch.zeros(24, 4), (torch.rand(24, 4) < .5).float()]).double()

@pytest.mark.parametrize('loss,targets', {
    'class weights': (lambda p, y: F.cross_entropy(p, y, torch.arange(1., 5.).double()), in_blocks),
    'floor': (lambda p, y: bce(p, y).sum()/y.sum().clamp(min=1), positives_late)}.values(), ids=['class weights','floor'])
def test_steps_that_are_alike_prove_no_rule(loss, targets):
    for mbs in (1, 4):
        before,whole,*_ = fit(loss, targets, bs=6)
        _,ours,told,_ = fit(loss, targets, GradientAccumulation(6, micro_batch_size=mbs), bs=6)
        assert float((ours-whole).norm()/(whole-before).norm()) < 1e-9 and told == []

@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_what_is_not_finite_stays_so(value):
    "No items count beside others whose loss is not finite either"
    _,ours,told,_ = fit(lambda p, y: each(p, y).mean()*value, classes, accumulated(8, True))
    assert ours.isnan().any()

def test_items_that_count_only_beside_others():
    "Without positives its own loss is infinite, and yet its items count in the big batch"
    def by_positives(p, y): return bce(p, y).sum()/y.sum()
    for bs,mbs in ((24, 1), (2, None), (8, 3)):               # of loader batches to come nothing is known
        off,told = compared(by_positives, late, bs, mbs)
        assert off < 1e-9 and told == []

def test_items_whose_reference_nobody_would_guess():
    "Those of the first micro-batches are left out, if they are all of their loader batches"
    def by_code(p, y): return bce(p, (y > 3).to(p)).sum()/(y > 3).sum()
    for bs,mbs in ((24, 1), (2, None)):
        off,told = compared(by_code, lambda: late()*5, bs, mbs)
        if mbs: assert off < 1e-9 and told == []
        else: assert len(told) == 1 and '100% of its items are left out' in told[0]

@pytest.mark.parametrize('check', ['always', True])
def test_a_floor_that_rises(check):
    "From one epoch to the next, so that what was measured before is below it. Where a rule was trusted, it is told"
    class Rising:
        least = 2.
        def __call__(self, p, y): return (bce(p, y)*y).sum()/y.sum().clamp(min=self.least)
    class Rise(Callback):
        def before_epoch(self): self.learn.loss_func.least = 2. + 6*self.learn.epoch
    for bs,mbs in ((24, 7), (24, 1), (8, None)):
        off,told = compared(Rising(), boxes, bs, mbs, Rise(), check=check, n_epoch=3)
        assert off < 1e-9 and (told == [] or check is True and len(told) == 1 and 'has changed' in told[0]), (off, told)

def ends_without():
    "The second half has no positive target"
    return torch.cat([boxes()[:24], torch.zeros(24, 4).double()])

@pytest.mark.parametrize('bs,mbs', [(24, 1), (24, 7), (8, None), (6, 4)])
@pytest.mark.parametrize('finite', [True, False])
def test_a_step_in_which_nothing_divides(bs, mbs, finite):
    "Its items would count beside those of others, of which there are none: what its loss says then holds, 0 or no number"
    def by_positives(p, y): return 0*p.sum() if finite and not y.any() else bce(p, y).sum()/y.sum()
    off,told = compared(by_positives, ends_without, bs, mbs) if finite else (0., [])
    assert off < 1e-9 and told == []
    if not finite:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            runs = [fit(by_positives, ends_without, *cbs, bs=size, n_epoch=1) for cbs,size in (((), 24), ([accumulated(mbs)], bs))]
        assert all(ours.isnan().any() for _,ours,*_ in runs)

def test_the_row_of_a_step_in_which_nothing_counts():
    "It is 0 for a loss with a floor"
    def floored(p, y): return (bce(p, y)*y).sum()/y.sum().clamp(min=1)
    for bs,mbs in ((24, 7), (8, None)):
        runs = [fit(floored, ends_without, *cbs, bs=size, n_epoch=1) for cbs,size in (((), 24), ([accumulated(mbs)], bs))]
        assert runs[0][-1] == 0. == runs[1][-1] and runs[1][2] == []

class Penalty(Callback):
    "A term that each item has, however many of its targets count"
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad + .1*self.pred.logsumexp(1).square().mean()

class Elsewhere(Callback):
    def after_loss(self):
        if not self.training: return
        self.learn.loss_grad = class_weights(self.pred, self.y.clamp(min=0))
        self.learn.loss = self.loss_grad.detach()

@pytest.mark.parametrize('bs,mbs', splits[:3:2])
def test_terms_and_losses_of_callbacks(bs, mbs):
    "A term with a divisor of its own is told; one that has the loss's is exact, as is a loss in the place of loss_func's"
    off,told = compared(F.cross_entropy, classes, bs, mbs, Penalty())
    assert off < 1e-9 and told == []
    off,told = compared(nn.CrossEntropyLoss(), ignored, bs, mbs, Penalty())
    assert off > 1e-6 and len(told) == 1
    off,told = compared(lambda p, y: p.mean(), ignored, bs, mbs, Elsewhere())
    assert off < 1e-9 and told == []

class Spread(Callback):
    "A term that compares items"
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad + .1*self.pred.std(0, correction=0).sum()

@pytest.mark.parametrize('bs,mbs', splits)
@pytest.mark.parametrize('loss,targets', [(nn.CrossEntropyLoss(), classes), (nn.MSELoss(), numbers), (class_weights, classes)])
def test_a_term_that_compares_items(loss, targets, bs, mbs):
    "Beside a loss that is known, too"
    off,told = compared(loss, targets, bs, mbs, Spread(), check=True)
    assert off > 1e-6 and len(told) == 1 and 'Spread' in told[0] and '% off' in told[0]

class InPlace(Callback):
    "Adds a term of activations as fastai's RNNRegularizer does"
    order = 60
    def after_loss(self):
        if self.training: self.learn.loss_grad += .1*self.learn.model[0](self.x).square().mean()
    def before_step(self): self.replaced = self.learn.gradient_accumulation.facts.replaced

def test_a_term_of_activations_is_none_of_the_outputs():
    cb = InPlace()
    fit(nn.CrossEntropyLoss(), classes, accumulated(7, True), cb)
    assert cb.replaced is None

class Teacher(nn.Linear):
    def __deepcopy__(self, memo): raise RuntimeError('I am large')

class Distils(Callback):
    "A term with the outputs of a model that it holds"
    def __init__(self): self.teacher = Teacher(6, 4).double().requires_grad_(False)
    def after_loss(self):
        if not self.training: return
        wanted = self.teacher(self.x).softmax(-1)
        self.learn.loss_grad = self.loss_grad + F.kl_div(self.pred.log_softmax(-1), wanted, reduction='batchmean')

@pytest.mark.parametrize('bs,mbs', splits[:3:2])
def test_a_term_with_a_model(bs, mbs):
    "Its items are met with their own inputs, and the model is not copied"
    off,told = compared(nn.CrossEntropyLoss(), classes, bs, mbs, Distils(), check=True)
    assert off < 1e-9 and told == []

class Stop(Callback):
    "After the batch with this number"
    order = 2000
    def __init__(self, at): self.at = at
    def after_batch(self):
        if self.training and self.learn.train_iter == self.at: raise KeyboardInterrupt

@pytest.mark.parametrize('at', [14, 30])
@pytest.mark.parametrize('loss,check,cbs', [(masked, True, ()), (quantile, True, ()), (masked, 'always', ()),
                                            (nn.MSELoss(), True, (Penalty,))])
def test_a_resumed_fit_is_the_same_to_the_bit(tmp_path, at, loss, check, cbs):
    """Where each micro-batch is measured, where a rule is trusted from the third step on, where none is, and where a callback adds a
    term"""
    def run(folder, *more):
        own = [*(cb() for cb in cbs), *more]
        return fit(loss, numbers, accumulated(None, check), TrainingCheckpoint(tmp_path/folder, every_steps=1), *own, bs=2, n_epoch=3)
    _,whole,*_ = run('whole')
    with pytest.raises(KeyboardInterrupt): run('stopped', Stop(at))
    _,ours,told,_ = run('stopped')
    assert torch.equal(ours, whole) and len(told) == 1 and 'Stop was removed' in told[0]

def test_after_running_out_of_memory_it_is_the_same_to_the_bit():
    "The loader batch starts again from what was known before"
    class Full(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(6, 4).double()
        def forward(self, x):
            if len(x) > 5: raise torch.OutOfMemoryError
            return self.l(x)
    def run(acc, model):
        set_seed(0)
        dl = DataLoader(list(zip(torch.randn(48, 6).double(), numbers())), bs=24)
        learn = Learner(DataLoaders(dl, dl, device='cpu'), model(), loss_func=masked, opt_func=SGD, lr=.1, cbs=[acc, NoValidation()])
        learn.remove_cbs([learn.progress, learn.recorder])
        with learn.no_logging(): learn.fit(2)
        return flat(learn.model)
    sizes = [run(accumulated(k), Full) for k in (3, 'auto')]           # 24, 12, 6, 3
    assert torch.equal(*sizes)

class WithFeatures(nn.Module):
    "Of its outputs one is computed from the other"
    def __init__(self):
        super().__init__()
        self.body,self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()),nn.Linear(8, 4)
    def forward(self, x):
        features = self.body(x)
        return self.head(features),features

class Decay(Callback):
    "A term of the weights"
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad + .01*self.model.head.weight.square().sum()

@pytest.mark.parametrize('cbs', [[], [Decay]], ids=['', 'Decay'])
@pytest.mark.parametrize('bs,mbs', splits)
def test_an_output_computed_from_another(bs, mbs, cbs):
    "Gradients are those beside others, for both of them; also in steps in which few targets count, or none. Those of a term stay"
    def few(): return boxes()*(torch.rand(48, 1) < .3)
    def targets(): return torch.cat([boxes(), few(), few(), few(), torch.zeros(48, 4).double()])
    def loss(p, y):
        divisor = (1+y).sum() if cbs else y.sum().clamp(min=5)                 # at a floor, a term comes with each micro-batch
        return ((bce(p[0], y)*(1+y)).sum() + .3*(p[1].square().sum(1)*(1+y[:,0])).sum())/divisor
    for check in (True, 'always'):
        off,told = compared(loss, targets, bs, mbs, *[cb() for cb in cbs], check=check, n_epoch=3, model=WithFeatures)
        assert off < 1e-9 and told == [], (check, off, told)

def test_a_term_that_comes_later_is_kept():
    "Also before it is found out"
    def loss(p, y): return (each(p, y)*(1+y)).sum()/(1+y).sum()
    class Sometimes(Callback):
        weight = 0.
        def after_loss(self):
            if self.training and self.learn.iter%8 == 6: self.learn.loss_grad = self.loss_grad + self.weight*self.pred.square().mean()
    def run(weight):
        cb = Sometimes()
        cb.weight = weight
        before,after,*_ = fit(loss, classes, accumulated(None, True), cb, bs=4)
        return before,after
    (before,without),(_,with_term) = run(0.),run(3.)
    assert (with_term-without).norm() > .05*(without-before).norm()

class Kept(Callback):
    "What a loss keeps in each step"
    def before_fit(self): self.values = []
    def before_step(self): self.values.append(float(self.learn.loss_func.kept))

def test_values_that_a_loss_keeps():
    "They count by what it divides by, also at its floor"
    class Keeps(nn.Module):
        def forward(self, p, y):
            res = bce(p, y).sum()/y.sum().clamp(min=5)
            self.kept = res.detach()
            return res
    def targets(): return torch.cat([boxes(), boxes()*(torch.rand(48, 1) < .3), torch.zeros(24, 4).double()])
    runs = []
    for cbs in ([], [accumulated(4)]):
        cb = Kept()
        fit(Keeps(), targets, *cbs, cb, n_epoch=4)
        runs.append(cb.values)
    assert runs[1] == pytest.approx(runs[0], rel=1e-8)

class ByInputs(nn.Module):
    "Weights come from the inputs, which it finds in the Learner"
    learn = None
    def forward(self, p, y):
        w = 1 + self.learn.x[:,:1].abs()
        res = (bce(p, y)*w).sum()/w.sum()/4
        self.kept = res.detach()
        return res

class Shows(Kept):
    def before_fit(self):
        super().before_fit()
        ByInputs.learn = self.learn

@pytest.mark.parametrize('bs,mbs', splits)
def test_a_loss_that_looks_at_inputs(bs, mbs):
    "What it keeps is that of the whole batch, too, also where micro-batches have one item"
    kept = []
    for size,cbs in ((24, []), (bs, [accumulated(mbs)])):
        cb = Shows()
        before,after,told,_ = fit(ByInputs(), boxes, *cbs, cb, bs=size, n_epoch=3)
        kept.append((after, cb.values))
        assert told == []
    assert (kept[1][0]-kept[0][0]).norm() < 1e-9*(kept[0][0]-before).norm()
    if bs == 24: assert kept[1][1] == pytest.approx(kept[0][1], rel=1e-8)
