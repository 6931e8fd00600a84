"""Answer a text by a text: a prompt in, an answer out, by a pretrained language-model head.

A target has `target-length` tokens at most, that for its end included. Of a longer one the first
ones are trained on, without an end: the log says how many are cut. A task that must have every
target whole refuses them.
"""

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.tasks.base import Batch, Columns, Encoded, Shapes, as_rows, encoded_as_it_is, mapped
from ravan_flwr.tasks.extensions import ByExample, Predicts
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.tasks.text import (
    complete_texts,
    describe,
    fixed_length,
    load_tokenizer,
    token_counts,
    tokenize,
    trim,
)  # fmt: skip

IGNORED = -100  # a target that is padding

log = logging.getLogger(__name__)


class TextToText(Predicts, ByExample):
    """Fill the prompt with the columns of an example; the target is its first answer."""

    auto_class = "AutoModelForSeq2SeqLM"
    pipeline = ""
    prediction_columns: ClassVar[tuple[str, ...]] = ("text",)
    classifies = False

    @abstractmethod
    def answers(self, examples: datasets.Dataset) -> list[Sequence[str]]:
        """List the right answers of each example."""

    @abstractmethod
    def score(self, answer: str, right: Sequence[str]) -> float:
        """Score an answer, from 0 to 1."""

    def load_reader(self, folder: Path) -> Any:
        return load_tokenizer(folder)

    def encode(self, examples: datasets.Dataset) -> Encoded:
        answers = self.answers(examples)
        with_target = examples.add_column("target", [right[0] for right in answers])
        features = fixed_length(("input_ids", "attention_mask"), self.max_length)
        features |= fixed_length(("labels",), self.data.target_length)
        settings = {
            "reader": describe(self.reader), "length": self.max_length, "data": self.data,
            "cut": "without an end",
        }  # fmt: skip
        encoded = encoded_as_it_is(mapped(with_target, self._encode_batch, features, settings))
        # Targets that have no token for their end.
        last = encoded.only("labels").take(np.arange(len(encoded)))["labels"][:, -1]
        if cut := int(((last != IGNORED) & (last != self.reader.eos_token_id)).sum()):
            log.warning(
                "answers: %d of %d have more tokens than target-length = %d; expected at most so "
                "many, the end included. They are cut for training, and scored whole; raise "
                "target-length in the preset's data to train on all of them",
                *(cut, len(encoded), self.data.target_length),
            )
        return replace(encoded, answers=answers)

    def _encode_batch(self, columns: Mapping[str, Any]) -> Columns:
        """Encode prompts, and targets (examples, target-length), cut without an end if longer."""
        length = self.data.target_length
        targets = np.full((len(columns["target"]), length), IGNORED, dtype=np.int32)
        for row, tokens in zip(targets, self.tokens(columns["target"]), strict=True):
            row[: len(tokens)] = tokens[:length]
        return self.inputs(columns) | {"labels": targets}

    def inputs(self, columns: Mapping[str, Any]) -> Columns:
        roles = [role for role, _ in self.data.columns if role in columns]
        for role in roles:
            if f"{{{role}}}" in self.data.prompt:
                complete_texts(columns[role], self.data.column(role))
        prompts = [self.data.prompt.format(**row) for row in as_rows(columns, roles)]
        read = tokenize(self.reader, self.max_length, prompts)
        return {"input_ids": read["input_ids"], "attention_mask": read["attention_mask"]}

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Read the tokens of each text, with one for its end, however many they are."""
        read: list[list[int]] = self.reader(list(texts), verbose=False).input_ids
        return read

    def shapes(self, config: Any, batch_size: int) -> Shapes:
        # Without a mask: no text of a plan is padded.
        return {
            "input_ids": ((batch_size, self.max_length), torch.int64),
            "labels": ((batch_size, self.data.target_length), torch.int64),
        }

    def lengths(self, examples: Encoded) -> np.ndarray:
        return token_counts(examples)

    def collate(self, batch: Batch) -> Batch:
        if "labels" not in batch:  # they are to be predicted
            return trim(batch)
        labels = batch["labels"].long()
        length = int((labels != IGNORED).sum(1).max())
        return trim(batch) | {"labels": labels[:, :length]}

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        return _losses(network, batch).mean()

    def measure(
        self, network: Any, batch: Batch, answers: Sequence[Sequence[str]],
        tally: Tally | None = None,
    ) -> dict[str, float]:  # fmt: skip
        loss = float(_losses(network, batch).sum())
        texts = self._written(network, batch)
        if tally is not None:
            self.count_labels(texts, answers, tally)
        scores = [self.score(text, right) for text, right in zip(texts, answers, strict=True)]
        return {"loss": loss, self.metric: float(sum(scores))}

    def count_labels(
        self, texts: Sequence[str], answers: Sequence[Sequence[str]], tally: Tally
    ) -> None:
        """Count which label was written for which, where the answers are labels."""

    def predict(self, network: Any, batch: Batch) -> list[tuple[str | float, ...]]:
        return [(text,) for text in self._written(network, batch)]

    def _written(self, network: Any, batch: Batch) -> list[str]:
        """Let the model write an answer to each prompt."""
        tokens = network.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.data.target_length,
            do_sample=False,
            num_beams=1,
            use_cache=True,
        )
        texts: list[str] = self.reader.batch_decode(tokens, skip_special_tokens=True)
        return texts


def _losses(network: Any, batch: Batch) -> Tensor:
    """Compute each example's loss, the mean over the tokens of its target."""
    labels = batch["labels"]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    shifted = network.prepare_decoder_input_ids_from_labels(labels)
    logits = network(**inputs, decoder_input_ids=shifted, use_cache=False).logits.float()
    by_token = F.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
    )
    return by_token.sum(1) / (labels != IGNORED).sum(1)
