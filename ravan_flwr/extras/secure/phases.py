"""Answer the phases of a secure round without training, and keep the client's state between them.

Like client_app.py this imports no torch. The client's state is one JSON text in the node's state: a
phase reads it first and writes it last. The server never sees a node's state.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict

from ravan_flwr.config.node_config import Node
from ravan_flwr.extras.secure.agreement import Parts
from ravan_flwr.extras.secure.client import DistrustError, SecureClient, State
from ravan_flwr.extras.secure.node_keys import NodeKeys
from ravan_flwr.messages.records import DISTRUSTS, PIECES, read_pieces, to_pieces

log = getLogger(__name__)

SECURE = "secure-round"  # the record in a node's state

# The parts of each light phase's message, and the function that answers it.
_LIGHT_PHASES: dict[str, tuple[tuple[str, ...], Callable[[SecureClient, int, Parts], Parts]]] = {
    "keys": ((), lambda client, number, _: client.make_keys(number)),
    "shares": (("schedule", "roll"), SecureClient.share_secrets),
    "agree": (("alive",), SecureClient.agree),
    "unmask": (("signers", "signatures"), SecureClient.unmask),
}


def answer_phase(
    message_type: str, content: RecordDict, context: Context, node: Node
) -> RecordDict:
    """Return the reply to a message of a light phase."""
    names, phase = _LIGHT_PHASES[message_type]
    number = content.config_records["config"]["round"]
    if type(number) is not int:
        raise ValueError(f"got round {number!r}, expected a whole number")
    parts = read_pieces(pieces_in(content), names)
    try:
        with open_secure_client(context, node) as client:
            answer = phase(client, number, parts)
    except DistrustError as error:
        log.warning("this node takes no part in round %d: %s", number, error)
        answer = {DISTRUSTS: json.dumps(error.partitions).encode()}
    return RecordDict({"arrays": to_pieces(answer), "metrics": MetricRecord({"round": number})})


def pieces_in(content: RecordDict) -> ArrayRecord:
    """Return the pieces of a message."""
    return content.array_records.get(PIECES, ArrayRecord())


def check_keys(node: Node) -> None:
    """Raise ValueError unless this node has the keys of secure aggregation."""
    node_keys(node).public()


def node_keys(node: Node) -> NodeKeys:
    """Return this node's keys; ValueError if its node config has no secure-keys."""
    if node.secure_keys is None:
        raise ValueError(
            "secure-aggregation = true: this node has no secure-keys in its node config, expected "
            "the folder that `ravan-flwr keys` made; set it, or secure-aggregation=false"
        )
    return NodeKeys(Path(node.secure_keys), node.partition_id)


@contextmanager
def open_secure_client(context: Context, node: Node) -> Iterator[SecureClient]:
    """Open the client of a secure round for one phase, and store its state afterwards.

    The state is stored after an error, too: a failed phase cannot be repeated.
    """
    record = context.state.config_records.get(SECURE, ConfigRecord())
    state: State = json.loads(str(record.get("state", "{}")), object_hook=_with_bytes)
    keys = node_keys(node)
    try:
        yield SecureClient(state, context.run_id, node.partition_id, keys)
    finally:
        context.state[SECURE] = ConfigRecord(
            {"state": json.dumps(state, default=lambda data: {"hex": data.hex()})}
        )


def _with_bytes(data: dict[str, Any]) -> Any:
    """Return {"hex": ...} as bytes, and other objects unchanged."""
    return bytes.fromhex(data["hex"]) if "hex" in data else data
