"""Run rounds of federated tuning: let clients train, sum their updates, evaluate, record.

Flower's `Strategy.start` has a fixed loop, buffers all replies and has no checkpoints, so `start`
is overridden. A round goes

    configure_train        the transport and the release choose clients; each is sent a message
    transport.exchange     replies, as they arrive, until the round may close
    aggregate_train        each reply is read and checked whole, then added to the release's sums,
                           of which the release makes the next state

Which release and transport a run has follows from its settings (optional.py). What differs between
methods is in the method. A round with fewer valid replies than `min-replies` stops the run.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from logging import getLogger
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.methods.base import Tensors
from ravan_flwr.optional import TRANSPORTS, load
from ravan_flwr.runs.callback import Callbacks
from ravan_flwr.runs.record import Metrics, RoundRecord, per_client_statistics
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.releases import Calibrated, Release, release_class
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.server.round import Round, Sent
from ravan_flwr.server.round_log import RoundLog, weighted_mean
from ravan_flwr.server.runtime import in_process, simulating
from ravan_flwr.server.stop_conditions import exceeds_max_bytes, reached, stop_reason
from ravan_flwr.server.superlink_calls import install_object_check, retry_failed_calls
from ravan_flwr.server.transports import Plain, Transport
from ravan_flwr.server.update import Update, max_validation_size, read_evaluated
from ravan_flwr.server.user_messages import report_start
from ravan_flwr.simulated_time.clock import find_clock
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
        self.callbacks, self.records = Callbacks(callbacks), list(start.records)
        self._resume_point = start
        self._release_class = release_class(config)
        smallest_cohort = self._release_class.smallest_cohort
        self.federation = Federation(config, loaded, start, privacy, smallest_cohort)
        transport: type[Transport] = load(TRANSPORTS[config.aggregation])
        self._transport = transport(self.federation, start.memory)  # of all rounds but round 0
        self._fetched: set[int] = set()  # nodes that have the app bundle

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
        result, federation, start = Result(), self.federation, self._resume_point
        arrays = initial_arrays
        config, method, privacy = federation.config, federation.method, federation.privacy
        registry, state = federation.registry, federation.state
        federation.clock = find_clock(grid)
        federation.began = federation.clock.now - start.time
        state.tensors = from_record(arrays)
        # 1. Recruit: query every node; the valid ones become registered clients.
        registry.recruit(grid, wait=True)
        fixed, fixed_sent = federation.message_builder.fixed, registry.restore(start.memory)
        if fixed_sent and fixed is not None:
            cast(Any, grid).give_fixed(fixed, fixed_sent)  # only one in process has such a memory
        self.summary()
        if privacy is not None:
            can_train = federation.sampler.can_train
            privacy.begin(registry, can_train, max(0, num_rounds + 1 - start.first))
        self.callbacks.on_recruited()
        # 2. Calibrate, if the method has a calibration and the run is new. This is round 0.
        if method.calibration is not None and fixed is None:
            arrays, _ = self._train(0, arrays, grid)
            fixed = federation.message_builder.fixed
            assert fixed is not None  # set by the round
            state.fingerprint = federation.loaded.model.load_fixed(from_record(fixed))
            self._record()
        for number in range(start.first, num_rounds + 1):
            if reason := self._stop_reason(number, self.records):
                log.info(reason)
                break
            # The last round is evaluated. It may be known only after training: by the time, by more
            # bytes than in earlier rounds, or by devices that refuse to train further.
            last = number == num_rounds or exceeds_max_bytes(self._counted, self.records, 2)
            last = last or (privacy is not None and privacy.ends_after(1))
            # 3. Choose clients, send messages, take the replies, close: the next state.
            arrays, train_metrics = self._train(number, arrays, grid)
            result.arrays, result.train_metrics_clientapp[number] = arrays, train_metrics
            trained = [*self.records, self.round.log.record({}, federation.time)]
            last = last or bool(self._stop_reason(number + 1, trained))
            # 4. Evaluate, every few rounds and at the end.
            metrics: MetricRecord | None = None
            if number % config.eval_every == 0 or last:
                with self.round.log.timed("evaluate"):
                    if evaluate_fn is None:
                        messages = self.configure_evaluate(number, arrays, ConfigRecord(), grid)
                        limits = replace(self.release.limits, enough=math.inf)
                        replies = self.round.replies(messages, limits)
                        metrics = self.aggregate_evaluate(number, replies)
                    else:
                        metrics = evaluate_fn(number, arrays)
            # 5. Record: the round's line, then the checkpoint, both on disk before the next round.
            self._record(metrics)
            # 6. Recruit nodes that have connected meanwhile, for the next round.
            if number < num_rounds:
                registry.gather(grid)
        return result

    # One round.

    def _train(
        self, number: int, arrays: ArrayRecord, grid: Grid
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Run a round as soon as enough clients are connected."""
        self.open_round(number, grid)
        self.federation.sampler.wait(grid, self.round.log)
        with self.round.log.timed("train"):
            messages = self.configure_train(number, arrays, ConfigRecord(), grid)
            replies = self.transport.exchange(self.round, self.release, messages)
            return self.aggregate_train(number, replies)

    def open_round(self, number: int, grid: Grid) -> None:
        """Begin a round, with empty sums. Round 0 is the calibration, with a plain transport."""
        federation, release = self.federation, self._release_class if number else Calibrated
        round_log = RoundLog(number, federation.registry.partitions)
        self.round = Round(federation.config, federation.message_builder, round_log, grid)
        self.release: Release = release(federation, self.round, federation.state.tensors)
        self.transport = self._transport if number else Plain(federation)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose the clients that train; return a message with the broadcast for each."""
        return self.release.write(self.transport.draw(self.round, self.release))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Sum the valid updates, head by head if there are heads; return state and mean loss.

        Raise RuntimeError if too few replies are valid. If the next state is refused, the old one
        stays, and the record has the reason.
        """
        round_, release = self.round, self.release
        # Lazy: the next reply is fetched, and the wait for it may end, after this one is used.
        for sent, update in round_.valid(replies, release.read):
            release.add(update)
            self._log_use(sent, update)
            del update  # it may be as large as the model
        if len(round_.log.clients) < (min_replies := release.limits.min_replies):
            raise RuntimeError(round_.log.too_few_replies_message(min_replies))
        try:
            mean = release.close()
            if mean is not None:
                self.federation.state.step(mean, release.method.frozen_tensors)
        except ValueError as error:
            if not server_round:
                raise  # without the calibration's fixed tensors the run cannot start
            round_.log.refused = str(error)
            log.warning(
                "round %d has no effect, the state stays as it was: %s; the record lists clients",
                server_round, error,
            )  # fmt: skip
        release.state = {}  # the old state
        loss = round_.log.train_loss
        metrics = MetricRecord({} if loss is None else {"train-loss": loss})
        return to_record(self.federation.state.tensors), metrics

    def _log_use(self, sent: Sent, update: Update) -> None:
        """Log a used update; also if its client had lost its personal parameters."""
        federation, partition = self.federation, update.client.partition_id
        span = sent.time - federation.began, federation.time
        device = federation.clock.find_device(partition)
        self.round.log.use(update, self.release.heads_in(update), sent.size, span, device)
        if update.anew and partition in federation.trained:
            self.round.log.began_anew.append(partition)
            log.warning(
                "partition %d has lost its personal parameters, as a restarted node does", partition
            )
        if self.round.number:  # a calibration leaves no personal parameters
            federation.trained.add(partition)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return a message for each client, but the skipped ones, to evaluate the state."""
        federation, registry = self.federation, self.federation.registry
        message_type = MessageType.EVALUATE
        content = self.release.encode(federation.state.tensors)
        clients = registry.without_skipped(registry.present(grid), message_type, server_round)
        message = federation.message_builder.message
        return [message(client, message_type, server_round, content, {}) for client in clients]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean over the clients' validation splits; None if no reply is valid.

        The weights are the clients' numbers of examples, or of other units.
        """
        federation, registry = self.federation, self.federation.registry
        measures, share = federation.loaded.task.measures, federation.config.validation_share

        def read(reply: Message, sent: Sent) -> tuple[float, Metrics]:
            # A device's own data may be more than what counts of them (`max-examples`).
            of_client, counted = (
                max_validation_size(examples, share)
                for examples in (sent.client.examples, registry.examples(sent.client))
            )
            return read_evaluated(reply, server_round, measures, of_client, counted)

        valid = self.round.valid(replies, read)
        answers = {sent.client.partition_id: answer for sent, answer in valid}
        if not answers:
            return None
        units, means = zip(*(answers[partition] for partition in sorted(answers)), strict=True)
        self.round.log.per_client = per_client_statistics(list(map(measures.completed, means)))
        mean = {name: weighted_mean([one[name] for one in means], units) for name in measures.names}
        return MetricRecord(dict(measures.completed(mean)))

    # Around the rounds.

    def summary(self) -> None:
        """Log the method, its number of trained parameters, and the clients of a round."""
        federation, clients = self.federation, self.federation.registry.clients.values()
        eligible = sum(federation.sampler.can_train(client.budget_fraction) for client in clients)
        steps = list(map(federation.steps, clients))
        report_start(federation.config, federation.method, steps, eligible)

    def _record(self, metrics: MetricRecord | None = None) -> None:
        """Append the round's record, and call the callbacks with it."""
        federation = self.federation
        if not simulating(self.round.grid):
            nodes = federation.registry.clients.keys()
            self.round.log.estimate_link(len(nodes), len(nodes - self._fetched))
            self._fetched |= nodes
        record = self.round.log.record(cast(Metrics, dict(metrics or {})), federation.time)
        if reached(federation.config, federation.loaded.task.metric, [record]):
            record["reached"] = federation.config.until_metric
        self.records.append(record)
        self.callbacks.on_round_end(record, federation.state.tensors)

    def _stop_reason(self, number: int, records: list[RoundRecord]) -> str:
        """Return why the run stops before a round of that number; "" if it continues."""
        federation, privacy = self.federation, self.federation.privacy
        metric = federation.loaded.task.metric
        reason = stop_reason(self._counted, metric, records, number)
        if not reason and privacy is not None and privacy.ends_after(0):
            reason = f"epsilon: no room for round {number}; the run ends here"
        return reason

    @property
    def _counted(self) -> Config:
        """Return the settings with the run's number of clients, which may not be the preset's."""
        return replace(self.federation.config, num_clients=self.federation.registry.partitions)

    @property
    def memory(self) -> Tensors:
        """Return what a resumed run needs in addition to the state."""
        federation = self.federation
        return (
            federation.state.memory
            | federation.clock.memory
            | self._transport.memory
            | (federation.registry.memory if in_process(self.round.grid) else {})
            | (federation.privacy.memory if federation.privacy else {})
        )
