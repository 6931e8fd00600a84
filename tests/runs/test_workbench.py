"""A run in one process has its device to itself; who holds back all is told."""

import json

import numpy as np
import pytest

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import Scalar
from ravan_flwr.training.model_and_data import ModelAndData, get_model_and_data


def test_one_process_has_its_device_to_itself(tmp_path):
    """Only where other processes may want a GPU's memory is it given back after a client."""
    settings: dict[str, Scalar] = {
        "num-rounds": 1, "local-steps": 1, "seed": 7, "output-dir": str(tmp_path),
    }  # fmt: skip
    run = simulate(settings, 2)
    run_config = json.loads((run.run_dir / "config.json").read_text())
    assert run_config["seed"] == 7
    assert not get_model_and_data(read_config(settings)).model.shares_device
    assert ModelAndData(read_config(settings)).model.shares_device
    assert json.loads((run.run_dir / "summary.json").read_text())["rejected"] == 0


@pytest.mark.parametrize(
    ("number", "share", "advice"), [(1, 0.1, "; use fewer"), (2, 0.9, "; lower it, or use fewer")]
)
def test_a_client_that_holds_back_all_it_has_is_told(number, share, advice, monkeypatch):
    """In the same words for all of them, which are counted where many are told."""
    bench = ModelAndData(read_config({"validation-share": share}))
    monkeypatch.setattr(bench, "rows", lambda _: [np.arange(number)] * 2)
    told = (
        rf"a client with {number} examples? would have none left to train on, since {number} "
        f"would be its validation split{advice} clients"
    )
    reasons = set()
    for partition in range(2):
        with pytest.raises(ValueError, match=told) as raised:
            bench.partition(partition, 2)
        reasons.add(str(raised.value))
    assert len(reasons) == 1
