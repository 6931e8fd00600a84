"""Read a study file and check all of it, so that no run begins of a study that has a mistake."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from ravan_flwr.config.keys import KEYS, check_key
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.config.yaml_file import read_yaml
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar
from ravan_flwr.studies import spec
from ravan_flwr.studies.intervals import LEAST
from ravan_flwr.studies.spec import RATE, Grid, Row, Rung, Study, Table

# What a table's rows may choose.
CHOSEN = (RATE, "clip-norm", "calibration-learning-rate")
OF_A_MACHINE = ("data", "model", "device", "processes")
TOLERANCE = 0.05  # numbers of parameters that differ by no more are called equal


class _Choose(spec.Checked):
    learning_rate: list[float]
    seeds: list[int]
    extensions: int = Field(default=spec.EXTENSIONS, ge=0, le=10)


class _TableOfFile(spec.TableOptions):
    rows: dict[Any, dict[str, Any] | None]
    settings: dict[str, Any] = Field(default_factory=dict)
    choose: dict[str, Any] | None = None
    change_from: str = ""


class _StudyFile(spec.Checked):
    title: str
    num_clients: int
    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Any]
    tables: list[_TableOfFile]
    choose: _Choose = _Choose(learning_rate=[], seeds=[])
    paper: str = ""


_Content = TypeVar("_Content", bound=spec.Checked)


def _require(holds: object, wrong: str) -> None:
    if not holds:
        raise ValueError(wrong)


def read_study(path: Path, here: Mapping[str, Scalar] | None = None) -> Study:
    """Read and check a study; every run's settings must be such as `simulate` takes.

    `here` has settings of this machine for all runs, which change nothing in what they are.
    """
    for key, value in (here or {}).items():
        _require(
            key in OF_A_MACHINE,
            f"study: got {key}={value}, expected {' or '.join(OF_A_MACHINE)}, which say where "
            "something lies or computes; write what belongs to the runs into the study's file",
        )
        check_key(key, value)
    where, tables = f"study {path}", list[Table]()
    content = _checked(where, _StudyFile, read_yaml(path))
    for seeds in (content.seeds, content.choose.seeds):
        for seed in seeds:
            check_key("seed", seed)
        twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        _require(not twice, f"{where}: got seeds {twice} twice; expected each once")
    numbers = _read_paper(path, content.paper) if content.paper else {}
    for table in content.tables:
        paper = numbers.pop(table.title, {})
        tables.append(_TableReader(where, content, table, dict(here or {}), tables).read(paper))
    _require(
        not numbers,
        f"{where}: the paper's numbers name tables {list(numbers)}, which it does not have; "
        "correct them",
    )
    return Study(content.title, tables)


def _checked(where: str, model: type[_Content], content: object) -> _Content:
    """Read a mapping; ValueError names the first field that is wrong, and those there are."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        fields = sorted(field.alias or name for name, field in model.model_fields.items())
        raise ValueError(
            f"{where}: {spec.first_wrong(error)}; expected the fields {fields}, and in them what "
            "docs/reports.md says; correct it"
        ) from None


class _TableReader:
    """Reads one table of a study file; `earlier` are those above it."""

    def __init__(
        self, where: str, study: _StudyFile, table: _TableOfFile, here: dict[str, Scalar],
        earlier: Sequence[Table],
    ) -> None:  # fmt: skip
        self.where, self.study, self.table = f"{where}: table {table.title!r}", study, table
        self.here, self.earlier = here, earlier
        self.configs: dict[str, Config] = {}  # of the rows

    def _require(self, holds: object, wrong: str) -> None:
        _require(holds, f"{self.where}: {wrong}")

    def read(self, paper: dict[str, float]) -> Table:
        """Read it; `paper` has the paper's number for each of its rows, if any."""
        table, taken = self.table, {spec.OVERVIEW, *(other.title for other in self.earlier)}
        self._require(
            table.title not in taken,
            f"two tables are called {table.title!r}, or it is called {spec.OVERVIEW!r}, which in a "
            "page stands for all of them; expected different titles; rename it",
        )
        choosing = [other for other in self.earlier if not other.rates_of]
        lender = self._earlier("rates-of", table.rates_of, choosing)
        key, grid = (lender.chosen, lender.grid) if lender else self._grid()
        rows = {
            str(name): self._row(str(name), x or {}, key, grid) for name, x in table.rows.items()
        }
        competing = [name for name in rows if name not in table.references] or list(rows)
        against = table.against or next(iter(["ravan"] if "ravan" in rows else competing), "")
        for what, names in (
            ("references", table.references), ("the paper's", paper),
            ("contrasts", table.contrasts), ("against", [against] if against else []),
        ):  # fmt: skip
            unknown = [name for name in names if name not in rows]
            told = f"{what} {unknown} are no rows, expected some of {list(rows)}; correct them"
            self._require(not unknown, told)
        self._check_choices(rows)
        self._check_measured_alike()
        for option in ("compare_last", "mean_of_last"):
            self._check_last(option.replace("_", "-"), getattr(table, option))
        if table.equal_parameters:
            self._check_equal()
        if lender:
            rows |= self._taking(rows, lender)
        options = table.model_dump(include={*spec.TableOptions.model_fields} - {"against"})
        return Table(
            **options, against=against, rows=rows, paper=paper, chosen=key, grid=grid,
            change_from=self._change_from(),
        )  # fmt: skip

    def _grid(self) -> tuple[str, Grid | None]:
        """Find from which values of which key the rows choose."""
        table, choose, out = self.table, self.study.choose, self.table.leave_one_seed_out
        content = {RATE: choose.learning_rate} if table.choose is None else table.choose
        if content == {RATE: []}:
            return RATE, None
        key, values = next(iter(content.items()), ("", None))
        numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
        self._require(
            len(content) == 1 and key in CHOSEN and numbers and values,
            f"choose = {content!r}, expected one of {', '.join(CHOSEN)} with a list of numbers, "
            "such as {clip-norm: [0.3, 1.0]}; correct it",
        )
        values = [float(value) for value in values or ()]
        twice = f"choose = {content!r} has a value twice; name each once"
        self._require(len(set(values)) == len(values), twice)
        for value in values:
            try:
                check_key(key, value)
            except ValueError as error:
                raise ValueError(f"{self.where}: choose: {error}") from None
        rung = Rung(tuple(self.study.seeds if out else choose.seeds))
        if not out:
            return key, Grid(key, tuple(values), (rung,), choose.extensions)
        compared = (table.metric, table.mean_of_last or 0)
        return key, Grid(key, tuple(values), (rung,), choose.extensions, None, *compared)

    def _row(self, name: str, changes: dict[str, Any], key: str, grid: Grid | None) -> Row:
        """Read a row, and check its settings with a value of the key that it may be run with."""
        study, where = self.study, f"{self.where}: row {name!r}"
        settings = study.settings | self.table.settings | changes
        clients = settings.pop("num-clients", study.num_clients)
        told = f"{where}: num-clients = {clients!r}: expected a whole number at least 1"
        _require(type(clients) is int and clients >= 1, told)
        grid = None if key in settings else grid
        value = grid.values[0] if grid else settings.get(key, KEYS[key].default)
        try:
            self.configs[name] = read_config(own_preset(settings | self.here | {key: value}))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        good, seeds = self.table.run_as_good, tuple(study.seeds)
        return Row(settings, clients, seeds, grid, run_as_good=good, here=self.here)

    def _check_choices(self, rows: Mapping[str, Row]) -> None:
        """Refuse choices that need more seeds or rates than there are."""
        table = self.table
        seeds = [len(row.grid.rungs[0].seeds) for row in rows.values() if row.grid]
        self._require(
            all(seeds), "its rates are chosen, expected seeds for that in choose; add some"
        )
        least = min(seeds, default=0)
        self._require(
            least >= LEAST or not (table.run_as_good or table.leave_one_seed_out),
            f"run-as-good, and leave-one-seed-out, where rates are chosen with {least} seeds; "
            f"expected rates to choose from, with {LEAST} seeds at least; add them",
        )
        self._require(
            not (table.rates_of and (table.choose is not None or table.leave_one_seed_out))
            and not (table.run_as_good and table.leave_one_seed_out),
            "got choose and rates-of, or leave-one-seed-out beside rates-of or run-as-good, "
            "expected one of them: rows choose for themselves, or take what was chosen for another "
            "table; take one away",
        )

    def _earlier(self, field: str, title: str, tables: Sequence[Table]) -> Table | None:
        """Find the earlier table that a field names, if it names one."""
        known = {table.title: table for table in tables}
        self._require(
            not title or title in known,
            f"{field} = {title!r}, expected an earlier table: one of {list(known)}; correct it",
        )
        return known.get(title)

    def _taking(self, rows: Mapping[str, Row], lender: Table) -> dict[str, Row]:
        """Let the rows take the rates that are chosen for another table."""
        taking = {name: row for name, row in rows.items() if row.grid}
        theirs = {name: row for name, row in lender.rows.items() if row.grid}
        unknown = [name for name in taking if name not in theirs]
        self._require(
            not unknown,
            f"rates-of = {lender.title!r}: no rate is chosen there for rows {unknown}, expected "
            "one for each row without a learning-rate; rename the row, or set its rate",
        )
        return {name: replace(row, chosen_as=theirs[name]) for name, row in taking.items()}

    def _change_from(self) -> Table | None:
        """Find the table with whose rows these are compared, if any."""
        table, other = (
            self.table,
            self._earlier("change-from", self.table.change_from, self.earlier),
        )
        if other:
            mine, theirs = ((x.metric, x.mean_of_last) for x in (table, other))
            self._require(
                mine == theirs,
                f"change-from = {other.title!r} tells {theirs} where this table tells {mine}, "
                "expected one metric in both, of as many evaluations; correct it",
            )
            self._require(
                {*self.configs} & other.rows.keys(),
                f"change-from = {other.title!r} has rows {list(other.rows)}, expected some of "
                f"{list(self.configs)}; rename a row",
            )
        return other

    def _check_measured_alike(self) -> None:
        """Refuse a row of a personalised method that cannot stand beside the others."""
        personal = [name for name, x in self.configs.items() if METHODS[x.method].personalised]
        self._require(
            not (personal and self.table.spectra),
            f"spectra: rows {personal} have another update for each client, expected rows with "
            "one model for all; take spectra away",
        )
        ways = {
            name: f"evaluate-on={x.evaluate_on} validation-share={x.validation_share:g}"
            for name, x in self.configs.items()
        }
        self._require(
            not personal or len({*ways.values()}) == 1,
            f"its rows are measured on different examples ({ways}), expected the same for all; "
            "set evaluate-on: clients and validation-share: 0.2 in the study's settings",
        )

    def _check_equal(self) -> None:
        """Refuse rows that do not train the same number of parameters, to 5 %."""
        from ravan_flwr.training.cost import adapter_parameters  # noqa: PLC0415 (imports torch)

        numbers = {
            name: adapter_parameters(config)
            for name, config in self.configs.items()
            if name not in self.table.references
        }
        few = f"equal-parameters has rows {list(numbers)}, expected at least two"
        self._require(len(numbers) > 1, few)
        apart = 1 - min(numbers.values()) / max(numbers.values())
        listed = ", ".join(f"{name} {number:,}" for name, number in numbers.items())
        self._require(
            apart <= TOLERANCE,
            f"it calls its rows equal, but the parameters that they train differ by "
            f"{100 * apart:.1f} % ({listed}), expected at most {100 * TOLERANCE:.0f} %; change "
            "lora-rank, heads or rank, name references, or take equal-parameters away",
        )

    def _check_last(self, key: str, last: int | None) -> None:
        """Refuse a mean of more evaluations than any row has."""
        times = [math.ceil(x.num_rounds / x.eval_every) for x in self.configs.values()]
        most = max(times, default=0)
        self._require(
            last is None or 2 <= last <= most,
            f"{key} = {last}, expected 2 evaluations or more, and no more than the {most} of a "
            "row's run; correct it, or eval-every",
        )


def _read_paper(study: Path, name: str) -> dict[str, dict[str, float]]:
    """Read the numbers of a file in `paper/` beside the study: table -> row -> percent."""
    path = study.parent / "paper" / f"{name}.yaml"
    told = f"study {study}: paper = {name!r}: found no file {path}; correct it"
    _require(path.is_file(), told)
    content = read_yaml(path)
    tables = content.items() if isinstance(content, dict) else []
    for title, rows in tables:
        numbers = isinstance(rows, dict) and all(type(x) in (int, float) for x in rows.values())
        _require(numbers, f"{path}: {title!r} is {rows!r}, expected numbers by row; correct it")
    return {str(title): {str(row): float(x) for row, x in rows.items()} for title, rows in tables}
