"""The methods of 2024 to 2026, each against the equations of its paper, in slow float64 loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.adapters import Layer
from tests.methods import LAYERS, aggregate, assert_close, build, deltas, some_state, train_client

SEEDS = st.lists(st.integers(0, 99), min_size=1, max_size=5)
TIGHT = {"rtol": 1e-4, "atol": 1e-4}


def matrices(flat, rank, first):
    """The float64 matrices of all layers in a flat tensor: `first` has them (side, rank)."""
    flat, found = flat.double(), []
    for layer in LAYERS:
        side = layer.out_features if first else layer.in_features
        part, flat = flat[: side * rank], flat[side * rank :]
        found.append(part.view(side, rank) if first else part.view(rank, side))
    assert not len(flat)
    return found


def loop_product(B, A):
    """B A, number by number."""
    made = torch.zeros(len(B), A.shape[1], dtype=torch.float64)
    for i in range(len(B)):
        for j in range(A.shape[1]):
            for k in range(len(A)):
                made[i, j] += B[i, k] * A[k, j]
    return made


def loop_mean(tensors, weights):
    """sum_c w_c T_c / sum_c w_c"""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total = total + weight * tensor
    return total / sum(weights)


def weights_of(seeds):
    """Some weights for replies, from 1 to 3."""
    return [1.0 + seed % 3 for seed in seeds]


def replies(method, adapters, state, seeds, shares=None):
    """What clients with these seeds send, with their shares and weights."""
    shares = shares or [1.0] * len(seeds)
    return [
        (train_client(method, adapters, state, share, seed), share, weight)
        for seed, share, weight in zip(seeds, shares, weights_of(seeds), strict=True)
    ]


# FedSVD


@given(SEEDS)
def test_fedsvd_decomposes_the_mean_of_b_times_the_a_that_clients_had(seeds):
    method, adapters = build("fedsvd", rank=3)
    state = some_state(method, adapters)
    sent = replies(method, adapters, state, seeds)
    new = aggregate(method, state, sent)
    old_As = matrices(state["A"], 3, False)
    for layer, A in enumerate(old_As):
        each = [matrices(upload["B"], 3, True)[layer] for upload, *_ in sent]
        product = loop_product(loop_mean(each, weights_of(seeds)), A)
        U, S, Vh = torch.linalg.svd(product)
        B_new, A_new = (matrices(new[k], 3, k == "B")[layer] for k in ("B", "A"))
        assert_close([loop_product(B_new, A_new)], [product], **TIGHT)
        assert_close([A_new @ A_new.T], [torch.eye(3)], **TIGHT)
        assert_close([B_new.T @ B_new], [(S[:3] ** 2).diag()], rtol=1e-3, atol=1e-3)
        for rank in range(3):  # up to their sign, for values that are apart
            if S[rank] - S[rank + 1] > 0.1 and (rank == 0 or S[rank - 1] - S[rank] > 0.1):
                assert abs(float(A_new[rank] @ Vh[rank])) > 1 - 1e-3
                assert abs(float(B_new[:, rank] @ U[:, rank])) > (1 - 1e-3) * float(S[rank])


def test_fedsvd_trains_and_sends_b_alone_and_gets_both():
    method, adapters = build("fedsvd", rank=None, lora_rank=1)
    assert method.rank == 22 // 10  # as for FFA-LoRA
    state = some_state(method, adapters)
    upload = train_client(method, adapters, state, 1.0, 0)
    assert (set(upload), set(method.broadcast(state, 1.0))) == ({"B"}, {"B", "A"})
    assert_close([adapter.A for adapter in adapters], matrices(state["A"], 2, False))
    assert [p.shape for p in method.parameters(adapters)] == [(6, 2), (4, 2)]


def test_fedsvds_a_is_orthonormal_from_the_start_and_spans_what_it_spanned():
    layer = Layer("wide", 6, 9)
    method, adapters = build("fedsvd", layers=(layer,), rank=4)
    state = method.initial_state(adapters)
    first = state["A"].view(4, 9)
    assert_close([first @ first.T], [torch.eye(4)])
    for seed in range(3):
        uploads = [train_client(method, adapters, state, 1.0, seed + 10 * n) for n in range(3)]
        state = aggregate(method, state, [(upload, 1.0) for upload in uploads])
        now = state["A"].view(4, 9)
        assert_close([now.T @ now], [first.T @ first], **TIGHT)  # the projector on its rows
    assert not torch.allclose(now, first, atol=0.1)


def test_fedsvd_keeps_what_was_when_all_clients_send_zero():
    method, adapters = build("fedsvd")
    state = some_state(method, adapters)
    zero = {"B": torch.zeros_like(state["B"])}
    new = aggregate(method, state, [(zero, 1.0)])
    assert all(not delta.any() for delta in deltas(method, adapters, new))
    for A in matrices(new["A"], 2, False):
        assert_close([A @ A.T], [torch.eye(2)])
