"""Turn a text with answers in it into tokens, of which those of the answers are learned.

The whole text is read at once, as a model reads it. Where an answer begins or ends, the tokens must
have a border: what stands before it, read alone, gives the same tokens. Else a token reaches over
the border ("Answer: " and "yes" have " yes" in common), and the text is read in two parts, since a
model that is given the prompt alone is to go on with the answer.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.tasks.forms import Written

log = logging.getLogger(__name__)

_NAMED = 5  # examples of each kind of problem
_KINDS = 10


@dataclass(frozen=True)
class Tokens:
    """Hold a text's tokens, and which of them are learned."""

    ids: list[int]
    learned: list[bool]
    first: int = 0  # how many at the front stay there whatever is cut: the token of a beginning

    def __len__(self) -> int:
        return len(self.ids)

    def without_front(self, over: int) -> "Tokens":
        """Cut so many tokens behind the first ones, which stay."""
        first, end = self.first, self.first + over
        ids = self.ids[:first] + self.ids[end:]
        return Tokens(ids, self.learned[:first] + self.learned[end:], first)


def tokens_of(reader: Any, written: Written, *, everything: bool = False) -> Tokens:
    """Read a whole text, as it is learned."""
    ids = first_tokens(reader) if written.plain else []
    learned = [False] * len(ids)
    for part, is_answer in _parts(reader, written):
        ids += part
        learned += [is_answer or everything] * len(part)
    if written.plain and written.answers:
        ids.append(reader.eos_token_id)
        learned.append(True)
    begins = bool(ids) and ids[0] == reader.bos_token_id
    return Tokens(ids, learned, int(begins))


def question_tokens(reader: Any, written: Written, most: int) -> list[int]:
    """Read a prompt alone, cut from its front."""
    ids = (first_tokens(reader) if written.plain else []) + _read(reader, written.text)
    if not ids:
        raise UnreadableError("its prompt has no token")
    first = int(ids[0] == reader.bos_token_id)
    over = len(ids) - most
    return ids if over <= 0 else ids[:first] + ids[first + over :]


def _parts(reader: Any, written: Written) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens from one border to the next, and whether they are an answer's."""
    text, origin, border = written.text, 0, 0
    before: list[int] = []  # the tokens from `origin` to `border`
    ends = [end for answer in written.answers for end in answer]
    for number, end in enumerate([*ends, len(text)]):
        now = _read(reader, text[origin:end])
        if now[: len(before)] != before:  # a token reaches over the border
            origin, before = border, []
            now = _read(reader, text[origin:end])
        yield now[len(before) :], number % 2 == 1
        before, border = now, end


def _read(reader: Any, text: str) -> list[int]:
    ids: list[int] = reader(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def first_tokens(reader: Any) -> list[int]:
    """Find what the tokenizer puts before every text, such as a token of the beginning."""
    read = reader("a", return_special_tokens_mask=True)
    pairs = zip(read["input_ids"], read["special_tokens_mask"], strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], pairs)]


def fitted(tokens: Tokens, most: int, overlong: str, *, everything: bool = False) -> Tokens:
    """Cut what is too long from the front, or refuse it, and what teaches nothing.

    Of an answer that has lost what was before it nothing is learned.
    """
    over = len(tokens) - most
    if over > 0 and overlong == "drop":
        raise UnreadableError("it has more tokens than max-length")
    if over > 0:
        tokens, place = tokens.without_front(over), tokens.first
        while not everything and place < len(tokens) and tokens.learned[place]:
            tokens.learned[place] = False
            place += 1
    if not any(tokens.learned[1:]):  # the first token follows from nothing
        raise UnreadableError(
            "its answer alone has more tokens than max-length" if over > 0
            else "it has no token to learn"
        )  # fmt: skip
    return tokens


# Examples that cannot be learned, or not whole.


def report_skipped_examples(problems: Sequence[str]) -> None:
    """Count the examples that are left out, by what is wrong with them; "" is nothing."""
    by_kind: dict[str, list[int]] = {}
    for number, problem in enumerate(problems, start=1):
        if problem:
            by_kind.setdefault(problem, []).append(number)
    most_first = sorted(by_kind.items(), key=lambda kind: -len(kind[1]))
    listed = []
    for problem, numbers in most_first[:_KINDS]:
        shown = ", ".join(map(str, numbers[:_NAMED])) + (", ..." if len(numbers) > _NAMED else "")
        listed.append(f"{len(numbers)}: {problem} (example {shown})")
    reasons = "; ".join(listed) + ("; ..." if len(most_first) > _KINDS else "")
    number = sum(map(len, by_kind.values()))
    if number == len(problems):
        raise ValueError(
            f"examples: none of {number} can be learned: {reasons or 'there are none'}; expected "
            "a question and an answer in each; correct them, or the preset's data"
        )
    if number:
        log.warning("examples: %d of %d are left out: %s", number, len(problems), reasons)


def report_cut_examples(cut: int, number: int, max_length: int) -> None:
    """Count the examples that are read without their fronts."""
    if cut:
        log.warning(
            "examples: %d of %d have more tokens than max-length = %d and are cut from the front; "
            "`overlong: drop` in the preset's data leaves them out, a larger max-length "
            "keeps them whole", cut, number, max_length,
        )  # fmt: skip
