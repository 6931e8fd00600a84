"""Rounds with masked updates (`secure-aggregation=true`): the server sees only their sum.

The server asks clients in five phases: for fresh keys, for shares of their secrets, for their
masked update, for a signature of the list of clients that sent one, and for the shares that unmask
the sum. A client that fails in a phase is excluded from later phases. With fewer than two thirds of
the clients, or if the sum cannot be unmasked, the round has no effect. The reason is logged, and
the run continues.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from logging import getLogger

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from pydantic import StrictInt, TypeAdapter, ValidationError

from ravan_flwr.config.run_config import Config
from ravan_flwr.extras.secure.agreement import Parts
from ravan_flwr.extras.secure.changes import (
    CUT_OFF,
    add_mean_changes,
    check_cohort,
    list_parts,
    min_cohort,
    round_digest,
    rows_by_tensor,
    selected_rows,
)
from ravan_flwr.extras.secure.schedule import Bits, Schedule, make_schedule
from ravan_flwr.extras.secure.server import (
    DealerError,
    KeyAnnouncement,
    SecureServer,
    UnmaskedSum,
    read_announcement,
)
from ravan_flwr.files import first_error
from ravan_flwr.messages.records import DISTRUSTS, PIECES, to_pieces
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.runs.record import MaskedRecord
from ravan_flwr.seeding import generator
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.releases import Release
from ravan_flwr.server.round import Limits, Round, Sent
from ravan_flwr.server.update import Update, read_masked, read_phase
from ravan_flwr.specs import MAX_MASKED_CLIENTS

log = getLogger(__name__)

SKIPPED_ROUNDS = 64  # for a client that makes rounds fail
MAX_CUT_OFF = 1e-3  # fraction of clipped numbers above which a round logs a warning


class Masked(Release):
    """A masked round: run its phases, and read the updates only as a sum."""

    message_type = "train.masked"

    def __init__(self, federation: Federation, round_: Round, state: Tensors) -> None:
        super().__init__(federation, round_, state)
        self._quorum = self.config.min_replies  # of the present phase
        self.record: MaskedRecord = {"clients": 0}
        self._accused: Counter[int] = Counter()  # by partition
        self._failure = ""  # why the sum cannot be unmasked, if that is known already

    @property
    def limits(self) -> Limits:
        # With too few replies the round has no effect, and the run continues. The masks belong to
        # the clients that were drawn.
        return replace(self.round.limits, min_replies=0, quorum=self._quorum, asks_more=False)

    @staticmethod
    def smallest_cohort(config: Config, partitions: int) -> int:
        return max(config.min_replies, min_cohort(config, partitions))

    # Before training: keys and shares.

    def draw(self) -> list[RegisteredClient]:
        """Return the clients of the cohort that have shared their secrets."""
        cohort = super().draw()
        try:
            return self._share_secrets(cohort)
        except ValueError as error:
            self._failure = str(error)
            return []

    def _share_secrets(self, cohort: Sequence[RegisteredClient]) -> list[RegisteredClient]:
        announcements: dict[int, KeyAnnouncement] = {}
        run = self.round.grid.run.run_id

        def announce_key(partition: int, parts: Parts) -> None:
            announcement = read_announcement(run, self.round.number, partition, parts)
            if any(set(announcement.keys) & set(peer.keys) for peer in announcements.values()):
                raise ValueError("its keys of the round are another client's")
            announcements[partition] = announcement

        self._ask("keys", cohort, {}, ("keys", "node"), announce_key)
        ready = [client for client in cohort if client.partition_id in announcements]
        secure = self.secure = SecureServer(self._schedule(ready), announcements)
        threshold = secure.schedule.threshold
        self.record = {"clients": len(ready), "threshold": threshold}
        self._quorum = max(threshold, self._quorum)
        names = ("sealed", "marks", "seeds")
        self._ask("shares", ready, secure.announce(), names, secure.take_shares_sent)
        for client in ready:
            votes = self._accused[client.partition_id]
            if votes > len(ready) - threshold:
                self._skip(client.partition_id)
                log.warning(
                    "partition %d is skipped: %d of %d clients do not know its key",
                    client.partition_id, votes, len(ready),
                )  # fmt: skip
        secure.close_sharing()
        return [client for client in ready if secure.dealers[secure.position(client.partition_id)]]

    def _schedule(self, clients: Sequence[RegisteredClient]) -> Schedule:
        """Return which rows each client trains: its own choice, less rows that too few chose."""
        config, method, state = self.config, self.method, self.state
        run, number = self.round.grid.run.run_id, self.round.number
        check_cohort(config, len(clients), self.federation.registry.partitions)

        rows: dict[int, Bits] = {}
        for client in clients:
            random = generator(config.seed, "heads", number, client.partition_id)
            rows[client.partition_id] = selected_rows(method, state, client.budget_fraction, random)
        steps = config.learning_rate * max(map(self.federation.steps, clients), default=0)
        parts, digest = list_parts(method, state, steps), round_digest(config, self.broadcast(1.0))
        return make_schedule(run, number, config.secure_minimum, parts, rows, digest)

    def _skip(self, partition: int) -> None:
        """Skip a client for many rounds, which it would make fail as well."""
        for node in self.federation.registry.nodes.values():
            if node.client is not None and node.client.partition_id == partition:
                node.skipped_until[MessageType.TRAIN] = self.round.number + SKIPPED_ROUNDS

    # Training.

    def address(self, message: Message, client: RegisteredClient) -> None:
        """Add the data for masking: the list of clients, and their shares for this client."""
        message.content[PIECES] = to_pieces(self.secure.to_mask(client.partition_id))

    def read(self, message: Message, sent: Sent) -> Update:
        client, fingerprint = sent.client, self.federation.state.fingerprint
        data, seconds = read_masked(message, client, self.round.number, fingerprint)
        self.secure.check_masked(client.partition_id, data)
        steps = self.federation.steps(client)
        return Update(client, {}, None, seconds, masked=data, bytes_up=len(data), steps=steps)

    def add(self, update: Update) -> None:
        self.secure.take_masked(update.client.partition_id, update.masked)

    def heads_in(self, update: Update) -> list[list[int]]:
        trained = self.secure.trained_rows(update.client.partition_id)
        rows = rows_by_tensor(self.secure.schedule.parts, trained)
        return sums_changes(self.method).heads_in_rows(rows)

    # After training: agreement, and unmasking.

    def close(self) -> Tensors:
        """Unmask the sum and return the next state; raise ValueError if this is impossible."""
        self.round.log.secure = self.record
        if self._failure:
            raise ValueError(self._failure)
        try:
            return self._add_to_state(self._unmask())
        except DealerError as error:
            blamed = self._blamed(error)
            for partition in blamed:
                self._skip(partition)
            names = ", ".join(f"partition {partition}" for partition in blamed)
            raise ValueError(f"{error}; skipped from now on: {names}") from error

    def _blamed(self, error: DealerError) -> list[int]:
        """Return the clients to skip: of two in dispute the one with more disputes, or both.

        One of the two is at fault, but the server cannot know which. Disputes are counted over all
        rounds that failed because of them.
        """
        if not error.deniers:
            return [error.partition]
        nodes = self.federation.registry.nodes.values()
        disputes = {n.client.partition_id: n.disputes for n in nodes if n.client is not None}
        for first, second in self.secure.denied:
            disputes[first].add(second)
            disputes[second].add(first)
        blamed = set()
        for pair in ((error.partition, denier) for denier in error.deniers):
            max_disputes = max(len(disputes[partition]) for partition in pair)
            blamed |= {partition for partition in pair if len(disputes[partition]) == max_disputes}
        return sorted(blamed)

    def _unmask(self) -> UnmaskedSum:
        secure, round_log = self.secure, self.round.log
        partitions = [client["partition-id"] for client in round_log.clients]
        sent, min_replies = secure.close_masked(), self.config.min_replies
        if len(partitions) < min_replies:
            raise ValueError(round_log.too_few_replies_message(min_replies))
        self._quorum = secure.schedule.threshold
        alive = [
            client
            for client in self.federation.registry.clients.values()
            if client.partition_id in partitions
        ]
        self._ask("agree", alive, sent, ("signature",), secure.take_signature)
        agreed = [
            client for client in alive if secure.position(client.partition_id) in secure.signatures
        ]
        self._ask("unmask", agreed, secure.close_list(), ("shares",), secure.take_shares)
        dropped = secure.dealers & ~secure.alive
        opened = secure.open()
        self.record["dropped"] = list(compress(secure.schedule.partitions, dropped))
        return opened

    def _add_to_state(self, opened: UnmaskedSum) -> Tensors:
        """Return the state after the mean changes."""
        untrained = sum(int((counts == 0).sum()) for counts in opened.counts.values())
        cut_off = float(opened.means[CUT_OFF].max(initial=0.0))
        self.record |= {"untrained": untrained, "cut-off": max(0.0, round(cut_off, 6))}
        if cut_off > MAX_CUT_OFF:
            log.warning(
                "round %d: %.2g %% of the numbers were beyond their bounds and cut off; lower "
                "learning-rate", self.round.number, 100 * cut_off,
            )  # fmt: skip
        means, method = opened.means, sums_changes(self.method)
        counts, clients = opened.counts, int(self.secure.alive.sum())
        if method.mean_over_cohort:  # also over clients that did not train a row
            means = {n: mean * (counts[n] / clients)[:, None] for n, mean in means.items()}
        return method.with_num_clients(add_mean_changes(self.state, means), clients)

    # All phases.

    def _ask(
        self,
        phase: str,
        clients: Sequence[RegisteredClient],
        parts: Parts,
        names: Sequence[str],
        take: Callable[[int, Parts], None],
    ) -> None:
        """Send all clients the same message, and take their answers; reject invalid ones."""
        number, pieces, messages = self.round.number, to_pieces(parts), []
        for client in clients:
            content = RecordDict({PIECES: pieces, "config": ConfigRecord({"round": number})})
            messages.append(
                Message(content, client.node_id, f"train.{phase}", group_id=str(number))
            )

        def read(message: Message, sent: Sent) -> None:
            answer = read_phase(message, number, names)
            if DISTRUSTS in answer:
                if phase == "shares":  # one vote of each client
                    self._accused.update(_partitions(answer[DISTRUSTS]))
                raise ValueError("it does not know the keys of others, and takes no part")
            take(sent.client.partition_id, answer)

        for _ in self.round.valid(self.round.replies(messages, self.limits), read):
            pass  # taken while it is read, since a share is checked against the others


def _partitions(data: bytes) -> set[int]:
    """Return the partitions that a client accuses; raise ValueError if they cannot be read."""
    if len(data) > 16 * MAX_MASKED_CLIENTS:  # parsed JSON takes many times its bytes
        raise ValueError(
            f"its list of clients has {len(data):,} bytes, expected {MAX_MASKED_CLIENTS} partitions"
        )
    try:
        return TypeAdapter(set[StrictInt]).validate_json(data)
    except ValidationError as error:
        raise ValueError(f"its list of clients: {first_error(error)}") from None
