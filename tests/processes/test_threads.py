"""The default preset computes with one thread, as PyTorch begins in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

# PyTorch takes its number from OMP_NUM_THREADS when it is imported, without computing anything: a
# fork stands for a process that began with another one.
CODE = """
import json, os, torch
from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.model_and_data import ModelAndData

def threads():
    model = ModelAndData(read_config({})).model
    before = torch.get_num_threads()
    with model.holding(model.initial_state()):
        within = torch.get_num_threads()
    assert torch.get_num_threads() == before
    return within

assert "OMP_NUM_THREADS" not in os.environ
told, tells = os.pipe()
if os.fork() == 0:
    os.environ["OMP_NUM_THREADS"] = "2"
    torch.set_num_threads(2)
    os.write(tells, str(threads()).encode())
    os._exit(0)
os.close(tells)
print(json.dumps({"": threads(), "2": int(os.read(told, 9))}))
"""


@pytest.fixture(scope="module")
def threads():
    """By what OMP_NUM_THREADS is, how many threads the default preset computes with."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(("given", "number"), [("", 1), ("2", 2)])
def test_the_default_preset_computes_with_one_thread(given, number, threads):
    """In a process of its own, as PyTorch begins there, and counted where the work is done."""
    assert threads[given] == number
