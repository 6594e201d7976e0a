"fastMONAI: medical volumes, whose batches are small"
from torch import nn
from fastMONAI.vision_loss import CustomLoss, TverskyFocalLoss
from monai.losses import DiceCELoss, DiceLoss
from monai.networks.nets import UNet, resnet10
from . import Case
from .data import make, numbers, whole_numbers

x,masks,y = numbers(28, 1, 16, 16, 16),whole_numbers(2, 28, 1, 16, 16, 16).float(),whole_numbers(3, 28)

def cases():
    unet = lambda: UNet(3, 1, 1, (4, 8), (2,), norm='instance')
    two = lambda: UNet(3, 1, 2, (4, 8), (2,), norm='instance')
    dice = lambda: CustomLoss(DiceLoss(sigmoid=True))
    return [Case('UNet, CustomLoss(DiceLoss)', make(x, masks, unet, dice)),
            Case('UNet, CustomLoss(DiceCELoss)', make(x, masks, two, lambda: CustomLoss(DiceCELoss(softmax=True, to_onehot_y=True)))),
            Case('UNet, TverskyFocalLoss', make(x, masks, unet, lambda: TverskyFocalLoss(gamma=1, include_background=True, sigmoid=True))),
            Case('resnet10 of volumes',
                 make(x, y, lambda: resnet10(spatial_dims=3, n_input_channels=1, num_classes=3), nn.CrossEntropyLoss),
                 lr=.01)]
