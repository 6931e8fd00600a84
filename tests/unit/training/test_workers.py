"""The number of clients that run side by side follows from the cores."""

import os

import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import THREAD_NUMBERS
from ravan_flwr.training import machine
from ravan_flwr.training.device import Workers, most_workers
from ravan_flwr.training.machine import CORES


@pytest.fixture(autouse=True)
def _eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "_quotas", lambda _: [float("inf")])
    for name in (*THREAD_NUMBERS, CORES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("settings", "clients", "number"),
    [
        ({"clients-per-round": 3}, 20, 3),
        ({"clients-per-round": 3, "over-sample": 1.5}, 20, 5),
        ({"clients-per-round": 10, "over-sample": 1.1}, 20, 11),
        ({"clients-per-round": 3, "over-sample": 1.5}, 4, 4),
        ({"clients-per-round": 3}, 2, 2),
        ({"clients-per-round": 3, "evaluate-on": "clients", "validation-share": 0.1}, 20, 20),
    ],
)
def test_the_number_of_parallel_clients(settings, clients, number):
    assert read_config(settings).max_concurrent(clients) == number


@pytest.mark.parametrize(
    ("processes", "threads", "on_cpu", "expected"),
    [
        ("auto", 1, True, Workers(8, 1)),
        ("auto", 7, True, Workers(1, 7)),
        ("auto", 1, False, Workers(1, 1)),
        (4, 7, True, Workers(4, 2)),  # the cores are divided
        (4, 7, False, Workers(4, 2)),
        (16, 7, True, Workers(10, 1)),  # no more than clients
    ],
)
def test_the_cores_are_divided(processes, threads, on_cpu, expected):
    config = read_config({"clients-per-round": 10, "processes": processes})
    assert most_workers(config, 20, threads, on_cpu=on_cpu) == expected


def test_threads_set_by_the_user_are_not_divided(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    config = read_config({"clients-per-round": 10, "processes": 4})
    assert most_workers(config, 20, None, on_cpu=True) == Workers(4, 6)
