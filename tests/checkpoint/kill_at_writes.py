"""Runs of a small script that is killed before, in and after every file operation of a save, one after the other; `test_kill.py` starts it

For each folder in the input, with the number of the operation: a new process that trains there, and kills itself at that operation"""
import os, pathlib, signal, sys
from pathlib import Path
from tempfile import TemporaryDirectory
import torch
torch.set_num_threads(1)
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai.data.all import *
from fastaccum.accumulation.callback import GradientAccumulation
from fastaccum.checkpoint.callback import TrainingCheckpoint

default_device(False)
of_paths = getattr(pathlib, '_NormalAccessor', None)     # Python 3.10's paths keep functions of `os`
operations = dict(os=('mkdir', 'rmdir', 'replace', 'rename', 'unlink', 'fsync'), torch=('save',), Path=('write_text',))

def watch(at):
    "Count the file operations in `models`, and kill the process at number `at`; returns their names"
    seen = []
    def step(name, then=lambda: None):
        seen.append(name)
        if len(seen)-1 == at: then(); os.kill(os.getpid(), signal.SIGKILL)
    def half(name, args):
        "What a kill in the middle of a write leaves"
        if name == 'save': Path(args[1].raw.file.name).write_bytes(b'PK\x03\x04 half a file')
        if name == 'write_text': open(args[0], 'w').write(args[1][:9])
    def watched(name, real, module):
        def f(*args, **kwargs):
            if not inside[0] or name == 'save' and not hasattr(args[1], 'raw'):       # a checkpoint's file has a buffer
                return real(*args, **kwargs)
            step(f'before {name}')
            if name in ('save', 'write_text'): step(f'in {name}', lambda: half(name, args))
            inside[0] = False
            try: res = real(*args, **kwargs)
            finally: inside[0] = True
            step(f'after {name}')
            return res
        return f
    inside = [True]
    for module,names in operations.items():
        module = dict(os=os, torch=torch, Path=Path)[module]
        for name in names:
            f = watched(name, getattr(module, name), module)
            setattr(module, name, f)
            if module is os and hasattr(of_paths, name): setattr(of_paths, name, staticmethod(f))
    return seen

def train(cbs):
    set_seed(0)
    items = [(x, x[:1]) for x in torch.randn(16, 3)]
    dls = DataLoaders(*[TfmdDL(items, bs=4, shuffle=s, num_workers=0) for s in (True, False)])
    learn = Learner(dls, nn.Sequential(nn.Linear(3, 8), nn.Dropout(.2), nn.Linear(8, 1)), loss_func=MSELossFlat(),
                    cbs=[GradientAccumulation(8), *cbs])
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    for _ in range(2): learn.fit_one_cycle(2, .05)
    torch.save([p.detach() for p in learn.model.parameters()], 'result.pt')
    return learn

def run(at, background):
    seen = watch(at)
    learn = train([TrainingCheckpoint(every_steps=2, keep=1, digest=True, background=background)])
    learn.training_checkpoint.finish()
    Path.open(Path('operations'), 'w').write('\n'.join(seen))

def serve():
    with TemporaryDirectory() as tmp:                       # what the first fit imports, and the first save, is imported here once
        os.chdir(tmp)
        train([TrainingCheckpoint(every_steps=2, digest=True)]).training_checkpoint.finish()
    for line in sys.stdin:
        folder,at,background = line.split()
        pid = os.fork()
        if not pid:
            os.chdir(folder)
            sys.stdout = sys.stderr = open('log', 'a')
            if at == 'alone': train([])
            else: run(int(at), background == 'True')
            sys.stdout.flush()
            os._exit(0)
        print(os.waitpid(pid, 0)[1], flush=True)

if __name__ == '__main__': serve()
