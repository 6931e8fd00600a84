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
from transformers import TrainerCallback

from ravan_flwr.strategies import FFALoraStrategy, RavanStrategy, federated
from tests import ROOT
from tests.flower.faulty_trainers import FAULTS
from tests.flower.in_turn import BEGINS
from tests.flower.test_own_app import accuracies
from tests.unit.strategies.test_federated import Grid, numbers, run, train_only

NODES = 2
APP = ROOT / "examples" / "own_trainer"
SFT = ROOT / "examples" / "own_sft"
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


def losses(log):
    """Return the clients' mean loss after each round."""
    table = log[log.rindex("ClientApp-side Evaluate Metrics") :]
    return [float(number) for number in re.findall(r"'eval-loss': '([\d.e+-]+)'", table)]


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
    settings = {"strategy": strategy, "num-server-rounds": 3}
    log = run_in_process(monkeypatch, SFT, settings, caplog)
    first, _, last = losses(log)
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


def simulated(python, app, configs, folder, *, package=None, nodes=NODES):
    """Run an app, or a package that changes it, with each run config in one simulation.

    Return the logs. Ray takes half a minute to start.
    """
    package = package or app.name
    words = ["-m", "tests.flower.in_turn", package, str(nodes), json.dumps(configs)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(app)])}
    done = python.run(words, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    _, *logs = done.stderr.split(BEGINS)
    assert len(logs) == len(configs)
    return logs


@pytest.mark.slow
def test_the_example_learns_in_a_simulation(python, tmp_path):
    configs = [{"strategy": name, "num-server-rounds": 2} for name in STRATEGIES]
    for log in simulated(python, APP, configs, tmp_path):
        assert accuracies(log)[-1] > 0.6
        assert "rejected" not in log
        assert log.count("Received 2 results and 0 failures") == 2


@pytest.mark.slow
def test_a_decoder_learns_in_a_simulation(python, tmp_path):
    configs = [{"strategy": name, "num-server-rounds": 3} for name in STRATEGIES]
    for log in simulated(python, SFT, configs, tmp_path):
        first, _, last = losses(log)
        assert last < 0.8 * first
        assert "rejected" not in log
        assert log.count("Received 2 results and 0 failures") == 6


@pytest.fixture(scope="module")
def supernodes(deployment):
    deployment.start_nodes()
    return deployment


def deployed(app, settings, supernodes, folder):
    """Run a copy of an app on the SuperNodes; return its log."""
    ignored = shutil.ignore_patterns("__pycache__")
    copied = shutil.copytree(app, folder / app.name, ignore=ignored)
    run = supernodes.run(settings, copied)
    assert run.wait() == "finished:completed", run.log
    return run.log


@pytest.mark.slow
def test_the_example_learns_on_two_supernodes(tmp_path, supernodes):
    """Every message starts a process of its own there."""
    log = deployed(APP, 'strategy="ravan" num-server-rounds=2', supernodes, tmp_path)
    assert accuracies(log)[-1] > 0.6
    assert log.count("Received 2 results and 0 failures") == 2


@pytest.mark.slow
def test_a_supernodes_client_trains_in_two_processes(tmp_path, supernodes):
    """The numbers are those of one process with the whole batch, on the same SuperNodes."""
    measured = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        app = shutil.copytree(APP, folder / "changed" / APP.name)
        client = app / "own_trainer" / "client_app.py"
        changes = {
            "federated(make_trainer)": f"federated(make_trainer, processes={processes})",
            "per_device_train_batch_size=32": f"per_device_train_batch_size={32 // processes}",
            "max_steps=30": "max_steps=3, use_cpu=True",
        }
        text = client.read_text()
        for old, new in changes.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        client.write_text(text)
        log = deployed(app, 'strategy="fedit" num-server-rounds=1', supernodes, folder)
        assert log.count("Received 2 results and 0 failures") == 1
        (loss,) = re.findall(r"'train-loss': ([\d.]+)", log)
        measured.append([*accuracies(log), float(loss)])
    assert measured[1] == pytest.approx(measured[0], abs=1e-5)


@pytest.mark.slow
def test_a_decoder_learns_on_two_supernodes(tmp_path, supernodes):
    log = deployed(SFT, 'strategy="ffa-lora" num-server-rounds=2', supernodes, tmp_path)
    first, last = losses(log)
    assert last < first
    assert log.count("Received 2 results and 0 failures") == 4


@pytest.mark.slow
def test_faulty_trainers_are_rejected_in_a_run_that_goes_on(python, tmp_path):
    """Their reasons are the clients' own; what ends early counts, and is reported."""
    settings = {"strategy": "ravan", "num-server-rounds": 2}
    package = "tests.flower.faulty_trainers"
    (log,) = simulated(python, APP, [settings], tmp_path, package=package, nodes=len(FAULTS))
    assert accuracies(log)[-1] > 0.6
    for number in (1, 2):
        (line,) = re.findall(rf"REJECTED {number} (.*)", log)
        reasons = json.loads(line)
        expected = [reason for begin, reason in filter(None, FAULTS.values()) if begin <= number]
        assert len(reasons) == len(expected)
        for reason in expected:
            assert sum(re.search(reason, r) is not None for r in reasons) == 1, (reason, reasons)
    assert "ended after 7 of 30 steps" in log
    missing = [float(number) for number in re.findall(r"'missing-steps': '([\d.e+]+)'", log)]
    assert missing == pytest.approx([23 / 4, 23 / 3], rel=0.01)  # clients have about as many rows


class NoGradientOfA(TrainerCallback):
    """Check that A has no gradient, which would count when gradients are clipped."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        gradients = {name: p.grad for name, p in model.named_parameters() if "default" in name}
        assert {"lora_B" in name for name, g in gradients.items() if g is not None} == {True, False}
        assert not any("lora_A" in name for name, g in gradients.items() if g is not None)


@pytest.mark.slow(kept=1)
@pytest.mark.filterwarnings("ignore")  # warnings of trl
@pytest.mark.parametrize("method", STRATEGIES)
def test_trls_dpo_trainer_keeps_its_reference(method, tmp_path, monkeypatch):
    """The reference is the adapter that the run began with, in every round."""
    trl = pytest.importorskip("trl")
    monkeypatch.syspath_prepend(SFT)
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
        callbacks=[NoGradientOfA()] if method == "ffa-lora" else [],
    )  # fmt: skip
    references = {name: p.clone() for name, p in model.named_parameters() if ".ref" in name}
    assert references
    kinds = {"ravan": RavanStrategy, "fedit": FedAvg, "ffa-lora": FFALoraStrategy}
    strategy = train_only(kinds[method])
    budget = 0.5 if method == "ravan" else 1.0
    initial = {k: t.clone().numpy() for k, t in get_peft_model_state_dict(model).items()}
    result = numbers(run(strategy, [federated(trainer, budget=budget)], model))
    assert result.keys() == initial.keys()
    moved = {name for name, array in initial.items() if not np.array_equal(result[name], array)}
    assert moved
    if method == "ffa-lora":
        assert not any("lora_A" in name for name in moved)
    for name, reference in references.items():
        assert torch.equal(model.get_parameter(name), reference)
