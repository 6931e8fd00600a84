"""Write what came of a study: tables for people and for machines, and pictures."""

from collections.abc import Iterator, Mapping, Sequence

from ravan_flwr.reports.chart import Chart
from ravan_flwr.runs.console import megabytes
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.specs import LOWER_IS_BETTER
from ravan_flwr.studies.choosing import RateChoice, choices_of
from ravan_flwr.studies.intervals import LEAST, Interval, interval
from ravan_flwr.studies.lines import Line, lines_of, sentence
from ravan_flwr.studies.numbers import rates_as_csv, rows_as_csv
from ravan_flwr.studies.pictures import charts, overview_charts
from ravan_flwr.studies.rates import RATE
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import OVERVIEW, Study, Table


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
    for chart in (chart for drawn in pictures.values() for chart in drawn):
        chart.write(folder)


LEGEND = """\
How to read the tables: a row is a method or a setting, run once with each seed. Its first
number is the metric after the last round: the mean over the seeds and its 95 % interval
(Student's t); of fewer than three seeds there is no interval. *To ...* is the difference to
that row, *the same, last 3* that of the mean of the last three evaluations, *from ...* that to
the row of the same name in that table, paired by seed, with its interval; in the table of all
tables the latter stands after the semicolon. Bold is the best of the rows that compete, and
every row that the same interval does not tell apart from it; without intervals, the best mean.
After a learning rate, *edge* says that it is the smallest or the largest of those that were
tried, so that a better one may lie outside, and *open* that some are still to be run. *As good*
are the rates that noise does not tell apart from it (in the tables of rates they are in
italics), where they were run as well with the difference that each makes, and *runs* is how
many runs it was chosen with. *Parameters* are those of the adapters that are trained. *Up* and
*down* are what all clients sent and received in a whole run, *client s* the seconds that they
took to train, summed; these are means over the seeds.
"""


def markdown(
    study: Study, results: Results, pictures: Mapping[str, Sequence[Chart]] | None = None
) -> str:
    """Write the tables for people."""
    text = [f"# {study.title}", ""]
    if study.tables_share_rows:
        text += ["## All tables", "", *overview_lines(study, results), ""]
        text += [*_shown((pictures or {}).get(OVERVIEW, ())), ""]
    for table in study.tables:
        text += [f"## {table.title}", "", *table_lines(table, results), ""]
        text += [*_shown((pictures or {}).get(table.title, ())), ""]
        if rates := rates_lines(table, results):
            what = f"{table.chosen_in_words}s".capitalize()
            text += [f"{what}, by what they reached on held-back examples:", "", *rates, ""]
    return "\n".join([*text, LEGEND])


def _shown(pictures: Sequence[Chart]) -> list[str]:
    return [f"![{chart.about}]({chart.name}.png)" for chart in pictures]


def table_lines(table: Table, results: Results) -> list[str]:
    """Write one table, and the sentence on who is ahead."""
    lines = lines_of(table, results)
    if not lines:
        return ["No run of this table is done yet."]
    text = list(_rows(table, lines))
    if told := sentence(table, lines):
        text += ["", told]
    if table.rates_of:
        what = table.chosen_in_words
        text += ["", f"The {what}s were chosen for *{table.rates_of}*, not for this table."]
    return text


def _rows(table: Table, lines: Sequence[Line]) -> Iterator[str]:
    """Yield the heads of the columns, the rule below them, and a row for each line."""
    cells = [_cells(table, lines, line) for line in lines]
    yield _row(list(cells[0]))
    yield _row(["---"] * len(cells[0]))
    for one in cells:
        yield _row(list(one.values()))


def _cells(table: Table, lines: Sequence[Line], line: Line) -> dict[str, str]:
    """Write a row for people, by the heads of its columns."""
    paired = any(one.standing for one in lines)
    chosen = any(one.choice for one in lines)
    metric = line.metric + ("" if line.metric in LOWER_IS_BETTER else ", %")
    cells = {"": line.row, metric: _value(line)}
    if table.paper:
        cells["paper, %"] = "-" if line.paper is None else f"{line.paper:.1f}"
    if paired:
        cells[f"to {table.against}"] = _signed(line.metric, line.apart)
    elif not table.change_from:
        cells["by seed"] = " ".join(told(line.metric, value) for value in line.values.values())
    if table.compare_last:
        cells[f"the same, last {table.compare_last}"] = _signed(line.metric, line.late)
    if table.change_from:
        cells[f"from {table.change_from.title}"] = _signed(line.metric, line.change)
    of_rate = table.chosen == RATE
    cells["learning rate"] = _chosen(line) if of_rate else f"{line.first.learning_rate:g}"
    if chosen and not of_rate:
        cells[table.chosen_in_words] = _chosen(line) if line.choice else "-"
    if chosen:
        cells["as good"] = _others(line)
        cells["runs"] = str(line.choice.runs) if line.choice else "-"
    return cells | {
        "rank": str(line.first.rank or "-"),
        "parameters": f"{line.first.parameters:,}",
        "up": megabytes(round(line.bytes_up)),
        "down": megabytes(round(line.bytes_down)),
        "client s": "-" if line.client_seconds is None else f"{line.client_seconds:.0f}",
    }


def _value(line: Line) -> str:
    """Write the mean and its interval, and how many seeds are done if some are not."""
    text = with_interval(line.metric, line.interval)
    text = f"**{text}**" if line.best else text
    done = len(line.values)
    return text if done == line.seeds else f"{text} ({done} of {line.seeds} seeds)"


def _signed(metric: str, apart: Interval | None) -> str:
    """Write a difference with its sign."""
    if apart is None:
        return "-"
    return ("+" if apart.mean > 0 else "") + with_interval(metric, apart)


def _chosen(line: Line) -> str:
    if line.choice is None:
        return f"{line.first.learning_rate:g}"
    return f"{line.choice.rate:g}" + (
        " (open)" if line.choice.open else " (edge)" if line.choice.at_the_edge else ""
    )


def _others(line: Line) -> str:
    """List the rates that are as good, with what they change; with too few seeds nobody knows."""
    if line.choice is None:
        return "-"
    if line.choice.seeds < LEAST:
        return "unknown"
    told = [f"{rate:g}" for rate in line.choice.others]
    if line.as_good:
        told = [f"{rate:g}: {_signed(line.metric, line.moved(rate))}" for rate in line.as_good]
    return (", " if line.as_good else " ").join(told) or "-"


def with_interval(metric: str, found: Interval) -> str:
    """Write a mean, and how far its interval reaches."""
    text = told(metric, found.mean)
    return text if found.half is None else f"{text} ± {told(metric, found.half)}"


def told(metric: str, value: float) -> str:
    """Write a metric: shares of 1 in percent, others as they are."""
    return f"{value:.3f}" if metric in LOWER_IS_BETTER else f"{100 * value:.1f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in cells)} |"


def overview_lines(study: Study, results: Results) -> list[str]:
    """Write the first number of every row of every table, and what it changed from another."""
    tables = [
        (table, {line.row: line for line in lines_of(table, results)}) for table in study.tables
    ]
    tables = [(table, lines) for table, lines in tables if lines]
    if not tables:
        return ["No run of this study is done yet."]
    text = [
        _row(["", *(table.title for table, _ in tables)]),
        _row(["---"] * (len(tables) + 1)),
    ]
    for name in dict.fromkeys(name for _, lines in tables for name in lines):
        cells = [_overview_cell(lines.get(name)) for _, lines in tables]
        text.append(_row([name, *cells]))
    return text


def _overview_cell(line: Line | None) -> str:
    if line is None:
        return "-"
    return _value(line) + (f"; {_signed(line.metric, line.change)}" if line.change else "")


def rates_lines(table: Table, results: Results) -> list[str]:
    """Write what each rate has reached on held-back examples, a row for each row of the table."""
    choices = choices_of(table, results)
    rates = sorted({rate for choice in choices.values() for rate in choice.tried})
    if not rates:
        return []  # given in the settings, or not measured yet
    heads = [*(f"{rate:g}" for rate in rates), "runs"]
    text = [_row(["", *heads]), _row(["---"] * (len(heads) + 1))]
    for name, choice in choices.items():
        cells = [_rate_cell(choice, rate) for rate in rates]
        text.append(_row([name, *cells, f"{choice.runs}{' (open)' * choice.open}"]))
    return text


def _rate_cell(choice: RateChoice, rate: float) -> str:
    score = choice.scores.get(rate)
    if score is None:
        return "failed" if rate in choice.tried and not choice.open else "-"
    text = with_interval(score.metric, interval(score.values))
    if rate == choice.rate:
        return f"**{text}**"
    return f"*{text}*" if rate in choice.within_noise else text
