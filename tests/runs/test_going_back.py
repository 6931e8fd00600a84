"""A collapsed run reports it, keeps a good checkpoint, and can resume from there."""

import json
import shutil

import pytest
import torch
from flwr.supercore.run import RunNotRunningException

from ravan_flwr import simulate
from ravan_flwr.cli import main
from ravan_flwr.config.presets import preset_file
from ravan_flwr.runs.checkpoint import checkpoint_rounds, load_checkpoint
from ravan_flwr.runs.collapse_detection import best_round, collapse_reason
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.tally import OTHER, Tally

SMALL: dict[str, Scalar] = {
    "num-rounds": 6, "local-steps": 1, "batch-size": 4, "report": False, "tracking": "none",
    "clients-per-round": 2,
}  # fmt: skip


def record_of(number, accuracy=None, loss=1.0):
    metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": loss}
    return {"round": number, "metrics": metrics}


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([0.9], (0.4, 1.0), r"accuracy fell to 0.4, below half of 0.9 in round 1"),
        ([0.9, 0.8, None], (0.1, 1.0), "below half of 0.9 in round 1"),
        ([0.9], (0.46, 1.0), None),
        ([0.12], (0.05, 1.0), None),  # not above chance yet
        ([0.5], (0.5, 2.1), r"loss rose to 2.1, above twice 1 in round 1"),
        ([0.5], (0.5, 1.9), None),
        ([], (0.0, 9.0), None),
        ([0.9], (None, 1.0), None),
    ],
)
def test_a_collapse_follows_the_rule(before, now, expected):
    records = [record_of(number, value) for number, value in enumerate(before, start=1)]
    actual = collapse_reason(records, record_of(9, *now), "accuracy")
    assert (actual is None) if expected is None else (actual is not None and expected in actual)


LABELS = ("tea", "coffee", "cocoa")


def tally_of(right, predicted):
    tally = Tally()
    tally.add(right, predicted)
    return tally


@pytest.mark.parametrize(
    ("right", "predicted", "expected"),
    [
        ([0, 1, 2, 2], [1, 1, 1, 1], "100.0% of predictions are 'coffee'"),
        ([0, 1, 2, 2], [OTHER] * 4, "100.0% of predictions are no label"),
        (
            [1] * 100 + [2] * 300,
            [0, 1] + [2] * 398,
            None,
        ),  # two of a hundred predictions of the other class
        ([1] * 100 + [2] * 300, [2] * 399 + [1], "99.8% of predictions are 'cocoa'"),
        ([1, 1, 1], [1, 1, 1], None),  # there is no other class
        ([0, 1, 2], [2, 1, 1], None),
        ([0, 0, 0, 1], [0, 0, 0, 1], None),
        ([], [], None),
    ],
)
def test_predictions_of_one_class_are_a_collapse(right, predicted, expected):
    tally = tally_of(right, predicted)
    now, earlier = record_of(3, 0.3, 1.0), [record_of(1, 0.3, 1.0)]
    assert collapse_reason(earlier, now, "accuracy", LABELS, tally) == expected
    assert collapse_reason([], now, "accuracy", LABELS, tally) is None  # too early to judge
    assert collapse_reason([], record_of(2, 0.3), "accuracy", LABELS, tally, last=True) is None
    assert collapse_reason([], now, "accuracy", LABELS, tally, last=True) == expected


@pytest.mark.parametrize(("loss", "collapsed"), [(1.0986, False), (1.0987, True)])
def test_a_loss_above_that_of_equal_probabilities_is_a_collapse(loss, collapsed):
    expected = collapse_reason(
        [record_of(1, 0.3, 1.0)], record_of(3, 0.3, loss), "accuracy", LABELS
    )
    assert (expected is not None) == collapsed
    if expected:
        assert expected == "loss is 1.099, above the 1.099 of equal probabilities for 3 classes"
    assert (
        collapse_reason([record_of(1, 0.3, 1.0)], record_of(3, 0.3, loss), "accuracy") is None
    )  # no classes


def test_the_best_round_is_the_earliest_with_the_largest_value():
    assert (
        best_round(
            [
                record_of(1, 0.1),
                record_of(2),
                record_of(3, 0.5),
                record_of(4, 0.5),
                record_of(5, 0.2),
            ],
            "accuracy",
        )
        == 3
    )
    assert best_round([record_of(1)], "accuracy") is None


@pytest.fixture
def measured(monkeypatch):
    """Fake the server's evaluation; return the accuracies that it will give."""
    accuracies = [0.3, 0.8, 0.1, 0.1, 0.1, 0.1]

    def evaluate(*_):
        return {"accuracy": accuracies.pop(0), "loss": 1.0}

    monkeypatch.setattr("ravan_flwr.training.model_and_data.ModelAndData.evaluate", evaluate)
    return accuracies


def records_of(run_dir):
    return [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_collapsed_run_reports_it_and_can_resume_from_its_best_round(tmp_path, measured, capsys):
    settings = SMALL | {"output-dir": str(tmp_path)}
    run = simulate(settings, 3)
    folder = run.run_dir / "checkpoints"
    message = capsys.readouterr().out
    assert "round 3 COLLAPSED: accuracy fell to 0.1, below half of 0.8 in round 2" in message
    # A resume cannot change the learning rate, so it is offered for a false reply only.
    assert "a new run needs a lower learning-rate" in message
    assert f"a false reply, after which resume={run.run_dir}@2 goes back" in message
    assert message.count("COLLAPSED") == 1  # in the first collapsed round only
    assert run.summary["collapsed"] == [3, 4, 5, 6]
    assert ["collapsed" in record for record in records_of(run.run_dir)] == [False] * 2 + [True] * 4
    assert checkpoint_rounds(folder) == [2, 4, 5, 6]
    good = load_checkpoint(folder, 2)

    message = "round 3 has no checkpoint in .*expected one of rounds 2, 4, 5, 6; choose another"
    with pytest.raises(ValueError, match=message):
        simulate(settings | {"resume": f"{run.run_dir}@3"}, 3)
    with pytest.raises(
        RuntimeError, match="IndexError|round 3"
    ):  # the fake evaluation has no values left
        _fail(settings | {"resume": f"{run.run_dir}@2"})
    assert len(records_of(run.run_dir)) == 6  # the failed attempt changed nothing
    assert checkpoint_rounds(folder) == [2, 4, 5, 6]
    assert (run.run_dir / "summary.json").exists()

    measured += [0.81, 0.82, 0.83, 0.84]
    resumed = simulate(settings | {"resume": f"{run.run_dir}@2"}, 3)
    assert [r["round"] for r in records_of(run.run_dir)] == [1, 2, 3, 4, 5, 6]
    assert resumed.summary["collapsed"] == []
    assert resumed.summary["metrics"]["final"]["accuracy"] == 0.84
    assert checkpoint_rounds(folder) == [4, 5, 6]
    assert good.state.keys() == load_checkpoint(folder).state.keys()


@pytest.mark.slow
@pytest.mark.parametrize("evaluate_on", ["server", "clients"])
@pytest.mark.usefixtures("without_charts")
def test_a_run_that_never_learned_reports_a_collapse_in_log_and_report(
    tmp_path, capsys, evaluate_on
):
    """The learning rate is a thousand times too high: no earlier round is better."""
    settings = SMALL | {
        "output-dir": str(tmp_path), "learning-rate": 3.0, "num-rounds": 3, "report": True,
        "validation-share": 0.2, "evaluate-on": evaluate_on,
    }  # fmt: skip
    run = simulate(settings, 3)
    assert 3 in run.summary["collapsed"]
    output = capsys.readouterr().out
    assert "COLLAPSED" in output
    assert "The likely cause is a learning rate that is too high (here 3)" in output
    page = (run.run_dir / "report" / "index.html").read_text()
    assert "The evaluation collapsed in round" in page
    assert "a learning rate that is too high (here 3.0)" in page


@pytest.mark.slow
def test_a_single_evaluation_at_the_end_is_checked_unless_nothing_is_trained(tmp_path):
    settings = SMALL | {"output-dir": str(tmp_path), "learning-rate": 3.0, "num-rounds": 3}
    run = simulate(settings | {"eval-every": 3}, 3)
    assert run.summary["collapsed"] == [3]
    untrained = simulate(settings | {"method": "none", "classifier": "frozen"}, 3)
    assert untrained.summary["collapsed"] == []


@pytest.mark.slow
def test_resuming_at_an_earlier_round_drops_later_rounds(tmp_path):
    settings = SMALL | {"output-dir": str(tmp_path), "num-rounds": 3}
    run = simulate(settings, 3)
    third = load_checkpoint(run.run_dir / "checkpoints", 3).state["H"]
    returned = simulate(settings | {"num-rounds": 2, "resume": f"{run.run_dir}@2"}, 3)
    assert returned.summary["rounds"] == 2
    assert [r["round"] for r in records_of(run.run_dir)] == [1, 2]
    assert not torch.equal(load_checkpoint(run.run_dir / "checkpoints").state["H"], third)
    resumed = simulate(settings | {"resume": str(run.run_dir)}, 3)
    assert resumed.summary["rounds"] == 3
    assert torch.equal(load_checkpoint(run.run_dir / "checkpoints").state["H"], third)


@pytest.mark.slow
def test_a_resumed_run_uses_its_own_settings(tmp_path, monkeypatch, capsys):
    """The run has a user's preset, other settings, and another number of clients."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    text = preset_file("digits-vit").read_text()
    (tmp_path / "conf" / "mine.yaml").write_text(text)
    settings = SMALL | {
        "preset": "conf/mine.yaml", "method": "hetlora", "partition": "iid", "num-rounds": 3,
        "learning-rate": 0.02, "budgets": "uniform", "eval-every": 2, "weighting": "examples",
    }  # fmt: skip
    uninterrupted = simulate(settings, 4)
    stopped = simulate(settings | {"num-rounds": 2}, 4)
    before = json.loads((stopped.run_dir / "config.json").read_text())
    assert (
        simulate({"resume": str(stopped.run_dir)}).summary["rounds"] == 2
    )  # the run's own number of rounds
    capsys.readouterr()
    main(["simulate", f"resume={stopped.run_dir}", "num-rounds=3"])
    assert "no effect" not in capsys.readouterr().out  # no setting is new
    after = json.loads((stopped.run_dir / "config.json").read_text())
    assert after == before | {"num-rounds": 3}
    assert json.loads((stopped.run_dir / "settings.json").read_text())["num-rounds"] == 3
    first, second = (
        load_checkpoint(run.run_dir / "checkpoints") for run in (uninterrupted, stopped)
    )
    assert first.round == second.round == 3
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)
    assert not (stopped.run_dir / "report").exists()
    simulate({"resume": f"{stopped.run_dir}@1", "num-rounds": 1})
    assert [record["round"] for record in records_of(stopped.run_dir)] == [1]

    with pytest.raises(ValueError, match="method: then 'hetlora', now 'fedit'; leave out those"):
        simulate({"resume": str(stopped.run_dir), "method": "fedit"})
    with pytest.raises(ValueError, match="preset: then 'mine', now 'digits-vit'"):
        simulate({"resume": str(stopped.run_dir), "preset": "digits-vit"})
    monkeypatch.chdir(tmp_path.parent)
    assert simulate({"resume": str(stopped.run_dir)}).summary["rounds"] == 1
    preset = tmp_path / "mine.yaml"
    (tmp_path / "conf" / "mine.yaml").rename(preset)
    with pytest.raises(ValueError, match=r"preset '.*/conf/mine.yaml': found no such file"):
        simulate({"resume": str(stopped.run_dir)})
    assert simulate({"resume": str(stopped.run_dir), "preset": str(preset)}).summary["rounds"] == 1
    preset.write_text(text.replace("heads: 4", "heads: 2"))
    with pytest.raises(ValueError, match="heads: then 4, now 2; .* give the old value"):
        simulate({"resume": str(stopped.run_dir), "preset": str(preset)})
    with_old_value: dict[str, Scalar] = {
        "resume": str(stopped.run_dir),
        "preset": str(preset),
        "heads": 4,
    }
    assert simulate(with_old_value).summary["rounds"] == 1


def _fail(settings):
    try:
        simulate(settings, 3)
    except IndexError as error:
        raise RuntimeError(f"IndexError {error}") from None


@pytest.mark.parametrize("phase", ["training", "evaluating"])
def test_a_removed_run_directory_ends_the_run_at_once(tmp_path, monkeypatch, phase):
    """The directory is not created again with a part of the run."""
    rounds: list[int] = []

    def remove(*_):
        rounds.append(len(rounds))
        if len(rounds) == 2:
            (path,) = tmp_path.glob("*/")
            shutil.rmtree(path)
        return {"accuracy": 0.5, "loss": 1.0}

    functions = {
        "training": "ravan_flwr.server.releases.Mean.close",
        "evaluating": "ravan_flwr.training.model_and_data.ModelAndData.evaluate",
    }
    monkeypatch.setattr(functions[phase], remove)
    with pytest.raises(OSError, match="is gone: it was removed or renamed while the run wrote"):
        simulate(SMALL | {"output-dir": str(tmp_path), "evaluate-on": "server"}, 3)
    assert len(rounds) == 2
    assert not list(tmp_path.iterdir())


def test_a_run_that_flower_has_ended_reports_it(tmp_path, monkeypatch):
    """As after a jump of the clock, when all nodes seem unresponsive for years."""

    def ended(_):
        raise RunNotRunningException

    monkeypatch.setattr("ravan_flwr.server.releases.Mean.close", ended)
    with pytest.raises(RuntimeError, match="Flower has ended this run: .* a jump of its clock"):
        simulate(SMALL | {"output-dir": str(tmp_path)}, 3)
    (path,) = tmp_path.glob("*/failure.json")
    assert "Flower has ended this run" in json.loads(path.read_text())["error"]


def test_a_claimed_budget_fraction_is_limited_by_max_share(tmp_path):
    settings = SMALL | {"output-dir": str(tmp_path), "num-rounds": 1, "limits": "max-share=0.5"}
    run = simulate(settings, 3)
    (record,) = records_of(run.run_dir)
    assert {(c["budget-fraction"], c["heads"]) for c in record["clients"]} == {(0.5, 2)}
