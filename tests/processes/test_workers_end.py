"""The processes of clients end with the run, however that ends."""

import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from testing.deployment import PATIENCE, wait_for
from tests.fork_server import fork_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="workers fork on Linux"),
    pytest.mark.xdist_group("fork server"),
]

LONG = [
    "num-rounds=100000", "local-steps=5", "batch-size=8", "report=false", "tracking=none",
    "num-clients=4", "processes=2",
]  # fmt: skip


def session(pid):
    """All processes of the session that a process leads, itself apart."""
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
    """A run with two workers, amid its rounds."""
    words = ["-m", "ravan_flwr", "simulate", *LONG, f"output-dir={tmp_path}/runs"]
    process = python.start(words, log=tmp_path / "log")

    def trains():
        assert process.poll() is None, (tmp_path / "log").read_text()
        return list(tmp_path.rglob("*.safetensors"))

    try:
        wait_for(trains, "a round")
        run = SimpleNamespace(pid=fork_of(process.pid), wait=process.wait)
        assert len(session(run.pid)) == 3  # two workers, and who forks them
        yield run
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_worker(number, training):
    os.kill(training.pid, number)
    assert training.wait(PATIENCE) == (-9 if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not session(training.pid), "the workers to end")


def test_control_c_goes_to_all_and_the_run_can_go_on(training, tmp_path, python):
    os.killpg(training.pid, signal.SIGINT)  # as a terminal does
    assert training.wait(PATIENCE) == 130
    wait_for(lambda: not session(training.pid), "the workers to end")
    told = (tmp_path / "log").read_text()
    assert "stopped; " in told
    assert "rejected" not in told
    assert "Traceback" not in told
    (run,) = (tmp_path / "runs").iterdir()
    rounds = len((run / "rounds.jsonl").read_text().splitlines())
    again = [*LONG[1:], f"num-rounds={rounds + 1}", f"resume={run}"]
    done = python.run(["-m", "ravan_flwr", "simulate", *again])
    assert done.returncode == 0, done.stderr
    assert len((run / "rounds.jsonl").read_text().splitlines()) == rounds + 1


def test_who_is_killed_holds_the_runs_lock_no_longer(training, tmp_path, python):
    """Not even while a worker is stopped, so that it cannot end."""
    (worker, *_) = sorted(session(training.pid))[-1:]
    os.kill(worker, signal.SIGSTOP)
    os.kill(training.pid, signal.SIGKILL)
    training.wait(PATIENCE)
    (run,) = (tmp_path / "runs").iterdir()
    code = f"from pathlib import Path; from ravan_flwr.runs.lock import locked\n\
with locked(Path({str(run)!r})): print('free')"
    assert python.run(["-c", code]).stdout == "free\n"
    wait_for(lambda: not session(training.pid), "the workers to end")
