"""The checksum of the code covers all files, as they were when the process began."""

from pathlib import Path

import pytest

from ravan_flwr.messages import fingerprint
from ravan_flwr.messages.fingerprint import code_fingerprint


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Replace this package by one of two files, not read yet."""
    place = tmp_path / "messages" / "fingerprint.py"
    place.parent.mkdir()
    place.write_text("one = 1")
    (tmp_path / "cli.py").write_text("two = 2")
    monkeypatch.setattr(fingerprint, "__file__", str(place))
    code_fingerprint.cache_clear()
    yield tmp_path
    code_fingerprint.cache_clear()


@pytest.mark.parametrize("name", ["cli.py", "messages/fingerprint.py", "another.py"])
def test_a_change_of_any_file_changes_the_checksum(package, name):
    before = code_fingerprint()
    (package / name).write_text("three = 3")
    code_fingerprint.cache_clear()  # as in another process
    assert code_fingerprint() != before


def test_an_edit_does_not_change_the_checksum_of_a_running_process(package: Path):
    before = code_fingerprint()
    (package / "cli.py").write_text("three = 3")
    assert code_fingerprint() == before
