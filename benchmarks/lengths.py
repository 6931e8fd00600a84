"""Measure the time saved by batches of texts of similar lengths, in evaluation and training.

    python -m benchmarks.lengths                   # three minutes

The texts are docstrings of Python's standard library, from one word to thousands, of which the
first 256 tokens are read. The network has the shape of BERT-Mini (4 layers, 256 wide) and random
weights, with RAVAN's adapters. In an evaluation every text is measured once, in batches of 256:
in the order of the file, as in earlier versions, and by length, as now. Steps of training are of
32 texts, with `batching=random` and `batching=length`. The two take turns; figures are medians.
"""

import argparse
import ast
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ravan_flwr.config.run_config import read_config
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.base import EVALUATION_BATCH, Encoded
from ravan_flwr.tasks.text import token_counts
from ravan_flwr.training.batching import evaluation_batches, training_batches
from ravan_flwr.training.local_steps import ClientWork, evaluate_all, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import TrainingSettings

TEXTS, LENGTH, BATCH = 6000, 256, 32
BERT_MINI: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 1024, "vocab_size": 8000, "max_position_embeddings": 512,
}  # fmt: skip
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
LEAST = 1.2  # times as fast, an evaluation and training


def main(arguments: list[str]) -> int:
    """Measure, print the table, and report whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=1024, help="of the evaluation")
    parser.add_argument("--steps", type=int, default=16, help="of training")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    texts = docstrings()
    with tempfile.TemporaryDirectory() as name:
        loaded = load_workbench(Path(name), texts, options.texts)
        test = loaded.test_sets["test"]
        train = loaded.partition(0, 1).train
        of_test, of_train = token_counts(test), token_counts(train)
        found = {
            "evaluation": in_turn(evaluations(loaded, test), options.repetitions),
            "training": in_turn(trainings(loaded, train, options.steps), options.repetitions),
        }
    tokens = {
        "evaluation": [
            padded_tokens(evaluation_batches(len(test), EVALUATION_BATCH, by), of_test)
            for by in (None, of_test)
        ],
        "training": [
            padded_tokens(first_batches(len(train), options.steps, by), of_train)
            for by in (None, of_train)
        ],
    }
    show(found, tokens, of_test)
    if options.json:
        options.json.write_text(json.dumps({"seconds": found, "tokens": tokens}, indent=2) + "\n")
    missed = [what for what, rows in found.items() if ratio(rows) < LEAST]
    sys.stdout.write(f"bar: both {LEAST} times as quick; missed: {', '.join(missed) or 'none'}\n")
    return int(options.check and bool(missed))


def docstrings() -> list[str]:
    """Return the docstrings of all modules, classes and functions of the standard library, once."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # examples of invalid Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found[ast.get_docstring(node) or ""] = None
    texts = [text for text in found if text]
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[number] for number in order[:TEXTS]]


def load_workbench(folder: Path, texts: list[str], number: int) -> ModelAndData:
    """Save a model, its tokenizer and the texts, and load them as a run does."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**BERT_MINI)).save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordPiece())
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=8000, special_tokens=[*SPECIAL.values()])
    tokenizer.train_from_iterator(texts, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **SPECIAL
    ).save_pretrained(folder / "model")  # fmt: skip
    (folder / "data").mkdir()
    for split, part in (("validation", texts[:number]), ("train", texts[number:])):
        rows = [
            {"sentence": text, "label": "negative" if "." in text else "positive"} for text in part
        ]
        lines = "\n".join(map(json.dumps, rows))
        (folder / "data" / f"{split}.jsonl").write_text(lines + "\n")
    settings: dict[str, Scalar] = {
        "preset": "glue-llama", "glue-task": "sst2", "model": str(folder / "model"),
        "data": str(folder / "data"), "max-length": LENGTH, "lora-rank": 8, "learning-rate": 1e-4,
    }  # fmt: skip
    config = read_config(settings)  # the files are no subset of GLUE
    loaded = ModelAndData(replace(config, data=replace(config.data, subset="")))
    loaded.model  # noqa: B018 (built before timing)
    return loaded


def evaluations(loaded: ModelAndData, test: Encoded) -> dict[str, Callable[[], object]]:
    """Return functions that evaluate in the order of the file, and by length."""

    def by_length() -> dict[str, float]:
        with loaded.model.holding(loaded.model.initial_state()):
            return evaluate_all(loaded.model, loaded.task, {"test": test}, EVALUATION_BATCH)

    def in_order() -> dict[str, float]:
        with mock.patch.object(type(loaded.task), "lengths", return_value=None):
            return by_length()

    return {"in order": in_order, "by length": by_length}


def trainings(loaded: ModelAndData, train: Encoded, steps: int) -> dict[str, Callable[[], object]]:
    """Return functions that train on batches at random, and on batches of similar lengths."""
    by_chance = TrainingSettings(steps, BATCH, 1e-4, "float32")

    def work(local_steps: TrainingSettings) -> object:
        state = loaded.model.initial_state()
        own = ClientWork(train, state, 1.0, local_steps, ClientRound(0, 1, 0))
        return train_locally(loaded.model, loaded.task, own)

    alike = replace(by_chance, batching="length")
    return {"in order": lambda: work(by_chance), "by length": lambda: work(alike)}


def in_turn(works: dict[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Time each in turn, after a warm-up turn."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repetitions + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def first_batches(number: int, steps: int, lengths: np.ndarray | None) -> Iterator[np.ndarray]:
    """Draw the same batches as `trainings`."""
    drawn = training_batches(number, BATCH, ClientRound(0, 1, 0).generator("batches"), lengths)
    yield from (rows for rows, _ in zip(drawn, range(steps), strict=False))


def padded_tokens(batches: Iterator[np.ndarray] | list[np.ndarray], lengths: np.ndarray) -> int:
    """Count the tokens that go through the network, with padding."""
    return int(sum(len(rows) * lengths[rows].max() for rows in batches))


def ratio(rows: dict[str, list[float]]) -> float:
    """Return the speed-up by length: the median over the turns."""
    return statistics.median(
        one / other for one, other in zip(rows["in order"], rows["by length"], strict=True)
    )


def show(
    found: dict[str, dict[str, list[float]]], tokens: dict[str, list[int]], lengths: np.ndarray
) -> None:
    """Print a row for each kind of work."""
    quartiles = ", ".join(f"{value:.0f}" for value in np.quantile(lengths, [0, 0.25, 0.5, 0.75, 1]))
    lines = [
        f"{len(lengths)} texts; least, quartiles and most of their tokens: {quartiles}",
        "| | before, s | by length, s | times as quick | tokens with padding | by length |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for what, rows in found.items():
        before, after = (statistics.median(values) for values in rows.values())
        lines.append(
            f"| {what} | {before:.2f} | {after:.2f} | **{ratio(rows):.2f}** "
            f"| {tokens[what][0]:,} | {tokens[what][1]:,} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
