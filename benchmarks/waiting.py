"""Compute the fraction of time in which a GPU was idle, from PyTorch's own profile.

A profile is a trace of events: kernels and copies on the GPU, each with a start and a duration.
The GPU was busy in their union, since kernels of several streams overlap. A profiler slows down
the CPU and not the kernels, so that the busy time is compared with the time of the same work
without it.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ON_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}  # without its copies of the CPU's annotations


def busy_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the time in which at least one event of a trace was active on the GPU."""
    total = end = 0.0
    for start, duration in sorted(
        (float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ON_THE_GPU
    ):
        total += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return total / 1e6  # a trace counts microseconds


def waiting_share(events: Iterable[Mapping[str, Any]], seconds: float) -> float:
    """Return the fraction of this many seconds in which the GPU waited, from 0 to 1."""
    return min(1.0, max(0.0, 1 - busy_seconds(events) / seconds))


def kernels(events: Iterable[Mapping[str, Any]]) -> int:
    """Count the kernels, each of which the CPU launches, unless a graph does."""
    return sum(event.get("cat") == "kernel" for event in events)


def traced(work: Callable[[], object]) -> list[Mapping[str, Any]]:
    """Do some work under the profiler, and return the events of its trace."""
    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu]) as recorded:
        work()
        if gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events: list[Mapping[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events
