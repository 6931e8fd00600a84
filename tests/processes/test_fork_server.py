"""A fork and its proxy process behave as an ordinary process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.deployment import wait_for
from testing.network import Network, network_unavailable
from tests.fork_server import WORKER, ForkServer, fork_of

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
        ("import os; os._exit(5)", 5, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_the_proxy_ends_with_the_forks_status(bare, code, status, errors):
    ended = bare.run(["-c", code])
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", errors)


def test_a_fork_prints_its_traceback_and_runs_its_exit_handlers(bare):
    ended = bare.run(["-c", "import atexit; atexit.register(print, 'last'); 1 / 0"])
    assert (ended.returncode, ended.stdout) == (1, "last\n")
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


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


def test_only_the_fork_keeps_the_passed_files_open(bare):
    """File descriptors keep their numbers; a reader sees the end when the fork closes them."""
    pipes = [os.pipe() for _ in range(3)]
    numbers = [write_end for _, write_end in pipes]
    code = f"import os; [(os.write(n, b'%d' % n), os.close(n)) for n in {numbers}]; {SLEEPS}"
    with started(bare, code, pass_fds=numbers) as process:
        for read_end, write_end in pipes:
            os.close(write_end)
            with os.fdopen(read_end, "rb") as file:
                assert file.read() == b"%d" % write_end
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_reaches_the_fork(bare, number):
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, also by forks
    handler = "import signal, sys; signal.signal({0}, lambda *_: sys.exit(40)); " + SLEEPS
    with started(bare, handler.format(number.value)) as process:
        signal.signal(number, before)
        process.send_signal(number)
        assert process.wait() == 40


def test_an_ignored_signal_stays_ignored(bare):
    with started(bare, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait() == -signal.SIGTERM


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


def test_forks_end_with_the_server():
    with ForkServer([]) as server:
        process = started(server)
        fork = fork_of(process.pid)
    wait_for(lambda: not Path(f"/proc/{fork}").exists(), "the fork to be killed")
    assert process.wait() == 1
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def second(bare):
    """Start a server that is a fork of the other one, with one more module."""
    with ForkServer(["colorsys"], bare) as server:
        yield server


def test_a_server_may_be_a_fork_of_another_one(bare, second):
    code = "import sys; print('colorsys' in sys.modules)"
    assert [server.run(["-c", code]).stdout for server in (bare, second)] == ["False\n", "True\n"]
    code = "import os, sys; print(os.getpid() == os.getsid(0), sys.executable, sys.stdin.read())"
    forked = subprocess.run(
        [second.executable, "-c", code], input="in", capture_output=True, text=True
    )
    assert forked.stdout == f"True {second.executable} in\n", forked.stderr
    worker = str(Path(second.executable).with_name(WORKER))
    code = "import os, sys; print(sys.executable, os.getppid() == os.getsid(os.getppid()))"
    ended = subprocess.run([worker, "-c", code], capture_output=True, text=True)
    assert ended.stdout == f"{sys.executable} True\n", ended.stderr


@pytest.mark.parametrize("index", [0, 1])
def test_forks_end_with_either_of_two_servers(index):
    base = ForkServer([])
    servers = [base, ForkServer([], base)]
    process = started(servers[1])
    fork = fork_of(process.pid)
    servers[index].__exit__()
    wait_for(lambda: not Path(f"/proc/{fork}").exists(), "the fork to be killed")
    assert process.wait() == 1
    assert process.stdout is not None
    process.stdout.close()
    servers[1 - index].__exit__()


def test_a_worker_of_pytest_starts_processes_as_python_does(bare):
    """Its child processes are no forks, unless they are started as such."""
    code = "import os, sys; print(sys.executable, os.getppid() == os.getsid(os.getppid()))"
    worker = str(Path(bare.executable).with_name(WORKER))
    ended = subprocess.run([worker, "-u", "-c", code], capture_output=True, text=True)
    assert ended.stdout == f"{sys.executable} True\n", ended.stderr


def test_no_library_changes_a_forks_logging(python):
    """A handler of the root logger would write the lines of Flower's logger a second time."""
    code = "import logging; print(logging.root.handlers, logging.root.manager.disable)"
    ended = subprocess.run([python.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "[] 0\n", ended.stderr


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
