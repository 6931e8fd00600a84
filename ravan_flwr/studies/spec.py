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
"""

import hashlib
import json
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ravan_flwr.config.key_values import as_key_values
from ravan_flwr.config.keys import NOT_OF_RESULT
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import Scalar
from ravan_flwr.studies.rates import RATE

OVERVIEW = "overview"  # in a page: all tables in one
HELD_BACK = 0.2  # the share of its examples that a client holds back while rates are chosen
# A run that is done is the one that is meant, whatever these are: a rank that was "auto" has
# become a number.
_NO_MATTER = NOT_OF_RESULT | {"rank"}
ENGINES = {"process": "simulate", "flower": "run"}  # and the commands that run them


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: settings, seed included, and the number of clients.

    `here` has what this machine adds, such as the folder of the data: the run is the same with it.
    """

    settings: tuple[tuple[str, Scalar], ...]
    num_clients: int
    here: tuple[tuple[str, Scalar], ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """Name the folder: the same for the same run, whatever table it stands in."""
        text = json.dumps([sorted(self.settings), self.num_clients])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def command(self, folder: Path, engine: str) -> list[str]:
        """Build the command that a person would type to run this alone, without a report."""
        settings: dict[str, Scalar] = {"report": False, "tracking": "none"}
        settings |= dict(self.settings) | dict(self.here)
        settings |= {"num-clients": self.num_clients, "output-dir": str(self.folder(folder))}
        return [sys.executable, "-m", "ravan_flwr", ENGINES[engine], *as_key_values(settings)]

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

    @property
    def num_rounds(self) -> int:
        """Return how many rounds it takes."""
        return int(self.resolved["num-rounds"])


@dataclass(frozen=True)
class Row:
    """A row of a table: settings that are run with several seeds."""

    settings: dict[str, Scalar]
    num_clients: int
    seeds: list[int]
    rates: list[float]  # the values of `chosen` to choose from; empty: the settings say it
    rate_seeds: list[int]
    extensions: int = 0  # how many rates may be added to them
    chosen_as: "Row | None" = None  # the row of another table whose rate it takes
    chosen: str = RATE  # the key
    run_as_good: bool = False  # with the rates that are as good as the best, too?
    here: dict[str, Scalar] = field(default_factory=dict)  # see PlannedRun

    def candidates(self, rate: float) -> list[PlannedRun]:
        """List the runs that measure how good a rate is."""
        if self.chosen_as is not None:
            return self.chosen_as.candidates(rate)
        held_back: dict[str, Scalar] = {
            self.chosen: rate,
            "evaluate-on": "clients",
            "validation-share": HELD_BACK,
            "eval-every": read_config(own_preset(self.settings)).num_rounds,
        }
        return self._runs(held_back, self.rate_seeds)

    def runs(self, rate: float | None = None) -> list[PlannedRun]:
        """List the runs of the table, one a seed, with that learning rate or with the settings'."""
        return self._runs({} if rate is None else {self.chosen: rate}, self.seeds)

    def _runs(self, more: dict[str, Scalar], seeds: list[int]) -> list[PlannedRun]:
        here = tuple(self.here.items())
        return [
            PlannedRun(
                tuple((self.settings | more | {"seed": seed}).items()), self.num_clients, here
            )
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
    rates_of: str = ""  # the table that its learning rates were chosen for, if another
    against: str = ""  # the row that differences are to
    chosen: str = RATE  # the key whose values its rows choose from
    change_from: "Table | None" = None  # whose rows of the same names differences are to as well
    compare_last: int = 0  # of how many evaluations, the last ones, means are compared as well

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


def run_key_values(run: PlannedRun) -> str:
    """Write a run's settings as a person types them."""
    return " ".join(as_key_values(dict(run.settings)))
