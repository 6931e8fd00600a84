"""Compute the learning rate of a round: a constant, or a cosine over the rounds.

FlowerTune's cosine: in round t of T the rate is end + (start - end) (1 + cos(pi t / T)) / 2, so
that the last round has the end's. In warm-up rounds the rate rises in equal steps, and the cosine
begins after them.
"""

import math

from ravan_flwr.config.keys import AUTO
from ravan_flwr.config.run_config import Config


def rate_in_round(config: Config, number: int) -> float:
    """Return the clients' learning rate in a round, which counts from 1."""
    schedule = config.parts("learning-rate-schedule")
    start, warm_up = config.learning_rate, schedule["warm-up"]
    if 0 < number <= warm_up:
        return float(start * number / (warm_up + 1))
    if schedule[""] == "constant":
        return start
    end = start / 50 if schedule["end"] == AUTO else float(schedule["end"])
    done = (number - warm_up) / max(1, config.num_rounds - warm_up)
    return float(end + (start - end) * (1 + math.cos(math.pi * min(1.0, max(0.0, done)))) / 2)
