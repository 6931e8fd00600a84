"""Runs with example-level privacy, in process, on real digits."""

import json
import re

import pytest

from ravan_flwr import simulate
from ravan_flwr.privacy.account import epsilon_of
from ravan_flwr.specs import Scalar
from ravan_flwr.training.plan import plan_of

PRIVATE: dict[str, Scalar] = {
    "privacy": "example", "epsilon": 8.0, "partition": "iid", "local-steps": 10, "batch-size": 64,
    "clients-per-round": 2, "num-rounds": 3, "eval-every": 3, "lora-rank": 1, "processes": 1,
    "learning-rate": 1e-2, "classifier": "trained", "tracking": "none",
}  # fmt: skip
CLIENTS = 4


def rounds_of(run):
    return [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_a_run_with_private_examples_learns_and_counts_epsilon_after_resuming(tmp_path, capsys):
    settings = PRIVATE | {"output-dir": str(tmp_path)}
    run = simulate(settings, CLIENTS)
    out = capsys.readouterr().out
    assert out.count("epsilon ") >= 4  # the planned value, and a line for each round
    assert "loss 0" not in out
    assert run.summary["metrics"]["final"]["accuracy"] > 0.5  # chance is 0.1
    account = json.loads((run.run_dir / "privacy.json").read_text())
    z, participations = account["noise-multiplier"], account["asked"]
    assert sum(rounds for _, rounds in participations.values()) == 6
    largest = max(
        epsilon_of(z, rate, 1e-5, 10 * rounds) for rate, rounds in participations.values()
    )
    assert run.summary["epsilon"] == pytest.approx(largest)
    assert run.summary["epsilon"] <= 8.0
    assert (run.summary["unit"], run.summary["delta"]) == ("example", 1e-5)
    for record in rounds_of(run):
        assert "train-loss" not in record
        assert not any("train-loss" in client for client in record["clients"])
    for path in (run.run_dir / "adapter" / "README.md", run.run_dir / "report" / "index.html"):
        assert f"epsilon {run.summary['epsilon']:.3f}" in path.read_text()
        assert "for each example of a client" in path.read_text()
    # Resuming at an earlier round restores no privacy budget; the run ends when all is spent.
    resumed = simulate(settings | {"resume": f"{run.run_dir}@2", "num-rounds": 99}, CLIENTS)
    output = capsys.readouterr().out
    assert re.search(r"epsilon: no room for round \d+; the run ends here", output)
    assert 7.0 < resumed.summary["epsilon"] <= 8.0
    assert resumed.summary["noise-multiplier"] == z
    after = json.loads((run.run_dir / "privacy.json").read_text())["asked"]
    assert all(rounds == 3 for _, rounds in after.values())  # the noise was calibrated for three
    records = rounds_of(resumed)
    assert any(record.get("recounted") for record in records)
    assert any(record.get("out-of-budget") for record in records)
    (run.run_dir / "privacy.json").unlink()
    with pytest.raises(ValueError, match=r"privacy\.json: it is missing"):
        simulate(settings | {"resume": str(run.run_dir), "num-rounds": 99}, CLIENTS)


@pytest.mark.usefixtures("untimed")
@pytest.mark.slow
def test_a_plan_states_epsilon_of_examples():
    plan = plan_of(PRIVATE | {"num-rounds": 20}, CLIENTS)
    plan = " ".join(plan.split())
    assert "epsilon 8.000 after 20 rounds, delta 1e-05" in plan
    assert "of each example of the client with the fewest (359), in a step with proba" in plan
    assert "with probability 0.1783" in plan
    assert plan_of(PRIVATE | {"method": "none", "classifier": "frozen"}, CLIENTS)
    with_noise = plan_of(
        PRIVATE | {"epsilon": 4.0, "noise-multiplier": 1.0, "num-rounds": 50}, CLIENTS
    )
    num_rounds = int(re.search(r"epsilon = 4 is spent after (\d+)", with_noise)[1])  # type: ignore[index]
    rate = 64 / 359
    assert (
        epsilon_of(1.0, rate, 1e-5, 10 * num_rounds)
        <= 4.0
        < epsilon_of(1.0, rate, 1e-5, 10 * num_rounds + 10)
    )


@pytest.mark.usefixtures("untimed")
@pytest.mark.slow
def test_a_plan_counts_a_gradient_of_each_example():
    """It counts at least four bytes for each trained parameter and example of a batch."""

    def memory_of(**settings):
        plan = plan_of(PRIVATE | settings, CLIENTS)
        numbers = int(re.search(r"trained +([\d,]+) parameters", plan)[1].replace(",", ""))  # type: ignore[index]
        line = next(line for line in plan.splitlines() if re.match("1 ", line))
        return float(line.split()[-2]) * 1e6, numbers

    (private, numbers), (plain, _) = memory_of(), memory_of(privacy="none", epsilon="auto")
    assert private > plain * 0.5
    larger, _ = memory_of(**{"batch-size": 256})
    (small, _) = memory_of(**{"micro-batch-size": 8})
    assert larger - private > 4 * (256 - 64) * numbers
    assert small < private / 4


def test_a_trained_layer_without_a_rule_is_refused_before_the_run(tmp_path, monkeypatch):
    from ravan_flwr.adapters import by_example

    rules = {kind: rule for kind, rule in by_example.RULES.items() if kind.__name__ != "Linear"}
    monkeypatch.setattr(by_example, "RULES", rules)
    with pytest.raises(ValueError, match="a trained layer is a Linear, classifier, without a"):
        simulate(PRIVATE | {"output-dir": str(tmp_path)}, CLIENTS)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="a trained layer is a Linear, classifier, without a"):
        plan_of(PRIVATE, CLIENTS)
