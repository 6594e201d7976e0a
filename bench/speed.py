"""Time of a micro-batch beyond that of a hand-written loop which does the same work

One process with one thread, data ready in memory. In each round every peer runs one fit, in another order each time. The clock runs
from the first to the last optimizer step of the fit, so setting up does not count. A peer's overhead is its time per micro-batch
minus the hand-written loop's of the same round; the median over the rounds is reported. Processor time is the main measure: other
processes on the machine disturb it less than the wall clock."""
import gc, random, time
from statistics import median, quantiles
from typing import NamedTuple
from .jobs import job
from .peers import PEERS, installed

CLOCKS = dict(cpu=time.process_time, wall=time.perf_counter)

class Case(NamedTuple):
    "A model in a precision, whose fits have `steps` steps of `n_acc` micro-batches"
    model:str
    n_acc:int
    steps:int
    rounds:int
    precision:str='fp32'
    peers:tuple=tuple(PEERS)

MICRO_BS = 4
_cases = (Case('MLP 32-64-10', 8, 25, 25), Case('MLP 32-64-10', 64, 5, 25, peers=('hand', 'split')), Case('MLP, squared error', 8, 25, 25),
          Case('conv net', 8, 4, 15), Case('transformer', 8, 4, 15), Case('transformer, padded', 8, 4, 15))
CASES = [c._replace(precision=p) for c in _cases for p in ('fp32', 'bf16')]

def time_fit(peer, a_job, n_steps) -> dict: # Clock -> us per micro-batch
    "Let `peer` run a fit of `n_steps` steps"
    ticks = []
    fresh = a_job.fresh(on_step=lambda: ticks.append([f() for f in CLOCKS.values()]))
    gc.collect()
    peer.run(fresh)
    assert len(ticks) == n_steps, f'{peer.label}: {len(ticks)} steps instead of {n_steps}'
    return {k: (b-a)*1e6/((n_steps-1)*a_job.n_acc) for k,a,b in zip(CLOCKS, ticks[0], ticks[-1])}

def overhead(times, hand, clock):
    "Median and quartiles over the rounds, us"
    over = [t[clock]-h[clock] for t,h in zip(times, hand)]
    low,_,high = quantiles(over, n=4) if len(over) > 1 else over*3
    return dict(us=median(t[clock] for t in times), over=median(over), low=low, high=high)

def run_case(case, device='cpu') -> list: # One dict a peer
    peers = {k: p for k,p in installed(case.precision).items() if k in case.peers}
    the_job = job(case.model, case.n_acc*case.steps, MICRO_BS, n_acc=case.n_acc, precision=case.precision, device=device)
    times = {k: [] for k in peers}
    for i in range(-1, case.rounds):      # the first warms up
        for k in random.Random(i).sample(list(peers), len(peers)):
            t = time_fit(peers[k], the_job, case.steps)
            if i >= 0: times[k].append(t)
        if i < 0: gc.freeze()             # the libraries' own objects, which would make every collection slow
    gc.unfreeze()
    about = dict(model=case.model, precision=case.precision, n_acc=case.n_acc)
    return [dict(**about, peer=p.label, **{c: overhead(times[k], times['hand'], c) for c in CLOCKS}) for k,p in peers.items()]

def run(device='cpu') -> list:
    "On a GPU the small model only, whose micro-batches the host takes longer to ask for than the device to compute"
    rows = []
    for case in CASES if device == 'cpu' else [c._replace(rounds=7) for c in CASES[:2]]:
        print(f'  {case.model}, {case.precision}, {case.n_acc} micro-batches a step: {case.rounds} rounds', flush=True)
        rows += run_case(case, device)
    return rows
