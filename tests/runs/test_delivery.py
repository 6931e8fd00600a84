"""Devices that keep a run's result: what they have is what the server has, whole, or nothing."""

import contextlib
import json
import resource
import shutil
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForImageClassification

from ravan_flwr import simulate
from ravan_flwr.client import answers
from ravan_flwr.launch import in_process
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.methods import METHODS
from ravan_flwr.reports import device_result
from ravan_flwr.reports.evaluation import result_of
from ravan_flwr.reports.export import export_run
from ravan_flwr.specs import Scalar
from ravan_flwr.training.network import build_network
from testing.tiny import save_data, save_model

SHORT: dict[str, Scalar] = {
    "num-rounds": 2, "local-steps": 2, "batch-size": 8, "report": False, "tracking": "none",
    "budgets": "uniform", "deliver": True,
}  # fmt: skip
OF_WEIGHTS = {"full", "fedex-lora", "flora"}
NO_RESULT_PATH = "its node config has no result-path"


class Devices:
    """Node configs of simulated clients, by partition, and what becomes of each message."""

    def __init__(self, folder):
        self.folder, self.places = folder, {}
        self.configs: dict[Any, dict[str, Scalar]] = {}
        self.change = lambda message: None

    def add(self, number, **settings):
        self.places[number] = self.folder / f"device {number}" / "results"
        self.places[number].parent.mkdir(exist_ok=True)
        told = {"result-path": str(self.places[number])} | settings
        self.configs[number] = {k.replace("_", "-"): v for k, v in told.items()}

    def run(self, num_clients=3, **settings):
        config = SHORT | {"output-dir": str(self.folder / "runs")}
        return simulate(config | {k.replace("_", "-"): v for k, v in settings.items()}, num_clients)

    def copy_of(self, run):
        """Put a copy of a run that has ended among the runs here."""
        folder = self.folder / "runs" / run.run_dir.name
        shutil.copytree(run.run_dir, folder)
        return replace(run, run_dir=folder)

    def result(self, number, run):
        return self.places[number] / run.run_dir.name


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of a round that nobody was given."""
    folder = tmp_path_factory.mktemp("ended")
    return simulate(SHORT | {"num-rounds": 1, "deliver": False, "output-dir": str(folder)}, 3)


@pytest.fixture
def devices(tmp_path, monkeypatch):
    made = Devices(tmp_path)

    class Grid(InProcessGrid):
        def __init__(self, *given):
            super().__init__(*given)
            for context in self._contexts.values():
                context.node_config.update(
                    made.configs.get(context.node_config["partition-id"], {})
                )

        def _deliver(self, message):
            if message.metadata.message_type == "query.deliver":
                made.change(message)
            return super()._deliver(message)

    monkeypatch.setattr(in_process, "InProcessGrid", Grid)
    return made


def logits_of(network, examples):
    with torch.inference_mode():
        return network.eval()(pixel_values=examples["pixel_values"]).logits


def check_logits(run, folders, client=None):
    """Each folder, loaded as its own README says of its kind, gives the logits of the server."""
    with result_of(run.run_dir, client) as loaded:
        (encoded,) = loaded.test_sets.values()
        examples = encoded.take(encoded.rows[:32])
        ours = logits_of(loaded.model.network, examples)
    for folder in folders:
        if folder.name == "merged":
            theirs = AutoModelForImageClassification.from_pretrained(folder)
        else:
            backbone = build_network(loaded.config.model, loaded.task, seed=99).network
            theirs = peft.PeftModel.from_pretrained(backbone, folder)
        torch.testing.assert_close(logits_of(theirs, examples), ours, rtol=1e-4, atol=1e-4)


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if not m.mixes])
def test_every_device_has_what_the_server_has(method, devices):
    devices.add(0)
    devices.add(1, result_form="merged")
    run = devices.run(
        method=method, wire="int8" if method == "ravan" else "float32",
        budgets="full" if METHODS[method].personalised else "uniform",
    )  # fmt: skip
    natural = "merged" if method in OF_WEIGHTS else "adapter"
    assert run.summary["delivered"] == [
        {"partition-id": 0, "folder": natural}, {"partition-id": 1, "folder": "merged"},
    ]  # fmt: skip
    assert run.summary["not-delivered"] == [{"client": "partition 2", "reason": NO_RESULT_PATH}]
    assert json.loads((run.run_dir / "summary.json").read_text()) == run.summary
    folders = [devices.result(0, run) / natural, devices.result(1, run) / "merged"]
    if METHODS[method].personalised:  # each has its own, and the server none
        for number, folder in enumerate(folders):
            check_logits(run, [folder], number)
        assert not (run.run_dir / natural).exists()
    else:
        check_logits(run, folders)
        assert files_of(folders[0]) == files_of(run.run_dir / natural)  # the card as well
    for number in (0, 1):
        there = {path.name for path in devices.places[number].iterdir()}
        assert there == {run.run_dir.name}


def test_a_device_of_texts_has_what_reads_them_as_the_server_exports_it(devices, tmp_path):
    """In a process that has read no example yet, as every message has in a deployment."""
    model = save_model("bert", tmp_path / "model")
    data = save_data("glue-llama", tmp_path / "data", "rte")
    devices.add(0)
    devices.add(1, result_form="merged")
    devices.change = lambda _: answers.forget()
    run = devices.run(
        preset="glue-llama", glue_task="rte", model=str(model), data=str(data), lora_rank=2,
        max_length=16, learning_rate=1e-3, num_rounds=1,
    )  # fmt: skip
    assert [one["folder"] for one in run.summary["delivered"]] == ["adapter", "merged"]
    for number, (form, folder) in enumerate((("peft", "adapter"), ("merged", "merged"))):
        export_run(run.run_dir, form, tmp_path / folder)
        assert files_of(devices.result(number, run) / folder) == files_of(tmp_path / folder)
    files = {path.as_posix() for path in files_of(tmp_path / "merged")}
    assert "tokenizer.json" in files


def test_a_small_device_gets_all_heads(devices):
    devices.add(0, budget=0.25)
    run = devices.run(num_clients=1, clients_per_round=1)
    (line, *_) = (run.run_dir / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line)["clients"][0]["heads"] == 1
    check_logits(run, [devices.result(0, run) / "adapter"])


def test_what_is_made_once_for_the_run_is_there_as_well(devices):
    """Data-aware bases travel once; a device that never trained has them with the result."""
    devices.add(2)
    run = devices.run(init="data-aware:2", clients_per_round=1)
    assert run.summary["delivered"] == [{"partition-id": 2, "folder": "adapter"}]
    check_logits(run, [devices.result(2, run) / "adapter"])
    devices.add(1)
    again = devices.run(init="data-aware:2", clients_per_round=1, resume=str(run.run_dir))
    assert [one["partition-id"] for one in again.summary["delivered"]] == [1, 2]
    check_logits(run, [devices.result(1, run) / "adapter"])


def test_in_a_simulation_nobody_takes_it_and_that_is_no_error(devices, caplog):
    run = devices.run()
    assert run.summary["delivered"] == []
    assert [one["reason"] for one in run.summary["not-delivered"]] == [NO_RESULT_PATH] * 3
    assert not {"delivered", "not-delivered"} & devices.run(deliver=False).summary.keys()


def test_a_form_that_there_is_not_is_told(devices):
    devices.add(0, result_form="adapter")
    run = devices.run(method="full", num_rounds=1)
    assert run.summary["not-delivered"][0]["reason"].startswith(
        "its result-form is 'adapter', but method 'full' changes pretrained weights"
    )
    assert not devices.places[0].exists()


# Again, and after more rounds.


def test_a_run_that_has_ended_is_delivered_again_and_nothing_else_of_it_changes(devices):
    run = devices.run(deliver=False)
    before = files_of(run.run_dir)
    with pytest.raises(ValueError, match="seed: then 0, now 1"):
        devices.run(seed=1, resume=str(run.run_dir))
    devices.add(1)
    first = devices.run(resume=str(run.run_dir), num_rounds=1)
    assert "nothing is trained" not in (run.run_dir / "log.txt").read_text()
    assert first.summary["delivered"] == [{"partition-id": 1, "folder": "adapter"}]
    there = devices.result(1, run)
    inodes = {path: path.stat().st_ino for path in there.rglob("*")}
    devices.add(0)
    second = devices.run(resume=str(run.run_dir))
    assert [one["partition-id"] for one in second.summary["delivered"]] == [0, 1]
    assert {path: path.stat().st_ino for path in there.rglob("*")} == inodes  # left as it was
    after = files_of(run.run_dir)
    changed = {path.as_posix() for path in after if before.get(path) != after[path]}
    assert changed == {"summary.json", "log.txt"}
    summary = {k: v for k, v in second.summary.items() if "delivered" not in k}
    assert summary == run.summary
    # A person resumes it once more without: who has it stays written.
    assert (
        devices.run(deliver=False, resume=str(run.run_dir)).summary["delivered"]
        == (second.summary["delivered"])
    )


def test_a_run_that_ended_before_its_result_was_delivered_delivers_it(devices, monkeypatch):
    devices.add(0)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ravan_flwr.extras.delivery.DeliverAtEnd.deliver", killed)
        with pytest.raises(KeyboardInterrupt):
            devices.run()
    (directory,) = (devices.folder / "runs").iterdir()
    assert "delivered" not in json.loads((directory / "summary.json").read_text())
    assert (directory / "adapter" / "adapter_config.json").exists()
    assert devices.run(resume=str(directory)).summary["delivered"] != []


def test_more_rounds_replace_what_the_same_run_delivered(devices):
    devices.add(0)
    run = devices.run()
    former = files_of(devices.result(0, run))
    other = devices.run(seed=1)
    more = devices.run(num_rounds=3, resume=str(run.run_dir))
    assert more.summary["delivered"] == [{"partition-id": 0, "folder": "adapter"}]
    assert files_of(devices.result(0, run)) != former
    check_logits(more, [devices.result(0, run) / "adapter"])
    names = {path.name for path in devices.places[0].iterdir()}
    assert names == {run.run_dir.name, other.run_dir.name}
    check_logits(other, [devices.result(0, other) / "adapter"])


def test_what_was_damaged_on_the_device_is_mended(devices):
    devices.add(0)
    run = devices.run()
    there = devices.result(0, run)
    whole = files_of(there)
    (there / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    (there / "adapter" / "README.md").unlink()
    devices.run(resume=str(run.run_dir))
    assert files_of(there) == whole


@pytest.mark.parametrize("what", ["folder", "file", "link", "another run", "damaged mark"])
def test_what_somebody_else_made_is_never_touched(what, ended, devices, tmp_path):
    devices.add(0)
    run = devices.copy_of(ended)
    there = devices.result(0, run)
    there.parent.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("data")
    (elsewhere / device_result.MARK).write_text(json.dumps({"run-id": "f" * 16}))
    if what == "file":
        there.write_text("precious")
    elif what == "link":
        there.symlink_to(elsewhere)
    else:
        there.mkdir()
        (there / "precious").write_text("data")
    if what == "another run":
        (there / device_result.MARK).write_text(json.dumps({"run-id": "f" * 16}))
    if what == "damaged mark":
        (there / device_result.MARK).write_text("[" * 100_000)
    before = files_of(tmp_path / "device 0"), files_of(elsewhere)
    again = devices.run(num_rounds=1, resume=str(run.run_dir))
    assert again.summary["delivered"] == []
    assert (
        "already, which this run did not write, and which stays as it is; move it away"
        in (again.summary["not-delivered"][0]["reason"])
    )
    assert (files_of(tmp_path / "device 0"), files_of(elsewhere)) == before
    assert there.is_symlink() == (what == "link")


def test_files_that_somebody_put_beside_are_never_lost(devices):
    devices.add(0)
    run = devices.run()
    there = devices.result(0, run)
    (there / "adapter" / "model.onnx").write_text("made of it")
    before = files_of(there)
    assert devices.run(resume=str(run.run_dir)).summary["delivered"] != []
    assert files_of(there) == before
    more = devices.run(resume=str(run.run_dir), num_rounds=3)
    assert more.summary["delivered"] == []
    told = more.summary["not-delivered"][0]["reason"]
    assert "'adapter/model.onnx' in" in told
    assert "which this run did not write, and which stays as it is; move it away" in told
    assert files_of(there) == before


@pytest.mark.parametrize("files", [None, [], {}, "x", {"adapter/README.md": 1}])
def test_a_mark_that_lists_nothing_proves_nothing(files, devices):
    devices.add(0)
    run = devices.run()
    mark = devices.result(0, run) / device_result.MARK
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"files": files}))
    again = devices.run(resume=str(run.run_dir))
    assert again.summary["delivered"] == []
    assert "which this run did not write" in again.summary["not-delivered"][0]["reason"]


# Faults of the device.


@contextlib.contextmanager
def files_of_at_most(number):
    """Let the system refuse larger files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_a_full_disk_is_told_and_leaves_nothing_behind(form, devices, monkeypatch):
    devices.add(0, result_form=form)
    devices.add(1)
    run = devices.run()
    former = files_of(devices.places[0])
    keep = answers._keep

    def on_a_full_disk(client):
        with files_of_at_most(20_000 if client.node.partition_id == 0 else -1):
            return keep(client)

    monkeypatch.setattr(answers, "_keep", on_a_full_disk)
    more = devices.run(num_rounds=3, resume=str(run.run_dir))
    assert more.summary["delivered"] == [{"partition-id": 1, "folder": "adapter"}]
    assert more.summary["rounds"] == 3
    (first, _) = more.summary["not-delivered"]
    assert first["client"] == "partition 0"
    assert "File too large" in first["reason"]
    assert str(devices.folder) not in json.dumps(more.summary)  # the server is told no paths
    # What the run delivered before is there as it was, and nothing beside it.
    assert files_of(devices.places[0]) == former
    assert [path.name for path in devices.places[0].iterdir()] == [run.run_dir.name]
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("a file is in the way", "its result-path cannot be written to: File exists"),
        ("its parent is missing", "its result-path cannot be written to: No such file or"),
        ("read-only", "its result-path cannot be written to: Read-only file system"),
        ("no memory", "RuntimeError: out of memory"),
    ],
)
def test_a_place_that_cannot_be_used_is_told(fault, told, devices, monkeypatch):
    devices.add(0)
    place = devices.places[0]
    if fault == "a file is in the way":
        place.write_text("")
    elif fault == "its parent is missing":
        place.parent.rmdir()
    else:
        error = OSError(30, "Read-only file system", str(place))
        error_or_memory = error if fault == "read-only" else RuntimeError("out of memory")

        def refuse(*_):
            raise error_or_memory

        monkeypatch.setattr(device_result, "_write", refuse)
    run = devices.run(num_rounds=1)
    assert run.summary["delivered"] == []
    assert run.summary["not-delivered"][0]["reason"].startswith(told)
    assert str(devices.folder) not in json.dumps(run.summary)


@pytest.mark.parametrize("moment", ["_write_mark", "_replace"])
def test_a_process_that_ends_on_the_way_leaves_what_was_there(moment, devices, monkeypatch):
    devices.add(0)
    run = devices.run()
    former = files_of(devices.result(0, run))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device_result, moment, killed)
        patch.setattr(device_result, "_remove", lambda _: None)  # nobody cleans up after a kill
        with pytest.raises(KeyboardInterrupt):
            devices.run(num_rounds=3, resume=str(run.run_dir))
    assert files_of(devices.result(0, run)) == former
    assert len(list(devices.places[0].iterdir())) == 2
    again = devices.run(num_rounds=3, resume=str(run.run_dir))
    assert again.summary["delivered"] == [{"partition-id": 0, "folder": "adapter"}]
    assert [path.name for path in devices.places[0].iterdir()] == [run.run_dir.name]
    check_logits(again, [devices.result(0, run) / "adapter"])


def test_a_name_that_cannot_be_taken_gives_back_what_had_it(devices, monkeypatch, tmp_path):
    target, beside = tmp_path / "run", tmp_path / "missing"
    target.mkdir()
    (target / "file").write_text("x")
    with pytest.raises(FileNotFoundError):
        device_result._replace(beside, target, tmp_path / "former")
    assert (target / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# Faults of whoever sends it.

CHANGES = {
    "a name that leads elsewhere": (
        lambda config, _: config.update({"run": "../../elsewhere"}), "the run's name is '../../els",
    ),
    "an absolute name": (lambda config, _: config.update({"run": "/elsewhere"}), "the run's name"),
    "no checksum": (lambda config, _: config.pop("checksum"), "checksum is None, expected"),
    "another checksum": (
        lambda config, _: config.update({"checksum": "0" * 16}), "it was damaged",
    ),
    "a summary that lacks all": (lambda config, _: config.update({"summary": "{}"}), "KeyError: "),
    "a summary of another kind": (
        lambda config, _: config.update({"summary": '{"metrics": [1]}'}), "TypeError: ",
    ),
    "bytes that differ": (lambda _, array: _flip(array, 40), "it was damaged"),
    "not a number": (lambda _, array: _flip(array, 3, 0x7F), "not finite"),
    "bytes that are missing": (
        lambda _, array: setattr(array, "data", array.data[:-4]), "bytes, expected",
    ),
    "another shape": (
        lambda _, array: setattr(array, "shape", array.shape[::-1]), "it was damaged",
    ),
}  # fmt: skip


def _flip(array, where, by=1):
    data = bytearray(array.data)
    data[where] ^= by
    if by != 1:
        data[where - 3 : where + 1] = b"\xff\xff\xff\x7f"
    array.data = bytes(data)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_as_it_was_sent_is_not_kept(change, ended, devices):
    devices.add(0)
    devices.add(1)
    damage, told = CHANGES[change]

    def changed(message):
        if message.metadata.dst_node_id == 1:
            content = message.content
            damage(content["config"], content["arrays"]["H"])

    run = devices.copy_of(ended)
    devices.change = changed
    again = devices.run(num_rounds=1, num_clients=2, resume=str(run.run_dir))
    assert again.summary["delivered"][-1:] == having_from(change)
    reasons = {one["client"]: one["reason"] for one in again.summary["not-delivered"]}
    assert told in reasons["partition 0"]
    assert not devices.places[0].exists() or not list(devices.places[0].iterdir())
    assert not (devices.folder / "elsewhere").exists()


def having_from(change):
    # Nodes of one process are sent one and the same array.
    shared = change.startswith(("bytes", "not a", "another sh"))
    return [] if shared else [{"partition-id": 1, "folder": "adapter"}]
