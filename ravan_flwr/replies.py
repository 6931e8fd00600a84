"""What a reply of unknown origin must be before anything of it is used.

Whatever a node sends, reading it gives sound values or a ValueError that says what is wrong:
no other exception, and nothing that is larger than four times what was sent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

from ravan_flwr.methods.base import Tensors
from ravan_flwr.payload import view_record
from ravan_flwr.roster import Member, check_derived
from ravan_flwr.wire import decode


@dataclass(frozen=True)
class Trained:
    """A reply to a training message."""

    upload: Tensors  # over the message's own bytes: to be read only
    metrics: dict[str, float]  # `train-loss` and `seconds`


def read_trained(
    reply: Message,
    member: Member,
    round_number: int,
    derived: Sequence[float],
    wire: str = "float32",
) -> Trained:
    """A reply of that round, of a node with the server's bases; what its tensors are is the
    method's to check."""
    content = content_of(reply)
    metrics = _metrics_of(content, round_number)
    told = metrics.get("derived")
    numbers = told if isinstance(told, list) else []
    check_derived([float(number) for number in numbers], derived, member.versions)
    values = {key: finite(metrics, key) for key in ("train-loss", "seconds")}
    return Trained(decode(view_record(_arrays_of(content)), wire), values)


def read_evaluated(
    reply: Message, round_number: int, names: Sequence[str], most: float
) -> tuple[float, dict[str, float]]:
    """(number of examples, their means) of a reply to an evaluation of that round."""
    metrics = _metrics_of(content_of(reply), round_number)
    number = finite(metrics, "num-examples")
    if not 0 < number <= most:
        raise ValueError(f"num-examples is {number:g}, expected above 0 and at most {most:g}")
    return number, {name: finite(metrics, name) for name in names}


def most_held_back(trained: int, share: float) -> int:
    """How many examples a client with so many to train on can have held back, at that share.

    Of n it holds back ceil(share n), less than share n + 1: no claim outweighs the others.
    """
    return math.ceil((trained * share + 1) / (1 - share) - 1e-9)


def content_of(reply: Message) -> RecordDict:
    """What a reply brings; ValueError with the node's reason if it brings an error."""
    if reply.has_error():
        reason = (reply.error.reason or "").strip() or "no reason given"
        raise ValueError(f"it failed with code {reply.error.code}: {reason}")
    return reply.content


def _metrics_of(content: RecordDict, round_number: int) -> Mapping[str, Any]:
    records = content.metric_records
    if "metrics" not in records:
        raise ValueError("missing 'metrics'")
    metrics = records["metrics"]
    if metrics.get("round") != round_number:
        raise ValueError(f"reply is of round {metrics.get('round')!r}, expected {round_number}")
    return metrics


def _arrays_of(content: RecordDict) -> ArrayRecord:
    records = content.array_records
    if "arrays" not in records:
        raise ValueError("missing 'arrays'")
    return records["arrays"]


def finite(metrics: Mapping[str, Any], key: str) -> float:
    """One number of a reply, which must be one and finite."""
    if key not in metrics:
        raise ValueError(f"missing {key!r}")
    value = metrics[key]
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"{key} is {value!r}, expected a finite number")
    return float(value)


LARGEST = math.nextafter(math.inf, 0)
