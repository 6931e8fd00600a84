"""A device keeps its privacy account in a file of its own, independently of its run state."""

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.replay_guard import ACCOUNT
from ravan_flwr.extras.example_privacy.account import open_account


def entries(state, run="1", partition=0):
    with open_account(state, run, partition) as book:
        found = [dict(entry) for entry in book.entries]
    assert all(entry.pop("run") == run for entry in found)
    return found


def write_entry(state, entry):
    with open_account(state, "1", 0) as book:
        book.write_entry(**entry)


def test_on_a_device_the_last_entry_is_in_both_places(on_a_device):
    state = RecordDict()
    assert entries(state) == []
    for number in (1, 2):
        write_entry(state, {"number": number, "of": [0.5]})
    assert entries(state) == 2 * [{"number": 2, "of": [0.5]}]
    assert entries(RecordDict()) == [{"number": 2, "of": [0.5]}]
    assert entries(RecordDict(), run="2") == entries(RecordDict(), partition=1) == []
    assert all(path.stat().st_mode & 0o077 == 0 for path in on_a_device.iterdir())


def test_an_incomplete_line_invalidates_no_other(on_a_device):
    write_entry(RecordDict(), {"number": 1})
    (path,) = on_a_device.iterdir()
    with path.open("ab") as file:
        file.write(b'{"number": 9')
    assert entries(RecordDict()) == [{"number": 1}]
    write_entry(RecordDict(), {"number": 2})
    assert entries(RecordDict()) == [{"number": 2}]
    path.write_bytes(b"[3]\n\xff\n")
    state = RecordDict({ACCOUNT: ConfigRecord({"run": "1", "number": 4})})
    assert entries(state) == [{"number": 4}]


def test_in_a_simulation_the_account_is_in_the_state_alone():
    state = RecordDict()
    write_entry(state, {"number": 1})
    assert entries(state) == [{"number": 1}]
    assert entries(RecordDict()) == []
