"""The mistakes of docs/troubleshooting.md print the errors on the page."""

import csv
import re
import shlex

import datasets
import pytest
from flwr.common.config import fuse_dicts
from flwr.supercore.error.catalog import API_ERROR_MAP

from ravan_flwr.cli import EXAMPLES, _parser, main
from ravan_flwr.data.examples import label_numbers
from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.registered_client import check_same_code, check_same_model
from scripts import check_words
from tests import ROOT
from tests.commands import error_of
from tests.hand_made import FINGERPRINT, registered_client
from tests.own_models import make_bert

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CASES = re.findall(r"^```bash\n(.*)\n```\n```text\n(.*)\n```$", PAGE, re.MULTILINE)
TEXTS = range(60)
QUICK = ["num-rounds=1", "local-steps=1", "tracking=none", "output-dir=runs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with a model, texts, a preset for them, and two runs."""
    path = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        make_bert(path / "model")
        tables: dict[str, list[tuple[str, ...]]] = {
            "texts/train.csv": [("text", "label"), *((f"text {n}", "ab"[n % 2]) for n in TEXTS)],
            "other.csv": [("text", "label"), ("hello", "c")],
            "new.csv": [("body",), ("hello",)],
        }
        for name, rows in tables.items():
            (path / name).parent.mkdir(exist_ok=True)
            with (path / name).open("w", newline="") as file:
                csv.writer(file).writerows(rows)
        (path / "notes").mkdir()
        (path / "notes" / "a.txt").write_text("hello")
        main(["new", "mine", "--data", "texts", "--model", "model"])
        for method in ("ravan", "full"):
            main(["simulate", "preset=conf/mine.yaml", f"method={method}", *QUICK])
    return path


def test_the_page_has_at_least_thirty_tested_mistakes():
    symptoms = [line for line in PAGE.split("## On devices")[1].splitlines() if line[:2] == "| "]
    assert len(CASES) + len(symptoms) >= 30
    assert len(CASES) >= 25


# `datasets` does not close the CSV files that it has read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("command", "printed"), CASES, ids=[command for command, _ in CASES])
def test_a_mistake_prints_the_error_on_the_page(command, printed, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name, method in (("RUN", "ravan"), ("FULL", "full")):
        (run,) = folder.glob(f"runs/*-{method}-*")
        command = re.sub(rf"\b{name}\b", str(run.relative_to(folder)), command)
    output = " ".join(error_of(capsys, *shlex.split(command)[1:]).split())
    pattern = ".*".join(re.escape(part.strip()) for part in printed.split("..."))
    assert re.search(pattern, output), output


def test_the_page_has_flowers_error_of_a_wrong_key():
    """Flower prints these words without the key; its log has the second."""
    (paragraph,) = (line for line in PAGE.splitlines() if "Invalid run configuration" in line)
    assert "Invalid run configuration." in {spec.public_message for spec in API_ERROR_MAP.values()}
    with pytest.raises(ValueError, match="Key 'lr' is not present") as error:
        fuse_dicts({"seed": 0}, {"lr": 0.1})
    assert "`Key 'lr' is not present`" in paragraph
    assert str(error.value).startswith("Key 'lr' is not present")


VERSION = ("install the server's version on the device", "end it and run again")
LABELS = ("add them to the labels of the preset", "rename them", "take the examples out")
MODEL = ("copy the server's model", "constraints.txt")
UNKNOWN = datasets.Dataset.from_dict({"label": ["c"]})


def refused_for(code=None, backbone="b", fingerprint=FINGERPRINT):
    check_same_code(code_fingerprint(), code or code_fingerprint())
    check_same_model(registered_client(), backbone, fingerprint)


REFUSED = [
    (lambda: refused_for(code="other"), "its ravan_flwr has fingerprint", VERSION),
    (lambda: refused_for(backbone="other"), "its backbone has fingerprint", MODEL),
    (lambda: refused_for(fingerprint=[3.0, 4.0]), "bases have", MODEL[1:]),
    (lambda: label_numbers(UNKNOWN, ("a", "b"), "train"), "got unknown labels", LABELS),
]


@pytest.mark.parametrize(("fail", "symptom", "remedies"), REFUSED)
def test_a_refusal_and_the_page_give_the_same_remedy(fail, symptom, remedies):
    rows = [line.replace("`", "") for line in PAGE.splitlines() if line.startswith("| ")]
    (row,) = (row for row in rows if symptom in row)
    with pytest.raises(ValueError, match=symptom) as error:
        fail()
    for remedy in remedies:
        assert remedy in row
        assert remedy in str(error.value)


@pytest.mark.parametrize("command", EXAMPLES)
def test_a_commands_help_has_an_example_within_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert not list(check_words.replaced(text))
    (line,) = re.findall(r"^example:\n  ravan-flwr (.*)$", text, re.MULTILINE)
    assert line == f"{command} {EXAMPLES[command]}"
    assert _parser().parse_args(shlex.split(line)).command
