"""Cores are counted as a container, an affinity or a study leaves them."""

import os

import pytest

from ravan_flwr.training import machine
from ravan_flwr.training.machine import CORES, usable_cores


@pytest.fixture(autouse=True)
def _sixteen(monkeypatch):
    monkeypatch.setattr(machine, "cpu_count", lambda: 16)


def test_what_a_study_leaves_counts():
    assert usable_cores({}) == 16
    assert usable_cores({CORES: "4"}) == 4
    assert usable_cores({CORES: "99"}) == 16
    assert usable_cores({CORES: ""}) == 16


@pytest.mark.parametrize("share", ["0", "many", "-1", "1.5", "²", "9" * 5000, "\x1b[2J"])
def test_what_is_no_number_of_cores_is_refused(share):
    told = f"{CORES} = '[^\x1b]{{1,50}}' in the environment: expected .* 1 or more; correct it"
    with pytest.raises(ValueError, match=told):
        usable_cores({CORES: share})


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="not on macOS")
def test_the_affinity_counts(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert usable_cores({}) == 1
