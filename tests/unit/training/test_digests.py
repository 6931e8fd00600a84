"""Digests of large files: those of hashlib, read once a machine, never those of another content."""

import hashlib
import os
import time

import pytest

from ravan_flwr.training import network
from ravan_flwr.training.network import file_digest

LONG_AGO = time.time() - 3600


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "HASHED_AT_ONCE", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 8)
    os.utime(file, (LONG_AGO, LONG_AGO))
    return file


def unreadable(*_):
    raise AssertionError("the file was read")


def test_it_is_sha256_and_the_file_is_read_once(large, monkeypatch):
    expected = hashlib.sha256(large.read_bytes()).digest()
    assert file_digest(large) == expected
    monkeypatch.setattr(network, "_hashed", unreadable)
    assert file_digest(large) == expected


@pytest.mark.parametrize("changed", ["content", "size", "another file in its place"])
def test_a_changed_file_is_read_again(changed, large, tmp_path):
    file_digest(large)
    if changed == "another file in its place":
        other = tmp_path / "other"
        other.write_bytes(b"x" * large.stat().st_size)
        os.utime(other, (LONG_AGO, LONG_AGO))  # of the same size and time
        other.replace(large)
    else:
        large.write_bytes(b"x" * (large.stat().st_size + (changed == "size")))
    assert file_digest(large) == hashlib.sha256(large.read_bytes()).digest()


def test_a_file_that_has_just_been_written_is_not_remembered(large, monkeypatch):
    os.utime(large)
    file_digest(large)
    monkeypatch.setattr(network, "_hashed", unreadable)
    with pytest.raises(AssertionError, match="was read"):
        file_digest(large)


@pytest.mark.parametrize("content", [b"", b"00", b"\xff\xfe", b"no digest at all"])
def test_a_damaged_cache_is_no_cache(content, large, tmp_path):
    expected = file_digest(large)
    (kept,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    kept.write_bytes(content)
    assert file_digest(large) == expected


def test_a_cache_that_cannot_be_written_is_none(large, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert file_digest(large) == hashlib.sha256(large.read_bytes()).digest()
