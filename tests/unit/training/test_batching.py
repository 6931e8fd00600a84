"""Batches of examples: each example once a pass, as a function of the seed."""

import itertools

import numpy as np
import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.batching import POOL, evaluation_batches, training_batches

NUMBERS = [(1, 4), (4, 4), (10, 4), (37, 4), (128, 16), (1000, 16), (5, 8)]
LENGTHS = np.random.default_rng(0).geometric(0.05, 1000)  # a few long texts, many short ones


def a_pass(number, batch_size, lengths, seed=0, skip=0):
    random = torch.Generator().manual_seed(seed)
    batches = training_batches(number, batch_size, random, lengths)
    count = -(-number // batch_size)
    return [*itertools.islice(batches, skip * count, (skip + 1) * count)]


def padded_tokens(batches, lengths=LENGTHS):
    """Count the tokens that go through a network, with padding."""
    return sum(len(rows) * lengths[rows].max() for rows in batches)


BY_LENGTH = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["random", "length"])


@pytest.mark.parametrize(
    ("epochs", "examples", "steps"),
    [(0.5, 40, 2), (0.5, 41, 3), (0.1, 300, 3), (0.7, 100, 7), (1e-9, 10**6, 1), (1.5, 1, 2)],
)
def test_partial_passes_are_rounded_up_to_whole_batches(epochs, examples, steps):
    config = read_config({"local-steps": f"epochs:{epochs}", "batch-size": 10})
    assert config.count_steps(examples) == steps
    assert read_config({"local-steps": 7}).count_steps(examples) == 7


@pytest.mark.parametrize(("number", "batch_size"), NUMBERS)
@BY_LENGTH
def test_a_pass_has_every_example_once_in_equal_batches(number, batch_size, lengths):
    config = read_config({"local-steps": "epochs:3", "batch-size": batch_size})
    by_chance = sorted(map(len, a_pass(number, batch_size, None)))
    assert config.count_steps(number) == 3 * len(by_chance)
    for skip in range(3):
        batches = a_pass(number, batch_size, lengths, skip=skip)
        assert sorted(np.concatenate(batches)) == list(range(number))
        assert sorted(map(len, batches)) == by_chance


@BY_LENGTH
def test_batches_are_a_function_of_the_seed(lengths):
    passes = [a_pass(1000, 16, lengths, seed) for seed in (1, 1, 2)]
    one, again, other = (np.concatenate(batches) for batches in passes)
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_random_batches_equal_those_of_earlier_versions():
    random = torch.Generator().manual_seed(3)
    expected = [rows for _ in range(2) for rows in torch.randperm(37, generator=random).split(8)]
    random = torch.Generator().manual_seed(3)
    batches = [*itertools.islice(training_batches(37, 8, random), 10)]
    for rows, batch in zip(expected, batches, strict=True):
        assert np.array_equal(rows.numpy(), batch)


def test_batches_by_length_have_much_less_padding():
    by_chance, alike, sorted_ones = (
        padded_tokens(batches) - LENGTHS.sum()
        for batches in (
            a_pass(1000, 16, None), a_pass(1000, 16, LENGTHS), evaluation_batches(1000, 16, LENGTHS)
        )
    )  # fmt: skip
    assert alike < 0.4 * by_chance
    assert sorted_ones < 0.1 * by_chance


def test_batches_by_length_still_differ_from_pass_to_pass():
    """Neither a batch's examples nor the order of lengths is fixed, and no batch is short."""
    passes = [a_pass(100, 8, LENGTHS, skip=skip) for skip in range(40)]
    assert len({frozenset(map(int, rows)) for batches in passes for rows in batches}) > 300
    longest_at = {int(np.argmax([LENGTHS[rows].max() for rows in one])) for one in passes}
    assert len(longest_at) > 5
    short = [np.mean(LENGTHS[rows]) for batches in passes for rows in batches if len(rows) < 8]
    assert len(short) == 40
    assert min(short) < np.median(LENGTHS[:100]) < max(short)
    assert POOL * 8 < 100  # so that there are several pools


@pytest.mark.parametrize(("number", "batch_size"), NUMBERS)
def test_an_evaluation_has_every_example_once(number, batch_size):
    for lengths in (None, LENGTHS[:number]):
        batches = evaluation_batches(number, batch_size, lengths)
        assert sorted(np.concatenate(batches)) == list(range(number))
        assert max(map(len, batches)) <= batch_size
        assert len(batches) == -(-number // batch_size)
    inner = [LENGTHS[rows] for rows in evaluation_batches(number, batch_size, LENGTHS[:number])]
    assert list(np.concatenate(inner)) == sorted(LENGTHS[:number], reverse=True)


def test_only_texts_have_lengths():
    assert read_config({"preset": "glue-llama", "batching": "length"}).batching == "length"
    with pytest.raises(ValueError, match=r"batching = 'length': .*digits-vit.yaml has no texts"):
        read_config({"batching": "length"})
    with pytest.raises(ValueError, match="batching 'lenght' is unknown: did you mean 'length'"):
        read_config({"batching": "lenght"})
