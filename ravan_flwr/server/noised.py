"""A round with `privacy=client`: a Poisson-sampled cohort, clipped changes, noise.

The account is written before the release. Each registered client is drawn independently, with the
system's entropy. Clients that are disconnected or unresponsive are drawn as well and contribute
zero; the divisor does not shrink. The round waits equally long for each client, so that no client
decides whether another client counts.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from logging import getLogger
from typing import TYPE_CHECKING, cast

from flwr.app import MessageType
from flwr.serverapp import Grid
from torch import Tensor

from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Method, Tensors, split_classifier
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.methods.tensors import sum_of_squares
from ravan_flwr.privacy.mechanism import ClippedSum, expected_clients, subsample
from ravan_flwr.runs.record import PrivacyRecord
from ravan_flwr.server.aggregation import check_upload
from ravan_flwr.server.kind import Kind
from ravan_flwr.server.privacy_budget import ClientBudget
from ravan_flwr.server.replies import Update
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.masked import expand_to_state

if TYPE_CHECKING:
    from ravan_flwr.server.round import Round

log = getLogger(__name__)


def checked(
    method: Method, state: Tensors, upload: Mapping[str, Tensor], fraction: float
) -> Tensors:
    """Return an upload in the state's shapes, with NaN for what the client did not train.

    Raise ValueError if it is not valid. It is not compared with other clients' uploads.
    """
    check_upload(method, upload, split_classifier(state)[1], fraction)
    for name, tensor in upload.items():
        sum_of_squares(tensor, name)  # raises if a number is not finite
    return expand_to_state(method, state, upload)


class Noised(Kind):
    """Make the next state from clipped changes and noise, within the run's privacy budget."""

    budget = ClientBudget
    asks_more = False  # the account counts only the clients that were drawn
    gives_grace = False
    enough = math.inf  # the round waits for all replies

    def __init__(self, round_: "Round") -> None:
        super().__init__(round_)
        self.account = cast(ClientBudget, self.run.privacy)
        self.norm = self.next_norm = self.account.norm
        round_.least = 0  # a cohort may be empty; then the round releases only noise
        # All clients that may be drawn, connected or not.
        everyone = self.run.registry.clients.values()
        eligible = (
            client for client in everyone if round_.method.can_train(client.budget_fraction)
        )
        self.clients = sorted(eligible, key=lambda client: client.partition_id)
        self.noise = self.account.noise(len(self.clients))

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        """Draw each client independently; return those that can be asked, and log the others.

        Which clients are connected is determined before the draw.
        """
        round_log, registry = self.round.round_log, self.run.registry
        self.run.sampler.eligible(grid, round_log)  # logs the clients that are not eligible
        present = {client.node_id for client in registry.present(grid)}
        skipped = {
            node_id
            for node_id in present
            if registry.nodes[node_id].is_skipped(MessageType.TRAIN, self.round.number)
        }
        cohort = []
        for client in (self.clients[i] for i in subsample(len(self.clients), self.account.rate)):
            if client.node_id not in present:
                round_log.reject(client, "it is not connected; its change counts as zero")
            elif client.node_id in skipped:
                round_log.skipped.append(client.partition_id)
            else:
                cohort.append(client)
        return cohort

    @staticmethod
    def check_model(model: AdaptedModel) -> None:
        """Raise ValueError unless the method sums changes, before any privacy budget is spent."""
        sums_changes(model.method)

    @property
    def expected(self) -> dict[str, Tensor]:
        """Return how many clients are expected to train each number of the state."""
        fractions, state = (
            Counter(client.budget_fraction for client in self.clients),
            self.run.state.tensors,
        )
        return expected_clients(self.round.method, state, fractions, self.account.rate)

    @cached_property
    def private_sums(self) -> ClippedSum:
        """Return the round's sums, empty before the first reply."""
        return ClippedSum(self.run.state.tensors, self.norm)

    def add(self, update: Update) -> list[list[int]]:
        method, state, upload = self.round.method, self.run.state.tensors, update.upload
        self.private_sums.add(checked(method, state, upload, update.client.budget_fraction))
        return method.heads_in(upload)

    def mean(self) -> Tensors:
        sums = self.private_sums
        del self.private_sums
        if not sums.count:
            log.warning("round %d: no update arrived, and only noise is added", self.round.number)
        self.next_norm = sums.next_norm(self.noise)
        return sums.release(self.noise, self.expected)

    def close(self) -> None:
        """Spend the release's privacy budget, then take the next state."""
        self.account.spend()
        spent = self.account.as_record() | {"clip-norm": self.norm}
        self.round.round_log.private = cast(PrivacyRecord, spent)
        try:
            super().close()
        finally:
            self.account.norm = self.next_norm
