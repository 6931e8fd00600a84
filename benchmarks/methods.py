"""Measure the cost of a round of every method relative to FedIT: bytes, CPU and wall seconds.

    python -m benchmarks.methods      # digits-vit; eleven minutes

All methods have one parameter budget, the same clients and examples, and a frozen classifier.
Each takes turns with a run of FedIT, so that a ratio compares simultaneous runs. The first round
of a run, which includes set-up, is excluded, and a run of Fed-SB excludes its calibration from the
seconds, but not from the bytes. Bytes are those of the record, beside those by the formulas of
docs/methods.md.
"""

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS, get_method
from ravan_flwr.methods.base import Method
from ravan_flwr.server.run_recorder import RunRecorder
from ravan_flwr.specs import Scalar
from ravan_flwr.training.model_and_data import get_model_and_data

BASE = "fedit"
SETTINGS: dict[str, Scalar] = {
    "preset": "digits-vit", "lora-rank": 8, "classifier": "frozen", "clients-per-round": 3,
    "local-steps": 10, "tracking": "none", "processes": 1,
}  # fmt: skip
CLIENTS = 3  # all in every round, so that each receives the one-time payload in the first

Row = dict[str, Any]


class Shapes:
    """The variables of the formulas of docs/methods.md: a method's ranks, and the layers' sides."""

    def __init__(self, method: Method, replies: int) -> None:
        self.out = sum(layer.out_features for layer in method.layers)
        self.ins = sum(layer.in_features for layer in method.layers)
        self.sides = [(layer.out_features, layer.in_features) for layer in method.layers]
        self.n, self.r, self.replies = len(method.layers), method.rank or 0, replies
        self.h, self.size = method.settings.heads, method.size

    @property
    def both(self) -> int:
        """Count the parameters of B and A: r (out + in)."""
        return self.r * (self.out + self.ins)

    def residual(self, number: int, grows: int) -> int:
        """Count the residual before a round: k (out + in), at most out in, for each matrix."""
        k = (number - 1) * grows
        return sum(min(k * (out + side), out * side) for out, side in self.sides)


# name -> values up and down of a client in round 1, 2, .., as in the table of docs/methods.md. A
# method that is not here sends the same as its base class.
Formula = Callable[[Shapes, int], tuple[float, float]]
FORMULAS: dict[str, Formula] = {
    "ravan": lambda s, _: (s.n * s.h * s.r**2 + s.h * s.n / 32, s.n * s.h * s.r**2),
    "full": lambda s, _: (s.size, s.size),
    **dict.fromkeys(
        (
            *("fedit", "slora", "lora-fair", "fedrot-lora", "centralised"),
            *("hetlora", "flexlora", "raflora"),
        ),
        lambda s, _: (s.both, s.both),
    ),
    "fedalt": lambda s, _: (s.n * s.h * s.r**2 + s.h * s.n / 32, s.n * s.h * s.r**2),
    "feddpa": lambda s, t: (s.both if t % 2 else 0, s.both),
    "fedsa-lora": lambda s, _: (s.r * s.ins, s.r * s.ins),
    **dict.fromkeys(("local", "none"), lambda *_: (0, 0)),
    "fedex-lora": lambda s, t: (s.both, s.both + s.residual(t, (s.replies - 1) * s.r)),
    "frlora": lambda s, t: (s.both, s.both + s.residual(t, 2 * s.r)),
    "ffa-lora": lambda s, _: (s.r * s.out, s.r * s.out),
    "fed-sb": lambda s, t: (s.n * s.r**2, s.n * s.r**2 + (s.both if t == 1 else 0)),
    "fedsvd": lambda s, _: (s.r * s.out, s.both),
    "rolora": lambda s, t: (s.r * (s.out if t % 2 else s.ins), s.both),
    "fed-plora": lambda s, _: (s.both + s.r / 32, s.both),
    "flora": lambda s, t: (s.both, s.residual(t, s.replies * s.r)),
}


def formula_of(name: str) -> Formula:
    """Return the formula of a method."""
    if name in FORMULAS:
        return FORMULAS[name]
    known = {get_method(method): formula for method, formula in FORMULAS.items()}
    found = [known[kind] for kind in get_method(name).__mro__ if kind in known]
    assert found, f"method {name} has no formula for what it sends; add a row to FORMULAS"
    return found[0]


@contextmanager
def ends_of_rounds() -> Iterator[list[tuple[float, float]]]:
    """Record wall and CPU seconds, of all threads and children, at the end of every round."""
    ends: list[tuple[float, float]] = []
    done = RunRecorder.on_round_end

    def noting(*args: Any) -> None:
        done(*args)
        ends.append((time.perf_counter(), cpu_seconds()))

    setattr(RunRecorder, "on_round_end", noting)  # noqa: B010 (mypy: it is a method)
    try:
        yield ends
    finally:
        setattr(RunRecorder, "on_round_end", done)  # noqa: B010


def cpu_seconds() -> float:
    """Count the CPU seconds of this process and its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(name: str, rounds: int, folder: Path) -> Row:
    """Run a method, and return the medians of its rounds but the first."""
    settings = {**SETTINGS, "method": name, "num-rounds": rounds, "output-dir": str(folder)}
    with ends_of_rounds() as ends:
        run = simulate(settings, CLIENTS)
    lines = (run.run_dir / "rounds.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["round"]]
    spans = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)]
    return {
        "wall": statistics.median(wall for wall, _ in spans),
        "cpu": statistics.median(cpu for _, cpu in spans),
        "up": [mean_bytes(record, "bytes-up") for record in records],
        "down": [mean_bytes(record, "bytes-down") for record in records],
    }


def mean_bytes(record: dict[str, Any], key: str) -> float:
    """Return the mean over a round's clients."""
    return statistics.fmean(client[key] for client in record["clients"])


def formula(name: str, rounds: int) -> tuple[list[float], list[float]]:
    """Compute bytes up and down of a client in each round, by the formulas of docs/methods.md."""
    method = get_model_and_data(read_config({**SETTINGS, "method": name})).model.method
    shapes = Shapes(method, int(SETTINGS["clients-per-round"]))
    each = [formula_of(name)(shapes, number) for number in range(1, rounds + 1)]
    return [4 * up for up, _ in each], [4 * down for _, down in each]


def compare(names: list[str], rounds: int, runs: int, folder: Path) -> dict[str, Row]:
    """Run every method, in turn with FedIT."""
    found: dict[str, Row] = {}
    for name in names:
        pairs = [
            (measure(BASE, rounds, folder), measure(name, rounds, folder)) for _ in range(runs)
        ]
        row = dict(pairs[0][1])
        for what in ("cpu", "wall"):
            row[f"{what}-ratios"] = [own[what] / base[what] for base, own in pairs]
        row["formula-up"], row["formula-down"] = formula(name, rounds)
        found[name] = row
    return found


def show(found: dict[str, Row]) -> None:
    """Print the table of docs/methods.md."""
    last = len(next(iter(found.values()))["up"])
    print("| `method` | up | by the formula | down | by the formula | CPU | wall |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in found.items():
        sizes = [
            f"{statistics.fmean(row[key]):,.0f}"
            for key in ("up", "formula-up", "down", "formula-down")
        ]
        times = [
            f"{statistics.median(row[key]):.2f} ({min(row[key]):.2f} to {max(row[key]):.2f})"
            for key in ("cpu-ratios", "wall-ratios")
        ]
        print(f"| `{name}` | {' | '.join(sizes)} | {' | '.join(times)} |")
    print(f"\nBytes a round and client, the mean of rounds 1 to {last}; seconds beside {BASE}'s.")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default=",".join(METHODS), help="some of them, by commas")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    names = options.methods.split(",")
    with tempfile.TemporaryDirectory(prefix="ravan-bench-") as folder, redirect_stdout(sys.stderr):
        found = compare(names, options.rounds, options.runs, Path(folder))
    show(found)
    if options.json:
        options.json.write_text(json.dumps({"methods": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
