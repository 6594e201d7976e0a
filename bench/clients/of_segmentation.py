"segmentation-models-pytorch: models, and losses over the pixels of a batch"
import segmentation_models_pytorch as smp
from functools import partial
from torch import nn
from . import Case
from .data import conv_net, make, numbers, whole_numbers

x,y = numbers(60, 1, 8, 8),whole_numbers(3, 60, 8, 8)
masks = (numbers(60, 1, 8, 8, seed=1) > 0).float()
L = smp.losses

def case(name, loss_func, y=y, out=3, **kwargs): return Case(name, make(x, y, lambda: conv_net(out, head=False), loss_func), **kwargs)

def cases():
    both = dict(dice=partial(L.DiceLoss, 'multiclass'), jaccard=partial(L.JaccardLoss, 'multiclass'),
                tversky=partial(L.TverskyLoss, 'multiclass'),
                focal=partial(L.FocalLoss, 'multiclass'), lovasz=partial(L.LovaszLoss, 'multiclass', per_image=True),
                soft_ce=partial(L.SoftCrossEntropyLoss, smooth_factor=.1))
    binary = dict(soft_bce=L.SoftBCEWithLogitsLoss, dice_of_masks=partial(L.DiceLoss, 'binary'),
                  focal_of_masks=partial(L.FocalLoss, 'binary'))
    big,small = numbers(32, 1, 32, 32),whole_numbers(3, 32, 32, 32)
    nets = [
        Case(f'{cls.__name__}, cross entropy',
             make(big, small, lambda cls=cls: cls('resnet18', encoder_weights=None, in_channels=1, classes=3),
                  nn.CrossEntropyLoss))
            for cls in (smp.Unet, smp.FPN, smp.Linknet)]
    return [*(case(k, f) for k,f in both.items()), *(case(k, f, masks, 1) for k,f in binary.items()),
            *(case(f'{k}, coupled', both[k], acc=dict(coupled=True), ways=('micro-batches',)) for k in ('dice','jaccard','tversky')),
            *nets]
