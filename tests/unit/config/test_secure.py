"""Methods and numbers of replies under secure aggregation; for other settings, test_private."""

import pytest

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

SECURE: dict[str, Scalar] = {"secure-aggregation": True, "clients-per-round": 10}


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
