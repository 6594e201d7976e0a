"The simulated accelerator: what it computes, counts and refuses"
import gc, pytest
import simulated
from reference import *
from fastaccum.core.memory import PeakMemory
from fastaccum.precision.callback import MixedPrecision
from simulated import limit, memory, move, raw, trace, waits


sim = simulated.device
def there(*shape): return torch.randn(*shape).to(sim)

@pytest.fixture(autouse=True)
def on_sim(device): devices.use('sim')

def conv():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(8, 4))
def norms(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.body = (nn.Embedding(20, 8),
                              nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True),
                                                    1))
        self.out = nn.Linear(8, 4)
    def forward(self, x): return self.out(self.body(self.emb(x.abs().mul(5).long().clamp(max=19))).mean(1))

nets = {'MLP': (mlp, 0), 'norms': (norms, 0), 'transformer': (Words, 1e-4), 'conv net': (conv, 1e-4)}
routes = {'whole': {}, 'split': dict(micro_batch_size=3), 'auto': dict(micro_batch_size='auto')}

@pytest.mark.parametrize('amp', ['to_fp32', 'to_bf16', 'to_fp16'])
@pytest.mark.parametrize('route', routes)
@pytest.mark.parametrize('net', nets)
def test_trains_as_the_cpu(net, route, amp):
    "To the last bit; convolutions and attention have other kernels"
    make,tol = nets[net]
    torch.manual_seed(0)
    data,model = Data(torch.randn(45, 6), torch.randint(4, (45,))),make()
    def fit(where):
        devices.use(where)
        learn = learner(data, 8, GradientAccumulation(16, **routes[route]), model=model, loss_func=CrossEntropyLossFlat())
        getattr(learn, amp)()
        learn.fit(2, .1)
        assert all(p.device.type==where for p in learn.model.parameters())
        return weights(learn.model),tensor(learn.recorder.losses),len(learn.recorder.losses)
    (a,la,n),(b,lb,m) = fit('cpu'),fit('sim')
    assert rel_err(a, weights(model)) > .01           # it trained
    assert n==m and rel_err(a, b) <= tol*(1 if amp=='to_fp32' else 100) and rel_err(la, lb) <= tol*(1 if amp=='to_fp32' else 100)

def test_two_devices():
    a,b = there(3),torch.randn(3)
    for f in (lambda: a+b, lambda: b*a, lambda: torch.cat([a, b]), lambda: F.mse_loss(a, b), lambda: a.add_(b),
              lambda: torch.where(a > 0, a, b)):
        with pytest.raises(RuntimeError, match='same device.*sim:0 and cpu'): f()
    assert raw(a*torch.tensor(2.)).equal(raw(a)*2)    # without dimensions, as on a GPU
    a.copy_(b)
    assert raw(a).equal(b)

reads = {'item': lambda t: t.sum().item(), 'float': lambda t: float(t[0]), 'if': lambda t: bool((t > 0).any()),
         'cpu': lambda t: t.cpu(), 'tolist': lambda t: t.tolist(),
         'to': lambda t: t.to('cpu', torch.float64), 'copy_': lambda t: torch.empty(3).copy_(t),
         'nonzero': lambda t: t.nonzero(), 'a mask': lambda t: t[t > 0],
         'masked_select': lambda t: t.masked_select(t > 0), 'equal': lambda t: torch.equal(t, t),
         'synchronize': lambda t: torch.sim.synchronize(),
         'unique': lambda t: t.unique(), 'a new tensor': lambda t: torch.tensor([1., 2.], device=sim),
         'a copy there': lambda t: torch.ones(3).to(sim), 'numpy': lambda t: t.cpu().numpy()}
others = {'add': lambda t: t+1, 'shape': lambda t: t.shape, 'to itself': lambda t: t.to(sim),
          'type': lambda t: t.half(), 'clone': lambda t: t.clone(), 'where': lambda t: torch.where(t > 0, t, 0),
          'index': lambda t: t[1:], 'non_blocking': lambda t: torch.ones(3).to(sim, non_blocking=True),
          'zeros': lambda t: torch.zeros(3, device=sim), 'detach': lambda t: t.detach()}

@pytest.mark.parametrize('name,n', [*((k, 1) for k in reads), *((k, 0) for k in others)])
def test_waits(name, n):
    t = there(3)
    with waits: (reads if n else others)[name](t)
    assert waits.n==n, waits.sites
    if n: assert 'test_simulated.py' in first(waits.sites)

def test_trace():
    t = there(3)
    with trace: torch.ones(3).to(sim, non_blocking=True).mul(t).sum().item()
    assert [o for o in trace if o in ('copy to the device', 'aten::mul', 'aten::sum', 'read')]==[
        'copy to the device', 'aten::mul', 'aten::sum', 'read']

def test_memory():
    start = memory.live
    a = there(100)
    b = a[:50]                                        # a view takes none
    assert memory.live-start==400
    c = a+1
    assert memory.live-start==800==torch.sim.memory_allocated()-start
    del a, c
    assert memory.live-start==400                     # the view keeps it
    del b
    memory.reset_peak()
    assert memory.live==start==memory.peak

def test_peak_beside_garbage():
    "Garbage from before, collected inside, hides nothing of the peak"
    gc.disable()
    try:
        ring = [there(1000)]
        ring.append(ring)
        del ring
        with PeakMemory(sim) as peak:
            gc.collect()
            there(250)
    finally: gc.enable()
    assert peak.peak==1000

def runs_out(f, n):
    "`f()` with `n` bytes more than live now"
    with limit(memory.live+n), pytest.raises(torch.OutOfMemoryError, match='sim out of memory. Tried to allocate'): f()
    gc.collect()                                      # the traceback keeps what was there

@pytest.mark.slow
def test_runs_out():
    "An error as CUDA's, also below autograd; then all goes on"
    gc.collect()
    model,x = move(nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 3))),there(64, 6)
    opt = torch.optim.Adam(model.parameters())
    live = memory.live
    for _ in range(2):
        runs_out(lambda: model(x), 200000)
        assert memory.live==live
        loss = model(x).sum()
        assert memory.live > live+100000
        runs_out(loss.backward, 10000)
        model.zero_grad()
        del loss
        assert memory.live==live
    n_failed = memory.n_failed
    model(x).sum().backward()
    runs_out(opt.step, 10000)
    assert memory.limit is None and memory.n_failed==n_failed+1

@pytest.mark.parametrize('error', [ValueError('bad'), KeyboardInterrupt(), ZeroDivisionError()], ids=repr)
def test_errors_below_autograd(error):
    "They come out as they are"
    model = move(nn.Linear(6, 4))
    def fail(g): raise error
    hook = model.weight.register_hook(fail)
    for _ in range(3):
        with pytest.raises(type(error)) as e: model(there(2, 6)).sum().backward()
        assert e.value is error
    hook.remove()
    model.zero_grad()
    model(there(2, 6)).sum().backward()
    assert raw(model.bias.grad).equal(torch.full((4,), 2.))

def test_random_numbers():
    "A generator of its own, which draws what the CPU's would; `torch.manual_seed` sets both"
    torch.manual_seed(5); a = torch.rand(3)
    torch.manual_seed(5); b = torch.rand(3, device=sim); c = torch.rand(3)
    assert a.equal(raw(b)) and a.equal(c)
    state = torch.sim.get_rng_state()
    d = torch.rand(3, device=sim)
    torch.sim.set_rng_state(state)
    assert raw(torch.rand(3, device=sim)).equal(raw(d)) and not raw(d).equal(raw(b))

def test_copies_and_files(tmp_path):
    model = move(mlp())
    twin = deepcopy(model)
    assert all(p.device==sim and p is not q and raw(p).equal(raw(q)) for p,q in zip(twin.parameters(), model.parameters()))
    torch.save(model.state_dict(), tmp_path/'m')
    for where in (None, sim, 'cpu'): assert raw(torch.load(tmp_path/'m', map_location=where)['0.weight']).equal(raw(model[0].weight))
    other = move(mlp())
    other.load_state_dict(torch.load(tmp_path/'m'))
    assert weights(other).equal(weights(model)) and weights(move(other, 'cpu')).equal(weights(model))
