"""Run rounds of federated tuning: sample clients, send messages, sum up updates, evaluate, record.

Flower's `Strategy.start` has a fixed loop, buffers all replies and knows no checkpoint, so that
this one has its own. Replies are taken as they arrive (round.py); what differs by method is the
method's. A round with fewer valid replies than `min-replies` stops the run.
"""

from collections.abc import Callable, Iterable, Sequence
from logging import getLogger
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.messages.wire import encode
from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.runs.callback import Callbacks
from ravan_flwr.runs.console import count
from ravan_flwr.runs.record import Metrics
from ravan_flwr.runs.status import RunStatus
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import outgoing
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.message_builder import MessageBuilder
from ravan_flwr.server.partitions import ExampleCounts
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.release import Calibrated, release_of
from ravan_flwr.server.replies import Measures
from ravan_flwr.server.reply_decoder import guard
from ravan_flwr.server.reply_fetcher import in_process
from ravan_flwr.server.round import Round, Run
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.server.state import ServerState
from ravan_flwr.server.status import Status
from ravan_flwr.server.stop_conditions import StopCondition
from ravan_flwr.server.superlink import ask_again
from ravan_flwr.server.transport import transport_of

log = getLogger(__name__)


class FederatedTuning(Strategy):
    """Run rounds of one federated method.

    `backbone` and `seed_fingerprint` are the server's, which every node must share, and
    `derived` is that of the model now. A run that is resumed has a `first_round` above 1, the
    method's `fixed` tensors, if its method has any, the server's `memory` (the optimiser's
    moments, the usual changes), the number of `partitions` that its nodes shared the data in, and
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
        measured: Measures | None = None,
        partition_sizes: Callable[[int], Sequence[int]] | None = None,
        callbacks: Iterable[object] = (),
        limits: Iterable[StopCondition] = (),
        privacy: PrivacyBudget | None = None,
    ) -> None:
        self.config, self.method = config, method
        self.callbacks, self.first_round = Callbacks(callbacks), first_round
        self._load_fixed = load_fixed
        self._measured = measured or Measures()
        self._privacy = privacy
        self._limits = [*limits, *([] if privacy is None else [privacy])]
        if privacy is not None:
            privacy.restore(memory or {})
        # Numbers of examples are checked where they count.
        counted = config.weighting == "examples" or config.evaluate_on == "clients"
        examples = ExampleCounts(partition_sizes if counted else None, config.max_examples)
        self.registry = ClientRegistry(
            config.num_clients or 0, backbone, seed_fingerprint, partitions, config.max_share,
            config.min_replies, examples,
        )  # fmt: skip
        self.state = ServerState(config, derived, memory)
        self.mail = MessageBuilder(None if fixed is None else to_record(fixed))
        self.status = Status(self.registry, self._on_status)
        self._run = Run(
            config, method, self.registry, Sampler(config, method, self.registry), self.mail,
            self.state, self.status, set(trained),
        )  # fmt: skip
        self._round: Round | None = None

    def summary(self) -> None:
        """Log what is about to run."""
        steps = sorted(map(self._run.steps, self.registry.members.values())) or [0]
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
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or ConfigRecord()
        if not in_process(grid):
            guard()
            ask_again(grid, timeout)
        result = Result()
        # 1. Recruit: query every node; the valid ones are members of the roster.
        self.status.begin("recruiting", self.first_round - 1, num_rounds)
        self.registry.recruit(grid, wait=True)
        self.summary()
        if self._privacy is not None:
            self._privacy.begin(self.registry, num_rounds)
        # 2. Calibrate, if the method does so and the run is new. This is round 0.
        arrays = self._calibrate(grid, initial_arrays, timeout)
        for number in range(self.first_round, num_rounds + 1):
            if self._ends_before(number):
                break
            last = number == num_rounds or any(limit.is_last for limit in self._limits)
            # 3. Open the round, and wait until enough members are connected.
            round_ = self._open_round(number)
            self._run.sampler.wait(grid, round_.round_log, timeout)
            with round_.round_log.timed("train"):
                # 4. Sample clients, and write a message to each.
                messages = list(self.configure_train(number, arrays, train_config, grid))
                # 5. Send the messages. The replies are fetched one by one, in step 6.
                replies = round_.send(messages, timeout, training=True)
                # 6. Check and accumulate the replies, and close the round: the next state.
                new, train_metrics = self.aggregate_train(number, replies)
            if new is None or train_metrics is None:
                raise round_.too_few()
            arrays = result.arrays = new
            result.train_metrics_clientapp[number] = train_metrics
            # 7. Evaluate, every few rounds and at the end.
            metrics = None
            if number % self.config.eval_every == 0 or last:
                with round_.round_log.timed("evaluate"):
                    if evaluate_fn is not None:
                        self.status.begin("evaluating", number)
                        metrics = evaluate_fn(number, arrays)
                    else:
                        asked = list(self.configure_evaluate(number, arrays, evaluate_config, grid))
                        answers = round_.send(asked, timeout)
                        metrics = self.aggregate_evaluate(number, answers)
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics
            # 8. Record: the round's line, then the checkpoint, both on disk before the next round.
            record = round_.round_log.record(cast(Metrics, dict(metrics or {})))
            self.status.begin("saving", number)
            for limit in self._limits:
                limit.add(record)
            self.callbacks.on_round_end(record, self.state.tensors)
            # 9. Recruit nodes that have come meanwhile.
            self.registry.recruit(grid)
        return result

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients, and write each a message with what the method sends it."""
        round_ = self._round_of(server_round)
        self.state.tensors = from_record(arrays)
        method = self.method.in_round(server_round)
        broadcasts: dict[float, ArrayRecord] = {}  # by share: most methods have one for all
        for member in round_.choose(grid):
            share = member.share if self.method.parts else 1.0
            if share not in broadcasts:
                tensors = outgoing(method, self.state.tensors, share)
                broadcasts[share] = self._encoded(tensors, server_round)
            settings = ConfigRecord({**config, **round_.release.settings(member)})
            message = self.mail.message(
                member, round_.kind, server_round, broadcasts[share], settings
            )
            yield round_.transport.address(message, member)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the replies as they come, and close the round; (None, None) if too few are valid."""
        round_ = self._round_of(server_round)
        round_.train(replies)
        if not round_.release.has_enough:
            return None, None
        round_.close()
        loss = round_.round_log.train_loss
        told = MetricRecord({} if loss is None else {"train-loss": loss})
        return to_record(self.state.tensors), told

    # Evaluation on the clients' own validation parts.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Write a message to every client that does not rest."""
        arrays = self._encoded(from_record(arrays), server_round)
        members = self.registry.present(grid)
        kind = MessageType.EVALUATE
        for member in self.registry.rested(members, kind, server_round):
            yield self.mail.message(member, kind, server_round, arrays, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean over all clients' validation examples; None if no reply is valid."""
        means = self._round_of(server_round).evaluate(replies, self._measured)
        return None if means is None else MetricRecord(dict(means))

    # The steps that Flower's Strategy has no name for.

    def _calibrate(self, grid: Grid, arrays: ArrayRecord, timeout: float) -> ArrayRecord:
        """Hold the method's calibration round, if it has one; return the state after it."""
        if self.method.calibration is None or self.mail.fixed is not None:
            return arrays
        self.state.tensors = from_record(arrays)
        round_ = Round(0, self._run, Calibrated)
        self._run.sampler.wait(grid, round_.round_log, timeout)
        messages = [
            self.mail.message(member, round_.kind, 0, arrays, ConfigRecord())
            for member in round_.choose(grid)
        ]
        round_.train(round_.send(messages, timeout, training=True))
        if not round_.release.has_enough:
            raise round_.too_few()
        round_.release.close()  # whose errors end the run
        record = round_.round_log.record({})
        for limit in self._limits:
            limit.add(record)
        self.state.derived = self._load_fixed(from_record(cast(ArrayRecord, self.mail.fixed)))
        self.callbacks.on_round_end(record, self.state.tensors)
        return to_record(self.state.tensors)

    def _ends_before(self, number: int) -> bool:
        """Tell whether no further round is to be held, and log why."""
        for limit in self._limits:
            if limit.is_spent:
                limit.tell(number)
                return True
        return False

    def _open_round(self, number: int) -> Round:
        """Open a training round; it becomes the round under way."""
        release, transport = release_of(self.config), transport_of(self.config)
        self._round = Round(number, self._run, release, transport, self._privacy)
        return self._round

    def _on_status(self, status: Callable[[], RunStatus]) -> None:
        """Call the callbacks of today: some of them need the strategy, and are made after it."""
        if self.callbacks.look_at_status:
            self.callbacks.on_status(status())

    @property
    def memory(self) -> Tensors:
        """Collect what a run that goes on needs beside the tensors."""
        return self.state.memory | (self._privacy.memory if self._privacy else {})

    def _round_of(self, number: int) -> Round:
        """Return the round under way, or open one of that number."""
        if self._round is None or self._round.number != number:
            return self._open_round(number)
        return self._round

    def _encoded(self, tensors: Tensors, server_round: int) -> ArrayRecord:
        """Encode tensors for the wire."""
        random = generator(self.config.seed, "wire down", server_round)
        return to_record(encode(tensors, self.config.wire, random))
