"""The number of PyTorch threads: one core is free, small networks use one, users may set it."""

import math

import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.training import machine
from ravan_flwr.training.device import SMALL, computing_with, suitable_threads
from ravan_flwr.training.machine import CORES
from ravan_flwr.training.model_and_data import ModelAndData


@pytest.fixture
def four(monkeypatch):
    """Pretend that PyTorch would use four threads, and that the user set none."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.delenv(CORES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


@pytest.mark.usefixtures("four")
def test_small_networks_use_one_thread_and_others_leave_a_core_free():
    assert suitable_threads(300_000, 32) == 1
    assert suitable_threads(SMALL, 1) == 1
    assert suitable_threads(SMALL, 2) == 3
    assert suitable_threads(86_000_000, 8) == 3


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(("settings", "threads"), [("1", 1), ("3", 3), ("9", 4)])
def test_a_run_of_a_study_uses_a_thread_for_each_of_its_cores(monkeypatch, settings, threads):
    """Limited to the cores of a study with --jobs; a small network uses one thread there, too."""
    monkeypatch.setenv(CORES, settings)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(machine, "_quotas", lambda *_: [math.inf])
    assert suitable_threads(86_000_000, 8) == threads
    assert suitable_threads(300_000, 32) == 1


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("number", ["7", " 7 ", "4,2"])
def test_a_number_set_by_the_user_is_kept(monkeypatch, name, number):
    monkeypatch.setenv(name, number)
    assert suitable_threads(86_000_000, 8) is None


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("text", ["abc", "0", "-2", "1.5", ""])
def test_an_invalid_number_of_threads_is_ignored(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    assert suitable_threads(86_000_000, 8) == 3


def test_there_is_at_least_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert suitable_threads(86_000_000, 8) == 1


def test_the_earlier_number_is_restored_also_after_an_error():
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


def test_the_tests_set_the_number_of_threads():
    assert ModelAndData(read_config({})).model.threads is None  # conftest sets OMP_NUM_THREADS
