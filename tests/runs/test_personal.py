"""Runs in which a part of the model stays with each client, and the two references."""

import json
from typing import ClassVar

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from ravan_flwr import result_of, simulate
from ravan_flwr.cli import main
from ravan_flwr.client.client_request import PERSONAL_RECORD, find_personal, store_personal
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch import in_process
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.runs.checkpoint import load_personal_states
from ravan_flwr.specs import Scalar
from ravan_flwr.training.model_and_data import ModelAndData

SMALL: dict[str, Scalar] = {
    "num-rounds": 3, "local-steps": 2, "batch-size": 8, "report": False, "tracking": "none",
    "clients-per-round": 2,
}  # fmt: skip
PERSONAL = ("fedsa-lora", "local")


def run(folder, num_clients=3, **settings):
    config = SMALL | {k.replace("_", "-"): v for k, v in settings.items()}
    return simulate(config | {"output-dir": str(folder)}, num_clients)


def records_of(simulation):
    lines = (simulation.run_dir / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def parts_of(simulation, number=3):
    return load_personal_states(simulation.run_dir / "checkpoints", number)


def same_parts(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[client][key], other[client][key])
        for client in one
        for key in one[client].keys() | other[client].keys()
    )


class Watched(InProcessGrid):
    """Notes the tensors of every message, and loses a client's state when it is told to."""

    sent: ClassVar[list[set[str]]] = []
    losing = 0  # the round in which client 1 has lost its state when it is asked to train

    def _deliver(self, message):
        records = message.content.array_records.values()
        self.sent.append({name for record in records for name in record})
        number = message.content.config_records.get("config", {}).get("round")
        asked = message.metadata.dst_node_id, message.metadata.message_type, number
        if asked == (1, "train", self.losing):
            del self._contexts[1].state[PERSONAL_RECORD]
        reply = super()._deliver(message)
        self.sent.append({name for one in reply.content.array_records.values() for name in one})
        return reply


@pytest.fixture
def watched(monkeypatch):
    class Grid(Watched):
        sent: ClassVar[list[set[str]]] = []

    monkeypatch.setattr(in_process, "InProcessGrid", Grid)
    return Grid


@pytest.mark.parametrize("classifier", ["frozen", "trained"])
@pytest.mark.parametrize(("method", "travels"), [("fedsa-lora", {"A"}), ("local", set())])
def test_what_stays_never_travels(method, travels, classifier, watched, tmp_path):
    simulation = run(tmp_path, method=method, classifier=classifier)
    assert set().union(*watched.sent) == travels
    kept = {"B", "A"} - travels | ({"classifier"} if classifier == "trained" else set())
    assert {frozenset(own) for own in parts_of(simulation).values()} == {frozenset(kept)}
    assert simulation.summary["began-anew"] == 0
    # A alone, up: of eight matrices of 96 x 96 at rank 4.
    a_client = 4 * 8 * 4 * 96 * len(travels)
    asked = sum(len(record["clients"]) for record in records_of(simulation))
    assert asked == (9 if method == "local" else 6)  # each client in each round, or two of three
    assert simulation.summary["bytes-up"] == asked * a_client


@pytest.mark.parametrize("method", PERSONAL)
def test_a_resumed_run_ends_with_the_same_bits_on_every_client(method, tmp_path):
    whole = run(tmp_path, method=method)
    part = run(tmp_path, method=method, num_rounds=2)
    resumed = run(tmp_path, method=method, resume=str(part.run_dir))
    assert same_parts(parts_of(whole), parts_of(resumed))
    assert resumed.summary["metrics"] == whole.summary["metrics"]
    assert resumed.summary["per-client"] == whole.summary["per-client"]
    assert resumed.summary["began-anew"] == 0
    # Back to round 1, whose parts are still there.
    back = run(tmp_path, method=method, resume=f"{part.run_dir}@1")
    assert same_parts(parts_of(whole), parts_of(back))


def test_parts_are_kept_with_the_checkpoints_that_are(tmp_path):
    simulation = run(tmp_path, method="local", num_rounds=6)
    names = {path.name for path in (simulation.run_dir / "checkpoints").iterdir()}
    numbers = {name.partition("-")[2] for name in names if name.startswith("round-")}
    assert {name for name in names if name.startswith("clients-")} == {
        f"clients-{number}" for number in numbers
    }
    assert len(numbers) in (3, 4)


def test_parts_that_are_not_there_are_begun_anew_and_it_is_told(tmp_path, caplog):
    part = run(tmp_path, method="local", num_rounds=2)
    (part.run_dir / "checkpoints" / "clients-000002.safetensors").unlink()
    resumed = run(tmp_path, method="local", resume=str(part.run_dir))
    assert records_of(resumed)[-1]["began-anew"] == [0, 1, 2]
    assert resumed.summary["began-anew"] == 3


@pytest.mark.parametrize("method", PERSONAL)
def test_a_run_resumed_on_devices_tells_of_their_lost_parts(method, tmp_path, monkeypatch, capsys):
    """Under Flower a node keeps its part itself, for one run: one that is resumed is another."""
    monkeypatch.setattr(InProcessGrid, "in_process", False)
    part = run(tmp_path, method=method, num_rounds=2)
    assert not list((part.run_dir / "checkpoints").glob("clients-*"))
    trained = {c["partition-id"] for one in records_of(part) for c in one["clients"]}
    capsys.readouterr()
    resumed = run(tmp_path, method=method, num_rounds=4, resume=str(part.run_dir))
    lost: set[int] = set()
    for record in records_of(resumed)[2:]:
        asked = {client["partition-id"] for client in record["clients"]}
        assert set(record.get("began-anew", ())) == (asked & trained) - lost
        lost |= asked & trained
    assert lost
    assert resumed.summary["began-anew"] == len(lost)
    told = capsys.readouterr().out
    assert all(f"partition {one} has lost its personal parameters" in told for one in lost)


def test_damaged_parts_are_refused(tmp_path):
    part = run(tmp_path, method="local", num_rounds=2)
    path = part.run_dir / "checkpoints" / "clients-000002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"clients-000002.safetensors is damaged .*checksum is"):
        run(tmp_path, method="local", resume=str(part.run_dir))


def test_a_client_that_lost_its_part_begins_anew_and_it_is_told(watched, tmp_path, capsys):
    watched.losing = 2
    simulation = run(tmp_path, method="local")
    assert [record.get("began-anew") for record in records_of(simulation)] == [None, [0], None]
    assert simulation.summary["began-anew"] == 1
    told = capsys.readouterr().out
    assert "partition 0 has lost its personal parameters" in told
    assert "began anew 1" in told


def test_parts_that_are_not_sound_count_as_lost():
    model = ModelAndData(read_config({"method": "fedsa-lora"})).model
    good = model.personal_state()
    for own in (
        {"B": good["B"][:3], "classifier": good["classifier"]},
        {"B": good["B"] + torch.nan, "classifier": good["classifier"]},
        {"B": good["B"].double().half(), "classifier": good["classifier"]},
        good | {"A": good["B"]},
        {},
    ):
        state = RecordDict()
        store_personal(state, own)
        assert find_personal(state, model) is None
    state = RecordDict({PERSONAL_RECORD: ConfigRecord({"x": 1})})
    assert find_personal(state, model) is None
    store_personal(state, good)
    found = find_personal(state, model)
    assert found is not None
    assert all(torch.equal(found[key], good[key]) for key in good)
    assert from_record(state.array_records[PERSONAL_RECORD]).keys() == good.keys()


def test_local_clients_are_each_alone(tmp_path):
    """What a client ends with does not depend on who else is there."""
    together = run(tmp_path, method="local", weighting="examples")
    again = run(tmp_path, method="local", wire="int8")
    assert same_parts(parts_of(together), parts_of(again))
    parts = parts_of(together)
    assert not torch.equal(parts[0]["B"], parts[1]["B"])


def test_one_client_trains_on_the_examples_of_all(tmp_path):
    settings: dict[str, Scalar] = {"validation-share": 0.25, "partition": "dirichlet"}
    loaded = ModelAndData(read_config(settings | {"method": "centralised"}))
    parts = [loaded.partition(number, 3) for number in range(3)]
    pooled = loaded.pooled(3)
    assert sorted(pooled.rows) == sorted(row for part in parts for row in part.train.rows)
    assert not set(pooled.rows) & {row for part in parts for row in part.validation.rows}
    whole = ModelAndData(read_config({"method": "centralised"})).pooled(3)
    assert len(whole) > len(pooled)
    simulation = run(tmp_path, method="centralised")
    for record in records_of(simulation):
        (client,) = record["clients"]
        assert client["examples"] == len(whole)
    assert (simulation.run_dir / "adapter").is_dir()


def test_the_spread_over_clients_is_that_of_what_they_measured(tmp_path):
    simulation = run(tmp_path, evaluate_on="clients", validation_share=0.3, method="fedit")
    for record in records_of(simulation):
        assert record["per-client"].keys() == record["metrics"].keys()
    spread = simulation.summary["per-client"]["accuracy"]
    assert spread["clients"] == 3
    assert spread["min"] <= spread["lower-quartile"] <= spread["median"] <= spread["max"]
    assert "per-client" not in run(tmp_path, method="fedit", num_rounds=1).summary


@pytest.mark.parametrize("words", [["export", "--as", "merged"], ["predict"], ["evaluate"]])
def test_whose_model_must_be_said(words, tmp_path, capsys):
    simulation = run(tmp_path, method="fedsa-lora", num_rounds=1, num_clients=4)
    data = tmp_path / "data.csv"
    data.write_text("image,label\n")
    command, *more = words
    given = {
        "export": [str(simulation.run_dir), *more, str(tmp_path / "out")],
        "predict": [
            str(simulation.run_dir), "--data", str(data), "--output", str(tmp_path / "o.csv"),
        ],
        "evaluate": [str(simulation.run_dir), "--data", str(data)],
    }[command]  # fmt: skip
    trained = {client["partition-id"] for client in records_of(simulation)[0]["clients"]}
    idle = min({0, 1, 2, 3} - trained)
    for client, told in (
        ([], "has a model for each client, and none of the server's: got no client"),
        (["--client", str(idle)], "it has not trained; expected one of"),
        (["--client", "-1"], "it has not trained; expected one of"),
    ):
        with pytest.raises(SystemExit) as end:
            main([command, *given, *client])
        assert end.value.code == 2
        assert told in capsys.readouterr().err


def test_where_the_parts_are_on_devices_it_is_said(tmp_path):
    simulation = run(tmp_path, method="fedsa-lora", num_rounds=1)
    for path in (simulation.run_dir / "checkpoints").glob("clients-*"):
        path.unlink()
    with (
        pytest.raises(ValueError, match="on the devices, and deliver=true makes"),
        result_of(simulation.run_dir, 0),
    ):
        pass
    other = run(tmp_path, method="fedit", num_rounds=1)
    with (
        pytest.raises(ValueError, match="client = 0: method 'fedit' has one model for all"),
        result_of(other.run_dir, 0),
    ):
        pass


def test_the_report_shows_how_clients_differ(tmp_path):
    simulation = run(tmp_path, method="fedsa-lora", report=True)
    assert (simulation.run_dir / "report" / "clients.png").is_file()
    page = (simulation.run_dir / "report" / "index.html").read_text()
    assert "How the clients differ" in page
