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

from ravan_flwr.runs.directory import LinesFile
from ravan_flwr.runs.record import RoundRecord, check, parsed

SAMPLES = "samples.jsonl"
MOST = 1000  # characters of a text


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


def samples_file(run: Path) -> LinesFile[SampleLine]:
    """Return a run's file of answers, to be read as it grows."""
    do = "restore it, or take it away"
    return LinesFile(run / SAMPLES, lambda line, _: check(parsed(line), SampleLine), do)


def samples_of(
    lines: Sequence[SampleLine], rounds: Sequence[RoundRecord], *, last: bool = False
) -> list[SampleLine]:
    """Choose what was written after the rounds that are recorded, and before the first.

    Or what was written last.
    """
    evaluated = {0} | {record["round"] for record in rounds if record["metrics"]}
    lines = [line for line in lines if line["round"] in evaluated]
    return [line for line in lines if line["round"] == lines[-1]["round"]] if last else lines


# For a page.

MOST_SHOWN = 20  # examples
_ROUNDS = 5  # of which the answers are shown


def compared(lines: Sequence[SampleLine]) -> list[dict[str, Any]]:
    """Lay the answers to each example below each other: of the first round, the last, and between.

    Each is (what stands on the left, the text).
    """
    rounds = sorted({line["round"] for line in lines})
    places = {round(n * (len(rounds) - 1) / (_ROUNDS - 1)) for n in range(_ROUNDS)}
    shown = {rounds[place] for place in places if rounds}
    by_example: dict[int, list[SampleLine]] = {}
    for line in sorted(lines, key=lambda line: (line["example"], line["round"])):
        if line["round"] in shown:
            by_example.setdefault(line["example"], []).append(line)
    return [
        {
            "instruction": answers[-1]["instruction"],
            "rows": [
                ("right answer", answers[-1]["expected"]),
                *((f"after round {x['round']}" if x["round"] else "before training", x["answer"])
                  for x in answers),
            ],
        }
        for answers in [*by_example.values()][:MOST_SHOWN]
    ]  # fmt: skip
