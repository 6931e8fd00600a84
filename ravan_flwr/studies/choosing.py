"""Choose a rate for each row of a study, the same way and with the same effort for all.

That is the learning rate, or a value of the key that the row's table names.

All rates of the study's grid are measured with the same seeds, on held-back examples. While the
best is the largest or smallest of those tried, the next of the grid is measured as well, a number
of times at most. All of it follows from the results, so that it is the same whenever it is asked.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from ravan_flwr.studies.results import Results
from ravan_flwr.studies.scores import Score, alike, following, ranked
from ravan_flwr.studies.spec import PlannedRun, Row, Study, Table


@dataclass(frozen=True)
class RateChoice:
    """Hold what was measured of a row's rates, as far as it is."""

    tried: list[float]  # in order
    scores: dict[float, Score]  # of the rates of which every seed is done
    runs: int  # that this takes
    open: bool  # are some of them still to be run?

    @property
    def rate(self) -> float | None:
        """Return the best; None where none is measured."""
        return ranked(self.scores)[0] if self.scores else None

    @property
    def seeds(self) -> int:
        """Return with how many seeds each was measured."""
        return self.runs // len(self.tried)

    @property
    def at_the_edge(self) -> bool:
        return self.rate in (self.tried[0], self.tried[-1])

    @property
    def within_noise(self) -> list[float]:
        """List the rates that the best does not beat by more than noise, the best too."""
        return alike(self.scores) if self.scores else []

    @property
    def others(self) -> list[float]:
        """List those of them that are not the best."""
        return [rate for rate in self.within_noise if rate != self.rate]


def choose(row: Row, results: Results) -> RateChoice | None:
    """Choose the rate of a row from what is measured; None where its settings say it."""
    if not row.rates:
        return None
    scores: dict[float, Score] = {}
    tried, open_ = sorted(row.rates), False
    for rate in tried:
        open_ |= _measure(row, rate, results, scores)
    for _ in range(row.extensions):
        more = None if open_ or not scores else following(scores, tried, row.chosen)
        if more is None:
            break
        tried = sorted([*tried, more])
        open_ = _measure(row, more, results, scores)
    return RateChoice(tried, scores, len(tried) * len(row.rate_seeds), open_)


def _measure(row: Row, rate: float, results: Results, scores: dict[float, Score]) -> bool:
    """Score a rate if all its runs are done; tell whether some are still to be run."""
    runs = row.candidates(rate)
    done = [result for run in runs if (result := results.of(run)) is not None]
    if len(done) == len(runs):
        scores[rate] = Score.of(done)
    return any(results.of(run) is None and results.failure(run) is None for run in runs)


def choices_of(table: Table, results: Results) -> dict[str, RateChoice]:
    """Choose for each row of a table of which at least one rate is measured, for this table."""
    if table.rates_of:
        return {}
    found = {name: choose(row, results) for name, row in table.rows.items()}
    return {name: choice for name, choice in found.items() if choice and choice.scores}


def runs_of(row: Row, results: Results) -> list[PlannedRun]:
    """List a row's runs for its table; none where its learning rate is not known."""
    choice = choose(row, results)
    if choice is None:
        return row.runs()
    return [] if choice.rate is None else row.runs(choice.rate)


def runs_as_good(row: Row, results: Results) -> dict[float, list[PlannedRun]]:
    """List a row's runs with the other rates that are as good, by rate, where its table asks."""
    choice = choose(row, results) if row.run_as_good else None
    return {rate: row.runs(rate) for rate in choice.others} if choice else {}


def candidates(study: Study, results: Results) -> list[PlannedRun]:
    """List the runs from which learning rates are chosen, each once, as far as they are known."""
    return _each_once(run for row in study.rows for run in _candidates(row, results))


def _candidates(row: Row, results: Results) -> Iterator[PlannedRun]:
    choice = choose(row, results)
    for rate in choice.tried if choice else ():
        yield from row.candidates(rate)


def planned(study: Study, results: Results) -> list[PlannedRun]:
    """List the runs of the tables, each once, as far as learning rates are chosen."""
    best = (run for row in study.rows for run in runs_of(row, results))
    others = (runs for row in study.rows for runs in runs_as_good(row, results).values())
    return _each_once(chain(best, chain.from_iterable(others)))


def _each_once(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Drop runs that mean the same, in whatever order their settings stand."""
    return list({run.name: run for run in runs}.values())
