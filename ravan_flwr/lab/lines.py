"""Compare the rows of a table: means over seeds, differences paired by seed, the best rows."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ravan_flwr.lab.choosing import RateChoice, choose, list_runs, runs_as_good
from ravan_flwr.lab.results import Interval, Result, Results, difference, holm, interval
from ravan_flwr.lab.spec import PlannedRun, Table
from ravan_flwr.tasks import get_sign


@dataclass(frozen=True)
class Line:
    """A row of a table, with the results of its seeds that are done."""

    table: Table
    row: str
    metric: str
    results: Mapping[int, Result]  # by seed
    values: Mapping[int, float]  # of the metric
    as_good: Mapping[float, Mapping[int, float]]  # values by rate, of the other rates as good
    seeds: int  # number of seeds in the study
    choice: RateChoice | None  # of the rate, if it is chosen from a grid
    difference: Interval | None = None  # to the row `against`
    late: Interval | None = None  # to that row, of the means of the last evaluations
    change: Interval | None = None  # from the same row of the table `change-from`
    p_holm: float | None = None  # p-value of a planned contrast, corrected by Holm's method
    robust: bool = False  # better, or worse, with any of the rates as good?
    best: bool = False  # the best row, or not significantly different from it

    @classmethod
    def of(cls, table: Table, name: str, results: Results) -> "Line | None":
        """Return a row's line; None if no run is done, or a run ended too early for a value."""
        row, last = table.rows[name], table.mean_of_last or 0
        by_seed = _by_seed(list_runs(row, results), results)
        if not by_seed or any(x.ended_too_early(table.metric, last) for x in by_seed.values()):
            return None

        def measure(by_seed: Mapping[int, Result]) -> dict[int, float]:
            return {
                seed: result.value(table.metric, last)
                for seed, result in by_seed.items()
                if not result.ended_too_early(table.metric, last)
            }

        return cls(
            table=table,
            row=name,
            metric=table.metric or next(iter(by_seed.values())).metric,
            results=by_seed,
            values=measure(by_seed),
            as_good={
                rate: measure(_by_seed(runs, results))
                for rate, runs in runs_as_good(row, results).items()
            },
            seeds=len(row.seeds),
            choice=choose(row, results),
        )

    @property
    def first(self) -> Result:
        return next(iter(self.results.values()))

    @property
    def competes(self) -> bool:
        return self.row not in self.table.references

    @property
    def interval(self) -> Interval:
        return interval(list(self.values.values()))

    @property
    def merit(self) -> float:
        """Return the mean with a sign such that larger is better."""
        return get_sign(self.metric) * self.interval.mean

    def average(self, name: str) -> float | None:
        """Return the mean over seeds of a field of the results; None if a run did not record it."""
        numbers = [getattr(result, name) for result in self.results.values()]
        return None if None in numbers else statistics.mean(numbers)

    def change_in(self, results: Results) -> Interval | None:
        """Return the difference from the row of the same name in the table `change-from`."""
        base = self.table.change_from
        if base is None or self.row not in base.rows:
            return None
        line = Line.of(base, self.row, results)
        return difference(self.values, line.values) if line else None

    def compared_to(self, reference: "Line") -> "Line":
        """Return the line with its differences to a row; `late` too, if `compare-last` is set."""
        last = self.table.compare_last
        values, reference_values = ([x.values, *x.as_good.values()] for x in (self, reference))
        standings = {self._standing(difference(a, b)) for a, b in product(values, reference_values)}
        return replace(
            self,
            difference=difference(self.values, reference.values),
            late=difference(self._late(last), reference._late(last)) if last else None,
            robust=standings in ({"better"}, {"worse"}),
        )

    def _late(self, last: int) -> dict[int, float]:
        """Return the mean of the last evaluations by seed, of runs that have at least `last`."""
        return {
            seed: statistics.mean(course[-last:])
            for seed, result in self.results.items()
            if len(course := result.curve.get(self.metric, [])) >= last
        }

    @property
    def standing(self) -> str:
        """Return "better", "worse" or "alike", to the row `against`; "" without an interval."""
        return self._standing(self.difference)

    def _standing(self, difference: Interval | None) -> str:
        if difference is None or difference.contains_zero is None:
            return ""
        if difference.contains_zero:
            return "alike"
        return "better" if get_sign(self.metric) * difference.mean > 0 else "worse"

    def shift(self, rate: float) -> Interval | None:
        """Return the difference that another of the rates as good makes to the values."""
        return difference(self.as_good[rate], self.values)


def _by_seed(runs: Sequence[PlannedRun], results: Results) -> dict[int, Result]:
    by_seed = {int(dict(run.settings)["seed"]): results.of(run) for run in runs}
    return {seed: result for seed, result in by_seed.items() if result is not None}


def compare_rows(table: Table, results: Results) -> list[Line]:
    """Return the table's lines, compared, of the rows with at least one finished run."""
    lines = [line for name in table.rows if (line := Line.of(table, name, results)) is not None]
    reference = next((line for line in lines if line.row == table.against), None)
    best = max((line for line in lines if line.competes), key=lambda x: x.merit, default=None)
    lines = [
        replace(
            line if reference is None or line is reference else line.compared_to(reference),
            change=line.change_in(results),
            best=line.competes and best is not None and _is_as_good(line, best),
        )
        for line in lines
    ]
    p_values = {x.row: x.difference.p for x in lines if x.difference and x.difference.p is not None}
    corrected = holm({name: p_values.get(name, 1.0) for name in table.contrasts})
    return [
        replace(line, p_holm=corrected.get(line.row)) if line.row in p_values else line
        for line in lines
    ]


def runs_without_value(table: Table, results: Results) -> dict[str, str]:
    """Return texts by row, "1 of 3 runs": the runs that ended too early for a value."""
    counts, last = {}, table.mean_of_last or 0
    for name, row in table.rows.items():
        run_results = _by_seed(list_runs(row, results), results).values()
        if number := sum(result.ended_too_early(table.metric, last) for result in run_results):
            counts[name] = f"{number} of {len(run_results)} runs"
    return counts


def _is_as_good(line: Line, best: Line) -> bool:
    """Return whether no significant difference to the best exists; without interval, a tie."""
    gap = difference(line.values, best.values)
    if gap is None or gap.contains_zero is None:
        return line.merit == best.merit
    return gap.contains_zero


_STANDINGS = {
    "better": "Significantly better than {}: {}.",
    "worse": "Significantly worse than {}: {}.",
    "alike": "Not significantly different from {}: {}.",
}


def sentence(table: Table, lines: Sequence[Line]) -> str:
    """Return sentences on significantly better and worse rows (95 % intervals), and on faults."""
    named = {standing: [x.row for x in lines if x.standing == standing] for standing in _STANDINGS}
    texts = [
        _STANDINGS[standing].format(table.against, ", ".join(x))
        for standing, x in named.items()
        if x
    ]
    # Are all runs done with the rates that are as good?
    complete = [len(values) == line.seeds for line in lines for values in line.as_good.values()]
    if not texts and len(lines) > 1:
        reference = next((x.values for x in lines if x.row == table.against), None)
        texts = [f"Row {table.against} is not done, so that there are no differences."]
        if reference is not None:
            number = min(len(x.values.keys() & reference.keys()) for x in lines)
            seeds = "one seed" if number == 1 else f"{number} seeds"
            texts = [f"With {seeds} there is no interval, so no row is called better than another."]
    elif (named["better"] or named["worse"]) and complete and all(complete):
        robust = ", ".join(line.row for line in lines if line.robust) or "none"
        texts.append(
            f"With any of the rates that are as good, of both rows, this holds for: {robust}."
        )
    if table.contrasts:
        p_values = {x.row: x.p_holm for x in lines if x.p_holm is not None}
        rows = [row for row, p in p_values.items() if p < 0.05]
        number = len(table.contrasts)
        texts.append(
            f"Significantly different from {table.against} with Holm's correction over the "
            f"{number} planned contrast{'s' * (number != 1)}: {', '.join(rows) or 'none'}."
        )
        if missing := ", ".join(name for name in table.contrasts if name not in p_values):
            texts.append(f"Planned contrasts without a result: {missing}.")
    rejected = [(x.row, sum(r.rejected or 0 for r in x.results.values())) for x in lines]
    if counts := ", ".join(f"{row} {number}" for row, number in rejected if number):
        texts.append(f"Rejected or missing replies: {counts}.")
    return " ".join(texts)
