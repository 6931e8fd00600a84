"""FedRPCA against a plain solver of robust PCA, and against optimality conditions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.methods.fedrpca import sparse_part
from tests.methods import aggregate, build_mid_run, train_client

CLIENTS = st.lists(
    st.tuples(st.sampled_from([0.34, 0.67, 1.0]), st.integers(0, 99)), min_size=1, max_size=5
)


def soft_threshold(value, by):
    return math.copysign(max(abs(value) - by, 0.0), value)


def principal_component_pursuit(M):
    """Principal component pursuit by alternating directions (Candès et al., 2011, algorithm 1).

    Returns S and the multipliers of L + S = M.
    """
    n1, n2 = M.shape
    weight = 1 / math.sqrt(max(n1, n2))
    mu = n1 * n2 / (4 * sum(abs(float(x)) for x in M.flatten()))
    S, Y = torch.zeros_like(M), torch.zeros_like(M)
    for _ in range(100):
        U, sizes, Vh = torch.linalg.svd(M - S + Y / mu, full_matrices=False)
        L = (
            U
            @ torch.tensor([soft_threshold(float(x), 1 / mu) for x in sizes], dtype=M.dtype).diag()
            @ Vh
        )
        rest = M - L + Y / mu
        rows = [[soft_threshold(float(x), weight / mu) for x in row] for row in rest]
        S = torch.tensor(rows, dtype=M.dtype)
        Y = Y + mu * (M - L - S)
    return S, Y


def heads_in(upload, method):
    """Return the heads of a reply, by plain loops over the bits, and their products."""
    bits = [int(byte) >> place & 1 for byte in upload["heads"] for place in range(8)]
    marked = [i for i in range(len(method.layers) * method.heads) if bits[i]]
    return dict(zip(marked, upload["H"].double(), strict=True))


@pytest.mark.slow
@given(CLIENTS)
def test_a_round_adds_the_low_rank_part_and_amplifies_the_sparse_part(clients):
    method, adapters, state = build_mid_run("fedrpca")
    replies = [(train_client(method, adapters, state, *c), c[0]) for c in clients]
    new = aggregate(method, state, replies)["H"].flatten(0, 1).double()
    sent = [heads_in(upload, method) for upload, _ in replies]
    for head, old in enumerate(state["H"].flatten(0, 1).double()):
        changes = [(products[head] - old).flatten() for products in sent if head in products]
        if not changes:
            assert torch.equal(new[head], old)
            continue
        M = torch.stack(changes, 1)
        alike = all(torch.equal(change, changes[0]) for change in changes)
        S = torch.zeros_like(M) if alike else principal_component_pursuit(M)[0]
        expected = old.flatten()
        for client in range(M.shape[1]):
            L = M[:, client] - S[:, client]
            expected = expected + (L + 2 * S[:, client]) / M.shape[1]
        torch.testing.assert_close(new[head].flatten(), expected, rtol=1e-6, atol=1e-6)


def test_the_update_of_one_client_alone_is_found_and_amplified():
    """A common direction and a few values of one client are separated."""
    random = torch.Generator().manual_seed(0)
    common = torch.randn(169, 1, generator=random) @ (0.5 + torch.rand(1, 10, generator=random))
    own = 5 * torch.randn(169, 10, generator=random)
    own *= torch.rand(169, 10, generator=random) < 0.05
    found = sparse_part((common + own).double(), torch.ones(10).double())
    assert float((found - own).norm()) < 0.1 * float(own.norm())


@pytest.mark.slow
@given(st.integers(0, 99), st.integers(2, 5))
def test_the_solution_is_nearly_optimal(seed, clients):
    """Any Y with |Y|_2 <= 1 and |Y|_inf <= lambda bounds the minimum from below, by <Y, M>."""
    random = torch.Generator().manual_seed(seed)
    M = torch.randn(9, clients, generator=random).double()
    S = sparse_part(M, torch.ones(clients).double())
    _, Y = principal_component_pursuit(M)
    Y = Y / max(1.0, float(torch.linalg.svdvals(Y)[0]), 3.0 * float(Y.abs().max()))
    cost = float(torch.linalg.svdvals(M - S).sum() + S.abs().sum() / 3.0)
    assert float((Y * M).sum()) - 1e-9 <= cost <= 1.003 * float((Y * M).sum())


@pytest.mark.slow
@given(st.integers(0, 99), st.lists(st.integers(1, 3), min_size=2, max_size=4))
def test_a_weight_equals_repeated_clients_with_the_same_change(seed, weights):
    random = torch.Generator().manual_seed(seed)
    M = torch.randn(9, len(weights), generator=random).double()
    repeated = torch.tensor(weights)
    several = sparse_part(M.repeat_interleave(repeated, 1), torch.ones(sum(weights)).double())
    found = sparse_part(M, repeated.double()).repeat_interleave(repeated, 1)
    torch.testing.assert_close(found, several, rtol=1e-6, atol=1e-6)
