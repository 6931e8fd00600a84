"""Run a tuning, rung by rung: measure rates, keep the better ones, go beyond an edge."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ravan_flwr.studies.clock import Clock, Work
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.running import RunOptions, run_missing
from ravan_flwr.studies.scores import Score, alike, following, ranked
from ravan_flwr.studies.spec import run_key_values
from ravan_flwr.studies.tuning import Rung, Tuning

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """Hold the scores of a rung, by rate."""

    rung: Rung
    scores: dict[float, Score]

    def ranked(self) -> list[float]:
        """List the rates, the best first; of equals the smaller."""
        return ranked(self.scores)

    def alike(self) -> list[float]:
        """List the rates that the best one does not beat by more than noise, from the smallest."""
        return alike(self.scores)


@dataclass
class Choice:
    """Hold what a tuning has measured; after the last rung, the rate that it chose."""

    tuning: Tuning
    folder: Path
    tried: list[float]
    rungs: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # a run's words -> why

    @property
    def rate(self) -> float:
        return self.rungs[-1].ranked()[0]

    @property
    def score(self) -> Score:
        return self.rungs[-1].scores[self.rate]

    @property
    def at_the_edge(self) -> bool:
        return self.rate in (min(self.tried), max(self.tried))


def tune(tuning: Tuning, folder: Path, how: RunOptions) -> Choice:
    """Run what is not done yet; RuntimeError where every rate of a rung failed."""
    choice, results = Choice(tuning, folder, sorted(tuning.rates)), Results(folder)
    clock = Clock(sum((rung.work for rung in tuning.rungs), start=Work()))
    rates: Sequence[float] = tuning.rates
    for rung in tuning.rungs:
        clock.later -= rung.work
        scores = _measure(choice, rung, rates, results, how, clock)
        if not scores:
            first, reason = next(iter(choice.failed.items()))
            raise RuntimeError(f"every learning rate failed; the first: {first}: {reason}")
        while (more := _following(choice, Measured(rung, scores))) is not None:
            log.info("the best is the last of the rates tried: %g as well", more)
            choice.tried.append(more)
            scores |= _measure(choice, rung, [more], results, how, clock)
        measured = Measured(rung, scores)
        choice.rungs.append(measured)
        following = tuning.rungs[len(choice.rungs) : len(choice.rungs) + 1]
        rates = [rate for after in following for rate in measured.ranked()[: after.rates]]
    return choice


def _following(choice: Choice, measured: Measured) -> float | None:
    """Return the rate to try as well, where the best is an edge of all that were tried."""
    tuning = choice.tuning
    if len(choice.tried) - len(tuning.rates) >= tuning.extensions:
        return None
    return following(measured.scores, choice.tried)


def _measure(
    choice: Choice,
    rung: Rung,
    rates: Sequence[float],
    results: Results,
    how: RunOptions,
    clock: Clock,
) -> dict[float, Score]:
    """Run these rates, and score those of which no run failed."""
    scores = {}
    runs = {rate: choice.tuning.runs(rung, rate) for rate in sorted(rates)}
    planned = [run for one in runs.values() for run in one]
    failed = run_missing(str(replace(rung, rates=len(rates))), planned, results, how, clock)
    for run, reason in failed.items():
        choice.failed[run_key_values(run)] = reason
    for rate, one in runs.items():
        done = [result for run in one if (result := results.of(run)) is not None]
        if len(done) == len(one):
            scores[rate] = Score.of(done)
            log.info("  %g: %s %s", rate, scores[rate].metric, scores[rate])
    return scores
