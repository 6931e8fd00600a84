"""Let a device answer what may be asked once only once, however many processes are asked at a time.

Flower starts a process for every message, at once. Each has the node's state as it was when it
began, and the state of the one that ends last is kept. So a server that asks twice at the same time
would get signatures of two lists, or two private rounds that the account has as one. What stands
against it is a number that only goes up, in a file that only this user can write.

A node answers for one run at a time, and begins each with nothing of those before. Flower keeps a
node's state for a series of runs, and gives a message what the last of them left: its state, and
its run config. A run of ours keeps things there that are of no other: fixed tensors, the client's
personal parameters, accounts, the secrets of a secure round.
"""

from collections.abc import Mapping

from flwr.app import ConfigRecord, Context, Message, RecordDict

from ravan_flwr.client.account import EXAMPLES
from ravan_flwr.client.on_device import append, is_on_a_device, locked_file
from ravan_flwr.secure import PHASES

_OF = "of-run"


def answer_once(kind: str, content: RecordDict, context: Context, partition: int) -> None:
    """Raise ValueError if a process of this node was asked this, or something later, before."""
    if not is_on_a_device():
        return
    if kind in PHASES:
        name, number = "secure", len(PHASES) * _number_in(content, "round") + PHASES.index(kind)
    elif kind == "train" and context.run_config.get("privacy") == "example":
        earlier = _number_in(content, "earlier-rounds")
        name, number = "private", max(_number_in(context.state, "rounds", EXAMPLES), earlier) + 1
    else:
        return  # it may be asked again
    with locked_file(f"{context.run_id}-{partition}-{name}") as file:
        file.seek(0)
        # One that was not written whole has no end, or a line of its own that is too small.
        last = max(map(int, filter(bytes.isdigit, file.read().splitlines())), default=-1)
        if number <= last:
            raise ValueError(
                "asked at the same time for what this node does once, or again for what it has "
                "done, expected one message after the other"
            )
        append(file, b"\n%d\n" % number)


def _number_in(records: RecordDict, name: str, record: str = "config") -> int:
    """Read a number of a record; 0 of one that whoever answers will refuse."""
    fields: Mapping[str, object] = records.config_records.get(record, ConfigRecord())
    value = fields.get(name)
    return value if type(value) is int and 0 <= value < 2**53 else 0


def enforce_run_scope(message: Message, context: Context) -> None:
    """Forget what another run has left; ValueError if the message is of an earlier one."""
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
