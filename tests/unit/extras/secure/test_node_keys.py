"""Keys of devices: private, never overwritten, and errors name a file but no folder."""

import errno
import os
import stat
from itertools import count

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ravan_flwr.cli import main
from ravan_flwr.config.node_config import Node
from ravan_flwr.extras.secure.node_keys import NodeKeys, make_keys
from ravan_flwr.extras.secure.phases import node_keys
from tests.commands import error_of


def test_a_device_makes_its_keys(tmp_path, capsys):
    folder = tmp_path / "secure"
    main(["keys", str(folder), "--partition-id", "3"])
    out = capsys.readouterr().out
    assert f"made {folder}/partition-3.pub\n" in out
    assert f'node config  secure-keys="{folder}"\n' in out
    assert sorted(path.name for path in folder.iterdir()) == ["partition-3.key", "partition-3.pub"]
    assert stat.S_IMODE((folder / "partition-3.key").stat().st_mode) == 0o600
    keys = NodeKeys(folder, 3)
    keys.check(3, keys.sign(b"text"), b"text")
    with pytest.raises(ValueError, match="its signature is not by"):
        keys.check(3, keys.sign(b"text"), b"another")


def test_keys_are_never_overwritten(tmp_path, capsys):
    make_keys(tmp_path, 3)
    before = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    error = error_of(capsys, "keys", tmp_path, "--partition-id", 3)
    assert "partition-3.key is there already" in error
    (tmp_path / "partition-4.pub").symlink_to("/nowhere")
    with pytest.raises(ValueError, match=r"partition-4\.pub is there already"):
        make_keys(tmp_path, 4)
    assert [path.read_bytes() for path in sorted(tmp_path.glob("partition-3.*"))] == before
    error_of(capsys, "keys", tmp_path, "--partition-id", -1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --nodes --partition-id is required"),
        (["--partition-id", "3", "--nodes", "3"], "not allowed with argument"),
        (["--partition-id", "3", "--host", "a.org"], "--host a.org: got --partition-id beside it"),
    ],
)
def test_only_one_kind_of_keys_is_made(words, message, tmp_path, capsys):
    assert message in error_of(capsys, "keys", tmp_path / "keys", *words)
    assert not (tmp_path / "keys").exists()


def test_without_a_writable_folder_no_keys_are_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        error = error_of(capsys, "keys", folder, "--partition-id", 3)
        assert f"{folder}: keys cannot be written there" in error
        assert "expected a folder that is new or this user's" in error


# An unknown algorithm: 1.2.3.4.
UNKNOWN = b"""-----BEGIN PUBLIC KEY-----
MA0wBQYDKgMEAwQAAQID
-----END PUBLIC KEY-----
"""


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\xff" * 9000, UNKNOWN, None])
def test_files_that_are_no_keys_are_reported(tmp_path, data):
    make_keys(tmp_path, 0)
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    other = curve.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "partition-1.pub").write_bytes(other if data is None else data)
    with pytest.raises(
        ValueError, match=r"secure-keys: partition-1\.pub: .*Ed25519 public"
    ) as error:
        NodeKeys(tmp_path, 0).read_public_key(1)
    assert str(tmp_path) not in str(error.value)
    (tmp_path / "partition-0.key").write_bytes(other if data is None else data)
    with pytest.raises(ValueError, match=r"secure-keys: partition-0\.key: .*Ed25519 private"):
        NodeKeys(tmp_path, 0).public()


def test_a_pipe_is_no_key(tmp_path):
    make_keys(tmp_path, 0)
    os.mkfifo(tmp_path / "partition-1.pub")
    with pytest.raises(ValueError, match=r"secure-keys: partition-1\.pub: is a pipe or a device"):
        NodeKeys(tmp_path, 0).read_public_key(1)


def test_mismatched_keys_are_refused(tmp_path):
    make_keys(tmp_path, 0)
    make_keys(tmp_path, 1)
    (tmp_path / "partition-1.pub").replace(tmp_path / "partition-0.pub")
    with pytest.raises(ValueError, match=r"partition-0\.pub is not of partition-0\.key"):
        NodeKeys(tmp_path, 0).public()


def test_a_device_without_keys_cannot_take_part(tmp_path):
    with pytest.raises(ValueError, match="no secure-keys in its node config"):
        node_keys(Node(0, 3))
    with pytest.raises(ValueError, match=r"partition-0\.key: it cannot be read"):
        node_keys(Node(0, 3, secure_keys=str(tmp_path))).public()


def test_a_full_disk_leaves_no_incomplete_pair(tmp_path, monkeypatch):
    folder = tmp_path / "secure"

    calls = count(1)

    def full(_):
        if next(calls) == 3:  # the public key, after the private one and its folder
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="cannot be written there"):
        make_keys(folder, 3)
    assert not list(folder.iterdir())
    make_keys(folder, 3)
