"""Train in a secure round, where what is uploaded is masked."""

from dataclasses import replace

import numpy as np
from flwr.app import MetricRecord, RecordDict

from ravan_flwr.client.client_request import ClientRequest, keep_own
from ravan_flwr.client.secure_part import pieces_in, secure_part
from ravan_flwr.config.key import AUTO
from ravan_flwr.messages.records import read_pieces, to_pieces
from ravan_flwr.methods.base import Tensors
from ravan_flwr.secure.schedule import Schedule
from ravan_flwr.seeding import generator
from ravan_flwr.training.local_steps import train_locally
from ravan_flwr.training.masked import (
    by_tensor,
    check_cohort,
    check_digest,
    check_parts,
    check_rows,
    parts_of,
    selected_rows,
    to_numbers,
)


def train_masked(client: ClientRequest) -> RecordDict:
    """Train the rows that the schedule of a secure round says, and mask how they changed."""
    parts = read_pieces(pieces_in(client.content), ("here", "sealed", "marks"))
    with secure_part(client.context, client.node) as secure:
        schedule, rows = secure.take_shares(client.round, parts)
    sent, method = client.broadcast, client.loaded.model.method
    check_digest(replace(client.loaded.config, rank=method.rank), sent, schedule)
    random = np.random.default_rng(client.turn.derive("rounding"))
    _check_schedule(client, sent, schedule)
    chosen, own = by_tensor(schedule.parts, rows), client.find_own()
    result = train_locally(
        *client.work, client.granted, client.steps, client.turn, own=own, rows=chosen
    )
    if result.own:
        keep_own(client.context.state, result.own)
    numbers = to_numbers(method, sent, result.upload, schedule, rows, random)
    with secure_part(client.context, client.node) as secure:
        masked = secure.mask(client.round, numbers)
    arrays = to_pieces({"masked": masked})
    return RecordDict({"arrays": arrays, "metrics": MetricRecord(client.upload_metrics)})


def _check_schedule(client: ClientRequest, sent: Tensors, schedule: Schedule) -> None:
    """Refuse what the server would have said otherwise, as far as this client can know it."""
    method, config, node = client.loaded.model.method, client.config, client.node
    check_cohort(config, len(schedule.partitions), node.num_partitions)
    check_parts(parts_of(method, sent, config.learning_rate * client.steps.number), schedule)
    # What a node with budget = auto has named depends on memory that was free then.
    fraction = (
        client.granted if node.budget == AUTO else min(client.budget_fraction, config.max_share)
    )
    random = generator(config.seed, "heads", client.round, node.partition_id)
    check_rows(selected_rows(method, sent, fraction, random), schedule, node.partition_id)
