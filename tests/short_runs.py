"""Short runs in this process, and reading what they wrote."""

import json

import torch

from ravan_flwr import simulate
from ravan_flwr.runs.checkpoint import load_checkpoint
from ravan_flwr.specs import Scalar

SHORT: dict[str, Scalar] = {
    "num-rounds": 2, "local-steps": 2, "batch-size": 8, "tracking": "none",
}  # fmt: skip


def run(folder, clients=3, settings=None, **more):
    """Run a simulation of the digits with few steps; `more` are settings with Python names."""
    changes = (settings or {}) | {key.replace("_", "-"): value for key, value in more.items()}
    return simulate(SHORT | {"output-dir": str(folder)} | changes, clients)


def records_of(simulation):
    """Return the records of a run's rounds."""
    lines = (simulation.run_dir / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def records_without_times(simulation):
    """Return the records of a run's rounds without what is measured."""
    records = records_of(simulation)
    for record in records:
        del record["seconds"], record["phases"], record["time"]
        for client in record["clients"]:
            del client["seconds"], client["span"]
    return records


def state_of(simulation, number):
    """Return the global state after a round."""
    return load_checkpoint(simulation.run_dir / "checkpoints", number).state


def saved(simulation, number=2):
    """Return all tensors of a checkpoint, with the memory that a resumed run needs."""
    checkpoint = load_checkpoint(simulation.run_dir / "checkpoints", number)
    return checkpoint.state | checkpoint.memory


def same_bits(first, second):
    """Return whether two states have the same tensors."""
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
