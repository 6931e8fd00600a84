"""Clients in several processes: the bits of one process, and faults that lose one reply."""

import os
import signal
import time
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ravan_flwr.client import answers, client_request
from ravan_flwr.launch import parallel_clients, workers
from ravan_flwr.methods import METHODS as ALL_METHODS
from ravan_flwr.runs.checkpoint import load_checkpoint
from ravan_flwr.training.machine import CORES
from tests import short_runs
from tests.short_runs import records_of, records_without_times, same_bits
from tests.support import ROOT

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="workers fork on Linux"),
    pytest.mark.forks,
]

METHODS: list[dict[str, Any]] = [
    {"method": "ravan", "budgets": "skewed-right", "wire": "int8", "over-sample": 1.5},
    {"method": "fedit", "evaluate-on": "clients", "validation-share": 0.2},
    {"method": "fed-sb"},
    {"method": "full", "server-optimizer": "adam"},
]
# Other methods that adapt to budgets, as RAVAN.
WITH_SMALL_BUDGETS = (
    "hetlora", "flexlora", "raflora", "flora", "florist", "fed-plora", "fslora",
)  # fmt: skip
AVERAGED: dict[str, Any] = {"weighting": "median", "server-optimizer": "momentum"}
METHODS += [
    {"method": name}
    | (AVERAGED if listed.averages else {})
    | ({"budgets": "uniform"} if name in WITH_SMALL_BUDGETS else {})
    for name, listed in ALL_METHODS.items()
    if name not in {settings["method"] for settings in METHODS}
]
ONE_ROUND = {"num-rounds": 1, "clients-per-round": 3}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    monkeypatch.setenv(CORES, "2")


def run(folder, processes, **more):
    settings = {"local-steps": 1, "clients-per-round": 4, "eval-every": 2, "processes": processes}
    return short_runs.run(folder / str(processes), 6, settings, **more)


def assert_same(simulation, other):
    assert records_without_times(simulation) == records_without_times(other)
    states = [load_checkpoint(run.run_dir / "checkpoints").state for run in (simulation, other)]
    assert same_bits(*states)


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """Write a user's preset, and return its path."""
    path = tmp_path_factory.mktemp("preset") / "mine.yaml"
    path.write_text((ROOT / "conf" / "digits-vit.yaml").read_text())
    return str(path)


@pytest.fixture(scope="module")
def spawned_run(preset, tmp_path_factory):
    """Return a run with two spawned workers, which import everything themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CORES, "2")
        # So that no worker is forked.
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        return run(tmp_path_factory.mktemp("anew"), 2, preset=preset, **ONE_ROUND)


def test_workers_with_a_presets_path_give_the_bits_of_one_process(spawned_run, preset, tmp_path):
    """Forked and spawned ones, which have ended."""
    forked = run(tmp_path, 2, preset=preset, **ONE_ROUND)
    single = run(tmp_path, 1, preset=preset, **ONE_ROUND)
    for double in (forked, spawned_run):
        assert double.summary["processes"] == 2
        assert double.summary["rejected"] == 0
        assert_same(single, double)
    words = "ravan_flwr.launch.worker_process"
    assert not [p for p in psutil.Process().children() if words in p.cmdline()]


@pytest.mark.slow
def test_masked_rounds_in_two_processes_give_the_bits_of_one(tmp_path):
    """Each worker answers several messages with the state and other arrays."""
    settings = {"secure-aggregation": True, "clients-per-round": 6, "budgets": "uniform"}
    single, double = (run(tmp_path, number, **settings) for number in (1, 2))
    assert double.summary["processes"] == 2
    assert double.summary["rejected"] == 0
    assert_same(single, double)


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("settings", METHODS, ids=lambda settings: settings["method"])
def test_two_processes_give_the_bits_of_one(settings, tmp_path):
    single, double = (run(tmp_path, number, **settings) for number in (1, 2))
    expected_processes = 1 if ALL_METHODS[str(settings["method"])].pools else 2  # one client trains
    assert (single.summary["processes"], double.summary["processes"]) == (1, expected_processes)
    assert_same(single, double)


@pytest.mark.slow
def test_auto_starts_workers_for_large_runs_and_gives_the_same_bits(tmp_path, monkeypatch, capsys):
    single = run(tmp_path, 1)
    small_run = run(tmp_path, "auto")
    assert small_run.summary["processes"] == 1
    monkeypatch.setattr(parallel_clients, "MIN_WORK", 0)
    large_run = run(tmp_path, "auto")
    assert large_run.summary["processes"] == 2
    assert "2 clients at a time, each in a process with 1 thread" in capsys.readouterr().out
    assert_same(single, small_run)
    assert_same(single, large_run)
    monkeypatch.setenv(CORES, "1")
    assert run(tmp_path, "auto").summary["processes"] == 1


def inject_fault(monkeypatch, fault):
    """Call `fault` in the worker at the first training of partition 1."""
    train, server = answers._ANSWERS["train"], os.getpid()

    def trained(client):
        assert os.getpid() != server
        if (client.round, client.node.partition_id) == (1, 1):
            fault()
        return train(client)

    monkeypatch.setitem(answers._ANSWERS, "train", trained)


def rejected(simulation):
    return [
        [(reply["client"], reply["reason"]) for reply in record["rejected"]]
        for record in records_of(simulation)
    ]


@pytest.mark.slow
def test_a_killed_worker_loses_only_its_clients_reply(tmp_path, monkeypatch):
    inject_fault(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    first, second = rejected(run(tmp_path, 2, clients_per_round=6))
    ((client, reason),) = first
    assert client == "partition 1"
    assert "the process that computed it ended before it answered; memory" in reason
    assert second == []


@pytest.mark.slow
def test_without_workers_clients_are_computed_sequentially(tmp_path, monkeypatch, capsys):
    """All workers are killed: at most the replies in progress are lost."""
    train, server = answers._ANSWERS["train"], os.getpid()

    def trained(client):
        if os.getpid() != server:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(client)

    def fail_to_start(*_):
        raise OSError("no memory")

    monkeypatch.setitem(answers._ANSWERS, "train", trained)
    monkeypatch.setattr(parallel_clients, "spawn_worker", fail_to_start)
    first, second = rejected(run(tmp_path, 2, clients_per_round=6))
    assert len(first) <= 2
    assert all("ended before it answered" in reason for _, reason in first)
    assert second == []
    output = capsys.readouterr().out
    assert "one after the other" in output
    assert "no other can be started: no memory" in output


@pytest.mark.slow
def test_an_error_in_a_worker_is_reported_as_with_one_process(tmp_path, monkeypatch):
    def fail():
        client_request.log.warning("about to fail in %s", "a worker")
        raise ArithmeticError("no good")

    inject_fault(monkeypatch, fail)
    simulation = run(tmp_path, 2, clients_per_round=6)
    reason = "it failed with code 2: ArithmeticError: no good"
    assert rejected(simulation) == [[("partition 1", reason)], []]
    assert "about to fail in a worker" in (simulation.run_dir / "log.txt").read_text()


@pytest.mark.slow
def test_a_hung_workers_client_is_rejected_at_the_rounds_timeout(tmp_path, monkeypatch):
    """The clock advances only while the hung worker is the last one, on machines of any speed."""
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
    inject_fault(monkeypatch, hang)
    first, second = rejected(run(tmp_path, 2, clients_per_round=6, round_timeout=6.0))
    assert ("partition 1", "no reply within 6 s") in first
    assert second == []


@pytest.mark.parametrize(("threads", "forks"), [(1, True), (1, False), (2, True)])
def test_workers_are_forks_if_threads_and_devices_permit(threads, forks, tmp_path, monkeypatch):
    """A fork computes with one thread; the user's number of threads is kept."""

    started = []

    def record_start(kind):
        def fail_to_start(*arguments):
            started.append((kind, *arguments[1:]))
            raise OSError

        return fail_to_start

    for kind in ("fork_worker", "spawn_worker"):
        monkeypatch.setattr(parallel_clients, kind, record_start(kind))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    # Only there: PyTorch for CUDA would use the GPU that is reported to it.
    accelerator = SimpleNamespace(is_available=lambda: not forks)
    monkeypatch.setattr(parallel_clients, "torch", SimpleNamespace(accelerator=accelerator))
    run(tmp_path, 2, num_rounds=1)
    # OMP_NUM_THREADS is set: conftest.py
    assert started == [("fork_worker",) if forks and threads == 1 else ("spawn_worker", None)]
