"""FedALT against a plain loop over all clients' own heads, with and without masks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr import result_of
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.multihead import score_heads
from ravan_flwr.runs.checkpoint import load_personal_states
from ravan_flwr.seeding import generator
from ravan_flwr.specs import Scalar
from tests.methods import LAYERS, aggregate, build, personal_state
from tests.short_runs import records_of, run, same_bits, state_of


def train(method, adapters, state, seed, own, fraction=1.0):
    """Return a client's upload and personal state after a random update of all it may train."""
    method.load(adapters, state)
    if own is not None:
        method.personal.put(adapters, own)
    random = generator(seed, "client")
    method.choose(adapters, fraction, random, lambda: None)
    with torch.no_grad():
        for parameter in method.parameters(adapters):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    return method.upload(adapters), personal_state(method, adapters)


def products(own):
    """Return the products of a client's own heads, in float64."""
    return own["own"].double()


def others_of(client, owns):
    """Return the mean of all other clients' own heads, head by head."""
    rest = [products(own) for number, own in owns.items() if number != client]
    return sum(rest) / len(rest)


@pytest.mark.slow
@given(st.integers(2, 4), st.lists(st.sampled_from([0.34, 0.67, 1.0]), min_size=4, max_size=4))
def test_each_client_has_its_own_heads_beside_the_mean_of_the_others(clients, fractions):
    """Three rounds, also where clients train only some heads: those of the others are unchanged."""
    method, adapters = build("fedalt")
    state, owns = method.initial_state(adapters), dict[int, Tensors]()
    for number in range(3):
        before = {c: products(own) for c, own in owns.items()}
        upload_and_own = {
            c: train(method, adapters, state, 10 * number + c, owns.get(c), fractions[c])
            for c in range(clients)
        }
        owns = {c: own for c, (_, own) in upload_and_own.items()}
        state = aggregate(
            method, state, [(up, fractions[c]) for c, (up, _) in upload_and_own.items()]
        )
        mean = sum(map(products, owns.values())) / clients
        torch.testing.assert_close(state["H"].double(), mean, atol=1e-6, rtol=0)
        assert int(state["clients"]) == clients
        for c, (upload, own) in upload_and_own.items():
            bits = np.unpackbits(upload["heads"].numpy(), bitorder="little")[: 2 * 3].astype(bool)
            moved = products(own) - before.get(c, torch.zeros_like(mean))
            untrained = moved.flatten(0, 1)[~bits]
            assert untrained.abs().sum() < 1e-6
            method.load(adapters, state)
            method.personal.put(adapters, own)
            for place, adapter in enumerate(adapters):
                expected = others_of(c, owns)[place]
                torch.testing.assert_close(adapter.others.double(), expected, atol=1e-6, rtol=0)
                torch.testing.assert_close(
                    adapter.H.detach().double(), products(own)[place], atol=1e-6, rtol=0
                )


@given(st.integers(0, 99))
def test_heads_are_scored_by_the_gradient_that_passes_the_gate(seed):
    method, adapters = build("fedalt")
    state = method.initial_state(adapters)
    own = train(method, adapters, state, seed, None)[1]
    own["gate"].mul_(30)  # so that each token has a gate of its own
    method.load(adapters, state)
    method.personal.put(adapters, own)
    random = generator(seed, "inputs")
    inputs = [torch.randn(7, layer.in_features, generator=random) for layer in LAYERS]

    def backward(*_):
        pairs = zip(adapters, inputs, strict=True)
        sum(adapter(x).square().sum() for adapter, x in pairs).backward()

    scores = score_heads("gradient", adapters, random, backward)
    for adapter in adapters:
        adapter.zero_grad()
    backward()
    expected = torch.stack([adapter.H.grad.norm(dim=(1, 2)) for adapter in adapters])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


@given(st.integers(0, 99))
def test_a_layer_mixes_each_input_by_its_gate(seed):
    method, adapters = build("fedalt")
    state, owns = method.initial_state(adapters), dict[int, Tensors]()
    for _ in range(2):
        upload_and_own = {
            c: train(method, adapters, state, seed + c, owns.get(c)) for c in range(2)
        }
        owns = {c: own for c, (_, own) in upload_and_own.items()}
        state = aggregate(method, state, [(upload, 1.0) for upload, _ in upload_and_own.values()])
    method.load(adapters, state)
    method.personal.put(adapters, owns[0])
    gates = owns[0]["gate"].double().numpy()
    for place, (adapter, layer) in enumerate(zip(adapters, LAYERS, strict=True)):
        G, gates = gates[: 2 * layer.in_features].reshape(2, -1), gates[2 * layer.in_features :]
        B, A = adapter.B.double().numpy(), adapter.A.double().numpy()
        own, rest = products(owns[0])[place].numpy(), others_of(0, owns)[place].numpy()
        W = adapter.base.weight.double().numpy()
        b = adapter.base.bias.double().numpy()
        x = np.random.default_rng(seed).normal(size=(2, 3, layer.in_features))
        with torch.no_grad():
            got = adapter(torch.tensor(x).float()).double().numpy()
        for example in range(2):
            for token in range(3):
                v = x[example, token]
                first, second = np.exp(G @ v) / np.exp(G @ v).sum()
                expected = W @ v + b
                for i in range(3):
                    expected = expected + first * (B[i] @ (own[i] @ (A[i] @ v)))
                    expected = expected + second * (B[i] @ (rest[i] @ (A[i] @ v)))
                np.testing.assert_allclose(got[example, token], expected, atol=1e-5, rtol=1e-5)


def test_only_own_heads_and_gates_are_trained():
    method, adapters = build("fedalt")
    state = method.initial_state(adapters) | {"H": torch.randn(2, 3, 2, 2)}
    method.load(adapters, state)
    method.choose(adapters, 1.0, generator(0), lambda: None)
    for adapter, layer in zip(adapters, LAYERS, strict=True):
        adapter(torch.randn(2, 3, layer.in_features)).square().sum().backward()
        assert adapter.H.grad.abs().sum() > 0
        assert adapter.gate.grad.abs().sum() > 0
        assert not adapter.others.requires_grad


def test_a_round_without_effect_does_not_change_own_heads():
    method, adapters = build("fedalt")
    state = method.initial_state(adapters)
    _, first = train(method, adapters, state, 1, None)
    upload, _ = train(method, adapters, state, 2, None)
    state = aggregate(method, state, [(train(method, adapters, state, 1, None)[0], 1.0),
                                      (upload, 1.0)])  # fmt: skip
    _, second = train(method, adapters, state, 3, first)
    _, again = train(method, adapters, state, 3, second)  # the same state again
    torch.testing.assert_close(again["own"], second["own"], atol=1e-6, rtol=0)


def test_clients_have_equal_weights():
    method, adapters = build("fedalt")
    state = method.initial_state(adapters)
    upload_and_own = [train(method, adapters, state, seed, None)[0] for seed in range(2)]
    one = aggregate(method, state, [(upload_and_own[0], 1.0, 1.0), (upload_and_own[1], 1.0, 7.0)])
    two = aggregate(method, state, [(upload, 1.0) for upload in upload_and_own])
    assert same_bits(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_in_a_run_each_client_has_the_mean_of_the_others(masked, tmp_path):
    """With skewed budget fractions; masked sums agree within their quantisation step."""
    settings: dict[str, Scalar] = {"method": "fedalt", "budgets": "skewed-right"}
    settings |= {"secure-aggregation": True, "secure-minimum": 3} if masked else {}
    clients = 5
    done = run(tmp_path, clients, settings)
    assert (done.summary["rejected"], done.summary["without-effect"]) == (0, [])
    rounds = [record for record in records_of(done) if record["round"]]
    assert [len(record["clients"]) for record in rounds] == [clients, clients]
    state = state_of(done, 2)
    parts = load_personal_states(done.run_dir / "checkpoints", 2)
    assert parts is not None
    assert int(state["clients"]) == len(parts) == clients
    step = 1e-4 if masked else 1e-6
    mean = torch.stack([own["own"] for own in parts.values()]).mean(0)
    torch.testing.assert_close(state["H"], mean, atol=step, rtol=0)
    assert float(mean.abs().max()) > 20 * step
    with result_of(done.run_dir, 1) as loaded:
        for place, adapter in enumerate(loaded.model.adapters):
            rest = sum(own["own"][place] for c, own in parts.items() if c != 1) / (clients - 1)
            torch.testing.assert_close(adapter.others, rest, atol=2 * step, rtol=0)
    assert read_config(settings).evaluate_on == ("server" if masked else "clients")


def test_masked_clients_that_report_and_heads_with_a_nonzero_start_are_refused():
    with pytest.raises(ValueError, match="clients would report"):
        read_config({"method": "fedalt", "secure-aggregation": True, "evaluate-on": "clients"})
    with pytest.raises(ValueError, match="init = 'first-round': got method 'fedalt'"):
        build("fedalt", init="first-round")
