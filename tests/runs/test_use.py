"""Evaluation and prediction with a run's result."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # its type stubs are a separate package
import pytest
from PIL import Image
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from ravan_flwr import evaluate, predict, simulate, write_report
from ravan_flwr.cli import main
from ravan_flwr.data.rows import read_rows
from ravan_flwr.results import prediction
from ravan_flwr.results.evaluation import _is_trained_on
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.text import Text
from tests.commands import error_of
from tests.runs.in_use import LABELS, QUICK, digit_images, run_of_digits, run_of_texts
from tests.support.tiny import save_data, save_model

# `datasets` does not close CSV files and damaged images before garbage collection.
LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    return run_of_texts(folder), folder / "data"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return run_of_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def image_folders(tmp_path_factory):
    """Save digits as images, in a folder for each label."""
    folder = tmp_path_factory.mktemp("image_folders")
    for number, (image, label) in enumerate(zip(*digit_images(8, "L"), strict=True)):
        (folder / label).mkdir(exist_ok=True)
        image.save(folder / label / f"{number:03}.png")
    return folder


def read_json(path):
    return json.loads(path.read_text())


def copy_of(run, folder, name="", **changes):
    """Copy a run, with changes of one of its files."""
    shutil.copytree(run.run_dir, folder)
    if name:
        (folder / name).write_text(json.dumps(read_json(folder / name) | changes))
    return folder


def examples_of(data):
    rows = map(json.loads, (data / "sst2" / "validation.jsonl").read_text().splitlines())
    texts, labels = zip(*((row["sentence"], row["label"]) for row in rows), strict=True)
    return texts, labels


def test_an_evaluation_on_the_test_examples_gives_the_runs_metrics(texts):
    run, data = texts
    evaluated = evaluate(run.run_dir, data)
    classes = read_json(run.run_dir / "classes.json")
    assert evaluated["metrics"] == pytest.approx(run.summary["metrics"]["final"])
    assert evaluated["metrics"]["macro-f1"] == pytest.approx(classes["macro-f1"])
    assert evaluated["split"] == "validation"  # the preset's test split
    assert evaluated["examples"] == classes["examples"] == len(examples_of(data)[0])
    assert evaluated["classes"] == classes["classes"]
    assert evaluated["confusion"] == classes["confusion"]


def test_predictions_have_the_accuracy_of_the_evaluation(texts, tmp_path):
    run, data = texts
    result = predict(run.run_dir, data / "sst2" / "validation.jsonl", tmp_path / "out.parquet")
    rows = pd.read_parquet(tmp_path / "out.parquet")
    assert [*rows] == ["row", "sentence", "input-label", "label", "probability", "problem"]
    read, right = examples_of(data)
    assert rows["sentence"].tolist() == [*read]
    assert rows["input-label"].tolist() == [*right]
    assert (result.rows, result.unreadable, result.problems) == (len(right), 0, [])
    assert rows["row"].tolist() == list(range(1, len(right) + 1))
    classes = read_json(run.run_dir / "classes.json")
    assert accuracy_score(right, rows["label"]) == pytest.approx(classes["accuracy"])
    assert f1_score(right, rows["label"], average="macro") == pytest.approx(classes["macro-f1"])
    matrix = confusion_matrix(right, rows["label"], labels=LABELS)
    assert matrix.tolist() == classes["confusion"]
    assert ((rows["probability"] >= 0.5) & (rows["probability"] <= 1)).all()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_every_file_format_gives_the_same_predictions(kind, texts, tmp_path, capsys):
    run, data = texts
    frame = pd.DataFrame({"sentence": examples_of(data)[0][:40]})
    path = tmp_path / f"in.{kind}"
    write = {"csv": frame.to_csv, "parquet": frame.to_parquet}
    write |= {"jsonl": lambda path: frame.to_json(path, orient="records", lines=True)}
    write[kind](path)
    main(["predict", str(run.run_dir), "--data", str(path), "--output", str(tmp_path / "o.csv")])
    assert "40 of 40 rows predicted" in capsys.readouterr().out
    predict(run.run_dir, data / "sst2" / "validation.jsonl", tmp_path / "whole.csv")
    labels, of_all = (pd.read_csv(tmp_path / name)["label"] for name in ("o.csv", "whole.csv"))
    assert labels.tolist() == of_all.tolist()[:40]


def test_an_unreadable_row_is_skipped_with_a_problem(texts, tmp_path, capsys):
    run, data = texts
    good = json.dumps({"sentence": examples_of(data)[0][0]})
    lines = [good, "{", json.dumps({"sentence": ""}), json.dumps({"other": 1}), good]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ["--data", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    main(["predict", str(run.run_dir), *words])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["label"] is None for row in rows] == [False, True, True, True, False]
    assert rows[0]["label"] == rows[4]["label"]
    assert [row["problem"] is None for row in rows] == [True, False, False, False, True]
    printed = capsys.readouterr()
    for message in ("row 2: it is no JSON", "row 3: its text", "3 of 5 rows cannot be read"):
        assert message in printed.err
    assert "2 of 5 rows predicted" in printed.out


def test_a_column_that_is_called_as_an_answer_is_renamed(texts, tmp_path, monkeypatch):
    """Answers keep their names, so a column `label` of the input would be lost."""
    run, data = texts
    sentence = examples_of(data)[0][0]
    monkeypatch.setattr(Text, "prediction_columns", ("sentence", "probability"))
    (tmp_path / "in.jsonl").write_text(json.dumps({"sentence": sentence}))
    predict(run.run_dir, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert [*row] == ["row", "input-sentence", "sentence", "probability", "problem"]
    assert row["input-sentence"] == sentence
    assert row["sentence"] in LABELS


def test_an_id_and_other_columns_are_passed_through(texts, tmp_path):
    run, data = texts
    sentences = [*examples_of(data)[0][:3]]
    columns: dict[str, list[Any]] = {
        "id": [7, 8, 9], "sentence": sentences, "score": [0.5, None, 1e300],
        "label": ["a", "b", ""], "input-label": ["c"] * 3, "picture": [b"x"] * 3,
        "tags": [["t"]] * 3,
    }  # fmt: skip
    frame = pd.DataFrame(columns).astype({"id": "int64"})
    frame.to_parquet(tmp_path / "in.parquet")
    predict(run.run_dir, tmp_path / "in.parquet", tmp_path / "out.parquet")
    rows = pd.read_parquet(tmp_path / "out.parquet")
    read = ["row", "id", "sentence", "score", "input-input-label", "input-label"]
    assert [*rows] == [*read, "label", "probability", "problem"]
    assert rows["id"].dtype == np.int64
    assert rows["id"].tolist() == [7, 8, 9]
    assert rows["input-input-label"].tolist() == ["a", "b", ""]
    assert rows["score"].dropna().tolist() == [0.5, 1e300]
    lines = ["{", *(json.dumps({"id": n, "sentence": text, "ok": True, "tags": ["é"]})
                    for n, text in enumerate(sentences)), '{"id": null, "other": 1}']  # fmt: skip
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    predict(run.run_dir, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    read = ["row", "id", "sentence", "ok", "tags", "other"]
    assert [*answers[0]] == [*read, "label", "probability", "problem"]
    assert [answer["other"] for answer in answers] == [None, None, None, None, "1"]
    assert [answer["id"] for answer in answers] == [None, "0", "1", "2", None]
    assert (answers[1]["ok"], answers[1]["tags"]) == ("true", '["é"]')
    (tmp_path / "in.csv").write_text("id,sentence\n=1+1,return it\n8,return it,more\n")
    predict(run.run_dir, tmp_path / "in.csv", tmp_path / "out.csv")
    table = pd.read_csv(tmp_path / "out.csv", dtype=str, keep_default_na=False)
    assert table["id"].tolist() == ["'=1+1", ""]


@pytest.mark.slow
def test_a_model_that_has_moved_is_named(texts, tmp_path, capsys):
    run, data = texts
    moved, old = tmp_path / "moved", Path(read_json(run.run_dir / "config.json")["model"]["name"])
    shutil.move(old, moved)
    file, words = data / "sst2" / "validation.jsonl", ["--model", str(moved)]
    try:
        error = error_of(capsys, "evaluate", run.run_dir, "--data", data)
        assert "found no such folder" in error
        assert "--model" in error
        main(["evaluate", str(run.run_dir), "--data", str(data), "--json", *words])
        accuracy = run.summary["metrics"]["final"]["accuracy"]
        assert json.loads(capsys.readouterr().out)["metrics"]["accuracy"] == accuracy
        main(["predict", str(run.run_dir), "--data", str(file), "--output", f"{tmp_path}/o.csv",
              *words])  # fmt: skip
        assert pd.read_csv(tmp_path / "o.csv")["label"].notna().all()
        main(["export", str(run.run_dir), "--as", "peft", str(tmp_path / "adapter"), *words])
        config = read_json(tmp_path / "adapter" / "adapter_config.json")
        assert config["base_model_name_or_path"] == str(moved)
        assert f'from_pretrained("{moved}"' in (tmp_path / "adapter" / "README.md").read_text()
    finally:
        shutil.move(moved, old)


@pytest.mark.slow
def test_unreadable_images_are_skipped_with_a_problem(digits, image_folders, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(image_folders, folder)
    first, second, third = sorted(folder.rglob("*.png"))[:3]
    first.write_bytes(first.read_bytes()[:-40])
    second.write_bytes(b"")
    Image.open(third).resize((40, 60)).convert("RGBA").save(third)  # with another size and mode
    (folder / "notes.txt").write_text("not an image")
    result = predict(digits.run_dir, folder, tmp_path / "out.csv")
    rows = pd.read_csv(tmp_path / "out.csv", dtype=str, keep_default_na=False)
    assert [*rows] == ["file", "label", "probability", "problem"]
    assert result.rows == len(rows) == 240
    assert result.unreadable == 2
    assert rows["label"][:3].tolist()[:2] == ["", ""]
    assert rows["label"][2] in set("0123456789")
    assert not (rows["label"][2:] == "").any()
    named = [name for name, _, _ in (problem.partition(": ") for problem in result.problems)]
    assert named == rows["file"].tolist()[:2]
    evaluated_again = evaluate(digits.run_dir, image_folders)
    right = [name.split("/")[0] for name in rows["file"]]
    accuracy = np.mean([a == b for a, b in zip(right[3:], rows["label"][3:], strict=True)])
    assert accuracy == pytest.approx(evaluated_again["metrics"]["accuracy"], abs=3 / 240)
    predict(digits.run_dir, third, tmp_path / "one.jsonl")  # a single image
    row = read_json(tmp_path / "one.jsonl")
    assert (row["file"], row["label"]) == (third.name, rows["label"][2])


def test_predictions_are_written_batch_by_batch(texts, tmp_path, monkeypatch):
    """A batch is predicted before the next one is read."""
    run, _ = texts
    read: list[int] = []
    predicted: list[object] = []

    def count_rows(path, columns):
        for row in read_rows(path, columns):
            read.append(row.number)
            assert row.number <= len(predicted) + 8
            yield row

    def record_cells(*arguments, original=prediction._predicted):
        for cells in original(*arguments):
            predicted.append(cells)
            yield cells

    monkeypatch.setattr(prediction, "read_rows", count_rows)
    monkeypatch.setattr(prediction, "_predicted", record_cells)
    monkeypatch.setattr("ravan_flwr.tasks.base.EVALUATION_BATCH", 8)
    (tmp_path / "in.csv").write_text("sentence\n" + "return it\n" * 50)
    result = predict(run.run_dir, tmp_path / "in.csv", tmp_path / "out.csv")
    assert result.rows == len(read) == len(predicted) == 50


def test_without_a_prediction_no_file_is_written(texts, tmp_path, capsys):
    run, data = texts
    (tmp_path / "bad.jsonl").write_text("{\n{\n")
    (tmp_path / "empty.csv").write_text("sentence\n")
    (tmp_path / "there.csv").write_text("mine")
    good, new = data / "sst2" / "validation.jsonl", tmp_path / "new.csv"
    for source, output, result in (
        (tmp_path / "bad.jsonl", new, "none of its 2 rows can be read, the first since row 1"),
        (tmp_path / "empty.csv", new, "it has no rows"),
        (good, tmp_path / "there.csv", "is there already"),
        (good, tmp_path / "new.txt", "expected a name that ends in"),
        (tmp_path / "absent.csv", new, "found nothing there"),
        (data, new, "got a folder"),
    ):
        words = "predict", run.run_dir, "--data", source, "--output", output
        assert result in error_of(capsys, *words)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["bad.jsonl", "empty.csv", "there.csv"]
    assert (tmp_path / "there.csv").read_text() == "mine"


@pytest.mark.slow
@LEFT_OPEN
def test_an_evaluation_names_its_examples(texts, digits, image_folders, tmp_path, capsys):
    run, data = texts
    lines = (data / "sst2" / "validation.jsonl").read_text()
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "train.jsonl").write_text(lines * 2)
    (splits / "test.jsonl").write_text(lines)
    (tmp_path / "one.jsonl").write_text(lines)
    frame = pd.DataFrame(map(json.loads, lines.splitlines()))
    (tmp_path / "tables").mkdir()
    frame.to_csv(tmp_path / "tables" / "mine.csv", index=False)
    number = len(lines.splitlines())
    for path, split in (
        (splits, "test"),
        (tmp_path / "one.jsonl", "all examples"),
        (tmp_path / "tables", "all examples"),
    ):
        main(["evaluate", str(run.run_dir), "--data", str(path), "--json"])
        evaluated = json.loads(capsys.readouterr().out)
        assert (evaluated["split"], evaluated["examples"]) == (split, number)
        assert evaluated["metrics"]["accuracy"] == run.summary["metrics"]["final"]["accuracy"]
    main(["evaluate", str(digits.run_dir), "--data", str(image_folders)])
    printed = capsys.readouterr().out
    evaluated = evaluate(digits.run_dir, image_folders)
    assert "240 examples (all examples of" in printed
    assert f"accuracy {evaluated['metrics']['accuracy']:.4f}" in printed
    assert [line.split()[0] for line in printed.splitlines()[-10:]] == list("0123456789")


def test_training_data_are_recognised_by_their_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained_data, digits = DataSpec("hub", str(tmp_path / "data")), DataSpec("sklearn-digits")
    for name in ("data", "./data/", "data/train.csv", str(tmp_path / "data")):
        assert _is_trained_on(name, trained_data)
        assert not _is_trained_on(name, digits)
    assert not any(_is_trained_on(name, trained_data) for name in ("data/test.csv", "other", "."))


def test_a_result_is_not_evaluated_with_other_bases(digits, image_folders, tmp_path):
    damaged = copy_of(digits, tmp_path / "bad", "config.json", seed=7)
    with pytest.raises(ValueError, match="got a checkpoint of other bases"):
        evaluate(damaged, image_folders)


@LEFT_OPEN
def test_mistakes_of_an_evaluation_are_errors(texts, tmp_path, capsys):
    run, _ = texts
    for name, content, result in (
        ("label.csv", "sentence,label\na,neutral\n", "got unknown labels neutral"),
        ("column.csv", "sentence,other\na,positive\n", "expected 'label'"),
        ("empty.csv", "sentence,label\n", "no example"),
        ("in.xlsx", "", "got a file of kind"),
        ("absent", None, "found no such folder or file"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        assert result in error_of(capsys, "evaluate", run.run_dir, "--data", tmp_path / name)


@pytest.fixture(scope="module", params=["newsgroups-t5", "mrqa-t5"])
def generating_run(request, tmp_path_factory):
    """Return a run of a text-to-text model, which generates names of labels, or answers."""
    folder = tmp_path_factory.mktemp(request.param)
    settings: dict[str, Any] = {
        "preset": request.param, "model": str(save_model("t5", folder / "model")),
        "data": str(save_data(request.param, folder / "data")), "max-length": 16,
        "output-dir": str(folder / "runs"),
    }  # fmt: skip
    return simulate(QUICK | settings, 2), folder / "data"


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_a_text_to_text_run_is_evaluated_predicted_and_reported(generating_run, tmp_path):
    run, data = generating_run
    labelled = run.summary["preset"] == "newsgroups-t5"
    assert (run.run_dir / "classes.json").is_file() == labelled
    write_report([run.run_dir], tmp_path / "report")
    assert (tmp_path / "report" / "confusion.png").is_file() == labelled
    evaluated = evaluate(run.run_dir, data)
    for key, value in run.summary["metrics"]["final"].items():
        assert evaluated["metrics"][key] == pytest.approx(value)
    files = [path for path in data.rglob("*") if path.suffix in {".jsonl", ".parquet"}]
    (test,) = [path for path in files if path.stem.startswith("test")] or [
        path for path in files if path.stem.startswith("validation")
    ]
    predict(run.run_dir, test, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == evaluated["examples"]
    assert all(row["text"] and not row["problem"] for row in rows)
    if labelled:
        counts = read_json(run.run_dir / "classes.json")
        others = sum(not row["label"] for row in rows)
        assert others == sum(counts.get("no-label", [])) == sum(evaluated.get("no-label", []))


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_a_run_without_classes_json_has_a_report_and_a_card(digits, tmp_path):
    earlier = copy_of(digits, tmp_path / "old")
    (earlier / "classes.json").unlink()
    page = write_report(str(earlier), tmp_path / "report")
    assert "Class by class" not in page.read_text()
    assert not (tmp_path / "report" / "confusion.png").exists()
    main(["export", str(earlier), "--as", "merged", str(tmp_path / "merged")])
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"macro-f1 {digits.summary['metrics']['final']['macro-f1']:.4f}" in card


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_the_table_by_class_is_of_the_last_evaluation_also_after_resuming(tmp_path):
    settings = QUICK | {"output-dir": str(tmp_path), "num-rounds": 2}
    run = simulate(settings, 2)
    first = read_json(run.run_dir / "classes.json")
    assert first["round"] == 2
    resumed = simulate(settings | {"num-rounds": 3, "resume": str(run.run_dir)}, 2)
    last = read_json(run.run_dir / "classes.json")
    assert last["round"] == 3
    assert last["accuracy"] == pytest.approx(resumed.summary["metrics"]["final"]["accuracy"])
    # A table of an earlier round is not shown.
    (run.run_dir / "classes.json").write_text(json.dumps(first))
    page = write_report([run.run_dir], tmp_path / "report").read_text()
    assert "Class by class" not in page


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_a_report_has_the_numbers_of_the_run(digits, tmp_path):
    page = write_report([digits.run_dir], tmp_path).read_text()
    classes = read_json(digits.run_dir / "classes.json")
    assert classes["accuracy"] == pytest.approx(digits.summary["metrics"]["final"]["accuracy"])
    assert f"{classes['macro-f1']:.4f}" in page
    for row in classes["classes"]:
        cells = (row["examples"], f"{row['precision']:.4f}", f"{row['recall']:.4f}")
        text = "".join(f"<td>{cell}</td>" for cell in cells)
        assert f'<th scope="row">{row["label"]}</th>{text}' in page


@pytest.mark.slow
@LEFT_OPEN
def test_hostile_labels_are_shown_as_text(texts, tmp_path):
    """Names come from data, so that a page must escape them."""
    classes = read_json(texts[0].run_dir / "classes.json")["classes"]
    classes[0]["label"] = "<script>alert(1)</script> $x_y^$"
    damaged = copy_of(texts[0], tmp_path / "bad", "classes.json", classes=classes)
    page = write_report([damaged], tmp_path / "report").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", '{"round": 1}', {"classes": [1]}, {"confusion": [[1]]}, {"no-label": ["a", 1]},
     {"accuracy": "high"}],
)  # fmt: skip
def test_an_error_names_a_damaged_classes_json(damage, texts, tmp_path):
    changes = {} if isinstance(damage, str) else damage
    damaged = copy_of(texts[0], tmp_path / "bad", "classes.json", **changes)
    if isinstance(damage, str):
        (damaged / "classes.json").write_text(damage)
    with pytest.raises(ValueError, match=r"classes\.json"):
        write_report([damaged], tmp_path / "report")


def test_images_of_one_folder_have_its_name_as_label(digits, image_folders, tmp_path):
    """`datasets` makes no label if there is only one class."""
    shutil.copytree(image_folders / "7", tmp_path / "data" / "7")
    evaluated = evaluate(digits.run_dir, tmp_path / "data")
    counts = {row["label"]: row["examples"] for row in evaluated["classes"]}
    assert counts == {str(n): 0 for n in range(10)} | {"7": len([*(image_folders / "7").iterdir()])}


@pytest.mark.slow
@LEFT_OPEN
def test_an_evaluation_names_unreadable_images(digits, image_folders, tmp_path):
    shutil.copytree(image_folders, tmp_path / "data")
    image = sorted((tmp_path / "data" / "3").iterdir())[1]
    image.write_bytes(image.read_bytes()[:-40])
    with pytest.raises(ValueError, match=rf"cannot be read: \S+{image.name} .*truncated"):
        evaluate(digits.run_dir, tmp_path / "data")
