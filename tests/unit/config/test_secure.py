"""Settings that are incompatible with secure aggregation are refused by name, before any load."""

import pytest

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

SECURE: dict[str, Scalar] = {"secure-aggregation": True, "clients-per-round": 10}
REFUSED: dict[str, tuple[dict[str, Scalar], str]] = {
    "private steps": (
        {"privacy": "example", "epsilon": 8.0},
        "got privacy = 'example', expected 'none', since the server clips and counts updates",
    ),
    "noise": ({"privacy": "client", "epsilon": 8.0}, "got privacy = 'client', expected 'none'"),
    "gradient scores": ({"scoring": "gradient"}, "got scoring = 'gradient', expected 'random'"),
    "global weights": (
        {"scoring": "weight", "selection": "global"},
        "got selection = 'global', expected 'layer'",
    ),
    "bases of data": ({"init": "data-aware"}, "got init = 'data-aware', expected another"),
    "a first round": ({"init": "first-round"}, "got init = 'first-round', expected another"),
    "weights": ({"weighting": "examples"}, "got weighting = 'examples', expected 'uniform'"),
    "robust": ({"weighting": "median"}, "got weighting = 'median', expected 'uniform'"),
    "a limit": ({"limits": "max-update-norm=1.0"}, "got max-update-norm = 1.0, expected 'auto'"),
    "reserves": ({"over-sample": 1.5}, "got over-sample = 1.5, expected 1.0"),
    "a wire": ({"wire": "int8"}, "got wire = 'int8', expected 'float32'"),
    "on clients": (
        {"evaluate-on": "clients", "validation-share": 0.1},
        "got evaluate-on = 'clients', expected 'server'",
    ),
    "two clients": ({"clients-per-round": 2}, "got clients-per-round = 2, expected 4"),
    "many clients": ({"clients-per-round": 257}, "expected 4 .secure-minimum. to 256"),
    "a high minimum": ({"secure-minimum": 11}, "got clients-per-round = 10, expected 11"),
    "a low minimum": ({"secure-minimum": 2}, "secure-minimum = 2: expected a whole number at le"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_reveal_more_than_sums_are_refused_by_name(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read_config(SECURE | changes)


@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if not m.sums_changes])
def test_methods_that_need_more_than_sums_are_refused(name):
    """Methods for all clients or for one are refused by the number of clients."""
    with pytest.raises(ValueError, match=rf"secure-aggregation = true: got method = {name!r}|256"):
        read_config(SECURE | {"method": name, "evaluate-on": "server"})


@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if m.sums_changes])
def test_methods_that_sum_changes_are_accepted(name):
    config = read_config(SECURE | {"method": name})
    assert (config.secure_aggregation, config.secure_minimum, config.min_replies) == (True, 4, 4)


def test_min_replies_is_at_least_the_secure_minimum():
    assert read_config(SECURE | {"secure-minimum": 5}).min_replies == 5
    assert read_config(SECURE | {"limits": "min-replies=7"}).min_replies == 7
    assert read_config({}).min_replies == 1


def test_secure_minimum_has_no_effect_without_secure_aggregation():
    (message,) = without_effect({"secure-minimum": 5})
    assert message.endswith("is protected, without secure-aggregation=true: secure-minimum=5")
    assert without_effect(SECURE | {"secure-minimum": 5}) == []
