"""The checksum of the code: of all of it, and of what a process began with."""

from pathlib import Path

import pytest

from ravan_flwr.messages import fingerprint
from ravan_flwr.messages.fingerprint import code_fingerprint


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two files in place of this one, not read yet."""
    place = tmp_path / "messages" / "fingerprint.py"
    place.parent.mkdir()
    place.write_text("one = 1")
    (tmp_path / "cli.py").write_text("two = 2")
    monkeypatch.setattr(fingerprint, "__file__", str(place))
    code_fingerprint.cache_clear()
    yield tmp_path
    code_fingerprint.cache_clear()


@pytest.mark.parametrize("name", ["cli.py", "messages/fingerprint.py", "another.py"])
def test_every_file_counts(package, name):
    before = code_fingerprint()
    (package / name).write_text("three = 3")
    code_fingerprint.cache_clear()  # another process
    assert code_fingerprint() != before


def test_an_edit_changes_nothing_for_the_process_that_runs_already(package: Path):
    before = code_fingerprint()
    (package / "cli.py").write_text("three = 3")
    assert code_fingerprint() == before
