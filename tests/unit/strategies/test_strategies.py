"""The strategies in Flower's own loop: the app's results, FedAvg's rules, and invalid replies."""

import dataclasses
import re
import uuid
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

from ravan_flwr import strategies
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.tensors import flatten
from ravan_flwr.strategies import (
    FedExLoraStrategy,
    FedSBStrategy,
    FFALoraStrategy,
    FlexLoraStrategy,
    RavanStrategy,
)
from ravan_flwr.strategies.base import RESIDUAL
from ravan_flwr.strategies.lora import LoraArrays
from tests.hand_made import Nodes, fake_clock, run
from tests.methods import LAYERS, build

__all__ = ["fake_clock"]

HEADS, RANK = 3, 2
SHARES = (1.0, 0.34, 0.67, 0.67)
BASELINES = {
    "fedex-lora": FedExLoraStrategy,
    "ffa-lora": FFALoraStrategy,
    "fedmomentum": strategies.FedMomentumStrategy,
    "fedrot-lora": strategies.FedRotLoraStrategy,
    "fedsvd": strategies.FedSVDStrategy,
    "flexlora": FlexLoraStrategy,
    "hetlora": strategies.HetLoraStrategy,
    "lora-fair": strategies.LoraFairStrategy,
    "raflora": strategies.RaFLoraStrategy,
}


# The app's server, and the replies that it received.


class Recorded(Nodes):
    """Nodes of different budget fractions, whose uploads are kept by round."""

    def __init__(self, method, **changes):
        super().__init__(len(SHARES))
        self.method, self.adapters = build(method, **changes)
        for (node, one), fraction in zip(self.registered.items(), SHARES, strict=True):
            if self.method.budget_units is not None:  # else all train all parameters
                self.registered[node] = dataclasses.replace(one, budget_fraction=fraction)
        self.uploads: dict[int, list[dict[str, torch.Tensor]]] = {}

    def reply(self, message, upload, number):
        self.uploads.setdefault(number, []).append(upload)
        return super().reply(message, upload, number)


def app_run(method, rounds=2, weighting="uniform", **changes):
    """Return the states after each round of the app, and the uploads of each round."""
    nodes = Recorded(method, **changes)
    settings = {"clients_per_round": len(SHARES), "weighting": weighting}
    notes, _, _ = run(nodes, rounds=rounds, method=method, **settings)
    start = nodes.method.initial_state(nodes.adapters)
    return nodes.method, [start, *notes.states], nodes.uploads


def named(uploads, form):
    return {number: [form(upload) for upload in some] for number, some in uploads.items()}


def name_of(layer):
    return f"base_model.model.{layer.name}"


def named_heads(upload):
    """Return an upload of the app as arrays by name, by plain loops over the bits."""
    bits = [int(byte) >> place & 1 for byte in upload["heads"] for place in range(8)]
    arrays, at = {}, 0
    for position, layer in enumerate(LAYERS):
        heads = [head for head in range(HEADS) if bits[position * HEADS + head]]
        arrays[f"{name_of(layer)}.ravan_H"] = upload["H"][at : at + len(heads)].numpy()
        arrays[f"{name_of(layer)}.ravan_heads"] = np.array(heads)
        at += len(heads)
    return arrays


def named_factors(tensors):
    """Return B and A of the app, flat one layer after the other, as arrays by name."""
    arrays = {}
    for name, side in (("B", "out_features"), ("A", "in_features")):
        if name not in tensors:
            continue
        flat = tensors[name].numpy()
        rank, at = len(flat) // sum(getattr(layer, side) for layer in LAYERS), 0
        for layer in LAYERS:
            size = rank * getattr(layer, side)
            shape = (-1, rank) if name == "B" else (rank, -1)
            arrays[f"{name_of(layer)}.lora_{name}.weight"] = flat[at : at + size].reshape(shape)
            at += size
    return arrays


def start_of_heads(extra=()):
    arrays: dict[str, Any] = {}
    for layer in LAYERS:
        arrays[f"{name_of(layer)}.ravan_H"] = np.zeros((HEADS, RANK, RANK), np.float32)
        arrays[f"{name_of(layer)}.ravan_s"] = np.ones(HEADS, np.float32)
    return arrays | dict(extra)


# Flower's loop over hand-made replies.


def record(arrays):
    return ArrayRecord({name: Array(np.array(value)) for name, value in arrays.items()})


def measured(**metrics):
    named = {name.replace("_", "-"): value for name, value in metrics.items()}
    return RecordDict({"metrics": MetricRecord(named)})


def content(arrays, **metrics):
    return RecordDict({"arrays": record(arrays), **measured(**metrics)})


class Replying(InProcessGrid):
    """Nodes 1, 2, ...: they reply to training with `answer(round, place)`."""

    def __init__(self, number, answer, evaluate=lambda _: measured(num_examples=1, loss=1.0)):
        super().__init__({}, number)
        self.answer, self.evaluate, self.asked = answer, evaluate, []

    def _deliver(self, message):
        number, node = message.content["config"]["server-round"], message.metadata.dst_node_id
        kind = message.metadata.message_type
        self.asked.append((kind, number))
        trains = kind != "evaluate"
        content = self.answer(number, node - 1) if trains else self.evaluate(node - 1)
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        return reply


def loop(strategy, initial, replies, examples=None):
    """Return the arrays after Flower's own `start`; `replies` are arrays by name, by round."""
    nodes = len(next(iter(replies.values())))
    examples = examples or [1] * nodes

    def answer(number, place):
        return content(replies[number][place], num_examples=examples[place])

    result = strategy.start(Replying(nodes, answer), record(initial), num_rounds=len(replies))
    return {name: array.numpy() for name, array in result.arrays.items()}


def heads_of(arrays):
    return torch.stack(
        [torch.from_numpy(np.array(arrays[f"{name_of(layer)}.ravan_H"])) for layer in LAYERS]
    )


@pytest.mark.parametrize("head_mean", ["trained", "all"])
def test_ravan_equals_the_apps_ravan(head_mean):
    _, states, uploads = app_run("ravan", head_mean=head_mean)
    got = loop(RavanStrategy(head_mean=head_mean), start_of_heads(), named(uploads, named_heads))
    torch.testing.assert_close(heads_of(got), states[-1]["H"], rtol=0, atol=1e-6)
    assert not torch.equal(states[-1]["H"], states[1]["H"])
    assert all((got[f"{name_of(layer)}.ravan_s"] == 1).all() for layer in LAYERS)


@pytest.mark.parametrize(("method", "strategy"), [*BASELINES.items(), ("fedit", FedAvg)])
def test_a_baseline_equals_the_apps(method, strategy):
    app, states, uploads = app_run(method, rounds=3)
    start = states[0] | ({} if "A" in states[0] else {"A": flatten(app.initial_A)})
    got = loop(strategy(), named_factors(start), named(uploads, named_factors))
    for name, array in named_factors(states[-1]).items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-6, err_msg=name)
    added = [name for name in got if "residual" in name]
    assert bool(added) == (method in ("fedex-lora", "fedmomentum"))
    if added:
        state = {name: torch.from_numpy(got[name]) for name in added}
        expected = app.residuals(states[-1])
        for actual, residual in zip(app.residuals(state), expected, strict=True):
            torch.testing.assert_close(actual.dense(), residual.dense())


@pytest.mark.parametrize("method", BASELINES)
def test_a_resumed_run_continues_where_the_first_one_ended(method):
    """As the page has it: the arrays so far, and the rounds before; FedRot-LoRA's rounds differ."""
    app, states, uploads = app_run(method, rounds=3)
    start = named_factors(states[0] | ({} if "A" in states[0] else {"A": flatten(app.initial_A)}))
    replies = named(uploads, named_factors)
    expected = loop(BASELINES[method](), start, replies)
    first = loop(BASELINES[method](), start, {1: replies[1]})
    rest = Replying(len(SHARES), lambda n, place: content(replies[n + 1][place], num_examples=1))
    before = ConfigRecord({"rounds-before": 1})
    got = BASELINES[method]().start(rest, record(first), num_rounds=2, train_config=before).arrays
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name].numpy(), array, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", RESIDUAL)
def test_initial_arrays_have_residuals_and_their_rank_or_neither(name):
    arrays = {f"{FIRST}.lora_{factor}.weight": torch.ones(2, 2) for factor in "AB"}
    with pytest.raises(ValueError, match="array 'residual.*' is missing, expected both of"):
        LoraArrays({**arrays, name: torch.tensor([1])}, "fedex-lora", seed=0, server_round=1)


def named_cores(upload):
    pairs = zip(LAYERS, upload["H"], strict=True)
    return {f"{name_of(layer)}.ravan_H": H[None].numpy() for layer, H in pairs}


def test_fed_sb_equals_the_apps():
    _, states, uploads = app_run("fed-sb")
    del uploads[0]  # the calibration
    initial = {f"{name_of(x)}.ravan_H": np.zeros((1, RANK, RANK), np.float32) for x in LAYERS}
    got = loop(FedSBStrategy(), initial, named(uploads, named_cores))
    torch.testing.assert_close(heads_of(got)[:, 0], states[-1]["H"], rtol=0, atol=1e-6)


# FedAvg's rules.


def drawn(shapes, random):
    return {name: random.normal(size=x.shape).astype(np.float32) for name, x in shapes.items()}


def complete_replies(rounds, nodes=3):
    """Return replies in which all clients train every head, and a classifier."""
    random, shapes = np.random.default_rng(0), products_alone()
    return {n: [drawn(shapes, random) for _ in range(nodes)] for n in range(1, rounds + 1)}


def start_with_classifier():
    return start_of_heads({CLASSIFIER: np.ones((2, 3), np.float32)})


def products_alone():
    return {k: v for k, v in start_with_classifier().items() if not k.endswith("ravan_s")}


def assert_alike(got, expected):
    for name, array in expected.items():
        assert got[name].dtype == np.float32
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "optimizer",
    [None, FedAdam, FedYogi, FedAdagrad, partial(FedAvgM, server_momentum=0.9),
     partial(FedAdam, eta=0.5)],
)  # fmt: skip
def test_if_all_clients_train_all_heads_ravan_is_fedavg_or_the_optimiser_over_products(optimizer):
    replies, examples = complete_replies(3), [1, 5, 2]
    expected = loop((optimizer or FedAvg)(), products_alone(), replies, examples)
    strategy = RavanStrategy(weighting="examples", server_optimizer=optimizer and optimizer())
    assert_alike(loop(strategy, start_with_classifier(), replies, examples), expected)


def test_a_client_may_send_pefts_state_dict():
    random = np.random.default_rng(0)
    replies = [drawn(start_of_heads(), random) for _ in range(2)]
    got = loop(RavanStrategy(), start_of_heads(), {1: replies})
    for name in map(name_of, LAYERS):
        products = [x[f"{name}.ravan_s"][:, None, None] * x[f"{name}.ravan_H"] for x in replies]
        np.testing.assert_allclose(got[f"{name}.ravan_H"], np.mean(products, 0), atol=1e-6)


def test_the_order_of_heads_in_a_reply_does_not_matter():
    cores = np.arange(2 * 4, dtype=np.float32).reshape(2, RANK, RANK)
    reply = {f"{name_of(x)}.ravan_H": cores for x in LAYERS}
    reply |= {f"{name_of(x)}.ravan_heads": np.array([2, 0]) for x in LAYERS}
    got = loop(RavanStrategy(), start_of_heads(), {1: [reply, reply]})
    for layer in LAYERS:
        H = got[f"{name_of(layer)}.ravan_H"]
        assert (H[2] == cores[0]).all()
        assert (H[0] == cores[1]).all()
        assert not H[1].any()


def test_flowers_fractions_minimum_numbers_and_metrics_functions_work():
    replies = complete_replies(2, nodes=6)
    keys: list[tuple[int, str]] = []

    def metrics(contents, key):
        keys.append((len(contents), key))
        return MetricRecord({"mine": float(len(contents))})

    grid = Replying(
        6, lambda number, place: content(replies[number][place], rows=3, loss=1.0),
        lambda place: measured(rows=1 + place, accuracy=place / 10),
    )  # fmt: skip
    strategy = RavanStrategy(
        fraction_train=0.5, fraction_evaluate=0.1, min_evaluate_nodes=4, weighted_by_key="rows",
        train_metrics_aggr_fn=metrics,
    )  # fmt: skip
    result = strategy.start(grid, record(start_with_classifier()), num_rounds=2)
    for number in (1, 2):
        assert grid.asked.count(("train", number)) == 3
        assert grid.asked.count(("evaluate", number)) == 4
    assert keys == [(3, "rows")] * 2
    assert result.train_metrics_clientapp[2]["mine"] == 3.0
    assert result.evaluate_metrics_clientapp[2].keys() == {"accuracy"}
    assert RavanStrategy.start is FedAvg.start


# Invalid replies.

FIRST = f"base_model.model.{LAYERS[0].name}"


def some_heads(seed):
    random = np.random.default_rng(seed)
    reply: dict[str, Any] = {CLASSIFIER: np.ones((2, 3), np.float32) * seed}
    for layer in LAYERS:
        reply[f"{name_of(layer)}.ravan_H"] = random.normal(size=(2, RANK, RANK)).astype(np.float32)
        reply[f"{name_of(layer)}.ravan_heads"] = np.array([0, 2])
    return reply


def without(name):
    return lambda one: one["arrays"].pop(name)


def having(name, value):
    return lambda one: one["arrays"].update({name: Array(value)})


def counting(**metrics):
    return lambda one: one["metrics"].update({k.replace("_", "-"): v for k, v in metrics.items()})


CLASSIFIER = "base_model.model.classifier.weight"
H, HEADS_OF = f"{FIRST}.ravan_H", f"{FIRST}.ravan_heads"


def of(shape, value=1.0, dtype=np.float32):
    return np.full(shape, value, dtype)


WRONG = {
    "other rank": (having(H, of((2, 3, 3))), r"\(2, 3, 3\), expected .*\(2, 2, 2\)"),
    "fewer products": (having(H, of((1, 2, 2))), r"\(1, 2, 2\), expected"),
    "more dimensions": (having(H, of((2, 2, 2, 1))), "expected"),
    "unknown head": (having(HEADS_OF, np.array([0, 3])), "unknown head 3, expected 0 to 2"),
    "negative head": (having(HEADS_OF, np.array([-1, 0])), "unknown head -1"),
    "head twice": (having(HEADS_OF, np.array([2, 2])), "a head twice"),
    "heads that are words": (having(HEADS_OF, np.array(["a", "b"])), "expected numbers"),
    "heads that are fractions": (having(HEADS_OF, np.array([0.0, 1.5])), "whole numbers"),
    "heads in a table": (having(HEADS_OF, np.array([[0, 1]])), "one dimension"),
    "NaN": (having(H, of((2, 2, 2), np.nan)), "not finite"),
    "infinite": (having(H, of((2, 2, 2), np.inf)), "not finite"),
    "too far": (having(H, of((2, 2, 2), 1e30)), "norm.*the learning rate, or raise the limit"),
    "complex": (having(H, of((2, 2, 2), dtype=np.complex64)), "dtype complex64"),
    "no layer": (without(H), "ravan_H' is missing"),
    "no classifier": (without(CLASSIFIER), "classifier.weight' is missing"),
    "another classifier": (having(CLASSIFIER, of((3, 2))), r"\(3, 2\), expected torch.float32 \(2"),
    "an unknown array": (having("other", of(1)), "'other' is unknown"),
    "NaN in the classifier": (having(CLASSIFIER, of((2, 3), np.nan)), "not finite"),
    "no arrays": (lambda one: one.pop("arrays"), "0 ArrayRecords, expected 1"),
    "two records": (lambda one: one.update({"more": record({"a": np.ones(1)})}), "2 ArrayRecords"),
    "no metrics": (lambda one: one.pop("metrics"), "its metrics are"),
    "a loss that is NaN": (
        lambda one: one["metrics"].update({"loss": float("nan")}),
        "'loss' is nan",
    ),
    "no weight": (lambda one: one["metrics"].pop("num-examples"), "its metrics are"),
    "no examples": (counting(num_examples=0), "num-examples is 0"),
    "NaN examples": (counting(num_examples=float("nan")), "finite"),
    "endless examples": (counting(num_examples=1e300), "at most"),
    "a list of losses": (counting(loss=[1.0, 2.0]), r"loss\[2\]"),
    "raw bytes": (
        lambda one: one["arrays"].update({H: Array("float32", (1,), "raw", b"x")}),
        "its reply cannot be used",
    ),
    "a pickle": (
        lambda one: one["arrays"].update(
            {H: Array("float32", (1,), "numpy.ndarray", b"cos\nsystem\n.")}
        ),
        "pickle|magic|reply",
    ),
}


def replying(place, spoil=lambda _: None):
    one = content(some_heads(place), num_examples=1 + place, loss=1.0 * place)
    if place == 3:
        spoil(one)
    return one


@pytest.mark.parametrize("kind", WRONG)
def test_an_invalid_reply_is_rejected_alone(kind):
    """The round of four equals one of the first three, and advice names no key of the app."""
    spoil, reason = WRONG[kind]
    strategy, initial = RavanStrategy(), record(start_with_classifier())
    got = strategy.start(Replying(4, lambda _, p: replying(p, spoil)), initial, num_rounds=1)
    expected = RavanStrategy().start(Replying(3, lambda _, p: replying(p)), initial, num_rounds=1)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(got.arrays[name].numpy(), array.numpy())
    assert got.train_metrics_clientapp[1] == expected.train_metrics_clientapp[1]
    ((number, rejected),) = strategy.rejected.items()
    assert (number, list(rejected)) == (1, [4])
    assert re.search(reason, rejected[4]), rejected[4]
    assert "learning-rate" not in rejected[4]
    assert "in limits" not in rejected[4]


def test_a_round_of_invalid_replies_alone_changes_nothing(caplog):
    """In the first round it is an error, since no array would result."""
    replies = complete_replies(3, nodes=2)
    expected = loop(FedAvg(), products_alone(), {1: replies[1], 2: replies[3]})
    invalid = [{CLASSIFIER: reply[CLASSIFIER]} for reply in replies[2]]
    strategy = RavanStrategy()
    got = loop(strategy, start_with_classifier(), replies | {2: invalid})
    assert sorted(strategy.rejected) == [2]
    assert "round 2: all 2 clients failed or were rejected" in caplog.text
    assert_alike(got, expected)
    message = rf"round 1: all 2 .* the last of them: array '{FIRST}.ravan_H' is missing"
    with pytest.raises(ValueError, match=message):
        loop(RavanStrategy(), start_with_classifier(), {1: invalid})


def test_the_mean_is_plain_or_weighted_by_examples():
    """Of two replies, of 1 and 3 examples, that change a head to 1 and 3."""
    names = [name for name in products_alone() if name.endswith("ravan_H")]
    replies = [dict.fromkeys(names, of((HEADS, RANK, RANK), value)) for value in (1.0, 3.0)]
    for weighting, mean in (("uniform", 2.0), ("examples", 2.5)):
        strategy = RavanStrategy(weighting=weighting)
        got = loop(strategy, start_of_heads(), {1: replies}, [1, 3])
        for name in names:
            np.testing.assert_array_equal(got[name], of((HEADS, RANK, RANK), mean))
    with pytest.raises(ValueError, match="weighting 'size' is unknown"):
        RavanStrategy(weighting="size")


def test_hetlora_is_weighted_by_norms_if_alone():
    """Not by examples as well: with other numbers of examples the next state is the same."""
    _, states, uploads = app_run("hetlora", rounds=1)
    initial, replies = named_factors(states[0]), [named_factors(u) for u in uploads[1]]
    one, other = (
        loop(strategies.HetLoraStrategy(), initial, {1: replies}, examples)
        for examples in (None, [1, 1000, 10, 3])
    )
    for name, array in one.items():
        np.testing.assert_array_equal(other[name], array)


@pytest.mark.parametrize("others", [0, 2])
def test_failed_clients_are_recorded_and_end_a_run_without_any_reply(others):
    """A client that is built with another rank fails when it loads the arrays."""

    def answer(_, place):
        failed = Error(2, "ValueError: got shape (4, 8, 8)\x1b[2K")
        return failed if place >= others else replying(place)

    strategy, initial = RavanStrategy(), record(start_with_classifier())
    if others:
        assert strategy.start(Replying(4, answer), initial, num_rounds=1).arrays
        assert sorted(strategy.rejected[1]) == [3, 4]
        assert strategy.rejected[1][4].endswith(r"got shape (4, 8, 8)\x1b[2K")
    else:
        with pytest.raises(ValueError, match=r"all 4 .* the last of them: its client failed: Val"):
            strategy.start(Replying(4, answer), initial, num_rounds=2)


def test_initial_arrays_that_are_not_finite_are_refused():
    """Otherwise every client would be rejected for them."""
    initial = record(start_with_classifier() | {CLASSIFIER: np.full((2, 3), np.nan, np.float32)})
    with pytest.raises(ValueError, match=f"round 1: array .*{CLASSIFIER}.* is not finite"):
        RavanStrategy().start(Replying(2, lambda *_: None), initial, num_rounds=1)


RANKED = {
    "a rank of its own": ("lora_B.weight", (6, 3), "rank 3, expected 1 to 2"),
    "no rank": ("lora_B.weight", (6, 0), "rank 0, expected 1 to 2"),
    "another side": ("lora_B.weight", (5, 2), r"\(5, 2\), expected torch.float32 \(6, 2\)"),
    "two ranks": ("lora_A.weight", (1, 5), r"\(1, 5\), expected torch.float32 \(2, 5\)"),
}


@pytest.mark.parametrize("kind", RANKED)
def test_a_lora_of_another_shape_is_rejected_alone(kind):
    part, shape, reason = RANKED[kind]
    _, states, uploads = app_run("flexlora", rounds=1)
    good = [named_factors(upload) for upload in uploads[1]]
    complete = max(good, key=lambda reply: reply[f"{FIRST}.lora_B.weight"].size)
    bad = complete | {f"{FIRST}.{part}": np.ones(shape, np.float32)}
    strategy, initial = FlexLoraStrategy(), named_factors(states[0])
    got = loop(strategy, initial, {1: [*good, bad]})
    expected = loop(FlexLoraStrategy(), initial, {1: good})
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
    (found,) = strategy.rejected[1].values()
    assert re.search(reason, found), found


def test_a_client_that_trained_a_frozen_factor_is_rejected_with_advice():
    app, states, uploads = app_run("ffa-lora", rounds=1)
    initial = named_factors(states[0] | {"A": flatten(app.initial_A)})
    replies = [named_factors(upload | {"A": flatten(app.initial_A)}) for upload in uploads[1]]
    strategy = FFALoraStrategy()
    with pytest.raises(ValueError, match="all 4 clients failed or were rejected"):
        loop(strategy, initial, {1: replies})
    for reason in strategy.rejected[1].values():
        assert "lora_A" in reason
        assert "freeze it on the clients" in reason


# Configuration errors of the user.


def test_arrays_of_another_adapter_are_refused_by_name():
    lora = named_factors(app_run("fedit", rounds=1)[1][0])
    uneven = start_of_heads({H: np.zeros((2, 2, 2), np.float32)})
    ranks = lora | {f"{FIRST}.lora_B.weight": np.zeros((6, 1), np.float32)}
    for strategy, arrays, message in (
        (RavanStrategy, lora, r"no name ends in \.ravan_H .*RavanConfig"),
        (FlexLoraStrategy, start_of_heads(), r"no name ends in \.lora_A\.weight .*LoraConfig"),
        (RavanStrategy, uneven, "same heads and rank"),
        (FedSBStrategy, start_of_heads(), "set num_heads=1"),
        (FlexLoraStrategy, ranks, "leave rank_pattern out"),
    ):
        with pytest.raises(ValueError, match=message):
            loop(strategy(), arrays, {1: [{}, {}]})


class WithEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.dense = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.dense(self.words(x))


@pytest.mark.parametrize("strategy", BASELINES.values())
@pytest.mark.parametrize(
    ("options", "name"),
    [({"use_dora": True}, "lora_magnitude_vector"), ({}, "lora_embedding_A")],
)
def test_dora_and_loras_of_embeddings_are_refused(strategy, options, name):
    """Of the exact strategies the plain mean of these arrays would not be the mean."""
    targets = ["dense"] if options else ["dense", "words"]
    model = get_peft_model(WithEmbedding(), LoraConfig(r=2, target_modules=targets, **options))
    arrays = {k: t.numpy() for k, t in get_peft_model_state_dict(model).items()}
    with pytest.raises(ValueError, match=rf"{name}.* leave use_dora out, take embeddings out"):
        loop(strategy(), arrays, {1: [{}, {}]})


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("server_optimizer", "adam", "'adam': expected a strategy of Flower"),
        ("head_mean", "some", "expected 'trained' .* or 'all'"),
        ("max_update_norm", 0, "max_update_norm = 0: expected a number above 0"),
        ("max_update_norm", "x", "max_update_norm = 'x': expected a number above"),
        ("max_update_norm", None, "None: expected a number above .*; leave it out"),
    ],
)
def test_a_wrong_argument_is_refused(argument, value, message):
    with pytest.raises(ValueError, match=message):
        RavanStrategy(**{argument: value})


def test_the_error_of_a_server_optimizer_names_the_strategies_that_take_one():
    with pytest.raises(ValueError, match="no mean of .*, or use RavanStrategy") as message:
        FlexLoraStrategy(server_optimizer=FedAdam())
    for name in (name for name in strategies.__all__ if "Strategy" in name):
        averages = METHODS[getattr(strategies, name).method].averages
        assert (name in str(message.value)) == averages


def test_replies_before_any_broadcast_are_an_error():
    with pytest.raises(RuntimeError, match="call start, or configure_train"):
        RavanStrategy().aggregate_train(1, [])


def test_every_app_method_without_further_needs_has_a_strategy():
    methods = {
        getattr(strategies, name).method for name in strategies.__all__ if "Strategy" in name
    }
    assert methods == {*BASELINES, "ravan", "fed-sb"}
