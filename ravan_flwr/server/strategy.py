"""The Strategy: roster, sampling, rounds, faults; it asks the method for everything else.

Flower's `Strategy.start` has a fixed loop, buffers all replies and knows no checkpoint, so
this one has its own. Replies are folded as they arrive; a bad one is rejected, with its
reason in the record; a round with fewer good ones than `min-replies` stops the run.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import getLogger
from typing import Protocol, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import from_record, num_bytes, to_record
from ravan_flwr.messages.member import Member
from ravan_flwr.messages.wire import check_room, encode, wire_of_round
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors
from ravan_flwr.runs.record import Metrics, RoundRecord
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import Aggregate, open_calibration, outgoing
from ravan_flwr.server.envelope import guard
from ravan_flwr.server.exchange import Patience, in_process
from ravan_flwr.server.ledger import Ledger, mean_of
from ravan_flwr.server.limit import ChangeLimit
from ravan_flwr.server.mailbox import Mailbox
from ravan_flwr.server.nodes import sample
from ravan_flwr.server.optimizer import ServerOptimizer
from ravan_flwr.server.replies import Trained, most_held_back, read_evaluated, read_trained
from ravan_flwr.server.robust import FEWEST
from ravan_flwr.server.roster import Roster

log = getLogger(__name__)


# What the names of the server's memory begin with.
MOMENTS = "server-optimizer/"
CHANGES = "usual-change/"


def _named(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


class Recorder(Protocol):
    """Where a finished round goes: to the record, to the checkpoint, to the screen."""

    def calibrated(self, record: RoundRecord, fixed: Tensors, state: Tensors) -> list[float]:
        """Called after a calibration round; the fingerprint of a model with `fixed` in it."""

    def round_done(self, record: RoundRecord, state: Tensors, memory: Tensors) -> None:
        """Called once a round, before the next one begins; `memory` is what else a run that goes
        on needs."""


class FederatedTuning(Strategy):
    """Rounds of one federated method.

    `backbone` and `seed_fingerprint` are the server's, which every node must share, and
    `derived` is that of the model now. A run that is resumed has a `first_round` above 1, the
    method's `fixed` tensors, if its method has any, the server's `memory` (the optimiser's
    moments, the usual changes), and the number of `partitions` that its nodes shared the data in.
    `measured` is what a client that evaluates must tell. `dealt_out` gives the numbers of examples
    that clients train on, when so many of them share the data.
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
        memory: Tensors | None = None,
        partitions: int | None = None,
        measured: Sequence[str] = ("loss", "accuracy"),
        dealt_out: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.config, self.method = config, method
        self.derived = derived
        self.recorder, self.first_round = recorder, first_round
        self.roster = Roster(
            config.num_clients, backbone, seed_fingerprint, partitions, config.max_share,
            config.min_replies,
        )  # fmt: skip
        self.mail = Mailbox(None if fixed is None else to_record(fixed))
        self._partitions, self._measured = partitions, measured
        self._state: Tensors = {}
        self._moments = _named(memory or {}, MOMENTS)
        step = config.learning_rate * config.local_steps
        usual = _named(memory or {}, CHANGES)
        self._limit = ChangeLimit(config.max_update_norm, step, usual, config.wire)
        self._optimizer = ServerOptimizer(
            config.server_optimizer, config.server_learning_rate, config.server_momentum
        )
        self._left_out: list[int] = []
        self._dealt_out = dealt_out
        self._sizes: Sequence[int] | None = None
        self._ledger = Ledger(0, 0)

    def summary(self) -> None:
        """Say what is about to run."""
        log.info(
            "%s%s, %d trained parameters beside the classifier (%.1f %% of a LoRA of rank %d); "
            "%d clients a round, %d local steps of %d",
            self.config.method, f", rank {self.method.rank}" if self.method.rank else "",
            self.method.trainable_parameters(),
            100 * self.method.trainable_parameters() / self.method.budget, self.config.lora_rank,
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
        guard()
        self._recruit(grid, wait=True)
        self._check_partitions()
        result = Result()
        arrays = initial_arrays
        if self.mail.fixed is None:
            arrays = self._calibrate(grid, arrays, timeout)
        for number in range(self.first_round, num_rounds + 1):
            self._ledger = Ledger(number, self.roster.partitions)
            self._wait_for_enough(grid, timeout)
            messages = list(self.configure_train(number, arrays, train_config, grid))
            with self._ledger.timed("train"):
                enough = min(self.config.clients_per_round, len(messages))
                replies = self._exchange(grid, messages, timeout, enough)
                new, train_metrics = self.aggregate_train(number, replies)
            if new is None or train_metrics is None:
                raise RuntimeError(self._ledger.why_too_few_came(self.config.min_replies))
            arrays = result.arrays = new
            result.train_metrics_clientapp[number] = train_metrics

            metrics: MetricRecord | None = None
            if number % self.config.eval_every == 0 or number == num_rounds:
                with self._ledger.timed("evaluate"):
                    if evaluate_fn is not None:
                        metrics = evaluate_fn(number, arrays)
                    else:
                        asked = list(self.configure_evaluate(number, arrays, evaluate_config, grid))
                        answers = self._exchange(grid, asked, timeout)
                        metrics = self.aggregate_evaluate(number, answers)
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics
            record = self._ledger.record(cast(Metrics, dict(metrics or {})))
            self.recorder.round_done(record, self._state, self._memory)
            self._recruit(grid)
        return result

    def _recruit(self, grid: Grid, *, wait: bool = False) -> None:
        """Let the roster fill; what nodes say of their examples is checked where it counts."""
        counts = self.config.weighting == "examples" or self.config.evaluate_on == "clients"
        self.roster.recruit(grid, wait=wait, dealt_out=self._deal_out if counts else None)

    def _deal_out(self, parts: int) -> Sequence[int] | None:
        """What each client has; None where the server has not what clients share."""
        if self._dealt_out is None:
            return None
        try:
            if self._sizes is None or len(self._sizes) != parts:
                self._sizes = self._dealt_out(parts)
        except (ValueError, OSError, RuntimeError) as error:
            log.warning("what nodes say of their numbers of examples is not checked: %s", error)
            self._dealt_out = self._sizes = None
        return self._sizes

    @property
    def _memory(self) -> Tensors:
        """What a run that goes on needs beside the state."""
        parts = {MOMENTS: self._moments, CHANGES: self._limit.memory}
        return {prefix + k: tensor for prefix, part in parts.items() for k, tensor in part.items()}

    def _check_partitions(self) -> None:
        """A run that goes on must find its data dealt out as it was."""
        now = self.roster.partitions
        dealt_out = not all(member.own_data for member in self.roster.members.values())
        if dealt_out and self._partitions not in (None, now):
            raise ValueError(
                f"resume: the nodes have num-partitions = {now}, expected {self._partitions} as "
                "before, since the data is dealt out by it; start as many clients again"
            )
        self._partitions = now
        if now < self.config.min_replies:
            raise ValueError(
                f"min-replies = {self.config.min_replies}: the nodes have num-partitions = {now}, "
                "and a round no more replies than that; lower it, or start more clients"
            )

    # Calibration.

    def _calibrate(self, grid: Grid, arrays: ArrayRecord, timeout: float) -> ArrayRecord:
        """Hold the method's calibration round, if it has one; the state after it."""
        config, calibration = self.config, self.method.calibration
        if calibration is None:
            return arrays
        step = config.calibration_learning_rate * config.local_steps
        sums = open_calibration(calibration, config.max_update_norm, step, config.robust)
        self._ledger = Ledger(0, self.roster.partitions)
        self._wait_for_enough(grid, timeout)
        kind = f"{MessageType.TRAIN}.calibrate"
        everyone = calibration.everyone
        members = self._able(grid) if everyone else self._sample(grid, 0)
        enough = len(members) if everyone else self.config.clients_per_round
        messages = [self.mail.message(m, kind, 0, arrays, ConfigRecord()) for m in members]
        for member, trained, bytes_up, bytes_down in self._valid(
            0, self._exchange(grid, messages, timeout, enough)
        ):
            try:
                sums.add(trained.upload, self._weight(member))
            except ValueError as error:
                self._reject(member, error)
                continue
            self._use(member, trained, [], bytes_up, bytes_down)
        least = config.min_replies
        if config.robust != "none":
            least = max(least, FEWEST)
        if len(self._ledger.clients) < least:
            raise RuntimeError(self._ledger.why_too_few_came(least))
        fixed, changed = sums.close()
        self.mail.keep_fixed(to_record(fixed))
        state = from_record(arrays) | changed
        self.derived = self.recorder.calibrated(self._ledger.record({}), fixed, state)
        return to_record(state)

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for each sampled client, with what the method sends it."""
        self._state = from_record(arrays)
        broadcasts: dict[float, ArrayRecord] = {}  # by share: most methods have one for all
        for member in self._sample(grid, server_round):
            share = member.share if self.method.parts else 1.0
            if share not in broadcasts:
                sent = outgoing(self.method, self._state, share)
                broadcasts[share] = self._coded(sent, server_round)
            kind = MessageType.TRAIN
            yield self.mail.message(member, kind, server_round, broadcasts[share], config)

    def _coded(self, tensors: Tensors, server_round: int) -> ArrayRecord:
        """As they travel."""
        config = self.config
        random = generator(config.seed, "wire down", server_round)
        return to_record(encode(tensors, config.wire, random))

    def _able(self, grid: Grid) -> list[Member]:
        """The members that are connected and can afford to train; the others are left out."""
        members = self.roster.present(grid)
        able = [member for member in members if self.method.can_train(member.share)]
        left_out = [m.partition_id for m in members if not self.method.can_train(m.share)]
        if left_out != self._left_out:
            log.info(
                "%d clients cannot afford the whole of %s and are left out: partitions %s",
                len(left_out), self.config.method, ", ".join(map(str, left_out)) or "none",
            )  # fmt: skip
        self._ledger.left_out = self._left_out = left_out
        everybody = self.roster.members.values()
        if not any(self.method.can_train(member.share) for member in everybody):
            shares = ", ".join(sorted({f"{member.share:g}" for member in everybody}))
            raise ValueError(
                f"method {self.config.method!r} is trained whole or not at all, and no client "
                f"can afford it: got budgets of {shares}, expected one of 1; use a method that "
                "can be trained in part, or budgets=full"
            )
        return able

    def _sample(self, grid: Grid, server_round: int) -> list[Member]:
        """The clients of a round, and those that are asked in case some are silent."""
        config = self.config
        able = self._able(grid)
        kind = MessageType.TRAIN
        members = self.roster.rested(able, kind, server_round, config.min_replies)
        self._ledger.resting = [m.partition_id for m in able if m not in members]
        number = min(config.clients_per_round, len(members))
        spare = min(math.ceil(number * (config.over_sample - 1) - 1e-9), len(members) - number)
        return sample(members, number, config.seed, server_round, spare)

    def _weight(self, member: Member) -> float:
        """A reply's weight in a mean."""
        return float(self._examples(member)) if self.config.weighting == "examples" else 1.0

    def _examples(self, member: Member) -> int:
        """As how many examples a client's count."""
        return self.roster.examples(member, self.config.max_examples)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies as they come; (None, None) if none was valid."""
        aggregate = Aggregate(self.method, self._state, self._limit, self.config.robust)
        for member, trained, bytes_up, bytes_down in self._valid(server_round, replies):
            try:
                aggregate.offer(trained.upload, member.share, self._weight(member))
            except ValueError as error:
                self._reject(member, error)
                continue
            self._use(member, trained, self.method.heads_in(trained.upload), bytes_up, bytes_down)
        if aggregate.count < self.config.min_replies:
            return None, None
        self._close(aggregate)
        return to_record(self._state), MetricRecord({"train-loss": self._ledger.train_loss})

    def _close(self, aggregate: Aggregate) -> None:
        """Take the next state; one that cannot be is refused, and the state stays as it was."""
        number = self._ledger.number
        if self.config.robust != "none" and aggregate.count < FEWEST:
            log.warning(
                "round %d: %d replies came, and robust = %r changes nothing with fewer than %d",
                number, aggregate.count, self.config.robust, FEWEST,
            )  # fmt: skip
        try:
            mean = aggregate.close()
            state, moments = self._optimizer.step(self._state, mean, self._moments)
            check_room(state, self.config.wire)  # else it could never be sent
        except ValueError as error:
            self._ledger.refused = str(error)
            log.warning(
                "round %d has no effect, the state stays as it was: %s; see who took part in it",
                number, error,
            )  # fmt: skip
        else:
            self._state, self._moments = state, moments

    def _valid(
        self, server_round: int, replies: Iterable[Message]
    ) -> Iterator[tuple[Member, Trained, int, int]]:
        """Replies to training messages that are of this round and of the server's bases."""
        for reply in replies:
            member, bytes_down = self.mail.sender(reply, self._ledger)
            try:
                wire = wire_of_round(self.config.wire, server_round)
                most = self._most_numbers(member.share)
                trained = read_trained(reply, member, server_round, self.derived, wire, most)
            except ValueError as error:
                self._reject(member, error)
            else:
                bytes_up = num_bytes(reply.content.array_records["arrays"])
                yield member, trained, bytes_up, bytes_down

    def _most_numbers(self, share: float) -> int:
        """How many numbers an upload of a client with that share has, at most."""
        shapes = self.method.upload_shapes(share).values()
        return sum(map(math.prod, shapes)) + (
            self._state[CLASSIFIER].numel() if CLASSIFIER in self._state else 0
        )

    def _use(
        self,
        member: Member,
        trained: Trained,
        selected: list[list[int]],
        bytes_up: int,
        bytes_down: int,
    ) -> None:
        self.mail.accept(member)
        self._ledger.use(member, trained.metrics, selected, bytes_up, bytes_down)

    # Evaluation on the clients' own validation parts.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for every client."""
        arrays = self._coded(from_record(arrays), server_round)
        members = self.roster.present(grid)
        kind = MessageType.EVALUATE
        for member in self.roster.rested(members, kind, server_round, self.config.min_replies):
            yield self.mail.message(member, kind, server_round, arrays, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean over all clients' validation examples."""
        answers: dict[int, tuple[float, dict[str, float]]] = {}
        share = self.config.validation_share
        for reply in replies:
            member, _ = self.mail.sender(reply, self._ledger)
            try:
                most = most_held_back(self._examples(member), share)
                answer = read_evaluated(reply, server_round, self._measured, most)
            except ValueError as error:
                self._reject(member, error)
            else:
                answers[member.partition_id] = answer
                self.mail.accept(member)
        if not answers:
            return None
        ordered = [answers[key] for key in sorted(answers)]
        numbers = [number for number, _ in ordered]
        return MetricRecord(
            {
                name: mean_of([values[name] for _, values in ordered], numbers)
                for name in ordered[0][1]
            }
        )

    def _exchange(
        self, grid: Grid, messages: list[Message], timeout: float, enough: float = math.inf
    ) -> Iterator[Message]:
        """Send, and the replies as they come; nobody waits for more than `enough` good ones."""
        config = self.config
        # In one process clients run one after the other, and none is slow beside the others.
        grace = math.inf if in_process(grid) else config.straggler_grace

        def patience(asked: int) -> Patience:
            return Patience(timeout, asked, config.min_replies, grace, enough)

        return self.mail.exchange(grid, messages, self.roster.nodes, patience, self._ledger)

    def _reject(self, member: Member, reason: object) -> None:
        self.mail.reject(member, reason, self._ledger)

    def _wait_for_enough(self, grid: Grid, timeout: float) -> None:
        """Until as many members are connected as a round needs, or the time is up."""
        deadline = time.monotonic() + timeout
        while len(self._able(grid)) < self.config.min_replies:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.2)
            self._recruit(grid)
