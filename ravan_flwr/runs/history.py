"""Read run directories, and group runs that differ only in the seed.

Only records are read: `config.json`, `rounds.jsonl` and, of a finished run, `summary.json`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravan_flwr.config.keys import NOT_OF_RESULT
from ravan_flwr.methods import METHODS
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.lock import NAME as LOCK
from ravan_flwr.runs.record import RoundRecord, Summary

# Runs that differ only in these keys are one group.
_NOT_A_DIFFERENCE = NOT_OF_RESULT | {"seed"}
_CHOSEN_FOR_THEM = {"task", "model", "data", "learning-rate", "rank"}  # for method and preset
_LETTERS = 48  # of a setting in a group's name, and of the names of many groups
_FEW = 3  # groups, whose names may be longer
NEEDED_SETTINGS = {"method", "preset", "seed", "num-rounds"}


# "round", "bytes", "client-seconds", "time" and each metric: a value for each evaluation
Curve = dict[str, list[int | float]]


def make_curve(rounds: Sequence[RoundRecord], metric: str) -> Curve:
    """Return metrics, and cumulative bytes and seconds, of rounds that measured `metric`."""
    curve: Curve = {}
    sent = seconds = 0.0
    for record in rounds:
        sent += record["bytes-up"] + record["bytes-down"]
        seconds += client_seconds(record)
        if metric in record["metrics"]:
            point = {
                "round": record["round"],
                "bytes": sent,
                "client-seconds": round(seconds, 3),
                "time": record.get("time", 0.0),
            }
            for name, value in (point | record["metrics"]).items():
                curve.setdefault(name, []).append(value)
    return curve


def client_seconds(record: RoundRecord) -> float:
    """Sum the seconds that the clients of a round report."""
    return sum(client.get("seconds", 0.0) for client in record["clients"])


class NoRoundError(ValueError):
    """Raised for a run without a finished round, which has nothing to report."""


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run directory."""

    path: Path
    config: dict[str, Any]
    rounds: list[RoundRecord]  # a calibration round first, if there was one
    summary: Summary | None  # None: it has not finished

    @classmethod
    def read(cls, path: Path) -> "RecordedRun":
        """Read a run directory; raise ValueError if it is none, or has no finished round."""
        # A run takes its lock before it writes its settings.
        begun = (path / LOCK).is_file()
        directory = RunDirectory(path) if begun else RunDirectory.open(path, "report")
        rounds = directory.read_rounds()
        if not any(record["round"] for record in rounds):
            raise NoRoundError(
                f"report: {path} has no finished round, expected a run with one; name a run "
                "directory, or run it longer"
            )
        config = directory.read_config()
        if lacking := sorted(NEEDED_SETTINGS - config.keys()):
            raise ValueError(
                f"report: {path / 'config.json'} lacks {', '.join(lacking)}, expected the "
                "settings of a run; restore it, or use the version that made the run"
            )
        # The largest number: devices with their own data may have left during the run.
        config["num-clients"] = max(record["partitions"] for record in rounds)
        has_summary = (path / "summary.json").is_file()
        return cls(path, config, rounds, directory.read_summary() if has_summary else None)

    @property
    def metrics(self) -> set[str]:
        """Return the names of all measured metrics."""
        return {name for record in self.rounds for name in record["metrics"]}

    def curve(self, metric: str) -> Curve:
        """Return the curve of a metric, by round and by cost."""
        return make_curve(self.rounds, metric)

    @property
    def in_simulated_time(self) -> bool:
        """Return whether the run's time is that of simulated devices."""
        return self.config.get("devices") is not None and all("time" in r for r in self.rounds)

    @property
    def has_time_of_devices(self) -> bool:
        """Return whether the run's time is that of devices, simulated ones or SuperNodes."""
        real = all("link-bytes-estimate" in r and "time" in r for r in self.rounds)
        return real or self.in_simulated_time

    def train_loss(self) -> tuple[list[float], list[float]]:
        """Return the rounds, and the clients' mean training loss in each."""
        records = [r for r in self.rounds if r["round"] and "train-loss" in r]
        return [r["round"] for r in records], [r["train-loss"] for r in records]


Groups = dict[str, list[RecordedRun]]


def common_metric(runs: Sequence[RecordedRun]) -> str:
    """Return a metric that all evaluated runs have measured, preferably not a loss."""
    evaluated = [run for run in runs if run.metrics]
    common = set.intersection(*(run.metrics for run in evaluated)) if evaluated else set()
    if evaluated and not common:
        raise ValueError(
            f"report: the runs have measured {sorted(set.union(*(r.metrics for r in evaluated)))}, "
            "and none of these in all runs; expected a common metric; report the runs separately"
        )
    return min((x for x in common if x.partition("-")[0] != "loss"), default="loss")


def group_runs(runs: Sequence[RecordedRun]) -> Groups:
    """Group runs that differ only in the seed; a group's name lists its differing settings.

    A field of the model or the data is a setting of its own. Long values are shortened.
    """
    all_keys = dict.fromkeys(key for run in runs for key in _settings(run))
    keys = [
        key
        for key in all_keys
        if _top(key) not in _NOT_A_DIFFERENCE
        and len({repr(_settings(run).get(key)) for run in runs if not _ignores(run, key)}) > 1
    ]
    causes = {"method", "preset"}
    chosen = causes.union(*map(_given, runs))
    federations = {(run.config.get("preset"), run.config.get("num-clients")) for run in runs}
    if len(federations) > len({preset for preset, _ in federations}):
        chosen.add("num-clients")
    for key in [key for key in keys if _top(key) not in chosen or _top(key) in _CHOSEN_FOR_THEM]:
        # It is left out where all others, or if it was chosen the method and preset, determine it.
        rest = [x for x in keys if x != key and (x in causes or _top(key) not in chosen)]
        if len({_values(run, rest) for run in runs}) == len(
            {_values(run, [*rest, key]) for run in runs}
        ):
            keys.remove(key)
    number = len({_values(run, keys) for run in runs})
    for key in reversed(keys) if number > _FEW else ():
        # A legend has no room for many long names: leave out what the others determine.
        rest = [x for x in keys if x != key]
        too_long = any(len(", ".join(_values(run, keys))) > _LETTERS for run in runs)
        if too_long and len({_values(run, rest) for run in runs}) == number:
            keys = rest
    alike: dict[tuple[str, ...], list[RecordedRun]] = {}
    for run in runs:
        alike.setdefault(_values(run, keys), []).append(run)
    groups: Groups = {}
    for values, members in alike.items():
        name = ", ".join(map(shorten, values)) or str(members[0].config["method"])
        groups[f"{name} ({len(groups) + 1})" if name in groups else name] = members
    return groups


def _settings(run: RecordedRun) -> dict[str, Any]:
    """Return a run's configuration, with the fields of its model and its data one by one."""
    settings: dict[str, Any] = {}
    for key, value in run.config.items():
        fields = value if isinstance(value, dict) else {}
        settings |= {f"{key}.{name}": x for name, x in fields.items()} or {key: value}
    return settings


def _top(key: str) -> str:
    return key.partition(".")[0]


def _values(run: RecordedRun, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the values of those of the keys that are set, and that the method does not ignore."""
    settings = _settings(run)
    values = {key: settings.get(key) for key in keys if not _ignores(run, key)}
    set_ = {k: x for k, x in values.items() if x not in (None, "")}
    return tuple(f"{k} {x}".removeprefix("method ") for k, x in set_.items())


def shorten(text: str, letters: int = _LETTERS) -> str:
    """Cut a long text, such as a path, in its middle: texts often differ at their ends."""
    half = letters // 2
    return text if len(text) <= letters else f"{text[: half - 1]}…{text[-half:]}"


def _given(run: RecordedRun) -> Collection[str]:
    """Return the keys that were set; all, of a run of an earlier version."""
    written = (run.path / "settings.json").is_file()
    return RunDirectory(run.path).read_settings() if written else run.config


def _ignores(run: RecordedRun, key: str) -> bool:
    """Return whether the run's method ignores a setting."""
    method = METHODS.get(run.config["method"])
    return method is not None and key in method.ignored
