"The way of a batch through the code stays short enough to follow: `make trips`"
import pytest, trips

@pytest.fixture(scope='module')
def found(): return {name: trips.measured(calls) for name,calls in trips.trips().items()}

@pytest.mark.parametrize('name', trips.goals)
def test_trip(found, name):
    too_long = {k: f'{found[name][k]}, at most {most}' for k,most in trips.goals[name].items() if found[name][k] > most}
    assert not too_long

def test_route_and_largest():
    calls = [(1,'core/a','f'), (2,'core/a','g'), (2,'checkpoint/b','save'), (3,'core/a','g'), (3,'checkpoint/c','h'),
             (2,'core/a','f'), (2,'checkpoint/b','mark')]
    assert trips.measured(calls) == dict(functions=5, calls=7, changes=5)
    assert trips.largest(calls, 'checkpoint/') == calls[2:5] and trips.route(calls[:3]) == ['core/a','checkpoint/b']

def test_calls_are_seen():
    from fastaccum.core import loss_weight
    import torch
    calls = trips.calls_of(loss_weight, torch.nn.MSELoss(), (torch.ones(2),))
    assert calls[0][1:] == ('core/losses', 'loss_weight') and calls[0][0] == 1
