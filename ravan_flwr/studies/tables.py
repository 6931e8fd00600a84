"""What came of a study: tables for people and for machines, and pictures."""

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
from ravan_flwr.runs.history import Run as Directory
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
    """The metric by round and by megabyte, a line for each row with a band over its seeds.

    And the spectra of what the runs added, if the table asks for them.
    """
    groups = {
        name: [Directory.read(path) for run in row.runs(folder) if (path := run.directory(folder))]
        for name, row in table.rows.items()
    }
    groups = {name: runs for name, runs in groups.items() if runs}
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
    """A row of a table: what its seeds came to."""

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


def _lines(table: Table, folder: Path) -> Iterator[_Line]:
    for name, row in table.rows.items():
        summaries = [run.summary(folder) for run in row.runs(folder)]
        done = [summary for summary in summaries if summary is not None]
        if not done:
            continue
        rate = done[0]["learning-rate"]
        yield _Line(
            table.title,
            name,
            final_of(done[0], table.metric)[0],
            [final_of(summary, table.metric)[1] for summary in done],
            rate,
            bool(row.rates),
            bool(row.rates) and rate in (min(row.rates), max(row.rates)),
            done[0]["adapter-parameters"],
            done[0]["rank"],
            table.paper.get(name),
            statistics.mean(summary["bytes-up"] for summary in done),
            statistics.mean(summary["bytes-down"] for summary in done),
            statistics.mean(summary["seconds"] for summary in done),
        )


def markdown(
    study: Study, folder: Path, pictures: Mapping[str, Sequence[Chart]] | None = None
) -> str:
    """The tables for people: mean and standard deviation over the seeds, the best in bold."""
    text = [f"# {study.title}", ""]
    for table in study.tables:
        lines = list(_lines(table, folder))
        competing = [line.mean for line in lines if line.row not in table.references]
        best = max(competing, default=0.0)
        metric = lines[0].metric if lines else "metric"
        columns = ["", f"{metric}, %", *(["paper, %"] if table.paper else []), "by seed"]
        columns += ["learning rate", "rank", "parameters", "up", "down", "seconds"]
        text += [f"## {table.title}", "", _row(columns), _row(["---"] * len(columns))]
        for line in lines:
            value = f"{100 * line.mean:.1f}"
            value += f" ± {100 * line.spread:.1f}" if len(line.finals) > 1 else ""
            value = f"**{value}**" if line.mean == best else value
            seeds = " ".join(f"{100 * final:.1f}" for final in line.finals)
            rate = f"{line.rate:g}" + (" (edge)" if line.at_the_edge else "")
            theirs = ["-" if line.paper is None else f"{line.paper:.1f}"] if table.paper else []
            sent = megabytes(round(line.bytes_up)), megabytes(round(line.bytes_down))
            text.append(
                _row(
                    [line.row, value, *theirs, seeds, rate, str(line.rank or "-"),
                     f"{line.parameters:,}", *sent, f"{line.seconds:.0f}"]
                )
            )  # fmt: skip
        drawn = (pictures or {}).get(table.title, ())
        text += ["", *(f"![{chart.about}]({chart.name}.png)" for chart in drawn), ""]
    return "\n".join(text)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def comma_separated(study: Study, folder: Path) -> str:
    """The same for machines, in full precision."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(
        ["table", "row", "metric", "mean", "spread", "finals", "learning-rate", "chosen", "rank",
         "parameters", "bytes-up", "bytes-down", "seconds", "paper"]
    )  # fmt: skip
    for table in study.tables:
        for line in _lines(table, folder):
            writer.writerow(
                [line.table, line.row, line.metric, line.mean, line.spread,
                 " ".join(map(str, line.finals)), line.rate, line.chosen, line.rank,
                 line.parameters, line.bytes_up, line.bytes_down, line.seconds, line.paper]
            )  # fmt: skip
    return buffer.getvalue()
