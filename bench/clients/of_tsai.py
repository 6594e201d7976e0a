"tsai: time series"
import numpy as np, torch
import fastcore.script
# tsai 1.0.1 imports a name that fastcore 2 no longer has
if not hasattr(fastcore.script, 'Param'): fastcore.script.Param = lambda *args, **kwargs: None
from tsai.all import (SGD, CrossEntropyLossFlat, CutMix1d, FCN, InceptionTimePlus, L, LSTM, LSTM_FCN, Learner, MixUp1d, MSELossFlat, ResNet,
                      TSClassification, TSRegression, TST, TSTPlus, WeightedPerSampleLoss, XceptionTime, create_model, get_ts_dls,
                      FocalLossFlat, TCN, gMLP)
from . import Case

X = np.random.RandomState(0).randn(96, 3, 40).astype(np.float32)
classes,numbers = np.random.RandomState(1).randint(0, 3, 96).astype(str),X.mean((1, 2)).astype(np.float32)
splits = L(range(60)),L(range(60, 96))

def make(arch, loss_func=CrossEntropyLossFlat, y=classes, tfm=TSClassification):
    def learner(bs):
        dls = get_ts_dls(X, y, splits=splits, tfms=[None, tfm()], bs=[bs, 32], num_workers=0, shuffle_train=False, drop_last=False)
        return Learner(dls, create_model(arch, dls=dls), loss_func=loss_func(), opt_func=SGD)
    return learner

def cases():
    weights = torch.rand(96, generator=torch.manual_seed(0)) + .1
    return [
        *(Case(arch.__name__, make(arch))
          for arch in (FCN, ResNet, InceptionTimePlus, XceptionTime, TCN, LSTM, LSTM_FCN, TST, TSTPlus, gMLP)),
            Case('regression', make(FCN, MSELossFlat, numbers, TSRegression)),
            Case('focal loss', make(FCN, FocalLossFlat)),
            Case('MixUp1d', make(TST), lambda: [MixUp1d()], ways=('micro-batches',)),
            Case('CutMix1d', make(TST), lambda: [CutMix1d()], ways=('micro-batches',)),
            Case('WeightedPerSampleLoss', make(TST), lambda: [WeightedPerSampleLoss(weights.clone())])]
