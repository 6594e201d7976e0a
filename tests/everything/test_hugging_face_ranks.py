"Hugging Face models over two ranks: the weights are those of a plain PyTorch loop in one process that takes the model's own loss"
import sys, pytest, torch
pytest.importorskip('transformers')
from fastaccum.all import DataParallel, GradientAccumulation, launch
from test_hugging_face import by_hand, model, train, weights

kinds = 'causal','sequences','classes'
cases = {'split': (20, {}), 'exact': (20, dict(exact=True)), 'accumulated': (4, None)}
def acc(case): return GradientAccumulation(20) if case == 'accumulated' else GradientAccumulation(micro_batch_size=7, **cases[case][1])

def trained():
    res = {(kind, case): weights(train(kind, cases[case][0], acc(case), DataParallel()).model) for kind in kinds for case in cases}
    return res | dict(dropout=weights(train('causal', 20, acc('exact'), DataParallel(), p=.2).model))
def both(n): return launch(trained, n)
def alone(n): return {kind: weights(by_hand(kind)) for kind in kinds} | dict(dropout=weights(train('causal', 20, p=.2).model))

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    from test_joint_validation import started
    waits = [started(f, n, tmp_path_factory.mktemp(f'ranks{n}'), __file__) for f,n in ((alone, 1), (both, 2))]
    return [wait() for wait in waits]

@pytest.mark.slow       # starts two ranks
@pytest.mark.parametrize('kind,case', [(kind, case) for kind in kinds for case in cases] + [('causal', 'dropout')])
def test_ranks(results, kind, case):
    one,ranks = results
    want = one['dropout' if case == 'dropout' else kind]
    far = (want-weights(model(kind))).norm()
    for rank in ranks: assert (rank['dropout' if case == 'dropout' else (kind, case)]-want).norm() <= 4e-6*far

if __name__ == '__main__':
    f,n,out = sys.argv[1:]
    torch.set_num_threads(1)
    torch.save(globals()[f](int(n)), out)
