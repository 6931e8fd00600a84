"""Define a round's record and a run's summary: every key of `rounds.jsonl` and `summary.json`.

The records are plain dictionaries with typed keys, so that what is written is what was read: keys
of a later version are kept when a run goes on. `check_line` and `wrong_in` check what a file says.
"""

import json
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NotRequired, TypedDict, cast, get_origin, get_type_hints

from ravan_flwr.runs.client_statistics import Spread

Metrics = dict[str, float]

ClientRecord = TypedDict(
    "ClientRecord",
    {
        "partition-id": int,
        "share": float,  # of the largest budget
        "heads": float,  # in each layer; a mean where layers have different numbers
        "selected": list[list[int]],  # the heads in the reply, by layer
        "examples": int,
        "steps": int,  # of the optimiser; in a calibration, batches
        "train-loss": NotRequired[float],  # not told in private and in secure runs
        "skipped-steps": NotRequired[int],  # in which float16 overflowed, where there are any
        "seconds": NotRequired[float],  # not told where devices add the noise
        "bytes-up": int,
        "bytes-down": int,
    },
)


class Rejection(TypedDict):
    """Name a client whose reply was not used or did not come, and say why."""

    client: str
    reason: str


Spent = TypedDict(
    "Spent",
    {
        "unit": NotRequired[str],  # example: epsilon is that of a client's examples, the largest
        "epsilon": float,  # of all rounds so far
        "delta": float,
        "noise-multiplier": float,
        "clip-norm": NotRequired[float],  # of this round
        "noise-cohort": NotRequired[int],  # clients a round of the federation that epsilon is of
        "epsilon-to-server": NotRequired[float],  # of the client that the server knows most of
        "epsilon-to-server-bound": NotRequired[float],  # the same, whoever was drawn
    },
)


Masked = TypedDict(
    "Masked",
    {
        "clients": int,  # that had keys for the round
        "threshold": NotRequired[int],  # of them that it takes to unmask
        "dropped": NotRequired[list[int]],  # partitions that shared secrets, but sent no numbers
        "untrained": NotRequired[int],  # heads, or tensors, that too few trained
        "cut-off": NotRequired[float],  # share of the numbers that were beyond their bounds
    },
)


RoundRecord = TypedDict(
    "RoundRecord",
    {
        "round": int,  # 0 is the calibration round
        "train-loss": NotRequired[float],  # not told in private and in secure runs
        "metrics": Metrics,  # empty where nothing was evaluated
        "clients": list[ClientRecord],
        "rejected": list[Rejection],
        "left-out": list[int],  # partitions that cannot afford the method
        "resting": list[int],  # partitions that were silent before, and were not asked
        "more-left-out": NotRequired[int],  # than are listed
        "more-resting": NotRequired[int],
        "spare": list[int],  # partitions whose replies were not needed
        "partitions": int,  # in how many the data is shared
        "bytes-up": int,
        "bytes-down": int,
        "link-bytes-estimate": NotRequired[int],  # on the devices' links, the app bundle included
        "seconds": float,
        "phases": dict[str, float],  # seconds
        "refused": NotRequired[str],  # why the round has no effect
        "collapsed": NotRequired[str],  # why its evaluation counts as a collapse
        "spread": NotRequired[dict[str, Spread]],  # by metric (client_statistics.py)
        "privacy": NotRequired[Spent],  # of a private run
        "spent": NotRequired[list[int]],  # partitions that have nothing left of their epsilon
        "recounted": NotRequired[list[int]],  # partitions whose own account lacked rounds
        "secure": NotRequired[Masked],  # of a run with secure aggregation
        "began-anew": NotRequired[list[int]],  # partitions that had lost their part of the model
        "reached": NotRequired[float],  # the `until-metric` that its evaluation has reached
    },
)


Delivered = TypedDict(
    "Delivered",
    {
        "partition-id": int,
        "folder": str,  # that the device has of the result: adapter or merged
    },
)


class FinalAndBest(TypedDict):
    """Hold the metrics of the last evaluation, and those of the best one."""

    final: Metrics
    best: Metrics


Summary = TypedDict(
    "Summary",
    {
        "method": str,
        "preset": str,
        "seed": int,
        "classifier": str,
        "num-clients": int,
        "rounds": int,
        "rank": int | None,
        "learning-rate": float,
        "trainable-parameters": int,
        "adapter-parameters": int,
        "metric": str,
        "metrics": FinalAndBest,
        "bytes-up": int,
        "bytes-down": int,
        "link-bytes-estimate": NotRequired[int],  # of all rounds, where there are links
        "rejected": int,
        "steps": NotRequired[int],  # of all clients in all rounds; an older run has not noted them
        "collapsed": list[int],  # rounds
        "without-effect": list[int],  # rounds
        "left-out": list[int],
        "seconds": float,
        "finished": str,
        "code": NotRequired[str],  # version of the package and, of a checkout, its commit
        "processes": NotRequired[int],  # in which clients computed, of a run in process
        "spread": NotRequired[dict[str, Spread]],  # over the clients, of the last evaluation
        "unit": NotRequired[str],  # that epsilon is of: example, or none of a client's
        "epsilon": NotRequired[float],  # that a private run has spent, with this delta
        "delta": NotRequired[float],
        "noise-multiplier": NotRequired[float],
        "noise-cohort": NotRequired[int],
        "epsilon-to-server": NotRequired[float],  # with secure aggregation, for any client
        "epsilon-to-server-bound": NotRequired[float],  # the same, whoever was drawn
        "began-anew": NotRequired[int],  # times that a client had lost its part of the model
        "head-norms": NotRequired[dict[str, list[float]]],  # by layer
        "until-metric": NotRequired[float],  # of a run that was to end when it is reached
        "reached": NotRequired[int],  # the first round whose evaluation has reached it
        "run-id": NotRequired[str],  # random: by this devices know a run that delivers again
        "delivered": NotRequired[list[Delivered]],  # devices that have this result
        "not-delivered": NotRequired[list[Rejection]],  # devices that could not get it, and why
    },
)

# Older runs lack some keys: these are the ones that a report needs, and a run that goes on.
NEEDED_BY_A_REPORT = (
    "round", "metrics", "clients", "rejected", "partitions", "bytes-up", "bytes-down", "phases",
    "train-loss", "seconds",
)  # fmt: skip
NEEDED_TO_GO_ON = (*NEEDED_BY_A_REPORT, "left-out")
_SPENT = ("epsilon", "delta", "noise-multiplier")
_OF_EACH = {"clients": {"partition-id"}, "rejected": {"client", "reason"}}


MOST_LEVELS = 20  # of nesting in a run's files
LARGEST = 10**18  # whole number in them


def parsed(text: bytes, *, finite: bool = False) -> Any:
    """Parse JSON as a run writes it; ValueError if it is none, deep, or has absurd numbers."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [content]
    for _ in range(MOST_LEVELS):
        for one in level:
            if isinstance(one, int) and abs(one) > LARGEST:
                raise ValueError(f"it has a whole number above {LARGEST:g}")
            if finite and isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"it has the number {one}")
        inner = [one.values() if isinstance(one, dict) else one for one in level
                 if isinstance(one, dict | list)]  # fmt: skip
        level = list(chain.from_iterable(inner))
        if not level:
            return content
    raise ValueError("it is nested too deeply")


def check_line(line: bytes, before: int | None) -> RoundRecord:
    """Read one line, which must be of the round after `before`; ValueError if it is not."""
    record = parsed(line, finite=True)
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        raise ValueError(f"it is {line.decode()[:60]!r}, expected an object with a whole 'round'")
    expected = (0, 1) if before is None else (before + 1,)
    if record["round"] not in expected:
        raise ValueError(
            f"it is of round {record['round']}, expected {' or '.join(map(str, expected))}"
        )
    return cast(RoundRecord, record)


def needed_in(record: RoundRecord, needed: Sequence[str]) -> list[str]:
    """List what is needed of a record: private and secure runs tell no loss."""
    without = "privacy" in record or "secure" in record
    return [key for key in needed if key != "train-loss" or not without]


def wrong_in(record: RoundRecord, needed: Sequence[str] = NEEDED_TO_GO_ON) -> str:
    """Say which of the needed values is not as a run writes it; empty if all are."""
    kinds = get_type_hints(RoundRecord)
    for key in needed_in(record, needed):
        value = record.get(key)
        allowed = _allowed(kinds[key])
        if not isinstance(value, allowed) or isinstance(value, bool):
            names = " or ".join(kind.__name__ for kind in allowed)
            return f"{key} = {value!r}, expected {names}"
    for name, value in record["metrics"].items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"{name} = {value!r} among its metrics, expected a number"
    if "privacy" in record and not _is_spent(record["privacy"]):
        return f"privacy = {record['privacy']!r}, expected an object with {sorted(_SPENT)}, numbers"
    for key, fields in _OF_EACH.items():
        for one in cast(Sequence[object], record[key]):  # type: ignore[literal-required]
            if not isinstance(one, dict) or not one.keys() >= fields:
                return f"{one!r} among its {key}, expected an object with {sorted(fields)}"
    return ""


def _is_spent(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    numbers = [
        value.get(key) for key in (*_SPENT, *(value.keys() & {"noise-cohort", "epsilon-to-server"}))
    ]
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)


def _allowed(annotation: Any) -> tuple[type, ...]:
    """List the types of JSON values that an annotation allows: a float may be a whole number."""
    kind: type = get_origin(annotation) or annotation
    return (int, float) if kind is float else (kind,)
