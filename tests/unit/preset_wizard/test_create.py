"""`ravan-flwr new`: the properties that it detects in data, and its errors."""

import collections
import os
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from transformers import AutoTokenizer, FNetConfig, FNetModel

from ravan_flwr import simulate
from ravan_flwr.cli import main
from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.lab.partition import assign
from tests.docstrings import docstrings, lines
from tests.support.tiny import DATA, MODELS, features, save_data, save_model


def as_lines(folder, rows, name="train"):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text(lines(rows))
    return str(folder)


def labelled(name, text):
    """Return a docstring's row; its label is a module of the standard library."""
    return {"id": name, "text": text, "label": name.partition(".")[0]}


@pytest.fixture
def texts(tmp_path):
    return as_lines(tmp_path / "texts", [labelled(*row) for row in docstrings()])


@pytest.fixture
def images(tmp_path):
    """Write scikit-learn's digits as image files of another size, in a folder for each class."""
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images[:300], digits.target, strict=False)):
        part = "test" if number % 5 == 0 else "train"
        path = tmp_path / "images" / part / f"digit {label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).resize((20, 24)).save(path)
    return str(tmp_path / "images")


@pytest.fixture
def new(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder; return its output and the preset that it wrote."""
    monkeypatch.chdir(tmp_path)

    def run(name, data, model, *words):
        main(["new", name, "--data", str(data), "--model", str(model), *words])
        path = tmp_path / "conf" / f"{name}.yaml"
        return capsys.readouterr().out, read_config(with_preset_path({"preset": str(path)}))

    return run


@pytest.fixture
def refused(new, tmp_path, capsys):
    """Run the command in an empty folder; return its errors."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            new(*words)
        assert end.value.code == 2
        assert not list(tmp_path.glob("conf/*"))
        return capsys.readouterr().err

    return run


@pytest.fixture
def bert(tmp_path):
    return save_model("bert", tmp_path / "bert")


def test_a_folder_of_texts_and_a_model_become_a_preset(new, texts, bert, tmp_path):
    output, config = new("docs", texts, bert)
    assert dict(config.data.columns) == {"text": "text", "label": "label"}
    labels = [labelled(*row)["label"] for row in docstrings()]
    assert config.data.labels == tuple(sorted(set(labels)))
    assert (config.preset, config.task, config.model.name) == ("docs", "text", str(bert))
    held_back = sum(round(count / 5) for count in collections.Counter(labels).values())
    assert f"{len(labels) - held_back:,} examples to train, {held_back:,} more to test:" in output
    assert "not used: id" in output
    assert config.data.test_share == 0.2
    assert config.heads < 4  # of layers this small four heads would exceed the useful rank
    assert "adapts 4 matrices of 16 x 16" in output
    assert f"wrote  {tmp_path}/conf/docs.yaml" in output
    assert output.splitlines()[-1] == "       ravan-flwr simulate preset=conf/docs.yaml"
    # Every line with a setting has a comment.
    written = (tmp_path / "conf" / "docs.yaml").read_text().splitlines()
    plain = [line for line in written if re.match("  [^ ]", line) and "#" not in line]
    assert all(line.strip()[0] in "lhn" for line in plain), plain


def test_a_model_of_an_unlisted_architecture_is_accepted(new, texts, tmp_path, monkeypatch):
    """FNet has no attention, but linear layers."""
    shape: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    monkeypatch.setitem(MODELS, "other", (FNetModel, FNetConfig(**shape, vocab_size=300)))
    output, config = new("docs", texts, save_model("other", tmp_path / "other"))
    assert "all 5 linear layers but the head are adapted" in output
    assert config.model.targets == ()


def test_the_tokens_that_are_read_cover_99_of_100_texts(new, tmp_path):
    """Tokens are counted with the model's own tokenizer, over 200 texts of which one is long."""
    model = save_model("bert", tmp_path / "bert")
    rows = [{"text": "a " * (1 + n % 40), "label": "xy"[n % 2]} for n in range(399)]
    rows.append({"text": "a " * 300, "label": "x"})
    folder = as_lines(tmp_path / "data", rows)
    as_lines(tmp_path / "data", rows[:2], "test")
    output, config = new("short", folder, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    counts = sorted(len(tokenizer(row["text"]).input_ids) for row in rows)
    assert counts[395] <= config.max_length < counts[395] + 8 < counts[-1]
    assert f"{config.max_length} tokens of a text are read" in output


def test_no_more_tokens_are_read_than_the_model_takes(new, tmp_path):
    """RoBERTa counts positions from 2 on: BERTweet's 130 are for 128 tokens."""
    model = save_model("roberta", tmp_path / "model", max_position_embeddings=30)
    rows = [{"text": "a " * 100, "label": "xy"[n % 2]} for n in range(20)]
    _, config = new("long", as_lines(tmp_path / "data", rows), model)
    assert config.max_length == 28


def test_images_are_detected_and_split(new, refused, images, texts, bert, tmp_path):
    vit = save_model("vit", tmp_path / "vit")
    (tmp_path / "flat").mkdir()
    Image.new("L", (20, 24)).save(tmp_path / "flat" / "a.png")
    assert "sorted into a folder for each class" in refused("x", tmp_path / "flat", vit)
    for data, model, found in (
        (images, bert, "images, but this model reads texts"),
        (texts, "digits-vit", "texts, but this model reads images"),
    ):
        message = refused("x", data, model)
        assert f"your data are {found}" in message
        assert "AutoModel" not in message
    output, config = new("digits", images, vit)
    assert (config.task, config.max_length) == ("vision", 0)
    assert config.data.labels == tuple(f"digit {number}" for number in range(10))
    assert "240 examples to train, 60 to test" in output


@pytest.mark.parametrize("task", ["mnli", "qqp", "qnli", "rte", "sst2"])
def test_published_data_sets_give_a_preset(task, new, bert, tmp_path):
    """The columns and classes of GLUE as recorded from the hub, not as in conf/."""
    folder = tmp_path / "glue"
    save_data("glue-llama", folder, task)
    name, subset = DATA["glue-llama", task]
    published = features(name, subset)
    words = ["--subset", task]
    texts = [column for column in published if column not in ("label", "idx")]
    for option in zip(("--text", "--text-pair"), texts, strict=False):
        words += option
    output, config = new(task, folder, bert, *words)
    columns = dict(config.data.columns)
    assert columns["label"] == "label"
    assert ("text-pair" in columns) == (task != "sst2")
    assert "label from column 'label'" in output
    assert set(columns.values()) <= set(published)
    assert config.data.labels == tuple(published["label"].names)
    # The labels of GLUE's test split are secret: each is -1.
    assert dict(config.data.tests)["test"].startswith("validation") or "more to test" in output


def test_unusual_labels_and_names_round_trip(new, bert, tmp_path):
    labels = ['a "b"', "yes", "# no", "{x: 1}", "ü\u2028", "\U0001f600 New  York", "null"]
    rows = [{"text": f"some words {n}", "label": labels[n % 7]} for n in range(140)]
    _, config = new("odd", as_lines(tmp_path / 'my "data" # 1', rows), bert)
    assert config.data.labels == tuple(sorted(labels))
    text = (tmp_path / "conf" / "odd.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["data"]["name"] == str(tmp_path / 'my "data" # 1')
    assert '"\u00fc\\L"' in text


def test_few_examples_give_few_clients(new, bert, tmp_path):
    rows = [{"text": f"text {n}", "image": "a.png", "label": "ab"[n % 2]} for n in range(8)]
    _, config = new("few", as_lines(tmp_path / "data", rows), bert)
    assert dict(config.data.columns) == {"text": "text", "label": "label"}
    settings = with_preset_path({"preset": str(tmp_path / "conf" / "few.yaml")})
    assert min(assign(settings).report.sizes) == 1
    assert config.num_clients == 6


@pytest.mark.parametrize(
    ("examples", "clients", "expected"),
    [
        (38, 2, 10),  # 15 examples a client after the test: a few steps at least
        (1000, 5, 25),  # five passes over 160 examples in steps of 32
        (4000, 5, 50),  # the default, of more examples
    ],
)
def test_few_examples_give_short_rounds(examples, clients, expected, new, bert, tmp_path):
    rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(examples)]
    folder = as_lines(tmp_path / "data", rows)
    output, config = new("few", folder, bert, "--clients", str(clients))
    assert (config.batch_size, config.local_steps) == (32, expected)
    assert "tune takes nine such runs or more" in output


def test_columns_can_be_named(new, bert, tmp_path):
    rows = [{"a": f"text {n}", "b": f"more {n}", "k": n % 2, "l": n % 3} for n in range(60)]
    folder = as_lines(tmp_path / "data", rows)
    _, config = new("named", folder, bert, "--text", "b", "--label", "l", "--text-pair", "a")
    assert dict(config.data.columns) == {"text": "b", "text-pair": "a", "label": "l"}
    assert config.data.labels == ("0", "1", "2")


def test_a_text_to_text_model_generates_labels(new, texts, tmp_path):
    t5 = save_model("t5", tmp_path / "t5")
    _, config = new("write", texts, t5)
    assert (config.task, config.data.prompt) == ("text-to-label", "{text}")
    assert config.data.target_length >= 2
    assert config.classifier == "frozen"  # it has no classifier


ROWS = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(40)]
LISTS = [row | {"label": [row["label"]]} for row in ROWS]
EMPTY = {"text": None, "label": None}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a", "label": "x"}] * 9, "got 1 class (x)"),
        ([{**row, "label": n * 0.5} for n, row in enumerate(ROWS)], "of the type float64"),
        (LISTS, "labels are of the type list"),
        (
            [*ROWS[:2], {"text": "b", "label": None}, *ROWS, {"text": "c", "label": None}],
            "train: 2 of 44 examples have nothing in column 'label' (row 3, 44)",
        ),
        ([EMPTY | {"label": "a"}, *ROWS], "1 of 41 examples have nothing in column 'text' (row 1)"),
        ([*ROWS, {"text": "", "label": "a"}], "1 of 41 examples have nothing in column 'text'"),
        ([*ROWS, {"text": "a", "label": ""}], "1 of 41 examples have nothing in column 'label'"),
        (
            [*ROWS, EMPTY, EMPTY | {"label": "a"}],
            "train: 2 of 42 examples have nothing in column 'text' (row 41, 42), 1 of 42 examples "
            "have nothing in column 'label' (row 41)",
        ),
        (
            [{"a": f"text {n}", "b": f"more {n}", "label": n % 2} for n in range(60)],
            "no column 'text': --text NAME names it, of the columns 'a', 'b', 'label'",
        ),
        ([{"n": n, "m": n % 2} for n in range(60)], "no column 'text', 'label': --text NAME, "),
        (
            [{"Text": f"{n}", " label": n % 2} for n in range(60)],
            "--label NAME names it, of the columns 'Text', ' label'",
        ),
        ([{"text": f"{n}"} for n in range(60)], "no column 'label': --label NAME"),
        (  # as in Alpaca
            [{"instruction": "a", "input": "", "output": "b"}] * 9,
            "write the preset by hand (docs/language-models.md)",
        ),
    ],
)
def test_data_that_cannot_be_learned_are_refused(rows, message, refused, bert, tmp_path):
    assert message in refused("x", as_lines(tmp_path / "data", rows), bert)


@pytest.mark.parametrize(
    ("splits", "words", "message"),
    [
        (
            {"train": ROWS, "test": [{"text": "a", "label": None}] * 3},
            "",
            "data, test: 3 of 3 examples have nothing in column 'label' (row 1, 2, 3)",
        ),
        ({"train": LISTS, "test": LISTS}, "", "are of the type list"),
        ({"test": ROWS}, "", "got the splits test, expected one that is called train"),
        ({"train": ROWS}, "--text-pair text", "got --text text, --text-pair text, --label label"),
        ({"train": ROWS}, "--text label --label label", "got --text label, --label label"),
        ({"train": ROWS}, "--image text", "has no images but"),
        ({"train": ROWS}, "--image text --text text", "no column twice, and no image beside a"),
        (
            {"train": [{"review": f"{n}", "stars": n % 2} for n in range(9)]},
            "--text review",
            "no column 'label': --label NAME names it, of the columns 'review', 'stars'\n",
        ),
    ],
)
def test_unfit_splits_and_options_are_refused(splits, words, message, refused, bert, tmp_path):
    for name, rows in splits.items():
        as_lines(tmp_path / "data", rows, name)
    assert message in refused("x", tmp_path / "data", bert, *words.split())


def test_damaged_files_are_named(refused, bert, tmp_path):
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "train.jsonl").write_text('{"text": "a", "label": "b"}\n{"text": "c')
    assert "its files cannot be read (ArrowInvalid" in refused("x", tmp_path / "cut", bert)
    (tmp_path / "nothing").mkdir()
    assert "doesn't contain any data files" in refused("x", tmp_path / "nothing", bert)
    table = tmp_path / "nothing" / "train.csv"
    table.write_text("text,label\n" + "gro\u00df,a\n" * 9, encoding="latin1")
    error = refused("x", tmp_path / "nothing", bert)
    assert "train.csv: its text is no UTF-8, expected" in error
    assert "Failed to read" not in error
    table.unlink()
    os.mkfifo(table)
    assert "train.csv is a pipe or a device, expected a" in refused("x", tmp_path / "nothing", bert)


@pytest.mark.parametrize(
    ("name", "data", "model", "message"),
    [
        ("../x", "texts", "bert", "NAME '../x': expected letters, digits"),
        ("x.yml", "texts", "bert", "NAME 'x.yml': expected letters"),
        ("x", "texts/train.jsonl", "bert", "got a file, expected a folder; move it into"),
        ("x", "texts", "texts", "has no config.json"),
        ("x", "nodir", "bert", "data nodir: found nothing there"),
        ("x", "texts", "minilm", "model minilm: found nothing there"),
        ("x", "nothere.csv", "bert", "data = 'nothere.csv': found nothing there"),
    ],
)
def test_invalid_arguments_are_reported(name, data, model, message, refused, texts, bert):
    assert message in refused(name, data, model)


def test_line_breaks_in_the_label_list_are_between_labels_alone(new, bert, tmp_path):
    labels = [f"New  York, \U0001f600 {number}  " for number in range(60)]
    rows = [{"text": f"some words {n}", "label": labels[n % 60]} for n in range(600)]
    _, config = new("long", as_lines(tmp_path / "data", rows), bert)
    assert config.data.labels == tuple(sorted(labels))
    written = (tmp_path / "conf" / "long.yaml").read_text().splitlines()
    assert max(len(line) for line in written if "New  York" in line) < 150


def test_a_test_split_with_secret_labels_is_refused(refused, bert, tmp_path):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(2))
    (tmp_path / "numbered").mkdir()
    for name, labels in (("train", [0, 1] * 20), ("test", [-1] * 40)):
        rows = {"text": ["a"] * 40, "label": labels}
        split = datasets.Dataset.from_dict(rows, features=features)
        split.to_parquet(tmp_path / "numbered" / f"{name}.parquet")
    missing = "numbered, test: 40 of 40 examples have nothing in column 'label'"
    assert missing in refused("x", tmp_path / "numbered", bert)


def test_labels_that_only_the_test_split_has_are_reported(new, bert, tmp_path):
    folder = as_lines(tmp_path / "data", ROWS)
    output, _ = new("same", folder, bert)
    assert "no example to train has" not in output
    as_lines(tmp_path / "data", [*ROWS, {"text": "a", "label": "c"}], "test")
    output, config = new("other", folder, bert)
    assert "no example to train has c, as some to test have" in output
    assert config.data.labels == ("a", "b", "c")


def test_tables_of_two_kinds_are_refused(refused, bert, tmp_path):
    folder = as_lines(tmp_path / "data", ROWS)
    (tmp_path / "data" / "more.csv").write_text("text,label\na,b\n")
    assert "got files of the kinds .csv, .jsonl, expected one kind" in refused("x", folder, bert)
    (tmp_path / "data" / "train.jsonl").rename(tmp_path / "data" / "train.json")
    assert "got files of the kinds .csv, .json, expected one kind" in refused("x", folder, bert)


@pytest.mark.slow
def test_the_bundled_model_is_accepted(new, images, tmp_path):
    output, config = new("digits", images, "digits-vit")
    assert (config.model.source, config.model.name) == ("bundled", "digits-vit")
    assert "adapts 8 matrices of 96 x 96" in output
    assert "source: bundled" in (tmp_path / "conf" / "digits.yaml").read_text()
    preset = str(tmp_path / "conf" / "digits.yaml")
    run = simulate({"preset": preset, "num-rounds": 1, "local-steps": 1, "tracking": "none"}, 3)
    assert run.summary["rounds"] == 1


@pytest.mark.parametrize(
    ("name", "data", "model", "words", "message"),
    [
        ("digits-vit", ".", "x/y", [], "and nothing is overwritten"),
        ("x", "./none", "x/y", [], "data = './none': found no such folder"),
        ("x", ".", "./none", [], "model = './none': found no such folder"),
        ("x", ".", "x/y", ["--clients", "0"], "--clients: got 0, expected 2 or more"),
        ("x", ".", "x/y", ["--chat-template", "none.jinja"], "none.jinja: it cannot be read"),
        ("x", ".", "x/y", ["--chat-template", "/dev/zero"], "/dev/zero is a pipe or a"),
    ],
)
def test_early_errors_need_no_import(name, data, model, words, message, refused, monkeypatch):
    monkeypatch.setattr("ravan_flwr.cli.running.importing", lambda: pytest.fail("too late"))
    assert message in refused(name, data, model, *words)


def test_nothing_is_overwritten(new, texts, bert, tmp_path):
    new("once", texts, bert)
    before = (tmp_path / "conf" / "once.yaml").read_bytes()
    with pytest.raises(SystemExit):
        new("once", texts, bert)
    assert (tmp_path / "conf" / "once.yaml").read_bytes() == before
    assert [path.name for path in (tmp_path / "conf").iterdir()] == ["once.yaml"]


def test_a_preset_for_devices_has_all_of_them_in_a_round(new, refused, texts, bert):
    """Five devices, five a round."""
    message = refused("too-many", texts, bert, "--clients", "5000")
    assert "--clients 5000: the data have " in message
    for name, words, expected in (
        ("simulated", [], (10, 3)),
        ("five", ["--clients", "5"], (5, 5)),
        ("many", ["--clients", "14"], (14, 10)),
    ):
        _, config = new(name, texts, bert, *words)
        assert (config.num_clients, config.clients_per_round) == expected
    assert "empty: the default" not in (Path.cwd() / "conf" / "simulated.yaml").read_text()
