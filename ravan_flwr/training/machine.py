"""Find this machine's GPUs and cores without PyTorch, which takes seconds to import.

`nvidia-smi` is installed with the driver. Of the GPUs that it lists, CUDA uses those that
CUDA_VISIBLE_DEVICES names. CUDA may number unequal GPUs in another order than `nvidia-smi`. Nothing
here depends on the order.
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

DRIVER = Path("/proc/driver/nvidia/gpus")  # one folder per GPU, visible or not
VISIBLE = "CUDA_VISIBLE_DEVICES"
_COLUMNS = "index,uuid,name,memory.total,memory.free"
_MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one (MIG), with its memory in bytes if that is known."""

    index: str
    uuid: str  # accepted in CUDA_VISIBLE_DEVICES
    name: str
    total: int | None
    free: int | None


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """List the GPUs that a program with this environment may use."""
    gpus = _list_gpus(environment)
    chosen = environment.get(VISIBLE)
    if chosen is None or not gpus:
        return gpus
    selection = []
    for word in chosen.split(","):
        gpu = _find_gpu(word.strip(), gpus)
        if gpu is None:  # CUDA ignores the rest of the list
            break
        selection.append(gpu)
    return selection


def assign_gpus(gpus: Sequence[Gpu], processes: int) -> list[dict[str, str]]:
    """Assign GPUs to processes in turn; return the environment variables of each process.

    They are empty with less than two GPUs or processes.
    """
    if len(gpus) < 2 or processes < 2:
        return [{}] * processes
    assigned = [gpus[number % len(gpus) :: processes] for number in range(processes)]
    return [{VISIBLE: ",".join(gpu.uuid for gpu in part)} for part in assigned]


def _find_gpu(word: str, gpus: list[Gpu]) -> Gpu | None:
    """Return the GPU of a word of CUDA_VISIBLE_DEVICES: an index, or the start of a UUID."""
    if word.startswith("MIG-"):  # a part of a GPU; nvidia-smi lists no memory for it
        return Gpu(word, word, "a part of a GPU (MIG)", None, None)
    is_uuid = word.startswith("GPU-")
    matches = [g for g in gpus if (g.uuid.startswith(word) if is_uuid else g.index == word)]
    return matches[0] if len(matches) == 1 else None


def _list_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """List all GPUs that nvidia-smi lists."""
    gpus = []
    for line in _run_nvidia_smi(
        environment, f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits"
    ):
        index, uuid, fields = (part.strip() for part in line.split(",", 2))
        name, *sizes = (part.strip() for part in fields.rsplit(",", 2))
        # "[N/A]" for a GPU that shares the machine's memory.
        total, free = (int(size) * _MIB if size.isdecimal() else None for size in sizes)
        gpus.append(Gpu(index, uuid, name, total, free))
    return gpus


def _run_nvidia_smi(environment: Mapping[str, str], *options: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none without a driver, or if it fails."""
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


def explain_unused_gpus(
    driver: Path = DRIVER, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return why a process on the CPU may not use the machine's GPUs; None without any."""
    if driver.is_dir():
        gpus = [str(gpu) for gpu in driver.iterdir()]  # visible to this process or not
    else:  # as under WSL
        gpus = _run_nvidia_smi(environment, "--list-gpus")
    if not (number := len(gpus)):
        return None
    return (
        f"this process computes on the CPU, but the machine has {number} "
        f"GPU{'s' * (number > 1)}. See whether PyTorch is built for CUDA, and for one that the "
        f"driver knows (python -m torch.utils.collect_env), whether {VISIBLE} hides them, whether "
        "a container was started with --gpus all, and whether `flwr run` gives clients a share "
        '(--federation-config "... client-resources-num-gpus=0.25"). To use the CPU, set device=cpu'
    )


@cache
def log_unused_gpus() -> None:
    """Warn of unused GPUs in the log, once per process."""
    if advice := explain_unused_gpus():
        log.warning("%s", advice)


# The number of cores for a process; set in the environment by a program that runs several at once.
CORES = "RAVAN_FLWR_CORES"


def usable_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of usable cores: the least of affinity, control group quota and `CORES`."""
    if hasattr(os, "sched_getaffinity"):
        number = len(os.sched_getaffinity(0))
    else:  # macOS
        number = os.cpu_count() or 1
    if limit := environment.get(CORES, ""):
        if not re.fullmatch("[0-9]{1,9}", limit) or int(limit) < 1:
            raise ValueError(
                f"{CORES} = {limit[:40]!r} in the environment: expected a number of cores, 1 or "
                "more; set such a number, or unset it for all cores"
            )
        number = min(number, int(limit))
    return max(1, int(min(number, *_quotas(Path("/proc/self/cgroup")))))


def _quotas(groups: Path, root: Path = Path("/sys/fs/cgroup")) -> Iterator[float]:
    """Yield the core quotas of this process's control group and of its parent groups."""
    yield math.inf
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = root / controllers / path.lstrip("/") if controllers else root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(root):
                yield _quota(folder)


def _quota(folder: Path) -> float:
    """Return the quota of one control group, of version 2 or 1; infinite if it has none."""
    try:
        if (file := folder / "cpu.max").is_file():
            quota, period = file.read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError):  # missing, or "max"
        return math.inf
