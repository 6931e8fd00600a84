"""Define a round's record and a run's summary: every key of `rounds.jsonl` and `summary.json`.

The records are plain dictionaries with typed keys, so that a resumed run keeps keys of a later
version. `check` rejects content that no run writes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NotRequired, TypeVar, cast

from typing_extensions import TypedDict  # Pydantic requires this one before Python 3.12

from ravan_flwr.files import first_error

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
        "train-loss": NotRequired[float],  # not in private and in secure runs
        "skipped-steps": NotRequired[int],  # in which float16 overflowed, if any
        "seconds": NotRequired[float],  # not where devices add the noise
        "bytes-up": int,
        "bytes-down": int,
        "span": NotRequired[list[float]],  # times of the message and of the reply
        "staleness": NotRequired[int],  # versions by which its update was out of date
        "device": NotRequired[str],  # the kind of a simulated device
    },
)


class Rejection(TypedDict):
    """A client whose reply was rejected or missing, and the reason."""

    client: str
    reason: str


PrivacyRecord = TypedDict(
    "PrivacyRecord",
    {
        "unit": NotRequired[str],  # example: epsilon of single examples, the largest over clients
        "epsilon": float,  # of all rounds so far
        "delta": float,
        "noise-multiplier": float,
        "clip-norm": NotRequired[float],  # of this round
        "noise-cohort": NotRequired[int],  # clients a round in the federation that epsilon is for
    },
)


MaskedRecord = TypedDict(
    "MaskedRecord",
    {
        "clients": int,  # with keys for the round
        "threshold": NotRequired[int],  # clients that are needed to unmask
        "dropped": NotRequired[list[int]],  # partitions that shared secrets, but sent no numbers
        "untrained": NotRequired[int],  # heads, or tensors, that too few clients trained
        "cut-off": NotRequired[float],  # fraction of the numbers beyond their bounds
    },
)


RoundRecord = TypedDict(
    "RoundRecord",
    {
        "round": int,  # 0 is the calibration round
        "train-loss": NotRequired[float],  # not in private and in secure runs
        "metrics": Metrics,  # empty where nothing was evaluated
        "clients": list[ClientRecord],
        "rejected": list[Rejection],
        "not-eligible": list[int],  # partitions that cannot afford the method
        "skipped": list[int],  # partitions that are not asked, since they were unresponsive
        "more-not-eligible": NotRequired[int],  # that are not listed
        "more-skipped": NotRequired[int],
        "unused": list[int],  # partitions whose replies were not needed
        "late": NotRequired[list[Rejection]],  # replies that an earlier round rejected as missing
        "partitions": int,  # number of partitions of the data
        "bytes-up": int,
        "bytes-down": int,
        "link-bytes-estimate": NotRequired[int],  # on the devices' links, the app bundle included
        "time": NotRequired[float],  # seconds of the run so far, simulated with `devices`
        "seconds": float,
        "phases": dict[str, float],  # seconds
        "refused": NotRequired[str],  # why the round has no effect
        "collapsed": NotRequired[str],  # why its evaluation counts as a collapse
        "per-client": NotRequired[dict[str, ClientStatistics]],  # by metric
        "privacy": NotRequired[PrivacyRecord],  # of a private run
        "out-of-budget": NotRequired[list[int]],  # partitions out of privacy budget
        "recounted": NotRequired[list[int]],  # partitions whose own account lacked rounds
        "secure": NotRequired[MaskedRecord],  # of a run with secure aggregation
        "began-anew": NotRequired[list[int]],  # partitions that had lost their personal parameters
        "reached": NotRequired[float],  # the `until-metric` that its evaluation reached
    },
)


Delivered = TypedDict(
    "Delivered",
    {
        "partition-id": int,
        "folder": str,  # of the result on the device: adapter or merged
    },
)


class FinalAndBest(TypedDict):
    """The metrics of the last evaluation, and those of the best one."""

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
        "simulated": NotRequired[bool],  # whether clients were simulated; not in older runs
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
        "steps": NotRequired[int],  # of all clients in all rounds; not in older runs
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
        "unit": NotRequired[str],  # example: epsilon of single examples; absent: of clients
        "epsilon": NotRequired[float],  # spent by a private run, with this delta
        "delta": NotRequired[float],
        "noise-multiplier": NotRequired[float],
        "noise-cohort": NotRequired[int],
        "began-anew": NotRequired[int],  # times that a client had lost its personal parameters
        "head-norms": NotRequired[dict[str, list[float]]],  # by layer
        "until-metric": NotRequired[float],  # the value at which the run was to end
        "reached": NotRequired[int],  # the first round whose evaluation reached it
        "run-id": NotRequired[str],  # random: identifies the run to devices when it delivers again
        "delivered": NotRequired[list[Delivered]],  # devices that have this result
        "not-delivered": NotRequired[list[Rejection]],  # devices that do not have it, with reasons
    },
)

MAX_DEPTH = 20  # of nesting in a run's files
MAX_INTEGER = 10**18  # in a run's files


def parse_json(text: bytes, *, finite: bool = False) -> Any:
    """Parse JSON; raise ValueError if it is invalid, nested too deeply, or has absurd numbers."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [content]
    for _ in range(MAX_DEPTH):
        for item in level:
            if isinstance(item, int) and abs(item) > MAX_INTEGER:
                raise ValueError(f"it has a whole number above {MAX_INTEGER:g}")
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
def _adapter(schema: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # noqa: PLC0415 (`--help` needs none)

    return TypeAdapter(schema)


def check(content: object, schema: type[_Content]) -> _Content:
    """Return `content` unchanged; raise ValueError unless it is valid by the `schema`."""
    try:
        _adapter(cast(Any, schema)).validate_python(content, strict=True)
    except ValueError as error:
        raise ValueError(f"it has {first_error(cast('ValidationError', error))}") from None
    return cast(_Content, content)


def check_line(line: bytes, previous: RoundRecord | None) -> RoundRecord:
    """Parse a round's line; raise ValueError unless it is of the round after `previous`."""
    record = check(parse_json(line, finite=True), RoundRecord)
    expected = (0, 1) if previous is None else (previous["round"] + 1,)
    if record["round"] not in expected:
        raise ValueError(
            f"it is of round {record['round']}, expected {' or '.join(map(str, expected))}"
        )
    return record


def summarise(values: Sequence[float]) -> ClientStatistics:
    """Summarise the values of one metric, one for each client."""
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
    """Summarise every metric of the clients' answers."""
    return {name: summarise([answer[name] for answer in answers]) for name in answers[0]}
