"""Delivery of a run's result: each device gets the complete result of the server, or nothing."""

import contextlib
import json
import resource
import shutil
from dataclasses import replace
from typing import Any

import pytest

from ravan_flwr.client import answers
from ravan_flwr.extras.delivery import client as keeping
from ravan_flwr.extras.delivery import device_result
from ravan_flwr.launch import in_process
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.methods import METHODS
from ravan_flwr.results.evaluation import result_of
from ravan_flwr.results.export import export_run
from ravan_flwr.specs import Scalar
from tests import short_runs
from tests.runs.in_use import OF_WEIGHTS, check_logits, examples_and_logits
from tests.support.tiny import save_data, save_model

NO_RESULT_PATH = "its node config has no result-path"


class Devices:
    """Node configs of simulated clients, by partition, and a hook that may change each message."""

    def __init__(self, folder):
        self.folder, self.result_folders = folder, {}
        self.configs: dict[Any, dict[str, Scalar]] = {}
        self.change = lambda message: None

    def add(self, number, **settings):
        self.result_folders[number] = self.folder / f"device {number}" / "results"
        self.result_folders[number].parent.mkdir(exist_ok=True)
        config = {"result-path": str(self.result_folders[number])} | settings
        self.configs[number] = {k.replace("_", "-"): v for k, v in config.items()}

    def run(self, clients=3, **settings):
        given = {"budgets": "uniform", "deliver": True}
        return short_runs.run(self.folder / "runs", clients, given, **settings)

    def copy_of(self, run):
        """Copy a finished run into this folder of runs."""
        folder = self.folder / "runs" / run.run_dir.name
        shutil.copytree(run.run_dir, folder)
        return replace(run, run_dir=folder)

    def result(self, number, run):
        return self.result_folders[number] / run.run_dir.name

    def results(self, number):
        """Return the names of a device's results."""
        return {path.name for path in self.result_folders[number].iterdir()}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return a run of one round whose result was not delivered."""
    return short_runs.run(tmp_path_factory.mktemp("ended"), budgets="uniform", num_rounds=1)


@pytest.fixture
def devices(tmp_path, monkeypatch):
    registered = Devices(tmp_path)

    class Grid(InProcessGrid):
        def __init__(self, *given):
            super().__init__(*given)
            for context in self._contexts.values():
                context.node_config.update(
                    registered.configs.get(context.node_config["partition-id"], {})
                )

        def _deliver(self, message):
            if message.metadata.message_type == "query.deliver":
                registered.change(message)
            return super()._deliver(message)

    monkeypatch.setattr(in_process, "InProcessGrid", Grid)
    return registered


def check_results(run, folders, client=None):
    """Check that each folder gives the logits of the server's model."""
    with result_of(run.run_dir, client) as loaded:
        expected = examples_and_logits(loaded)
    for folder in folders:
        check_logits(folder, loaded, expected)


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def delivered(run):
    """Return the partitions that have the run's adapter."""
    assert all(delivery["folder"] == "adapter" for delivery in run.summary["delivered"])
    return [delivery["partition-id"] for delivery in run.summary["delivered"]]


def reason_of(run):
    """Return why no device has the result."""
    assert run.summary["delivered"] == []
    return run.summary["not-delivered"][0]["reason"]


def killed(*_):
    raise KeyboardInterrupt


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if not m.mixes])
def test_every_device_gets_the_servers_result(method, devices):
    devices.add(0)
    devices.add(1, result_form="merged")
    run = devices.run(
        method=method, wire="int8" if method == "ravan" else "float32",
        budgets="full" if METHODS[method].personalised else "uniform",
    )  # fmt: skip
    folder_name = "merged" if method in OF_WEIGHTS else "adapter"
    assert run.summary["delivered"] == [
        {"partition-id": 0, "folder": folder_name}, {"partition-id": 1, "folder": "merged"},
    ]  # fmt: skip
    assert run.summary["not-delivered"] == [{"client": "partition 2", "reason": NO_RESULT_PATH}]
    assert json.loads((run.run_dir / "summary.json").read_text()) == run.summary
    folders = [devices.result(0, run) / folder_name, devices.result(1, run) / "merged"]
    if METHODS[method].personalised:  # each client has its own result, and the server none
        for number, folder in enumerate(folders):
            check_results(run, [folder], number)
        assert not (run.run_dir / folder_name).exists()
    else:
        check_results(run, folders)
        assert files_of(folders[0]) == files_of(run.run_dir / folder_name)  # the card as well
    assert devices.results(0) == devices.results(1) == {run.run_dir.name}


@pytest.mark.slow
def test_a_device_gets_the_same_files_as_an_export_with_the_tokenizer(devices, tmp_path):
    """Also in a process that has read no example, as in a deployment."""
    model = save_model("bert", tmp_path / "model")
    data = save_data("glue-llama", tmp_path / "data", "rte")
    devices.add(0)
    devices.add(1, result_form="merged")
    devices.change = lambda _: answers.forget()
    run = devices.run(
        preset="glue-llama", glue_task="rte", model=str(model), data=str(data), lora_rank=2,
        max_length=16, learning_rate=1e-3, num_rounds=1,
    )  # fmt: skip
    assert [delivery["folder"] for delivery in run.summary["delivered"]] == ["adapter", "merged"]
    for number, (form, folder) in enumerate((("peft", "adapter"), ("merged", "merged"))):
        export_run(run.run_dir, form, tmp_path / folder)
        assert files_of(devices.result(number, run) / folder) == files_of(tmp_path / folder)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_a_small_device_gets_all_heads(devices):
    devices.add(0, budget=0.25)
    run = devices.run(clients=1, clients_per_round=1)
    assert short_runs.records_of(run)[0]["clients"][0]["heads"] == 1
    check_results(run, [devices.result(0, run) / "adapter"])


@pytest.mark.slow
def test_a_device_that_never_trained_gets_the_bases(devices):
    """Data-aware bases are sent once; a device that never trained gets them with the result."""
    devices.add(2)
    settings = {"init": "data-aware:2", "clients_per_round": 1}
    run = devices.run(**settings)
    assert delivered(run) == [2]
    check_results(run, [devices.result(2, run) / "adapter"])
    devices.add(1)
    assert delivered(devices.run(resume=str(run.run_dir), **settings)) == [1, 2]
    check_results(run, [devices.result(1, run) / "adapter"])


def test_a_form_that_the_method_lacks_is_not_delivered(devices):
    devices.add(0, result_form="adapter")
    reason = reason_of(devices.run(method="full", num_rounds=1))
    assert reason.startswith("its result-form is 'adapter', but method 'full'")
    assert not devices.result_folders[0].exists()


# Repeated delivery, and delivery after more rounds.


@pytest.mark.slow
def test_delivering_a_finished_run_again_changes_only_its_summary_and_log(devices):
    run = devices.run(deliver=False)
    assert not {"delivered", "not-delivered"} & run.summary.keys()
    before = files_of(run.run_dir)
    with pytest.raises(ValueError, match="seed: then 0, now 1"):
        devices.run(seed=1, resume=str(run.run_dir))
    devices.add(1)
    assert delivered(devices.run(resume=str(run.run_dir), num_rounds=1)) == [1]
    assert "nothing is trained" not in (run.run_dir / "log.txt").read_text()
    folder = devices.result(1, run)
    inodes = {path: path.stat().st_ino for path in folder.rglob("*")}
    devices.add(0)
    second = devices.run(resume=str(run.run_dir))
    assert delivered(second) == [0, 1]
    assert {path: path.stat().st_ino for path in folder.rglob("*")} == inodes  # not written again
    after = files_of(run.run_dir)
    changed = {path.as_posix() for path in after if before.get(path) != after[path]}
    assert changed == {"summary.json", "log.txt"}
    assert {k: v for k, v in second.summary.items() if "delivered" not in k} == run.summary
    # Resuming it without `deliver` keeps the list of deliveries.
    assert delivered(devices.run(deliver=False, resume=str(run.run_dir))) == [0, 1]


@pytest.mark.slow
def test_a_run_that_ended_before_its_result_was_delivered_delivers_it(devices, monkeypatch):
    devices.add(0)
    with monkeypatch.context() as patch:
        patch.setattr("ravan_flwr.extras.delivery.server.DeliverAtEnd.deliver", killed)
        with pytest.raises(KeyboardInterrupt):
            devices.run()
    (directory,) = (devices.folder / "runs").iterdir()
    assert "delivered" not in json.loads((directory / "summary.json").read_text())
    assert (directory / "adapter" / "adapter_config.json").exists()
    assert delivered(devices.run(resume=str(directory))) == [0]


def test_a_result_whose_checkpoint_is_damaged_is_not_replaced_by_an_earlier_one(devices):
    """`deliver` sets num-rounds=1: the round before was taken for the last one."""
    devices.add(0)
    run = devices.run(deliver=False)
    (run.run_dir / "checkpoints" / "round-000002.safetensors").write_bytes(b"damaged")
    before = files_of(run.run_dir)
    with pytest.raises(ValueError, match=r"restore .*round-000002.*num-rounds=2.*@1"):
        devices.run(resume=str(run.run_dir), num_rounds=1)
    assert files_of(run.run_dir) == before
    assert devices.run(resume=str(run.run_dir)).summary["rounds"] == 2  # round 2 is trained again


def test_a_run_that_went_back_and_was_killed_before_its_result_writes_it_first(
    devices, monkeypatch
):
    """Its summary is that of the rounds that it went back from, of which it has as many again."""
    devices.add(0)
    run = devices.run()
    others = {"limits": "max-share=0.5", "num_rounds": run.summary["rounds"]}
    with monkeypatch.context() as patch:
        patch.setattr("ravan_flwr.server_app.write_result", killed)
        with pytest.raises(KeyboardInterrupt):
            devices.run(resume=f"{run.run_dir}@1", **others)
    again = devices.run(resume=str(run.run_dir), **others)
    assert delivered(again) == [0]
    sent = sum(record["bytes-up"] for record in short_runs.records_of(again))
    assert run.summary["bytes-up"] != sent == again.summary["bytes-up"]
    check_results(again, [devices.result(0, again) / "adapter"])


@pytest.mark.slow
def test_more_rounds_replace_what_the_same_run_delivered(devices):
    devices.add(0)
    run = devices.run()
    former = files_of(devices.result(0, run))
    other = devices.run(seed=1)
    more = devices.run(num_rounds=3, resume=str(run.run_dir))
    assert delivered(more) == [0]
    assert files_of(devices.result(0, run)) != former
    check_results(more, [devices.result(0, run) / "adapter"])
    assert devices.results(0) == {run.run_dir.name, other.run_dir.name}
    check_results(other, [devices.result(0, other) / "adapter"])


@pytest.mark.parametrize("kind", ["folder", "file", "link", "another run", "damaged mark"])
def test_files_of_other_origin_are_never_changed(kind, ended, devices, tmp_path):
    devices.add(0)
    run = devices.copy_of(ended)
    folder, elsewhere = devices.result(0, run), tmp_path / "elsewhere"
    folder.parent.mkdir()
    mark = json.dumps({"run-id": "f" * 16})
    for made in (elsewhere, folder):
        made.mkdir()
        (made / "precious").write_text("data")
    (elsewhere / device_result.MARK).write_text(mark)
    if kind in ("file", "link"):
        shutil.rmtree(folder)
    if kind == "file":
        folder.write_text("precious")
    elif kind == "link":
        folder.symlink_to(elsewhere)
    elif kind != "folder":
        text = mark if kind == "another run" else "[" * 100_000
        (folder / device_result.MARK).write_text(text)
    before = files_of(tmp_path / "device 0"), files_of(elsewhere)
    reason = reason_of(devices.run(num_rounds=1, resume=str(run.run_dir)))
    assert "already, which this run did not write, and which stays as it is" in reason
    assert (files_of(tmp_path / "device 0"), files_of(elsewhere)) == before
    assert folder.is_symlink() == (kind == "link")


@pytest.mark.slow
def test_damaged_files_are_replaced_and_added_ones_never_removed(devices):
    devices.add(0)
    run = devices.run()
    folder = devices.result(0, run)
    before = files_of(folder)
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    (folder / "adapter" / "README.md").unlink()
    devices.run(resume=str(run.run_dir))
    assert files_of(folder) == before
    (folder / "adapter" / "model.onnx").write_text("made of it")
    before = files_of(folder)
    assert delivered(devices.run(resume=str(run.run_dir))) == [0]
    assert files_of(folder) == before
    reason = reason_of(devices.run(resume=str(run.run_dir), num_rounds=3))
    assert "'adapter/model.onnx' in" in reason
    assert "which this run did not write, and which stays as it is" in reason
    assert files_of(folder) == before


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("files", [None, [], {}, "x", {"adapter/README.md": 1}])
def test_a_result_with_an_invalid_mark_is_not_replaced(files, devices):
    devices.add(0)
    run = devices.run()
    mark = devices.result(0, run) / device_result.MARK
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"files": files}))
    reason = reason_of(devices.run(resume=str(run.run_dir)))
    assert "which this run did not write" in reason


# Faults of the device.


@contextlib.contextmanager
def files_of_at_most(number):
    """Limit the size of files, so that writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_a_full_disk_is_reported_and_leaves_the_former_result(form, devices, monkeypatch):
    devices.add(0, result_form=form)
    devices.add(1)
    run = devices.run()
    former = files_of(devices.result_folders[0])
    write_result = keeping._keep

    def on_a_full_disk(client):
        with files_of_at_most(20_000 if client.node.partition_id == 0 else -1):
            return write_result(client)

    monkeypatch.setattr(keeping, "_keep", on_a_full_disk)
    more = devices.run(num_rounds=3, resume=str(run.run_dir))
    assert delivered(more) == [1]
    assert more.summary["rounds"] == 3
    (first, _) = more.summary["not-delivered"]
    assert first["client"] == "partition 0"
    assert "File too large" in first["reason"]
    assert str(devices.folder) not in json.dumps(more.summary)  # no path reaches the server
    # The former result is unchanged, without other files beside it.
    assert files_of(devices.result_folders[0]) == former
    assert devices.results(0) == {run.run_dir.name}


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("a file is in the way", "its result-path cannot be written to: File exists"),
        ("its parent is missing", "its result-path cannot be written to: No such file or"),
        (OSError(30, "Read-only", "/x"), "its result-path cannot be written to: Read-only"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
    ],
)
def test_an_unusable_result_path_is_reported(fault, reason, devices, monkeypatch):
    devices.add(0)
    folder = devices.result_folders[0]
    if fault == "a file is in the way":
        folder.write_text("")
    elif fault == "its parent is missing":
        folder.parent.rmdir()
    else:

        def refuse(*_):
            if isinstance(fault, OSError):
                fault.filename = str(folder)
            raise fault

        monkeypatch.setattr(device_result, "write_result", refuse)
    run = devices.run(num_rounds=1)
    assert reason_of(run).startswith(reason)
    assert str(devices.folder) not in json.dumps(run.summary)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["_write_mark", "_replace"])
def test_a_killed_process_leaves_the_former_result(moment, devices, monkeypatch):
    devices.add(0)
    run = devices.run()
    former = files_of(devices.result(0, run))
    with monkeypatch.context() as patch:
        patch.setattr(device_result, moment, killed)
        # A killed process does not clean up.
        patch.setattr(device_result, "_remove", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            devices.run(num_rounds=3, resume=str(run.run_dir))
    assert files_of(devices.result(0, run)) == former
    assert len(devices.results(0)) == 2
    resumed = devices.run(num_rounds=3, resume=str(run.run_dir))
    assert delivered(resumed) == [0]
    assert devices.results(0) == {run.run_dir.name}
    check_results(resumed, [devices.result(0, run) / "adapter"])


def test_a_failed_rename_restores_the_former_result(tmp_path):
    target, missing = tmp_path / "run", tmp_path / "missing"
    target.mkdir()
    (target / "file").write_text("x")
    with pytest.raises(FileNotFoundError):
        device_result._replace(missing, target, tmp_path / "former")
    assert (target / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# Faults of the sender.

# Every damage to a message's fields and tensors: unit/messages/test_parcel.py.
CHANGES = {
    "a name that leads elsewhere": (
        lambda config, _: config.update({"run": "../../elsewhere"}), "the run's name is '../../els",
    ),
    "a summary that lacks all": (lambda config, _: config.update({"summary": "{}"}), "KeyError: "),
    "a summary of another kind": (
        lambda config, _: config.update({"summary": '{"metrics": [1]}'}), "TypeError: ",
    ),
    "bytes that differ": (
        lambda _, array: setattr(array, "data", b"\1" + array.data[1:]), "it was damaged",
    ),
    "bytes that are missing": (
        lambda _, array: setattr(array, "data", array.data[:-4]), "bytes, expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_result_is_not_stored(change, ended, devices):
    devices.add(0)
    devices.add(1)
    damage, reason = CHANGES[change]

    def damage_message(message):
        if message.metadata.dst_node_id == 1:
            damage(message.content["config"], message.content["arrays"]["H"])

    run = devices.copy_of(ended)
    devices.change = damage_message
    resumed = devices.run(num_rounds=1, clients=2, resume=str(run.run_dir))
    # Nodes of one process share the same array.
    assert delivered(resumed) == ([] if change.startswith("bytes") else [1])
    reasons = {reply["client"]: reply["reason"] for reply in resumed.summary["not-delivered"]}
    assert reason in reasons["partition 0"]
    assert not devices.result_folders[0].exists() or not devices.results(0)
    assert not (devices.folder / "elsewhere").exists()
