"""Read what a model wrote at each evaluation, to the same few test examples: `samples.jsonl`.

    {"round": 5, "example": 0, "instruction": "What does os.getcwd do?",
     "expected": "It returns the working directory.", "answer": "It gets the working path."}

Round 0 is the model before training. A text of more than `MOST` characters is cut. A run that goes
back to an earlier round has lines of some rounds twice, of which the later counts.
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


MOST_SHOWN = 20  # examples on a page


def first_and_last(
    lines: Sequence[SampleLine], rounds: Sequence[RoundRecord]
) -> list[dict[str, Any]]:
    """Lay the first and the last answer to each example below the right one, for a page.

    Answers after rounds that are not recorded, since the run has gone back, are left out.
    """
    evaluated = {0} | {record["round"] for record in rounds if record["metrics"]}
    found = {(x["round"], x["example"]): x for x in lines if x["round"] in evaluated}
    shown = sorted({number for number, _ in found})
    last = [line for (number, _), line in sorted(found.items()) if number == shown[-1]]
    return [
        {
            "instruction": line["instruction"],
            "rows": [
                ("right answer", line["expected"]),
                *(
                    (f"after round {number}" if number else "before training", one["answer"])
                    for number in dict.fromkeys((shown[0], shown[-1]))
                    if (one := found.get((number, line["example"])))
                ),
            ],
        }
        for line in last[:MOST_SHOWN]
    ]
