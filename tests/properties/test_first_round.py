"""RAVAN's heads from a first round's singular blocks, against numpy's decomposition."""

import copy

import numpy as np
import pytest
import torch

from tests.methods import (
    LAYERS,
    FakeTraining,
    assert_close,
    build,
    build_with_network,
    calibration_sums,
    deltas,
)


def changes_of_two_clients():
    """Return two clients' changes of each layer, and the mean, in numpy."""
    rng = np.random.default_rng(7)
    both = [[rng.normal(size=(layer.out_features, layer.in_features)) for layer in LAYERS]
            for _ in range(2)]  # fmt: skip
    return both, [(one + other) / 2 for one, other in zip(*both, strict=True)]


def first_round(heads, both=None):
    """Return RAVAN after its first round, its adapters, and its initial state."""
    return first_round_of("ravan", both, init="first-round", heads=heads, rank=2)


def first_round_of(name, both=None, **settings):
    method, adapters = build(name, **settings)
    sums = calibration_sums(method)
    for changes in both or changes_of_two_clients()[0]:
        upload = method.calibration.run(
            adapters, FakeTraining([torch.tensor(change).float() for change in changes])
        )
        assert sum(tensor.nbytes for tensor in upload.values()) == method.calibration.bytes_up
        sums.add(upload, 1.0)
    fixed, changed = sums.close()
    assert sum(tensor.nbytes for tensor in fixed.values()) == method.calibration.bytes_down
    method.calibration.load(adapters, fixed)
    return method, adapters, method.initial_state(adapters) | changed


@pytest.mark.parametrize("heads", [1, 2])
def test_all_heads_together_start_at_the_best_approximation_of_the_mean(heads):
    method, adapters, state = first_round(heads)
    for mean, delta in zip(
        changes_of_two_clients()[1], deltas(method, adapters, state), strict=True
    ):
        U, S, Vt = np.linalg.svd(mean)
        best = U[:, : 2 * heads] * S[: 2 * heads] @ Vt[: 2 * heads]
        np.testing.assert_allclose(delta.double(), best, atol=1e-5)


def test_each_head_has_the_next_block_of_singular_directions():
    method, adapters, state = first_round(2)
    method.load(adapters, state)
    for mean, adapter in zip(changes_of_two_clients()[1], adapters, strict=True):
        U, S, Vt = np.linalg.svd(mean)
        for head, block in enumerate((slice(0, 2), slice(2, 4))):
            alone = (adapter.B[head] @ adapter.H[head] @ adapter.A[head]).detach().double()
            np.testing.assert_allclose(alone, U[:, block] * S[block] @ Vt[block], atol=1e-5)
            np.testing.assert_allclose(adapter.H[head].detach(), np.diag(S[block]), atol=1e-5)
            assert_close([adapter.B[head].T @ adapter.B[head]], [torch.eye(2)])


def test_heads_beyond_a_matrixs_rank_start_at_zero():
    """The layers' smaller sides are 5 and 4: two heads of rank 2 fit, a third and fourth do not."""
    method, adapters, state = first_round(4)
    assert state["H"][:, :2].abs().amax((2, 3)).min() > 0
    assert not state["H"][:, 2:].any()
    for adapter in adapters:
        for basis in (*adapter.B, *adapter.A.mT):
            assert_close([basis.T @ basis], [torch.eye(2)])
    two = first_round(2)
    assert_close(deltas(method, adapters, state), deltas(two[0], two[1], two[2]))


def test_a_zero_change_gives_no_bases():
    """As where updates vanish in low-precision weights."""
    nothing = [torch.zeros(layer.out_features, layer.in_features).numpy() for layer in LAYERS]
    with pytest.raises(ValueError, match=r"mean change of zero .* raise calibration-learning-rate"):
        first_round(2, both=[nothing, nothing])
    # If one matrix does not change, its heads are in general position; others have their blocks.
    some = [nothing[0], *changes_of_two_clients()[0][0][1:]]
    _, adapters, state = first_round(2, both=[some, some])
    assert not state["H"][0].any()
    assert state["H"][1:].abs().amax((2, 3)).min() > 0
    assert adapters[0].A.count_nonzero() == adapters[0].A.numel()


def test_it_equals_fed_sb_with_several_heads():
    ravan, adapters, state = first_round(1)
    fed_sb, others, changed = first_round_of("fed-sb", rank=2)
    assert torch.equal(state["H"][:, 0], changed["H"])
    one, other = deltas(ravan, adapters, state), deltas(fed_sb, others, changed)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("name", "more"), [("ravan", {"init": "first-round"}), ("fed-sb", {})])
def test_the_weights_are_restored_also_if_the_first_round_fails(name, more):
    method, adapters, network = build_with_network(name, **more)
    before = copy.deepcopy(network.state_dict())

    class Fails(FakeTraining):
        def train(self, parameters):
            super().train(parameters)
            raise RuntimeError("boom")

    changes = [torch.ones(layer.out_features, layer.in_features) for layer in LAYERS]
    with pytest.raises(RuntimeError, match="boom"):
        method.calibration.run(adapters, Fails(changes))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(p.requires_grad for name, p in network.named_parameters() if "base" in name)
