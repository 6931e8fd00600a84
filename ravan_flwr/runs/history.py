"""Read run directories, and group runs that differ in the seed alone.

Only records are read: `config.json`, `rounds.jsonl` and, of a finished run, `summary.json`.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from ravan_flwr.config.keys import NOT_OF_RESULT
from ravan_flwr.methods import METHODS
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord, Summary

# Runs that differ in these alone are seeds of one thing.
_NOT_A_DIFFERENCE = NOT_OF_RESULT | {"seed"}
NEEDED_SETTINGS = {"method", "preset", "seed", "num-rounds"}


class NoRoundError(ValueError):
    """Say that a run has held no round, so that there is nothing to report yet."""


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run directory."""

    path: Path
    config: dict[str, Any]
    rounds: list[RoundRecord]  # a calibration round first, if there was one
    summary: Summary | None  # None: it has not finished

    @classmethod
    def read(cls, path: Path) -> "RecordedRun":
        """Read a run directory; ValueError if it is none, or no round has ended."""
        directory = RunDirectory.open(path, "report")
        rounds = directory.read_rounds()
        if not any(record["round"] for record in rounds):
            raise NoRoundError(
                f"report: {path} has no finished round, expected at least one; run it longer"
            )
        done = (path / "summary.json").is_file()
        summary = directory.read_summary() if done else None
        config = directory.read_config()
        if lacking := sorted(NEEDED_SETTINGS - config.keys()):
            raise ValueError(
                f"report: {path / 'config.json'} lacks {', '.join(lacking)}, expected the "
                "settings of a run; restore it, or use the version that made the run"
            )
        # There it is the preset's. Devices with their own data may have become fewer.
        config["num-clients"] = max(record["partitions"] for record in rounds)
        return cls(path, config, rounds, summary)

    @property
    def metrics(self) -> set[str]:
        """Return the names of all metrics that were measured."""
        return {name for record in self.rounds for name in record["metrics"]}

    def bytes_so_far(self) -> list[float]:
        """Sum the megabytes sent both ways, up to the end of each round."""
        sent = accumulate(record["bytes-up"] + record["bytes-down"] for record in self.rounds)
        return [total / 1e6 for total in sent]

    @property
    def in_simulated_time(self) -> bool:
        """Return whether its clients took the time of simulated devices."""
        return self.config.get("devices") is not None and all("time" in r for r in self.rounds)

    @property
    def has_time_of_devices(self) -> bool:
        """Return whether its time is that of devices: of simulated ones, or of SuperNodes."""
        real = all("link-bytes-estimate" in r and "time" in r for r in self.rounds)
        return real or self.in_simulated_time

    def by_time(self, name: str, unit: float = 1.0) -> tuple[list[float], list[float]]:
        """Return the time at which a metric was measured, in units of seconds, and its values."""
        found = [r for r in self.rounds if name in r["metrics"]]
        return [r["time"] / unit for r in found], [r["metrics"][name] for r in found]

    def measured(self, name: str, *, by_bytes: bool = False) -> tuple[list[float], list[float]]:
        """Return the rounds, or megabytes, at which a metric was measured, and its values."""
        at = self.bytes_so_far() if by_bytes else [record["round"] for record in self.rounds]
        pairs = zip(at, self.rounds, strict=True)
        points = [(x, record["metrics"][name]) for x, record in pairs if name in record["metrics"]]
        return [x for x, _ in points], [y for _, y in points]

    def train_loss(self) -> tuple[list[float], list[float]]:
        """Return the rounds and the clients' mean loss in each."""
        records = [r for r in self.rounds if r["round"] and "train-loss" in r]
        return [r["round"] for r in records], [r["train-loss"] for r in records]

    def heads_trained(self, known: int = 0) -> list[list[int]]:
        """Count in how many replies each head was: layers by heads, of which `known` are known."""
        replies = [client["selected"] for r in self.rounds if r["round"] for client in r["clients"]]
        if not replies:
            return []
        layers = [Counter(chain(*trained)) for trained in zip(*replies, strict=True)]
        heads = range(max([known, *(head + 1 for layer in layers for head in layer)]))
        return [[layer[head] for head in heads] for layer in layers]


Groups = dict[str, list[RecordedRun]]


def common_metric(runs: Sequence[RecordedRun]) -> str:
    """Choose a metric that all evaluated runs have, another than the loss if there is one."""
    evaluated = [run for run in runs if run.metrics]
    common = set.intersection(*(run.metrics for run in evaluated)) if evaluated else set()
    if evaluated and not common:
        raise ValueError(
            f"report: the runs have measured {sorted(set.union(*(r.metrics for r in evaluated)))}, "
            "and none of it in all of them; expected a metric in common; report them apart"
        )
    return min(common - {"loss"}, default="loss")


def group_runs(runs: Sequence[RecordedRun]) -> Groups:
    """Group runs that differ in the seed alone, each under a name of what sets it apart."""
    known = dict.fromkeys(key for run in runs for key in run.config)
    keys = [
        key
        for key in known
        if key not in _NOT_A_DIFFERENCE
        and len({_text(run.config.get(key)) for run in runs if not _ignores(run, key)}) > 1
    ]
    if "preset" in keys:  # what it says goes with it
        keys = [key for key in keys if key not in {"task", "model", "data"}]
    # Where a setting goes with another one, it says nothing more.
    for key in {"learning-rate", "rank", "validation-share"}.intersection(keys):
        other = "evaluate-on" if key == "validation-share" else "method"
        pairs = {(_text(run.config.get(other)), _text(run.config.get(key))) for run in runs}
        if len(pairs) == len({one for one, _ in pairs}):
            keys.remove(key)
    groups: Groups = {}
    for run in runs:
        values = {key: run.config.get(key) for key in keys if not _ignores(run, key)}
        named = [  # a setting that is not set sets nothing apart
            value if key == "method" else f"{key} {value}"
            for key, value in values.items()
            if value is not None
        ]
        groups.setdefault(", ".join(map(str, named)) or str(run.config["method"]), []).append(run)
    return groups


def _ignores(run: RecordedRun, key: str) -> bool:
    """Tell whether the run's method does nothing with a setting."""
    method = METHODS.get(run.config["method"])
    return method is not None and key in method.ignored


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
