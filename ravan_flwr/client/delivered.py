"""Keep the result of a run that the server delivers to this device."""

from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.client_request import ClientRequest
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.messages.parcel import kept, not_kept, read_parcel

log = getLogger(__name__)


def keep_delivered(client: ClientRequest) -> RecordDict:
    """Keep the run's result; whatever prevents that is told, and costs nothing else."""
    try:
        answer = _keep(client)
    except Exception as error:  # noqa: BLE001 (a full disk, what is damaged, memory that ran out)
        place = client.node.result_path or "(no result-path)"
        log.warning("the run's result is not kept in %s: %s", place, error)
        answer = not_kept(_without_paths(error))
    return RecordDict({"kept": ConfigRecord(answer)})


def _keep(client: ClientRequest) -> dict[str, Any]:
    from ravan_flwr.reports.device_result import keep_result  # noqa: PLC0415 (no round needs it)

    node = client.node
    parcel = read_parcel(client.content.config_records["config"])
    if node.result_path is None:
        raise ValueError("its node config has no result-path")
    client.take_fixed()
    state = from_record(client.content.array_records["arrays"])
    own = client.find_own()
    if own is None and client.bench.model.own_shapes():
        raise ValueError(
            "this device has no part of the model of its own: it has not trained in this run, or "
            "was started again since; expected deliver=true in a run in which it trains"
        )
    place, writer = Path(node.result_path), str(node.partition_id)
    form = node.result_form
    return kept(parcel, keep_result(place, parcel, state, client.bench, form, writer, own))


def _without_paths(error: Exception) -> str:
    """Tell an error to the server, which is told no paths of a device."""
    if isinstance(error, OSError):
        return f"its result-path cannot be written to: {error.strerror or type(error).__name__}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
