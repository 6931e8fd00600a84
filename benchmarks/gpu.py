"""Measure seconds and peak memory of a client's local steps on a GPU, at real models' shapes.

    python -m benchmarks.gpu                       # digits-vit, ViT-B/16, LLaMA-3.2-1B; minutes
    python -m benchmarks.gpu --device cpu --small  # does it run? small shapes, on a CPU
    make gpu                                       # the tests marked gpu, and this

Random weights of the presets' shapes and random examples, no hub. A line is a model in a
precision: RAVAN at the paper's rank beside LoRA, with the same batches, in one process, in turn;
medians over the repetitions. Memory is PyTorch's: of the model with its adapters, and the most
that the steps took beyond it. "GPU waits" is the share of a round in which no kernel was at work
(waiting.py), "kernels" how many a step launches: where the GPU waits long, gpu_levers.py says
what several clients in one pass, or a graph of the step, would bring.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.waiting import kernels, traced, waiting_share
from ravan_flwr.adapters.attach import TARGETS
from ravan_flwr.adapters.quantize import quantize
from ravan_flwr.adapters.stored import keep_in
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import ModelSpec, Scalar
from ravan_flwr.tasks.base import Encoded, Task
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.device import pick_device
from ravan_flwr.training.kept_in import DTYPES
from ravan_flwr.training.local_steps import PRECISIONS, LocalSteps, train_locally
from ravan_flwr.training.network import CONFIGS, Backbone, checkpoint_gradients, network_class
from ravan_flwr.training.workbench import make_method, make_task

VARIANTS: tuple[dict[str, Scalar], ...] = (
    {"precision": "float32"},
    {"precision": "bfloat16"},
    {"precision": "bfloat16", "backbone-dtype": "bfloat16"},
    {"precision": "bfloat16", "backbone-dtype": "bfloat16", "gradient-checkpointing": True},
    {"precision": "bfloat16", "backbone-dtype": "bfloat16", "quantize": "4bit"},
)
SMALL = {
    "vit": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "image_size": 32,
    },
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 128,
        "vocab_size": 1000,
    },
}


def main(arguments: list[str]) -> None:
    """Measure, and write a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=50, help="local steps of a round")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    given = parser.parse_args(arguments)
    try:
        pick_device(given.device)
    except ValueError as error:
        sys.exit(f"benchmarks/gpu.py: error: {error}")
    lines = []
    sys.stdout.write(
        "| model | precision | method | seconds a round | to fedit's | GPU waits | kernels | "
        "model, MB | steps, MB |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    for preset in ("digits-vit", "cifar100-vit-b16", "glue-llama"):
        for variant in VARIANTS:
            if variant.get("quantize") and given.device == "cpu":
                continue
            for line in measure(preset, variant, given):
                lines.append(line)
                waited = "" if line["waits"] is None else f"{line['waits']:.0%}"
                sys.stdout.write(
                    f"| {line['model']} | {line['variant']} | {line['method']} | "
                    f"{line['seconds']:.3f} | {line['ratio']:.2f} | {waited} | "
                    f"{line['kernels'] or ''} | {line['weights'] / 1e6:,.0f} | "
                    f"{line['steps'] / 1e6:,.0f} |\n"
                )
                sys.stdout.flush()
    if given.json:
        about = "cpu" if given.device == "cpu" else torch.cuda.get_device_name(given.device)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "device": about,
            "torch": torch.__version__,
            "steps": given.steps,
            "repeat": given.repeat,
            "lines": lines,
        }
        given.json.write_text(json.dumps(content, indent=2) + "\n")


def measure(
    preset: str, variant: dict[str, Scalar], given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure both methods, in turn."""
    made = {}
    for method in ("ravan", "fedit"):
        small = {"lora-rank": 4} if given.small else {}
        config = read_config({"preset": preset, "method": method, **variant, **small})
        config = replace(config, device=given.device, model=shape_of(config.model, given.small))
        made[method] = config, build(config)
    seconds: dict[str, list[float]] = {method: [] for method in made}
    peaks = dict.fromkeys(made, 0)
    for repetition in range(given.repeat + 1):
        for method, (config, (model, task, examples)) in made.items():
            before = reset_peak(given.device)
            started = time.perf_counter()
            train(model, task, examples, config, given.steps, repetition)
            synchronize(given.device)
            if repetition:  # the first warms up
                seconds[method].append(time.perf_counter() - started)
                peaks[method] = max(peaks[method], peak(given.device) - before)
    traces = {
        method: traced(partial(train, *parts, config, given.steps, 0))
        for method, (config, parts) in made.items()
        if given.device != "cpu"
    }
    ratios = [a / b for a, b in zip(seconds["ravan"], seconds["fedit"], strict=True)]
    return [
        {
            "model": made[method][0].model.name,
            "variant": ", ".join(
                str(value) if key == "precision" else f"{key} {value}"
                for key, value in variant.items()
            ),
            "method": method,
            "seconds": statistics.median(seconds[method]),
            "ratio": statistics.median(ratios) if method == "ravan" else 1.0,
            **waits(traces.get(method), statistics.median(seconds[method]), given.steps),
            "weights": weight(made[method][1][0]),
            "steps": peaks[method],
        }
        for method in made
    ]


def train(
    model: AdaptedModel, task: Task, examples: Encoded, config: Config, steps: int, round_: int
) -> None:
    """Do a client's round."""
    how = LocalSteps(steps, config.batch_size, 1e-4, config.precision)
    state = model.initial_state()
    train_locally(model, task, examples, state, 1.0, how, ClientRound(0, round_, 0))


def waits(
    trace: list[Mapping[str, Any]] | None, seconds: float, steps: int
) -> dict[str, float | None]:
    """Say how long the GPU waited, and what a step launched; nothing of a CPU."""
    if trace is None:
        return {"waits": None, "kernels": None}
    return {
        "waits": round(waiting_share(trace, seconds), 3),
        "kernels": round(kernels(trace) / steps),
    }


def shape_of(spec: ModelSpec, small: bool) -> ModelSpec:
    """Return the preset's shape, or a small one."""
    shape = dict(spec.shape) or CONFIGS[spec.source](spec)
    if spec.source == "bundled" or not small:  # that is small as it is
        return replace(spec, shape=tuple(shape.items()))
    return replace(spec, shape=tuple((shape | SMALL[str(shape["model_type"])]).items()))


def build(config: Config) -> tuple[AdaptedModel, Task, Encoded]:
    """Build a model with random weights, its task, and random examples."""
    task, device = make_task(config), torch.device(config.device)
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(config.model.shape)
    settings = AutoConfig.for_model(**shape)
    settings.num_labels, settings.pad_token_id = len(config.data.labels), 0
    with device:
        network = network_class(shape, task)(settings)
    network.config.use_cache = False
    base = f"{network.base_model_prefix}."
    heads = [p for name, p in network.named_parameters() if not name.startswith(base)]
    size = sum(p.numel() for p in network.parameters()) - sum(p.numel() for p in heads)
    keep_in(network, DTYPES.get(config.backbone_dtype, torch.float32), heads)
    if config.quantize != "none":
        quantize(network, config.quantize, heads, PRECISIONS[config.precision] or torch.float32)
    if config.gradient_checkpointing:
        checkpoint_gradients(network, config.model.name)
    model = AdaptedModel(
        Backbone(network.eval(), heads, TARGETS[str(shape["model_type"])], size),
        lambda layers, number: make_method(config, layers, number),
        train_classifier=False,
        shares_device=False,
    )
    random, rows = np.random.default_rng(0), 4 * config.batch_size
    if config.task == "vision":
        sides = (settings.num_channels, settings.image_size, settings.image_size)
        inputs = {"pixel_values": torch.from_numpy(random.random((rows, *sides), np.float32))}
    else:
        tokens = random.integers(1, settings.vocab_size, (rows, config.max_length))
        ids = torch.from_numpy(tokens.astype(np.int32))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = torch.from_numpy(random.integers(0, settings.num_labels, rows))
    return model, task, Encoded(inputs | {"labels": labels}, np.arange(rows))


def synchronize(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def reset_peak(device: str) -> int:
    """Begin to count anew, and return the bytes in use now."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: str) -> int:
    """Return the most bytes in use since `reset_peak`."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def weight(model: AdaptedModel) -> int:
    """Count the bytes of the model with its adapters."""
    tensors = [*model.network.parameters(), *model.network.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main(sys.argv[1:])
