"""Train in a secure round, whose uploads are masked."""

from dataclasses import replace

import numpy as np
from flwr.app import MetricRecord, RecordDict

from ravan_flwr.client.client_request import ClientRequest, store_personal
from ravan_flwr.config.key import AUTO
from ravan_flwr.extras.secure.changes import (
    check_cohort,
    check_digest,
    check_parts,
    check_rows,
    list_parts,
    rows_by_tensor,
    selected_rows,
    to_numbers,
)
from ravan_flwr.extras.secure.phases import open_secure_client, pieces_in
from ravan_flwr.extras.secure.schedule import Schedule
from ravan_flwr.messages.records import read_pieces, to_pieces
from ravan_flwr.seeding import generator
from ravan_flwr.training.local_steps import ClientWork, train_locally


def train_masked(client: ClientRequest) -> RecordDict:
    """Train the rows that the schedule assigns to this client, and return their masked changes."""
    parts = read_pieces(pieces_in(client.content), ("here", "sealed", "marks"))
    with open_secure_client(client.context, client.node) as secure:
        schedule, rows = secure.take_shares(client.round, parts)
    loaded, work = client.loaded, client.work
    sent, method = work.broadcast, loaded.model.method
    check_digest(replace(loaded.config, rank=method.rank), sent, schedule)
    random = np.random.default_rng(work.client_round.derive("rounding"))
    _check_schedule(client, work, schedule)
    work = replace(work, scheduled_rows=rows_by_tensor(schedule.parts, rows))
    result = train_locally(loaded.model, loaded.task, work)
    if result.personal:
        store_personal(client.context.state, result.personal)
    numbers = to_numbers(method, sent, result.upload, schedule, rows, random)
    with open_secure_client(client.context, client.node) as secure:
        masked = secure.mask(client.round, numbers)
    arrays = to_pieces({"masked": masked})
    return RecordDict({"arrays": arrays, "metrics": MetricRecord(client.upload_metrics)})


def _check_schedule(client: ClientRequest, work: ClientWork, schedule: Schedule) -> None:
    """Raise ValueError if the schedule breaks the run's settings, as far as a client can check."""
    method, config, node = client.loaded.model.method, client.config, client.node
    sent = work.broadcast
    check_cohort(config, len(schedule.partitions), node.num_partitions)
    check_parts(list_parts(method, sent, config.learning_rate * work.settings.num_steps), schedule)
    # A node with budget = auto reported a fraction that depends on the memory free at that time.
    fraction = (
        work.fraction if node.budget == AUTO else min(client.budget_fraction, config.max_share)
    )
    random = generator(config.seed, "heads", client.round, node.partition_id)
    check_rows(selected_rows(method, sent, fraction, random), schedule, node.partition_id)
