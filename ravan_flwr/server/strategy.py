"""Run rounds of federated tuning: sample clients, send messages, sum up updates, evaluate, record.

Flower's `Strategy.start` has a fixed loop, buffers all replies and knows no checkpoint, so `start`
is overridden. Replies are taken as they arrive (round.py); what differs by method is the method's.
A round with fewer valid replies than `min-replies` stops the run.
"""

from collections.abc import Callable, Iterable, Sequence
from logging import getLogger
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors
from ravan_flwr.runs.callback import Callbacks
from ravan_flwr.runs.console import count
from ravan_flwr.runs.record import Metrics
from ravan_flwr.runs.status import RunStatus
from ravan_flwr.server.buffered import Flight
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.release import Calibrated, release_of
from ravan_flwr.server.reply_collector import MessageBuilder
from ravan_flwr.server.reply_fetcher import in_process, simulating
from ravan_flwr.server.round import Round
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.server.state import ServerState
from ravan_flwr.server.status import Status
from ravan_flwr.server.stop_conditions import StopCondition
from ravan_flwr.server.superlink import ask_again, guard
from ravan_flwr.server.transport import transport_of
from ravan_flwr.simulated_time.clock import REAL, Clock, clock_of
from ravan_flwr.tasks.base import Measures

log = getLogger(__name__)


class FederatedTuning(Strategy):
    """Run rounds of one federated method.

    `backbone` and `seed_fingerprint` are the server's, which every node must share, and
    `derived` is that of the model now. A run that is resumed has a `first_round` above 1, the
    method's `fixed` tensors, if its method has any, the server's `memory` (the optimiser's
    moments), the number of `partitions` that its nodes shared the data in, and
    those that have `trained` before. `load_fixed` puts the tensors of a calibration into the
    server's model, and returns its new fingerprint. `callbacks` see what the run does, and each
    round before the next one begins.
    `measured` names the metrics that a client reports of an evaluation. `partition_sizes` returns
    the numbers of examples that clients train on, when so many of them share the data. `limits` may
    end the run before its last round; so may `privacy`, which is what a private run may spend.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        *,
        backbone: str,
        seed_fingerprint: list[float],
        derived: list[float],
        load_fixed: Callable[[Tensors], list[float]],
        first_round: int = 1,
        fixed: Tensors | None = None,
        memory: Tensors | None = None,
        partitions: int | None = None,
        trained: Iterable[int] = (),
        time: float = 0.0,
        measured: Measures | None = None,
        partition_sizes: Callable[[int], Sequence[int]] | None = None,
        callbacks: Iterable[object] = (),
        limits: Iterable[StopCondition] = (),
        privacy: PrivacyBudget | None = None,
    ) -> None:
        self.config, self.method = config, method
        self.callbacks, self.first_round = Callbacks(callbacks), first_round
        self._load_fixed, self.privacy = load_fixed, privacy
        self.measured = measured or Measures()
        self._fetched: set[int] = set()  # nodes that have the app bundle
        self.clock: Clock = REAL
        self._began = 0.0
        self._time_before = time  # seconds that the run has taken, of one that is resumed
        self.trained = set(trained)  # they have what stays with a client
        self._limits = [*limits, *([] if privacy is None else [privacy])]
        if privacy is not None:
            privacy.restore(memory or {})
        # Numbers of examples are checked where they count.
        counted = config.weighting == "examples" or config.evaluate_on == "clients"
        self.registry = ClientRegistry(
            config.num_clients or 0, backbone, seed_fingerprint, partitions, config.max_share,
            config.min_replies, partition_sizes if counted else None, config.max_examples,
        )  # fmt: skip
        self.state = ServerState(config, derived, memory)
        self.mail = MessageBuilder(fixed)
        self.status = Status(self.registry, self._on_status)
        self.flight = Flight(memory or {})
        self.sampler = Sampler(config, method, self.registry)

    def steps(self, member: RegisteredClient) -> int:
        """Count the steps of a client with as many examples: none where nothing is trained."""
        if not self.method.trainable_parameters() and CLASSIFIER not in self.state.tensors:
            return 0
        return self.config.local_steps or self.config.steps_of(self.registry.examples(member))

    def summary(self) -> None:
        """Log what is about to run."""
        steps = sorted(map(self.steps, self.registry.members.values())) or [0]
        low, high = steps[0], steps[-1]
        able = sum(self.method.can_train(one.share) for one in self.registry.members.values())
        log.info(
            "%s%s, %d trained parameters%s (%.1f %% of a LoRA of rank %d); %s a round, %s of %d",
            self.config.method, f", rank {self.method.rank}" if self.method.rank else "",
            self.method.trainable_parameters(),
            " beside the classifier" if self.config.classifier == "trained" else "",
            100 * self.method.trainable_parameters() / self.method.budget, self.config.lora_rank,
            count(min(self.config.clients_per_round, able), "client"),
            (f"{low} to " if low < high else "") + count(high, "local step"),
            self.config.batch_size,
        )  # fmt: skip
        if self.config.secure_aggregation:
            noised = self.config.privacy == "client"
            log.info(
                "secure-aggregation: the server sees sums over at least %d clients, %s",
                self.config.secure_minimum,
                "with noise that they have added"
                if noised
                else "head by head; what fewer train stays as it is",
            )

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
        if not in_process(grid):
            guard()
            ask_again(grid, timeout)
        self.clock = clock_of(grid)
        self._began = self.clock.now - self._time_before
        result, arrays = Result(), initial_arrays
        self.state.tensors = from_record(arrays)
        # 1. Recruit: query every node; the valid ones become registered clients.
        self.status.begin("recruiting", self.first_round - 1, num_rounds)
        self.registry.recruit(grid, wait=True)
        self.summary()
        if self.privacy is not None:
            self.privacy.begin(self.registry, num_rounds)
        # 2. Calibrate, if the method does so and the run is new. This is round 0.
        if self.method.calibration is not None and self.mail.fixed is None:
            arrays, _ = self._train(0, arrays, grid, timeout)
            self.state.derived = self._load_fixed(from_record(cast(ArrayRecord, self.mail.fixed)))
            self._record()
        for number in range(self.first_round, num_rounds + 1):
            if spent := [limit for limit in self._limits if limit.is_spent]:
                spent[0].tell(number)
                break
            last = number == num_rounds or any(limit.is_last for limit in self._limits)
            # 3. Choose clients, send messages, take the replies, close: this is the next state.
            arrays, told = self._train(number, arrays, grid, timeout)
            last = last or 0 < self.config.until_time <= self.time
            result.arrays, result.train_metrics_clientapp[number] = arrays, told
            # 4. Evaluate, every few rounds and at the end.
            metrics: MetricRecord | None = None
            if number % self.config.eval_every == 0 or last:
                with self.round.round_log.timed("evaluate"):
                    if evaluate_fn is None:
                        asked = self.configure_evaluate(number, arrays, ConfigRecord(), grid)
                        metrics = self.aggregate_evaluate(number, self.round.send(asked, timeout))
                    else:
                        self.status.begin("evaluating", number)
                        metrics = evaluate_fn(number, arrays)
            # 5. Record: the round's line, then the checkpoint, both on disk before the next round.
            self.status.begin("saving", number)
            self._record(metrics)
            # 6. Recruit nodes that have come meanwhile.
            self.registry.recruit(grid)
        return result

    def _train(
        self, number: int, arrays: ArrayRecord, grid: Grid, timeout: float
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Hold a round: choose clients, send, take the replies, close."""
        self.round = self.open_round(number)
        self.sampler.wait(grid, self.round.round_log, timeout)
        with self.round.round_log.timed("train"):
            messages = self.configure_train(number, arrays, ConfigRecord(), grid)
            self.round.take(self.round.transport.replies(messages, timeout))
            # A node that fails costs its reply, and never the run while others can be asked.
            while more := self.round.more_messages():
                self.round.take(self.round.send(more, timeout, training=True))
            return self.aggregate_train(number, ())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose the clients that train, and write each a message with what the method sends it."""
        return self.round.messages(grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Average the updates, and close the round; RuntimeError if too few replies are valid."""
        self.round.take(replies)
        if not self.round.release.has_enough:
            raise RuntimeError(self.round.round_log.why_too_few_came(self.round.least))
        self.round.close()
        loss = self.round.round_log.train_loss
        told = MetricRecord({} if loss is None else {"train-loss": loss})
        return to_record(self.state.tensors), told

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Write a message to all clients, to evaluate the state."""
        return self.round.evaluation_messages(grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean over the clients' validation splits; None if no reply is valid."""
        means = self.round.evaluated(replies)
        return None if means is None else MetricRecord(dict(means))

    def _record(self, metrics: MetricRecord | None = None) -> None:
        """Make the round's record, and show it to limits and callbacks."""
        if not simulating(self.round.grid):
            nodes = self.registry.members.keys()
            self.round.round_log.estimate_link(len(nodes), len(nodes - self._fetched))
            self._fetched |= nodes
        record = self.round.round_log.record(cast(Metrics, dict(metrics or {})), self.time)
        for limit in self._limits:
            limit.add(record)
        self.callbacks.on_round_end(record, self.state.tensors)

    def open_round(self, number: int) -> Round:
        if number == 0:
            return Round(number, self, Calibrated)
        return Round(number, self, release_of(self.config), transport_of(self.config))

    def _on_status(self, status: Callable[[], RunStatus]) -> None:
        """Call the callbacks of today: some of them need the strategy, and are made after it."""
        if self.callbacks.look_at_status:
            self.callbacks.on_status(status())

    def since(self, time: float) -> float:
        """Return the seconds from the run's beginning to that time of the clock."""
        return time - self._began

    @property
    def time(self) -> float:
        """Return the seconds that the run has taken so far."""
        return self.since(self.clock.now)

    @property
    def memory(self) -> Tensors:
        """Collect what a run that goes on needs beside the tensors."""
        return (
            self.state.memory
            | self.clock.memory
            | self.flight.memory(self.clock)
            | (self.privacy.memory if self.privacy else {})
        )
