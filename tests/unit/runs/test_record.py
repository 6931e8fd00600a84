"""The types of a record match what a run writes and what readers require."""

from typing import Any, get_type_hints

import pytest

from ravan_flwr.runs.record import (
    ClientRecord,
    MaskedRecord,
    PrivacyRecord,
    Rejection,
    RoundRecord,
    check,
)
from ravan_flwr.runs.tracking import collect_numbers
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.update import Update
from tests.hand_made import registered_client

OPTIONAL = {
    "refused", "collapsed", "per-client", "began-anew", "more-not-eligible", "more-skipped",
    "privacy", "reached", "out-of-budget", "recounted", "secure", "link-bytes-estimate",
    "late",
}  # fmt: skip
SPENT: PrivacyRecord = {"epsilon": 2.5, "delta": 1e-5, "noise-multiplier": 1.0, "clip-norm": 0.1}


@pytest.fixture
def round_log():
    round_log = RoundLog(1, 4)
    update = Update(registered_client(), {}, 1.0, 0.5, skipped=2, bytes_up=7, steps=3, staleness=1)
    round_log.use(update, [[0, 1], [0, 2]], 8, (0.0, 2.5), "phone-entry")
    round_log.reject(registered_client(2, 1), "late")
    return round_log


def test_the_round_log_writes_every_key(round_log):
    record = round_log.record({"accuracy": 0.5})
    assert record.keys() == get_type_hints(RoundRecord).keys() - OPTIONAL
    assert [client.keys() for client in record["clients"]] == [get_type_hints(ClientRecord).keys()]
    assert [entry.keys() for entry in record["rejected"]] == [get_type_hints(Rejection).keys()]
    assert check(record, RoundRecord) is record  # so that a run can be resumed
    round_log.refused = "not finite"
    assert round_log.record({}).keys() == record.keys() | {"refused"}


def test_a_late_reply_is_no_second_rejection(round_log):
    round_log.note_late(registered_client(3, 2), "late: a reply to round 1")
    record = round_log.record({})
    assert record["late"] == [{"client": "partition 2", "reason": "late: a reply to round 1"}]
    assert [entry["client"] for entry in record["rejected"]] == ["partition 1"]
    assert check(record, RoundRecord) is record


def test_private_clients_out_of_budget_or_without_account_are_recorded(round_log):
    round_log.out_of_budget, round_log.recounted = [2, 3], [1, 0]
    record = round_log.record({}) | {"privacy": SPENT | {"unit": "example"}}
    assert (record["out-of-budget"], record["recounted"]) == ([2, 3], [0, 1])
    assert check(record, RoundRecord) is record


MASKED: MaskedRecord = {
    "clients": 5,
    "threshold": 4,
    "dropped": [2],
    "untrained": 0,
    "cut-off": 0.0,
}


@pytest.mark.parametrize(
    ("key", "kept", "numbers"),
    [("privacy", SPENT, {"epsilon": 2.5}), ("secure", MASKED, {"clients": 1})],
)
def test_a_private_or_secure_round_records_its_account_or_phases_and_no_loss(key, kept, numbers):
    options: Any = {"private": kept} if key == "privacy" else {"secure": kept}
    round_log = RoundLog(1, 4, **options)
    round_log.use(Update(registered_client(), {}, None, 0.5, bytes_up=7, steps=3), [[0]], 8)
    record: Any = round_log.record({})
    assert record[key] == kept
    assert "train-loss" not in record
    assert "train-loss" not in record["clients"][0]
    assert check(record, RoundRecord) is record
    found = collect_numbers(record)
    assert "train-loss" not in found
    assert found.items() >= numbers.items()
    assert key == "secure" or found == numbers


@pytest.mark.parametrize(
    "spent",
    [None, 3, [], {"epsilon": 1}, SPENT | {"epsilon": "<b>"}, SPENT | {"noise-cohort": "9"}],
    ids=str,
)
def test_an_invalid_account_is_refused(round_log, spent):
    record = round_log.record({}) | {"privacy": spent}
    with pytest.raises(ValueError, match="it has privacy"):
        check(record, RoundRecord)


@pytest.mark.parametrize("key", sorted(RoundRecord.__required_keys__))
def test_a_missing_key_that_resuming_needs_is_reported(round_log, key):
    record = round_log.record({})
    del record[key]
    with pytest.raises(ValueError, match=f"it has {key}: .*required"):
        check(record, RoundRecord)


@pytest.mark.parametrize(
    ("key", "odd"),
    [
        ("bytes-up", "x"), ("heads", None), ("selected", 7), ("selected", [["x"]]),
        ("selected", [[True]]), ("partition-id", "x"), ("seconds", "1"),
    ],
)  # fmt: skip
def test_an_invalid_client_is_refused(round_log, key, odd):
    record = round_log.record({})
    record["clients"][0][key] = odd
    with pytest.raises(ValueError, match=rf"it has clients\.0\.{key}"):
        check(record, RoundRecord)
