"""The code on a model card runs unchanged and gives the run's predictions."""

import json
import re
from typing import Any

import pytest

from ravan_flwr import export_run, predict
from ravan_flwr.results.card import fill_card
from ravan_flwr.runs.directory import RunDirectory
from tests.runs.in_use import digit_images, docstrings, run_of_digits, run_of_images, run_of_texts

RUNS = {
    "digits": run_of_digits,
    "images": lambda folder: run_of_images(folder, processor=True),
    "images-without-processor": lambda folder: run_of_images(folder, processor=False),
    "texts": run_of_texts,
}


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    return request.param, RUNS[request.param](tmp_path_factory.mktemp(request.param)).run_dir


def predictions_of(run, data, folder):
    """Return label and probability of each row, by `predict`."""
    predict(run, data, folder / "answers.jsonl")
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return [(row["label"], row["probability"]) for row in rows]


def inputs_of(kind, folder):
    """Return a file to predict from, and its examples as the card's code takes them."""
    if kind == "texts":
        texts = [text for text, _ in docstrings()][::35]
        lines = [json.dumps({"sentence": text}) for text in texts]
        (folder / "texts.jsonl").write_text("\n".join(lines))
        return folder / "texts.jsonl", texts
    images, _ = digit_images(8 if kind == "digits" else 30, "L" if kind == "digits" else "RGB")
    (folder / "images").mkdir()
    for number, image in enumerate(images[:12]):
        image.save(folder / "images" / f"{number:02}.png")
    return folder / "images", images[:12]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("form", ["merged", "peft", "ravan"])
def test_a_cards_code_gives_the_runs_predictions(form, run, tmp_path, monkeypatch):
    kind, directory = run
    data, examples = inputs_of(kind, tmp_path)
    expected = predictions_of(directory, data, tmp_path)
    assert len({label for label, _ in expected}) > 1
    export_run(directory, form, tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    code = code.replace('"."', f'"{tmp_path / "export"}"')
    ((start, end),) = re.findall(r"^(.*classify = .*?\n)((?:image|found) = .*)$", code, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(start, names)
    for example, (label, probability) in zip(examples, expected, strict=True):
        if kind == "texts":
            line = end.replace('"a text"', repr(example))
        else:
            example.save("image.png")
            line = end
        exec(line, names)
        best = names["found"][0]
        assert best["label"] == label
        assert best["score"] == pytest.approx(probability, abs=2e-5)


def test_the_runs_adapter_has_its_tokenizer_or_image_processor(run):
    kind, directory = run
    files = {path.name for path in (directory / "adapter").iterdir()}
    assert "labels.json" in files
    assert ({"tokenizer.json"} if kind == "texts" else {"preprocessor_config.json"}) <= files
    if kind == "texts":
        config = json.loads((directory / "adapter" / "tokenizer_config.json").read_text())
        assert config["model_max_length"] == 12


def test_a_card_says_where_the_examples_were(run, tmp_path):
    read = RunDirectory(run[1])
    summary = read.read_summary()
    assert summary.pop("simulated") is True
    cases: tuple[tuple[Any, str], ...] = (
        ({"simulated": True}, "Clients were simulated on one machine"),
        ({"simulated": False}, "The examples stayed on the clients; the clients' updates were"),
        ({}, "Each client trained on its own examples; the clients' updates were"),
    )
    for given, text in cases:
        fill_card(tmp_path, "merged", read.read_config(), summary | given)
        card = (tmp_path / "README.md").read_text()
        assert text in card
        assert ("stayed on" in card) is (given == {"simulated": False})
