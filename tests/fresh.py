"""Processes that know nothing of fastaccum yet, and start at once: forks of one that has imported `fastai.basics`, and what takes
long of PyTorch

`run` and `start` are `subprocess.run` and `subprocess.Popen` of a Python with a script, or with code after '-c'. Where there is no
fork, they are these."""
import array, atexit, json, multiprocessing, os, runpy, signal, socket, subprocess, sys, threading, traceback, types, warnings
from pathlib import Path

can_fork = hasattr(os, 'fork') and hasattr(socket, 'SCM_RIGHTS')

# --- here
class Forks:
    "The process that forks, which begins with the first request"
    server = None

    def request(self, args, env, cwd, fds):
        if self.server is None: self._begin()
        ours,theirs = socket.socketpair()
        env = {k: str(v) for k,v in env.items()}
        text = json.dumps(dict(args=[*map(str, args)], env=env, cwd=str(cwd or Path.cwd()))).encode()
        fds = array.array('i', [*fds, theirs.fileno()])
        self.line.sendmsg([len(text).to_bytes(8, 'big')], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        self.line.sendall(text)
        theirs.close()
        return ours.makefile('r')

    def _begin(self):
        self.line,theirs = socket.socketpair()
        self.server = subprocess.Popen([sys.executable, '-W', 'ignore', __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                       stdin=subprocess.DEVNULL)
        theirs.close()
        atexit.register(self._end)

    def _end(self):
        self.line.close()
        self.server.wait()

forks = Forks()

class Process:
    "As much of `subprocess.Popen` as the tests use"
    def __init__(self, args, env, cwd, stderr):
        in_,stdin = os.pipe()
        stdout,out = os.pipe()
        errors,err = os.pipe()
        self.said = forks.request(args, env, cwd, [in_, out, {subprocess.PIPE: err, subprocess.STDOUT: out, None: 2}[stderr]])
        for fd in (in_, out, err): os.close(fd)
        self.stdin = open(stdin, 'w', buffering=1)
        self.stdout = open(stdout)
        self.stderr = open(errors)
        self.pid = int(self.said.readline())
        self.returncode = None

    def send_signal(self, sig): os.kill(self.pid, sig)
    def kill(self): self.send_signal(signal.SIGKILL)

    # It leads a group of its own. Whoever of it lives on holds the ends of the pipes
    def kill_all(self):
        try: os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError: pass               # it has just ended

    def wait(self):
        if self.returncode is None: self.returncode = int(self.said.readline())
        return self.returncode

    def communicate(self, timeout=None):
        late = threading.Timer(timeout or 600, self.kill_all)
        late.start()
        self.stdin.close()
        errors = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        out = self.stdout.read()
        reader.join()
        self.wait()
        late.cancel()
        for f in (self.stdout, self.stderr, self.said): f.close()
        return out,errors[0]

def start(*args, env=None, cwd=None, stderr=None):
    env = dict(os.environ) if env is None else env
    if can_fork: return Process(args, env, cwd, stderr)
    return subprocess.Popen([sys.executable, '-W', 'ignore', *map(str, args)], env=env, cwd=cwd, text=True, bufsize=1, stderr=stderr,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def run(*args, timeout=300, **kwargs):
    p = start(*args, stderr=subprocess.PIPE, **kwargs)
    out,err = p.communicate(timeout=timeout)
    return subprocess.CompletedProcess(args, p.returncode, out, err)

# --- in the process that forks
def serve(line):
    import torch, fastai.basics
    import torch._dynamo, torch.distributed.fsdp      # with much else that the first fit, or the first rank, would wait for
    torch.set_num_threads(1)
    while (head := line.recvmsg(8, socket.CMSG_SPACE(16)))[0]:
        fds = array.array('i')
        for *_,data in head[1]: fds.frombytes(data)
        size,text = int.from_bytes(head[0], 'big'),b''
        while len(text) < size: text += line.recv(size-len(text))
        if not (watcher := os.fork()): watch(line, json.loads(text), fds)
        for fd in fds: os.close(fd)
        reap()

def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass

def watch(line, request, fds):
    "Tells the test the number of the new process, and how it ended"
    line.close()
    *std,told = fds
    pid = os.fork()
    if not pid:
        os.close(told)
        become(request, std)
    for fd in std: os.close(fd)
    os.write(told, f'{pid}\n'.encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try: os.write(told, f'{status}\n'.encode())
    except BrokenPipeError: pass                      # nobody waits for it any more
    os._exit(0)

def become(request, std):
    "A Python that was started with these arguments"
    os.setsid()
    for i,fd in enumerate(std): os.dup2(fd, i)
    for fd in {*std}: os.close(fd)
    os.environ.clear()
    os.environ.update(request['env'])
    os.chdir(request['cwd'])
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # where a process that it spawns looks for the script
    what,*args = request['args']
    code = args.pop(0) if what == '-c' else None
    sys.argv = [what, *args]
    sys.path[:1] = [str(Path(what).parent) if code is None else '', *filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))]
    sys.stdin,sys.stdout,sys.stderr = open(0),open(1, 'w', buffering=1),open(2, 'w', buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os._exit(ended(what, code))

def ended(what, code):
    "The exit status of the script or the code"
    status = 0
    try:
        if code is None: runpy.run_path(what, run_name='__main__')
        else:
            sys.modules['__main__'] = main = types.ModuleType('__main__')
            exec(compile(code, '<string>', 'exec'), vars(main))
    except SystemExit as e: status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException as e:                        # as the interpreter does
        sys.last_value = e
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status

if __name__ == '__main__':
    warnings.simplefilter('ignore')
    serve(socket.socket(fileno=int(sys.argv[1])))
