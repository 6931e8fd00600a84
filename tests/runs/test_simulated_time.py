"""Runs in simulated time: the ends of rounds, and resuming to the same bits."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from ravan_flwr import server_app, simulate
from ravan_flwr.flower_private import TaskType
from ravan_flwr.results.report import write_report
from ravan_flwr.runs.history import RecordedRun
from ravan_flwr.server.releases import Release
from ravan_flwr.training.plan import plan_of
from tests import short_runs
from tests.hand_made import settings_from
from tests.short_runs import SHORT, records_of, same_bits

TIMED: dict[str, Any] = {
    "num-rounds": 3, "local-steps": 1, "batch-size": 4, "eval-every": 10, "processes": 1,
    "devices": "edge-gpus",
}  # fmt: skip
run = functools.partial(short_runs.run, clients=8, settings=TIMED)


def last_state(simulation):
    return load_file(sorted(simulation.run_dir.glob("checkpoints/round-*.safetensors"))[-1])


@pytest.mark.slow
def test_a_round_ends_with_its_slowest_client(tmp_path):
    devices = tmp_path / "devices.yaml"
    devices.write_text(
        "- {name: fast, clients: 3, teraflops: 1, downlink: 80, uplink: 8}\n"
        "- {name: slow, teraflops: 1, downlink: 0.8, uplink: 0.08}\n"
    )
    settings = {"devices": str(devices), "clients_per_round": 4, "until_time": 1.0}
    rounds = records_of(run(tmp_path, clients=4, **settings))
    first = {client["partition-id"]: client for client in rounds[0]["clients"]}
    assert {c["device"] for c in first.values()} == {"fast", "slow"}
    slow = first[3]
    expected = slow["bytes-down"] / 1e5 + slow["bytes-up"] / 1e4  # training takes less than 1 ms
    assert slow["span"] == pytest.approx([0.0, expected], abs=1e-3)
    assert rounds[0]["time"] == slow["span"][1] > first[0]["span"][1]
    assert [r["time"] >= 1.0 for r in rounds] == [False] * (len(rounds) - 1) + [True]


@pytest.mark.slow
@pytest.mark.parametrize(("init", "steps"), [("first-round", 2), ("data-aware:5", 5)])
def test_a_calibration_takes_its_own_steps_and_bytes(tmp_path, init, steps):
    """On devices that take no time to compute, and on devices that take none to send."""
    devices = tmp_path / "devices.yaml"
    settings = {"devices": str(devices), "init": init, "local_steps": 2, "num_rounds": 1}
    devices.write_text("- {name: a, clients: 8, teraflops: 1000, downlink: 0.8, uplink: 0.08}\n")
    calibration = records_of(run(tmp_path, **settings))[0]
    for client in calibration["clients"]:
        expected = client["bytes-down"] / 1e5 + client["bytes-up"] / 1e4
        assert client["span"] == pytest.approx([0.0, expected], abs=1e-3)
    devices.write_text(
        "- {name: a, clients: 8, teraflops: 0.001, downlink: 1000000, uplink: 1000000}\n"
    )
    calibration, first = records_of(run(tmp_path, **settings))
    (end,) = {client["span"][1] for client in calibration["clients"]}
    start, later = first["clients"][0]["span"]
    assert end == pytest.approx((later - start) * steps / 2, rel=1e-3)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    "aggregation",
    [
        {"over-sample": 2.0},
        {"straggler-grace": 0.01, "clients-per-round": 6, "num-rounds": 6},
        {"aggregation": "async", "buffer-size": 2, "concurrency": 4},
        {"aggregation": "async", "buffer-size": 4, "concurrency": 8, "max-staleness": 1}
        | {"devices": "./one-slow.yaml", "num-rounds": 6},
        {"aggregation": "async", "buffer-size": 2, "concurrency": 4, "init": "data-aware:2"}
        | {"devices": "./one-slow.yaml", "num-rounds": 4},
        {"method": "fed-sb", "devices": "auto", "num-rounds": 4},  # in real time
    ],
)
def test_a_run_in_simulated_time_resumes_to_the_same_bits(tmp_path, monkeypatch, aggregation):
    """Also if earlier replies were missed, or too stale, or if clients had received bases."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one-slow.yaml").write_text(
        "- {name: fast, clients: 7, teraflops: 1, downlink: 80, uplink: 80}\n"
        "- {name: slow, teraflops: 1, downlink: 0.08, uplink: 0.08}\n"
    )
    rounds = aggregation.get("num-rounds", 3)
    uninterrupted = run(tmp_path, **aggregation)
    stopped = run(tmp_path, **aggregation | {"num-rounds": rounds - 2})
    resumed = run(tmp_path, **aggregation, resume=str(stopped.run_dir))
    assert resumed.run_dir == stopped.run_dir
    expected, actual = records_of(uninterrupted), records_of(resumed)
    if aggregation.get("devices") != "auto":
        assert [r["time"] for r in expected] == [r["time"] for r in actual]
    sent = [
        [(c["partition-id"], c["bytes-down"]) for r in records for c in r["clients"]]
        for records in (expected, actual)
    ]
    assert sent[0] == sent[1]
    assert same_bits(last_state(uninterrupted), last_state(resumed))


@pytest.mark.slow
def test_a_run_killed_with_a_part_of_a_buffer_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """The run is killed with two of three updates: they are computed again, and count once."""
    settings = {"aggregation": "async", "buffer_size": 3, "concurrency": 5}
    uninterrupted = run(tmp_path, **settings)
    read, calls = Release.read, itertools.count(1)

    def kill_at_sixth_update(self, message, sent):
        if next(calls) == 3 + 3:
            raise KeyboardInterrupt
        return read(self, message, sent)

    with monkeypatch.context() as patch:
        patch.setattr(Release, "read", kill_at_sixth_update)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed", **settings)
    (killed,) = (tmp_path / "killed").iterdir()
    assert len((killed / "rounds.jsonl").read_text().splitlines()) == 1
    resumed = simulate({"resume": str(killed)})

    def spans_of(simulation):
        return [
            (r["time"], [(c["partition-id"], c["span"], c.get("staleness")) for c in r["clients"]])
            for r in records_of(simulation)
        ]

    assert spans_of(resumed) == spans_of(uninterrupted)
    assert same_bits(last_state(uninterrupted), last_state(resumed))


@pytest.mark.slow
def test_budgets_by_speed_give_slow_devices_smaller_fractions(tmp_path):
    (record,) = records_of(run(tmp_path, budgets="by-speed", num_rounds=1, clients_per_round=8))
    fractions = [client["budget-fraction"] for client in record["clients"]]
    assert 0.25 <= min(fractions) < max(fractions) == 1.0


@pytest.mark.parametrize(
    ("kind", "clients"),
    [
        (TaskType.SERVER_APP, "got SuperNodes of a deployment"),
        (TaskType.SIMULATION, "got Flower's simulation"),
    ],
)
def test_simulated_devices_are_refused_for_real_clients(kind, clients):
    grid: Any = SimpleNamespace(run=SimpleNamespace(primary_task_type=kind))
    context = Context(1, 0, {}, RecordDict(), settings_from({"devices": "phones"}))
    with pytest.raises(ValueError, match=f"devices = 'phones': {clients}"):
        server_app.run(grid, context)


@pytest.mark.usefixtures("untimed")
@pytest.mark.slow
def test_report_and_plan_show_simulated_time(tmp_path):
    settings = {"num_rounds": 2, "eval_every": 1}
    runs = [run(tmp_path, aggregation=kind, **settings) for kind in ("sync", "async")]
    write_report([run.run_dir for run in runs], tmp_path / "report")
    assert "Accuracy by time of the devices" in (tmp_path / "report" / "index.html").read_text()
    for name in ("devices", "idle"):
        assert (tmp_path / "report" / f"run2-{name}.png").is_file()
    seconds = [record["time"] for record in records_of(runs[0])]
    assert RecordedRun.read(runs[0].run_dir).curve("accuracy")["time"] == seconds
    assert "s on the slowest" in plan_of(SHORT | TIMED, 8)
    assert "s on the slowest" not in plan_of(SHORT | TIMED | {"devices": "auto"}, 8)
