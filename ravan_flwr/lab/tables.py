"""Write the results of a study: tables in Markdown, CSV files, and pictures.

They are written into a folder and, between marks, into a page. For each table that it shows, the
page has two separate lines:

    <!-- study NAME: TITLE -->
    <!-- end of study -->

NAME is the name of the study's file, TITLE the table's. `rates of TITLE` shows its learning rates,
and `overview` all tables in one. The command writes the text between the lines, from the record of
the runs. For a page `results/x.md` the record is `results/x/NAME.jsonl`, beside `NAME.csv`,
`NAME-rates.csv` and the pictures. So page, numbers and record stay consistent.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from ravan_flwr.files import write_atomically
from ravan_flwr.lab.choosing import RateChoice, choose_all
from ravan_flwr.lab.lines import Line, compare_rows, runs_without_value, sentence
from ravan_flwr.lab.pictures import charts, overview_charts
from ravan_flwr.lab.results import Interval, Results, interval
from ravan_flwr.lab.spec import MIN_SEEDS, OVERVIEW, RATE, Study, Table
from ravan_flwr.results.charts import Chart
from ravan_flwr.runs.console import megabytes
from ravan_flwr.tasks import MACRO_F1, TIME, is_fraction

# Each sentence explains what has its mark, a regular expression, in the text.
LEGEND = {
    "": "Numbers are means over the seeds.",
    " ± ": "After ± is half of the 95 % interval (Student's t).",
    r"\| (to|from) ": "Differences are paired by seed.",
    r"\*\*": "Bold: the best row that competes, and those not significantly different from it; "
    "with fewer than three seeds, the best mean alone.",
    r" \(edge\)": "*Edge*: the smallest or largest rate tried.",
    r" \(open\)": "*Open*: some rates are to be run.",
    "×": "*3×*: three seeds took it.",
    r"\| as good \||what they reached ": "*As good*: rates not significantly different from the "
    "chosen one; in a table of rates they are in italics. *Runs*: those of the choice.",
    "p, Holm": "*p, Holm*: of a paired t-test, corrected for the number of planned contrasts.",
    r"\| up \|": "*Up*, *down*, *client s*: all clients, a run.",
}
NOT_CHOSEN = "No learning rate was chosen by results: each is a setting, or the method's default."


def write_tables(study: Study, results: Results, failed: Mapping[str, str]) -> None:
    """Write `results.md`, two CSV files and the pictures, from the finished and failed runs."""
    folder = results.folder
    pictures = draw_pictures(study, results)
    text = markdown(study, results, pictures)
    if failed:
        text += "\n".join(["## Failed", "", *(f"- `{k}`: {v}" for k, v in failed.items()), ""])
    write_atomically(folder / "results.md", text.encode())
    write_atomically(folder / "results.csv", rows_as_csv(study, results).encode())
    write_atomically(folder / "rates.csv", rates_as_csv(study, results).encode())
    for chart in (chart for group in pictures.values() for chart in group):
        chart.write(folder)


def draw_pictures(study: Study, results: Results) -> dict[str, list[Chart]]:
    """Return the charts of each table, by its title."""
    overview = {OVERVIEW: overview_charts(study, results)} if study.tables_share_rows else {}
    return {table.title: charts(table, results) for table in study.tables} | overview


def markdown(
    study: Study, results: Results, pictures: Mapping[str, Sequence[Chart]] | None = None
) -> str:
    """Return all tables of a study in Markdown, with links to the pictures."""
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
        if any(row.seeds for row in table.rows.values()):  # a tuning's row has none
            text += [*table_lines(table, results), ""]
        text += [*shown.get(table.title, ()), ""]
        if rates := rates_lines(table, results):
            heading = f"{table.chosen_key_name}s".capitalize()
            where = "in this table" if table.leave_one_seed_out else "on validation splits"
            text += [f"{heading}, by what they reached {where}:", "", *rates, ""]
    return "\n".join([*text, _legend("\n".join(text)), ""])


def _legend(text: str) -> str:
    """Return the sentences that explain the tables of a text."""
    sentences = [sentence for mark, sentence in LEGEND.items() if re.search(mark, text)]
    if "| learning rate |" in text and "| as good |" not in text:
        sentences.append(NOT_CHOSEN)
    return " ".join(sentences)


def table_lines(table: Table, results: Results) -> list[str]:
    """Return the lines of one table, and the sentence on significant differences."""
    lines, without_value = compare_rows(table, results), runs_without_value(table, results)
    if not lines and not without_value:
        return ["No run of this table is done yet."]
    key_name = table.chosen_key_name
    text = _table(_cells(table, lines, line) for line in lines) if lines else []
    if lines and (comparison := sentence(table, lines)):
        text += ["", comparison]
    if without_value:
        rows = ", ".join(f"{name} ({runs})" for name, runs in without_value.items())
        problem = "a time, since runs ended before they reached the target"
        if table.mean_of_last:
            problem = f"a mean of the last {table.mean_of_last} evaluations, since runs ended early"
        text += ["", f"Without {problem}: {rows}."]
    if table.rates_of:
        text += ["", f"The {key_name}s were chosen for *{table.rates_of}*, not for this table."]
    if table.leave_one_seed_out:
        text += ["", f"Each seed has the {key_name} that is best by the other seeds of this table."]
    return text


def _table(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the lines of a Markdown table; each row maps column heads to cells."""
    cells = [dict(row) for row in rows]
    table = [list(cells[0]), ["---"] * len(cells[0]), *(list(row.values()) for row in cells)]
    return [
        f"| {' | '.join(' '.join(x.split()).replace('|', '/') for x in row)} |" for row in table
    ]


def _cells(table: Table, lines: Sequence[Line], line: Line) -> dict[str, str]:
    """Return a row's cells in Markdown, by column head."""
    paired = any(row.standing for row in lines)
    any_choice = any(row.choice for row in lines)
    unit = ", s" if line.metric == TIME else ", %" if is_fraction(line.metric) else ""
    metric = line.metric + unit
    metric += f", mean of the last {table.mean_of_last}" if table.mean_of_last else ""
    cells = {"": line.row, metric: _value(line)}
    if table.paper:
        paper = table.paper.get(line.row)
        cells["paper, %"] = "-" if paper is None else f"{paper:.1f}"
    if line.metric != MACRO_F1 and all(
        MACRO_F1 in result.final for row in lines for result in row.results.values()
    ):
        last = table.mean_of_last or 0
        macro_f1 = [result.value(MACRO_F1, last) for result in line.results.values()]
        cells["macro-F1, %"] = with_interval(MACRO_F1, interval(macro_f1))
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
    of_rate, seconds = table.chosen_key == RATE, line.average("client_seconds")
    cells["learning rate"] = _chosen_rate(line) if of_rate else f"{line.first.learning_rate:g}"
    if any_choice and not of_rate:
        cells[table.chosen_key_name] = _chosen_rate(line) if line.choice else "-"
    if any_choice:
        cells["as good"] = _alternatives(line)
        cells["runs"] = str(line.choice.runs) if line.choice else "-"
    return cells | {
        "rank": str(line.first.rank or "-"),
        "parameters": f"{line.first.parameters:,}",
        "up": megabytes(round(line.average("bytes_up") or 0)),
        "down": megabytes(round(line.average("bytes_down") or 0)),
        "client s": "-" if seconds is None else f"{seconds:.0f}",
    }


def _value(line: Line) -> str:
    """Return the mean and its interval, with the number of finished seeds if some are missing."""
    text = with_interval(line.metric, line.interval)
    text = f"**{text}**" if line.best else text
    num_seeds = len(line.values)
    return text if num_seeds == line.seeds else f"{text} ({num_seeds} of {line.seeds} seeds)"


def _signed(metric: str, difference: Interval | None) -> str:
    """Return a difference with its sign and interval."""
    if difference is None:
        return "-"
    return ("+" if difference.mean > 0 else "") + with_interval(metric, difference)


def _chosen_rate(line: Line) -> str:
    """Return the chosen rate, or the number of seeds that took each rate."""
    if (choice := line.choice) is None:
        return f"{line.first.learning_rate:g}"
    text = f"{choice.rate:g}"
    if choice.by_seed:
        rates = [choice.by_seed[seed] for seed in line.values]
        text = " ".join(f"{rates.count(rate)}×{rate:g}" for rate in sorted(set(rates)))
    return text + (" (open)" if choice.pending else " (edge)" if choice.at_the_edge else "")


def _alternatives(line: Line) -> str:
    """Return the other rates as good, with their differences; "unknown" with too few seeds."""
    if line.choice is None:
        return "-"
    if len(line.choice.grid.seeds) < MIN_SEEDS:
        return "unknown"
    texts = [f"{rate:g}" for rate in line.choice.alternatives]
    if line.as_good:
        texts = [f"{rate:g}: {_signed(line.metric, line.shift(rate))}" for rate in line.as_good]
    return (", " if line.as_good else " ").join(texts) or "-"


def with_interval(metric: str, estimate: Interval) -> str:
    """Return a mean with the half-width of its interval."""
    text = as_text(metric, estimate.mean)
    return (
        text if estimate.half_width is None else f"{text} ± {as_text(metric, estimate.half_width)}"
    )


def as_text(metric: str, value: float) -> str:
    """Return a metric as text: fractions of 1 in percent, others unchanged."""
    return f"{100 * value:.1f}" if is_fraction(metric) else f"{value:.3f}"


def overview_lines(study: Study, results: Results) -> list[str]:
    """Return a table with each row's value in every table, and its change from another table."""
    tables = {t.title: {x.row: x for x in compare_rows(t, results)} for t in study.tables}
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
    """Return a table of each rate's metric: a line for each row."""
    choices = choose_all(table, results)
    rates = sorted({rate for choice in choices.values() for rate in choice.tried})
    if not rates:
        return []  # fixed by the settings, or not measured yet

    def cell(choice: RateChoice, rate: float) -> str:
        score = choice.scores.get(rate)
        if score is None:
            return "failed" if rate in choice.tried and not choice.pending else "-"
        mark = "**" if rate == choice.rate else "*"
        mark *= rate in choice.within_noise
        return mark + with_interval(score.metric, interval(score.values)) + mark

    return _table(
        {"": name}
        | {f"{rate:g}": cell(choice, rate) for rate in rates}
        | {"runs": f"{choice.runs}{' (open)' * choice.pending}"}
        for name, choice in choices.items()
    )


def rows_as_csv(study: Study, results: Results) -> str:
    """Return every row of every table as CSV; intervals are half-widths."""
    contrasts = any(table.contrasts for table in study.tables)
    lines = [line for table in study.tables for line in compare_rows(table, results)]
    rows = [_csv_values(line, contrasts=contrasts) for line in lines]
    columns = None if rows else ["table", "row"]  # no run is done yet
    return str(pd.DataFrame(rows, columns=columns, dtype=object).to_csv(index=False))


def _csv_values(line: Line, *, contrasts: bool) -> dict[str, object]:
    """Return a row's CSV values, by column."""
    first, choice, table = line.first, line.choice, line.table
    values = list(line.values.values())
    rate: object = choice and choice.rate
    if choice and choice.by_seed:
        rate = _joined(choice.by_seed.values())
    cells: dict[str, object] = {
        "table": table.title,
        "row": line.row,
        "metric": line.metric,
        "mean": line.interval.mean,
        "spread": statistics.stdev(values) if len(values) > 1 else 0.0,
        "finals": _joined(values),
        "learning-rate": first.learning_rate,
        "chosen": choice is not None,
        "rank": first.rank,
        "parameters": first.parameters,
        "bytes-up": line.average("bytes_up"),
        "bytes-down": line.average("bytes_down"),
        "seconds": line.average("seconds"),
        "paper": table.paper.get(line.row),
        "interval": line.interval.half_width,
        "seeds": _joined(line.values),
        "against": table.against,
        **_estimate_columns("difference", line.difference),
        **_estimate_columns("change", line.change),
        "best": line.best,
        "client-seconds": line.average("client_seconds"),
        "key": table.chosen_key if choice else None,
        "rate": rate,
        "tried": _joined(choice.tried) if choice else None,
        "as-good": _joined(choice.within_noise) if choice else None,
        "runs": choice.runs if choice else None,
        "as-good-finals": "; ".join(
            f"{rate}: {_joined(x.values())}" for rate, x in line.as_good.items()
        ),
        **_estimate_columns("late", line.late),
    }
    if contrasts:
        cells |= {"p": line.difference.p if line.difference else None, "p-holm": line.p_holm}
    return cells


def _estimate_columns(name: str, estimate: Interval | None) -> dict[str, object]:
    """Return a difference and the half-width of its interval, by column."""
    mean = "late-difference" if name == "late" else name
    return {mean: estimate and estimate.mean, f"{name}-interval": estimate and estimate.half_width}


def rates_as_csv(study: Study, results: Results) -> str:
    """Return each rate's metric as CSV, by seed."""
    rows = [
        (table.title, row, table.chosen_key, rate, seed, score.metric, value)
        for table in study.tables
        for row, choice in choose_all(table, results).items()
        for rate, score in sorted(choice.scores.items())
        for seed, value in zip(choice.grid.seeds, score.values, strict=True)
    ]
    columns = ["table", "row", "key", "rate", "seed", "metric", "value"]
    return str(pd.DataFrame(rows, columns=columns, dtype=object).to_csv(index=False))


def _joined(values: Iterable[float]) -> str:
    return " ".join(map(str, values))


_RATES = "rates of "
_END = "<!-- end of study -->"


@dataclass(frozen=True)
class Page:
    """A page that shows tables of a study."""

    path: Path
    name: str  # of the study
    study: Study

    @classmethod
    def of(cls, path: Path, file: Path, study: Study) -> "Page":
        """Return the page, checked before any run: it must have marks for a table of the study."""
        page = cls(path, file.stem, study)
        page._checked()
        return page

    def _checked(self) -> tuple[str, list[str]]:
        """Return the page's text and the titles of its tables; ValueError for wrong marks."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--page {self.path}: it cannot be read ({error}), expected a page in Markdown; "
                "write one, or name another file"
            ) from None
        titles = [match["title"] for match in self._sections.finditer(text)]
        tables = [OVERVIEW, *(table.title for table in self.study.tables)]
        begun = text.count(f"<!-- study {self.name}: ")
        if (
            not titles
            or begun > len(titles)
            or {x.removeprefix(_RATES) for x in titles} - {*tables}
        ):
            raise ValueError(
                f"--page {self.path}: found {begun} places for study {self.name}, with tables "
                f"{titles} in between whole marks, expected lines such as '<!-- study "
                f"{self.name}: {tables[-1]} -->' and, after each, '{_END}', with tables of "
                f"{tables}; correct the page"
            )
        return text, titles

    @property
    def folder(self) -> Path:
        """Return the folder of the CSV files and pictures, beside the page."""
        return self.path.with_suffix("")

    @property
    def record(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def write(self, results: Results) -> None:
        """Write the page's tables, their CSV files and their pictures."""
        text, marked = self._checked()
        for suffix, numbers in self.numbers(results).items():
            write_atomically(self.folder / f"{self.name}{suffix}.csv", numbers.encode())
        titles = {title.removeprefix(_RATES) for title in marked}
        pictures = draw_pictures(self.study, results)
        for chart in (chart for title in titles for chart in pictures.get(title, ())):
            replace(chart, name=f"{self.name}-{chart.name}").write(self.folder)
        write_atomically(self.path, self.with_tables(text, results).encode())

    def numbers(self, results: Results) -> dict[str, str]:
        """Return the content of the CSV files, by the suffix of their names."""
        return {"": rows_as_csv(self.study, results), "-rates": rates_as_csv(self.study, results)}

    def with_tables(self, text: str, results: Results) -> str:
        """Return the page's text with the current tables."""
        tables = {table.title: table for table in self.study.tables}

        def section(match: re.Match[str]) -> str:
            title = match["title"]
            if title == OVERVIEW:
                lines = overview_lines(self.study, results)
            else:
                write = rates_lines if title.startswith(_RATES) else table_lines
                lines = write(tables[title.removeprefix(_RATES)], results)
            return "\n".join([match["mark"], "", *lines, "", _END])

        return self._sections.sub(section, text)

    @property
    def _sections(self) -> re.Pattern[str]:
        mark = rf"^(?P<mark><!-- study {re.escape(self.name)}: (?P<title>[^\n]+) -->)$"
        within = "(?:(?!<!-- study ).)*?"  # not beyond the mark of another table
        return re.compile(rf"{mark}{within}^{_END}$", re.MULTILINE | re.DOTALL)
