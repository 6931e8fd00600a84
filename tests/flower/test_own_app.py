"""examples/own_app, which uses only the library: in Flower's simulation, and on SuperNodes."""

import json
import os
import re
import shutil
import sys

import pytest

from ravan_flwr.launch.superlink import LocalSuperLink
from testing.deployment import Deployment
from tests import ROOT
from tests.flower.in_turn import BEGINS

APP = ROOT / "examples" / "own_app"
STRATEGIES = ("ravan", "fedit", "flexlora", "fedex-lora")
FEDERATION = f"num-supernodes=4 client-resources-num-cpus={os.cpu_count()}"  # one actor


def accuracies(log):
    """Return the server's accuracy before the first round, and after each."""
    table = log[log.rindex("ServerApp-side Evaluate Metrics") :]
    return [float(number) for number in re.findall(r"'accuracy': '([\d.e+-]+)'", table)]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """Copy the app, so that `flwr run` writes nothing into the checkout."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(APP, tmp_path_factory.mktemp("example") / "own_app", ignore=ignored)


@pytest.fixture(scope="module")
def superlink(python):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python.executable)
        patch.setenv("PYTHONPATH", str(ROOT))
        link = LocalSuperLink()
    with link:
        yield link


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


@pytest.mark.slow
def test_an_unknown_strategy_is_an_error_that_lists_them(app, superlink, capfd):
    assert superlink.run(app, 'strategy="fedprox"', FEDERATION) != "finished:completed"
    message = "strategy = 'fedprox': expected one of ravan, fedit, flexlora, fedex-lora; set one"
    assert message in "".join(capfd.readouterr())


def test_the_example_learns_on_two_supernodes(app, tmp_path, python):
    with Deployment(tmp_path, nodes=2, scripts=python.scripts) as deployment:
        for number in range(2):
            deployment.register(number)
            deployment.start_node(number, f"partition-id={number} num-partitions=2")
            assert deployment.wait_for_node(number)
        run = deployment.run('strategy="ravan" num-server-rounds=2', app)
        assert run.wait() == "finished:completed", run.log
        before, *after = accuracies(run.log)
        assert before < 0.3
        assert len(after) == 2
        assert after[-1] > 0.6
        assert run.log.count("Received 2 results and 0 failures") == 2
    assert deployment.left_running == []


def test_the_example_is_short():
    files = [path for path in APP.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    assert len(files) == 6
    assert sum(len(path.read_text().splitlines()) for path in files) <= 150
