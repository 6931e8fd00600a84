"""The method in the docstring of methods/base.py has the properties as it stands there."""

import sys
import textwrap
from types import ModuleType

import pytest
import torch

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods import METHODS, MethodInfo, base
from ravan_flwr.methods.tensors import check_tensor, flatten, probe
from ravan_flwr.seeding import generator
from tests.properties import test_methods as laws

NAME = "smallest"
LAWS = [
    (laws.test_a_layer_computes_its_pretrained_weight_plus_the_delta_weight, {}),
    (laws.test_the_order_of_replies_does_not_matter, {}),
    (laws.test_clients_that_change_nothing_change_nothing, {}),
    (laws.test_one_client_alone_gets_its_own_delta_weight, {}),
    (laws.test_the_aggregates_delta_weight_is_the_mean_of_the_clients, {}),
    (laws.test_a_weight_counts_like_as_many_replies, {}),
    (laws.test_what_travels_arrives_as_it_was_and_weighs_what_was_said, {"fraction": 1.0}),
    (laws.test_a_client_with_a_smaller_budget_trains_and_sends_less_or_nothing, {}),
    (laws.test_the_network_comes_back_to_the_bit, {}),
    (laws.test_nothing_that_travels_is_shared_with_the_model, {}),
    (laws.test_lora_factors_are_the_delta_weight_or_the_weights_have_changed, {}),
    (laws.test_fingerprints_tell_seeds_apart_and_ignore_what_is_trained, {}),
    (laws.test_the_classifier_is_averaged_over_all_clients, {}),
    (laws.test_a_round_without_replies_keeps_the_state, {}),
    *(
        (laws.test_a_bad_upload_is_rejected_and_leaves_the_sums_alone, {"case": case})
        for case in laws.BAD_TENSORS
    ),
]


def example():
    """The code between the docstring's words: from the class to the next line that is not in it."""
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


@pytest.mark.parametrize(("law", "more"), LAWS, ids=lambda value: getattr(value, "__name__", None))
def test_it_keeps_the_laws(law, more):
    law(name=NAME, **more)
