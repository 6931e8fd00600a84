"""A run with client-level privacy, in process: its reports, files and continuation."""

import json
import re

import pytest

from ravan_flwr import simulate
from ravan_flwr.privacy.account import epsilon_of
from ravan_flwr.specs import Scalar
from ravan_flwr.training.plan import plan_of

QUICK: dict[str, Scalar] = {
    "lora-rank": 2, "local-steps": 1, "batch-size": 8, "num-rounds": 3, "eval-every": 3,
    "report": True, "tracking": "none", "clients-per-round": 2, "budgets": "uniform",
    "privacy": "client", "epsilon": 8.0,
}  # fmt: skip


def test_a_private_run_reports_epsilon_and_counts_it_after_resuming(tmp_path, capsys):
    settings = QUICK | {"output-dir": str(tmp_path)}
    run = simulate(settings, 4)
    out = capsys.readouterr().out
    assert out.count("epsilon ") >= 4  # the planned value, and a line for each round
    assert "loss 0" not in out
    account = json.loads((run.run_dir / "privacy.json").read_text())
    assert account["releases"] == 3
    z = account["noise-multiplier"]
    assert run.summary["epsilon"] == account["epsilon"] == epsilon_of(z, 0.5, 1e-5, 3) <= 8.0
    assert run.summary["delta"] == 1e-5
    card = (run.run_dir / "adapter" / "README.md").read_text()
    assert f"epsilon {run.summary['epsilon']:.3f}" in card
    page = (run.run_dir / "report" / "index.html").read_text()
    assert f"epsilon {run.summary['epsilon']:.3f}" in page
    assert "Training loss by round" not in page
    # The privacy budget is spent; resuming at an earlier round does not restore it.
    resumed = simulate(settings | {"resume": f"{run.run_dir}@2", "num-rounds": 9}, 4)
    assert "epsilon: no room for round 3" in capsys.readouterr().out
    assert resumed.summary["rounds"] == 2
    assert resumed.summary["epsilon"] == run.summary["epsilon"]
    (run.run_dir / "privacy.json").unlink()
    with pytest.raises(ValueError, match=r"privacy\.json: it is missing"):
        simulate(settings | {"resume": str(run.run_dir), "num-rounds": 9}, 4)


@pytest.mark.slow
def test_a_plan_states_epsilon():
    plan = plan_of(QUICK, 4)
    assert re.search(r"epsilon (7\.99\d|8\.000) after 3 rounds, delta 1e-05", plan)
    with_noise = plan_of(QUICK | {"epsilon": 4.0, "noise-multiplier": 1.5, "num-rounds": 50}, 4)
    num_rounds = int(re.search(r"epsilon = 4 is spent after (\d+) rounds", with_noise)[1])  # type: ignore[index]
    assert (
        epsilon_of(1.5, 0.5, 1e-5, num_rounds) <= 4.0 < epsilon_of(1.5, 0.5, 1e-5, num_rounds + 1)
    )
    assert "privacy" not in plan_of(QUICK | {"privacy": "none", "epsilon": "auto"}, 4)
