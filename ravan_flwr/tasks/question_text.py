"""Write a multiple-choice question as texts, and find which of its choices is right."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from ravan_flwr.data.questions import roles_of_choices
from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.data.values import text_of
from ravan_flwr.specs import QuestionSpec
from ravan_flwr.tasks.forms import roles_in

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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
    listed = "\n".join(f"{letter}. {one}" for letter, one in zip(LETTERS, choices, strict=False))
    if "choices" in roles_in(spec.prompt):
        choices = list(LETTERS[: len(choices)])
    return _apart(spec.prompt.format(**texts, choices=listed), choices, right)


def _apart(prompt: str, choices: Sequence[str], right: int) -> QuestionText:
    """Put the space between prompt and choice before the choice, as tokens have it."""
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
