"""Examples are encoded once, also by processes that start together; texts have room for words."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import transformers
from datasets import Value

from ravan_flwr.data.examples import by_role
from ravan_flwr.data.partition import read_values
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks import get_task
from ravan_flwr.tasks.base import encoded_as_it_is, mapped
from ravan_flwr.tasks.text import load_tokenizer, tokenize
from tests.own_models import make_bert
from tests.support.tiny import save_model


def test_the_second_process_uses_the_result_of_the_first(tmp_path):
    """Each loads the data set itself, as a process does; the lock is by process or thread."""
    datasets.Dataset.from_dict({"x": list(range(600))}).save_to_disk(tmp_path / "data")
    batches = []

    def function(columns):
        batches.append(len(columns["x"]))
        time.sleep(0.05)  # time for the other to start
        return {"y": 2 * np.asarray(columns["x"])}

    def encoded(_):
        examples = datasets.load_from_disk(str(tmp_path / "data"))
        in_memory = mapped(examples, function, {"y": Value("int64")}, {})
        return encoded_as_it_is(in_memory).table["y"].tolist()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(encoded, range(2))
    assert one == other == list(range(0, 1200, 2))
    assert sum(batches) == 600
    # A later process finds the result without a lock; a data set in memory has no cache.
    assert encoded(0) == one
    for lock in Path(tmp_path).rglob("*.lock"):
        lock.unlink()
    assert encoded(0) == one
    assert not [*Path(tmp_path).rglob("*.lock")]
    alone = datasets.Dataset.from_dict({"x": [1, 2]})
    in_memory = encoded_as_it_is(mapped(alone, function, {"y": Value("int64")}, {}))
    assert in_memory.table["y"].tolist() == [2, 4]


def test_a_length_without_room_for_a_word_is_refused(tmp_path):
    """A text of which only the tokenizer's own tokens are read says nothing."""
    make_bert(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenize(tokenizer, 3, ["a freeware browser"])["attention_mask"].tolist() == [[1, 1, 1]]
    for length in (1, 2):
        with pytest.raises(ValueError, match=f"max-length = {length}: expected at least 3"):
            tokenize(tokenizer, length, ["a freeware browser"])
    with pytest.raises(ValueError, match="expected at least 4"):
        tokenize(tokenizer, 3, ["a"], ["b"])


def test_a_tokenizer_in_python_is_refused(tmp_path):
    """BERTweet has one: it cannot be described, as the cache of encoded texts needs it."""
    (tmp_path / "vocab.txt").write_text("a 2\nbrowser 1\n")
    (tmp_path / "bpe.codes").write_text("a b 1\n")
    files = (str(tmp_path / name) for name in ("vocab.txt", "bpe.codes"))
    transformers.BertweetTokenizer(*files).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a BertweetTokenizer, .* tokenizer\.json"):
        load_tokenizer(tmp_path)


def examples_of(task, kind, column, folder):
    """Return a task, and three examples with a column to partition by."""
    by_task: dict[str, dict[str, Any]] = {
        "text": {"text": ["a b", "c", "d e"], "label": ["x", "y", "x"]},
        "question-answering": {
            "question": ["a", "b", "c"], "context": ["d"] * 3, "answers": [["e"], ["f"], ["g"]]
        },
        "causal": {"prompt": ["a", "b c", "d"], "completion": ["e f", "g", "h"]},
    }  # fmt: skip
    columns = by_task[task]
    spec = DataSpec(
        "hub", columns=tuple((name, name) for name in columns), labels=("x", "y"),
        partition_by=column, prompt="{question}", prompts=("{prompt}",), target_length=4,
    )  # fmt: skip
    examples = datasets.Dataset.from_dict(columns | {column: ["ann", "bob", "ann"]})
    model = save_model(kind, folder)
    config = {"vocab_size": 300, "max_position_embeddings": 32}
    return get_task(task)(spec, 16, lambda: model, lambda: config), by_role(examples, spec, "data")


@pytest.mark.parametrize(
    ("task", "kind", "column"),
    [("text", "bert", "labels"), ("question-answering", "t5", "target"), ("causal", "llama", "by")],
)
def test_a_column_to_partition_by_may_have_any_name(task, kind, column, tmp_path):
    reads, examples = examples_of(task, kind, column, tmp_path)
    examples = reads.prepared(examples)
    assert read_values(examples, column) == ["ann", "bob", "ann"]
    assert len(reads.encode(examples)) == 3


@pytest.mark.parametrize("column", ["length", "problem"])
def test_a_column_to_partition_by_that_tokens_would_replace_is_refused(column, tmp_path):
    """The lengths of the examples in tokens were taken for its values."""
    reads, examples = examples_of("causal", "llama", column, tmp_path)
    with pytest.raises(ValueError, match=f"got the column '{column}', .*rename it in the data"):
        reads.prepared(examples)
