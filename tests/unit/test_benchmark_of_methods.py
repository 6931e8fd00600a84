"""benchmarks/methods.py: its formulas, as in docs/methods.md, equal the bytes that are sent."""

import pytest

from benchmarks.methods import FORMULAS, Shapes, formula_of
from ravan_flwr.methods import METHODS
from tests.methods import aggregate, build, train_client

CLIENTS = 3


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_every_method_has_a_formula():
    assert FORMULAS.keys() <= METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_payloads_equal_the_formulas(name):
    method, adapters = build(name)
    shapes = Shapes(method, CLIENTS)
    state = method.initial_state(adapters)
    for number in range(1, 5):
        turn = method.in_round(number)
        up, down = formula_of(name)(shapes, number)
        once = shapes.both if (name, number) == ("fed-sb", 1) else 0  # sent beside the state
        counts = state.keys() & {"residual-rank", "rounds", "clients"}
        counters = bytes_of({key: state[key] for key in counts})
        assert bytes_of(turn.broadcast(state, 1.0)) - counters == 4 * (down - once)
        uploads = [train_client(turn, adapters, state, 1.0, seed) for seed in range(CLIENTS)]
        for upload in uploads:
            assert 4 * up <= bytes_of(upload) < 4 * up + 1  # bits are padded to bytes
        state = aggregate(turn, state, [(upload, 1.0) for upload in uploads])
