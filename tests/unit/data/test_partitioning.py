"""Partitions equal those of flwr-datasets; `dirichlet-by-client` draws proportions by client."""

import warnings

import datasets
import numpy as np
import pytest
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.data.partition import (
    PARTITIONERS,
    Partition,
    counts_by_client,
    partition_by_class,
    partition_by_client,
    partition_rows,
)

CLASSES = 10


def labels_of(number, seed=0):
    return np.random.default_rng(seed).integers(0, CLASSES, number)


def fractions_of(labels, parts):
    return np.array([np.bincount(labels[rows], minlength=CLASSES) / len(rows) for rows in parts])


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**31),
    st.integers(0, 300),
)
def test_each_example_has_one_client_and_sizes_are_equal(clients, classes, alpha, seed, more):
    labels = np.random.default_rng(seed).integers(0, classes, clients + more)
    parts = partition_by_client(labels, clients, alpha, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    sizes = [len(rows) for rows in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("alpha", [1e-300, 1e-12, 1e6])
def test_extreme_values_of_alpha_give_equal_sizes(alpha):
    labels = labels_of(600)
    parts = partition_by_client(labels, 6, alpha, np.random.default_rng(0))
    assert [len(rows) for rows in parts] == [100] * 6


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
def test_class_fractions_are_as_skewed_as_numpys_dirichlet_draws(alpha):
    labels = labels_of(40_000)
    parts = partition_by_client(labels, 200, alpha, np.random.default_rng(0))
    drawn = np.random.default_rng(12345).dirichlet([alpha] * CLASSES, size=20_000)
    fractions = fractions_of(labels, parts)
    for order in (1, 2, 3):  # the largest fraction of a client, the second, the third
        mean = np.sort(fractions, 1)[:, -order].mean()
        assert mean == pytest.approx(np.sort(drawn, 1)[:, -order].mean(), abs=0.03)


def test_class_fractions_follow_the_clients_own_draw():
    labels = labels_of(40_000)
    parts = partition_by_client(labels, 200, 0.3, np.random.default_rng(7))
    # The partitioner's first draw.
    drawn = np.random.default_rng(7).dirichlet([0.3] * CLASSES, size=200)
    assert np.abs(fractions_of(labels, parts) - drawn).sum(1).mean() < 0.2


def test_counts_equal_the_drawn_ones_where_these_add_up():
    drawn = np.array([[0.5, 0.5], [0.25, 0.75]])
    counts = counts_by_client(drawn, np.array([8, 8]), np.array([6, 10]))
    assert counts.tolist() == [[4, 4], [2, 6]]


def test_a_class_without_a_draw_is_partitioned_as_well():
    drawn = np.array([[1.0, 0.0], [1.0, 0.0]])
    counts = counts_by_client(drawn, np.array([5, 5]), np.array([4, 6]))
    assert counts.sum(0).tolist() == [4, 6]
    assert counts.sum(1).tolist() == [5, 5]


def parts_of(partitioner, rows, clients):
    partitioner.dataset = rows
    return [partitioner.load_partition(number)["row"][:] for number in range(clients)]


@pytest.mark.parametrize(("number", "clients"), [(1438, 20), (50, 49), (7, 7), (10, 1)])
def test_iid_partitions_equal_flwr_datasets(number, clients):
    rows = datasets.Dataset.from_dict({"row": np.arange(number)}).shuffle(seed=5)
    theirs = parts_of(IidPartitioner(clients), rows, clients)
    iid = Partition("iid", 0, clients, 0)
    ours = PARTITIONERS["iid"](range(number), iid, np.random.default_rng(5), "")
    assert [part.tolist() for part in ours] == theirs


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(
    ("number", "clients", "alpha", "classes"),
    [
        (1438, 20, 0.3, 10),
        (500, 100, 1.0, 7),
        (300, 7, 0.05, 20),
        (200, 1, 0.3, 3),
        (60, 40, 0.3, 4),
    ],
)
def test_dirichlet_partitions_equal_flwr_datasets(number, clients, alpha, classes, texts):
    """To the bit, for any number of draws; neither can partition the last case."""
    labels = np.random.default_rng(number).integers(0, classes, number)
    labels = np.array([f"class {label}" for label in labels]) if texts else labels
    rows = datasets.Dataset.from_dict({"row": np.arange(number), "label": labels})
    least = max(1, min(10, number // (4 * clients)))
    ours = partition_by_class(labels, clients, alpha, least, np.random.default_rng(7))
    partitioner = DirichletPartitioner(clients, "label", alpha, least, seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (number, clients) == (60, 40):
            assert ours is None
            with pytest.raises(ValueError, match="number of attempts"):
                parts_of(partitioner, rows, clients)
            return
        theirs = parts_of(partitioner, rows, clients)
    assert ours is not None
    assert [part.tolist() for part in ours] == theirs


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "dirichlet-by-client"])
def test_partitioning_reads_the_data_equally_often_for_any_number_of_clients(kind, monkeypatch):
    reads_done = []
    for name in ("select", "shard", "__getitem__", "with_format"):
        inner = getattr(datasets.Dataset, name)

        def counting(*args, inner=inner, **kwargs):
            reads_done.append(inner.__name__)
            return inner(*args, **kwargs)

        monkeypatch.setattr(datasets.Dataset, name, counting)
    examples = datasets.Dataset.from_dict({"label": labels_of(20_000)})

    def reads(clients):
        reads_done.clear()
        parts = partition_rows(examples, Partition(kind, 50.0, clients, 0), "label")
        assert sorted(np.concatenate(parts)) == list(range(20_000))
        assert min(map(len, parts)) >= 1
        return len(reads_done)

    assert reads(2_000) == reads(2) < 10


def test_too_many_clients_for_a_dirichlet_partition_are_refused_early():
    examples = datasets.Dataset.from_dict({"label": labels_of(2_000)})
    with pytest.raises(ValueError, match=r"1000 clients got fewer than 1 of 2000 .* 220 draws; "):
        partition_rows(examples, Partition("dirichlet", 0.1, 1000, 0), "label")
    with pytest.raises(ValueError, match="2001 clients share 2000 examples"):
        partition_rows(examples, Partition("iid", 0.3, 2001, 0), "label")


def test_as_many_clients_as_examples_have_one_each():
    examples = datasets.Dataset.from_dict({"label": labels_of(3_000)})
    for kind in ("iid", "dirichlet-by-client"):
        parts = partition_rows(examples, Partition(kind, 0.3, 3_000, 0), "label")
        assert [len(rows) for rows in parts] == [1] * 3_000
