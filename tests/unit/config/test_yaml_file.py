"""YAML files are parsed once for each content, and every reader has a copy of its own."""

import os

import pytest
import yaml

from ravan_flwr.config import presets
from ravan_flwr.config.run_config import read_config
from ravan_flwr.config.yaml_file import read_yaml


def test_a_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: {b: [1, 2]}")
    status = path.stat()
    assert read_yaml(path) == {"a": {"b": [1, 2]}}
    path.write_text("a: {b: [1, 3]}")  # as long as before, in the same instant
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert read_yaml(path) == {"a": {"b": [1, 3]}}


def test_what_one_reader_changes_no_other_sees(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: {b: [1, 2]}")
    read_yaml(path)["a"]["b"].append(3)
    assert read_yaml(path) == {"a": {"b": [1, 2]}}


def test_a_file_that_is_wrong_is_wrong_every_time(tmp_path):
    for name in ("a.yaml", "b.yaml"):
        path = tmp_path / name
        path.write_text("a: 1\na: 2")
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name}, line 2, column 1: the key 'a' is"):
                read_yaml(path)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("!!timestamp 'x'", "'x' is no timestamp"),
        ("2024-13-45", "'2024-13-45' is no timestamp"),
        ("!!bool maybe", "'maybe' is no bool"),
        ("!!int x", "'x' is no int"),
        ("!!int ''", "'' is no int"),
        ("!!float x", "'x' is no float"),
    ],
)
def test_a_value_that_its_tag_does_not_fit_is_named_with_its_place(value, told, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"a: 1\nb: {value}")
    with pytest.raises(ValueError, match=f"a.yaml, line 2, column 4: {told} of YAML; expected"):
        read_yaml(path)


def test_a_run_config_is_read_many_times_and_its_preset_parsed_once(monkeypatch):
    parsed = []

    def load(text, **how):
        parsed.append(text)
        return real(text, **how)

    real = yaml.load
    monkeypatch.setattr(yaml, "load", load)
    presets._read.cache_clear()
    first = read_config({})
    assert [read_config({}) for _ in range(3)] == [first] * 3
    assert len(parsed) == 1
