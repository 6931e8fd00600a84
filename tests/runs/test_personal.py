"""Runs with personal parameters, and the references `local` and `centralised`."""

import functools
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from ravan_flwr import result_of
from ravan_flwr.client.client_request import PERSONAL_RECORD, find_personal, store_personal
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch import in_process
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.runs.checkpoint import load_personal_states, save_personal_states
from ravan_flwr.training.model_and_data import ModelAndData
from tests import short_runs
from tests.commands import error_of
from tests.short_runs import records_of, same_bits

run = functools.partial(short_runs.run, settings={"num-rounds": 3, "clients-per-round": 2})
PERSONAL = ("fedsa-lora", "local")


def parts_of(simulation, number=3):
    return load_personal_states(simulation.run_dir / "checkpoints", number)


def same_parts(first, second):
    return first.keys() == second.keys() and all(
        same_bits(first[client], second[client]) for client in first
    )


@pytest.fixture
def watched(monkeypatch):
    """Record the tensors of every message, and delete a client's state in one round."""

    class Grid(InProcessGrid):
        sent: ClassVar[list[set[str]]] = []
        lose_in_round = 0  # the round before whose training client 1 loses its state

        def _deliver(self, message):
            number = message.content.config_records.get("config", {}).get("round")
            request = message.metadata.dst_node_id, message.metadata.message_type, number
            if request == (1, "train", self.lose_in_round):
                del self._contexts[1].state[PERSONAL_RECORD]
            reply = super()._deliver(message)
            for content in (message.content, reply.content):
                self.sent.append({n for record in content.array_records.values() for n in record})
            return reply

    monkeypatch.setattr(in_process, "InProcessGrid", Grid)
    return Grid


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("classifier", ["frozen", "trained"])
@pytest.mark.parametrize(("method", "travels"), [("fedsa-lora", {"A"}), ("local", set())])
def test_personal_parameters_are_never_sent(method, travels, classifier, watched, tmp_path):
    simulation = run(tmp_path, method=method, classifier=classifier)
    assert set().union(*watched.sent) == travels
    personal_names = {"B", "A"} - travels | ({"classifier"} if classifier == "trained" else set())
    parts = {frozenset(part) for part in parts_of(simulation).values()}
    assert parts == {frozenset(personal_names)}
    assert simulation.summary["began-anew"] == 0
    # Only A is uploaded, of eight matrices of 96 x 96 at rank 4.
    a_client = 4 * 8 * 4 * 96 * len(travels)
    num_requests = sum(len(record["clients"]) for record in records_of(simulation))
    assert num_requests == (9 if method == "local" else 6)  # each client, or two of three
    assert simulation.summary["bytes-up"] == num_requests * a_client


@pytest.mark.slow
@pytest.mark.parametrize("method", PERSONAL)
def test_a_run_resumes_to_the_same_bits_on_every_client(method, tmp_path):
    uninterrupted = run(tmp_path, method=method)
    stopped = run(tmp_path, method=method, num_rounds=2)
    resumed = run(tmp_path, method=method, resume=str(stopped.run_dir))
    assert same_parts(parts_of(uninterrupted), parts_of(resumed))
    assert resumed.summary["metrics"] == uninterrupted.summary["metrics"]
    assert resumed.summary["per-client"] == uninterrupted.summary["per-client"]
    assert resumed.summary["began-anew"] == 0
    # Back to round 1, whose personal parameters are still stored.
    returned = run(tmp_path, method=method, resume=f"{stopped.run_dir}@1")
    assert same_parts(parts_of(uninterrupted), parts_of(returned))


@pytest.mark.slow
def test_personal_parameters_are_stored_as_long_as_their_checkpoint(tmp_path):
    simulation = run(tmp_path, method="local", num_rounds=6)
    names = {path.name for path in (simulation.run_dir / "checkpoints").iterdir()}
    numbers = {name.partition("-")[2] for name in names if name.startswith("round-")}
    assert {name for name in names if name.startswith("clients-")} == {
        f"clients-{number}" for number in numbers
    }
    assert len(numbers) in (3, 4)


@pytest.mark.slow
def test_damaged_personal_parameters_are_refused_and_missing_ones_initialised(tmp_path):
    stopped = run(tmp_path, method="local", num_rounds=2)
    path = stopped.run_dir / "checkpoints" / "clients-000002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"clients-000002.safetensors is damaged .*checksum is"):
        run(tmp_path, method="local", resume=str(stopped.run_dir))
    path.unlink()
    resumed = run(tmp_path, method="local", resume=str(stopped.run_dir))
    assert records_of(resumed)[-1]["began-anew"] == [0, 1, 2]
    assert resumed.summary["began-anew"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", PERSONAL)
def test_a_run_resumed_on_devices_reports_lost_parameters(method, tmp_path, monkeypatch, capsys):
    """Under Flower a node stores them for one run, and a resumed run is another run."""
    monkeypatch.setattr(InProcessGrid, "in_process", False)
    stopped = run(tmp_path, method=method, num_rounds=2)
    assert not list((stopped.run_dir / "checkpoints").glob("clients-*"))
    trained = {c["partition-id"] for record in records_of(stopped) for c in record["clients"]}
    capsys.readouterr()
    resumed = run(tmp_path, method=method, num_rounds=4, resume=str(stopped.run_dir))
    lost: set[int] = set()
    for record in records_of(resumed)[2:]:
        requested = {client["partition-id"] for client in record["clients"]}
        assert set(record.get("began-anew", ())) == (requested & trained) - lost
        lost |= requested & trained
    assert lost
    assert resumed.summary["began-anew"] == len(lost)
    output = capsys.readouterr().out
    assert all(f"partition {number} has lost its personal parameters" in output for number in lost)


def test_personal_parameters_without_a_partition_are_refused(tmp_path):
    states: Any = {"x": {"own": torch.ones(1)}}
    save_personal_states(tmp_path, 1, states)
    with pytest.raises(ValueError, match="clients-000001.safetensors is damaged .*'x/own'"):
        load_personal_states(tmp_path, 1)


@pytest.mark.slow
def test_a_client_without_its_parameters_starts_again_and_is_reported(watched, tmp_path, capsys):
    watched.lose_in_round = 2
    simulation = run(tmp_path, method="local")
    assert [record.get("began-anew") for record in records_of(simulation)] == [None, [0], None]
    assert simulation.summary["began-anew"] == 1
    output = capsys.readouterr().out
    assert "partition 0 has lost its personal parameters" in output
    assert "began anew 1" in output


def test_invalid_personal_parameters_count_as_lost():
    model = ModelAndData(read_config({"method": "fedsa-lora"})).model
    good = model.collect_personal()
    for personal in (
        {"B": good["B"][:3], "classifier": good["classifier"]},
        {"B": good["B"] + torch.nan, "classifier": good["classifier"]},
        {"B": good["B"].double().half(), "classifier": good["classifier"]},
        good | {"A": good["B"]},
        {},
    ):
        state = RecordDict()
        store_personal(state, personal)
        assert find_personal(state, model) is None
    state = RecordDict({PERSONAL_RECORD: ConfigRecord({"x": 1})})
    assert find_personal(state, model) is None
    store_personal(state, good)
    loaded = find_personal(state, model)
    assert loaded is not None
    assert all(torch.equal(loaded[key], good[key]) for key in good)
    assert from_record(state.array_records[PERSONAL_RECORD]).keys() == good.keys()


@pytest.mark.slow
def test_local_clients_are_independent(tmp_path):
    """A client's result does not depend on the weights or uploads of other clients."""
    together = run(tmp_path, method="local", weighting="examples")
    other = run(tmp_path, method="local", wire="int8")
    assert same_parts(parts_of(together), parts_of(other))
    parts = parts_of(together)
    assert not torch.equal(parts[0]["B"], parts[1]["B"])


@pytest.mark.slow
def test_centralised_training_uses_the_examples_of_all_clients(tmp_path):
    settings: dict[str, Any] = {
        "validation-share": 0.25,
        "partition": "dirichlet",
        "method": "centralised",
    }
    loaded = ModelAndData(read_config(settings))
    parts = [loaded.partition(number, 3) for number in range(3)]
    pooled = loaded.pooled(3)
    assert sorted(pooled.rows) == sorted(row for stopped in parts for row in stopped.train.rows)
    assert not set(pooled.rows) & {row for stopped in parts for row in stopped.validation.rows}
    uninterrupted = ModelAndData(read_config({"method": "centralised"})).pooled(3)
    assert len(uninterrupted) > len(pooled)
    simulation = run(tmp_path, method="centralised")
    for record in records_of(simulation):
        (client,) = record["clients"]
        assert client["examples"] == len(uninterrupted)
    assert (simulation.run_dir / "adapter").is_dir()


@pytest.mark.slow
def test_per_client_statistics_are_of_the_clients_metrics(tmp_path):
    simulation = run(
        tmp_path, evaluate_on="clients", validation_share=0.3, method="fedit",
        tracking="tensorboard",
    )  # fmt: skip
    for record in records_of(simulation):
        assert record["per-client"].keys() == record["metrics"].keys()
    statistics = simulation.summary["per-client"]["accuracy"]
    assert statistics["clients"] == 3
    values = [statistics[name] for name in ("min", "lower-quartile", "median", "max")]
    assert values == sorted(values)
    assert (simulation.run_dir / "report" / "clients.png").is_file()
    page = (simulation.run_dir / "report" / "index.html").read_text()
    assert "How the clients differ" in page
    assert "per-client" not in run(tmp_path, method="fedit", num_rounds=1).summary


@pytest.mark.slow
def test_commands_need_a_client_of_a_personalised_run(tmp_path, capsys):
    simulation = run(tmp_path, method="fedsa-lora", num_rounds=1, clients=4)
    run_dir, data = simulation.run_dir, tmp_path / "data.csv"
    data.write_text("image,label\n")
    trained = {client["partition-id"] for client in records_of(simulation)[0]["clients"]}
    idle = min({0, 1, 2, 3} - trained)
    for words in (
        ["export", run_dir, "--as", "merged", tmp_path / "out"],
        ["predict", run_dir, "--data", data, "--output", tmp_path / "o.csv"],
        ["evaluate", run_dir, "--data", data],
    ):
        for client, output in (
            ([], "has a model for each client, and none of the server's: got no client"),
            (["--client", idle], "it has not trained; expected one of"),
            (["--client", "-1"], "it has not trained; expected one of"),
        ):
            assert output in error_of(capsys, *words, *client)
    for path in (simulation.run_dir / "checkpoints").glob("clients-*"):
        path.unlink()
    other = run(tmp_path, method="fedit", num_rounds=1)
    for folder, message in (
        (run_dir, "on the devices, and deliver=true makes"),
        (other.run_dir, "client = 0: method 'fedit' has one model for all"),
    ):
        with pytest.raises(ValueError, match=message), result_of(folder, 0):
            pass


@pytest.mark.slow
def test_a_calibration_trains_no_personal_parameters(tmp_path):
    settings = {"method": "fedalt", "init": "data-aware"}
    uninterrupted = run(tmp_path, **settings)
    first, *others = records_of(uninterrupted)
    assert (first["round"], len(first["clients"])) == (0, 3)
    assert not any(record.get("began-anew") for record in others)
    stopped = run(tmp_path, **settings, num_rounds=2)
    resumed = run(tmp_path, **settings, resume=str(stopped.run_dir))
    assert same_parts(parts_of(uninterrupted), parts_of(resumed))
