"""The default preset computes with one thread, unless OMP_NUM_THREADS asks for another number."""

import json
import os

import pytest

# PyTorch reads its number of threads at import, from OMP_NUM_THREADS or the machine's cores. A fork
# that sets the number is equal to a process that started with it.
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
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.environ["OMP_NUM_THREADS"] = "2"
    torch.set_num_threads(2)
    os.write(write_end, str(threads()).encode())
    os._exit(0)
os.close(write_end)
print(json.dumps({"": threads(), "2": int(os.read(read_end, 9))}))
"""


@pytest.mark.slow
def test_the_default_preset_computes_with_one_thread_unless_the_environment_has_a_number(python):
    """Counted inside `holding`, where training runs."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = python.run(["-c", CODE], environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"": 1, "2": 2}  # by the value of OMP_NUM_THREADS
