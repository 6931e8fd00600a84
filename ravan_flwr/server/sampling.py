"""Choose the clients of a round.

Simulated node ids are random, so the choice does not depend on them: a round's clients are a
function of (seed, round) and the clients sorted by partition id.
"""

from collections.abc import Callable, Sequence
from logging import getLogger

import torch
from flwr.app import MessageType
from flwr.serverapp import Grid

from ravan_flwr.config.keys import KRUM
from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.plain_text import listed
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Method
from ravan_flwr.runs.console import count
from ravan_flwr.seeding import generator
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.runtime import in_process
from ravan_flwr.simulated_time.clock import find_clock

log = getLogger(__name__)


def sample(
    clients: Sequence[RegisteredClient], number: int, seed: int, round_number: int, reserve: int = 0
) -> list[RegisteredClient]:
    """Return a random cohort as a function of seed and round number, sorted by partition id.

    `reserve` further clients follow, sorted likewise. They do not change the cohort.
    """
    order = torch.randperm(len(clients), generator=generator(seed, "sample", round_number))
    pool = sorted(clients, key=lambda client: client.partition_id)
    parts = order[:number], order[number : number + reserve]
    return [pool[i] for part in parts for i in sorted(part.tolist())]


class Sampler:
    """Choose clients that are connected, eligible for the method, and not skipped.

    `smallest_cohort` returns how many clients a round needs, of the run's partitions.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        registry: ClientRegistry,
        smallest_cohort: Callable[[Config, int], int],
    ) -> None:
        self.config, self.method, self.registry = config, method, registry
        self._smallest_cohort = smallest_cohort
        # Of the previous round, to log only changes.
        self._not_eligible: list[int] = []
        self._not_connected = 0

    def sample(
        self,
        grid: Grid,
        round_log: RoundLog,
        among: Callable[[Sequence[RegisteredClient]], list[RegisteredClient]],
    ) -> list[RegisteredClient]:
        """Return the round's cohort, followed by the reserve clients (`over-sample`).

        `among` selects the clients that may be drawn.
        """
        config, eligible = self.config, self.eligible(grid, round_log)
        clients = self.available(among(eligible), round_log, self._min_clients)
        number = min(config.clients_per_round, len(clients))
        reserve = config.num_asked(len(clients)) - number
        all_clients = len(self.registry.clients)
        not_connected = all_clients - len(eligible) - len(round_log.not_eligible)
        if not_connected != self._not_connected and number < config.clients_per_round:
            log.info(
                "%d of %d clients are not connected: the round asks %d; clients-per-round is %d",
                *(not_connected, all_clients, number, config.clients_per_round),
            )
        self._not_connected = not_connected
        return sample(clients, number, config.seed, round_log.number, reserve)

    def eligible(self, grid: Grid, round_log: RoundLog) -> list[RegisteredClient]:
        """Return the connected clients whose budget fraction allows to train; log the others."""
        clients = self.registry.present(grid)
        eligible = set(filter(self.can_train, {client.budget_fraction for client in clients}))
        round_log.not_eligible = [
            client.partition_id for client in clients if client.budget_fraction not in eligible
        ]
        if round_log.not_eligible != self._not_eligible:
            self._not_eligible = round_log.not_eligible
            log.info(
                "%s not eligible: the budget does not allow the whole of %s; partitions %s",
                count(len(round_log.not_eligible), "client"), self.config.method,
                listed(map(str, round_log.not_eligible), 20, ", ") or "none",
            )  # fmt: skip
        candidates = () if eligible else self.registry.clients.values()
        fractions = sorted({client.budget_fraction for client in candidates})
        if fractions and not any(map(self.can_train, fractions)):  # no client at all
            whole = self.config.robust in KRUM
            by = f" with weighting={self.config.weighting}" if whole else ""
            raise ValueError(
                f"method {self.config.method!r}{by} is trained whole or not at all, and no client "
                f"can afford it: got budgets of {', '.join(f'{f:g}' for f in fractions)}, "
                "expected one of 1; use "
                + ("weighting=median" if whole else "a method that can be trained in part")
                + ", or budgets=full"
            )
        return [client for client in clients if client.budget_fraction in eligible]

    def can_train(self, fraction: float) -> bool:
        """Return whether a client with that budget fraction can train."""
        return self.method.can_train(fraction) and (fraction >= 1 or self.config.robust not in KRUM)

    def available(
        self, eligible: Sequence[RegisteredClient], round_log: RoundLog, min_clients: int = 1
    ) -> list[RegisteredClient]:
        """Return the clients that are not skipped in this round; log the others."""
        available = self.registry.without_skipped(
            eligible, MessageType.TRAIN, round_log.number, min_clients
        )
        ids = {client.node_id for client in available}
        round_log.skipped = [
            client.partition_id for client in eligible if client.node_id not in ids
        ]
        return available

    def wait(self, grid: Grid, round_log: RoundLog) -> None:
        """Wait until as many clients are eligible as a round needs, or the time is up."""
        clock = find_clock(grid)
        deadline = clock.now + self.config.round_timeout
        while len(self.eligible(grid, round_log)) < self._min_clients:
            clients = len(self.registry.clients)
            # No new client can connect in one process, or if every partition has its node.
            complete = in_process(grid) or clients >= self.registry.partitions
            all_here = complete and len(self.registry.present(grid)) == clients
            if all_here or clock.now >= deadline:
                break
            clock.wait_for_node()
            self.registry.gather(grid)

    @property
    def _min_clients(self) -> int:
        """Return how many clients a round needs: at least one."""
        return self._smallest_cohort(self.config, self.registry.partitions)
