"""A node's description of itself: every field is sent and validated."""

import dataclasses

import pytest

from ravan_flwr.messages.registered_client import RegisteredClient, read_registered_client
from tests.hand_made import registered_client

# Keys that older nodes and servers send and read: none may be removed.
KEYS = {
    "partition-id": int, "num-partitions": int, "own-data": bool, "examples": int,
    "budget-fraction": float, "device": str, "free-memory": int, "versions": str, "code": str,
    "backbone": str, "fingerprint": list, "keeps-result": bool,
}  # fmt: skip


def test_every_field_is_sent_with_its_type():
    answer = registered_client().as_config()
    assert {key: type(value) for key, value in answer.items()} == KEYS
    assert len(KEYS) == len(dataclasses.fields(RegisteredClient)) - 1
    assert read_registered_client(1, answer) == registered_client()


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_another_type_is_refused(key):
    answer = registered_client().as_config()
    other = "x" if KEYS[key] is not str else 1
    with pytest.raises(ValueError, match=f"{key} is {other!r}, expected {KEYS[key].__name__}"):
        read_registered_client(1, answer | {key: other})
    if KEYS[key] is int:
        with pytest.raises(ValueError, match=f"{key} is True, expected int"):
            read_registered_client(1, answer | {key: True})
