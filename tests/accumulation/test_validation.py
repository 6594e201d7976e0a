"Losses, metrics and predictions of a validation are those of whole loader batches, also where the model keeps something of its last call"
from types import SimpleNamespace
import pytest
from reference import *
import torch.nn.functional as F
from fastai.vision.models.unet import DynamicUnet
from fastaccum.core.watch import Traces
from test_tokens import Attention, accuracy_of_words, masked_learner

torch.manual_seed(0)
data = Data(torch.randn(32, 6).double(), torch.arange(32)%4)
ce = nn.CrossEntropyLoss()
shared = {}                                              # what a model keeps outside of itself

def keep_in_place(m, h): m.kl.copy_(h.mean(0).pow(2).sum())
def keep_log(m, h): m.rows.append(h)
# How a model keeps something of the hidden activations `h`, and the term of the loss that is computed from it
forms = {'a number':      (lambda m, h: setattr(m, 'term', h.mean(0).pow(2).sum()), lambda m: m.term),
         'a float':       (lambda m, h: setattr(m, 'term', float(h.mean(0).pow(2).sum())), lambda m: m.term),
         'a buffer':      (keep_in_place, lambda m: m.kl),
         'in an object':  (lambda m, h: setattr(m.box, 'kl', h.mean(0).pow(2).sum()), lambda m: m.box.kl),
         'in dicts':      (lambda m, h: setattr(m, '_aux', dict(a=dict(kl=h.mean(0).pow(2).sum()))), lambda m: m._aux['a']['kl']),
         'outside':       (lambda m, h: shared.update(kl=h.mean(0).pow(2).sum()), lambda m: shared['kl']),
         'shares':        (lambda m, h: setattr(m, 'load', h.softmax(1).mean(0)), lambda m: 8*m.load.pow(2).sum()),
         'rows':          (lambda m, h: setattr(m, 'feats', [h]), lambda m: m.feats[0].mean(0).pow(2).sum()),
         'columns':       (lambda m, h: setattr(m, 'feats', h.T.contiguous()), lambda m: m.feats.mean(1).pow(2).sum()),
         'codes':         (lambda m, h: setattr(m, 'codes', h.argmax(1)), lambda m: F.one_hot(m.codes, 8).double().mean(0).pow(2).sum()),
         'a log':         (keep_log, lambda m: m.rows[-1].mean(0).pow(2).sum())}

class Keeps(nn.Module):
    def __init__(self, keep, noise=0.):
        super().__init__()
        self.keep,self.noise = keep,noise
        self.a,self.b = nn.Linear(6, 8),nn.Linear(8, 4)
        self.register_buffer('kl', torch.zeros(()))
        self.box,self.rows = SimpleNamespace(),[]
    def forward(self, x):
        h = self.a(x).tanh()
        h = h + self.noise*torch.randn_like(h)
        self.keep(self, h)
        return self.b(h)

def keeper(form, *cbs, noise=0., **kwargs):
    keep,term = forms[form]
    set_seed(0)
    learn = learner(data, 16, *cbs, model=Keeps(keep, noise), **kwargs)
    learn.model.double()
    learn.loss_func = lambda p, y: ce(p, y) + term(learn.model)
    return learn

@pytest.mark.parametrize('form', forms)
def test_the_loss_has_what_the_model_keeps_of_all_items(form):
    plain = keeper(form).validate()
    for acc in (dict(micro_batch_size=5), dict(accum_bs=32, micro_batch_size=1), dict(micro_batch_size=5, coupled=True)):
        assert keeper(form, GradientAccumulation(**acc)).validate()[0] == pytest.approx(plain[0], rel=1e-12)

def test_a_look_leaves_no_trace():
    "A log has the rows of each item once, and random numbers are those of the whole batch"
    def run(*cbs):
        learn = keeper('a log', *cbs, noise=1.)
        set_seed(0)
        loss, = learn.validate()
        return loss,learn.model.rows
    (loss,rows),(whole,all_rows) = run(GradientAccumulation(micro_batch_size=5)),run()
    assert loss == pytest.approx(whole, rel=1e-12) and [len(o) for o in rows] == [len(o) for o in all_rows] == [32]

class KeptRows(Metric):
    def reset(self): self.rows = []
    def accumulate(self, learn): self.rows.append(learn.model.codes)
    @property
    def value(self): return len(torch.cat(self.rows))

class Collects(Callback):
    n_rows = 0
    def after_batch(self):
        if not self.training: self.n_rows += len(self.learn.model.codes)

def test_callbacks_and_metrics_get_all_rows():
    learn = keeper('codes', GradientAccumulation(micro_batch_size=5), Collects(), metrics=KeptRows())
    assert learn.validate()[1] == learn.collects.n_rows == 32

def most_items(model, x=data.x.float(), y=data.y[0], loss_func=ce):
    "Of a call of the model in validation"
    sizes = []
    learn = learner(Data(x, y), 16, GradientAccumulation(micro_batch_size=5), model=model, loss_func=loss_func)
    hook = nn.modules.module.register_module_forward_pre_hook(lambda m, x: sizes.append(len(x[0])) if m is learn.model else None)
    learn.validate()
    hook.remove()
    return max(sizes)

class Notes(nn.Module):
    "Keeps what is the same for all items, and counts its calls"
    calls = 0
    def __init__(self): super().__init__(); self.body,self.sizes = mlp(),[]
    def forward(self, x):
        self.calls += 1
        self.state,self.table = torch.zeros(1, 9),dict(ones=torch.ones(6))
        self.sizes.append(x.shape)
        return self.body(x)

def test_other_models_go_in_parts():
    "A counter, a table, and what a U-Net's blocks keep for themselves: nobody reads these as items"
    assert most_items(mlp()) == most_items(Notes()) == 5
    body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
    assert most_items(DynamicUnet(body, 4, (16, 16)), torch.randn(32, 3, 16, 16), torch.randint(4, (32, 16, 16))) == 5

def test_what_a_model_holds_may_be_long_or_hold_itself():
    "A look at it ends"
    model = nn.Linear(2, 1)
    model.log,model.itself = [torch.zeros(1)]*1000,[]
    model.itself.append(model.itself)
    traces = Traces(model)
    for _ in range(2): traces.noting(model)(torch.ones(3, 2))
    assert not traces.of_items(3)
    model.log[-1] = torch.ones(1)
    assert traces.of_items(3)

# --- micro_batch_tokens
def of_all_places(pred, y): return pred.softmax(-1).amax(-1).mean()
metrics = [accuracy_of_words, of_all_places, lambda pred, y: pred.pow(2).mean()]

def test_metrics_count_no_trimmed_places():
    "As plain fastai's, before the first fit and in it. Those of padding are what the model says there"
    def results(*cbs):
        learn = masked_learner('every_word', *cbs, double=False, metrics=metrics)
        before,preds = learn.validate(),learn.get_preds()[0]
        learn.fit(1, 0.)
        return [*before, *learn.recorder.values[-1][1:]],preds
    (plain,preds),(ours,our_preds) = results(),results(GradientAccumulation(16, micro_batch_tokens=60))
    assert ours == pytest.approx(plain, rel=1e-6)
    for a,b in zip(our_preds, preds): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize('name', ['transformer','transformer_padded_first','packed'])
def test_before_the_first_fit(name):
    def results(*cbs):
        learn = masked_learner(name, *cbs)
        if name != 'packed': learn.summary()               # which fastai's own hooks cannot look at
        return learn.validate()[0],learn.get_preds()[0]
    (loss,preds),(plain,same) = results(GradientAccumulation(16, micro_batch_tokens=48)),results()
    assert loss == pytest.approx(plain, rel=1e-12)
    torch.testing.assert_close(preds, same, rtol=1e-10, atol=1e-12)

class MeansPlaces(Attention):
    "Keeps a mean over all places"
    def forward(self, x):
        self.mean = self.emb(x).pow(2).mean()
        return super().forward(x)

def test_a_term_over_padded_places():
    def loss(*cbs):
        learn = masked_learner('transformer', *cbs)
        learn.model = (set_seed(0), MeansPlaces().double())[1]
        learn.loss_func = lambda pred, y: F.cross_entropy(pred, y) + learn.model.mean
        return learn.validate()[0]
    for most in (48, 288): assert loss(GradientAccumulation(16, micro_batch_tokens=most)) == pytest.approx(loss(), rel=1e-12)

def test_metrics_of_training_count_no_trimmed_places():
    def row(*cbs):
        learn = masked_learner('every_word', *cbs, double=False, metrics=metrics)
        learn.recorder.train_metrics = True
        learn.fit(1, .1)
        return learn.recorder.values[0]
    assert list(row(GradientAccumulation(micro_batch_tokens=24))) == pytest.approx(list(row()), rel=1e-5)
