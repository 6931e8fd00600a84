"""Compare captured steps with eager ones, in what clients upload and in the time of a step.

    python -m benchmarks.gpu_steps --device recorder --check   # without a GPU, two minutes
    python -m benchmarks.gpu_steps --device cuda --check       # the same with CUDA graphs
    python -m benchmarks.gpu_steps --device cuda               # milliseconds a step, three minutes

`--check` trains several clients of every method with `digits-vit`, each eagerly and captured, in
two rounds: whole and partial budgets, other learning rates, clipping, the proximal term, weight
decay, short batches, scores by gradients, bfloat16. `recorder` stands in for a GPU: it records the
operations of a step on the CPU and runs them again (tests/support/recorder.py).

The times are those of the product's own path, from a broadcast to the upload, with models of the
presets' shapes and random weights: eager, captured, and several clients in one pass; beside them
the same network in a plain loop with PEFT's LoRA, autocast and AdamW.
"""

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_models import failure, loaded_of, precision_of
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Tensors, split_classifier
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.training.captured import Capture, CudaGraphs, GraphCache
from ravan_flwr.training.local_steps import ClientWork, LocalResult, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import TrainingSettings, autocast
from ravan_flwr.training.together import reason_for_one_by_one, train_together
from tests.support.recorder import Recorder

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
            fraction = 0.5 if client % 2 and method.budget_units else 1.0
            steps = TrainingSettings(
                **{"num_steps": 3, "batch_size": BATCH, "learning_rate": 0.003, **options},
                precision=loaded.config.precision,
            )
            work = ClientWork(
                loaded.partition(client, CLIENTS).train,
                {**method.broadcast(own, fraction), **classifier}, fraction, steps,
                ClientRound(0, number, client), personal.get(client),
            )  # fmt: skip
            result = train_locally(model, loaded.task, work)
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
    model.training_graphs = None
    eager = rounds(loaded)
    captured = model.training_graphs = GraphCache(capture)
    replayed = rounds(loaded)
    model.training_graphs = None
    results = [[*itertools.chain(*one)] for one in (eager, replayed, rounds(loaded))]
    graphs = [graph for state in captured.fixed_tensors.values() for graph in state.graphs.values()]
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


# Times.

BFLOAT16: dict[str, Scalar] = {"precision": "bfloat16"}
TIMED: list[tuple[str, str, dict[str, Scalar], Sequence[int]]] = [
    # name, preset, settings, clients in one pass
    ("ViT-B/16, bfloat16", "cifar100-vit-b16", BFLOAT16, (1, 4)),
    ("ViT-B/16, bfloat16, FedIT", "cifar100-vit-b16", {**BFLOAT16, "method": "fedit"}, (1,)),
    (
        "ViT-B/16, float32, TF32",
        "cifar100-vit-b16",
        {"precision": "float32", "float32-matmul": "tf32"},
        (1,),
    ),
    ("ViT-B/16, float32", "cifar100-vit-b16", {"precision": "float32"}, (1,)),
    ("digits-vit, float32", "digits-vit", {"precision": "float32"}, (1, 8, 32)),
    ("LLaMA-3.2-1B, 24 tokens", "glue-llama", {**BFLOAT16, "max-length": 24}, (1,)),
    ("LLaMA-3.2-1B, 128 tokens", "glue-llama", {**BFLOAT16, "max-length": 128}, (1,)),
]


def times(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the times of a step, per client: eager, captured, several clients in one pass."""
    for name, preset, wanted, passes in TIMED:
        is_exact = wanted["precision"] == "float32"
        settings = wanted if is_exact else {**wanted, "precision": precision_of(options)}
        try:
            loaded = loaded_of(options, preset, **settings)
            captured = loaded.model.training_graphs
            if options.device == "cpu":
                captured = GraphCache(Recorder())
            loaded.model.training_graphs = None
            eager = milliseconds(loaded, options)
            yield f"{name}, eager", f"{eager:.2f} ms a step"
            loaded.model.training_graphs = captured
            for number in passes:
                taken = milliseconds(loaded, options, number)
                what = "captured" if number == 1 else f"captured, {number} clients in one pass"
                yield f"{name}, {what}", f"{taken:.2f} ms a client and step, {eager / taken:.1f} x"
            del loaded, captured
        except Exception as error:  # noqa: BLE001 (a row that fails is a finding)
            yield name, failure(error)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    try:
        yield (
            "ViT-B/16, a plain script: PEFT's LoRA, autocast, AdamW",
            f"{peft(options):.2f} ms a step",
        )
    except Exception as error:  # noqa: BLE001
        yield "a plain script with PEFT", failure(error)


def milliseconds(loaded: ModelAndData, options: argparse.Namespace, together: int = 1) -> float:
    """Return the median time of a step and client, from the broadcast to the upload."""
    number, repeats = (3, 2) if options.small else (20, 4)
    config, state = loaded.config, loaded.model.initial_state()
    steps = TrainingSettings(number, config.batch_size, 1e-4, config.precision)
    if together > 1 and (why := reason_for_one_by_one(loaded.model, loaded.task, steps)):
        raise ValueError(why)
    taken = []
    for repeat in range(repeats + 2):  # the first captures, the second compares
        work = [
            ClientWork(
                loaded.partition(c % 4, 4).train, state, 1.0, steps, ClientRound(0, repeat, c)
            )
            for c in range(max(together, 2))
        ]
        synchronize(options)
        began = time.perf_counter()
        if together > 1:
            train_together(loaded.model, loaded.task, work)
        else:
            for client in work:
                train_locally(loaded.model, loaded.task, client)
        synchronize(options)
        taken.append(1000 * (time.perf_counter() - began) / len(work) / number)
    return statistics.median(taken[2:])


def peft(options: argparse.Namespace) -> float:
    """Return the time of a step of ViT-B/16 in a plain loop with PEFT's LoRA."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForImageClassification  # noqa: PLC0415

    precision = precision_of(options)
    loaded = loaded_of(options, "cifar100-vit-b16", precision=precision)
    batch = loaded.task.collate(
        loaded.partition(0, 4).train.take(np.arange(loaded.config.batch_size))
    )
    device, targets = (
        loaded.model.device,
        {layer.name.rpartition(".")[2] for layer in loaded.model.layers},
    )
    network = AutoModelForImageClassification.from_pretrained(
        loaded.config.model.name, num_labels=100, ignore_mismatched_sizes=True
    )
    model = get_peft_model(network, LoraConfig(r=32, target_modules=[*targets])).to(device)
    pixels = batch["pixel_values"].to(device).float() / 255
    labels = batch["labels"].to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    number, taken = 3 if options.small else 20, []
    for _ in range(4):
        synchronize(options)
        began = time.perf_counter()
        for _ in range(number):
            optimizer.zero_grad()
            with autocast(device.type, precision):
                loss = model(pixel_values=pixels, labels=labels).loss
            loss.backward()
            optimizer.step()
        synchronize(options)
        taken.append(1000 * (time.perf_counter() - began) / number)
    return statistics.median(taken[1:])


def synchronize(options: argparse.Namespace) -> None:
    """Wait for the GPU."""
    if options.device == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> int:
    """Check, or time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "recorder"), default="cuda")
    parser.add_argument("--check", action="store_true", help="compare the bits of uploads")
    parser.add_argument("--small", action="store_true", help="small networks: try the script")
    options = parser.parse_args(arguments)
    if options.check:
        return check(options.device)
    options.device = "cpu" if options.device == "recorder" else options.device
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        for name, result in times(options):
            print(f"{name:60} {result}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
