"""Runs in simulated time: the ends of rounds, and resuming to the same bits."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from ravan_flwr import server_app, simulate
from ravan_flwr.flower_private import TaskType
from ravan_flwr.reports.report import write_report
from ravan_flwr.runs.history import RecordedRun
from ravan_flwr.server.buffered import Buffered
from ravan_flwr.training.plan import plan_of
from tests.hand_made import settings_from

SHORT: dict[str, Any] = {
    "num-rounds": 3, "local-steps": 1, "batch-size": 4, "report": False, "tracking": "none",
    "eval-every": 10, "processes": 1,
}  # fmt: skip


def records(run):
    return [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]


def last_state(run):
    return load_file(sorted(run.run_dir.glob("checkpoints/round-*.safetensors"))[-1])


@pytest.mark.slow
def test_a_round_ends_with_its_slowest_client(tmp_path):
    (tmp_path / "devices.yaml").write_text(
        "- {name: fast, clients: 3, teraflops: 1, downlink: 80, uplink: 8}\n"
        "- {name: slow, teraflops: 1, downlink: 0.8, uplink: 0.08}\n"
    )
    settings = SHORT | {
        "devices": str(tmp_path / "devices.yaml"), "clients-per-round": 4,
        "output-dir": str(tmp_path), "until-time": 1.0,
    }  # fmt: skip
    rounds = records(simulate(settings, num_clients=4))
    first = {client["partition-id"]: client for client in rounds[0]["clients"]}
    assert {c["device"] for c in first.values()} == {"fast", "slow"}
    slow = first[3]
    expected = slow["bytes-down"] / 1e5 + slow["bytes-up"] / 1e4  # training takes less than 1 ms
    assert slow["span"] == pytest.approx([0.0, expected], abs=1e-3)
    assert rounds[0]["time"] == slow["span"][1] > first[0]["span"][1]
    assert [r["time"] >= 1.0 for r in rounds] == [False] * (len(rounds) - 1) + [True]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    "aggregation",
    [
        {"over-sample": 2.0},
        {"straggler-grace": 0.01, "clients-per-round": 6, "num-rounds": 6},
        {"aggregation": "async", "buffer-size": 2, "concurrency": 4},
        {"aggregation": "async", "buffer-size": 4, "concurrency": 8, "max-staleness": 1}
        | {"devices": "./one-slow.yaml", "num-rounds": 6},
    ],
)
def test_a_run_in_simulated_time_resumes_to_the_same_bits(tmp_path, monkeypatch, aggregation):
    """Also if earlier replies were missed, or too stale."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one-slow.yaml").write_text(
        "- {name: fast, clients: 7, teraflops: 1, downlink: 80, uplink: 80}\n"
        "- {name: slow, teraflops: 1, downlink: 0.08, uplink: 0.08}\n"
    )
    settings = SHORT | {"devices": "edge-gpus", "output-dir": str(tmp_path)} | aggregation
    uninterrupted, rounds = simulate(settings, num_clients=8), settings["num-rounds"]
    stopped = simulate(settings | {"num-rounds": rounds - 2}, num_clients=8)
    resumed = simulate(
        settings | {"resume": str(stopped.run_dir), "num-rounds": rounds}, num_clients=8
    )
    assert resumed.run_dir == stopped.run_dir
    expected, actual = records(uninterrupted), records(resumed)
    assert [r["time"] for r in expected] == [r["time"] for r in actual]
    states = last_state(uninterrupted), last_state(resumed)
    assert states[0].keys() == states[1].keys()
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())


@pytest.mark.slow
def test_a_run_killed_with_a_part_of_a_buffer_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """The run is killed with two of three updates: they are computed again, and count once."""
    settings = SHORT | {
        "devices": "edge-gpus", "output-dir": str(tmp_path), "aggregation": "async",
        "buffer-size": 3, "concurrency": 5,
    }  # fmt: skip
    uninterrupted = simulate(settings, num_clients=8)
    version, calls = Buffered.version, itertools.count(1)

    def kill_at_sixth_update(self, round_, sent):
        if next(calls) == 3 + 3:
            raise KeyboardInterrupt
        return version(self, round_, sent)

    monkeypatch.setattr(Buffered, "version", kill_at_sixth_update)
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        simulate(settings | {"output-dir": str(folder)}, num_clients=8)
    monkeypatch.setattr(Buffered, "version", version)
    (killed,) = folder.iterdir()
    assert len((killed / "rounds.jsonl").read_text().splitlines()) == 1
    resumed = simulate({"resume": str(killed)})

    def spans_of(run):
        return [
            (r["time"], [(c["partition-id"], c["span"], c.get("staleness")) for c in r["clients"]])
            for r in records(run)
        ]

    assert spans_of(resumed) == spans_of(uninterrupted)
    states = last_state(uninterrupted), last_state(resumed)
    assert states[0].keys() == states[1].keys()
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())


@pytest.mark.slow
def test_budgets_by_speed_give_slow_devices_smaller_fractions(tmp_path):
    run = simulate(
        SHORT | {
            "devices": "edge-gpus", "budgets": "by-speed", "num-rounds": 1,
            "clients-per-round": 8, "output-dir": str(tmp_path),
        },
        num_clients=8,
    )  # fmt: skip
    fractions = {c["partition-id"]: c["budget-fraction"] for c in records(run)[0]["clients"]}
    assert 0.25 <= min(fractions.values()) < max(fractions.values()) == 1.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TaskType.SERVER_APP, "got SuperNodes of a deployment, whose clients take real time"),
        (TaskType.SIMULATION, "got Flower's simulation, whose clients take real time"),
    ],
)
def test_simulated_devices_are_refused_for_real_clients(kind, message):
    grid: Any = SimpleNamespace(run=SimpleNamespace(primary_task_type=kind))
    context = Context(1, 0, {}, RecordDict(), settings_from({"devices": "phones"}))
    with pytest.raises(
        ValueError, match=f"devices = 'phones': {message}, expected a run in process"
    ):
        server_app.run(grid, context)


@pytest.mark.usefixtures("untimed")
@pytest.mark.slow
def test_report_and_plan_show_simulated_time(tmp_path):
    settings = SHORT | {"devices": "edge-gpus", "eval-every": 1, "output-dir": str(tmp_path)}
    runs = [
        simulate(settings | {"num-rounds": 2} | changes, num_clients=8)
        for changes in ({}, {"aggregation": "async"})
    ]
    write_report([run.run_dir for run in runs], tmp_path / "report")
    assert "Accuracy by time of the devices" in (tmp_path / "report" / "index.html").read_text()
    for name in ("devices", "idle"):
        assert (tmp_path / "report" / f"run2-{name}.png").is_file()
    recorded = RecordedRun.read(runs[0].run_dir)
    seconds = [record["time"] for record in records(runs[0])]
    assert recorded.curve("accuracy")["time"] == seconds
    assert "s on the slowest" in plan_of(settings, 8)
    assert "s on the slowest" not in plan_of(settings | {"devices": "auto"}, 8)
