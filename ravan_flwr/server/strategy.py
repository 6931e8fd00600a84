"""Run rounds of federated tuning: sample clients, send messages, sum updates, evaluate, record.

Flower's `Strategy.start` has a fixed loop, buffers all replies and has no checkpoints, so `start`
is overridden. Replies are processed as they arrive (round.py). The method defines what differs
between methods. A round with fewer valid replies than `min-replies` stops the run.
"""

from collections.abc import Callable, Iterable
from logging import getLogger
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER, Tensors
from ravan_flwr.methods.multihead import MultiHeadMethod
from ravan_flwr.runs.callback import Callbacks
from ravan_flwr.runs.console import count
from ravan_flwr.runs.record import Metrics
from ravan_flwr.server.buffered import InFlight
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.kind import Calibrated, kind_of
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.reply_collector import MessageBuilder
from ravan_flwr.server.reply_fetcher import in_process, simulating
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.server.round import Round
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.server.state import ServerState
from ravan_flwr.server.stop_conditions import exceeds_max_bytes, reached, stop_reason
from ravan_flwr.server.superlink import install_object_check, retry_failed_calls
from ravan_flwr.simulated_time.clock import REAL, Clock, SimulatedClock, clock_of
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)


class FederatedTuning(Strategy):
    """Run rounds of one federated method.

    Args:
        config: The run's configuration.
        loaded: The server's model and data. Every node must have the same fingerprints.
        start: The state, records and memory that the run begins with.
        callbacks: Objects with hooks of `Callback`, called with the run's status and after each
            round.
        privacy: The privacy budget of a private run.
    """

    def __init__(
        self,
        config: Config,
        loaded: ModelAndData,
        start: ResumePoint,
        *,
        callbacks: Iterable[object] = (),
        privacy: PrivacyBudget | None = None,
    ) -> None:
        self.config, self.loaded, self.method = config, loaded, loaded.model.method
        self.callbacks, self.privacy = Callbacks(callbacks), privacy
        self._resume_point = start
        self._fetched: set[int] = set()  # nodes that have the app bundle
        self.clock: Clock = REAL
        self._began = 0.0
        self.trained = start.trained  # partitions that hold personal parameters, if there are some
        self.records = list(start.records)
        if privacy is not None:
            privacy.restore(start.memory)
        partitions = start.records[-1]["partitions"] if start.records else None
        self.registry = ClientRegistry(config, loaded, partitions)
        self.state = ServerState(config, loaded.model.derived, start.state, start.memory)
        self.message_builder = MessageBuilder(self.registry.nodes, start.fixed)
        self.in_flight = InFlight(start.memory)
        self.sampler = Sampler(config, self.method, self.registry)

    def steps(self, client: RegisteredClient) -> int:
        """Return a client's local steps in a round; 0 if there are no trainable parameters."""
        if not self.method.trainable_parameters() and CLASSIFIER not in self.state.tensors:
            return 0
        return self.config.local_steps or self.config.steps_of(self.registry.examples(client))

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
        """Run the rounds; the result has the arrays of the last one.

        `num_rounds` and `timeout` come from the configuration. `evaluate_fn` evaluates a state on
        the server. Without it clients evaluate.
        """
        if not in_process(grid):
            install_object_check()
            retry_failed_calls(grid, timeout)
        self.clock = clock_of(grid)
        self._began = self.clock.now - self._resume_point.time
        result, arrays = Result(), initial_arrays
        self.state.tensors = from_record(arrays)
        # 1. Recruit: query every node; the valid ones become registered clients.
        self.registry.recruit(grid, wait=True)
        self.registry.restore(self._resume_point.memory)
        self.summary()
        if self.privacy is not None:
            self.privacy.begin(self.registry, num_rounds)
        # 2. Calibrate, if the method has a calibration and the run is new. This is round 0.
        if self.method.calibration is not None and self.message_builder.fixed is None:
            arrays, _ = self._train(0, arrays, grid)
            assert self.message_builder.fixed is not None  # set by the round
            self.state.derived = self.loaded.model.load_fixed(
                from_record(self.message_builder.fixed)
            )
            self._record()
        for number in range(self._resume_point.first, num_rounds + 1):
            if reason := self._stop_reason(number):
                log.info(reason)
                break
            last = number == num_rounds or exceeds_max_bytes(self.config, self.records, 2)
            last = last or (self.privacy is not None and self.privacy.ends_after(1))
            # 3. Choose clients, send messages, take the replies, close: the next state.
            arrays, train_metrics = self._train(number, arrays, grid)
            result.arrays, result.train_metrics_clientapp[number] = arrays, train_metrics
            last = last or 0 < self.config.until_time <= self.time
            # 4. Evaluate, every few rounds and at the end.
            metrics: MetricRecord | None = None
            if number % self.config.eval_every == 0 or last:
                with self.round.round_log.timed("evaluate"):
                    if evaluate_fn is None:
                        messages = self.configure_evaluate(number, arrays, ConfigRecord(), grid)
                        metrics = self.aggregate_evaluate(number, self.round.send(messages))
                    else:
                        metrics = evaluate_fn(number, arrays)
            # 5. Record: the round's line, then the checkpoint, both on disk before the next round.
            self._record(metrics)
            # 6. Recruit nodes that have connected meanwhile, for the next round.
            if number < num_rounds:
                self.registry.gather(grid)
        return result

    def summary(self) -> None:
        """Log the method, its number of trained parameters, and the clients of a round."""
        steps = sorted(map(self.steps, self.registry.clients.values())) or [0]
        low, high = steps[0], steps[-1]
        eligible = sum(
            self.method.can_train(m.budget_fraction) for m in self.registry.clients.values()
        )
        asked = self.config.clients_per_round
        fewer = eligible < asked and not METHODS[self.config.method].all_clients
        log.info(
            "%s%s, %d trained parameters%s (%.1f %% of a LoRA of rank %d); %s a round, %s of %d%s",
            self.config.method, f", rank {self.method.rank}" if self.method.rank else "",
            self.method.trainable_parameters(),
            " and the classifier" if self.config.classifier == "trained" else "",
            100 * self.method.trainable_parameters() / self.method.budget, self.config.lora_rank,
            count(min(asked, eligible), "client"),
            (f"{low} to " if low < high else "") + count(high, "local step"),
            self.config.batch_size,
            f"; clients-per-round is {asked}, but no more can take part" * fewer,
        )  # fmt: skip
        method = self.method
        if isinstance(method, MultiHeadMethod) and method.init == "gram-schmidt":
            columns, side = method.heads * method.rank, method.side
            if columns > side:
                log.info(
                    "init=gram-schmidt: heads x rank = %d, the smallest layer has %d dimensions: "
                    "the bases of %d heads at a time are orthonormal there",
                    columns, side, side // method.rank,
                )  # fmt: skip
        if self.config.secure_aggregation:
            log.info(
                "secure-aggregation: the server sees sums over at least %d clients, head by head; "
                "heads that fewer clients train stay unchanged",
                self.config.secure_minimum,
            )

    def _train(
        self, number: int, arrays: ArrayRecord, grid: Grid
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Run a round as soon as enough clients are connected."""
        self.round = self.open_round(number)
        self.sampler.wait(grid, self.round.round_log)
        with self.round.round_log.timed("train"):
            messages = self.configure_train(number, arrays, ConfigRecord(), grid)
            return self.aggregate_train(number, self.round.replies(messages))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose the clients that train; return a message with the broadcast for each."""
        return self.round.messages(grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Accumulate the updates, head by head if there are heads; return state and mean loss.

        Raise RuntimeError if too few replies are valid.
        """
        self.round.take(replies)
        self.round.close()
        loss = self.round.round_log.train_loss
        metrics = MetricRecord({} if loss is None else {"train-loss": loss})
        return to_record(self.state.tensors), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return a message for each client that asks it to evaluate the state."""
        return self.round.evaluation_messages(grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean over the clients' validation splits; None if no reply is valid."""
        means = self.round.evaluated(replies)
        return None if means is None else MetricRecord(dict(means))

    def _record(self, metrics: MetricRecord | None = None) -> None:
        """Append the round's record, and call the callbacks with it."""
        if not simulating(self.round.grid):
            nodes = self.registry.clients.keys()
            self.round.round_log.estimate_link(len(nodes), len(nodes - self._fetched))
            self._fetched |= nodes
        record = self.round.round_log.record(cast(Metrics, dict(metrics or {})), self.time)
        if reached(self.config, self.loaded.task.metric, [record]):
            record["reached"] = self.config.until_metric
        self.records.append(record)
        self.callbacks.on_round_end(record, self.state.tensors)

    def _stop_reason(self, number: int) -> str:
        """Return why the run stops before a round of that number; "" if it continues."""
        reason = stop_reason(self.config, self.loaded.task.metric, self.records, number)
        if not reason and self.privacy is not None and self.privacy.ends_after(0):
            reason = f"epsilon: no room for round {number}; the run ends here"
        return reason

    def open_round(self, number: int) -> Round:
        """Open a round; round 0 is the calibration."""
        return Round(number, self, kind_of(self.config) if number else Calibrated)

    def since(self, time: float) -> float:
        """Return the seconds from the run's start to that time of the clock."""
        return time - self._began

    @property
    def time(self) -> float:
        """Return the seconds that the run has taken so far."""
        return self.since(self.clock.now)

    @property
    def memory(self) -> Tensors:
        """Return what a resumed run needs in addition to the state."""
        return (
            self.state.memory
            | self.clock.memory
            | self.in_flight.memory(self.clock)
            | (self.registry.memory if isinstance(self.clock, SimulatedClock) else {})
            | (self.privacy.memory if self.privacy else {})
        )
