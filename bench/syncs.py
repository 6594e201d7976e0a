"""How often the host asks for a tensor's value, for which it would wait until a GPU has done all that is queued

Counted in fits of different lengths: what eight more micro-batches cost, and what four more steps do."""
from .jobs import job
from .measure import SyncCounter
from .peers import installed

def count(peer, n_steps, n_acc, **kwargs) -> int:
    a_job = job('MLP 32-64-10', n_steps*n_acc, 4, n_acc=n_acc, **kwargs)
    with SyncCounter() as syncs: peer.run(a_job)
    return syncs.sites.total()

def syncs(peer, **kwargs) -> dict: # Syncs per micro-batch, and per step
    "`kwargs` of the `Job`"
    count(peer, 1, 1, **kwargs)                 # what is asked once in a process does not count
    base = count(peer, 2, 4, **kwargs)
    micro = (count(peer, 2, 8, **kwargs)-base)/8
    return dict(micro_batch=micro, step=(count(peer, 6, 4, **kwargs)-base)/4 - 4*micro)

def run() -> list: # One dict a peer, precision, and kind of optimizer
    cases = [('fp32', False), ('bf16', False), ('fp16', False), ('fp16', True)]
    return [dict(peer=p.label, precision=precision, fused=fused, **syncs(p, precision=precision, fused=fused))
            for precision,fused in cases for p in installed(precision).values()]
