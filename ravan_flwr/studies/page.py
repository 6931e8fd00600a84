"""Write a study's tables into a page, between marks, and its numbers and pictures beside it.

In the page stand, for each table that it shows, two lines of their own:

    <!-- study NAME: TITLE -->
    <!-- end of study -->

NAME is that of the study's file, TITLE the table's; `rates of TITLE` shows its learning rates, and
`overview` all tables in one.
What stands between the lines is written by the command, from the record of the runs: for a page
`docs/results.md` that is `docs/results/NAME.jsonl`, and with it lie `NAME.csv`, `NAME-rates.csv`
and the pictures. So page, numbers and record cannot drift apart.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ravan_flwr.reports.chart import Chart
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.studies.numbers import rates_as_csv, rows_as_csv
from ravan_flwr.studies.pictures import charts, overview_charts
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import OVERVIEW, Study
from ravan_flwr.studies.tables import overview_lines, rates_lines, table_lines

_BEGIN = re.compile(r"^<!-- study (?P<name>[^:]+): (?P<title>.+) -->$")
_RATES = "rates of "
_END = "<!-- end of study -->"


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
        page._parts(page._text())
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
        drawn = {part.title: part.charts for part in self._parts(text) if part.title}
        for chart in (chart for charts_of in drawn.values() for chart in charts_of(results)):
            replace(chart, name=f"{self.name}-{chart.name}").write(self.folder)
        write_atomically(self.path, self.written(text, results).encode())

    def numbers(self, results: Results) -> dict[str, str]:
        """Write the files of numbers, by the end of their names."""
        return {"": rows_as_csv(self.study, results), "-rates": rates_as_csv(self.study, results)}

    def written(self, text: str, results: Results) -> str:
        """Return the page with today's tables in it."""
        return "\n".join(part.written(results) for part in self._parts(text))

    def _parts(self, text: str) -> list["_Part"]:
        """Cut the page up: its own lines, marks included, and the tables between them."""
        parts: list[_Part] = []
        own: list[str] = []
        within: _Part | None = None
        for number, line in enumerate(text.split("\n"), start=1):
            begins = _BEGIN.match(line)
            if within is not None:
                if begins:
                    raise self._wrong(number, line, f"{_END!r} before it")
                if line != _END:
                    continue
                within = None
            own.append(line)
            if begins and begins["name"] == self.name:
                within = self._table(number, begins["title"])
                parts += [_Part("\n".join(own)), within]
                own = []
        if within is not None:
            raise self._wrong(number, "the end of the page", f"{_END!r} before it")
        if not parts:
            raise ValueError(
                f"--page {self.path}: found no place for study {self.name}, expected lines such as "
                f"'<!-- study {self.name}: {self.study.tables[0].title} -->' and, after it, "
                f"'{_END}'; add them"
            )
        return [*parts, _Part("\n".join(own))]

    def _table(self, number: int, title: str) -> "_Part":
        if title == OVERVIEW:
            return _Part(
                "",
                OVERVIEW,
                partial(overview_lines, self.study),
                partial(overview_charts, self.study),
            )
        titles = {table.title: table for table in self.study.tables}
        wanted = title.removeprefix(_RATES)
        if wanted not in titles:
            known = [*titles, OVERVIEW]
            raise self._wrong(number, title, f"a table of the study: one of {known}")
        lines = table_lines if title == wanted else rates_lines
        table = titles[wanted]
        return _Part("", wanted, partial(lines, table), partial(charts, table))

    def _wrong(self, number: int, got: str, expected: str) -> ValueError:
        return ValueError(
            f"--page {self.path}: line {number}: got {got!r}, expected {expected}; correct the page"
        )


@dataclass(frozen=True)
class _Part:
    """Hold lines of the page's own, or a table that stands between two marks."""

    own: str
    title: str = ""  # of the table
    lines: Callable[[Results], list[str]] = lambda _: []
    charts: Callable[[Results], list[Chart]] = lambda _: []

    def written(self, results: Results) -> str:
        """Write it as it is to stand in the page."""
        return "\n".join(["", *self.lines(results), ""]) if self.title else self.own
