"""Read study files: rows of settings, each of which is run once with every seed.

    title: ...
    num-clients: 20
    seeds: [0, 1, 2]
    settings: {num-rounds: 10}              # optional: of all rows
    choose:                                 # optional: a learning rate for each row of a table
      learning-rate: [1.0e-3, 1.0e-2]
      seeds: [100, 101, 102]
      extensions: 4                         # optional: rates tried beyond the grid, for each row
    tables:
      - title: IID
        settings: {partition: iid}          # optional: of the rows of this table
        equal-parameters: true              # optional: reject rows that differ by more than 5 %
        references: [full]                  # optional: rows that do not compete
        choose: {clip-norm: [0.3, 1.0]}     # optional: a key in place of the learning rate
        rates-of: IID                       # optional: take the rates chosen for that table
        run-as-good: true                   # optional: also run the other rates as good
        against: ravan                      # optional: differences are to this row, paired by seed
        change-from: IID                    # optional: also to the same row of that table
        compare-last: 3                     # optional: compare means of so many evaluations
        mean-of-last: 5                     # optional: values are means of so many evaluations
        leave-one-seed-out: true            # optional: choose by the other seeds of this table
        contrasts: [fedit, fed-sb]          # optional: p-values of these rows, Holm-corrected
        spectra: true                       # optional: draw the rows' singular values
        paper: {fedit: 68.66}               # optional: a paper's numbers, in percent, beside ours
        metric: accuracy-matched            # optional: in place of the task's; `time`: the
                                            # simulated seconds that a run took
        rows:
          ravan: {}                         # the settings in which a row differs
          fedit: {method: fedit}

Each run is a process of its own, in a folder named after a hash of its settings. So rows with
equal settings share a run, an interrupted study continues where it stopped, and a failed run is
listed and does not stop the others. The result of a run is a line of a record (results.py), from
which a study continues without the folders.

Learning rates are chosen on the clients' validation splits, never on the test examples, with
seeds of their own: the rate with the best mean metric after the last round wins. While the best
rate is the largest or smallest tried, the next rate beyond it is tried too (choosing.py). A table
may choose the value of another key in the same way; below, such a value is called a rate too.
With `leave-one-seed-out` no validation split is needed: all rates are run with the table's own
seeds, and each seed takes the rate whose mean over the *other* seeds is best.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from ravan_flwr.config.key import did_you_mean
from ravan_flwr.config.keys import (
    KEYS,
    NOT_OF_RESULT,
    SEVERAL,
    as_key_values,
    check_key,
    check_num_clients,
)
from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import VALIDATION_SHARE, Config, read_config
from ravan_flwr.config.yaml_file import Part, check_names, read_yaml
from ravan_flwr.files import first_error
from ravan_flwr.methods import METHODS
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import Scalar, join_list
from ravan_flwr.tasks import MACRO_F1, TASKS, TIME

RATE = "learning-rate"  # the key that a table chooses, unless it names another
MIN_SEEDS = 3  # for an interval; of two values it is 13 times as wide as their distance
EXTENSIONS = 4  # most rates that are added, one at a time, while the best is an edge
OVERVIEW = "overview"  # title, in a page, of all tables in one
MAX_FILE_NAME = 60  # characters: a picture's name has more of them, and a file's at most 255 bytes
# A finished run matches whatever these are. A rank of "auto" is a number in its directory.
_NOT_COMPARED = NOT_OF_RESULT | {"rank"}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: settings, with the seed, and the number of clients.

    `overrides` has settings of this machine, such as the data's folder. They do not change which
    run it is.
    """

    settings: tuple[tuple[str, Scalar], ...]
    num_clients: int
    overrides: tuple[tuple[str, Scalar], ...] = field(default=(), compare=False)

    @cached_property
    def name(self) -> str:
        """Return the folder's name: equal for equal runs, in every table."""
        return _digest([sorted(self.settings), self.num_clients])

    def command(self, folder: Path, engine: str) -> list[str]:
        """Return the command that runs this run alone, without a report."""
        settings: dict[str, Scalar] = {"tracking": "none"}
        settings |= dict(self.settings) | dict(self.overrides)
        settings |= {"num-clients": self.num_clients, "output-dir": str(self.folder(folder))}
        command = [sys.executable, "-m", "ravan_flwr", "simulate", "--engine", engine]
        return [*command, *as_key_values(settings)]

    def folder(self, study: Path) -> Path:
        """Return the folder in which the run creates its run directory."""
        return study / "runs" / self.name

    def directory(self, study: Path) -> Path | None:
        """Return the run's directory, if it is done with the settings as they resolve today."""
        summaries = sorted(self.folder(study).glob("*/summary.json"))
        if not summaries:
            return None
        recorded = RunDirectory(summaries[-1].parent).read_config()
        if not self.resolved["data"]["labels"]:  # then the run read them from its data
            recorded["data"] = {**recorded["data"], "labels": []}
        # The recorded config has the number of clients, which here is `num_clients`.
        compared = self.resolved.keys() - dict(self.overrides).keys() - {"num-clients"}
        same = all(recorded.get(key) == self.resolved[key] for key in compared)
        return summaries[-1].parent if same else None

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """Return the settings with preset and defaults, without those that change no result."""
        config = read_config(with_preset_path(dict(self.settings))).as_dict()
        if config["rank"] is not None and "rank" not in dict(self.settings):  # it is the preset's
            return {key: value for key, value in config.items() if key not in NOT_OF_RESULT}
        return {key: value for key, value in config.items() if key not in _NOT_COMPARED}

    @cached_property
    def digest(self) -> str:
        """Return a hash of the resolved settings that are not defaults: later versions add keys."""
        return _digest(
            {
                # Later versions add fields to mappings such as `data`: non-empty fields count.
                key: {k: v for k, v in value.items() if v} if isinstance(value, dict) else value
                for key, value in self.resolved.items()
                if value is not None and (key not in KEYS or value != KEYS[key].default)
            }
        )

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds."""
        rounds = dict(self.settings).get("num-rounds")
        return rounds if type(rounds) is int else int(self.resolved["num-rounds"])

    def __str__(self) -> str:
        """Return the settings as key=value words, as on the command line."""
        return " ".join(as_key_values(dict(self.settings)))


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Grid:
    """The key and the values from which a row chooses, and how they are compared."""

    key: str
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    extensions: int = EXTENSIONS  # most values that may be added
    # The fraction of a client's examples that are its validation split; None: the table's own
    # examples, where each seed takes the value that is best by the other seeds.
    validation_share: float | None = VALIDATION_SHARE
    metric: str = ""  # to compare; "": the task's
    last: int = 0  # number of last evaluations to average; 0: the final value


@dataclass(frozen=True)
class Row:
    """A row of a table: settings that are run with several seeds."""

    settings: dict[str, Scalar]
    num_clients: int
    seeds: tuple[int, ...]
    grid: Grid | None = None  # to choose from; None: the settings have the rate
    rate_source: "Row | None" = None  # the row of another table whose rate it takes
    run_as_good: bool = False  # also run the other rates as good as the best?
    overrides: dict[str, Scalar] = field(default_factory=dict)  # see PlannedRun

    def candidates(self, rate: float) -> list[PlannedRun]:
        """Return the runs that measure a rate, one a seed."""
        assert self.grid is not None
        changes: dict[str, Scalar] = {self.grid.key: rate}
        if self.grid.validation_share is not None:
            changes |= {"evaluate-on": "clients", "validation-share": self.grid.validation_share}
            changes["eval-every"] = self._run(changes, 0).num_rounds
        return [self._run(changes, seed) for seed in self.grid.seeds]

    def runs(self, rates: float | Mapping[int, float] | None = None) -> list[PlannedRun]:
        """Return the table's runs, one a seed: with one rate, a rate by seed, or the settings'."""
        if rates is None:
            return [self._run({}, seed) for seed in self.seeds]
        assert self.grid is not None
        by_seed = rates if isinstance(rates, Mapping) else dict.fromkeys(self.seeds, rates)
        return [self._run({self.grid.key: by_seed[seed]}, seed) for seed in self.seeds]

    def _run(self, changes: dict[str, Scalar], seed: int) -> PlannedRun:
        settings = self.settings | changes | {"seed": seed}
        return PlannedRun(tuple(settings.items()), self.num_clients, tuple(self.overrides.items()))


class TableOptions(Part):
    """The fields of a table in a study file, without its rows."""

    title: str
    equal_parameters: bool = False
    references: list[str] = Field(default_factory=list)  # rows that do not compete
    rates_of: str = ""  # title of the table whose chosen rates are taken
    run_as_good: bool = False
    spectra: bool = False  # draw the singular values of the rows' updates?
    metric: str = ""  # "": the task's
    against: str = ""  # the reference row of differences
    compare_last: int | None = None  # also compare means of so many last evaluations
    mean_of_last: int | None = None  # every value is the mean of so many last evaluations
    leave_one_seed_out: bool = False  # each seed takes the rate best by the others?
    contrasts: list[str] = Field(default_factory=list)  # rows with a planned contrast to `against`
    paper: dict[str, float] = Field(default_factory=dict)  # row -> a paper's number, in percent

    @property
    def file_name(self) -> str:
        """Return the title as the beginning of the names of its pictures."""
        return re.sub(r"[\W_]+", "-", self.title.lower()).strip("-")[:MAX_FILE_NAME]


class Table(TableOptions):
    """A table of a study: its options, and its rows by name."""

    rows: dict[str, Row]
    chosen_key: str = RATE  # the key whose value the rows choose
    grid: Grid | None = None
    change_from: "Table | None" = None  # table with which rows of the same name are compared

    @property
    def chosen_key_name(self) -> str:
        """Return that key as words, such as "learning rate"."""
        return self.chosen_key.replace("-", " ")


@dataclass(frozen=True)
class Study:
    """The checked content of a study file."""

    title: str
    tables: list[Table]

    @property
    def rows(self) -> list[Row]:
        """Return the rows of all tables."""
        return [row for table in self.tables for row in table.rows.values()]

    @property
    def tables_share_rows(self) -> bool:
        """Return whether a row's name is in several tables, so that an overview is useful."""
        names = [name for table in self.tables for name in table.rows]
        return len(set(names)) < len(names)


# Keys whose value a table's rows may choose.
CHOOSABLE_KEYS = (RATE, "clip-norm", "calibration-learning-rate")
MACHINE_KEYS = ("data", "model", "device", "processes")
_Number = TypeVar("_Number", int, float)
TOLERANCE = 0.05  # relative difference up to which numbers of parameters count as equal


def _check_each(key: str, values: list[_Number]) -> list[_Number]:
    """Return a key's values; raise ValueError if one is out of its range, or there twice."""
    for value in values:
        check_key(key, value)
    if len(set(values)) < len(values):
        raise ValueError(f"got {values}, expected each value once")
    return values


def _check_choice(choose: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return a key and its values; ValueError for other keys, or no values but learning rates."""
    key, values = next(iter(choose.items()), ("", []))
    if len(choose) != 1 or key not in CHOOSABLE_KEYS or not (values or key == RATE):
        raise ValueError(
            f"expected one of {', '.join(CHOOSABLE_KEYS)} with a list of numbers, such as "
            "{clip-norm: [0.3, 1.0]}"
        )
    return {key: _check_each(key, values)}


_Seeds = Annotated[list[int], AfterValidator(partial(_check_each, "seed"))]


class _Choose(Part):
    learning_rate: Annotated[list[float], AfterValidator(partial(_check_each, RATE))]
    seeds: _Seeds
    extensions: int = Field(default=EXTENSIONS, ge=0, le=10)


class _TableOfFile(TableOptions):
    rows: dict[Any, dict[str, Any] | None]
    settings: dict[str, Any] = Field(default_factory=dict)
    choose: Annotated[dict[str, list[float]], AfterValidator(_check_choice)] | None = None
    change_from: str = ""


class _StudyFile(Part):
    title: str
    num_clients: int
    seeds: _Seeds = Field(min_length=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    tables: list[_TableOfFile]
    choose: _Choose = _Choose(learning_rate=[], seeds=[])


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def read_study(path: Path, overrides: Mapping[str, Scalar] | None = None) -> Study:
    """Return a study file's checked content; `simulate` must accept every run's settings.

    `overrides` has settings of this machine for all runs; they do not change which runs there are.
    """
    for key, value in (overrides or {}).items():
        _require(
            key in MACHINE_KEYS,
            f"study: got {key}={value}, expected {' or '.join(MACHINE_KEYS)}, which are "
            "settings of this machine; write other settings into the study's file",
        )
        check_key(key, value)
    where, tables = f"study {path}", list[Table]()
    file = read_yaml(path)
    preset = isinstance(file, dict) and "task" in file and "title" not in file
    _require(not preset, f"{where}: got a preset, expected a study; simulate preset={path} runs it")
    check_names(f"{where}: ", file, _StudyFile)
    if "choose" in file:
        check_names(f"{where}: choose.", file["choose"], _Choose)
    for number, table in enumerate(file["tables"] if isinstance(file["tables"], list) else []):
        check_names(f"{where}: tables.{number}.", table, _TableOfFile)
    try:
        content = _StudyFile.model_validate(file)
    except ValidationError as error:
        problem = f"{first_error(error)}; expected what docs/compare.md describes"
        raise ValueError(f"{where}: {problem}") from None
    both = sorted({*content.seeds} & {*content.choose.seeds})
    _require(
        not both,
        f"{where}: seeds and choose.seeds both have {both}, expected no seed in both: rates are "
        "not chosen with seeds that are reported; change one",
    )
    for table in content.tables:
        tables.append(_TableReader(where, content, table, dict(overrides or {}), tables).read())
    return Study(content.title, tables)


def _metrics(config: Config) -> list[str]:
    """Return the metrics that a run measures; the server has one more of each for a test set."""
    task, tests = TASKS[config.task], [name for name, _ in config.data.tests]
    names = [*task.metrics]
    if config.evaluate_on == "server":
        names += [f"{name}-{test}" for name in names for test in tests if len(tests) > 1]
        names += [MACRO_F1] * ("label" in task.roles)
    return names + [TIME] * (config.devices is not None)


class _TableReader:
    """Read one table of a study file; `earlier` are the tables above it."""

    def __init__(
        self, where: str, study: _StudyFile, table: _TableOfFile, overrides: dict[str, Scalar],
        earlier: Sequence[Table],
    ) -> None:  # fmt: skip
        self.where, self.study, self.table = f"{where}: table {table.title!r}", study, table
        self.overrides, self.earlier = overrides, earlier
        self.configs: dict[str, Config] = {}  # by row

    def _require(self, condition: object, problem: str) -> None:
        _require(condition, f"{self.where}: {problem}")

    def read(self) -> Table:
        """Return the checked table."""
        table, used = self.table, {OVERVIEW, *(t.file_name for t in self.earlier)}
        self._require(
            table.file_name not in used,
            f"its title is another's, or {OVERVIEW!r}, which in a page stands for all tables. "
            "Titles that differ only in case, in punctuation or in their ends count as the same, "
            f"since their pictures would all be {table.file_name}-*.png; expected one of its own; "
            "rename it",
        )
        choosing = [t for t in self.earlier if not t.rates_of]
        source = self._earlier_table("rates-of", table.rates_of, choosing)
        key, grid = (source.chosen_key, source.grid) if source else self._grid()
        self._require(table.rows, "rows: got none, expected one at least; add one")
        rows = {
            str(name): self._row(str(name), x or {}, key, grid) for name, x in table.rows.items()
        }
        competing = [name for name in rows if name not in table.references] or list(rows)
        against = table.against or next(iter(["ravan"] if "ravan" in rows else competing), "")
        for option, names in (
            ("references", table.references), ("paper", table.paper),
            ("contrasts", table.contrasts), ("against", [against] if against else []),
        ):  # fmt: skip
            unknown = [name for name in names if name not in rows]
            problem = f"{option} {unknown} are no rows, expected some of {list(rows)}; correct them"
            self._require(not unknown, problem)
        self._require(
            against not in table.contrasts,
            f"contrasts has {against!r}, expected other rows: contrasts are to it; take it away",
        )
        for option, names in (("contrasts", table.contrasts), ("references", table.references)):
            problem = f"{option} = {names}: expected each row once; take the others away"
            self._require(len({*names}) == len(names), problem)
        timeless = [name for name, config in self.configs.items() if config.devices is None]
        self._require(
            table.metric != TIME or not timeless,
            f"metric = {TIME!r}: rows {timeless} have no simulated time; set devices",
        )
        self._check_metric()
        self._check_choices(rows)
        self._check_evaluation()
        self._check_last("compare-last", table.compare_last, max)
        self._check_last("mean-of-last", table.mean_of_last, min)
        if table.equal_parameters:
            self._check_equal_parameters()
        if source:
            rows |= self._take_rates(rows, source)
        options = table.model_dump(include={*TableOptions.model_fields} - {"against"})
        return Table(
            **options, against=against, rows=rows, chosen_key=key, grid=grid,
            change_from=self._change_from(),
        )  # fmt: skip

    def _grid(self) -> tuple[str, Grid | None]:
        """Return the key that the rows choose, and the grid of its values, if any."""
        table, choose = self.table, self.study.choose
        ((key, values),) = (table.choose or {RATE: choose.learning_rate}).items()
        if not values:
            return key, None
        grid = Grid(key, tuple(sorted(values)), tuple(choose.seeds), choose.extensions)
        if not table.leave_one_seed_out:
            return key, grid
        return key, replace(
            grid, seeds=tuple(self.study.seeds), validation_share=None, metric=table.metric,
            last=table.mean_of_last or 0,
        )  # fmt: skip

    def _row(self, name: str, changes: dict[str, Any], key: str, grid: Grid | None) -> Row:
        """Return a row, after a check of its settings with a value of the key."""
        study, where = self.study, f"{self.where}: row {name!r}"
        settings = study.settings | self.table.settings | changes
        settings |= {key: join_list(settings[key]) for key in SEVERAL if key in settings}
        clients = settings.pop("num-clients", study.num_clients)
        problem = f"{where}: seed = {settings.get('seed')!r}: every row has the study's seeds"
        _require("seed" not in settings, f"{problem}, expected no other; leave it out")
        grid = None if key in settings else grid
        value = grid.values[0] if grid else settings.get(key, KEYS[key].default)
        try:
            check_num_clients(clients)
            self.configs[name] = read_config(
                with_preset_path(settings | self.overrides | {key: value})
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        as_good, seeds = self.table.run_as_good, tuple(study.seeds)
        return Row(settings, clients, seeds, grid, run_as_good=as_good, overrides=self.overrides)

    def _check_choices(self, rows: Mapping[str, Row]) -> None:
        """Raise ValueError if choices have too few seeds, or options exclude each other."""
        table = self.table
        seeds = [len(row.grid.seeds) for row in rows.values() if row.grid]
        self._require(
            all(seeds), "its rates are chosen, expected seeds for that in choose; add some"
        )
        min_seeds = min(seeds, default=0)
        self._require(
            min_seeds >= MIN_SEEDS or not (table.run_as_good or table.leave_one_seed_out),
            f"run-as-good, and leave-one-seed-out, where rates are chosen with {min_seeds} seeds; "
            f"expected rates to choose from, with {MIN_SEEDS} seeds at least; add them",
        )
        self._require(
            not (table.rates_of and (table.choose is not None or table.leave_one_seed_out))
            and not (table.run_as_good and table.leave_one_seed_out),
            "got choose and rates-of, or leave-one-seed-out beside rates-of or run-as-good, "
            "expected one of them; take one away",
        )

    def _earlier_table(self, field: str, title: str, tables: Sequence[Table]) -> Table | None:
        """Return the earlier table that a field names, if it names one."""
        by_title = {table.title: table for table in tables}
        self._require(
            not title or title in by_title,
            f"{field} = {title!r}, expected an earlier table: one of {list(by_title)}",
        )
        return by_title.get(title)

    def _take_rates(self, rows: Mapping[str, Row], source: Table) -> dict[str, Row]:
        """Return the rows that have a grid, with the rates of another table's rows."""
        taking = {name: row for name, row in rows.items() if row.grid}
        source_rows = {name: row for name, row in source.rows.items() if row.grid}
        unknown = [name for name in taking if name not in source_rows]
        self._require(
            not unknown,
            f"rates-of = {source.title!r}: no rate is chosen there for rows {unknown}, expected "
            "one for each row without a learning-rate; rename the row, or set its rate",
        )
        return {name: replace(row, rate_source=source_rows[name]) for name, row in taking.items()}

    def _change_from(self) -> Table | None:
        """Return the table of `change-from`, if any."""
        base = self._earlier_table("change-from", self.table.change_from, self.earlier)
        if base:
            measure, base_measure = ((x.metric, x.mean_of_last) for x in (self.table, base))
            self._require(
                measure == base_measure,
                f"change-from = {base.title!r} has {base_measure} where this table has {measure}, "
                "expected one metric in both, of as many evaluations; change one of the tables",
            )
            self._require(
                {*self.configs} & base.rows.keys(),
                f"change-from = {base.title!r} has rows {list(base.rows)}, expected some of "
                f"{list(self.configs)}; rename a row",
            )
        return base

    def _check_metric(self) -> None:
        """Raise ValueError unless the runs of every row will measure the table's metric."""
        metric = self.table.metric
        # A task's own metric, by which runs are compared, is listed after the loss.
        own = {name: TASKS[config.task].metrics[1] for name, config in self.configs.items()}
        self._require(
            metric or len({*own.values()}) == 1,
            f"its rows have different metrics ({own}), expected one, since they are compared; name "
            "a metric that all of them measure, or make a table for each",
        )
        for name, config in self.configs.items():
            measured = _metrics(config)
            self._require(
                not metric or metric in measured,
                f"metric = {metric!r}: row {name!r} measures {', '.join(measured)}, expected "
                f"one of these{did_you_mean(metric, measured)} Correct it",
            )

    def _check_evaluation(self) -> None:
        """Raise ValueError if a personalised row and the others are not comparable."""
        personal = [name for name, x in self.configs.items() if METHODS[x.method].personalised]
        self._require(
            not (personal and self.table.spectra),
            f"spectra: rows {personal} have another update for each client, expected rows with "
            "one model for all; take spectra away",
        )
        evaluations = {
            name: f"evaluate-on={x.evaluate_on} validation-share={x.validation_share:g}"
            for name, x in self.configs.items()
        }
        self._require(
            not personal or len({*evaluations.values()}) == 1,
            f"its rows are measured on different examples ({evaluations}), expected the same for "
            "all; set evaluate-on: clients and validation-share: 0.2 in the study's settings",
        )

    def _check_equal_parameters(self) -> None:
        """Raise ValueError if the rows' numbers of trained parameters differ by more than 5 %."""
        from ravan_flwr.training.cost import adapter_parameters  # noqa: PLC0415 (imports torch)

        numbers = {
            name: adapter_parameters(config)
            for name, config in self.configs.items()
            if name not in self.table.references
        }
        problem = f"equal-parameters has rows {list(numbers)}, expected at least two"
        self._require(len(numbers) > 1, problem)
        gap = 1 - min(numbers.values()) / max(numbers.values())
        listed = ", ".join(f"{name} {number:,}" for name, number in numbers.items())
        self._require(
            gap <= TOLERANCE,
            f"it has equal-parameters, but its rows' numbers of parameters differ by "
            f"{100 * gap:.1f} % ({listed}), expected at most {100 * TOLERANCE:.0f} %; change "
            "lora-rank, heads or rank, name references, or take equal-parameters away",
        )

    def _check_last(self, key: str, last: int | None, bound: Callable[..., int]) -> None:
        """Raise ValueError if `last` exceeds the evaluations of the row with most, or fewest."""
        times = (math.ceil(x.num_rounds / x.eval_every) for x in self.configs.values())
        max_last = bound(times, default=0)
        self._require(
            last is None or 2 <= last <= max_last,
            f"{key} = {last}, expected 2 evaluations or more, and no more than the {max_last} of a "
            "row's run; change it, or eval-every",
        )
