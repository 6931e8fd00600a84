"""Answer messages that must be answered once only once, even if several arrive at a time.

Flower starts a process for every message, at once. Each gets the node's state of its start, and the
state of the process that ends last is kept. So a server that sends a message twice at the same time
would get signatures of two lists, or two private rounds that the account counts as one. A number
that only increases prevents that. It is in a file that only this user can write.

A node answers for one run at a time, and starts each run with an empty state. Flower keeps a node's
state for a series of runs, and gives a message the state and the run config of the last of them.
But fixed tensors, the client's personal parameters, accounts and the secrets of a secure round
belong to one run.
"""

from collections.abc import Mapping

from flwr.app import ConfigRecord, Context, Message, RecordDict

from ravan_flwr.client.on_device import is_on_a_device, locked_file
from ravan_flwr.files import append
from ravan_flwr.optional import PHASES

ACCOUNT = "privacy-account"  # the record in a node's state, with the number of private rounds
_OF = "of-run"


def answer_once(message_type: str, content: RecordDict, context: Context, partition: int) -> None:
    """Raise ValueError if a process of this node was asked this message, or a later one, before."""
    if not is_on_a_device():
        return
    if message_type in PHASES:
        name, number = (
            "secure",
            len(PHASES) * _number_in(content, "round") + PHASES.index(message_type),
        )
    elif message_type == "train" and context.run_config.get("privacy") == "example":
        earlier = _number_in(content, "earlier-rounds")
        name, number = "private", max(_number_in(context.state, "rounds", ACCOUNT), earlier) + 1
    else:
        return  # it may be asked again
    with locked_file(f"{context.run_id}-{partition}-{name}") as file:
        file.seek(0)
        # A number that was not written whole is too small, and on a line of its own.
        last = max(map(int, filter(bytes.isdigit, file.read().splitlines())), default=-1)
        if number <= last:
            raise ValueError(
                "asked at the same time for what this node does once, or again for what it has "
                "done, expected one message after the other"
            )
        append(file, b"\n%d\n" % number)


def _number_in(records: RecordDict, name: str, record: str = "config") -> int:
    """Return a number of a record; 0 for an invalid one, which the message's handler refuses."""
    fields: Mapping[str, object] = records.config_records.get(record, ConfigRecord())
    value = fields.get(name)
    return value if type(value) is int and 0 <= value < 2**53 else 0


def enforce_run_scope(message: Message, context: Context) -> None:
    """Clear the state of another run; ValueError if the message belongs to an earlier run."""
    run, origin = str(context.run_id), message.metadata.run_id
    if origin != context.run_id:
        raise ValueError(
            f"got a message of run {origin} while this node is in run {run} of the same series, "
            "expected one run of a series after the other; start it again"
        )
    state = context.state
    last = state.get(_OF)
    if isinstance(last, ConfigRecord) and last.get("run") != run:
        state.clear()
    state[_OF] = ConfigRecord({"run": run})
