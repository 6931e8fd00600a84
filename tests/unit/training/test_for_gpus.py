"""What is different on a GPU, tried on a CPU: 16 bits throughout, padded ranks, TF32, placement."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ravan_flwr.adapters import Layer
from ravan_flwr.adapters.stored import NarrowLayerNorm, keep_casts
from ravan_flwr.config.run_config import read_config
from ravan_flwr.data.examples import load_splits
from ravan_flwr.launch import sharing
from ravan_flwr.launch.sharing import share_gpus
from ravan_flwr.seeding import ClientRound
from ravan_flwr.server.user_messages import report_float32
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.base import Encoded, encoded_as_it_is
from ravan_flwr.training import model_and_data
from ravan_flwr.training.cost import footprint, step_memory
from ravan_flwr.training.local_steps import ClientWork, TrainingLoop
from ravan_flwr.training.machine import Gpu
from ravan_flwr.training.model_and_data import ModelAndData, make_method
from ravan_flwr.training.network import backbone_dtype, captures_steps
from ravan_flwr.training.plan import describe
from ravan_flwr.training.step import TrainingSettings
from tests.support.tiny import save_data, save_model

WORK = ClientRound(0, 1, 0)
CUDA: dict[str, Scalar] = {"preset": "cifar100-vit-b16", "device": "cuda"}


def gradients(loaded, precision):
    """Return a step's gradients from a state that is not zero."""
    random = torch.Generator().manual_seed(0)
    model = loaded.model
    state = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=random)
        for name, tensor in model.initial_state().items()
    }
    steps = TrainingSettings(1, 8, 0.1, precision)
    work = ClientWork(loaded.partition(0, 4).train, state, 0.5, steps, WORK)
    loop = TrainingLoop(model, loaded.task, work)
    with model.holding(state):
        model.method.choose(model.adapters, 0.5, WORK.generator("heads"), loop.measure)
        loop.backward()
        return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def off(got, expected):
    return float((got - expected).norm() / expected.norm())


@pytest.fixture(scope="module", params=["vit", "llama"])
def settings(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    preset = {"vit": "cifar100-vit-b16", "llama": "glue-llama"}[request.param]
    task = "rte" if preset == "glue-llama" else ""
    save_data(preset, folder / "data", task, 40, 10)
    save_model(request.param, folder / "model")
    found: dict[str, Scalar] = {
        "preset": preset, "model": str(folder / "model"), "data": str(folder / "data"),
        "device": "cpu", "partition": "iid", "batch-size": 8, "rank": 3,
    }  # fmt: skip
    return found | ({"glue-task": task} if task else {})


def narrowed(settings, monkeypatch):
    """Return the model as a GPU with precision=bfloat16 has it."""
    monkeypatch.setattr(model_and_data, "computes_narrowly", lambda *_: True)
    monkeypatch.setattr(model_and_data, "backbone_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(
        model_and_data, "keep_casts", lambda network, multiple: keep_casts(network, 8)
    )
    return ModelAndData(read_config(settings | {"precision": "bfloat16"}))


def test_the_residual_stream_stays_in_16_bits_and_gradients_are_as_near(settings, monkeypatch):
    exact = gradients(ModelAndData(read_config(settings | {"precision": "float32"})), "float32")
    with_autocast = ModelAndData(read_config(settings | {"precision": "bfloat16"}))
    loss_of_autocast = off(gradients(with_autocast, "bfloat16"), exact)
    loaded = narrowed(settings, monkeypatch)
    dtypes = set()
    for module in loaded.model.network.modules():
        if isinstance(module, NarrowLayerNorm) or type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(
                lambda _, inputs, output: dtypes.update([inputs[0].dtype, output.dtype])
            )
    assert off(gradients(loaded, "bfloat16"), exact) < 1.5 * loss_of_autocast < 0.05
    assert dtypes == {torch.bfloat16}
    trained = {parameter.dtype for parameter in loaded.model.parameters()}
    assert trained == {torch.float32}


def test_kept_bases_have_padded_ranks_and_give_the_same_gradients(settings):
    runs = [ModelAndData(read_config(settings | {"precision": "bfloat16"})) for _ in range(2)]
    keep_casts(runs[1].model.network, 8)
    plain, padded = (gradients(loaded, "bfloat16") for loaded in runs)
    assert off(padded, plain) < 1e-2
    adapter = runs[1].model.adapters[0]
    assert adapter.A_stack.kept_cast[1].shape == (4 * 8, adapter.A_stack.shape[1])
    assert adapter.B_stack.kept_cast[1].shape == (adapter.B_stack.shape[0], 4 * 8)
    assert adapter.A_stack.shape[0] == 4 * 3


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({}, "auto"), ({"float32-matmul": "tf32"}, "factored"),
        ({"precision": "bfloat16"}, "factored"), ({"precision": "float16"}, "factored"),
        ({"backbone-dtype": "4bit"}, "factored"), ({"backbone-dtype": "8bit"}, "factored"),
        ({"backbone-dtype": "bfloat16"}, "auto"),
    ],
)  # fmt: skip
def test_low_precision_layers_are_factored_and_never_merged(settings, form):
    """A merged weight of 10 bits would lose small updates."""
    method = make_method(read_config(settings), [Layer("x", 64, 64)], 0)
    assert method.settings.layer_form == form
    if "float32-matmul" in settings:
        loaded = ModelAndData(read_config(settings | {"device": "cpu"}))
        assert {adapter.form for adapter in loaded.model.adapters} == {form}


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"precision": "bfloat16"}, torch.bfloat16),
        ({"precision": "bfloat16", "backbone-dtype": "float32"}, torch.float32),
        ({"precision": "bfloat16", "method": "full"}, torch.float32),
    ],
)
def test_bfloat16_on_a_gpu_stores_a_frozen_network_so(changes, dtype):
    config = read_config(CUDA | changes)
    assert backbone_dtype(config, "cuda") == dtype
    assert backbone_dtype(config, "cpu") == torch.float32


@pytest.mark.parametrize(
    "changes",
    [{"cuda-graphs": "off"}, {"gradient-checkpointing": True}, {"privacy": "example",
      "epsilon": 5.0}],
)  # fmt: skip
def test_some_steps_are_never_captured(changes):
    assert captures_steps(read_config(CUDA))
    assert not captures_steps(read_config(CUDA | changes))


def test_examples_on_a_device_are_the_same(monkeypatch):
    config = read_config({})
    images = load_splits(config.data)["train"].select(range(10)).select_columns(["image"])
    by_file = encoded_as_it_is(images)
    monkeypatch.setattr("ravan_flwr.tasks.base.BLOCK", 3)
    monkeypatch.setattr("ravan_flwr.tasks.base.IN_MEMORY", 0)
    rows = np.array([7, 0, 9])
    for examples in (by_file, encoded_as_it_is(images)):
        placed = examples.select(np.arange(1, 10)).on(torch.device("cpu"))
        assert len(placed) == 9
        assert isinstance(placed.table, dict)
        expected = examples.take(rows[:2] + 1)
        assert torch.equal(placed.take(rows[:2])["image"], expected["image"])


@pytest.mark.parametrize(
    ("settings", "free", "is_placed"),
    [
        ({}, 10**9, True),
        ({}, 10_000, False),
        ({"privacy": "example", "epsilon": 5.0}, 10**9, False),
    ],
)  # fmt: skip
def test_images_lie_on_a_gpu_where_they_take_little_of_its_memory(
    settings, free, is_placed, monkeypatch
):
    """A digit has 8 x 8 numbers of 4 bytes and a label of 8; a device's own digits count, too."""
    placed = []

    def on(encoded, device):
        placed.append(encoded.nbytes)
        return encoded

    monkeypatch.setattr(Encoded, "on", on)
    monkeypatch.setattr(model_and_data, "likely_device", lambda _: "cuda")
    monkeypatch.setattr(model_and_data, "free_memory", lambda _: free)
    loaded = ModelAndData(read_config({"device": "cpu"} | settings))
    loaded.partition(0, 4)
    _ = loaded.test_sets
    assert len(placed) == 2 * is_placed
    monkeypatch.setattr(
        model_and_data, "device_examples", lambda *_: loaded.splits["train"].select(range(9))
    )
    loaded.device_examples("/data", 0)
    assert placed[2:] == [9 * (4 * 64 + 8)] * is_placed


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [({}, True), ({"float32-matmul": "tf32"}, False), ({"precision": "bfloat16"}, False)],
)
def test_a_plan_and_a_run_in_exact_float32_on_a_gpu_tell_of_tf32(settings, is_told, caplog):
    config = read_config({"device": "cuda"} | settings)
    assert ("float32-matmul=tf32" in describe(config)) is is_told
    assert "float32-matmul=tf32" not in describe(replace(config, device="cpu"))
    for kind, expected in (("cuda", is_told), ("cpu", False)):
        caplog.clear()
        loaded: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(kind)))
        with caplog.at_level("INFO", "ravan_flwr"):
            report_float32(loaded, config)
        assert ("float32-matmul=tf32" in caplog.text) is expected


@pytest.mark.slow
def test_the_memory_of_captured_steps_limits_the_clients_of_a_gpu_but_not_a_run(monkeypatch):
    step, need = step_memory(read_config(CUDA), 1.0), footprint(read_config(CUDA))
    assert step.graph == need.graph == step.activations > 0
    assert step.total == step.weights + step.trained + 2 * step.activations
    assert step_memory(read_config(CUDA | {"cuda-graphs": "off"}), 1.0).graph == 0

    def fitting(room):
        total = round(room / sharing.USABLE) + 1
        gpus = [Gpu(index="0", uuid="GPU-0", name="G", free=total, total=total)]
        monkeypatch.setattr(sharing, "visible_gpus", lambda _: gpus)
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        return share_gpus(read_config(CUDA | {"clients-per-round": 8}), 20).clients_per_gpu

    assert fitting(need.server + need.client) == 1  # eager steps
    assert fitting(need.server + 2 * need.client) == 1
    assert fitting(need.server + 2 * (need.client + need.graph)) == 2
