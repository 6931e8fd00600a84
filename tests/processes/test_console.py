"""The console: the module as a command, encodings, and closed pipes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_without_an_error_message(python):
    command = [python.executable, "-m", "ravan_flwr", "plan"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before the first line
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == 128 + 13  # the shell's status for SIGPIPE


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "ravan_flwr", "simulate", "sed=1"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path.home())
    assert ended.returncode == 2
    assert "did you mean 'seed'" in ended.stderr


LOGGING = """
import logging
from ravan_flwr.runs.console import log_to_stdout
log_to_stdout()
for number in range(2000):
    logging.getLogger("ravan_flwr").info("größer \\u2264 %d", number)
open("{done}", "w").close()
"""


def test_a_closed_stdout_does_not_end_a_program(tmp_path):
    closing = "log_to_stdout()\nimport sys\nsys.stdout.close()\nfor"
    code = LOGGING.replace("log_to_stdout()\nfor", closing)
    code = code.format(done=tmp_path / "done")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_characters_outside_the_consoles_encoding_are_escaped(encoding, tmp_path):
    code = LOGGING.format(done=tmp_path / "done")
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={"PYTHONIOENCODING": encoding},
        cwd=sys.path[0] or ".",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    first = ended.stdout.decode(encoding).splitlines()[0]
    shown = {"latin-1": "größer \\u2264 0", "ascii": "gr\\xf6\\xdfer \\u2264 0"}
    assert first == shown.get(encoding, "größer ≤ 0")


def test_a_closed_pipe_does_not_end_a_program_that_logs(tmp_path):
    code = LOGGING.format(done=tmp_path / "done")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        assert process.stderr.read() == b""
        assert process.wait() == 0
    assert (tmp_path / "done").exists()
