"""Count the bytes of a secure round, for a plan."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.extras.secure.changes import list_parts, selected_rows
from ravan_flwr.extras.secure.fixed_point import WIDTH
from ravan_flwr.extras.secure.schedule import GIVEN, make_schedule, max_protocol_bytes
from ravan_flwr.methods.base import Method
from ravan_flwr.methods.budgets import budget_fraction
from ravan_flwr.seeding import generator


class RoundBytes(NamedTuple):
    """Bytes of each masked number, and those that a client sends and receives beside them."""

    number: int
    up: int
    down: int


def round_bytes(config: Config, method: Method, state: Mapping[str, Tensor]) -> RoundBytes:
    """Return the most bytes of any client, in a round of clients with the run's budgets."""
    # Bounds are sent as decimal text, and none has more digits than this one.
    longest, digest = 1e-5 / 3, GIVEN * "0"
    parts = [part._replace(bound=longest) for part in list_parts(method, state, 1.0)]
    rows = {}
    for partition in range(config.clients_per_round):
        fraction = budget_fraction(config.budgets, config.seed, partition)
        if method.can_train(fraction):
            random = generator(config.seed, "heads", 1, partition)
            rows[partition] = selected_rows(method, state, fraction, random)
    minimum, number = config.secure_minimum, config.num_rounds
    schedule = make_schedule(2**63, number, minimum, parts, rows, digest)
    up, down = max_protocol_bytes(schedule)
    return RoundBytes(WIDTH, WIDTH + up, down)  # one number more: how many were cut off
