"""Processes that begin at the same time encode the examples once."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
from datasets import Value

from ravan_flwr.tasks.base import encoded_as_it_is, mapped


def test_whoever_comes_second_finds_what_the_first_has_made(tmp_path):
    """Each reads the data set by itself, as a process does; a lock is a process's or a thread's."""
    datasets.Dataset.from_dict({"x": list(range(600))}).save_to_disk(tmp_path / "data")
    batches = []

    def function(columns):
        batches.append(len(columns["x"]))
        time.sleep(0.05)  # time for the other to begin
        return {"y": 2 * np.asarray(columns["x"])}

    def encoded(_):
        examples = datasets.load_from_disk(str(tmp_path / "data"))
        made = mapped(examples, function, {"y": Value("int64")}, {})
        return encoded_as_it_is(made).table["y"].tolist()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(encoded, range(2))
    assert one == other == list(range(0, 1200, 2))
    assert sum(batches) == 600
    # Who comes later finds it, and nothing is locked; what is in memory alone has no cache.
    assert encoded(0) == one
    for lock in Path(tmp_path).rglob("*.lock"):
        lock.unlink()
    assert encoded(0) == one
    assert not [*Path(tmp_path).rglob("*.lock")]
    alone = datasets.Dataset.from_dict({"x": [1, 2]})
    made = encoded_as_it_is(mapped(alone, function, {"y": Value("int64")}, {}))
    assert made.table["y"].tolist() == [2, 4]
