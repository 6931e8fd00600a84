"""Choose a rate for each row of a study, by the same procedure and budget for all rows.

A rate is a learning rate, or a value of the key that the row's table names.

All rates of the grid are measured with the same seeds, on a validation split. While the best rate
is the largest or smallest tried, the grid is extended beyond it, up to `extensions` times. The
choice is a function of the results: the same results give the same choice.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ravan_flwr.config.keys import KEYS
from ravan_flwr.lab.results import Result, Results, interval
from ravan_flwr.lab.spec import RATE, Grid, PlannedRun, Row, Study, Table
from ravan_flwr.tasks import get_sign

_HALF_DECADE = (2.9, 3.5)  # bounds of a step of two rates a decade: 3 or 10 / 3


@dataclass(frozen=True)
class Score:
    """The metric and the loss that a rate reached, by seed."""

    metric: str
    values: list[float]
    losses: list[float]  # empty if no loss was measured

    @classmethod
    def of(cls, results: Sequence[Result], metric: str = "", last: int = 0) -> "Score":
        """Return the score of the results of one rate's runs."""
        losses = [result.final["loss"] for result in results if "loss" in result.final]
        values = [result.value(metric, last) for result in results]
        return cls(metric or results[0].metric, values, losses)

    def __str__(self) -> str:
        half_width = interval(self.values).half_width
        return f"{self.mean:.4f}" + ("" if half_width is None else f" ± {half_width:.4f}")

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def sort_key(self) -> tuple[float, float]:
        """Return a key that sorts by the mean metric, ties by the smaller loss."""
        return get_sign(self.metric) * self.mean, -statistics.mean(self.losses or [0.0])

    def without(self, number: int) -> "Score":
        """Return the score without one seed, given by its position."""
        values, losses = ([*x[:number], *x[number + 1 :]] for x in (self.values, self.losses))
        return Score(self.metric, values, losses)

    def beats(self, other: "Score") -> bool:
        """Return whether this score is significantly better than the other.

        The 95 % interval of the differences, paired by seed, must be above zero. Fewer than three
        seeds have no interval: then the means decide, ties by the smaller loss.
        """
        pairs = zip(self.values, other.values, strict=True)
        difference = interval([get_sign(self.metric) * (a - b) for a, b in pairs])
        if difference.contains_zero is None:
            return self.sort_key > other.sort_key
        return difference.mean > 0 and not difference.contains_zero


Scores = Mapping[float, Score]  # by rate


def ranked(scores: Scores) -> list[float]:
    """Return the rates, the best first; of ties the smaller first."""
    return sorted(scores, key=lambda rate: (*scores[rate].sort_key, -rate), reverse=True)


def rates_as_good(scores: Scores) -> list[float]:
    """Return the rates that are not significantly worse than the best, in ascending order."""
    best = scores[ranked(scores)[0]]
    return sorted(rate for rate, score in scores.items() if not best.beats(score))


def grid_around(rate: float) -> list[float]:
    """Return a rate, and those half a decade below and above it, within the key's range.

    They are neighbours in 1, 3, 10, 30, ... if the rate is of this series. Another rate keeps its
    own digits in every decade: 1.7e-5, 5e-5, 1.7e-4.
    """
    digits = rate / 10.0 ** math.floor(math.log10(rate) + 1e-9)
    above = float(f"{rate * (3 if digits < 2.5 else 10 / 3):.1e}")
    rates = (above / 10, rate, above)
    return [float(f"{value:.12g}") for value in rates if _is_allowed(value, RATE)]


def rate_beyond(best: float, tried: Collection[float], key: str = RATE) -> float | None:
    """Return the next rate beyond the best if it is the largest or smallest tried; else None."""
    ordered = sorted(tried)
    if len(ordered) < 2 or best not in (ordered[0], ordered[-1]) or ordered[0] <= 0:
        return None
    neighbour = ordered[-2] if best == ordered[-1] else ordered[1]
    step = best / neighbour
    if _HALF_DECADE[0] < max(step, 1 / step) < _HALF_DECADE[1]:  # a decade from the neighbour
        further = float(f"{neighbour * (10 if step > 1 else 0.1):.12g}")
    else:
        further = float(f"{best * step:.2g}")
    return further if _is_allowed(further, key) else None


def _is_allowed(rate: float, name: str) -> bool:
    """Return whether this rate is in the key's range."""
    key = KEYS[name]
    return key.above < rate <= key.high


@dataclass(frozen=True)
class RateChoice:
    """The measurements of a row's rates so far, and the choice that results from them."""

    grid: Grid
    tried: list[float]  # ascending
    scores: dict[float, Score]  # of the rates whose seeds are all done
    pending: bool  # are some of these runs still to be done?

    @property
    def runs(self) -> int:
        """Return the number of runs of all rates."""
        return len(self.tried) * len(self.grid.seeds)

    @property
    def rate(self) -> float | None:
        """Return the best rate; None if none is measured."""
        return ranked(self.scores)[0] if self.scores else None

    @property
    def by_seed(self) -> dict[int, float] | None:
        """Return each seed's rate, best by the other seeds; None with a validation split."""
        if self.grid.validation_share is not None or not self.scores:
            return None
        best = (ranked(scores)[0] for scores in _leave_one_out(self.grid, self.scores))
        return dict(zip(self.grid.seeds, best, strict=True))

    @property
    def at_the_edge(self) -> bool:
        chosen = self.by_seed.values() if self.by_seed else [self.rate]
        return any(rate in (self.tried[0], self.tried[-1]) for rate in chosen)

    @property
    def within_noise(self) -> list[float]:
        """Return the rates that are not significantly worse than the best, and the best."""
        return rates_as_good(self.scores) if self.scores else []

    @property
    def alternatives(self) -> list[float]:
        """Return the rates that are not significantly worse than the best, without the best."""
        return [rate for rate in self.within_noise if rate != self.rate]


def choose(row: Row, results: Results) -> RateChoice | None:
    """Choose the rate of a row from the results so far; None if its settings fix the rate."""
    row = row.rate_source or row
    if (grid := row.grid) is None:
        return None
    tried, scores, pending = list[float](), dict[float, Score](), False
    rates = list(grid.values)
    while rates:
        for rate in rates:
            runs = row.candidates(rate)
            done = [result for run in runs if (result := results.of(run)) is not None]
            short = any(result.ended_too_early(grid.metric, grid.last) for result in done)
            if len(done) == len(runs) and not short:
                scores[rate] = Score.of(done, grid.metric, grid.last)
            pending |= any(not (results.of(run) or results.failure(run)) for run in runs)
        tried = sorted([*tried, *rates])
        may_extend = len(tried) - len(grid.values) < grid.extensions and not pending
        rates = _extension(grid, scores, tried) if may_extend else []
    return RateChoice(grid, tried, scores, pending)


def _leave_one_out(grid: Grid, scores: Scores) -> Iterator[Scores]:
    """Yield the scores without each seed; with a validation split, once those of all seeds."""
    if grid.validation_share is not None:
        yield scores
        return
    for number in range(len(grid.seeds)):
        yield {rate: score.without(number) for rate, score in scores.items()}


def _extension(grid: Grid, scores_of_rates: Scores, tried: Sequence[float]) -> list[float]:
    """Return the rate to try in addition, if a best rate is an edge of those tried."""
    for scores in _leave_one_out(grid, scores_of_rates):
        best, *others = ranked(scores) or [math.nan]
        # Ties of the best mean are no evidence that a rate beyond is better.
        alone = all(scores[rate].mean != scores[best].mean for rate in others)
        if scores and alone and (next_rate := rate_beyond(best, tried, grid.key)) is not None:
            return [next_rate]
    return []


def choose_all(table: Table, results: Results) -> dict[str, RateChoice]:
    """Return the choice of each row that chooses in this table and has a measured rate."""
    if table.rates_of:
        return {}
    choices = {name: choose(row, results) for name, row in table.rows.items()}
    return {name: choice for name, choice in choices.items() if choice and choice.scores}


def list_runs(row: Row, results: Results) -> list[PlannedRun]:
    """Return a row's runs for its table; none while its rate is not chosen."""
    choice = choose(row, results)
    if choice is None:
        return row.runs()
    return [] if choice.rate is None else row.runs(choice.by_seed or choice.rate)


def runs_as_good(row: Row, results: Results) -> dict[float, list[PlannedRun]]:
    """Return a row's runs with the other rates that are as good, by rate, if `run-as-good`."""
    choice = choose(row, results) if row.run_as_good else None
    return {rate: row.runs(rate) for rate in choice.alternatives} if choice else {}


def candidates(study: Study, results: Results) -> list[PlannedRun]:
    """Return the runs from which rates are chosen, each once, as far as they are known."""
    choices = ((row.rate_source or row, choose(row, results)) for row in study.rows)
    return unique_runs(
        run
        for row, choice in choices
        for rate in (choice.tried if choice else ())
        for run in row.candidates(rate)
    )


def table_runs(study: Study, results: Results) -> list[PlannedRun]:
    """Return the runs of the tables, each once, as far as rates are chosen."""
    best = (run for row in study.rows for run in list_runs(row, results))
    alternatives = (runs for row in study.rows for runs in runs_as_good(row, results).values())
    return unique_runs(chain(best, chain.from_iterable(alternatives)))


def unique_runs(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Drop duplicates: runs whose settings are equal, in any order."""
    return list({run.name: run for run in runs}.values())
