"""Several clients in one pass are the same clients one by one."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ravan_flwr.client import answers
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch import parallel_clients
from ravan_flwr.launch.parallel_clients import clients_per_pass
from ravan_flwr.methods import METHODS as ALL_METHODS
from ravan_flwr.methods.base import split_classifier
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.captured import GraphCache
from ravan_flwr.training.local_steps import ClientWork, TrainingLoop, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import OptimizerStep, TrainingSettings
from ravan_flwr.training.together import reason_for_one_by_one, train_together
from tests import ROOT
from tests.short_runs import records_of, run, same_bits
from tests.support.recorder import Recorder

STEPS: dict[str, Any] = {
    "num_steps": 6, "batch_size": 16, "learning_rate": 0.003, "precision": "float32",
}  # fmt: skip
METHODS = ["ravan", "fedit", "ffa-lora", "fed-sb", "hetlora", "rolora"]


def made(method="ravan", **settings):
    config = {"device": "cpu", "method": method, **settings}
    return ModelAndData(read_config({name.replace("_", "-"): v for name, v in config.items()}))


def works(loaded, number=3, fraction=1.0, **options):
    """Return clients of 36 examples, and one of 5, with a state that is not zero."""
    random = torch.Generator().manual_seed(1)
    state = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=random)
        for name, tensor in loaded.model.initial_state().items()
    }
    own, classifier = split_classifier(state)
    steps = TrainingSettings(**STEPS | options)
    clients = []
    for client in range(number):
        examples = loaded.partition(client, 40).train
        examples = examples.select(np.arange(5)) if client == 1 else examples
        broadcast = {**loaded.model.method.broadcast(own, fraction), **classifier}
        clients.append(ClientWork(examples, broadcast, fraction, steps, ClientRound(0, 1, client)))
    return clients


def in_one_pass(loaded, clients):
    results = train_together(loaded.model, loaded.task, clients)
    assert None not in results
    return [result for result in results if result is not None]


def one_by_one(loaded, clients):
    return [train_locally(loaded.model, loaded.task, client) for client in clients]


def distance(results, expected):
    return max(
        float((one.upload[name].double() - tensor.double()).norm() / tensor.double().norm())
        for one, other in zip(results, expected, strict=True)
        for name, tensor in other.upload.items()
    )


@pytest.mark.slow(kept=4)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("classifier", ["frozen", "trained"])
@pytest.mark.parametrize(
    ("method", "fraction"),
    [*((method, 1.0) for method in METHODS), ("ravan", 0.5), ("hetlora", 0.5)],
)
def test_uploads_and_losses_are_those_of_single_clients(method, classifier, fraction, captured):
    loaded = made(method, classifier=classifier)
    clients = works(loaded, fraction=fraction)
    expected = one_by_one(loaded, clients)
    loaded.model.training_graphs = GraphCache(Recorder()) if captured else None
    results = in_one_pass(loaded, clients)
    # Adam magnifies the rounding of gradients near zero.
    assert distance(results, expected) < 1e-4
    assert distance(results[:1], expected[1:2]) > 1e-2  # clients differ
    for one, other in zip(results, expected, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-5)
        if "heads" in one.upload:
            assert torch.equal(one.upload["heads"], other.upload["heads"])
    loaded.model.training_graphs = None
    again = one_by_one(loaded, clients)
    for one, other in zip(again, expected, strict=True):
        assert same_bits(one.upload, other.upload)


@pytest.mark.parametrize("method", ["ravan", "fedit", "ffa-lora", "fed-sb"])
def test_gradients_are_those_of_single_clients(method, monkeypatch):
    """The first step's gradients, before Adam, agree to float32's rounding.

    The order of the sums, and with it the rounding, depends on the machine: 1.0e-6 was seen.
    """
    loaded = made(method, classifier="trained")
    model, found = loaded.model, []

    def keep(step):
        found.append([p.grad.detach().clone().view(step.clients, -1) for p in step.parameters])

    monkeypatch.setattr(OptimizerStep, "_clip", keep)
    clients = works(loaded, number=3, max_gradient_norm=1.0)
    train_together(model, loaded.task, clients)
    joint = found[0]
    for place, client in enumerate(clients):
        loop = TrainingLoop(model, loaded.task, client)
        with model.holding(client.broadcast):
            model.method.choose(
                model.adapters, 1.0, client.client_round.generator("heads"), loop.measure
            )
            parameters = model.parameters()
            loop.backward()
            gradients = [parameter.grad.flatten() for parameter in parameters]
        for one, other in zip(joint, gradients, strict=True):
            assert float((one[place] - other).norm()) <= 3e-6 * max(1.0, float(other.norm()))


@pytest.mark.parametrize(
    "options", [{"max_gradient_norm": 0.05}, {"proximal_mu": 0.5}, {"weight_decay": 0.5}]
)
def test_clipping_decay_and_the_proximal_term_are_each_clients_own(options):
    loaded = made()
    clients, plain = works(loaded, **options), works(loaded)
    results = in_one_pass(loaded, clients)
    assert distance(results, one_by_one(loaded, clients)) < 1e-4
    if "max_gradient_norm" not in options:  # Adam hardly depends on the scale of gradients
        assert distance(results, one_by_one(loaded, plain)) > 1e-3


def test_clients_with_other_settings_or_shapes_train_alone():
    loaded = made()
    first, _, third = works(loaded)
    half = works(loaded, fraction=0.5)[1]
    later = works(loaded, learning_rate=0.1)[2]
    results = train_together(loaded.model, loaded.task, [first, half, later, third])
    assert [result is None for result in results] == [False, True, True, False]
    assert distance([results[0], results[3]], one_by_one(loaded, [first, third])) < 1e-4


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({}, ""),
        ({"method": "full"}, "more than the factors"),
        ({"method": "fedex-lora"}, "more than the factors"),
        ({"method": "fedsa-lora"}, "stay with each client"),
        ({"method": "none"}, "no adapter"),
        ({"scoring": "gradient"}, "scoring=gradient"),
        ({"micro_batch_size": 4}, "micro-batch-size"),
    ],
)
def test_reasons_to_train_one_by_one(settings, part):
    loaded = made(**settings)
    steps = TrainingSettings(
        1, 8, 0.1, "float32", micro_batch_size=settings.get("micro_batch_size")
    )
    reason = reason_for_one_by_one(loaded.model, loaded.task, steps)
    assert part in reason
    assert bool(reason) == bool(part)
    loaded.model.network.config.hidden_dropout_prob = 0.1
    assert part or "dropout" in reason_for_one_by_one(loaded.model, loaded.task, steps)


def test_the_page_names_the_methods_whose_clients_train_in_one_pass():
    """A round of `centralised` has one client."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    (named,) = re.findall(r"This works for (.*?), also with a trained classifier", page)
    steps = TrainingSettings(**STEPS)
    together = set()
    for method in ALL_METHODS:
        loaded = made(method)
        if not reason_for_one_by_one(loaded.model, loaded.task, steps):
            together.add(method)
    assert {*re.findall("`(.*?)`", named)} == together - {"centralised"}


def test_a_network_with_a_rate_of_dropout_for_each_stage_trains_one_by_one(tmp_path):
    """CvT leaves out paths of its third stage, by its default configuration."""
    config = transformers.CvtConfig(embed_dim=[8] * 3, num_heads=[1] * 3, depth=[1, 2, 3])
    transformers.CvtModel(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    loaded = made(preset="svhn-vit-b16", model=str(tmp_path), rank=2)
    steps = TrainingSettings(**STEPS)
    assert "has dropout" in reason_for_one_by_one(loaded.model, loaded.task, steps)
    loaded.model.network.config.drop_path_rate = [0.0] * 3
    assert not reason_for_one_by_one(loaded.model, loaded.task, steps)


RUN: dict[str, Scalar] = {
    "clients-per-round": 5, "local-steps": 4, "device": "cpu", "budgets": "uniform", "processes": 1,
    "batch-size": 32,
}  # fmt: skip


@pytest.mark.slow
def test_a_run_in_passes_is_the_run_one_by_one(tmp_path):
    runs = [records_of(run(tmp_path, 12, RUN, clients_per_pass=number)) for number in (1, 3)]
    for one, other in zip(*runs, strict=True):
        assert other["train-loss"] == pytest.approx(one["train-loss"], rel=1e-4)
        assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-3)
        for client, same in zip(one["clients"], other["clients"], strict=True):
            keys = ("partition-id", "heads", "examples", "bytes-up", "bytes-down")
            assert {key: client[key] for key in keys} == {key: same[key] for key in keys}
            assert same["seconds"] > 0


def counted(monkeypatch):
    """Return two lists, of the clients of each pass, and of those that train alone."""
    passes: list[list[int]] = []
    alone: list[int] = []

    def train(model, task, clients):
        results = train_together(model, task, clients)
        trained = zip(clients, results, strict=True)
        passes.append(
            [one.client_round.partition_id for one, result in trained if result is not None]
        )
        return results

    def train_alone(model, task, work):
        alone.append(work.client_round.partition_id)
        return train_locally(model, task, work)

    monkeypatch.setattr(answers, "train_together", train)
    monkeypatch.setattr(answers, "train_locally", train_alone)
    return passes, alone


def test_clients_of_mixed_budgets_train_once_each(tmp_path, monkeypatch):
    """Between the messages of a pass lie those of other budgets, which begin other passes."""
    passes, alone = counted(monkeypatch)
    settings = {**RUN, "clients-per-round": 12, "local-steps": 1, "batch-size": 8}
    result = run(tmp_path, 12, settings, num_rounds=2, clients_per_pass=2)
    budgets = {client["heads"] for client in records_of(result)[0]["clients"]}
    assert len(budgets) > 1
    assert sorted([*itertools.chain(*passes), *alone]) == sorted([*range(12)] * 2)
    assert len(alone) <= 2 * len(budgets)  # at most one is left of each budget
    assert {len(clients) for clients in passes} == {2}


def test_clients_with_other_numbers_of_steps_have_passes_of_their_own(monkeypatch, tmp_path):
    """Of 1,438 examples four clients have 240, two steps of 239, and two have 239, one step."""
    passes, alone = counted(monkeypatch)
    settings = {"local-steps": "epochs:1", "batch-size": 239, "clients-per-round": 6}
    settings |= {"device": "cpu", "processes": 1, "partition": "iid"}
    run(tmp_path, 6, settings, num_rounds=1, clients_per_pass=6)
    assert sorted(map(len, passes)) == [2, 4]
    assert not alone
    assert sorted(itertools.chain(*passes)) == [*range(6)]


@pytest.mark.parametrize(
    ("settings", "number", "reason"),
    [
        ({"clients-per-round": 50}, 32, ""),
        ({"clients-per-round": 3}, 3, ""),
        ({"clients-per-round": 50, "clients-per-pass": 40}, 40, ""),
        ({"preset": "cifar100-vit-b16", "clients-per-round": 50}, 1, ""),
        ({"clients-per-round": 50, "method": "fedsa-lora"}, 1, "stay with each client"),
        ({"clients-per-round": 50, "method": "full", "clients-per-pass": 4}, 1, "more than"),
        ({"clients-per-round": 50, "privacy": "example", "epsilon": 5.0}, 1, "privacy=example"),
    ],
)
def test_a_gpu_gets_as_many_clients_in_a_pass_as_keep_it_busy(
    settings, number, reason, monkeypatch, caplog
):
    """ViT-B/16 keeps a GPU busy alone; where passes are refused, the log has the reason."""
    loaded = made(method=settings.get("method", "ravan"))
    _ = loaded.model
    monkeypatch.setattr(parallel_clients, "get_model_and_data", lambda _: loaded)
    config = read_config({"device": "cpu", **settings})
    if config.clients_per_pass is None:
        assert clients_per_pass(config, 100) == 1  # on a CPU
    monkeypatch.setattr(AdaptedModel, "device", torch.device("cuda"))
    caplog.clear()
    with caplog.at_level("INFO", "ravan_flwr"):
        assert clients_per_pass(config, 100) == number
    text = " ".join(record.getMessage() for record in caplog.records)
    assert reason in text
    assert ("one by one" in text) == bool(reason)


@pytest.mark.slow
def test_a_pass_that_fails_leaves_the_run_as_it_is(tmp_path, monkeypatch, capsys):
    expected = records_of(run(tmp_path, 12, RUN))

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(answers, "train_together", fail)
    found = records_of(run(tmp_path, 12, RUN, clients_per_pass=3))
    assert capsys.readouterr().out.count("one by one from now on") == 1
    assert [one["metrics"] for one in found] == [one["metrics"] for one in expected]
