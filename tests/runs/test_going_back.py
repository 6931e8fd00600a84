"""After a poisoned round: it is told, a good checkpoint is left, and a run goes back to it."""

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


def of(number, accuracy=None, loss=1.0):
    metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": loss}
    return {"round": number, "metrics": metrics}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ([0.9], (0.4, 1.0), r"accuracy fell to 0.4, below half of 0.9 in round 1"),
        ([0.9, 0.8, None], (0.1, 1.0), "below half of 0.9 in round 1"),
        ([0.9], (0.46, 1.0), None),
        ([0.12], (0.05, 1.0), None),  # nothing was learned yet
        ([0.5], (0.5, 2.1), r"loss rose to 2.1, above twice 1 in round 1"),
        ([0.5], (0.5, 1.9), None),
        ([], (0.0, 9.0), None),
        ([0.9], (None, 1.0), None),
    ],
)
def test_a_collapse_is_what_the_rule_says(before, now, told):
    records = [of(number, value) for number, value in enumerate(before, start=1)]
    got = collapse_reason(records, of(9, *now), "accuracy")
    assert (got is None) if told is None else (got is not None and told in got)


LABELS = ("tea", "coffee", "cocoa")


def counted(right, predicted):
    tally = Tally()
    tally.add(right, predicted)
    return tally


@pytest.mark.parametrize(
    ("right", "predicted", "told"),
    [
        ([0, 1, 2, 2], [1, 1, 1, 1], "100.0% of predictions are 'coffee'"),
        ([0, 1, 2, 2], [OTHER] * 4, "100.0% of predictions are no label"),
        ([1] * 100 + [2] * 300, [0, 1] + [2] * 398, None),  # two of a hundred others
        ([1] * 100 + [2] * 300, [2] * 399 + [1], "99.8% of predictions are 'cocoa'"),
        ([1, 1, 1], [1, 1, 1], None),  # there is no other class
        ([0, 1, 2], [2, 1, 1], None),
        ([0, 0, 0, 1], [0, 0, 0, 1], None),
        ([], [], None),
    ],
)
def test_predictions_that_fall_on_one_class_are_a_collapse(right, predicted, told):
    tally = counted(right, predicted)
    now, earlier = of(3, 0.3, 1.0), [of(1, 0.3, 1.0)]
    assert collapse_reason(earlier, now, "accuracy", LABELS, tally) == told
    assert collapse_reason([], now, "accuracy", LABELS, tally) is None  # it has hardly trained
    assert collapse_reason([], of(2, 0.3), "accuracy", LABELS, tally, last=True) is None
    assert collapse_reason([], now, "accuracy", LABELS, tally, last=True) == told


@pytest.mark.parametrize(("loss", "collapsed"), [(1.0986, False), (1.0987, True)])
def test_a_loss_above_that_of_equal_probabilities_is_a_collapse(loss, collapsed):
    told = collapse_reason([of(1, 0.3, 1.0)], of(3, 0.3, loss), "accuracy", LABELS)
    assert (told is not None) == collapsed
    if told:
        assert told == "loss is 1.099, above the 1.099 of equal probabilities for 3 classes"
    assert collapse_reason([of(1, 0.3, 1.0)], of(3, 0.3, loss), "accuracy") is None  # no classes


def test_the_best_round_is_the_earliest_of_the_largest():
    assert best_round([of(1, 0.1), of(2), of(3, 0.5), of(4, 0.5), of(5, 0.2)], "accuracy") == 3
    assert best_round([of(1)], "accuracy") is None


@pytest.fixture
def measured(monkeypatch):
    """The server's evaluation, by round."""
    accuracies = [0.3, 0.8, 0.1, 0.1, 0.1, 0.1]

    def evaluate(*_):
        return {"accuracy": accuracies.pop(0), "loss": 1.0}

    monkeypatch.setattr("ravan_flwr.training.model_and_data.ModelAndData.evaluate", evaluate)
    return accuracies


def records_of(run_dir):
    return [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]


def test_a_collapsed_run_says_so_and_goes_back_to_its_best_round(tmp_path, measured, capsys):
    settings = SMALL | {"output-dir": str(tmp_path)}
    run = simulate(settings, 3)
    folder = run.run_dir / "checkpoints"
    told = capsys.readouterr().out
    assert "round 3 COLLAPSED: accuracy fell to 0.1, below half of 0.8 in round 2" in told
    assert f"resume={run.run_dir}@2" in told
    assert told.count("COLLAPSED") == 1  # where it begins
    assert run.summary["collapsed"] == [3, 4, 5, 6]
    assert ["collapsed" in record for record in records_of(run.run_dir)] == [False] * 2 + [True] * 4
    assert checkpoint_rounds(folder) == [2, 4, 5, 6]
    good = load_checkpoint(folder, 2)

    told = "round 3 has no checkpoint in .*expected one of rounds 2, 4, 5, 6; choose another"
    with pytest.raises(ValueError, match=told):
        simulate(settings | {"resume": f"{run.run_dir}@3"}, 3)
    with pytest.raises(RuntimeError, match="IndexError|round 3"):  # nothing left to measure
        _fail(settings | {"resume": f"{run.run_dir}@2"})
    assert len(records_of(run.run_dir)) == 6  # a failed attempt has changed nothing
    assert checkpoint_rounds(folder) == [2, 4, 5, 6]
    assert (run.run_dir / "summary.json").exists()

    measured += [0.81, 0.82, 0.83, 0.84]
    again = simulate(settings | {"resume": f"{run.run_dir}@2"}, 3)
    assert [r["round"] for r in records_of(run.run_dir)] == [1, 2, 3, 4, 5, 6]
    assert again.summary["collapsed"] == []
    assert again.summary["metrics"]["final"]["accuracy"] == 0.84
    assert checkpoint_rounds(folder) == [4, 5, 6]
    assert good.state.keys() == load_checkpoint(folder).state.keys()


@pytest.mark.parametrize("where", ["server", "clients"])
@pytest.mark.usefixtures("undrawn")
def test_a_run_that_never_learned_says_so_in_its_log_and_its_report(tmp_path, capsys, where):
    """A rate a thousand times too high: no earlier round is better, and nothing falls."""
    settings = SMALL | {
        "output-dir": str(tmp_path), "learning-rate": 3.0, "num-rounds": 3, "report": True,
        "validation-share": 0.2, "evaluate-on": where,
    }  # fmt: skip
    run = simulate(settings, 3)
    assert 3 in run.summary["collapsed"]
    told = capsys.readouterr().out
    assert "COLLAPSED" in told
    assert "The likely cause is a learning rate that is too high (here 3)" in told
    page = (run.run_dir / "report" / "index.html").read_text()
    assert "The evaluation collapsed in round" in page
    assert "a learning rate that is too high (here 3.0)" in page


def test_one_evaluation_at_the_end_is_judged_and_no_training_is_not(tmp_path):
    settings = SMALL | {"output-dir": str(tmp_path), "learning-rate": 3.0, "num-rounds": 3}
    run = simulate(settings | {"eval-every": 3}, 3)
    assert run.summary["collapsed"] == [3]
    idle = simulate(settings | {"method": "none", "classifier": "frozen"}, 3)
    assert idle.summary["collapsed"] == []


def test_going_back_to_the_end_drops_what_came_after(tmp_path):
    settings = SMALL | {"output-dir": str(tmp_path), "num-rounds": 3}
    run = simulate(settings, 3)
    third = load_checkpoint(run.run_dir / "checkpoints", 3).state["H"]
    back = simulate(settings | {"num-rounds": 2, "resume": f"{run.run_dir}@2"}, 3)
    assert back.summary["rounds"] == 2
    assert [r["round"] for r in records_of(run.run_dir)] == [1, 2]
    assert not torch.equal(load_checkpoint(run.run_dir / "checkpoints").state["H"], third)
    forth = simulate(settings | {"resume": str(run.run_dir)}, 3)
    assert forth.summary["rounds"] == 3
    assert torch.equal(load_checkpoint(run.run_dir / "checkpoints").state["H"], third)


def test_a_run_that_goes_on_takes_its_own_settings(tmp_path, monkeypatch, capsys):
    """Of a preset that `new` has written, with another number of clients and everything changed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    text = preset_file("digits-vit").read_text()
    (tmp_path / "conf" / "mine.yaml").write_text(text)
    settings = SMALL | {
        "preset": "conf/mine.yaml", "method": "hetlora", "partition": "iid", "num-rounds": 3,
        "learning-rate": 0.02, "budgets": "uniform", "eval-every": 2, "weighting": "examples",
    }  # fmt: skip
    whole = simulate(settings, 4)
    part = simulate(settings | {"num-rounds": 2}, 4)
    before = json.loads((part.run_dir / "config.json").read_text())
    assert simulate({"resume": str(part.run_dir)}).summary["rounds"] == 2  # as many as it had
    capsys.readouterr()
    main(["simulate", f"resume={part.run_dir}", "num-rounds=3"])
    assert "no effect" not in capsys.readouterr().out  # nothing is given that it had not
    assert json.loads((part.run_dir / "config.json").read_text()) == before
    one, two = (load_checkpoint(run.run_dir / "checkpoints") for run in (whole, part))
    assert one.round == two.round == 3
    assert all(torch.equal(one.state[name], two.state[name]) for name in one.state)
    assert not (part.run_dir / "report").exists()
    simulate({"resume": f"{part.run_dir}@1", "num-rounds": 1})
    assert [record["round"] for record in records_of(part.run_dir)] == [1]

    with pytest.raises(ValueError, match="method: then 'hetlora', now 'fedit'; leave out those"):
        simulate({"resume": str(part.run_dir), "method": "fedit"})
    with pytest.raises(ValueError, match="preset: then 'mine', now 'digits-vit'"):
        simulate({"resume": str(part.run_dir), "preset": "digits-vit"})
    monkeypatch.chdir(tmp_path.parent)
    assert simulate({"resume": str(part.run_dir)}).summary["rounds"] == 2
    preset = tmp_path / "mine.yaml"
    (tmp_path / "conf" / "mine.yaml").rename(preset)
    with pytest.raises(ValueError, match=r"preset '.*/conf/mine.yaml': found no such file"):
        simulate({"resume": str(part.run_dir)})
    assert simulate({"resume": str(part.run_dir), "preset": str(preset)}).summary["rounds"] == 2
    preset.write_text(text.replace("heads: 4", "heads: 2"))
    with pytest.raises(ValueError, match="heads: then 4, now 2; .* give the old value"):
        simulate({"resume": str(part.run_dir), "preset": str(preset)})
    as_it_was: dict[str, Scalar] = {"resume": str(part.run_dir), "preset": str(preset), "heads": 4}
    assert simulate(as_it_was).summary["rounds"] == 2


def _fail(settings):
    try:
        simulate(settings, 3)
    except IndexError as error:
        raise RuntimeError(f"IndexError {error}") from None


@pytest.mark.parametrize("here", ["training", "evaluating"])
def test_a_run_directory_that_is_removed_in_the_middle_is_told_at_once(tmp_path, monkeypatch, here):
    """And is not made anew, with a part of the run in it."""
    rounds: list[int] = []

    def remove(*_):
        rounds.append(len(rounds))
        if len(rounds) == 2:
            (path,) = tmp_path.glob("*/")
            shutil.rmtree(path)
        return {"accuracy": 0.5, "loss": 1.0}

    place = {
        "training": "ravan_flwr.server.kind.Kind.close",
        "evaluating": "ravan_flwr.training.model_and_data.ModelAndData.evaluate",
    }
    monkeypatch.setattr(place[here], remove)
    with pytest.raises(OSError, match="is gone: it was removed or renamed while the run wrote"):
        simulate(SMALL | {"output-dir": str(tmp_path), "evaluate-on": "server"}, 3)
    assert len(rounds) == 2
    assert not list(tmp_path.iterdir())


def test_a_run_that_flower_has_ended_says_so(tmp_path, monkeypatch):
    """As after a jump of the clock: then nobody has given a sign of life for years."""

    def ended(_):
        raise RunNotRunningException

    monkeypatch.setattr("ravan_flwr.server.kind.Kind.close", ended)
    with pytest.raises(RuntimeError, match="Flower has ended this run: .* a jump of its clock"):
        simulate(SMALL | {"output-dir": str(tmp_path)}, 3)
    (path,) = tmp_path.glob("*/failure.json")
    assert "Flower has ended this run" in json.loads(path.read_text())["error"]


def test_a_claimed_budget_is_cut_to_what_is_granted(tmp_path):
    settings = SMALL | {"output-dir": str(tmp_path), "num-rounds": 1, "limits": "max-share=0.5"}
    run = simulate(settings, 3)
    (record,) = records_of(run.run_dir)
    assert {(c["budget-fraction"], c["heads"]) for c in record["clients"]} == {(0.5, 2)}
