"""The preset wizard for language models: columns, prompts, chat templates, and errors."""

import re

import datasets
import pytest

from ravan_flwr.cli import main
from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.preset_wizard.create import new_preset
from ravan_flwr.preset_wizard.data_summary import find_columns
from ravan_flwr.training.model_and_data import get_model_and_data
from tests.commands import error_of
from tests.docstrings import lines
from tests.support.tiny import save_speaker, texts

TALK = [{"role": "user", "content": "ka"}, {"role": "assistant", "content": "ne"}]
MESSAGES = {"messages": [TALK, TALK]}
TEXTS = ["kane lora", "mivi tuso"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (MESSAGES, {"messages": "messages"}),
        ({"prompt": TEXTS, "completion": TEXTS}, {"prompt": "prompt", "completion": "completion"}),
        (
            {"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS, "score": [1.0, 2.0]},
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        ),
        (
            {"prompt": [TALK[:1]] * 2, "chosen": [TALK[1:]] * 2, "rejected": [TALK[1:]] * 2},
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        ),
        (  # as in UltraFeedback
            {"prompt": TEXTS, "chosen": [TALK] * 2, "rejected": [TALK] * 2},
            {"chosen": "chosen", "rejected": "rejected"},
        ),
    ],
)
def test_columns_of_language_models_are_recognised(columns, expected):
    assert find_columns(datasets.Dataset.from_dict(columns), {}, "here") == expected


def test_preferences_without_a_prompt_are_reported():
    columns = datasets.Dataset.from_dict({"chosen": TEXTS, "rejected": TEXTS})
    with pytest.raises(ValueError, match="are texts, and there is no column prompt"):
        find_columns(columns, {}, "here")


def test_columns_of_classification_are_recognised():
    pairs = {"question": TEXTS * 5, "answer": TEXTS * 5, "label": [0, 1] * 5}
    found = find_columns(datasets.Dataset.from_dict(pairs), {"text": "question"}, "here")
    assert found == {"text": "question", "label": "label"}
    few = {"text": texts(20), "label": ["a", "b"] * 10}
    assert find_columns(datasets.Dataset.from_dict(few), {}, "here")["label"] == "label"


def preset_from(tmp_path, monkeypatch, rows, **speaker):
    """Run the wizard on these examples and a small model; return its output and the preset."""
    save_speaker("qwen2", tmp_path / "model", texts(9), **speaker)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(lines(rows))
    output = list(new_preset("mine", str(tmp_path / "data"), str(tmp_path / "model")))
    path = {"preset": str(tmp_path / "conf/mine.yaml")}
    return "\n".join(output), read_config(with_preset_path(path))


def test_conversations_give_a_preset(tmp_path, monkeypatch):
    output, config = preset_from(tmp_path, monkeypatch, [{"messages": TALK}] * 60)
    assert "60 examples" not in output  # some are validation examples
    assert "messages from column 'messages'" in output
    assert (config.task, config.classifier, config.partition) == ("causal", "frozen", "iid")
    assert 0 < config.max_length <= 32
    assert config.data.prompts == ()


def test_preferences_give_a_preset(tmp_path, monkeypatch):
    other = [TALK[0], {"role": "assistant", "content": "ne ka ne ka ne"}]
    output, config = preset_from(tmp_path, monkeypatch, [{"chosen": TALK, "rejected": other}] * 60)
    assert "chosen from column 'chosen', rejected from column 'rejected'" in output
    assert (config.task, config.classifier) == ("preference", "frozen")
    loaded = get_model_and_data(config)
    assert len(loaded.test_sets["test"]) == 12
    longest = int(loaded.test_sets["test"].take(loaded.test_sets["test"].rows[:1])["length"].max())
    assert longest <= config.max_length < longest + 8


def test_a_chat_template_can_be_given(tmp_path, monkeypatch, capsys):
    """The file is the test's own; the examples are written by it."""
    template = "{% for one in messages %}<{{ one.role }}> {{ one.content }}\n{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    save_speaker("qwen2", tmp_path / "model", texts(9), template=None)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "train.jsonl"
    file.write_text(lines([{"messages": TALK}] * 60))
    monkeypatch.chdir(tmp_path)
    words = ["--data", "data", "--model", "model", "--chat-template", "chat.jinja"]
    main(["new", "mine", *words])
    config = read_config(with_preset_path({"preset": str(tmp_path / "conf/mine.yaml")}))
    assert config.data.chat_template == template
    assert get_model_and_data(config).task.reader.chat_template == template
    file.write_text(lines([{"prompt": "a", "completion": "b"}] * 60))
    error = error_of(capsys, "new", "other", *words)
    assert "it writes the column messages, which data.columns has not" in error


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "no chat template; .* instruction-tuned model"),
        ("{{ raise_exception('never') }}", r"none of \d+ can be learned: .* refuses it: never"),
        ("always the same", r"none of \d+ can be learned: .*does not show where its answers are"),
    ],
)
def test_a_template_without_a_trainable_answer_is_refused(tmp_path, monkeypatch, template, why):
    with pytest.raises(ValueError, match=why):
        preset_from(tmp_path, monkeypatch, [{"messages": TALK}] * 60, template=template)
    assert not (tmp_path / "conf").exists()


def test_examples_without_a_trainable_answer_are_counted(tmp_path, monkeypatch, caplog):
    rows = [{"messages": TALK}] * 40 + [{"messages": TALK[:1]}] * 20
    preset_from(tmp_path, monkeypatch, rows)
    assert re.search(r"16 of 48 are left out: 16: its conversation has no", caplog.text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a file of it is empty"),
        ('{"prompt": "caf\u00e9: ", "completion": "ka"}\n'.encode("latin1") * 9, "no UTF-8"),
    ],
    ids=["empty", "latin-1"],
)
def test_files_without_texts_are_reported(content, message, tmp_path):
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*{message}"):
        list(new_preset("mine", str(tmp_path), str(tmp_path / "model")))
