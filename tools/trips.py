"""How far does a batch travel? Functions of fastaccum, calls, and changes of file, for one loader batch that ends an
accumulated batch: `make trips`

With `--route` also the way through the files. A short way is one that a reader can follow."""
import sys, tempfile, warnings
from pathlib import Path
import torch
warnings.filterwarnings('ignore', '.torch.jit.script', FutureWarning)
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
import fastaccum
from fastaccum.all import *
from fastaccum.loop import BatchLoop

# Most functions and changes of file that a trip may take; of a checkpoint's save, calls and changes of file
goals = {'whole loader batch': dict(functions=42, changes=22), 'split in 2': dict(functions=47, changes=27),
         'split in 2, fp16': dict(functions=64, changes=44),
         'coupled': dict(functions=70, changes=40), 'checkpoint': dict(calls=600, changes=100)}
package = f'{Path(fastaccum.__file__).parent}/'

def learner(*cbs):
    "A `Learner` with two layers, whose loader batches have 8 items"
    set_seed(0)
    items = L(zip(torch.randn(64, 4), torch.randint(3, (64,))))
    dls = DataLoaders(DataLoader(items, bs=8), DataLoader(items, bs=8), device='cpu')
    learn = Learner(dls, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), loss_func=CrossEntropyLossFlat(),
                    opt_func=SGD, cbs=cbs, path=tempfile.mkdtemp())
    learn.remove_cb(ProgressCallback)
    return learn

def calls_of(f, *args):
    "The functions of fastaccum that `f(*args)` calls, as (depth of the stack, file, name)"
    calls,depth = [],0
    def note(frame, event, arg):
        nonlocal depth
        if event in ('call','return'): depth += 1 if event == 'call' else -1
        code = frame.f_code
        if event == 'call' and code.co_filename.startswith(package) and code.co_name[0] != '<':
            calls.append((depth, code.co_filename[len(package):-3], getattr(code, 'co_qualname', code.co_name)))
    sys.setprofile(note)
    try: f(*args)
    finally: sys.setprofile(None)
    return calls

def last_batch(learn):
    "What the last loader batch of an epoch calls. It ends an accumulated batch"
    of_loop,found = BatchLoop.__call__,[]
    def noted(self, i, b):
        if self.learn.training: found.append(calls_of(of_loop, self, i, b))
        else: of_loop(self, i, b)
    BatchLoop.__call__ = noted
    try:
        with learn.no_logging(): learn.fit(1, .1)
    finally: BatchLoop.__call__ = of_loop
    return found[-1]

def largest(calls, folder):
    "The longest call of the files in `folder` by a file elsewhere, with all that it calls"
    begins = [i for i,(_,f,_) in enumerate(calls) if f.startswith(folder)]
    def end(i): return next((j for j in range(i+1, len(calls)) if calls[j][0] <= calls[i][0]), len(calls))
    return max((calls[i:end(i)] for i in begins), key=len)

def trips():
    "Name -> calls"
    two = dict(micro_batch_size=4)
    res = {'whole loader batch': last_batch(learner(GradientAccumulation(16))),
           'split in 2': last_batch(learner(GradientAccumulation(16, **two))),
           'split in 2, fp16': last_batch(learner(GradientAccumulation(16, **two), MixedPrecision('fp16', device='cpu'))),
           'coupled': last_batch(learner(GradientAccumulation(**two, coupled=True)))}
    saving = last_batch(learner(GradientAccumulation(16), TrainingCheckpoint(every_steps=1, every_minutes=None)))
    return {**res, 'checkpoint': largest(saving, 'checkpoint/')}

def route(calls):
    "The files in the order of the way"
    files = [f for _,f,_ in calls]
    return [f for i,f in enumerate(files) if not i or files[i-1] != f]

def measured(calls): return dict(functions=len({c[1:] for c in calls}), calls=len(calls), changes=len(route(calls))-1)

def main():
    torch.set_num_threads(1)
    for name,calls in trips().items():
        got,most = measured(calls),goals[name]
        print(f'{name:20}', *(f'{k} {v:5}' + (f' (at most {most[k]})' if k in most else '') for k,v in got.items()), sep='  ')
        if '--route' in sys.argv: print('   ', ' > '.join(route(calls)))

if __name__=='__main__': main()
