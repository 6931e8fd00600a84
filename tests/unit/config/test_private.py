"""Settings that break privacy or masks are refused by name, before anything is loaded."""

import pytest

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

PRIVATE: dict[str, Scalar] = {"privacy": "client", "epsilon": 8.0, "clients-per-round": 10}
EXAMPLE: dict[str, Scalar] = {"privacy": "example", "epsilon": 8.0}
SECURE: dict[str, Scalar] = {"secure-aggregation": True, "clients-per-round": 10}
ON_CLIENTS: dict[str, Scalar] = {"evaluate-on": "clients", "validation-share": 0.1}
Refused = list[tuple[dict[str, Scalar], str]]
# What breaks each kind of protection, what breaks sums over clients, and what breaks one of them.
ALWAYS: Refused = [
    ({"scoring": "gradient"}, "got scoring = 'gradient', expected 'random'"),
    ({"init": "data-aware"}, "got init = 'data-aware', expected another"),
    ({"init": "first-round"}, "got init = 'first-round', expected another"),
    (ON_CLIENTS, "got evaluate-on = 'clients', expected 'server'"),
]
OF_SUMS: Refused = [
    ({"scoring": "weight", "selection": "global"}, "got selection = 'global', expected 'layer'"),
    ({"weighting": "examples"}, "got weighting = 'examples', expected 'uniform'"),
    ({"weighting": "median"}, "got weighting = 'median', expected 'uniform'"),
    ({"limits": "max-update-norm=1.0"}, "got max-update-norm = 1.0, expected 'auto'"),
    ({"over-sample": 1.5}, "got over-sample = 1.5, expected 1.0"),
]
OF_CLIENTS: Refused = [
    ({"epsilon": "auto"}, "got neither epsilon nor noise-multiplier"),
    ({"straggler-grace": 3.0}, "got straggler-grace = 3.0, expected 'auto'"),
    ({"limits": "min-replies=2"}, "got min-replies = 2, expected 1"),
    ({"max-bytes": 1e12}, "got max-bytes = .*, expected 'auto'"),
    ({"noise-cohort": 2}, "clients-per-round = 10: got noise-cohort = 2"),
    (
        {"delta": 1e-16},
        "delta = 1e-16: expected a number at least 1e-12",
    ),  # epsilon is infinite there
]
OF_EXAMPLES: Refused = [
    ({"epsilon": "auto"}, "got neither epsilon nor noise-multiplier"),
    ({"local-steps": "epochs:2"}, "got local-steps = 'epochs:2', expected a number of .* batches"),
    ({"preset": "finance", "batching": "length"}, "got batching = 'length', expected 'random'"),
    ({"preset": "finance", "batching": "packed"}, "got batching = 'packed', expected 'random'"),
    ({"precision": "float16"}, "got precision = 'float16', expected 'float32' or"),
    ({"noise-cohort": 500}, "got noise-cohort = 500, expected 'auto'"),
]
MASKED: Refused = [
    (EXAMPLE, "got privacy = 'example', expected 'none', since the server clips and counts"),
    ({"privacy": "client", "epsilon": 8.0}, "got privacy = 'client', expected 'none'"),
    ({"wire": "int8"}, "got wire = 'int8', expected 'float32'"),
    ({"sparsity": "1:1/4"}, "got sparsity = '1:1/4', expected '1:1', since the places of the larg"),
    ({"clients-per-round": 2}, "got clients-per-round = 2, expected 4"),
    ({"clients-per-round": 257}, "expected 4 .secure-minimum. to 256"),
    ({"secure-minimum": 11}, "got clients-per-round = 10, expected 11"),
    ({"secure-minimum": 2}, "secure-minimum = 2: expected a whole number at le"),
]
REFUSED = [
    (protection, *row)
    for protection, rows in (
        (PRIVATE, ALWAYS + OF_SUMS + OF_CLIENTS),
        (EXAMPLE, ALWAYS + OF_EXAMPLES),
        (SECURE, ALWAYS + OF_SUMS + MASKED),
    )
    for row in rows
]


@pytest.mark.parametrize(("protection", "changes", "message"), REFUSED)
def test_settings_that_break_a_protection_are_refused_by_name(protection, changes, message):
    if protection is EXAMPLE:
        message = f"privacy = 'example': {message}"
    with pytest.raises(ValueError, match=message):
        read_config(protection | changes)


# A private cohort is sampled by chance.
ABLE = [name for name, m in METHODS.items() if m.sums_changes and not m.all_clients]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ABLE])
def test_methods_that_need_more_than_the_sum_of_changes_are_refused(name):
    expected = f"expected one of {', '.join(ABLE)}, since"
    with pytest.raises(ValueError, match=f"got method = {name!r}, {expected}"):
        read_config(PRIVATE | {"method": name})


@pytest.mark.parametrize("name", ABLE)
def test_methods_that_sum_changes_are_accepted(name):
    config = read_config(PRIVATE | {"method": name, "clip-norm": 0.3, "noise-cohort": 5000})
    assert (config.privacy, config.epsilon, config.clip_norm) == ("client", 8.0, 0.3)
    assert (config.noise_multiplier, config.noise_cohort, config.delta) == (None, 5000, 1e-5)


def test_a_simulated_noise_cohort_permits_evaluation_on_clients():
    assert read_config(PRIVATE | ON_CLIENTS | {"noise-cohort": 50}).evaluate_on == "clients"


BY_EXAMPLE = [name for name, method in METHODS.items() if method.by_example]


@pytest.mark.parametrize("name", METHODS)
def test_methods_with_per_example_gradients_are_accepted(name):
    if name in BY_EXAMPLE:
        config = read_config(EXAMPLE | {"method": name})
        assert (config.privacy, config.clip_norm, config.noise_multiplier) == ("example", 1.0, None)
    else:
        expected = f"expected one of {', '.join(BY_EXAMPLE)}, since"
        with pytest.raises(ValueError, match=f"got method = {name!r}, {expected}"):
            read_config(EXAMPLE | {"method": name})


def test_options_on_noised_uploads_are_accepted_with_private_examples():
    allowed: tuple[dict[str, Scalar], ...] = (
        {"weighting": "median", "clients-per-round": 3}, {"weighting": "examples"},
        {"over-sample": 1.5}, {"straggler-grace": 3.0}, {"max-bytes": 1e12},
        {"limits": "min-replies=2"}, {"scoring": "weight", "selection": "global"},
        {"precision": "bfloat16"}, {"clip-norm": 0.2},
    )  # fmt: skip
    for changes in allowed:
        read_config(EXAMPLE | changes)


def test_privacy_keys_have_no_effect_without_privacy():
    (message,) = without_effect({"epsilon": 8.0, "clip-norm": 0.5})
    assert message.startswith("no effect, and no client is protected, without privacy=client or")
    assert message.endswith(": clip-norm=0.5, epsilon=8.0")
    assert without_effect(PRIVATE) == []
