"""What is written stays whole: run directories and checkpoints."""

import json
import os

import pytest
import torch

from ravan_flwr.checkpoint import KEPT, load_checkpoint, save_checkpoint
from ravan_flwr.records import RunDirectory, write_atomically


def test_two_runs_of_one_second_have_two_folders(tmp_path):
    folders = {RunDirectory.create(tmp_path / "runs", "x").path for _ in range(3)}
    assert len(folders) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="output-dir = .*cannot make a folder there"):
        RunDirectory.create(tmp_path / "runs", "x")


def test_a_file_in_the_way_is_told(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match="output-dir = .*cannot make a folder there"):
        RunDirectory.create(tmp_path / "runs", "x")


def test_what_is_no_run_directory_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="resume = .*found no config.json there"):
        RunDirectory.open(tmp_path)


def test_rounds_are_lines_and_a_cut_off_line_does_not_count(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.read_rounds() == []
    for number in (1, 2, 3):
        directory.append_round({"round": number})
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"rou')
    assert [r["round"] for r in directory.read_rounds()] == [1, 2, 3]
    assert directory.keep_rounds(2) == [{"round": 1}, {"round": 2}]
    directory.append_round({"round": 3})
    assert (tmp_path / "rounds.jsonl").read_text().count("\n") == 3


def test_numbers_that_json_lacks_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="Out of range float values"):
        RunDirectory(tmp_path).write_json("x.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
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
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.glob("*.json"))) == KEPT
    number, loaded, _ = load_checkpoint(tmp_path)
    assert number == 5
    assert all(torch.equal(loaded[key], state(5)[key]) for key in state(5))


def damage_bytes(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit": damage_bytes,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:10]),
    "no checksum": lambda path: path.with_suffix(".json").unlink(),
    "checksum cut off": lambda path: path.with_suffix(".json").write_text('{"rou'),
    "checksum of another": lambda path: path.with_suffix(".json").write_text(
        json.dumps({"round": 3, "sha256": "0"})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage, caplog):
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, number, state(number))
    DAMAGES[damage](tmp_path / "round-000003.safetensors")
    assert load_checkpoint(tmp_path)[0] == 2
    assert "round-000003.safetensors is damaged" in caplog.text


def test_no_usable_checkpoint_is_told(tmp_path):
    with pytest.raises(ValueError, match="no usable checkpoint in .*start a new run"):
        load_checkpoint(tmp_path)
