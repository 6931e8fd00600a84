"""Let a node answer for one run at a time, and begin each with nothing of those before.

Flower keeps a node's state for a series of runs, and gives a message what the last of them left:
its state, and its run config. A run of ours keeps things there that are of no other: fixed
tensors, the client's own part, accounts, the secrets of a secure round.
"""

from flwr.app import ConfigRecord, Context, Message

_OF = "of-run"


def enforce_run_scope(message: Message, context: Context) -> None:
    """Forget what another run has left; ValueError if the message is of an earlier one."""
    run, other = str(context.run_id), message.metadata.run_id
    if other != context.run_id:
        raise ValueError(
            f"got a message of run {other} while this node is in run {run} of the same series, "
            "expected one run of a series after the other; start it again"
        )
    state = context.state
    last = state.get(_OF)
    if isinstance(last, ConfigRecord) and last.get("run") != run:
        state.clear()
    state[_OF] = ConfigRecord({"run": run})
