"""A signal ends a command and all processes that it has started."""

import os
import pty
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from ravan_flwr.launch.superlink import LocalSuperLink, list_processes
from tests import ROOT
from tests.support.deployment import END_TIMEOUT, ROUNDS_TIMEOUT, TIMEOUT, copy_app, wait_for

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
    pytest.mark.xdist_group("fork server"),
]

LONG = ["num-rounds=100000", "local-steps=20", "tracking=none", "num-clients=3"]
STUDY = {
    "title": "Long", "num-clients": 3, "seeds": [0, 1],
    "settings": {"num-rounds": 100_000, "local-steps": 20},
    "tables": [{"title": "One", "rows": {"base": {}}}],
}  # fmt: skip
# The terminal of standard input becomes the session's, as in a terminal window.
IN_A_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); \
os.execv(sys.executable, [sys.executable, '-m', 'ravan_flwr', *sys.argv[1:]])"


@pytest.fixture
def folder():
    """Make a folder with a short path, for Ray's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s-") as name:
        yield Path(name)
        for pid in list_processes(Path(name)):
            os.kill(pid, signal.SIGKILL)


def environment(folder):
    """Return an environment that identifies processes, by TMPDIR also those of `flwr run`."""
    return os.environ | {"FLWR_HOME": str(folder / "home"), "TMPDIR": str(folder)}


@pytest.fixture
def start(python, folder):
    """Start a command as a fork; its child processes are forks as well."""
    app = copy_app(folder / "app")

    def start(*words):
        return python.start(
            ["-m", "ravan_flwr", *words], environment=environment(folder), log=folder / "log",
            folder=app,
        )  # fmt: skip

    return start


def records_in(folder):
    """Return the round logs of runs; Ray may remove its folders during the search."""
    with suppress(FileNotFoundError):
        return list(folder.rglob("rounds.jsonl"))
    return []


def wait_for_training(process, folder, number=1):
    """Wait until so many runs have a round on disk."""

    def trains():
        assert process.poll() is None, (folder / "log").read_text()
        return len(records_in(folder)) >= number

    wait_for(trains, "a round", ROUNDS_TIMEOUT)


def assert_nothing_is_left(folder):
    """Check that all processes end: the command has sent each a signal."""
    wait_for(lambda: not list_processes(folder), "the last process to end", END_TIMEOUT)


@pytest.mark.slow
def test_sigterm_ends_a_run_in_flower_and_all_of_its_processes(folder, start):
    process = start("simulate", "--engine=flower", *LONG, f"output-dir={folder}/runs")
    wait_for_training(process, folder)
    assert len(list_processes(folder)) > 5  # the SuperLink, Flower's, Ray's
    process.terminate()
    assert process.wait(TIMEOUT) == 128 + signal.SIGTERM
    assert_nothing_is_left(folder)
    assert "ravan-flwr: error: ended by SIGTERM" in (folder / "log").read_text()


@pytest.mark.slow
def test_a_terminal_that_closes_ends_a_run_in_flower(folder):
    """Python and Flower's commands are no forks here."""
    terminal, inside = pty.openpty()
    words = ["simulate", "--engine=flower", *LONG, f"output-dir={folder}/runs"]
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *words],
        env=environment(folder), cwd=copy_app(folder / "app"), start_new_session=True,
        stdin=inside, stdout=inside, stderr=inside,
    )  # fmt: skip
    os.close(inside)
    os.set_blocking(terminal, False)

    def trains():
        with suppress(BlockingIOError):
            os.read(terminal, 65536)  # a full terminal would block the process
        return bool(records_in(folder))

    wait_for(trains, "a round", ROUNDS_TIMEOUT)
    assert len(list_processes(folder)) > 5
    os.close(terminal)
    assert process.wait(TIMEOUT) != 0
    assert_nothing_is_left(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_simulation(number, folder, start):
    process = start("simulate", *LONG, f"output-dir={folder}/runs")
    wait_for_training(process, folder)
    process.send_signal(number)
    assert process.wait(TIMEOUT) == 128 + number
    assert_nothing_is_left(folder)
    assert f"ended by {number.name}" in (folder / "log").read_text()


@pytest.mark.slow
def test_a_signal_ends_a_study_with_its_runs(folder, start):
    (folder / "long.yaml").write_text(yaml.safe_dump(STUDY))
    arguments = [str(folder / "long.yaml"), f"--output={folder}/study", "--jobs=2"]
    process = start("study", *arguments)
    wait_for_training(process, folder, 2)
    assert len(list_processes(folder)) == 3  # the study, two runs
    process.terminate()
    assert process.wait(TIMEOUT) == 128 + signal.SIGTERM
    assert_nothing_is_left(folder)


@pytest.mark.slow
def test_an_ignored_sighup_does_not_end_a_run(folder, python):
    command = shlex.join(
        [python.executable, "-m", "ravan_flwr", "simulate", *LONG, f"output-dir={folder}/runs"]
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", f"trap '' HUP; exec {command}"],
            env=environment(folder), cwd=ROOT, stdout=log, stderr=log,
        )  # fmt: skip
    wait_for_training(process, folder)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.terminate()
    assert process.wait(TIMEOUT) == 128 + signal.SIGTERM


def test_a_superlink_that_is_interrupted_at_its_start_is_ended(monkeypatch):
    link = LocalSuperLink()

    def interrupted():
        while not list_processes(link.home):  # forked, but not yet the SuperLink's program
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(link, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        link.__enter__()
    assert list_processes(link.home) == []
    assert not link.home.exists()
