"""A private run, whole and in process: what it tells, what it keeps, how it goes on."""

import json
import re

import pytest

from ravan_flwr import simulate
from ravan_flwr.privacy.account import epsilon_of
from ravan_flwr.reports.dashboard import DashboardPage
from ravan_flwr.specs import Scalar
from ravan_flwr.training.plan import plan_of

QUICK: dict[str, Scalar] = {
    "lora-rank": 2, "local-steps": 1, "batch-size": 8, "num-rounds": 3, "eval-every": 3,
    "report": True, "tracking": "none", "clients-per-round": 2, "budgets": "uniform",
    "privacy": "client", "epsilon": 8.0,
}  # fmt: skip


def test_a_private_run_tells_what_it_spends_and_goes_on_counting(tmp_path, capsys):
    settings = QUICK | {"output-dir": str(tmp_path)}
    run = simulate(settings, 4)
    out = capsys.readouterr().out
    assert out.count("epsilon ") >= 4  # what it will be, and a line a round
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
    assert f"{run.summary['epsilon']:.3f}" in DashboardPage(run.run_dir).get().decode()
    # Nothing is left of epsilon, so that it goes back, and what was released stays released.
    again = simulate(settings | {"resume": f"{run.run_dir}@2", "num-rounds": 9}, 4)
    assert "epsilon: no room for round 3" in capsys.readouterr().out
    assert again.summary["rounds"] == 2
    assert again.summary["epsilon"] == run.summary["epsilon"]
    (run.run_dir / "privacy.json").unlink()
    with pytest.raises(ValueError, match=r"privacy\.json: it is missing"):
        simulate(settings | {"resume": str(run.run_dir), "num-rounds": 9}, 4)


def test_a_plan_tells_what_a_run_will_spend():
    told = plan_of(QUICK, 4)
    assert re.search(r"epsilon (7\.99\d|8\.000) after 3 rounds, delta 1e-05", told)
    assert "noise of norm" in told
    few = plan_of(QUICK | {"epsilon": 4.0, "noise-multiplier": 1.5, "num-rounds": 50}, 4)
    fit = int(re.search(r"epsilon = 4 ends the run after (\d+) rounds", few)[1])  # type: ignore[index]
    assert epsilon_of(1.5, 0.5, 1e-5, fit) <= 4.0 < epsilon_of(1.5, 0.5, 1e-5, fit + 1)
    assert "privacy" not in plan_of(QUICK | {"privacy": "none", "epsilon": "auto"}, 4)
