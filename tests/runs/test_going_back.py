"""After a poisoned round: it is told, a good checkpoint is left, and a run goes back to it."""

import json
import shutil

import pytest
import torch
from flwr.supercore.run import RunNotRunningException

from ravan_flwr import simulate
from ravan_flwr.runs.checkpoint import checkpoint_rounds, load_checkpoint
from ravan_flwr.runs.watch import best_round, collapse
from ravan_flwr.specs import Scalar

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
    got = collapse(records, of(9, *now), "accuracy")
    assert (got is None) if told is None else (got is not None and told in got)


def test_the_best_round_is_the_earliest_of_the_largest():
    assert best_round([of(1, 0.1), of(2), of(3, 0.5), of(4, 0.5), of(5, 0.2)], "accuracy") == 3
    assert best_round([of(1)], "accuracy") is None


@pytest.fixture
def measured(monkeypatch):
    """The server's evaluation, by round."""
    accuracies = [0.3, 0.8, 0.1, 0.1, 0.1, 0.1]

    def evaluate(*_):
        return {"accuracy": accuracies.pop(0), "loss": 1.0}

    monkeypatch.setattr("ravan_flwr.training.workbench.Workbench.evaluate", evaluate)
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
        "training": "ravan_flwr.server.round.TrainingRound.close",
        "evaluating": "ravan_flwr.training.workbench.Workbench.evaluate",
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

    monkeypatch.setattr("ravan_flwr.server.round.TrainingRound.close", ended)
    with pytest.raises(RuntimeError, match="Flower has ended this run: .* a jump of its clock"):
        simulate(SMALL | {"output-dir": str(tmp_path)}, 3)
    (path,) = tmp_path.glob("*/failure.json")
    assert "Flower has ended this run" in json.loads(path.read_text())["error"]


def test_what_was_usual_goes_on_with_the_run(tmp_path):
    settings = SMALL | {"output-dir": str(tmp_path), "num-rounds": 3, "clients-per-round": 3}
    whole = simulate(settings, 3)
    part = simulate(settings | {"num-rounds": 1}, 3)
    resumed = simulate(settings | {"resume": str(part.run_dir)}, 3)
    one, two = (load_checkpoint(run.run_dir / "checkpoints") for run in (whole, resumed))
    assert set(one.memory) == {"usual-change/H", "usual-change/classifier"}
    assert one.memory["usual-change/H"].shape == (3, 2)
    for name in one.memory:
        assert torch.equal(one.memory[name], two.memory[name])
    assert all(torch.equal(one.state[name], two.state[name]) for name in one.state)


def test_a_claimed_budget_is_cut_to_what_is_granted(tmp_path):
    settings = SMALL | {"output-dir": str(tmp_path), "num-rounds": 1, "max-share": 0.5}
    run = simulate(settings, 3)
    (record,) = records_of(run.run_dir)
    assert {(c["share"], c["heads"]) for c in record["clients"]} == {(0.5, 2)}
