"What other libraries' tests claim of accumulation, tried with fastaccum; the file of the results, and the page with its counts"
import json
from importlib import import_module
from pathlib import Path
import pytest, torch
from bench import clients
from bench.clients import claims, of_accelerate, of_lightning, of_transformers
from bench.clients.__main__ import CLIENTS, READ
from bench.clients.claims import Claim, Conformance

root = Path(__file__).resolve().parents[2]
results = clients.results()
modules = {k: import_module(f'bench.clients.of_{k}') for k in READ}
cases = {k: m.cases() for k,m in modules.items()}
few = 'accelerate-10-loader batches', 'lightning-5-', 'lightning-26-micro-batches', 'transformers-1-micro-batches'
some = 'accelerate-4-two ranks', 'transformers-12-two ranks'         # of the claims over ranks, which take longest
def mark(name, way): return [] if name in few else [pytest.mark.slow if way != 'two ranks' or name in some else pytest.mark.long]
own = [pytest.param(c, way, id=(name := f'{k}-{i}-{way}'), marks=mark(name, way))
       for k,cs in cases.items() for i,c in enumerate(cs) if isinstance(c, Claim) for way in c.ways]

# -- The arithmetic
def tensors(**values): return {k: torch.tensor(v) for k,v in values.items()}

@pytest.mark.parametrize('found,expected,off', [
    (dict(a=[3., 4.]), dict(a=[3., 4.]), 0), (dict(a=[0., 5.5]), dict(a=[0., 5.]), .1), (dict(a=[1.], b=[3.]), dict(a=[1.], b=[2.]), .5),
    (dict(a=[1.]), dict(a=[0.]), 1), (dict(a=[1.]), dict(a=[1., 1.]), float('inf')), (dict(a=[1.]), dict(b=[1.]), float('inf')),
    (dict(a=[float('nan')]), dict(a=[1.]), float('inf'))])
def test_distance(found, expected, off): assert claims.distance(tensors(**found), tensors(**expected))==pytest.approx(off)

def gives(off=0., says=None):
    if says: claims.warnings.warn(says)
    return tensors(a=[1.+off])
def raises(what): raise RuntimeError(what)
def refuses(): return claims.GradientAccumulation(0)

@pytest.mark.parametrize('big,ours,expected', [
    (gives, gives, ('exact', 0., '')), (gives, lambda: gives(.5), ('bug', .5, '')),
    (gives, lambda: gives(.5, 'half'), ('told', .5, 'half')),
    (lambda: gives(says='half'), lambda: gives(.5, 'half'), ('bug', .5, '')), (gives, lambda: gives(says='half'), ('exact', 0., '')),
    (lambda: raises('before'), gives, ('fails', None, 'before')), (gives, lambda: raises('oh'), ('bug', None, 'RuntimeError: oh')),
    (claims.REFUSED, gives, ('bug', None, 'There is no error.'))])
def test_result(big, ours, expected): assert claims.result(Claim('a claim', '', big, dict(way=ours)), 'way')==expected

@pytest.mark.slow
def test_result_refused():
    what,off,said = claims.result(claims.refused('a claim', '', refuses), '')
    assert (what, off)==('refused', None) and 'accum_bs=0' in said

# -- The claims
@pytest.mark.parametrize('claim,way', own)
def test_claim(claim, way):
    "As the file says; the other claims are of `fastaccum.conformance`, and are tested with it"
    row, = [r for k in READ for r in results[k]['rows'] if (r['case'], r['way'], r['where'])==(claim.name, way, claim.where)]
    assert claims.result(claim, way)[0]==row['result']!='bug'

class AllAlike(claims.GradientAccumulation):
    "Each micro-batch counts alike, as in a loop that divides the losses by their number"
    def __init__(self, *args, **kwargs): super().__init__(*args, weight=lambda learn: 1, **kwargs)

@pytest.mark.slow
@pytest.mark.parametrize('train', [of_accelerate.tracked, of_accelerate.folds, of_lightning.four_steps, of_transformers.smoothed])
@pytest.mark.parametrize('way', ['micro-batches', 'loader batches'])
def test_wrong_weights_are_noticed(train, way, monkeypatch):
    monkeypatch.setattr(claims, 'GradientAccumulation', AllAlike)
    what,off,_ = claims.result(claims.same('a claim', '', train), way)
    assert what=='bug' and off > 1e-3

@pytest.mark.slow
@pytest.mark.parametrize('wrong', [dict(seen=torch.tensor([22.]))])
def test_a_new_run_is_not_one_that_goes_on(wrong):
    "The number of loader batches tells them apart: the weights are the same"
    assert claims.distance({**of_transformers.whole(18), **wrong}, of_transformers.whole(18)) > .1

# -- The file, the page
def test_results_are_of_all_claims():
    "Else: `python -m bench.clients accelerate lightning transformers`"
    assert list(results)==[*CLIENTS, *READ]
    for k in READ:
        assert [(r['case'], r['way'], r['where']) for r in results[k]['rows']]==[(c.name, way, c.where) for c in cases[k] for way in c.ways]
        assert results[k]['read']==modules[k].READ and results[k]['measured'] and results[k]['error'] is None
        assert len({c.name for c in cases[k]})==len(cases[k])
        found = {r['case']: r['theirs'] for r in results[k]['rows']}
        for c in cases[k]:
            if isinstance(c, Conformance): assert found[c.name]==c.theirs()
    fails = [r for k in READ for r in results[k]['rows'] if r['result']=='fails']
    assert {r['case'] for r in fails}=={'One backward pass for each loader batch, with an optimizer that calls a closure (LBFGS)'}
    refusals = {c.name for k in READ for c in cases[k] if isinstance(c, Claim) and c.big==claims.REFUSED}
    assert {r['case'] for k in READ for r in results[k]['rows'] if r['result']=='refused'}==refusals

def row(result): return dict(case='a case', way='', result=result, off=None, said='')
def test_counts():
    few = dict(tsai=dict(rows=[row('exact'), row('told')]), timm=dict(rows=[row('exact')]),
               **{k: dict(read=dict(name=k.title()), rows=[row('refused')]) for k in READ})
    assert clients.in_words(few)==('2 clients in 3 configurations: 2 exact, 1 with a warning. 3 claims of the tests of Accelerate, '
                                   'Lightning and Transformers in 3 configurations: 3 with an error')
    expected = clients.in_words(results).replace(' exact,', ' exact with dropout off and BatchNorm frozen,', 1)
    assert f'{expected}.' in (root/'nbs'/'works_with.ipynb').read_text(encoding='utf-8'), expected

def test_what_is_said_stands_once():
    "A row for each message, without figures and names; claims that are kept here and there have no row"
    def row(case, said, off): return dict(case=case, way='', result='told', off=off, said=said)
    few = dict(a=dict(rows=[row('x', 'ALoss is no mean: 3% off.', .03), row('y', 'BLoss is no mean: 9% off.', .09)]),
               b=dict(rows=[row('z', 'BLoss is no mean: 1% off.', .01)]))
    assert clients.others(few, 'told').values.tolist()==[['The loss is no mean', 'a: x, y; b: z', '1% to 9%']]
    rows = [dict(case=c, result=what, said='TypeError: no size. Pass one.', theirs=theirs)
            for c,what,theirs in (('p', 'exact', 'L: exact'), ('q', 'exact', 'L: 3% off; M: exact'), ('r', 'refused', ''))]
    assert clients.worth_knowing(dict(read=dict(name='L'), rows=rows)).values.tolist()==[
        ['q', 'exact', '3% off; M: exact'], ['r', 'an error: No size', '']]

@pytest.mark.slow
def test_page():
    "Else: run nbs/works_with.ipynb again"
    page = json.loads((root/'nbs/works_with.ipynb').read_text(encoding='utf-8'))
    shown = [''.join(o['data']['text/markdown']) for c in page['cells'] for o in c.get('outputs', [])
             if 'text/markdown' in o.get('data', {})]
    ours = clients.installed(results)
    assert shown==[f'The cases were {clients.about(ours)}.', clients.markdown(clients.summary(ours)),
                   *(clients.markdown(clients.others(ours, k)) for k in ('told','refused','fails')),
                   *(text for o in clients.libraries(results).values()
                     for text in (clients.read_from(o), clients.markdown(clients.worth_knowing(o))))]
