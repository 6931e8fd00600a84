"""The log of a run is in its directory."""

import logging

from ravan_flwr.runs.console import LOG_FILE, logging_to


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
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "WARNING said one, half a character \\ud800", "WARNING said two, half a character \\ud800",
    ]  # fmt: skip


def test_an_unwritable_log_does_not_stop_the_run(tmp_path):
    (tmp_path / LOG_FILE).mkdir()
    with logging_to(tmp_path):
        logging.getLogger("ravan_flwr").warning("said")
    assert (tmp_path / LOG_FILE).is_dir()
