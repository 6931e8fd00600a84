"""A limit of bytes ends a run with an evaluation and a result, and the run can be resumed."""

import json

import pytest

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import Scalar
from ravan_flwr.training.plan import bytes_of_round, plan_of

QUICK: dict[str, Scalar] = {
    "lora-rank": 2, "local-steps": 1, "batch-size": 8, "num-rounds": 5, "eval-every": 5,
    "report": False, "tracking": "none", "clients-per-round": 2,
}  # fmt: skip


def bytes_of_a_round():
    return bytes_of_round(read_config(QUICK))


def rounds(run):
    return [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("fitting_rounds", "expected"), [(2.5, 2), (1.0, 1), (2.0, 2), (99.0, 5)])
def test_the_last_round_that_fits_is_evaluated_and_ends_the_run(
    fitting_rounds, expected, tmp_path, capsys
):
    limit = int(fitting_rounds * bytes_of_a_round())
    run = simulate(QUICK | {"max-bytes": float(limit), "output-dir": str(tmp_path)}, 4)
    records = rounds(run)
    assert len(records) == run.summary["rounds"] == expected
    assert run.summary["bytes-up"] + run.summary["bytes-down"] <= limit
    assert records[-1]["metrics"] == run.summary["metrics"]["final"] != {}
    assert (run.run_dir / "adapter" / "adapter_config.json").is_file()
    assert "% of max-bytes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_resumes_with_a_larger_limit(tmp_path):
    settings = QUICK | {"output-dir": str(tmp_path)}
    run = simulate(settings | {"max-bytes": 2.0 * bytes_of_a_round()}, 4)
    same = simulate(
        settings | {"max-bytes": 2.0 * bytes_of_a_round(), "resume": str(run.run_dir)}, 4
    )
    assert same.summary["rounds"] == 2
    continued = simulate(
        settings | {"max-bytes": 4.0 * bytes_of_a_round(), "resume": str(run.run_dir)}, 4
    )
    assert continued.summary["rounds"] == 4


@pytest.mark.slow
def test_a_plan_counts_the_rounds_within_the_limit():
    assert "enough for 3 of 5 rounds" in plan_of(QUICK | {"max-bytes": 3.5 * bytes_of_a_round()})
    assert "enough for all rounds" in plan_of(QUICK | {"max-bytes": 1e12})
    assert "max-bytes" not in plan_of(QUICK)


def test_a_limit_below_one_round_is_refused_before_the_run(tmp_path):
    with pytest.raises(ValueError, match="max-bytes = 9: a round takes .* room for one at least"):
        simulate(QUICK | {"max-bytes": 9.0, "output-dir": str(tmp_path)}, 4)
    assert not list(tmp_path.iterdir())
