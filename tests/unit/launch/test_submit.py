"""Errors of `flwr run` and `flwr ls` are reported with what these commands printed."""

import os

import pytest

from ravan_flwr.launch.submit import submit

RUN = 'echo "Successfully started run 17"'


@pytest.fixture
def flwr(tmp_path, monkeypatch):
    """Put a `flwr` on the path, whose two commands each test writes."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(run, ls):
        path = folder / "flwr"
        path.write_text(f'#!/bin/sh\ncase "$1" in\nrun) {run};;\nls) {ls};;\nesac\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return write


def submitted(tmp_path):
    return submit(tmp_path, "edge", "", os.environ)


def test_the_status_of_a_run_is_what_flower_lists(flwr, tmp_path, capsys):
    empty = r"printf '\033[92mINFO \033[0m:      \nINFO :   line\nINFO :      \n'"
    flwr(f"{RUN}; {empty}", """echo '{"runs": [{"status": "finished:completed"}]}'""")
    assert submitted(tmp_path) == "finished:completed"
    assert capsys.readouterr().out == "Successfully started run 17\nINFO :   line\n"


@pytest.mark.parametrize(
    "ls",
    [
        "echo 'cannot reach the SuperLink' >&2; exit 1",
        "echo 'cannot reach the SuperLink'",
        """echo '{"runs": []}'; echo 'cannot reach the SuperLink' >&2""",
    ],
)
def test_a_run_that_flower_does_not_list_is_reported(flwr, tmp_path, ls):
    flwr(RUN, ls)
    with pytest.raises(RuntimeError, match=r"(?s)flwr ls edge --run-id 17 .*cannot reach"):
        submitted(tmp_path)


def test_a_run_that_does_not_start_is_reported(flwr, tmp_path):
    flwr("echo refused; exit 2", "exit 1")
    with pytest.raises(RuntimeError, match="ended with status 2 before the run"):
        submitted(tmp_path)


def test_a_stream_that_breaks_off_does_not_say_that_the_run_has_not_started(flwr, tmp_path):
    """A lost connection to the SuperLink ends `flwr run --stream`, and no run."""
    flwr(f"{RUN}; echo 'connection lost' >&2; exit 1", "exit 1")
    with pytest.raises(RuntimeError, match="status 1 after run 17 .*`flwr ls edge --run-id 17`"):
        submitted(tmp_path)
