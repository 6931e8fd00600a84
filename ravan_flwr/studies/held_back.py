"""Count what clients hold back before a rate is chosen by it, and refuse too little."""

import logging
import math

from ravan_flwr.data.examples import load_splits
from ravan_flwr.data.partition import deal_out
from ravan_flwr.studies.tuning import Tuning
from ravan_flwr.training.workbench import column_for, partition_of

FEW = 100  # with fewer, a single answer is more than a percent

log = logging.getLogger(__name__)


def check_held_back(tuning: Tuning) -> int:
    """Count the examples that all clients hold back; ValueError where one has none to train on."""
    config, share = tuning.config, tuning.config.validation_share
    train, counts = load_splits(config.data)["train"], []
    for seed in tuning.rungs[-1].seeds:
        how = partition_of(config, tuning.num_clients, seed)
        numbers = [len(rows) for rows in deal_out(train, how, column_for(config, train))]
        counts.append(sum(math.ceil(share * number) for number in numbers))
        least = min(numbers)
        if math.ceil(share * least) >= least:
            raise ValueError(
                f"tune: a client has {least} of the {len(train):,} examples under seed {seed}, "
                f"expected enough to hold back {100 * share:g} % and train on the others; use "
                "fewer clients with num-clients=..., or more examples"
            )
    if counts[0] < FEW:
        log.warning(
            "clients hold back %d examples in all, so that one answer changes the metric by %.1f "
            "%%: rates may differ by chance; raise validation-share, or use more examples",
            counts[0],
            100 / counts[0],
        )
    return counts[0]
