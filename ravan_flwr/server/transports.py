"""Transports: how messages and replies travel, and when the state moves on.

`Plain` waits for the clients that were drawn, until a deadline; `Buffered` (buffered.py) closes a
round when enough updates are in. One object serves a run.
"""

from collections.abc import Iterable, Iterator, Mapping
from logging import getLogger
from types import MappingProxyType

from flwr.app import Message
from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.optional import TRANSPORTS, load
from ravan_flwr.runs.console import count
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.releases import Mean
from ravan_flwr.server.reply_collector import Sent
from ravan_flwr.server.round import Round

log = getLogger(__name__)


def transport_class(config: Config) -> "type[Plain]":
    """Return the class of a run's transport."""
    found: type[Plain] = load(TRANSPORTS[config.aggregation])
    return found


def write(
    federation: Federation, round_: Round, release: Mean, clients: Iterable[RegisteredClient]
) -> list[Message]:
    """Return a message with the broadcast for each of these clients."""
    messages = []
    for client in clients:
        round_.recipients.add(client.node_id)
        # Most methods have one broadcast for all.
        fraction = client.budget_fraction if round_.method.parts else 1.0
        if fraction not in round_.broadcasts:
            round_.broadcasts[fraction] = round_.encoded(release.broadcast(fraction))
        message = federation.message_builder.message(
            client, release.message_type, round_.number, round_.broadcasts[fraction], {}
        )
        release.address(message, client)
        messages.append(message)
    return messages


class Plain:
    """Send each drawn client a message; ask further clients if too few replies are valid.

    Args:
        federation: The parts of the run.
        memory: What `memory` returned when a resumed run was stopped.
    """

    def __init__(
        self,
        federation: Federation,
        memory: Mapping[str, Tensor] = MappingProxyType({}),  # noqa: ARG002
    ) -> None:
        self.federation = federation

    @property
    def memory(self) -> Tensors:
        """Return what a resumed run needs."""
        return {}

    def open(self, round_: Round, release: Mean) -> list[Message]:
        """Return the messages with which the round begins."""
        return write(self.federation, round_, release, release.draw())

    def replies(self, round_: Round, release: Mean, messages: list[Message]) -> Iterator[Message]:
        """Send the messages and yield the replies, until the round may close.

        A node's failure loses its reply, but not the round while other clients can be asked.
        """
        while messages:
            yield from round_.send(messages, round_.enough)
            messages = self._more(round_, release)

    def version(self, round_: Round, sent: Sent) -> tuple[Tensors, int]:  # noqa: ARG002
        """Return the state that a client was sent, and how many rounds ago it was."""
        return self.federation.state.tensors, 0

    def _more(self, round_: Round, release: Mean) -> list[Message]:
        """Return messages to further clients if too few replied; none if all clients were asked."""
        if len(round_.log.clients) >= round_.least or not round_.asks_more:
            return []
        skipped = round_.log.skipped
        clients = self.federation.sampler.sample(
            round_.grid,
            round_.log,
            lambda eligible: [m for m in eligible if m.node_id not in round_.recipients],
        )
        round_.log.skipped = skipped
        if clients:
            log.warning(
                "round %d has %d valid replies, expected %d at least: it asks %s more",
                round_.number, len(round_.log.clients), round_.least,
                count(len(clients), "client"),
            )  # fmt: skip
        return write(self.federation, round_, release, clients)
