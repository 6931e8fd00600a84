"""A person at a console: the module as a command, any encoding, and enough seen."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT


def test_a_reader_who_has_seen_enough_ends_a_command_in_silence(python):
    command = [python.executable, "-m", "ravan_flwr", "plan"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before the first line
        told = process.stderr.read()
    assert told == b""
    assert process.returncode == 128 + 13  # as the shell tells of SIGPIPE


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "ravan_flwr", "simulate", "sed=1"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path.home())
    assert ended.returncode == 2
    assert "did you mean 'seed'" in ended.stderr


TALKS = """
import logging
from ravan_flwr.runs.console import log_to_stdout
log_to_stdout()
for number in range(2000):
    logging.getLogger("ravan_flwr").info("größer \\u2264 %d", number)
open("{done}", "w").close()
"""


def test_a_console_that_is_gone_ends_nothing(tmp_path):
    closing = "log_to_stdout()\nimport sys\nsys.stdout.close()\nfor"
    code = TALKS.replace("log_to_stdout()\nfor", closing)
    code = code.format(done=tmp_path / "done")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_a_console_shows_what_it_can(encoding, tmp_path):
    code = TALKS.format(done=tmp_path / "done")
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={"PYTHONIOENCODING": encoding},
        cwd=sys.path[0] or ".",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    first = told.stdout.decode(encoding).splitlines()[0]
    shown = {"latin-1": "größer \\u2264 0", "ascii": "gr\\xf6\\xdfer \\u2264 0"}
    assert first == shown.get(encoding, "größer ≤ 0")


def test_a_closed_pipe_ends_nothing(tmp_path):
    code = TALKS.format(done=tmp_path / "done")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        assert process.stderr.read() == b""
        assert process.wait() == 0
    assert (tmp_path / "done").exists()
