"""examples/own_app, which uses only the library: in Flower's simulation, and on SuperNodes."""

import json
import os
import re
import shutil

import pytest

from tests import ROOT
from tests.flower.in_turn import BEGINS

NODES = 2
APP = ROOT / "examples" / "own_app"
STRATEGIES = ("ravan", "fedit", "flexlora", "fedex-lora")


def accuracies(log):
    """Return the server's accuracy before the first round, and after each."""
    table = log[log.rindex("ServerApp-side Evaluate Metrics") :]
    return [float(number) for number in re.findall(r"'accuracy': '([\d.e+-]+)'", table)]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """Copy the app, so that `flwr run` writes nothing into the checkout."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(APP, tmp_path_factory.mktemp("example") / "own_app", ignore=ignored)


@pytest.mark.slow
def test_the_example_learns_in_a_simulation(python):
    """All strategies run in one simulation, since Ray takes half a minute to start."""
    configs = [{"strategy": name, "num-server-rounds": 3} for name in STRATEGIES]
    words = ["-m", "tests.flower.in_turn", "own_app", "4", json.dumps(configs)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(APP)])}
    done = python.run(words, environment=environment)
    assert done.returncode == 0, done.stderr
    _, *logs = done.stderr.split(BEGINS)
    assert len(logs) == len(STRATEGIES)
    for log in logs:
        before, *after = accuracies(log)
        assert before < 0.3
        assert len(after) == 3
        assert after[-1] > 0.7
        assert "rejected" not in log
        assert log.count("Received 4 results and 0 failures") == 3


def test_the_example_learns_on_two_supernodes(app, deployment):
    deployment.start_nodes()
    run = deployment.run('strategy="ravan" num-server-rounds=2', app)
    assert run.wait() == "finished:completed", run.log
    before, *after = accuracies(run.log)
    assert before < 0.3
    assert len(after) == 2
    assert after[-1] > 0.6
    assert run.log.count("Received 2 results and 0 failures") == 2


@pytest.mark.slow
def test_an_unknown_strategy_is_an_error_that_lists_them(app, deployment):
    run = deployment.run('strategy="fedprox"', app)
    assert run.wait() == "finished:failed"
    assert f"strategy = 'fedprox': expected one of {', '.join(STRATEGIES)}" in run.log


def test_the_example_is_short():
    files = [path for path in APP.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    assert len(files) == 6
    assert sum(len(path.read_text().splitlines()) for path in files) <= 150
