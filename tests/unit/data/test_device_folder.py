"""A device's own data folder is read and checked against the preset."""

import json

import datasets
import numpy as np
import pytest
from flwr.app import Context, RecordDict

from ravan_flwr.client.client_request import ClientRequest
from ravan_flwr.config.run_config import read_config
from ravan_flwr.data.examples import device_examples, label_numbers
from ravan_flwr.data.hub import every_split
from tests.support.tiny import newsgroups, pictures, save_model

LABELS = ("red", "green", "blue")


def spec(preset="glue-llama", **changes):
    return read_config({"preset": preset} | changes).data


@pytest.fixture
def rows():
    return {"sentence": ["good", "bad", "fine"], "label": ["positive", "negative", "positive"]}


# `datasets` leaves the closing of CSV files to the garbage collector.
LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def save_images(root, *names):
    """Write an image with each of these names."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pictures([number])[0].save(root / name)


def digits_of(path):
    """Return the labels of a folder of images, or of one image."""
    examples = device_examples(str(path), spec("svhn-vit-b16"))
    return sorted(label_numbers(examples, spec("svhn-vit-b16").labels, "x"))


def texts_of(path):
    return device_examples(str(path), spec())["text"][:]


@LEFT_OPEN
@pytest.mark.parametrize("kind", ["csv", "parquet", "json", "jsonl"])
def test_tables(kind, rows, tmp_path):
    table = datasets.Dataset.from_dict(rows)
    write = {"csv": table.to_csv, "parquet": table.to_parquet}.get(kind, table.to_json)
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper" / f"mine.{kind}")
    examples = device_examples(str(tmp_path), spec())
    assert examples["text"][:] == rows["sentence"]
    assert list(label_numbers(examples, spec().labels, "x")) == [1, 0, 1]
    alone = device_examples(str(tmp_path / "deeper" / f"mine.{kind}"), spec())
    assert alone["label"][:] == rows["label"]


def test_texts_that_are_not_utf8_are_reported(tmp_path):
    line = json.dumps({"sentence": "caf\u00e9", "label": "positive"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(f"{line}\n".encode("latin1") * 3)
    with pytest.raises(ValueError, match="column 'sentence' has texts that are no UTF-8"):
        device_examples(str(tmp_path), spec())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["7/0.png", "0/1.png", "7/2.png"], [0, 7, 7]),
        (["7/a.png", "7/test_b.png"], [7, 7]),  # one label, and a name like that of a split
        (["7/a.png", "0/2021/7/b.png"], [7, 7]),  # at different depths
        (["train/7/a.png", "test/0/b.png"], [0, 7]),  # folders like those of splits
        (["7/a.png", "7/.thumbnails/b.png", "__MACOSX/0/c.png"], [7]),  # hidden files
    ],
)
def test_images_have_the_label_of_their_folder_at_any_depth(names, expected, tmp_path):
    save_images(root := tmp_path / "own [2] data", *names)
    (root / "notes.txt").write_text("not an example")
    assert digits_of(root) == expected


def test_an_image_alone_has_the_label_of_its_folder(tmp_path):
    save_images(tmp_path, "7/a.png", "7/b.png")
    assert digits_of(tmp_path / "7" / "a.png") == [7]


def test_a_broken_link_is_reported_and_a_hidden_one_is_skipped(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"sentence": "x", "label": 1}) + "\n")
    (tmp_path / ".#train.jsonl").symlink_to("me@host.7:1")  # the lock file of an editor
    assert texts_of(tmp_path) == ["x"]
    (tmp_path / "notes.txt").symlink_to("notes.txt")
    with pytest.raises(ValueError, match=r"notes\.txt is a link to nothing, expected a file"):
        texts_of(tmp_path)


@LEFT_OPEN
def test_words_for_missing_values_are_read_as_texts(tmp_path):
    (tmp_path / "train.csv").write_text("sentence,label\nNA,1\nNone,0\nnull,1\n")
    expected = ["NA", "None", "null"]
    assert texts_of(tmp_path) == expected
    for place in (tmp_path, tmp_path / "train.csv"):
        assert every_split(str(place), "", "")["train"]["sentence"][:] == expected


@LEFT_OPEN
@pytest.mark.parametrize("beside", ["LICENSE", "notes.txt", "read me.pdf"])
def test_other_files_beside_a_table_change_nothing_in_it(beside, tmp_path):
    """A license made None a missing value on the server, and not on the devices."""
    (tmp_path / "train.csv").write_text("sentence,label\nNA,None\nNo,007\n")
    (tmp_path / beside).write_text("all rights reserved\n")
    train = every_split(str(tmp_path), "", "")["train"]
    assert train[:] == {"sentence": ["NA", "No"], "label": ["None", "007"]}


@LEFT_OPEN
def test_a_metadata_table_gives_the_labels_of_images(tmp_path):
    save_images(tmp_path, "all/0.png", "all/1.png")
    (tmp_path / "all" / "metadata.csv").write_text("file_name,label\n0.png,4\n1.png,2\n")
    assert digits_of(tmp_path) == [2, 4]


def test_a_file_with_brackets_in_its_name_is_read(rows, tmp_path):
    datasets.Dataset.from_dict(rows).to_json(tmp_path / "data[1].jsonl")
    (tmp_path / "data1.jsonl").write_text('{"sentence": "other", "label": "positive"}')
    examples = every_split(str(tmp_path / "data[1].jsonl"), "", "")["train"]
    assert examples["sentence"][:] == rows["sentence"]


def test_a_changed_folder_is_read_again(tmp_path):
    def write(name, text):
        path = tmp_path / name / "data" / "train.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"sentence": text, "label": 1}) + "\n")
        return path.parent

    first, second = write("a", "one"), write("b", "two")  # the same file names in both
    assert texts_of(first) == ["one"]
    assert texts_of(second) == ["two"]
    assert texts_of(write("a", "three")) == ["three"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"label": ["positive"]}, "got the columns 'label', expected 'sentence' or 'text'"),
        ({"sentence": [], "label": []}, "got no example, expected some"),
        ([], "got 0 files of other kinds, expected images, parquet, CSV or JSON lines"),
        (["a.csv", "b.parquet"], "got csv and parquet, expected images"),
        (["broken.parquet"], "its files cannot be read .ArrowInvalid: Parquet magic bytes"),
    ],
)
def test_files_without_examples_are_refused(content, message, tmp_path):
    if isinstance(content, dict):
        features = datasets.Features(dict.fromkeys(content, datasets.Value("string")))
        table = datasets.Dataset.from_dict(content, features=features)
        table.to_parquet(tmp_path / "x.parquet")
    else:
        for name in content:
            (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=f"node config: data-path = .*{message}"):
        device_examples(str(tmp_path), spec())


@pytest.mark.parametrize("path", ["relative", "/nowhere/at/all"])
def test_paths(path):
    with pytest.raises(ValueError, match="found no such folder, expected the absolute path"):
        device_examples(path, spec())


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (["blue", "red"], None, [2, 0]),
        ([1, 0], ["blue", "green"], [1, 2]),
        ([2, 0], None, [2, 0]),
        (["pink", "gold", "pink"], None, "here: got unknown labels gold, pink; expected red"),
        ([3, 0, -1], None, "unknown labels -1, 3; expected numbers from 0 to 2"),
        ([-1, 0], ["red", "green"], "unknown labels None"),  # not of the first class
        ([0, 1, 2], ["pink", "red", "gold"], "here: got unknown labels gold, pink; expected red"),
        ([0, 0], ["pink"], "here: got unknown labels pink; expected red"),
        ([0, 1], ["red", "pink"], "here: got unknown labels pink; expected red"),
    ],
)
def test_labels_are_numbered_by_name_and_unknown_ones_are_listed(labels, classes, expected):
    features = datasets.Features({"label": datasets.ClassLabel(names=classes)}) if classes else None
    table = datasets.Dataset.from_dict({"label": labels}, features=features)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            label_numbers(table, LABELS, "here")
    else:
        assert list(label_numbers(table, LABELS, "here")) == expected


def test_a_devices_own_classes_are_matched_by_name(tmp_path):
    """Its class numbers do not identify the preset's classes, even if there are as many."""
    classes = datasets.ClassLabel(names=["positive", "negative"])
    features = datasets.Features({"sentence": datasets.Value("string"), "label": classes})
    table = datasets.Dataset.from_dict({"sentence": ["good", "bad"], "label": [0, 1]}, features)
    table.to_parquet(tmp_path / "x.parquet")
    examples = device_examples(str(tmp_path), spec())
    assert list(label_numbers(examples, spec().labels, "here")) == [1, 0]


def node(run_config, **settings):
    context = Context(
        run_id=1, node_id=1, state=RecordDict(), run_config=run_config,
        node_config={"partition-id": 1, "num-partitions": 2} | settings,
    )  # fmt: skip
    return ClientRequest(RecordDict(), context)


@LEFT_OPEN
def test_a_node_trains_on_its_folder_and_needs_no_shared_data(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    newsgroups(30, 5).to_csv(tmp_path / "mine" / "news.csv")
    run_config = {
        "preset": "newsgroups-t5", "model": str(save_model("t5", tmp_path / "model")),
        "validation-share": 0.2, "max-length": 16, "lora-rank": 2,
    }  # fmt: skip
    monkeypatch.setattr("ravan_flwr.training.model_and_data.load_splits", None)
    examples = node(run_config, **{"data-path": str(tmp_path / "mine")}).examples
    assert (len(examples.train), len(examples.validation)) == (24, 6)
    assert sorted([*examples.train.rows, *examples.validation.rows]) == list(range(30))
    answers = examples.train.read_answers(np.arange(24))
    assert {name for (name,) in answers} <= set(spec("newsgroups-t5").labels)
    with pytest.raises(TypeError, match="not callable"):  # the shared data
        _ = node(run_config).examples
    with pytest.raises(ValueError, match="data-path = 3: expected the path of a folder as text"):
        node(run_config, **{"data-path": 3})
