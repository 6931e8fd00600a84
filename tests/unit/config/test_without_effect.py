"""Who gives a key that changes nothing is told so, and it is true that it changes nothing."""

import dataclasses

import pytest
import torch

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Settings
from ravan_flwr.specs import Scalar
from tests.methods import build, some_state, train_client

OTHER = {
    "heads": 5, "init": "gram-schmidt", "scaling": "constant", "scoring": "weight",
    "selection": "global", "head-mean": "all",
    "rank": 1, "lora-scale": 3.0,
}  # fmt: skip
OF_SETTINGS = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)}
IGNORED = [
    (method, key) for method in METHODS for key in METHODS[method].ignored if key in OF_SETTINGS
]
OTHERS = [
    (method, key) for method in METHODS for key in METHODS[method].ignored if key not in OF_SETTINGS
]


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ({}, ""),
        (
            {"method": "fedit", "heads": 8, "scoring": "weight"},
            "with method=fedit: heads=8, scoring=weight",
        ),
        ({"method": "fedit", "heads": "auto", "rank": 4, "lora-scale": 2.0}, ""),
        ({"heads": 8, "scoring": "weight"}, ""),
        ({"lora-scale": 2.0}, "with method=ravan: lora-scale=2.0"),
        ({"method": "full", "rank": 3}, "with method=full: rank=3"),
        (
            {"batching": "packed", "micro-batch-size": 1},
            "with one example at a time: batching=packed",
        ),
        ({"concurrency": 5}, "with aggregation=sync: concurrency=5"),
        ({"batching": "packed", "micro-batch-size": 2}, ""),
    ],
)
def test_keys_without_effect(given, idle):
    told = [f"no effect {idle}"] if idle else []
    assert without_effect(given) == told
    assert without_effect({name: key.default for name, key in KEYS.items()} | given) == told


@pytest.mark.parametrize(("method", "key"), IGNORED)
def test_what_a_method_ignores_changes_nothing(method, key):
    def uploaded(**changes):
        made, adapters = build(method, **changes)
        state = some_state(made, adapters)
        return state, train_client(made, adapters, state, 1.0, 3)

    for one, other in zip(uploaded(), uploaded(**{key.replace("-", "_"): OTHER[key]}), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("method", "key"), OTHERS)
def test_what_a_method_says_itself_is_taken_from_nobody(method, key):
    given: dict[str, Scalar] = {"clients-per-round": 7, "weighting": "examples"}
    assert read_config({"method": method, key: given[key]}) == read_config({"method": method})


@pytest.mark.parametrize("preset", ["digits-vit", "svhn-vit-b16"])
@pytest.mark.parametrize("method", ["fedit", "fed-sb", "hetlora"])
def test_heads_change_no_rank_of_a_method_that_has_none(preset, method):
    given = {"preset": preset, "method": method}
    assert read_config({**given, "heads": 8}).rank == read_config(given).rank
