"""A model card escapes settings that have a meaning in Markdown, YAML or Python."""

import ast
import json
import re

import pytest

from ravan_flwr.results.card import write_card
from ravan_flwr.runs.directory import RunDirectory
from tests.hand_made import SUMMARY

CONFIG = {
    "task": "vision", "method": "ravan", "heads": 4, "preset": "svhn-vit-b16",
    "partition": "dirichlet:0.3", "classifier": "frozen",
    "clients-per-round": 3, "local-steps": 50, "batch-size": 32, "evaluate-on": "server",
}  # fmt: skip
BACKBONE = "AutoModelForImageClassification.from_pretrained"


@pytest.fixture
def card_of(tmp_path):
    def card_of(name):
        directory = RunDirectory(tmp_path)
        model = {"name": name, "source": "folder", "revision": ""}
        data = {"source": name, "labels": ["a", "b"]}
        directory.write_json("config.json", CONFIG | {"model": model, "data": data})
        directory.write_json("summary.json", SUMMARY)
        write_card(tmp_path, "peft", directory)
        return (tmp_path / "README.md").read_text()

    return card_of


@pytest.mark.parametrize(
    "name",
    [
        "it's a model | with cells",
        'C:\\new "models"\\vit',
        "two\nlines\n# and a heading",
        "<script>alert(1)</script> `code` [link](https://example.org)",
        "{{ 7 * 7 }} {% raw %}",
    ],
)
def test_a_name_stays_in_one_table_cell_and_one_string(name, card_of):
    card = card_of(name)
    plain = card_of("model").splitlines()
    assert [re.sub(r"(backbone|data) .*", "", line) for line in card.splitlines()] == [
        re.sub(r"(backbone|data) .*", "", line) for line in plain
    ]
    (row,) = [line for line in card.splitlines() if line.startswith("| backbone |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
    assert not re.search(r"(?<!\\)[<`\[]", row)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    (call,) = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == BACKBONE
    ]
    assert len(call.args) == 1
    assert ast.literal_eval(call.args[0]) == name
    assert json.dumps(name) in code
