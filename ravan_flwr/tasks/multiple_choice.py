"""Score a language model on multiple-choice questions by likelihood.

As lm-evaluation-harness does: each choice is written after the question, and the model's answer is
the choice whose tokens have the largest log-likelihood there, as a sum (its `acc`), or divided by
the choice's characters (its `acc_norm`). Where the prompt lists the choices, their letters are
scored, as in MMLU; else their texts.

The last token of a choice is never read. So choices of one token, as letters are, share one text.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.nn import functional as F

from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.specs import QuestionSpec
from ravan_flwr.tasks.conversation import Written
from ravan_flwr.tasks.question_text import QuestionText, asked
from ravan_flwr.tasks.skipped_examples import report_cut_examples, report_skipped_examples
from ravan_flwr.tasks.token_loss import block_rows, hidden_states, logits_of
from ravan_flwr.tasks.tokens import tokens_of

TOKENS = 16_384  # that are read at a time


@dataclass(frozen=True)
class Question:
    """Hold a question as tokens: of the prompt, and of each choice."""

    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    right: int
    characters: tuple[int, ...]


class Questions:
    """Hold the questions that can be scored."""

    def __init__(self, questions: Sequence[Question], score: str) -> None:
        self.questions, self.score = list(questions), score

    def __len__(self) -> int:
        return len(self.questions)

    def accuracy(self, network: Any, device: torch.device) -> float:
        """Compute the share of questions that are answered right; of equals the first counts.

        Not a number if a likelihood is none: the model has diverged.
        """
        found = self.likelihoods(network, device)
        if not all(math.isfinite(value) for values in found for value in values):
            return math.nan
        pairs = zip(self.questions, found, strict=True)
        right = sum(self._answer(question, values) == question.right for question, values in pairs)
        return right / len(self)

    def _answer(self, question: Question, values: Sequence[float]) -> int:
        if self.score == "characters":
            pairs = zip(values, question.characters, strict=True)
            values = [value / characters for value, characters in pairs]
        return values.index(max(values))

    def likelihoods(self, network: Any, device: torch.device) -> list[list[float]]:
        """Compute the log-likelihood of each choice of each question."""
        ends = [0]
        for question in self.questions:
            ends.append(ends[-1] + len(question.choices))
        sums = torch.zeros(ends[-1], dtype=torch.float64)
        for batch in _batches(_texts(self.questions)):
            owners, values = _scored(network, batch, device)
            sums.index_add_(0, owners, values.cpu().double())
        return [sums[start:end].tolist() for start, end in pairwise(ends)]


# From an example to tokens.


def questions_of(
    examples: datasets.Dataset, spec: QuestionSpec, reader: Any, most: int, overlong: str
) -> Questions:
    """Read all questions, and leave out those that cannot be scored; tell of them."""
    problems, cut, good = [], 0, []
    answers = examples.features["answer"]
    for row in examples:
        try:
            whole = _tokens(reader, asked(row, spec, answers))
            question = _fitted(reader, whole, most, overlong)
        except UnreadableError as error:
            problems.append(str(error))
            continue
        problems.append("")
        cut += len(question.prompt) < len(whole.prompt)
        good.append(question)
    report_skipped_examples(problems, "questions", "asked", "choices and the right answer")
    report_cut_examples(cut, len(problems), most, "questions")
    return Questions(good, spec.score)


def _tokens(reader: Any, one: QuestionText) -> Question:
    """Read prompt and choices; where a token would reach over the border, they are read apart."""
    prompt: tuple[int, ...] = ()
    choices = []
    for choice in one.choices:
        text = one.prompt + choice
        tokens = tokens_of(reader, Written(text, ((len(one.prompt), len(text)),)))
        start = tokens.learned.index(True)
        prompt = tuple(tokens.ids[:start])
        choices.append(tuple(tokens.ids[start:-1]))  # without the token for the end
    if not prompt:
        raise UnreadableError("its prompt has no token")
    if not all(choices):
        raise UnreadableError("one of its choices has no token")
    characters = tuple(len(choice.strip()) for choice in one.choices)
    return Question(prompt, tuple(choices), one.right, characters)


def _fitted(reader: Any, question: Question, most: int, overlong: str) -> Question:
    """Cut a prompt from its front, the same for all choices, or refuse the question."""
    prompt, longest = question.prompt, max(map(len, question.choices))
    over = len(prompt) + longest - most
    if over <= 0:
        return question
    first = int(prompt[0] == reader.bos_token_id)
    if over >= len(prompt) - first:
        raise UnreadableError("one of its choices alone has more tokens than max-length")
    if overlong == "drop":
        raise UnreadableError("it has more tokens than max-length")
    cut = prompt[:first] + prompt[first + over :]
    return Question(cut, question.choices, question.right, question.characters)


# What the network makes of them.


@dataclass(frozen=True)
class _Text:
    """Hold a text that the model reads, and the choices that are scored by it."""

    ids: tuple[int, ...]
    start: int  # the position of the prompt's last token
    scored: list[tuple[int, tuple[int, ...]]]  # the number of a choice, and its tokens


def _texts(questions: Sequence[Question]) -> list[_Text]:
    """List the different texts that are read, the longest first."""
    texts: list[_Text] = []
    number = 0
    for question in questions:
        here: dict[tuple[int, ...], _Text] = {}
        for choice in question.choices:
            ids = question.prompt + choice[:-1]
            one = here.setdefault(ids, _Text(ids, len(question.prompt) - 1, []))
            one.scored.append((number, choice))
            number += 1
        texts += here.values()
    return sorted(texts, key=lambda one: -len(one.ids))


def _batches(texts: Sequence[_Text]) -> Iterator[Sequence[_Text]]:
    """Divide texts, which are sorted by their lengths."""
    start = 0
    while start < len(texts):
        number = max(1, TOKENS // len(texts[start].ids))
        yield texts[start : start + number]
        start += number


def _scored(network: Any, batch: Sequence[_Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute the log-likelihood of each token of each choice, and say whose it is."""
    width = max(len(one.ids) for one in batch)
    ids = torch.tensor([[*one.ids, *[0] * (width - len(one.ids))] for one in batch])
    places = [
        (line * width + one.start + place, token, number)
        for line, one in enumerate(batch)
        for number, choice in one.scored
        for place, token in enumerate(choice)
    ]
    positions, targets, owners = torch.tensor(places).T
    hidden = hidden_states(network, ids.to(device)).flatten(0, 1)
    hidden, rows = hidden.index_select(0, positions.to(device)), block_rows(network.config)
    found = [
        -F.cross_entropy(logits_of(network, some).float(), right, reduction="none")
        for some, right in zip(hidden.split(rows), targets.to(device).split(rows), strict=True)
    ]
    return owners, torch.cat(found)
