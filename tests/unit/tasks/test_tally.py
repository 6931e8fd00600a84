"""Scores by class equal scikit-learn's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_wine
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
)
from sklearn.neighbors import KNeighborsClassifier

from ravan_flwr.tasks.tally import OTHER, Tally, macro_f1

LABELS = ["a", "b", "c", "d", "e"]
NUMBERS = st.integers(0, len(LABELS) - 1)


def agree_with_sklearn(right, predicted, labels):
    tally = Tally()
    for part in np.array_split(np.arange(len(right)), 3):  # in parts, as batches are
        tally.add(right[part].tolist(), predicted[part].tolist())
    numbers = list(range(len(labels)))
    expected = precision_recall_fscore_support(right, predicted, labels=numbers, zero_division=0)
    scores = tally.by_class(labels)
    assert [score.label for score in scores] == labels
    for name, values in zip(("precision", "recall", "f1"), expected[:3], strict=True):
        np.testing.assert_allclose([getattr(score, name) for score in scores], values)
    assert [score.examples for score in scores] == expected[3].tolist()
    matrix = confusion_matrix(right, predicted, labels=numbers)
    assert tally.matrix(len(labels)) == matrix.tolist()
    assert tally.accuracy() == pytest.approx(accuracy_score(right, predicted))
    # scikit-learn omits classes that occur nowhere, as macro_f1 does.
    expected = f1_score(right, predicted, average="macro", zero_division=0)
    assert macro_f1(scores) == pytest.approx(expected)
    assert len(tally) == len(right)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40))
def test_scores_of_any_predictions(pairs):
    right, predicted = np.asarray(pairs).T
    agree_with_sklearn(right, predicted, LABELS)


def test_scores_of_a_classifier_on_wines():
    examples, classes = load_wine(return_X_y=True)
    model = KNeighborsClassifier(1).fit(examples[::2], classes[::2])
    names = load_wine().target_names.tolist()
    agree_with_sklearn(classes[1::2], model.predict(examples[1::2]), names)


def test_an_answer_that_is_no_label_counts_as_wrong():
    tally = Tally()
    tally.add([0, 0, 1, 1], [0, OTHER, OTHER, 1])
    assert tally.invalid_predictions(2) == [1, 1]
    assert tally.matrix(2) == [[1, 0], [0, 1]]
    assert tally.accuracy() == 0.5
    first = tally.by_class(["a", "b"])[0]
    assert (first.precision, first.recall, first.examples) == (1.0, 0.5, 2)


def test_an_empty_tally_does_not_divide_by_zero():
    assert Tally().accuracy() == 0
    assert macro_f1(Tally().by_class(LABELS)) == 0
