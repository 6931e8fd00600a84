"""A run ends when its metric reaches a value, with a result, and not before."""

import functools
from typing import Any

import pytest

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.results.report import describe_run
from ravan_flwr.runs.history import RecordedRun
from ravan_flwr.server.stop_conditions import check_limits, reached
from tests import short_runs
from tests.short_runs import records_of

QUICK = {"local-steps": 1, "num-rounds": 3, "learning-rate": 1e-3, "clients-per-round": 2}
run = functools.partial(short_runs.run, clients=4, settings=QUICK)


@pytest.mark.slow
def test_the_round_that_reaches_the_value_is_the_last(tmp_path, capsys):
    """The value is the larger accuracy of the first two rounds of an unbounded run."""
    unbounded = run(tmp_path)
    expected = [record["metrics"] for record in records_of(unbounded)]
    measured = [metrics["accuracy"] for metrics in expected]
    value = max(measured[:2])
    first = next(n for n, accuracy in enumerate(measured, 1) if accuracy >= value)
    ended = run(tmp_path, until_metric=value)
    records = records_of(ended)
    assert [record["metrics"] for record in records] == expected[:first]
    assert [record.get("reached") for record in records] == [None] * (first - 1) + [value]
    assert ended.summary["rounds"] == ended.summary["reached"] == first
    assert ended.summary["until-metric"] == value
    assert "reached" not in unbounded.summary.keys() | records_of(unbounded)[-1].keys()
    assert (ended.run_dir / "adapter" / "adapter_config.json").is_file()
    message = f"until-metric = {value:g}: reached in round {first} (accuracy {value:.4f})"
    assert message in capsys.readouterr().out
    facts = describe_run(RecordedRun.read(ended.run_dir))["facts"]
    assert facts["until-metric"] == f"{value:g}, reached in round {first}"

    resume = str(ended.run_dir)
    assert run(tmp_path, until_metric=value, resume=resume).summary["rounds"] == first
    assert message in capsys.readouterr().out
    # The value is the recorded one; 0 removes it, so that all rounds run.
    assert simulate({"resume": resume}).summary["rounds"] == first
    continued = simulate({"resume": resume, "until-metric": 0})
    assert continued.summary["rounds"] == 3
    assert "reached" not in continued.summary


@pytest.mark.slow
def test_only_evaluated_rounds_count_and_a_missed_value_gives_a_warning(tmp_path, capsys):
    assert run(tmp_path, until_metric=1e-6, eval_every=2).summary["reached"] == 2
    summary = run(tmp_path, until_metric=1, eval_every=2, num_rounds=2).summary
    assert (summary["rounds"], summary["until-metric"]) == (2, 1)
    assert "reached" not in summary
    assert "warning: until-metric = 1 was not reached" in capsys.readouterr().out


def test_a_perplexity_is_reached_from_above():
    records: list[Any] = [
        {"round": number, "metrics": {"perplexity": value} if value else {}}
        for number, value in enumerate((25.0, 0.0, 20.0, 30.0), start=1)
    ]
    config = read_config({"until-metric": 20.0})
    assert reached(config, "perplexity", records) is records[2]
    reached_alone = [reached(config, "perplexity", [record]) is not None for record in records]
    assert reached_alone == [False, False, True, False]
    assert reached(read_config({"until-metric": 19.0}), "perplexity", records) is None
    assert reached(read_config({}), "perplexity", records) is None


@pytest.mark.parametrize(
    ("metric", "value", "message"),
    [
        ("accuracy", 85, "the metric is accuracy, expected a fraction.* write 0.85?"),
        ("f1", 1.01, "the metric is f1, expected a fraction"),
        ("perplexity", 0.5, "the metric is perplexity, expected 1 or more"),
    ],
)
def test_an_impossible_value_is_refused(metric, value, message):
    config = read_config({"until-metric": value})
    with pytest.raises(ValueError, match=f"until-metric = {value:g}: {message}"):
        check_limits(config, metric, [])


def test_a_refused_value_leaves_no_directory(tmp_path):
    with pytest.raises(ValueError, match="until-metric = 85: the metric is accuracy"):
        run(tmp_path, until_metric=85.0)
    assert not list(tmp_path.iterdir())
