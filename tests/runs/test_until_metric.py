"""A run ends when its metric reaches a value, with a result, and not before."""

import json
from typing import Any

import pytest

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.reports.run_view import view_of
from ravan_flwr.runs.history import RecordedRun
from ravan_flwr.server.stop_conditions import check_limits, reached
from ravan_flwr.specs import Scalar

QUICK: dict[str, Scalar] = {
    "lora-rank": 2, "local-steps": 1, "batch-size": 8, "num-rounds": 3, "learning-rate": 1e-3,
    "report": False, "tracking": "none", "clients-per-round": 2,
}  # fmt: skip


def rounds(run):
    return [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_round_that_reaches_the_value_is_the_last(tmp_path, capsys):
    """The value is the larger accuracy of the first two rounds of an unbounded run."""
    settings = QUICK | {"output-dir": str(tmp_path)}
    unbounded = simulate(settings, 4)
    measured = [record["metrics"]["accuracy"] for record in rounds(unbounded)]
    value = max(measured[:2])
    first = next(n for n, accuracy in enumerate(measured, 1) if accuracy >= value)
    run = simulate(settings | {"until-metric": value}, 4)
    records = rounds(run)
    assert [record["metrics"] for record in records] == [
        record["metrics"] for record in rounds(unbounded)[:first]
    ]
    assert [record.get("reached") for record in records] == [None] * (first - 1) + [value]
    assert run.summary["rounds"] == run.summary["reached"] == first
    assert run.summary["until-metric"] == value
    assert "reached" not in unbounded.summary.keys() | rounds(unbounded)[-1].keys()
    assert (run.run_dir / "adapter" / "adapter_config.json").is_file()
    message = (
        f"until-metric = {value:g}: reached in round {first} (accuracy {value:.4f}); the run ends"
    )
    assert message in capsys.readouterr().out
    facts = view_of(RecordedRun.read(run.run_dir))["facts"]
    assert facts["until-metric"] == f"{value:g}, reached in round {first}"

    same = simulate(settings | {"until-metric": value, "resume": str(run.run_dir)}, 4)
    assert same.summary["rounds"] == first
    assert message in capsys.readouterr().out
    assert (
        simulate({"resume": str(run.run_dir)}).summary["rounds"] == first
    )  # the value is the recorded one
    continued = simulate(
        {"resume": str(run.run_dir), "until-metric": 0}
    )  # 0 removes the value: all rounds run
    assert continued.summary["rounds"] == 3
    assert "reached" not in continued.summary


@pytest.mark.slow
def test_only_evaluated_rounds_count_and_a_missed_value_gives_a_warning(tmp_path, capsys):
    settings = QUICK | {"until-metric": 1e-6, "eval-every": 2, "output-dir": str(tmp_path)}
    assert simulate(settings, 4).summary["reached"] == 2
    not_reached = simulate(settings | {"until-metric": 1, "num-rounds": 2}, 4)
    assert not_reached.summary["rounds"] == 2
    assert not_reached.summary["until-metric"] == 1
    assert "reached" not in not_reached.summary
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
        ("accuracy", 85, "the metric is accuracy, expected a fraction, 1 at most; .* write 0.85?"),
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
        simulate(QUICK | {"until-metric": 85.0, "output-dir": str(tmp_path)}, 4)
    assert not list(tmp_path.iterdir())


def test_a_negative_value_is_refused():
    with pytest.raises(ValueError, match="until-metric = -1: expected a number at least 0"):
        read_config({"until-metric": -1})
