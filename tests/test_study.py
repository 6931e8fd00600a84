"""Studies: shared runs, resumption, failures, tables."""

import json
from pathlib import Path

import pytest
import yaml

from ravan_flwr import study as study_module
from ravan_flwr.cli import main
from ravan_flwr.preset import conf_folder
from ravan_flwr.study import markdown, read_study, run_study

CONTENT = {
    "title": "A study",
    "num-clients": 3,
    "seeds": [0, 1],
    "settings": {"num-rounds": 1, "local-steps": 1, "classifier": "frozen"},
    "tables": [
        {"title": "One", "rows": {"base": {}, "more": {"heads": 8}}},
        {"title": "Two", "rows": {"same as base": {}}},
    ],
}


def write(tmp_path, **changes):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(CONTENT | changes))
    return path


@pytest.mark.parametrize("path", sorted((conf_folder() / "studies").glob("*.yaml")), ids=str)
def test_every_study_can_be_read(path):
    assert read_study(path).runs


def test_rows_that_mean_the_same_share_their_runs(tmp_path):
    study = read_study(write(tmp_path))
    assert len(study.runs) == 4
    assert len({run.name for run in study.runs}) == 4
    assert study.tables[0].rows["base"] == study.tables[1].rows["same as base"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "expected the fields"),
        ({"seeds": 3}, "seeds is no list"),
        ({"settings": {"method": "ravn"}}, "row 'base': method 'ravn' is unknown: did you mean"),
    ],
)
def test_a_study_file_is_checked_before_anything_runs(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_study(write(tmp_path, **changes))


def test_a_study_runs_resumes_and_writes_its_tables(tmp_path, monkeypatch, capsys):
    path, folder = write(tmp_path), tmp_path / "out"
    main(["study", str(path), "--output", str(folder), "--jobs", "2"])
    summaries = sorted(folder.glob("runs/*/*/summary.json"))
    assert len(summaries) == 4
    text = (folder / "results.md").read_text()
    assert "| base |" in text.replace("**", "")
    rows = (folder / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 3
    finals = [json.loads(p.read_text())["metrics"]["final"]["accuracy"] for p in summaries]
    assert all(str(final) in "".join(rows) for final in finals)

    monkeypatch.setattr(study_module.Run, "command", lambda *_: ["false"])
    main(["study", str(path), "--output", str(folder)])  # nothing is left to run
    assert (folder / "results.md").read_text() == text
    assert "4 runs, 4 of them done" in capsys.readouterr().out


def test_a_failed_run_is_listed_and_the_others_go_on(tmp_path, caplog):
    tables = [{"title": "T", "rows": {"good": {}, "bad": {"max-update-norm": 1e-9}}}]
    path = write(tmp_path, tables=tables, seeds=[0])
    assert not run_study(path, tmp_path / "out", jobs=1)
    assert "failed" in caplog.text
    assert "round 1: got no valid reply" in caplog.text
    assert "| **" in markdown(read_study(path), tmp_path / "out")
    assert "bad" not in markdown(read_study(path), tmp_path / "out")


def test_mistakes_on_the_command_line(tmp_path, capsys):
    for words in (["study", str(tmp_path / "x.yaml")], ["study", __file__, "--jobs", "0"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
    told = capsys.readouterr().err
    assert f"found no file {Path(tmp_path / 'x.yaml')}" in told
    assert "--jobs 0: expected a whole number at least 1" in told
