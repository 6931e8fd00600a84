"""Convert a client's changes to the rows and whole numbers of a secure round, and means back.

The sum is over changes: s_i H_i - H_i for a head of RAVAN, and new minus old for other tensors. An
additional part sums the fraction of each client's numbers that were cut off at their bounds.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ravan_flwr.config.keys import NOT_OF_RESULT
from ravan_flwr.config.run_config import Config
from ravan_flwr.extras.secure.fixed_point import Numbers, choose_bound, to_steps
from ravan_flwr.extras.secure.schedule import Bits, Part, Schedule, compute_threshold
from ravan_flwr.methods.base import (
    CLASSIFIER,
    Method,
    Tensors,
    expand_to_state,
    split_classifier,
)
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.methods.tensors import checksum

CUT_OFF = "/cut-off"  # no tensor has this name


def list_parts(method: Method, state: Mapping[str, Tensor], steps: float) -> tuple[Part, ...]:
    """List the parts that are summed; `steps` is the learning rate times a client's most steps."""
    rows = sums_changes(method).rows(split_classifier(state)[0]) | {CLASSIFIER: 1}
    parts = []
    for name in _float_names(state):
        size = state[name].numel() // rows[name]
        if size:
            # The meta tensors of a plan have no values, so their bound is a placeholder.
            largest = 0.0 if state[name].is_meta else float(state[name].abs().max())
            parts.append(Part(name, rows[name], size, choose_bound(steps, largest)))
    return (*parts, Part(CUT_OFF, 1, 1, 1.0))


def selected_rows(
    method: Method, state: Mapping[str, Tensor], fraction: float, random: torch.Generator
) -> Bits:
    """Return which rows of all parts a client with that budget fraction would train."""
    trained = sums_changes(method).rows_trained(split_classifier(state)[0], fraction, random) | {
        CLASSIFIER: torch.ones(1).bool()
    }
    bits = [trained[name].numpy() for name in _float_names(state) if state[name].numel()]
    return np.concatenate([*bits, [True]])


def rows_by_tensor(parts: Sequence[Part], rows: Bits) -> Tensors:
    """Split the rows of all parts by tensor."""
    ends = np.cumsum([part.rows for part in parts])
    cut = np.split(rows, ends[:-1])
    return {part.name: torch.from_numpy(bits.copy()) for part, bits in zip(parts, cut, strict=True)}


def round_digest(config: Config, state: Mapping[str, Tensor]) -> str:
    """Return a hash of the settings and the state with which a client of a secure round trains.

    They must be the same for all clients. A server could send all but one client a state, or a
    learning rate, that leads to no change. Then the sum would be that client's change (Pasquini et
    al., 2022).
    """
    settings = {k: v for k, v in config.as_dict().items() if k not in NOT_OF_RESULT}
    text = json.dumps([settings, checksum(state, digits=64)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_digest(config: Config, state: Mapping[str, Tensor], schedule: Schedule) -> None:
    """Raise ValueError unless settings and state of this client have the schedule's hash."""
    if schedule.given != round_digest(config, state):
        raise ValueError(
            "got settings or a state that are not those of the schedule, expected what all clients "
            "of the round are given; start server and clients with one version and one run config"
        )
    if schedule.minimum < config.secure_minimum:
        raise ValueError(
            f"got a schedule with sums of {schedule.minimum} clients, expected the run's own "
            f"secure-minimum = {config.secure_minimum} at least"
        )
    if not 1 <= schedule.round <= config.num_rounds:
        raise ValueError(
            f"got round {schedule.round}, expected 1 to {config.num_rounds} (num-rounds)"
        )


def min_cohort(config: Config, clients: int) -> int:
    """Return how many clients a round needs: two thirds of `clients-per-round`, or of all."""
    return max(config.secure_minimum, compute_threshold(min(config.clients_per_round, clients)))


def check_cohort(config: Config, cohort: int, clients: int) -> None:
    """Raise ValueError unless the cohort's size is between `min_cohort` and the setting."""
    smallest, largest = min_cohort(config, clients), config.clients_per_round
    if not smallest <= cohort <= largest:
        raise ValueError(
            f"got a round of {cohort} clients, expected {smallest} to {largest}: at least two "
            "thirds of clients-per-round, or of all clients if they are fewer; lower "
            "clients-per-round"
        )


def check_rows(rows: Bits, schedule: Schedule, partition: int) -> None:
    """Raise ValueError unless the schedule lists a client with the rows that it would choose.

    The schedule leaves out rows that too few clients have chosen, for all clients.
    """
    listed = schedule.trained[schedule.partitions.index(partition)]
    if not np.array_equal(listed, rows & schedule.trained.any(0)):
        raise ValueError(
            "got a schedule with other heads than the seed and its budget give this client, "
            "expected those; the server does not follow the run's settings"
        )


def check_parts(parts: Sequence[Part], schedule: Schedule) -> None:
    """Raise ValueError unless a schedule has these parts, with bounds that are not lower.

    With a lower bound a sum reveals the signs of changes, where all clients' signs agree.
    """
    expected = [(part.name, part.rows, part.size) for part in parts]
    actual = [(part.name, part.rows, part.size) for part in schedule.parts]
    if actual != expected:
        raise ValueError(f"got a schedule of {str(actual)[:200]}, expected {str(expected)[:200]}")
    for own, part in zip(parts, schedule.parts, strict=True):
        if part.bound < own.bound:
            raise ValueError(
                f"got a bound of {part.bound:.3g} for {own.name}, expected {own.bound:.3g} at "
                "least, by this client's steps; if it has more examples than the server counts, "
                "raise max-examples"
            )


def to_numbers(
    method: Method, sent: Mapping[str, Tensor], upload: Mapping[str, Tensor], schedule: Schedule,
    rows: Bits, random: np.random.Generator,
) -> Numbers:  # fmt: skip
    """Round a client's changes to whole numbers, in the schedule's order of rows."""
    filled = expand_to_state(method, sent, upload)
    numbers, cut_off_count, total = [], 0, 0
    for part, span in schedule.spans():
        if part.name == CUT_OFF:
            continue
        change = (filled[part.name].double() - sent[part.name].double()).view(part.rows, -1)
        chosen = change.numpy()[rows[span]].reshape(-1)
        steps, cut = to_steps(chosen, part.bound, random)
        numbers.append(steps)
        cut_off_count, total = cut_off_count + cut, total + len(steps)
    cut_off = np.array([cut_off_count / max(1, total)])
    return np.concatenate([*numbers, to_steps(cut_off, 1.0, random)[0]])


def add_mean_changes(
    state: Mapping[str, Tensor], means: Mapping[str, NDArray[np.float64]]
) -> Tensors:
    """Return a state plus the mean changes."""
    return {
        name: (old.double() + torch.from_numpy(means[name]).view_as(old)).float()
        if name in means
        else old
        for name, old in state.items()
    }


def _float_names(state: Mapping[str, Tensor]) -> list[str]:
    """List the names of the tensors that clients change, sorted: all but those of integers."""
    return sorted(name for name, tensor in state.items() if tensor.is_floating_point())
