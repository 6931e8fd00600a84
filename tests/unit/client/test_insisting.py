"""A device that requires protection refuses runs and rounds without it."""

import pytest

from ravan_flwr.config.node_config import Node, check_node_requirements, epsilon_limit, read_node
from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import Scalar

PLACE: dict[str, Scalar] = {"partition-id": 0, "num-partitions": 4}
MASKED: dict[str, Scalar] = {"secure-aggregation": True, "clients-per-round": 50}
PRIVATE: dict[str, Scalar] = {"privacy": "client", "epsilon": 8.0}
NOISE: dict[str, Scalar] = {"privacy": "client", "noise-multiplier": 1.0}
CASES: list[tuple[dict[str, Scalar], dict[str, Scalar], str]] = [
    ({"require-secure-aggregation": True}, PRIVATE, "with secure-aggregation = false"),
    ({"max-epsilon": 8}, MASKED, "max-epsilon = 8: got a run with privacy = 'none'"),
    ({"max-epsilon": 4}, PRIVATE, "epsilon = 8.0, expected epsilon = 4 at most"),
    ({"max-epsilon": 4}, NOISE, "epsilon = auto, expected epsilon = 4 at most"),
    # The epsilon of a study is that of a larger federation.
    ({"max-epsilon": 8}, PRIVATE | {"noise-cohort": 10**6}, "a run with noise-cohort = 1000000"),
    ({"max-epsilon": 8}, PRIVATE | {"delta": 1e-3}, "delta = 0.001, expected 1e-05"),
]


@pytest.mark.parametrize(("required", "settings", "message"), CASES)
def test_a_run_without_the_required_protection_is_refused(required, settings, message):
    with pytest.raises(ValueError, match=message):
        check_node_requirements(read_node(PLACE | required), read_config(settings))
    check_node_requirements(read_node(PLACE), read_config(settings))


@pytest.mark.parametrize(
    ("required", "settings"),
    [
        ({"require-secure-aggregation": True}, MASKED),
        ({"max-epsilon": 8}, PRIVATE),
        ({"max-epsilon": 8, "max-delta": 1e-3}, PRIVATE | {"delta": 1e-3}),
        # The client counts by itself here, so that no promise of the server is needed.
        ({"max-epsilon": 1}, {"privacy": "example", "noise-multiplier": 1.0}),
    ],
)
def test_a_run_with_the_required_protection_is_accepted(required, settings):
    check_node_requirements(read_node(PLACE | required), read_config(settings))


def test_the_lower_of_two_limits_counts():
    node = Node(0, 2, max_epsilon=3.0)
    limits = [epsilon_limit(node, epsilon) for epsilon in (8.0, 2.0, None)]
    assert limits == [3.0, 2.0, 3.0]
    assert epsilon_limit(Node(0, 2), None) is None
    assert epsilon_limit(Node(0, 2), 8.0) == 8.0
