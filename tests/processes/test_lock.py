"""One process at a time writes to a run directory, and a crash releases the lock."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from ravan_flwr import simulate
from ravan_flwr.runs.lock import locked
from ravan_flwr.specs import Scalar

SMALL: dict[str, Scalar] = {
    "num-rounds": 1, "local-steps": 1, "batch-size": 8, "report": False, "tracking": "none",
    "eval-every": 1,
}  # fmt: skip

HOLDER = """
import sys, time
from pathlib import Path
from ravan_flwr.runs.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Start another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_error_names_the_holder_and_a_crash_releases_the_lock(tmp_path, holder):
    message = (
        rf"resume = .* got a run that process {holder.pid} on .* is writing to, expected .*; wait"
    )
    with pytest.raises(ValueError, match=message), locked(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_an_error_releases_the_lock_and_leaves_no_file(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_one_process_cannot_lock_twice(tmp_path):
    with locked(tmp_path):
        with pytest.raises(ValueError, match=f"process {os.getpid()} on"), locked(tmp_path):
            pass
        assert (tmp_path / "lock").exists()
    with locked(tmp_path):
        pass


def test_a_process_that_waits_for_a_removed_file_locks_the_new_one(tmp_path, monkeypatch):
    """The holder removes the file after this process opened it and before it locks it."""
    calls: list[int] = []
    real = fcntl.flock

    def late(descriptor, operation):
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(descriptor)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2
        with pytest.raises(ValueError, match="is writing to"), locked(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_filesystem_without_locks_gives_a_warning_only(number, tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass
    assert f"cannot be locked ([Errno {number}] {os.strerror(number)}): make sure" in caplog.text
    with (
        pytest.raises(ValueError, match="would each count only the"),
        locked(tmp_path, needed=True),
    ):
        pass


@pytest.mark.slow
def test_two_processes_cannot_resume_one_run(tmp_path):
    run = simulate(SMALL | {"output-dir": str(tmp_path)}, 3)
    before = {p: p.read_bytes() for p in run.run_dir.rglob("*") if p.is_file()}
    more = SMALL | {"num-rounds": 2, "resume": str(run.run_dir)}
    with locked(run.run_dir), pytest.raises(ValueError, match="is writing to"):
        simulate(more, 3)
    assert {p: p.read_bytes() for p in run.run_dir.rglob("*") if p.is_file()} == before
    assert simulate(more, 3).summary["rounds"] == 2
