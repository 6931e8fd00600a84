"""Write and read `classes.json`: a classification run's last evaluation on the server, by class.

    {"round": 20, "examples": 359, "accuracy": 0.95, "macro-f1": 0.94,
     "classes": [{"label": "0", "examples": 36, "predicted": 37, "right": 35,
                  "precision": 0.946, "recall": 0.972, "f1": 0.959}, ...],
     "confusion": [[35, 0, ...], ...],   rows: the right class, columns: the predicted one
     "no-label": [0, ...]}               answers that are no label, of a text-to-text model

With more than `MAX_IN_MATRIX` classes there is no `confusion`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, get_type_hints

from typing_extensions import TypedDict

from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord, check
from ravan_flwr.tasks.tally import ClassScores, Tally, macro_f1

CLASSES = "classes.json"
MAX_IN_MATRIX = 100

_OfClass = TypedDict("_OfClass", get_type_hints(ClassScores))  # type: ignore[misc]
_ClassesFile = TypedDict(
    "_ClassesFile",
    {
        "round": int,
        "examples": int,
        "accuracy": float,
        "macro-f1": float,
        "classes": list[_OfClass],
        "confusion": NotRequired[list[list[int]]],
        "no-label": NotRequired[list[int]],
    },
)


def class_report(tally: Tally, labels: Sequence[str]) -> dict[str, Any]:
    """Return an evaluation class by class, as JSON content."""
    scores = tally.by_class(labels)
    content: dict[str, Any] = {
        "examples": len(tally),
        "accuracy": tally.accuracy(),
        "macro-f1": macro_f1(scores),
        "classes": [dataclasses.asdict(scores_of_class) for scores_of_class in scores],
    }
    if len(labels) <= MAX_IN_MATRIX:
        content["confusion"] = tally.matrix(len(labels))
        if any(no_label := tally.invalid_predictions(len(labels))):
            content["no-label"] = no_label
    return content


def write_classes(
    directory: RunDirectory, number: int, tally: Tally, labels: Sequence[str]
) -> None:
    """Write the file of a round's evaluation, which replaces the previous one."""
    text = json.dumps({"round": number, **class_report(tally, labels)}, allow_nan=False)
    directory.write(CLASSES, text + "\n")


def read_classes(run: Path, rounds: Sequence[RoundRecord]) -> dict[str, Any] | None:
    """Read a run's file; None unless it is of the last evaluated round.

    Runs of earlier versions have no file, nor do runs whose clients evaluate. After a run goes
    back, the file is of a later round until the next evaluation.
    """
    path = run / CLASSES
    if not path.is_file():
        return None
    content = RunDirectory(run).read_json(CLASSES)
    try:
        check(content, _ClassesFile)
        number = len(content["classes"])
        rows = [*content.get("confusion", []), *filter(None, [content.get("no-label")])]
        if len(content.get("confusion", [])) not in (0, number) or {*map(len, rows)} - {number}:
            raise ValueError(f"its confusion or no-label is not one of {number} classes")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; restore or remove it") from None
    evaluated = [record["round"] for record in rounds if record["metrics"]]
    return content if evaluated and content["round"] == evaluated[-1] else None


HEADS = ("class", "examples", "precision", "recall", "F1", "most often mistaken for")


def class_table(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with a row for each class, and a note about it."""
    matrix = content.get("confusion", [])
    heads = HEADS if matrix else HEADS[:-1]
    labels = [entry["label"] for entry in content["classes"]]
    rows = [
        (
            entry["label"],
            entry["examples"],
            *(f"{entry[score]:.4f}" for score in ("precision", "recall", "f1")),
            *([_most_confused_with(number, matrix[number], labels)] if matrix else []),
        )
        for number, entry in enumerate(content["classes"])
    ]
    about = (
        f"On {content['examples']} examples that no client trains on: accuracy "
        f"{content['accuracy']:.4f}, macro-F1 {content['macro-f1']:.4f} (the mean of F1 over the "
        "classes that occur). Precision: the fraction of a class's predictions that are right. "
        "Recall: the fraction of a class's examples that are predicted."
    )
    if none := sum(content.get("no-label", [])):
        about += f" {none} answers are no label."
    return {"about": about, "heads": heads, "rows": rows}


def _most_confused_with(right: int, row: Sequence[int], labels: Sequence[str]) -> str:
    """Return the wrong class that was predicted most often for this one, with the count."""
    wrong = [(number, column) for column, number in enumerate(row) if column != right and number]
    if not wrong:
        return ""
    number, column = max(wrong, key=lambda pair: pair[0])
    return f"{labels[column]} ({number})"
