"""Settings that break a private run's account are refused by name, before anything is loaded."""

import pytest

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

PRIVATE: dict[str, Scalar] = {"privacy": "client", "epsilon": 8.0}
REFUSED: dict[str, tuple[dict[str, Scalar], str]] = {
    "no noise": ({"epsilon": "auto"}, "got neither epsilon nor noise-multiplier"),
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
    "stragglers": ({"straggler-grace": 3.0}, "got straggler-grace = 3.0, expected 'auto'"),
    "a least": ({"limits": "min-replies=2"}, "got min-replies = 2, expected 1"),
    "bytes": ({"max-bytes": 1e12}, "got max-bytes = .*, expected 'auto'"),
    "on clients": (
        {"evaluate-on": "clients", "validation-share": 0.1},
        "got evaluate-on = 'clients', expected 'server'",
    ),
    "a small cohort": ({"noise-cohort": 2}, "clients-per-round = 10: got noise-cohort = 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_break_the_account_are_refused_by_name(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read_config(PRIVATE | {"clients-per-round": 10} | changes)


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
    evaluation: dict[str, Scalar] = {"evaluate-on": "clients", "validation-share": 0.2}
    assert read_config(PRIVATE | evaluation | {"noise-cohort": 50}).evaluate_on == "clients"
    with pytest.raises(ValueError, match="got evaluate-on = 'clients', expected 'server'"):
        read_config(PRIVATE | evaluation)


EXAMPLE: dict[str, Scalar] = {"privacy": "example", "epsilon": 8.0}
REFUSED_OF_EXAMPLES: dict[str, tuple[dict[str, Scalar], str]] = {
    "no noise": ({"epsilon": "auto"}, "got neither epsilon nor noise-multiplier"),
    "gradient scores": ({"scoring": "gradient"}, "got scoring = 'gradient', expected 'random'"),
    "bases of data": ({"init": "data-aware"}, "got init = 'data-aware', expected another"),
    "a first round": ({"init": "first-round"}, "got init = 'first-round', expected another"),
    "passes": ({"local-epochs": 2.0}, "got local-epochs = 2.0, expected 'auto', since batches"),
    "lengths": (
        {"preset": "finance", "batching": "length"},
        "got batching = 'length', expected 'random'",
    ),
    "packing": (
        {"preset": "finance", "batching": "packed"},
        "got batching = 'packed', expected 'random'",
    ),
    "half": ({"precision": "float16"}, "got precision = 'float16', expected 'float32' or"),
    "a cohort": ({"noise-cohort": 500}, "got noise-cohort = 500, expected 'auto'"),
    "on clients": (
        {"evaluate-on": "clients", "validation-share": 0.1},
        "got evaluate-on = 'clients', expected 'server'",
    ),
}


@pytest.mark.parametrize("case", REFUSED_OF_EXAMPLES)
def test_settings_that_break_the_account_of_examples_are_refused_by_name(case):
    changes, message = REFUSED_OF_EXAMPLES[case]
    with pytest.raises(ValueError, match=f"privacy = 'example': {message}"):
        read_config(EXAMPLE | changes)


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
