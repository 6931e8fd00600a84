"""The examples of a data set, and their partition over clients."""

import numpy as np
import pytest

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import read_config
from ravan_flwr.data.examples import load_splits
from ravan_flwr.data.partition import BY_COLUMN, PARTITIONERS, Partition, partition_rows
from ravan_flwr.specs import DataSpec
from ravan_flwr.training.model_and_data import ModelAndData

SPEC = DataSpec("sklearn-digits", columns=(("image", "image"), ("label", "label")))


@pytest.fixture(scope="module")
def splits():
    return load_splits(SPEC)


def test_digits_are_split_four_to_one_by_class(splits):
    assert {name: len(split) for name, split in splits.items()} == {"train": 1438, "test": 359}
    shares = [np.bincount(split["label"][:]) / len(split) for split in splits.values()]
    np.testing.assert_allclose(shares[0], shares[1], atol=0.005)
    assert splits["test"]["label"][:20] == load_splits(SPEC)["test"]["label"][:20]


CASES = [
    ("iid", 1), ("iid", 100), ("dirichlet", 1), ("dirichlet", 20), ("dirichlet-by-client", 1),
    ("dirichlet-by-client", 100), ("natural", 10), ("pathological", 20), ("shards", 20),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_partitions_are_disjoint_complete_and_a_function_of_the_seed(splits, kind, number):
    def partition(seed):
        parameter = 2 if kind in ("pathological", "shards") else 0.3
        spec = Partition(kind, parameter, number, seed)
        return [rows.tolist() for rows in partition_rows(splits["train"], spec, "label")]

    parts = partition(0)
    rows = [row for part in parts for row in part]
    assert len(parts) == number
    assert min(map(len, parts)) >= 1
    assert len(set(rows)) == len(rows)
    if kind == "shards":
        assert 1438 - 40 < len(rows) <= 1438
    else:
        assert sorted(rows) == list(range(1438))
    assert partition(0) == parts
    members = [[sorted(part) for part in partition(seed)] for seed in (0, 1)]
    assert (members[0] != members[1]) == (kind != "natural" and number > 1)


def test_every_partition_is_a_choice():
    assert {kind for kind, _ in CASES} == set(PARTITIONERS)
    assert set(PARTITIONERS) == set(KEYS["partition"].variants)
    assert set(BY_COLUMN) == {word for word, parts in KEYS["partition"].variants.items() if parts}


def test_unassigned_examples_are_reported(splits, caplog):
    caplog.set_level("INFO")
    partition_rows(splits["train"], Partition("shards", 2, 20, 0), "label")
    assert "partition=shards: 38 of 1438 examples belong to no client" in caplog.text


def test_an_iid_partition_reads_no_column(splits):
    rows_of_clients = partition_rows(splits["train"], Partition("iid", 0.3, 5, 0), "user")
    expected = partition_rows(splits["train"], Partition("iid", 0.3, 5, 0), "label")
    assert all(np.array_equal(a, b) for a, b in zip(rows_of_clients, expected, strict=True))


def test_an_impossible_dirichlet_partition_suggests_a_larger_alpha(splits):
    with pytest.raises(ValueError, match=r"'dirichlet:0.001': 50 clients .* raise alpha"):
        partition_rows(splits["train"], Partition("dirichlet", 0.001, 50, 0), "label")


def test_a_validation_split_is_not_trained_on():
    loaded = ModelAndData(read_config({"validation-share": 0.2, "evaluate-on": "clients"}))
    without = ModelAndData(read_config({})).partition(3, 20)
    part = loaded.partition(3, 20)
    assert len(part.validation) == int(np.ceil(0.2 * len(without.train)))
    assert sorted([*part.train.rows, *part.validation.rows]) == sorted(without.train.rows)
    assert np.array_equal(part.validation.rows, loaded.partition(3, 20).validation.rows)
    config = read_config({"validation-share": 0.2, "partition": "iid"})
    with pytest.raises(ValueError, match="validation-share = 0.2: a client with 1 example "):
        ModelAndData(config).partition(5, 1438)
