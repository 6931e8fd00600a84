"""The LoRA layer, and low-rank sums of products, against plain computations."""

from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.adapters.lora import ProductSum, complete_rows, svd
from tests.methods import assert_close

SIDES = st.integers(1, 8)


def factors(out, inside, rank, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(out, rank, generator=random), torch.randn(rank, inside, generator=random)


@pytest.mark.parametrize(("alpha", "rank"), [(4, 4), (16, 4), (3, 2)])
@pytest.mark.parametrize(("out", "inside"), [(6, 5), (5, 6), (8, 8)])
def test_the_layer_equals_pefts(alpha, rank, out, inside):
    torch.manual_seed(0)
    B, A = factors(out, inside, rank)
    network, plain = (
        nn.Sequential(nn.Linear(inside, out), nn.ReLU(), nn.Linear(out, 3)) for _ in range(2)
    )
    plain.load_state_dict(network.state_dict())
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["0"])
    theirs: Any = peft.get_peft_model(network, settings)
    layer = theirs.base_model.model[0]
    with torch.no_grad():
        layer.lora_A["default"].weight.copy_(A)
        layer.lora_B["default"].weight.copy_(B)
    first, *rest = plain
    assert isinstance(first, nn.Linear)
    ours = LoRALinear(first, B, A, alpha / rank)
    plain = nn.Sequential(ours, *rest)
    x = torch.randn(2, 7, inside)
    assert_close([plain(x)], [theirs(x)], rtol=1e-6, atol=1e-6)

    theirs(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert_close(
        [ours.B.grad, ours.A.grad],
        [layer.lora_B["default"].weight.grad, layer.lora_A["default"].weight.grad],
    )
    assert ours.base.weight.grad is None


def test_factors_may_have_another_rank():
    layer = LoRALinear(nn.Linear(5, 6), *factors(6, 5, 3))
    layer.set_factors(*factors(6, 5, 1, seed=1))
    B, A = factors(6, 5, 1, seed=1)
    assert_close([layer.delta_weight()], [B @ A])


@given(SIDES, SIDES, st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 3)), max_size=12))
def test_a_factored_sum_of_products_is_exact_and_its_size_bounded(out, inside, parts):
    total, plain = ProductSum(out, inside), torch.zeros(out, inside, dtype=torch.float64)
    for seed, (rank, weight) in enumerate(parts):
        B, A = factors(out, inside, rank, seed)
        total.add(B, A, weight)
        plain += weight * B.double() @ A.double()
        assert len(total.factors()[1]) <= min(out, inside)
    for _ in range(2):
        assert_close([total.dense()], [plain], rtol=1e-9, atol=1e-9)


@given(SIDES, SIDES, st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_the_svd_of_factors_equals_that_of_the_matrix(out, inside, ranks):
    total, matrix = ProductSum(out, inside), torch.zeros(out, inside, dtype=torch.float64)
    for seed, rank in enumerate(ranks):
        B, A = factors(out, inside, rank, seed)
        total.add(B, A)
        matrix += B.double() @ A.double()
    U, S, Vh = total.svd()
    plain = torch.linalg.svdvals(matrix)
    assert_close([U @ S.diag() @ Vh], [matrix], rtol=1e-9, atol=1e-9)
    assert_close([S], [plain[: len(S)]], rtol=1e-9, atol=1e-9)
    eye = torch.eye(len(S), dtype=torch.float64)
    assert_close([U.T @ U, Vh @ Vh.T], [eye, eye], rtol=1e-9, atol=1e-9)
    assert (U.gather(0, U.abs().argmax(0, keepdim=True)) > 0).all()


@given(st.integers(0, 4), st.integers(0, 4))
def test_rows_are_completed_to_orthonormal_ones(given_rows, more):
    _, _, Vh = svd(torch.randn(8, 8, dtype=torch.float64))
    completed = complete_rows(Vh[:given_rows], given_rows + more, torch.Generator())
    assert torch.equal(completed[:given_rows], Vh[:given_rows])
    eye = torch.eye(given_rows + more, dtype=torch.float64)
    assert_close([completed @ completed.T], [eye], rtol=1e-9, atol=1e-9)
