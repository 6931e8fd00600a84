"""Run directories and checkpoints are written completely or not at all."""

import json
import os
import shutil
from typing import Any

import pytest
import safetensors.torch
import torch

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.presets import PresetPath, conf_folder, preset_names
from ravan_flwr.config.run_config import read_config
from ravan_flwr.files import write_atomically
from ravan_flwr.runs.checkpoint import (
    KEPT,
    checkpoint_rounds,
    drop_after,
    load_checkpoint,
    load_fixed,
    save_checkpoint,
    save_fixed,
)
from ravan_flwr.runs.directory import (
    RunDirectory,
    is_write_error,
    run_name,
    with_recorded_settings,
    write_error_message,
)
from ravan_flwr.specs import Scalar
from tests.hand_made import ROUND


def test_two_runs_of_the_same_second_have_different_folders(tmp_path):
    folders = {RunDirectory.create(tmp_path / "runs", "x").path for _ in range(3)}
    assert len(folders) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="output-dir = .*cannot make a folder there"):
        RunDirectory.create(tmp_path / "runs", "x")


def test_a_file_in_place_of_the_folder_is_reported(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match="output-dir = .*cannot make a folder there"):
        RunDirectory.create(tmp_path / "runs", "x")


def test_a_folder_that_is_no_run_directory_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="resume = .*found no config.json .*correct the path$"):
        RunDirectory.open(tmp_path)
    for age, name in enumerate(("b", "c", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (2 - age, 2 - age))
    with pytest.raises(ValueError, match="correct the path; the newest run in it is .*/b$"):
        RunDirectory.open(tmp_path)


def test_rounds_are_lines_and_an_incomplete_line_is_ignored(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.read_rounds() == []
    for number in (1, 2, 3):
        directory.append_round(of(number))
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"rou')
    assert [r["round"] for r in directory.read_rounds()] == [1, 2, 3]
    directory.write_rounds(directory.read_rounds()[:2])
    directory.append_round(of(3))
    assert (tmp_path / "rounds.jsonl").read_text().count("\n") == 3


def test_non_finite_numbers_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="Out of range float values"):
        RunDirectory(tmp_path).write_json("x.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"old"


def state(number):
    return {"H": torch.full((2, 2), float(number)), "classifier": torch.arange(3.0)}


def test_the_last_checkpoints_are_kept_and_the_last_is_loaded(tmp_path):
    for number in range(1, 6):
        save_checkpoint(tmp_path, number, state(number))
    assert len(list(tmp_path.iterdir())) == KEPT
    loaded = load_checkpoint(tmp_path)
    assert loaded.round == 5
    assert all(torch.equal(loaded.state[key], state(5)[key]) for key in state(5))


def damage_bytes(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def renamed(path):
    path.with_name("round-000001.safetensors").replace(path)


def without_checksum(path):
    path.write_bytes(safetensors.torch.save(state(3)))


DAMAGES = {
    "a bit": damage_bytes,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:10]),
    "empty": lambda path: path.write_bytes(b""),
    "another's under its name": renamed,
    "no checksum": without_checksum,
    "another checksum": lambda path: path.write_bytes(
        safetensors.torch.save(state(3), {"round": "3", "sha256": "0"})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_for_a_damaged_checkpoint_the_previous_one_is_loaded(tmp_path, damage, caplog):
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, number, state(number))
    DAMAGES[damage](tmp_path / "round-000003.safetensors")
    assert load_checkpoint(tmp_path).round == 2
    assert "round-000003.safetensors is damaged" in caplog.text


def test_a_missing_usable_checkpoint_is_reported(tmp_path):
    with pytest.raises(ValueError, match="no usable checkpoint in .*start a new run"):
        load_checkpoint(tmp_path)


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path):
    for number in range(1, 8):
        save_checkpoint(tmp_path, number, state(number), best=min(number, 2))
    assert checkpoint_rounds(tmp_path) == [2, 5, 6, 7]
    assert torch.equal(load_checkpoint(tmp_path, 2).state["H"], state(2)["H"])
    # The process was killed there.
    (tmp_path / ".round-00006.safetensors.123.tmp").write_bytes(b"half of it")
    drop_after(tmp_path, 5)
    assert not list(tmp_path.glob(".*.tmp"))
    assert checkpoint_rounds(tmp_path) == [2, 5]


def test_a_missing_or_damaged_checkpoint_is_reported(tmp_path):
    for number in (4, 5):
        save_checkpoint(tmp_path, number, state(number))
    with pytest.raises(ValueError, match=r"round 3 has no .*expected one of rounds 4, 5; choose"):
        load_checkpoint(tmp_path, 3)
    damage_bytes(tmp_path / "round-000004.safetensors")
    with pytest.raises(ValueError, match=r"000004.* is damaged .*expected one of rounds 4, 5"):
        load_checkpoint(tmp_path, 4)


def test_damaged_calibration_tensors_are_reported(tmp_path):
    assert load_fixed(tmp_path) is None
    save_fixed(tmp_path, state(1))
    loaded = load_fixed(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded["H"], state(1)["H"])
    damage_bytes(tmp_path / "fixed.safetensors")
    with pytest.raises(ValueError, match="fixed.safetensors is damaged .*expected what the calib"):
        load_fixed(tmp_path)


def write_lines(folder, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "rounds.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return RunDirectory(folder)


def of(number, **changes):
    return {**ROUND, "round": number, **{k.replace("_", "-"): v for k, v in changes.items()}}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([of(1), of(1)], r"line 2 is damaged \(it is of round 1, expected 2"),
        ([of(1), of(2), of(1), of(2)], "line 3 is damaged .*of round 1, expected 3"),
        ([of(1), of(3)], "line 2 is damaged .*of round 3, expected 2"),
        ([of(2)], "line 1 is damaged .*of round 2, expected 0 or 1"),
        ([of(1), "[]"], r"line 2 is damaged .*got \[\]: Input should be a valid dict"),
        ([of(1), "null"], "line 2 is damaged"),
        ([of(1), of("2")], "line 2 is damaged"),
        ([of(1), of(True)], "line 2 is damaged"),
        ([of(1), "{"], "line 2 is damaged"),
        ([of(1), of(2, metrics=[])], r"line 2 is damaged \(it has metrics: got \[\]"),
        ([of(1), of(2, metrics={"accuracy": "x"})], "it has metrics.accuracy: got 'x'"),
        ([of(1), of(2, partitions=None)], "it has partitions: got None"),
        ([of(1), of(2, bytes_up=True)], "it has bytes-up: got True"),
        ([of(1)], "the last round in it is 1, expected 2 as in the checkpoint"),
        ([], "the last round in it is none, expected 2"),
    ],
)
def test_the_record_is_validated_before_a_run_is_resumed(tmp_path, lines, message):
    directory = write_lines(tmp_path, *lines)
    with pytest.raises(ValueError, match=message):
        directory.rounds_until(2)
    valid = [of(0), of(1), of(2), of(3)]
    assert write_lines(tmp_path, *valid).rounds_until(2) == valid[:3]


DEEP = "[" * 100_000 + "]" * 100_000
ABSURD = {
    "deep": DEEP,
    "not so deep": DEEP[100_000 - 300 : 100_000 + 300],
    "NaN": "NaN",
    "infinite": "-Infinity",
    "large": "1" + "0" * 400,
    "larger": "1" * 100_000,
    "float": "1e999",
}


@pytest.mark.parametrize("value", ABSURD)
def test_invalid_json_is_reported_with_its_file(tmp_path, value):
    text = f'{{"round": 1, "bytes-up": {ABSURD[value]}}}'
    for name in ("config.json", "summary.json", "privacy.json", "rounds.jsonl"):
        (tmp_path / name).write_text(text + "\n")
    directory = RunDirectory(tmp_path)
    if value not in ("NaN", "infinite", "float"):  # these values are checked by their readers
        for name in ("summary.json", "privacy.json"):
            with pytest.raises(ValueError, match=f"{name} is damaged .*; restore it"):
                directory.read_json(name)
        with pytest.raises(ValueError, match=r"config.json is damaged .*; restore it"):
            directory.read_config()
    with pytest.raises(ValueError, match=r"rounds.jsonl: line 1 is damaged .*; restore it"):
        directory.rounds_until(1)
    (tmp_path / "round-000001.safetensors").write_bytes(safetensors.torch.save(state(1)))
    (tmp_path / "round-000001.json").write_text(text)
    with pytest.raises(ValueError, match="no usable checkpoint in"):
        load_checkpoint(tmp_path)


GIVEN: list[dict[str, Scalar]] = [{"preset": name, "method": "fedit"} for name in preset_names()]
GIVEN += [
    {"heads": 8, "rank": 7, "lora-rank": 3, "init": "data-aware", "learning-rate": 0.5},
    {"preset": "glue-llama", "glue-task": "rte", "max-length": 17, "wire": "int8"},
    {"preset": "svhn-vit-b16", "model": "google/x@abc", "data": "some/one", "weighting": "median"},
    {"preset": "code", "backbone-dtype": "float32", "precision": "float32", "max-bytes": 1e6},
    {"partition": "pathological:3:user", "data": "some/one", "local-steps": "epochs:0.5"},
    {"device": "cpu", "straggler-grace": 3.0, "round-timeout": 9, "limits": "max-examples=4"},
    {"deliver": True, "num-rounds": 9, "tracking": "none", "heads": 4},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_the_settings_of_a_run_are_found_again(given, tmp_path):
    """Also settings with all defaults, an output folder, or the path of a preset file."""
    file = conf_folder() / f"{given.get('preset', 'digits-vit')}.yaml"
    for preset in (file.stem, PresetPath(shutil.copy(file, tmp_path))):
        defaults = {key: spec.default for key, spec in KEYS.items()}
        all_settings = defaults | given | {"preset": preset}
        directory = RunDirectory(tmp_path)
        directory.write_settings(all_settings | {"output-dir": "/x", "resume": "/y"})
        directory.write_json("config.json", {})
        request: dict[str, Scalar] = {"resume": str(tmp_path), "seed": 3}
        found, clients = with_recorded_settings(request)
        assert found.keys() <= given.keys() | {"preset", "resume", "seed"}
        assert clients is None
        assert read_config(found) == read_config(all_settings | request)


def test_missing_or_invalid_settings_are_reported(tmp_path):
    directory, request = RunDirectory(tmp_path), {"resume": str(tmp_path)}
    directory.write_json("config.json", {})
    with pytest.raises(ValueError, match="is not there, .* or write it: a JSON object"):
        with_recorded_settings(request)
    for wrong, message in (({"seed": [1]}, "seed = .*; got a list"), ({"x": 1}, "unknown key 'x'")):
        directory.write_json("settings.json", wrong)
        with pytest.raises(ValueError, match=message):
            read_config(with_recorded_settings(request)[0])
    (tmp_path / "settings.json").write_text("[1]")
    with pytest.raises(ValueError, match="got no JSON object"):
        with_recorded_settings(request)


def test_files_of_a_run_are_written_into_its_directory_alone(tmp_path):
    """A removed run directory is not created again for the rest of the run."""
    directory = RunDirectory.create(tmp_path, "run")
    directory.path.rename(tmp_path / "elsewhere")
    record: Any = ROUND
    for write in (
        lambda: directory.write_json("summary.json", {}),
        lambda: directory.append_round(record),
        lambda: directory.write_rounds([]),
        lambda: save_checkpoint(directory.checkpoints, 1, state(1)),
        lambda: save_fixed(directory.checkpoints, state(1)),
    ):
        with pytest.raises(FileNotFoundError) as error:
            write()
        assert error.value.filename == str(directory.path)
        assert is_write_error(error.value, directory.path)
        assert "is gone" in write_error_message(error.value, directory.path)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, ""),
        ({"heads": 8}, "-heads8"),
        ({"heads": 8, "num-rounds": 30}, "-num-rounds30-heads8"),
        ({"partition": "dirichlet:0.3", "data": "a/b"}, "-partitiondirichlet-0.3"),
        ({"local-steps": 10, "batch-size": 16, "heads": 2, "init": "normal", "scaling": "constant"},
         "-batch-size16-heads2-initnormal"),
        ({"num-rounds": 30, "learning-rate": 0.003, "clients-per-round": 5, "heads": 8},
         "-num-rounds30-learning-rate0.003-heads8"),
        ({"heads": 4, "partition": "dirichlet-by-client:0.3"}, ""),  # as in the preset
    ],
)  # fmt: skip
def test_a_runs_name_has_what_the_user_changed(changes, name):
    config = read_config(changes | {"seed": 3})
    assert run_name(config, changes | {"seed": 3}) == f"digits-vit-ravan-seed3{name}"
    assert run_name(config, changes, 20) == f"digits-vit-ravan-seed3{name}"
    assert run_name(config, {}, 4) == "digits-vit-ravan-seed3-clients4"
