"""Measure a round by PyTorch's number of threads, on an idle machine and beside a busy process.

    python benchmarks/threads.py                  # the default preset, ten minutes
    python benchmarks/threads.py --check          # an error where a busy neighbour costs too much

A line is a setting: ours (threads.py decides), PyTorch's own (a thread a core), one thread, and
OpenMP's passive waiting with a thread a core. Each run is a process of its own; the settings take
turns. The busy process is an endless loop in Python, one for every core but one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CORES = os.cpu_count() or 1
SETTINGS = {
    "ours": {},
    "a thread a core": {"OMP_NUM_THREADS": str(CORES)},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "a thread a core, passive": {"OMP_NUM_THREADS": str(CORES), "OMP_WAIT_POLICY": "passive"},
}
BAR = 2.0  # ours with a busy process, relative to the fastest setting with one


def main(arguments: list[str]) -> int:
    """Measure, print the table, and report whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of a run; the first does not count")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in SETTINGS}
    for beside in ("quiet", "busy"):
        with busy_processes(CORES - 1 or 1 if beside == "busy" else 0):
            for _ in range(options.runs):
                for name, environment in SETTINGS.items():
                    rounds = seconds_of_rounds(environment, options.rounds)
                    seconds[name].setdefault(beside, []).extend(rounds[1:])
    lines = ["| threads | quiet, s | busy, s | busy to quiet |", "| --- | --- | --- | --- |"]
    for name, found in seconds.items():
        quiet, busy = (statistics.median(found[beside]) for beside in ("quiet", "busy"))
        lines.append(f"| {name} | {quiet:.2f} | {busy:.2f} | {busy / quiet:.1f} |")
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=2) + "\n")
    best = min(statistics.median(found["busy"]) for found in seconds.values())
    ratio = statistics.median(seconds["ours"]["busy"]) / best
    sys.stdout.write(f"ours beside a busy process: {ratio:.2f} times the best (bar {BAR})\n")
    return int(options.check and ratio > BAR)


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep a number of processes busy within the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds_of_rounds(
    environment: dict[str, str], rounds: int, more: Sequence[str] = ("processes=1",)
) -> list[float]:
    """Time the training of each round of the default preset."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_"))}
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"num-rounds={rounds}", f"eval-every={rounds}", f"output-dir={folder}"]
        settings += ["tracking=none", *more]
        subprocess.run(
            [sys.executable, "-m", "ravan_flwr", "simulate", *settings],
            env=inherited | environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (records,) = Path(folder).glob("*/rounds.jsonl")
        return [json.loads(line)["phases"]["train"] for line in records.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
