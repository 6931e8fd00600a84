"""Measure the peak memory of a training step by number of trained heads, at ViT-B/16's shape.

    python benchmarks/ravan_memory.py              # about three minutes on two cores

Random weights, 24 matrices of 768 x 768, 4 heads of rank 110. Each number of heads K has its
own process, which builds the model, resets the kernel's high-water mark of its
resident memory, and does two steps (forward, backward, Adam); the peer beside it trains all
heads. "Scores" is the backward pass of gradient scoring. The last column is the plan's count
on the meta device. The time to make the bases is printed first.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

from ravan_flwr.adapters import Layer, MultiHeadLinear, attach, find_layers, make_bases
from ravan_flwr.methods.base import Settings
from ravan_flwr.methods.multihead import score_heads
from ravan_flwr.methods.ravan import Ravan
from ravan_flwr.seeding import generator
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.vision import Vision
from ravan_flwr.training.cost import ADAM, saved_for_backward

HEADS = 4
TASK = Vision(DataSpec("hub"), 0, lambda: None)


def build(rank: int, device: str) -> tuple[ViTForImageClassification, Ravan, list[MultiHeadLinear]]:
    """Build ViT-B/16, random, with RAVAN's adapters; shapes alone on the meta device."""
    torch.manual_seed(0)
    with torch.device(device):
        network = ViTForImageClassification(ViTConfig())
    network.requires_grad_(False)
    settings = Settings(
        seed=0,
        lora_rank=32,
        rank=rank,
        lora_scale=1.0,
        heads=HEADS,
        init="normal",
        calibration_steps=1,
        scaling="trained",
        scoring="random",
        selection="layer",
    )
    layers = find_layers(network, ("attention.q_proj", "attention.v_proj"))
    size = sum(parameter.numel() for parameter in network.parameters())
    method = Ravan(settings, layers, size)
    return network, method, list(attach(network, layers, method.adapt).values())


def measure(heads: int, batch_size: int) -> float:
    """Measure the megabytes of two steps beyond the model; for 0 heads, one gradient scoring."""
    network, method, adapters = build(110, "cpu")
    task = TASK
    shapes = task.shapes(network.config, batch_size)
    batch = {
        "pixel_values": torch.randn(shapes["pixel_values"][0]),
        "labels": torch.zeros(batch_size, dtype=torch.long),
    }
    network.train()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of building
    before = _status("VmRSS")

    def backward(*_: object) -> None:
        task.loss(network, batch).backward()

    if heads == 0:
        score_heads("gradient", adapters, generator(0), backward)
    else:
        method.choose(adapters, heads / HEADS, generator(0), lambda: None)
        optimizer = torch.optim.Adam(method.parameters(adapters), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            backward()
            optimizer.step()
    return (_status("VmHWM") - before) / 1e3


def count(heads: int, batch_size: int) -> float:
    """Count megabytes as the plan does: memory kept for backward, and trained parameters."""
    network, method, adapters = build(110, "meta")
    method.choose(adapters, heads / HEADS, generator(0), lambda: None)
    trained = sum(4 * p.numel() for p in method.parameters(adapters))
    return (saved_for_backward(network, TASK, batch_size) + ADAM * trained) / 1e6


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def bases_seconds(rank: int) -> float:
    """Time the making of Gram-Schmidt bases for all 24 matrices."""
    started = time.perf_counter()
    for number in range(24):
        layer = Layer(str(number), 768, 768)
        make_bases(
            "gram-schmidt",
            heads=HEADS,
            rank=rank,
            out_features=768,
            in_features=768,
            seed=0,
            layer=layer.name,
        )
    return time.perf_counter() - started


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--one", type=int, help="measure one number of heads and stop")
    arguments = parser.parse_args()
    write = sys.stdout.write
    if arguments.one is not None:
        write(f"{measure(arguments.one, arguments.batch_size)}\n")
        return
    write(f"Gram-Schmidt bases for 24 x (768 x 768), 4 x 156: {bases_seconds(156):.1f} s\n\n")
    # Freed memory is returned to the system at once, so that the peak is the memory in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    medians = {}
    for heads in (4, 3, 2, 1, 0):
        command = [
            sys.executable,
            __file__,
            "--one",
            str(heads),
            "--batch-size",
            str(arguments.batch_size),
        ]
        peaks = sorted(
            float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
            for _ in range(arguments.repeat)
        )
        medians[heads] = peaks[len(peaks) // 2]
    write("| trained heads | peak, MB | ratio to all | counted, MB |\n| --- | --- | --- | --- |\n")
    for heads, peak in medians.items():
        name = f"{heads} of {HEADS}" if heads else "none (scores)"
        estimate = f"{count(heads, arguments.batch_size):.0f}" if heads else ""
        write(f"| {name} | {peak:.0f} | {peak / medians[HEADS]:.3f} | {estimate} |\n")


if __name__ == "__main__":
    main()
