"""Partitions by value, by shards and by few classes, against those of flwr-datasets."""

import datasets
import numpy as np
import pytest
from flwr_datasets import partitioner as theirs
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.data.partition import (
    partition_few_classes,
    partition_naturally,
    partition_shards,
)


def labels_of(number, classes, seed, texts):
    labels = np.random.default_rng(seed).integers(0, classes, number).tolist()
    labels[:classes] = range(classes)
    return [f"ü{label}" for label in labels] if texts else labels


def rows_of(partitioner, values, clients):
    rows = np.arange(len(values))
    partitioner.dataset = datasets.Dataset.from_dict({"row": rows, "by": values})
    return [sorted(partitioner.load_partition(client)["row"]) for client in range(clients)]


def as_lists(dealt):
    return [rows.tolist() for rows in dealt]


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize(("clients", "number", "classes"), [(20, 1438, 10), (7, 200, 9)])
@pytest.mark.filterwarnings("ignore:Classes", "ignore:Specifying null_placement:FutureWarning")
def test_few_classes_and_shards_are_those_of_flwr_datasets(clients, number, classes, each, texts):
    values = labels_of(number, classes, each, texts)
    few = theirs.PathologicalPartitioner(clients, "by", each, "first-deterministic", seed=each)
    ours = partition_few_classes(values, clients, each, np.random.default_rng(each))
    assert as_lists(ours) == rows_of(few, values, clients)
    shards = theirs.ShardPartitioner(clients, "by", num_shards_per_partition=each, seed=each)
    ours = partition_shards(values, clients, each, np.random.default_rng(each))
    assert as_lists(ours) == rows_of(shards, values, clients)


@pytest.mark.parametrize("texts", [False, True])
def test_a_client_for_each_value_is_as_in_flwr_datasets(texts):
    values = labels_of(300, 12, 0, texts)
    ours = partition_naturally(values, 12, "by")
    assert as_lists(ours) == rows_of(theirs.NaturalIdPartitioner("by"), values, 12)
    assert [{values[row] for row in rows} for rows in ours] == [{v} for v in sorted(set(values))]


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 4), st.integers(0, 99))
def test_whoever_is_dealt_out_to_has_something_or_all_are_told(clients, classes, each, seed):
    values = labels_of(120, classes, seed, texts=False)
    for deal in (partition_few_classes, partition_shards):
        try:
            dealt = deal(values, clients, each, np.random.default_rng(seed))
        except ValueError as error:
            assert "expected at " in str(error)  # noqa: PT017
            continue
        rows = np.concatenate(dealt).tolist()
        assert len(rows) == len(set(rows))
        assert min(map(len, dealt)) >= 1
        if deal is partition_few_classes:
            assert {len({values[row] for row in mine}) for mine in dealt} == {each}


@pytest.mark.parametrize(
    ("deal", "message"),
    [
        (
            lambda v, r: partition_few_classes(v, 3, 5, r),
            "partition = 'pathological:5': there are 4 different",
        ),
        (
            lambda v, r: partition_few_classes(v, 30, 2, r),
            "pathological': .* share the 10 examples of",
        ),
        (
            lambda v, r: partition_shards(v, 20, 3, r),
            "partition = 'shards:3': 20 clients have 60 shards",
        ),
        (
            lambda v, _: partition_naturally(v, 3, "user"),
            "num-clients = 3: .* each of the 4 different values of 'user'; leave .* num-clients=4",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(deal, message):
    with pytest.raises(ValueError, match=message):
        deal(["a", "b", "c", "d"] * 10, np.random.default_rng(0))
