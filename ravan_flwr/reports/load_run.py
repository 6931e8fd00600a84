"""Load a run's result from its directory: the model with the last checkpoint in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ravan_flwr.config.run_config import recorded_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.checkpoint import load_checkpoint, load_fixed, load_own_parts
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.training.model_and_data import ModelAndData


@contextmanager
def result_of(run: Path | str, client: int | None = None) -> Iterator[ModelAndData]:
    """Build the model and data of a run; within the block its model holds the last round's state.

    Where each client has a model of its own (`fedsa-lora`, `local`), `client` says whose it is, by
    its partition.
    """
    directory = RunDirectory.open(Path(run), "result")
    config = recorded_config(directory.read_config(), str(directory.path))
    _check_client(client, config.method)
    bench = ModelAndData(config)
    checkpoint = load_checkpoint(directory.checkpoints)
    own = None if client is None else _own_part(directory, checkpoint.round, client)
    fixed = load_fixed(directory.checkpoints)
    if fixed is not None:
        bench.model.load_fixed(fixed)
    with bench.model.holding(checkpoint.state, own):
        yield bench


def _check_client(client: int | None, method: str) -> None:
    """Raise ValueError where a client must be named and is not, or the other way round."""
    personalised = method in METHODS and METHODS[method].personalised
    if personalised and client is None:
        raise ValueError(
            f"method {method!r} has a model for each client, and none of the server's: got no "
            "client, expected the number of one; name it with --client N"
        )
    if not personalised and client is not None:
        raise ValueError(
            f"client = {client}: method {method!r} has one model for all, expected no client; "
            "leave it out"
        )


def _own_part(directory: RunDirectory, last_round: int, client: int) -> Tensors:
    """Read a client's own part of the model, as a run in one process has kept it."""
    parts = load_own_parts(directory.checkpoints, last_round)
    if parts is None:
        raise ValueError(
            f"client = {client}: {directory.checkpoints} has no clients-{last_round:06d}"
            ".safetensors, expected the clients' parts of the model, which runs in one process "
            "have alone; elsewhere they are on their devices, which deliver=true tells to keep "
            "their models"
        )
    if client not in parts:
        there = ", ".join(map(str, sorted(parts))) or "none"
        raise ValueError(
            f"client = {client}: it has no part of the model, since it has not trained; expected "
            f"one of {there}"
        )
    return parts[client]
