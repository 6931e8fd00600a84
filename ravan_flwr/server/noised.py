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
from typing import cast

from flwr.app import MessageType
from torch import Tensor

from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors, expand_to_state
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.methods.tensors import sum_of_squares
from ravan_flwr.privacy.mechanism import ClippedSum, expected_clients, subsample
from ravan_flwr.runs.record import PrivacyRecord
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.privacy_budget import ClientBudget
from ravan_flwr.server.releases import Release
from ravan_flwr.server.round import Limits, Round
from ravan_flwr.server.update import Update
from ravan_flwr.training.adapted_model import AdaptedModel

log = getLogger(__name__)


def check_finite(upload: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a number of an upload is not finite."""
    for name, tensor in upload.items():
        sum_of_squares(tensor, name)


class Noised(Release):
    """Make the next state from clipped changes and noise, within the run's privacy budget."""

    budget = ClientBudget

    def __init__(self, federation: Federation, round_: Round, state: Tensors) -> None:
        super().__init__(federation, round_, state)
        self.account = cast(ClientBudget, federation.privacy)
        self.norm = self.account.norm
        # All clients that may be drawn, connected or not.
        everyone = federation.registry.clients.values()
        eligible = (client for client in everyone if self.method.can_train(client.budget_fraction))
        self.clients = sorted(eligible, key=lambda client: client.partition_id)
        self.noise = self.account.noise(len(self.clients))

    @property
    def limits(self) -> Limits:
        # The round waits for all replies, of the clients that were drawn: the account counts them
        # alone. A cohort may be empty; then only noise is released.
        return Limits(min_replies=0, quorum=0, grace=math.inf, asks_more=False)

    @staticmethod
    def check_model(model: AdaptedModel) -> None:
        """Raise ValueError unless the method sums changes, before any privacy budget is spent."""
        sums_changes(model.method)

    def draw(self) -> list[RegisteredClient]:
        """Draw each client independently; return those that can be asked, and log the others.

        Which clients are connected is determined before the draw.
        """
        log, registry, grid = self.round.log, self.federation.registry, self.round.grid
        registry.require_clients()  # before anything is spent: no node of the run may be left
        self.federation.sampler.eligible(grid, log)  # logs the clients that are not eligible
        present = {client.node_id for client in registry.present(grid)}
        skipped = {
            node_id
            for node_id in present
            if registry.nodes[node_id].is_skipped(MessageType.TRAIN, self.round.number)
        }
        cohort = []
        for client in (self.clients[i] for i in subsample(len(self.clients), self.account.rate)):
            if client.node_id not in present:
                log.reject(client, "it is not connected; its change counts as zero")
            elif client.node_id in skipped:
                log.skipped.append(client.partition_id)
            else:
                cohort.append(client)
        return cohort

    def check_size(self, upload: Tensors, fraction: float, max_move: float) -> Mapping[str, float]:  # noqa: ARG002
        check_finite(upload)
        return {}  # clipping bounds the change

    def add(self, update: Update) -> None:
        # In the state's shapes, with NaN for what the client did not train.
        self.clipped_sum.add(expand_to_state(self.method, self.state, update.upload))

    @cached_property
    def clipped_sum(self) -> ClippedSum:
        """Return the round's sums, empty before the first reply."""
        return ClippedSum(self.state, self.norm)

    def close(self) -> Tensors:
        """Spend the release's privacy budget, then add noise to the sum of the changes."""
        self.account.spend()
        spent = self.account.as_record() | {"clip-norm": self.norm}
        self.round.log.private = cast(PrivacyRecord, spent)
        sums = self.clipped_sum
        del self.clipped_sum
        if not sums.count:
            log.warning("round %d: no update arrived, and only noise is added", self.round.number)
        self.account.norm = sums.next_norm(self.noise)
        # How many clients are expected to train each number of the state.
        fractions = Counter(client.budget_fraction for client in self.clients)
        expected = expected_clients(self.method, self.state, fractions, self.account.rate)
        return sums.noised_mean(self.noise, expected)
