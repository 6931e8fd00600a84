"""Who has what, in a terminal and as a picture: each number against slow loops."""

import json
import shutil
from xml.etree import ElementTree as ET

import datasets
import numpy as np
import pytest

from ravan_flwr.cli import main
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.reports.partition import ROWS, as_text, assign
from ravan_flwr.reports.partition_picture import check_picture, draw, write_picture
from ravan_flwr.training.model_and_data import ModelAndData, column_for

PRESET = """
task: text
model: some/model
data:
  name: ./texts
  columns: {text: text, label: topic}
  partition-by: user
run: {partition: natural, local-epochs: 1, batch-size: 2}
"""
USERS = ["ann $x$", "b\x1b[2J", "日本語", "\u202eevil", "zoe" * 20]


def write_rows(folder, rows):
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture
def preset(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    write_rows(
        folder,
        [
            {"text": f"word {i}", "topic": f"class {i % 3}", "user": USERS[i * i % 7 % 5]}
            for i in range(60)
        ],
    )
    path = tmp_path / "mine.yaml"
    path.write_text(PRESET)
    return path


@pytest.mark.parametrize("partition", ["dirichlet", "pathological", "shards", "exponential"])
def test_the_table_counts_what_clients_have(partition):
    settings = {"partition": partition, "local-epochs": 1.0, "validation-share": 0.2}
    assigned = assign(settings, 6)
    bench = ModelAndData(read_config(settings))
    labels = np.array(bench.splits["train"]["label"][:])
    lines = as_text(assigned).splitlines()
    cells = [line.split() for line in lines[-6:]]
    for client, line in enumerate(cells):
        mine = labels[bench.rows(6)[client]]
        counts = [np.count_nonzero(mine == label) for label in range(10)]
        assert line == [str(client), str(len(mine)), *(str(count or ".") for count in counts)]
        assert assigned.steps[client] == -(-len(bench.partition(client, 6).train) // 32)
    shares = assigned.report.shares
    whole = assigned.report.counts.sum(0) / assigned.report.sizes.sum()
    slow = np.mean([sum(abs(a - b) for a, b in zip(row, whole, strict=True)) / 2 for row in shares])
    assert assigned.report.skew == pytest.approx(slow)
    assert f"label skew      {slow:.2f}" in as_text(assigned)
    left = f"unassigned      {len(labels) - assigned.report.sizes.sum()} "
    assert any(left in line for line in lines) == (assigned.report.unassigned > 0)


@pytest.mark.parametrize("number", [41, 1000])
def test_of_many_clients_forty_have_a_line(number):
    assigned = assign({}, number)
    lines = as_text(assigned, 80).splitlines()
    assert f"{ROWS} of {number:,} clients, in the order of their largest class:" in lines
    assert max(map(len, lines)) <= 110
    shown = [int(line.split()[0]) for line in lines[-ROWS:]]
    assert len(set(shown)) == ROWS
    largest = assigned.report.counts[shown].argmax(1)
    assert largest.tolist() == sorted(largest)


def test_names_of_clients_are_for_this_terminal_alone(preset, tmp_path):
    assigned = assign({"preset": str(preset)})
    assert (
        len(assigned.report.names) == len(set(assigned.report.names)) == assigned.config.num_clients
    )
    text = as_text(assigned)
    assert "日本語" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "do not fit here" in as_text(assigned, 40)
    for form in ("svg", "png"):
        write_picture(assigned, tmp_path / f"a.{form}")
    svg = (tmp_path / "a.svg").read_text()
    ET.fromstring(svg)
    assert "class 2" in svg
    assert not any(name in svg for name in ("ann", "zoe", "日本語", "evil"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("partition", ["pathological", "dirichlet", "linear"])
def test_a_picture_numbers_the_values_of_what_is_no_label(preset, tmp_path, partition):
    if partition == "linear":  # counted by the label; without one by the users
        row = {"question": "a", "answers": ["b"], "context": "c"}
        write_rows(tmp_path / "texts", [row | {"user": user} for user in USERS * 12])
        data = "{name: ./texts, partition-by: user}"
        preset.write_text(f"task: question-answering\nmodel: some/t5\ndata: {data}\n")
    assigned = assign({"preset": str(preset), "partition": partition}, 3)
    assert assigned.classes == "user"
    assert {"日本語", "ann $x$"} < set(assigned.report.classes)
    svg = str(draw(assigned).svg())
    texts = [element.text for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]
    assert {"values of 'user'", "0", "3"} <= set(texts)
    assert not any(name in svg for name in ("ann", "zoe", "日本語", "evil"))


def test_names_of_labels_are_drawn_as_text_without_effect(preset, tmp_path):
    labels = ["a\u202eb", "c\nd", "e\x1b[2J", "f $x$", "g" * 40]
    rows = [{"text": f"{i}", "topic": labels[i % 5], "user": USERS[i % 5]} for i in range(50)]
    write_rows(tmp_path / "texts", rows)
    settings = {"preset": str(preset), "partition": "pathological::label"}
    svg = draw(assign(settings, 3)).svg()
    ET.fromstring(svg)
    assert all(name in svg for name in ("a\\u202eb", "c\\nd", "e\\x1b[2J", "f $x$", "ggg ..."))
    assert "\u202e" not in svg


@pytest.mark.parametrize("partition", ["shards", "pathological", "dirichlet", "natural"])
def test_a_task_without_labels_names_the_columns_that_do(preset, tmp_path, partition):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns, "user": USERS[i % 5], "odd": None, "w": i % 3} for i in range(50)]
    write_rows(tmp_path / "texts", rows)
    preset.write_text("task: causal\nmodel: some/model\ndata: ./texts\n")
    settings = {"preset": str(preset), "partition": partition}
    told = "got the column 'label': the task has no label, .*each example: 'user', 'w'; name one"
    with pytest.raises(ValueError, match=told):
        assign(settings, None if partition == "natural" else 5)
    encoded = datasets.Dataset.from_dict({"input_ids": [[1]], "learned": [[1]], "length": [1]})
    with pytest.raises(ValueError, match=told):
        column_for(read_config(own_preset(settings)), encoded)
    assert assign(settings | {"partition": "pathological::w"}, 3).config.num_clients == 3


def test_another_number_of_clients_than_names_is_refused(preset):
    number = assign({"preset": str(preset)}).config.num_clients
    assert assign({"preset": str(preset)}, number).config.num_clients == number
    told = f"num-clients = 3: .* each of the {number} different values of 'user'"
    with pytest.raises(ValueError, match=told):
        assign({"preset": str(preset)}, 3)
    with pytest.raises(ValueError, match="got the column 'usr': .* 'text', 'topic', 'user';"):
        assign({"preset": str(preset), "partition": "natural:usr"})
    assert assign({"preset": str(preset), "partition": "iid"}).config.num_clients == 10


@pytest.mark.parametrize("number", [6, 50])
def test_without_classes_sizes_are_shown_alone(tmp_path, number):
    folder = tmp_path / "asked"
    folder.mkdir()
    path = tmp_path / "mine.yaml"
    path.write_text("task: question-answering\nmodel: some/t5\ndata: ./asked\n")
    write_rows(
        folder, [{"question": f"{i}", "context": "x", "answers": ["y"]} for i in range(3000)]
    )
    assigned = assign({"preset": str(path), "partition": "linear"}, number)
    lines = as_text(assigned).splitlines()
    assert assigned.report.classes == ()
    assert not any("classes each" in line for line in lines)
    sizes = [int(line.split()[1]) for line in lines[-min(number, ROWS) :]]
    assert sizes == sorted(sizes, reverse=number > ROWS)
    assert sizes[0] != sizes[-1]
    assert draw(assigned).png().startswith(b"\x89PNG")
    assert draw(assign({"preset": str(path)}, number)).svg()


def test_a_picture_of_ten_thousand_clients_is_small():
    counts = np.random.default_rng(0).integers(0, 5, (10_000, 10)) + 1
    assigned = assign({}, 2)
    many = type(assigned.report)(counts, assigned.report.classes, (), 0)
    chart = draw(type(assigned)(assigned.config, many, "label", np.ones(10_000)))
    assert len(chart.png()) < 1_000_000
    assert len(chart.svg()) < 2_000_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", "expected a name that ends in .png or .svg"),
        ("a", "expected a name that ends"),
        ("none/a.png", "found no folder .*none; expected the name of a file"),
        ("folder.png", "is a folder; expected the name of a file to write"),
        ("there.png", "is there already, expected a new file; name one"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path, name, message):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "there.png").write_text("mine")
    with pytest.raises(ValueError, match=f"--picture .*{message}"):
        check_picture(tmp_path / name)


def test_the_command_shows_it_where_there_are_letters_alone(preset, tmp_path, monkeypatch):
    words = ["plan", "--picture", "a.svg", f"preset={preset}"]
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "told").open("w", encoding="ascii") as console:  # as in a terminal of C's
        monkeypatch.setattr("sys.stdout", console)
        main(words)
    assert "\\u65e5" in (tmp_path / "told").read_text()
    assert (tmp_path / "a.svg").is_file()
    shutil.rmtree(tmp_path / "texts")
