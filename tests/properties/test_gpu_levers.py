"""The levers that benchmarks/gpu_levers.py tries on a GPU train what one client at a time does."""

import argparse
import warnings

import pytest
import torch

from benchmarks import gpu_levers
from benchmarks.gpu_levers import apart, compiled, one_at_a_time, together


@pytest.fixture(params=["ravan", "fedit", "full"])
def bench(request, tmp_path):
    given = argparse.Namespace(
        method=request.param, device="cpu", small=True, steps=3, clients=3, folder=tmp_path
    )
    return gpu_levers.Bench("cifar100-vit-b16", "float32", given)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")
def test_uploads_are_those_of_one_client_at_a_time(bench):
    expected = one_at_a_time(bench)
    different = apart(expected[:1], expected[1:2])
    assert different > 5e-4  # the clients have batches of their own
    assert apart(together(bench), expected) < 1e-2 * different
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's compiler warns of itself
        assert apart(compiled(bench, "aot_eager"), expected) < 1e-2 * different
    # And the model is as it was.
    assert apart(one_at_a_time(bench), expected) == 0


def test_a_difference_is_found():
    ones = [{"H": torch.ones(2, 3), "s": torch.tensor([0.0, 2.0])}]
    others = [{"H": torch.ones(2, 3), "s": torch.tensor([0.5, 2.0])}]
    assert apart(ones, ones) == 0
    assert apart(others, ones) == 0.25
    assert apart([*ones, *others], ones + ones) == 0.25
