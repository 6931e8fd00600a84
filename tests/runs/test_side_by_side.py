"""Clients in several processes: the bits of one process, and faults that cost one reply."""

import json
import os
import signal
import time
from multiprocessing.connection import wait

import psutil
import pytest
import torch

from ravan_flwr import simulate
from ravan_flwr.client import answers
from ravan_flwr.launch import parallel_clients, workers
from ravan_flwr.launch.workers import ForkStarter, SpawnStarter
from ravan_flwr.methods import METHODS as LISTED
from ravan_flwr.runs.checkpoint import load_checkpoint
from ravan_flwr.specs import Scalar
from ravan_flwr.training.machine import CORES
from testing import ROOT

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="workers fork on Linux"),
    pytest.mark.forks,
]

SMALL: dict[str, Scalar] = {
    "num-rounds": 2, "local-steps": 1, "batch-size": 8, "clients-per-round": 4, "report": False,
    "tracking": "none", "eval-every": 2,
}  # fmt: skip
METHODS: list[dict[str, Scalar]] = [
    {"method": "ravan", "budgets": "skewed-right", "wire": "int8", "over-sample": 1.5},
    {"method": "fedit", "evaluate-on": "clients", "validation-share": 0.2},
    {"method": "fed-sb"},
    {"method": "full", "server-optimizer": "adam"},
]
MIXED = ("hetlora", "flexlora", "raflora", "flora", "fed-plora")  # as RAVAN
SMALL_ONES: dict[str, Scalar] = {"budgets": "uniform"}
AVERAGED: dict[str, Scalar] = {"weighting": "median", "server-optimizer": "momentum"}
METHODS += [
    {
        "method": name,
        **(AVERAGED if listed.averages else {}),
        **(SMALL_ONES if name in MIXED else {}),
    }
    for name, listed in LISTED.items()
    if name not in {settings["method"] for settings in METHODS}
]


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    monkeypatch.setenv(CORES, "2")


def run(folder, number, **more):
    settings = SMALL | {"output-dir": str(folder / str(number)), "processes": number} | more
    return simulate(settings, 6)


def records(simulation):
    lines = (simulation.run_dir / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def timeless(simulation):
    """A run's records without the times in them."""
    found = records(simulation)
    for record in found:
        del record["seconds"], record["phases"], record["time"]
        for client in record["clients"]:
            del client["seconds"], client["span"]
    return found


def state(simulation):
    return load_checkpoint(simulation.run_dir / "checkpoints").state


def assert_same(one, other):
    assert timeless(one) == timeless(other)
    first, second = state(one), state(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


A_ROUND: dict[str, Scalar] = {"num-rounds": 1, "clients-per-round": 3}


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """The path of a preset of one's own."""
    path = tmp_path_factory.mktemp("preset") / "mine.yaml"
    path.write_text((ROOT / "conf" / "digits-vit.yaml").read_text())
    return str(path)


@pytest.fixture(scope="module")
def started_anew(preset, tmp_path_factory):
    """A run with two new processes, each of which has imported everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CORES, "2")
        patch.setattr(torch.accelerator, "is_available", lambda: True)  # so that none forks
        return run(tmp_path_factory.mktemp("anew"), 2, preset=preset, **A_ROUND)


@pytest.mark.parametrize("starter", [ForkStarter, SpawnStarter])
def test_workers_read_a_preset_that_its_path_names(starter, preset, request, tmp_path):
    if starter is SpawnStarter:
        two = request.getfixturevalue("started_anew")
    else:
        two = run(tmp_path, 2, preset=preset, **A_ROUND)
    assert two.summary["processes"] == 2
    assert two.summary["rejected"] == 0


def test_masked_rounds_in_two_processes_are_those_of_one(tmp_path):
    """Each worker answers more than two messages that bring the state and pieces beside it."""
    settings: dict[str, Scalar] = {"secure-aggregation": True, "clients-per-round": 6}
    one, two = (run(tmp_path, number, **settings) for number in (1, 2))
    assert two.summary["processes"] == 2
    assert two.summary["rejected"] == 0
    assert_same(one, two)


@pytest.mark.parametrize("settings", METHODS, ids=lambda settings: settings["method"])
def test_two_processes_give_the_bits_of_one(settings, tmp_path):
    one, two = (run(tmp_path, number, **settings) for number in (1, 2))
    at_work = 1 if LISTED[str(settings["method"])].pools else 2  # one client a round
    assert (one.summary["processes"], two.summary["processes"]) == (1, at_work)
    assert_same(one, two)


def test_auto_starts_workers_where_they_pay_and_gives_the_same_bits(tmp_path, monkeypatch, capsys):
    one = run(tmp_path, 1)
    tiny = run(tmp_path, "auto")
    assert tiny.summary["processes"] == 1
    monkeypatch.setattr(parallel_clients, "MIN_WORK", 0)
    long = run(tmp_path, "auto")
    assert long.summary["processes"] == 2
    assert "2 clients at a time, each in a process with 1 thread" in capsys.readouterr().out
    assert_same(one, tiny)
    assert_same(one, long)


def test_auto_leaves_a_core_alone_that_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.setenv(CORES, "1")
    monkeypatch.setattr(parallel_clients, "MIN_WORK", 0)
    assert run(tmp_path, "auto").summary["processes"] == 1


def faulty(monkeypatch, fault):
    """Let partition 1's first training meet a fault, in a worker."""
    train, server = answers._ANSWERS["train"], os.getpid()

    def trained(client):
        assert os.getpid() != server
        if (client.round, client.node.partition_id) == (1, 1):
            fault()
        return train(client)

    monkeypatch.setitem(answers._ANSWERS, "train", trained)


def rejected(simulation):
    return [[(one["client"], one["reason"]) for one in r["rejected"]] for r in records(simulation)]


def test_a_worker_that_is_killed_costs_its_clients_reply(tmp_path, monkeypatch):
    faulty(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    first, second = rejected(run(tmp_path, 2, **{"clients-per-round": 6}))
    ((client, reason),) = first
    assert client == "partition 1"
    assert "the process that computed it ended before it answered; memory" in reason
    assert second == []


def test_with_no_worker_left_clients_go_on_one_after_the_other(tmp_path, monkeypatch, capsys):
    """Somebody ends all processes but the server's: at most the clients at work are lost."""
    train, server = answers._ANSWERS["train"], os.getpid()

    def trained(client):
        if os.getpid() != server:
            parent = psutil.Process(os.getppid())
            parent.suspend()  # it forks no other worker in the place of one that is killed first
            for one in (*parent.children(), parent):
                if one.pid != os.getpid():
                    one.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        return train(client)

    monkeypatch.setitem(answers._ANSWERS, "train", trained)
    first, second = rejected(run(tmp_path, 2, **{"clients-per-round": 6}))
    assert len(first) <= 2
    assert all("ended before it answered" in reason for _, reason in first)
    assert second == []
    told = capsys.readouterr().out
    assert "clients compute one after the other" in told
    assert "the process that forks workers has ended" in told


def test_an_error_is_told_as_with_one_process(tmp_path, monkeypatch):
    def fail():
        answers.log.warning("about to fail in %s", "a worker")
        raise ArithmeticError("no good")

    faulty(monkeypatch, fail)
    simulation = run(tmp_path, 2, **{"clients-per-round": 6})
    reason = "it failed with code 2: ArithmeticError: no good"
    assert rejected(simulation) == [[("partition 1", reason)], []]
    assert "about to fail in a worker" in (simulation.run_dir / "log.txt").read_text()


def test_a_hung_worker_costs_the_rounds_timeout(tmp_path, monkeypatch):
    """Time passes only where nobody else is waited for, so that no machine is too slow."""
    now, began, hangs = [0.0], time.monotonic(), tmp_path / "hangs"

    def hang():
        hangs.touch()
        time.sleep(3600)

    def wait_for_replies(busy, _):
        if len(busy) > 1 or now[0] or not hangs.exists():
            return wait(busy)
        now[0] = 7.0
        return []

    monkeypatch.setattr(workers, "wait", wait_for_replies)
    monkeypatch.setattr(time, "monotonic", lambda: began + now[0])
    faulty(monkeypatch, hang)
    more: dict[str, Scalar] = {"clients-per-round": 6, "round-timeout": 6.0}
    first, second = rejected(run(tmp_path, 2, **more))
    assert ("partition 1", "no reply within 6 s") in first
    assert second == []


@pytest.mark.parametrize(("threads", "forks"), [(1, True), (1, False), (2, True)])
def test_how_workers_are_started(threads, forks, tmp_path, monkeypatch):
    """A fork computes with one thread; a number that a user has set is kept."""

    def no_room(*_):
        raise OSError

    started = []
    for kind in (ForkStarter, SpawnStarter):
        monkeypatch.setattr(kind, "__init__", lambda *given: started.append(given))
        monkeypatch.setattr(kind, "close", lambda _: None)
    monkeypatch.setattr(parallel_clients, "WorkerPool", no_room)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: not forks)
    run(tmp_path, 2, **{"num-rounds": 1})
    ((starter, _, *given),) = started
    forked = forks and threads == 1
    assert isinstance(starter, ForkStarter if forked else SpawnStarter)
    assert given == ([] if forked else [None])  # OMP_NUM_THREADS is set: conftest.py


def test_workers_that_cannot_be_forked_are_started_anew(started_anew, preset, tmp_path):
    assert started_anew.summary["processes"] == 2
    assert_same(run(tmp_path, 1, preset=preset, **A_ROUND), started_anew)
    words = "ravan_flwr.launch.worker_process"
    assert not [p for p in psutil.Process().children() if words in p.cmdline()]


def test_processes_are_told_to_have_no_effect_in_flower(tmp_path, monkeypatch, capsys):
    from ravan_flwr.launch.in_process_grid import InProcessGrid

    monkeypatch.setattr(InProcessGrid, "in_process", False)
    assert "processes" not in run(tmp_path, 3, **{"num-rounds": 1, "clients-per-round": 1}).summary
    assert "no effect: processes=3; Flower's runtimes" in capsys.readouterr().out
