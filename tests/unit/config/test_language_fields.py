"""The fields of a preset for a language model: defaults, and errors."""

import pytest
import yaml

from ravan_flwr.config.presets import PresetPath, read_preset
from ravan_flwr.config.run_config import read_config, recorded_config

ALPACA = {"columns": {"instruction": "a", "input": "b", "completion": "c"}}


def read(tmp_path, data, task="causal"):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"task": task, "model": "a/b", "data": {"name": "c/d"} | data}))
    return read_preset(PresetPath(path))


def test_missing_fields_have_defaults(tmp_path):
    preset = read(tmp_path, {})
    assert preset.data.columns == (("messages", "messages"),)
    assert (preset.data.overlong, preset.data.loss_on) == ("cut", "answers")
    assert preset.max_length == 512
    assert preset.data.target_length == 128
    assert preset.run["classifier"] == "frozen"
    assert preset.run["partition"] == "iid"
    plain = read(tmp_path, {"columns": {"prompt": "q", "completion": "a"}})
    assert plain.data.prompts == ("{prompt}",)


def test_prompts_over_columns(tmp_path):
    prompts = ["{instruction} {input}", "{instruction} {{}}"]
    assert read(tmp_path, ALPACA | {"prompt": prompts}).data.prompts == tuple(prompts)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"columns": {"messages": "m", "text": "t"}}, "data.columns.text is unknown"),
        ({"columns": {"prompt": "p"}}, "expected messages, a column of conversations, or a prompt"),
        ({"columns": {"text": "body"}}, "expected messages, a column of conversations, or a pro"),
        ({"columns": {"completion": "c"}}, "expected a column for a prompt"),
        (ALPACA, "got prompt, expected braces around {input}, {instruction} alone"),
        (ALPACA | {"prompt": "{instruction}"}, "input is in no prompt"),
        (ALPACA | {"prompt": ["{instruction}", 5]}, "expected a text, or several as a list"),
        (ALPACA | {"prompt": []}, "expected a text, or several as a list"),
        (ALPACA | {"prompt": "{completion}{input}"}, "got completion, input, expected braces"),
        ({"columns": {"a.b": "a", "completion": "c"}, "prompt": "{a.b}"}, "expected braces around"),
        ({"columns": {"0": "a", "completion": "c"}, "prompt": "{0}"}, "expected braces around"),
        ({"prompt": "{messages}"}, "are written by the chat template; leave it out"),
        (ALPACA | {"prompt": "{instruction}{input}", "chat-template": "x"}, "chat-template: it"),
        ({"overlong": "keep"}, "data.overlong 'keep' is unknown"),
        ({"loss-on": "answer"}, "did you mean 'answers'"),
        ({"chat-template": ["x"]}, "expected a text"),
        ({"target-length": 0}, "expected a whole number at least 1"),
        ({"labels": ["a", "b"]}, "expected the names of the classes"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused(data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, data)


def test_other_tasks_refuse_these_fields(tmp_path):
    with pytest.raises(ValueError, match="data.overlong: only task causal or preference has it; l"):
        read(tmp_path, {"overlong": "drop", "labels": ["a", "b"]}, "text")
    with pytest.raises(ValueError, match="data.loss-on: only task causal has it; leave it out"):
        read(tmp_path, {"loss-on": "all"}, "preference")


def test_columns_of_preferences(tmp_path):
    preset = read(tmp_path, {}, "preference")
    assert dict(preset.data.columns).keys() == {"prompt", "chosen", "rejected"}
    assert (preset.data.prompts, preset.run["classifier"]) == (("{prompt}",), "frozen")
    pair = {"chosen": "a", "rejected": "b"}
    conversations = read(tmp_path, {"columns": pair, "chat-template": "x"}, "preference")
    assert (conversations.data.prompts, conversations.data.chat_template) == ((), "x")
    with_prompt = {"columns": pair | {"instruction": "i"}, "prompt": "{instruction}: "}
    assert read(tmp_path, with_prompt, "preference").data.prompts == ("{instruction}: ",)
    for data, message in (
        ({"columns": {"prompt": "p", "chosen": "c"}}, "expected a prompt with chosen and rejected"),
        ({"columns": pair, "prompt": "{chosen}"}, "has chosen and rejected.* leave it out"),
        ({"columns": pair | {"messages": "m"}}, "expected braces around {messages} alone"),
        ({"columns": {"chosen": "a", "rejected": "a"}}, "a column of its own for each role"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, data, "preference")


def test_a_recorded_configuration_is_read_again(tmp_path):
    read(tmp_path, ALPACA | {"prompt": "{instruction}{input}", "loss-on": "all"})
    config = read_config({"preset": PresetPath(tmp_path / "mine.yaml")})
    assert recorded_config(config.as_dict(), "here") == config
