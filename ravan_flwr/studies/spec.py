"""Studies: a file names rows of settings; every row is run with every seed, once.

    title: ...
    paper: vision                           # optional: numbers of paper/vision.yaml beside ours
    num-clients: 20
    seeds: [0, 1, 2]
    settings: {num-rounds: 10}              # of all rows
    choose:                                 # optional: a learning rate for each row of a table
      learning-rate: [1.0e-3, 1.0e-2]
      seeds: [100]
    tables:
      - title: IID
        settings: {partition: iid}          # optional: of the rows of this table
        equal-parameters: true              # optional: refuse rows that differ by more than 5 %
        references: [full]                  # optional: rows that do not compete
        spectra: true                       # optional: draw the rows' singular values
        metric: accuracy-matched            # optional: another one than the task's
        rows:
          ravan: {}                         # the settings in which a row differs
          fedit: {method: fedit}

A run is a process of its own and has a folder named after its settings, so that rows which
mean the same run share it, a study that was interrupted goes on where it stopped, and a
failed run is listed and does not stop the others.

Learning rates are chosen on examples that the clients hold back, never on the test examples,
with seeds of their own: the rate with the best mean metric after the last round.
"""

import hashlib
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ravan_flwr.config.keys import AUTO, NOT_OF_RESULT, check_key
from ravan_flwr.config.run_config import read_config
from ravan_flwr.config.words import words_of
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import Summary
from ravan_flwr.specs import Scalar

HELD_BACK = 0.2  # the share of its examples that a client holds back while rates are chosen
# A run that is done is the one that is meant, whatever these are: a rank that was "auto" has
# become a number.
_NO_MATTER = NOT_OF_RESULT | {"rank"}
ENGINES = {"process": "simulate", "flower": "run"}  # and the commands that run them
TOLERANCE = 0.05  # numbers of parameters that differ by no more are called equal


@dataclass(frozen=True)
class Run:
    """One run of a study: settings, seed included, and the number of clients."""

    settings: tuple[tuple[str, Scalar], ...]
    num_clients: int

    @property
    def name(self) -> str:
        """A folder's name: the same for the same run, whatever table it stands in."""
        text = json.dumps([sorted(self.settings), self.num_clients])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def command(self, folder: Path, engine: str) -> list[str]:
        """What a person would type to run this alone; the study draws its own pictures."""
        settings: dict[str, Scalar] = {"report": False, "tracking": "none"}
        settings |= dict(self.settings)
        settings |= {"num-clients": self.num_clients, "output-dir": str(self.folder(folder))}
        return [sys.executable, "-m", "ravan_flwr", ENGINES[engine], *words_of(settings)]

    def folder(self, study: Path) -> Path:
        """Where the run's own directory is made."""
        return study / "runs" / self.name

    def directory(self, study: Path) -> Path | None:
        """The run's directory, if it is done, and with the settings as they resolve today."""
        found = sorted(self.folder(study).glob("*/summary.json"))
        if not found:
            return None
        recorded = RunDirectory(found[-1].parent).read_config()
        same = all(recorded.get(key) == value for key, value in self.resolved.items())
        return found[-1].parent if same else None

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """What a preset and the defaults make of the settings, as far as it matters."""
        config = read_config(dict(self.settings)).as_dict()
        return {key: value for key, value in config.items() if key not in _NO_MATTER}

    def summary(self, study: Path) -> Summary | None:
        """How the run ended, if it is done."""
        directory = self.directory(study)
        if directory is None:
            return None
        return RunDirectory(directory).read_summary()


@dataclass(frozen=True)
class Row:
    """A row of a table: settings that are run with several seeds."""

    settings: dict[str, Scalar]
    num_clients: int
    seeds: list[int]
    rates: list[float]  # the learning rates to choose from; empty: the settings say it
    rate_seeds: list[int]

    def candidates(self, rate: float) -> list[Run]:
        """The runs that tell how good a learning rate is."""
        held_back: dict[str, Scalar] = {
            "learning-rate": rate,
            "evaluate-on": "clients",
            "validation-share": HELD_BACK,
            "eval-every": read_config(self.settings).num_rounds,
        }
        return self._runs(held_back, self.rate_seeds)

    def runs(self, folder: Path) -> list[Run]:
        """The runs of the table, one a seed; none if every candidate failed."""
        if not self.rates:
            return self._runs({}, self.seeds)
        rate = self.chosen_rate(folder)
        return [] if rate is None else self._runs({"learning-rate": rate}, self.seeds)

    def chosen_rate(self, folder: Path) -> float | None:
        """The rate with the best mean over its seeds, the smallest of equals."""
        means = {}
        for rate in sorted(self.rates):
            done = [run.summary(folder) for run in self.candidates(rate)]
            finals = [final_of(summary)[1] for summary in done if summary is not None]
            if len(finals) == len(done):
                means[rate] = statistics.mean(finals)
        return max(means, key=means.__getitem__) if means else None

    def _runs(self, more: dict[str, Scalar], seeds: list[int]) -> list[Run]:
        return [
            Run(tuple((self.settings | more | {"seed": seed}).items()), self.num_clients)
            for seed in seeds
        ]


@dataclass(frozen=True)
class Table:
    """Rows by name."""

    title: str
    rows: dict[str, Row]
    spectra: bool  # draw the singular values of the rows' updates?
    metric: str  # "": the task's
    paper: dict[str, float]  # row -> what the paper has, in percent
    references: tuple[str, ...] = ()  # rows that do not compete with the others


@dataclass(frozen=True)
class Study:
    """A study file, checked."""

    title: str
    tables: list[Table]

    @property
    def rows(self) -> list[Row]:
        """Those of all tables."""
        return [row for table in self.tables for row in table.rows.values()]

    def candidates(self) -> list[Run]:
        """The runs from which learning rates are chosen, each once."""
        runs = (run for row in self.rows for rate in row.rates for run in row.candidates(rate))
        return list(dict.fromkeys(runs))

    def runs(self, folder: Path) -> list[Run]:
        """The runs of the tables, each once, as far as learning rates are chosen."""
        return list(dict.fromkeys(run for row in self.rows for run in row.runs(folder)))


_FIELDS = {"title": str, "num-clients": int, "seeds": list, "settings": dict, "tables": list}
_CHOOSE = {"learning-rate": list, "seeds": list}
_TABLE = {"title": str, "rows": dict}
_TABLE_OPTIONS = {
    "settings": dict, "equal-parameters": bool, "references": list, "spectra": bool,
    "metric": str,
}  # fmt: skip


def read_study(path: Path) -> Study:
    """Read and check a study; every run's settings must be such as `simulate` takes."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"study {path}: {error}; expected YAML; correct it") from None
    _check_fields(f"study {path}", content, _FIELDS, {"choose": dict, "paper": str})
    choose = content.setdefault("choose", {"learning-rate": [], "seeds": []})
    _check_fields(f"study {path}: choose", choose, _CHOOSE, {})
    for seed in (seeds := [*content["seeds"], *choose["seeds"]]):
        check_key("seed", seed)
    if not content["seeds"] or bool(choose["seeds"]) != bool(choose["learning-rate"]):
        raise ValueError(f"study {path}: got seeds {seeds}, expected at least one; name some")
    numbers = _read_paper(path, content["paper"]) if "paper" in content else {}
    tables: list[Table] = []
    for table in content["tables"]:
        _check_fields(f"study {path}: a table", table, _TABLE, _TABLE_OPTIONS)
        if table["title"] in (known.title for known in tables):
            raise ValueError(
                f"study {path}: two tables are called {table['title']!r}, expected different "
                "titles; rename one"
            )
        paper = numbers.pop(table["title"], {})
        tables.append(_read_table(path, content, table, paper))
    if numbers:
        raise ValueError(
            f"study {path}: the paper's numbers name tables {list(numbers)}, which it does not "
            "have; correct them"
        )
    return Study(content["title"], tables)


def _read_table(
    path: Path, study: Mapping[str, Any], table: Mapping[str, Any], paper: dict[str, float]
) -> Table:
    where = f"study {path}: table {table['title']!r}"
    rows = {
        str(name): _read_row(
            f"study {path}: row {name!r}", study,
            study["settings"] | table.get("settings", {}) | (changes or {}),
        )
        for name, changes in table["rows"].items()
    }  # fmt: skip
    references = tuple(table.get("references", []))
    for what, names in (("references", references), ("the paper's", paper)):
        if unknown := [name for name in names if name not in rows]:
            raise ValueError(
                f"{where}: {what} {unknown} are no rows, expected some of {list(rows)}; correct "
                "them"
            )
    if table.get("equal-parameters"):
        _check_equal(where, {k: v for k, v in rows.items() if k not in references})
    return Table(
        table["title"], rows, table.get("spectra", False), table.get("metric", ""), paper,
        references,
    )  # fmt: skip


def _read_row(where: str, study: Mapping[str, Any], settings: dict[str, Any]) -> Row:
    clients = settings.pop("num-clients", study["num-clients"])
    if type(clients) is not int or clients < 1:
        raise ValueError(
            f"{where}: num-clients = {clients!r}: expected a whole number at least 1; change it"
        )
    choose = study["choose"]
    rates = [] if "learning-rate" in settings else choose["learning-rate"]
    try:
        for rate in rates or [settings.get("learning-rate", AUTO)]:
            read_config(settings | {"learning-rate": rate})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Row(settings, clients, study["seeds"], rates, choose["seeds"])


def _read_paper(study: Path, name: str) -> dict[str, dict[str, float]]:
    """Table -> row -> percent, of a file in `paper/` beside the study."""
    path = study.parent / "paper" / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"study {study}: paper = {name!r}: found no file {path}; correct it")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    tables = content.items() if isinstance(content, dict) else []
    for title, rows in tables:
        if not isinstance(rows, dict) or not all(type(x) in (int, float) for x in rows.values()):
            raise ValueError(f"{path}: {title!r} is {rows!r}, expected numbers by row; correct it")
    return {str(title): {str(row): float(x) for row, x in rows.items()} for title, rows in tables}


def _check_fields(
    where: str, content: object, fields: Mapping[str, type], options: Mapping[str, type]
) -> None:
    """Raise ValueError unless `content` is a mapping with these fields, and no others."""
    got = set(content) if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or not set(fields) <= set(content) <= {*fields, *options}:
        shown = sorted(got) if isinstance(got, set) else got
        optional = f", and if need be {sorted(options)}" if options else ""
        raise ValueError(f"{where}: got {shown}, expected the fields {sorted(fields)}{optional}")
    for field, kind in {**fields, **options}.items():
        if field in content and not isinstance(content[field], kind):
            raise ValueError(f"{where}: {field} is no {kind.__name__}; correct it")


def _check_equal(where: str, rows: Mapping[str, Row]) -> None:
    """Raise ValueError unless the rows train the same number of parameters, to 5 %."""
    from ravan_flwr.training.cost import adapter_parameters  # noqa: PLC0415 (imports torch)

    if len(rows) < 2:
        raise ValueError(f"{where}: equal-parameters has rows {list(rows)}, expected at least two")
    numbers = {
        name: adapter_parameters(read_config({"learning-rate": 1.0, **row.settings}))
        for name, row in rows.items()
    }
    apart = 1 - min(numbers.values()) / max(numbers.values())
    if apart > TOLERANCE:
        listed = ", ".join(f"{name} {number:,}" for name, number in numbers.items())
        raise ValueError(
            f"{where} calls its rows equal, but the parameters that they train differ by "
            f"{100 * apart:.1f} % ({listed}), expected at most {100 * TOLERANCE:.0f} %; change "
            "lora-rank, heads or rank, name references, or take equal-parameters away"
        )


def final_of(summary: Summary, metric: str = "") -> tuple[str, float]:
    """A metric after the last round, the task's own if none is named: its name and value."""
    name, final = metric or summary["metric"], summary["metrics"]["final"]
    if name not in final:
        raise ValueError(f"a run has measured {sorted(final)}, expected {name!r}; evaluate it")
    return name, final[name]
