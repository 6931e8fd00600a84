"""Classify a text, or a pair of texts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from ravan_flwr.data.examples import label_numbers
from ravan_flwr.data.model_folder import model_file_errors
from ravan_flwr.tasks.base import Batch, Columns, Encoded, Shapes, encoded_as_it_is, mapped
from ravan_flwr.tasks.extensions import Classification


class Text(Classification):
    """Read the columns `text`, `label`, and `text-pair` if there is one."""

    auto_class = "AutoModelForSequenceClassification"
    pipeline = "text-classification"

    def load_reader(self, folder: Path) -> Any:
        return load_tokenizer(folder)

    def encode(self, examples: datasets.Dataset) -> Encoded:
        labels = label_numbers(examples, self.data.labels, "labels")
        texts = [role for role, _ in self.data.columns if role != "label"]
        numbered = examples.select_columns(texts).add_column("labels", labels)
        features = fixed_length(self.reader.model_input_names, self.max_length)
        features |= {"labels": datasets.Value("int64")}
        settings = {"reader": describe(self.reader), "length": self.max_length}

        def encoded(columns: Mapping[str, Any]) -> Columns:
            return self.inputs(columns) | {"labels": np.asarray(columns["labels"])}

        return encoded_as_it_is(mapped(numbered, encoded, features, settings))

    def inputs(self, columns: Mapping[str, Any]) -> Columns:
        roles = ["text", "text-pair"] if self.data.column("text-pair") else ["text"]
        texts = [complete_texts(columns[role], self.data.column(role)) for role in roles]
        return tokenize(self.reader, self.max_length, *texts)

    def adjust(self, network: nn.Module) -> None:
        config = cast(Any, network).config
        # A decoder classifies by its last token that is not padding. A plan has no reader.
        is_plan = next(network.parameters()).is_meta
        config.pad_token_id = 0 if is_plan else self.reader.pad_token_id
        config.use_cache = False  # the cache of keys and values is for generation

    def shapes(self, config: Any, batch_size: int) -> Shapes:
        length = self.max_length
        return {
            "input_ids": ((batch_size, length), torch.int64),
            # Networks would derive this mask from one by token, by inspecting its values.
            "attention_mask": ((batch_size, 1, length, length), torch.bool),
            "labels": ((batch_size,), torch.int64),
        }

    def lengths(self, examples: Encoded) -> np.ndarray:
        return token_counts(examples)

    def collate(self, batch: Batch) -> Batch:
        return trim(batch, self.multiple)

    def check_sizes(self) -> None:
        check_positions(self.model_config, self.max_length)

    def logits(self, network: nn.Module, batch: Batch) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return cast(Tensor, network(**inputs).logits)


TASK = Text


# Architectures whose positions begin after the number of the padding token, as RoBERTa's do.
_AFTER_PADDING = (
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod",
    "mpnet", "longformer", "luke", "ibert", "data2vec-text", "esm",
)  # fmt: skip


def max_tokens(model_config: Mapping[str, Any]) -> int | None:
    """Return for how many tokens of a text the model has positions; None: for any number."""
    positions = model_config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    if model_config.get("model_type") not in _AFTER_PADDING:
        return positions
    padding = model_config.get("pad_token_id")
    return positions - 1 - (padding if isinstance(padding, int) else 1)


def check_positions(model_config: Mapping[str, Any], max_length: int) -> None:
    """Raise ValueError if texts may have more tokens than the model has positions."""
    positions = max_tokens(model_config)
    if positions is not None and max_length > positions:
        raise ValueError(
            f"max-length = {max_length}: the model has positions for {positions} tokens, expected "
            f"at most so many; set max-length={positions}, or in the preset's data"
        )


def complete_texts(texts: Sequence[str | None], column: str) -> Sequence[str]:
    """Return the texts; ValueError if a text is missing."""
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"column {column!r}: an example has {text!r}, expected a text; take out the "
                "examples that have none, or name another column"
            )
    return cast(Sequence[str], texts)


_AT_A_TIME = 8192  # rows of a file in memory while their tokens are counted
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")


def load_tokenizer(folder: Path) -> Any:
    """Load the model's tokenizer, which pads on the right."""
    # Without these files transformers would make a tokenizer with an empty vocabulary.
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ValueError(
            f"model {folder}: it has no tokenizer, expected tokenizer.json; choose another model"
        )
    with model_file_errors(str(folder), "tokenizer's files"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"model {folder}: its tokenizer is a {type(tokenizer).__name__}, which transformers "
            "has in Python alone, expected one with a tokenizer.json; choose another model"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ValueError(
            f"model {folder}: its tokenizer has neither a padding token nor one for the end; "
            "choose another model"
        )
    tokenizer.padding_side = "right"
    return tokenizer


def describe(tokenizer: Any) -> dict[str, Any]:
    """Return everything that affects this tokenizer's output, as part of a cache key."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return {"tokenizer": backend.to_str(), "pad": tokenizer.pad_token}


def tokenize(tokenizer: Any, length: int, *texts: Sequence[str]) -> Columns:
    """Return the tokens of texts, or pairs of texts, truncated and padded to `length`."""
    added = tokenizer.num_special_tokens_to_add(pair=len(texts) > 1)
    if length <= added:
        raise ValueError(
            f"max-length = {length}: expected at least {added + 1}, since the tokenizer adds "
            f"{added} tokens to each text; raise it"
        )
    read = tokenizer(
        *(list(text) for text in texts),
        truncation=True,
        max_length=length,
        padding="max_length",
        return_tensors="np",
    )
    return {name: array.astype(np.int32) for name, array in read.items()}


def fixed_length(names: Sequence[str], length: int) -> dict[str, Any]:
    """Return features of columns with `length` tokens."""
    return {name: datasets.List(datasets.Value("int32"), length=length) for name in names}


def token_counts(examples: Encoded) -> np.ndarray:
    """Return the number of tokens of each text, without padding."""
    examples = examples.only("attention_mask")
    parts = np.array_split(np.arange(len(examples)), -(-len(examples) // _AT_A_TIME))
    counts = [examples.take(rows)["attention_mask"].sum(1).numpy() for rows in parts]
    return np.concatenate(counts)


def trim(batch: Batch, multiple: int = 1) -> Batch:
    """Drop columns in which every text of the batch is padding; token ids become int64.

    The number of the columns that are left is a multiple of `multiple`, if there are so many.
    """
    length = rounded_up(int(batch["attention_mask"].sum(1).max()), multiple)
    return {
        name: tensor[:, :length].long() if name in _BY_TOKEN else tensor
        for name, tensor in batch.items()
    }


def rounded_up(length: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a length."""
    return -(-length // multiple) * multiple


_BY_TOKEN = {"input_ids", "attention_mask", "token_type_ids"}
