"""The Strategy: roster, sampling, rounds, faults; it asks the method for everything else.

Flower's `Strategy.start` has a fixed loop, buffers all replies and knows no checkpoint, so
this one has its own. Replies are folded as they arrive; a bad one is rejected, with its
reason in the record; a round without a valid one stops the run.
"""

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
from ravan_flwr.exchange import check_round, content_of, finite, pull_replies, push
from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.payload import FIXED, from_record, hash_of, num_bytes, to_record
from ravan_flwr.recruiting import Recruiter, listed
from ravan_flwr.roster import (
    Member,
    check_derived,
    sample,
)

log = getLogger(__name__)


class Recorder(Protocol):
    """Where a finished round goes: to the record, to the checkpoint, to the screen."""

    def calibrated(self, record: dict[str, Any], fixed: Tensors) -> list[float]:
        """Called after a calibration round; the fingerprint of a model with `fixed` in it."""

    def round_done(self, record: dict[str, Any], state: Tensors) -> None:
        """Called once a round, before the next one begins."""


@dataclass(frozen=True)
class Rejection:
    """A reply that was not used, and why."""

    client: str
    reason: str


class PeftStrategy(Strategy):
    """Rounds of one federated method.

    `backbone` and `seed_fingerprint` are the server's, which every node must share, and
    `derived` is that of the model now. A run that is resumed has a `first_round` above 1, and
    the method's `fixed` tensors, if its method has any.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        *,
        backbone: str,
        seed_fingerprint: list[float],
        derived: list[float],
        recorder: Recorder,
        first_round: int = 1,
        fixed: Tensors | None = None,
    ) -> None:
        self.config, self.method = config, method
        self.derived = derived
        self.recorder, self.first_round = recorder, first_round
        self.roster = Recruiter(config.num_clients, backbone, seed_fingerprint)
        self._fixed = to_record(fixed) if fixed else None
        self._holders: set[int] = set()  # nodes that have the fixed tensors
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
        if self._fixed is None:
            self._calibrate(grid, arrays, timeout)
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
            record = self._record(number, self._mean_loss(), metrics or {}, started)
            self.recorder.round_done(record, self._state)
            self.roster.recruit(grid)
        return result

    # Calibration.

    def _calibrate(self, grid: Grid, arrays: ArrayRecord, timeout: float) -> None:
        """Hold the method's calibration round, if it has one, with every node."""
        sums = self.method.open_calibration()
        if sums is None:
            return
        started = time.perf_counter()
        self._clients, self._rejected = [], []
        kind = f"{MessageType.TRAIN}.calibrate"
        messages = [
            self._message(member, kind, 0, arrays, ConfigRecord())
            for member in self.roster.present(grid)
        ]
        for member, content, metrics, bytes_down in self._valid(
            0, self._exchange(grid, messages, timeout)
        ):
            try:
                sums.add(from_record(content.array_records["arrays"]))
            except (ValueError, KeyError) as error:
                self._reject(member, error)
                continue
            self._note(member, content, metrics, bytes_down, [])
        if not self._clients:
            raise RuntimeError(self._why_no_reply(0))
        fixed = sums.close()
        self._fixed = to_record(fixed)
        record = self._record(0, self._mean_loss(), {}, started)
        self.derived = self.recorder.calibrated(record, fixed)

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
        for member, content, metrics, bytes_down in self._valid(server_round, replies):
            try:
                upload = from_record(content.array_records["arrays"])
                aggregate.offer(upload, member.share)
            except (ValueError, KeyError) as error:
                self._reject(member, error)
                continue
            self._note(member, content, metrics, bytes_down, self.method.heads_in(upload))
        if not aggregate.count:
            return None, None
        self._state = aggregate.close()
        return to_record(self._state), MetricRecord({"train-loss": self._mean_loss()})

    def _valid(
        self, server_round: int, replies: Iterable[Message]
    ) -> Iterator[tuple[Member, RecordDict, dict[str, float], int]]:
        """Replies to training messages that are of this round and of the server's bases."""
        for reply in replies:
            member, bytes_down = self._sent.pop(reply.metadata.reply_to_message_id)
            try:
                content = content_of(reply)
                metrics = self._train_metrics(content, server_round, member)
            except (ValueError, KeyError) as error:
                self._reject(member, error)
            else:
                yield member, content, metrics, bytes_down
        self._reject_silent()

    def _note(
        self,
        member: Member,
        content: RecordDict,
        metrics: dict[str, float],
        bytes_down: int,
        selected: list[list[int]],
    ) -> None:
        """Record a client whose reply was used."""
        if self._fixed is not None:
            self._holders.add(member.node_id)
        heads = sum(map(len, selected)) / max(1, len(selected))
        self._clients.append(
            {
                "partition-id": member.partition_id,
                "heads": int(heads) if heads.is_integer() else heads,
                "selected": selected,
                "examples": member.examples,
                "train-loss": metrics["train-loss"],
                "seconds": round(metrics["seconds"], 4),
                "bytes-up": num_bytes(content.array_records["arrays"]),
                "bytes-down": bytes_down,
            }
        )

    def _mean_loss(self) -> float:
        """Over the clients, in an order in which that of arrival plays no part."""
        losses = [c["train-loss"] for c in sorted(self._clients, key=_partition)]
        return float(sum(losses) / len(losses))

    def _record(
        self, number: int, loss: float, metrics: Mapping[str, Any], started: float
    ) -> dict[str, Any]:
        """A line of `rounds.jsonl`."""
        return {
            "round": number,
            "train-loss": loss,
            "metrics": dict(metrics),
            "clients": sorted(self._clients, key=_partition),
            "rejected": [vars(rejection) for rejection in self._rejected],
            "seconds": round(time.perf_counter() - started, 4),
        }

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
        if self._fixed is not None:
            settings["fixed-hash"] = hash_of(self._fixed)
            if member.node_id not in self._holders:
                content[FIXED] = self._fixed
        return Message(content, member.node_id, kind, group_id=str(number))

    def _exchange(self, grid: Grid, messages: list[Message], timeout: float) -> Iterator[Message]:
        """Send, then yield replies as they arrive, until all came or the time is up."""
        members = self.roster.members
        self._sent = {}
        sizes = [sum(map(num_bytes, m.content.array_records.values())) for m in messages]
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
        self._holders.discard(member.node_id)
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


def _partition(client: Mapping[str, Any]) -> int:
    return int(client["partition-id"])
