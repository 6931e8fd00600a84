"""Measure time and memory of a training step by method, against PEFT's LoRA, at ViT-B/16's shape.

    python benchmarks/layers.py                    # five minutes on two cores
    python benchmarks/layers.py --device cuda --batch 32 --precision bfloat16 --compile

Random weights, the query and value projections adapted (24 matrices of 768 x 768), 1.18 million
trained parameters in each row but the last: RAVAN with 4 heads of rank 110, LoRA of rank 32.
A step is forward, backward and Adam. The rows take turns within a repetition, and a row's ratio
is the median over the repetitions of its time by PEFT's in the same one. Memory is the kernel's
high-water mark over two steps, in a process for each row.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from ravan_flwr import RavanConfig
from ravan_flwr.adapters import LoRALinear, MultiHeadLinear, attach, find_layers, make_bases

HEADS, RANK, LORA_RANK = 4, 110, 32
TARGETS = ("attention.q_proj", "attention.v_proj")
PEER = "LoRA r = 32, PEFT"
BARS = {
    "LoRA r = 32, ours": 1.00,
    "RAVAN 4 x 110": 1.10,
    "RAVAN 4 x 110, PEFT": 1.10,
    "RAVAN 4 x 110, 1 head trained": 1.03,
}
LOOP_BAR, MEMORY_BAR = 0.85, 1.05


class Loop(nn.Module):
    """A multi-head layer as a plain loop over the heads."""

    def __init__(self, layer: MultiHeadLinear) -> None:
        super().__init__()
        self.base, self.H, self.s = layer.base, layer.H, layer.s
        for name, bases in (("A", layer.A), ("B", layer.B)):
            self.register_buffer(name, bases.contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        for B, H, A, s in zip(self.B, self.H, self.A, self.s, strict=True):  # type: ignore[arg-type]
            y = y + s * F.linear(F.linear(F.linear(x, A), H), B)
        return y


def network() -> ViTForImageClassification:
    """Build ViT-B/16 with random weights, frozen."""
    torch.manual_seed(0)
    vit = ViTForImageClassification(ViTConfig())
    vit.requires_grad_(False).train()
    return vit


def ravan(form: str = "auto", heads: tuple[int, ...] = (), *, loop: bool = False) -> nn.Module:
    """Attach RAVAN's adapters; `heads` are the trained ones."""
    model = network()

    def adapt(layer: object, linear: nn.Linear) -> nn.Module:
        del layer
        sides = linear.out_features, linear.in_features
        B, A = make_bases(
            "normal",
            heads=HEADS,
            rank=RANK,
            out_features=sides[0],
            in_features=sides[1],
            seed=0,
            layer="",
        )
        layer_ = MultiHeadLinear(linear, B, A, form)
        if heads:
            layer_.train_heads(heads)
        return Loop(layer_) if loop else layer_

    attach(model, find_layers(model, TARGETS), adapt)
    return model


def lora() -> nn.Module:
    """Attach our LoRA."""
    model = network()

    def adapt(layer: object, linear: nn.Linear) -> nn.Module:
        del layer
        B = torch.zeros(linear.out_features, LORA_RANK)
        return LoRALinear(linear, B, torch.randn(LORA_RANK, linear.in_features))

    attach(model, find_layers(model, TARGETS), adapt)
    return model


def peft_lora() -> nn.Module:
    """Attach PEFT's LoRA."""
    config = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=[t.split(".")[1] for t in TARGETS]
    )
    return get_peft_model(network(), config)


def peft_ravan() -> nn.Module:
    """Attach RAVAN's adapters as PEFT does."""
    return get_peft_model(
        network(),
        RavanConfig(
            r=RANK,
            num_heads=HEADS,
            init="normal",
            target_modules=[t.split(".")[1] for t in TARGETS],
        ),
    )


ROWS: dict[str, Callable[[], nn.Module]] = {
    PEER: peft_lora,
    "LoRA r = 32, ours": lora,
    "RAVAN 4 x 110": ravan,
    "RAVAN 4 x 110, PEFT": peft_ravan,
    "RAVAN 4 x 110, factored": lambda: ravan("factored"),
    "RAVAN 4 x 110, a loop over heads": lambda: ravan(loop=True),
    "RAVAN 4 x 110, 1 head trained": lambda: ravan(heads=(1,)),
}


class Step:
    """Run forward, backward and Adam of one row."""

    def __init__(self, row: str, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.precision)
        model = ROWS[row]().to(self.device)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=1e-4, fused=True)
        self.model = torch.compile(model) if options.compile else model
        random = torch.Generator().manual_seed(1)
        self.pixels = torch.randn(options.batch, 3, 224, 224, generator=random).to(self.device)
        self.labels = torch.zeros(options.batch, dtype=torch.long, device=self.device)

    def __call__(self) -> float:
        """Take one step; return its seconds."""
        self._wait()
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        low = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=low):
            logits = self.model(pixel_values=self.pixels).logits
        F.cross_entropy(logits.float(), self.labels).backward()
        self.optimizer.step()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def memory(row: str, options: argparse.Namespace) -> float:
    """Measure this process's peak in megabytes over two steps, everything included."""
    step = Step(row, options)
    gc.collect()
    if options.device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    step(), step()
    if options.device != "cpu":
        return torch.cuda.max_memory_allocated() / 1e6
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) * 1024 / 1e6


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure seconds, ratio to PEFT and megabytes of every row."""
    steps = {row: Step(row, options) for row in options.rows}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {row: [] for row in steps}
    for _ in range(options.repetitions):
        for row, step in steps.items():
            times[row].append(step())
    del steps
    found = {}
    for row, seconds in times.items():
        ratios = [mine / peer for mine, peer in zip(seconds, times[PEER], strict=True)]
        found[row] = {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "megabytes": 0.0 if options.no_memory else _memory_of(row),
        }
    return found


def _memory_of(row: str) -> float:
    command = [sys.executable, *sys.argv, "--memory-of", row]
    done = subprocess.run(command, check=True, capture_output=True, env=os.environ)
    return float(done.stdout)


def missed(found: dict[str, dict[str, float]]) -> list[str]:
    """Return a message for each missed bar."""
    messages = [
        f"{row}: {found[row]['ratio']:.3f} x PEFT's, bar {bar:.2f}"
        for row, bar in BARS.items()
        if row in found and found[row]["ratio"] > bar
    ]
    ours, loop = found["RAVAN 4 x 110"], found.get("RAVAN 4 x 110, a loop over heads")
    if loop and ours["seconds"] > LOOP_BAR * loop["seconds"]:
        messages.append(
            f"RAVAN: {ours['seconds'] / loop['seconds']:.3f} x a loop's, bar {LOOP_BAR}"
        )
    if ours["megabytes"] > MEMORY_BAR * found[PEER]["megabytes"]:
        share = ours["megabytes"] / found[PEER]["megabytes"]
        messages.append(f"RAVAN: {share:.3f} x PEFT's memory, bar {MEMORY_BAR}")
    return messages


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(memory(options.memory_of, options))
        return
    found = measure(options)
    print("| training step | seconds | x PEFT's | MB | x PEFT's |\n| --- | --- | --- | --- | --- |")
    for row, figures in found.items():
        more = figures["megabytes"] / max(found[PEER]["megabytes"], 1e-9)
        print(
            f"| {row} | {figures['seconds']:.3f} | {figures['ratio']:.3f} | "
            f"{figures['megabytes']:.0f} | {more:.3f} |"
        )
    if options.json:
        options.json.write_text(json.dumps({"layers": found}, indent=1) + "\n")
    for words in missed(found):
        print("missed:", words)
    sys.exit(options.check and bool(missed(found)))


if __name__ == "__main__":
    main()
