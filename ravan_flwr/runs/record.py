"""Define a round's record and a run's summary: every key of `rounds.jsonl` and `summary.json`.

The records are plain dictionaries with typed keys, so that what is written is what was read: keys
of a later version are kept when a run goes on. `check` refuses what no run writes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NotRequired, TypeVar, cast

from typing_extensions import TypedDict  # Pydantic asks for this one before Python 3.12

from ravan_flwr.files import first_wrong

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Metrics = dict[str, float]

ClientStatistics = TypedDict(  # of a metric over the clients, each counted once
    "ClientStatistics",
    {
        "clients": float,
        "mean": float,
        "std": float,
        "min": float,
        "lower-quartile": float,
        "median": float,
        "upper-quartile": float,
        "max": float,
    },
)

ClientRecord = TypedDict(
    "ClientRecord",
    {
        "partition-id": int,
        "budget-fraction": float,  # of the adapter
        "heads": float,  # in each layer; a mean where layers have different numbers
        "selected": list[list[int]],  # the heads in the reply, by layer
        "examples": int,
        "steps": int,  # of the optimiser; in a calibration, batches
        "train-loss": NotRequired[float],  # not told in private and in secure runs
        "skipped-steps": NotRequired[int],  # in which float16 overflowed, where there are any
        "seconds": NotRequired[float],  # not told where devices add the noise
        "bytes-up": int,
        "bytes-down": int,
        "span": NotRequired[list[float]],  # when it was sent its message, and when it had answered
        "staleness": NotRequired[int],  # versions that its update was old by
        "device": NotRequired[str],  # the kind of a simulated device
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
        "not-eligible": list[int],  # partitions that cannot afford the method
        "skipped": list[int],  # partitions that were unresponsive, and were not asked
        "more-not-eligible": NotRequired[int],  # than are listed
        "more-skipped": NotRequired[int],
        "unused": list[int],  # partitions whose replies were not needed
        "partitions": int,  # in how many the data is shared
        "bytes-up": int,
        "bytes-down": int,
        "link-bytes-estimate": NotRequired[int],  # on the devices' links, the app bundle included
        "time": NotRequired[float],  # seconds of the run so far, simulated with `devices`
        "seconds": float,
        "phases": dict[str, float],  # seconds
        "refused": NotRequired[str],  # why the round has no effect
        "collapsed": NotRequired[str],  # why its evaluation counts as a collapse
        "per-client": NotRequired[dict[str, ClientStatistics]],  # by metric
        "privacy": NotRequired[Spent],  # of a private run
        "out-of-budget": NotRequired[list[int]],  # partitions out of privacy budget
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
        "not-eligible": list[int],
        "seconds": float,
        "finished": str,
        "code": NotRequired[str],  # version of the package and, of a checkout, its commit
        "processes": NotRequired[int],  # in which clients computed, of a run in process
        "per-client": NotRequired[
            dict[str, ClientStatistics]
        ],  # over the clients, of the last evaluation
        "unit": NotRequired[str],  # that epsilon is of: example, or none of a client's
        "epsilon": NotRequired[float],  # that a private run has spent, with this delta
        "delta": NotRequired[float],
        "noise-multiplier": NotRequired[float],
        "noise-cohort": NotRequired[int],
        "began-anew": NotRequired[int],  # times that a client had lost its part of the model
        "head-norms": NotRequired[dict[str, list[float]]],  # by layer
        "until-metric": NotRequired[float],  # of a run that was to end when it is reached
        "reached": NotRequired[int],  # the first round whose evaluation has reached it
        "run-id": NotRequired[str],  # random: by this devices know a run that delivers again
        "delivered": NotRequired[list[Delivered]],  # devices that have this result
        "not-delivered": NotRequired[list[Rejection]],  # devices that could not get it, and why
    },
)

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
        for item in level:
            if isinstance(item, int) and abs(item) > LARGEST:
                raise ValueError(f"it has a whole number above {LARGEST:g}")
            if finite and isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"it has the number {item}")
        inner = [item.values() if isinstance(item, dict) else item for item in level
                 if isinstance(item, dict | list)]  # fmt: skip
        level = list(chain.from_iterable(inner))
        if not level:
            return content
    raise ValueError("it is nested too deeply")


_Content = TypeVar("_Content")


@cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # noqa: PLC0415 (`--help` does without)

    return TypeAdapter(kind)


def check(content: object, kind: type[_Content]) -> _Content:
    """Return what JSON has as it is; ValueError if a run does not write it so."""
    try:
        _adapter(cast(Any, kind)).validate_python(content, strict=True)
    except ValueError as error:
        raise ValueError(f"it has {first_wrong(cast('ValidationError', error))}") from None
    return cast(_Content, content)


def check_line(line: bytes, before: RoundRecord | None) -> RoundRecord:
    """Read one line, which must be of the round after `before`; ValueError if it is not."""
    record = check(parsed(line, finite=True), RoundRecord)
    expected = (0, 1) if before is None else (before["round"] + 1,)
    if record["round"] not in expected:
        raise ValueError(
            f"it is of round {record['round']}, expected {' or '.join(map(str, expected))}"
        )
    return record


def statistics_of(values: Sequence[float]) -> ClientStatistics:
    """Describe the values of one metric, one a client."""
    import numpy as np  # noqa: PLC0415 (`--help` needs none)

    numbers = np.asarray(values, float)
    low, middle, high = map(float, np.quantile(numbers, (0.25, 0.5, 0.75)))
    return {
        "clients": len(numbers),
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
        "min": float(numbers.min()),
        "lower-quartile": low,
        "median": middle,
        "upper-quartile": high,
        "max": float(numbers.max()),
    }


def per_client_statistics(answers: Sequence[Mapping[str, float]]) -> dict[str, ClientStatistics]:
    """Describe every metric of the clients' answers."""
    return {name: statistics_of([answer[name] for answer in answers]) for name in answers[0]}
