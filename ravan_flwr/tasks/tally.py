"""Count predicted labels by class, and derive accuracy, F1 and the confusion matrix.

Precision, recall and F1 of a class are 0 where they would be 0 / 0. Macro-F1 is the mean over the
classes that occur among the examples or the predictions, as scikit-learn computes it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OTHER = -1  # the prediction of a text-to-text model that wrote no label
COLLAPSED = 0.99  # fraction of the examples of all other classes


@dataclass(frozen=True)
class ClassScores:
    """The scores of one class."""

    label: str
    examples: int
    predicted: int  # how often this class was predicted
    right: int  # correct predictions of this class
    precision: float
    recall: float
    f1: float


class Tally:
    """Count pairs of (correct, predicted) label numbers; memory grows with different pairs only."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[int, int]] = Counter()

    def add(self, right: Iterable[int], predicted: Iterable[int]) -> None:
        """Add the correct and predicted labels of examples."""
        self.pairs.update(zip(right, predicted, strict=True))

    def __len__(self) -> int:
        return self.pairs.total()

    def accuracy(self) -> float:
        """Return the fraction of correct predictions."""
        right = sum(n for (expected, label), n in self.pairs.items() if expected == label)
        return right / max(len(self), 1)

    def predicted(self, label: int) -> int:
        """Return how often a label was predicted."""
        return sum(number for (_, prediction), number in self.pairs.items() if prediction == label)

    def collapsed_label(self) -> int | None:
        """Return the label predicted for nearly all examples of the other classes; None if none."""
        label = max((prediction for _, prediction in self.pairs), key=self.predicted, default=OTHER)
        other_pairs = Counter({pair: n for pair, n in self.pairs.items() if pair[0] != label})
        hits = sum(number for (_, prediction), number in other_pairs.items() if prediction == label)
        return label if other_pairs and hits >= COLLAPSED * other_pairs.total() else None

    def matrix(self, classes: int) -> list[list[int]]:
        """Return the confusion matrix, a row for each correct class, without `OTHER`."""
        rows = range(classes)
        return [[self.pairs[right, predicted] for predicted in rows] for right in rows]

    def invalid_predictions(self, classes: int) -> list[int]:
        """Return for each class how often the prediction was no label."""
        return [self.pairs[right, OTHER] for right in range(classes)]

    def by_class(self, labels: Sequence[str]) -> list[ClassScores]:
        """Return the scores of each class."""
        examples: Counter[int] = Counter()
        predicted: Counter[int] = Counter()
        for (expected, prediction), count in self.pairs.items():
            examples[expected] += count
            predicted[prediction] += count
        scores = []
        for number, label in enumerate(labels):
            actual, guessed, right = examples[number], predicted[number], self.pairs[number, number]
            precision, recall = (right / count if count else 0.0 for count in (guessed, actual))
            f1 = 2 * right / (actual + guessed) if actual + guessed else 0.0
            scores.append(ClassScores(label, actual, guessed, right, precision, recall, f1))
        return scores


def macro_f1(scores: Sequence[ClassScores]) -> float:
    """Return the mean F1 over the classes that occur."""
    occurring = [score.f1 for score in scores if score.examples or score.predicted]
    return sum(occurring) / max(len(occurring), 1)
