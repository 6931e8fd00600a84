"""Describe a study: a file names rows of settings; every row is run with every seed, once.

    title: ...
    num-clients: 20
    seeds: [0, 1, 2]
    settings: {num-rounds: 10}              # of all rows
    choose:                                 # optional: a learning rate for each row of a table
      learning-rate: [1.0e-3, 1.0e-2]
      seeds: [100, 101, 102]
      extensions: 4                         # optional: rates tried beyond the grid, for each row
    tables:
      - title: IID
        settings: {partition: iid}          # optional: of the rows of this table
        equal-parameters: true              # optional: refuse rows that differ by more than 5 %
        references: [full]                  # optional: rows that do not compete
        choose: {clip-norm: [0.3, 1.0]}     # optional: that key in place of the learning rate
        rates-of: IID                       # optional: what is chosen is that of that table
        run-as-good: true                   # optional: run the rates that are as good, too
        against: ravan                      # optional: differences are to this row, paired by seed
        change-from: IID                    # optional: and to the same row of that table
        compare-last: 3                     # optional: compare the means of so many evaluations
        mean-of-last: 5                     # optional: values are means of so many evaluations
        leave-one-seed-out: true            # optional: choose by the other seeds of this table
        contrasts: [fedit, fed-sb]          # optional: rows whose p-values Holm's method corrects
        spectra: true                       # optional: draw the rows' singular values
        paper: {fedit: 68.66}               # optional: a paper's numbers, in percent, beside ours
        metric: accuracy-matched            # optional: another one than the task's; `time`: the
                                            # simulated seconds that a run took
        rows:
          ravan: {}                         # the settings in which a row differs
          fedit: {method: fedit}

A run is a process of its own and has a folder named after its settings, so that rows which
mean the same run share it, a study that was interrupted goes on where it stopped, and a
failed run is listed and does not stop the others. What a run has come to is a line of a record
(results.py), from which a study goes on where the folders are gone.

Learning rates are chosen on examples that the clients hold back, never on the test examples,
with seeds of their own: the rate with the best mean metric after the last round. While the best
is the largest or smallest of those tried, the next is tried as well (choosing.py). A table may
choose another number in the same way: what is called a rate below is a value of that key.
With `leave-one-seed-out` no validation split is needed: all rates are run with the table's own
seeds, and each seed takes the rate whose mean over the *other* seeds is best.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ravan_flwr.config.keys import KEYS, NOT_OF_RESULT, as_key_values, check_key
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import HELD_BACK, Config, read_config
from ravan_flwr.config.yaml_file import KEBAB, read_yaml
from ravan_flwr.files import first_wrong
from ravan_flwr.methods import METHODS
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import Scalar

RATE = "learning-rate"  # what is chosen, where a table of a study does not name another key
LEAST = 3  # values of which an interval is told: that of two is 13 times as wide as their spread
EXTENSIONS = 4  # rates that are added at most, one at a time, where the best is an edge
OVERVIEW = "overview"  # in a page: all tables in one
# A run that is done is the one that is meant, whatever these are: a rank that was "auto" has
# become a number.
_NO_MATTER = NOT_OF_RESULT | {"rank"}
ENGINES = {"process": ["simulate"], "flower": ["simulate", "--engine", "flower"]}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: settings, seed included, and the number of clients.

    `overrides` has what this machine adds, such as the data's folder: the run is the same with it.
    """

    settings: tuple[tuple[str, Scalar], ...]
    num_clients: int
    overrides: tuple[tuple[str, Scalar], ...] = field(default=(), compare=False)

    @cached_property
    def name(self) -> str:
        """Name the folder: the same for the same run, whatever table it stands in."""
        return _digest([sorted(self.settings), self.num_clients])

    def command(self, folder: Path, engine: str) -> list[str]:
        """Build the command that a person would type to run this alone, without a report."""
        settings: dict[str, Scalar] = {"report": False, "tracking": "none"}
        settings |= dict(self.settings) | dict(self.overrides)
        settings |= {"num-clients": self.num_clients, "output-dir": str(self.folder(folder))}
        return [sys.executable, "-m", "ravan_flwr", *ENGINES[engine], *as_key_values(settings)]

    def folder(self, study: Path) -> Path:
        """Return the folder in which the run's own directory is made."""
        return study / "runs" / self.name

    def directory(self, study: Path) -> Path | None:
        """Find the run's directory, if it is done with the settings as they resolve today."""
        summaries = sorted(self.folder(study).glob("*/summary.json"))
        if not summaries:
            return None
        recorded = RunDirectory(summaries[-1].parent).read_config()
        if not self.resolved["data"]["labels"]:  # the run has found them in its data
            recorded["data"] = {**recorded["data"], "labels": []}
        # A run's own has how many clients there were, which `num_clients` says here.
        compared = self.resolved.keys() - dict(self.overrides).keys() - {"num-clients"}
        same = all(recorded.get(key) == self.resolved[key] for key in compared)
        return summaries[-1].parent if same else None

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """Resolve the settings with preset and defaults, without those that change no result."""
        config = read_config(own_preset(dict(self.settings))).as_dict()
        if config["rank"] is not None and "rank" not in dict(self.settings):  # the preset's
            return {key: value for key, value in config.items() if key not in NOT_OF_RESULT}
        return {key: value for key, value in config.items() if key not in _NO_MATTER}

    @cached_property
    def digest(self) -> str:
        """Hash the settings that are set, as they resolve: later versions have further keys."""
        return _digest(
            {
                # Of a part such as `data`, where later versions add fields, what is filled counts.
                key: {k: v for k, v in value.items() if v} if isinstance(value, dict) else value
                for key, value in self.resolved.items()
                if value is not None and (key not in KEYS or value != KEYS[key].default)
            }
        )

    @property
    def num_rounds(self) -> int:
        """Return how many rounds it takes."""
        rounds = dict(self.settings).get("num-rounds")
        return rounds if type(rounds) is int else int(self.resolved["num-rounds"])

    def __str__(self) -> str:
        """Write the settings as a person types them."""
        return " ".join(as_key_values(dict(self.settings)))


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Rung:
    """Say how long, and with which seeds, the best so many rates of the rung before are run."""

    seeds: tuple[int, ...]
    rates: int | None = None  # None: all
    rounds: int | None = None  # None: as the settings say


@dataclass(frozen=True)
class Grid:
    """Say from which values of which key a row chooses, and by what."""

    key: str
    values: tuple[float, ...]
    rungs: tuple[Rung, ...]
    extensions: int = EXTENSIONS  # how many values may be added to them
    # The part of a client's examples that the values are compared on; None: the table's own
    # examples, where each seed takes what is best by the other seeds.
    validation_share: float | None = HELD_BACK
    metric: str = ""  # that is compared; "": the task's
    last: int = 0  # evaluations, the last ones, whose mean is compared; 0: the last value


@dataclass(frozen=True)
class Row:
    """A row of a table: settings that are run with several seeds."""

    settings: dict[str, Scalar]
    num_clients: int
    seeds: tuple[int, ...]
    grid: Grid | None = None  # to choose from; None: the settings say the rate
    chosen_as: "Row | None" = None  # the row of another table whose rate it takes
    run_as_good: bool = False  # with the rates that are as good as the best, too?
    overrides: dict[str, Scalar] = field(default_factory=dict)  # see PlannedRun

    def candidates(self, rate: float, rung: Rung) -> list[PlannedRun]:
        """List the runs that measure how good a rate is, one a seed."""
        assert self.grid is not None
        changes: dict[str, Scalar] = {self.grid.key: rate}
        if self.grid.validation_share is not None:
            changes |= {"evaluate-on": "clients", "validation-share": self.grid.validation_share}
            changes["eval-every"] = rung.rounds or self._run(changes, 0).num_rounds
        if rung.rounds is not None:
            changes["num-rounds"] = rung.rounds
        return [self._run(changes, seed) for seed in rung.seeds]

    def runs(self, rates: float | Mapping[int, float] | None = None) -> list[PlannedRun]:
        """List the runs of the table, one a seed, with that rate, its own, or the settings'."""
        if rates is None:
            return [self._run({}, seed) for seed in self.seeds]
        assert self.grid is not None
        by_seed = rates if isinstance(rates, Mapping) else dict.fromkeys(self.seeds, rates)
        return [self._run({self.grid.key: by_seed[seed]}, seed) for seed in self.seeds]

    def _run(self, changes: dict[str, Scalar], seed: int) -> PlannedRun:
        settings = self.settings | changes | {"seed": seed}
        return PlannedRun(tuple(settings.items()), self.num_clients, tuple(self.overrides.items()))


class Checked(BaseModel):
    """Part of a study file: keys in kebab-case, no others, and each of its own type."""

    model_config = KEBAB | ConfigDict(extra="forbid")


class TableOptions(Checked):
    """What a table of a study file says beside its rows."""

    title: str
    equal_parameters: bool = False
    references: list[str] = []  # rows that do not compete with the others
    rates_of: str = ""  # the table that its learning rates were chosen for, if another
    run_as_good: bool = False
    spectra: bool = False  # draw the singular values of the rows' updates?
    metric: str = ""  # "": the task's
    against: str = ""  # the row that differences are to
    compare_last: int | None = None  # of how many evaluations means are compared as well
    mean_of_last: int | None = None  # of how many evaluations every value is the mean
    leave_one_seed_out: bool = False  # does each seed take the rate that is best by the others?
    contrasts: list[str] = []  # rows whose differences to `against` were planned
    paper: dict[str, float] = {}  # row -> what a paper has, in percent


class Table(TableOptions):
    """Rows by name."""

    rows: dict[str, Row]
    chosen: str = RATE  # the key whose values its rows choose from
    grid: Grid | None = None
    change_from: "Table | None" = None  # whose rows of the same names are compared as well

    @property
    def chosen_in_words(self) -> str:
        """Name that key for people."""
        return self.chosen.replace("-", " ")


@dataclass(frozen=True)
class Study:
    """A study file, checked."""

    title: str
    tables: list[Table]

    @property
    def rows(self) -> list[Row]:
        """List the rows of all tables."""
        return [row for table in self.tables for row in table.rows.values()]

    @property
    def tables_share_rows(self) -> bool:
        """Tell whether a row's name stands in several tables, so that they can be one."""
        names = [name for table in self.tables for name in table.rows]
        return len(set(names)) < len(names)


# What a table's rows may choose.
CHOSEN = (RATE, "clip-norm", "calibration-learning-rate")
OF_A_MACHINE = ("data", "model", "device", "processes")
TOLERANCE = 0.05  # numbers of parameters that differ by no more are called equal


class _Choose(Checked):
    learning_rate: list[float]
    seeds: list[int]
    extensions: int = Field(default=EXTENSIONS, ge=0, le=10)


class _TableOfFile(TableOptions):
    rows: dict[Any, dict[str, Any] | None]
    settings: dict[str, Any] = Field(default_factory=dict)
    choose: dict[str, Any] | None = None
    change_from: str = ""


class _StudyFile(Checked):
    title: str
    num_clients: int
    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Any]
    tables: list[_TableOfFile]
    choose: _Choose = _Choose(learning_rate=[], seeds=[])


_Content = TypeVar("_Content", bound=Checked)


def _require(holds: object, wrong: str) -> None:
    if not holds:
        raise ValueError(wrong)


def read_study(path: Path, overrides: Mapping[str, Scalar] | None = None) -> Study:
    """Read and check a study; every run's settings must be such as `simulate` takes.

    `overrides` has settings of this machine for all runs, which change nothing in what they are.
    """
    for key, value in (overrides or {}).items():
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
    for table in content.tables:
        tables.append(_TableReader(where, content, table, dict(overrides or {}), tables).read())
    return Study(content.title, tables)


def _checked(where: str, model: type[_Content], content: object) -> _Content:
    """Read a mapping; ValueError names the first field that is wrong, and those there are."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        fields = sorted(field.alias or name for name, field in model.model_fields.items())
        raise ValueError(
            f"{where}: {first_wrong(error)}; expected the fields {fields}, and in them what "
            "docs/reports.md says; correct it"
        ) from None


class _TableReader:
    """Reads one table of a study file; `earlier` are those above it."""

    def __init__(
        self, where: str, study: _StudyFile, table: _TableOfFile, overrides: dict[str, Scalar],
        earlier: Sequence[Table],
    ) -> None:  # fmt: skip
        self.where, self.study, self.table = f"{where}: table {table.title!r}", study, table
        self.overrides, self.earlier = overrides, earlier
        self.configs: dict[str, Config] = {}  # of the rows

    def _require(self, holds: object, wrong: str) -> None:
        _require(holds, f"{self.where}: {wrong}")

    def read(self) -> Table:
        """Read it, and check what it says."""
        table, titles = self.table, {OVERVIEW, *(t.title for t in self.earlier)}
        self._require(
            table.title not in titles,
            f"its title is another's, or {OVERVIEW!r}, which in a page stands for all of them; "
            "expected one of its own; rename it",
        )
        choosing = [t for t in self.earlier if not t.rates_of]
        lender = self._earlier("rates-of", table.rates_of, choosing)
        key, grid = (lender.chosen, lender.grid) if lender else self._grid()
        rows = {
            str(name): self._row(str(name), x or {}, key, grid) for name, x in table.rows.items()
        }
        competing = [name for name in rows if name not in table.references] or list(rows)
        against = table.against or next(iter(["ravan"] if "ravan" in rows else competing), "")
        for what, names in (
            ("references", table.references), ("paper", table.paper),
            ("contrasts", table.contrasts), ("against", [against] if against else []),
        ):  # fmt: skip
            unknown = [name for name in names if name not in rows]
            problem = f"{what} {unknown} are no rows, expected some of {list(rows)}; correct them"
            self._require(not unknown, problem)
        self._check_choices(rows)
        self._check_measured_alike()
        self._check_last("compare-last", table.compare_last, max)
        self._check_last("mean-of-last", table.mean_of_last, min)
        if table.equal_parameters:
            self._check_equal()
        if lender:
            rows |= self._taking(rows, lender)
        options = table.model_dump(include={*TableOptions.model_fields} - {"against"})
        return Table(
            **options, against=against, rows=rows, chosen=key, grid=grid,
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
        problem = f"{where}: num-clients = {clients!r}: expected a whole number at least 1"
        _require(type(clients) is int and clients >= 1, problem)
        grid = None if key in settings else grid
        value = grid.values[0] if grid else settings.get(key, KEYS[key].default)
        try:
            self.configs[name] = read_config(own_preset(settings | self.overrides | {key: value}))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        good, seeds = self.table.run_as_good, tuple(study.seeds)
        return Row(settings, clients, seeds, grid, run_as_good=good, overrides=self.overrides)

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
            "expected one of them; take one away",
        )

    def _earlier(self, field: str, title: str, tables: Sequence[Table]) -> Table | None:
        """Find the earlier table that a field names, if it names one."""
        by_title = {table.title: table for table in tables}
        self._require(
            not title or title in by_title,
            f"{field} = {title!r}, expected an earlier table: one of {list(by_title)}; correct it",
        )
        return by_title.get(title)

    def _taking(self, rows: Mapping[str, Row], lender: Table) -> dict[str, Row]:
        """Let the rows take the rates that are chosen for another table."""
        taking = {name: row for name, row in rows.items() if row.grid}
        lender_rows = {name: row for name, row in lender.rows.items() if row.grid}
        unknown = [name for name in taking if name not in lender_rows]
        self._require(
            not unknown,
            f"rates-of = {lender.title!r}: no rate is chosen there for rows {unknown}, expected "
            "one for each row without a learning-rate; rename the row, or set its rate",
        )
        return {name: replace(row, chosen_as=lender_rows[name]) for name, row in taking.items()}

    def _change_from(self) -> Table | None:
        """Find the table with whose rows these are compared, if any."""
        table, base = (
            self.table,
            self._earlier("change-from", self.table.change_from, self.earlier),
        )
        if base:
            measure, base_measure = ((x.metric, x.mean_of_last) for x in (table, base))
            self._require(
                measure == base_measure,
                f"change-from = {base.title!r} has {base_measure} where this table has {measure}, "
                "expected one metric in both, of as many evaluations; correct it",
            )
            self._require(
                {*self.configs} & base.rows.keys(),
                f"change-from = {base.title!r} has rows {list(base.rows)}, expected some of "
                f"{list(self.configs)}; rename a row",
            )
        return base

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
        gap = 1 - min(numbers.values()) / max(numbers.values())
        listed = ", ".join(f"{name} {number:,}" for name, number in numbers.items())
        self._require(
            gap <= TOLERANCE,
            f"it calls its rows equal, but the parameters that they train differ by "
            f"{100 * gap:.1f} % ({listed}), expected at most {100 * TOLERANCE:.0f} %; change "
            "lora-rank, heads or rank, name references, or take equal-parameters away",
        )

    def _check_last(self, key: str, last: int | None, choose: Callable[..., int]) -> None:
        """Refuse a mean of more evaluations than a row has: the row with most, or with least."""
        times = (math.ceil(x.num_rounds / x.eval_every) for x in self.configs.values())
        most = choose(times, default=0)
        self._require(
            last is None or 2 <= last <= most,
            f"{key} = {last}, expected 2 evaluations or more, and no more than the {most} of a "
            "row's run; correct it, or eval-every",
        )
