"""Deal out a run's examples as its clients will have them, and count who has what."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import datasets
import numpy as np

from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.data.examples import load_splits
from ravan_flwr.data.partition import BY_COLUMN, deal_out
from ravan_flwr.partition_report.count import PartitionReport, holdings_of
from ravan_flwr.specs import Scalar
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.model_and_data import column_for, held_back, partition_of, settle


@dataclass(frozen=True)
class Assignment:
    """Hold what clients have, under which settings, and how long they train on it."""

    config: Config  # with the number of clients
    holdings: PartitionReport
    classes: str  # the column that they are counted by; "" if none
    steps: np.ndarray  # of each client in a round

    @property
    def by_label(self) -> bool:
        """Tell whether they are counted by the task's own labels, whose names are no secret."""
        return self.classes == "label" and bool(self.config.data.labels)


def deal(settings: Mapping[str, Scalar], num_clients: int | None = None) -> Assignment:
    """Deal out the examples as in a run with these settings."""
    config = settle(read_config(own_preset(settings)))
    number = number_of_clients(config, num_clients)
    config = replace(config, num_clients=number)
    train = load_splits(config.data)["train"]
    column = column_for(config, train)
    dealt = deal_out(train, partition_of(config, number, config.seed), column)
    natural = config.division == "natural"
    classes = _classes(config, train, column)
    found = holdings_of(train, dealt, classes, config.data.labels, column if natural else "")
    trained = [size - held_back(config, size) for size in found.sizes.tolist()]
    return Assignment(config, found, classes, np.array([config.steps_of(size) for size in trained]))


def _classes(config: Config, train: datasets.Dataset, column: str) -> str:
    """Choose the column to count by: the one that makes clients differ, or the label."""
    if config.division in BY_COLUMN and config.division != "natural":
        return column
    other = column if config.division != "natural" else ""
    return next((name for name in ("label", other) if name in train.column_names), "")
