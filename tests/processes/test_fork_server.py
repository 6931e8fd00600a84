"""A fork and its proxy process behave as an ordinary process."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fork_server import ForkServer, fork_of
from tests.support.deployment import wait_for
from tests.support.network import Network, network_unavailable

SLEEPS = "import time; print('here', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def bare():
    """Start a fork server without imports."""
    with ForkServer([]) as server:
        yield server


def started(bare, code=SLEEPS, **options):
    command = [bare.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


@pytest.mark.parametrize(
    ("code", "status", "errors"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(5)", 5, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_the_proxy_ends_with_the_forks_status(bare, code, status, errors):
    ended = bare.run(["-c", code])
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ended.stderr.endswith(errors)
    assert bool(ended.stderr) == bool(errors)


def test_a_fork_has_the_proxys_folder_environment_arguments_and_parent(bare, tmp_path):
    (tmp_path / "mine.py").write_text("said = 'imported'")
    code = (
        "import json, mine, os, sys; "
        "print(json.dumps([mine.said, os.getcwd(), dict(os.environ), sys.argv, os.getppid()]))"
    )
    given = {"PYTHONPATH": str(tmp_path), "A": "é", "LC_ALL": "C.UTF-8"}
    ended = bare.run(["-c", code, "one", "two"], environment=given, folder=tmp_path)
    output = json.loads(ended.stdout)
    assert output == ["imported", str(tmp_path), given, ["-c", "one", "two"], os.getpid()]


def test_no_library_changes_a_forks_logging(python):
    """A handler of the root logger would write the lines of Flower's logger a second time."""
    code = "import logging; print(logging.root.handlers, logging.root.manager.disable)"
    ended = subprocess.run([python.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "[] 0\n", ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_reaches_the_fork(bare, number):
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, also by forks
    handler = "import signal, sys; signal.signal({0}, lambda *_: sys.exit(40)); " + SLEEPS
    with started(bare, handler.format(number.value)) as process:
        signal.signal(number, before)
        process.send_signal(number)
        assert process.wait() == 40


def wait_for_end(process, fork):
    """Wait until the fork is killed; its proxy ends with an error."""
    wait_for(lambda: not Path(f"/proc/{fork}").exists(), "the fork to be killed")
    assert process.wait() == 1
    assert process.stdout is not None
    process.stdout.close()


def test_forks_end_with_the_server():
    with ForkServer([]) as server:
        process = started(server)
        fork = fork_of(process.pid)
    wait_for_end(process, fork)


def test_a_fork_ends_with_its_proxy(bare):
    with started(bare) as process:
        fork = fork_of(process.pid)
        process.kill()
    wait_for(lambda: not Path(f"/proc/{fork}").exists(), "the fork to be killed")
    assert bare.run(["-c", "print('others go on')"]).stdout == "others go on\n"


def test_a_killed_fork_has_ended_when_wait_returns(bare, tmp_path):
    process = bare.start(["-c", SLEEPS], log=tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text() == "here\n", "the fork to start")
    fork = fork_of(process.pid)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not Path(f"/proc/{fork}").exists()


@pytest.mark.parametrize("index", [0, 1])
def test_forks_end_with_either_of_two_servers(index):
    base = ForkServer([])
    servers = [base, ForkServer([], base)]
    process = started(servers[1])
    fork = fork_of(process.pid)
    servers[index].__exit__()
    wait_for_end(process, fork)
    servers[1 - index].__exit__()


@pytest.mark.skipif(bool(reason := network_unavailable()), reason=reason)
def test_forks_of_a_server_in_a_host_have_the_hosts_namespaces(bare, tmp_path):
    kinds = ["net", "uts", "pid", "mnt"]

    def spaces(process):
        return [str(Path(f"/proc/{process}/ns/{kind}").readlink()) for kind in kinds]

    code = f"import os; print(*[os.readlink('/proc/self/ns/' + kind) for kind in {kinds}])"
    with Network(tmp_path, ["server"], bare.inside) as network:
        server = network.hosts["server"]
        namespaces = server.run(f'python -c "{code}"').split()
        assert namespaces == spaces(server.pid)
        assert not set(namespaces) & set(spaces("self"))
