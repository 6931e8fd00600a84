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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.studies.pictures import charts, overview_charts
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import OVERVIEW, Study
from ravan_flwr.studies.tables import (
    overview_lines,
    rates_as_csv,
    rates_lines,
    rows_as_csv,
    table_lines,
)  # fmt: skip

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
        drawn = [charts(x, results) for x in self.study.tables if x.title in shown]
        if OVERVIEW in shown:
            drawn.append(overview_charts(self.study, results))
        for chart in (chart for charts_of in drawn for chart in charts_of):
            replace(chart, name=f"{self.name}-{chart.name}").write(self.folder)
        write_atomically(self.path, self.written(text, results).encode())

    def numbers(self, results: Results) -> dict[str, str]:
        """Write the files of numbers, by the end of their names."""
        return {"": rows_as_csv(self.study, results), "-rates": rates_as_csv(self.study, results)}

    def written(self, text: str, results: Results) -> str:
        """Return the page with today's tables in it."""
        for start, end, title in reversed(self._places(text)):
            lines = "\n".join(["", "", *self._lines(title, results), "", ""])
            text = text[:start] + lines + text[end:]
        return text

    def _lines(self, title: str, results: Results) -> list[str]:
        if title == OVERVIEW:
            return overview_lines(self.study, results)
        write = rates_lines if title.startswith(_RATES) else table_lines
        tables = {table.title: table for table in self.study.tables}
        return write(tables[title.removeprefix(_RATES)], results)

    def _places(self, text: str) -> list[tuple[int, int, str]]:
        """Find where tables of the study stand: the ends of their marks, and their titles."""
        places = []
        titles = [table.title for table in self.study.tables]
        for mark, after in pairwise([*_MARK.finditer(text), None]):
            if mark is None or mark["name"] != self.name:
                continue
            if after is None or after["name"]:
                where, got = (after or mark), after[0] if after else "the end of the page"
                raise self._wrong(text, where, got, f"{_END!r} before it")
            if mark["title"].removeprefix(_RATES) not in (*titles, OVERVIEW):
                known = [*titles, OVERVIEW]
                raise self._wrong(
                    text, mark, mark["title"], f"a table of the study: one of {known}"
                )
            places.append((mark.end(), after.start(), mark["title"]))
        if not places:
            raise ValueError(
                f"--page {self.path}: found no place for study {self.name}, expected lines such as "
                f"'<!-- study {self.name}: {titles[0]} -->' and, after it, '{_END}'; add them"
            )
        return places

    def _wrong(self, text: str, mark: re.Match[str], got: str, expected: str) -> ValueError:
        line = text.count("\n", 0, mark.start()) + 1
        return ValueError(
            f"--page {self.path}: line {line}: got {got!r}, expected {expected}; correct the page"
        )
