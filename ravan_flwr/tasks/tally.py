"""Count which label was predicted for examples of which class, and what follows from the counts.

Precision, recall and F1 of a class are 0 where they would be 0 / 0. Macro-F1 is the mean over the
classes that occur, among the examples or among the predictions, as scikit-learn computes it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OTHER = -1  # what a text-to-text model wrote where it wrote no label
FALLEN = 0.99  # of the examples of all other classes


@dataclass(frozen=True)
class ClassScores:
    """Hold how well a model recognises one class."""

    label: str
    examples: int
    predicted: int  # how often it was the answer
    right: int
    precision: float
    recall: float
    f1: float


class Tally:
    """Add up pairs of (right, predicted) label numbers; memory grows with different pairs only."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[int, int]] = Counter()

    def add(self, right: Iterable[int], predicted: Iterable[int]) -> None:
        """Count predictions of so many examples."""
        self.pairs.update(zip(right, predicted, strict=True))

    def __len__(self) -> int:
        return self.pairs.total()

    def accuracy(self) -> float:
        """Compute the share of right predictions."""
        right = sum(n for (expected, label), n in self.pairs.items() if expected == label)
        return right / max(len(self), 1)

    def predicted(self, label: int) -> int:
        """Count how often a label was predicted."""
        return sum(number for (_, prediction), number in self.pairs.items() if prediction == label)

    def fallen_on(self) -> int | None:
        """Find the label that nearly all examples of the others are taken for, if there is one."""
        label = max((prediction for _, prediction in self.pairs), key=self.predicted, default=OTHER)
        other_pairs = Counter({pair: n for pair, n in self.pairs.items() if pair[0] != label})
        hits = sum(number for (_, prediction), number in other_pairs.items() if prediction == label)
        return label if other_pairs and hits >= FALLEN * other_pairs.total() else None

    def matrix(self, classes: int) -> list[list[int]]:
        """Lay the counts out, a row for each class; what is no label is left out."""
        rows = range(classes)
        return [[self.pairs[right, predicted] for predicted in rows] for right in rows]

    def invalid_predictions(self, classes: int) -> list[int]:
        """Count for each class how often the prediction was no label."""
        return [self.pairs[right, OTHER] for right in range(classes)]

    def by_class(self, labels: Sequence[str]) -> list[ClassScores]:
        """Score each class."""
        examples: Counter[int] = Counter()
        predicted: Counter[int] = Counter()
        for (expected, prediction), count in self.pairs.items():
            examples[expected] += count
            predicted[prediction] += count
        scores = []
        for number, label in enumerate(labels):
            of, as_, right = examples[number], predicted[number], self.pairs[number, number]
            precision, recall = (right / count if count else 0.0 for count in (as_, of))
            f1 = 2 * right / (of + as_) if of + as_ else 0.0
            scores.append(ClassScores(label, of, as_, right, precision, recall, f1))
        return scores


def macro_f1(scores: Sequence[ClassScores]) -> float:
    """Average F1 over the classes that occur."""
    occurring = [score.f1 for score in scores if score.examples or score.predicted]
    return sum(occurring) / max(len(occurring), 1)
