"""Describe a study: a file names rows of settings; every row is run with every seed, once.

    title: ...
    paper: vision                           # optional: numbers of paper/vision.yaml beside ours
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
        metric: accuracy-matched            # optional: another one than the task's
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
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ravan_flwr.config.keys import KEYS, NOT_OF_RESULT, as_key_values
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import Scalar

RATE = "learning-rate"  # what is chosen, where a table of a study does not name another key
EXTENSIONS = 4  # rates that are added at most, one at a time, where the best is an edge
OVERVIEW = "overview"  # in a page: all tables in one
HELD_BACK = 0.2  # the share of its examples that a client holds back while rates are chosen
# A run that is done is the one that is meant, whatever these are: a rank that was "auto" has
# become a number.
_NO_MATTER = NOT_OF_RESULT | {"rank"}
ENGINES = {"process": ["simulate"], "flower": ["simulate", "--engine", "flower"]}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: settings, seed included, and the number of clients.

    `here` has what this machine adds, such as the folder of the data: the run is the same with it.
    """

    settings: tuple[tuple[str, Scalar], ...]
    num_clients: int
    here: tuple[tuple[str, Scalar], ...] = field(default=(), compare=False)

    @cached_property
    def name(self) -> str:
        """Name the folder: the same for the same run, whatever table it stands in."""
        return _digest([sorted(self.settings), self.num_clients])

    def command(self, folder: Path, engine: str) -> list[str]:
        """Build the command that a person would type to run this alone, without a report."""
        settings: dict[str, Scalar] = {"report": False, "tracking": "none"}
        settings |= dict(self.settings) | dict(self.here)
        settings |= {"num-clients": self.num_clients, "output-dir": str(self.folder(folder))}
        return [sys.executable, "-m", "ravan_flwr", *ENGINES[engine], *as_key_values(settings)]

    def folder(self, study: Path) -> Path:
        """Return the folder in which the run's own directory is made."""
        return study / "runs" / self.name

    def directory(self, study: Path) -> Path | None:
        """Find the run's directory, if it is done with the settings as they resolve today."""
        found = sorted(self.folder(study).glob("*/summary.json"))
        if not found:
            return None
        recorded = RunDirectory(found[-1].parent).read_config()
        if not self.resolved["data"]["labels"]:  # the run has found them in its data
            recorded["data"] = {**recorded["data"], "labels": []}
        # A run's own has how many clients there were, which `num_clients` says here.
        compared = self.resolved.keys() - dict(self.here).keys() - {"num-clients"}
        same = all(recorded.get(key) == self.resolved[key] for key in compared)
        return found[-1].parent if same else None

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """Resolve the settings with preset and defaults, without those that change no result."""
        config = read_config(own_preset(dict(self.settings))).as_dict()
        return {key: value for key, value in config.items() if key not in _NO_MATTER}

    @cached_property
    def digest(self) -> str:
        """Hash the settings as they resolve; a key that has its default counts as a new one."""
        return _digest(
            {
                # Of a part such as `data`, where later versions add fields, what is filled counts.
                key: {k: v for k, v in value.items() if v} if isinstance(value, dict) else value
                for key, value in self.resolved.items()
                if key not in KEYS or value != KEYS[key].default
            }
        )

    @property
    def num_rounds(self) -> int:
        """Return how many rounds it takes."""
        given = dict(self.settings).get("num-rounds")
        return given if type(given) is int else int(self.resolved["num-rounds"])

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
    here: dict[str, Scalar] = field(default_factory=dict)  # see PlannedRun

    def candidates(self, rate: float, rung: Rung) -> list[PlannedRun]:
        """List the runs that measure how good a rate is, one a seed."""
        assert self.grid is not None
        more: dict[str, Scalar] = {self.grid.key: rate}
        if self.grid.validation_share is not None:
            more |= {"evaluate-on": "clients", "validation-share": self.grid.validation_share}
            more["eval-every"] = rung.rounds or self._num_rounds
        if rung.rounds is not None:
            more["num-rounds"] = rung.rounds
        return [self._run(more, seed) for seed in rung.seeds]

    def runs(self, rates: float | Mapping[int, float] | None = None) -> list[PlannedRun]:
        """List the runs of the table, one a seed, with that rate, its own, or the settings'."""
        if rates is None:
            return [self._run({}, seed) for seed in self.seeds]
        assert self.grid is not None
        by_seed = rates if isinstance(rates, Mapping) else dict.fromkeys(self.seeds, rates)
        return [self._run({self.grid.key: by_seed[seed]}, seed) for seed in self.seeds]

    @cached_property
    def _num_rounds(self) -> int:
        return read_config(own_preset(self.settings)).num_rounds

    def _run(self, more: dict[str, Scalar], seed: int) -> PlannedRun:
        settings = self.settings | more | {"seed": seed}
        return PlannedRun(tuple(settings.items()), self.num_clients, tuple(self.here.items()))


class Checked(BaseModel):
    """Part of a study file: keys in kebab-case, no others, and each of its own type."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        populate_by_name=True,
        alias_generator=lambda name: name.replace("_", "-"),
    )


def first_wrong(error: ValidationError) -> str:
    """Tell the first thing that is wrong, in one line."""
    first = error.errors()[0]
    place, got = ".".join(map(str, first["loc"])), repr(first["input"])[:80]
    return f"{place}: got {got}: {first['msg']}"


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


class Table(TableOptions):
    """Rows by name."""

    rows: dict[str, Row]
    paper: dict[str, float] = {}  # row -> what the paper has, in percent
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
