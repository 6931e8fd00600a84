"""examples/own_trainer and own_sft, Trainers made clients: in process, simulated, on SuperNodes."""

import difflib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict

from ravan_flwr.strategies import RavanStrategy, federated
from tests import ROOT
from tests.flower.in_turn import BEGINS
from tests.flower.test_own_app import accuracies
from tests.unit.strategies.test_federated import Grid, numbers, run, train_only

NODES = 2
APP = ROOT / "examples" / "own_trainer"
STRATEGIES = ("ravan", "fedit", "ffa-lora")


def run_in_process(monkeypatch, app, settings, caplog):
    """Run an example with two nodes in this process; return what it logged."""
    monkeypatch.syspath_prepend(app)
    for part in ("client_app", "server_app", "task"):
        monkeypatch.delitem(sys.modules, f"{app.name}.{part}", raising=False)
    parts = {x: importlib.import_module(f"{app.name}.{x}_app") for x in ("client", "server")}
    grid = Grid([parts["client"].app] * NODES)
    for context in grid._contexts.values():
        context.run_config.update(settings)
    caplog.clear()
    with caplog.at_level("INFO", "flwr"):
        parts["server"].app(grid, Context(1, 0, {}, RecordDict(), settings))
    return caplog.text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_example_learns(strategy, monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    settings = {"strategy": strategy, "num-server-rounds": 2}
    log = run_in_process(monkeypatch, APP, settings, caplog)
    before, *after = accuracies(log)
    assert before < 0.3
    assert len(after) == 2
    assert after[-1] > 0.6
    assert log.count("Received 2 results and 0 failures") == 2
    assert "rejected" not in log


@pytest.mark.slow(kept=1)
@pytest.mark.filterwarnings("ignore")  # warnings of trl
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_decoder_learns_by_trls_trainer(strategy, monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    app = ROOT / "examples" / "own_sft"
    settings = {"strategy": strategy, "num-server-rounds": 3}
    log = run_in_process(monkeypatch, app, settings, caplog)
    table = log[log.rindex("ClientApp-side Evaluate Metrics") :]
    first, _, last = map(float, re.findall(r"'eval-loss': '([\d.e+-]+)'", table))
    assert last < 0.8 * first
    assert log.count("Received 2 results and 0 failures") == 6
    assert "rejected" not in log


def test_the_page_shows_the_few_lines_that_changed():
    old, new = (
        (APP / "own_trainer" / f"{name}.py").read_text().splitlines()
        for name in ("script", "client_app")
    )
    lines = list(difflib.unified_diff(old, new, "script.py", "client_app.py", lineterm="", n=1))
    (shown,) = re.findall(r"```diff\n(.*?)\n```", (APP / "README.md").read_text(), re.DOTALL)
    assert shown.splitlines() == lines
    for sign in "+-":
        assert 3 < sum(line[0] == sign and line[:3] != 3 * sign for line in lines) <= 10


@pytest.mark.slow
def test_the_script_runs_without_flower(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(APP)])}
    code = "import runpy, sys; sys.modules['flwr'] = None; runpy.run_module('own_trainer.script')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "digits-adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_example_learns_in_a_simulation(python, tmp_path):
    """All strategies run in one simulation, since Ray takes half a minute to start."""
    configs = [{"strategy": name, "num-server-rounds": 2} for name in STRATEGIES]
    words = ["-m", "tests.flower.in_turn", "own_trainer", "2", json.dumps(configs)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(APP)])}
    done = python.run(words, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    _, *logs = done.stderr.split(BEGINS)
    assert len(logs) == len(STRATEGIES)
    for log in logs:
        assert accuracies(log)[-1] > 0.6
        assert "rejected" not in log
        assert log.count("Received 2 results and 0 failures") == 2


@pytest.mark.slow
def test_the_example_learns_on_two_supernodes(tmp_path, deployment):
    """Every message starts a process of its own there."""
    ignored = shutil.ignore_patterns("__pycache__")
    app = shutil.copytree(APP, tmp_path / "own_trainer", ignore=ignored)
    deployment.start_nodes()
    run = deployment.run('strategy="ravan" num-server-rounds=2', app)
    assert run.wait() == "finished:completed", run.log
    assert accuracies(run.log)[-1] > 0.6
    assert run.log.count("Received 2 results and 0 failures") == 2


@pytest.mark.slow(kept=1)
@pytest.mark.filterwarnings("ignore")  # warnings of trl
@pytest.mark.parametrize("method", ["ravan", "fedit"])
def test_trls_dpo_trainer_keeps_its_reference(method, tmp_path, monkeypatch):
    """The reference is the adapter that the run began with, in every round."""
    trl = pytest.importorskip("trl")
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_sft")
    task = importlib.import_module("own_sft.task")
    pairs = {"prompt": ["two plus two is"], "chosen": [" four"], "rejected": [" nine"]}
    options = trl.DPOConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=0.01, bf16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    model = task.make_model(method)
    trainer = trl.DPOTrainer(
        model, args=options, processing_class=task.make_tokenizer(),
        train_dataset=datasets.Dataset.from_dict({name: 4 * x for name, x in pairs.items()}),
    )  # fmt: skip
    references = {name: p.clone() for name, p in model.named_parameters() if ".ref" in name}
    assert references
    strategy = train_only(RavanStrategy if method == "ravan" else FedAvg)
    budget = 0.5 if method == "ravan" else 1.0
    initial = {k: t.clone().numpy() for k, t in get_peft_model_state_dict(model).items()}
    result = numbers(run(strategy, [federated(trainer, budget=budget)], model))
    assert result.keys() == initial.keys()
    assert any(not np.array_equal(result[name], array) for name, array in initial.items())
    for name, reference in references.items():
        assert torch.equal(model.get_parameter(name), reference)
