"""Checkpoints and the clients' personal parameters beside them."""

import pytest
import safetensors.torch
import torch

from ravan_flwr.runs.checkpoint import (
    checkpoint_rounds,
    drop_after,
    load_checkpoint,
    load_fixed,
    load_personal_states,
    save_checkpoint,
    save_fixed,
    save_personal_states,
)

STATES = {
    0: {"gate": torch.tensor([1.0, -2.0]), "B/weight": torch.tensor([[3.0]])},
    12: {"gate": torch.tensor([4.0, 5.0])},
}


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run that exists."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def save_round(folder, number, best=None):
    """Write a round whose tensors have its number."""
    save_personal_states(folder, number, {7: {"gate": torch.tensor(float(number))}})
    save_checkpoint(folder, number, {"H": torch.full((2, 3), float(number))}, best=best)


def test_personal_parameters_come_back_by_partition(folder):
    save_personal_states(folder, 3, STATES)
    found = load_personal_states(folder, 3) or {}
    assert found.keys() == STATES.keys()
    for partition, state in STATES.items():
        assert found[partition].keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(found[partition][name], tensor)
    assert load_personal_states(folder, 4) is None


def test_personal_parameters_of_no_partition_are_refused(folder):
    save_checkpoint(folder, 3, {"twelve/gate": torch.zeros(2)})
    (folder / "round-000003.safetensors").rename(folder / "clients-000003.safetensors")
    with pytest.raises(ValueError, match=r"clients-000003.* damaged \('twelve/gate' has no"):
        load_personal_states(folder, 3)


def test_the_last_three_rounds_and_the_best_are_kept_with_their_clients_parameters(folder):
    for number in range(1, 8):
        save_round(folder, number, best=2)
    assert checkpoint_rounds(folder) == [2, 5, 6, 7]
    of_clients = {path.name for path in folder.glob("clients-*")}
    assert of_clients == {f"clients-{number:06d}.safetensors" for number in (2, 5, 6, 7)}


def test_a_run_that_goes_back_loses_later_rounds_and_interrupted_writes(folder):
    for number in (1, 2, 3):
        save_round(folder, number)
    (folder / ".round-000004.safetensors.x.tmp").write_bytes(b"half")
    drop_after(folder, 1)
    assert {path.name for path in folder.iterdir()} == {
        "round-000001.safetensors", "clients-000001.safetensors",
    }  # fmt: skip


def test_the_state_and_what_the_server_remembers_come_back_apart(folder):
    save_checkpoint(folder, 2, {"H": torch.ones(2)}, {"server-optimizer/H/step": torch.ones(())})
    found = load_checkpoint(folder)
    assert (found.round, [*found.state]) == (2, ["H"])
    assert [*found.memory] == ["server-optimizer/H/step"]


def test_a_file_of_another_round_is_not_that_rounds(folder, caplog):
    for number in (1, 2):
        save_round(folder, number)
    (folder / "round-000002.safetensors").rename(folder / "round-000003.safetensors")
    with pytest.raises(ValueError, match="metadata names round '2'"):
        load_checkpoint(folder, 3)
    assert load_checkpoint(folder).round == 1
    assert "trying the one before it" in caplog.text


def test_changed_bytes_are_noticed(folder):
    save_round(folder, 1)
    path = folder / "round-000001.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        meta = file.metadata()
    path.write_bytes(safetensors.torch.save({"H": torch.full((2, 3), 1.0625)}, meta))
    with pytest.raises(ValueError, match="checksum"):
        load_checkpoint(folder, 1)


def test_what_a_calibration_fixed_is_read_whole_or_not_at_all(folder):
    assert load_fixed(folder) is None
    save_fixed(folder, {"B": torch.eye(2)})
    found = load_fixed(folder) or {}
    assert torch.equal(found["B"], torch.eye(2))
    path = folder / "fixed.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"fixed.* is damaged .*start a new run"):
        load_fixed(folder)
