"""Score a language model on multiple-choice questions by likelihood.

As lm-evaluation-harness does: each choice is written after the question, and the model's answer is
the choice whose tokens have the largest log-likelihood there, as a sum (its `acc`), or divided by
the choice's characters (its `acc_norm`). Where the prompt lists the choices, their letters are
scored, as in MMLU; else their texts.

The last token of a choice is never read. So choices of one token, as letters are, share one text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import datasets
import torch
from torch import Tensor

from ravan_flwr.data.other_examples import roles_of_choices
from ravan_flwr.data.rows import UnreadableError, text_of
from ravan_flwr.specs import QuestionSpec
from ravan_flwr.tasks.forms import Written, roles_in
from ravan_flwr.tasks.token_loss import losses_at
from ravan_flwr.tasks.tokens import report_cut_examples, report_skipped_examples, tokens_of

TOKENS = 16_384  # that are read at a time
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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
        ends = [0, *accumulate(len(question.choices) for question in self.questions)]
        sums = torch.zeros(ends[-1], dtype=torch.float64)
        texts, start = _texts(self.questions), 0
        while start < len(texts):
            number = max(1, TOKENS // len(texts[start].ids))
            owners, values = _scored(network, texts[start : start + number], device)
            sums.index_add_(0, owners, values.cpu().double())
            start += number
        return [sums[start:end].tolist() for start, end in pairwise(ends)]


# From an example to texts.


@dataclass(frozen=True)
class QuestionText:
    """Hold a question as texts: what the model reads, what it may go on with, and what is right."""

    prompt: str
    choices: tuple[str, ...]
    right: int


def asked(row: Mapping[str, Any], spec: QuestionSpec, answers: Any = None) -> QuestionText:
    """Write a question; UnreadableError if it is none."""
    choices = _choices(row, spec)
    value = row["answer"]
    if isinstance(answers, datasets.ClassLabel) and isinstance(value, int):
        value = answers.names[value] if value >= 0 else None
    right = _position(value, choices)
    texts = {role: text_of(role, row[role]).strip() for role, _ in spec.columns if role != "answer"}
    listed = "\n".join(
        f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)
    )
    if "choices" in roles_in(spec.prompt):
        choices = list(LETTERS[: len(choices)])
    prompt = spec.prompt.format(**texts, choices=listed)
    # The space between prompt and choice stands before the choice, as tokens have it.
    bare = prompt.rstrip(" ")
    space = "" if bare == prompt and prompt[-1:].isspace() else " "
    return QuestionText(bare, tuple(space + choice for choice in choices), right)


def _choices(row: Mapping[str, Any], spec: QuestionSpec) -> list[str]:
    """List a question's choices."""
    values: Any = list(spec.always)
    if not values:
        values = [row[role] for role in roles_of_choices(spec)]
        if len(spec.choices) == 1:
            (values,) = values
    if not isinstance(values, list):
        raise UnreadableError("its choices are no list")
    if len(values) < 2:
        raise UnreadableError("it has less than two choices")
    if len(values) > len(LETTERS):
        raise UnreadableError(f"it has more than {len(LETTERS)} choices")
    if any(value is None or (isinstance(value, str) and not value.strip()) for value in values):
        raise UnreadableError("one of its choices is empty")
    return [text_of("choice", value).strip() for value in values]


def _position(value: Any, choices: Sequence[str]) -> int:
    """Find the right choice by its text, its letter, or its number, which counts from 0."""
    if isinstance(value, float):  # of a table in which some are missing
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UnreadableError("its answer is missing")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UnreadableError(f"its answer is a {type(value).__name__}, expected a number or text")
    place = _place_of(value.strip(), choices) if isinstance(value, str) else value
    if not 0 <= place < len(choices):
        raise UnreadableError("its answer is out of range: no choice has that number or letter")
    return place


def _place_of(text: str, choices: Sequence[str]) -> int:
    """Find a text among the choices, or as a letter or number."""
    by_letter = LETTERS.find(text.upper()) if len(text) == 1 else -1
    if text in choices:
        place = choices.index(text)
        if 0 <= by_letter < len(choices) and by_letter != place:
            raise UnreadableError("its answer is the text of one choice and the letter of another")
        return place
    if by_letter >= 0:
        return by_letter
    if text.isascii() and text.isdigit() and len(text) < 4:
        return int(text)
    raise UnreadableError("its answer is none of its choices, no letter and no number")


# From texts to tokens.


def questions_of(
    examples: datasets.Dataset, spec: QuestionSpec, reader: Any, most: int, overlong: str
) -> Questions:
    """Read all questions, and leave out those that cannot be scored; report them."""
    problems, cut, good = [], 0, []
    answers = examples.features["answer"]
    for row in examples:
        try:
            whole = _tokens(reader, asked(row, spec, answers))
            question, longest = whole, max(map(len, whole.choices))
            over = len(whole.prompt) + longest - most
            if over > 0:  # cut the prompt from its front, the same for all choices
                first = int(whole.prompt[0] == reader.bos_token_id)
                if over >= len(whole.prompt) - first:
                    raise UnreadableError(
                        "one of its choices alone has more tokens than max-length"
                    )
                if overlong == "drop":
                    raise UnreadableError("it has more tokens than max-length")
                shorter = whole.prompt[:first] + whole.prompt[first + over :]
                question = replace(whole, prompt=shorter)
                cut += 1
        except UnreadableError as error:
            problems.append(str(error))
            continue
        problems.append("")
        good.append(question)
    report_skipped_examples(problems, "questions", "asked", "choices and the right answer")
    report_cut_examples(cut, len(problems), most, "questions")
    return Questions(good, spec.score)


def _tokens(reader: Any, question: QuestionText) -> Question:
    """Read prompt and choices; where a token would reach over the border, they are read apart."""
    prompt: tuple[int, ...] = ()
    choices = []
    for choice in question.choices:
        text = question.prompt + choice
        tokens = tokens_of(reader, Written(text, ((len(question.prompt), len(text)),)))
        start = tokens.learned.index(True)
        prompt = tuple(tokens.ids[:start])
        choices.append(tuple(tokens.ids[start:-1]))  # without the token for the end
    if not prompt:
        raise UnreadableError("its prompt has no token")
    if not all(choices):
        raise UnreadableError("one of its choices has no token")
    characters = tuple(len(choice.strip()) for choice in question.choices)
    return Question(prompt, tuple(choices), question.right, characters)


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
            text = here.setdefault(ids, _Text(ids, len(question.prompt) - 1, []))
            text.scored.append((number, choice))
            number += 1
        texts += here.values()
    return sorted(texts, key=lambda text: -len(text.ids))


def _scored(network: Any, batch: Sequence[_Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute the log-likelihood of each token of each choice, and say whose it is."""
    width = max(len(text.ids) for text in batch)
    ids = torch.tensor([[*text.ids, *[0] * (width - len(text.ids))] for text in batch])
    places = [
        (line * width + text.start + place, token, number)
        for line, text in enumerate(batch)
        for number, choice in text.scored
        for place, token in enumerate(choice)
    ]
    positions, targets, owners = torch.tensor(places).T
    given = ids.to(device), positions.to(device), targets.to(device)
    return owners, -torch.cat(losses_at(network, *given, "none"))
