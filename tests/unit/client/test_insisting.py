"""A device that insists on protection takes part in no run, and in no round, without it."""

import copy
import math
from functools import partial

import dp_accounting
import dp_accounting.pld
import pytest
from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.account import NOISE, NoiseAccount
from ravan_flwr.config.node_config import Node, check_node_requirements, limit_of, read_node
from ravan_flwr.config.run_config import read_config
from ravan_flwr.privacy.account import epsilon_seen
from ravan_flwr.specs import Scalar

PLACE: dict[str, Scalar] = {"partition-id": 0, "num-partitions": 4}
MASKED: dict[str, Scalar] = {"secure-aggregation": True, "clients-per-round": 50}
PRIVATE: dict[str, Scalar] = {"privacy": "client", "epsilon": 8.0}
CASES: dict[str, tuple[dict[str, Scalar], dict[str, Scalar], str]] = {
    "no masks": ({"require-secure-aggregation": True}, PRIVATE, "with secure-aggregation = false"),
    "no privacy": ({"max-epsilon": 8}, MASKED, "max-epsilon = 8: got a run with privacy = 'none'"),
    "more": ({"max-epsilon": 4}, PRIVATE, "epsilon = 8.0, expected epsilon = 4 at most"),
    "no limit": (
        {"max-epsilon": 4},
        {"privacy": "client", "noise-multiplier": 1.0},
        "epsilon = auto, expected epsilon = 4 at most",
    ),
    "a study's noise": (
        {"max-epsilon": 8},
        PRIVATE | {"noise-cohort": 1_000_000},
        "a run with noise-cohort = 1000000, whose epsilon is that of a larger federation",
    ),
    "delta": ({"max-epsilon": 8}, PRIVATE | {"delta": 1e-3}, "delta = 0.001, expected 1e-05"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_does_not_protect_as_wanted_is_refused(case):
    wanted, settings, told = CASES[case]
    with pytest.raises(ValueError, match=told):
        check_node_requirements(read_node(PLACE | wanted), read_config(settings))
    check_node_requirements(read_node(PLACE), read_config(settings))


@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        ({"require-secure-aggregation": True}, MASKED),
        ({"require-secure-aggregation": True, "max-epsilon": 8}, MASKED | PRIVATE),
        ({"max-epsilon": 8}, PRIVATE),
        ({"max-epsilon": 8, "max-delta": 1e-3}, PRIVATE | {"delta": 1e-3}),
        # Here it counts by itself, so that no promise is needed.
        ({"max-epsilon": 1}, MASKED | PRIVATE),
        ({"max-epsilon": 1}, {"privacy": "example", "noise-multiplier": 1.0}),
    ],
)
def test_a_run_that_does_is_not(wanted, settings):
    check_node_requirements(read_node(PLACE | wanted), read_config(settings))


def test_the_lower_of_two_limits_counts():
    node = Node(0, 2, max_epsilon=3.0)
    assert (limit_of(node, 8.0), limit_of(node, 2.0), limit_of(node, None)) == (3.0, 2.0, 3.0)
    assert limit_of(Node(0, 2), None) is None
    assert limit_of(Node(0, 2), 8.0) == 8.0


def test_a_device_counts_what_the_server_sees_of_it_and_stops_before_its_limit():
    """As the library counts; one round that would be too many is refused before it begins."""
    account = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    node, state, held = Node(0, 2, max_epsilon=3.0), RecordDict(), 0
    more = 1 / 4.0**2
    while account.get_epsilon(1e-5) < 2.0:
        NoiseAccount(state, 7, 0).check(node)  # as it is asked for keys
        NoiseAccount(state, 7, 0).spend(node, more)
        account.compose(dp_accounting.GaussianDpEvent(4.0))
        held += 1
    far = Node(0, 2, max_epsilon=epsilon_seen((held + 0.5) * more, 1e-5))
    for refused in (
        NoiseAccount(state, 7, 0).check,
        partial(NoiseAccount(state, 7, 0).spend, more=more),
    ):
        with pytest.raises(ValueError, match=r"max-epsilon = .*: the server has seen"):
            refused(far)
    assert NoiseAccount(state, 7, 0).seen == pytest.approx(held * more)
    told = epsilon_seen(held * more, 1e-5)
    assert told == pytest.approx(account.get_epsilon(1e-5), rel=2e-3)
    NoiseAccount(state, 8, 0).spend(far, more)  # another run begins anew


def test_a_round_that_was_too_much_is_refused_before_others_reckon_with_it_from_then_on():
    node, state = Node(0, 2, max_epsilon=1.0), RecordDict()
    NoiseAccount(state, 7, 0).check(node)
    with pytest.raises(ValueError, match="the server has seen 0 of this device"):
        NoiseAccount(state, 7, 0).spend(node, 4.0)
    assert NoiseAccount(state, 7, 0).seen == 0
    with pytest.raises(ValueError, match="one more round would take that to"):
        NoiseAccount(state, 7, 0).check(node)


def test_a_server_that_has_seen_more_is_believed_and_one_that_says_less_is_not():
    """As after a restart, or in a run that goes on, which is a new one to the device."""
    node, state = Node(0, 2, max_epsilon=8.0), RecordDict()
    NoiseAccount(state, 7, 0).spend(node, 0.5)
    NoiseAccount(state, 7, 0).believe(0.0)
    assert NoiseAccount(state, 7, 0).seen == 0.5
    NoiseAccount(state, 7, 0).believe(2.0)
    assert NoiseAccount(state, 7, 0).seen == 2.0
    for told in (None, "1", 1, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"seen = .* in the message: expected what"):
            NoiseAccount(state, 7, 0).believe(told)


def test_a_question_that_ends_after_a_round_takes_nothing_out_of_the_account(on_a_device):
    """Its process has the node's state as it was before, and Flower keeps what ends last."""
    del on_a_device
    node, state = Node(0, 2, max_epsilon=3.0), RecordDict()
    for _ in range(5):
        NoiseAccount(copy.deepcopy(state), 7, 0).spend(node, 0.1)
    assert NoiseAccount(state, 7, 0).seen == pytest.approx(0.5)
    assert epsilon_seen(0.5, 1e-5) < 3.0 < epsilon_seen(0.6, 1e-5)
    with pytest.raises(ValueError, match="it takes part no further"):
        NoiseAccount(copy.deepcopy(state), 7, 0).spend(node, 0.1)
    NoiseAccount(RecordDict(), 7, partition=1).spend(node, 0.1)  # this user's other device
    NoiseAccount(state, 8, 0).spend(node, 0.1)


@pytest.mark.parametrize("seen", [math.nan, -1.0, math.inf, "1", 1])
def test_a_damaged_account_is_begun_anew(seen):
    state = RecordDict({NOISE: ConfigRecord({"run": "7", "seen": seen, "last": 0.0})})
    assert NoiseAccount(state, 7, 0).seen == 0.0
