"critical_batch: the branches are what they say, and the Learner is as before"
import random, re, pytest
from fastai.text.all import (
    AWD_LSTM, BaseTokenizer, TextBlock, Tokenizer, awd_lstm_clas_config, awd_lstm_lm_config, language_model_learner,
    text_classifier_learner)
from reference import *
from torch.utils._pytree import tree_leaves
from fastaccum.batch_size.critical import conclusion, critical_batch
from fastaccum.precision.callback import MixedPrecision
from fastaccum.batch_size.rates import ScaleLR
from fastaccum.logs.steps import StepLogger

torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.randint(4, (61,)))

def make(*cbs, shuffle=True, opt_func=Adam, **kwargs):
    learn = learner(data, 8, *cbs, loss_func=CrossEntropyLossFlat(), opt_func=opt_func, **kwargs)
    learn.dls = DataLoaders(DataLoader(L(data[i] for i in range(61)), bs=8, shuffle=shuffle),
                            DataLoader(L(data[i] for i in range(61)), bs=61))
    return learn

def state(learn):
    loaders = [(dl.rng.getstate() if hasattr(dl, 'rng') else None) for dl in learn.dls.loaders]
    cbs = [
        (cb.name, {k: v for k,v in vars(cb).items() if isinstance(v, (int,float,str))
                   or k in ('lrs','losses','values')}) for cb in learn.cbs]
    own = {k: v for k,v in vars(learn).items() if isinstance(v, (int,float,str,bool))}
    return deepcopy((learn.model.state_dict(), learn.opt and learn.opt.state_dict(), torch.get_rng_state(),
                     random.getstate(), list(np.random.get_state()), loaders, cbs, own,
                     [p.grad for p in learn.model.parameters()], learn.model.training))
def same(a, b):
    a,b = tree_leaves(a),tree_leaves(b)
    return (len(a)==len(b)
            and all(x.equal(y) if isinstance(x, Tensor) else np.array_equal(x, y) if isinstance(x, np.ndarray)
                    else x==y for x,y in zip(a, b)))

class Break(Callback):
    "Stops the second branch"
    order = 70
    count = [0]
    def after_step(self):
        self.count[0] += 1
        if self.count[0]==10: raise KeyboardInterrupt

@pytest.mark.parametrize('opt_func', [Adam, partial(OptimWrapper, opt=torch.optim.AdamW), ranger], ids=['fastai', 'torch', 'lookahead'])
def test_as_before(opt_func):
    "To the last bit: weights, optimizer, random numbers, callbacks; after an exception too"
    learn = make(GradientAccumulation(16), StepLogger(), MixedPrecision('bf16'), MixUp(.4), GradientClip(1.),
                 SaveModelCallback(), opt_func=opt_func)
    learn.fit(1, 1e-2)
    before = state(learn)
    table = critical_batch(learn, [8, 32], n_items=61, n_seeds=2)
    assert same(state(learn), before) and list(table)==['accum_bs', 'steps', 'items', 'loss', 'loss_std']
    stop = Break(); learn.add_cb(stop)
    before = state(learn)
    Break.count[0] = 0
    with pytest.raises(KeyboardInterrupt): critical_batch(learn, [8, 32], n_items=61, n_seeds=2)
    assert same(state(learn), before)
    learn.remove_cb(stop)
    learn.fit(1, 1e-2)

def test_goes_on_the_same():
    "A run with it in the middle is the run without it"
    runs = [make(GradientAccumulation(16)) for _ in range(2)]
    for ask,l in enumerate(runs):
        set_seed(3)
        l.fit(1, 1e-2)
        if ask: critical_batch(l, [8, 16], n_items=61, n_seeds=2)
        l.fit(1, 1e-2)
    assert weights(runs[0].model).equal(weights(runs[1].model))

def test_a_new_learner():
    "One that was never trained has no optimizer, and gets none"
    learn = make()
    critical_batch(learn, [8, 16], n_items=61, n_seeds=2)
    assert learn.opt is None

def test_branches():
    "A branch is the training that one would have done by hand: weights and optimizer from the Learner, the rate scaled"
    learn = make()
    learn.fit(1, 1e-2)
    table = critical_batch(learn, [8, 16], n_items=61, lr=1e-2, n_seeds=2, scale_lr=ScaleLR('linear'))
    losses = []
    for seed in range(2):
        hand = make()
        hand.dls = learn.dls
        hand.create_opt()
        hand.model.load_state_dict(learn.model.state_dict()); hand.opt.load_state_dict(deepcopy(learn.opt.state_dict()))
        hand.opt.hypers,hand.opt.state = L(hand.opt.hypers),defaultdict(dict, hand.opt.state)
        hand.add_cb(GradientAccumulation(16))
        set_seed(seed); learn.dls.train.rng.seed(seed)
        hand.fit(1, 2e-2)
        losses.append(hand.validate()[0])
    assert table.loss[1]==pytest.approx(np.mean(losses), rel=1e-5) and table.loss_std[1]==pytest.approx(np.std(losses, ddof=1), rel=1e-3)
    assert table.steps.tolist()==[8, 4] and table['items'].tolist()==[61, 61]

def test_advice(capsys):
    "The largest size that is no worse than the smallest beyond what the seeds explain"
    def runs(**by_size):
        return pd.DataFrame([dict(accum_bs=int(k[1:]), seed=i, loss=v+d, steps=960//int(k[1:]))
                             for k,v in by_size.items() for i,d in enumerate(noise[k])])
    noise = dict(b16=[0, .1, .2], b32=[.01, .1, .19], b64=[0, .11, .2], b128=[0, .1, .2])
    text = conclusion(runs(b16=1., b32=1., b64=1., b128=1.5), None)
    assert (text.startswith('Use steps of up to 64 items: 4 times fewer') and '128 items: loss +0.5000' in text
            and 'same learning rate' in text)
    assert conclusion(runs(b16=1., b32=1.3, b64=1., b128=1.), None).startswith('Accumulation is not worth it here')
    assert 'up to 128 items' in conclusion(runs(b16=1., b32=.9, b64=.8, b128=.7), ScaleLR('sqrt'))
    critical_batch(make(), [8, 16], n_items=32, n_seeds=2)
    assert '+-' in capsys.readouterr().out

def test_longer_than_an_epoch(capsys):
    "Refused, unless that is meant; the cost is told before the first step"
    with pytest.raises(ValueError, match=r'62 items, 1.02 epochs of 61 .*n_items=61 .3 steps of 16.*force=True'):
        critical_batch(make(), [8, 16], n_items=62)
    with pytest.raises(ValueError, match='320 items, 5.25 epochs'): critical_batch(make(), [8, 16])
    Break.count[0] = 9                                         # the first step ends it
    with pytest.raises(KeyboardInterrupt): critical_batch(make(Break()), [8, 16], n_items=122, n_seeds=2, force=True)
    told = capsys.readouterr().out
    assert '4 branches of 122 items' in told and '488 items, which is 8 epochs' in told
    steps = int(re.search(r'take (\d+) steps', told)[1])
    table = critical_batch(make(), [8, 16], n_items=122, n_seeds=2, force=True)
    assert abs(2*table.steps.sum() - steps) <= 4 and table['items'].tolist()==[122, 122]

def test_carried():
    "The last step of a branch is short, as its epoch began with items of the epoch before: nothing to warn about"
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        table = critical_batch(make(), [8, 48], n_items=122, n_seeds=2, force=True)
    assert table.steps.tolist()==[15, 3]

def text(kind):
    "fastai's AWD_LSTM, trained a little, so that it keeps weights after dropout"
    set_seed(0)
    df = pd.DataFrame(dict(text=[' '.join(random.choices('abcdef', k=random.randint(3, 20))) for _ in range(60)], label=['x', 'y']*30))
    tokens = TextBlock(Tokenizer(BaseTokenizer, rules=[]), vocab=['xxunk', 'xxpad', *'abcdef'], is_lm=kind=='language', seq_len=8)
    blocks,splitter = [tokens] + [CategoryBlock]*(kind=='classes'),IndexSplitter(range(48, 60))
    dls = DataBlock(blocks, get_x=lambda r: r.text, get_y=None if kind=='language' else lambda r: r.label,
                    splitter=splitter).dataloaders(df, bs=8, seq_len=8, num_workers=0)
    config = {**(awd_lstm_lm_config if kind=='language' else awd_lstm_clas_config), 'emb_sz': 8, 'n_hid': 12, 'n_layers': 2}
    learn = dict(language=language_model_learner, classes=text_classifier_learner)[kind](dls, AWD_LSTM, config=config, pretrained=False)
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

@pytest.mark.slow
@pytest.mark.parametrize('kind', ['language', 'classes'])
def test_text(kind):
    "AWD_LSTM keeps tensors that `deepcopy` refuses, and a language model's loader the order of its texts"
    learn = text(kind)
    learn.fit(1, 1e-3)
    order = lambda: [list(getattr(dl, 'items', dl.dataset).idxs) if kind=='language' else None for dl in learn.dls.loaders]
    before,n = (deepcopy(learn.model.state_dict()), random.getstate(), order()),8*len(learn.dls.train)
    table = critical_batch(learn, [8, 16], n_items=n, n_seeds=2)
    assert same((learn.model.state_dict(), random.getstate(), order()), before) and table['items'].tolist()==[n, n]
    again = critical_batch(learn, [8, 16], n_items=n, n_seeds=2)
    assert again.equals(table)
    learn.fit(1, 1e-3)

@pytest.mark.parametrize('kw,msg',
                         [(dict(sizes=[16]), 'two or more'), (dict(sizes=[4, 16]), 'at least a loader batch'),
                          (dict(sizes=[8, 2.5]), 'two or more'),
                                    (dict(n_seeds=1), 'n_seeds=1'), (dict(n_items=8), 'n_items=8')])
def test_errors(kw, msg):
    with pytest.raises(ValueError, match=msg): critical_batch(make(), **{**dict(sizes=[8, 16]), **kw})

def test_data_that_cannot_do():
    with pytest.raises(ValueError, match='does not shuffle'): critical_batch(make(shuffle=False), [8, 16])
    learn = make()
    learn.dls = DataLoaders(learn.dls.train)
    with pytest.raises(ValueError, match='validation set'): critical_batch(learn, [8, 16])
