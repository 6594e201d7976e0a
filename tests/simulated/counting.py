"What is counted: the bytes that live on the device, what the host waited for, and the order in which things were asked of the device"
import contextlib, sys, weakref
from collections import Counter
import torch

class Memory:
    "Bytes of the storages that live on the device: each is followed until nothing refers to it"
    def __init__(self): self.live,self.peak,self.limit,self.n_failed,self.sizes = 0,0,None,0,{}

    def follow(self, tensor):
        s = tensor.untyped_storage()
        key,n = s._cdata,s.nbytes()
        if key in self.sizes: return
        if self.limit is not None and self.live+n > self.limit:
            self.n_failed += 1
            raise torch.OutOfMemoryError(f'sim out of memory. Tried to allocate {n} bytes; {self.live} of {self.limit} are in use.')
        self.sizes[key] = n
        self.live += n
        self.peak = max(self.peak, self.live)
        weakref.finalize(s, self.forget, key).atexit = False

    def forget(self, key): self.live -= self.sizes.pop(key)
    def resized(self, key, n):
        self.live += n-self.sizes[key]
        self.sizes[key] = n
        self.peak = max(self.peak, self.live)
    def reset_peak(self): self.peak = self.live

class Waits:
    "Where the host waited for the device while this is on: reads of values, copies to the host and blocking ones from it, `synchronize`"
    def __init__(self): self.on,self.sites,self.is_error = False,Counter(),False
    def __enter__(self):
        self.on = True
        self.sites.clear()
        return self
    def __exit__(self, *exc): self.on = False

    n = property(lambda self: self.sites.total())

    def hit(self, what):
        trace.add(what)
        if self.is_error: raise RuntimeError(f'called a synchronizing operation: {what}')
        if not self.on: return
        f = sys._getframe(1)
        while f.f_back is not None and ('/torch/' in f.f_code.co_filename or '/simulated/' in f.f_code.co_filename): f = f.f_back
        self.sites[f"{what}: {'/'.join(f.f_code.co_filename.split('/')[-2:])}:{f.f_lineno} {f.f_code.co_name}"] += 1

class Trace(list):
    "While this is on, names of the operators in their order, and among them what `waits` counts and copies that do not block"
    on = False
    def __enter__(self):
        self.on = True
        self.clear()
        return self
    def __exit__(self, *exc): self.on = False
    def add(self, what):
        if self.on: self.append(what)

memory,waits,trace = Memory(),Waits(),Trace()

@contextlib.contextmanager
def limit(n):
    "At most so many bytes on the device, inside"
    old,memory.limit = memory.limit,n
    try: yield memory
    finally: memory.limit = old
