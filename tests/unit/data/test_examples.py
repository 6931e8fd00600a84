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


# For any number of clients; see test_other_partitions.
COMPLETE = ("iid", "dirichlet", "dirichlet-by-client")


@pytest.mark.parametrize("kind", COMPLETE)
@pytest.mark.parametrize("number", [1, 2, 20, 100])
def test_partitions_are_disjoint_complete_and_a_function_of_the_seed(splits, kind, number):
    def partition(seed):
        return partition_rows(splits["train"], Partition(kind, 0.3, number, seed), "label")

    rows_of_clients = partition(0)
    assert len(rows_of_clients) == number
    assert sorted(np.concatenate(rows_of_clients)) == list(range(1438))
    assert all(np.array_equal(a, b) for a, b in zip(rows_of_clients, partition(0), strict=True))
    assert min(map(len, rows_of_clients)) >= 1
    if number > 1:
        assert any(
            not np.array_equal(a, b) for a, b in zip(rows_of_clients, partition(1), strict=True)
        )


OTHERS = [
    ("natural", 10), ("pathological", 20), ("shards", 20),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "number"), OTHERS)
def test_other_partitions_are_disjoint_and_a_function_of_the_seed(splits, kind, number):
    def partition(seed):
        return partition_rows(splits["train"], Partition(kind, 2, number, seed), "label")

    rows_of_clients, rows = partition(0), np.concatenate(partition(0))
    assert len(rows_of_clients) == number
    assert min(map(len, rows_of_clients)) >= 1
    assert len(set(rows.tolist())) == len(rows)
    assert len(rows) == 1438 if kind != "shards" else 1438 - 40 < len(rows) <= 1438
    assert all(np.array_equal(a, b) for a, b in zip(rows_of_clients, partition(0), strict=True))
    other = any(
        not np.array_equal(a, b) for a, b in zip(rows_of_clients, partition(1), strict=True)
    )
    assert other == (kind != "natural")


def test_every_partition_is_a_choice():
    assert {*COMPLETE, *(kind for kind, _ in OTHERS)} == set(PARTITIONERS)
    assert set(PARTITIONERS) == set(KEYS["partition"].forms)
    assert set(BY_COLUMN) == {word for word, parts in KEYS["partition"].forms.items() if parts}


def test_unassigned_examples_are_reported(splits, caplog):
    caplog.set_level("INFO")
    partition_rows(splits["train"], Partition("shards", 2, 20, 0), "label")
    assert "partition=shards: 38 of 1438 examples belong to no client" in caplog.text


def test_an_iid_partition_reads_no_column(splits):
    rows_of_clients = partition_rows(splits["train"], Partition("iid", 0.3, 5, 0), "user")
    expected = partition_rows(splits["train"], Partition("iid", 0.3, 5, 0), "label")
    assert all(np.array_equal(a, b) for a, b in zip(rows_of_clients, expected, strict=True))


def test_dirichlet_partitions_are_more_skewed_than_iid(splits):
    labels = np.array(splits["train"]["label"][:])

    def unevenness(kind):
        rows_of_clients = partition_rows(splits["train"], Partition(kind, 0.3, 20, 0), "label")
        shares = [np.bincount(labels[rows], minlength=10) / len(rows) for rows in rows_of_clients]
        return np.mean([np.max(share) for share in shares])

    assert unevenness("dirichlet") > 0.35
    assert unevenness("iid") < 0.25


def test_more_clients_than_examples_are_refused(splits):
    with pytest.raises(ValueError, match="2000 clients share 1438 examples"):
        partition_rows(splits["train"], Partition("iid", 0.3, 2000, 0), "label")


def test_an_impossible_dirichlet_partition_suggests_a_larger_alpha(splits):
    with pytest.raises(
        ValueError, match=r"partition = 'dirichlet:0.001': 50 clients .* raise alpha"
    ):
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
