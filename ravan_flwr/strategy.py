"""The Strategy: roster, sampling, rounds, faults; it asks the method for everything else.

Flower's `Strategy.start` has a fixed loop, buffers all replies and knows no checkpoint, so
this one has its own. Replies are folded as they arrive; a bad one is rejected, with its
reason in the record; a round without a valid one stops the run.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ravan_flwr.aggregation import Aggregate
from ravan_flwr.config import Config
from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.payload import from_record, num_bytes, to_record
from ravan_flwr.roster import (
    Member,
    check_derived,
    check_same_app,
    code_fingerprint,
    read_member,
    sample,
)

log = getLogger(__name__)

NODES_TIMEOUT = 60.0  # seconds to wait for the first node
ROSTER_TIMEOUT = 20.0  # seconds to wait for the rest, from the last that came
QUERY_TIMEOUT = 300.0  # seconds to wait for answers: a node loads its model and data first


class Recorder(Protocol):
    """Where a finished round goes: to the record, to the checkpoint, to the screen."""

    def round_done(self, record: dict[str, Any], state: Tensors) -> None:
        """Called once a round, before the next one begins."""


@dataclass(frozen=True)
class Rejection:
    """A reply that was not used, and why."""

    client: str
    reason: str


class PeftStrategy(Strategy):
    """Rounds of one federated method.

    `backbone` and `derived` are the server's fingerprints, which every node must share.
    `first_round` is above 1 when a run is resumed.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        *,
        backbone: str,
        derived: list[float],
        recorder: Recorder,
        first_round: int = 1,
    ) -> None:
        self.config, self.method = config, method
        self.backbone, self.derived = backbone, derived
        self.recorder, self.first_round = recorder, first_round
        self._code = code_fingerprint()
        self.roster: dict[int, Member] = {}  # by node id
        self.refused: dict[int, str] = {}  # node id -> reason
        self._state: Tensors = {}
        self._sent: dict[str, tuple[Member, int]] = {}  # message id -> whom, how many bytes
        self._clients: list[dict[str, Any]] = []
        self._rejected: list[Rejection] = []

    def summary(self) -> None:
        """Say what is about to run."""
        log.info(
            "%s, rank %d, %d trainable parameters; %d clients a round, %d local steps of %d",
            self.config.method, self.method.rank, self.method.trainable_parameters(),
            self.config.clients_per_round, self.config.local_steps, self.config.batch_size,
        )  # fmt: skip

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds; the arrays of the last are the result's."""
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or ConfigRecord()
        self.summary()
        self.recruit(grid, wait=True)
        result = Result()
        arrays = initial_arrays
        for number in range(self.first_round, num_rounds + 1):
            started = time.perf_counter()
            messages = list(self.configure_train(number, arrays, train_config, grid))
            new, train_metrics = self.aggregate_train(
                number, self._exchange(grid, messages, timeout)
            )
            if new is None or train_metrics is None:
                raise RuntimeError(self._why_no_reply(number))
            arrays = result.arrays = new
            result.train_metrics_clientapp[number] = train_metrics

            metrics: MetricRecord | None = None
            if number % self.config.eval_every == 0 or number == num_rounds:
                if evaluate_fn is not None:
                    metrics = evaluate_fn(number, arrays)
                else:
                    asked = list(self.configure_evaluate(number, arrays, evaluate_config, grid))
                    metrics = self.aggregate_evaluate(
                        number, self._exchange(grid, asked, timeout)
                    )  # fmt: skip
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics
            self.recorder.round_done(
                {
                    "round": number,
                    "train-loss": train_metrics["train-loss"],
                    "metrics": dict(metrics or {}),
                    "clients": sorted(self._clients, key=lambda c: c["partition-id"]),
                    "rejected": [vars(rejection) for rejection in self._rejected],
                    "seconds": round(time.perf_counter() - started, 4),
                },
                self._state,
            )
            self.recruit(grid)
        return result

    # Who takes part.

    def recruit(self, grid: Grid, *, wait: bool = False) -> None:
        """Ask every node that is new the one question; at the start, wait for them to come."""
        patience = time.monotonic() + (NODES_TIMEOUT if wait else 0.0)
        while True:
            known = self.roster.keys() | self.refused.keys()
            if new := [node_id for node_id in grid.get_node_ids() if node_id not in known]:
                self._ask(grid, new)
                patience = time.monotonic() + (ROSTER_TIMEOUT if wait else 0.0)
            if len(self.roster) + len(self.refused) >= self._expected_nodes():
                break
            if time.monotonic() >= patience:
                break
            time.sleep(0.05)
        if not self.roster:
            raise RuntimeError(
                f"no node to train on: {_listed(self.refused.values()) or 'none is connected'}. "
                "Expected at least one that can train; start SuperNodes"
            )
        if wait:
            self._introduce()

    def _expected_nodes(self) -> int:
        return max((m.num_partitions for m in self.roster.values()), default=1)

    def _introduce(self) -> None:
        """Say who is there, and how to have as many as the preset means."""
        members = self.roster.values()
        shares = sorted({m.share for m in members})
        log.info(
            "%d nodes with %d examples, budgets %s, on %s",
            len(members), sum(m.examples for m in members),
            ", ".join(f"{s:g}" for s in shares), ", ".join(sorted({m.device for m in members})),
        )  # fmt: skip
        if (missing := self._expected_nodes() - len(members)) > 0:
            log.warning("%d of the nodes' partitions have no node; they are left out", missing)
        if len(members) < self.config.num_clients:
            log.info(
                "the preset means %d clients; a simulation has them with: flwr run . --stream "
                '--federation-config "num-supernodes=%d client-resources-num-cpus=1"',
                self.config.num_clients, self.config.num_clients,
            )  # fmt: skip

    def _ask(self, grid: Grid, nodes: Iterable[int]) -> None:
        messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in nodes]
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in _pushed(grid, messages)}
        for reply in _replies(grid, set(asked), QUERY_TIMEOUT):
            node_id = asked.pop(reply.metadata.reply_to_message_id)
            try:
                member = read_member(node_id, _content(reply).config_records["member"])
                taken = {m.partition_id: m.node_id for m in self.roster.values()}
                if member.partition_id in taken:
                    raise ValueError(
                        f"partition-id {member.partition_id} is taken by node "
                        f"{taken[member.partition_id]}; give every SuperNode its own"
                    )
                check_same_app(member, self._code, self.backbone, self.derived)
            except (ValueError, KeyError) as error:
                self._refuse(node_id, str(error))
            else:
                self.roster[node_id] = member
        for node_id in asked.values():
            self._refuse(node_id, f"no answer within {QUERY_TIMEOUT:g} s")

    def _refuse(self, node_id: int, reason: str) -> None:
        self.refused[node_id] = reason
        log.warning("refused node %d: %s", node_id, reason)

    def members_present(self, grid: Grid) -> list[Member]:
        """The members that are connected now, by partition id."""
        present = set(grid.get_node_ids())
        members = [m for m in self.roster.values() if m.node_id in present]
        return sorted(members, key=lambda member: member.partition_id)

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for each sampled client, with what the method sends it."""
        self._state = from_record(arrays)
        self._clients, self._rejected = [], []
        members = self.members_present(grid)
        number = min(self.config.clients_per_round, len(members))
        for member in sample(members, number, self.config.seed, server_round):
            broadcast = to_record(self.method.broadcast(self._state, member.share))
            yield self._message(member, MessageType.TRAIN, server_round, broadcast, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies as they come; (None, None) if none was valid."""
        aggregate = Aggregate(self.method, self._state, self.config.max_update_norm)
        losses: dict[int, float] = {}
        for reply in replies:
            member, bytes_down = self._sent.pop(reply.metadata.reply_to_message_id)
            try:
                content = _content(reply)
                metrics = self._train_metrics(content, server_round, member)
                record = content.array_records["arrays"]
                upload = from_record(record)
                aggregate.offer(upload, member.share)
            except (ValueError, KeyError) as error:
                self._reject(member, error)
                continue
            losses[member.partition_id] = metrics["train-loss"]
            selected = self.method.heads_in(upload)
            self._clients.append(
                {
                    "partition-id": member.partition_id,
                    "heads": _plain(sum(len(heads) for heads in selected) / len(selected)),
                    "selected": selected,
                    "examples": member.examples,
                    "train-loss": metrics["train-loss"],
                    "seconds": round(metrics["seconds"], 4),
                    "bytes-up": num_bytes(record),
                    "bytes-down": bytes_down,
                }
            )
        self._reject_silent()
        if not aggregate.count:
            return None, None
        self._state = aggregate.close()
        # Summed in the order of the partitions, so that the order of arrival does not matter.
        mean = sum(losses[k] for k in sorted(losses)) / len(losses)
        return to_record(self._state), MetricRecord({"train-loss": mean})

    def _train_metrics(
        self, content: RecordDict, server_round: int, member: Member
    ) -> dict[str, float]:
        metrics = content.metric_records["metrics"]
        _check_round(metrics, server_round)
        derived = metrics["derived"]
        check_derived(derived if isinstance(derived, list) else [], self.derived, member.versions)
        return {key: _finite(metrics, key) for key in ("train-loss", "seconds")}

    # Evaluation on the clients' own validation parts.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for every client."""
        for member in self.members_present(grid):
            yield self._message(member, MessageType.EVALUATE, server_round, arrays, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean over all clients' validation examples."""
        answers: dict[int, tuple[float, dict[str, float]]] = {}
        for reply in replies:
            member, _ = self._sent.pop(reply.metadata.reply_to_message_id)
            try:
                metrics = _content(reply).metric_records["metrics"]
                _check_round(metrics, server_round)
                values = {key: _finite(metrics, key) for key in metrics if key != "round"}
                answers[member.partition_id] = (values.pop("num-examples"), values)
            except (ValueError, KeyError) as error:
                self._reject(member, error)
        self._reject_silent()
        if not answers:
            return None
        ordered = [answers[key] for key in sorted(answers)]
        total = sum(number for number, _ in ordered)
        names = ordered[0][1]
        return MetricRecord(
            {name: sum(n * values[name] for n, values in ordered) / total for name in names}
        )

    # Messages.

    def _message(
        self, member: Member, kind: str, number: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> Message:
        settings = ConfigRecord({**config, "round": number})
        content = RecordDict({"arrays": arrays, "config": settings})
        return Message(content, member.node_id, kind, group_id=str(number))

    def _exchange(self, grid: Grid, messages: list[Message], timeout: float) -> Iterator[Message]:
        """Send, then yield replies as they arrive, until all came or the time is up."""
        members = {m.node_id: m for m in self.roster.values()}
        self._sent = {}
        sizes = [num_bytes(m.content.array_records["arrays"]) for m in messages]
        everyone = [members[m.metadata.dst_node_id] for m in messages]
        pushed = {id(m) for m in _pushed(grid, messages)}
        for message, member, size in zip(messages, everyone, sizes, strict=True):
            if id(message) in pushed:
                self._sent[message.metadata.message_id] = (member, size)
            else:
                self._reject(member, "the message could not be sent")
        self._timeout = timeout
        yield from _replies(grid, set(self._sent), timeout)

    def _reject(self, member: Member, reason: object) -> None:
        text = f"missing {reason}" if isinstance(reason, KeyError) else str(reason)
        self._rejected.append(Rejection(f"partition {member.partition_id}", text))
        log.warning("rejected partition %d: %s", member.partition_id, text)

    def _reject_silent(self) -> None:
        for member, _ in self._sent.values():
            self._reject(member, f"no reply within {self._timeout:g} s")
        self._sent = {}

    def _why_no_reply(self, number: int) -> str:
        reasons = _listed(f"{r.client}: {r.reason}" for r in self._rejected)
        message = (
            f"round {number}: got no valid reply, expected at least one: "
            f"{reasons or 'no client is connected'}."
        )
        if number > 1:
            message += (
                f" Round {number - 1} is in the last checkpoint; mend the clients and go on from "
                "there with resume=RUN"
            )
        return message


def _listed(reasons: Iterable[str], most: int = 3) -> str:
    """Different reasons, the first few of them."""
    different = list(dict.fromkeys(reasons))
    more = len(different) - most
    return "; ".join(different[:most]) + (f"; and {more} more" if more > 0 else "")


def _pushed(grid: Grid, messages: list[Message]) -> list[Message]:
    """Push, and return those messages that were taken."""
    taken = set(grid.push_messages(messages))
    return [message for message in messages if message.metadata.message_id in taken]


def _replies(grid: Grid, waiting: set[str], timeout: float) -> Iterator[Message]:
    """Replies to these messages as they arrive; polls often at first, then less."""
    deadline = time.monotonic() + timeout
    pause = 0.005
    while waiting and time.monotonic() < deadline:
        came = False
        for reply in grid.pull_messages(waiting):
            if reply.metadata.reply_to_message_id in waiting:
                came = True
                waiting.remove(reply.metadata.reply_to_message_id)
                yield reply
        pause = 0.005 if came else min(pause * 1.5, 0.2)
        if not came:
            time.sleep(pause)


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        reason = (reply.error.reason or "").strip() or "no reason given"
        raise ValueError(f"it failed with code {reply.error.code}: {reason}")
    return reply.content


def _check_round(metrics: Mapping[str, Any], expected: int) -> None:
    if metrics["round"] != expected:
        raise ValueError(f"reply is of round {metrics['round']}, expected {expected}")


def _finite(metrics: Mapping[str, Any], key: str) -> float:
    value = metrics[key]
    if isinstance(value, list) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r}, expected a finite number")
    return float(value)


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number
