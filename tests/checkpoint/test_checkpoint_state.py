"What is saved, what is put back where, what is refused: nothing is lost without a word"
import threading
from collections import Counter
import pandas as pd, pytest
from quick import quickly
import torch.utils.data as torch_data
from reference import *
from fastai.callback.mixup import MixUp
from fastai.callback.tracker import EarlyStoppingCallback
from fastai.callback.training import GradientClip
from fastai.data.all import RandomSplitter, TfmdDL
from test_checkpoint import Interrupt, Stateless, data, fastai_dl, make, net, new_process, one_process, run, test_eq_bits
from fastaccum.checkpoint.callback import *
from fastaccum.checkpoint.files import read_checkpoint, write_checkpoint
from fastaccum.checkpoint.folder import CheckpointFolder

def check(case, at=(2, 3), every=3):
    "Interrupted and resumed, it is the whole run"
    whole = run(case)
    run(case, TrainingCheckpoint(every_steps=every), stop=Interrupt(at))
    new_process()
    learn = run(case, TrainingCheckpoint(every_steps=every))
    test_eq_bits(learn, whole)
    return learn,whole

class Clip(Callback):
    "Clips the parameters that it has in a list, made once"
    def before_fit(self): self.params,self.n = [p for p in self.learn.model.parameters()],0
    def before_step(self): self.n += 1; nn.utils.clip_grad_norm_(self.params, .05)

class EMA(Callback):
    "Keeps an average, and pulls the weights towards it"
    def before_fit(self):
        self.average,self.shadow,self.params = (deepcopy(self.learn.model),
                                                [p.detach().clone() for p in self.learn.model.parameters()],
                                                list(self.learn.model.parameters()))
    def after_step(self):
        for e,s,p in zip(self.average.parameters(), self.shadow, self.params):
            e.data.lerp_(p.data, .1); s.lerp_(p.data, .2); p.data.lerp_(e.data, .05).lerp_(s, .05)

class Unfreezes(Callback):
    def before_epoch(self):
        if self.learn.epoch == 1: self.learn.unfreeze()
def two_groups(m): return [params(m[0]), params(m[1:])]

class Names(Callback):
    "A tensor with several names and views, and one of the model's; made at once, or in the first batch"
    run_valid = False
    def __init__(self, lazy, row_first):
        self.lazy,self.row_first,self.n = lazy,row_first,0
        if not lazy: self.make()
    def make(self):
        buf = torch.zeros(3, 4)
        if self.row_first: self.row = buf[0]
        self.buf = self.same = buf
        self.row,self.more = buf[0],[buf, dict(t=buf.T, row=buf[0], part=buf[1:,1:])]
    def after_batch(self):
        if not hasattr(self, 'buf'): self.make()
        if not hasattr(self, 'weight'): self.weight = self.learn.model[0].weight; self.inside = dict(w=self.weight, row=self.weight.data[0])
        self.n += 1
        self.row += self.n; self.same[1] += .1; self.more[1]['t'][3,2] += 2.; self.more[1]['part'] *= 1.1
        self.inside['row'].mul_(1+1e-4*self.buf.sum().sigmoid().item()); self.weight.data[1] += 1e-3
    def check(self):
        assert self.same is self.buf and self.more[0] is self.buf and self.weight is self.learn.model[0].weight is self.inside['w']
        assert {t.untyped_storage().data_ptr() for t in (self.buf, self.row, *self.more[1].values())} == {self.buf.data_ptr()}
        assert self.inside['row'].data_ptr() == self.weight.data_ptr()

@pytest.mark.parametrize('lazy,row_first,background',
                         [(False, False, False), (True, False, True), (True, True, False), (False, True, True)])
def test_names_and_views(lazy, row_first, background):
    "A write to one shows in the others after a restart, too"
    case = dict(cbs=lambda: [Names(lazy, row_first)], fit=lambda l: l.fit(2, .05))
    whole = run(case)
    run(case, TrainingCheckpoint(every_steps=2, background=background), stop=Interrupt((0, 5)))
    for f in CheckpointFolder.in_use.values(): f.wait()
    new_process()
    learn = run(case, TrainingCheckpoint())
    test_eq_bits(learn, whole)
    for l in (whole, learn): l.names.check(); assert torch.equal(l.names.buf, whole.names.buf) and l.names.n == 16

class Apart(Callback):
    "Begins with views of the model and with two names of a tensor, and gives each a tensor of its own"
    def before_fit(self): self.average,self.a = [p.data for p in self.learn.model.parameters()],torch.zeros(3); self.b = self.a
    def after_step(self):
        self.average = [a*.9 + p.data*.1 for a,p in zip(self.average, self.learn.model.parameters())]
        self.a,self.b = self.a+1,self.b+2
        for p,a in zip(self.learn.model.parameters(), self.average): p.data.lerp_(a, .01).add_((self.b-self.a).mean(), alpha=1e-4)

def test_no_longer_views():
    "What was restored does not overwrite what its place belonged to when the fit began"
    learn,_ = check(dict(cbs=lambda: [Apart()]))
    assert torch.equal(learn.apart.b, 2*learn.apart.a)

class Becomes(Callback):
    "Attributes that become something of another type"
    run_valid = False
    def __init__(self): self.size,self.losses,self.best,self.mean = 'auto',[],None,0.
    def after_batch(self):
        loss = self.learn.loss.detach()
        self.size = 4 if self.size == 'auto' else self.size+1
        self.losses,self.mean = np.append(self.losses, loss.item()),self.mean*.9+loss
        self.best = min(loss, loss if self.best is None else self.best)

def test_types_that_change():
    learn,whole = check(dict(cbs=lambda: [Becomes()]))
    a,b = learn.becomes,whole.becomes
    assert (a.size,a.losses.tolist(),a.best,a.mean) == (b.size,b.losses.tolist(),b.best,b.mean) and a.size > 10

class Tables(Callback):
    "Attributes of many kinds, each of which changes the training"
    def __init__(self, log=None): self.log = log
    def before_fit(self):
        self.counts,self.by,self.frame,self.rng,self.state_rng = (
            Counter(),defaultdict(list),pd.DataFrame(dict(lr=[1.])),np.random.default_rng(1),random.Random(2))
        self.learn.my_number = getattr(self.learn, 'my_number', 0)
    def before_step(self):
        self.counts['steps'] += 1; self.by[self.learn.epoch].append(self.rng.random())
        self.frame.loc[len(self.frame)] = self.state_rng.random()
        self.learn.my_number += 1
        k = self.counts['steps']*.01 + sum(map(sum, self.by.values())) + self.frame.lr.sum() + self.learn.my_number*.01
        for p in self.learn.model.parameters(): p.grad.mul_(1+.01*k)

class Scaled(nn.Module):
    "A model with a number, a buffer that is not saved, and a generator"
    def __init__(self):
        super().__init__()
        self.net,self.n,self.g = net(),0,torch.Generator().manual_seed(3)
        self.register_buffer('mean', torch.zeros(6), persistent=False)
    def forward(self, x):
        if self.training: self.n += 1; self.mean.lerp_(x.mean(0), .1)
        return self.net(x - self.mean + torch.randn(6, generator=self.g)*.1)*(1+.01*self.n)

class Learnt:
    "No module, but it has one"
    def __init__(self): self.net,self.calls = nn.Linear(4, 4),0
    def __call__(self, p, y):
        self.calls += 1
        with torch.no_grad():
            for w in self.net.parameters(): w.mul_(1.01)
        return F.mse_loss(p, y) + .01*self.net(p).pow(2).mean()*self.calls
def closure():
    layer = nn.Linear(4, 4)
    def loss(p, y):
        with torch.no_grad(): layer.weight.mul_(1.01)
        return F.mse_loss(p, y) + .1*layer(p).pow(2).mean()
    return loss

global_rng = np.random.default_rng(4)
def noisy(o): return o[0]+global_rng.random()*.1,o[1]
class Noisy(Data):
    def __init__(self): super().__init__(data.x, *data.y); self.rng = torch.Generator().manual_seed(1)
    def __getitem__(self, i): x,y = super().__getitem__(i); return x+torch.randn(6, generator=self.rng)*.1,y
class Curriculum(Callback):
    def before_epoch(self): self.learn.dls.train.sampler.weights.mul_(torch.rand(61)+.5)
    run_valid = False

def fresh(case):
    "Generators and losses are the script's: new ones in each process"
    def start(*cbs, stop=None):
        global_rng.bit_generator.state = np.random.default_rng(4).bit_generator.state
        torch.manual_seed(5)
        return run({k: v() if k in ('loss_func','model') else v for k,v in case.items()}, *cbs, stop=stop)
    return start

cases = dict(clip=dict(cbs=lambda: [Clip()]), ema=dict(cbs=lambda: [EMA()]),
             frozen=dict(splitter=two_groups, opt_func=Adam, fit=lambda l: (l.freeze(), l.fit(4, .05))),
             unfreezes=dict(splitter=two_groups, cbs=lambda: [Unfreezes()], fit=lambda l: (l.freeze(), l.fit(4, .05))),
             tables=dict(cbs=lambda: [Tables()]), model=dict(model=Scaled), loss=dict(loss_func=Learnt), closure=dict(loss_func=closure),
             global_generator=dict(dl_type=lambda d, batch_size: DataLoader(d, bs=batch_size, shuffle=True, after_item=noisy)),
             sampler=dict(cbs=lambda: [Curriculum()],
                          dl_type=lambda d, batch_size: torch_data.DataLoader(
                              d, batch_size, sampler=torch_data.WeightedRandomSampler(torch.ones(61), 61))))

@pytest.mark.parametrize('case', quickly(['clip','unfreezes','loss','sampler'], cases))
def test_same_run(case):
    start = fresh(cases[case])
    whole = start()
    start(TrainingCheckpoint(every_steps=3), stop=Interrupt((2, 3)))
    new_process()
    test_eq_bits(start(TrainingCheckpoint(every_steps=3)), whole)

def test_generator_of_the_data():
    def start(*cbs, stop=None):
        torch.manual_seed(0); set_seed(0)
        learn = learner(Noisy(), 8, *cbs, *([stop] if stop else []), dl_type=fastai_dl, model=net())
        try: learn.fit(3, .05)
        except RuntimeError: pass
        return weights(learn.model)
    whole = start()
    start(TrainingCheckpoint(every_steps=3), stop=Interrupt((1, 3)))
    new_process()
    assert torch.equal(start(TrainingCheckpoint(every_steps=3)), whole)

def test_live_objects():
    "Parameters and lists of the script stay the objects they are"
    class Refers(Callback):
        def __init__(self, log): self.log = log
        def before_fit(self): self.params,self.head,self.acc = list(self.learn.model.parameters()),self.learn.model[0],torch.zeros(1)
        def after_batch(self):
            if self.learn.training: self.log.append(self.learn.iter); self.acc += 1
    case = {}
    run(case, Refers([]), TrainingCheckpoint(every_steps=3), stop=Interrupt((1, 3)))
    new_process()
    log = []
    learn = make(case, cb := Refers(log), TrainingCheckpoint(every_steps=3))
    learn.fit_one_cycle(4, .05)
    assert cb.log is log and len(log) == 32 and cb.acc == 32
    assert cb.head is learn.model[0] and all(a is b for a,b in zip(cb.params, learn.model.parameters()))

def test_arguments_are_this_scripts():
    case = lambda patience: dict(cbs=lambda: [EarlyStoppingCallback(patience=patience, min_delta=10.)], fit=lambda l: l.fit(6, .05))
    run(case(2), TrainingCheckpoint(every_steps=3), stop=Interrupt((1, 3)))
    new_process()
    learn = run(case(4), TrainingCheckpoint(every_steps=3))
    assert learn.early_stopping.patience == 4 and len(learn.recorder.values) == 5 and learn.early_stopping.wait == 4

class Lazy(Callback):
    "Makes an object in its first batch: nobody makes it before the next process restores it"
    run_valid = False
    def after_batch(self):
        if not hasattr(self, 'its'): self.its = Learnt()
        self.its.calls += 1

def test_cannot_restore():
    case = dict(cbs=lambda: [Lazy()])
    run(case, TrainingCheckpoint(every_steps=3), stop=Interrupt((1, 3)))
    new_process()
    with pytest.warns(UserWarning,
                      match=r'states that cannot be restored: lazy.its \(there is no Learnt for its state\)\. Create'):
        run(case, TrainingCheckpoint())

class Opened(Callback):
    def before_fit(self): self.file,self.iter = open(os.devnull),iter([1])
    def after_fit(self): self.file.close()
    def after_epoch(self): self.late = iter([2])

class Cleans(Opened):
    def after_fit(self): super().after_fit(); del self.file,self.iter,self.late

def test_report_after_a_fit():
    "It is what the fit said: callbacks of `fit` are gone by then, and others tidy up"
    learn = make({}, TrainingCheckpoint(every_steps=3))
    assert learn.training_checkpoint.report() == {}                      # before a fit too
    said = {f'cleans.{k}': f'a {v} cannot be saved'
            for k,v in dict(file='TextIOWrapper', iter='list_iterator', late='list_iterator').items()}
    with pytest.warns(UserWarning, match='will not have: cleans'): learn.fit(2, .05, cbs=Cleans())
    assert learn.training_checkpoint.report() == said
    learn.fit(1, .05)
    assert learn.training_checkpoint.report() == {}

def test_reported_once():
    with pytest.warns(UserWarning) as w: learn = run({}, TrainingCheckpoint(every_steps=3), Opened())
    told = [str(x.message) for x in w if 'will not have' in str(x.message)]
    assert (len(told) == 2 and 'opened.file (a TextIOWrapper cannot be saved); opened.iter' in told[0]
            and 'opened.late' in told[1] and 'opened.file' not in told[1])
    kinds = dict(file='TextIOWrapper', iter='list_iterator', late='list_iterator')
    assert learn.training_checkpoint.report() == {f'opened.{k}': f'a {v} cannot be saved' for k,v in kinds.items()}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        new_process(); shutil.rmtree('models')
        # nothing to say about fastai's
        run({}, TrainingCheckpoint(every_steps=3), EarlyStoppingCallback(patience=9), GradientClip(), MixUp())

def test_main_things_are_errors():
    "Before the first batch"
    class Extra(nn.Linear):
        def get_extra_state(self): return threading.Event()
        def set_extra_state(self, s): pass
    class BadLoss(Learnt):
        def __init__(self): super().__init__(); self.it = iter([1])
    for kwargs,path in ((dict(model=Extra(6, 4)), 'model._extra_state: a Event'),
                        (dict(loss_func=BadLoss()), 'loss_func.it: a list_iterator')):
        learn = learner(data, 8, TrainingCheckpoint(), **kwargs)
        before = weights(learn.model)
        with pytest.raises(TypeError, match=path): learn.fit(1)
        assert torch.equal(weights(learn.model), before)

# -- Other data, other loss, other callbacks ---------------------------------------------------------------------
def refused(what, first_run, second):
    "`second` is refused with a checkpoint of `first_run`, and trains nothing"
    with pytest.raises(RuntimeError, match='interrupted'): first_run(TrainingCheckpoint(every_steps=2), Interrupt((1, 3)))
    new_process()
    with pytest.raises(ValueError, match=what): second(TrainingCheckpoint(every_steps=2))
    new_process(); shutil.rmtree('models')

def fit(*cbs, d=data, **kwargs):
    learner(d, 8, *cbs, **dict(dict(model=net(), opt_func=SGD), **kwargs)).fit(3, .05)

def test_other_data():
    other = Data(data.x.clone(), *data.y)
    other.x[-1, 0] += 1e-6
    refused('the items of `train`: 1 of 61', fit, partial(fit, d=other))
    def split(*cbs, seed=None):
        train,valid = RandomSplitter(.25, seed=seed)(range(61))
        sets = [Data(data.x[i], data.y[0][i]) for i in (train, valid)]
        learn = Learner(DataLoaders(*[DataLoader(s, bs=8, shuffle=True) for s in sets]), net(), loss_func=MSELossFlat(), cbs=cbs)
        with learn.no_bar(), learn.no_logging(): learn.fit(3, .05)
    refused('the items of `train`: .* split them with a seed', split, split)
    with pytest.raises(RuntimeError): split(TrainingCheckpoint(every_steps=2), Interrupt((1, 3)), seed=1)
    new_process()
    split(TrainingCheckpoint(every_steps=2), seed=1)
    new_process(); shutil.rmtree('models')
    def noise(k): return lambda o: (o[0]*k, o[1])
    dl = lambda k: lambda d, batch_size: DataLoader(d, bs=batch_size, after_item=noise(k))
    refused('after_item', partial(fit, dl_type=dl(1.)), partial(fit, dl_type=dl(1.1)))

def test_other_loss_and_optimizer():
    refused('loss: ', fit, partial(fit, loss_func=nn.L1Loss()))
    refused('loss.beta: 0.5 in the checkpoint, 0.6 now', partial(fit, loss_func=nn.SmoothL1Loss(beta=.5)),
            partial(fit, loss_func=nn.SmoothL1Loss(beta=.6)))
    refused('optimizer: ', fit, partial(fit, opt_func=RMSProp))
    refused('optimizer: ', fit, partial(fit, opt_func=partial(SGD, mom=.5)))

def test_other_callbacks():
    refused('GradientClip was removed', lambda *cbs: fit(*cbs, GradientClip()), fit)
    refused('MixUp was added', fit, lambda *cbs: fit(*cbs, MixUp()))
    class Looks(Callback):
        def before_batch(self): pass
    with pytest.raises(RuntimeError): fit(TrainingCheckpoint(every_steps=2), Interrupt((1, 3)))
    new_process()
    with pytest.warns(UserWarning, match='callbacks have changed: Interrupt was removed, Looks was added'):
        fit(TrainingCheckpoint(every_steps=2), Looks())

class Resizes(Callback):
    "Progressive resizing: other data from the second epoch on"
    def __init__(self, again): self.again = again
    def before_epoch(self):
        if self.learn.epoch == 1 or (self.again and self.learn.epoch > 1):
            self.learn.dls = DataLoaders(*[DataLoader(Data(data.x*2, *data.y), bs=8, shuffle=s) for s in (True, False)])

def test_data_replaced_in_the_middle():
    def start(again, *cbs):
        set_seed(0)
        learn = make({}, Resizes(again), *cbs)
        learn.fit(4, .05)
        return learn
    def stopped(*cbs):
        with pytest.raises(RuntimeError): start(*cbs)
        new_process()
    whole = start(True)
    stopped(True, TrainingCheckpoint(every_steps=3), Interrupt((2, 6)))
    test_eq_bits(start(True, TrainingCheckpoint(every_steps=3)), whole)
    shutil.rmtree('models'); new_process()
    stopped(False, TrainingCheckpoint(every_steps=3), Interrupt((2, 6)))
    with pytest.raises(ValueError, match='replaced during the fit.*the items of `train`'): start(False, TrainingCheckpoint(every_steps=3))

class Draws(Callback):
    "Draws from a generator of its own"
    run_valid = False
    def __init__(self): self.rng,self.all = random.Random(3),[]
    def after_batch(self): self.all.append(self.rng.random())

class RefersTo(Callback):
    "Comes first, and has another callback"
    order = -90
    def before_fit(self): self.other = self.learn.draws

@pytest.mark.parametrize('older', [False, True])
def test_paths_of_generators(older):
    "A callback's generators stand under its name, whoever refers to it; in older files, where the walk came first"
    case = dict(cbs=lambda: [RefersTo(), Draws(), GradientAccumulation(16)])
    whole = run(case)
    run(case, TrainingCheckpoint(every_steps=2), stop=Interrupt((1, 4)))
    new_process()
    for f in Path('models/checkpoint').glob('*.pt'):
        state = read_checkpoint(f)
        held = state['rng']['generators']
        assert 'draws.rng' in held and not [k for k in held if 'witnesses' in k or 'refers_to' in k or '.now.' in k]
        if older: held['refers_to.other.rng'] = held.pop('draws.rng')
        write_checkpoint(state, f)
    assert run(case, TrainingCheckpoint(every_steps=2)).draws.all == whole.draws.all
