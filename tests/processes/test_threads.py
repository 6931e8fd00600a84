"""The default preset computes with one thread, unless OMP_NUM_THREADS asks for another number."""

import json
import os

import pytest

# PyTorch takes its number when it is imported, without computing anything, from OMP_NUM_THREADS or
# the machine's cores: a fork that is given a number stands for a process that began with it.
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
torch.set_num_threads(3)
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
def threads(python):
    """By what OMP_NUM_THREADS is, how many threads the default preset computes with."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = python.run(["-c", CODE], environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("given", "number"), [("", 1), ("2", 2)])
def test_the_default_preset_computes_with_one_thread(given, number, threads):
    """In a process of its own, and counted where the work is done."""
    assert threads[given] == number
