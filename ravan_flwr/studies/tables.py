"""Write what came of a study: tables for people and for machines, and pictures."""

import csv
import io
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ravan_flwr.results.charts import Chart
from ravan_flwr.results.report import comparison_charts
from ravan_flwr.results.spectrum import Spectra
from ravan_flwr.results.spectrum import charts as spectrum_charts
from ravan_flwr.runs.console import megabytes
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.runs.history import RecordedRun
from ravan_flwr.specs import LOWER_IS_BETTER
from ravan_flwr.studies.spec import Study, Table, final_of


def write_tables(study: Study, folder: Path, failed: Mapping[str, str]) -> None:
    """Write `results.md`, `results.csv` and the pictures of what is done, and what failed."""
    pictures = {table.title: charts(table, folder) for table in study.tables}
    text = markdown(study, folder, pictures)
    if failed:
        text += "\n".join(["## Failed", "", *(f"- `{k}`: {v}" for k, v in failed.items()), ""])
    write_atomically(folder / "results.md", text.encode())
    write_atomically(folder / "results.csv", comma_separated(study, folder).encode())
    for chart in (chart for drawn in pictures.values() for chart in drawn):
        write_atomically(folder / f"{chart.name}.png", chart.png())


def charts(table: Table, folder: Path) -> list[Chart]:
    """Draw the metric by round and by megabyte, a line for each row with a band over its seeds.

    And the spectra of what the runs added to the weights, if the table asks for them.
    """
    groups = {}
    for name, row in table.rows.items():
        done = [path for run in row.runs(folder) if (path := run.directory(folder))]
        if done:
            groups[name] = [RecordedRun.read(path) for path in done]
    if not groups:
        return []
    slug = re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-")
    drawn = comparison_charts(groups)[:2]
    if table.spectra:
        spectra = {name: [Spectra.of(run.path) for run in runs] for name, runs in groups.items()}
        drawn += spectrum_charts(spectra, top=64)
    return [replace(chart, name=f"{slug}-{chart.name}") for chart in drawn]


@dataclass(frozen=True)
class _Line:
    """A row of a table, with the results of its seeds."""

    table: str
    row: str
    metric: str
    finals: list[float]
    rate: float
    chosen: bool  # from a grid
    at_the_edge: bool  # of that grid
    parameters: int
    rank: int | None
    paper: float | None  # in percent
    bytes_up: float
    bytes_down: float
    seconds: float

    @property
    def mean(self) -> float:
        return statistics.mean(self.finals)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.finals) if len(self.finals) > 1 else 0.0

    def cells(self, *, best: bool, with_paper: bool) -> list[str]:
        """Write the row for people."""
        value = self._told(self.mean)
        value += f" ± {self._told(self.spread)}" if len(self.finals) > 1 else ""
        paper = "-" if self.paper is None else f"{self.paper:.1f}"
        return [
            self.row,
            f"**{value}**" if best else value,
            *([paper] if with_paper else []),
            " ".join(map(self._told, self.finals)),
            f"{self.rate:g}" + (" (edge)" if self.at_the_edge else ""),
            str(self.rank or "-"),
            f"{self.parameters:,}",
            megabytes(round(self.bytes_up)),
            megabytes(round(self.bytes_down)),
            f"{self.seconds:.0f}",
        ]

    @property
    def merit(self) -> float:
        """Return the mean such that larger is better."""
        return -self.mean if self.metric in LOWER_IS_BETTER else self.mean

    def _told(self, value: float) -> str:
        """Write a metric: shares of 1 in percent, others as they are."""
        return f"{value:.3f}" if self.metric in LOWER_IS_BETTER else f"{100 * value:.1f}"

    def values(self) -> list[object]:
        """List the row's values for machines, as `CSV_COLUMNS` names them."""
        finals = " ".join(map(str, self.finals))
        result = [self.table, self.row, self.metric, self.mean, self.spread, finals]
        settings = [self.rate, self.chosen, self.rank, self.parameters]
        return [*result, *settings, self.bytes_up, self.bytes_down, self.seconds, self.paper]


def _lines(table: Table, folder: Path) -> Iterator[_Line]:
    """Yield a line for each row of which at least one run is done."""
    for name, row in table.rows.items():
        summaries = [run.summary(folder) for run in row.runs(folder)]
        done = [summary for summary in summaries if summary is not None]
        if not done:
            continue
        rate = done[0]["learning-rate"]
        yield _Line(
            table=table.title,
            row=name,
            metric=final_of(done[0], table.metric)[0],
            finals=[final_of(summary, table.metric)[1] for summary in done],
            rate=rate,
            chosen=bool(row.rates),
            at_the_edge=bool(row.rates) and rate in (min(row.rates), max(row.rates)),
            parameters=done[0]["adapter-parameters"],
            rank=done[0]["rank"],
            paper=table.paper.get(name),
            bytes_up=statistics.mean(summary["bytes-up"] for summary in done),
            bytes_down=statistics.mean(summary["bytes-down"] for summary in done),
            seconds=statistics.mean(summary["seconds"] for summary in done),
        )


CSV_COLUMNS = """
    table row metric mean spread finals
    learning-rate chosen rank parameters bytes-up bytes-down seconds paper
"""
COLUMNS = ("by seed", "learning rate", "rank", "parameters", "up", "down", "seconds")
LEGEND = """\
How to read the tables: a row is a method or a setting, run once with each seed. Its first number
is the metric after the last round, the mean over the seeds ± their standard deviation, with the
best of the rows that compete in bold; *by seed* has each seed's. *Edge* after a learning rate: it
is the smallest or the largest of those that were tried, so a better one may lie outside.
*Parameters* are those of the adapters that are trained. *Up* and *down* are what all clients sent
and received in a whole run; these and *seconds* are means over the seeds.
"""


def markdown(
    study: Study, folder: Path, pictures: Mapping[str, Sequence[Chart]] | None = None
) -> str:
    """Write the tables for people: mean and standard deviation over the seeds, best in bold."""
    text = [f"# {study.title}", ""]
    for table in study.tables:
        drawn = (pictures or {}).get(table.title, ())
        text += [f"## {table.title}", "", *_markdown_table(table, list(_lines(table, folder)))]
        text += ["", *(f"![{chart.about}]({chart.name}.png)" for chart in drawn), ""]
    return "\n".join([*text, LEGEND])


def _markdown_table(table: Table, lines: Sequence[_Line]) -> Iterator[str]:
    """Yield the heads of the columns, the rule below them, and a row for each line."""
    with_paper = bool(table.paper)
    metric = lines[0].metric if lines else "metric"
    columns = [
        "",
        metric + ("" if metric in LOWER_IS_BETTER else ", %"),
        *(["paper, %"] if with_paper else []),
        *COLUMNS,
    ]
    yield _row(columns)
    yield _row(["---"] * len(columns))
    best = max((line.merit for line in lines if line.row not in table.references), default=0.0)
    for line in lines:
        yield _row(line.cells(best=line.merit == best, with_paper=with_paper))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def comma_separated(study: Study, folder: Path) -> str:
    """Write the same for machines, in full precision."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(CSV_COLUMNS.split())
    for table in study.tables:
        for line in _lines(table, folder):
            writer.writerow(line.values())
    return buffer.getvalue()
