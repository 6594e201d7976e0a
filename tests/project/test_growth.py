"What grows with the work: the benchmark runs, tiny, and the file keeps what the page says"
import json, os, subprocess, sys
from pathlib import Path
import pytest
from bench import growth

root = Path(__file__).resolve().parents[2]
tiny = """
import json
from bench import growth
print(json.dumps(growth.run(tensors=(4, 12), micro_batches=(1, 8), many=400, worlds=(2, 64), items=(100, 300), world=2, rounds=2)))
"""

def sizes(rows): return [r['n'] for r in rows]

@pytest.mark.long        # starts processes
def test_all_is_measured():
    "The sizes that were asked for; what is counted is the same on every machine"
    env = {**os.environ, 'PYTHONPATH': str(root)}
    out = subprocess.run([sys.executable, '-c', tiny], stdout=subprocess.PIPE, text=True, check=True, env=env)
    res = json.loads(out.stdout.splitlines()[-1])            # PyTorch 2.10's Gloo says before it who is connected
    assert [*map(sizes, (res['tensors'], res['micro_batches'], res['simulated'], res['saves']))] == [[4, 12], [1, 8], [2, 64], [100, 300]]
    assert all(0 < r['low'] <= r['ratio'] <= r['high'] and r['hand'] > 0 for r in res['tensors']+res['micro_batches'])
    assert [r['dtype'] for r in res['real']] == ['float32', 'float64']
    assert [0 < r['off'] < tol for r,tol in zip(res['real'], (1e-5, 1e-12))] == [True, True]
    assert len(res['memory']) in (0, 2) and all(sizes(of['rows']) == [*range(80, 401, 40)] for of in res['memory'])
    small,large = res['simulated']
    assert small['calls'] == large['calls'] == 2 and small['ops'] == large['ops'] > 50
    assert abs(res['saves'][0]['bytes']-res['saves'][1]['bytes']) < 2000 and all(r['ms'] > 0 for r in res['saves'])
    assert [len(t) for t in growth.tables(res)] == [2, 2, len(res['memory']) and 9, 2, 2]
    assert [len(ax.lines) for ax in growth.plot(res).axes] == [2, 2, len(res['memory']), 1, 1, 1]

def test_nothing_grows():
    "Each size of the file, which the page shows"
    res = growth.results()
    assert [*map(sizes, (res['tensors'], res['micro_batches'], res['simulated'], res['saves']))] == [
        [*growth.TENSORS], [*growth.MICRO_BATCHES], [*growth.WORLDS], [*growth.ITEMS]]
    for k in ('tensors', 'micro_batches'): assert res[k][-1]['ratio'] <= 1.1*res[k][0]['ratio'] and res[k][-1]['ratio'] < 1.3
    ours,theirs = (of['rows'][-1] for of in res['memory'])
    assert ours['n'] == theirs['n'] == growth.MANY//80*80 and ours['mib'] < theirs['mib']
    assert {r['calls'] for r in res['simulated']} == {2} and len({r['ops'] for r in res['simulated']}) == 1
    assert [(r['n'], r['off'] < tol) for r,tol in zip(res['real'], (1e-5, 1e-12))] == [(8, True), (8, True)]
    first,*_,last = res['saves']
    assert last['ms'] < first['ms']+5 and last['bytes'] < first['bytes']+100_000
