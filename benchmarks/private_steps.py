"""Measure the cost of example-level privacy for a client's steps, relative to plain steps.

    python -m benchmarks.private_steps            # a minute of a core

A client of the digits trains `--steps` steps of 32 examples, in turn by plain and private steps,
with one thread. Seconds are of the processor, by step; ratios are medians over the turns. Poisson
draws have equally many examples on average. The last column is a loop over a batch's examples.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.example_privacy.gradients import StepNoise
from ravan_flwr.extras.example_privacy.steps import train_privately
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.training.local_steps import ClientWork, make_training_settings, train_locally
from ravan_flwr.training.model_and_data import ModelAndData

METHODS = ("ravan", "fedit", "ffa-lora")
EXAMPLES = 256  # of the client; 32 are expected in a step


def main(arguments: list[str]) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sys.stdout.write("| method | plain step, ms | private, ms | x plain | one by one, x plain |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    for method in METHODS:
        turns = measured(method, options.steps, options.repetitions)
        plain, private = (statistics.median(turn[way] for turn in turns) for way in (0, 1))
        ratios = [statistics.median(turn[way] / turn[0] for turn in turns) for way in (1, 2)]
        sys.stdout.write(
            f"| {method} | {1e3 * plain:.1f} | {1e3 * private:.1f} | {ratios[0]:.2f} "
            f"| {ratios[1]:.1f} |\n"
        )
        sys.stdout.flush()
    return 0


def measured(method: str, steps: int, repetitions: int) -> list[list[float]]:
    """Return seconds of a step for each turn: plain, private, one example after the other."""
    settings: dict[str, Scalar] = {"method": method, "partition": "iid", "local-steps": steps}
    config = read_config(settings)
    loaded = ModelAndData(config)
    examples = loaded.partition(0, 2).train.select(np.arange(EXAMPLES))
    state, noise = loaded.model.initial_state(), StepNoise(1.0, 1.0)
    local_steps = make_training_settings(config, 1, EXAMPLES)
    work = ClientWork(examples, state, 1.0, local_steps, ClientRound(0, 1, 0))
    one_by_one = replace(work, settings=replace(local_steps, micro_batch_size=1))

    def plain() -> object:
        return train_locally(loaded.model, loaded.task, work)

    def private() -> object:
        return train_privately(loaded.model, loaded.task, work, noise)

    def loop() -> object:
        return train_privately(loaded.model, loaded.task, one_by_one, noise)

    ways = (plain, private, loop)
    for way in ways:
        way()
    return [[seconds(way) / steps for way in ways] for _ in range(repetitions)]


def seconds(way: Callable[[], object]) -> float:
    """Measure the processor seconds of one turn."""
    began = time.process_time()
    way()
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
