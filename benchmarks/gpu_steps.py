"""Compare captured steps with eager ones, in what clients upload and in the time of a step.

    python -m benchmarks.gpu_steps --device recorder --check   # without a GPU, two minutes
    python -m benchmarks.gpu_steps --device cuda --check       # the same with CUDA graphs
    python -m benchmarks.gpu_steps --device cuda               # milliseconds a step, three minutes

`--check` trains several clients of every method with `digits-vit`, each eagerly and captured, in
two rounds: whole and partial budgets, other learning rates, clipping, the proximal term, weight
decay, short batches, scores by gradients, bfloat16. `recorder` stands in for a GPU: it records the
operations of a step on the CPU and runs them again (testing/recorder.py).

The times are those of the product's own path, from a broadcast to the upload, with models of the
presets' shapes and random weights: eager, captured, and several clients in one pass; beside them
the same network in a plain loop with PEFT's LoRA, autocast and AdamW.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Tensors, split_classifier
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.training.captured import Capture, CapturedSteps, CudaGraphs
from ravan_flwr.training.local_steps import LocalResult, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import LocalSteps
from testing.recorder import Recorder

BATCH, CLIENTS = 16, 40  # 36 examples a client: two whole batches and a short one
OPTIONS: list[dict[str, Any]] = [
    {}, {}, {"learning_rate": 0.001}, {"learning_rate": 0.0007},
    {"proximal_mu": 0.5, "max_gradient_norm": 0.5}, {"proximal_mu": 0.1, "max_gradient_norm": 0.2},
    {"weight_decay": 0.1}, {"weight_decay": 0.1},
]  # fmt: skip
FURTHER: dict[str, dict[str, Scalar]] = {
    "ravan, bfloat16": {"precision": "bfloat16"},
    "fedit, bfloat16": {"method": "fedit", "precision": "bfloat16"},
    "ravan, scoring=gradient": {"scoring": "gradient"},
    "ravan, selection=global": {"selection": "global", "scoring": "weight"},
    "ravan, scaling=constant": {"scaling": "constant"},
    "ravan, classifier=trained": {"classifier": "trained"},
}


def rounds(loaded: ModelAndData) -> list[list[LocalResult]]:
    """Train clients in two rounds, the second from the state that the first ends with."""
    model = loaded.model
    generator = torch.Generator().manual_seed(0)
    state = {
        name: t + 0.01 * torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
        for name, t in model.initial_state().items()
    }
    personal: dict[int, Tensors] = {}
    done = []
    for number in (1, 2):
        method = model.method.in_round(number)
        own, classifier = split_classifier(state)
        sums = method.open_round(own)
        results = []
        for client, options in enumerate(OPTIONS):
            fraction = 0.5 if client % 2 and method.parts else 1.0
            steps = LocalSteps(
                **{"number": 5, "batch_size": BATCH, "learning_rate": 0.003, **options},
                precision=loaded.config.precision,
            )
            result = train_locally(
                model, loaded.task, loaded.partition(client, CLIENTS).train,
                {**method.broadcast(own, fraction), **classifier}, fraction, steps,
                ClientRound(0, number, client), personal.get(client),
            )  # fmt: skip
            sums.add(split_classifier(result.upload)[0], 1.0)
            personal |= {client: result.personal} if result.personal else {}
            results.append(result)
        state = {**sums.close(), **classifier}
        done.append(results)
    return done


def same(some: Sequence[LocalResult], others: Sequence[LocalResult]) -> bool:
    """Return whether uploads, personal parameters and losses have the same bits."""
    return all(
        dict_same(one.upload, other.upload)
        and dict_same(one.personal, other.personal)
        and (one.train_loss == other.train_loss or one.train_loss != one.train_loss)
        for one, other in zip(some, others, strict=True)
    )


def dict_same(some: Tensors, others: Tensors) -> bool:
    """Return whether tensors by name are equal."""
    return some.keys() == others.keys() and all(torch.equal(t, others[n]) for n, t in some.items())


def check_method(config: dict[str, Scalar], device: str, capture: Capture) -> tuple[bool, str]:
    """Return whether captured steps are the eager ones to the bit, and a description."""
    loaded = ModelAndData(read_config({"preset": "digits-vit", "device": device, **config}))
    model = loaded.model
    model.captured = None
    eager = rounds(loaded)
    captured = model.captured = CapturedSteps(capture)
    replayed = rounds(loaded)
    model.captured = None
    results = [[*itertools.chain(*one)] for one in (eager, replayed, rounds(loaded))]
    graphs = [graph for state in captured.states.values() for graph in state.graphs.values()]
    failed = [graph for graph in graphs if graph is None]
    is_same = same(results[0], results[1]) and same(results[0], results[2])
    okay = (
        is_same and captured.number > len(failed) == 0
    ) or not model.method.trainable_parameters()
    return okay, f"{captured.number} graphs, {len(failed)} not captured, same bits: {is_same}"


def check(device: str) -> int:
    """Print a line for each method and option, and a total; return the exit code."""
    capture: Capture = CudaGraphs() if device == "cuda" else Recorder()
    runs: dict[str, dict[str, Scalar]] = {name: {"method": name} for name in METHODS}
    good = 0
    for name, config in (runs | FURTHER).items():
        okay, line = check_method(config, "cuda" if device == "cuda" else "cpu", capture)
        good += okay
        print(f"{name:26} {line}", flush=True)
    print(f"same bits: {good} of {len(runs | FURTHER)} methods")
    return int(good < len(runs | FURTHER))


def main(arguments: Sequence[str]) -> int:
    """Check, or time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "recorder", "cpu"), default="cuda")
    parser.add_argument("--check", action="store_true", help="compare the bits of uploads")
    options = parser.parse_args(arguments)
    return check(options.device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
