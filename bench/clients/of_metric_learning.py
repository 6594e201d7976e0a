"pytorch-metric-learning: losses that compare items, with coupled=True"
import inspect
from pytorch_metric_learning import losses
from torch import nn
from . import Case
from .data import conv_net, make, numbers, whole_numbers

x,y = numbers(60, 1, 8, 8),whole_numbers(4, 60)
# Losses with weights of their own get the sizes; some need embeddings of another kind
sizes = dict(num_classes=4, embedding_size=8)
other_calls = ('BaseMetricLossFunction','CrossBatchMemory','MultipleLosses','SelfSupervisedLoss','VICRegLoss',
               'WeightMixin','GenericPairLoss','BaseLossWrapper','MeanReducer')

def cases():
    res = []
    for name,cls in inspect.getmembers(losses, inspect.isclass):
        if name in other_calls or not issubclass(cls, nn.Module): continue
        given = {k for c in cls.__mro__ for k in inspect.signature(c.__init__).parameters}
        kwargs = {k: v for k,v in sizes.items() if k in given}
        try: cls(**kwargs)
        except (TypeError, KeyError): continue  # an abstract class, or one that wants another loss
        res.append(Case(name, make(x, y, lambda: conv_net(8), lambda cls=cls, kwargs=kwargs: cls(**kwargs)), acc=dict(coupled=True),
                        ways=('micro-batches',), lr=.02))
    return res
