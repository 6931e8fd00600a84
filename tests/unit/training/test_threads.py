"""One core is left to others, small networks have one thread, and a user's number is kept."""

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
    """A machine on which PyTorch would take four threads, and a user who said nothing."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.delenv(CORES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


@pytest.mark.usefixtures("four")
def test_small_networks_have_one_thread_and_others_leave_one_core():
    assert suitable_threads(300_000, 32) == 1
    assert suitable_threads(SMALL, 1) == 1
    assert suitable_threads(SMALL, 2) == 3
    assert suitable_threads(86_000_000, 8) == 3


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(("given", "threads"), [("1", 1), ("3", 3), ("9", 4)])
def test_a_run_beside_others_has_a_thread_for_each_core_that_is_left_to_it(
    monkeypatch, given, threads
):
    """As a study with --jobs leaves them, and a small network has one thread there, too."""
    monkeypatch.setenv(CORES, given)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(machine, "_quotas", lambda *_: [math.inf])
    assert suitable_threads(86_000_000, 8) == threads
    assert suitable_threads(300_000, 32) == 1


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("number", ["7", " 7 ", "4,2"])
def test_a_number_of_the_users_is_kept(monkeypatch, name, number):
    monkeypatch.setenv(name, number)
    assert suitable_threads(86_000_000, 8) is None


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("text", ["abc", "0", "-2", "1.5", ""])
def test_what_is_no_number_of_threads_sets_none(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    assert suitable_threads(86_000_000, 8) == 3


def test_there_is_always_one(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert suitable_threads(86_000_000, 8) == 1


def test_the_number_before_comes_back_also_after_an_error():
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


def test_the_users_number_is_the_tests():
    assert ModelAndData(read_config({})).model.threads is None  # conftest sets OMP_NUM_THREADS
