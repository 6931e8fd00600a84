"""Load a run's result from its directory: the model with the last checkpoint in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ravan_flwr.config.recorded import recorded_config
from ravan_flwr.runs.checkpoint import load_checkpoint, load_fixed
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.training.workbench import Workbench


@contextmanager
def result_of(run: Path | str) -> Iterator[Workbench]:
    """Build the workbench of a run; within the block its model holds the last round's state."""
    directory = RunDirectory.open(Path(run), "result")
    config = recorded_config(directory.read_config(), str(directory.path))
    bench = Workbench(config)
    state = load_checkpoint(directory.checkpoints).state
    fixed = load_fixed(directory.checkpoints)
    if fixed is not None:
        bench.model.load_fixed(fixed)
    with bench.model.holding(state):
        yield bench
