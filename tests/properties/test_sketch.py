"""Data-aware bases: sketches are additive, and give the leading subspaces of the sum."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ravan_flwr.adapters import Layer, MultiHeadLinear, make_bases
from ravan_flwr.adapters.sketch import GradientSketch, Sketcher, fill_heads, watch_gradients
from ravan_flwr.seeding import generator
from tests.methods import LAYERS, build, calibration_sums

LAYER = Layer("layer", 30, 20)


def sketch_of(sketcher, G):
    """Return the sketch of a given gradient, by x and gy with gy^T x = G."""
    sketch = GradientSketch(sketcher, torch.device("cpu"))
    sketch.add(G.float(), torch.eye(len(G)))
    return sketch.flat()


@pytest.mark.parametrize("heads", [1, 3, 7, 16])
def test_heads_beyond_the_matrix_have_bases(heads):
    """Layers of sides 6 and 5 have room for two heads of rank 2 and a half."""
    method, adapters = build("ravan", init="data-aware", heads=heads, rank=2)
    sums = calibration_sums(method)
    up, down = method.calibration.bytes_up, method.calibration.bytes_down
    sums.add({"sketch": torch.randn(up // 4, generator=generator(0))}, 1.0)
    fixed, _ = sums.close()
    assert sum(tensor.nbytes for tensor in fixed.values()) == down
    method.calibration.load(adapters, fixed)
    for layer in adapters:
        for basis in (*layer.B, *layer.A.mT):
            eye = basis.T @ basis
            torch.testing.assert_close(eye / eye[0, 0], torch.eye(2), rtol=1e-4, atol=1e-4)


def test_the_hooks_sketch_is_of_the_weights_gradient():
    torch.manual_seed(0)
    B, A = make_bases(
        "normal", heads=2, rank=2, out_features=30, in_features=20, seed=0, layer="l"
    )  # fmt: skip
    layer = MultiHeadLinear(nn.Linear(20, 30), B, A)
    nn.init.normal_(layer.H)
    x = torch.randn(3, 5, 20)
    recorded = []
    with watch_gradients(layer, lambda x, gy: recorded.append(gy.T @ x)):
        layer(x).square().sum().backward()
    weight = (layer.base.weight + layer.delta_weight()).detach().requires_grad_()
    (torch.nn.functional.linear(x, weight, layer.base.bias)).square().sum().backward()
    torch.testing.assert_close(recorded[0], weight.grad, rtol=1e-4, atol=1e-4)
    assert layer.subset is None
    assert layer.H.grad is None


@given(st.integers(1, 4))
def test_the_sum_of_sketches_is_the_sketch_of_the_sum(clients):
    sketcher = Sketcher(LAYER, 4, seed=0)
    gradients = torch.randn(clients, 30, 20, generator=generator(clients))
    summed = sum(sketch_of(sketcher, G) for G in gradients)
    torch.testing.assert_close(summed, sketch_of(sketcher, gradients.sum(0)), rtol=1e-4, atol=1e-4)
    assert len(summed) == sketcher.size


@pytest.mark.parametrize("dimensions", [1, 3, 5])
def test_the_leading_subspaces_of_a_low_rank_gradient_are_found(dimensions):
    random = generator(7)
    U = torch.linalg.qr(torch.randn(30, 6, generator=random)).Q.double()
    V = torch.linalg.qr(torch.randn(20, 6, generator=random)).Q.double()
    S = torch.tensor([9.0, 7.0, 5.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    sketcher = Sketcher(LAYER, dimensions, seed=0)
    left, right = sketcher.subspaces(sketch_of(sketcher, U @ S.diag() @ V.T).double())
    for got, true in ((left, U[:, :dimensions]), (right, V[:, :dimensions])):
        assert got.shape == true.shape
        cosines = torch.linalg.svdvals(got.T @ true)
        torch.testing.assert_close(cosines, torch.ones(dimensions, dtype=torch.float64))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_remaining_heads_are_an_orthonormal_complement(heads, rank, more):
    side = heads * rank + more
    given_ = min(side, max(1, heads // 2) * rank)
    leading = torch.linalg.qr(torch.randn(side, given_, generator=generator(1)).double()).Q
    filled = fill_heads(leading, heads, rank, generator(2))
    assert filled.shape == (heads, side, rank)
    columns = filled.transpose(0, 1).flatten(1)
    torch.testing.assert_close(columns[:, :given_], leading)
    torch.testing.assert_close(columns.T @ columns, torch.eye(heads * rank, dtype=torch.float64))


def test_heads_beyond_the_side_begin_a_new_block():
    leading = torch.linalg.qr(torch.randn(10, 4, generator=generator(1)).double()).Q
    filled = fill_heads(leading, 5, 4, generator(2))
    for start, stop in ((0, 2), (2, 4), (4, 5)):
        block = filled[start:stop].transpose(0, 1).flatten(1)
        eye = torch.eye(4 * (stop - start), dtype=torch.float64)
        torch.testing.assert_close(block.T @ block, eye)


def calibrated(seeds):
    method, adapters = build(init="data-aware")
    method.load(adapters, method.initial_state(adapters))
    sums = calibration_sums(method)
    uploads = []
    for seed in seeds:
        random = generator(seed, "batch")

        def measure(_, random=random):
            for layer, adapter in zip(LAYERS, adapters, strict=True):
                x = torch.randn(6, layer.in_features, generator=random)
                adapter(x).square().mean().backward()

        uploads.append(method.calibration.run(adapters, SimpleNamespace(measure=measure)))
    for upload in uploads:
        sums.add(upload, 1.0)
    return method, adapters, sums, uploads


def test_fixed_tensors_are_orthonormal_bases_on_every_node():
    method, adapters, sums, _ = calibrated([1, 2])
    fixed, changed = sums.close()
    assert changed == {}
    before = method.fingerprint(adapters)
    method.calibration.load(adapters, fixed)
    assert method.fingerprint(adapters) != pytest.approx(before, rel=1e-3)
    other, others = build(init="data-aware")
    other.calibration.load(others, fixed)
    for one, two in zip(adapters, others, strict=True):
        assert torch.equal(one.B, two.B)
        assert torch.equal(one.A, two.A)
        columns = one.B[:2].transpose(0, 1).flatten(1)  # two heads of rank 2 fit into 4 and 6
        torch.testing.assert_close(columns.T @ columns, torch.eye(4), atol=1e-5, rtol=0)


def test_other_inits_have_no_calibration_round():
    assert build()[0].calibration is None
