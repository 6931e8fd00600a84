"""A study resumes from the record of its runs, and refuses damaged records."""

import dataclasses
import hashlib
import importlib.metadata
import json
import subprocess
from typing import Any
from unittest.mock import Mock

import pytest

from ravan_flwr.lab import running, spec
from ravan_flwr.lab.choosing import table_runs
from ravan_flwr.lab.results import NAME, Result, Results
from ravan_flwr.lab.running import run_study
from ravan_flwr.lab.spec import read_study
from ravan_flwr.messages.fingerprint import code_fingerprint, code_version
from tests.hand_made import SUMMARY
from tests.studies import fill, found
from tests.studies import result as result_of
from tests.support import ROOT
from tests.unit.lab.written import written


@pytest.fixture
def path(tmp_path):
    rows = {"ravan": {}, "fedit": {"method": "fedit"}}
    return written(tmp_path, seeds=[0, 1], tables=[{"title": "T", "rows": rows}])


@pytest.fixture
def run(path, tmp_path):
    """Return the study's first run."""
    return table_runs(read_study(path), Results(tmp_path))[0]


@pytest.fixture
def folder_of(tmp_path):
    """Return a function that writes a run's folder with this summary."""

    def write(run, config, summary):
        folder = run.folder(tmp_path) / "run"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return write


@pytest.fixture
def filled(path, tmp_path):
    """Return a record of every run of the study."""
    results = Results(tmp_path)
    fill(read_study(path), results, lambda settings: 0.5 + settings["seed"] / 10)
    return results.record


@pytest.mark.slow
def test_a_study_resumes_from_its_record_alone(path, filled, tmp_path, monkeypatch):
    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["false"])
    assert run_study(path, tmp_path)  # no run directory exists, and nothing is run
    lines = filled.read_text().splitlines()
    filled.write_text("\n".join(lines[:3]) + "\n")
    assert not run_study(path, tmp_path)
    assert "failed" in json.loads(filled.read_text().splitlines()[-1])


def test_a_result_round_trips_through_its_line(run, tmp_path):
    expected = result_of(0.25, rank=None, client_seconds=None, code="0.6.0+1a2b3c4")
    Results(tmp_path).add(run, expected)
    assert Results(tmp_path).of(run) == expected
    line = json.loads((tmp_path / NAME).read_text())
    assert line["settings"] == "num-rounds=2 seed=0"
    assert (line["clients"], line["code"]) == (3, "0.6.0+1a2b3c4")


def test_the_later_of_two_lines_counts_and_a_failure_is_retried(run, tmp_path):
    results = Results(tmp_path)
    results.add_failure(run, "no room")
    assert Results(tmp_path).failure(run) == "no room"
    assert Results(tmp_path).of(run) is None
    results.add(run, result_of(0.5))
    assert Results(tmp_path).failure(run) is None
    assert found(Results(tmp_path), run).value() == 0.5
    # Of a failure without settings it is not known whether they are the run's.
    (tmp_path / NAME).write_text(json.dumps({"run": run.name, "failed": "no room"}) + "\n")
    assert Results(tmp_path).failure(run) is None


def test_an_incomplete_last_line_is_dropped(path, filled, tmp_path, caplog):
    content = filled.read_bytes()
    filled.write_bytes(content[:-9])
    runs = table_runs(read_study(path), Results(tmp_path))
    assert "its last line is cut off" in caplog.text
    results = Results(tmp_path)
    assert [results.of(run) is None for run in runs] == [False, False, False, True]
    assert filled.read_bytes() == content[: content[:-1].rindex(b"\n") + 1]


@pytest.mark.parametrize(
    "line",
    [
        b"not JSON", b"[1]", b"{}", b"3", b"\xff", b'{"run": "x", "failed": NaN}',
        b'{"run": "x", "metric": "accuracy"}',
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(filled, tmp_path, line):
    filled.write_bytes(filled.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=r"runs.jsonl: line 5 is .*expected the result of a run"):
        Results(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "9"},
        {"final": {"loss": 1.0}},
        {"final": {"accuracy": "high"}},
        {"curve": {"round": [1], "bytes": []}},
        {"curve": [1]},
        {"rank": "four"},
    ],
)
def test_a_line_with_a_wrong_value_is_named(filled, tmp_path, change):
    *others, last = filled.read_text().splitlines()
    filled.write_text("\n".join([*others, json.dumps(json.loads(last) | change)]) + "\n")
    with pytest.raises(ValueError, match="line 4 is"):
        Results(tmp_path)


def test_a_result_counts_only_for_its_own_settings(run, monkeypatch):
    before = run.digest
    resolved = dict(run.resolved)
    for change, same in (
        ({"local-steps": 7}, False),
        ({"data": resolved["data"] | {"source": "other"}}, False),
        ({"a-later-key": ""}, False),  # an unknown key of the config has no default
        ({"wire": "float32"}, True),
        ({"data": resolved["data"] | {"a-later-field": ""}}, True),
    ):
        monkeypatch.setattr(spec.PlannedRun, "resolved", resolved | change)
        assert (dataclasses.replace(run).digest == before) == same, change


def test_a_run_of_an_earlier_version_is_added_to_the_record(run, folder_of, tmp_path):
    """Its folder has no rounds with seconds of clients; all other values are read."""
    folder = folder_of(run, run.resolved, SUMMARY)
    result = found(Results(tmp_path), run)
    assert (result.value(), result.client_seconds, result.curve) == (0.5, None, {})
    (folder / "summary.json").unlink()
    assert Results(tmp_path).of(run) == result


@pytest.mark.parametrize(
    ("change", "done"), [({"rank": 13}, True), ({"learning-rate": 0.5}, False)]
)
def test_a_run_is_repeated_if_its_preset_changed(change, done, run, folder_of, tmp_path):
    """A rank follows from the other settings."""
    folder_of(run, run.resolved | change, {})
    assert (run.directory(tmp_path) is not None) == done


def test_an_interrupted_study_starts_no_run_and_records_no_failure(path, tmp_path, monkeypatch):
    started = []

    def command(run, *_):
        started.append(run)
        return ["sleep", "0.3"]

    monkeypatch.setattr(spec.PlannedRun, "command", command)
    monkeypatch.setattr(running, "minutes", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_study(path, tmp_path, jobs=1)
    assert len(started) <= 2  # the finished run, and one that started meanwhile
    assert not (tmp_path / NAME).exists()


def test_the_path_of_the_data_does_not_identify_a_run(path, filled, folder_of, tmp_path):
    study = read_study(path, {"data": str(tmp_path), "device": "cpu"})
    results = Results(tmp_path)
    runs = table_runs(study, results)
    assert all(results.of(run) is not None for run in runs)
    assert f"data={tmp_path}" in runs[0].command(tmp_path, "process")
    assert runs[0].name == table_runs(read_study(path), results)[0].name
    filled.unlink()
    folder = folder_of(runs[0], runs[0].resolved | {"data": {"name": "x"}}, {})
    assert runs[0].directory(tmp_path) == folder
    assert table_runs(read_study(path), results)[0].directory(tmp_path) is None


def test_a_record_hashes_the_data(path, tmp_path):
    """The hash covers both splits, as `scripts/make_packages_data.py` prints it."""
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(f"{name}\n")
    results = Results(tmp_path)
    run = table_runs(read_study(path, {"data": str(tmp_path / "data")}), results)[0]
    results.add(run, result_of(0.5))
    line = json.loads((tmp_path / NAME).read_text())
    assert line["data-hash"] == hashlib.sha256(b"train\ntest\n").hexdigest()
    assert "data=" not in line["settings"]


def test_without_an_installed_package_the_code_is_identified_by_its_files(monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    assert code_version.__wrapped__() == f"files {code_fingerprint()}"


def test_the_version_of_the_code_has_its_commit():
    version, _, commit = code_version().partition("+")
    assert version == importlib.metadata.version("ravan-flwr")
    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    assert git.returncode != 0 or git.stdout.startswith(commit.removesuffix("-dirty"))


class Ended:
    """The directory of a run of two rounds that end after 2 and 5 s, evaluated in the second."""

    def __init__(self, devices, **summary):
        self.devices, self.more = devices, summary

    def read_config(self):
        return {"devices": self.devices}

    def read_summary(self):
        return {
            "metric": "accuracy", "metrics": {"final": {"accuracy": 0.9}}, "learning-rate": 1e-3,
            "rank": 4, "adapter-parameters": 9, "bytes-up": 7, "bytes-down": 7, "seconds": 60.0,
        } | self.more  # fmt: skip

    def read_rounds(self):
        sent = {"clients": [], "bytes-up": 1, "bytes-down": 1}
        return [
            sent | {"round": 1, "metrics": {}, "time": 2.0},
            sent | {"round": 2, "metrics": {"accuracy": 0.9}, "time": 5.0},
        ]


def test_the_time_of_simulated_devices_is_a_metric():
    directory: Any = Ended("edge-gpus")
    assert Result.of(directory).value("time") == 5.0
    assert Result.of(directory).curve["time"] == [5.0]
    reached: Any = Ended("edge-gpus", **{"until-metric": 0.9, "reached": 2})
    assert Result.of(reached).value("time") == 5.0


@pytest.mark.parametrize("directory", [Ended(None), Ended("edge-gpus", **{"until-metric": 0.95})])
def test_a_run_in_real_time_or_short_of_its_target_has_no_time_metric(directory):
    with pytest.raises(ValueError, match="metric = 'time': got a run that has measured accuracy"):
        Result.of(directory).value("time")
