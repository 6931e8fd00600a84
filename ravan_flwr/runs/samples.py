"""Read what a model wrote at each evaluation, to the same few test examples: `samples.jsonl`.

    {"round": 5, "example": 0, "instruction": "What does os.getcwd do?",
     "expected": "It returns the working directory.", "answer": "It gets the working path."}

Round 0 is the model before training. A text of more than `MOST` characters is cut. A run that goes
back to an earlier round drops what lies behind it with its next evaluation.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from ravan_flwr.files import LARGE, opened
from ravan_flwr.runs.record import RoundRecord, check, parsed

SAMPLES = "samples.jsonl"
MOST = 1000  # characters of a text
_TAIL = 2**20  # bytes of the file that a page of a run under way reads


class SampleLine(TypedDict):
    """Hold one answer to one example."""

    round: int
    example: int
    instruction: str
    expected: str
    answer: str


def cut(text: str) -> str:
    """Shorten a text that is too long for a page."""
    return text if len(text) <= MOST else text[: MOST - 3] + "..."


def samples_of(run: Path, rounds: Sequence[RoundRecord]) -> list[SampleLine]:
    """Read what a run wrote after the rounds that are recorded, and before the first."""
    evaluated = {0} | {record["round"] for record in rounds if record["metrics"]}
    return [line for line in sample_lines(run) if line["round"] in evaluated]


def last_samples(run: Path, rounds: Sequence[RoundRecord]) -> list[SampleLine]:
    """Read what a run wrote last, from the end of its file."""
    evaluated = {0} | {record["round"] for record in rounds if record["metrics"]}
    lines = [line for line in sample_lines(run, _TAIL) if line["round"] in evaluated]
    return [line for line in lines if line["round"] == lines[-1]["round"]]


def sample_lines(run: Path, tail: int | None = None) -> list[SampleLine]:
    """Read the file, or its end; a line that is still being written does not count."""
    path = run / SAMPLES
    if not path.exists():
        return []
    with opened(path, LARGE) as file:
        size = file.seek(0, 2)
        start = 0 if tail is None else max(0, size - tail)
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]
    found = []
    for number, line in enumerate(lines[1:] if start else lines, start=1):
        try:
            found.append(check(parsed(line), SampleLine))
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged: line {number}{' of its end' * bool(start)}: {error}; restore "
                "it, or take it away"
            ) from None
    return found


# For a page.

MOST_SHOWN = 20  # examples
_ROUNDS = 5  # of which the answers are shown


def compared(lines: Sequence[SampleLine]) -> list[dict[str, Any]]:
    """Lay the answers to each example below each other: of the first round, the last, and between.

    Each is (what stands on the left, the text).
    """
    shown = _spread(sorted({line["round"] for line in lines}))
    by_example: dict[int, list[SampleLine]] = {}
    for line in lines:
        if line["round"] in shown:
            by_example.setdefault(line["example"], []).append(line)
    return [_one(by_example[example]) for example in sorted(by_example)[:MOST_SHOWN]]


def _spread(rounds: Sequence[int]) -> set[int]:
    """Choose the first round, the last, and a few between."""
    places = (round(n * (len(rounds) - 1) / (_ROUNDS - 1)) for n in range(_ROUNDS))
    return {rounds[place] for place in places} if rounds else set()


def _one(lines: Sequence[SampleLine]) -> dict[str, Any]:
    """Describe one example, and its answers in the order of the rounds."""
    ordered = sorted(lines, key=lambda line: line["round"])
    last = ordered[-1]
    answers = [(_when(line["round"]), line["answer"]) for line in ordered]
    return {
        "instruction": last["instruction"], "rows": [("right answer", last["expected"]), *answers]
    }  # fmt: skip


def _when(number: int) -> str:
    return f"after round {number}" if number else "before training"
