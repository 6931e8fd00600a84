"""Return in which runtime a grid's clients are: this process, Flower's simulation, a deployment."""

from typing import Any, cast

from flwr.serverapp import Grid

from ravan_flwr.flower_private import TaskType


def in_process(grid: Grid) -> bool:
    """Return whether clients run in this process, when their replies are fetched."""
    return bool(getattr(grid, "in_process", False))


def count_processes(grid: Grid) -> int | None:
    """Return the number of processes of an in-process run; None for Flower's runtimes."""
    return int(getattr(grid, "processes", 1)) if in_process(grid) else None


def drop_message(grid: Grid, message_id: str) -> None:
    """Forget a message of an in-process run whose reply will not be pulled; it has arrays."""
    cast(Any, grid).drop(message_id)


def simulating(grid: Grid) -> bool:
    """Return whether clients are simulated, in process or by Flower: they have this setup, too."""
    return in_process(grid) or grid.run.primary_task_type == TaskType.SIMULATION
