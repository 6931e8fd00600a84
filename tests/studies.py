"""Made-up results of runs, for tests of studies."""

from ravan_flwr.lab.choosing import candidates, choose, table_runs
from ravan_flwr.lab.results import Result


def result(value, metric="accuracy", rate=1e-3, **changes):
    """Return the result of a run of two rounds that ended with this value."""
    fields = {
        "metric": metric, "final": {metric: value, "loss": 1.0}, "learning_rate": rate,
        "rank": 4, "parameters": 100, "bytes_up": 1_000_000, "bytes_down": 2_000_000,
        "seconds": 9.0, "client_seconds": 8.0,
        "curve": {
            "round": [1, 2], "bytes": [1.5e6, 3e6], "client-seconds": [4.0, 8.0],
            metric: [value / 2, value],
        },
    }  # fmt: skip
    return Result(**fields | changes)


def fill(study, results, value_of, metric="accuracy"):
    """Store a result for each run of a study, learning rates first, until none is missing."""
    for runs in (candidates, table_runs):
        while missing := [run for run in runs(study, results) if results.of(run) is None]:
            if all(results.failure(run) for run in missing):
                break
            for run in missing:
                settings = dict(run.settings)
                value = value_of(settings)
                if value is None:
                    results.add_failure(run, "it diverged")
                    continue
                rate = settings.get("learning-rate", 1e-3)
                results.add(run, result(value, metric, rate))


def chosen(row, results):
    """Return the choice of a row that chooses its learning rate."""
    choice = choose(row, results)
    assert choice is not None
    return choice


def ends(interval):
    """Return an interval's bounds."""
    assert interval is not None
    assert interval.half_width is not None
    return interval.mean - interval.half_width, interval.mean + interval.half_width


def found(results, run):
    """Return the result of a finished run."""
    result = results.of(run)
    assert result is not None
    return result
