"""Hand-made records of rounds, as a run writes them."""

import math
from typing import Any


def client(partition: int, **changes: Any) -> dict[str, Any]:
    return {
        "partition-id": partition, "budget-fraction": 0.5, "heads": 2, "selected": [[0, 2], [1, 3]],
        "examples": 72, "steps": 5, "train-loss": 1.0, "seconds": 3.25, "bytes-up": 25_000,
        "bytes-down": 51_000,
    } | changes  # fmt: skip


def record(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": number, "train-loss": 2.5 / number,
        "metrics": {"accuracy": 1 - math.exp(-number / 4), "loss": 2.3 / number},
        "clients": [client(number % 4), client(4)], "rejected": [], "not-eligible": [],
        "skipped": [],
        "unused": [], "partitions": 5, "bytes-up": 50_000, "bytes-down": 102_000, "seconds": 4.0,
        "phases": {"train": 3.0, "evaluate": 0.5},
    } | changes  # fmt: skip
