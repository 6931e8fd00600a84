"""Measure clients a second with 1,000 clients of 50 images: pfl-research 0.6, ours, Flower's way.

    python -m benchmarks.clients                       # 16 minutes; makes pfl's environment
    python -m benchmarks.clients --pfl PYTHON          # an environment with pfl and PEFT
    python -m benchmarks.clients --flower --processes 2

The setting is that of pfl-research's CIFAR-10 benchmark in shape: 50,000 training images of
32 x 32 x 3 in ten classes, partitioned evenly, 50 clients a round, one pass in batches of ten. The
images are crops of scikit-learn's two photographs, since CIFAR-10 is a download; the content of
an image does not change the cost of a step. The network has the shape of `digits-vit` with
patches of 4 x 4: 64 and a class token, 0.3 million parameters, random, with a LoRA of rank 4 on
queries and values, the classifier frozen. All rows compute with the same number of threads.

The peer is `benchmarks/plain_pfl`. Its own benchmarks use plain SGD in a client; ours is always
Adam, so that it is measured with both, and the bar is against Adam. Rows take turns, and each run
is a process of its own. A round lasts from one line of its file to the next, by this program's
clock. The first round, and the last, which evaluates, do not count. Processor time depends little
on other processes of the machine, except through caches. Start-up is the time to the first line,
less a round; memory is the peak of one process, by the kernel.
"""

import argparse
import itertools
import json
import os
import pickle
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
import numpy as np
import psutil
import torch
import transformers
from sklearn.datasets import load_sample_images

from benchmarks.rounds import simulated
from tests.support import ROOT

PEER, BAR = "pfl, Adam", 1.0  # times as many clients a second
BARRED = "ours, fedit"
FLOWER = "Flower's FedAvg in Ray, a process a core"
PFL = "pfl==0.6.0"
CLIENTS, EACH, COHORT, BATCH, TEST, SIDE, CLASSES = 1000, 50, 50, 10, 1000, 32, 10
RANK, RATE = 4, 0.001
OURS = {"ours, fedit": "fedit", "ours, ravan": "ravan"}


@dataclass(frozen=True)
class Measured:
    """Hold the measurements of one run."""

    rounds: list[float]  # seconds of each round
    processor: list[float]  # processor seconds of each round, over all threads and processes
    start: float  # seconds from the command to the first round
    memory: float  # MB

    @property
    def clients_a_second(self) -> float:
        return COHORT / statistics.median(self.rounds)

    @property
    def processor_a_client(self) -> float:
        return statistics.median(self.processor) / COHORT


def main() -> None:
    """Run the selected rows, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="of a run that count (default: 4)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    parser.add_argument(
        "--processes", type=int, help="also ours with so many worker processes (key processes)"
    )
    parser.add_argument("--flower", action="store_true", help="also benchmarks/plain_fedit in Ray")
    parser.add_argument(
        "--pfl",
        type=Path,
        help="a Python that has pfl, torch, transformers and peft; without it the benchmark makes "
        f"an environment beside this one's packages and installs {PFL} in it",
    )
    parser.add_argument("--check", action="store_true", help="end with 1 if the bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ravan-bench-") as name:
        folder = Path(name)
        python = options.pfl or make_environment(folder / "pfl")
        write_inputs(folder)
        rows = rows_of(folder, python, options.rounds + 2, options.processes)
        environment = environment_of(folder, options.threads)
        found: dict[str, list[Measured]] = {row: [] for row in rows}
        for _ in range(options.runs):
            for row, command in rows.items():
                lines = folder / "runs" / f"{len(list(folder.glob('runs/*')))}"
                found[row].append(measured(command(lines), lines, environment))
        plain = on_flower(folder, options.rounds + 2) if options.flower else []
    show(found, plain)
    if options.json:
        clients = {row: [asdict(run) for run in runs] for row, runs in found.items()}
        flower = {FLOWER: [{"rounds": plain}]} if plain else {}
        options.json.write_text(json.dumps({"clients": clients | flower}, indent=1) + "\n")
    speedup = ratio(found, BARRED)
    if speedup < BAR:
        print(f"missed: {BARRED} trains {speedup:.2f} times as many clients a second, bar {BAR}")
    sys.exit(options.check and speedup < BAR)


def make_environment(folder: Path) -> Path:
    """Make an environment with pfl, over the packages of this one: the same torch and PEFT."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    home = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(home) / "beneath.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", PFL], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{PFL} cannot be installed: {done.stderr[-1000:]}; name a Python that has it, --pfl"
        )
    return python


def write_inputs(folder: Path) -> None:
    """Write the network, and the images: a pickle for pfl, parquet for ours and Flower."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, image_size=SIDE, patch_size=4,
        num_channels=3,
    )  # fmt: skip
    config.num_labels = CLASSES
    transformers.ViTForImageClassification(config).save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    (folder / "data").mkdir()
    (folder / "pickles").mkdir()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for name, number in (("train", CLIENTS * EACH), ("test", TEST)):
        images, labels = crops(number, random)
        table = datasets.Dataset.from_dict(
            {"image": list(images), "label": labels}, features=features
        )
        table.to_parquet(folder / "data" / f"{name}.parquet")
        pickles = folder / "pickles" / f"{name}.p"
        pickles.write_bytes(pickle.dumps((images.transpose(0, 3, 1, 2), labels)))
    (folder / "preset.yaml").write_text(PRESET.format(folder=folder))


PRESET = """
task: vision
model: "{folder}/model"
data:
  name: "{folder}/data"
  columns: {{image: image, label: label}}
  labels: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
run: {{partition: iid, classifier: frozen}}
"""


def crops(number: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Crop squares of two photographs; the class is the photograph and the fifth of its width.

    Returns (number, 32, 32, 3) bytes, and the classes.
    """
    photographs = np.stack(load_sample_images().images)
    _, height, width, _ = photographs.shape
    which = random.integers(2, size=number)
    top = random.integers(height - SIDE, size=number)
    left = random.integers(width - SIDE, size=number)
    squares = [
        photographs[w, t : t + SIDE, x : x + SIDE] for w, t, x in zip(which, top, left, strict=True)
    ]
    return np.stack(squares), which * 5 + left * 5 // (width - SIDE)


Command = Callable[[Path], list[str]]  # command of a folder for the file of rounds


def rows_of(folder: Path, python: Path, rounds: int, processes: int | None) -> dict[str, Command]:
    """Return each row's command."""
    rows: dict[str, Command] = {}
    for name, optimizer in (("pfl, SGD", "sgd"), (PEER, "adam")):
        rows[name] = lambda out, optimizer=optimizer: pfl_command(  # type: ignore[misc]
            folder, python, out, rounds, optimizer
        )
    for name, method in OURS.items():
        rows[name] = lambda out, method=method: our_command(  # type: ignore[misc]
            folder, out, rounds, method
        )
    if processes is not None:
        for name, method in OURS.items():
            rows[f"{name}, {processes} processes"] = lambda out, method=method: our_command(  # type: ignore[misc]
                folder, out, rounds, method, processes
            )
    return rows


def pfl_command(folder: Path, python: Path, out: Path, rounds: int, optimizer: str) -> list[str]:
    """Return the peer's command."""
    settings = {
        "model": folder / "model", "data": folder / "pickles", "lines": out / "rounds.jsonl",
        "clients": CLIENTS, "cohort": COHORT, "rounds": rounds, "batch-size": BATCH,
        "lora-rank": RANK, "learning-rate": RATE, "optimizer": optimizer,
    }  # fmt: skip
    options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [str(python), str(ROOT / "benchmarks" / "plain_pfl" / "train.py"), *options]


def our_command(folder: Path, out: Path, rounds: int, method: str, processes: int = 1) -> list[str]:
    """Return our command; one pass over 50 images in batches of ten is five steps."""
    settings = {
        "preset": folder / "preset.yaml", "method": method, "num-clients": CLIENTS,
        "clients-per-round": COHORT, "num-rounds": rounds, "local-steps": EACH // BATCH,
        "batch-size": BATCH, "learning-rate": RATE, "lora-rank": RANK, "eval-every": rounds,
        "tracking": "none", "output-dir": out, "processes": processes,
    }  # fmt: skip
    options = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "ravan_flwr", "simulate", *options]


def environment_of(folder: Path, threads: int) -> Mapping[str, str]:
    """Fix the threads of all rows, and keep caches in the benchmark's folder."""
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return os.environ | limits | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}


def measured(command: list[str], out: Path, environment: Mapping[str, str]) -> Measured:
    """Run a command, and note when each line appears in the rounds.jsonl below `out`."""
    out.mkdir(parents=True)
    began = time.perf_counter()
    ends: list[tuple[float, float]] = []  # by wall clock and processor clock
    with (out / "said").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=out, stdout=log, stderr=subprocess.STDOUT
        )
        ended = False
        while not ended:  # read once more after the end, for the last lines
            time.sleep(0.01)
            wait_flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, process.pid, wait_flags) is not None
            lines = sum(file.read_bytes().count(b"\n") for file in out.glob("**/rounds.jsonl"))
            if lines > len(ends):
                ends += [(time.perf_counter(), computed(process.pid))] * (lines - len(ends))
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        output = (out / "said").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {output}")
    rounds = [
        (end - before_end, processor - before_processor)
        for (before_end, before_processor), (end, processor) in itertools.pairwise(ends)
    ]
    walls = [wall for wall, _ in rounds[:-1]]  # the last round evaluates
    return Measured(
        rounds=walls,
        processor=[processor for _, processor in rounds[:-1]],
        start=ends[0][0] - began - statistics.median(walls),
        memory=used.ru_maxrss / 1000,
    )


def computed(pid: int) -> float:
    """Sum the processor seconds of a process and its children."""
    root = psutil.Process(pid)
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def on_flower(folder: Path, rounds: int) -> list[float]:
    """Run Flower's plain app with 1,000 nodes in Ray, a process a core; return round seconds."""
    file = folder / "times.json"
    simulated(
        ROOT / "benchmarks" / "plain_fedit",
        f"model='{folder}/model' data='{folder}/data' times='{file}' partition='iid' "
        f"num-rounds={rounds} clients-per-round={COHORT} local-steps={EACH // BATCH} "
        f"batch-size={BATCH} learning-rate={RATE} lora-rank={RANK}",
        nodes=CLIENTS,
    )
    seconds: list[float] = json.loads(file.read_text())["seconds"]
    return seconds[1:]


def ratio(found: Mapping[str, list[Measured]], row: str, what: str = "clients_a_second") -> float:
    """Return the median over runs of the ratio of a row's figure to the peer's."""
    return statistics.median(
        float(getattr(mine, what)) / float(getattr(peer, what))
        for mine, peer in zip(found[row], found[PEER], strict=True)
    )


def show(found: Mapping[str, list[Measured]], plain: list[float]) -> None:
    """Print a row for each, medians over the runs; `x` is the ratio to the peer."""
    print("| | clients a second | by run | x | processor, ms a client | x | start-up, s | MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row, runs in found.items():
        speed, processor, start, memory = (
            statistics.median(float(getattr(run, what)) for run in runs)
            for what in ("clients_a_second", "processor_a_client", "start", "memory")
        )
        each = " ".join(f"{run.clients_a_second:.1f}" for run in runs)
        print(
            f"| {row} | {speed:.1f} | {each} | {ratio(found, row):.2f} | {1e3 * processor:.0f} | "
            f"{ratio(found, row, 'processor_a_client'):.2f} | {start:.1f} | {memory:,.0f} |"
        )
    if plain:
        speed = COHORT / statistics.median(plain)
        peer = statistics.median(run.clients_a_second for run in found[PEER])
        print(f"| {FLOWER} | {speed:.1f} | | {speed / peer:.2f} | | | | |")


if __name__ == "__main__":
    main()
