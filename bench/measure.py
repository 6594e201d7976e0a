"Host syncs and operators inside a `with` block: counted, so the same on every machine and run"
import traceback
from collections import Counter
from unittest.mock import patch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

class OpCounter(TorchDispatchMode):
    "How often each operator was called"
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name.split('::')[1]] += 1
        return func(*args, **(kwargs or {}))

class SyncCounter(TorchDispatchMode):
    """Where the host asked for a tensor's value, which on a GPU waits for all that was queued: `.item()`, `if tensor`,
    `.cpu()`, `.tolist()`..."""
    ops = 'aten::_local_scalar_dense','aten::item','aten::is_nonzero','aten::nonzero'
    def __init__(self):
        super().__init__()
        self.sites,self.patches,self.inside = Counter(),[],False

    @property
    def n(self): return sum(self.sites.values())

    def count(self):
        frames = [f for f in traceback.extract_stack() if '/torch/' not in f.filename
                  and not f.filename.endswith(('fastai/torch_core.py', 'measure.py'))]
        self.sites[f'{"/".join(frames[-1].filename.split("/")[-2:])}:{frames[-1].lineno}'] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in self.ops: self.count()
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        for name in ('cpu', 'tolist'):  # on a CPU these are no operators
            def counted(t, *args, _f=getattr(Tensor, name), **kwargs):
                outer,self.inside = self.inside,True
                if not outer: self.count()    # a subclass comes here a second time
                try: return _f(t, *args, **kwargs)
                finally: self.inside = outer
            self.patches.append(patch.object(Tensor, name, counted))
        for p in self.patches: p.start()
        return super().__enter__()

    def __exit__(self, *args):
        for p in self.patches: p.stop()
        return super().__exit__(*args)
