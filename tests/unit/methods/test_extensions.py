"""A method that lacks what an option needs is refused, with the reason."""

import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS, get_method
from ravan_flwr.methods.base import Method
from ravan_flwr.methods.extensions import NormLimits, SumsChanges, norm_limits, sums_changes
from tests.methods import build

OF_OPTIONS = {
    "coverage", "rows", "rows_trained", "train_rows", "heads_in_rows", "mean_over_cohort",
    "find_start", "norms_if_alone", "norm_bounds",
}  # fmt: skip


def test_the_base_class_has_no_attribute_that_only_options_need():
    assert not OF_OPTIONS & set(dir(Method))
    assert set(dir(SumsChanges)) | set(dir(NormLimits)) >= OF_OPTIONS


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_row_matches_its_class(name):
    # FedRPCA has RAVAN's clients, and another next state.
    sums = issubclass(get_method(name), SumsChanges) and name != "fedrpca"
    assert METHODS[name].sums_changes == sums


def test_a_method_without_the_extension_is_refused_under_its_option():
    """Under privacy=client by test_private.py, which checks the same list."""
    able = ", ".join(name for name, method in METHODS.items() if method.sums_changes)
    with pytest.raises(ValueError, match=f"'hetlora'.*expected one of {able}, since"):
        read_config({"method": "hetlora", "clients-per-round": 8, "secure-aggregation": True})
    method, _ = build("hetlora")
    with pytest.raises(ValueError, match="HetLora does not sum clients' changes"):
        sums_changes(method)


def test_changes_are_measured_from_the_broadcast_by_default():
    method, adapters = build("fedit")
    sent = method.initial_state(adapters)
    upload = {"B": sent["B"] + 1}
    limits = norm_limits(method)
    assert not isinstance(method, NormLimits)
    assert torch.equal(limits.find_start(upload, sent)["B"], sent["B"])
    assert limits.norms_if_alone(upload, sent) == limits.norm_bounds(sent, {}) == {}
    flexlora, _ = build("flexlora")
    assert norm_limits(flexlora) is flexlora
