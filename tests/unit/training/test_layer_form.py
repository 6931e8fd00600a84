"""One rule for the form of multi-head layers, used by layers and plan."""

import pytest

from ravan_flwr.adapters import Layer
from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.model_and_data import make_method


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({}, "auto"),
        ({"precision": "bfloat16"}, "factored"), ({"precision": "float16"}, "factored"),
        ({"backbone-dtype": "4bit"}, "factored"), ({"backbone-dtype": "8bit"}, "factored"),
        ({"backbone-dtype": "bfloat16"}, "auto"),
    ],
)  # fmt: skip
def test_low_precision_layers_are_factored_and_never_merged(settings, form):
    assert make_method(read_config(settings), [Layer("x", 64, 64)], 0).settings.layer_form == form
