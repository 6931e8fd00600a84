"""The frozen bases: their geometry, and reproducibility by (seed, layer, scheme)."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.adapters.bases import SCHEMES, make_bases
from ravan_flwr.config.keys import KEYS


def bases(scheme, heads=3, rank=4, out_features=24, in_features=16, **changes):
    settings: dict[str, Any] = {"seed": 0, "layer": "layers.0.q"} | changes
    return make_bases(
        scheme, heads=heads, rank=rank, out_features=out_features, in_features=in_features,
        **settings,
    )  # fmt: skip


def test_the_configuration_offers_every_scheme():
    assert set(KEYS["init"].variants) == {*SCHEMES, "data-aware", "first-round"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bases_are_a_function_of_seed_layer_and_scheme(scheme):
    B, A = bases(scheme)
    torch.manual_seed(123)  # earlier use of the generator has no influence
    again_B, again_A = bases(scheme)
    assert torch.equal(B, again_B)
    assert torch.equal(A, again_A)
    assert B.dtype == A.dtype == torch.float32
    for change in ({"seed": 1}, {"layer": "layers.1.q"}):
        other_B, other_A = bases(scheme, **change)
        assert not torch.allclose(B, other_B)
        assert not torch.allclose(A, other_A)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 8), st.integers(0, 8))
def test_gram_schmidt_is_orthonormal_over_all_heads(heads, rank, more_out, more_in):
    B, A = bases("gram-schmidt", heads, rank, heads * rank + more_out, heads * rank + more_in)
    columns = B.transpose(0, 1).flatten(1).double()  # all columns of all B_i
    rows = A.flatten(0, 1).double()
    eye = torch.eye(heads * rank, dtype=torch.float64)
    torch.testing.assert_close(columns.T @ columns, eye, atol=1e-6, rtol=0)
    torch.testing.assert_close(rows @ rows.T, eye, atol=1e-6, rtol=0)


def test_gram_schmidt_equals_the_textbook_procedure():
    from ravan_flwr.adapters.bases import _orthonormal_heads
    from ravan_flwr.seeding import generator

    drawn = torch.randn(6, 4, generator=generator(0, "x"), dtype=torch.float64)
    basis: list[torch.Tensor] = []
    for column in drawn.T:
        rest = column - sum((b * (b @ column) for b in basis), torch.zeros(6))
        basis.append(rest / rest.norm())
    got = _orthonormal_heads(2, 2, 6, generator(0, "x"))
    torch.testing.assert_close(got.transpose(0, 1).flatten(1), torch.stack(basis, 1))


def test_heads_that_do_not_fit_begin_a_new_orthonormal_block():
    B, A = bases("gram-schmidt", heads=5, rank=4, out_features=10, in_features=64)
    for start, stop in ((0, 2), (2, 4), (4, 5)):  # two heads of rank 4 fit into 10
        block = B[start:stop].transpose(0, 1).flatten(1).double()
        eye = torch.eye(4 * (stop - start), dtype=torch.float64)
        torch.testing.assert_close(block.T @ block, eye, atol=1e-6, rtol=0)
    rows = A.flatten(0, 1).double()
    torch.testing.assert_close(rows @ rows.T, torch.eye(20, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.linalg.matrix_rank(B.transpose(0, 1).flatten(1)) == 10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_columns_of_B_and_rows_of_A_have_norm_one(scheme):
    B, A = bases(scheme, heads=4, rank=32, out_features=400, in_features=300)
    assert B.norm(dim=1).square().mean().sqrt() == pytest.approx(1.0, rel=0.1)
    assert A.norm(dim=2).square().mean().sqrt() == pytest.approx(1.0, rel=0.1)


def test_constant_heads_are_the_same():
    B, A = bases("constant")
    assert all(torch.equal(b, B[0]) for b in B)
    assert all(torch.equal(a, A[0]) for a in A)


def test_shared_subspace_has_one_subspace_and_different_heads():
    B, A = bases("shared-subspace")
    assert torch.linalg.matrix_rank(B.transpose(0, 1).flatten(1)) == 4
    assert torch.linalg.matrix_rank(A.flatten(0, 1)) == 4
    assert not torch.allclose(B[0], B[1])
    for i in range(3):  # B_i = M R_i and A_i = R_i N with the same invertible R_i
        R = torch.linalg.lstsq(B[0].double(), B[i].double()).solution  # R_0^-1 R_i
        assert torch.linalg.matrix_rank(R) == 4
        torch.testing.assert_close(
            torch.linalg.lstsq(A[0].double().T, A[i].double().T).solution.T.trace().abs(),
            R.trace().abs(),
            rtol=1e-3,
            atol=1e-3,
        )
