"Host syncs, operators and live memory inside a `with` block: counted, so the same on every machine and run"
import traceback, weakref
from collections import Counter
from unittest.mock import patch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

class OpCounter(TorchDispatchMode):
    "How often each operator was called"
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name.split('::')[1]] += 1
        return func(*args, **(kwargs or {}))

class SyncCounter(TorchDispatchMode):
    "Where the host asked for a tensor's value, which on a GPU waits for all that was queued: `.item()`, `if tensor`, `.cpu()`, `.tolist()`..."
    ops = 'aten::_local_scalar_dense','aten::item','aten::is_nonzero','aten::nonzero'
    def __init__(self):
        super().__init__()
        self.sites,self.patches,self.inside = Counter(),[],False

    @property
    def n(self): return sum(self.sites.values())

    def count(self):
        frames = [f for f in traceback.extract_stack() if '/torch/' not in f.filename and not f.filename.endswith(('fastai/torch_core.py', 'measure.py'))]
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

class LiveMemory(TorchDispatchMode):
    "Most bytes of storages that lived at once; those of `known` tensors do not count"
    def __init__(self, known=()):
        super().__init__()
        self.live = self.peak = 0
        self.hold = [t.untyped_storage() for t in known]  # they live on, so that their addresses are not used again
        self.keys = {s._cdata for s in self.hold}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        for t in tree_leaves(res):
            if isinstance(t, Tensor): self._add(t.untyped_storage())
        return res

    def _add(self, s):
        if s._cdata in self.keys: return
        self.keys.add(s._cdata)
        self.live += s.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(s, self._free, s._cdata, s.nbytes())

    def _free(self, key, n):
        self.keys.discard(key)
        self.live -= n
