"""One rule for the form of multi-head layers: the config, the layers and the plan follow it."""

import pytest

from ravan_flwr.adapters import Layer
from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.model_and_data import layer_form, make_method


@pytest.mark.parametrize("asked", ["auto", "factored", "merged"])
def test_32_bits_leave_the_form_as_it_was_asked_for(asked):
    assert layer_form(asked, "float32", "none") == asked


@pytest.mark.parametrize("few", [("bfloat16", "none"), ("float32", "4bit"), ("float16", "8bit")])
def test_few_bits_are_factored_and_never_merged(few):
    assert layer_form("auto", *few) == layer_form("factored", *few) == "factored"
    with pytest.raises(ValueError, match="layer-form = 'merged': got (precision|quantize) = "):
        layer_form("merged", *few)


@pytest.mark.parametrize(("precision", "told"), [("float32", "auto"), ("bfloat16", "factored")])
def test_a_methods_layers_are_told_what_the_rule_says(precision, told):
    config = read_config({"precision": precision})
    assert config.layer_form == "auto"  # as it was asked for: a resumed run compares it
    assert make_method(config, [Layer("x", 64, 64)], 0).settings.layer_form == told
