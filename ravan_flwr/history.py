"""What run directories tell, and which runs are seeds of one thing.

Only records are read: `config.json`, `rounds.jsonl` and, of a finished run, `summary.json`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravan_flwr.records import Record, RunDirectory

# Settings in which runs may differ and still be seeds of one thing.
_NOT_A_DIFFERENCE = {
    "seed", "output-dir", "resume", "device", "round-timeout", "report", "tracking",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a run directory tells."""

    path: Path
    config: Record
    rounds: list[Record]  # a calibration round first, if there was one
    summary: Record | None  # None: it has not finished

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read a run directory; ValueError if it is none, or no round has ended."""
        directory = RunDirectory.open(path, "report")
        rounds = directory.read_rounds()
        if not any(record["round"] for record in rounds):
            raise ValueError(
                f"report: {path} has no finished round, expected at least one; run it longer"
            )
        done = (path / "summary.json").is_file()
        summary = directory.read_json("summary.json") if done else None
        config = directory.read_json("config.json")
        if summary:  # the preset's number stands in the configuration, the true one here
            config["num-clients"] = summary["num-clients"]
        return cls(path, config, rounds, summary)

    @property
    def metric(self) -> str:
        """The name of what was measured beside the loss."""
        names = {name for record in self.rounds for name in record["metrics"]} - {"loss"}
        return min(names, default="loss")

    def bytes_so_far(self) -> list[float]:
        """Megabytes both ways, up to the end of each round."""
        total, so_far = 0, []
        for record in self.rounds:
            total += record["bytes-up"] + record["bytes-down"]
            so_far.append(total / 1e6)
        return so_far

    def measured(self, name: str, *, by_bytes: bool = False) -> tuple[list[float], list[float]]:
        """The rounds, or megabytes, at which a metric was measured, and its values."""
        at = self.bytes_so_far() if by_bytes else [record["round"] for record in self.rounds]
        pairs = zip(at, self.rounds, strict=True)
        points = [(x, record["metrics"][name]) for x, record in pairs if name in record["metrics"]]
        return [x for x, _ in points], [y for _, y in points]

    def train_loss(self) -> tuple[list[float], list[float]]:
        """The clients' mean loss by round."""
        records = [record for record in self.rounds if record["round"]]
        return [r["round"] for r in records], [r["train-loss"] for r in records]


Groups = dict[str, list[Run]]


def group_runs(runs: Sequence[Run]) -> Groups:
    """Runs that differ in the seed alone, under a name made of what sets them apart."""
    keys = [
        key
        for key in runs[0].config
        if key not in _NOT_A_DIFFERENCE and len({_text(run.config.get(key)) for run in runs}) > 1
    ]
    if "method" in keys:  # its rate and rank go with it
        keys = [key for key in keys if key not in {"learning-rate", "rank"}]
    groups: Groups = {}
    for run in runs:
        named = [run.config[key] if key == "method" else f"{key} {run.config[key]}" for key in keys]
        groups.setdefault(", ".join(map(str, named)) or str(run.config["method"]), []).append(run)
    return groups


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
