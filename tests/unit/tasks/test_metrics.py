"""The metrics equal their reference implementations on random cases."""

import random
import string
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss
from torchmetrics.functional.text import squad

from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.base import Encoded
from ravan_flwr.tasks.extensions import right_and_loss
from ravan_flwr.tasks.question_answering import QuestionAnswering, f1, words
from ravan_flwr.tasks.text_to_label import TextToLabel
from ravan_flwr.tasks.vision import Vision
from ravan_flwr.training.local_steps import evaluate_all

PARTS = st.sampled_from(
    ["the", "a", "An", "cat", "Cat", "sat", "on", "mat", "U.S.", "3,000", "don't", "—", "!", "é"]
)
ANSWERS = st.lists(PARTS, max_size=6).map(" ".join)


def by_squad(answer, right):
    prediction: dict[str, str] = {"prediction_text": answer, "id": "1"}
    target: Any = {"answers": {"answer_start": [0] * len(right), "text": right}, "id": "1"}
    return pytest.approx(float(squad([prediction], [target])["f1"]) / 100, abs=1e-6)


def task(kind, labels=()):
    return kind(DataSpec("hub", labels=labels, target_length=8), 16, lambda: None)


@given(ANSWERS, st.lists(ANSWERS, min_size=1, max_size=4))
def test_f1_equals_the_squad_scorers(answer, right):
    assert task(QuestionAnswering).score(answer, right) == by_squad(answer, right)


def test_words_of_random_text_equal_the_scorers():
    draw = random.Random(0)
    alphabet = string.ascii_letters + string.punctuation + " \t\nàß"
    for _ in range(300):
        text, other = ("".join(draw.choices(alphabet, k=draw.randint(0, 40))) for _ in range(2))
        assert f1(text, other) == by_squad(text, [other])
    assert words("The Cat's  mat!") == ["cats", "mat"]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
def test_accuracy_and_loss_equal_scikit_learns(pairs):
    labels, leaning = (torch.tensor(column) for column in zip(*pairs, strict=True))
    logits = torch.randn(len(pairs), 5, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(len(pairs)), leaning] += 10
    sums = right_and_loss(logits, labels)
    assert sums["accuracy"] / len(pairs) == pytest.approx(accuracy_score(labels, logits.argmax(-1)))
    reference = log_loss(labels, logits.double().softmax(-1), labels=range(5))
    assert sums["loss"] / len(pairs) == pytest.approx(reference, rel=1e-4, abs=1e-6)


def test_a_label_is_correct_if_it_is_generated_exactly():
    names = ("sci.med", "sci.space")
    draw = random.Random(1)
    answers = [draw.choice([*names, "sci.Med", " sci.med ", "sci", ""]) for _ in range(50)]
    right = [draw.choice(names) for _ in range(50)]
    scores = [task(TextToLabel, names).score(a, [r]) for a, r in zip(answers, right, strict=True)]
    stripped = [answer.strip() for answer in answers]
    assert np.mean(scores) == pytest.approx(accuracy_score(right, stripped))


def test_several_test_sets_have_joint_and_separate_metrics(monkeypatch):
    sets = {"one": Encoded({}, np.arange(30)), "two": Encoded({}, np.arange(10))}
    sums = {30: {"accuracy": 15.0, "loss": 30.0}, 10: {"accuracy": 10.0, "loss": 30.0}}
    monkeypatch.setattr(
        "ravan_flwr.training.local_steps.sum_metrics", lambda _m, _t, one, *_: sums[len(one)]
    )
    model: Any = None
    means = evaluate_all(model, task(Vision), sets, 8)
    assert means == pytest.approx({
        "accuracy": 0.625, "loss": 1.5, "accuracy-one": 0.5, "loss-one": 1.0,
        "accuracy-two": 1.0, "loss-two": 3.0,
    })  # fmt: skip
    alone = evaluate_all(model, task(Vision), {"one": sets["one"]}, 8)
    assert alone == {"accuracy": 0.5, "loss": 1.0}


def test_answers_may_have_squads_form():
    """A mapping has the answers under `text`."""

    def read(answers):
        examples = datasets.Dataset.from_dict({"answers": answers})
        return [list(one) for one in task(QuestionAnswering).answers(examples)]

    plain = [["a cat", "cat"], ["mat"]]
    own = [{"text": texts, "answer_start": [0] * len(texts)} for texts in [*plain, []]]
    assert read(own[:2]) == read(plain) == plain
    with pytest.raises(ValueError, match=r"answers: examples \[2\] have none"):
        read(own)


def test_spaces_around_a_label_are_ignored():
    spaced = task(TextToLabel, ("positive ", "negative"))
    right = spaced.answers(datasets.Dataset.from_dict({"label": ["positive ", "negative"]}))
    assert [spaced.score(" positive", right[0]), spaced.score("positive ", right[1])] == [1.0, 0.0]
