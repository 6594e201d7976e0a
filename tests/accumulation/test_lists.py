"Lists of images and boxes: an object for each item, or columns? Each against plain fastai with the whole batch"
import warnings
import pytest
from reference import *
from fastaccum.all import *
from fastaccum.core.microbatch import Lists
from test_silent import moved

class Detection:
    "Images of 3 channels, of many sizes or of one, and `n_boxes(i)` boxes of each"
    def __init__(self, n, n_boxes=lambda i: i%3+1, one_size=False, stacked=False):
        self.n,self.n_boxes,self.one_size,self.stacked = n,n_boxes,one_size,stacked
    def __len__(self): return self.n
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        image = torch.randn(3, 5 if self.one_size else 5+i%4, 6, generator=g)
        return (image, torch.randn((), generator=g)) if self.stacked else (image, torch.randn(self.n_boxes(i), 4, generator=g))

def as_lists(make, stacked): return lambda b: (make(x for x,_ in b), torch.stack([y for _,y in b]) if stacked else make(y for _,y in b))
def as_dicts(b): return list(x for x,_ in b), [dict(boxes=y, labels=torch.ones(len(y))) for _,y in b]

class Pooled(nn.Module):
    "Of a list of images, or of a tensor"
    def __init__(self): super().__init__(); self.body = mlp(3, 4)
    def forward(self, xs): return self.body(torch.stack([x.mean((1, 2)) for x in xs]))
def box_loss(pred, boxes):
    "A mean over images"
    boxes = [b['boxes'] if isinstance(b, dict) else b for b in boxes]
    return torch.stack([(p-b).pow(2).mean() for p,b in zip(pred, boxes)]).mean()
def value_loss(pred, y): return (pred.sum(1)-y).pow(2).mean()

def trained(data, bs, collate, k=None, n_epoch=2, accum_bs=None, loss=box_loss):
    set_seed(0)
    dls = DataLoaders(*[torch.utils.data.DataLoader(data, batch_size=bs, collate_fn=collate)]*2)
    dls.n_inp = 1
    acc = [GradientAccumulation(accum_bs, micro_batch_size=k, weight=lambda l: len(l.xb[0]))] if k else []
    learn = Learner(dls, Pooled(), loss_func=loss, opt_func=SGD, cbs=acc)
    learn.start = deepcopy(learn.model)
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, .05)
    return learn

def silent_off(data, bs, collate, k, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        whole = trained(data, bs, collate, **kwargs)
        split = trained(data, bs, collate, k, **kwargs)
        assert split.gradient_accumulation.items == len(data)%bs or bs
    return moved(split, whole, whole.start)

@pytest.mark.parametrize('collate', [as_lists(list, False), as_lists(tuple, False), as_dicts], ids=['lists', 'tuples', 'dicts'])
@pytest.mark.parametrize('n_boxes', [lambda i: i%3+1, lambda i: 2, lambda i: 3, lambda i: 4], ids=['many', 'two', 'three', 'four'])
@pytest.mark.parametrize('bs', [2, 3, 4])
def test_images_and_boxes(bs, n_boxes, collate):
    "As many boxes as images, as many images as channels. If all three are the same in every batch, it is told"
    if bs == 3 == n_boxes(0) == n_boxes(1) and collate is not as_dicts:
        with pytest.warns(UserWarning, match='no batch shows'): trained(Detection(12, n_boxes), bs, collate, 1)
        return
    assert silent_off(Detection(12, n_boxes), bs, collate, 1) < 2e-6

@pytest.mark.parametrize('bs', [2, 3, 6])
def test_images_and_values(bs):
    "The last loader batch is smaller, and tells"
    assert silent_off(Detection(13, stacked=True), bs, as_lists(list, True), 1, loss=value_loss) < 2e-6

def test_what_no_batch_tells_is_told():
    "Three images at a time, to the end. They are taken for images"
    data,collate = Detection(12, stacked=True),as_lists(list, True)
    whole = trained(data, 3, collate, loss=value_loss)
    with pytest.warns(UserWarning, match='list of 3 tensors with 3 rows each.*one object for each item.*no batch shows') as seen:
        split = trained(data, 3, collate, 1, loss=value_loss)
    assert moved(split, whole, whole.start) < 2e-6 and sum('rows each' in str(w.message) for w in seen) == 1

# --- columns
class Columns(nn.Module):
    def __init__(self): super().__init__(); self.body = mlp(6, 4)
    def forward(self, xs): return self.body(torch.cat(tuple(xs), 1))
def column_loader(n, bs, make):
    torch.manual_seed(0)
    x,y = torch.randn(n, 6),torch.randn(n, 4)
    return [(make(x[i:i+bs].split(2, 1)), y[i:i+bs]) for i in range(0, n, bs)]

@pytest.mark.parametrize('make', [list, tuple])
@pytest.mark.parametrize('n,bs', [(19, 8), (11, 8), (10, 4)])
def test_columns(n, bs, make):
    "Three columns; the last loader batch has three items, or two"
    def fit(k):
        set_seed(0)
        dls = DataLoaders(*[column_loader(n, bs, make)]*2); dls.n_inp = 1
        learn = Learner(dls, Columns(), loss_func=MSELossFlat(), opt_func=SGD, cbs=[GradientAccumulation(micro_batch_size=k)] if k else [])
        learn.start = deepcopy(learn.model)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .05)
        return learn
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        whole,split = fit(None),fit(1)
    assert moved(split, whole, whole.start) < 2e-6

def test_a_wrong_guess_is_told():
    lists = Lists()
    three,four = ([torch.ones(n, 2) for _ in range(3)] for n in (3, 4))
    assert lists.look((three,), (torch.ones(3),)) == 3 and lists.holds_objects(three)
    assert lists.look((four,), (torch.ones(4),)) == 4 and not lists.holds_objects(four)
    assert 'later batches show that this was wrong' in lists.message
