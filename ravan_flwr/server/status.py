"""Report the run's current step and its clients whenever they change: `status.json`."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path

from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.runs.callback import Callback
from ravan_flwr.runs.directory import check_run_exists
from ravan_flwr.runs.status import RunStatus, write_status
from ravan_flwr.server.client_registry import ClientRegistry, Node

MOST_TIME_FRACTION = 0.05  # of the run's time, for reports of single replies
DESCRIBED = 1000  # the most clients in a report; the dashboard lists fewer


class StatusFile(Callback):
    """Write the run's status to its directory, for the dashboard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_status(self, status: RunStatus) -> None:
        check_run_exists(self.folder)
        write_status(self.folder, status)


class Status:
    """Report the run's current step to `report`; None disables reports."""

    def __init__(
        self, registry: ClientRegistry, report: Callable[[RunStatus], None] | None
    ) -> None:
        self._registry, self._report = registry, report
        self._doing, self._since, self._round, self._rounds = "recruiting", time.time(), 0, 0
        self._asked: Sequence[RegisteredClient] = ()
        self._answered: list[int] = []
        self._not_before = 0.0
        registry.on_answer = self._write_if_quick

    def begin(
        self,
        doing: str,
        number: int,
        rounds: int | None = None,
        clients: Collection[RegisteredClient] = (),
    ) -> None:
        """Report that a step of a round begins, and the clients that were sent a message in it."""
        self._doing, self._since, self._round = doing, time.time(), number
        self._rounds = self._rounds if rounds is None else rounds
        self._asked = sorted(clients, key=lambda client: client.partition_id)
        self._answered = []
        self._write()

    def answered(self, node: Node, client: RegisteredClient) -> None:
        """Note that a client has replied."""
        node.heard = time.time()
        self._answered.append(client.partition_id)
        self._write_if_quick()

    def _write_if_quick(self) -> None:
        """Report the status, unless reports take too much time (many clients, many replies)."""
        if time.perf_counter() >= self._not_before:
            self._write()

    def _write(self) -> None:
        if self._report is None:
            return
        began = time.perf_counter()
        self._report(self._now())
        ended = time.perf_counter()
        self._not_before = ended + (ended - began) / MOST_TIME_FRACTION

    def _described(self) -> Iterable[RegisteredClient]:
        """Return at most `DESCRIBED` clients, those of this step first."""
        clients = self._registry.clients
        asked = [client.node_id for client in self._asked if client.node_id in clients]
        nodes = dict.fromkeys(chain(asked, clients))
        return (clients[node] for node in islice(nodes, DESCRIBED))

    def _now(self) -> RunStatus:
        clients = self._registry.clients
        return {
            "doing": self._doing,
            "since": self._since,
            "round": self._round,
            "rounds": self._rounds,
            "asked": [client.partition_id for client in self._asked],
            "answered": sorted(self._answered),
            "partitions": self._registry.partitions,
            "clients": len(clients),
            "nodes": [
                {
                    "partition-id": client.partition_id,
                    "budget-fraction": client.budget_fraction,
                    "device": client.device,
                    "examples": client.examples,
                    "own-data": client.own_data,
                    "versions": client.versions,
                    "heard": self._registry.nodes[client.node_id].heard,
                }
                for client in self._described()
            ],
            "refused": [
                {"node": node.name, "reason": node.refused}
                for node in self._registry.nodes.values()
                if node.refused
            ],
        }
