"""Describe a node to the server, and check the description when it arrives."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast, get_origin

from ravan_flwr.messages.plain_text import plain, shown

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
    derived: tuple[float, ...]  # fingerprint of the tensors that the seed determines
    keeps_result: bool = False  # it has a folder for delivered results

    def as_config(self) -> dict[str, Any]:
        """Return the values of the answer's ConfigRecord; `read_registered_client` inverts it."""
        values = {key: getattr(self, name) for key, name, _ in _on_the_wire()}
        return values | {"derived": list(self.derived)}


def _on_the_wire() -> Iterator[tuple[str, str, type]]:
    """Yield each field that travels as (key, name, type); a message has its sender's id anyway."""
    for field in fields(RegisteredClient):
        if field.name != "node_id":
            kind = get_origin(field.type) or field.type
            key = field.name.replace("_", "-")
            yield key, field.name, list if kind is tuple else cast(type, kind)


def read_registered_client(
    node_id: int, answer: Mapping[str, Any], length: int | None = None
) -> RegisteredClient:
    """Return the client in an untrusted answer; raise ValueError if it is malformed.

    `length` is the number of values that its fingerprint `derived` must have.
    """
    for key, _, kind in _on_the_wire():
        if type(answer.get(key)) is not kind:
            raise ValueError(f"{key} is {shown(answer.get(key))}, expected {kind.__name__}")
    _check_values(answer, length)
    values = {name: answer[key] for key, name, _ in _on_the_wire()}
    texts = {name: plain(value, 200) for name, value in values.items() if isinstance(value, str)}
    return RegisteredClient(
        node_id=node_id, **values | texts | {"derived": tuple(values["derived"])}
    )


def _check_values(answer: Mapping[str, Any], length: int | None) -> None:
    """Raise ValueError for values of the right types that no honest node sends."""
    derived = answer["derived"]
    if length not in (None, len(derived)):
        raise ValueError(f"derived has {len(derived)} numbers, expected {length}")
    if not all(type(number) is float for number in derived):
        raise ValueError(f"derived is {shown(derived)}, expected float numbers")
    parts = answer["num-partitions"]
    if not 1 <= parts <= MOST_PARTITIONS:
        raise ValueError(f"num-partitions is {parts}, expected 1 to {MOST_PARTITIONS}")
    if not 0 <= answer["partition-id"] < parts:
        raise ValueError(
            f"partition-id is {answer['partition-id']}, expected 0 to {parts - 1} "
            "(num-partitions - 1)"
        )
    if not 1 <= answer["examples"] <= MOST_EXAMPLES:
        raise ValueError(
            f"examples is {answer['examples']}, expected at least 1 and at most {MOST_EXAMPLES}"
        )
    if not 0 < answer["budget-fraction"] <= 1:
        raise ValueError(
            f"budget-fraction is {answer['budget-fraction']}, expected above 0 and at most 1"
        )


def check_same_app(
    client: RegisteredClient, code: str, backbone: str, derived: Sequence[float]
) -> None:
    """Raise ValueError unless a client has the server's code, backbone and bases."""
    if client.code != code:
        raise ValueError(
            f"its ravan_flwr has fingerprint {client.code}, expected {code}: other files than the "
            "server's; in a simulation the SuperLink was started in another checkout, so end it "
            "and run again"
        )
    if client.backbone != backbone:
        raise ValueError(
            f"its backbone has fingerprint {client.backbone}, expected {backbone}: another model, "
            f"revision or library (it has {client.versions}); give it the server's"
        )
    check_derived(client.derived, derived, client.versions)


def check_derived(derived: object, expected: Sequence[float], versions: str = "") -> None:
    """Raise ValueError unless bases and classifier agree up to rounding."""
    numbers = derived if isinstance(derived, list | tuple) else ()
    same = len(numbers) == len(expected) and all(
        isinstance(g, float | int) and math.isclose(g, e, rel_tol=1e-4, abs_tol=1e-4)
        for g, e in zip(numbers, expected, strict=True)
    )
    if not same:
        raise ValueError(
            f"its bases have fingerprint {shown(list(numbers[:20]))}, expected {list(expected)}: "
            f"they were made from another seed, rank, scheme or library {versions}; give it the "
            "server's"
        )
