"""Write what came of a study: tables for people and for machines, and pictures.

They are written into a folder and, between marks, into a page. In the page stand, for each table
that it shows, two lines of their own:

    <!-- study NAME: TITLE -->
    <!-- end of study -->

NAME is that of the study's file, TITLE the table's; `rates of TITLE` shows its learning rates, and
`overview` all tables in one. What stands between the lines is written by the command, from the
record of the runs: for a page `docs/results.md` that is `docs/results/NAME.jsonl`, and with it lie
`NAME.csv`, `NAME-rates.csv` and the pictures. So page, numbers and record cannot drift apart.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pandas as pd

from ravan_flwr.reports.charts import Chart
from ravan_flwr.runs.console import megabytes
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.studies.choosing import Measured, RateChoice, alike, choices_of, ranked
from ravan_flwr.studies.lines import Line, lines_of, missed, sentence
from ravan_flwr.studies.pictures import charts, overview_charts
from ravan_flwr.studies.results import Interval, Results, interval
from ravan_flwr.studies.spec import LEAST, OVERVIEW, RATE, Study, Table
from ravan_flwr.tasks import TIME, is_fraction

LEGEND = """\
Numbers are means over the seeds with 95 % intervals (Student's t), differences are paired by seed.
Bold: the best row that competes, and those not significantly different from it. *Edge*: the
smallest or largest rate tried; *open*: some are to be run; *3×*: three seeds took it. *As good* are
rates not significantly different from it, in italics below; *runs* those of the choice. *p, Holm*:
of a paired t-test, corrected for the number of planned contrasts. *Up*, *down*, *client s*: all
clients, a run.
"""


def write_tables(study: Study, results: Results, failed: Mapping[str, str]) -> None:
    """Write `results.md`, two CSV files and the pictures of what is done, and what failed."""
    folder = results.folder
    pictures = {table.title: charts(table, results) for table in study.tables}
    if study.tables_share_rows:
        pictures[OVERVIEW] = overview_charts(study, results)
    text = markdown(study, results, pictures)
    if failed:
        text += "\n".join(["## Failed", "", *(f"- `{k}`: {v}" for k, v in failed.items()), ""])
    write_atomically(folder / "results.md", text.encode())
    write_atomically(folder / "results.csv", rows_as_csv(study, results).encode())
    write_atomically(folder / "rates.csv", rates_as_csv(study, results).encode())
    for chart in (chart for group in pictures.values() for chart in group):
        chart.write(folder)


def markdown(
    study: Study, results: Results, pictures: Mapping[str, Sequence[Chart]] | None = None
) -> str:
    """Write the tables for people."""
    shown = {
        title: [f"![{chart.about}]({chart.name}.png)" for chart in group]
        for title, group in (pictures or {}).items()
    }
    text = [f"# {study.title}", ""]
    if study.tables_share_rows:
        text += ["## All tables", "", *overview_lines(study, results), ""]
        text += [*shown.get(OVERVIEW, ()), ""]
    for table in study.tables:
        text += [f"## {table.title}", ""]
        if any(row.seeds for row in table.rows.values()):  # a tuning only chooses
            text += [*table_lines(table, results), ""]
        text += [*shown.get(table.title, ()), ""]
        if rates := rates_lines(table, results):
            what = f"{table.chosen_in_words}s".capitalize()
            where = "in this table" if table.leave_one_seed_out else "on validation splits"
            text += [f"{what}, by what they reached {where}:", "", *rates, ""]
    return "\n".join([*text, LEGEND])


def table_lines(table: Table, results: Results) -> list[str]:
    """Write one table, and the sentence on significant differences."""
    lines, without = lines_of(table, results), missed(table, results)
    if not lines and not without:
        return ["No run of this table is done yet."]
    what = table.chosen_in_words
    text = _table(_cells(table, lines, line) for line in lines) if lines else []
    if lines and (comparison := sentence(table, lines)):
        text += ["", comparison]
    if without:
        rows = ", ".join(f"{name} ({runs})" for name, runs in without.items())
        text += ["", f"Without a time, since runs ended before they reached the target: {rows}."]
    if table.rates_of:
        text += ["", f"The {what}s were chosen for *{table.rates_of}*, not for this table."]
    if table.leave_one_seed_out:
        text += ["", f"Each seed has the {what} that is best by the other seeds of this table."]
    return text


def _table(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Write rows, each by the heads of its columns, as a table of Markdown."""
    cells = [dict(row) for row in rows]
    table = [list(cells[0]), ["---"] * len(cells[0]), *(list(row.values()) for row in cells)]
    return [
        f"| {' | '.join(' '.join(x.split()).replace('|', '/') for x in row)} |" for row in table
    ]


def _cells(table: Table, lines: Sequence[Line], line: Line) -> dict[str, str]:
    """Write a row for people, by the heads of its columns."""
    paired = any(row.standing for row in lines)
    chosen = any(row.choice for row in lines)
    unit = ", s" if line.metric == TIME else ", %" if is_fraction(line.metric) else ""
    metric = line.metric + unit
    metric += f", mean of the last {table.mean_of_last}" if table.mean_of_last else ""
    cells = {"": line.row, metric: _value(line)}
    if table.paper:
        paper = table.paper.get(line.row)
        cells["paper, %"] = "-" if paper is None else f"{paper:.1f}"
    if paired:
        cells[f"to {table.against}"] = _signed(line.metric, line.difference)
    elif not table.change_from:
        cells["by seed"] = " ".join(as_text(line.metric, value) for value in line.values.values())
    if table.contrasts:
        cells["p, Holm"] = "-" if line.p_holm is None else f"{line.p_holm:.2g}"
    if table.compare_last:
        cells[f"the same, last {table.compare_last}"] = _signed(line.metric, line.late)
    if table.change_from:
        cells[f"from {table.change_from.title}"] = _signed(line.metric, line.change)
    of_rate = table.chosen == RATE
    cells["learning rate"] = _chosen(line) if of_rate else f"{line.first.learning_rate:g}"
    if chosen and not of_rate:
        cells[table.chosen_in_words] = _chosen(line) if line.choice else "-"
    if chosen:
        cells["as good"] = _alternatives(line)
        cells["runs"] = str(line.choice.runs) if line.choice else "-"
    return cells | {
        "rank": str(line.first.rank or "-"),
        "parameters": f"{line.first.parameters:,}",
        "up": megabytes(round(line.mean_of("bytes_up") or 0)),
        "down": megabytes(round(line.mean_of("bytes_down") or 0)),
        "client s": "-" if line.client_seconds is None else f"{line.client_seconds:.0f}",
    }


def _value(line: Line) -> str:
    """Write the mean and its interval, and how many seeds are done if some are not."""
    text = with_interval(line.metric, line.interval)
    text = f"**{text}**" if line.best else text
    num_seeds = len(line.values)
    return text if num_seeds == line.seeds else f"{text} ({num_seeds} of {line.seeds} seeds)"


def _signed(metric: str, difference: Interval | None) -> str:
    """Write a difference with its sign."""
    if difference is None:
        return "-"
    return ("+" if difference.mean > 0 else "") + with_interval(metric, difference)


def _chosen(line: Line) -> str:
    """Write the rate, or how many seeds took which."""
    if (choice := line.choice) is None:
        return f"{line.first.learning_rate:g}"
    text = f"{choice.rate:g}"
    if choice.by_seed:
        rates = [choice.by_seed[seed] for seed in line.values]
        text = " ".join(f"{rates.count(rate)}×{rate:g}" for rate in sorted(set(rates)))
    return text + (" (open)" if choice.open else " (edge)" if choice.at_the_edge else "")


def _alternatives(line: Line) -> str:
    """List the rates that are as good, with what they change; with too few seeds nobody knows."""
    if line.choice is None:
        return "-"
    if line.choice.seeds < LEAST:
        return "unknown"
    texts = [f"{rate:g}" for rate in line.choice.alternatives]
    if line.as_good:
        texts = [f"{rate:g}: {_signed(line.metric, line.moved(rate))}" for rate in line.as_good]
    return (", " if line.as_good else " ").join(texts) or "-"


def with_interval(metric: str, estimate: Interval) -> str:
    """Write a mean, and how far its interval reaches."""
    text = as_text(metric, estimate.mean)
    return text if estimate.half is None else f"{text} ± {as_text(metric, estimate.half)}"


def as_text(metric: str, value: float) -> str:
    """Write a metric: shares of 1 in percent, others as they are."""
    return f"{100 * value:.1f}" if is_fraction(metric) else f"{value:.3f}"


def overview_lines(study: Study, results: Results) -> list[str]:
    """Write the first number of every row of every table, and what it changed from another."""
    tables = {t.title: {x.row: x for x in lines_of(t, results)} for t in study.tables}
    tables = {title: lines for title, lines in tables.items() if lines}
    if not tables:
        return ["No run of this study is done yet."]

    def cell(line: Line | None) -> str:
        if line is None:
            return "-"
        return _value(line) + (f"; {_signed(line.metric, line.change)}" if line.change else "")

    names = dict.fromkeys(name for lines in tables.values() for name in lines)
    return _table(
        {"": name} | {title: cell(lines.get(name)) for title, lines in tables.items()}
        for name in names
    )


def rates_lines(table: Table, results: Results) -> list[str]:
    """Write what each rate has reached, a row for each row of the table and rung of its choice."""
    choices = choices_of(table, results)
    rates = sorted({rate for choice in choices.values() for rate in choice.tried})
    if not rates:
        return []  # given in the settings, or not measured yet

    def cell(choice: RateChoice, measured: Measured, rate: float) -> str:
        score = measured.scores.get(rate)
        if score is None:
            return "failed" if rate in measured.rates and not choice.open else "-"
        mark = "**" if rate == ranked(measured.scores)[0] else "*"
        mark *= rate in alike(measured.scores)
        return mark + with_interval(score.metric, interval(score.values)) + mark

    return _table(
        {"": _name(name, measured)}
        | {f"{rate:g}": cell(choice, measured, rate) for rate in rates}
        | {"runs": f"{len(measured.rates) * len(measured.rung.seeds)}{' (open)' * choice.open}"}
        for name, choice in choices.items()
        for measured in choice.rungs
    )


def _name(row: str, measured: Measured) -> str:
    rounds = measured.rung.rounds
    return row + (f", {rounds} round{'s' * (rounds != 1)}" if rounds else "")


def rows_as_csv(study: Study, results: Results) -> str:
    """Write every row of every table; of intervals, how far they reach to each side."""
    contrasts = any(table.contrasts for table in study.tables)
    lines = [line for table in study.tables for line in lines_of(table, results)]
    rows = [_values(line, contrasts=contrasts) for line in lines]
    columns = None if rows else ["table", "row"]  # none is done yet
    return str(pd.DataFrame(rows, columns=columns, dtype=object).to_csv(index=False))


def _values(line: Line, *, contrasts: bool) -> dict[str, object]:
    """Give a row's values by their columns."""
    first, choice, table = line.first, line.choice, line.table
    values = list(line.values.values())
    rate: object = choice and choice.rate
    if choice and choice.by_seed:
        rate = _words(choice.by_seed.values())
    cells: dict[str, object] = {
        "table": table.title,
        "row": line.row,
        "metric": line.metric,
        "mean": line.interval.mean,
        "spread": statistics.stdev(values) if len(values) > 1 else 0.0,
        "finals": _words(values),
        "learning-rate": first.learning_rate,
        "chosen": choice is not None,
        "rank": first.rank,
        "parameters": first.parameters,
        "bytes-up": line.mean_of("bytes_up"),
        "bytes-down": line.mean_of("bytes_down"),
        "seconds": line.mean_of("seconds"),
        "paper": table.paper.get(line.row),
        "interval": line.interval.half,
        "seeds": _words(line.values),
        "against": table.against,
        **_ends("difference", line.difference),
        **_ends("change", line.change),
        "best": line.best,
        "client-seconds": line.client_seconds,
        "key": table.chosen if choice else None,
        "rate": rate,
        "tried": _words(choice.tried) if choice else None,
        "as-good": _words(choice.within_noise) if choice else None,
        "runs": choice.runs if choice else None,
        "as-good-finals": "; ".join(
            f"{rate}: {_words(x.values())}" for rate, x in line.as_good.items()
        ),
        **_ends("late", line.late),
    }
    if contrasts:
        cells |= {"p": line.difference.p if line.difference else None, "p-holm": line.p_holm}
    return cells


def _ends(name: str, estimate: Interval | None) -> dict[str, object]:
    """Give a difference and its interval by the columns of that name."""
    mean = "late-difference" if name == "late" else name
    return {mean: estimate and estimate.mean, f"{name}-interval": estimate and estimate.half}


def rates_as_csv(study: Study, results: Results) -> str:
    """Write what each learning rate has reached on held-back examples, with each seed."""
    rows = [
        (table.title, _name(row, measured), table.chosen, rate, seed, score.metric, value)
        for table in study.tables
        for row, choice in choices_of(table, results).items()
        for measured in choice.rungs
        for rate, score in sorted(measured.scores.items())
        for seed, value in zip(measured.rung.seeds, score.values, strict=True)
    ]
    columns = ["table", "row", "key", "rate", "seed", "metric", "value"]
    return str(pd.DataFrame(rows, columns=columns, dtype=object).to_csv(index=False))


def _words(values: Iterable[float]) -> str:
    return " ".join(map(str, values))


_RATES = "rates of "
_END = "<!-- end of study -->"
_MARK = re.compile(rf"^(?:<!-- study (?P<name>[^:]+): (?P<title>.+) -->|{_END})$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """Hold a page that shows tables of a study."""

    path: Path
    name: str  # of the study
    study: Study

    @classmethod
    def of(cls, path: Path, file: Path, study: Study) -> "Page":
        """Check the page before anything runs: it must have a place for a table of the study."""
        page = cls(path, file.stem, study)
        if not path.is_file():
            raise ValueError(f"--page {path}: found no file there, expected a page; write one")
        page._places(page._text())
        return page

    def _text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--page {self.path}: it is no text in UTF-8 ({error.reason}), expected a page in "
                "Markdown; name another file"
            ) from None

    @property
    def folder(self) -> Path:
        """Return the folder of numbers and pictures beside the page."""
        return self.path.with_suffix("")

    @property
    def record(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def write(self, results: Results) -> None:
        """Write the tables, the numbers and the pictures of the tables that the page shows."""
        text = self._text()
        for suffix, numbers in self.numbers(results).items():
            write_atomically(self.folder / f"{self.name}{suffix}.csv", numbers.encode())
        shown = {title.removeprefix(_RATES) for *_, title in self._places(text)}
        groups = [charts(x, results) for x in self.study.tables if x.title in shown]
        if OVERVIEW in shown:
            groups.append(overview_charts(self.study, results))
        for chart in (chart for charts_of in groups for chart in charts_of):
            replace(chart, name=f"{self.name}-{chart.name}").write(self.folder)
        write_atomically(self.path, self.written(text, results).encode())

    def numbers(self, results: Results) -> dict[str, str]:
        """Write the files of numbers, by the end of their names."""
        return {"": rows_as_csv(self.study, results), "-rates": rates_as_csv(self.study, results)}

    def written(self, text: str, results: Results) -> str:
        """Return the page with today's tables in it."""
        tables = {table.title: table for table in self.study.tables}
        for start, end, title in reversed(self._places(text)):
            if title == OVERVIEW:
                lines = overview_lines(self.study, results)
            else:
                write = rates_lines if title.startswith(_RATES) else table_lines
                lines = write(tables[title.removeprefix(_RATES)], results)
            text = text[:start] + "\n".join(["", "", *lines, "", ""]) + text[end:]
        return text

    def _places(self, text: str) -> list[tuple[int, int, str]]:
        """Find where tables of the study stand: the ends of their marks, and their titles."""
        places = []
        titles = [table.title for table in self.study.tables]
        for mark, after in pairwise([*_MARK.finditer(text), None]):
            if mark is None or mark["name"] != self.name:
                continue
            if after is None or after["name"]:
                where, value = (after or mark), after[0] if after else "the end of the page"
                raise self._wrong(text, where, value, f"{_END!r} before it")
            if mark["title"].removeprefix(_RATES) not in (*titles, OVERVIEW):
                choices = [*titles, OVERVIEW]
                raise self._wrong(
                    text, mark, mark["title"], f"a table of the study: one of {choices}"
                )
            places.append((mark.end(), after.start(), mark["title"]))
        if not places:
            raise ValueError(
                f"--page {self.path}: found no place for study {self.name}, expected lines such as "
                f"'<!-- study {self.name}: {titles[0]} -->' and, after it, '{_END}'; add them"
            )
        return places

    def _wrong(self, text: str, mark: re.Match[str], value: str, expected: str) -> ValueError:
        line = text.count("\n", 0, mark.start()) + 1
        return ValueError(
            f"--page {self.path}: line {line}: got {value!r}, expected {expected}; correct the page"
        )
