"""Release a round with `privacy=client`: a drawn cohort, clipped changes, noise, the account first.

Which clients train is drawn from the system's entropy, one by one, from all clients: those that
are away or unresponsive are drawn as well and count as zero, and nothing is divided by fewer. The
round waits for each client as long as for any other, so that none decides whether another counts.
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
from ravan_flwr.runs.record import Spent
from ravan_flwr.server.aggregation import check_upload
from ravan_flwr.server.kind import Kind
from ravan_flwr.server.privacy_budget import ClientBudget
from ravan_flwr.server.replies import Update
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.masked import filled_in

if TYPE_CHECKING:
    from ravan_flwr.server.round import Round

log = getLogger(__name__)


def checked(
    method: Method, state: Tensors, upload: Mapping[str, Tensor], fraction: float
) -> Tensors:
    """Bring the upload of a client with that budget into the state's shapes, NaN where untrained.

    ValueError if it is not sound. Nothing is compared with other clients' uploads.
    """
    check_upload(method, upload, split_classifier(state)[1], fraction)
    for name, tensor in upload.items():
        sum_of_squares(tensor, name)  # refuses what is not finite
    return filled_in(method, state, upload)


class Noised(Kind):
    """Take the state that clipped changes and noise make, within the run's privacy budget."""

    budget = ClientBudget
    asks_more = False  # its account is of the clients that were drawn
    gives_grace = False
    enough = math.inf  # all replies are waited for: no number of them is enough

    def __init__(self, round_: "Round") -> None:
        super().__init__(round_)
        self.account = cast(ClientBudget, self.run.privacy)
        self.norm = self.next_norm = self.account.norm
        round_.least = 0  # a cohort may be empty; then noise alone is released
        # All that may be drawn, connected or not.
        everyone = self.run.registry.clients.values()
        able = (client for client in everyone if round_.method.can_train(client.budget_fraction))
        self.clients = sorted(able, key=lambda client: client.partition_id)
        self.noise = self.account.noise(len(self.clients))

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        """Draw each client by itself, and return those that can be asked; the log has the others.

        Who is here is found out before anybody is drawn.
        """
        round_log, registry = self.round.round_log, self.run.registry
        self.run.sampler.able(grid, round_log)  # notes who cannot afford to train
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
        """Refuse what does not sum changes, before anything is spent."""
        sums_changes(model.method)

    @property
    def expected(self) -> dict[str, Tensor]:
        """Count how many clients are expected to train each number of the state."""
        fractions, state = (
            Counter(client.budget_fraction for client in self.clients),
            self.run.state.tensors,
        )
        return expected_clients(self.round.method, state, fractions, self.account.rate)

    @cached_property
    def private_sums(self) -> ClippedSum:
        """Return the sums, which open empty when the first reply is there."""
        return ClippedSum(self.run.state.tensors, self.norm)

    def add(self, update: Update) -> list[list[int]]:
        method, state, upload = self.round.method, self.run.state.tensors, update.upload
        self.private_sums.add(checked(method, state, upload, update.client.budget_fraction))
        return method.heads_in(upload)

    def mean(self) -> Tensors:
        sums = self.private_sums
        del self.private_sums
        if not sums.count:
            log.warning("round %d: no change came, and noise alone is added", self.round.number)
        self.next_norm = sums.next_norm(self.noise)
        return sums.release(self.noise, self.expected)

    def close(self) -> None:
        """Spend what the release takes, then take the next state."""
        self.account.spend()
        spent = self.account.as_record() | {"clip-norm": self.norm}
        self.round.round_log.private = cast(Spent, spent)
        try:
            super().close()
        finally:
            self.account.norm = self.next_norm
