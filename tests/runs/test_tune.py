"""A tuning on the digits: its runs, choice, charts and files."""

import csv
import json
import math
import re
import stat
import sys
from unittest.mock import Mock

import pytest
import yaml

from ravan_flwr.cli import main
from ravan_flwr.config.presets import conf_folder, with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.data.examples import load_splits
from ravan_flwr.lab import spec
from ravan_flwr.lab.choosing import RateChoice, Score
from ravan_flwr.lab.tuning import _check_examples, adopt, plan_tuning
from ravan_flwr.training import model_and_data
from tests.commands import error_of

SHORT = ["num-clients=3", "num-rounds=2", "local-steps=5", "classifier=frozen"]


@pytest.fixture
def forked_runs(python, monkeypatch):
    """Start runs as forks, with two seeds for each rate."""
    monkeypatch.setattr("ravan_flwr.lab.tuning.SEEDS", 2)
    monkeypatch.setattr(sys, "executable", python.executable)


PRESET = """# my own
task: vision
model: {source: bundled, name: digits-vit}
data: {source: sklearn-digits, columns: {image: image, label: label}}  # it knows its labels
"""


def write_preset(folder, rates="  ravan: 3.0e-3\n"):
    """Write a preset of the digits with these learning rates and comments."""
    path = folder / "mine.yaml"
    path.write_text(f"{PRESET}learning-rate:  # mine\n{rates}# the end\n")
    return path


def tuning_with_best(settings, rate=1e-2):
    """Return a tuning and its choice, in which this learning rate is the best."""
    tuning = plan_tuning(settings)
    scores = {
        rate: Score("accuracy", [0.9, 0.92, 0.91], []),
        1e-3: Score("accuracy", [0.8] * 3, []),
    }
    tried = [1e-3, rate, 0.03]
    return tuning, RateChoice(tuning.grid, tried, scores, False)


def read_rates(folder):
    """Read `rates.csv`."""
    with (folder / "rates.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_tuning_extends_its_grid_resumes_and_draws(tmp_path, forked_runs, monkeypatch, capsys):
    # With a wrong default the best rate is at the grid's edge, so the grid is extended.
    out = tmp_path / "out"
    words = ["tune", *SHORT, "--output", str(out), "--jobs", "2"]
    monkeypatch.setattr("ravan_flwr.lab.tuning.grid_around", lambda _: [1e-5, 3e-5, 1e-4])
    monkeypatch.setattr("ravan_flwr.lab.tuning.EXTENSIONS", 1)
    before = (conf_folder() / "digits-vit.yaml").read_text()
    main(words)
    output = capsys.readouterr().out
    assert "6 runs of 2 rounds, seeds 100 101" in output
    assert "learning rate 0.0003: accuracy" in output
    assert "it is at the edge of the rates tried (1e-05, 3e-05, 0.0001, 0.0003)" in output
    rates = read_rates(out)
    assert all(0 <= float(row["value"]) <= 1 for row in rates)
    assert {(row["row"], row["seed"]) for row in rates} == {
        ("ravan", "100"), ("ravan", "101"),
    }  # fmt: skip
    assert {float(row["rate"]) for row in rates} == {1e-5, 3e-5, 1e-4, 3e-4}
    assert (out / "ravan-accuracy-by-rate.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "results.md").read_text()
    assert "|  | 1e-05 | 3e-05 | 0.0001 | 0.0003 | runs |" in text
    assert "![The accuracy on the validation split of clients, by learning rate" in text
    # The preset has rates of a paper and is not changed; the lines to write are printed.
    assert "keeps its numbers" in output
    assert "  ravan: 3.0e-4" in output
    assert (conf_folder() / "digits-vit.yaml").read_text() == before

    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["false"])
    main(words)  # all runs are done
    assert (out / "results.md").read_text() == text


@pytest.mark.slow
def test_the_best_rate_is_written_into_the_preset(tmp_path, forked_runs, capsys, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text(PRESET)
    words = ["tune", f"preset={path}", *SHORT, "--rates", "1e-5,1e-2,5", "--output", str(tmp_path)]
    main(words)
    output = capsys.readouterr().out
    assert "learning rate 0.01: accuracy" in output
    assert "not significantly worse" not in output
    assert "the edge of the rates tried" not in output
    # Each value is a run's accuracy on the clients' validation splits.
    runs = [path.parent for path in tmp_path.glob("runs/*/*/summary.json")]
    finals = [json.loads((run / "summary.json").read_text())["metrics"]["final"] for run in runs]
    values = [float(row["value"]) for row in read_rates(tmp_path)]
    assert sorted(values) == sorted(final["accuracy"] for final in finals)
    configs = [json.loads((run / "config.json").read_text()) for run in runs]
    assert {config["evaluate-on"] for config in configs} == {"clients"}
    assert re.search(r"^  1e-05: .*\n  5: ", output, re.MULTILINE)
    # The preset has the rate and is otherwise unchanged; the next run uses it.
    assert output.endswith(f"written: learning-rate of ravan is 1.0e-2 in {path}\n")
    text = path.read_text()
    assert text.startswith(PRESET + "learning-rate:\n  ravan: 1.0e-2  # tune: accuracy ")
    assert read_config(with_preset_path({"preset": str(path)})).learning_rate == 1e-2
    # The runs still count as this preset's, whose labels come from the data.
    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["false"])
    main(words)
    assert path.read_text() == text


def test_a_dry_run_runs_nothing(tmp_path, capsys):
    main(["tune", "method=fedit", "--dry-run", "--output", str(tmp_path / "out")])
    output = capsys.readouterr().out
    assert "learning rate of fedit in preset digits-vit, 20 clients" in output
    assert "9 runs of 20 rounds, seeds 100 101 102" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_when_every_rate_fails_the_error_has_the_first_reason(tmp_path, forked_runs, capsys):
    failing = ["limits=max-update-norm=1e-9", "--rates", "1e-3,1e-2"]
    errors = error_of(capsys, "tune", *SHORT, *failing, "--output", tmp_path, status=1)
    assert "every learning rate failed; the first: " in errors
    assert "got no valid reply" in errors
    assert not (tmp_path / "results.md").exists()


@pytest.mark.parametrize("words", [["tune"], ["study", "conf/studies/scales.yaml"]])
def test_a_missing_device_is_an_error_before_any_run(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(conf_folder().parent)
    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: pytest.fail("too late"))
    error = error_of(capsys, *words, "device=cuda:99", "--output", tmp_path / "out")
    assert "device = 'cuda:99' is not there" in error
    assert not (tmp_path / "out").exists()


def test_an_interrupted_tuning_prints_how_to_continue(tmp_path, monkeypatch, capsys):
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("ravan_flwr.lab.tuning.run_missing", interrupt)
    with pytest.raises(SystemExit) as end:
        main(["tune", *SHORT, "--output", str(tmp_path)])
    assert end.value.code == 130
    assert f"finished runs are kept in {tmp_path}; the same" in capsys.readouterr().out


def test_writing_the_rate_keeps_the_rest_of_the_preset(tmp_path):
    path = write_preset(tmp_path, "  fedit: 1.0e-3  # theirs\n  ravan: 3.0e-3\n")
    path.chmod(0o640)
    message = adopt(*tuning_with_best({"preset": str(path), "batch-size": 8}))
    assert message == f"written: learning-rate of ravan is 1.0e-2 in {path}"
    assert read_config(with_preset_path({"preset": str(path)})).learning_rate == 1e-2
    before, _, after = path.read_text().partition("  ravan: 1.0e-2  # tune: ")
    assert before == f"{PRESET}learning-rate:  # mine\n  fedit: 1.0e-3  # theirs\n"
    # Three values at a distance of 0.01; the quantile of Student's t is 4.3027.
    half_width = 4.3027 * 0.01 / math.sqrt(3)
    assert after == f"accuracy 0.9100 ± {half_width:.4f}, with batch-size=8\n# the end\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_preset_behind_a_symlink_is_written_only_on_request(tmp_path):
    path, elsewhere = write_preset(tmp_path), tmp_path / "elsewhere.yaml"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    best = tuning_with_best({"preset": str(path)})
    assert "not written" in adopt(*best, write=False)
    assert elsewhere.read_bytes() == before
    adopt(*best)
    assert path.is_symlink()
    assert "ravan: 1.0e-2" in elsewhere.read_text()


@pytest.mark.parametrize(
    ("settings", "rates", "mode", "reason"),
    [
        ({}, "  ravan: 3.0e-3\n", 0o444, "the file is read-only"),
        ({"targets": "query"}, "  ravan: 3.0e-3\n", 0o644, "chosen with targets=query, which"),
        ({}, "  ravan: {frozen: 3.0e-3, trained: 1.0e-3}\n", 0o644, "keeps its numbers"),
    ],
)
def test_presets_that_are_not_written(settings, rates, mode, reason, tmp_path):
    path = write_preset(tmp_path, rates)
    path.chmod(mode)
    before = path.read_bytes()
    message = adopt(*tuning_with_best({"preset": str(path), **settings}))
    assert message.startswith(f"not written to {path}: ")
    assert reason in message
    assert yaml.safe_load(message.partition("\n")[2]) == {"learning-rate": {"ravan": 1e-2}}
    assert path.read_bytes() == before
    assert [other.name for other in path.parent.glob(".*")] == []


def test_a_preset_that_was_damaged_or_removed_meanwhile_is_not_written(tmp_path):
    path = write_preset(tmp_path)
    choice = tuning_with_best({"preset": str(path)})
    path.write_text("a: [")
    assert "no YAML any more" in adopt(*choice)
    assert path.read_text() == "a: ["
    path.unlink()
    assert "No such file" in adopt(*choice)


def test_too_few_examples_for_validation_splits_are_refused_before_any_run(tmp_path, capsys):
    words = "num-clients=1438", "partition=iid", "--output", tmp_path / "out"
    assert "a client has 1 example under seed 100" in error_of(capsys, "tune", *words)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_the_examples_of_all_seeds_are_read_once(monkeypatch):
    load = Mock(wraps=load_splits)
    monkeypatch.setattr(model_and_data, "load_splits", load)
    _check_examples(plan_tuning({}))
    load.assert_called_once()


def test_invalid_arguments_of_tune_are_errors(capsys):
    for words, message in (
        (["--rates", "fast"], "--rates fast: expected numbers"),
        (["--jobs", "0"], "--jobs 0: expected a whole number"),
        (["seed"], "got 'seed', expected KEY=VALUE"),
    ):
        assert message in error_of(capsys, "tune", *words)
