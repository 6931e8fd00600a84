"""Without its optional parts the package runs every method, and names a part that is needed."""

import shutil
import subprocess
import sys

import pytest

from ravan_flwr.methods import METHODS
from tests import ROOT

RUNS = """
import ravan_flwr.client_app, ravan_flwr.server_app
from ravan_flwr import simulate
from ravan_flwr.training.plan import plan_of

short = {"num-rounds": 1, "local-steps": 1, "batch-size": 8, "tracking": "none"}
for method in METHODS:
    run = simulate(short | {"method": method, "output-dir": "runs"}, 3)
    assert (run.summary["rounds"], run.summary["rejected"]) == (1, 0), method
private = {"privacy": "example", "epsilon": 8.0}


def check_refused(settings, function):
    try:
        function(short | settings | {"clients-per-round": 4, "output-dir": "runs"}, 4)
    except ValueError as error:
        assert "got an installation without it" in str(error), error
    else:
        raise AssertionError(settings)


for settings in ({"secure-aggregation": True}, {"deliver": True}, private):
    check_refused(settings, simulate)
check_refused(private, plan_of)
print("without optional parts:", ravan_flwr.__file__)
"""


@pytest.mark.slow
def test_the_core_runs_every_method_without_the_optional_parts(tmp_path):
    """Nor does it need the tools of researchers, which are no part of the app."""
    without = shutil.ignore_patterns("extras", "lab", "strategies", "peft", "__pycache__")
    shutil.copytree(ROOT / "ravan_flwr", tmp_path / "ravan_flwr", ignore=without)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    code = RUNS.replace("METHODS", repr([*METHODS]))
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"without optional parts: {tmp_path}" in ended.stdout
