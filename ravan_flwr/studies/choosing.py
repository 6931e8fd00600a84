"""Choose a rate for each row of a study, the same way and with the same effort for all.

That is the learning rate, or a value of the key that the row's table names.

All rates of the grid are measured with the same seeds, on a validation split. While the best is the
largest or smallest of those tried, the next of the grid is measured as well, a number of times at
most. A grid may have several rungs: few seeds and rounds first, more of both for the better rates
(successive halving). All of it follows from the results, so that it is the same whenever it is
asked.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ravan_flwr.config.keys import KEYS
from ravan_flwr.studies.results import Result, Results, interval
from ravan_flwr.studies.spec import RATE, Grid, PlannedRun, Row, Rung, Study, Table
from ravan_flwr.tasks import sign_of

_IN_HALVES = (2.9, 3.5)  # steps of a grid with two rates a decade: 3 and 10 / 3


@dataclass(frozen=True)
class Score:
    """Hold what a rate has reached, by seed."""

    metric: str
    values: list[float]
    losses: list[float]  # empty where none is measured

    @classmethod
    def of(cls, results: Sequence[Result], metric: str = "", last: int = 0) -> "Score":
        """Read it from the results of one rate's runs."""
        losses = [result.final["loss"] for result in results if "loss" in result.final]
        values = [result.value(metric, last) for result in results]
        return cls(metric or results[0].metric, values, losses)

    def __str__(self) -> str:
        spread = f" ± {statistics.stdev(self.values):.4f}" if len(self.values) > 1 else ""
        return f"{self.mean:.4f}{spread}"

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def order(self) -> tuple[float, float]:
        """Compare by the mean metric, of equals by the smaller loss."""
        return sign_of(self.metric) * self.mean, -statistics.mean(self.losses or [0.0])

    def without(self, number: int) -> "Score":
        """Leave one seed out."""
        values, losses = ([*x[:number], *x[number + 1 :]] for x in (self.values, self.losses))
        return Score(self.metric, values, losses)

    def beats(self, other: "Score") -> bool:
        """Tell whether it is better by more than noise.

        That is: the 95 % interval of the differences, paired by seed, lies above zero. Two seeds
        have no interval, and then the better mean beats.
        """
        pairs = zip(self.values, other.values, strict=True)
        difference = interval([sign_of(self.metric) * (a - b) for a, b in pairs])
        if difference.holds_zero is None:
            return self.order > other.order
        return difference.mean > 0 and not difference.holds_zero


Scores = Mapping[float, Score]  # by rate


def ranked(scores: Scores) -> list[float]:
    """List the rates, the best first; of equals the smaller."""
    return sorted(scores, key=lambda rate: (*scores[rate].order, -rate), reverse=True)


def alike(scores: Scores) -> list[float]:
    """List the rates that the best one does not beat by more than noise, from the smallest."""
    best = scores[ranked(scores)[0]]
    return sorted(rate for rate, score in scores.items() if not best.beats(score))


def grid_around(rate: float) -> list[float]:
    """List the rates from a decade below this one to a decade above, as far as the key takes.

    Two rates a decade: 1, 3, 10, 30, ... around such a rate. A rate that is none of these keeps its
    own digits in every decade: 5e-5, 1.7e-4, 5e-4.
    """
    digits = rate / 10.0 ** math.floor(math.log10(rate) + 1e-9)
    between = float(f"{rate * (3 if digits < 2.5 else 10 / 3):.1e}")
    rates = (rate / 10, between / 10, rate, between, rate * 10)
    return [float(f"{value:.12g}") for value in rates if _allowed(value, RATE)]


def beyond(best: float, tried: Collection[float], key: str = RATE) -> float | None:
    """Return the rate to try next where the best is the largest or smallest tried; else None."""
    ordered = sorted(tried)
    if len(ordered) < 2 or best not in (ordered[0], ordered[-1]) or ordered[0] <= 0:
        return None
    neighbour = ordered[-2] if best == ordered[-1] else ordered[1]
    step = best / neighbour
    if _IN_HALVES[0] < max(step, 1 / step) < _IN_HALVES[1]:  # then a decade from the neighbour
        further = float(f"{neighbour * (10 if step > 1 else 0.1):.12g}")
    else:
        further = float(f"{best * step:.2g}")
    return further if _allowed(further, key) else None


def _allowed(rate: float, name: str) -> bool:
    """Tell whether the key takes this rate."""
    key = KEYS[name]
    return key.above < rate <= key.high


@dataclass(frozen=True)
class Measured:
    """Hold the rates of a rung, and the scores of those of which every seed is done."""

    rung: Rung
    rates: list[float]
    scores: dict[float, Score]


@dataclass(frozen=True)
class RateChoice:
    """Hold what was measured of a row's rates, as far as it is."""

    grid: Grid
    tried: list[float]  # in order
    rungs: list[Measured]
    open: bool  # are some of them still to be run?

    @property
    def scores(self) -> dict[float, Score]:
        """Return the scores of the last rung that has some."""
        return next((measured.scores for measured in reversed(self.rungs) if measured.scores), {})

    @property
    def runs(self) -> int:
        """Count the runs that this takes."""
        return sum(len(measured.rates) * len(measured.rung.seeds) for measured in self.rungs)

    @property
    def rate(self) -> float | None:
        """Return the best; None where none is measured."""
        return ranked(self.scores)[0] if self.scores else None

    @property
    def by_seed(self) -> dict[int, float] | None:
        """Return what each seed takes by the others; None where a validation split decides."""
        if self.grid.validation_share is not None or not self.scores:
            return None
        best = (ranked(view)[0] for view in _views(self.grid, self.rungs[-1].rung, self.scores))
        return dict(zip(self.rungs[-1].rung.seeds, best, strict=True))

    @property
    def seeds(self) -> int:
        """Return with how many seeds each was measured."""
        return len(self.rungs[-1].rung.seeds)

    @property
    def at_the_edge(self) -> bool:
        chosen = self.by_seed.values() if self.by_seed else [self.rate]
        return any(rate in (self.tried[0], self.tried[-1]) for rate in chosen)

    @property
    def within_noise(self) -> list[float]:
        """List the rates that the best does not beat by more than noise, the best too."""
        return alike(self.scores) if self.scores else []

    @property
    def alternatives(self) -> list[float]:
        """List those of them that are not the best."""
        return [rate for rate in self.within_noise if rate != self.rate]


def choose(row: Row, results: Results) -> RateChoice | None:
    """Choose the rate of a row from what is measured; None where its settings say it."""
    row = row.chosen_as or row
    if (grid := row.grid) is None:
        return None
    tried, rungs, open_ = sorted(grid.values), list[Measured](), False
    for rung in grid.rungs:
        rates = ranked(rungs[-1].scores)[: rung.rates] if rungs else list(tried)
        measured = Measured(rung, [], {})
        rungs.append(measured)
        while rates:
            for rate in sorted(rates):
                runs = row.candidates(rate, rung)
                measured.rates.append(rate)
                run_results = [result for run in runs if (result := results.of(run)) is not None]
                complete = len(run_results) == len(runs)
                if complete and not any(result.missed(grid.metric) for result in run_results):
                    measured.scores[rate] = Score.of(run_results, grid.metric, grid.last)
                open_ |= any(not (results.of(run) or results.failure(run)) for run in runs)
            may_extend = len(tried) - len(grid.values) < grid.extensions and not open_
            rates = _following(grid, measured, tried) if may_extend else []
            tried = sorted([*tried, *rates])
        if open_ or not measured.scores:
            break
    return RateChoice(grid, tried, rungs, open_)


def _views(grid: Grid, rung: Rung, scores: Scores) -> Iterator[Scores]:
    """Yield the scores that choices are made by: all seeds, or all but one."""
    if grid.validation_share is not None:
        yield scores
        return
    for number in range(len(rung.seeds)):
        yield {rate: score.without(number) for rate, score in scores.items()}


def _following(grid: Grid, measured: Measured, tried: Sequence[float]) -> list[float]:
    """Return the rate to try as well, where a best one is an edge of all that were tried."""
    for scores in _views(grid, measured.rung, measured.scores):
        best, *others = ranked(scores) or [math.nan]
        # Where several rates reach the same, nothing says that others are better.
        alone = all(scores[rate].mean != scores[best].mean for rate in others)
        if scores and alone and (next_rate := beyond(best, tried, grid.key)) is not None:
            return [next_rate]
    return []


def choices_of(table: Table, results: Results) -> dict[str, RateChoice]:
    """Choose for each row of a table of which at least one rate is measured, for this table."""
    if table.rates_of:
        return {}
    choices = {name: choose(row, results) for name, row in table.rows.items()}
    return {name: choice for name, choice in choices.items() if choice and choice.scores}


def runs_of(row: Row, results: Results) -> list[PlannedRun]:
    """List a row's runs for its table; none where its learning rate is not known."""
    choice = choose(row, results)
    if choice is None:
        return row.runs()
    return [] if choice.rate is None else row.runs(choice.by_seed or choice.rate)


def runs_as_good(row: Row, results: Results) -> dict[float, list[PlannedRun]]:
    """List a row's runs with the other rates that are as good, by rate, where its table asks."""
    choice = choose(row, results) if row.run_as_good else None
    return {rate: row.runs(rate) for rate in choice.alternatives} if choice else {}


def candidates(study: Study, results: Results) -> list[PlannedRun]:
    """List the runs from which learning rates are chosen, each once, as far as they are known."""
    choices = ((row.chosen_as or row, choose(row, results)) for row in study.rows)
    return each_once(
        run
        for row, choice in choices
        for measured in (choice.rungs if choice else ())
        for rate in sorted(measured.rates)
        for run in row.candidates(rate, measured.rung)
    )


def planned(study: Study, results: Results) -> list[PlannedRun]:
    """List the runs of the tables, each once, as far as learning rates are chosen."""
    best = (run for row in study.rows for run in runs_of(row, results))
    alternatives = (runs for row in study.rows for runs in runs_as_good(row, results).values())
    return each_once(chain(best, chain.from_iterable(alternatives)))


def each_once(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Drop runs that mean the same, in whatever order their settings stand."""
    return list({run.name: run for run in runs}.values())
