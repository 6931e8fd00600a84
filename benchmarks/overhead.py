"""Measure the overhead of a round in process beyond training: `digits-vit`, ViT-B/16's shape.

    python -m benchmarks.overhead                  # two minutes

Both are complete runs, with records, checkpoints and evaluations; the first round, which includes
set-up, is excluded. Training is the clients' local steps (forward, backward, Adam), evaluation the
server's forward passes over its test examples, and the rest everything else:
sampling, messages, loading and collecting weights, checks, sums, the record and the checkpoint. A
row is the median over its rounds.
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
from tests.support.tiny import save_data

Round = dict[str, float]  # seconds of the round, of training, of evaluation

# name -> (the largest fraction of the rest, the number of clients, the run's settings)
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

    def outer(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - began

    return outer


def rounds_of(settings: dict[str, Scalar], clients: int, folder: Path) -> list[Round]:
    """Time a run's rounds but the first, each from the end of the previous one."""
    seconds: Round = {}
    ends: list[tuple[float, Round]] = []

    def ending(inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any) -> None:
            inner(*args)
            ends.append((time.perf_counter(), dict(seconds)))
            seconds.clear()

        return outer

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (training.TrainingLoop, "train", timed(training.TrainingLoop.train, seconds, "training")),
        (ModelAndData, "evaluate", timed(ModelAndData.evaluate, seconds, "evaluation")),
        (RunRecorder, "on_round_end", ending(RunRecorder.on_round_end)),
    ]
    before = [getattr(home, name) for home, name, _ in places]
    try:
        for home, name, new in places:
            setattr(home, name, new)
        quiet: dict[str, Scalar] = {"tracking": "none", "processes": 1}
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
    """Write ViT-B/16 with random weights and a few pictures, in folders as from the hub."""
    transformers.ViTModel(transformers.ViTConfig()).save_pretrained(folder / "model")
    transformers.ViTImageProcessor().save_pretrained(folder / "model")
    save_data("svhn-vit-b16", folder / "data", train=30, test=8)
    return {"model": str(folder / "model"), "data": str(folder / "data")}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    found: dict[str, Round] = {}
    missed = []
    with tempfile.TemporaryDirectory(prefix="ravan-bench-") as folder, redirect_stdout(sys.stderr):
        inputs = write_vit_b16(Path(folder))
        for name, (bar, clients, settings) in RUNS.items():
            more = inputs if "preset" in settings else {}
            rounds = rounds_of({**settings, **more}, clients, Path(folder) / "runs")
            for one in rounds:
                one["rest"] = one["all"] - one["training"] - one["evaluation"]
            found[name] = {
                key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]
            }
            fraction = statistics.median(round_["rest"] / round_["all"] for round_ in rounds)
            found[name]["share"] = fraction
            if fraction > bar:
                missed.append(f"{name}: the rest is {fraction:.1%} of a round, bar {bar:.0%}")
    print("| a round | seconds | training | evaluation | the rest | of all |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in found.items():
        parts = " | ".join(f"{row[key]:.3f}" for key in ("all", "training", "evaluation", "rest"))
        print(f"| {name} | {parts} | {row['share']:.1%} |")
    if options.json:
        options.json.write_text(json.dumps({"overhead": found}, indent=1) + "\n")
    for words in missed:
        print("missed:", words)
    sys.exit(options.check and bool(missed))


if __name__ == "__main__":
    main()
