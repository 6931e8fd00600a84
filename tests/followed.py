"""Hand-made run directories, as a run leaves them at some moment, for tests of the dashboard."""

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

NOW = 1_795_000_000.0


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


def node(partition: int, **changes: Any) -> dict[str, Any]:
    return {
        "partition-id": partition, "budget-fraction": 0.5, "device": "cuda:0", "examples": 72,
        "own-data": False, "versions": "flwr 1.41.0", "heard": NOW - 60 * partition,
    } | changes  # fmt: skip


def status(**changes: Any) -> Any:
    return {
        "doing": "training", "since": NOW - 21, "round": 4, "rounds": 10, "asked": [0, 4],
        "answered": [4], "partitions": 5, "nodes": [node(0), node(4)], "refused": [],
    } | changes  # fmt: skip


def lines(folder: Path, records: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(item) + "\n" for item in records)
    (folder / "rounds.jsonl").write_text(text)


def run_in(folder: Path, rounds: int = 3, pid: int | None = None, **files: Any) -> Path:
    """Write a run with `rounds` of ten rounds done, locked by `pid` (0: none, None: this one)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "method": "ravan",
        "preset": "digits-vit",
        "seed": 0,
        "num-rounds": 10,
        "report": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    lines(folder, [record(number) for number in range(1, rounds + 1)])
    (folder / "status.json").write_text(json.dumps(status()))
    (folder / "log.txt").write_text("2026-11-22 07:14:27 INFO    round 1/10  loss 2.8400\n")
    if pid != 0:
        holder = f"process {os.getpid() if pid is None else pid} on {socket.gethostname()}"
        (folder / "lock").write_text(holder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
