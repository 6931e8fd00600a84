"""Measure what a round in process takes beside its training: `digits-vit`, ViT-B/16's shape.

    python -m benchmarks.overhead                  # two minutes

Both runs are whole ones, with their records, checkpoints and evaluations; the first round, in which
things are built, is left out. Training is the clients' local steps (forward, backward, Adam),
evaluation the server's forward passes over its test examples, and the rest everything else:
sampling, messages, weights put in and taken out, checks, sums, the record and the checkpoint. A row
is the median over its rounds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import transformers

from ravan_flwr import simulate
from ravan_flwr.server.run_recorder import RunRecorder
from ravan_flwr.specs import Scalar
from ravan_flwr.training import local_steps as training
from ravan_flwr.training.model_and_data import ModelAndData
from testing.tiny import save_data

Round = dict[str, float]  # seconds of all of it, of training, of evaluation

# name -> (the most that the rest may be of a round, the number of clients, the run's settings)
RUNS: dict[str, tuple[float, int, dict[str, Scalar]]] = {
    "digits-vit, 3 clients, 50 steps of 32": (0.10, 20, {"num-rounds": 8}),
    "ViT-B/16, 1 client, 5 steps of 8": (
        0.02,
        3,
        {
            "preset": "svhn-vit-b16",
            "num-rounds": 4,
            "clients-per-round": 1,
            "local-steps": 5,
            "batch-size": 8,
            "partition": "iid",
        },
    ),
}


def timed(inner: Callable[..., Any], seconds: Round, what: str) -> Callable[..., Any]:
    """Wrap a function so that its seconds are counted."""

    def outer(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*given, **named)
        finally:
            seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - began

    return outer


def rounds_of(settings: dict[str, Scalar], clients: int, folder: Path) -> list[Round]:
    """Time a run's rounds but the first, each from the end of the one before to its own."""
    seconds: Round = {}
    ends: list[tuple[float, Round]] = []

    def ending(inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*given: Any) -> None:
            inner(*given)
            ends.append((time.perf_counter(), dict(seconds)))
            seconds.clear()

        return outer

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (training.Stepper, "train", timed(training.Stepper.train, seconds, "training")),
        (ModelAndData, "evaluate", timed(ModelAndData.evaluate, seconds, "evaluation")),
        (RunRecorder, "on_round_end", ending(RunRecorder.on_round_end)),
    ]
    before = [getattr(home, name) for home, name, _ in places]
    try:
        for home, name, new in places:
            setattr(home, name, new)
        quiet: dict[str, Scalar] = {"report": False, "tracking": "none", "processes": 1}
        simulate({**quiet, "output-dir": str(folder), **settings}, clients)
    finally:
        for (home, name, _), old in zip(places, before, strict=True):
            setattr(home, name, old)
    times = [end for end, _ in ends]
    return [
        {"all": after - begun, **parts}
        for begun, after, (_, parts) in zip(times, times[1:], ends[1:], strict=False)
    ]


def write_vit_b16(folder: Path) -> dict[str, Scalar]:
    """Write ViT-B/16 with random weights and a few pictures, in folders as the hub has them."""
    transformers.ViTModel(transformers.ViTConfig()).save_pretrained(folder / "model")
    transformers.ViTImageProcessor().save_pretrained(folder / "model")
    save_data("svhn-vit-b16", folder / "data", train=30, test=8)
    return {"model": str(folder / "model"), "data": str(folder / "data")}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()
    found: dict[str, Round] = {}
    missed = []
    with tempfile.TemporaryDirectory(prefix="ravan-bench-") as folder, redirect_stdout(sys.stderr):
        inputs = write_vit_b16(Path(folder))
        for name, (bar, clients, settings) in RUNS.items():
            more = inputs if "preset" in settings else {}
            rounds = rounds_of({**settings, **more}, clients, Path(folder) / "runs")
            for one in rounds:
                one["rest"] = one["all"] - one["training"] - one["evaluation"]
            found[name] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            share = statistics.median(one["rest"] / one["all"] for one in rounds)
            found[name]["share"] = share
            if share > bar:
                missed.append(f"{name}: the rest is {share:.1%} of a round, bar {bar:.0%}")
    print("| a round | seconds | training | evaluation | the rest | of all |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in found.items():
        parts = " | ".join(f"{row[key]:.3f}" for key in ("all", "training", "evaluation", "rest"))
        print(f"| {name} | {parts} | {row['share']:.1%} |")
    if asked.json:
        asked.json.write_text(json.dumps({"overhead": found}, indent=1) + "\n")
    for words in missed:
        print("missed:", words)
    sys.exit(asked.check and bool(missed))


if __name__ == "__main__":
    main()
