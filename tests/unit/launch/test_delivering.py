"""`ravan-flwr deliver`: the submitted settings, and its errors."""

import json
import shutil
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from ravan_flwr.cli import main
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch import submit as submitting
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import Scalar
from tests import ROOT
from tests.hand_made import SUMMARY

DELIVERED = [{"partition-id": 2, "folder": "adapter"}]
FAILED = [{"client": "partition 0", "reason": "its result-path cannot be written to: disk full"}]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run of some settings, in a folder whose name has a space and a quote."""
    path = tmp_path / 'runs "1"' / "20260101-120000-digits-vit-fedit-seed3"
    path.mkdir(parents=True)
    settings: dict[str, Scalar] = {"method": "fedit", "seed": 3, "num-rounds": 7}
    settings["limits"] = "max-share=0.5"
    (path / "config.json").write_text(json.dumps(read_config(settings).as_dict()))
    RunDirectory(path).write_settings(settings)
    (path / "summary.json").write_text(json.dumps(SUMMARY))
    monkeypatch.chdir(ROOT)
    return path


@pytest.fixture
def submitted(run, monkeypatch):
    """Record the submission; `after` is what the run then adds to the summary."""
    found: dict[str, Any] = {"status": "finished:completed"}
    found["after"] = {"delivered": DELIVERED, "not-delivered": []}

    def submit(app, superlink, settings, environment):
        found.update(app=app, superlink=superlink, settings=parse_config_args([settings]))
        (run / "summary.json").write_text(json.dumps(SUMMARY | found["after"]))
        return found["status"]

    monkeypatch.setattr(submitting, "submit", submit)
    return found


def deliver(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["deliver", *map(str, words)])
    output = capsys.readouterr().err
    assert "Traceback" not in output
    return end.value.code, output


def test_it_submits_the_settings_of_the_run_without_new_rounds(run, submitted, capsys):
    main(["deliver", str(run), "edge"])
    assert (submitted["app"], submitted["superlink"]) == (ROOT, "edge")
    settings = submitted["settings"]
    assert settings == {
        "method": "fedit", "seed": 3, "num-rounds": 1, "limits": "max-share=0.5",
        "resume": str(run), "deliver": True, "tracking": "none",
    }  # fmt: skip
    assert read_config(settings).deliver
    output = capsys.readouterr().out
    assert "flwr run . edge --stream -c 'method=" in output
    assert output.endswith("partition 2 has the result, in adapter/\n")


def test_a_preset_is_submitted_by_its_name(run, submitted):
    RunDirectory(run).write_settings({"preset": "/anywhere/conf/svhn-vit-b16.yaml"})
    main(["deliver", str(run), "edge"])
    assert submitted["settings"]["preset"] == "svhn-vit-b16"


def test_clients_without_the_result_are_printed(run, submitted, capsys):
    submitted["after"]["not-delivered"] = FAILED
    main(["deliver", str(run), "edge"])
    assert capsys.readouterr().out.endswith(
        "partition 0 does not have it: its result-path cannot be written to: disk full\n"
    )


def test_a_delivery_to_no_device_is_a_failure(run, submitted, capsys):
    submitted["after"] = {"delivered": [], "not-delivered": FAILED}
    status, output = deliver(capsys, run, "edge")
    assert status == 1
    assert "no device has the result: partition 0: its result-path" in output
    submitted["after"] = {"delivered": [], "not-delivered": []}
    assert "no device has the result: none was connected" in deliver(capsys, run, "edge")[1]


def test_a_missing_delivery_record_is_reported(run, submitted, capsys):
    """RUN is then a directory on another machine."""
    submitted["after"] = {}
    status, output = deliver(capsys, run, "edge")
    assert (status, "no delivery was recorded in" in output) == (1, True)
    submitted["status"] = "finished:failed"
    status, output = deliver(capsys, run, "edge")
    assert "the delivery ended as 'finished:failed'" in output
    assert "call this command there" in output


def test_an_undeliverable_run_is_refused_with_advice(run, submitted, capsys, monkeypatch, tmp_path):
    def refused(path=run):
        status, error = deliver(capsys, path, "edge")
        assert status == 2
        return error.rstrip()

    assert "found no config.json there" in refused(tmp_path)
    assert "call this command there, as a" in refused(tmp_path / "elsewhere")
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    (unfinished / "summary.json").unlink()
    assert "expected the file of a finished run" in refused(unfinished)
    settings = run / "settings.json"
    for text, message in (
        ('{"preset": "digits-vit", "method": "ravan"', "settings.json is damaged"),
        ('{"presets": "digits-vit"}', "unknown key 'presets'"),
        ('{"preset": "/elsewhere/mine.yaml"}', "preset 'mine' is unknown"),
    ):
        settings.write_text(text)
        assert message in refused()
    settings.unlink()
    assert "settings.json is not there" in refused()
    monkeypatch.chdir(tmp_path)
    settings.write_text("{}")
    assert "found no pyproject.toml in" in refused()
    assert "settings" not in submitted


def test_an_unreadable_run_directory_is_reported(run, submitted, capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(run))

    monkeypatch.setattr(RunDirectory, "open", refuse)
    status, output = deliver(capsys, run, "edge")
    assert status == 2
    assert f"Permission denied: {str(run)!r}. RUN is a directory on the server's machine" in output
    assert "as a user who may read it" in output
