"""Write a study's tables into a page, between marks, and its numbers and pictures beside it.

In the page stand, for each table that it shows, two lines of their own:

    <!-- study NAME: TITLE -->
    <!-- end of study -->

NAME is that of the study's file, TITLE the table's. What stands between them is written by the
command, from the record of the runs: for a page `docs/results.md` that is
`docs/results/NAME.jsonl`, and with it lie `NAME.csv`, `NAME-rates.csv` and the pictures. So page,
numbers and record cannot drift apart.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.studies.numbers import rates_as_csv, rows_as_csv
from ravan_flwr.studies.pictures import charts
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import Study, Table
from ravan_flwr.studies.tables import table_lines

_BEGIN = re.compile(r"^<!-- study (?P<name>[^:\s]+): (?P<title>.+) -->$")
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
        page._parts(path.read_text(encoding="utf-8"))
        return page

    @property
    def folder(self) -> Path:
        """Return the folder of numbers and pictures beside the page."""
        return self.path.with_suffix("")

    @property
    def record(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def write(self, results: Results) -> None:
        """Write the tables, the numbers and the pictures of the tables that the page shows."""
        text = self.path.read_text(encoding="utf-8")
        for suffix, numbers in self.numbers(results).items():
            write_atomically(self.folder / f"{self.name}{suffix}.csv", numbers.encode())
        shown = [table for _, table in self._parts(text) if table]
        for chart in (chart for table in shown for chart in charts(table, results)):
            write_atomically(self.folder / f"{self.name}-{chart.name}.png", chart.png())
        write_atomically(self.path, self.written(text, results).encode())

    def numbers(self, results: Results) -> dict[str, str]:
        """Write the files of numbers, by the end of their names."""
        return {"": rows_as_csv(self.study, results), "-rates": rates_as_csv(self.study, results)}

    def written(self, text: str, results: Results) -> str:
        """Return the page with today's tables in it."""
        parts = []
        for part, table in self._parts(text):
            parts.append("\n".join(["", *table_lines(table, results), ""]) if table else part)
        return "\n".join(parts)

    def _parts(self, text: str) -> list[tuple[str, Table | None]]:
        """Cut the page up: its own lines, marks included, and the tables between them."""
        parts: list[tuple[str, Table | None]] = []
        own: list[str] = []
        within: Table | None = None
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
                parts += [("\n".join(own), None), ("", within)]
                own = []
        if within is not None:
            raise self._wrong(number, "the end of the page", f"{_END!r} before it")
        if not parts:
            raise ValueError(
                f"--page {self.path}: found no place for study {self.name}, expected lines such as "
                f"'<!-- study {self.name}: {self.study.tables[0].title} -->' and, after it, "
                f"'{_END}'; add them"
            )
        return [*parts, ("\n".join(own), None)]

    def _table(self, number: int, title: str) -> Table:
        titles = {table.title: table for table in self.study.tables}
        if title not in titles:
            raise self._wrong(number, title, f"a table of the study: one of {list(titles)}")
        return titles[title]

    def _wrong(self, number: int, got: str, expected: str) -> ValueError:
        return ValueError(
            f"--page {self.path}: line {number}: got {got!r}, expected {expected}; correct the page"
        )
