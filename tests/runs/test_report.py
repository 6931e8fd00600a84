"""Reports, spectra and tracking agree with the round log."""

import csv
import json
import shutil
import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event

from ravan_flwr import write_spectra
from ravan_flwr.adapters import MultiHeadLinear
from ravan_flwr.cli import main
from ravan_flwr.results.evaluation import result_of
from ravan_flwr.results.report import write_report
from ravan_flwr.results.run_charts import run_charts
from ravan_flwr.results.spectrum import Spectra, effective_rank
from ravan_flwr.runs import tracking
from ravan_flwr.runs.history import RecordedRun, group_runs
from ravan_flwr.runs.tracking import Trackers, check_tracking
from tests.commands import error_of
from tests.hostile_texts import HOSTILE
from tests.short_runs import records_of, run
from tests.tags import Tags


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    settings = {"num_rounds": 3, "budgets": "uniform"}
    return [
        run(folder, 5, method=method, seed=seed, **settings).run_dir
        for method in ("ravan", "hetlora")
        for seed in (0, 1)
    ]


def read_json(path):
    return json.loads(path.read_text())


def copy_of(run_dir, folder, change=lambda records: records, **config):
    """Copy a run's config and round log, with changes, without the summary."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(read_json(run_dir / "config.json") | config))
    lines = [json.dumps(record) for record in change(records_at(run_dir))]
    (folder / "rounds.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def records_at(run_dir):
    return records_of(SimpleNamespace(run_dir=run_dir))


def with_value(key, value):
    return lambda records: [record | {key: value} for record in records]


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
    summary = read_json(runs[0] / "summary.json")
    assert f"{summary['metrics']['final']['accuracy']:.4f}" in page.text
    assert f"{summary['trainable-parameters']:,}" in page.text
    assert "#010203" not in (tmp_path / "index.html").read_text()
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in tmp_path.glob("*.png"))


def test_the_heads_are_those_of_the_records(runs, tmp_path):
    """Also where only the first head of each layer was trained."""

    def first_heads_only(records):
        for client in (client for record in records for client in record["clients"]):
            client["selected"] = [[0] for _ in client["selected"]]
        return records

    changed = copy_of(runs[0], tmp_path, first_heads_only)
    shutil.copy(runs[0] / "summary.json", changed)
    for folder in (runs[0], changed):
        charts: dict[str, Any] = {c.name: c for c in run_charts(RecordedRun.read(folder))}
        times = torch.zeros(8, 4)
        for record in records_at(folder):
            for client in record["clients"]:
                for layer, heads in enumerate(client["selected"]):
                    times[layer, heads] += 1
        drawn = charts["heads"].figure.axes[0].images[0].get_array()
        assert torch.equal(torch.tensor(drawn.tolist()), times)
        assert charts["norms"].figure.axes[0].images[0].get_array().shape == (8, 4)
    assert not times[:, 1:].any()


def test_norms_of_heads_are_those_of_their_delta_weights(runs):
    written = read_json(runs[0] / "summary.json")["head-norms"]
    with result_of(runs[0]) as loaded:
        for layer, adapter in zip(loaded.model.layers, loaded.model.adapters, strict=True):
            assert isinstance(adapter, MultiHeadLinear)
            parts = adapter.B @ adapter.H @ adapter.A
            expected = torch.linalg.matrix_norm(parts).tolist()
            assert written[layer.name] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_several_runs_are_grouped_with_seeds_as_a_band(runs, tmp_path):
    ravan, faster, hetlora, _ = recorded = [RecordedRun.read(path) for path in runs]
    groups = group_runs(recorded)
    assert {name: len(grouped) for name, grouped in groups.items()} == {"ravan": 2, "hetlora": 2}
    # Runs with other learning rates are other groups.
    faster.config["learning-rate"] = 9.0
    assert set(group_runs([ravan, faster, hetlora])) == {
        "ravan, learning-rate 0.003", "ravan, learning-rate 9.0",
        f"hetlora, learning-rate {hetlora.config['learning-rate']}",
    }  # fmt: skip
    # Settings without effect, or that follow from another setting, make no group.
    faster.config.update({
        "learning-rate": 0.003, "method": "local", "heads": 9, "evaluate-on": "clients",
        "validation-share": 0.2, "clients-per-round": 1_000_000,
    })  # fmt: skip
    assert list(group_runs([ravan, faster])) == ["ravan", "local"]
    main(["report", *map(str, runs), "--output", str(tmp_path)])
    page = read_page(tmp_path / "index.html")
    assert page.text.count("seed 1: ") == 2
    summaries = [read_json(path / "summary.json") for path in runs[:2]]
    finals = [summary["metrics"]["final"]["accuracy"] for summary in summaries]
    assert f"{sum(finals) / 2:.4f}" in page.text
    assert f"{min(finals):.4f} to {max(finals):.4f}" in page.text


@pytest.mark.usefixtures("without_charts")
def test_hostile_reasons_stay_text_and_change_nothing_else(runs, tmp_path):
    """Reasons and names come from clients: each must stay in its cell."""

    def parsed(folder, texts):
        rejected = [{"client": text, "reason": text} for text in texts]
        copied = copy_of(
            runs[0], tmp_path / folder, lambda r: [r[0] | {"rejected": rejected}, *r[1:]]
        )
        main(["report", str(copied)])
        return read_page(copied / "report" / "index.html")

    page, harmless = parsed("bad", HOSTILE), parsed("good", ["x"] * len(HOSTILE))
    assert "This run has not finished." in page.text
    assert not [tag for tag, _ in page.tags if tag == "script"]
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
    folders = [
        copy_of(run_dir, tmp_path / run_dir.name, model={"name": name})
        for run_dir, name in zip(runs, names, strict=False)
    ]
    text = read_page(write_report(folders, tmp_path / "out")).text
    for name in names:
        assert text.count(name) > 4  # in legends of charts, and a table


@pytest.mark.slow
def test_runs_without_evaluation_or_with_another_metric(runs, tmp_path, capsys):
    not_evaluated = copy_of(runs[0], tmp_path / "a", with_value("metrics", {}))
    f1 = copy_of(runs[0], tmp_path / "b", with_value("metrics", {"f1": 0.5}))
    evaluated = copy_of(runs[2], tmp_path / "c")  # without the file of the table by class
    page = read_page(write_report([not_evaluated, evaluated], tmp_path / "out"))
    assert "not evaluated" in page.text
    assert "0.0000" not in page.text
    write_report([not_evaluated], tmp_path / "one")
    assert not (tmp_path / "one" / "loss.png").exists()  # nothing to draw
    error = error_of(capsys, "report", f1, runs[2], "--output", tmp_path / "two")
    assert "expected a common metric" in error


def test_damaged_files_are_named(runs, tmp_path, capsys):
    """Every kind of damage to a line: unit/runs/test_directory.py."""
    old = copy_of(runs[0], tmp_path / "old", lambda records: [{"round": 1, "clients": []}])
    cut = copy_of(runs[0], tmp_path / "cut")
    text = (cut / "rounds.jsonl").read_text()
    (cut / "rounds.jsonl").write_text(text[:50] + "\n" + text[50:])
    bad = copy_of(runs[0], tmp_path / "bad")
    (bad / "summary.json").write_text("{")
    void = copy_of(runs[0], tmp_path / "void", with_value("train-loss", None))
    text_for_list = copy_of(runs[0], tmp_path / "text", with_value("rejected", ["1"]))
    for folder, message in (
        (old, "rounds.jsonl: line 1 is damaged (it has metrics: got nothing"),
        (void, "line 1 is damaged (it has train-loss: got None"),
        (text_for_list, "line 1 is damaged (it has rejected.0: got '1'"),
        (cut, "rounds.jsonl: line 1 is damaged"),
        (bad, "summary.json is damaged"),
    ):
        assert message in error_of(capsys, "report", folder)


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
        ([unfinished], "has no finished round"),
        ([unfinished, begun], "none of 2 runs has a finished round"),
        ([runs[0], tmp_path], "found no config.json there"),  # a folder that is no run is an error
    ):
        assert message in error_of(capsys, "report", *run_dirs, "--output", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_runs_of_versions_with_other_settings_are_compared(runs, tmp_path):
    """A missing setting counts as its default."""

    def without(key):
        folder = copy_of(runs[0], tmp_path / key)
        config = read_json(folder / "config.json")
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))
        return RecordedRun.read(folder)

    current, earlier = RecordedRun.read(runs[0]), without("rank")
    later = RecordedRun.read(copy_of(runs[0], tmp_path / "later", **{"a-later-key": True}))
    assert list(group_runs([current, later])) == ["ravan", "a-later-key True"]
    assert list(group_runs([current, earlier])) == ["rank 13", "ravan"]
    assert list(group_runs([earlier, current])) == ["ravan", "rank 13"]
    with pytest.raises(ValueError, match=r"config.json lacks method"):
        without("method")


def test_names_have_no_settings_that_the_preset_determines(runs, tmp_path):
    """A setting that was chosen is in a name; one that the preset or method determines is not."""

    def run_of(name, given, **changes):
        folder = copy_of(runs[0], tmp_path / name, **given | changes)
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
    with pytest.raises(ValueError, match="report --spectrum: .* method 'local'"):
        Spectra.of(copy_of(runs[0], tmp_path / "personal", method="local"))


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
    run_dir = run(tmp_path, tracking="tensorboard").run_dir
    logged = {
        (event.step, value.tag): value.simple_value
        for event in events_in(run_dir / "tensorboard")
        for value in event.summary.value
    }
    for record in records_at(run_dir):
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
        records = records_of(run(tmp_path, tracking=name))
        expected = [(record["round"], record["train-loss"]) for record in records]
        assert (wandb.logged if name == "wandb" else logged) == expected
    assert wandb.finished
    assert wandb.settings["config"]["method"] == "ravan"


@pytest.mark.slow
@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("starts", [True, False])
def test_a_tracker_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, caplog, starts):
    wandb = FakeWandB(fails=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb if starts else SimpleNamespace())
    simulation = run(tmp_path, num_rounds=3, tracking="wandb")
    assert simulation.summary["rounds"] == 3
    message = "tracking with wandb stops: no network" if starts else "no tracking with wandb"
    assert caplog.text.count(message) == 1
    assert wandb.finished == starts


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


@pytest.mark.usefixtures("without_charts")
def test_each_run_is_named_as_its_row_in_the_table(runs, tmp_path):
    copies = [
        copy_of(runs[0], tmp_path / f"{n}", lambda records, n=n: records[:n], **{"num-rounds": n})
        for n in (1, 2)
    ]
    text = read_page(write_report(copies, tmp_path / "out")).text
    table, _, each = text.partition("Each run")
    for row in group_runs([*map(RecordedRun.read, copies)]):
        assert row in table
        assert f"{row}, seed 0: " in each
