"""Runs in simulated time: who is waited for, when they end; resumed to the same bits."""

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


def test_a_round_ends_with_its_slowest_client(tmp_path):
    (tmp_path / "devices.yaml").write_text(
        "- {name: fast, clients: 3, teraflops: 1, downlink: 80, uplink: 8}\n"
        "- {name: slow, teraflops: 1, downlink: 0.8, uplink: 0.08}\n"
    )
    settings = SHORT | {
        "devices": str(tmp_path / "devices.yaml"), "clients-per-round": 4,
        "output-dir": str(tmp_path), "until-time": 1.0,
    }  # fmt: skip
    done = records(simulate(settings, num_clients=4))
    first = {client["partition-id"]: client for client in done[0]["clients"]}
    assert {c["device"] for c in first.values()} == {"fast", "slow"}
    slow = first[3]
    by_hand = slow["bytes-down"] / 1e5 + slow["bytes-up"] / 1e4  # and less than 1 ms of training
    assert slow["span"] == pytest.approx([0.0, by_hand], abs=1e-3)
    assert done[0]["time"] == slow["span"][1] > first[0]["span"][1]
    assert [r["time"] >= 1.0 for r in done] == [False] * (len(done) - 1) + [True]


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
def test_a_resumed_run_has_the_same_bits(tmp_path, monkeypatch, aggregation):
    """Also where replies were missed before, or were too old to count."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one-slow.yaml").write_text(
        "- {name: fast, clients: 7, teraflops: 1, downlink: 80, uplink: 80}\n"
        "- {name: slow, teraflops: 1, downlink: 0.08, uplink: 0.08}\n"
    )
    settings = SHORT | {"devices": "edge-gpus", "output-dir": str(tmp_path)} | aggregation
    whole, rounds = simulate(settings, num_clients=8), settings["num-rounds"]
    begun = simulate(settings | {"num-rounds": rounds - 2}, num_clients=8)
    rest = simulate(settings | {"resume": str(begun.run_dir), "num-rounds": rounds}, num_clients=8)
    assert rest.run_dir == begun.run_dir
    one, other = records(whole), records(rest)
    assert [r["time"] for r in one] == [r["time"] for r in other]
    states = last_state(whole), last_state(rest)
    assert states[0].keys() == states[1].keys()
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())


def test_a_run_killed_in_the_middle_of_a_buffer_has_the_same_bits(tmp_path, monkeypatch):
    """Two updates of three are in when it dies: they are made again, and count once."""
    settings = SHORT | {
        "devices": "edge-gpus", "output-dir": str(tmp_path), "aggregation": "async",
        "buffer-size": 3, "concurrency": 5,
    }  # fmt: skip
    whole = simulate(settings, num_clients=8)
    check, seen = Buffered.check, itertools.count(1)

    def die(self, message, registered_client):
        if next(seen) == 3 + 3:
            raise KeyboardInterrupt
        return check(self, message, registered_client)

    monkeypatch.setattr(Buffered, "check", die)
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        simulate(settings | {"output-dir": str(folder)}, num_clients=8)
    monkeypatch.setattr(Buffered, "check", check)
    (killed,) = folder.iterdir()
    assert len((killed / "rounds.jsonl").read_text().splitlines()) == 1
    rest = simulate({"resume": str(killed)})

    def told(run):
        return [
            (r["time"], [(c["partition-id"], c["span"], c.get("staleness")) for c in r["clients"]])
            for r in records(run)
        ]

    assert told(rest) == told(whole)
    states = last_state(whole), last_state(rest)
    assert states[0].keys() == states[1].keys()
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())


def test_by_speed_gives_a_slow_device_less(tmp_path):
    run = simulate(
        SHORT | {
            "devices": "edge-gpus", "budgets": "by-speed", "num-rounds": 1,
            "clients-per-round": 8, "output-dir": str(tmp_path),
        },
        num_clients=8,
    )  # fmt: skip
    shares = {c["partition-id"]: c["budget-fraction"] for c in records(run)[0]["clients"]}
    assert 0.25 <= min(shares.values()) < max(shares.values()) == 1.0


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (TaskType.SERVER_APP, "got SuperNodes of a deployment, whose clients take real time"),
        (TaskType.SIMULATION, "got Flower's simulation, whose clients take real time"),
    ],
)
def test_real_clients_have_no_simulated_devices(kind, told):
    grid: Any = SimpleNamespace(run=SimpleNamespace(primary_task_type=kind))
    context = Context(1, 0, {}, RecordDict(), settings_from({"devices": "phones"}))
    with pytest.raises(ValueError, match=f"devices = 'phones': {told}, expected a run in process"):
        server_app.run(grid, context)


def test_report_and_plan_tell_the_time(tmp_path):
    settings = SHORT | {"devices": "edge-gpus", "eval-every": 1, "output-dir": str(tmp_path)}
    runs = [
        simulate(settings | {"num-rounds": 2} | more, num_clients=8)
        for more in ({}, {"aggregation": "async"})
    ]
    write_report([run.run_dir for run in runs], tmp_path / "report")
    assert "Accuracy by time of the devices" in (tmp_path / "report" / "index.html").read_text()
    for name in ("devices", "idle"):
        assert (tmp_path / "report" / f"run2-{name}.png").is_file()
    read = RecordedRun.read(runs[0].run_dir)
    seconds = [record["time"] for record in records(runs[0])]
    assert read.curve("accuracy")["time"] == seconds
    assert "s on the slowest" in plan_of(settings, 8)
    assert "s on the slowest" not in plan_of(settings | {"devices": "auto"}, 8)
