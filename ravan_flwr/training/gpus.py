"""Find the NVIDIA GPUs of this machine without PyTorch, which takes seconds to import.

`nvidia-smi` comes with the driver. Of the GPUs that it lists, CUDA uses those that
CUDA_VISIBLE_DEVICES names. It may number unequal GPUs in another order than `nvidia-smi` does;
nothing here depends on which of them is which.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
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
    uuid: str
    name: str
    total: int | None
    free: int | None


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """List the GPUs that a program started with this environment may use."""
    gpus = _listed(environment)
    chosen = environment.get(VISIBLE)
    if chosen is None or not gpus:
        return gpus
    found = []
    for word in chosen.split(","):
        gpu = _named(word.strip(), gpus)
        if gpu is None:  # CUDA sees nothing of what comes after it, either
            break
        found.append(gpu)
    return found


def _named(word: str, gpus: list[Gpu]) -> Gpu | None:
    """Find the GPU that a word of CUDA_VISIBLE_DEVICES means: an index, or the start of a UUID."""
    if word.startswith("MIG-"):  # a part of a GPU, of which nvidia-smi lists no memory
        return Gpu(word, word, "a part of a GPU (MIG)", None, None)
    is_uuid = word.startswith("GPU-")
    found = [g for g in gpus if (g.uuid.startswith(word) if is_uuid else g.index == word)]
    return found[0] if len(found) == 1 else None


def _listed(environment: Mapping[str, str]) -> list[Gpu]:
    """List all GPUs of the machine that the driver answers for."""
    lines = _ask(environment, f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits")
    return [_read(line) for line in lines]


def _read(line: str) -> Gpu:
    index, uuid, rest = (part.strip() for part in line.split(",", 2))
    name, total, free = (part.strip() for part in rest.rsplit(",", 2))
    return Gpu(index, uuid, name, _bytes(total), _bytes(free))


def _bytes(mebibytes: str) -> int | None:
    """Read a size in MiB; None for "[N/A]", of a GPU that has the machine's memory."""
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else None


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
    built_with_cuda: bool,
    driver: Path = DRIVER,
    environment: Mapping[str, str] = os.environ,
) -> str | None:
    """Say what GPUs a process on the CPU was not given, and what to do; None if there are none."""
    number = gpus_of_machine(driver, environment)
    if not number:
        return None
    if not built_with_cuda:
        reason = "this PyTorch is built without CUDA; install one that has it (pytorch.org)"
    elif "RAY_RAYLET_PID" in environment and not environment.get(VISIBLE, "all"):
        reason = (
            "the simulation gave this client none. `ravan-flwr run` asks for a share of them by "
            f"itself; with `flwr run` give {SHARE_FOR_EXAMPLE}"
        )
    elif VISIBLE in environment:
        reason = f"{VISIBLE}={environment[VISIBLE]!r} hides them; unset it, or name some there"
    else:
        reason = (
            "CUDA cannot use them; see whether nvidia-smi lists them, and start a container with "
            "--gpus all"
        )
    return (
        f"this process computes on the CPU, but the machine has {number} "
        f"GPU{'s' * (number > 1)}: {reason}. If the CPU is meant, device=cpu says so"
    )


@cache
def tell_of_unused_gpus(built_with_cuda: bool) -> None:
    """Log that GPUs are unused, once a process."""
    if told := unused_gpus(built_with_cuda):
        log.warning("%s", told)
