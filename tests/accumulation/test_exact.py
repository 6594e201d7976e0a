"Every optimizer step is the step of the same items as one batch"
import itertools, warnings, pytest
from reference import *
from fastai.callback.mixup import CutMix, MixUp
from fastai.losses import *
from fastaccum.core.warnings import FastaccumWarning

# Items, loader batch, accum_bs, micro-batch: divisible; a short last batch; one that closes by itself; accum_bs between two loader
# batches; loader batches that are split
layouts = {'divisible': (64,8,32,None), 'ragged 61': (61,8,32,None), 'ragged 45': (45,8,32,None),
           'accum_bs 20': (61,8,20,None), 'split': (61,16,32,5)}
n_max,n_cls = 64,4
torch.manual_seed(0)
cls_w = tensor([.1, 3., 1., .4])

# x and the model for predictions of the shape (n,c), (n,5,c), (n,c,5), (n,c,3,3)
def conv(d, n_out): return nn.Sequential(getattr(nn, f'Conv{d}d')(6, 8, 1), nn.Tanh(), getattr(nn, f'Conv{d}d')(8, n_out, 1))
shapes = dict(rows=((6,), mlp, ()), words=((5,6), mlp, (5,)), first=((6,5), lambda n_out: conv(1, n_out), (5,)),
              pixels=((6,3,3), lambda n_out: conv(2, n_out), (3,3)))

# Targets of n items with `d` further dimensions
def classes(*d): return torch.randint(n_cls, (n_max,*d))
def ignored(*d, value=-100):
    "Classes of which very unequal numbers are ignored; in the second micro-batch (items 8 to 15) all"
    y = classes(*d).view(n_max, -1)
    for i in range(n_max): y[i, (i*i)%(y.shape[1]+1) if i//8 != 1 else 0:] = value
    return y.view(n_max, *d)
def reals(*d): return torch.randn(n_max, *d, n_cls)
def bits(*d): return (torch.rand(n_max, *d, n_cls) < .3).float()
def shares(*d): return reals(*d).softmax(-1)
def third_class(*d): return torch.where(torch.arange(n_max).view(-1, *[1]*len(d))//8 == 1, 2, classes(*d))

class Own(nn.Module):
    "A mean over items, of a loss that nobody knows"
    def forward(self, pred, y): return (pred-y).pow(4).mean(-1).sqrt().mean()

def top(pred, y): return (pred-y).abs().amax(-1).mean()

cases = {  # name: loss, shape of the predictions, targets
    'cross entropy':       (nn.CrossEntropyLoss(), 'rows', classes),
    'nll':                 (nn.NLLLoss(weight=cls_w), 'rows', classes),
    'class weights':       (nn.CrossEntropyLoss(weight=cls_w), 'rows', classes),
    'class weight 0':      (nn.CrossEntropyLoss(weight=tensor([1., 2., 0., .5])), 'rows', third_class),
    'smoothing':           (nn.CrossEntropyLoss(label_smoothing=.1), 'rows', classes),
    'weights, smoothing':  (nn.CrossEntropyLoss(weight=cls_w, label_smoothing=.1), 'rows', classes),
    'ignored':             (nn.CrossEntropyLoss(), 'first', ignored),
    'ignored 0':           (nn.CrossEntropyLoss(ignore_index=0), 'first', partial(ignored, value=0)),
    'ignored, weights':    (nn.CrossEntropyLoss(weight=cls_w), 'first', ignored),
    'ignored, smoothing':  (nn.CrossEntropyLoss(label_smoothing=.1), 'first', ignored),
    'all three':           (nn.CrossEntropyLoss(weight=cls_w, label_smoothing=.1, ignore_index=1), 'first', partial(ignored, value=1)),
    'weight 0, all three': (nn.CrossEntropyLoss(weight=tensor([1., 2., 0., .5]), label_smoothing=.1), 'first', ignored),
    'pixels':              (nn.CrossEntropyLoss(), 'pixels', classes),
    'pixels, ignored':     (nn.CrossEntropyLoss(weight=cls_w), 'pixels', ignored),
    'pixels, all three':   (nn.CrossEntropyLoss(weight=cls_w, label_smoothing=.1), 'pixels', ignored),
    'soft targets':        (nn.CrossEntropyLoss(), 'rows', shares),
    'soft, weights':       (nn.CrossEntropyLoss(weight=cls_w, label_smoothing=.1), 'rows', shares),
    'sum':                 (nn.CrossEntropyLoss(reduction='sum'), 'rows', classes),
    'sum, ignored':        (nn.CrossEntropyLoss(reduction='sum', weight=cls_w), 'first', ignored),
    'mse':                 (nn.MSELoss(), 'rows', reals),
    'mse sum':             (nn.MSELoss(reduction='sum'), 'words', reals),
    'l1':                  (nn.L1Loss(), 'words', reals),
    'smooth l1':           (nn.SmoothL1Loss(), 'rows', reals),
    'huber':               (nn.HuberLoss(), 'rows', reals),
    'bce':                 (nn.BCEWithLogitsLoss(), 'rows', bits),
    'bce weights':         (nn.BCEWithLogitsLoss(weight=cls_w), 'rows', bits),
    'bce pos_weight':      (nn.BCEWithLogitsLoss(pos_weight=cls_w), 'words', bits),
    'kl batchmean':        (nn.KLDivLoss(reduction='batchmean'), 'words', shares),
    'multi margin':        (nn.MultiMarginLoss(), 'rows', classes),
    'multi label':         (nn.MultiLabelSoftMarginLoss(), 'rows', bits),
    'own':                 (Own(), 'rows', reals),
    'own function':        (top, 'rows', reals),
    'F.cross_entropy':     (F.cross_entropy, 'first', ignored),
    'F.mse_loss':          (F.mse_loss, 'words', reals),
    'partial':             (partial(F.cross_entropy, weight=cls_w, ignore_index=2), 'first', partial(ignored, value=2)),
    'partial of partial':  (partial(partial(F.cross_entropy, ignore_index=2), label_smoothing=.2), 'first', partial(ignored, value=2)),
    'partial sum':         (partial(F.nll_loss, reduction='sum'), 'rows', classes),
    'CrossEntropyLossFlat':         (CrossEntropyLossFlat(), 'words', ignored),
    'CrossEntropyLossFlat, axis':   (CrossEntropyLossFlat(axis=1, weight=cls_w), 'pixels', ignored),
    'LabelSmoothingFlat':           (LabelSmoothingCrossEntropyFlat(), 'words', classes),
    'LabelSmoothingFlat, sum':      (LabelSmoothingCrossEntropyFlat(reduction='sum'), 'rows', classes),
    'FocalLossFlat':                (FocalLossFlat(), 'words', classes),
    'FocalLossFlat, all':           (FocalLossFlat(weight=cls_w, gamma=1.), 'words', ignored),
    'BCEWithLogitsLossFlat':        (BCEWithLogitsLossFlat(), 'rows', lambda: bits().long()),
    'BCEWithLogitsLossFlat, pos':   (BCEWithLogitsLossFlat(pos_weight=tensor(3.)), 'words', bits),
    'MSELossFlat':                  (MSELossFlat(), 'words', reals),
    'L1LossFlat':                   (L1LossFlat(), 'rows', reals),
    'DiceLoss':                     (DiceLoss(reduction='mean'), 'pixels', classes),
}

def case(name, n):
    "Data, model and loss of a case"
    loss_func,shape,target = cases[name]
    x,model,dims = shapes[shape]
    torch.manual_seed(1)
    return Data(torch.randn(n, *x), target(*dims)[:n]), model(n_out=n_cls), loss_func

@pytest.mark.parametrize('layout', layouts)
@pytest.mark.parametrize('name', cases)
def test_gradient(name, layout):
    n,bs,accum_bs,k = layouts[layout]
    data,model,loss_func = case(name, n)
    learn = learner(data, bs, GradientAccumulation(accum_bs, micro_batch_size=k), Spy(), model=model, loss_func=loss_func)
    lr = .01/(accum_bs if 'sum' in name else 1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(2, lr)
    check(learn, data, bs, accumulated(data.sizes(bs), accum_bs, n_epoch=2))

# --- that these tests can fail

@pytest.mark.parametrize('name,layout', [(c,l) for c in ('mse','cross entropy','ignored') for l in layouts])
def test_fails_with_one_item_one_percent_off(name, layout):
    n,bs,accum_bs,k = layouts[layout]
    data,model,loss_func = case(name, n)
    def off(learn): return loss_weight(learn.loss_func, learn.yb)*(1 + .01/bs*(learn.iter%4 == 2))
    learn = learner(data, bs, GradientAccumulation(accum_bs, micro_batch_size=k, weight=off), Spy(), model=model, loss_func=loss_func)
    learn.fit(1, .01)
    with pytest.raises(AssertionError, match='its gradient is'): check(learn, data, bs, accumulated(data.sizes(bs), accum_bs), tol=1e-5)

@pytest.mark.parametrize('name,layout,exact',
                         [('mse','divisible',True), ('mse','accum_bs 20',False), ('ignored','divisible',False),
                          ('class weights','divisible',False)])
def test_fastai_accumulation(name, layout, exact):
    "What fastai's own callback makes of it: right only if batches divide and all items count alike"
    n,bs,accum_bs,k = layouts[layout]
    data,model,loss_func = case(name, n)
    learn = learner(data, bs, FastaiAccumulation(accum_bs), Spy(), model=model, loss_func=loss_func)
    learn.fit(1, .01)
    steps = accumulated(data.sizes(bs), accum_bs, 'carry')
    if exact: check(learn, data, bs, steps)
    else:
        with pytest.raises(AssertionError, match='its gradient is'): check(learn, data, bs, steps, tol=.02)

# --- nothing to learn from

def masked_mean(pred, y):
    "A mean whose gradient is NaN if all is masked"
    mask = y >= 0
    return (F.cross_entropy(pred, y.clamp(min=0), reduction='none')*mask).sum()/mask.sum()

n_valid = {'on the device': lambda learn: (learn.y >= 0).sum(), 'host number': lambda learn: int((learn.y >= 0).sum())}
empty_cases = {'cross entropy': (nn.CrossEntropyLoss(), None), 'weights': (nn.CrossEntropyLoss(weight=cls_w, label_smoothing=.1), None),
               'flat': (CrossEntropyLossFlat(axis=1), None), 'function': (F.cross_entropy, None),
               **{f'NaN gradients, {k}': (masked_mean, w) for k,w in n_valid.items()}}

@pytest.mark.parametrize('empty', [range(8, 16), range(0, 8), range(32, 64), range(64)],
                         ids=['second batch', 'first batch', 'whole step', 'all'])
@pytest.mark.parametrize('name', empty_cases)
def test_without_valid_targets(name, empty):
    "Items without any target add nothing; a step without any has zero gradients, and is taken"
    loss_func,weight = empty_cases[name]
    data,model,_ = case('ignored', 64)
    data.y[0][list(empty)] = -100
    learn = learner(data, 8, GradientAccumulation(32, weight=weight), Spy(), model=model, loss_func=loss_func)
    learn.fit(2, .01)
    check(learn, data, 8, accumulated(data.sizes(8), 32, n_epoch=2))
    assert weights(learn.model).isfinite().all() and tensor(learn.recorder.losses).isfinite().all()

# --- losses that no weight makes exact

@pytest.mark.parametrize('weight,value,inexact', [(None, -100, True), (cls_w, 0, True), (None, 0, False)])
def test_two_means(weight, value, inexact, recwarn):
    "fastai's label smoothing with class weights or ignored targets: one warning, which says what helps"
    data,model,_ = case('ignored 0', 61)
    data.y[0][data.y[0]==0] = value
    learn = learner(data, 8, GradientAccumulation(32), model=model, loss_func=LabelSmoothingCrossEntropyFlat(axis=1, weight=weight))
    learn.fit(3, .01)
    assert [str(w.message).count('weight=') for w in recwarn if 'two means' in str(w.message)]==[1]*inexact

# --- MixUp and CutMix

class Mixed(Callback):
    "Writes down what MixUp or CutMix made of each micro-batch"
    order,run_valid = MixUp.order+1,False
    def __init__(self, mixer): self.mixer,self.batches = mixer,[]
    def before_batch(self):
        y1 = self.mixer.yb1[0] if self.mixer.stack_y else self.learn.y
        lam = self.mixer.lam.expand(len(self.learn.y))
        self.batches.append([t.clone() for t in (self.learn.x, self.learn.y, y1, lam)])

def mixed_loss(loss_func):
    "The mixed loss of all items at once: its mean goes over all targets, whatever their weights"
    none = deepcopy(loss_func)
    none.reduction = 'none'
    def f(pred, y, y1, lam):
        l,l1 = (none(pred, t).view(len(lam), -1) for t in (y, y1))
        return torch.lerp(l1, l, lam[:,None].float()).mean()
    return f

mixed_cases = {'cross entropy': (CrossEntropyLossFlat(), classes), 'class weights': (CrossEntropyLossFlat(weight=cls_w), classes),
    'smoothing, weights': (LabelSmoothingCrossEntropyFlat(weight=cls_w), classes), 'focal': (FocalLossFlat(), classes),
    'mse': (MSELossFlat(), reals), 'bce': (BCEWithLogitsLossFlat(), bits)}

@pytest.mark.parametrize('layout', ['divisible', 'ragged 61', 'split'])
@pytest.mark.parametrize('mixer', [MixUp, CutMix])
@pytest.mark.parametrize('name', mixed_cases)
def test_mixed(name, mixer, layout):
    n,bs,accum_bs,k = layouts[layout]
    loss_func,target = mixed_cases[name]
    torch.manual_seed(1)
    data = Data(torch.randn(n, 6, 5, 5), target()[:n])
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, n_cls))
    mixer = mixer(.8)
    learn = learner(data, bs, GradientAccumulation(accum_bs, micro_batch_size=k), Spy(), mixer, Mixed(mixer),
                    model=model, loss_func=loss_func)
    own = learn.loss_func
    learn.fit(1, .1)
    steps = accumulated(data.sizes(bs), accum_bs)
    assert len(learn.spy.steps)==len(steps) and learn.loss_func is own
    for s,ids in zip(learn.spy.steps, steps):
        x,y,y1,lam = map(torch.cat, zip(*[learn.mixed.batches[i] for _,i in ids]))
        ref,_ = big_batch(model, s.weights, mixed_loss(loss_func), x, (y, y1, lam))
        assert rel_err(s.grad, ref) < 1e-6

# --- other inputs, targets, weights and models

class Summed(nn.Module):
    "Takes a dict"
    def __init__(self): super().__init__(); self.a,self.b = mlp(),mlp()
    def forward(self, x): return self.a(x['a'])+self.b(x['b'])

class Bag(nn.Module):
    "Sparse gradients"
    def __init__(self): super().__init__(); self.emb,self.out = nn.Embedding(20, 8, sparse=True),nn.Linear(8, n_cls)
    def forward(self, x): return self.out(self.emb(x).tanh()).transpose(1, 2)

class Tied(nn.Module):
    "One parameter in two places"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(6, 6),nn.Linear(6, 6); self.b.weight = self.a.weight
    def forward(self, x): return self.b(self.a(x).tanh())
def tied_groups(model): return [list(model.a.parameters()), list(model.b.parameters())]

def two_losses(pred, y1, y2): return F.mse_loss(pred, y1) + 2*F.l1_loss(pred, y2)
def weighted_mse(pred, y, w): return ((pred-y).pow(2).mean(-1)*w).sum()/w.sum()
OptSGD = partial(OptimWrapper, opt=torch.optim.SGD)

def rand(*d): return torch.randn(61, *d)
others = {  # data, and arguments of Learner and accumulation
    'two targets':      (Data(rand(6), rand(4), rand(4)), dict(loss_func=two_losses), {}),
    'weights in yb':    (Data(rand(6), rand(4), rand(1)[:,0].exp()), dict(loss_func=weighted_mse),
                         dict(weight=lambda learn: learn.yb[1].sum())),
    'host weights':     (Data(rand(6), rand(4), rand(1)[:,0].exp()), dict(loss_func=weighted_mse),
                         dict(weight=lambda learn: float(learn.yb[1].sum()))),
    'dict of inputs':   (Data(dict(a=rand(6), b=rand(6)), rand(4)), dict(model=Summed()), {}),
    'torch DataLoader': (Data(rand(6), rand(4)), dict(dl_type=torch.utils.data.DataLoader), {}),
    'sparse gradients': (Data(torch.randint(20, (61,5)), ignored(5)[:61]),
                         dict(model=Bag(), loss_func=nn.CrossEntropyLoss(), opt_func=OptSGD), {}),
    'tied parameters':  (Data(rand(6), rand(6)), dict(model=Tied(), splitter=tied_groups), {}),
    'a loss [l]':       (Data(rand(6), rand(4)), dict(loss_func=lambda pred, y: F.mse_loss(pred, y).view(1)), {}),
    'float64':          (Data(rand(6).double(), rand(4).double()), dict(model=mlp().double(), loss_func=nn.MSELoss()), {}),
    'uint8 targets':    (Data(rand(6), torch.randint(150, 170, (61,)).byte()),
                         dict(model=mlp(n_out=170), loss_func=nn.CrossEntropyLoss()), {}),
}

@pytest.mark.filterwarnings('ignore:What <lambda> averages over could not be measured')   # a loss [l] has no items
@pytest.mark.parametrize('k', [None, 3], ids=['', 'split'])
@pytest.mark.parametrize('name', others)
def test_others(name, k):
    if 'sparse' in name and devices.now.name == 'sim': pytest.skip('the simulated device has no sparse tensors')
    data,kwargs,acc = others[name]
    learn = learner(data, 8, GradientAccumulation(20, micro_batch_size=k, **acc), Spy(), **kwargs)
    learn.fit(2, .01)
    check(learn, data, 8, accumulated(data.sizes(8), 20, n_epoch=2))

class Crop(Callback):
    "Loader batches whose sequences have different lengths"
    run_valid = False
    def before_batch(self):
        n = 1 + 2*self.learn.iter%5
        self.learn.xb,self.learn.yb = [(t[:,:n],) for t in (self.learn.x, self.learn.y)]
def all_words(ts): return torch.cat([t.flatten(0, 1) for t in ts])

@pytest.mark.parametrize('k', [None, 3], ids=['', 'split'])
@pytest.mark.parametrize('loss_func,target',
                         [(MSELossFlat(), reals), (CrossEntropyLossFlat(), classes), (BCEWithLogitsLossFlat(), bits),
                          (FocalLossFlat(), classes)], ids=lambda o: getattr(o, '__name__', str(o)))
def test_lengths(loss_func, target, k):
    data = Data(torch.randn(61, 5, 6), target(5)[:61])
    learn = learner(data, 8, GradientAccumulation(32, micro_batch_size=k), Crop(), Spy(), loss_func=loss_func)
    learn.fit(1, .01)
    assert len(learn.spy.steps)==2
    check_own(learn, all_words)

def odd_batches(data, batch_size=None):
    "A loader whose batches have 3, 8, 1, 10 items and so on"
    sizes = [3,8,1,10,2,7,5]
    return torch.utils.data.DataLoader(data, batch_sampler=[range(sum(sizes[:i]), sum(sizes[:i+1])) for i in range(len(sizes))])

@pytest.mark.parametrize('k', [None, 3], ids=['', 'split'])
@pytest.mark.parametrize('name', ['mse', 'ignored', 'class weights', 'own'])
def test_odd_batches(name, k):
    data,model,loss_func = case(name, 36)
    learn = learner(data, None, GradientAccumulation(10, micro_batch_size=k), Spy(), model=model, loss_func=loss_func, dl_type=odd_batches)
    learn.fit(2, .01)
    assert [[i for _,i in s.batches] for s in learn.spy.steps]==[[0,1],[2,3],[4,5,6]]*2   # 11, 11 and 14 items
    check_own(learn)

def detection_batches(data, batch_size):
    "Targets as a list of dicts, one for each image, with any number of boxes"
    def collate(items): return torch.stack([x for x,_ in items]),[dict(boxes=y.repeat(1+i%3, 1)) for i,(_,y) in enumerate(items)]
    return torch.utils.data.DataLoader(data, batch_size, collate_fn=collate)

def box_loss(pred, targets): return torch.stack([(p-t['boxes']).pow(2).mean() for p,t in zip(pred, targets)]).mean()

def test_items_of_detection():
    "Images are counted, not boxes"
    data = Data(rand(6), rand(4))
    learn = learner(data, 8, GradientAccumulation(20), Spy(), loss_func=box_loss, dl_type=detection_batches)
    learn.dls.valid = learn.dls.train
    learn.fit(1, .01)
    assert [s.n_items for s in learn.spy.steps]==[24,24,13]
    check_own(learn, lambda parts: torch.cat(parts) if isinstance(parts[0], Tensor) else sum(parts, []))

def test_not_normalized():
    "`normalize=False`: the sum of the micro-batches' means"
    data = Data(rand(6), rand(4))
    learn = learner(data, 8, GradientAccumulation(20, normalize=False), Spy())
    learn.fit(1, .01)
    for s,ids in zip(learn.spy.steps, accumulated(data.sizes(8), 20)):
        micro = [big_batch(learn.model, s.weights, learn.loss_func, x, y) for x,*y in data.steps(8, [[i] for i in ids])]
        assert rel_err(s.grad, sum(g for g,_ in micro)) < 1e-6

class Regularize(Callback):
    "Changes `loss_grad`, as fastai's RNNRegularizer does; the loss that is logged stays"
    run_valid = False
    def after_loss(self): self.learn.loss_grad += .1*self.learn.pred.pow(2).mean()

def test_regularized():
    data = Data(torch.randn(64, 6), torch.randn(64, 4))
    whole,acc = learner(data, 32, Regularize()),learner(data, 8, GradientAccumulation(32), Regularize())
    for l in (whole, acc): l.fit(2, .1)
    assert rel_err(weights(acc.model), weights(whole.model)) < 1e-6
    assert rel_err(tensor(acc.recorder.losses), tensor(whole.recorder.losses)) < 1e-6

# --- in any loop

@pytest.mark.parametrize('name,layout', [*zip(cases, itertools.cycle(l for l in layouts if l!='split'))])
def test_any_loop(name, layout):
    "`GradientAccumulator` in a loop without fastai"
    if devices.now.name=='sim' and name.endswith(', pos'): pytest.skip("only a Learner's loss has its `pos_weight` on the simulated device")
    n,bs,accum_bs,_ = layouts[layout]
    data,model,loss_func = case(name, n)
    put = devices.now.put
    model,loss_func = put(model),put(loss_func)
    acc,sizes,steps = GradientAccumulator(model.parameters(), accum_bs, normalize='sum' not in name),data.sizes(bs),[]
    for i,(x,y) in enumerate(data.steps(bs, [[(0,i)] for i in range(len(sizes))])):
        x,y = put(x),put(y)
        pred = model(x)
        acc.add(loss_func(pred, y), len(x), loss_weight(loss_func, y), y.numel(), pred).backward()
        if not acc.ready and i < len(sizes)-1: continue
        loss,steps = acc.finish(),accumulated(sizes, accum_bs)
        x,y = data.steps(bs, steps)[[s[-1][1] for s in steps].index(i)]
        grad,big_loss = big_batch(model, weights(model), loss_func, x, [y])
        assert rel_err(grads(model), grad) < 1e-6 and loss.item()==pytest.approx(big_loss, rel=1e-5)
        acc.reset()

# --- many steps

opts = {'SGD': partial(SGD, mom=.9, wd=.01), 'fastai Adam': partial(Adam, wd=.1),
        'AdamW': partial(OptimWrapper, opt=torch.optim.AdamW, weight_decay=.1),
        'torch SGD': partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9, weight_decay=.01)}

@pytest.mark.parametrize('clip', [None, .1])
@pytest.mark.parametrize('layout', ['divisible', 'ragged 61', 'accum_bs 20', 'split'])
@pytest.mark.parametrize('name', opts)
def test_many_steps(name, layout, clip):
    "After 15 epochs the weights are no further from the float64 run than rounding takes the big batch's own"
    n,bs,accum_bs,k = layouts[layout]
    data,model,loss_func = case('ignored, weights', n)
    learn = learner(data, bs, GradientAccumulation(accum_bs, micro_batch_size=k),
                    *L(GradientClip(clip) if clip else None), model=model, loss_func=loss_func, opt_func=opts[name],
                    wd_bn_bias=True)
    learn.fit(15, .03)
    big = data.steps(bs, accumulated(data.sizes(bs), accum_bs, n_epoch=15))
    exact = train(double(model), double(loss_func), opts[name], [double(b) for b in big], .03, clip)
    whole = train(deepcopy(model), loss_func, opts[name], big, .03, clip)
    assert rel_err(exact, weights(model)) > .1                       # it moved
    assert rel_err(weights(learn.model), exact) < 4*rel_err(whole, exact) + 1e-6

# --- a loss of fastai that takes all items together

@pytest.mark.parametrize('reduction', ['sum','mean'])
@pytest.mark.parametrize('square', [False, True])
@pytest.mark.parametrize('bs,acc', [(8, dict(accum_bs=32)), (32, dict(micro_batch_size=5))], ids=['loader batches','split'])
def test_dice_without_pixels(bs, acc, square, reduction):
    "One ratio of sums, whatever its reduction says. As shares add up to 1 for each item it is a mean, but not if they are squared"
    torch.manual_seed(1)
    data,loss = Data(torch.randn(64, 6), classes()),DiceLoss(reduction=reduction, square_in_union=square)
    def trained(bs, *cbs):
        set_seed(0)
        learn = learner(data, bs, *cbs, model=mlp(n_out=n_cls), loss_func=loss)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter('always')
            learn.fit(1, .1)
        return weights(learn.model),[str(w.message) for w in found if w.category is FastaccumWarning]
    whole,_ = trained(32)
    for acc,exact in ((acc, not square), (dict(micro_batch_size=5, coupled=True), True)):
        ours,told = trained(32 if 'coupled' in acc else bs, GradientAccumulation(**acc))
        assert (len(told), rel_err(ours, whole) < 1e-6) == (not exact, exact)
        assert exact or 'DiceLoss' in told[0] and 'coupled=True' in told[0]
