"""The partition report: each number equals that of a plain loop."""

import json
import shutil

import numpy as np
import pytest

from ravan_flwr.cli import main
from ravan_flwr.config.run_config import read_config
from ravan_flwr.lab.partition import ROWS, as_text, assign
from ravan_flwr.training.model_and_data import ModelAndData

PRESET = """
task: text
model: some/model
data:
  name: ./texts
  columns: {text: text, label: topic}
  partition-by: user
run: {partition: natural, local-steps: "epochs:1", batch-size: 2}
"""
USERS = ["ann $x$", "b\x1b[2J", "日本語", "\u202eevil", "zoe" * 20]


def write_rows(folder, rows):
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture
def preset(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    users = [USERS[i * i % 7 % 5] for i in range(60)]
    rows = [{"text": f"word {i}", "topic": f"class {i % 3}", "user": users[i]} for i in range(60)]
    write_rows(folder, rows)
    path = tmp_path / "mine.yaml"
    path.write_text(PRESET)
    return path


@pytest.mark.parametrize("partition", ["dirichlet", "pathological", "shards", "iid"])
def test_the_table_counts_the_clients_examples(partition):
    settings = {"partition": partition, "local-steps": "epochs:1", "validation-share": 0.2}
    assigned = assign(settings, 6)
    loaded = ModelAndData(read_config(settings))
    labels = np.array(loaded.splits["train"]["label"][:])
    lines = as_text(assigned).splitlines()
    cells = [line.split() for line in lines[-6:]]
    for client, line in enumerate(cells):
        client_labels = labels[loaded.rows(6)[client]]
        counts = [np.count_nonzero(client_labels == label) for label in range(10)]
        shown = (str(count or ".") for count in counts)
        assert line == [str(client), str(len(client_labels)), *shown]
        assert assigned.steps[client] == -(-len(loaded.partition(client, 6).train) // 32)
    shares = assigned.report.shares
    overall = assigned.report.counts.sum(0) / assigned.report.sizes.sum()
    distances = [sum(map(abs, row - overall)) / 2 for row in np.asarray(shares)]
    expected = np.mean(distances)
    assert assigned.report.skew == pytest.approx(expected)
    assert f"label skew      {expected:.2f}" in as_text(assigned)
    left = f"unassigned      {len(labels) - assigned.report.sizes.sum()} "
    assert any(left in line for line in lines) == (assigned.report.unassigned > 0)


@pytest.mark.parametrize("number", [41, 1000])
def test_forty_of_many_clients_have_a_line(number):
    assigned = assign({}, number)
    lines = as_text(assigned).splitlines()
    assert f"the first {ROWS} of {number:,} clients:" in lines
    assert max(map(len, lines)) <= 110
    shown = [int(line.split()[0]) for line in lines[-ROWS:]]
    assert shown == [*range(ROWS)]


def test_names_of_clients_are_shown_in_the_terminal_alone(preset, tmp_path, monkeypatch):
    assigned = assign({"preset": str(preset)})
    names, text = assigned.report.names, as_text(assigned)
    assert len(names) == len(set(names)) == assigned.config.num_clients
    assert "日本語" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    monkeypatch.setattr("ravan_flwr.lab.partition.CLASSES", 2)
    assert "are too many for columns" in as_text(assigned)


@pytest.mark.parametrize("partition", ["shards", "pathological", "dirichlet", "natural"])
def test_a_task_without_labels_needs_another_column(preset, tmp_path, partition):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns, "user": USERS[i % 5], "odd": None, "w": i % 3} for i in range(50)]
    write_rows(tmp_path / "texts", rows)
    preset.write_text("task: causal\nmodel: some/model\ndata: ./texts\n")
    settings = {"preset": str(preset), "partition": partition}
    with pytest.raises(ValueError, match="got the column 'label': .*; name one"):
        assign(settings, None if partition == "natural" else 5)
    assert assign(settings | {"partition": "pathological::w"}, 3).config.num_clients == 3


def test_another_number_of_clients_than_names_is_refused(preset):
    number = assign({"preset": str(preset)}).config.num_clients
    assert assign({"preset": str(preset)}, number).config.num_clients == number
    with pytest.raises(ValueError, match=f"num-clients = 3: .* the {number} different .* 'user'"):
        assign({"preset": str(preset)}, 3)
    with pytest.raises(ValueError, match="got the column 'usr': the examples have"):
        assign({"preset": str(preset), "partition": "natural:usr"})
    assert assign({"preset": str(preset), "partition": "iid"}).config.num_clients == 10


@pytest.mark.parametrize("number", [6, 50])
def test_without_classes_only_sizes_are_shown(tmp_path, number):
    folder = tmp_path / "asked"
    folder.mkdir()
    path = tmp_path / "mine.yaml"
    path.write_text("task: question-answering\nmodel: some/t5\ndata: ./asked\n")
    rows = [{"question": f"{i}", "context": "x", "answers": ["y"]} for i in range(3000)]
    write_rows(folder, rows)
    assigned = assign({"preset": str(path)}, number)
    lines = as_text(assigned).splitlines()
    assert assigned.report.classes == ()
    assert not any("classes each" in line for line in lines)
    sizes = [int(line.split()[1]) for line in lines[-min(number, ROWS) :]]
    assert sizes == [3000 // number] * min(number, ROWS)


def test_the_command_writes_ascii_where_the_terminal_needs_it(preset, tmp_path, monkeypatch):
    words = ["plan", "--partition", f"preset={preset}"]
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "told").open("w", encoding="ascii") as console:  # a terminal in the C locale
        monkeypatch.setattr("sys.stdout", console)
        main(words)
    assert "\\u65e5" in (tmp_path / "told").read_text()
    shutil.rmtree(tmp_path / "texts")
