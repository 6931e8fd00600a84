"""Keep a delivered result on this device, and report to the server whether that succeeded."""

from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.client_request import ClientRequest, find_personal
from ravan_flwr.extras.delivery.device_result import save_result
from ravan_flwr.extras.delivery.parcel import confirmation, read_parcel, refusal
from ravan_flwr.messages.arrays import from_record

log = getLogger(__name__)


def keep_result(client: ClientRequest) -> RecordDict:
    """Write the run's result to this device; any failure is logged and reported to the server."""
    try:
        reply = _keep(client)
    except Exception as error:  # noqa: BLE001 (a full disk, damaged files, out of memory)
        folder = client.node.result_path or "(no result-path)"
        log.warning("the run's result is not kept in %s: %s", folder, error)
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):  # the server must not learn paths of a device
            reason = error.strerror or type(error).__name__
            text = f"its result-path cannot be written to: {reason}"
        reply = refusal(text)
    return RecordDict({"kept": ConfigRecord(reply)})


def _keep(client: ClientRequest) -> dict[str, Any]:
    node = client.node
    parcel = read_parcel(client.content.config_records["config"])
    if node.result_path is None:
        raise ValueError("its node config has no result-path")
    client.load_fixed_tensors()
    state = from_record(client.content.array_records["arrays"])
    personal = find_personal(client.context.state, client.loaded.model)
    if personal is None and client.loaded.model.personal_shapes():
        raise ValueError(
            "this device has no personal parameters: it has not trained in this run, or was "
            "started again since; expected deliver=true in a run in which it trains"
        )
    folder, writer = Path(node.result_path), str(node.partition_id)
    form = node.result_form
    return confirmation(
        parcel, save_result(folder, parcel, state, client.loaded, form, writer, personal)
    )
