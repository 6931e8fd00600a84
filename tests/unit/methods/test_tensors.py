"""The checksum of tensors covers names, dtypes, shapes and bytes."""

import hashlib
import math
import re
from typing import Any

import pytest
import torch

from ravan_flwr.methods.ravan import HeadMeans
from ravan_flwr.methods.tensors import (
    MeansByNorm,
    check_tensor,
    checksum,
    pack_bits,
    probe,
    sum_of_squares,
)
from tests import ROOT


def test_the_checksum_is_that_of_names_dtypes_shapes_and_bytes():
    written = hashlib.sha256()
    written.update(b"A int32 (1,)" + bytes([7, 0, 0, 0]))
    written.update(b"B float32 (1, 2)" + bytes([0, 0, 128, 63, 0, 0, 0, 192]))  # 1 and -2
    tensors = {"B": torch.tensor([[1.0, -2.0]]), "A": torch.tensor([7], dtype=torch.int32)}
    assert checksum(tensors) == written.hexdigest()[:16]


@pytest.mark.parametrize(
    "other",
    [
        {"y": torch.zeros(2, 3)},
        {"x": torch.zeros(3, 2)},
        {"x": torch.zeros(2, 3, dtype=torch.int32)},
        {"x": torch.zeros(2, 3) + torch.eye(2, 3)},
        {"x": torch.zeros(2, 3), "y": torch.zeros(0)},
    ],
    ids=["name", "shape", "dtype", "numbers", "one more"],
)
def test_any_difference_changes_the_checksum(other):
    assert checksum(other) != checksum({"x": torch.zeros(2, 3)})


def test_the_memory_layout_does_not_change_the_checksum():
    matrix = torch.arange(6.0).view(2, 3)
    assert checksum({"x": matrix.T}) == checksum({"x": matrix.T.contiguous()})


def test_a_fingerprint_by_hand():
    """Two sums a basis, with the cosines of 0, 1, 2 and the sines of 0, 0.7, 1.4; twice layer 2."""
    first, second = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([[0.0, 3.0]])
    cosines = 1 + 2 * math.cos(2.0) + 2 * 3 * math.cos(1.0)
    sines = 2 * math.sin(1.4) + 2 * 3 * math.sin(0.7)
    assert probe([(first,), (second,)]) == pytest.approx([cosines, sines], rel=1e-12)


def test_a_sum_of_squares_is_checked_in_float64_where_float32_overflows():
    assert sum_of_squares(torch.tensor([3.0, 4.0]), "x") == 25.0
    assert sum_of_squares(torch.full((2,), 1e30), "x") == pytest.approx(2e60, rel=1e-6)
    assert sum_of_squares(torch.tensor([7, 8], dtype=torch.uint8), "bits") == 0.0
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="x has values that are not finite"):
            sum_of_squares(torch.tensor([1.0, number]), "x")


def test_form_and_numbers_of_a_tensor_are_checked():
    good = {"x": torch.zeros(2, 3)}
    assert check_tensor(good, "x", (2, 3), torch.float32) is good["x"]
    meta = {"x": torch.full((2, 3), math.nan).to("meta")}  # as `plan` has it: a shape alone
    assert check_tensor(meta, "x", (2, 3), torch.float32) is meta["x"]
    for bad, message in (
        ({}, "expected 'x' among them"),
        ({"x": torch.zeros(3, 2)}, r"x is torch.float32 \(3, 2\), expected torch.float32 \(2, 3\)"),
        ({"x": torch.zeros(2, 3).double()}, "x is torch.float64"),
        ({"x": torch.full((2, 3), math.nan)}, "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            check_tensor(bad, "x", (2, 3), torch.float32)


def test_means_without_uploads_far_above_the_median_norm():
    """The median is 1.9, and 8 x 1.9 < 16: a norm of 15 counts, one of 20 does not."""
    sums = MeansByNorm({"x": torch.zeros(1), "y": torch.full((1,), 5.0)})
    for number, weight in ((1.9, 1.0), (-1.9, 2.0), (1.9, 1.0), (15.0, 4.0), (20.0, 8.0)):
        sums.add({"x": torch.tensor([number]), "y": torch.zeros(1)}, weight)
    mean = sums.close()
    assert float(mean["x"]) == pytest.approx((1.9 - 2 * 1.9 + 1.9 + 4 * 15.0) / 8, rel=1e-6)
    assert float(mean["y"]) == 0.0
    # The norm is over all tensors together: 3 and 4 make 5, as far from 0.3 as 16 x 0.3.
    sums = MeansByNorm({"x": torch.zeros(1), "y": torch.zeros(1)})
    for x, y in ((0.3, 0.0), (0.0, 0.3), (0.3, 0.0), (3.0, 4.0)):
        sums.add({"x": torch.tensor([x]), "y": torch.tensor([y])}, 1.0)
    assert float(sums.close()["x"]) == pytest.approx(0.2, rel=1e-6)
    assert float(MeansByNorm({"x": torch.full((1,), 7.0)}).close()["x"]) == 7.0


@pytest.mark.parametrize(("over_cohort", "expected"), [(False, [7.0, 0.0]), (True, [8.5, 10.0])])
def test_means_of_heads_by_hand(over_cohort, expected):
    """Clients of weights 1 and 3 train head 0 to 4 and 8; a client of weight 4 trains head 1 to 0.

    Over the cohort a client counts with the old value, 10 or 20, of the head it did not train.
    """
    old = torch.tensor([10.0, 20.0, 30.0]).view(1, 3, 1, 1)
    sums = HeadMeans(old, mean_over_cohort=over_cohort)
    for head, product, weight in ((0, 4.0, 1.0), (0, 8.0, 3.0), (1, 0.0, 4.0)):
        bits = pack_bits(torch.arange(3) == head)
        sums.add({"H": torch.full((1, 1, 1), product), "heads": bits}, weight)
    assert sums.close()["H"].flatten().tolist() == [*expected, 30.0]
    assert HeadMeans(old).mean_over_cohort is False


def test_the_pages_aggregation_clips_the_change_of_each_client():
    """Changes of norm 5 and 0.5: the first counts with norm 1; with weight 3, three times."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", page, re.S) if "ClippedMeans" in x)
    names: dict[str, Any] = {}
    exec(code, names)
    state = {"B": torch.tensor([1.0, 2.0])}
    sums = names["ClippedMeans"](state)
    sums.add({"B": torch.tensor([4.0, 6.0])}, 3.0)
    sums.add({"B": torch.tensor([1.0, 2.5])}, 1.0)
    expected = torch.tensor([1 + 3 * 0.6 / 4, 2 + (3 * 0.8 + 0.5) / 4])
    torch.testing.assert_close(sums.close()["B"], expected)
