"""Call the ClientApp from Flower's `Grid`, in the process of the ServerApp.

A client runs when its reply is pulled, so at most one reply waits. Or several clients run at a time
in worker processes (parallel_clients.py), with the same results.
"""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from logging import getLogger
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.client.client_request import read_personal, store_personal
from ravan_flwr.config.keys import KEYS
from ravan_flwr.flower_private import NodeInfo, Run, TaskType, set_message_id
from ravan_flwr.launch.worker_process import compute_reply, identify
from ravan_flwr.launch.workers import Job, WorkerPool
from ravan_flwr.messages.arrays import FIXED
from ravan_flwr.methods.base import Tensors
from ravan_flwr.optional import MAKE_KEYS, load
from ravan_flwr.specs import Scalar

log = getLogger(__name__)

LOCAL_WORK = (MessageType.TRAIN, MessageType.EVALUATE)  # the messages that workers answer


class InProcessGrid(Grid):
    """Flower's `Grid` over clients in this process."""

    in_process = True  # clients run when their replies are pulled

    def __init__(self, run_config: Mapping[str, Scalar], num_clients: int) -> None:
        identify()
        self._run = replace(Run.create_empty(1), primary_task_type=TaskType.SIMULATION)
        self._waiting: dict[str, Message] = {}
        self._last: dict[tuple[int, str], str] = {}  # id of the waiting message by client and kind
        # Start workers, if any, before the first client computes.
        self.start_pool: Callable[[], WorkerPool | None] = lambda: None
        self._pool: WorkerPool | None = None  # None: clients run one after the other
        # How many clients train in one pass if there are no workers; called once.
        self.clients_per_pass: Callable[[], int] | None = None
        self._per_pass = 1
        self._trained_ahead = set[str]()  # ids of unanswered messages that were in a pass
        self._expected: Sequence[str] = ()  # ids of messages whose replies will be pulled, in order
        self._timeout = float(run_config.get("round-timeout", KEYS["round-timeout"].default))
        self._until = math.inf  # deadline of the replies to the messages that were pushed last
        self._nodes: tuple[list[int], list[NodeInfo]] = [], []  # ids, and their NodeInfos
        self._contexts = {}
        for node_id in range(1, num_clients + 1):
            node: dict[str, Scalar] = {"partition-id": node_id - 1, "num-partitions": num_clients}
            self._contexts[node_id] = Context(1, node_id, node, RecordDict(), dict(run_config))

    @property
    def processes(self) -> int:
        """Return the number of processes in which clients compute."""
        return 1 if self._pool is None else self._pool.processes

    def close(self) -> None:
        """End all processes of clients."""
        if self._pool is not None:
            self._pool.close()

    def give_keys(self, folder: Path) -> None:
        """Make all clients' signing keys in a folder, and name it in their node configs."""
        for node_id, context in self._contexts.items():
            load(MAKE_KEYS)(folder, node_id - 1)
            context.node_config["secure-keys"] = str(folder)

    def personal_states(self) -> dict[int, Tensors]:
        """Return the clients' personal parameters, by partition."""
        parts = {i - 1: read_personal(context.state) for i, context in self._contexts.items()}
        return {
            partition: personal for partition, personal in parts.items() if personal is not None
        }

    def give_personal_states(self, parts: Mapping[int, Tensors]) -> None:
        """Restore the clients' personal parameters in a resumed run."""
        for node_id, context in self._contexts.items():
            if node_id - 1 in parts:
                store_personal(context.state, parts[node_id - 1])

    def give_fixed(self, fixed: ArrayRecord, partitions: Iterable[int]) -> None:
        """Restore the fixed tensors of clients that had received them, in a resumed run."""
        for partition in partitions:
            self._contexts[partition + 1].state[FIXED] = fixed

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
        """Return a new message; Flower now prefers the constructor."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all clients."""
        return list(self._contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the NodeInfos of all clients: the same list object while the ids are the same."""
        return self._listed(self.get_node_ids())

    def _listed(self, node_ids: Iterable[int]) -> list[NodeInfo]:
        ids = list(node_ids)
        if self._nodes[0] != ids:
            self._nodes = ids, [NodeInfo(node_id=node) for node in ids]
        return self._nodes[1]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages, and return their ids; clients run when their replies are pulled."""
        if self._pool is None:
            self._pool, self.start_pool = self.start_pool(), lambda: None
            if self._pool is None and self.clients_per_pass is not None:
                self._per_pass, self.clients_per_pass = self.clients_per_pass(), None
        self._until = time.monotonic() + self._timeout
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        message_id = str(uuid.uuid4())
        # An unanswered message of the same kind to the same client is dropped.
        self.drop(self._last.get(node_and_type(message), ""))
        set_message_id(message, message_id)
        self._waiting[message_id] = message
        self._last[node_and_type(message)] = message_id
        return message_id

    def drop(self, message_id: str) -> None:
        """Forget a message whose reply will not be pulled."""
        if message := self._waiting.pop(message_id, None):
            self._last.pop(node_and_type(message), None)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the next client; return a list with its reply, or an empty one if it is too late."""
        ids = {message_id for message_id in message_ids if message_id in self._waiting}
        # For a single id, do not search the queue.
        for message_id in list(ids) if len(ids) == 1 else self._waiting:
            if message_id in ids:
                message = self._waiting.pop(message_id)
                self._last.pop(node_and_type(message), None)
                try:
                    return [self._deliver(message)]
                except TimeoutError:
                    return []
        return []

    def expect(self, message_ids: Sequence[str]) -> Sequence[str]:
        """Let workers begin messages whose replies will be pulled; return the ids to pull."""
        self._expected = message_ids
        if self._pool is not None:
            waiting = filter(None, map(self._waiting.get, message_ids))
            self._pool.expect(map(self._job, filter(is_local_work, waiting)))
        return message_ids

    def _deliver(self, message: Message) -> Message:
        """Return a client's reply; TimeoutError if it comes too late."""
        job = self._job(message)
        if self._pool is None or not is_local_work(message):
            if self._pool is None and message.metadata.message_type == MessageType.TRAIN:
                self._train_ahead(message)
            reply = compute_reply(message, job.context)
        elif (answer := self._pool.answer(job)) is None:
            raise TimeoutError
        else:
            reply = answer
        set_message_id(reply, str(uuid.uuid4()))
        return reply

    def _train_ahead(self, message: Message) -> None:
        """Train a client in one pass with the next ones of its budget, unless a pass has done so.

        The messages of these clients are answered as ever; the answers find the results.
        """
        done = self._trained_ahead
        if self._per_pass == 1 or message.metadata.message_id in done:
            return
        # Clients of earlier passes may wait behind this one, which has another budget.
        done.intersection_update(self._waiting)
        waiting = (self._waiting.get(other) for other in self._expected if other not in done)
        others = (one for one in waiting if one is not None and _is_like(one, message))
        messages = [message, *islice(others, self._per_pass - 1)]
        if len(messages) == 1:
            return
        earlier = [self._waiting[message_id].content for message_id in done]
        done.update(one.metadata.message_id for one in messages[1:])
        from ravan_flwr.client.answers import train_ahead  # noqa: PLC0415 (imports transformers)

        try:
            train_ahead([(one.content, self._job(one).context) for one in messages], earlier)
        except Exception as error:  # noqa: BLE001 (out of memory, or what a client's answer raises)
            self._per_pass = 1
            log.warning("clients train one by one from now on, since one pass failed: %s", error)

    def _job(self, message: Message) -> Job:
        return Job(message, self._contexts[message.metadata.dst_node_id], self._until)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push all messages, then pull all replies; `timeout` is not used."""
        del timeout
        pushed = list(self.push_messages(messages))
        self.expect(pushed)
        return [reply for message_id in pushed for reply in self.pull_messages([message_id])]


def node_and_type(message: Message) -> tuple[int, str]:
    """Return the id of a message's client, and the kind of the message."""
    return message.metadata.dst_node_id, message.metadata.message_type


def _is_like(message: Message, other: Message) -> bool:
    """Return whether two messages ask for training with the same budget fraction."""
    types = [one.metadata.message_type for one in (message, other)]
    if types != [MessageType.TRAIN, MessageType.TRAIN]:
        return False
    ours, theirs = (one.content.config_records["config"] for one in (message, other))
    return ours["budget-fraction"] == theirs["budget-fraction"]


def is_local_work(message: Message) -> bool:
    """Return whether workers answer a message of this kind."""
    return message.metadata.message_type.partition(".")[0] in LOCAL_WORK
