"""Measure the speed-up of one run by all cores, on an idle machine and beside a busy process.

    python -m benchmarks.cores                 # four minutes on two cores
    python -m benchmarks.cores --check         # an error where a bar is missed

The default preset with ten clients a round. Each run is a process of its own, and the settings
take turns: one client at a time with one thread, as with `processes=1`, and parallel clients as
chosen by `processes=auto`. A ratio is of one turn; the first round of a run does not count. The
busy process is an endless loop in Python.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.threads import busy_processes, seconds_of_rounds

SETTINGS = {"one process": "processes=1", "all cores": "processes=auto"}
BARS = {"quiet": 1.4, "busy": 0.9}  # times as fast as one process


def main(arguments: list[str]) -> int:
    """Measure, print the table, and report whether the bars are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="of each setting")
    parser.add_argument("--rounds", type=int, default=4, help="of a run; the first does not count")
    parser.add_argument("--steps", type=int, default=20, help="of a client in each round")
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, list[float]]] = {}
    for beside in BARS:
        with busy_processes(1 if beside == "busy" else 0):
            turns = [turn(options.rounds, options.steps) for _ in range(options.runs)]
        found[beside] = {name: [one[name] for one in turns] for name in SETTINGS}
    lines = [
        "| a round of ten clients | one process, s | all cores, s | times as quick |",
        "| --- " * 4 + "|",
    ]
    missed = []
    for beside, seconds in found.items():
        ratios = [one / both for one, both in zip(*seconds.values(), strict=True)]
        one, both = map(statistics.median, seconds.values())
        ratio = statistics.median(ratios)
        each = ", ".join(f"{each:.2f}" for each in ratios)
        lines.append(f"| {beside} | {one:.2f} | {both:.2f} | {ratio:.2f} ({each}) |")
        if ratio < BARS[beside]:
            missed.append(f"missed: {beside}, {ratio:.2f}, bar {BARS[beside]}")
    sys.stdout.write("\n".join([*lines, *missed]) + "\n")
    if options.json:
        options.json.write_text(json.dumps({"cores": found}, indent=1) + "\n")
    return int(options.check and bool(missed))


def turn(rounds: int, steps: int) -> dict[str, float]:
    """Run each setting once; return the median training seconds of a round."""
    more = ["clients-per-round=10", f"local-steps={steps}"]
    environment: dict[str, str] = {}
    return {
        name: statistics.median(seconds_of_rounds(environment, rounds, [*more, setting])[1:])
        for name, setting in SETTINGS.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
