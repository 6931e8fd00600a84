"""The number of cores respects studies; joblib counts those of affinity and containers."""

import pytest

from ravan_flwr.training.machine import CORES, usable_cores


@pytest.fixture(autouse=True)
def _sixteen(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 16)


def test_affinity_and_a_studys_share_of_cores_count():
    assert usable_cores({}) == 16
    assert usable_cores({CORES: "4"}) == 4
    assert usable_cores({CORES: "99"}) == 16
    assert usable_cores({CORES: ""}) == 16


@pytest.mark.parametrize("share", ["0", "many", "-1", "1.5", "²", "9" * 5000, "\x1b[2J"])
def test_an_invalid_number_of_cores_is_refused(share):
    message = f"{CORES} = '[^\x1b]{{1,50}}' in the environment: expected .* 1 or more; correct it"
    with pytest.raises(ValueError, match=message):
        usable_cores({CORES: share})
