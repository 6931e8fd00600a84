"""Classes found in the data, and the test split that is taken from the training examples."""

import csv
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits, load_wine

from ravan_flwr.data.examples import (
    device_examples,
    label_numbers,
    load_splits,
    other_examples,
    with_labels,
)
from ravan_flwr.specs import DataSpec

TEXTS = (("text", "text"), ("label", "label"))


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes rows as CSV or JSON lines and returns the folder's path."""

    def write(rows, name="train.jsonl"):
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".csv"):
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([["text", "label"], *rows])
        else:
            lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
            path.write_text("\n".join(lines) + "\n")
        return DataSpec("hub", str(path.parent), columns=TEXTS)

    return write


def wines():
    """Return real measurements as texts, with the names of three kinds of grapes."""
    wine = load_wine()
    texts = [" ".join(f"{value:g}" for value in row) for row in wine.data]
    return [(text, f"grape {number}") for text, number in zip(texts, wine.target, strict=True)]


def test_texts_have_the_sorted_values_of_their_column(folder):
    spec = with_labels(folder(wines()))
    assert spec.labels == ("grape 0", "grape 1", "grape 2")
    assert with_labels(spec) is spec


def test_a_column_that_is_read_by_its_role_is_logged(folder, caplog):
    """A typing error in the preset chooses another column."""
    spec = replace(folder(wines()), columns=(("text", "bodi"), ("label", "label")))
    load_splits(spec)
    (line,) = [line for line in caplog.messages if "bodi" in line]
    assert line.endswith("got no column 'bodi', so 'text' is read, its role")


@pytest.mark.parametrize("labels", [[1, None, 0], [None, 1, 0], ["b", None, "a"]])
def test_examples_without_a_label_are_counted(labels):
    train = datasets.Dataset.from_list([{"text": "x", "label": label} for label in labels])
    with pytest.raises(ValueError, match="labels: 1 examples have no label, expected one each"):
        label_numbers(train, ("a", "b"), "labels")


@pytest.mark.parametrize("missing", [None, -1])
def test_a_numbered_class_may_be_missing(missing):
    """Published test splits have -1, and a table of one's own may have no value."""
    features = datasets.Features(label=datasets.ClassLabel(names=["a", "b"]))
    train = datasets.Dataset.from_dict({"label": [1, missing, 0]}, features)
    with pytest.raises(ValueError, match="labels: got unknown labels None; expected a, b"):
        label_numbers(train, ("a", "b"), "labels")


def test_each_of_several_test_sets_needs_labels(folder):
    rows = [(f"text {n}", "ab"[n % 2]) for n in range(40)]
    folder(rows, "train.jsonl")
    spec = replace(folder(rows, "validation.jsonl"), labels=("a", "b"), train="train")
    both = replace(spec, tests=(("val", "validation"), ("final", "test")))
    with pytest.raises(ValueError, match="got the splits train, validation, expected test"):
        load_splits(both)
    assert len(load_splits(replace(spec, tests=(("test", "test"),)))["test"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets' CSV
@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
@pytest.mark.parametrize("first", [0, 1])
def test_numeric_labels_are_sorted_by_value(name, first, folder):
    """Stars from 1 to 12 are no indices, and 12 is sorted after 2."""
    rows = [(f"text {number}", first + number % 12) for number in range(120)]
    spec = with_labels(folder(rows, name))
    assert spec.labels == tuple(str(first + number) for number in range(12))
    train = load_splits(spec)["train"]
    numbers = label_numbers(train, spec.labels, "labels")
    assert [int(number) + first for number in numbers] == train["label"][:]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets' CSV
@pytest.mark.parametrize("packed", [False, True])
def test_zeros_in_front_of_a_label_are_kept(packed, folder):
    """They vanish in a number, so 001 and 1 became one class, and 001 the second of the labels."""
    names = ["001", "1", "002"]
    rows = [(text, names[int(label.split()[1])]) for text, label in wines()]
    spec = folder(rows, "train.csv")
    file = Path(spec.name, "train.csv")
    if packed:
        file.write_bytes(gzip.compress(file.read_bytes()))
    assert with_labels(spec).labels == ("001", "002", "1")
    expected = [["1", "001", "002"].index(label) for _, label in rows]
    for examples in (
        device_examples(spec.name, spec),
        other_examples(spec)[0],
        other_examples(replace(spec, name=str(file)))[0],
    ):
        assert label_numbers(examples, ("1", "001", "002"), "labels").tolist() == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets' CSV
@pytest.mark.parametrize("names", [("7", "8+"), ("7", "-"), ("unknown", "True"), ("eight", "007")])
def test_labels_of_a_sorted_file_are_read_alike_from_its_begin_to_its_end(names, folder):
    """pandas decides for 10,000 rows at a time whether a column has numbers or truth values."""
    rows = [(f"text {n}", name) for name in names for n in range(10_000)]
    spec = folder(rows, "train.csv")
    assert with_labels(spec).labels == tuple(sorted(names))
    assert set(load_splits(folder(rows[-50:], "test.csv"))["test"]["label"]) == {names[1]}


def test_booleans_are_classes(folder):
    spec = with_labels(folder([(f"text {n}", n % 2 == 0) for n in range(20)]))
    assert spec.labels == ("False", "True")
    train = load_splits(spec)["train"]
    assert label_numbers(train, spec.labels, "labels").tolist() == [*map(int, train["label"])]


@pytest.mark.parametrize("labels", [("True", "False"), ("true", "false", "unknown")])
def test_booleans_are_looked_up_by_name_and_are_no_indices(labels, folder):
    train = load_splits(folder([(f"text {n}", n % 2 == 0) for n in range(20)]))["train"]
    expected = [0 if value else 1 for value in train["label"]]
    assert label_numbers(train, labels, "labels").tolist() == expected
    with pytest.raises(ValueError, match="unknown labels false, true; expected worse, better;"):
        label_numbers(train, ("worse", "better"), "labels")


@pytest.mark.parametrize("labels", [[1, True, 0], ["a", True, "b"]])
def test_a_column_with_some_booleans_is_refused(labels, folder):
    spec = folder([(f"text {n}", label) for n, label in enumerate(labels * 10)])
    with pytest.raises(ValueError, match="the labels are of .* type"):
        with_labels(spec)
    train = load_splits(replace(spec, labels=("a", "b")))["train"]
    with pytest.raises(ValueError, match="expected texts, numbers or classes"):
        label_numbers(train, ("a", "b"), "labels")


def test_numbers_are_indices_where_names_are_given(folder, caplog):
    spec = folder([(f"text {n}", n % 2) for n in range(20)])
    train = load_splits(spec)["train"]
    for _ in range(2):
        numbers = label_numbers(train, ("worse", "better"), "labels")
        assert numbers.tolist() == train["label"][:]
    (line,) = [line for line in caplog.messages if "whole numbers" in line]
    assert line == "labels: got whole numbers, taken as places in the list: 0 is 'worse'"


def test_folders_of_images_name_their_classes(tmp_path):
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images[:60], digits.target, strict=False)):
        path = tmp_path / "train" / f"digit {label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(path)
    spec = DataSpec("hub", str(tmp_path), columns=(("image", "image"), ("label", "label")))
    assert with_labels(spec).labels == tuple(f"digit {number}" for number in range(10))


def test_without_a_test_split_a_fifth_of_each_class_becomes_one(folder):
    spec = with_labels(folder(wines()))
    splits = load_splits(spec)
    assert {name: len(split) for name, split in splits.items()} == {"train": 142, "test": 36}
    counts = np.bincount(label_numbers(splits["test"], spec.labels, "labels"))
    assert counts.tolist() == [12, 14, 10]  # of 59, 71 and 48
    texts = [set(split["text"]) for split in splits.values()]
    assert not texts[0] & texts[1]
    assert load_splits(spec)["test"]["text"][:] == splits["test"]["text"][:]


def test_an_existing_test_split_is_used(folder):
    rows = wines()
    folder(rows[::2])
    splits = load_splits(folder(rows[1::2], "test.jsonl"))
    assert {name: len(split) for name, split in splits.items()} == {"train": 89, "test": 89}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", "x")] * 9, r"got 1 class \(x\), expected two at least"),
        ([("a", "x"), ("b", "y")], "of its 2 examples none can be taken for it"),
        ([("a", "x")] * 9 + [("b", None)] * 9, "some examples have no label"),
        ([("a", 0.5)] * 9 + [("b", 1.5)] * 9, "labels are of the type float64, expected texts"),
        ([(f"{n}", f"{n % 10_001}") for n in range(30_003)], "10,001 different values, expected"),
    ],
)
def test_values_that_are_no_classes_are_refused(rows, message, folder):
    with pytest.raises(ValueError, match=message):
        with_labels(folder(rows))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"subset": "sst2"}, r"it has no folder sst2, .* `ravan-flwr new NAME --data"),
        ({"train": "training"}, "got the splits train, expected training; correct"),
    ],
)
def test_a_missing_subset_folder_or_split_is_reported(missing, message, folder):
    with pytest.raises(ValueError, match=message):
        load_splits(replace(folder(wines()), **missing))


def test_no_plotting_library_is_imported_to_load_a_table(folder, monkeypatch):
    """flwr-datasets imports two, which takes seconds; None in sys.modules makes an import fail."""
    for name in ("flwr_datasets", "seaborn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert {*load_splits(folder(wines()))} == {"train", "test"}
