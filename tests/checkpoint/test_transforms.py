"What a transform is, told apart from what it has drawn or noted: a run with any transform of fastai resumes, bit for bit"
import json, os, random, subprocess, sys
import pandas as pd, pytest
from fastai.callback.progress import ProgressCallback
from fastai.data.block import CategoryBlock, DataBlock, MultiCategoryBlock, RegressionBlock
from fastai.data.core import TfmdDL
from fastai.data.transforms import Categorize, IntToFloatTensor, Normalize, RandomSplitter, ToTensor
from fastai.tabular.core import Categorify, FillMissing, TabularPandas
from fastai.text.all import Numericalize, Pad_Chunk, SortedDL, Tokenizer, WordTokenizer, pad_input
from fastai.vision.augment import (AffineCoordTfm, Brightness, Contrast, CropPad, DeterministicDihedral,
                                   DeterministicFlip, Dihedral, DihedralItem, Flip, FlipItem, Hue, OldRandomCrop,
    RandomCrop, RandomErasing, RandomResizedCrop, RandomResizedCropGPU, RatioResize, Resize, ResizeMethod, Rotate,
    Saturation, Warp, Zoom, aug_transforms, rotate_mat)
from fastai.vision.core import PILImage, PILMask, TensorImage, TensorPoint, imagenet_stats
from fastai.vision.data import ImageBlock, MaskBlock, PointBlock
from reference import *
from fastaccum.checkpoint.callback import TrainingCheckpoint
from fastaccum.checkpoint.fingerprint import DataFingerprints
from fastaccum.checkpoint.folder import CheckpointFolder
from quick import quickly


images = [PILImage.create(np.random.default_rng(i).integers(0, 255, (12, 10, 3), np.uint8)) for i in range(20)]
texts = [' '.join(random.Random(i).choices('to be or not that is the Question Whether tis NOBLER'.split(), k=3+i%5)) for i in range(20)]

class EveryOther(Transform):
    "Keeps notes that the next item depends on, and is told one of them"
    def __init__(self, n=0): self.n = n
    def encodes(self, x:TensorImage): self.n += 1; return x if self.n%3 else -x

def of_images(item=(), batch=(), size=(8, 8), block=CategoryBlock, get_y=lambda i: i%3):
    return DataBlock((ImageBlock, block), get_x=lambda i: images[i], get_y=get_y, splitter=RandomSplitter(seed=1),
                     item_tfms=[*item, *([Resize(size)] if size else [])],
                     batch_tfms=list(batch)).dataloaders(range(20), bs=4, num_workers=0)
def of_texts(after=(), dl_type=SortedDL, **kwargs):
    ds = Datasets(list(range(20)),
                  [[lambda i: texts[i], Tokenizer(WordTokenizer()), Numericalize(min_freq=1)],
                   [lambda i: i%3, Categorize()]], splits=RandomSplitter(seed=1)(range(20)))
    return ds.dataloaders(bs=4, num_workers=0, dl_type=dl_type, **kwargs)
def of_table():
    d = pd.DataFrame(dict(a=[.1*i if i%4 else np.nan for i in range(20)], b=[f'{i%5}' for i in range(20)], y=[i%3*1. for i in range(20)]))
    return TabularPandas(d, [Categorify, FillMissing, Normalize], ['b'], ['a'], 'y',
                         splits=RandomSplitter(seed=1)(range(20))).dataloaders(bs=4, num_workers=0)

points = lambda i: TensorPoint.create([[i%8, i%5], [2, 3]])
cases = dict(
    aug_transforms=lambda: of_images(batch=aug_transforms(size=8)),
    flip_vert=lambda: of_images(batch=[*aug_transforms(flip_vert=True), Normalize.from_stats(*imagenet_stats)]),
    **{f'{t.__name__}': (lambda t=t, kw=kw: of_images(batch=[t(**kw)])) for t,kw in {
        Flip: {}, Rotate: dict(p=.7), Warp: dict(p=.9), Zoom: dict(p=.9), Dihedral: {}, DeterministicFlip: {},
        DeterministicDihedral: {}, AffineCoordTfm: dict(aff_fs=partial(rotate_mat, p=1.)),
        Brightness: {}, Contrast: {}, Saturation: {}, Hue: dict(p=1.), RandomErasing: dict(p=.9),
        RandomResizedCropGPU: dict(size=8), EveryOther: {}, Normalize: {}, IntToFloatTensor: {}}.items()},
    **{f'{t.__name__}': (lambda t=t, kw=kw: of_images(item=[t(**kw)])) for t,kw in {
        FlipItem: {}, DihedralItem: {}, CropPad: dict(size=9), RandomCrop: dict(size=9), OldRandomCrop: dict(size=9),
        RandomResizedCrop: dict(size=9, min_scale=.3), RatioResize: dict(max_sz=12),
        ToTensor: {}}.items()},
    squish=lambda: of_images(item=[Resize(8, ResizeMethod.Squish)], size=None),
    pad=lambda: of_images(item=[Resize(8, ResizeMethod.Pad)], size=None),
    draws=lambda: of_images(batch=[Rotate(draw=lambda x: x.new_empty(len(x)).uniform_(0, 20), p=1.)]),
    points=lambda: of_images(block=PointBlock, get_y=points, batch=aug_transforms()),
    several=lambda: of_images(block=MultiCategoryBlock, get_y=lambda i: [i%3, i%2], batch=[Flip()]),
    regression=lambda: of_images(block=RegressionBlock, get_y=lambda i: i/20., batch=[Flip()]),
    mask=lambda: of_images(block=MaskBlock(codes=['a', 'b']),
                           get_y=lambda i: PILMask.create(np.asarray(images[i])[...,0]//128), batch=aug_transforms()),
    texts=lambda: of_texts(before_batch=pad_input),
    chunks=lambda: of_texts(before_batch=Pad_Chunk(seq_len=3), dl_type=TfmdDL), table=of_table)

class Stop(Callback):
    order,run_valid = 2000,False
    def __init__(self, at): self.at = at
    def batch_ended(self):
        if (self.learn.epoch,self.learn.iter) == self.at: raise RuntimeError('stopped')

class Sums(Callback):
    "What came out of the transforms"
    run_valid = False
    def __init__(self): self.sums = []
    def before_batch(self): self.sums.append([x.double().sum().item() for x in self.learn.xb + self.learn.yb])

class Net(nn.Module):
    "Takes whatever comes"
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(3))
    def forward(self, *xs):
        return (
            self.w*torch.stack([torch.cat([x.as_subclass(Tensor)[j].double().flatten() for x in xs]).std()
                                for j in range(len(xs[0]))]).float()[:,None])
def loss(p, *ys):
    return sum((p-y.as_subclass(Tensor).float().flatten(1).mean(1, keepdim=True) if y.dim() > 1
                else p-y.float()[:,None]).square().mean() for y in ys)

def train(case, *cbs, stop=None):
    CheckpointFolder.in_use.clear()
    set_seed(0)
    learn = Learner(cases[case](), Net(), loss, path='.', cbs=[GradientAccumulation(8), Sums(), *cbs, *([Stop(stop)] if stop else [])])
    learn.remove_cb(ProgressCallback)
    with learn.no_logging():
        if stop:
            with pytest.raises(RuntimeError, match='stopped'): learn.fit(2, 1e-2)
        else: learn.fit(2, 1e-2); learn.fit(1, 1e-3)
    return learn

longer = ['flip_vert','Zoom','Dihedral','DeterministicDihedral','Contrast','Saturation','Hue','IntToFloatTensor','DihedralItem',
          'OldRandomCrop','RatioResize','squish','pad','several','regression']
@pytest.mark.slow
@pytest.mark.parametrize('case', quickly([], cases, longer))
def test_resumes(case):
    whole = train(case)
    saves = lambda: TrainingCheckpoint(every_steps=1)
    train(case, saves(), stop=(1, 1))
    again = train(case, saves())
    assert again.sums.sums == whole.sums.sums
    assert torch.equal(again.model.w, whole.model.w)
    CheckpointFolder.in_use.clear()
    later = train(case, saves())              # both fits are finished: they are recognized
    assert torch.equal(later.model.w, whole.model.w)

def prints():
    "Fingerprints of all pipelines, before and after their use"
    res = {}
    for case,made in cases.items():
        set_seed(0)
        dls = made()
        fresh = DataFingerprints().of(dls)
        for dl in dls.loaders: dl.one_batch()
        res[case] = fresh,DataFingerprints().of(dls)
    return res

@pytest.mark.slow
def test_prints():
    "Used or not, in this process or another with another order of sets: a pipeline has one fingerprint"
    here = prints()
    for case,(fresh,used) in here.items(): assert used == fresh and ' at 0x' not in str(fresh), case
    code = 'import json, test_transforms; print(json.dumps(test_transforms.prints()))'
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                         env={**os.environ, 'PYTHONHASHSEED': '7', 'PYTHONPATH': os.pathsep.join(map(str, sys.path))})
    assert json.loads(out.stdout.splitlines()[-1]) == json.loads(json.dumps(here))

def test_changes_are_seen():
    "Another argument of a transform is another run"
    for a,b in ((Rotate(10), Rotate(20)), (Flip(p=.5), Flip(p=.4)), (Zoom(draw=1.), Zoom(draw=2.)),
                (EveryOther(), IntToFloatTensor()), (Warp(.2), Warp(.3)),
                (Normalize.from_stats([0.], [1.]), Normalize.from_stats([0.], [2.])),
                (Brightness(), Brightness(.3)), (RandomResizedCropGPU(8), RandomResizedCropGPU(8, min_scale=.2)),
                (Flip(size=8), Flip(size=6))):
        one,other = (DataFingerprints().of(of_images(batch=[t])) for t in (a, b))
        assert one != other, (a, b)
