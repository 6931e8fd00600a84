"""Run server and clients in one process, with a `Grid` that calls the ClientApp itself.

The same ServerApp and ClientApp as under Flower's own runtimes, for tests, studies and a single
GPU. A client runs when its reply is asked for, so that no more than one reply waits; or several
run at a time in processes of their own (parallel_clients.py), with the same results.
"""

import math
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from ravan_flwr import server_app
from ravan_flwr.client.client_request import keep_own, own_tensors
from ravan_flwr.config.keys import KEYS
from ravan_flwr.flower_private import NodeInfo, Run, TaskType, set_message_id
from ravan_flwr.launch.parallel_clients import SideBySide
from ravan_flwr.launch.start import Start, read_start
from ravan_flwr.launch.worker_process import identify, reply_of
from ravan_flwr.launch.workers import Job
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.secure.node_keys import make_keys
from ravan_flwr.specs import Scalar


@dataclass(frozen=True)
class Simulation:
    """Say where a finished run lies, and how it ended."""

    run_dir: Path
    summary: dict[str, Any]


def simulate(
    config: Mapping[str, Scalar],
    num_clients: int | None = None,
    callbacks: Iterable[object] = (),
) -> Simulation:
    """Run the app in this process and return when it is done.

    Calls in several threads run one after the other.

    Args:
        config: Keys of the run config; what is left out is the preset's, or with `resume` the
            run's. A relative `output-dir` starts at the working directory, and so does the
            default, `runs`.
        num_clients: How many clients share the data; the preset's number if left out.
        callbacks: What watches the run: objects with hooks of `Callback`.

    Returns:
        The run directory and the summary.
    """
    with _ONE_AT_A_TIME:
        return run(read_start(config, num_clients), callbacks)


# Runs of one process share a model and a log: those of several threads take turns.
_ONE_AT_A_TIME = threading.RLock()


def run(start: Start, callbacks: Iterable[object] = ()) -> Simulation:
    """Run what was read, as `simulate` does."""
    config, number = start.config, start.num_clients
    run_config = {key: spec.default for key, spec in KEYS.items()} | dict(start.run_config)
    context = Context(1, 0, {}, RecordDict(), run_config)
    if config.devices is None:
        grid = InProcessGrid(run_config, number)
    else:
        from ravan_flwr.launch.timed_grid import TimedGrid  # noqa: PLC0415 (few runs have one)

        grid = TimedGrid(run_config, number, config)
    with ExitStack() as stack:
        if config.secure_aggregation:
            keys = tempfile.TemporaryDirectory(prefix="ravan-flwr-keys-")
            grid.give_keys(Path(stack.enter_context(keys)))
        grid.clients = stack.enter_context(closing(SideBySide(run_config, config, number)))
        server_app.run(grid, context, callbacks)
    run_dir = Path(str(context.state.config_records[server_app.RESULT]["run-dir"]))
    return Simulation(run_dir, RunDirectory(run_dir).read_json("summary.json"))


class InProcessGrid(Grid):
    """Implement Flower's `Grid` over clients that live in this process."""

    in_process = True  # clients run when they are asked for their replies

    def __init__(self, run_config: Mapping[str, Scalar], num_clients: int) -> None:
        identify()
        self._run = replace(Run.create_empty(1), primary_task_type=TaskType.SIMULATION)
        self._waiting: dict[str, Message] = {}
        self._last: dict[tuple[int, str], str] = {}  # by client and kind: the message that waits
        self.clients: SideBySide | None = None  # None: one after the other
        self._timeout = float(run_config.get("round-timeout", KEYS["round-timeout"].default))
        self._until = math.inf  # when the messages that were pushed last are of no use any more
        self._nodes: tuple[list[int], list[NodeInfo]] = [], []  # ids, and what is known of them
        self._contexts = {}
        for node_id in range(1, num_clients + 1):
            node: dict[str, Scalar] = {"partition-id": node_id - 1, "num-partitions": num_clients}
            self._contexts[node_id] = Context(1, node_id, node, RecordDict(), dict(run_config))

    @property
    def processes(self) -> int:
        """Count the processes in which clients compute."""
        return 1 if self.clients is None else self.clients.processes

    def give_keys(self, folder: Path) -> None:
        """Make keys of all clients in a folder, by which they know each other."""
        for node_id, context in self._contexts.items():
            make_keys(folder, node_id - 1)
            context.node_config["secure-keys"] = str(folder)

    def personal_states(self) -> dict[int, Tensors]:
        """Collect the parts of the model that clients have of their own, by partition."""
        parts = {i - 1: own_tensors(context.state) for i, context in self._contexts.items()}
        return {partition: own for partition, own in parts.items() if own is not None}

    def give_personal_states(self, parts: Mapping[int, Tensors]) -> None:
        """Give clients the parts that they had when a run that goes on was stopped."""
        for node_id, context in self._contexts.items():
            if node_id - 1 in parts:
                keep_own(context.state, parts[node_id - 1])

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message; Flower itself now prefers the constructor."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """List all clients, always."""
        return list(self._contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """List the clients: the same list again while they are the same, as the server sees."""
        return self._listed(self.get_node_ids())

    def _listed(self, node_ids: Iterable[int]) -> list[NodeInfo]:
        ids = list(node_ids)
        if self._nodes[0] != ids:
            self._nodes = ids, [NodeInfo(node_id=node) for node in ids]
        return self._nodes[1]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages; their clients run when the replies are pulled."""
        if self.clients is not None:
            self.clients.get_ready()
        self._until = time.monotonic() + self._timeout
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        message_id = str(uuid.uuid4())
        # One of the same kind to the same client that nobody asked for is dropped.
        self._waiting.pop(self._last.pop(node_and_kind(message), ""), None)
        set_message_id(message, message_id)
        self._waiting[message_id] = message
        self._last[node_and_kind(message)] = message_id
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the next client whose turn it is and return its reply; one at a time."""
        ids = {message_id for message_id in message_ids if message_id in self._waiting}
        # Of one there is nothing to choose, and the others that wait are not looked at.
        for message_id in list(ids) if len(ids) == 1 else self._waiting:
            if message_id in ids:
                message = self._waiting.pop(message_id)
                self._last.pop(node_and_kind(message), None)
                try:
                    return [self._deliver(message)]
                except TimeoutError:
                    return []
        return []

    def expect(self, message_ids: Sequence[str]) -> Sequence[str]:
        """Let clients go ahead whose replies will be pulled one by one; return those there are."""
        if self.clients is not None:
            waiting = filter(None, map(self._waiting.get, message_ids))
            self.clients.expect(map(self._job, waiting))
        return message_ids

    def _deliver(self, message: Message) -> Message:
        """Return a client's reply; TimeoutError if it does not come in time."""
        job = self._job(message)
        if self.clients is None:
            reply = reply_of(message, job.context)
        elif (answer := self.clients.answer(job)) is None:
            raise TimeoutError
        else:
            reply = answer
        set_message_id(reply, str(uuid.uuid4()))
        return reply

    def _job(self, message: Message) -> Job:
        return Job(message, self._contexts[message.metadata.dst_node_id], self._until)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push all, then pull all; clients in one process always answer."""
        del timeout
        pushed = list(self.push_messages(messages))
        self.expect(pushed)
        return [reply for message_id in pushed for reply in self.pull_messages([message_id])]


def node_and_kind(message: Message) -> tuple[int, str]:
    """Tell to whom a message goes, and of what kind it is."""
    return message.metadata.dst_node_id, message.metadata.message_type
