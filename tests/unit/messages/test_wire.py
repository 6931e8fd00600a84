"""Reduced-precision messages round-trip to rounding, in the computed number of bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.config.keys import KEYS
from ravan_flwr.messages.wire import _in_rows, decode, encode, num_bytes
from ravan_flwr.seeding import generator

WIRES = KEYS["wire"].choices
SHAPES = st.one_of(
    st.tuples(st.integers(0, 3000)),
    st.tuples(st.integers(0, 50), st.integers(1, 50)),
    st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
)


def drawn(shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=generator(seed, "drawn"))


def bytes_in(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@given(SHAPES, st.sampled_from(WIRES), st.floats(1e-4, 1e3))
def test_tensors_round_trip_to_rounding(shape, wire, scale):
    sent = {"H": drawn(shape, scale=scale), "heads": torch.tensor([3], dtype=torch.uint8)}
    coded = encode(sent, wire, generator(1))
    assert bytes_in(coded) - 1 == num_bytes([shape], wire)
    got = decode(coded, wire)
    assert got.keys() == sent.keys()
    assert torch.equal(got["heads"], sent["heads"])
    assert (got["H"].dtype, got["H"].shape) == (torch.float32, sent["H"].shape)
    error = (got["H"] - sent["H"]).abs()
    if wire == "int8":
        rows = _in_rows(sent["H"])
        bound = rows.abs().amax(1, keepdim=True) / 127 if rows.numel() else rows
        assert (_in_rows(error) <= bound * 1.001).all()
    else:
        part = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[wire]
        smallest = 2**-25  # half of the smallest float16
        assert (error <= part * sent["H"].abs() + smallest * (wire == "float16")).all()


def test_rounding_to_8_bits_is_unbiased_and_a_function_of_its_seed():
    sent = {"H": drawn((2, 3, 3))}
    step = sent["H"].flatten(1).abs().amax(1) / 127
    mean = torch.stack(
        [decode(encode(sent, "int8", generator(n)), "int8")["H"] for n in range(4000)]
    )
    # A rounded value deviates by at most half a step; the bound is four deviations of the mean.
    bound = 4 * 0.5 * step / 4000**0.5
    assert ((mean.mean(0) - sent["H"]).abs().flatten(1).amax(1) < bound).all()
    one, two, other = (encode(sent, "int8", generator(n))["H"] for n in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_zeros_stay_zeros_and_each_head_has_a_scale_of_its_own():
    H = torch.zeros(3, 2, 2)
    H[1], H[2] = 1e-6, 1e6
    got = decode(encode({"H": H}, "int8", generator(0)), "int8")["H"]
    torch.testing.assert_close(got, H)


def test_a_value_beyond_the_wires_range_is_reported():
    with pytest.raises(ValueError, match="wire = 'float16': H has numbers up to 1e[+]05, expected"):
        encode({"H": torch.tensor([1e5])}, "float16", generator(0))
    assert encode({"H": torch.tensor([1e5])}, "bfloat16", generator(0))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"H": torch.zeros(2, 3, 3)}, "H is torch.float32, expected torch.int8 by wire = 'int8'"),
        ({"H/scales": torch.ones(3)}, r"H/scales is torch.float32 \(3,\), expected .* \(2,\)"),
        ({"H/scales": torch.ones(2).double()}, "H/scales is torch.float64"),
        ({"H/scales": torch.tensor([1.0, torch.nan])}, "negative or not finite"),
        ({"H/scales": torch.tensor([1.0, -1.0])}, "negative or not finite"),
        ({"B/scales": torch.ones(1)}, "B/scales has no tensor that it scales"),
    ],
)
def test_invalid_quantised_tensors_are_refused(changes, complaint):
    coded = encode({"H": drawn((2, 3, 3))}, "int8", generator(0))
    with pytest.raises(ValueError, match=complaint):
        decode(coded | changes, "int8")
    with pytest.raises(ValueError, match="H/scales is none"):
        decode({"H": coded["H"]}, "int8")
    with pytest.raises(ValueError, match=r"expected torch.bfloat16 by wire = 'bfloat16'"):
        decode({"H": torch.zeros(2, dtype=torch.float16)}, "bfloat16")
