"""A collapsed run reports it, keeps a good checkpoint, and can resume from there."""

import functools
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
from ravan_flwr.tasks.tally import OTHER, Tally
from tests import short_runs
from tests.short_runs import records_of, same_bits

SMALL = {"num-rounds": 6, "local-steps": 1, "batch-size": 4, "clients-per-round": 2}
run = functools.partial(short_runs.run, settings=SMALL)
EVALUATE = "ravan_flwr.training.model_and_data.ModelAndData.evaluate"


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


@pytest.mark.parametrize(
    ("right", "predicted", "expected"),
    [
        ([0, 1, 2, 2], [1, 1, 1, 1], "100.0% of predictions are 'coffee'"),
        ([0, 1, 2, 2], [OTHER] * 4, "100.0% of predictions are no label"),
        # Two of a hundred predictions are of the other class, or one of them.
        ([1] * 100 + [2] * 300, [0, 1] + [2] * 398, None),
        ([1] * 100 + [2] * 300, [2] * 399 + [1], "99.8% of predictions are 'cocoa'"),
        ([1, 1, 1], [1, 1, 1], None),  # there is no other class
        ([0, 1, 2], [2, 1, 1], None),
        ([0, 0, 0, 1], [0, 0, 0, 1], None),
        ([], [], None),
    ],
)
def test_predictions_of_one_class_are_a_collapse(right, predicted, expected):
    tally = Tally()
    tally.add(right, predicted)
    now, earlier = record_of(3, 0.3, 1.0), [record_of(1, 0.3, 1.0)]
    assert collapse_reason(earlier, now, "accuracy", LABELS, tally) == expected
    assert collapse_reason([], now, "accuracy", LABELS, tally) is None  # too early to judge
    assert collapse_reason([], record_of(2, 0.3), "accuracy", LABELS, tally, last=True) is None
    assert collapse_reason([], now, "accuracy", LABELS, tally, last=True) == expected


@pytest.mark.parametrize(("loss", "collapsed"), [(1.0986, False), (1.0987, True)])
def test_a_loss_above_that_of_equal_probabilities_is_a_collapse(loss, collapsed):
    records = [record_of(1, 0.3, 1.0)], record_of(3, 0.3, loss)
    reason = "loss is 1.099, above the 1.099 of equal probabilities for 3 classes"
    expected = reason if collapsed else None
    assert collapse_reason(*records, "accuracy", LABELS) == expected
    assert collapse_reason(*records, "accuracy") is None  # no classes


def test_the_best_round_is_the_earliest_with_the_largest_value():
    records = [
        record_of(number, value) for number, value in enumerate((0.1, None, 0.5, 0.5, 0.2), 1)
    ]
    assert best_round(records, "accuracy") == 3
    assert best_round([record_of(1)], "accuracy") is None


@pytest.fixture
def measured(monkeypatch):
    """Fake the server's evaluation; return the accuracies that it will give."""
    accuracies = [0.3, 0.8, 0.1, 0.1, 0.1, 0.1]
    monkeypatch.setattr(EVALUATE, lambda *_: {"accuracy": accuracies.pop(0), "loss": 1.0})
    return accuracies


@pytest.mark.slow
def test_a_collapsed_run_reports_it_and_can_resume_from_its_best_round(tmp_path, measured, capsys):
    simulation = run(tmp_path)
    folder = simulation.run_dir / "checkpoints"
    message = capsys.readouterr().out
    assert "round 3 COLLAPSED: accuracy fell to 0.1, below half of 0.8 in round 2" in message
    # A resume cannot change the learning rate, so it is offered for a false reply only.
    assert "a new run needs a lower learning-rate" in message
    assert f"a false reply, after which resume={simulation.run_dir}@2 goes back" in message
    assert message.count("COLLAPSED") == 1  # in the first collapsed round only
    assert simulation.summary["collapsed"] == [3, 4, 5, 6]
    collapsed = ["collapsed" in record for record in records_of(simulation)]
    assert collapsed == [False] * 2 + [True] * 4
    assert checkpoint_rounds(folder) == [2, 4, 5, 6]
    good = load_checkpoint(folder, 2)

    with pytest.raises(ValueError, match="round 3 has no checkpoint in .* of rounds 2, 4, 5, 6"):
        run(tmp_path, resume=f"{simulation.run_dir}@3")
    with pytest.raises(IndexError):  # the fake evaluation has no values left
        run(tmp_path, resume=f"{simulation.run_dir}@2")
    assert len(records_of(simulation)) == 6  # the failed attempt changed nothing
    assert checkpoint_rounds(folder) == [2, 4, 5, 6]
    assert (simulation.run_dir / "summary.json").exists()

    measured += [0.81, 0.82, 0.83, 0.84]
    resumed = run(tmp_path, resume=f"{simulation.run_dir}@2")
    assert [r["round"] for r in records_of(simulation)] == [1, 2, 3, 4, 5, 6]
    assert resumed.summary["collapsed"] == []
    assert resumed.summary["metrics"]["final"]["accuracy"] == 0.84
    assert checkpoint_rounds(folder) == [4, 5, 6]
    assert good.state.keys() == load_checkpoint(folder).state.keys()


@pytest.mark.slow
@pytest.mark.parametrize("evaluate_on", ["server", "clients"])
@pytest.mark.usefixtures("without_charts")
def test_a_run_that_never_learned_reports_a_collapse(tmp_path, capsys, evaluate_on):
    """The learning rate is a thousand times too high: no earlier round is better."""
    simulation = run(
        tmp_path, learning_rate=3.0, num_rounds=3, tracking="tensorboard",
        validation_share=0.2, evaluate_on=evaluate_on,
    )  # fmt: skip
    assert 3 in simulation.summary["collapsed"]
    output = capsys.readouterr().out
    assert "COLLAPSED" in output
    assert "learning rate that is too high (here 3)" in output
    page = (simulation.run_dir / "report" / "index.html").read_text()
    assert "The evaluation collapsed in round" in page
    assert "learning rate that is too high (here 3.0)" in page
    # Clients report no table by class.
    by_class = evaluate_on == "server"
    assert (simulation.run_dir / "classes.json").exists() == ("Class by class" in page) == by_class


@pytest.mark.slow
def test_a_single_evaluation_at_the_end_is_checked_unless_nothing_is_trained(tmp_path):
    settings = {"learning_rate": 3.0, "num_rounds": 3}
    assert run(tmp_path, eval_every=3, **settings).summary["collapsed"] == [3]
    untrained = run(tmp_path, method="none", classifier="frozen", **settings)
    assert untrained.summary["collapsed"] == []


@pytest.mark.slow
def test_resuming_at_an_earlier_round_drops_later_rounds(tmp_path):
    run_dir = run(tmp_path, num_rounds=3).run_dir
    third = load_checkpoint(run_dir / "checkpoints", 3).state["H"]
    returned = run(tmp_path, num_rounds=2, resume=f"{run_dir}@2")
    assert returned.summary["rounds"] == 2
    assert [r["round"] for r in records_of(returned)] == [1, 2]
    assert not torch.equal(load_checkpoint(run_dir / "checkpoints").state["H"], third)
    resumed = run(tmp_path, num_rounds=3, resume=str(run_dir))
    assert resumed.summary["rounds"] == 3
    assert torch.equal(load_checkpoint(run_dir / "checkpoints").state["H"], third)


@pytest.mark.usefixtures("without_charts")
def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path):
    settings = {"num_rounds": 1, "privacy": "client", "noise_multiplier": 1.0, "delta": 1e-6}
    path = run(tmp_path, tracking="tensorboard", **settings).run_dir
    account = path / "privacy.json"

    def refused(message, clients=3, suffix="", **more):
        before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
        content = {file: file.read_bytes() for file in before if file.is_file()}
        changed = settings | {"num_rounds": 2, "tracking": "tensorboard"} | more
        with pytest.raises(ValueError, match=message):
            run(tmp_path, clients, resume=f"{path}{suffix}", **changed)
        assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == content
        times = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
        assert {file: times[file] for file in before if file != path} == {
            file: time
            for file, time in before.items()
            if file != path  # the lock came and went
        }

    refused("seed: then 0, now 1", seed=1)
    refused("num-partitions = 2, expected 3 as before", clients=2)
    refused("min-replies = 9", limits="min-replies=9")
    refused("has no checkpoint", suffix="@7")
    kept = account.read_bytes()
    account.write_bytes(b"{}")
    refused("expected the account of the run")
    account.write_bytes(kept)
    resumed = run(tmp_path, resume=str(path), **settings | {"num_rounds": 2})
    assert resumed.summary["rounds"] == 2
    log = (path / "log.txt").read_text()
    assert log.count("resuming after round 1") == 1
    assert json.loads((path / "settings.json").read_text())["num-rounds"] == 2


@pytest.mark.slow
def test_a_resumed_run_uses_its_own_settings(tmp_path, monkeypatch, capsys):
    """The run has a user's preset, other settings, and another number of clients."""
    monkeypatch.chdir(tmp_path)
    preset, moved = tmp_path / "conf" / "mine.yaml", tmp_path / "mine.yaml"
    preset.parent.mkdir()
    text = preset_file("digits-vit").read_text()
    preset.write_text(text)
    settings = {
        "preset": "conf/mine.yaml", "method": "hetlora", "partition": "iid", "learning_rate": 0.02,
        "budgets": "uniform", "eval_every": 2, "weighting": "examples",
    }  # fmt: skip
    uninterrupted = run(tmp_path / "runs", clients=4, num_rounds=3, **settings)
    stopped = run(tmp_path / "runs", clients=4, num_rounds=2, **settings)
    stopped_dir = stopped.run_dir
    before = json.loads((stopped_dir / "config.json").read_text())

    def resumed(words="", **more):
        """Return the number of rounds of the resumed run."""
        return simulate({"resume": f"{stopped_dir}{words}", **more}).summary["rounds"]

    assert resumed() == 2  # the run's own number of rounds
    capsys.readouterr()
    main(["simulate", f"resume={stopped_dir}", "num-rounds=3"])
    assert "no effect" not in capsys.readouterr().out  # no setting is new
    after = json.loads((stopped_dir / "config.json").read_text())
    assert after == before | {"num-rounds": 3}
    assert json.loads((stopped_dir / "settings.json").read_text())["num-rounds"] == 3
    first, second = (
        load_checkpoint(folder / "checkpoints") for folder in (uninterrupted.run_dir, stopped_dir)
    )
    assert first.round == second.round == 3
    assert same_bits(first.state, second.state)
    assert not (stopped_dir / "report").exists()
    resumed("@1", **{"num-rounds": 1})
    assert [record["round"] for record in records_of(stopped)] == [1]

    with pytest.raises(ValueError, match="method: then 'hetlora', now 'fedit'"):
        resumed(method="fedit")
    with pytest.raises(ValueError, match="preset: then 'mine', now 'digits-vit'"):
        resumed(preset="digits-vit")
    monkeypatch.chdir(tmp_path.parent)
    assert resumed() == 1
    preset.rename(moved)
    with pytest.raises(ValueError, match=r"preset '.*/conf/mine.yaml': found no such file"):
        resumed()
    assert resumed(preset=str(moved)) == 1
    moved.write_text(text.replace("heads: 4", "heads: 2"))
    with pytest.raises(ValueError, match="heads: then 4, now 2; .* give the old value"):
        resumed(preset=str(moved))
    assert resumed(preset=str(moved), heads=4) == 1


@pytest.mark.parametrize(
    ("phase", "result"),
    [
        ("ravan_flwr.server.releases.Release.close", None),
        (EVALUATE, {"accuracy": 0.5, "loss": 1.0}),
    ],
)
def test_a_removed_run_directory_ends_the_run_at_once(tmp_path, monkeypatch, phase, result):
    """The directory is not created again with a part of the run."""
    rounds: list[int] = []

    def remove(*_):
        rounds.append(len(rounds))
        if len(rounds) == 2:
            (path,) = tmp_path.glob("*/")
            shutil.rmtree(path)
        return result

    monkeypatch.setattr(phase, remove)
    with pytest.raises(OSError, match="is gone: it was removed or renamed while the run wrote"):
        run(tmp_path, evaluate_on="server")
    assert len(rounds) == 2
    assert not list(tmp_path.iterdir())


def test_a_run_that_flower_has_ended_reports_it(tmp_path, monkeypatch):
    """As after a jump of the clock, when all nodes seem unresponsive for years."""

    def ended(_):
        raise RunNotRunningException

    monkeypatch.setattr("ravan_flwr.server.releases.Release.close", ended)
    with pytest.raises(RuntimeError, match="Flower has ended this run: .* a jump of its clock"):
        run(tmp_path)
    (path,) = tmp_path.glob("*/failure.json")
    assert "Flower has ended this run" in json.loads(path.read_text())["error"]


def test_a_claimed_budget_fraction_is_limited_by_max_share(tmp_path):
    (record,) = records_of(run(tmp_path, num_rounds=1, limits="max-share=0.5"))
    assert {(c["budget-fraction"], c["heads"]) for c in record["clients"]} == {(0.5, 2)}
