"""Describe a node to the server, and check the description when it arrives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ravan_flwr.messages.plain_text import plain, read_fields, shown

MOST_PARTITIONS = 1_000_000  # as many clients as a round can have
MOST_EXAMPLES = 2**48


@dataclass(frozen=True)
class RegisteredClient:
    """A node's description of itself.

    All fields but `node_id` travel, under the same names with hyphens.
    """

    node_id: int
    partition_id: int
    num_partitions: int
    own_data: bool  # not a partition of the preset's data
    examples: int
    budget_fraction: float  # of the adapter
    device: str
    free_memory: int  # bytes
    versions: str
    code: str  # fingerprint of this package's own files
    backbone: str  # fingerprint of the pretrained weights
    fingerprint: tuple[float, ...]  # of the model: of the tensors that the seed determines
    keeps_result: bool = False  # it has a folder for delivered results

    def as_config(self) -> dict[str, Any]:
        """Return the values of the answer's ConfigRecord; `read_registered_client` inverts it."""
        values = {name.replace("_", "-"): value for name, value in asdict(self).items()}
        del values["node-id"]
        return values | {"fingerprint": list(self.fingerprint)}


def read_registered_client(
    node_id: int, answer: Mapping[str, Any], length: int | None = None
) -> RegisteredClient:
    """Return the client in an untrusted answer; raise ValueError if it is malformed.

    `length` is the number of values that the fingerprint of its model must have.
    """
    values = read_fields(RegisteredClient, answer, "node_id")
    fingerprint, parts = values["fingerprint"], values["num_partitions"]
    if length not in (None, len(fingerprint)):
        raise ValueError(f"fingerprint has {len(fingerprint)} numbers, expected {length}")
    if not all(type(number) is float for number in fingerprint):
        raise ValueError(f"fingerprint is {shown(fingerprint)}, expected float numbers")
    for key, value, low, high in (
        ("num-partitions", parts, 1, MOST_PARTITIONS),
        ("partition-id", values["partition_id"], 0, parts - 1),
        ("examples", values["examples"], 1, MOST_EXAMPLES),
    ):
        if not low <= value <= high:
            raise ValueError(f"{key} is {value}, expected {low} to {high}")
    if not 0 < (fraction := values["budget_fraction"]) <= 1:
        raise ValueError(f"budget-fraction is {fraction}, expected above 0 and at most 1")
    texts = {name: plain(value, 200) for name, value in values.items() if isinstance(value, str)}
    return RegisteredClient(node_id=node_id, **values | texts | {"fingerprint": tuple(fingerprint)})


def partition_in(answer: Mapping[str, Any]) -> int | None:
    """Return the partition in an untrusted answer, also if the rest is not valid; None without."""
    number = answer.get("partition-id")
    return number if type(number) is int and 0 <= number < MOST_PARTITIONS else None


def check_same_code(code: str, expected: str) -> None:
    """Raise ValueError unless a client has the server's code."""
    if code != expected:
        raise ValueError(
            f"its ravan_flwr has fingerprint {plain(code, 200)}, expected {expected}: other files "
            "than the server's; install the server's version on the device; in a simulation the "
            "SuperLink was started in another checkout, so end it and run again"
        )


def check_same_model(client: RegisteredClient, backbone: str, fingerprint: Sequence[float]) -> None:
    """Raise ValueError unless a client has the server's backbone and bases."""
    if client.backbone != backbone:
        raise ValueError(
            f"its backbone has fingerprint {client.backbone}, expected {backbone}: another model, "
            f"revision or library (it has {client.versions}); copy the server's model to the "
            "device, and install the server's constraints.txt there"
        )
    check_fingerprint(client.fingerprint, fingerprint, client.versions)


def check_fingerprint(fingerprint: object, expected: Sequence[float], versions: str = "") -> None:
    """Raise ValueError unless bases and classifier agree up to rounding."""
    numbers = fingerprint if isinstance(fingerprint, list | tuple) else ()
    same = len(numbers) == len(expected) and all(
        isinstance(g, float | int) and math.isclose(g, e, rel_tol=1e-4, abs_tol=1e-4)
        for g, e in zip(numbers, expected, strict=True)
    )
    if not same:
        raise ValueError(
            f"its bases have fingerprint {shown(list(numbers[:20]))}, expected {list(expected)}: "
            f"they were made from another seed, rank, scheme or library {versions}; install the "
            "server's constraints.txt on the device"
        )
