"""Question answering over a context by generated text, scored by SQuAD's F1, averaged.

Answers are compared as bags of words, in lower case, without punctuation and articles. The
best-matching correct answer counts (Rajpurkar et al., 2016).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import datasets

from ravan_flwr.tasks.generation import TextToText


class QuestionAnswering(TextToText):
    """Read the columns `question`, `context` and `answers`, a list of texts."""

    metric = "f1"
    right = "answers"

    def answers(self, examples: datasets.Dataset) -> list[Sequence[str]]:
        # SQuAD's answers are mappings with the texts in `text`.
        column = [x["text"] if isinstance(x, dict) else x for x in examples["answers"]]
        if missing := [row for row, answers in enumerate(column) if not answers]:
            raise ValueError(
                f"answers: examples {missing[:10]} have none, expected at least one each; take "
                "them out"
            )
        return [[answers] if isinstance(answers, str) else answers for answers in column]

    def score(self, answer: str, right: Sequence[str]) -> float:
        return max(f1(answer, expected) for expected in right)


TASK = QuestionAnswering

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(answer: str, right: str) -> float:
    """Return the harmonic mean of precision and recall of an answer's words."""
    predicted, expected = Counter(words(answer)), Counter(words(right))
    if not predicted or not expected:
        return float(predicted == expected)
    common = (predicted & expected).total()
    return 2 * common / (predicted.total() + expected.total())
