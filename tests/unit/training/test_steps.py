"""Microbatches, schedules, decay and clipping equal plain code; defaults have no effect."""

import itertools
import math
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.base import Encoded
from ravan_flwr.training.batching import split_batches
from ravan_flwr.training.local_steps import (
    ClientWork,
    learning_rate_in_round,
    make_training_settings,
    read_batches,
    seed_dropout,
    train_locally,
)
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import adam
from tests.short_runs import same_bits

WORK = ClientRound(0, 1, 0)
QUICK = {"lora-rank": 2, "local-steps": 3, "batch-size": 12, "learning-rate": 1e-2}


def trained(loaded, **changes):
    config = read_config(QUICK | changes)
    examples = loaded.partition(0, 5).train
    state = loaded.model.initial_state()
    steps = make_training_settings(config, 1, len(examples))
    return train_locally(loaded.model, loaded.task, ClientWork(examples, state, 1.0, steps, WORK))


@pytest.fixture(scope="module")
def loaded():
    return ModelAndData(read_config(QUICK))


@pytest.mark.parametrize(("device", "asynchronous"), [("mps", False), ("cuda", True)])
def test_only_pinned_memory_is_copied_asynchronously(device, asynchronous):
    """MPS reads a batch's memory later, when the reader may have overwritten it."""
    copies = []

    class Pixels:
        def pin_memory(self):
            return self

        def to(self, device, non_blocking=False):
            copies.append(non_blocking)

    examples = Encoded({"pixels": torch.zeros(4)}, np.arange(4))
    order = iter([np.arange(2), np.arange(2, 4)])
    pixels: Any = Pixels()
    batches = read_batches(examples, lambda _: {"pixels": pixels}, order, torch.device(device))
    assert len([*batches]) == 2
    assert copies == [asynchronous] * 2


@pytest.mark.parametrize(("device", "fused"), [("cpu", True), ("cuda", True), ("mps", None)])
def test_adam_is_fused_or_pytorchs_default(device, fused, monkeypatch):
    """`fused=False` would update one parameter after the other."""
    options = {}
    monkeypatch.setattr(torch.optim, "Adam", lambda _, **kwargs: options.update(kwargs))
    adam([], 0.1, 0.0, torch.device(device))
    assert options["fused"] is fused


def test_batches_are_cut_into_parts_in_their_order():
    batches = [np.arange(7), np.arange(7, 12), np.arange(12, 14)]
    parts, numbers = split_batches(iter(batches), 3)
    assert np.concatenate(list(parts)).tolist() == list(range(14))
    assert list(numbers) == [3, 2, 1]


@pytest.mark.parametrize("size", [5, 1])
def test_microbatches_give_the_same_steps(loaded, size):
    complete, parts = trained(loaded), trained(loaded, **{"micro-batch-size": size})
    assert parts.train_loss == pytest.approx(complete.train_loss, rel=1e-5)
    for name, tensor in complete.upload.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(parts.upload[name], tensor, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"micro-batch-size": 12}, {"optimizer": "adam:0:1e9"}, {"server-optimizer": "none"}],
)  # fmt: skip
def test_settings_without_effect_change_no_bit(loaded, changes):
    before, after = trained(loaded), trained(loaded, **changes)
    assert before.train_loss == after.train_loss
    assert same_bits(before.upload, after.upload)


def test_decay_and_clipping_equal_pytorchs(loaded, monkeypatch):
    optimizers, clipped_norms = [], []
    adam_w, clip = torch.optim.AdamW, torch.nn.utils.clip_grad_norm_

    def recording(parameters, **options):
        optimizers.append(options)
        return adam_w(parameters, **options)

    def clipped(parameters, most):
        clipped_norms.append(float(clip(parameters, most)))
        after = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        assert float(after) <= most * 1.001

    monkeypatch.setattr(torch.optim, "AdamW", recording)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)
    trained(loaded, optimizer="adam:0.1:1e-3")
    assert optimizers[0]["weight_decay"] == 0.1
    assert len(clipped_norms) == 3
    assert max(clipped_norms) > 1e-3


@pytest.mark.parametrize("number", [1, 2, 77, 199, 200])
def test_the_cosine_schedule_equals_flowertunes(number):
    settings: dict[str, Any] = {"learning-rate": 5e-5, "num-rounds": 200}
    settings["learning-rate-schedule"] = "cosine"
    theirs = 1e-6 + 0.5 * (5e-5 - 1e-6) * (1 + math.cos(math.pi * number / 200))
    assert learning_rate_in_round(read_config(settings), number) == pytest.approx(theirs)


def test_the_learning_rate_warms_up():
    def rates(schedule):
        settings = {"learning-rate": 1.0, "learning-rate-schedule": schedule, "num-rounds": 9}
        return [learning_rate_in_round(read_config(settings), n) for n in range(1, 10)]

    assert rates("constant:3") == [0.25, 0.5, 0.75] + [1.0] * 6
    falling = rates("cosine:0:3")
    assert max(falling) == falling[3]
    assert falling[-1] == pytest.approx(0, abs=1e-12)


def test_contradictory_settings_are_refused():
    with pytest.raises(ValueError, match="micro-batch-size = 33: got batch-size = 32"):
        read_config({"micro-batch-size": 33})
    with pytest.raises(ValueError, match=r"'cosine:1': got learning-rate = 0\.1"):
        read_config({"learning-rate": 0.1, "learning-rate-schedule": "cosine:1"})


def test_a_client_without_any_training_example_is_reported():
    examples = datasets.Dataset.from_dict({"user": ["a", "b", "b"], "text": ["x", "y", "z"]})
    loaded = ModelAndData(read_config({}))
    vars(loaded).update(splits={"train": examples}, _train=examples.select([0, 1]))
    loaded._check_users("user")  # each client has a training example
    vars(loaded)["_train"] = examples.select([1, 2])
    with pytest.raises(ValueError, match="no example of 'a' can be learned.*value of 'user'"):
        loaded._check_users("user")


def test_dropout_is_pytorchs_of_a_seed_by_work_and_the_generator_is_restored():
    before, found = torch.get_rng_state(), []
    for work in (ClientRound(0, 1, 1), ClientRound(0, 1, 2), ClientRound(0, 2, 1)):
        seed = work.derive("dropout")
        with seed_dropout(seed, torch.device("cpu")):
            found.append(torch.rand(5))
        with torch.random.fork_rng([]):
            torch.manual_seed(seed % 2**63)
            assert torch.equal(torch.rand(5), found[-1])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))
    assert torch.equal(torch.get_rng_state(), before)
