"""Transports: how the messages and the replies of a round travel, and when the round may close.

`Plain` waits for the clients that were drawn. optional.py lists the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from logging import getLogger
from types import MappingProxyType

from flwr.app import Message
from torch import Tensor

from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.console import count
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.releases import Release
from ravan_flwr.server.round import Round

log = getLogger(__name__)


class Transport(ABC):
    """Turn the cohorts of a run's rounds into replies. One object serves a run.

    Args:
        federation: The parts of the run.
        memory: What `memory` returned when a resumed run was stopped.
    """

    def __init__(
        self,
        federation: Federation,
        memory: Mapping[str, Tensor] = MappingProxyType({}),  # noqa: ARG002 (most need none)
    ) -> None:
        self.federation = federation

    def draw(self, round_: Round, release: Release) -> list[RegisteredClient]:  # noqa: ARG002
        """Choose the clients that are sent messages when the round begins."""
        return release.draw()

    @abstractmethod
    def exchange(
        self, round_: Round, release: Release, messages: list[Message]
    ) -> Iterator[Message]:
        """Send the messages; yield the replies as they arrive, until the round may close.

        It is lazy: the next reply is fetched, and the wait may end, after a reply is used.
        """

    @property
    def memory(self) -> Tensors:
        """Return what a resumed run needs."""
        return {}


class Plain(Transport):
    """Send each drawn client a message; ask further clients if too few replies are valid."""

    def exchange(
        self, round_: Round, release: Release, messages: list[Message]
    ) -> Iterator[Message]:
        # A node's failure loses its reply, but not the round while other clients can be asked.
        while messages:
            came, limits = len(round_.log.clients), release.limits  # of the clients asked before
            limits = replace(limits, enough=limits.enough - came, quorum=limits.quorum - came)
            yield from round_.replies(messages, limits)
            messages = release.write(self._draw_more(round_, release))

    def _draw_more(self, round_: Round, release: Release) -> list[RegisteredClient]:
        """Draw further clients if too few replied; none if all clients were asked."""
        limits = release.limits
        if len(round_.log.clients) >= limits.min_replies or not limits.asks_more:
            return []
        skipped = round_.log.skipped  # of the first draw, which the next one overwrites
        clients = release.draw()
        asked = {client.partition_id for client in clients}
        round_.log.skipped = [partition for partition in skipped if partition not in asked]
        if clients:
            log.warning(
                "round %d has %d valid replies, expected %d at least: it asks %s more",
                round_.number, len(round_.log.clients), limits.min_replies,
                count(len(clients), "client"),
            )  # fmt: skip
        return clients
