"""Cores respect containers and studies; threads and clients side by side follow from them."""

import os

import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import THREAD_NUMBERS
from ravan_flwr.training import machine
from ravan_flwr.training.device import (
    SMALL,
    Workers,
    computing_with,
    most_workers,
    suitable_threads,
)
from ravan_flwr.training.machine import CORES, usable_cores


@pytest.fixture(autouse=True)
def _sixteen(monkeypatch):
    """Pretend sixteen cores, of which PyTorch would use four, and that the user set no number."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(machine, "_quotas", lambda _: [float("inf")])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for name in (*THREAD_NUMBERS, CORES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("share", "number"), [("4", 4), ("99", 16), ("", 16)])
def test_affinity_and_a_studys_share_of_cores_count(share, number):
    assert usable_cores({CORES: share}) == number


@pytest.mark.parametrize("share", ["0", "many", "-1", "1.5", "²", "9" * 5000, "\x1b[2J"])
def test_an_invalid_number_of_cores_is_refused(share):
    message = f"{CORES} = '[^\x1b]{{1,50}}' in the environment: expected .* 1 or more"
    with pytest.raises(ValueError, match=message):
        usable_cores({CORES: share})


@pytest.mark.parametrize(("quota", "number"), [(2.5, 2), (0.3, 1), (64.0, 16)])
def test_a_cgroup_quota_limits_the_cores(monkeypatch, quota, number):
    monkeypatch.setattr(machine, "_quotas", lambda _: [quota])
    assert usable_cores({}) == number


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("3:cpu,cpuacct:/x\n", {
            "cpu,cpuacct/x/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
        }, 2.0),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "9\n"}, None),
        ("4:memory:/x\n", {"memory/x/cpu.max": "1 1\n"}, None),
        ("0::/../..\n", {"cpu.max": "nonsense"}, None),
        ("nonsense", {}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_quotas_of_both_cgroup_versions_are_read(tmp_path, monkeypatch, groups, files, found):
    monkeypatch.undo()
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    quotas = list(machine._quotas(tmp_path / "groups", tmp_path / "root"))
    assert min(quotas) == (found or float("inf"))
    assert list(machine._quotas(tmp_path / "absent")) == [float("inf")]


# Threads of PyTorch.


def test_small_networks_use_one_thread_and_others_leave_a_core_free(monkeypatch):
    assert suitable_threads(300_000, 32) == 1
    assert suitable_threads(SMALL, 1) == 1
    assert suitable_threads(SMALL, 2) == 3
    assert suitable_threads(86_000_000, 8) == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert suitable_threads(86_000_000, 8) == 1  # at least


@pytest.mark.parametrize(("settings", "threads"), [("1", 1), ("3", 3), ("9", 4)])
def test_a_run_of_a_study_uses_a_thread_for_each_of_its_cores(monkeypatch, settings, threads):
    """Limited to the cores of a study with --jobs; a small network uses one thread there, too."""
    monkeypatch.setenv(CORES, settings)
    assert suitable_threads(86_000_000, 8) == threads
    assert suitable_threads(300_000, 32) == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("text", ["7", " 7 ", "4,2", "abc", "0", "-2", "1.5", ""])
def test_a_number_set_by_the_user_is_kept_and_an_invalid_one_ignored(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    expected = None if text in {"7", " 7 ", "4,2"} else 3
    assert suitable_threads(86_000_000, 8) == expected


def test_the_earlier_number_is_restored_also_after_an_error(monkeypatch):
    monkeypatch.undo()
    before = torch.get_num_threads()

    def fails():
        with computing_with(before + 2):
            assert torch.get_num_threads() == before + 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert torch.get_num_threads() == before
    with computing_with(None):
        assert torch.get_num_threads() == before


# Clients side by side.


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
def test_the_cores_are_divided(processes, threads, on_cpu, expected, monkeypatch):
    monkeypatch.setenv(CORES, "8")
    config = read_config({"clients-per-round": 10, "processes": processes})
    assert most_workers(config, 20, threads, on_cpu=on_cpu) == expected


def test_threads_set_by_the_user_are_not_divided():
    config = read_config({"clients-per-round": 10, "processes": 4})
    assert most_workers(config, 20, None, on_cpu=True) == Workers(4, 4)
