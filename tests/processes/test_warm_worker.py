"""The warm worker: the same bits as without it, and it ends with its owner."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import psutil
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from ravan_flwr.client import answers as client
from ravan_flwr.client import warm_worker
from ravan_flwr.client.on_device import find_socket_folder, is_on_a_device, private_folder
from ravan_flwr.config.run_config import read_config
from ravan_flwr.messages.arrays import FIXED, from_record, to_record
from ravan_flwr.training.model_and_data import ModelAndData
from tests import ROOT
from tests.fork_server import fork_of
from tests.support.deployment import wait_for

RUN_CONFIG = {"local-steps": 2, "batch-size": 8, "clients-per-round": 2, "init": "data-aware"}
BUSY = RUN_CONFIG | {"local-steps": 100_000}


@pytest.fixture
def home(tmp_path, monkeypatch):  # after tmp_path, which pytest makes in the usual folder
    """Make a new folder for the sockets; its path must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(folder)


@pytest.fixture
def owner(home, monkeypatch, python):
    """Start a fake of the process that starts client processes; wait for its workers' end."""
    monkeypatch.setattr(sys, "executable", python.executable)
    with subprocess.Popen(["sleep", "infinity"]) as process:
        monkeypatch.setattr(os, "getppid", lambda: process.pid)
        yield process
        process.kill()
        process.wait()
        wait_for(lambda: not workers(process.pid), "the worker to end with its owner")
        while warm_worker._started:
            warm_worker._started.pop().wait()


def workers(owner):
    """Return the workers of an owner."""
    words = {"ravan_flwr.client.warm_worker", str(owner)}
    processes = psutil.process_iter(["cmdline"])
    return [one.pid for one in processes if words <= set(one.info["cmdline"] or ())]


def context(run_config=RUN_CONFIG, **changes):
    config = {"partition-id": 1, "num-partitions": 2, "warm-worker": True} | changes
    return Context(
        run_id=1, node_id=7, node_config=config, state=RecordDict(), run_config=dict(run_config)
    )


def training_message(run_config=RUN_CONFIG):
    state = ModelAndData(read_config(run_config)).model.initial_state()
    config = ConfigRecord({"round": 1, "budget-fraction": 0.5})
    return RecordDict({"arrays": to_record(state), "config": config})


def comparable(reply):
    """Return a reply's contents, except seconds and free memory."""
    arrays = {k: from_record(v) for k, v in reply.array_records.items()}
    bits = {k: {n: t.numpy().tobytes() for n, t in v.items()} for k, v in arrays.items()}
    metrics = {k: dict(v) | {"seconds": 0} for k, v in reply.metric_records.items()}
    configs = {
        k: {key: v for key, v in record.items() if key != "free-memory"}
        for k, record in reply.config_records.items()
    }
    return bits, metrics, configs


COUNTED = """
import sys
from pathlib import Path
from ravan_flwr.client import warm_worker
from ravan_flwr.training import model_and_data
build = model_and_data.build_network
def build_and_print(*given):
    print("builds a network", flush=True)
    return build(*given)
model_and_data.build_network = build_and_print
here = warm_worker.Worker(Path(sys.argv[1]), int(sys.argv[2]))
print("listens", flush=True)
here.serve()
"""


@pytest.mark.slow
def test_warm_and_cold_replies_are_equal_and_a_run_builds_one_network(owner, python, tmp_path):
    socket, log = find_socket_folder() / f"{owner.pid}.sock", tmp_path / "log"
    python.start(["-c", COUNTED, str(socket), str(owner.pid)], log=log)
    wait_for(lambda: "listens" in log.read_text(), "the worker to listen")
    message = training_message()
    for kind, content in (("query", RecordDict()), ("train", message), ("train", message)):
        warm = warm_worker.ask(kind, content, context())
        assert comparable(warm) == comparable(client.answer(kind, content, context()))
    assert workers(owner.pid) == []  # that process has answered, and imported the libraries once
    assert log.read_text().count("builds a network") == 1
    another_run = context()
    another_run.run_id += 1
    warm_worker.ask("train", message, another_run)
    assert log.read_text().count("builds a network") == 2


def test_flower_stores_the_nodes_state_not_the_worker(owner):
    first, second, third = context(), context(), context()
    sent = training_message()
    fixed = client.answer("calibrate", sent, context()).array_records["arrays"]
    sent[FIXED] = ArrayRecord(dict(fixed))
    sent.config_records["config"]["fixed-hash"] = "0"
    for node_context in (first, second):
        with pytest.raises(ValueError, match=r"fixed tensors have hash \w+, expected 0"):
            warm_worker.ask("train", sent, node_context)
    del sent[FIXED]
    # Also after a failed reply, as Flower stores the state of its own processes.
    assert FIXED in second.state
    with pytest.raises(ValueError, match=r"fixed tensors have hash \w+, expected 0"):
        warm_worker.ask("train", sent, second)
    with pytest.raises(ValueError, match="this node does not have the fixed tensors 0"):
        warm_worker.ask("train", sent, third)


@pytest.mark.slow
def test_errors_are_the_same_as_without_a_worker(owner):
    for _ in range(2):
        with pytest.raises(ValueError, match="budget = 2: expected a number above 0"):
            warm_worker.ask("query", RecordDict(), context(budget=2))
        (pid,) = workers(owner.pid)
    with pytest.raises(RuntimeError, match="KeyError: 'arrays'"):
        warm_worker.ask(
            "train", RecordDict({"config": ConfigRecord({"budget-fraction": 1.0})}), context()
        )
    # Invalid input does not end the worker; after another error a new one starts.
    assert warm_worker.ask("query", RecordDict(), context())
    (other,) = workers(owner.pid)
    assert pid != other


CLIENT = """
import os, sys, tempfile
from flwr.app import RecordDict
from ravan_flwr.client import warm_worker
from tests.processes import test_warm_worker
tempfile.tempdir, os.getppid = sys.argv[1], lambda: int(sys.argv[2])
context = test_warm_worker.context(test_warm_worker.BUSY)
warm_worker.ask("train", test_warm_worker.training_message(), context)
"""


@pytest.fixture
def training_client(owner, home, python, tmp_path):
    """Start a client process that requests hours of training; yield once the worker trains."""
    warm_worker.ask("query", RecordDict(), context(BUSY))  # with all imports, and the examples
    (pid,) = workers(owner.pid)
    before = cpu_seconds(pid)
    process = python.start(["-c", CLIENT, str(home), str(owner.pid)], log=tmp_path / "asker")
    # Building the model takes less than a second; then it trains.
    wait_for(lambda: cpu_seconds(pid) > before + 2, "the worker to train")
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()


def cpu_seconds(pid):
    """Return the CPU time that a worker has used."""
    fields = Path(f"/proc/{fork_of(pid)}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_worker_that_is_killed_or_loses_its_client_is_replaced(owner, training_client):
    training_client.send_signal(signal.SIGKILL)
    wait_for(lambda: not workers(owner.pid), "the worker to end")
    assert warm_worker.ask("query", RecordDict(), context())
    (pid,) = workers(owner.pid)
    os.kill(fork_of(pid), signal.SIGKILL)  # its socket stays
    wait_for(lambda: not workers(owner.pid), "the worker to end")
    assert warm_worker.ask("query", RecordDict(), context())


@pytest.mark.slow
def test_a_working_worker_ends_with_its_owner(owner, home, training_client, tmp_path):
    owner.kill()
    wait_for(lambda: not workers(owner.pid), "the worker to end")
    assert training_client.wait() == 1
    assert "the warm worker ended before it answered" in (tmp_path / "asker").read_text()
    assert not list(home.rglob("*.sock"))


@pytest.mark.slow
def test_another_app_has_another_worker(owner, home, tmp_path, python):
    """Its code is in another folder, while this checkout is the working directory."""
    warm_worker.ask("query", RecordDict(), context())
    (old,) = workers(owner.pid)
    shutil.copytree(ROOT / "ravan_flwr", tmp_path / "ravan_flwr")
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    with (tmp_path / "ravan_flwr" / "client" / "answers.py").open("a") as file:
        file.write("\n_ANSWERS['query'] = lambda _: RecordDict({'other': ConfigRecord()})\n")
    program = f"""
import os, sys, tempfile
sys.path.insert(0, {str(tmp_path)!r})
from flwr.app import Context, RecordDict
from ravan_flwr.client import warm_worker
tempfile.tempdir, os.getppid = {str(home)!r}, lambda: {owner.pid}
node = {{"partition-id": 0, "num-partitions": 1}}
context = Context(run_id=2, node_id=7, node_config=node, state=RecordDict(), run_config={{}})
print(list(warm_worker.ask("query", RecordDict(), context)))
"""
    output = tmp_path / "told"
    assert python.start(["-c", program], log=output).wait() == 0, output.read_text()
    assert output.read_text() == "['other']\n"
    (new,) = workers(owner.pid)
    assert new != old


@pytest.mark.slow
def test_a_new_run_reads_its_examples_again(owner, tmp_path):
    """Also with the same settings: examples may have changed, and fixed bases are the old run's."""
    node_config = {"data-path": str(tmp_path)}
    images = [[[float(row == column) for column in range(8)] for row in range(8)]]

    def num_examples(number, run_id):
        table = {"image": images * number, "label": [1] * number}
        datasets.Dataset.from_dict(table).to_parquet(tmp_path / "digits.parquet")
        query_context = context(**node_config)
        query_context.run_id = run_id
        answer = warm_worker.ask("query", RecordDict(), query_context)
        return answer.config_records["client"]["examples"]

    assert [num_examples(10, 2), num_examples(20, 2), num_examples(30, 3)] == [10, 10, 30]
    assert len(workers(owner.pid)) == 1


def test_a_worker_of_a_device_counts_as_on_a_device(monkeypatch):
    """The message carries Flower's task id, without which a worker would assume a simulation."""
    monkeypatch.setattr(TaskIdentity, "_task_id", None)
    answer = RecordDict({"config": ConfigRecord({"told": 1})})
    on_device = []

    def record_call(*_):
        on_device.append(is_on_a_device())
        return answer

    monkeypatch.setattr(client, "answer", record_call)
    for number in (0, 77):
        header = {
            "message-type": "train", "run-id": 1, "node-id": 1, "run-config": {}, "task-id": number,
            "node-config": {"partition-id": 0, "num-partitions": 2},
        }  # fmt: skip
        warm_worker._compute_answer(header, RecordDict(), RecordDict(), new=False)
    assert on_device == [False, True]


def test_a_socket_needs_a_short_path(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(RuntimeError, match="set a shorter XDG_RUNTIME_DIR or TMPDIR"):
        find_socket_folder()


def test_an_idle_worker_ends(owner, home, python):
    program = (
        "import sys; from pathlib import Path; from ravan_flwr.client import warm_worker; "
        "warm_worker.IDLE_SECONDS = 1; "
        "warm_worker.Worker(Path(sys.argv[1]), int(sys.argv[2])).serve()"
    )
    path = home / "idle.sock"
    done = python.run(["-c", program, str(path), str(owner.pid)])
    assert (done.returncode, path.exists()) == (0, False)


def test_only_the_user_can_open_the_socket_in_a_folder_of_the_session(home, monkeypatch):
    folder = private_folder()
    assert (folder.parent, folder.stat().st_mode & 0o777) == (home, 0o700)
    assert private_folder() == folder
    session = home / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert private_folder() == session / "ravan-flwr"
    assert (session / "ravan-flwr").stat().st_mode & 0o777 == 0o700
    # A folder with wide permissions, as `sudo` leaves it, or none: as without the variable.
    session.chmod(0o755)
    assert private_folder().parent == home
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent/1000")
    assert private_folder().parent == home


@pytest.mark.parametrize("kind", ["wide", "link", "file", "another user's"])
def test_an_unsafe_existing_folder_is_replaced_by_a_new_one(kind, owner, home, caplog):
    existing = home / f"ravan-flwr-{os.getuid()}"
    if kind == "link":
        (home / "elsewhere").mkdir(mode=0o700)
        existing.symlink_to(home / "elsewhere")
    elif kind == "file":
        existing.touch(mode=0o600)
    else:
        existing.mkdir(mode=0o700)
        if kind == "wide":
            existing.chmod(0o777)
        elif os.getuid():
            pytest.skip("only root can give a folder away")
        else:
            os.chown(existing, 65534, 65534)
    folder = private_folder()
    assert f"{existing}: another user made it" in caplog.text
    assert folder != existing
    assert (folder.parent, folder.stat().st_mode & 0o777) == (home, 0o700)
    assert private_folder() == folder  # all of a SuperNode's processes use it
    if kind == "wide":
        for _ in range(2):
            assert warm_worker.ask("query", RecordDict(), context())
            assert len(workers(owner.pid)) == 1
