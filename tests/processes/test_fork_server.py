"""What stands for a process behaves as the process would."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.deployment import wait_for
from testing.network import Network, why_not
from tests.fork_server import WORKER, ForkServer, fork_of

SLEEPS = "import time; print('here', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def bare():
    """A fork server that has imported nothing."""
    with ForkServer([]) as server:
        yield server


def started(bare, code=SLEEPS, **options):
    command = [bare.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import os; os._exit(5)", 5, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_the_end_is_the_forks(bare, code, status, told):
    ended = bare.run(["-c", code])
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", told)


def test_an_error_and_what_is_left_to_do_at_the_end_are_told(bare):
    ended = bare.run(["-c", "import atexit; atexit.register(print, 'last'); 1 / 0"])
    assert (ended.returncode, ended.stdout) == (1, "last\n")
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_folder_environment_words_and_parent_are_those_that_were_given(bare, tmp_path):
    (tmp_path / "mine.py").write_text("said = 'imported'")
    code = (
        "import json, mine, os, sys; "
        "print(json.dumps([mine.said, os.getcwd(), dict(os.environ), sys.argv, os.getppid()]))"
    )
    given = {"PYTHONPATH": str(tmp_path), "A": "é", "LC_ALL": "C.UTF-8"}
    ended = bare.run(["-c", code, "one", "two"], environment=given, folder=tmp_path)
    told = json.loads(ended.stdout)
    assert told == ["imported", str(tmp_path), given, ["-c", "one", "two"], os.getpid()]


def test_files_that_were_given_are_the_forks_alone(bare):
    """By their numbers; what reads from them sees the end when the fork closes them."""
    pipes = [os.pipe() for _ in range(3)]
    numbers = [tells for _, tells in pipes]
    code = f"import os; [(os.write(n, b'%d' % n), os.close(n)) for n in {numbers}]; {SLEEPS}"
    with started(bare, code, pass_fds=numbers) as process:
        for told, tells in pipes:
            os.close(tells)
            with os.fdopen(told, "rb") as file:
                assert file.read() == b"%d" % tells
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_reaches_the_fork(bare, number):
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, also by forks
    handler = "import signal, sys; signal.signal({0}, lambda *_: sys.exit(40)); " + SLEEPS
    with started(bare, handler.format(number.value)) as process:
        signal.signal(number, before)
        process.send_signal(number)
        assert process.wait() == 40


def test_what_is_ignored_stays_ignored(bare):
    with started(bare, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_a_fork_dies_with_what_stands_for_it(bare):
    with started(bare) as process:
        fork = fork_of(process.pid)
        process.kill()
    wait_for(lambda: not Path(f"/proc/{fork}").exists(), "the fork to be killed")
    assert bare.run(["-c", "print('others go on')"]).stdout == "others go on\n"


def test_a_fork_that_the_server_started_is_dead_when_its_kill_was_waited_for(bare, tmp_path):
    process = bare.start(["-c", SLEEPS], log=tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text() == "here\n", "the fork to start")
    fork = fork_of(process.pid)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not Path(f"/proc/{fork}").exists()


def test_forks_die_with_the_server():
    with ForkServer([]) as server:
        process = started(server)
        fork = fork_of(process.pid)
    wait_for(lambda: not Path(f"/proc/{fork}").exists(), "the fork to be killed")
    assert process.wait() == 1
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def second(bare):
    """A server that is a fork of the other one, and has a module more."""
    with ForkServer(["colorsys"], bare) as server:
        yield server


def test_a_server_may_be_a_fork_of_another_one(bare, second):
    code = "import sys; print('colorsys' in sys.modules)"
    assert [one.run(["-c", code]).stdout for one in (bare, second)] == ["False\n", "True\n"]
    code = "import os, sys; print(os.getpid() == os.getsid(0), sys.executable, sys.stdin.read())"
    own = subprocess.run(
        [second.executable, "-c", code], input="in", capture_output=True, text=True
    )
    assert own.stdout == f"True {second.executable} in\n", own.stderr
    worker = str(Path(second.executable).with_name(WORKER))
    code = "import os, sys; print(sys.executable, os.getppid() == os.getsid(os.getppid()))"
    ended = subprocess.run([worker, "-c", code], capture_output=True, text=True)
    assert ended.stdout == f"{sys.executable} True\n", ended.stderr


@pytest.mark.parametrize("which", [0, 1])
def test_forks_die_with_either_of_two_servers(which):
    base = ForkServer([])
    servers = [base, ForkServer([], base)]
    process = started(servers[1])
    fork = fork_of(process.pid)
    servers[which].__exit__()
    wait_for(lambda: not Path(f"/proc/{fork}").exists(), "the fork to be killed")
    assert process.wait() == 1
    assert process.stdout is not None
    process.stdout.close()
    servers[1 - which].__exit__()


def test_a_process_of_pytest_is_a_python_like_any_other(bare):
    """What it starts is no fork, unless it asks for one."""
    code = "import os, sys; print(sys.executable, os.getppid() == os.getsid(os.getppid()))"
    worker = str(Path(bare.executable).with_name(WORKER))
    ended = subprocess.run([worker, "-u", "-c", code], capture_output=True, text=True)
    assert ended.stdout == f"{sys.executable} True\n", ended.stderr


def test_no_library_has_a_say_in_what_a_fork_logs(python):
    """Lines of Flower's logger would be written by the root's, too."""
    code = "import logging; print(logging.root.handlers, logging.root.manager.disable)"
    ended = subprocess.run([python.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "[] 0\n", ended.stderr


@pytest.mark.skipif(bool(why := why_not()), reason=why)
def test_forks_of_a_server_inside_are_in_the_namespaces_of_a_host(bare, tmp_path):
    kinds = ["net", "uts", "pid", "mnt"]

    def spaces(process):
        return [str(Path(f"/proc/{process}/ns/{kind}").readlink()) for kind in kinds]

    code = f"import os; print(*[os.readlink('/proc/self/ns/' + kind) for kind in {kinds}])"
    with Network(tmp_path, ["server"], bare.inside) as network:
        server = network.hosts["server"]
        told = server.run(f'python -c "{code}"').split()
        assert told == spaces(server.pid)
        assert not set(told) & set(spaces("self"))
