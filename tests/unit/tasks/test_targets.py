"""Targets of text-to-text tasks: labels must fit, and cut answers are counted."""

import dataclasses
import logging

import datasets
import numpy as np
import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.tasks.base import IGNORED
from ravan_flwr.tasks.question_answering import QuestionAnswering
from ravan_flwr.tasks.text_to_label import TextToLabel
from ravan_flwr.training.model_and_data import ModelAndData
from tests.support.tiny import WORDS, save_data, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model("t5", tmp_path_factory.mktemp("targets") / "model")


def task(kind, folder, length, labels=()):
    """Return a task with short prompts, and targets of this many tokens."""
    preset = "newsgroups-t5" if labels else "mrqa-t5"
    data = dataclasses.replace(
        read_config({"preset": preset}).data, labels=labels, target_length=length
    )
    return kind(data, 24, lambda: folder)


def tokens_of(folder, text):
    """Return the tokens of a text by the tokenizer itself, with the end token."""
    reader = task(QuestionAnswering, folder, 8).reader
    return len(reader.backend_tokenizer.encode(text).ids)


LONG = " ".join(WORDS[:6])


def test_a_too_long_label_is_reported_with_the_needed_length(folder):
    names = (WORDS[0], LONG, " ".join(WORDS[:3]))
    most = tokens_of(folder, LONG)
    task(TextToLabel, folder, most, names).check()
    message = rf"target-length = {most - 1}: .*: {LONG} \({most}\); .* set target-length: {most} in"
    with pytest.raises(ValueError, match=message):
        task(TextToLabel, folder, most - 1, names).check()


def questions(answers):
    number = len(answers)
    columns = {"question": ["what"] * number, "context": [WORDS[0]] * number}
    return datasets.Dataset.from_dict(columns | {"answers": answers})


def test_cut_answers_are_counted_once_and_scored_completely(folder, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    long, fits = tokens_of(folder, LONG), tokens_of(folder, WORDS[1])
    assert fits < long - 1
    assert tokens_of(folder, LONG.rsplit(" ", 1)[0]) <= long - 1
    task(QuestionAnswering, folder, long).encode(questions([[LONG], [WORDS[1]], [""]]))
    assert not caplog.records
    qa = task(QuestionAnswering, folder, long - 1)
    encoded = qa.encode(questions([[WORDS[1]], [LONG, WORDS[1]], [WORDS[1], LONG], [LONG]]))
    (message,) = caplog.messages
    assert message.startswith(f"answers: 2 of 4 have more tokens than target-length = {long - 1}")
    labels = encoded.take(np.arange(4))["labels"]
    tokens = qa.reader.backend_tokenizer.encode(LONG).ids
    assert labels[1].tolist() == tokens[: long - 1]  # the first ones, without the end token
    assert labels[0].tolist() == qa.reader(WORDS[1]).input_ids + [IGNORED] * (long - 1 - fits)
    assert qa.score(LONG, encoded.read_answers(np.array([3]))[0]) == 1
    monkeypatch.setattr("ravan_flwr.tasks.base.IN_MEMORY", 0)
    cached = qa.encode(questions([[LONG], [WORDS[1]], [LONG]]))
    assert isinstance(cached.table, datasets.Dataset)
    assert "answers: 2 of 3 have more tokens than" in caplog.text


def test_the_presets_labels_are_learned_completely(folder, tmp_path):
    """As in the preset: 32 tokens, and every label is recovered from its target."""
    settings = {"preset": "newsgroups-t5", "model": str(folder)}
    data = str(save_data("newsgroups-t5", tmp_path))
    loaded = ModelAndData(read_config(settings | {"data": data, "max-length": 16}))
    encoded = loaded.test_sets["test"]
    labels = encoded.take(np.arange(len(encoded)))["labels"]
    texts = loaded.task.reader.batch_decode(
        [row[row != IGNORED] for row in labels], skip_special_tokens=True
    )
    assert texts == [right for (right,) in encoded.answers]
