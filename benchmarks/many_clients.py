"""Measure runs in process with thousands of clients: time to the first round, memory, records.

    python benchmarks/many_clients.py              # two minutes
    python benchmarks/many_clients.py --data FOLDER --partition dirichlet-by-client

Every row is a process of its own, with `digits-vit`, one local step, and 60,000 images of 8 x 8:
scikit-learn's digits with noise, or the given folder. "Ready" is from the end of imports to the
first message of the first round: the data is loaded and partitioned, and every client queried.
"The rest" of a round is neither training nor evaluation; its difference between rows, divided by
the difference in clients, is the cost of a client outside the round.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from sklearn.datasets import load_digits

# Seconds of a processor, which are those of an idle machine.
READY_BARS = {1_000: 10.0, 10_000: 60.0}
ABSENT_BAR = 1e-3  # seconds of a round for a client outside it
COHORT_BAR = 30.0  # MB more for ten times as many clients a round
RECORD_BAR = 1.05  # relative to the record of a round with a hundredth of the clients
ASYNCHRONOUS = {
    "devices": "edge-gpus", "aggregation": "async", "buffer-size": 10, "concurrency": 200,
    "clients-per-round": 200,
}  # fmt: skip
ROWS = 60_000
FEW, MANY = 100, 10_000

# The same as `ravan-flwr simulate`, with a timestamp at the first message of the first round.
SIMULATED = """
import json, resource, statistics, sys, time
began = time.time()
from ravan_flwr.importing import importing
with importing():
    from ravan_flwr.launch.in_process import simulate
from ravan_flwr.server.strategy import FederatedTuning
from ravan_flwr.training.local_steps import TrainingLoop
clients, settings = int(sys.argv[1]), json.loads(sys.argv[2])
imported, used = time.time(), time.process_time()
ready = []
train, steps, trained = FederatedTuning._train, TrainingLoop.train, 0.0
def clocked(*given):
    processor = time.process_time() - used
    ready.append((time.time() - imported, processor, processor - trained))
    return train(*given)
def stepping(*given):
    global trained
    began = time.process_time()
    try:
        return steps(*given)
    finally:
        trained += time.process_time() - began
FederatedTuning._train, TrainingLoop.train = clocked, stepping
run = simulate(settings, clients).run_dir
lines = (run / "rounds.jsonl").read_text().splitlines()
rounds = [json.loads(line) for line in lines][1:]
rest = [r["seconds"] - sum(c["seconds"] for c in r["clients"]) - r["phases"].get("evaluate", 0)
        for r in rounds]
sizes = [path.stat().st_size for path in (run / "checkpoints").glob("*.safetensors")]
sys.stdout.write("\\n" + json.dumps({
    "imports": imported - began,
    "ready": ready[0][0],
    "ready, processor": ready[0][1],
    "rest of a round": sorted(rest)[len(rest) // 2],
    "rest, processor": statistics.median(b[2] - a[2] for a, b in zip(ready[1:], ready[2:])),
    "updates": max(len(r["clients"]) for r in rounds),
    "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    "record": max(map(len, lines[1:])),
    "checkpoint": max(sizes),
    "log lines": len((run / "log.txt").read_text().splitlines()),
}))
"""

Row = dict[str, float]


def main() -> None:
    """Run the selected rows, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder of 8 x 8 images (default: made up)")
    parser.add_argument("--partition", default="iid", help="how they are dealt out (default: iid)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ravan-bench-") as folder:
        data = options.data or write_noisy_digits(Path(folder) / "data")
        settings = {
            "data": str(data.absolute()), "partition": options.partition,
            "num-rounds": options.rounds,
            "local-steps": 1, "eval-every": 100, "tracking": "none",
            "processes": 1,
            "output-dir": str(Path(folder) / "runs"),
        }  # fmt: skip
        rows = {
            name: measured(clients, settings | {"clients-per-round": a_round})
            for name, clients, a_round in (
                (f"{FEW:,} clients, 20 a round", FEW, 20),
                ("1,000 clients, 20 a round", 1_000, 20),
                ("1,000 clients, 200 a round", 1_000, 200),
                (f"{MANY:,} clients, 20 a round", MANY, 20),
            )
        }
        flying = {**settings, **ASYNCHRONOUS, "num-rounds": 4 * options.rounds}
        in_flight = measured(MANY, flying)
    few, thousand, cohort, many = rows.values()
    absent = (many["rest of a round"] - few["rest of a round"]) / (MANY - FEW)
    grown = cohort["MB"] - thousand["MB"]
    update = in_flight["rest, processor"] / in_flight["updates"]
    show(rows | {f"{MANY:,} clients, 200 in flight, 10 a round": in_flight}, absent, grown)
    print(f"an asynchronous update takes {update * 1e3:.1f} ms of a processor beside its steps")
    if options.json:
        figures: dict[str, Any] = {"many clients": rows, "absent": absent, "cohort MB": grown}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    missed = [
        f"{number:,} clients take {row['ready, processor']:.1f} s, bar {READY_BARS[number]:g}"
        for number, row in ((1_000, thousand), (10_000, many))
        if row["ready, processor"] > READY_BARS[number]
    ]
    if absent > ABSENT_BAR:
        missed.append(f"a client that is not in a round: {absent * 1e3:.2f} ms, bar 1")
    if grown > COHORT_BAR:
        missed.append(f"200 clients a round take {grown:.0f} MB more than 20, bar {COHORT_BAR:g}")
    if many["record"] > RECORD_BAR * few["record"]:
        missed.append(f"a record has {many['record']} bytes with {MANY:,} clients")
    for words in missed:
        print("missed:", words)
    sys.exit(options.check and bool(missed))


def write_noisy_digits(folder: Path) -> Path:
    """Write scikit-learn's digits with noise, in the needed number, as a data folder."""
    random = np.random.default_rng(0)
    images, labels = load_digits(return_X_y=True)
    features = datasets.Features(
        {
            "image": datasets.Array2D((8, 8), "float32"),
            "label": datasets.ClassLabel(names=[str(digit) for digit in range(10)]),
        }
    )
    folder.mkdir()
    datasets.disable_progress_bars()
    for name, number in (("train", ROWS), ("test", 1000)):
        rows = random.integers(0, len(labels), number)
        noisy = images[rows].reshape(-1, 8, 8) / 16 + random.normal(0, 0.05, (number, 8, 8))
        table = {"image": noisy.astype(np.float32), "label": labels[rows]}
        dataset = datasets.Dataset.from_dict(table, features=features)
        dataset.to_parquet(folder / f"{name}.parquet")
    return folder


def measured(clients: int, settings: dict[str, Any]) -> Row:
    """Run once, in a process of its own."""
    command = [sys.executable, "-c", SIMULATED, str(clients), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{clients} clients: {done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def show(rows: dict[str, Row], absent: float, grown: float) -> None:
    """Print a row for each, and the results from their differences."""
    print("| | ready, s | of a processor | rest of a round, ms | MB | record, bytes | checkpoint |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        print(
            f"| {name} | {row['ready']:.1f} | {row['ready, processor']:.1f} "
            f"| {row['rest of a round'] * 1e3:.0f} | {row['MB']:.0f} "
            f"| {row['record']:,} | {row['checkpoint']:,} |"
        )
    print(f"\na client that is not in a round costs it {absent * 1e6:.1f} microseconds")
    print(f"200 clients a round take {grown:.0f} MB more than 20")


if __name__ == "__main__":
    main()
