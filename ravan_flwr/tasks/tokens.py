"""Tokenize a text with answers, and mark the tokens of the answers as learned.

The whole text is tokenized at once, as in a prediction. A token must end where an answer begins or
ends: the text before that border, tokenized alone, must give the same tokens. Otherwise a token
crosses the border (as " yes" between "Answer: " and "yes"), and the text is tokenized in two parts:
a model that gets the prompt alone must continue with the answer.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.tasks.prompts import AnnotatedText

log = logging.getLogger(__name__)

_MAX_PROBLEMS = 10  # that are listed


@dataclass(frozen=True)
class Tokens:
    """A text's tokens, and which of them are learned."""

    ids: list[int]
    learned: list[bool]
    first: int = 0  # tokens at the front that are never cut: the beginning token

    def __len__(self) -> int:
        return len(self.ids)

    def without_front(self, excess: int) -> "Tokens":
        """Return the tokens without the `excess` tokens that follow the `first` ones."""
        first, end = self.first, self.first + excess
        ids = self.ids[:first] + self.ids[end:]
        return Tokens(ids, self.learned[:first] + self.learned[end:], first)


def tokenize_text(reader: Any, annotated: AnnotatedText, *, learn_all: bool = False) -> Tokens:
    """Tokenize a whole text for training; `learn_all` marks all tokens as learned."""
    ids = first_tokens(reader) if annotated.plain else []
    learned = [False] * len(ids)
    for segment, is_answer in _segments(reader, annotated):
        ids += segment
        learned += [is_answer or learn_all] * len(segment)
    if annotated.plain and annotated.answers:
        ids.append(reader.eos_token_id)
        learned.append(True)
    begins = bool(ids) and ids[0] == reader.bos_token_id
    return Tokens(ids, learned, int(begins))


def question_tokens(reader: Any, annotated: AnnotatedText, max_tokens: int) -> list[int]:
    """Tokenize a prompt alone; cut its front to `max_tokens` tokens."""
    ids = (first_tokens(reader) if annotated.plain else []) + _read(reader, annotated.text)
    if not ids:
        raise UnreadableError("its prompt has no token")
    first = int(ids[0] == reader.bos_token_id)
    excess = len(ids) - max_tokens
    return ids if excess <= 0 else ids[:first] + ids[first + excess :]


def _segments(reader: Any, annotated: AnnotatedText) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens between consecutive borders, and whether they belong to an answer."""
    text, origin, border = annotated.text, 0, 0
    before: list[int] = []  # the tokens from `origin` to `border`
    ends = [end for answer in annotated.answers for end in answer]
    for number, end in enumerate([*ends, len(text)]):
        tokens = _read(reader, text[origin:end])
        if tokens[: len(before)] != before:  # a token crosses the border
            origin, before = border, []
            tokens = _read(reader, text[origin:end])
        yield tokens[len(before) :], number % 2 == 1
        before, border = tokens, end


def _read(reader: Any, text: str) -> list[int]:
    ids: list[int] = reader(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def first_tokens(reader: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before every text, such as a beginning token."""
    read = reader("a", return_special_tokens_mask=True)
    pairs = zip(read["input_ids"], read["special_tokens_mask"], strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], pairs)]


def shortened(tokens: Tokens, max_tokens: int, overlong: str, *, learn_all: bool = False) -> Tokens:
    """Return at most `max_tokens` tokens, cut from the front, or raise UnreadableError.

    It is raised if `overlong` is "drop" and the text too long, or if no token can be learned. An
    answer whose beginning was cut is not learned.
    """
    excess = len(tokens) - max_tokens
    if excess > 0 and overlong == "drop":
        raise UnreadableError("it has more tokens than max-length")
    if excess > 0:
        tokens, index = tokens.without_front(excess), tokens.first
        while not learn_all and index < len(tokens) and tokens.learned[index]:
            tokens.learned[index] = False
            index += 1
    if not any(tokens.learned[1:]):  # no token precedes the first, so it has no loss
        raise UnreadableError(
            "its answer alone has more tokens than max-length" if excess > 0
            else "it has no token to learn"
        )  # fmt: skip
    return tokens


# Reports of examples that are left out or cut.


def report_skipped_examples(problems: Sequence[str]) -> None:
    """Log how many examples are left out, by problem; "" means none. ValueError if all are."""
    counts = Counter(filter(None, problems))
    reasons = "; ".join(
        f"{count}: {problem} (example {problems.index(problem) + 1})"
        for problem, count in counts.most_common(_MAX_PROBLEMS)
    )
    number = counts.total()
    if number == len(problems):
        raise ValueError(
            f"examples: none of {number} can be learned: {reasons or 'there are none'}; expected "
            "a question and an answer in each; correct them, or the preset's data"
        )
    if number:
        log.warning("examples: %d of %d are left out: %s", number, len(problems), reasons)


def report_cut_examples(cut: int, number: int, max_length: int) -> None:
    """Log how many examples are cut from the front."""
    if cut:
        log.warning(
            "examples: %d of %d have more tokens than max-length = %d and are cut from the front; "
            "`overlong: drop` in the preset's data leaves them out, a larger max-length "
            "keeps them whole", cut, number, max_length,
        )  # fmt: skip
