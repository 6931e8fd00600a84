"""One process at a time writes to a run directory, and a crash releases the lock."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from ravan_flwr.runs.lock import locked
from tests import short_runs

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
    message = f"resume = .* got a run that process {holder.pid} on .* is writing to"
    with pytest.raises(ValueError, match=message), locked(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_one_process_cannot_lock_twice_and_an_error_releases_the_lock(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path):  # noqa: PT012
        with pytest.raises(ValueError, match=f"process {os.getpid()} on"), locked(tmp_path):
            pass
        assert (tmp_path / "lock").exists()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
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
    refused = pytest.raises(ValueError, match="would each count only the")
    with refused, locked(tmp_path, needed=True):
        pass


@pytest.mark.slow
def test_two_processes_cannot_resume_one_run(tmp_path):
    def contents(folder):
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    run_dir = short_runs.run(tmp_path, num_rounds=1).run_dir
    before = contents(run_dir)
    with locked(run_dir), pytest.raises(ValueError, match="is writing to"):
        short_runs.run(tmp_path, resume=str(run_dir))
    assert contents(run_dir) == before
    assert short_runs.run(tmp_path, resume=str(run_dir)).summary["rounds"] == 2
