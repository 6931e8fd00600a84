"""Measure on a GPU the parts that need one, each with a time limit.

    make gpu-first                                       # ten minutes; a table in docs/gpu.md
    python -m benchmarks.gpu steps --preset glue-llama   # one part, with another model
    python -m benchmarks.gpu --device pretend --small    # the tests' fake accelerator

Each part is a process of its own, which ends when its time is up; its results until then are in
the table:

- captured: captured steps, and several clients in one pass, beside eager ones (gpu_steps.py).
- right: a first round changes weights of 16 bits; float16 agrees with float32; gradients in each
  precision and in 4 bits are compared with float64's of the same weights.
- tests: the tests marked gpu, of precision, heads, plan, evaluation and budget.
- sync: three eager steps in which no operation may wait for the GPU.
- steps: the preset's own path, from the examples' file to the upload: milliseconds a step, the
  fraction of it in which the GPU waits (waiting.py), kernels and memory; a few variants; one
  evaluation; one, two and four processes of clients.

Models have the presets' shapes and random weights, examples are random: no hub is needed.
"""

import argparse
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_steps
from benchmarks.gpu_models import PRESETS, failure, loaded_of, precision_of, settings_of
from benchmarks.waiting import kernels, traced, waiting_share
from ravan_flwr import simulate
from ravan_flwr.adapters import stored
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.sharing import MAX_CLIENTS_PER_GPU, USABLE
from ravan_flwr.methods.base import Tensors
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.training import model_and_data
from ravan_flwr.training.cost import Footprint, footprint
from ravan_flwr.training.local_steps import (
    ClientWork,
    TrainingLoop,
    calibrate_locally,
    train_locally,
)
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import TrainingSettings

Row = tuple[str, str]  # name, result
ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- gpu-first: made by benchmarks/gpu.py -->", "<!-- end of gpu-first -->"
WORK = ClientRound(0, 1, 0)
EXACT = "cpu:0"  # float64 is computed there


# The measurements.


def started(loaded: ModelAndData) -> Tensors:
    """Make a non-zero state, so that every parameter has a gradient."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in loaded.model.initial_state().items()
    }


@contextmanager
def stepping(
    loaded: ModelAndData, precision: str, number: int = 1
) -> Iterator[tuple[TrainingLoop, Any]]:
    """Yield a client's loop, and its trained parameters."""
    steps = TrainingSettings(number, loaded.config.batch_size, 1e-4, precision)
    work = ClientWork(loaded.partition(0, 4).train, {}, 1.0, steps, WORK)
    loop = TrainingLoop(loaded.model, loaded.task, work)
    with loaded.model.holding(started(loaded)):
        loaded.model.method.choose(
            loaded.model.adapters, 1.0, WORK.generator("heads"), lambda *_: None
        )
        yield loop, loaded.model.parameters()


def train(loaded: ModelAndData, number: int) -> None:
    """Do a client's round, as in a run."""
    local_steps = TrainingSettings(number, loaded.config.batch_size, 1e-4, loaded.config.precision)
    examples, state = loaded.partition(0, 4).train, loaded.model.initial_state()
    work = ClientWork(examples, state, 1.0, local_steps, WORK)
    train_locally(loaded.model, loaded.task, work)


# The parts.


def sync(options: argparse.Namespace) -> Iterator[Row]:
    """Find operations that wait for the GPU; they do not depend on sizes."""
    for preset in ("cifar100-vit-b16", "glue-llama"):
        small = argparse.Namespace(**vars(options) | {"small": True})
        with stepping(loaded_of(small, preset), precision_of(options), 3) as (loop, parameters):
            loop.train(parameters)
            try:
                with no_waiting(options.device):
                    loop.train(parameters)
            except RuntimeError as error:
                frames = traceback.extract_tb(error.__traceback__)
                places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames]
                yield f"{preset}: three steps without waiting", f"no: {' <- '.join(places[:-4:-1])}"
            else:
                yield f"{preset}: three steps without waiting", "yes"


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Turn every wait for a GPU into an error."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def right(options: argparse.Namespace) -> Iterator[Row]:
    """Compare results with their expected values."""
    small = argparse.Namespace(**vars(options) | {"small": True})
    loaded = loaded_of(small, "glue-llama", init="first-round", precision="float32")
    steps = TrainingSettings(50, 4, 1e-5, "float32")
    examples, state = loaded.partition(0, 4).train, loaded.model.initial_state()
    work = ClientWork(examples, state, 1.0, steps, WORK)
    change = calibrate_locally(loaded.model, loaded.task, work).upload["change"]
    moved = (change != 0).float().mean()
    yield "first round: weights that fifty steps of 1e-5 moved", f"{moved:.1%}"

    def sketch(precision: str) -> Tensor:
        loaded_ = loaded_of(small, "glue-llama", init="data-aware", precision=precision)
        work = ClientWork(
            loaded_.partition(0, 4).train, loaded_.model.initial_state(), 1.0,
            TrainingSettings(1, 4, 1e-4, precision), ClientRound(0, 0, 0),
        )  # fmt: skip
        return calibrate_locally(loaded_.model, loaded_.task, work).upload["sketch"]

    if options.device != "cpu":
        yield "sketches of gradients in float16", f"{off(sketch('float16'), sketch('float32'))} off"
    exact = gradients(
        loaded_of(small, "glue-llama", device=EXACT, precision="float32"), double=True
    )
    kinds: dict[str, dict[str, Scalar]] = {"float32": {}, "bfloat16": {}, "float16": {}}
    kinds |= {"bfloat16, backbone in it": {"backbone-dtype": "bfloat16"}}
    for kind, more in kinds.items():
        precision = kind.partition(",")[0]
        if precision in {"cpu": ("float16",), "pretend": ("bfloat16",)}.get(options.device, ()):
            continue  # the CPU does not train in it, and the fake accelerator does not cast
        got = gradients(loaded_of(small, "glue-llama", precision=precision, **more))
        yield f"gradients in {kind}", f"{off(got, exact)} off float64's"
    if options.device != "pretend":
        yield "gradients in 4 bits, bfloat16", f"{off(*four_bits(small))} off float64's"


def gradients(loaded: ModelAndData, *, double: bool = False) -> Tensor:
    """Compute the gradients of a batch for all trained parameters."""
    precision = loaded.config.precision
    if double:
        loaded.model.network.double()
    with stepping(loaded, precision) as (loop, parameters):
        if loop.scaler.is_enabled():  # its first scale overflows; a run would skip that step
            loop.scaler = torch.amp.GradScaler(loop.device.type, init_scale=2.0**10)
        loop.backward()
        found = torch.cat([parameter.grad.flatten().cpu() for parameter in parameters])
        return found.double() / loop.scaler.get_scale()


def four_bits(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Compute gradients over a backbone in 4 bits, and in float64 over the unpacked weights."""
    import bitsandbytes.functional as F  # noqa: PLC0415

    settings: dict[str, Scalar] = {"backbone-dtype": "4bit", "precision": "bfloat16"}
    few = loaded_of(options, "glue-llama", **settings)
    unpacked_model = loaded_of(options, "glue-llama", device=EXACT, precision="float32")
    modules = dict(few.model.network.named_modules())
    with torch.no_grad():
        for name, module in unpacked_model.model.network.named_modules():
            weight: Any = getattr(modules[name], "weight", None)
            if getattr(weight, "quant_state", None) is not None:
                unpacked = F.dequantize_4bit(weight.data, weight.quant_state)
                module.get_parameter("weight").copy_(unpacked)
    return gradients(few), gradients(unpacked_model, double=True)


def off(got: Tensor, expected: Tensor) -> str:
    """Return the relative distance of tensors, by norms."""
    return f"{float((got - expected).norm() / expected.norm()):.1e}"


def tests(options: argparse.Namespace) -> Iterator[Row]:
    """Run the tests that need a GPU, and list the failed ones."""
    words = "precision or head or plan or evaluation or budget"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rf", "-m", "gpu", "-k", words]
    command += ["tests/runs/test_gpu.py", *["--collect-only"] * options.small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    for name in re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE):
        yield name, "failed"
    summary = re.findall(r"^.*\d+ .*in [\d.]+ ?s.*$", done.stdout, re.MULTILINE)
    yield "all of these", summary[-1].strip("= ") if summary else f"status {done.returncode}"


AS_IT_IS = "as it is"
VARIANTS: dict[str, dict[str, Scalar]] = {
    AS_IT_IS: {},
    "cuda-graphs=off": {"cuda-graphs": "off"},
    "gradient-checkpointing=true": {"gradient-checkpointing": True},
    "backbone-dtype=4bit": {"backbone-dtype": "4bit"},
}


def steps(options: argparse.Namespace) -> Iterator[Row]:
    """Time a client's steps in some variants, an evaluation, and processes side by side."""
    for name, changes in VARIANTS.items():
        if "4bit" in name and options.device != "cuda":
            continue
        loaded = None
        gc.collect()  # the model of the row before, which its peak of memory must not include
        try:
            loaded = loaded_of(options, options.preset, **changes)
            yield f"{options.preset}, {name}", timed_steps(loaded, options)
            if name == AS_IT_IS:
                began, number = time.perf_counter(), sum(map(len, loaded.test_sets.values()))
                loaded.evaluate()
                rate = number / (time.perf_counter() - began)
                yield f"{options.preset}, an evaluation", f"{rate:,.0f} examples a second"
        except Exception as error:  # noqa: BLE001 (a variant that fails is a finding)
            yield f"{options.preset}, {name}", failure(error)
    for processes in (1, 2) if options.small else (1, 2, 4):
        number, rounds = (2, 1) if options.small else (20, 2)
        settings: dict[str, Scalar] = {
            "processes": processes, "clients-per-round": 4, "num-rounds": rounds,
            "eval-every": rounds, "local-steps": number, "tracking": "none",
            "output-dir": str(options.folder / "runs"),
        }  # fmt: skip
        try:
            run = simulate(settings_of(options, options.preset, **settings), 4)
            lines = (run.run_dir / "rounds.jsonl").read_text().splitlines()
            seconds = json.loads(lines[-1])["phases"]
            times = ", ".join(f"{phase} {took:.2f} s" for phase, took in seconds.items())
            yield f"{options.preset}, processes={processes}, 4 clients of {number} steps", times
        except Exception as error:  # noqa: BLE001
            yield f"{options.preset}, processes={processes}", failure(error)


def timed_steps(loaded: ModelAndData, options: argparse.Namespace) -> str:
    """Measure a client's round: time and kernels by step, waiting, memory."""
    number, on_cuda = 2 if options.small else 20, options.device == "cuda"
    train(loaded, number)  # warms up
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        train(loaded, number)
        taken.append(time.perf_counter() - began)
    seconds = statistics.median(taken)
    report = f"{1000 * seconds / number:.1f} ms a step"
    if not on_cuda:
        return report
    torch.cuda.reset_peak_memory_stats()
    trace = traced(partial(train, loaded, 5))
    waits = waiting_share(trace, 5 * seconds / number)
    peak = torch.cuda.max_memory_allocated() / 1e9
    return f"{report}, the GPU waits {waits:.0%}, {kernels(trace) // 5} kernels, {peak:.1f} GB"


def captured(options: argparse.Namespace) -> Iterator[Row]:
    """Time captured steps, and several clients in one pass (gpu_steps.py)."""
    yield from gpu_steps.times(options)


# Capacity, by the plan.

SIZES = (8, 16, 24, 48, 80)  # GB of a GPU's memory
IN_16_BITS: dict[str, Scalar] = {"precision": "bfloat16", "backbone-dtype": "bfloat16"}
SAVING: dict[str, Scalar] = {"gradient-checkpointing": True, "backbone-dtype": "4bit"}
RUNS: dict[str, dict[str, Scalar]] = {
    "`cifar100-vit-b16`": {"preset": "cifar100-vit-b16"},
    "the same, `precision=bfloat16`": {"preset": "cifar100-vit-b16", "precision": "bfloat16"},
    "`newsgroups-t5`, `precision=bfloat16`": {"preset": "newsgroups-t5", "precision": "bfloat16"},
    "`glue-llama`, in float32": {"preset": "glue-llama", "backbone-dtype": "float32"},
    "the same, `precision=bfloat16`, `backbone-dtype=bfloat16`": {
        "preset": "glue-llama", **IN_16_BITS
    },
    "the same, `gradient-checkpointing=true`, `backbone-dtype=4bit` on top": {
        "preset": "glue-llama", **IN_16_BITS, **SAVING
    },
    "`general-nlp`, a 7B model in 4 bits": {"preset": "general-nlp"},
}  # fmt: skip


def classes() -> Iterator[str]:
    """Return the table of what GPUs of each size can train, by the plan."""
    yield f"| run | client, server, GB | {' | '.join(f'{size} GB' for size in SIZES)} |"
    yield "| --- " * (2 + len(SIZES)) + "|"
    for name, settings in RUNS.items():
        need = footprint(read_config({"device": "cuda"} | settings))
        cells = [fitting(USABLE * size * 1e9, need) for size in SIZES]
        both = f"{need.client / 1e9:.1f}, {need.server / 1e9:.1f}"
        yield f"| {name} | {both} | {' | '.join(cells)} |"


def fitting(room: float, need: Footprint) -> str:
    """Return how many clients fit beside the server, or that both fit as one process."""
    if room >= need.server + need.client:
        number = int((room - need.server) // (need.client + need.graph))
        return str(min(MAX_CLIENTS_PER_GPU, max(1, number)))
    return "in process" if room >= max(need.client, need.server) else "no"


# Each part in a process of its own.

# name -> (function, fraction of the remaining time)
PARTS: dict[str, tuple[Callable[[argparse.Namespace], Iterator[Row]], float]] = {
    "captured": (captured, 5),
    "right": (right, 2),
    "tests": (tests, 3),
    "sync": (sync, 1),
    "steps": (steps, 5),
}


def main(arguments: list[str]) -> int:
    """Run all parts within the limit and write the table, or run one part and print its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "part", nargs="?", choices=(*PARTS, "classes"),
        help="this one alone, without a limit; classes: what fits on which GPU, by the plan",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "pretend"))
    parser.add_argument("--preset", default=PRESETS[1], choices=PRESETS, help="of the part steps")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all parts")
    parser.add_argument("--page", type=Path, help="a page that has the table between two comments")
    parser.add_argument("--folder", type=Path, help="keep the models and examples that are made")
    options = parser.parse_args(arguments)
    if options.part == "classes":
        print("\n".join(classes()))
        return 0
    with tempfile.TemporaryDirectory() as place:
        options.folder = options.folder or Path(place)
        if options.part is None:
            return all_parts(options)
        settle_device(options.device)
        for what, result in PARTS[options.part][0](options):
            print(json.dumps([what, result]), flush=True)
    return 0


def settle_device(name: str) -> None:
    """Use the tests' accelerator as the device if it is selected."""
    if name != "pretend":
        return
    from tests.pretend import register  # noqa: PLC0415 (a machine with a GPU has no need of it)

    device = register()

    def pick(name: str) -> torch.device:
        return torch.device("cpu") if name == EXACT else device

    setattr(model_and_data, "pick_device", pick)  # noqa: B010 (mypy: it is no part of that module)
    setattr(stored, "autocasts", lambda _: False)  # noqa: B010 (it casts nothing)
    torch.__future__.set_swap_module_params_on_conversion(True)


def all_parts(options: argparse.Namespace) -> int:
    """Run every part; a part gets a fraction of the remaining time."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"error: PyTorch {torch.__version__} finds no GPU", file=sys.stderr)
        return 1
    ends, lines = time.monotonic() + options.limit, []
    for place, name in enumerate(PARTS):
        left = sum(share for _, share in list(PARTS.values())[place:])
        limit = max(0.0, ends - time.monotonic()) * PARTS[name][1] / left
        for what, result in rows_of(name, options, limit):
            lines.append(f"| {name} | {what} | {result} |".replace("\n", " "))
            print(lines[-1], flush=True)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    about = f"{gpu}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d')}:"
    table = [about, "", "| part | what | result |", "| --- | --- | --- |", *lines]
    if options.page:
        write_table(options.page, "\n".join(table))
    return 0


def rows_of(name: str, options: argparse.Namespace, limit: float) -> list[Row]:
    """Run a part for a limited number of seconds, and read its results."""
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--device", options.device]
    command += ["--preset", options.preset, "--folder", str(options.folder)]
    with tempfile.TemporaryFile("w+") as found, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *["--small"] * options.small], cwd=ROOT, stdout=found, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        end = ""
        try:
            if process.wait(limit):
                end = f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            end = f"stopped after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # with its own child processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found.seek(0)
        errors.seek(0)
        rows = [row for line in found if (row := row_in(line))]
        last = (errors.read().strip().splitlines() or [""])[-1][:200]
    return [*rows, *([(end, last if "status" in end else "")] if end else [])]


def row_in(line: str) -> Row | None:
    """Read a row; None for other output, or for an incomplete line."""
    try:
        what, result = json.loads(line)
    except (TypeError, ValueError):
        return None
    return str(what), str(result)


def write_table(page: Path, table: str) -> None:
    """Replace the table in the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
