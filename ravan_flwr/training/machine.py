"""Find what this machine has, without PyTorch, which takes seconds to import: GPUs and cores.

`nvidia-smi` comes with the driver. Of the GPUs that it lists, CUDA uses those that
CUDA_VISIBLE_DEVICES names. It may number unequal GPUs in another order than `nvidia-smi` does;
nothing here depends on which of them is which.
"""

import logging
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder a GPU, also for a process that sees none
VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARE_FOR_EXAMPLE = '--federation-config "... client-resources-num-gpus=0.25"'
_COLUMNS = "index,uuid,name,memory.total,memory.free"
_MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """Describe a GPU, or a part of one, with its memory in bytes where that is known."""

    index: str
    uuid: str  # which CUDA_VISIBLE_DEVICES takes
    name: str
    total: int | None
    free: int | None


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """List the GPUs that a program started with this environment may use."""
    gpus = _listed(environment)
    chosen = environment.get(VISIBLE)
    if chosen is None or not gpus:
        return gpus
    selection = []
    for word in chosen.split(","):
        gpu = _named(word.strip(), gpus)
        if gpu is None:  # CUDA sees nothing of what comes after it, either
            break
        selection.append(gpu)
    return selection


def in_turn(gpus: Sequence[Gpu], processes: int) -> list[dict[str, str]]:
    """Give GPUs to so many processes in turn: what each gets in its environment, if anything."""
    if len(gpus) < 2 or processes < 2:
        return [{}] * processes
    shares = [gpus[place % len(gpus) :: processes] for place in range(processes)]
    return [{VISIBLE: ",".join(gpu.uuid for gpu in share)} for share in shares]


def _named(word: str, gpus: list[Gpu]) -> Gpu | None:
    """Find the GPU that a word of CUDA_VISIBLE_DEVICES means: an index, or the start of a UUID."""
    if word.startswith("MIG-"):  # a part of a GPU, of which nvidia-smi lists no memory
        return Gpu(word, word, "a part of a GPU (MIG)", None, None)
    is_uuid = word.startswith("GPU-")
    matches = [g for g in gpus if (g.uuid.startswith(word) if is_uuid else g.index == word)]
    return matches[0] if len(matches) == 1 else None


def _listed(environment: Mapping[str, str]) -> list[Gpu]:
    """List all GPUs of the machine that the driver answers for."""
    gpus = []
    for line in _ask(environment, f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits"):
        index, uuid, fields = (part.strip() for part in line.split(",", 2))
        name, *sizes = (part.strip() for part in fields.rsplit(",", 2))
        # "[N/A]" of a GPU that has the machine's memory.
        total, free = (int(size) * _MIB if size.isdecimal() else None for size in sizes)
        gpus.append(Gpu(index, uuid, name, total, free))
    return gpus


def _ask(environment: Mapping[str, str], *options: str) -> list[str]:
    """Read the lines that nvidia-smi answers; none where there is no driver, or it fails."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, *options], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []


def gpus_of_machine(driver: Path = DRIVER, environment: Mapping[str, str] = os.environ) -> int:
    """Count the GPUs that the machine has, whether or not this process may use them."""
    if driver.is_dir():
        return len(list(driver.iterdir()))
    return len(_ask(environment, "--list-gpus"))  # as under WSL


def unused_gpus(
    cuda: str | None, driver: Path = DRIVER, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Say what GPUs a process on the CPU was not given, and what to do; None if there are none.

    `cuda` is the version that PyTorch is built for, if for any.
    """
    number = gpus_of_machine(driver, environment)
    if not number:
        return None
    if cuda is None:
        reason = "this PyTorch is built without CUDA; install one that has it (pytorch.org)"
    elif "RAY_RAYLET_PID" in environment and not environment.get(VISIBLE, "all"):
        reason = (
            "the simulation gave this client none. `--engine flower` asks for a share of them by "
            f"itself; with `flwr run` give {SHARE_FOR_EXAMPLE}"
        )
    elif VISIBLE in environment:
        reason = f"{VISIBLE}={environment[VISIBLE]!r} hides them; unset it, or name some there"
    else:
        reason = (
            f"CUDA {cuda} cannot use them; where PyTorch warns that the driver is too old, update "
            "it, or install PyTorch's wheels for an older CUDA (pytorch.org); else see whether "
            "nvidia-smi lists them, and start a container with --gpus all"
        )
    return (
        f"this process computes on the CPU, but the machine has {number} "
        f"GPU{'s' * (number > 1)}: {reason}. If the CPU is meant, device=cpu says so"
    )


@cache
def tell_of_unused_gpus(cuda: str | None) -> None:
    """Log that GPUs are unused, once a process."""
    if reason := unused_gpus(cuda):
        log.warning("%s", reason)


# Set in the environment by who runs several processes side by side: the cores for each of them.
CORES = "RAVAN_FLWR_CORES"


def usable_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Count by affinity, by the quota of the control group, and by what a study leaves to a run."""
    if hasattr(os, "sched_getaffinity"):
        number = len(os.sched_getaffinity(0))
    else:  # macOS
        number = os.cpu_count() or 1
    if share := environment.get(CORES, ""):
        if not re.fullmatch("[0-9]{1,9}", share) or int(share) < 1:
            raise ValueError(
                f"{CORES} = {share[:40]!r} in the environment: expected a number of cores, 1 or "
                "more; correct it, or unset it for all cores"
            )
        number = min(number, int(share))
    return max(1, int(min(number, *_quotas(Path("/proc/self/cgroup")))))


def _quotas(groups: Path, root: Path = Path("/sys/fs/cgroup")) -> Iterator[float]:
    """Read how many cores this process's control group, and those around it, may use."""
    yield math.inf
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and "cpu" not in kinds.split(","):
            continue
        inner = root / kinds / path.lstrip("/") if kinds else root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(root):
                yield _quota(folder)


def _quota(folder: Path) -> float:
    """Read the quota of one control group, of version 2 or 1; infinite where there is none."""
    try:
        if (file := folder / "cpu.max").is_file():
            quota, period = file.read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError):  # not there, or "max"
        return math.inf
