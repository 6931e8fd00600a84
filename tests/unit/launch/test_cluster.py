"""Which Ray cluster a simulation joins, what its machines have, and what is said of one that fails.

`tests/flower/test_cluster.py` has a real one.
"""

import json
import socket
from typing import Any

import pytest

from ravan_flwr.cli import main
from ravan_flwr.launch import cluster as clusters
from ravan_flwr.launch import superlink
from ravan_flwr.launch.cluster import Cluster, Machine, find_cluster
from ravan_flwr.launch.sharing import share_gpus
from ravan_flwr.training.machine import Gpu
from tests import ROOT

GB = 10**9


@pytest.fixture
def listening():
    """The address of something that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent():
    """An address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def started(folder, address):
    """What the last `ray start` leaves, in a temporary folder of Ray's."""
    (folder / "ray").mkdir(exist_ok=True)
    (folder / "ray" / "ray_current_cluster").write_text(address)
    return {"RAY_TMPDIR": str(folder)}


def answer(name, cpus=4, gpus=0, cards=(), code="c0de", **other) -> dict[str, Any]:
    """What a machine says of itself."""
    listed = [
        {"index": str(i), "uuid": f"GPU-{i}", "name": "H100", "total": size, "free": size}
        for i, size in enumerate(cards)
    ]
    return {"name": name, "cpus": cpus, "gpus": gpus, "cards": listed, "code": code, **other}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a shell script in the place of the program that asks the machines."""

    def write(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(path))

    return write


def test_without_a_cluster_the_machine_is_alone(tmp_path, silent):
    assert find_cluster({"RAY_TMPDIR": str(tmp_path)}) is None
    assert find_cluster({"RAY_ADDRESS": "local", **started(tmp_path, "10.0.0.1:6379")}) is None
    # As Ray does: the cluster that was started last has ended, so that it starts its own.
    assert find_cluster(started(tmp_path, silent)) is None
    assert find_cluster(started(tmp_path, "")) is None
    assert find_cluster(started(tmp_path, "\x00 no address")) is None


ALONE = "start it .* or join it .* or unset RAY_ADDRESS for a run on this machine alone"


@pytest.mark.parametrize(
    "address",
    [
        "ray://10.0.0.1:10001", "10.0.0.1", ":6379", "10.0.0.1:port", "10.0.0.1:70000",
        "no such host.invalid:6379",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_is_told(address, tmp_path):
    told = f"RAY_ADDRESS = '{address}': nothing answers at {address}, expected HOST:PORT"
    with pytest.raises(ValueError, match=f"^{told} .*{ALONE}$"):
        find_cluster({"RAY_ADDRESS": address, "RAY_TMPDIR": str(tmp_path)})


def test_a_cluster_that_does_not_answer_is_told(silent, tmp_path):
    for environment, place in (
        ({"RAY_ADDRESS": silent}, silent),
        ({"RAY_ADDRESS": "auto", **started(tmp_path, silent)}, silent),
        ({"RAY_ADDRESS": "auto", "RAY_TMPDIR": str(tmp_path / "none")}, "the last `ray start`"),
    ):
        with pytest.raises(ValueError, match=f"nothing answers at {place}, expected .*{ALONE}$"):
            find_cluster(environment)


def test_the_machines_are_asked(listening, tmp_path, program):
    answers = [answer("10.0.0.1", cpus=2), answer("10.0.0.2", 6, 1, [80 * GB, 40 * GB])]
    program(f"echo some words of Ray\necho '{json.dumps(answers)}'")
    for environment in ({"RAY_ADDRESS": listening}, started(tmp_path, listening)):
        found = find_cluster(environment)
        assert found is not None
        assert (found.address, found.cpus) == (listening, 8)
        # Ray may use one of the two cards, and which is unknown.
        assert [gpu.free for gpu in found.gpus] == [40 * GB]
        assert found.told() == f"the Ray cluster at {listening}: 2 machines, 8 CPUs, 1 GPU\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "printf 'Trace:\\n  x\\nRuntimeError: Version mismatch:\\n  Ray: 2.54\\n' >&2\nexit 1",
            r"\(RuntimeError: Version mismatch: Ray: 2.54\)",
        ),
        ("echo killed >&2; exit 1", r"\(killed\)"),
        ("exit 3", r"\(status 3\)"),
        ("exec sleep 60", r"\(no answer within 0.2 s\)"),
    ],
)
def test_a_cluster_that_cannot_be_asked_is_told(script, message, listening, program, monkeypatch):
    monkeypatch.setattr(clusters, "ASK_TIMEOUT", 0.2 if "sleep" in script else 60)
    program(script)
    with pytest.raises(ValueError, match=f"cannot be asked .*{message}.*RAY_ADDRESS=local"):
        find_cluster({"RAY_ADDRESS": listening})


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            [answer("a"), {"name": "b", "cpus": 1, "gpus": 0, "problem": "ModuleNotFoundError: x"}],
            r"machine b of .* cannot run this app \(ModuleNotFoundError: x\), expected ravan-flwr",
        ),
        ([answer("a"), answer("b", code="0ther")], "machines b of .* have another ravan-flwr than"),
        ([answer("a", cpus=0), answer("b", cpus=0)], "has no CPU for a client"),
    ],
)
def test_machines_that_cannot_run_the_clients_are_told(answers, message, listening, program):
    program(f"echo '{json.dumps(answers)}'")
    with pytest.raises(ValueError, match=message):
        find_cluster({"RAY_ADDRESS": listening})


def machine(name, cpus, *cards):
    found = [Gpu(str(i), f"GPU-{i}", "H100", size, size) for i, size in enumerate(cards)]
    return Machine(name, cpus, len(found), tuple(found), "c0de")


def test_clients_share_what_the_cluster_has_and_not_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    nowhere = {"PATH": str(tmp_path)}  # no nvidia-smi on this machine

    def sharing(*machines, asked=None, runs=1, **settings):
        config = {"preset": "cifar100-vit-b16", "clients-per-round": 100, **settings}
        there = Cluster("10.0.0.1:6379", machines)
        return share_gpus(config, 100, asked, runs, nowhere, there)

    large, small = machine("a", 8, 80 * GB), machine("b", 8, 80 * GB, 12 * GB)
    # 16 CPUs keep five clients on each of three GPUs busy, or as many as fit on the smallest.
    assert sharing(machine("a", 8, 80 * GB), machine("b", 8, 80 * GB, 80 * GB)).clients_per_gpu == 6
    assert 1 <= sharing(large, small).clients_per_gpu < 6
    assert sharing(large, large, runs=4).clients_per_gpu == 2
    assert sharing(large, machine("b", 8), asked=3).clients_per_gpu == 3
    alone = sharing(machine("a", 8))
    assert (alone.clients_per_gpu, alone.told().count("\n")) == (0, 1)
    assert sharing(large, device="cpu").clients_per_gpu == 0
    with pytest.raises(ValueError, match=r"GPU 0 \(H100\) is too small"):
        sharing(large, machine("b", 8, 2 * GB))


class Submitted:
    """Stands for a SuperLink: takes the command's words, and runs nothing."""

    federation = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, _app, _run_config, federation):
        Submitted.federation = federation
        return "finished:completed"


def test_the_command_tells_of_the_cluster(listening, program, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(superlink, "LocalSuperLink", Submitted)
    monkeypatch.setenv("RAY_ADDRESS", listening)
    program(f"echo '{json.dumps([answer('10.0.0.1'), answer('10.0.0.2')])}'")
    main(["simulate", "--engine=flower", "num-clients=7"])
    told = capsys.readouterr().out
    assert f"the Ray cluster at {listening}: 2 machines, 8 CPUs, 0 GPUs\n" in told
    assert f"  export RAY_ADDRESS={listening}\n" in told
    assert Submitted.federation == "num-supernodes=7 client-resources-num-cpus=1"


def test_the_command_ends_where_the_cluster_does_not_answer(silent, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RAY_ADDRESS", silent)
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--engine=flower"])
    assert end.value.code == 2
    assert f"RAY_ADDRESS = '{silent}': nothing answers" in capsys.readouterr().err
