"""Measure the seconds from the command to the first training step, by phase.

    python benchmarks/startup.py                   # two minutes

Every figure is the median of some runs, each in its own process, with files in the system's
cache. "Flower" is `ravan-flwr simulate --engine flower` with 20 nodes, until the record of a first
round of one step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HELP_BAR = 0.5
COMMANDS = {
    "ravan-flwr --help": ["-m", "ravan_flwr", "--help"],
    "import ravan_flwr.client_app": ["-c", "import ravan_flwr.client_app"],
    "import ravan_flwr.client.answers (torch, transformers)": [
        "-c",
        "from ravan_flwr.importing import importing\n"
        "with importing(): import ravan_flwr.client.answers",
    ],
}

# The same as `ravan-flwr simulate`, with timestamps between phases; it ends after the first step.
SIMULATED = """
import json, os, sys, time
began = float(os.environ["BEGAN"])
from ravan_flwr.importing import importing
with importing():
    from ravan_flwr.training import adapted_model as model
    from ravan_flwr.launch import in_process as simulation
    from ravan_flwr.training import local_steps as training
    from ravan_flwr.training import model_and_data as workbench
phases = {"imports": time.time() - began}

def clocked(home, name, phase):
    inner = getattr(home, name)
    def outer(*given, **named):
        start = time.time()
        try:
            return inner(*given, **named)
        finally:
            phases[phase] = phases.get(phase, 0.0) + time.time() - start
    setattr(home, name, outer)

clocked(workbench, "build_network", "backbone")
clocked(model.AdaptedModel, "__init__", "bases and adapters")
clocked(workbench, "load_splits", "data")
step = training.TrainingLoop.backward
def first(self):
    start = time.time()
    step(self)
    phases["the first step"] = time.time() - start
    phases["all of it"] = time.time() - began
    sys.stdout.write("\\n" + json.dumps(phases))
    sys.stdout.flush()
    os._exit(0)
training.TrainingLoop.backward = first
simulation.simulate({"tracking": "none", "output-dir": sys.argv[1]}, 20)
"""


def seconds_of(command: list[str]) -> float:
    """Time a whole process."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return time.perf_counter() - began


def simulated(folder: str) -> dict[str, float]:
    """Time the phases of a run in process."""
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED, folder],
        env=os.environ | {"BEGAN": str(time.time())},
        check=True,
        capture_output=True,
    )
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    known = sum(phases.values()) - phases["all of it"]
    return {**phases, "everything else": phases["all of it"] - known}


def in_flower(folder: str) -> float:
    """Time a run until its first round is recorded."""
    began = time.perf_counter()
    settings = [
        "--engine=flower",
        "local-steps=1",
        "num-rounds=1",
        "tracking=none",
        "clients-per-round=1",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "ravan_flwr", "simulate", f"output-dir={folder}", *settings],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while not list(Path(folder).glob("*/rounds.jsonl")):
            if process.poll() is not None or time.perf_counter() - began > 300:
                raise RuntimeError("the run recorded no round; run it by hand")
            time.sleep(0.05)
        return time.perf_counter() - began


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    found = {
        name: statistics.median(seconds_of(command) for _ in range(options.runs))
        for name, command in COMMANDS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        phases = [simulated(folder) for _ in range(options.runs)]
        for phase in phases[0]:
            found[f"simulate: {phase}"] = statistics.median(run[phase] for run in phases)
        found["Flower: a first round of one step"] = in_flower(str(Path(folder) / "flower"))
    print("| start-up | seconds |\n| --- | --- |")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.2f} |")
    if options.json:
        options.json.write_text(json.dumps({"startup": found}, indent=1) + "\n")
    is_slow = found["ravan-flwr --help"] > HELP_BAR
    if is_slow:
        print(f"missed: ravan-flwr --help, bar {HELP_BAR} s")
    sys.exit(options.check and is_slow)


if __name__ == "__main__":
    main()
