"""The console: the module as a command, encodings, and closed pipes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


def without_a_reader(command, lines):
    """Start a command, and close its output after so many lines; return its status and errors."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    return process.returncode, errors


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_without_an_error_message(python):
    of_sigpipe = 128 + 13  # the shell's status for it
    command = [python.executable, "-m", "ravan_flwr", "plan"]
    assert without_a_reader(command, 0) == (of_sigpipe, b"")


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


# `ravan-flwr simulate --engine=flower` with a fake SuperLink.
SIMULATE = """
from ravan_flwr.cli import main
from ravan_flwr.launch.superlink import LocalSuperLink, write_stdout
def run(*_):
    for number in range(2000):
        write_stdout(f"round {{number}}\\n")
    open("{done}", "w").close()
    return "finished:completed"
LocalSuperLink.run, LocalSuperLink.__enter__ = run, lambda link: link
main(["simulate", "--engine=flower"])
"""


@pytest.mark.parametrize("program", [LOGGING, SIMULATE])
def test_a_closed_pipe_does_not_end_a_program(program, tmp_path):
    """As with `| head -1`, also while Flower runs the simulation."""
    code = program.format(done=tmp_path / "done")
    assert without_a_reader([sys.executable, "-c", code], 1) == (0, b"")
    assert (tmp_path / "done").exists()
