"""Private steps on real digits: Poisson batches, microbatches, fresh noise, and refusals."""

import math
import weakref
from contextlib import contextmanager, suppress

import datasets
import numpy as np
import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.example_privacy import gradients as example_gradients
from ravan_flwr.extras.example_privacy import steps as private_steps
from ravan_flwr.extras.example_privacy.gradients import StepNoise
from ravan_flwr.extras.example_privacy.steps import (
    PrivateTrainingLoop,
    encode_each,
    sampling_rate,
    train_privately,
)
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.base import Encoded
from ravan_flwr.training import local_steps
from ravan_flwr.training.local_steps import ClientWork, make_training_settings, seed_dropout
from ravan_flwr.training.model_and_data import ModelAndData

QUIET = StepNoise(1e-12, 1e6)  # neither noise nor clipping
WORK = ClientRound(0, 1, 3)


def loaded_of(**settings):
    config: dict[str, Scalar] = {
        "method": "ravan", "partition": "iid", "local-steps": 2, "lora-rank": 1,
    }  # fmt: skip
    return ModelAndData(read_config(config | {k.replace("_", "-"): v for k, v in settings.items()}))


@pytest.fixture(scope="module")
def loaded():
    return loaded_of()


def trained(loaded, noise, rows=64, fraction=1.0):
    examples = loaded.partition(3, 20).train.select(np.arange(rows))
    steps, state = make_training_settings(loaded.config, 1, rows), loaded.model.initial_state()
    work = ClientWork(examples, state, fraction, steps, WORK)
    return train_privately(loaded.model, loaded.task, work, noise)


def all_rows(number, _):
    return np.arange(number)


@contextmanager
def moved(loaded):
    """Load the initial state with 0.01 added to all that is trained; yield its parameters."""
    with loaded.model.holding(loaded.model.initial_state()):
        parameters = loaded.model.parameters()
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(0.01)
        yield parameters


def assert_close(found, expected, rtol=1e-3, atol=1e-7):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def gradients_of_step(loaded, noise, **settings):
    config = loaded_of(**settings).config if settings else loaded.config
    examples = loaded.partition(3, 20).train.select(np.arange(48))
    work = ClientWork(examples, {}, 1.0, make_training_settings(config, 1, 48), WORK)
    loop = PrivateTrainingLoop(loaded.model, loaded.task, work, noise)
    with moved(loaded) as parameters:
        loop.train(parameters[:0])  # no update
        loop.settings = make_training_settings(read_config({"local-steps": 1}), 1, 48)
        loop.train(parameters)
        return [parameter.grad.clone() for parameter in parameters]


@pytest.fixture
def draw_all(monkeypatch):
    monkeypatch.setattr(private_steps, "subsample", all_rows)


def test_without_noise_and_clipping_a_step_is_plain_on_its_draw(loaded, draw_all):
    """Where all examples are drawn, the step is the mean times drawn by expected examples."""
    of_48 = gradients_of_step(loaded, QUIET, batch_size=32)
    of_all = gradients_of_step(loaded, QUIET, batch_size=48)
    assert_close(of_48, [gradient * 48 / 32 for gradient in of_all], atol=1e-6)
    examples = loaded.partition(3, 20).train.select(np.arange(48))
    with moved(loaded) as parameters:
        loaded.model.network.train()
        loaded.task.loss(loaded.model.network, examples.take(np.arange(48))).backward()
        assert_close(of_all, [parameter.grad for parameter in parameters], atol=1e-6)


@pytest.mark.parametrize("size", [5, 1])
def test_a_too_large_draw_is_split_into_parts(loaded, draw_all, size):
    noise = StepNoise(1e-9, 0.5)
    parts = gradients_of_step(loaded, noise, micro_batch_size=size)
    assert_close(gradients_of_step(loaded, noise), parts)


def test_a_network_is_freed_after_private_rounds(without_collector):
    """So are the sums of a round, in float64 beside the network, before the next round begins."""
    loaded = loaded_of()
    network = weakref.ref(loaded.model.network)
    trained(loaded, StepNoise(1.0, 1.0))
    del loaded
    assert network() is None


def test_a_failing_example_is_zero_and_affects_no_other(loaded, draw_all, monkeypatch, caplog):
    """Skipping the whole step would make the others' update depend on that example."""
    noise, took = StepNoise(1e-9, 0.5), Encoded.take
    complete = gradients_of_step(loaded, noise)
    without = [7, 30]
    monkeypatch.setattr(
        private_steps, "subsample", lambda number, _: np.delete(np.arange(number), without)
    )
    expected = gradients_of_step(loaded, noise)

    def take(self, rows):
        if set(rows) & set(without):
            raise OSError("image of Jane Doe is truncated")
        return took(self, rows)

    monkeypatch.setattr(private_steps, "subsample", all_rows)
    monkeypatch.setattr(Encoded, "take", take)
    found = gradients_of_step(loaded, noise)
    assert "example 8 counts as zero: OSError: image of Jane Doe is truncated" in caplog.text
    assert len(caplog.records) == 2
    assert_close(found, expected)
    for one, all_of_them in zip(found, complete, strict=True):
        assert not torch.allclose(one, all_of_them, rtol=1e-3, atol=1e-7)


class Chooses:
    """A task that raises for some examples, and excludes others."""

    def __init__(self, wrong, left_out):
        self.wrong, self.left_out = wrong, left_out

    def encode(self, examples):
        values = np.array(examples["x"])
        if set(values) & set(self.wrong):
            raise ValueError("got unknown labels")
        included = values[~np.isin(values, self.left_out)]
        return Encoded({"x": torch.from_numpy(included)}, np.arange(len(included)))


@pytest.mark.parametrize(("wrong", "left_out"), [([], []), ([0], []), ([3, 11], [4]), ([], [5, 6])])
def test_examples_that_cannot_be_encoded_count_and_fail_when_read(wrong, left_out):
    examples = datasets.Dataset.from_dict({"x": range(12)})
    encoded = encode_each(Chooses(wrong, left_out), examples)  # type: ignore[arg-type]
    assert len(encoded) == 12
    read = []
    for row in range(12):
        with suppress(IndexError):
            read += encoded.take(np.array([row]))["x"].tolist()
    assert read == [value for value in range(12) if value not in (*wrong, *left_out)]
    with pytest.raises(ValueError, match="none of 12 examples can be used: example 1: got unknown"):
        encode_each(Chooses(range(12), []), examples)  # type: ignore[arg-type]


def test_examples_that_cannot_be_encoded_are_reported_once(loaded, draw_all, caplog):
    """They come last among the rows, so that a step would report them by other numbers."""
    digits = loaded.splits["train"].select(range(12))
    labels = [str(label) for label in digits["label"]]
    labels[2] = "a zebra"
    examples = encode_each(loaded.task, digits.remove_columns("label").add_column("label", labels))
    state, steps = loaded.model.initial_state(), make_training_settings(loaded.config, 1, 12)
    work = ClientWork(examples, state, 1.0, steps, WORK)
    train_privately(loaded.model, loaded.task, work, StepNoise(1.0, 1.0))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "1 of 12 examples cannot be used" in message
    assert "example 3" in message


def test_gradient_checkpointing_changes_nothing(loaded, draw_all):
    noise = StepNoise(1e-9, 0.5)
    other = loaded_of(gradient_checkpointing=True)
    found = gradients_of_step(other, noise)
    assert_close(gradients_of_step(loaded, noise), found, rtol=1e-4)


def test_an_empty_draw_gives_a_step_of_noise_alone(loaded, monkeypatch):
    monkeypatch.setattr(private_steps, "subsample", lambda *_: np.arange(0))
    noise = StepNoise(3.0, 0.5)
    gradient = torch.cat([g.flatten() for g in gradients_of_step(loaded, noise)])
    assert float(gradient.std()) == pytest.approx(3.0 * 0.5 / 32, rel=0.1)
    for still in gradients_of_step(loaded, QUIET):
        assert still.abs().max() < 1e-5


def test_clipping_bounds_the_gradient(loaded, draw_all):
    gradients = gradients_of_step(loaded, StepNoise(1e-9, 0.5))
    norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
    assert 0.01 < norm <= 0.5 * 48 / 32


def test_drawn_examples_do_not_depend_on_the_seed(loaded):
    examples = loaded.partition(3, 20).train
    steps = make_training_settings(loaded.config, 1, len(examples))
    orders = []
    for _ in range(2):
        work = ClientWork(examples, {}, 1.0, steps, WORK)
        loop = PrivateTrainingLoop(loaded.model, loaded.task, work, QUIET)
        order = loop.draw_batches()
        orders.append([next(order).tolist() for _ in range(20)])
    assert orders[0] != orders[1]
    assert len({len(rows) for rows in orders[0]}) > 3  # Poisson sampling: batches differ in size
    assert loop.rate == 32 / len(examples)


def test_noise_does_not_depend_on_the_seed(loaded, monkeypatch):
    """With equal draws, two rounds differ by their noise alone."""
    monkeypatch.setattr(private_steps, "subsample", all_rows)
    for is_noisy in (True, False):
        one, other = (trained(loaded, StepNoise(1.0, 1.0)).upload["H"] for _ in range(2))
        assert torch.equal(one, other) != is_noisy
        monkeypatch.setattr(
            example_gradients, "gaussian", lambda shape, _: torch.zeros(shape).double()
        )


def test_dropout_is_not_seeded(loaded, monkeypatch):
    seeds = []

    def recording(number, device):
        seeds.append(number)
        return seed_dropout(number, device)

    monkeypatch.setattr(local_steps, "seed_dropout", recording)
    trained(loaded, QUIET, rows=4)
    trained(loaded, QUIET, rows=4)
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("rows", [1, 2, 20])
def test_a_client_with_few_examples_uses_all_in_every_batch(loaded, rows):
    assert sampling_rate(32, rows) == 1.0
    H = trained(loaded, StepNoise(1.0, 1.0), rows=rows).upload["H"]
    assert H.isfinite().all()
    assert H.any()


def test_the_model_is_restored_and_only_selected_heads_are_trained(loaded):
    before = {
        name: (p.detach().clone(), p.requires_grad)
        for name, p in loaded.model.network.named_parameters()
    }
    result = trained(loaded, StepNoise(1.0, 1.0), fraction=0.5)
    assert len(result.upload["H"]) == len(loaded.model.layers) * 2
    assert math.isnan(result.train_loss)
    for name, p in loaded.model.network.named_parameters():
        assert torch.equal(p, before[name][0])
        assert p.requires_grad == before[name][1]
        assert p.grad is None


def test_dependent_examples_are_refused_before_training(monkeypatch):
    loaded = loaded_of()
    logits = type(loaded.task).logits

    def mixed(*given):
        found = logits(*given)
        return found - found.mean(0, keepdim=True)

    monkeypatch.setattr(type(loaded.task), "logits", mixed)
    with pytest.raises(ValueError, match="depends on the other examples of its batch"):
        trained(loaded, QUIET)
