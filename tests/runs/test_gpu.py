"""Tests that need a GPU, for `make gpu`; without one they are skipped."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from subprocess import PIPE

import pytest
import torch

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.sharing import share_gpus
from ravan_flwr.launch.superlink import LocalSuperLink
from ravan_flwr.methods import METHODS
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.training.cost import (
    CONTEXT,
    evaluation_memory,
    footprint,
    largest_fraction,
    step_memory,
)
from ravan_flwr.training.device import free_memory
from ravan_flwr.training.local_steps import ClientWork, train_locally
from ravan_flwr.training.machine import visible_gpus
from ravan_flwr.training.model_and_data import ModelAndData, get_model_and_data
from ravan_flwr.training.step import TrainingSettings
from tests import ROOT
from tests.support.tiny import small_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA GPU"),
]

ROUND: dict[str, Scalar] = {"num-rounds": 1, "local-steps": 3, "tracking": "none"}


@pytest.fixture(autouse=True)
def free_gpu_memory():
    """Release this process's GPU memory before each test."""
    get_model_and_data.cache_clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A small decoder and data for it."""
    return small_decoder(tmp_path_factory.mktemp("gpu"))


def run(tmp_path, clients=3, **settings):
    config: dict[str, Scalar] = ROUND | {"device": "cuda", "output-dir": str(tmp_path)}
    return simulate(config | {k.replace("_", "-"): v for k, v in settings.items()}, clients)


def rounds(directory):
    return [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_a_round_of_every_method_agrees_with_the_cpu(method, tmp_path):
    gpu, cpu = (
        run(tmp_path / device, method=method, local_steps=10, device=device).summary
        for device in ("cuda", "cpu")
    )
    assert gpu["rejected"] == 0
    assert gpu["bytes-up"] == cpu["bytes-up"]
    for name in ("loss", "accuracy"):
        expected = pytest.approx(cpu["metrics"]["final"][name], rel=0.02, abs=0.03)
        assert gpu["metrics"]["final"][name] == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scoring", ["random", "gradient"])
def test_every_precision_reaches_the_accuracy_of_float32(precision, scoring, tmp_path):
    settings = {"precision": precision, "scoring": scoring, "budgets": "uniform"}
    low_precision = run(tmp_path / "low", local_steps=30, **settings).summary
    settings["precision"] = "float32"
    reference = run(tmp_path / "full", local_steps=30, **settings).summary
    assert low_precision["rejected"] == 0
    accuracy = reference["metrics"]["final"]["accuracy"]
    assert low_precision["metrics"]["final"]["accuracy"] == pytest.approx(accuracy, abs=0.05)


@pytest.mark.parametrize("init", ["gram-schmidt", "data-aware"])
@pytest.mark.parametrize("selection", ["layer", "global"])
def test_every_kind_of_head_trains(init, selection, tmp_path):
    heads = {"init": init, "selection": selection, "scoring": "weight", "budgets": "skewed-right"}
    assert run(tmp_path, **heads).summary["rejected"] == 0


# bitsandbytes warns of layers that are as narrow as this network's, for which 4 bits are slow.
@pytest.mark.filterwarnings("ignore:inner dimension .* is not aligned")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].frozen_backbone])
@pytest.mark.parametrize("how", ["8bit", "4bit"])
def test_a_quantized_backbone_trains(how, method, precision, llama, tmp_path):
    pytest.importorskip("bitsandbytes")
    result = run(tmp_path, **llama, backbone_dtype=how, method=method, precision=precision)
    assert result.summary["rejected"] == 0
    written = [(result.run_dir / name).is_dir() for name in ("merged", "adapter")]
    assert any(written) is not METHODS[method].personalised


@pytest.mark.parametrize("dtype", ["8bit", "4bit"])
def test_a_quantized_backbone_takes_less_memory(dtype, llama):
    pytest.importorskip("bitsandbytes")
    memory = []
    for quantized in ("auto", dtype):
        before = torch.cuda.memory_allocated()
        loaded = ModelAndData(read_config(llama | {"backbone-dtype": quantized, "device": "cuda"}))
        assert loaded.model.device.type == "cuda"
        memory.append(torch.cuda.memory_allocated() - before)
        del loaded
    assert memory[1] < memory[0]


def memory_of_steps(settings, number=3):
    """Return the measured bytes of training steps without the model, and the planned ones."""
    config = read_config(settings | {"device": "cuda"})
    loaded = ModelAndData(config)
    examples = loaded.partition(0, 4).train
    steps = TrainingSettings(number, config.batch_size, 1e-3, config.precision)
    model = loaded.model
    work = ClientWork(examples, model.initial_state(), 1.0, steps, ClientRound(0, 1, 0))
    train_locally(model, loaded.task, work)  # allocates cuBLAS's workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train_locally(model, loaded.task, replace(work, client_round=ClientRound(0, 2, 0)))
    return torch.cuda.max_memory_allocated() - before, step_memory(config, 1.0)


def test_checkpointing_keeps_fewer_activations(llama):
    settings = llama | {"max-length": 256, "batch-size": 64}
    checkpointed, plain = (
        memory_of_steps(settings | {"gradient-checkpointing": checkpointing})[0]
        for checkpointing in (True, False)
    )
    assert checkpointed < 0.9 * plain


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_take_no_more_memory_than_planned(precision):
    measured, plan = memory_of_steps({"precision": precision, "batch-size": 512})
    assert measured < 1.2 * plan.added


def test_an_evaluation_takes_no_more_memory_than_planned():
    config = read_config({"device": "cuda"})
    loaded = ModelAndData(config)
    loaded.evaluate()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loaded.evaluate()
    assert torch.cuda.max_memory_allocated() - before < 1.2 * evaluation_memory(config)


PRODUCT = """
import sys, torch
ones = torch.ones(1000, 1000, device="cuda")
ones @ ones
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_cuda_context_takes_no_more_than_is_reserved():
    """Measured in another process, since this one has its context already."""
    (before, *_) = visible_gpus(os.environ)
    command = [sys.executable, "-c", PRODUCT]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        (during, *_) = visible_gpus(os.environ)
        other.communicate("")
    assert before.total == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.05)
    assert before.free is not None
    assert during.free is not None
    assert 0 < before.free - during.free < CONTEXT


def test_an_automatic_budget_fraction_fits_the_free_memory():
    config = read_config({"device": "cuda", "batch-size": 64})
    device = torch.device("cuda")
    free = free_memory(device)
    assert 0 < free <= torch.cuda.mem_get_info()[1]
    assert largest_fraction(config, free) == 1.0
    assert footprint(config).client < torch.cuda.mem_get_info()[1]
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert free - free_memory(device) == pytest.approx(2**28, rel=0.1)
    del held  # PyTorch caches it for this process
    assert torch.cuda.memory_reserved() >= 2**28
    assert free_memory(device) == pytest.approx(free, rel=0.01)


@pytest.mark.parametrize("others_need_memory", [True, False])
def test_cached_memory_is_released_only_if_other_processes_need_it(others_need_memory, monkeypatch):
    if others_need_memory:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 1))
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    loaded = ModelAndData(read_config({"device": "cuda"}))
    examples, state = loaded.partition(0, 4).train, loaded.model.initial_state()
    steps = TrainingSettings(1, 8, 1e-3, "float32")
    for client in range(3):
        work = ClientWork(examples, state, 1.0, steps, ClientRound(0, 1, client))
        train_locally(loaded.model, loaded.task, work)
    assert len(calls) == (3 if others_need_memory else 0)


def test_one_process_keeps_its_cached_memory(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    assert run(tmp_path, clients=4).summary["rejected"] == 0
    assert not calls


def test_simulated_clients_compute_on_the_gpu(tmp_path, capfd):
    """Under Flower's runtime, with the GPU share of `--engine flower`."""
    settings = {"num-rounds": 2, "local-steps": 3, "clients-per-round": 2}
    sharing = share_gpus(read_config(settings), 3)
    assert sharing.clients_per_gpu >= 1
    words = f"output-dir='{tmp_path}' tracking='none' "
    words += " ".join(f"{key}={value}" for key, value in settings.items())
    with LocalSuperLink() as link:
        assert link.run(ROOT, words, sharing.federation(3)) == "finished:completed"
    (directory,) = tmp_path.iterdir()
    for record in rounds(directory):
        assert not record["rejected"]
    output = capfd.readouterr().out
    assert "on cuda:0" in output
    assert "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" not in output


def test_a_client_without_a_gpu_share_names_the_missing_setting(tmp_path, capfd, monkeypatch):
    """As with a plain `flwr run` whose federation config requests no GPU."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    words = f"output-dir='{tmp_path}' tracking='none' num-rounds=1 local-steps=1"
    with LocalSuperLink() as link:
        federation = "num-supernodes=2 client-resources-num-cpus=1"
        assert link.run(ROOT, words, federation) == "finished:completed"
    output = capfd.readouterr().out
    assert "on cpu" in output
    assert "client-resources-num-gpus=0.25" in output
