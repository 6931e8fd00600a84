"""FedDPA against a plain loop over its two kinds of rounds, and its mixing of inputs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr import result_of
from ravan_flwr.config.run_config import read_config
from ravan_flwr.runs.checkpoint import load_personal_states
from ravan_flwr.seeding import generator
from ravan_flwr.specs import Scalar
from tests.commands import error_of
from tests.methods import LAYERS, aggregate, assert_close, build, personal_state, train_client
from tests.short_runs import records_of, run

DPA: dict[str, Scalar] = {"method": "feddpa", "clients-per-round": 3}


def inputs_of(seed, layer):
    """Return some examples of three tokens each."""
    return np.random.default_rng(seed).normal(size=(4, 3, layer.in_features))


def own_round(method, adapters, state, seed, own=None):
    """Return a client's personal state after a round that trains it alone, with a random update."""
    turn = method.in_round(2)
    turn.load(adapters, state)
    if own is not None:
        turn.personal.put(adapters, own)
    turn.choose(adapters, 1.0, generator(0), lambda: None)
    for adapter, layer in zip(adapters, LAYERS, strict=True):
        adapter(torch.tensor(inputs_of(seed, layer)).float())
    random = generator(seed, "own")
    with torch.no_grad():
        for parameter in turn.parameters(adapters):
            parameter.add_(torch.randn(parameter.shape, generator=random))
    assert turn.upload(adapters) == {}
    return personal_state(turn, adapters)


def cut(flat, sides, rank=2):
    """Split a flat tensor into factors, in numpy, each with `rank` times a side."""
    pieces, at = [], 0
    for side in sides:
        pieces.append(flat[at : at + rank * side].double().numpy())
        at += rank * side
    return pieces


def mixed_by_loop(x, network, of_all, own, scale):
    """Compute a layer's output for one example, (tokens, in), token by token."""
    (W, b), (B, A), (own_B, own_A, mean) = network, of_all, own
    average = sum(x) / len(x)
    norms = np.linalg.norm(average) * np.linalg.norm(mean)
    a = 0.5 * max(0.0, float(average @ mean / norms)) if norms else 0.0
    return np.array([
        W @ token + b + scale * ((1 - a) * B @ (A @ token) + a * own_B @ (own_A @ token))
        for token in x
    ])  # fmt: skip


@pytest.mark.parametrize("trained", [True, False])
@given(st.integers(0, 99), st.sampled_from([1.0, 0.5]))
def test_inputs_are_mixed_by_similarity_to_the_clients_own(trained, seed, scale):
    method, adapters = build("feddpa", lora_scale=scale)
    state = method.initial_state(adapters)
    state = aggregate(method, state, [(train_client(method, adapters, state, 1.0, seed), 1.0)])
    own = own_round(method, adapters, state, seed) if trained else None
    method.load(adapters, state)
    if own is not None:
        method.personal.put(adapters, own)
    personal = personal_state(method, adapters)
    outs, ins = [layer.out_features for layer in LAYERS], [layer.in_features for layer in LAYERS]
    factors = [cut(state["B"], outs), cut(state["A"], ins)]
    factors += [
        cut(personal["own-B"], outs),
        cut(personal["own-A"], ins),
        cut(personal["mean-input"], ins, 1),
    ]
    for place, (adapter, layer) in enumerate(zip(adapters, LAYERS, strict=True)):
        B, A, own_B, own_A, mean = (factor[place] for factor in factors)
        if trained:
            examples = inputs_of(seed, layer)
            np.testing.assert_allclose(
                mean, examples.reshape(-1, layer.in_features).mean(0), atol=1e-6
            )
        else:
            assert not mean.any()
        B, own_B = B.reshape(-1, 2), own_B.reshape(-1, 2)
        A, own_A = A.reshape(2, -1), own_A.reshape(2, -1)
        base = adapter.base.weight.double().numpy(), adapter.base.bias.double().numpy()
        x = inputs_of(seed + 1, layer)
        with torch.no_grad():
            got = adapter(torch.tensor(x).float())
        for example, found in zip(x, got, strict=True):
            expected = mixed_by_loop(example, base, (B, A), (own_B, own_A, mean), scale)
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True))
def test_odd_rounds_equal_fedit_and_even_ones_train_own_adapters(seeds):
    method, adapters = build("feddpa")
    fedit, others = build("fedit")
    state, same = method.initial_state(adapters), fedit.initial_state(others)
    assert all(torch.equal(state[key], same[key]) for key in state)
    for number in (1, 3):
        owns = {seed: own_round(method, adapters, state, seed) for seed in seeds}
        turn = method.in_round(number)
        uploads = []
        for seed in seeds:
            upload = train_client(turn, adapters, state, 1.0, seed, owns[seed])
            before_round = personal_state(turn, adapters)
            assert all(torch.equal(before_round[key], owns[seed][key]) for key in before_round)
            uploads.append((upload, 1.0))
        state = aggregate(turn, state, uploads)
        replies = [(train_client(fedit, others, same, 1.0, seed), 1.0) for seed in seeds]
        same = aggregate(fedit, same, replies)
        assert all(torch.equal(state[key], same[key]) for key in state)
    even = method.in_round(2)
    after = aggregate(even, state, [({}, 1.0), ({}, 1.0)])
    assert all(torch.equal(after[key], state[key]) for key in state)
    with pytest.raises(ValueError, match="got tensors .*expected"):
        aggregate(even, state, [(state, 1.0)])


def test_an_own_round_trains_the_own_factors_alone():
    method, adapters = build("feddpa")
    state = method.initial_state(adapters)
    state = aggregate(method, state, [(train_client(method, adapters, state, 1.0, 3), 1.0)])
    own = own_round(method, adapters, state, 1)
    turn = method.in_round(2)
    turn.load(adapters, state)
    turn.personal.put(adapters, own)
    turn.choose(adapters, 1.0, generator(0), lambda: None)
    for adapter, layer in zip(adapters, LAYERS, strict=True):
        x = torch.tensor(inputs_of(5, layer)).float()
        expected = adapter.base(x)
        expected = expected + 0.5 * (x @ adapter.A.T @ adapter.B.T)
        expected = expected + 0.5 * (x @ adapter.personal_A.T @ adapter.personal_B.T)
        assert_close([adapter(x).detach()], [expected.detach()])
        adapter(x).square().sum().backward()
        assert adapter.B.grad is None
        assert adapter.A.grad is None
        assert adapter.personal_B.grad.abs().sum() > 0
        assert adapter.personal_A.grad.abs().sum() > 0


def test_its_two_loras_are_within_the_budget_of_one():
    methods = [build(name, rank=None, lora_rank=4)[0] for name in ("feddpa", "fedit")]
    assert [method.rank for method in methods] == [2, 4]
    assert len({method.trainable_parameters() for method in methods}) == 1
    with pytest.raises(ValueError, match=r"lora-rank = 1: .*two LoRAs.*raise lora-rank"):
        build("feddpa", rank=None, lora_rank=1)


@pytest.mark.slow
def test_two_rounds_with_skewed_budgets_and_their_export(tmp_path, capsys):
    done = run(tmp_path, 20, DPA, budgets="skewed-right")
    assert (done.summary["rejected"], done.summary["without-effect"]) == (0, [])
    assert read_config(DPA).evaluate_on == "clients"
    trained = next(iter(load_personal_states(done.run_dir / "checkpoints", 2) or {}))
    with result_of(done.run_dir, trained) as loaded:
        assert any(adapter.mean.any() for adapter in loaded.model.adapters)
    for client in ([], ["--client", str(trained)]):
        error = error_of(capsys, "export", done.run_dir, "--as", "merged", tmp_path / "x", *client)
        assert "mix two adapters" in error
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_the_servers_model_is_evaluated_without_personal_parameters(tmp_path):
    both = DPA | {"classifier": "frozen"}
    done = run(tmp_path, 4, both, evaluate_on="server")
    fedit: dict[str, Scalar] = {
        "method": "fedit",
        "rank": 2,
        "learning-rate": 1e-3,
        "num-rounds": 1,
    }
    other = run(tmp_path, 4, both | fedit)
    first, second = ([record["metrics"] for record in records_of(r)] for r in (done, other))
    assert first == [second[0], second[0]]  # the second round trains the clients' own adapters
