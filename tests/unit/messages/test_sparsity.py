"""Sparse messages carry the largest values alone; invalid ones are refused."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.config.keys import KEYS
from ravan_flwr.messages import wire
from ravan_flwr.messages.sparsity import FLAT, densify, num_bytes, sparsify, sparsity_of_round
from ravan_flwr.seeding import generator
from tests.sparse import by_hand

SHARES = st.sampled_from([Fraction(1, 4), Fraction(1, 16), Fraction(1, 3), Fraction(9, 10)])
SHAPES = st.dictionaries(
    st.sampled_from(["A", "B", "H", "classifier"]),
    st.one_of(
        st.tuples(st.integers(1, 700)),
        st.tuples(st.integers(1, 40), st.integers(1, 9)),
        st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 40)),
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    ),
    min_size=1,
)


def drawn(shapes, seed=0):
    """Draw rounded values, so that many are equally large."""
    random = generator(seed, "drawn")
    made = {n: (3 * torch.randn(shape, generator=random)).round() for n, shape in shapes.items()}
    return made | {"heads": torch.tensor([3], dtype=torch.uint8), "frozen": torch.ones(5)}


def bytes_in(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@given(SHAPES, SHARES, st.sampled_from(KEYS["wire"].choices))
def test_the_largest_values_arrive_in_the_computed_number_of_bytes(shapes, share, numbers):
    sent = drawn(shapes)
    coded = wire.encode(sparsify(sent, share, shapes.keys()), numbers, generator(1))
    beside = 1 + wire.num_bytes([(5,)], numbers)
    assert bytes_in(coded) == num_bytes(shapes.values(), share, numbers) + beside
    got = densify(wire.decode(coded, numbers), share)
    expected = by_hand(sent, share, shapes.keys())
    assert got.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in sent.values())
    step = largest / 127 if numbers == "int8" else 0.0
    for name, tensor in expected.items():
        assert got[name].shape == tensor.shape
        # Integers up to 20, which are exact in 16 bits.
        assert float((got[name].double() - tensor.double()).abs().max()) <= 1.001 * step


@given(SHAPES)
def test_a_fraction_of_one_sends_all_values_unchanged(shapes):
    sent = drawn(shapes)
    for made in (sparsify(sent, Fraction(1), shapes.keys()), densify(sent, Fraction(1))):
        assert made.keys() == sent.keys()
        assert all(made[name] is sent[name] for name in sent)
    assert num_bytes(shapes.values(), Fraction(1), "int8") == wire.num_bytes(
        shapes.values(), "int8"
    )


@pytest.mark.parametrize(
    ("shape", "share", "expected"),
    [
        ((8, 8), Fraction(1, 4), 16 * 4 + 8),  # a bit each: 8 bytes, where 16 indices take 16
        ((16, 16), Fraction(1, 64), 4 * 4 + 4 * 1),  # indices of a byte, where bits take 32
        ((257,), Fraction(1, 64), 4 * 4 + 4 * 2),  # of two bytes
        ((70_000,), Fraction(1, 700), 100 * 4 + 100 * 4),  # of four bytes
        ((5, 16, 16), Fraction(1, 64), 5 * (4 * 4 + 4 * 1)),  # head by head
    ],
)
def test_positions_are_a_bitmap_or_indices_whichever_is_smaller(shape, share, expected):
    assert num_bytes([shape], share, "float32") == expected
    tensors = {"x": torch.randn(shape, generator=generator(0, "x"))}
    coded = sparsify(tensors, share, {"x"})
    assert bytes_in(coded) == expected
    assert torch.equal(densify(coded, share)["x"], by_hand(tensors, share, {"x"})["x"])


def reply():
    share = Fraction(1, 16)
    sent = {"H": torch.randn(2, 16, 16, generator=generator(0, "H")), "B": torch.ones(400)}
    return share, 2 * 256 + 400, sparsify(sent, share, sent.keys())


def put(tensor, at, value):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


ROW = torch.arange(16, dtype=torch.uint8)
WRONG = {
    "a repeated index": (lambda c: {"H/places": torch.stack([ROW, put(ROW, 3, 2)])}, "repeated"),
    "indices out of order": (lambda c: {"H/places": torch.stack([ROW, ROW.flip(0)])}, "order"),
    "too few indices": (lambda c: {"H/places": c["H/places"][:, :-1]}, "H/places is"),
    "no places": (lambda c: {"H/places": None}, "H/places is missing"),
    "no numbers": (lambda c: {"H": None}, "H is missing"),
    "other numbers": (lambda c: {"H": c["H"].double()}, "H is torch.float64"),
    "too many numbers": (lambda c: {FLAT: torch.ones(26)}, "largest is"),
    "a shape too large": (
        lambda c: {"B/form": torch.empty(0, 2**40, 2**20, dtype=torch.uint8)}, "expected 912 at"
    ),
    "a shape with bytes": (lambda c: {"B/form": torch.ones(1, 400, dtype=torch.uint8)}, "B/form"),
    "a shape of other numbers": (lambda c: {"B/form": torch.empty(0, 400)}, "B/form is"),
    "a shape without sides": (lambda c: {"B/form": torch.empty(0, dtype=torch.uint8)}, "B/form is"),
    "a side of zero": (lambda c: {"B/form": torch.empty(0, 0, dtype=torch.uint8)}, "B/form is"),
    "a dense tensor": (lambda c: {"A": torch.ones(3)}, "A is no part of a sparse upload"),
    "places of nothing": (lambda c: {"A/places": ROW}, "A/places is no part"),
    "no shape": (lambda c: {"H/form": None}, "is no part of a sparse upload"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_invalid_sparse_tensors_are_refused(what):
    share, most, coded = reply()
    assert densify(coded, share, most).keys() == {"H", "B"}
    change, complaint = WRONG[what]
    corrupted = {name: t for name, t in (coded | change(coded)).items() if t is not None}
    with pytest.raises(ValueError, match=complaint):
        densify(corrupted, share, most)


@pytest.mark.parametrize("bit", [0, 12])
def test_a_bitmap_of_another_number_of_positions_is_refused(bit):
    share = Fraction(1, 2)
    coded = sparsify({"B": torch.arange(1.0, 13)}, share, {"B"})
    marks = coded[FLAT + "/places"]
    assert marks.tolist() == [0b11000000, 0b1111]
    flipped = put(marks, bit // 8, int(marks[bit // 8]) ^ (1 << bit % 8))
    with pytest.raises(ValueError, match="marks other places than 6 of 12"):
        densify(coded | {FLAT + "/places": flipped}, share, 12)


def test_each_rows_bitmap_has_its_own_number_of_positions():
    """One more in a row and one less in the next one would move a number to another head."""
    share = Fraction(1, 2)
    coded = sparsify({"H": torch.arange(1.0, 25).reshape(1, 3, 2, 4)}, share, {"H"})
    right, more, fewer = [0b11110000], [0b11111000], [0b11100000]
    assert coded["H/places"].tolist() == [[right] * 3]
    moved = torch.tensor([[right, more, fewer]], dtype=torch.uint8)
    with pytest.raises(ValueError, match="marks other places than 4 of 8 in each row"):
        densify(coded | {"H/places": moved}, share, 24)


def test_a_calibration_and_a_density_of_one_send_all_numbers():
    sparsity = Fraction(1, 2), Fraction(1, 4)
    assert sparsity_of_round(sparsity, 0) == (Fraction(1), Fraction(1))
    assert sparsity_of_round(sparsity, 1) == sparsity
    dense = {"H": torch.ones(1, 2, 3, 3), "B": torch.ones(7)}
    got = densify(dense, Fraction(1), 43)
    assert all(got[name] is tensor for name, tensor in dense.items())


def test_an_index_out_of_range_is_refused():
    share = Fraction(1, 30)
    coded = sparsify({"B": torch.arange(1.0, 301)}, share, {"B"})
    places = coded[FLAT + "/places"]
    assert places.tolist()[-2:] == [299 - 256, 1]
    beyond = put(places, -2, 300 - 256)
    with pytest.raises(ValueError, match="out of range, expected ascending ones below 300"):
        densify(coded | {FLAT + "/places": beyond}, share, 300)
