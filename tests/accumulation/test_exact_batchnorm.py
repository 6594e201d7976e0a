"`coupled='batchnorm'`: with micro-batches, a model with BatchNorm trains as with the whole loader batch"
import pytest
from contextlib import nullcontext
pytest.importorskip('greenlet')
import torchvision.models as tv
from quick import quickly
from reference import *
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.schedule import *
from fastai.callback.training import BnFreeze
from fastai.metrics import accuracy
from fastai.tabular.model import TabularModel
from fastai.vision.models.unet import DynamicUnet
from fastai.vision.models.xresnet import xresnet18
from fastaccum.all import *
from test_coupled import SupCon
from test_encoder import classifier, padded, texts
from test_silent import moved

exact = partial(GradientAccumulation, coupled='batchnorm')
class InDouble(nn.Module):
    "A loss in float64 whose value is float32, which fastai's Recorder needs"
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, pred, *yb): return self.f(pred, *yb).float()

set_seed(0)
images = Data(torch.randn(40, 3, 12, 12).double(), torch.arange(40)%4)
def small():
    "Convolutions with a residual connection"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem,self.n,self.a,self.n2,self.out = (nn.Conv2d(3, 6, 3),nn.BatchNorm2d(6),
                                                        nn.Conv2d(6, 6, 3, padding=1),nn.BatchNorm2d(6),nn.Linear(6, 4))
        def forward(self, x):
            x = F.relu(self.n(self.stem(x)))
            return self.out(F.relu(x + self.n2(self.a(x))).mean((2, 3)))
    set_seed(1)
    return Net().double()

def trained(k=None, *cbs, data=images, bs=20, model=None, loss=None, fit=lambda l: l.fit(2, .05), acc=None, make=exact, **kwargs):
    "With micro-batches of `k`, or plain"
    mine = () if k is None else (make(**{**dict(micro_batch_size=k), **(acc or {})}),)
    learn = learner(data, bs, *mine, *cbs, model=ifnone(model, small()),
                    loss_func=ifnone(loss, InDouble(nn.CrossEntropyLoss())),
                    valid=Data(data.x[:4], *[y[:4] for y in data.y]), **kwargs)
    learn.start = deepcopy(learn.model)
    fit(learn)
    return learn

def check_runs(a, b, tol=1e-10):
    "Weights, statistics, and rows"
    assert moved(a, b, b.start) < tol
    for (k,v),w in zip(a.model.named_buffers(), b.model.buffers()):
        torch.testing.assert_close(host(v), host(w), rtol=max(10*tol, 1e-9), atol=max(10*tol, 1e-9), msg=k)
    torch.testing.assert_close(a.recorder.losses, b.recorder.losses, rtol=1e-5, atol=1e-5)

@pytest.mark.filterwarnings('ignore:.* changes nothing here')
@pytest.mark.parametrize('k', [7, 1, 20])
def test_exact(k): check_runs(trained(k), trained())

def test_micro_batches_alone_are_another_run():
    "What it is for, and that these tests can fail"
    with pytest.warns(UserWarning, match="see 7 items at a time.*coupled='batchnorm'"): learn = trained(7, make=GradientAccumulation)
    whole = trained()
    assert moved(learn, whole, whole.start) > .05

def test_float32():
    data = Data(images.x.float(), *images.y)
    check_runs(trained(7, data=data, model=small().float(), loss=nn.CrossEntropyLoss()),
               trained(data=data, model=small().float(), loss=nn.CrossEntropyLoss()), 1e-4)

def calm(model):
    for m in model.modules():
        for k in ('p','dropout'):
            if isinstance(getattr(m, k, None), float): setattr(m, k, 0.)
    return model.double()

class First(nn.Module):
    "The first output of a text classifier with BatchNorm in its head"
    def __init__(self):
        super().__init__()
        self.model = classifier()
        self.model[1].layers = nn.Sequential(nn.Linear(24, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4))
        self.double()
    def __deepcopy__(self, memo):      # AWD_LSTM has none
        new = First()
        new.load_state_dict(self.state_dict())
        return new
    def forward(self, x): return self.model(x)[0]

def unet():
    net = DynamicUnet(nn.Sequential(*[nn.Sequential(nn.Conv2d(i, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()) for i in (3, 4)]), 4, (12, 12))
    for m in net.modules():
        if isinstance(m, nn.ReLU): m.inplace = False
    return net
class Tabular(nn.Module):
    def __init__(self): super().__init__(); self.net = TabularModel([(5, 3)], 5, 4, [12, 8])
    def forward(self, x): return self.net(x[:,:1].abs().long().clamp(max=4), x[:,1:])

pixels = Data(images.x[:16], torch.randint(4, (16, 12, 12)))
table = Data(torch.randn(40, 6).double(), torch.arange(40)%4)
text = Data(padded(texts[::-1]), torch.arange(14)%4)
large = Data(torch.randn(12, 3, 40, 40).double(), torch.arange(12)%4)
nets = dict(
    tabular=(Tabular, table, 20), text=(First, text, 14), unet=(unet, pixels, 8),
    resnet18=(partial(tv.resnet18, num_classes=4), large, 6), xresnet=(partial(xresnet18, n_out=4), large, 6),
    mobilenet=(partial(tv.mobilenet_v3_small, num_classes=4), large, 6),
    densenet=(partial(tv.DenseNet, 8, (2, 3, 2), 8, num_classes=4), large, 6),
    densenet121=(partial(tv.densenet121, num_classes=4), large, 6), resnet50=(partial(tv.resnet50, num_classes=4), large, 6),
    efficientnet=(partial(tv.efficientnet_b0, num_classes=4, stochastic_depth_prob=0.), large, 6))

@pytest.mark.parametrize('name', quickly([], nets, long=['densenet121', 'resnet50', 'efficientnet']))
def test_two_epochs(name):
    make,data,bs = nets[name]
    set_seed(3)
    net = make() if name == 'text' else calm(make())       # AWD_LSTM fails without any dropout
    runs = [trained(k, data=data, bs=bs, model=net, fit=lambda l: l.fit(2, .03)) for k in (max(1, bs//3), None)]
    # rounding grows from step to step: weights of resnet50 that are changed by 1e-14 end 2e-7 apart even at a tenth of
    # this rate. Other statistics are 1 apart
    check_runs(*runs, 1e-3)

def test_contrastive_loss_on_convolutions():
    "One loss over all outputs comes with it"
    class One(nn.Module):
        def forward(self, z, y): return SupCon()((z, None, None), y).float()
    fit = lambda l: l.fit(2, .5)
    check_runs(trained(7, loss=One(), fit=fit), trained(loss=One(), fit=fit), 1e-8)

losses = dict(
    weights=lambda: (InDouble(nn.CrossEntropyLoss(weight=torch.tensor([1., 5., 2., 3.]).double())), images),
    tokens=lambda: (InDouble(lambda p, y: F.cross_entropy(p.unsqueeze(2).expand(-1, -1, 3), y)),
                    Data(images.x, torch.where(torch.rand(40, 3) < .3, -100, torch.arange(40)[:,None]%4))))
@pytest.mark.parametrize('name', losses)
def test_losses(name):
    set_seed(2)
    loss,data = losses[name]()
    check_runs(trained(7, loss=loss, data=data), trained(loss=loss, data=data))

ways = dict(
    clip=((lambda: [GradientClip(.1)]), lambda l: l.fit(2, .05)),
    mixup=(lambda: [MixUp()], lambda l: (set_seed(4), l.fit(2, .05))),
    cutmix=(lambda: [CutMix()], lambda l: (set_seed(4), l.fit(2, .05))),
    one_cycle=(lambda: [], lambda l: l.fit_one_cycle(3, .05)),
    lr_find=(lambda: [], lambda l: (l.lr_find(num_it=6, show_plot=False), l.fit(1, .05))),
    frozen_norms=(lambda: [BnFreeze()], lambda l: (l.model.n.requires_grad_(False), l.fit(2, .05))))
@pytest.mark.parametrize('name', ways)
def test_callbacks_and_fits(name):
    cbs,fit = ways[name]
    loss = CrossEntropyLossFlat() if 'mix' in name or name == 'lr_find' else None      # mixers look at the loss itself
    data,model = (Data(images.x.float(), *images.y),small().float()) if loss else (images,small())
    check_runs(*(trained(k, *cbs(), fit=fit, loss=loss, data=data, model=model) for k in (7, None)), 1e-3 if loss else 1e-10)

def test_fine_tune():
    def net():
        set_seed(1)
        return nn.Sequential(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3),
                                           nn.BatchNorm2d(6)),
                                           nn.Sequential(nn.AdaptiveAvgPool2d(1), Flatten(), nn.BatchNorm1d(6),
                                               nn.Linear(6, 4))).double()
    split = lambda m: [params(m[0]), params(m[1])]
    check_runs(*(trained(k, model=net(), splitter=split, fit=lambda l: l.fine_tune(2, .05)) for k in (7, None)))

def test_schedule_and_several_loader_batches():
    "BatchNorm sees the loader batch, as a warning says, and the step averages over the accumulated batch"
    sched = lambda k, **kw: [GradientAccumulationSchedule(10, 20, finish=1., micro_batch_size=k, **kw)]
    told = partial(pytest.warns, UserWarning, match="see 10 items at a time, and a step has 20")
    with told(): a = trained(None, *sched(4, coupled='batchnorm'), bs=10)
    check_runs(a, trained(None, *sched(10), bs=10))
    with told(): a = trained(4, bs=10, acc=dict(accum_bs=20))
    check_runs(a, trained(10, bs=10, acc=dict(accum_bs=20), make=GradientAccumulation))

@pytest.mark.filterwarnings('default:BatchNorm.:fastaccum.core.warnings.FastaccumWarning')
def test_whole_batches_are_not_told(recwarn):
    trained(4, bs=20)
    trained(4, bs=20, acc=dict(accum_bs=20))
    assert not [w for w in recwarn if 'BatchNorm' in str(w.message)]

@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_half_precision(mode):
    data,model = Data(images.x.float(), *images.y),small().float()
    def fit(l): (l.to_bf16() if mode == 'bf16' else l.to_fp16(init_scale=2.**10)).fit(2, .05)
    runs = [trained(k, fit=fit, data=data, model=model, loss=nn.CrossEntropyLoss()) for k in (7, None)]
    check = moved(*runs, runs[1].start)
    assert check < (.1 if mode == 'bf16' else .03)

def test_metrics_and_prediction_of_the_whole_batch():
    sizes = []
    class See(Callback):
        run_valid,reads_pred = False,True
        def after_pred(self): sizes.append(len(self.learn.pred))
    learn = trained(7, See(), metrics=accuracy)
    assert sizes == [20]*4 and learn.model.n.num_batches_tracked == 4

def test_hooks_see_micro_batches():
    seen,model = [],small()
    learn = trained(7, model=model, fit=noop)
    learn.model.a.register_forward_hook(lambda m, i, o: seen.append(len(o)) if m.training else None)
    learn.fit(1, .05)
    assert seen == [7, 7, 6]*2

def test_auto():
    "Out of memory in one part: all start again, smaller"
    class Full(nn.Module):
        def __init__(self): super().__init__(); self.net = small()
        def forward(self, x):
            if self.training and len(x) > 6: raise torch.OutOfMemoryError('out of memory')
            return self.net(x)
    learn,whole = trained('auto', model=Full()),trained()
    assert learn.gradient_accumulation.micro_bs == 5
    a,b = weights(learn.model),weights(whole.model)
    assert rel_err(a, b) < 1e-10

class Stops(Callback):
    "As if the process were killed"
    run_valid = False
    def __init__(self, at): self.at = at
    def state_dict(self): return {}
    def load_state_dict(self, s): pass
    def before_batch(self):
        if (self.learn.epoch,self.learn.iter) == self.at: raise RuntimeError('killed')

@pytest.mark.filterwarnings('ignore:Since the checkpoint, callbacks have changed')
def test_resumes_bit_for_bit():
    from fastaccum.checkpoint.folder import CheckpointFolder
    fit = lambda l: l.fit(3, .05)
    whole = trained(7, TrainingCheckpoint('a', every_steps=1), fit=fit)
    CheckpointFolder.in_use.clear()
    with pytest.raises(RuntimeError, match='killed'): trained(7, TrainingCheckpoint('b', every_steps=1), Stops((1, 1)), fit=fit)
    CheckpointFolder.in_use.clear()
    again = trained(7, TrainingCheckpoint('b', every_steps=1), fit=fit)
    for (k,v),w in zip(again.model.state_dict().items(), whole.model.state_dict().values()): assert host(v).equal(host(w)), k

def test_an_error_leaves_the_model_as_it_was():
    class Branches(nn.Module):
        def __init__(self): super().__init__(); self.net,self.other = small(),nn.BatchNorm1d(4).double()
        def forward(self, x):
            calls.append(1)
            second = len(calls) == 5              # the second micro-batch of the second loader batch
            x = self.net(x)
            return self.other(x) if second else x
    calls = []
    learn = trained(7, model=Branches(), fit=noop)
    with pytest.raises(ValueError,
                       match="the same way through the model, but micro-batch 1 of 3 has left the model, and micro-batch 2 is at 'other'"):
        learn.fit(1, .05)
    assert no_gradients(learn) and learn.model.net.n.num_batches_tracked == 1

class ByHand(nn.BatchNorm2d):
    def forward(self, x): return (x-x.mean((0, 2, 3), keepdim=True))*self.weight.view(1, -1, 1, 1)

def with_norm(norm): return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(4, 4)).double()
@pytest.mark.parametrize('cbs,model,message', [
    ([ActivationCheckpointing(blocks=nn.Conv2d)], None, 'ActivationCheckpointing recomputes'),
    ([Compile(backend='eager')], None, 'Compile compiles the model'),
    ([GradientNoiseScale()], None, 'compares the gradients of micro-batches'),
    ([], lambda: with_norm(ByHand(4)), "'1' computes its statistics without"),
    ([], lambda: nn.DataParallel(small()), 'DataParallel calls the model in threads'),
    ([], lambda: with_norm(torch.jit.script(nn.BatchNorm2d(4))), "'1' computes its statistics without")],
    ids=lambda v: getattr(v, '__name__', None))
def test_refuses(cbs, model, message):
    if devices.now.name == 'sim' and model is not None: pytest.skip('the same on the CPU')
    with pytest.raises(ValueError, match=message): trained(7, *deepcopy(cbs), model=model() if model else None)

def test_arguments():
    with pytest.raises(ValueError, match='needs micro_batch_size'): GradientAccumulation(coupled='batchnorm')
    with pytest.raises(ValueError, match="activations='disk'.*'host' or 'device'"):
        GradientAccumulation(micro_batch_size=4, coupled='batchnorm', activations='disk')
    with pytest.raises(ValueError, match='leave this out'): GradientAccumulation(micro_batch_size=4, coupled=True, activations='device')

def test_activations_on_the_device_or_offloaded_twice():
    whole = trained()
    check_runs(trained(7, acc=dict(activations='device')), whole)
    check_runs(trained(7, ActivationOffload(min_bytes=0)), whole)

def test_gradients_on_the_host(): check_runs(trained(7, acc=dict(grad_device='cpu')), trained())

def test_sync_batchnorm():
    "Whose own forward pass needs a GPU where there are several processes"
    model = nn.SyncBatchNorm.convert_sync_batchnorm(small())
    check_runs(trained(7, model=model), trained())
    assert all('forward' not in vars(m) for m in model.modules())

def test_buffers_that_change_are_told():
    "A spectral norm takes a step for each micro-batch"
    model = small()
    nn.utils.spectral_norm(model.out)
    with pytest.warns(UserWarning, match=r'changes its buffers out\.weight_u.* once for each micro-batch'): trained(7, model=model)

def test_weights_that_change_in_the_forward_pass_are_told():
    "A moving average takes a step for each micro-batch"
    class Slow(nn.Module):
        def __init__(self): super().__init__(); self.net,self.slow = small(),nn.Linear(6, 4).requires_grad_(False).double()
        def forward(self, x):
            if self.training: self.slow.weight.lerp_(self.net.out.weight.detach(), .1)
            return self.net(x) + self.slow.weight.mean()
    with pytest.warns(UserWarning,
                      match=r'changes its buffers slow\.weight \(a frozen weight\).* once for each micro-batch'):
        trained(7, model=Slow())

def test_validation_without_running_statistics():
    "BatchNorm computes statistics of the batch there, too, and so sees all of it"
    def fitted(k):
        model = small()
        model.n2 = nn.BatchNorm2d(6, track_running_stats=False).double()
        learn = trained(k, model=model, metrics=accuracy, fit=lambda l: l.fit(1, .05))
        return learn,learn.validate(dl=DataLoader(list(zip(images.x[:20], images.y[0][:20])), bs=20))
    (a,va),(b,vb) = fitted(7),fitted(None)
    check_runs(a, b)
    torch.testing.assert_close(tensor(va), tensor(vb), rtol=1e-6, atol=1e-6)

class Kept(nn.Module):
    "Keeps a number for a term of the loss: of its items before or behind BatchNorm, or of its weights alone"
    def __init__(self, of):
        super().__init__()
        self.of,self.norm,self.side,self.out = of,nn.BatchNorm1d(432),nn.Linear(432, 3),nn.Linear(432, 4)
    def forward(self, x):
        x = x.flatten(1)
        z = self.norm(x)
        self.kept = dict(before=lambda: self.side(x), behind=lambda: self.side(z),
                         weights=lambda: self.side.weight)[self.of]().pow(2).mean()
        return self.out(z)

def add_kept(learn): learn.loss_grad = learn.loss_grad + learn.model.kept

@pytest.mark.parametrize('of', ['before', 'behind'])
def test_a_loss_of_what_the_model_keeps_is_told(of):
    "It has the value of the last micro-batch alone. Behind BatchNorm the loss frees that one's graph"
    run = partial(trained, 7, On('after_loss', add_kept), model=Kept(of).double(), fit=lambda l: l.fit(1, .01))
    error = pytest.raises(RuntimeError, match='second time') if of == 'behind' else nullcontext()
    with pytest.warns(UserWarning, match="activations that the model keeps .*'kept'.*6 of 20 items") as seen, error: run()
    assert len(seen) == 1

def test_a_loss_of_kept_weights_is_exact(recwarn):
    model = Kept('weights').double()
    check_runs(*(trained(k, On('after_loss', add_kept), model=model, fit=lambda l: l.fit(2, .01)) for k in (7, None)))
    assert not [w for w in recwarn if 'keeps' in str(w.message)]

class Numbers(nn.Module):
    "A mean over its items beside the outputs"
    def __init__(self): super().__init__(); self.net = small()
    def forward(self, x): out = self.net(x); return out,out.mean()

def test_numbers_of_the_items_are_refused_at_once():
    "Not at the end of the epoch, after steps with wrong numbers"
    steps = []
    with pytest.raises(ValueError, match='not the same for all micro-batches'):
        trained(7, On('after_step', steps.append), model=Numbers(), loss=OfNumbers())
    assert not steps

class OfNumbers(nn.Module):
    def forward(self, pred, y): return (F.cross_entropy(pred[0], y) + pred[1]).float()

class Differentiates(nn.Module):
    "Predicts with a gradient with respect to its input, or to what comes behind BatchNorm. skip: not only through BatchNorm"
    def __init__(self, behind=False, skip=False):
        super().__init__()
        self.behind,self.skip,self.norm,self.hid,self.out = behind,skip,nn.BatchNorm1d(432),nn.Linear(432, 4),nn.Linear(4, 4)
    def forward(self, x):
        x = x.flatten(1).requires_grad_()
        with torch.enable_grad():
            z = self.norm(x)
            start = z.detach().requires_grad_() if self.behind else x
            energy = self.hid(start if self.behind else z + x if self.skip else z).tanh()
            g, = torch.autograd.grad(energy.sum(), start, create_graph=self.training)
        return self.out(energy) + g[:,:4] + z[:,:4]

@pytest.mark.parametrize('skip', [False, True])
def test_gradients_through_batchnorm_in_the_model_are_refused(skip):
    "They would end there, silently where another way leads past it"
    with pytest.raises(ValueError, match='computes a gradient itself'): trained(7, model=Differentiates(skip=skip).double())

def test_gradients_behind_batchnorm_in_the_model():
    model = Differentiates(behind=True).double()
    check_runs(trained(7, model=model), trained(model=model))
