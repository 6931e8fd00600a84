"""Count the cores that this process may use: fewer than the machine has, in a container, say."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# Set in the environment by who runs several processes side by side: the cores for each of them.
CORES = "RAVAN_FLWR_CORES"


def usable_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Count by affinity, by the quota of the control group, and by what a study leaves to a run."""
    if hasattr(os, "sched_getaffinity"):
        number = len(os.sched_getaffinity(0))
    else:  # macOS
        number = os.cpu_count() or 1
    if share := environment.get(CORES, ""):
        number = min(number, _share(share))
    return max(1, int(min(number, *_quotas(Path("/proc/self/cgroup")))))


def _share(text: str) -> int:
    """Read how many cores the environment leaves to this process."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError(
            f"{CORES} = {text[:40]!r} in the environment: expected a number of cores, 1 or more; "
            "correct it, or unset it for all cores"
        )
    return int(text)


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
        if (both := folder / "cpu.max").is_file():
            quota, period = both.read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError):  # not there, or "max"
        return math.inf
