"""The page `your-own-task.md` works as printed: each command, in order."""

import csv
import re
import shlex
import sys

import pytest
import transformers

from ravan_flwr.cli import main
from tests import ROOT
from tests.own_models import make_bert, make_vit

pytestmark = pytest.mark.slow

PAGE, PRESETS = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("your-own-task.md", "reference.md")
)


def blocks():
    """Return the page's blocks as (language, text), without `sh`, which needs a connection."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [(language, text) for language, text in found if language in ("bash", "python")]


def newest_run(line, folder):
    """Emulate `RUN=$(ls -d PATTERN | tail -1)`, and no other command."""
    match = re.fullmatch(r"RUN=\$\(ls -d (\S+) \| tail -1\)", line)
    assert match is not None
    return str(sorted(folder.glob(match[1]))[-1].relative_to(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, python):
    """Return a folder with a small BERT and a small ViT."""
    path = tmp_path_factory.mktemp("own")
    make_bert(path / "model")
    make_vit(path / "vit")
    return path


def shorten(path, longest=100):
    """Cut long texts, which take most of a run's time."""
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *((text[:longest], label) for text, label in rows)])


def fewer_steps(preset):
    """Reduce rounds and steps in the preset: the test does not depend on the accuracy."""
    text, changes = re.subn(
        r"^  (num-rounds|local-steps): \d+", r"  \1: 3", preset.read_text(), flags=re.MULTILINE
    )
    assert changes == 2
    preset.write_text(text)


# `datasets` does not close a CSV that it has read.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_every_command_of_the_page_works_in_its_order(folder, monkeypatch, capsys, python):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", python.executable)
    for name, value in (
        ("SEEDS", 2),
        ("EXTENSIONS", 0),
        ("grid_around", lambda rate: [rate, 3 * rate]),
    ):
        monkeypatch.setattr(f"ravan_flwr.lab.tuning.{name}", value)
    printed, run = [], ""
    for language, text in blocks():
        if language == "python":
            exec(compile(text, "docs/your-own-task.md", "exec"), {})
            if "train.csv" in text:
                for name in ("train.csv", "test.csv"):
                    shorten(folder / "texts" / name)
        else:
            for line in text.strip().splitlines():
                assert len(line.split()) <= 12, "too many words to type"
                if line.startswith("RUN="):
                    run = newest_run(line, folder)
                    continue
                words = shlex.split(line.replace("$RUN", run))
                assert words[0] == "ravan-flwr"
                main(words[1:])
                if words[1] == "new":
                    fewer_steps(folder / "conf" / f"{words[2]}.yaml")
        printed.append(capsys.readouterr().out)
    output = "\n".join(printed)
    assert (folder / "conf" / "docs.yaml").is_file()
    assert "macro-f1" in output.lower()
    predicted, sevens, tested = (
        list(csv.DictReader((folder / name).read_text(encoding="utf-8").splitlines()))
        for name in ("predicted.csv", "sevens.csv", "texts/test.csv")
    )
    assert len(predicted) == len(tested) > 200
    assert {row["label"] for row in sevens} <= set("0123456789")
    assert re.search(r"\{'label': '\w+(\.\w+)*', 'score': 0\.\d+", output)
    assert transformers.AutoConfig.from_pretrained(folder / "digits").id2label[7] == "7"


def test_the_page_lists_the_defaults_that_are_used():
    from ravan_flwr.config.keys import RUN
    from ravan_flwr.config.preset import LORA_RANK
    from ravan_flwr.methods import METHODS

    table = PRESETS.split("## Fields of a preset")[1]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    for key, value in RUN.items():
        row = next(row for row in rows if f"run.{key}`" in row.split("|")[1])
        assert (str(value).lower() if isinstance(value, bool) else str(value)) in row, key
    for budget, rank in LORA_RANK.items():
        assert f"`{budget}: {{lora-rank: {rank}}}`" in table
    row = next(line for line in table.splitlines() if line.startswith("| `learning-rate`"))
    by_rate = {3e-3: ["ravan", "ffa-lora", "fed-sb", "fedsvd", "fedrpca", "fedalt"], 1e-4: ["full"]}
    for name, method in METHODS.items():
        assert name in by_rate.get(method.learning_rate, [name])
    assert "ravan, ffa-lora, fed-sb, fedsvd, fedrpca, fedalt 3e-3; full 1e-4; others 1e-3" in row
