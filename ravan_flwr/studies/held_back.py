"""Count what clients hold back before a rate is chosen by it, and refuse too little."""

import logging
from dataclasses import replace

from ravan_flwr.studies.tuning import Tuning
from ravan_flwr.training.model_and_data import ModelAndData, held_back

FEW = 100  # with fewer, a single answer is more than a percent

log = logging.getLogger(__name__)


def check_held_back(tuning: Tuning) -> int:
    """Count the examples that all clients hold back; ValueError where one has none to train on."""
    config, share = tuning.config, tuning.config.validation_share
    counts = []
    for seed in tuning.rungs[-1].seeds:
        seeded = replace(config, seed=seed)
        sizes = [len(rows) for rows in ModelAndData(seeded).rows(tuning.num_clients)]
        counts.append(sum(held_back(seeded, size) for size in sizes))
        least = min(sizes)
        if held_back(seeded, least) >= least:
            raise ValueError(
                f"tune: a client has {least} of the {sum(sizes):,} examples under seed {seed}, "
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
