"""A limit of bytes ends a run with an evaluation and a result, and the run can be resumed."""

import functools
from typing import Any

import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.cost import bytes_of_round
from ravan_flwr.training.plan import plan_of
from tests import short_runs
from tests.short_runs import SHORT, records_of

QUICK = SHORT | {"local-steps": 1, "num-rounds": 5, "eval-every": 5, "clients-per-round": 2}
run = functools.partial(short_runs.run, clients=4, settings=QUICK)


def bytes_of(rounds):
    return rounds * bytes_of_round(read_config(QUICK))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("fitting_rounds", "expected"), [(2.5, 2), (1.0, 1), (2.0, 2), (99.0, 5)])
def test_the_last_round_that_fits_ends_the_run(fitting_rounds, expected, tmp_path, capsys):
    limit = int(bytes_of(fitting_rounds))
    ended = run(tmp_path, max_bytes=float(limit))
    records = records_of(ended)
    assert len(records) == ended.summary["rounds"] == expected
    assert ended.summary["bytes-up"] + ended.summary["bytes-down"] <= limit
    assert records[-1]["metrics"] == ended.summary["metrics"]["final"] != {}
    assert (ended.run_dir / "adapter" / "adapter_config.json").is_file()
    assert "% of max-bytes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_resumes_with_a_larger_limit(tmp_path):
    resume = str(run(tmp_path, max_bytes=bytes_of(2.0)).run_dir)
    for rounds in (2, 4):
        resumed = run(tmp_path, max_bytes=bytes_of(float(rounds)), resume=resume)
        assert resumed.summary["rounds"] == rounds


@pytest.mark.slow
def test_a_plan_counts_the_rounds_within_the_limit():
    assert "enough for 3 of 5 rounds" in plan_of(QUICK | {"max-bytes": bytes_of(3.5)})
    assert "enough for all rounds" in plan_of(QUICK | {"max-bytes": 1e12})
    assert "max-bytes" not in plan_of(QUICK)


def test_a_plan_of_a_method_that_sends_nothing_has_room_for_all_rounds():
    assert "enough for all rounds" in plan_of(QUICK | {"method": "local", "max-bytes": 1e6})


@pytest.mark.slow
def test_a_plan_counts_the_evaluations_on_clients_in_the_rounds_that_have_one(tmp_path):
    """All clients get the state in every fifth round, and in the last one; two train in each."""
    settings: dict[str, Any] = {"evaluate-on": "clients", "validation-share": 0.2}
    settings |= {"num-rounds": 20, "max-bytes": 15.0 * bytes_of(1.0)}
    rounds = len(records_of(run(tmp_path, **{k.replace("-", "_"): v for k, v in settings.items()})))
    assert 5 < rounds < 15
    assert f"enough for {rounds} of 20 rounds" in plan_of(QUICK | settings, 4)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    "settings",
    [
        {"clients_per_round": 25},
        {"evaluate_on": "clients", "validation_share": 0.2},
        {"aggregation": "async", "buffer_size": 6, "concurrency": 8},
    ],
)
def test_the_first_round_is_counted_for_the_runs_own_number_of_clients(settings, tmp_path):
    """The preset has 20 clients. Of 30, 25 train, all are evaluated, or 6 fill a buffer."""
    settings |= {"num_rounds": 1, "eval_every": 1}
    sent = run(tmp_path / "all", clients=30, **settings).summary
    needed = sent["bytes-up"] + sent["bytes-down"]
    with pytest.raises(ValueError, match=rf"a round takes {needed:,} bytes"):
        run(tmp_path / "less", clients=30, max_bytes=needed - 1.0, **settings)
    assert not (tmp_path / "less").exists()
    options = {name.replace("_", "-"): value for name, value in settings.items()}
    up, down = (
        f"{sent[way]:,} {text}" for way, text in (("bytes-up", "bytes up"), ("bytes-down", "down"))
    )
    assert f"1 rounds: at most {up}, {down}" in plan_of(QUICK | options, 30)


def test_a_limit_below_one_round_is_refused_before_the_run(tmp_path):
    with pytest.raises(ValueError, match="max-bytes = 9: a round takes"):
        run(tmp_path, max_bytes=9.0)
    assert not list(tmp_path.iterdir())


def test_an_asynchronous_round_takes_the_bytes_of_its_buffer(tmp_path):
    """It has the updates of four clients, and `clients-per-round` is two."""
    settings = QUICK | {"aggregation": "async", "buffer-size": 4, "concurrency": 4}
    assert "a round         4 of 4 clients" in plan_of(settings, 4)
    with pytest.raises(ValueError, match="max-bytes = .*: a round takes"):
        run(tmp_path, settings=settings, max_bytes=bytes_of(1.5))
    ended = run(tmp_path, settings=settings, max_bytes=bytes_of(2.0))
    assert [len(record["clients"]) for record in records_of(ended)] == [4]
    assert ended.summary["bytes-up"] + ended.summary["bytes-down"] <= bytes_of(2.0)
