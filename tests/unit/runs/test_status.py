"""The status of a run is read as it was written, or not at all."""

import json
import logging

import pytest

from ravan_flwr.runs.console import LOG_FILE, last_lines, logging_to
from ravan_flwr.runs.status import read_status, write_status
from tests.followed import node, status


def test_a_written_status_is_read(tmp_path):
    assert read_status(tmp_path) is None
    write_status(tmp_path, status())
    assert read_status(tmp_path) == status()
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    "damaged",
    [
        "", "{", "[]", "null", "7", "NaN", "[" * 100_000, "\x00\xff",
        {"doing": "training"},
        status(nodes=["x"]), status(nodes={}), status(nodes=[node(0, heard="now")]),
        status(nodes=[node(0, device=["cpu"])]), status(round=True), status(round=1.5),
        status(since="x"), status(asked=[None]), status(refused=[{"node": "1"}]),
    ],
)  # fmt: skip
def test_an_invalid_status_is_ignored(tmp_path, damaged):
    text = damaged if isinstance(damaged, str) else json.dumps(damaged)
    (tmp_path / "status.json").write_text(text, encoding="latin-1")
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 400])
def test_a_status_with_impossible_numbers_is_ignored(tmp_path, number):
    text = json.dumps(status(since=7.5)).replace("7.5", number)
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


def test_a_full_disk_does_not_affect_the_run(tmp_path):
    write_status(tmp_path / "file" / "below", status())
    (tmp_path / "plain").write_text("")
    write_status(tmp_path / "plain", status())  # the folder does not exist, and cannot be made
    assert read_status(tmp_path / "plain") is None


def test_log_lines_are_appended_during_the_run(tmp_path, monkeypatch):
    log = logging.getLogger("ravan_flwr")
    # pytest-xdist cannot forward half a character of any handler.
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [])
    level = log.level
    log.setLevel(logging.INFO)
    try:
        for word in ("one", "two"):  # a run, and one that continues it
            with logging_to(tmp_path):
                log.warning("said %s, half a character \ud800", word)
        log.warning("afterwards")
    finally:
        log.setLevel(level)
    lines = last_lines(tmp_path)
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "WARNING said one, half a character \\ud800", "WARNING said two, half a character \\ud800",
    ]  # fmt: skip


def test_an_unwritable_log_does_not_stop_the_run(tmp_path):
    (tmp_path / LOG_FILE).mkdir()
    with logging_to(tmp_path):
        logging.getLogger("ravan_flwr").warning("said")
    assert last_lines(tmp_path) == []


def test_the_last_complete_lines_of_a_long_log_are_read(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"".join(b"line %d \xff\n" % n for n in range(100_000)))
    lines = last_lines(tmp_path, most=5)
    assert lines == [f"line {n} \ufffd" for n in range(99_995, 100_000)]
    assert all(line.startswith("line ") for line in last_lines(tmp_path, most=10**6))
    assert len(last_lines(tmp_path, most=10**6)) < 10_000
