"""Read replies of untrusted nodes, and check every value before it is used.

For any reply, reading returns valid values or raises a ValueError with the reason, and no other
exception. Its time is at most proportional to the reply's size. Its memory, with any wire, is at
most four times the reply's bytes, on top of the reply. A sparse reply is filled up to at most the
number of values in a dense upload of its client.
"""

import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from flwr.app import Message, RecordDict

from ravan_flwr.messages.arrays import num_bytes, view_record
from ravan_flwr.messages.plain_text import plain, shown
from ravan_flwr.messages.records import DISTRUSTS, read_pieces
from ravan_flwr.messages.registered_client import RegisteredClient, check_fingerprint
from ravan_flwr.messages.sparsity import densify
from ravan_flwr.messages.wire import decode
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.record import Metrics
from ravan_flwr.server.superlink_calls import UNREADABLE
from ravan_flwr.tasks.base import Measures

# Largest values that a client may report. A larger loss means that training diverged.
MAX_LOSS = 1e9
MAX_SECONDS = 1e9
MAX_STEPS = 1e9
_FOR_USERS = re.compile(r"<class 'ValueError'>:<'(.*)'>", re.DOTALL)  # Flower's text of an error
IN_UNIT_RANGE = ("accuracy", "f1")  # metrics from 0 to 1


@dataclass(frozen=True)
class Update:
    """The checked content of a client's training reply."""

    client: RegisteredClient
    upload: Tensors  # views of the message's bytes: read only
    loss: float | None  # None: in a private run
    seconds: float | None  # None: in a run in which devices add the noise
    anew: bool = False  # the client had no personal parameters, and began with new ones
    skipped: int = 0  # steps in which float16 overflowed
    masked: bytes = b""  # in place of an upload
    bytes_up: int = 0
    staleness: int = 0  # versions by which the state has moved since it was sent
    steps: int = 0  # local steps, from the client's examples and the settings
    max_move: float = 0.0  # learning rate times steps: how far its optimiser can move a number
    # By tensor: the norm of the next state if this update were the only one (`NormLimits`).
    norms_if_alone: Mapping[str, float] = field(default_factory=dict)


def read_trained(
    reply: Message,
    client: RegisteredClient,
    round_number: int,
    fingerprint: Sequence[float],
    wire: str = "float32",
    max_values: int | None = None,
    density: Fraction = Fraction(1),
    *,
    personal: bool = False,
    with_loss: bool = True,
    with_seconds: bool = True,
) -> Update:
    """Return the update in a training reply of that round; the node must have the server's bases.

    The method checks the tensors later. `max_values` limits the number of values after decoding,
    and `density` is the fraction of them that was sent. If clients have `personal` parameters, a
    reply reports whether the client began without them. Clients of a private run report no loss,
    and no seconds if they add the noise; if a reply has these values, they are not read.
    """
    with as_value_error():
        metrics, content = open_reply(reply, round_number)
        check_fingerprint(metrics.get("fingerprint"), fingerprint, client.versions)
        loss = within(metrics, "train-loss", -MAX_LOSS, MAX_LOSS) if with_loss else None
        seconds = within(metrics, "seconds", 0, MAX_SECONDS) if with_seconds else None
        anew = personal and within(metrics, "began-anew", 0, 1) > 0
        skips = with_loss and "skipped-steps" in metrics
        skipped = int(within(metrics, "skipped-steps", 0, MAX_STEPS)) if skips else 0
        arrays = content.array_records["arrays"]
        tensors = densify(decode(view_record(arrays), wire, max_values), density, max_values)
        return Update(client, tensors, loss, seconds, anew, skipped, bytes_up=num_bytes(arrays))


def read_refusal(reply: Message, round_number: int) -> str:
    """Return why a client refuses to train further; "" if the reply has an update."""
    with as_value_error():
        refused = read_content(reply).config_records.get("refused")
        if refused is None:
            return ""
        if refused.get("round") != round_number:
            raise ValueError(f"reply is of round {shown(refused.get('round'))}")
        return str(refused.get("reason") or "it gives no reason")


def read_phase(reply: Message, round_number: int, names: Collection[str]) -> Mapping[str, bytes]:
    """Return the pieces of a reply in a phase of a secure round, or the clients it distrusts."""
    with as_value_error():
        arrays = open_reply(reply, round_number)[1].array_records["arrays"]
        return read_pieces(arrays, (DISTRUSTS,) if DISTRUSTS in arrays else names)


def read_masked(
    reply: Message, client: RegisteredClient, round_number: int, fingerprint: Sequence[float]
) -> tuple[bytes, float | None]:
    """Return a client's masked numbers, and its seconds if it reports them.

    The client must have the server's bases.
    """
    with as_value_error():
        metrics, content = open_reply(reply, round_number)
        check_fingerprint(metrics.get("fingerprint"), fingerprint, client.versions)
        has_seconds = "seconds" in metrics
        seconds = within(metrics, "seconds", 0, MAX_SECONDS) if has_seconds else None
        return read_pieces(content.array_records["arrays"], ("masked",))["masked"], seconds


def read_evaluated(
    reply: Message,
    round_number: int,
    measures: Measures,
    max_examples: float,
    max_counted: float = math.inf,
) -> tuple[float, Metrics]:
    """Return the units of an evaluation reply of that round, and means over them.

    Units are examples, or what else the measures count. A reply has `max_examples` at most, and the
    units of `max_counted` examples at most are returned.
    """
    with as_value_error():
        metrics, _ = open_reply(reply, round_number)
        units = examples = above_zero(metrics, "num-examples", max_examples)
        if measures.unit != "examples":
            units = above_zero(metrics, f"num-{measures.unit}", examples * measures.max_per_example)
        limits = {
            name: (0, 1) if name in IN_UNIT_RANGE else (-MAX_LOSS, MAX_LOSS)
            for name in measures.names
        }
        means = {name: within(metrics, name, *limits[name]) for name in limits}
        return units * min(1.0, max_counted / examples), means


@contextmanager
def as_value_error() -> Iterator[None]:
    """Turn every exception of the code inside into a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except KeyError as error:
        raise ValueError(f"missing {plain(str(error))}") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {plain(str(error))}"
        raise ValueError(f"its reply cannot be used: {cause}") from error


def max_validation_size(trained: int, fraction: float) -> int:
    """Return the largest size of a validation split for a client with that many training examples.

    A split of n examples has ceil(fraction n) of them, less than fraction n + 1. The limit keeps a
    false claim from outweighing the other clients.
    """
    return math.ceil((trained * fraction + 1) / (1 - fraction) - 1e-9)


def read_content(reply: Message) -> RecordDict:
    """Return a reply's content; raise ValueError with the node's reason if it is an error."""
    if reply.has_error():
        text = (reply.error.reason or "").strip()
        sentence = _FOR_USERS.fullmatch(text)
        reason = plain(sentence[1] if sentence else text) or "no reason given"
        if sentence or reply.error.code == UNREADABLE:
            raise ValueError(reason)
        raise ValueError(f"it failed with code {reply.error.code}: {reason}")
    return reply.content


def open_reply(reply: Message, round_number: int) -> tuple[Mapping[str, Any], RecordDict]:
    """Return a reply's metrics and content; raise ValueError if it is from another round."""
    content = read_content(reply)
    metrics = content.metric_records["metrics"]
    if metrics.get("round") != round_number:
        value = shown(metrics.get("round"))
        raise ValueError(f"reply is of round {value}, expected {round_number}")
    return metrics, content


def finite(metrics: Mapping[str, Any], key: str) -> float:
    """Return one number of a reply; raise ValueError unless it is finite."""
    if key not in metrics:
        raise ValueError(f"missing {key!r}")
    value = metrics[key]
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key} is {shown(value)}, expected a finite number")
    return float(value)


def above_zero(metrics: Mapping[str, Any], key: str, high: float) -> float:
    """Return one number of a reply; raise ValueError unless it is above 0 and at most `high`."""
    value = finite(metrics, key)
    if not 0 < value <= high:
        raise ValueError(f"{key} is {value:g}, expected above 0 and at most {high:g}")
    return value


def within(metrics: Mapping[str, Any], key: str, low: float, high: float) -> float:
    """Return one number of a reply; raise ValueError unless it is from `low` to `high`."""
    value = finite(metrics, key)
    if not low <= value <= high:
        raise ValueError(f"{key} is {value:g}, expected from {low:g} to {high:g}")
    return value
