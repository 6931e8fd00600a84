"""Run server and clients in one process, for tests, studies and a single GPU.

ServerApp and ClientApp are those of Flower's runtimes; only the grid differs (in_process_grid.py).
"""

import tempfile
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from ravan_flwr import server_app
from ravan_flwr.config.keys import KEYS
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.launch.parallel_clients import clients_per_pass, start_pool
from ravan_flwr.launch.start import Start, read_start
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import Scalar
from ravan_flwr.training.machine import usable_cores


@dataclass(frozen=True)
class Simulation:
    """A finished run: its directory and its summary."""

    run_dir: Path
    summary: dict[str, Any]


def simulate(
    config: Mapping[str, Scalar | list[str]],
    num_clients: int | None = None,
    callbacks: Iterable[object] = (),
) -> Simulation:
    """Run the app in this process until the run has ended.

    Calls in several threads run one after the other.

    Args:
        config: Keys of the run config; one with several values, as `targets`, may have a list.
            Missing keys have the preset's values, or with `resume` the resumed run's. A relative
            `output-dir` is relative to the working directory, as is the default, `runs`.
        num_clients: Number of clients that share the data (default: the preset's).
        callbacks: Objects with hooks of `Callback`, called during the run.

    Returns:
        The run directory and the summary.
    """
    with _ONE_AT_A_TIME:
        return run(read_start(config, num_clients), callbacks)


# The runs of a process share a model and a log, so those of several threads take turns.
_ONE_AT_A_TIME = threading.RLock()


def run(start: Start, callbacks: Iterable[object] = ()) -> Simulation:
    """Run checked settings, as `simulate` does."""
    config, number = start.config, start.num_clients
    run_config = {key: spec.default for key, spec in KEYS.items()} | dict(start.run_config)
    context = Context(1, 0, {}, RecordDict(), run_config)
    if config.devices is None:
        grid = InProcessGrid(run_config, number)
    else:
        from ravan_flwr.launch.timed_grid import TimedGrid  # noqa: PLC0415 (few runs have one)

        grid = TimedGrid(run_config, number, config)
    with ExitStack() as stack:
        if config.secure_aggregation:
            keys = tempfile.TemporaryDirectory(prefix="ravan-flwr-keys-")
            grid.give_keys(Path(stack.enter_context(keys)))
        usable_cores()  # raises its errors here, before the run has a directory
        grid.start_pool = partial(start_pool, run_config, config, number)
        grid.clients_per_pass = partial(clients_per_pass, config, number)
        stack.callback(grid.close)
        server_app.run(grid, context, callbacks)
    run_dir = Path(str(context.state.config_records[server_app.RESULT]["run-dir"]))
    return Simulation(run_dir, RunDirectory(run_dir).read_json("summary.json"))
