"""Evaluate a run's result on examples that it has not seen."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from ravan_flwr.config.presets import chosen_data
from ravan_flwr.data.other_examples import other_examples
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.reports.classes import class_table, described
from ravan_flwr.reports.load_run import result_of
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.tally import Tally

log = logging.getLogger(__name__)


def evaluate(run: Path | str, data: Path | str, client: int | None = None) -> dict[str, Any]:
    """Measure a run's result on other examples, and count them class by class.

    `data` is a folder, a file, or an id of the hub, with the columns of the run's preset, and
    `client` as for `result_of`. The keys are `run`, `data`, `split`, `examples`, `metrics`; of
    classes also `classes` and `confusion`.
    """
    with result_of(run, client) as bench:
        task = bench.task
        spec = _spec_of(str(data), task.data)
        examples, split = other_examples(spec)
        if spec.name == task.data.name and split == "all examples":
            log.warning("%s: the run trained on most of these; the result is too good", data)
        tally = Tally() if task.classifies else None
        encoded = task.encode(examples)
        measured = bench.evaluate(tally, {"data": encoded})
    content: dict[str, Any] = {
        "run": str(run),
        "data": str(data),
        "split": split,
        "examples": len(encoded),
        "metrics": dict(measured),
    }
    if tally is not None:
        counted = described(tally, task.data.labels)
        content["metrics"]["macro-f1"] = counted["macro-f1"]
        content |= {key: counted[key] for key in _COUNTED if key in counted}
    return content


_BROADEST = 60  # characters of a cell
_COUNTED = ("classes", "confusion", "no-label")


def _spec_of(data: str, spec: DataSpec) -> DataSpec:
    """Name other data with the same columns, wherever the run's own came from."""
    file = Path(data).expanduser()
    if file.is_file():
        return dataclasses.replace(spec, source="hub", name=str(file), revision="")
    return chosen_data(dataclasses.replace(spec, source="hub"), data)


def as_text(content: dict[str, Any]) -> str:
    """Lay an evaluation out for a terminal."""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in content["metrics"].items())
    lines = [f"{content['examples']} examples ({content['split']} of {content['data']})", metrics]
    if "classes" in content:
        table = class_table(content | content["metrics"])
        lines += ["", *_aligned([table["heads"], *table["rows"]])]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    """Write a value for a terminal, as one line: names of classes come from the data."""
    text = plain(str(value))
    return text if len(text) <= _BROADEST else text[: _BROADEST - 3] + "..."


def _aligned(rows: list[tuple[object, ...]]) -> list[str]:
    """Write a table with columns as broad as their longest cell; numbers stand on the right."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    return [
        "  ".join(
            cell.rjust(width) if 0 < place < 5 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
