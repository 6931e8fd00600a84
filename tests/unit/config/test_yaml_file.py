"""A YAML file is parsed once for each content, and each reader gets a copy."""

import os

import pytest

from ravan_flwr.config.yaml_file import read_yaml


def test_a_changed_file_is_parsed_again_and_a_readers_changes_affect_no_other(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: {b: [1, 2]}")
    status = path.stat()
    for _ in range(2):
        content = read_yaml(path)
        assert content == {"a": {"b": [1, 2]}}
        content["a"]["b"].append(3)
    path.write_text("a: {b: [1, 3]}")  # of the same length, at the same time
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert read_yaml(path) == {"a": {"b": [1, 3]}}


def test_an_invalid_file_raises_every_time(tmp_path):
    for name in ("a.yaml", "b.yaml"):
        path = tmp_path / name
        path.write_text("a: 1\na: 2")
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name}, line 2, column 1: the key 'a' is"):
                read_yaml(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("!!timestamp 'x'", "'x' is no timestamp"),
        ("2024-13-45", "'2024-13-45' is no timestamp"),
        ("!!bool maybe", "'maybe' is no bool"),
        ("!!int x", "'x' is no int"),
        ("!!int ''", "'' is no int"),
        ("!!float x", "'x' is no float"),
    ],
)
def test_a_value_that_does_not_match_its_tag_is_reported_with_its_line(value, message, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"a: 1\nb: {value}")
    with pytest.raises(ValueError, match=f"a.yaml, line 2, column 4: {message} of YAML; expected"):
        read_yaml(path)
