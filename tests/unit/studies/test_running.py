"""A study runs all candidate rates before it runs the tables."""

import pytest
import yaml

from ravan_flwr.studies.choosing import candidates
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.running import RunOptions, run_missing, run_study
from ravan_flwr.studies.spec import PlannedRun, read_study
from tests.studies import result


@pytest.fixture
def path(tmp_path):
    rows = {"ravan": {}, "fedit": {"method": "fedit", "num-rounds": 3}}
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1], "settings": {"num-rounds": 2},
        "choose": {"learning-rate": [1e-3, 3e-3, 1e-2], "seeds": [100, 101]},
        "tables": [
            {"title": "T", "rows": rows},
            {"title": "IID", "rates-of": "T", "settings": {"partition": "iid"}, "rows": rows},
            {"title": "T again", "rates-of": "T", "rows": {"ravan": {}}},
        ],
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize("metric", ["acuracy", "accuracy"])
def test_a_metric_that_no_run_measures_ends_the_study_after_the_first_run(
    metric, path, tmp_path, monkeypatch
):
    content = yaml.safe_load(path.read_text())
    table = {"title": "T", "metric": metric, "settings": {"learning-rate": 1e-3}}
    content["tables"] = [table | {"rows": {"ravan": {}, "fedit": {"method": "fedit"}}}]
    path.write_text(yaml.safe_dump(content))
    study, results, begun = read_study(path), Results(tmp_path), []

    def command(run, *_):
        begun.append(run)
        results.add(run, result(0.5))
        is_left = metric == "acuracy" and len(begun) > 1  # it is ended, as the study is
        return ["sleep", "600"] if is_left else ["true"]

    monkeypatch.setattr(PlannedRun, "command", command)
    if metric == "acuracy":
        message = "'acuracy': got a run that has measured accuracy, loss.* mean 'accuracy'"
        with pytest.raises(ValueError, match=message):
            run_missing(study, results, RunOptions())
        assert len(begun) <= 2
    else:
        run_missing(study, results, RunOptions())
        assert len(begun) == 4


def test_the_runs_of_tables_start_after_all_candidates(path, tmp_path, monkeypatch):
    """A rate measured earlier is not chosen before all others are measured."""
    study, begun = read_study(path), []

    def command(run, *_):
        begun.append(run)
        return ["false"]

    results = Results(tmp_path)
    for run in candidates(study, results):
        settings = dict(run.settings)
        if "method" not in settings and settings["learning-rate"] != 1e-2:
            results.add(run, result(0.5))
    monkeypatch.setattr(PlannedRun, "command", command)
    assert not run_study(path, tmp_path)
    on_validation = [dict(run.settings).get("evaluate-on") == "clients" for run in begun]
    assert on_validation[: 2 + 6] == [True] * 8  # the last rate of ravan, and all of fedit
    assert not any(on_validation[8:])
