"""Partitioning by a column, for values of any type."""

import datetime
import time

import datasets
import numpy as np
import pytest

from ravan_flwr.data.partition import (
    Partition,
    find_column,
    numbered,
    partition_rows,
    read_values,
    rows_by_number,
)
from ravan_flwr.specs import DataSpec


def examples(values, feature=None):
    features = datasets.Features({"user": feature}) if feature is not None else None
    return datasets.Dataset.from_dict({"user": values}, features=features)


@pytest.mark.parametrize(
    "values",
    [
        ["ann", "bob", "ann"],
        ["\u202eann", "a\x00", "a", "e\u0301", "\u00e9", "\U0001f600", "", " ", "\x1b[2J"],
        [3, -1, 10**12, 3],
        [0.5, -0.5, 1e300, float("inf")],
        [True, False, True],
        [datetime.date(2026, 1, day) for day in (3, 1, 3)],
        ["x"],
    ],
    ids=["texts", "odd texts", "numbers", "decimals", "truths", "dates", "one"],
)
def test_each_value_is_a_client(values):
    train = examples(values)
    distinct = sorted(set(values))
    parts = partition_rows(train, Partition("natural", 2, len(distinct), 0), "user")
    expected = [[row for row, value in enumerate(values) if value == client] for client in distinct]
    assert [rows.tolist() for rows in parts] == expected


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-by-client", "natural", "shards"])
@pytest.mark.parametrize(
    ("train", "message"),
    [
        (examples(["a", None, "b", None]), "2 of 4 examples have no value .* first .* example 1;"),
        (examples([0.5, float("nan")]), "1 of 2 examples have no value"),
        (examples([0, -1], datasets.ClassLabel(names=["x"])), r"or class -1\), the first"),
        (examples([None, None]), "2 of 2 examples have no value"),
        (examples([["a"], ["b"]]), "it holds (List|Sequence|LargeList) values, expected texts"),
        (examples([{"a": 1}, {"a": 2}]), "it holds dict values, expected texts, numbers or"),
        (examples([b"a", b"b"]), "it holds Value values, expected texts"),
        (datasets.Dataset.from_dict({"x": [1, 2]}), r"the examples have \['x'\], expected one"),
    ],
)
def test_values_that_cannot_name_clients_are_refused_by_name(train, message, kind):
    with pytest.raises(ValueError, match=f"got the column 'user': .*{message}"):
        partition_rows(train, Partition(kind, 2, 1, 0), "user")


def test_a_hundred_thousand_values_are_partitioned_quickly():
    values = [f"user {number}" for number in range(100_000)] + ["x" * 10**6]
    began = time.process_time()
    distinct, numbers = numbered(values)
    rows = rows_by_number(numbers, len(distinct))
    assert time.process_time() - began < 20  # 0.3 s; each value against all would take hours
    assert len(rows) == 100_001
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(values)))


def test_a_column_is_found_by_its_name_and_by_its_role():
    spec = DataSpec("hub", columns=(("text", "body"), ("label", "topic")))
    for by, column in (("label", "label"), ("topic", "label"), ("user", "user"), ("body", "text")):
        assert find_column(DataSpec("hub", columns=spec.columns, partition_by=by)) == column
    assert read_values(examples(["a"]), "user") == ["a"]
