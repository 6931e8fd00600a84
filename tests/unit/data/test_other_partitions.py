"""Partitions by value, by shards and by few classes, against those of flwr-datasets."""

import datasets
import numpy as np
import pytest
from flwr_datasets import partitioner as theirs
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.data.partition import partition_few_classes, partition_naturally, partition_shards


def labels_of(number, classes, seed, texts):
    labels = np.random.default_rng(seed).integers(0, classes, number).tolist()
    labels[:classes] = range(classes)
    return [f"ü{label}" for label in labels] if texts else labels


def rows_of(partitioner, values, clients):
    rows = np.arange(len(values))
    partitioner.dataset = datasets.Dataset.from_dict({"row": rows, "by": values})
    return [sorted(partitioner.load_partition(client)["row"]) for client in range(clients)]


def lists_of(parts):
    return [rows.tolist() for rows in parts]


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize(("clients", "number", "classes"), [(20, 1438, 10), (7, 200, 9)])
@pytest.mark.filterwarnings("ignore:Classes", "ignore:Specifying null_placement:FutureWarning")
def test_pathological_and_shard_partitions_equal_flowers(clients, number, classes, each, texts):
    values = labels_of(number, classes, each, texts)
    few = theirs.PathologicalPartitioner(clients, "by", each, "first-deterministic", seed=each)
    ours = partition_few_classes(values, clients, each, np.random.default_rng(each))
    assert lists_of(ours) == rows_of(few, values, clients)
    shards = theirs.ShardPartitioner(clients, "by", num_shards_per_partition=each, seed=each)
    ours = partition_shards(values, clients, each, np.random.default_rng(each))
    assert lists_of(ours) == rows_of(shards, values, clients)


@pytest.mark.parametrize("texts", [False, True])
def test_the_natural_partition_equals_flwr_datasets(texts):
    values = labels_of(300, 12, 0, texts)
    ours = partition_naturally(values, 12, "by")
    assert lists_of(ours) == rows_of(theirs.NaturalIdPartitioner("by"), values, 12)
    assert [{values[row] for row in rows} for rows in ours] == [{v} for v in sorted(set(values))]


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 4), st.integers(0, 99))
def test_every_client_has_an_example_or_the_partition_is_refused(clients, classes, each, seed):
    values = labels_of(120, classes, seed, texts=False)
    for partition_of in (partition_few_classes, partition_shards):
        try:
            parts = partition_of(values, clients, each, np.random.default_rng(seed))
        except ValueError as error:
            assert "expected at " in str(error)  # noqa: PT017
            continue
        rows = np.concatenate(parts).tolist()
        assert len(rows) == len(set(rows))
        assert min(map(len, parts)) >= 1
        if partition_of is partition_few_classes:
            assert {len({values[row] for row in part}) for part in parts} == {each}


@pytest.mark.parametrize(
    ("partition_of", "more", "message"),
    [
        (partition_few_classes, (3, 5), "partition = 'pathological:5': there are 4 different"),
        (partition_few_classes, (30, 2), "pathological': .* share the 10 examples of"),
        (partition_shards, (20, 3), "partition = 'shards:3': 20 clients have 60 shards"),
    ],
)
def test_impossible_partitions_are_refused(partition_of, more, message):
    with pytest.raises(ValueError, match=message):
        partition_of(["a", "b", "c", "d"] * 10, *more, np.random.default_rng(0))


def test_a_natural_partition_has_a_client_for_each_value():
    message = "num-clients = 3: .* each of the 4 different values of 'user'; leave .* num-clients=4"
    with pytest.raises(ValueError, match=message):
        partition_naturally(["a", "b", "c", "d"] * 10, 3, "user")
