"""Measure seconds a round: an app like Flower's examples, ours, and ours with warm workers.

    python -m benchmarks.rounds deployment   # a SuperLink and two SuperNodes over TLS
    python -m benchmarks.rounds ray          # Flower's simulation runtime, 20 clients

All of them fine-tune `digits-vit` by FedIT, with a LoRA of rank 4, the classifier frozen: the same
payload, data, steps and clients. The peer, `benchmarks/plain_fedit`, loads model and data in
every message and leaves the rounds to Flower's FedAvg. Runs take turns; a run's figure is the
median of its rounds but the first, and a row's the median of its runs. A round ends when the
server has evaluated. No other program should run on the machine meanwhile.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import transformers
from datasets import Dataset
from sklearn.datasets import load_digits

from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.superlink import LocalSuperLink
from ravan_flwr.training.bundled import bundled_file, read_backbone
from tests.support import ROOT
from tests.support.deployment import Deployment

PEER = "Flower's FedAvg"
BARS = {  # times as many rounds a minute, by the number of local steps
    "ray": {1: 2.0, 10: 1.3, 50: 1.0},
    "deployment": {1: 1.5},
}
PLAIN = ROOT / "benchmarks" / "plain_fedit"


def main() -> None:
    """Run the selected measurement, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runtime", choices=["deployment", "ray"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1, help="local steps (default: 1)")
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ravan-bench-") as folder:
        write_inputs(Path(folder))
        measure = {"deployment": on_deployment, "ray": on_ray}[options.runtime]
        times = measure(Path(folder), options.runs, options.rounds, options.steps)
    show(times, options.runtime, options.steps)
    if options.json:
        options.json.write_text(json.dumps({options.runtime: times}, indent=1) + "\n")
    speedup = median(times[PEER]) / median(times["ours"])
    bar = BARS[options.runtime].get(options.steps, 0.0)  # 0: no bar
    if speedup < bar:
        print(f"missed: {speedup:.2f} times as quick, bar {bar}")
    sys.exit(options.check and speedup < bar)


def write_inputs(folder: Path) -> None:
    """Write backbone and digits as folders, which the peer reads as it would from the hub."""
    settings, weights = read_backbone(bundled_file(read_config({}).model.name))
    network = transformers.ViTForImageClassification(transformers.ViTConfig(**settings))
    network.load_state_dict(weights, strict=False)
    network.save_pretrained(folder / "model")
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    (folder / "data").mkdir()
    for name, rows in (("train", slice(359, None)), ("test", slice(359))):
        table = {"image": images[rows].tolist(), "label": labels[rows].tolist()}
        Dataset.from_dict(table).to_parquet(folder / "data" / f"{name}.parquet")


Times = dict[str, list[list[float]]]  # row -> run -> seconds of each round


def on_deployment(folder: Path, runs: int, rounds: int, steps: int) -> Times:
    """Run on two SuperNodes; those of the warm row are restarted with warm workers."""
    settings = f"num-rounds={rounds} clients-per-round=2 local-steps={steps}"
    times: Times = {PEER: [], "ours": [], "ours, warm": []}
    home = Path(tempfile.mkdtemp(dir=folder))
    with Deployment(home, nodes=2) as deployment:
        for number in range(2):
            deployment.register(number)
        for _ in range(runs):
            for row in times:
                for number in range(2):
                    warm = " warm-worker=true" * row.endswith("warm")
                    deployment.start_node(number, f"partition-id={number} num-partitions=2{warm}")
                assert all(deployment.wait_for_node(number) for number in range(2))
                if row == PEER:
                    file = folder / "times.json"
                    run = deployment.run(plain_settings(folder, file, settings), app=PLAIN)
                    status = run.wait()
                    seconds = json.loads(file.read_text())["seconds"]
                else:
                    run = deployment.run(
                        f"method='fedit' classifier='frozen' lora-rank=4 tracking='none' {settings}"
                    )
                    status = run.wait()
                    seconds = [record["seconds"] for record in run.rounds]
                assert status == "finished:completed", run.log
                times[row].append(seconds)
                for number in range(2):
                    deployment.stop_node(number)
    return times


def on_ray(folder: Path, runs: int, rounds: int, steps: int) -> Times:
    """Run with twenty clients in Ray, three of them a round."""
    settings = f"num-rounds={rounds} clients-per-round=3 local-steps={steps}"
    times: Times = {PEER: [], "ours": []}
    for _ in range(runs):
        file = folder / "times.json"
        simulated(PLAIN, plain_settings(folder, file, settings))
        times[PEER].append(json.loads(file.read_text())["seconds"])
        out = Path(tempfile.mkdtemp(dir=folder))
        simulated(
            ROOT,
            f"method='fedit' classifier='frozen' lora-rank=4 tracking='none' "
            f"output-dir='{out}' {settings}",
        )
        (record,) = out.glob("*/rounds.jsonl")
        lines = record.read_text().splitlines()
        times["ours"].append([json.loads(line)["seconds"] for line in lines])
    return times


def plain_settings(folder: Path, file: Path, settings: str) -> str:
    """Return the run config of the peer."""
    paths = f"model='{folder}/model' data='{folder}/data' times='{file}'"
    return f"{paths} {settings}"


def simulated(app: Path, settings: str, nodes: int = 20) -> None:
    """Call `flwr run` for an app on its own SuperLink."""
    federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
    command = ["flwr", "run", str(app), "--stream"]
    command += ["-c", settings, "--federation-config", federation]
    with LocalSuperLink() as superlink:
        subprocess.run(
            command,
            env=superlink.environment,
            check=True,
            capture_output=True,
            cwd=superlink.home,
        )


def show(times: Times, runtime: str, steps: int) -> None:
    """Print a row for each, and its ratio to the first."""
    base = median(times[PEER])
    print(f"\n{runtime}, {steps} local steps of 32 | seconds a round | runs | times as quick")
    for row, runs in times.items():
        each = " ".join(f"{statistics.median(run[1:]):.2f}" for run in runs)
        print(f"{row} | {median(runs):.2f} | {each} | {base / median(runs):.2f}")


def median(runs: list[list[float]]) -> float:
    """Return the median over the runs of the median of their rounds but the first."""
    return statistics.median(statistics.median(run[1:]) for run in runs)


if __name__ == "__main__":
    main()
