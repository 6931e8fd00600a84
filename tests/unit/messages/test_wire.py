"""What travels in few bits is what was meant to rounding, and weighs what was promised."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr import simulate
from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import read_config
from ravan_flwr.messages.wire import _in_rows, decode, encode, num_bytes
from ravan_flwr.methods import METHODS
from ravan_flwr.seeding import generator
from ravan_flwr.training.cost import Skeleton

WIRES = KEYS["wire"].choices
SHAPES = st.one_of(
    st.tuples(st.integers(0, 3000)),
    st.tuples(st.integers(0, 50), st.integers(1, 50)),
    st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
)


def drawn(shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=generator(seed, "drawn"))


def weight(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@given(SHAPES, st.sampled_from(WIRES), st.floats(1e-4, 1e3))
def test_what_arrives_is_what_was_sent_to_rounding(shape, wire, scale):
    sent = {"H": drawn(shape, scale=scale), "heads": torch.tensor([3], dtype=torch.uint8)}
    coded = encode(sent, wire, generator(1))
    assert weight(coded) - 1 == num_bytes([shape], wire)
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
    # A step's rounding has a deviation of at most half a step: four of the mean's.
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


def test_a_number_beyond_the_wires_range_is_told():
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
def test_what_no_client_sends_is_refused(changes, complaint):
    coded = encode({"H": drawn((2, 3, 3))}, "int8", generator(0))
    with pytest.raises(ValueError, match=complaint):
        decode(coded | changes, "int8")
    with pytest.raises(ValueError, match="H/scales is none"):
        decode({"H": coded["H"]}, "int8")
    with pytest.raises(ValueError, match=r"expected torch.bfloat16 by wire = 'bfloat16'"):
        decode({"H": torch.zeros(2, dtype=torch.float16)}, "bfloat16")


@pytest.mark.parametrize(
    ("method", "wire"),
    [*((name, "int8") for name in METHODS), ("ravan", "float16"), ("ravan", "bfloat16")],
)
def test_a_runs_bytes_are_those_of_the_plan(method, wire, tmp_path):
    settings = {
        "method": method, "wire": wire, "num-rounds": 2, "local-steps": 2, "batch-size": 8,
        "clients-per-round": 2, "classifier": "trained", "tracking": "none", "report": False,
    }  # fmt: skip
    run = simulate(settings | {"output-dir": str(tmp_path)}, 2)
    built = Skeleton.build(read_config(settings))
    lines = (run.run_dir / "rounds.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["round"]]
    for record in records:
        assert [c["bytes-up"] for c in record["clients"]] == [built.bytes_up(1.0)] * 2
        assert record["rejected"] == []
    once = {"fed-sb"}  # its first message brings the bases, too
    down = [c["bytes-down"] for c in records[method in once]["clients"]]
    assert all(bytes_down <= built.bytes_down(1.0) for bytes_down in down)
    whole = Skeleton.build(read_config(settings | {"wire": "float32"}))
    ratio = {"int8": 1 / 4, "float16": 1 / 2, "bfloat16": 1 / 2}[wire]
    assert built.bytes_up(1.0) == pytest.approx(ratio * whole.bytes_up(1.0), rel=0.03)
