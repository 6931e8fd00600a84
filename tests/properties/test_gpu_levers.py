"""The variants of benchmarks/gpu_levers.py train the same as one client at a time."""

import argparse
import warnings

import pytest
import torch

from benchmarks import gpu_levers
from benchmarks.gpu_levers import compiled, distance, one_at_a_time, together


@pytest.fixture(params=["ravan", "fedit", "full"])
def bench(request, tmp_path):
    options = argparse.Namespace(
        method=request.param, device="cpu", small=True, steps=3, clients=3, folder=tmp_path
    )
    return gpu_levers.Bench("cifar100-vit-b16", "float32", options)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")
def test_uploads_equal_those_of_one_client_at_a_time(bench):
    expected = one_at_a_time(bench)
    different = distance(expected[:1], expected[1:2])
    assert different > 5e-4  # the clients have different batches
    assert distance(together(bench), expected) < 1e-2 * different
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's compiler warns of itself
        assert distance(compiled(bench, "aot_eager"), expected) < 1e-2 * different
    # The model is unchanged.
    assert distance(one_at_a_time(bench), expected) == 0


def test_a_difference_is_detected():
    ones = [{"H": torch.ones(2, 3), "s": torch.tensor([0.0, 2.0])}]
    others = [{"H": torch.ones(2, 3), "s": torch.tensor([0.5, 2.0])}]
    assert distance(ones, ones) == 0
    assert distance(others, ones) == 0.25
    assert distance([*ones, *others], ones + ones) == 0.25
