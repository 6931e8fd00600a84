"""The Strategy: roster, sampling, rounds, faults; it asks the method for everything else.

Flower's `Strategy.start` has a fixed loop, buffers all replies and knows no checkpoint, so
this one has its own. Replies are folded as they arrive; a bad one is rejected, with its
reason in the record; a round without a valid one stops the run.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ravan_flwr.aggregation import Aggregate
from ravan_flwr.config import Config
from ravan_flwr.exchange import check_round, content_of, finite, pull_replies, push
from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.payload import from_record, num_bytes, to_record
from ravan_flwr.recruiting import Recruiter, listed
from ravan_flwr.roster import (
    Member,
    check_derived,
    sample,
)

log = getLogger(__name__)


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
        self.derived = derived
        self.recorder, self.first_round = recorder, first_round
        self.roster = Recruiter(config.num_clients, backbone, derived)
        self._state: Tensors = {}
        self._sent: dict[str, tuple[Member, int]] = {}  # message id -> whom, how many bytes
        self._clients: list[dict[str, Any]] = []
        self._rejected: list[Rejection] = []

    def summary(self) -> None:
        """Say what is about to run."""
        log.info(
            "%s, rank %d, %d parameters in the adapters; %d clients a round, %d local steps of %d",
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
        self.roster.recruit(grid, wait=True)
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
            self.roster.recruit(grid)
        return result

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for each sampled client, with what the method sends it."""
        self._state = from_record(arrays)
        self._clients, self._rejected = [], []
        members = self.roster.present(grid)
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
                content = content_of(reply)
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
        check_round(metrics, server_round)
        derived = metrics["derived"]
        check_derived(derived if isinstance(derived, list) else [], self.derived, member.versions)
        return {key: finite(metrics, key) for key in ("train-loss", "seconds")}

    # Evaluation on the clients' own validation parts.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for every client."""
        for member in self.roster.present(grid):
            yield self._message(member, MessageType.EVALUATE, server_round, arrays, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean over all clients' validation examples."""
        answers: dict[int, tuple[float, dict[str, float]]] = {}
        for reply in replies:
            member, _ = self._sent.pop(reply.metadata.reply_to_message_id)
            try:
                metrics = content_of(reply).metric_records["metrics"]
                check_round(metrics, server_round)
                values = {key: finite(metrics, key) for key in metrics if key != "round"}
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
        members = self.roster.members
        self._sent = {}
        sizes = [num_bytes(m.content.array_records["arrays"]) for m in messages]
        everyone = [members[m.metadata.dst_node_id] for m in messages]
        pushed = {id(m) for m in push(grid, messages)}
        for message, member, size in zip(messages, everyone, sizes, strict=True):
            if id(message) in pushed:
                self._sent[message.metadata.message_id] = (member, size)
            else:
                self._reject(member, "the message could not be sent")
        self._timeout = timeout
        yield from pull_replies(grid, set(self._sent), timeout)

    def _reject(self, member: Member, reason: object) -> None:
        text = f"missing {reason}" if isinstance(reason, KeyError) else str(reason)
        self._rejected.append(Rejection(f"partition {member.partition_id}", text))
        log.warning("rejected partition %d: %s", member.partition_id, text)

    def _reject_silent(self) -> None:
        for member, _ in self._sent.values():
            self._reject(member, f"no reply within {self._timeout:g} s")
        self._sent = {}

    def _why_no_reply(self, number: int) -> str:
        reasons = listed(f"{r.client}: {r.reason}" for r in self._rejected)
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


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number
