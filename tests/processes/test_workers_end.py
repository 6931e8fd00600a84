"""The client processes end with the run, whether it is killed or interrupted."""

import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from tests.fork_server import fork_of
from tests.support.deployment import ROUNDS_TIMEOUT, TIMEOUT, wait_for

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="workers fork on Linux"),
    pytest.mark.xdist_group("fork server"),
]

LONG = [
    "num-rounds=100000", "local-steps=5", "batch-size=8", "tracking=none",
    "num-clients=4", "processes=2",
]  # fmt: skip


def other_processes(pid):
    """Return the other processes of the session that `pid` leads."""
    found = []
    for other in psutil.pids():
        try:
            if other != pid and os.getsid(other) == pid:
                found.append(other)
        except ProcessLookupError:
            pass
    return found


@pytest.fixture
def training(tmp_path, python):
    """Start a run with two workers; yield it after its first round."""
    words = ["-m", "ravan_flwr", "simulate", *LONG, f"output-dir={tmp_path}/runs"]
    process = python.start(words, log=tmp_path / "log")

    def trains():
        assert process.poll() is None, (tmp_path / "log").read_text()
        return list(tmp_path.rglob("*.safetensors"))

    try:
        wait_for(trains, "a round", ROUNDS_TIMEOUT)
        run = SimpleNamespace(pid=fork_of(process.pid), wait=process.wait)
        assert len(other_processes(run.pid)) == 2
        yield run
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_run_ends_its_workers(number, training):
    os.kill(training.pid, number)
    assert training.wait(TIMEOUT) == (-9 if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not other_processes(training.pid), "the workers to end")


@pytest.mark.slow
def test_control_c_ends_run_and_workers_and_the_run_can_be_resumed(training, tmp_path, python):
    os.killpg(training.pid, signal.SIGINT)  # as a terminal does
    assert training.wait(TIMEOUT) == 130
    wait_for(lambda: not other_processes(training.pid), "the workers to end")
    log = (tmp_path / "log").read_text()
    assert "stopped; " in log
    assert "rejected" not in log
    assert "Traceback" not in log
    (run,) = (tmp_path / "runs").iterdir()
    rounds = len((run / "rounds.jsonl").read_text().splitlines())
    settings = [*LONG[1:], f"num-rounds={rounds + 1}", f"resume={run}"]
    done = python.run(["-m", "ravan_flwr", "simulate", *settings])
    assert done.returncode == 0, done.stderr
    assert len((run / "rounds.jsonl").read_text().splitlines()) == rounds + 1


@pytest.mark.slow
def test_a_killed_run_releases_its_lock(training, tmp_path, python):
    """Also while a worker is stopped, so that it cannot end before it continues."""
    (worker, *_) = sorted(other_processes(training.pid))[-1:]
    os.kill(worker, signal.SIGSTOP)
    os.kill(training.pid, signal.SIGKILL)
    training.wait(TIMEOUT)
    (run,) = (tmp_path / "runs").iterdir()
    code = f"from pathlib import Path; from ravan_flwr.runs.lock import locked\n\
with locked(Path({str(run)!r})): print('free')"
    assert python.run(["-c", code]).stdout == "free\n"
    os.kill(worker, signal.SIGCONT)
    wait_for(lambda: not other_processes(training.pid), "the workers to end")
