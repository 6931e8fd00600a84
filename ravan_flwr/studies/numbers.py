"""Write the numbers of a study for machines: a line a row, and a line for each rate and seed."""

import csv
import io
from collections.abc import Iterable, Sequence

from ravan_flwr.studies.choosing import choices_of
from ravan_flwr.studies.lines import Line, lines_of
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import Study, Table

COLUMNS = """
    table row metric mean spread finals
    learning-rate chosen rank parameters bytes-up bytes-down seconds paper
    interval seeds against difference difference-interval change change-interval
    best client-seconds key rate tried as-good runs as-good-finals
    late-difference late-interval
"""
OF_RATES = "table row key rate seed metric value"


def rows_as_csv(study: Study, results: Results) -> str:
    """Write every row of every table; of intervals, how far they reach to each side."""
    lines = (_values(line, table) for table in study.tables for line in lines_of(table, results))
    return _as_csv(COLUMNS.split(), lines)


def _values(line: Line, table: Table) -> list[object]:
    """List a row's values, as `COLUMNS` names them."""
    first, found, choice = line.first, line.interval, line.choice
    return [
        *(line.table, line.row, line.metric, found.mean, line.spread, _words(line.values.values())),
        *(first.learning_rate, choice is not None, first.rank, first.parameters),
        *(line.bytes_up, line.bytes_down, line.seconds, line.paper),
        *(found.half, _words(line.values), table.against),
        *((apart.mean, apart.half) if (apart := line.apart) else (None, None)),
        *((change.mean, change.half) if (change := line.change) else (None, None)),
        *(line.best, line.client_seconds),
        *((table.chosen, choice.rate, _words(choice.tried)) if choice else (None,) * 3),
        *((_words(choice.within_noise), choice.runs) if choice else (None,) * 2),
        "; ".join(f"{rate}: {_words(x.values())}" for rate, x in line.as_good.items()),
        *((late.mean, late.half) if (late := line.late) else ()),
    ]


def rates_as_csv(study: Study, results: Results) -> str:
    """Write what each learning rate has reached on held-back examples, with each seed."""
    lines = [
        (table.title, name, table.chosen, rate, seed, score.metric, value)
        for table in study.tables
        for name, choice in choices_of(table, results).items()
        for rate, score in sorted(choice.scores.items())
        for seed, value in zip(table.rows[name].rate_seeds, score.values, strict=True)
    ]
    return _as_csv(OF_RATES.split(), lines)


def _words(values: Iterable[float]) -> str:
    return " ".join(map(str, values))


def _as_csv(columns: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([*line, *[None] * (len(columns) - len(line))] for line in lines)
    return buffer.getvalue()
