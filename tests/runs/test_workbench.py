"""A run in one process has its device to itself."""

import json

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import Scalar
from ravan_flwr.training.workbench import Workbench, get_workbench


def test_one_process_has_its_device_to_itself(tmp_path):
    """Only where other processes may want a GPU's memory is it given back after a client."""
    settings: dict[str, Scalar] = {
        "num-rounds": 1, "local-steps": 1, "seed": 7, "output-dir": str(tmp_path),
    }  # fmt: skip
    run = simulate(settings, 2)
    run_config = json.loads((run.run_dir / "config.json").read_text())
    assert run_config["seed"] == 7
    assert not get_workbench(read_config(settings)).model.shares_device
    assert Workbench(read_config(settings)).model.shares_device
    assert json.loads((run.run_dir / "summary.json").read_text())["rejected"] == 0
