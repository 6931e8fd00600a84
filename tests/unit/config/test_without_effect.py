"""Keys without effect are reported, and have none."""

import dataclasses

import pytest
import torch

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Settings
from ravan_flwr.specs import Scalar
from tests.methods import build_mid_run, train_client

OTHER = {
    "heads": 5, "init": "gram-schmidt", "scaling": "constant", "scoring": "weight",
    "selection": "global", "head-mean": "all", "rank": 1, "lora-scale": 3.0,
}  # fmt: skip
OF_SETTINGS = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)}
PAIRS = [(method, key) for method, row in METHODS.items() for key in row.ignored]
IGNORED = [pair for pair in PAIRS if pair[1] in OF_SETTINGS]
OTHERS = [pair for pair in PAIRS if pair[1] not in OF_SETTINGS]


@pytest.mark.parametrize(
    ("settings", "idle"),
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
        (
            {"optimizer": "fedprox"},
            "of the proximal term without MU, as in optimizer=fedprox:0.01: optimizer=fedprox",
        ),
        ({"optimizer": "fedprox:0.01"}, ""),
        ({"batching": "packed", "micro-batch-size": 2}, ""),
    ],
)
def test_keys_without_effect_are_reported(settings, idle):
    expected = [f"no effect {idle}"] if idle else []
    assert without_effect(settings) == expected
    assert without_effect({name: key.default for name, key in KEYS.items()} | settings) == expected


@pytest.mark.parametrize(("method", "key"), IGNORED)
def test_a_key_that_a_method_ignores_changes_no_upload(method, key):
    def uploaded(**changes):
        method_, adapters, state = build_mid_run(method, **changes)
        return state, train_client(method_, adapters, state, 1.0, 3)

    for one, other in zip(uploaded(), uploaded(**{key.replace("-", "_"): OTHER[key]}), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("method", "key"), OTHERS)
def test_a_key_that_a_method_sets_itself_has_no_effect(method, key):
    settings: dict[str, Scalar] = {"clients-per-round": 7, "weighting": "examples"}
    assert read_config({"method": method, key: settings[key]}) == read_config({"method": method})


@pytest.mark.parametrize("preset", ["digits-vit", "svhn-vit-b16"])
@pytest.mark.parametrize("method", ["fedit", "fed-sb", "hetlora"])
def test_heads_change_no_rank_of_a_method_without_heads(preset, method):
    settings = {"preset": preset, "method": method}
    assert read_config({**settings, "heads": 8}).rank == read_config(settings).rank
