"""Read replies of unknown origin, and check them before anything of them is used.

Whatever a node sends, reading it gives sound values or a ValueError that says what is wrong:
no other exception, no more time than in proportion to what was sent, and, whatever the wire, no
more memory on top of the reply than four times its bytes. A sparse reply is filled up, to as many
numbers as any upload of its client has.
"""

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flwr.app import Message, RecordDict

from ravan_flwr.messages.arrays import view_record
from ravan_flwr.messages.plain_text import plain, shown
from ravan_flwr.messages.records import DISTRUSTS, read_pieces
from ravan_flwr.messages.registered_client import RegisteredClient, check_derived
from ravan_flwr.messages.sparsity import densify
from ravan_flwr.messages.wire import decode
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.record import Metrics
from ravan_flwr.server.superlink import UNREADABLE
from ravan_flwr.tasks.base import Measures

# What a number that a client tells may be, at most. A loss beyond it is a run that diverged.
MOST_LOSS = 1e9
MOST_SECONDS = 1e9
MOST_STEPS = 1e9
IN_UNIT_RANGE = ("accuracy", "f1")  # metrics from 0 to 1


@dataclass(frozen=True)
class Update:
    """Hold what a client has trained, as its reply says, which was checked."""

    client: RegisteredClient
    upload: Tensors  # over the message's own bytes: to be read only
    loss: float | None  # None: of a private run
    seconds: float | None  # None: of a run that devices noise
    anew: bool = False  # the client had no part of the model of its own, and began with a new one
    skipped: int = 0  # steps in which float16 overflowed
    masked: bytes = b""  # in place of an upload
    bytes_up: int = 0
    staleness: int = 0  # versions that the state has moved since it was sent
    steps: int = 0  # that its examples and the settings make


@dataclass(frozen=True)
class Evaluated:
    """Hold the content of a reply to an evaluation."""

    units: float
    metrics: Metrics  # means over the units


def read_trained(
    reply: Message,
    client: RegisteredClient,
    round_number: int,
    derived: Sequence[float],
    wire: str = "float32",
    most: int | None = None,
    density: Fraction = Fraction(1),
    *,
    personal: bool = False,
    with_loss: bool = True,
    with_seconds: bool = True,
) -> Update:
    """Read a training reply of that round, of a node with the server's bases.

    The method checks its tensors. `most` is how many numbers it can have on a wire that is decoded,
    and `density` is the part of them that was sent.
    Where clients have parts of their own (`personal`), a reply says whether it began without one.
    Clients of a private run report no loss, and where they add the noise no seconds; what is there
    all the same is not read.
    """
    with as_value_error():
        metrics, content = _opened(reply, round_number)
        check_derived(metrics.get("derived"), derived, client.versions)
        loss = within(metrics, "train-loss", -MOST_LOSS, MOST_LOSS) if with_loss else None
        seconds = within(metrics, "seconds", 0, MOST_SECONDS) if with_seconds else None
        anew = personal and within(metrics, "began-anew", 0, 1) > 0
        skips = with_loss and "skipped-steps" in metrics
        skipped = int(within(metrics, "skipped-steps", 0, MOST_STEPS)) if skips else 0
        tensors = decode(view_record(content.array_records["arrays"]), wire, most)
        return Update(client, densify(tensors, density, most), loss, seconds, anew, skipped)


def refusal_in(reply: Message, round_number: int) -> str:
    """Read why a client trains no further, in a reply of that round; "" if it has trained."""
    with as_value_error():
        refused = content_of(reply).config_records.get("refused")
        if refused is None:
            return ""
        if refused.get("round") != round_number:
            raise ValueError(f"reply is of round {shown(refused.get('round'))}")
        return str(refused.get("reason") or "it gives no reason")


def read_phase(reply: Message, round_number: int, names: Collection[str]) -> Mapping[str, bytes]:
    """Read what a client answers in a phase of a secure round; or whom it does not trust."""
    with as_value_error():
        arrays = _opened(reply, round_number)[1].array_records["arrays"]
        return read_pieces(arrays, (DISTRUSTS,) if DISTRUSTS in arrays else names)


def read_masked(
    reply: Message, client: RegisteredClient, round_number: int, derived: Sequence[float]
) -> tuple[bytes, float | None]:
    """Read a client's masked numbers, and its seconds if it tells them.

    Its bases must be the server's.
    """
    with as_value_error():
        metrics, content = _opened(reply, round_number)
        check_derived(metrics.get("derived"), derived, client.versions)
        has_seconds = "seconds" in metrics
        seconds = within(metrics, "seconds", 0, MOST_SECONDS) if has_seconds else None
        return read_pieces(content.array_records["arrays"], ("masked",))["masked"], seconds


def read_evaluated(reply: Message, round_number: int, measures: Measures, most: float) -> Evaluated:
    """Read a reply to an evaluation of that round, of at most so many examples."""
    with as_value_error():
        metrics, _ = _opened(reply, round_number)
        number = above_zero(metrics, "num-examples", most)
        if measures.unit != "examples":
            number = above_zero(metrics, f"num-{measures.unit}", number * measures.most)
        limits = {
            name: (0, 1) if name in IN_UNIT_RANGE else (-MOST_LOSS, MOST_LOSS)
            for name in measures.names
        }
        return Evaluated(number, {name: within(metrics, name, *limits[name]) for name in limits})


@contextmanager
def as_value_error() -> Iterator[None]:
    """Turn any error that a reply causes in the code inside into a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except KeyError as error:
        raise ValueError(f"missing {plain(str(error))}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {plain(str(error))}"
        raise ValueError(f"its reply cannot be used: {what}") from error


def most_validation_size(trained: int, fraction: float) -> int:
    """Return how many examples a client that trains on so many can have in its validation split.

    Of n examples a split of that fraction has ceil(fraction n), less than fraction n + 1: no claim
    outweighs the others.
    """
    return math.ceil((trained * fraction + 1) / (1 - fraction) - 1e-9)


def content_of(reply: Message) -> RecordDict:
    """Return a reply's content; ValueError with the node's reason if it is an error."""
    if reply.has_error():
        reason = plain((reply.error.reason or "").strip()) or "no reason given"
        if reply.error.code == UNREADABLE:
            raise ValueError(reason)
        raise ValueError(f"it failed with code {reply.error.code}: {reason}")
    return reply.content


def _opened(reply: Message, round_number: int) -> tuple[Mapping[str, Any], RecordDict]:
    """Return a reply's metrics, which are of that round, and its content."""
    content = content_of(reply)
    metrics = content.metric_records["metrics"]
    if metrics.get("round") != round_number:
        value = shown(metrics.get("round"))
        raise ValueError(f"reply is of round {value}, expected {round_number}")
    return metrics, content


def finite(metrics: Mapping[str, Any], key: str) -> float:
    """Read one number of a reply, which must be finite."""
    if key not in metrics:
        raise ValueError(f"missing {key!r}")
    value = metrics[key]
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key} is {shown(value)}, expected a finite number")
    return float(value)


def above_zero(metrics: Mapping[str, Any], key: str, most: float) -> float:
    """Read one number of a reply, above 0 and at most so large."""
    value = finite(metrics, key)
    if not 0 < value <= most:
        raise ValueError(f"{key} is {value:g}, expected above 0 and at most {most:g}")
    return value


def within(metrics: Mapping[str, Any], key: str, low: float, high: float) -> float:
    """Read one number of a reply, from `low` to `high`."""
    value = finite(metrics, key)
    if not low <= value <= high:
        raise ValueError(f"{key} is {value:g}, expected from {low:g} to {high:g}")
    return value
