"""The default preset computes with one thread, as PyTorch begins in a process of its own."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_the_default_preset_computes_with_one_thread(given, threads):
    """In a process of its own, as PyTorch begins there, and counted where the work is done."""
    code = (
        "import torch\n"
        "from ravan_flwr.config.run_config import read_config\n"
        "from ravan_flwr.training.workbench import Workbench\n"
        "model = Workbench(read_config({})).model\n"
        "before = torch.get_num_threads()\n"
        "with model.holding(model.initial_state()):\n"
        "    print(torch.get_num_threads())\n"
        "assert torch.get_num_threads() == before\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | given
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert int(told.stdout) == threads
