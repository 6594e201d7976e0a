"MONAI: losses of 3-D segmentation, whose batches are small"
from functools import partial
from monai import losses as L
from . import Case
from .data import conv_net, make, numbers, whole_numbers

x,y = numbers(32, 1, 6, 6, 6),whole_numbers(3, 32, 1, 6, 6, 6)

def cases():
    soft = dict(to_onehot_y=True, softmax=True)
    of = dict(DiceLoss=partial(L.DiceLoss, **soft), DiceLoss_batch=partial(L.DiceLoss, batch=True, **soft),
              DiceCELoss=partial(L.DiceCELoss, **soft),
              DiceFocalLoss=partial(L.DiceFocalLoss, **soft), GeneralizedDiceLoss=partial(L.GeneralizedDiceLoss, **soft),
              FocalLoss=partial(L.FocalLoss, to_onehot_y=True, use_softmax=True), TverskyLoss=partial(L.TverskyLoss, **soft),
              MaskedDiceLoss=partial(L.MaskedDiceLoss, **soft), HausdorffDTLoss=partial(L.HausdorffDTLoss, **soft))
    net = lambda: conv_net(3, 3, head=False)
    return [*(Case(k, make(x, y, net, f)) for k,f in of.items()),
            *(Case(f'{k}, coupled', make(x, y, net, of[k]), acc=dict(coupled=True), ways=('micro-batches',))
              for k in ('DiceLoss_batch', 'GeneralizedDiceLoss'))]
