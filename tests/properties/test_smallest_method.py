"""The method in the docstring of methods/base.py has the properties of all methods."""

import sys
import textwrap
from types import ModuleType

import pytest
import torch

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods import METHODS, MethodInfo, base
from ravan_flwr.methods.tensors import check_tensor, flatten, probe
from ravan_flwr.seeding import generator
from tests.properties import test_methods as properties

NAME = "smallest"
PROPERTIES = [
    (properties.test_a_layer_computes_its_pretrained_weight_plus_the_delta_weight, {}),
    (properties.test_the_order_of_replies_does_not_matter, {}),
    (properties.test_unchanged_clients_leave_the_state_unchanged, {}),
    (properties.test_a_single_client_gets_its_own_delta_weight, {}),
    (properties.test_the_aggregates_delta_weight_is_the_mean_of_the_clients, {}),
    (properties.test_a_weight_equals_repeated_replies, {}),
    (properties.test_messages_round_trip_with_the_computed_number_of_bytes, {"fraction": 1.0}),
    (properties.test_a_smaller_budget_fraction_trains_and_sends_less_or_nothing, {}),
    (properties.test_the_network_is_restored_to_the_bit, {}),
    (properties.test_messages_share_no_memory_with_the_model, {}),
    (properties.test_lora_factors_are_the_delta_weight_or_the_weights_have_changed, {}),
    (properties.test_fingerprints_depend_on_the_seed_but_not_on_trained_tensors, {}),
    (properties.test_the_classifier_is_averaged_over_all_clients, {}),
    (properties.test_a_round_without_replies_keeps_the_state, {}),
    *(
        (
            properties.test_an_invalid_upload_is_rejected_and_leaves_the_sums_unchanged,
            {"case": case},
        )
        for case in properties.BAD_TENSORS
    ),
]


def example():
    """Return the code in the docstring: from the class to the next line at the left margin."""
    lines = (base.__doc__ or "").splitlines()
    start = lines.index("    class Smallest(Method[LoRALinear]):")
    length = next(i for i, line in enumerate(lines[start:]) if line and not line.startswith(" "))
    return textwrap.dedent("\n".join(lines[start : start + length]))


@pytest.fixture(autouse=True)
def smallest(monkeypatch):
    names = {
        "LoRALinear": LoRALinear, "Method": base.Method, "check_tensor": check_tensor,
        "flatten": flatten, "generator": generator, "probe": probe, "torch": torch,
    }  # fmt: skip
    exec(example(), names)
    module = ModuleType(NAME)
    monkeypatch.setattr(module, "METHOD", names["Smallest"], raising=False)
    monkeypatch.setitem(sys.modules, f"ravan_flwr.methods.{NAME}", module)
    monkeypatch.setitem(METHODS, NAME, MethodInfo())


@pytest.mark.parametrize(
    ("check", "more"), PROPERTIES, ids=lambda value: getattr(value, "__name__", None)
)
def test_the_documented_method_has_all_properties(check, more):
    check(name=NAME, **more)
