"kornia: losses of pictures"
from functools import partial
from kornia import losses as L
from . import Case
from .data import conv_net, make, numbers, whole_numbers

x,y,masks = numbers(60, 1, 12, 12),numbers(60, 1, 12, 12, seed=1),whole_numbers(3, 60, 12, 12)
bits = (y > 0).float()

def cases():
    pictures = dict(SSIMLoss=partial(L.SSIMLoss, 5), PSNRLoss=partial(L.PSNRLoss, 1.), CharbonnierLoss=partial(L.CharbonnierLoss, 'mean'),
                    WelschLoss=partial(L.WelschLoss, 'mean'), CauchyLoss=partial(L.CauchyLoss, 'mean'),
                    GemanMcclureLoss=partial(L.GemanMcclureLoss, 'mean'))
    classes = dict(DiceLoss=L.DiceLoss, TverskyLoss=partial(L.TverskyLoss, .5, .5), FocalLoss=partial(L.FocalLoss, .5, reduction='mean'),
                   LovaszSoftmaxLoss=L.LovaszSoftmaxLoss)
    return [*(Case(k, make(x, y, lambda: conv_net(1, head=False), f)) for k,f in pictures.items()),
            *(Case(k, make(x, masks, lambda: conv_net(3, head=False), f)) for k,f in classes.items()),
            Case('BinaryFocalLossWithLogits',
                 make(x, bits, lambda: conv_net(1, head=False),
                      partial(L.BinaryFocalLossWithLogits, .25, reduction='mean')))]
