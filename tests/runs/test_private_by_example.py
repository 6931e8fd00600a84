"""Private runs in process, on real digits: their reports, files, plans and continuation."""

import functools
import json
import re

import pytest

from ravan_flwr.extras.example_privacy import rules as example_rules
from ravan_flwr.privacy.account import find_epsilon
from ravan_flwr.training.plan import plan_of
from tests import short_runs
from tests.short_runs import SHORT, records_of

CLIENT = SHORT | {
    "local-steps": 1, "num-rounds": 3, "eval-every": 3, "clients-per-round": 2,
    "budgets": "uniform", "privacy": "client", "epsilon": 8.0,
}  # fmt: skip
PRIVATE = SHORT | {
    "privacy": "example", "epsilon": 8.0, "partition": "iid", "local-steps": 10, "batch-size": 64,
    "clients-per-round": 2, "num-rounds": 3, "eval-every": 3, "lora-rank": 1, "processes": 1,
    "learning-rate": 1e-2, "classifier": "trained",
}  # fmt: skip
CLIENTS = 4
run = functools.partial(short_runs.run, clients=CLIENTS)


@pytest.mark.slow(kept=1)
@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("settings", [CLIENT, PRIVATE], ids=lambda one: one["privacy"])
def test_a_private_run_reports_epsilon_and_counts_it_after_resuming(settings, tmp_path, capsys):
    private = run(tmp_path, settings=settings, tracking="tensorboard")
    summary, run_dir = private.summary, private.run_dir
    out = capsys.readouterr().out
    assert out.count("epsilon ") >= 4  # the planned value, and a line for each round
    assert "loss 0" not in out
    page = (run_dir / "report" / "index.html").read_text()
    assert "Training loss by round" not in page
    for text in (page, (run_dir / "adapter" / "README.md").read_text()):
        assert f"epsilon {summary['epsilon']:.3f}" in text
        assert ("for each example of a client" in text) == (settings is PRIVATE)
    for record in records_of(private):
        assert "train-loss" not in record
        assert not any("train-loss" in client for client in record["clients"])
    assert summary["delta"] == 1e-5
    account = json.loads((run_dir / "privacy.json").read_text())
    z = account["noise-multiplier"]
    if settings is CLIENT:
        assert account["releases"] == 3
        expected = find_epsilon(z, 0.5, 1e-5, 3)
        assert summary["epsilon"] == account["epsilon"] == expected
    else:
        assert summary["metrics"]["final"]["accuracy"] > 0.5  # chance is 0.1
        assert summary["unit"] == "example"
        participations = account["asked"].values()
        assert sum(rounds for _, rounds in participations) == 6
        expected = max(find_epsilon(z, rate, 1e-5, 10 * rounds) for rate, rounds in participations)
    assert summary["epsilon"] == pytest.approx(expected)
    assert summary["epsilon"] <= 8.0
    # Resuming at an earlier round restores no privacy budget; the run ends when all is spent.
    resumed = run(tmp_path, settings=settings, resume=f"{run_dir}@2", num_rounds=99)
    assert re.search(r"epsilon: no room for round \d+; the run ends here", capsys.readouterr().out)
    if settings is CLIENT:
        assert (resumed.summary["rounds"], resumed.summary["epsilon"]) == (2, summary["epsilon"])
    else:
        assert 7.0 < resumed.summary["epsilon"] <= 8.0
        assert resumed.summary["noise-multiplier"] == z
        after = json.loads((run_dir / "privacy.json").read_text())["asked"]
        assert all(rounds == 3 for _, rounds in after.values())  # as the noise was calibrated
        records = records_of(resumed)
        assert any(record.get("recounted") for record in records)
        assert any(record.get("out-of-budget") for record in records)
    (run_dir / "privacy.json").unlink()
    with pytest.raises(ValueError, match=r"privacy\.json: it is missing"):
        run(tmp_path, settings=settings, resume=str(run_dir), num_rounds=99)


@pytest.mark.slow
def test_a_plan_states_epsilon():
    plan = plan_of(CLIENT, 4)
    assert re.search(r"epsilon (7\.99\d|8\.000) after 3 rounds, delta 1e-05", plan)
    with_noise = plan_of(CLIENT | {"epsilon": 4.0, "noise-multiplier": 1.5, "num-rounds": 50}, 4)
    fitting = int(re.search(r"epsilon = 4 is spent after (\d+) rounds", with_noise)[1])  # type: ignore[index]
    assert find_epsilon(1.5, 0.5, 1e-5, fitting) <= 4.0 < find_epsilon(1.5, 0.5, 1e-5, fitting + 1)
    assert "privacy" not in plan_of(CLIENT | {"privacy": "none", "epsilon": "auto"}, 4)


@pytest.mark.usefixtures("untimed")
@pytest.mark.slow
def test_a_plan_states_epsilon_of_examples():
    plan = " ".join(plan_of(PRIVATE | {"num-rounds": 20}, CLIENTS).split())
    assert "epsilon 8.000 after 20 rounds, delta 1e-05" in plan
    assert "client with the fewest (359)" in plan
    assert "with probability 0.1783" in plan
    assert plan_of(PRIVATE | {"method": "none", "classifier": "frozen"}, CLIENTS)
    settings = {"epsilon": 4.0, "noise-multiplier": 1.0, "num-rounds": 50}
    with_noise = plan_of(PRIVATE | settings, CLIENTS)
    steps = 10 * int(re.search(r"epsilon = 4 is spent after (\d+)", with_noise)[1])  # type: ignore[index]
    rate = 64 / 359
    assert find_epsilon(1.0, rate, 1e-5, steps) <= 4.0 < find_epsilon(1.0, rate, 1e-5, steps + 10)


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
    rules = {kind: rule for kind, rule in example_rules.RULES.items() if kind.__name__ != "Linear"}
    monkeypatch.setattr(example_rules, "RULES", rules)
    message = "a trained layer is a Linear, classifier, without a"
    with pytest.raises(ValueError, match=message):
        run(tmp_path, settings=PRIVATE)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        plan_of(PRIVATE, CLIENTS)
