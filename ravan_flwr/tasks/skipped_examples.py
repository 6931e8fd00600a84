"""Tell of examples that a language model cannot learn, or not whole; refuse data without any."""

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)

_NAMED = 5  # examples of each kind of problem
_KINDS = 10


def report_skipped_examples(
    problems: Sequence[str],
    what: str = "examples",
    done: str = "learned",
    needed: str = "a question and an answer",
) -> None:
    """Count the examples that are left out, by what is wrong with them; "" is nothing."""
    by_kind: dict[str, list[int]] = {}
    for number, problem in enumerate(problems, start=1):
        if problem:
            by_kind.setdefault(problem, []).append(number)
    most_first = sorted(by_kind.items(), key=lambda kind: -len(kind[1]))
    told = "; ".join(_listed(problem, numbers) for problem, numbers in most_first[:_KINDS])
    told += "; ..." if len(most_first) > _KINDS else ""
    number = sum(map(len, by_kind.values()))
    if number == len(problems):
        raise ValueError(
            f"{what}: none of {number} can be {done}: {told or 'there are none'}; "
            f"expected {needed} in each; correct them, or the preset's data"
        )
    if number:
        log.warning("%s: %d of %d are left out: %s", what, number, len(problems), told)


def _listed(problem: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_NAMED])) + (", ..." if len(numbers) > _NAMED else "")
    return f"{len(numbers)}: {problem} (example {shown})"


def report_cut_examples(cut: int, number: int, max_length: int, what: str = "examples") -> None:
    """Count the examples that are read without their fronts."""
    if cut:
        log.warning(
            "%s: %d of %d have more tokens than max-length = %d and are cut from the front; "
            "`overlong: drop` in the preset's data leaves them out, a larger max-length "
            "keeps them whole",
            what,
            cut,
            number,
            max_length,
        )


def report_answers_without_tokens(answers: int) -> None:
    """Count the answers that are read, but not learned."""
    if answers:
        log.warning(
            "examples: %d earlier answers of conversations are read, but not learned, since the "
            "chat template writes them otherwise once the conversation goes on",
            answers,
        )
