"""Let clients evaluate the state on their validation splits."""

from collections.abc import Iterable

from flwr.app import Message, MessageType

from ravan_flwr.runs.record import Metrics, per_client_statistics
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.reply_collector import Sent
from ravan_flwr.server.round import Round
from ravan_flwr.server.round_log import mean_of
from ravan_flwr.server.update import most_validation_size, read_evaluated


def evaluation_messages(federation: Federation, round_: Round) -> list[Message]:
    """Return a message to evaluate the state for each client that is not skipped."""
    registry, kind, number = federation.registry, MessageType.EVALUATE, round_.number
    arrays = round_.encoded(federation.state.tensors)
    clients = registry.without_skipped(registry.present(round_.grid), kind, number)
    builder = federation.message_builder
    return [builder.message(client, kind, number, arrays, {}) for client in clients]


def mean_metrics(
    federation: Federation, round_: Round, replies: Iterable[Message]
) -> Metrics | None:
    """Return the clients' mean metrics, weighted by their numbers of examples or other units.

    Return None if no reply is valid.
    """
    registry, measures = federation.registry, federation.loaded.task.measures

    def read(message: Message, sent: Sent) -> tuple[float, Metrics]:
        examples = registry.examples(sent.client)
        most = most_validation_size(examples, federation.config.validation_share)
        return read_evaluated(message, round_.number, measures, most)

    valid = round_.collector.valid(replies, read)
    answers = {sent.client.partition_id: answer for sent, answer in valid}
    if not answers:
        return None
    units, means = zip(*(answers[partition] for partition in sorted(answers)), strict=True)
    round_.log.per_client = per_client_statistics(list(map(measures.completed, means)))
    return measures.completed(
        {name: mean_of([mean[name] for mean in means], units) for name in measures.names}
    )
