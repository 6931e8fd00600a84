"""Reports, spectra and tracking agree with the round log."""

import csv
import json
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event

from ravan_flwr import simulate, write_spectra
from ravan_flwr.adapters import MultiHeadLinear
from ravan_flwr.cli import main
from ravan_flwr.reports.evaluation import result_of
from ravan_flwr.reports.report import write_report
from ravan_flwr.reports.run_charts import run_charts
from ravan_flwr.reports.spectrum import Spectra, effective_rank
from ravan_flwr.runs import tracking
from ravan_flwr.runs.history import RecordedRun, group_runs
from ravan_flwr.runs.tracking import Trackers, check_tracking
from ravan_flwr.specs import Scalar
from tests.hostile_texts import HOSTILE
from tests.tags import Tags

SHORT: dict[str, Scalar] = {
    "num-rounds": 3, "local-steps": 2, "batch-size": 8, "report": False, "tracking": "none",
    "budgets": "uniform",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [
        simulate(SHORT | {"method": method, "seed": seed, "output-dir": str(folder)}, 5).run_dir
        for method in ("ravan", "hetlora")
        for seed in (0, 1)
    ]


class Page(Tags):
    """Parser that collects a page's tags and text."""

    VOID = ("meta", "br", "img")

    def __init__(self):
        super().__init__()
        self.text = ""

    def handle_data(self, data):
        self.text += data


def read_page(path):
    page = Page()
    page.feed(path.read_text())
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:  # self-contained
        for name in ("src", "href", "xlink:href", "srcset"):
            assert not (attributes.get(name) or "#").startswith(("http", "/", "file")), tag
    return page


def test_a_report_of_one_run(runs, tmp_path, capsys):
    main(["report", str(runs[0]), "--output", str(tmp_path)])
    assert str(tmp_path / "index.html") in capsys.readouterr().out
    page = read_page(tmp_path / "index.html")
    figures = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    assert len(figures) == 9
    assert len(list(tmp_path.glob("*.png"))) == 9
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert f"{summary['metrics']['final']['accuracy']:.4f}" in page.text
    assert f"{summary['trainable-parameters']:,}" in page.text
    assert "#010203" not in (tmp_path / "index.html").read_text()
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in tmp_path.glob("*.png"))


def test_the_heads_are_those_of_the_records(runs):
    run = RecordedRun.read(runs[0])
    records = [json.loads(line) for line in (runs[0] / "rounds.jsonl").read_text().splitlines()]
    charts: dict[str, Any] = {chart.name: chart for chart in run_charts(run)}
    times = torch.zeros(8, 4)
    for record in records:
        for client in record["clients"]:
            for layer, heads in enumerate(client["selected"]):
                times[layer, heads] += 1
    drawn = charts["heads"].figure.axes[0].images[0].get_array()
    assert torch.equal(torch.tensor(drawn.tolist()), times)
    norms = charts["norms"].figure.axes[0].images[0].get_array()
    assert norms.shape == (8, 4)


def test_norms_of_heads_are_those_of_their_delta_weights(runs):
    written = json.loads((runs[0] / "summary.json").read_text())["head-norms"]
    with result_of(runs[0]) as loaded:
        for layer, adapter in zip(loaded.model.layers, loaded.model.adapters, strict=True):
            assert isinstance(adapter, MultiHeadLinear)
            parts = adapter.B @ adapter.H @ adapter.A
            expected = torch.linalg.matrix_norm(parts).tolist()
            assert written[layer.name] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_several_runs_are_grouped_with_seeds_as_a_band(runs, tmp_path):
    groups = group_runs([RecordedRun.read(path) for path in runs])
    assert {name: len(grouped) for name, grouped in groups.items()} == {"ravan": 2, "hetlora": 2}
    # Runs with other learning rates are other groups.
    ravan, faster, hetlora = (
        RecordedRun.read(runs[0]),
        RecordedRun.read(runs[1]),
        RecordedRun.read(runs[2]),
    )
    faster.config["learning-rate"] = 9.0
    assert set(group_runs([ravan, faster, hetlora])) == {
        "ravan, learning-rate 0.003", "ravan, learning-rate 9.0",
        f"hetlora, learning-rate {hetlora.config['learning-rate']}",
    }  # fmt: skip
    # Settings without effect, or that follow from another setting, make no group.
    faster.config.update(
        {
            "learning-rate": 0.003, "method": "local", "heads": 9,
            "evaluate-on": "clients", "validation-share": 0.2, "clients-per-round": 1_000_000,
        }
    )  # fmt: skip
    assert list(group_runs([ravan, faster])) == ["ravan", "local"]
    main(["report", *map(str, runs), "--output", str(tmp_path)])
    page = read_page(tmp_path / "index.html")
    assert page.text.count("seed 1: ") == 2
    finals = [
        json.loads((path / "summary.json").read_text())["metrics"]["final"]["accuracy"]
        for path in runs[:2]
    ]
    assert f"{sum(finals) / 2:.4f}" in page.text
    assert f"{min(finals):.4f} to {max(finals):.4f}" in page.text


@pytest.mark.usefixtures("without_charts")
def test_text_from_outside_is_escaped_and_rejections_are_listed(runs, tmp_path):
    for name in ("config.json", "rounds.jsonl"):
        (tmp_path / name).write_text((runs[0] / name).read_text())
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["rejected"] = [{"client": "partition 1", "reason": "<script>alert(1)</script>"}]
    (tmp_path / "rounds.jsonl").write_text("\n".join([json.dumps(record), *lines[1:], ""]))
    main(["report", str(tmp_path)])
    page = read_page(tmp_path / "report" / "index.html")
    assert "<script>alert(1)</script>" in page.text  # shown as text
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert "This run has not finished." in page.text


@pytest.mark.usefixtures("without_charts")
def test_hostile_reasons_stay_text_and_change_nothing_else(runs, tmp_path):
    """Reasons and names come from clients: each must stay in its cell."""

    def rejected(texts):
        def change(records):
            records[0]["rejected"] = [{"client": text, "reason": text} for text in texts]
            return records

        return change

    def parsed(folder, texts):
        page = write_report(
            [copy_of(runs[0], tmp_path / folder, rejected(texts))], tmp_path / "out"
        )
        return read_page(page)

    page, harmless = parsed("bad", HOSTILE), parsed("good", ["x"] * len(HOSTILE))
    assert page.tags == harmless.tags
    assert "49" not in page.text.partition("Rejected replies")[2].partition("Settings")[0]
    shown_text = page.text.replace("\ufffd", "\x00")  # which HTML has instead of a zero byte
    for text in HOSTILE:
        expected = text.encode(errors="backslashreplace").decode()
        assert shown_text.replace("\r", "").count(expected.replace("\r", "")) == 2, text


@pytest.mark.slow
def test_dollar_signs_in_texts_start_no_formula(runs, tmp_path):
    """Matplotlib would read text between two dollar signs as a formula."""
    names = [r"/data/$\frac{$/it's_a^model", r"/data/$x_$ and \$y^"]
    for run, name in zip(runs[:2], names, strict=True):
        folder = copy_of(run, tmp_path / str(names.index(name)))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model": {"name": name}}))
    main(["report", str(tmp_path / "0"), str(tmp_path / "1"), "--output", str(tmp_path / "out")])
    text = read_page(tmp_path / "out" / "index.html").text
    for name in names:
        assert text.count(name) > 4  # in legends of charts, and a table


def copy_of(run, folder, change=lambda records: records):
    """Copy a run's config and changed round log, without the summary."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((run / "config.json").read_text())
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines = [json.dumps(record) for record in change(records)]
    (folder / "rounds.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def test_untrained_heads_are_shown(runs, tmp_path):
    def first_heads_only(records):
        for client in (client for record in records for client in record["clients"]):
            client["selected"] = [[0] for _ in client["selected"]]
        return records

    folder = copy_of(runs[0], tmp_path, first_heads_only)
    (folder / "summary.json").write_text((runs[0] / "summary.json").read_text())
    charts: dict[str, Any] = {chart.name: chart for chart in run_charts(RecordedRun.read(folder))}
    drawn = torch.tensor(charts["heads"].figure.axes[0].images[0].get_array().tolist())
    assert drawn.shape == (8, 4)
    assert (drawn[:, 0] > 0).all()
    assert not drawn[:, 1:].any()


@pytest.mark.slow
def test_runs_without_evaluation_or_with_another_metric(runs, tmp_path, capsys):
    def without_metrics(records):
        return [record | {"metrics": {}} for record in records]

    def with_other_metric(records):
        return [record | {"metrics": {"f1": 0.5}} for record in records]

    not_evaluated, f1 = (
        copy_of(runs[0], tmp_path / "a", without_metrics),
        copy_of(runs[0], tmp_path / "b", with_other_metric),
    )
    evaluated = copy_of(runs[2], tmp_path / "c")  # without the file of the table by class
    main(["report", str(not_evaluated), str(evaluated), "--output", str(tmp_path / "out")])
    page = read_page(tmp_path / "out" / "index.html")
    assert "not evaluated" in page.text
    assert "0.0000" not in page.text
    main(["report", str(not_evaluated), "--output", str(tmp_path / "one")])
    assert not (tmp_path / "one" / "loss.png").exists()  # nothing to draw
    with pytest.raises(SystemExit):
        main(["report", str(f1), str(runs[2]), "--output", str(tmp_path / "two")])
    assert "expected a common metric" in capsys.readouterr().err


def with_value(key, value):
    return lambda records: [record | {key: value} for record in records]


def test_damaged_files_are_named(runs, tmp_path, capsys):
    old = copy_of(runs[0], tmp_path / "old", lambda records: [{"round": 1, "clients": []}])
    cut = copy_of(runs[0], tmp_path / "cut")
    text = (cut / "rounds.jsonl").read_text()
    (cut / "rounds.jsonl").write_text(text[:50] + "\n" + text[50:])
    bad = copy_of(runs[0], tmp_path / "bad")
    (bad / "summary.json").write_text("{")
    void = copy_of(runs[0], tmp_path / "void", with_value("train-loss", None))
    text_for_list = copy_of(runs[0], tmp_path / "text", with_value("rejected", ["1"]))
    for folder, message in (
        (old, "rounds.jsonl: line 1 is damaged (it has metrics: got nothing: Field required)"),
        (void, "line 1 is damaged (it has train-loss: got None: Input should be a valid number)"),
        (text_for_list, "line 1 is damaged (it has rejected.0: got '1': Input should be a valid"),
        (cut, "rounds.jsonl: line 1 is damaged"),
        (bad, "summary.json is damaged"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["report", str(folder)])
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert "found no config.json there" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert "has no finished round, expected a run with one" in capsys.readouterr().err


@pytest.mark.usefixtures("without_charts")
def test_runs_without_a_round_are_skipped_by_name(runs, tmp_path, capsys):
    unfinished = copy_of(runs[0], tmp_path / "unfinished", lambda records: [])
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "lock").write_text("process 1 on x")
    main(["report", str(unfinished), str(runs[0]), str(begun), "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert f"skipped: report: {unfinished} has no finished round" in printed
    assert f"skipped: report: {begun} has no finished round" in printed
    assert read_page(tmp_path / "out" / "index.html").text.count("Settings") == 1
    for run_dirs, message in (
        ([unfinished, begun], "report: none of 2 runs has a finished round, expected at least one"),
        ([runs[0], tmp_path], "found no config.json there"),  # a folder that is no run is an error
    ):
        with pytest.raises(SystemExit) as end:
            main(["report", *map(str, run_dirs), "--output", str(tmp_path / "none")])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_runs_of_versions_with_other_settings_are_compared(runs, tmp_path):
    """A missing setting counts as its default."""

    def changed_run(name, **changes):
        folder = copy_of(runs[0], tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value != "GONE"}
        (folder / "config.json").write_text(json.dumps(config))
        return RecordedRun.read(folder)

    current, later = changed_run("now"), changed_run("later", **{"a-later-key": True})
    earlier = changed_run("earlier", rank="GONE")
    assert list(group_runs([current, later])) == ["ravan", "a-later-key True"]
    assert list(group_runs([current, earlier])) == ["rank 13", "ravan"]
    assert list(group_runs([earlier, current])) == ["ravan", "rank 13"]
    with pytest.raises(ValueError, match=r"config.json lacks method, expected the settings"):
        changed_run("void", method="GONE")


def test_names_have_no_settings_that_the_preset_determines(runs, tmp_path):
    """A setting that was chosen is in a name; one that the preset or method determines is not."""

    def run_of(name, given, **changes):
        folder = copy_of(runs[0], tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | given | changes
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "settings.json").write_text(json.dumps(given))
        return RecordedRun.read(folder)

    def other(name, **given):
        derived = {"lora-rank": 9, "max-length": 64, "calibration-learning-rate": 9e-5}
        return run_of(name, {"preset": "other", **given}, data={"name": "x"}, **derived)

    two, three = run_of("two", {"num-rounds": 2}), run_of("three", {"num-rounds": 3})
    assert list(group_runs([two, three, other("far", **{"num-rounds": 2, "data": "x"})])) == [
        "preset digits-vit, num-rounds 2", "preset digits-vit, num-rounds 3",
        "preset other, num-rounds 2",
    ]  # fmt: skip
    # A learning rate that was chosen is not hidden by another choice.
    fast = run_of("fast", {"num-rounds": 3, "learning-rate": 1.0})
    assert list(group_runs([two, fast])) == [
        "num-rounds 2, learning-rate 0.003", "num-rounds 3, learning-rate 1.0",
    ]  # fmt: skip
    (two.path / "settings.json").unlink()  # a run of an earlier version: all is taken for chosen
    assert "lora-rank 4" in next(iter(group_runs([two, other("late")])))


@pytest.mark.slow
def test_spectra_are_the_singular_values_of_the_delta_weights(runs, tmp_path):
    main(["report", *map(str, runs), "--spectrum", "--output", str(tmp_path)])
    spectra_files = {"spectrum.png", "effective-rank.png", "spectrum.csv"}
    assert {path.name for path in write_spectra(runs, tmp_path / "alone")} == spectra_files
    assert spectra_files < {p.name for p in tmp_path.iterdir()}
    page = read_page(tmp_path / "index.html").text
    assert page.count("Singular values of the update") == 1
    with (tmp_path / "spectrum.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["group"] == "ravan"]
    rows = [row for row in rows if row["seed"] == "1"]
    with result_of(runs[1]) as loaded:
        deltas = loaded.model.method.delta_weights(loaded.model.adapters)
        names = [layer.name for layer in loaded.model.layers]
    assert [row["layer"] for row in rows] == names
    for row, delta in zip(rows, deltas, strict=True):
        values = torch.tensor([float(word) for word in row["singular-values"].split()])
        torch.testing.assert_close(values, torch.linalg.svdvals(delta), rtol=1e-4, atol=1e-5)
        assert float(row["norm"]) == pytest.approx(float(delta.norm()), rel=1e-4)


def test_a_personalised_run_has_no_spectrum(runs, tmp_path):
    folder = copy_of(runs[0], tmp_path / "personal")
    config = json.loads((folder / "config.json").read_text()) | {"method": "local"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="report --spectrum: .* method 'local', .*leave it out"):
        Spectra.of(folder)


def test_the_effective_rank_of_equal_and_unequal_values():
    assert effective_rank(torch.ones(5)) == pytest.approx(5)
    assert effective_rank(torch.tensor([3.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(4)) == 0
    assert 1 < effective_rank(torch.tensor([1.0, 0.1])) < 2


def events_in(folder):
    """Read TFRecords: length, its checksum, data, its checksum."""
    events = []
    for path in folder.iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return events


@pytest.mark.slow
def test_tensorboard_gets_every_round(tmp_path):
    run = simulate(SHORT | {"tracking": "tensorboard", "output-dir": str(tmp_path)}, 3).run_dir
    logged = {
        (event.step, value.tag): value.simple_value
        for event in events_in(run / "tensorboard")
        for value in event.summary.value
    }
    for line in (run / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        for tag, value in (
            ("train-loss", record["train-loss"]),
            ("evaluation/accuracy", record["metrics"]["accuracy"]),
            ("bytes/up", record["bytes-up"]),
        ):
            assert logged[record["round"], tag] == pytest.approx(value, rel=1e-5)


class FakeWandB:
    """The part of the package that is used."""

    def __init__(self, fails=False):
        self.logged, self.finished, self.fails = [], False, fails

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, numbers, step):
        if self.fails:
            raise ConnectionError("no network")
        self.logged.append((step, numbers["train-loss"]))

    def finish(self):
        self.finished = True


@pytest.fixture
def all_installed(monkeypatch):
    """Make every package appear as installed."""
    monkeypatch.setattr(tracking, "_is_installed", lambda name: True)


@pytest.mark.slow
@pytest.mark.usefixtures("all_installed")
def test_wandb_and_mlflow_get_every_round(tmp_path, monkeypatch):
    wandb = FakeWandB()
    logged: list[tuple[int, float]] = []
    mlflow = SimpleNamespace(
        set_experiment=lambda name: None,
        start_run=lambda run_name: None,
        log_params=lambda settings: None,
        log_metrics=lambda numbers, step: logged.append((step, numbers["train-loss"])),
        end_run=lambda: None,
    )
    for name, module in (("wandb", wandb), ("mlflow", mlflow)):
        monkeypatch.setitem(sys.modules, name, module)
        run = simulate(SHORT | {"tracking": name, "output-dir": str(tmp_path)}, 3).run_dir
        lines = (run / "rounds.jsonl").read_text().splitlines()
        expected = [(r["round"], r["train-loss"]) for r in map(json.loads, lines)]
        assert (wandb.logged if name == "wandb" else logged) == expected
    assert wandb.finished
    assert wandb.settings["config"]["method"] == "ravan"


@pytest.mark.slow
@pytest.mark.usefixtures("all_installed")
def test_a_tracker_that_cannot_start_does_not_fail_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())  # a module without `init`
    simulation = simulate(SHORT | {"tracking": "wandb", "output-dir": str(tmp_path)}, 3)
    assert simulation.summary["rounds"] == 3
    assert "no tracking with wandb" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("all_installed")
def test_a_tracker_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, caplog):
    wandb = FakeWandB(fails=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    simulation = simulate(SHORT | {"tracking": "wandb", "output-dir": str(tmp_path)}, 3)
    assert simulation.summary["rounds"] == 3
    assert len(re.findall("tracking with wandb stops: no network", caplog.text)) == 1
    assert wandb.finished


def test_an_error_names_the_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_is_installed", lambda name: False)
    with pytest.raises(ValueError, match=r"tracking = 'mlflow': the package mlflow is not install"):
        check_tracking("mlflow")
    Trackers("none", tmp_path, {}).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_report_removes_pictures_of_an_earlier_one_and_nothing_else(runs, tmp_path):
    out = tmp_path / "report"
    write_report(runs[:3], out, spectrum=True)
    before = {path.name for path in out.iterdir()}
    (out / "mine.png").write_bytes(b"mine")
    write_report(runs[:2], out)
    fresh = {path.name for path in write_report(runs[:2], tmp_path / "fresh").parent.iterdir()}
    assert before > fresh
    assert {path.name for path in out.iterdir()} == fresh | {"mine.png"}


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_an_earlier_report_among_the_runs_is_skipped(runs, tmp_path, capsys):
    copies = [copy_of(run, tmp_path / f"{n}") for n, run in enumerate(runs[:2])]
    for _ in range(2):
        found = sorted(map(str, tmp_path.iterdir()))  # as a shell expands runs/*
        main(["report", *found, "--output", str(tmp_path / "report")])
    assert len(found) == 3
    text = read_page(tmp_path / "report" / "index.html").text
    assert all(f": {path.name}" in text for path in copies)


def test_git_ignores_the_folders_that_the_documented_commands_write():
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text().splitlines()
    assert {"/report/", "/comparison/"} <= {*ignored}


@pytest.mark.usefixtures("without_charts")
def test_each_run_is_named_as_its_row_in_the_table(runs, tmp_path):
    copies = [copy_of(runs[0], tmp_path / f"{n}", lambda records, n=n: records[:n]) for n in (1, 2)]
    for rounds, folder in enumerate(copies, start=1):
        config = json.loads((folder / "config.json").read_text()) | {"num-rounds": rounds}
        (folder / "config.json").write_text(json.dumps(config))
    text = read_page(write_report(copies, tmp_path / "out")).text
    table, _, each = text.partition("Each run")
    for row in group_runs([*map(RecordedRun.read, copies)]):
        assert row in table
        assert f"{row}, seed 0: " in each
