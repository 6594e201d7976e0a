"""How far the weights are off those of training in big batches, in the cases of `fastaccum.conformance`: `python -m
bench exact`

A figure is the distance to the big batch's weights, in units of how far these have moved. Where there is one step only,
that is the error of its gradient. Composer asks for an older PyTorch than fastai does, so `make bench` does not install
it; it has its row where it was installed by hand."""
from functools import partial
from fastaccum.conformance import CASES, check
from . import peers

def runs() -> dict: # Name -> what trains
    "The peers, the Trainer once more as its own language models use it, and Composer"
    there = peers.installed()
    res = {p.label: p.run for p in there.values()}
    if 'trainer' in there: res['... with num_items_in_batch'] = partial(peers.trainer, by_items=True)
    if peers.find_spec('composer'): res['Composer'] = peers.composer
    return res

def row(peer, result) -> dict:
    if result.error: raise RuntimeError(f'{peer}, {result.case}\n{result.error}')
    return {'peer': peer, **{k: v for k,v in result._asdict().items() if k != 'error'}}

def run(cases=None) -> list: # One dict a peer and case
    return [row(k, r) for k,f in runs().items() for r in check(f, cases)]

def merged(rows, new) -> list:
    "`rows` with those that are `new`, also in the place of others of the same peers and cases; in the order of the cases"
    found = {(r['peer'], r['case']): r for r in (*rows, *new)}
    labels = dict.fromkeys(peer for peer,_ in found)
    return [found[label, case] for label in labels for case in CASES if (label, case) in found]
