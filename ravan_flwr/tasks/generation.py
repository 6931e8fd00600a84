"""Text to text: a prompt in, an answer out, by a pretrained language-model head."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.tasks.base import Batch, Columns, Encoded, Shapes, Task, encode_in_batches
from ravan_flwr.tasks.text import describe, fixed_length, load_tokenizer, tokenize, trim

IGNORED = -100  # a target that is padding


class TextToText(Task):
    """The prompt is filled with the columns of an example; the target is its first answer."""

    classes = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"

    @abstractmethod
    def answers(self, examples: datasets.Dataset) -> list[Sequence[str]]:
        """The right answers of each example."""

    @abstractmethod
    def score(self, answer: str, right: Sequence[str]) -> float:
        """How good an answer is, from 0 to 1."""

    def load_reader(self, folder: Path) -> Any:
        return load_tokenizer(folder)

    def encode(self, examples: datasets.Dataset) -> Encoded:
        answers = self.answers(examples)
        with_target = examples.add_column("target", [right[0] for right in answers])
        encoded = encode_in_batches(
            with_target,
            self._encode_batch,
            fixed_length(("input_ids", "attention_mask"), self.max_length)
            | fixed_length(("labels",), self.data.target_length),
            {"reader": describe(self.reader), "length": self.max_length, "data": self.data},
        )
        return Encoded(encoded.whole, encoded.rows, answers)

    def _encode_batch(self, columns: Mapping[str, Any]) -> Columns:
        roles = [role for role, _ in self.data.columns if role in columns]
        rows = zip(*(columns[role] for role in roles), strict=True)
        prompts = [self.data.prompt.format(**dict(zip(roles, row, strict=True))) for row in rows]
        read = tokenize(self.reader, self.max_length, prompts)
        target = tokenize(self.reader, self.data.target_length, columns["target"])
        labels = np.where(target["attention_mask"] > 0, target["input_ids"], IGNORED)
        return {
            "input_ids": read["input_ids"],
            "attention_mask": read["attention_mask"],
            "labels": labels.astype(np.int32),
        }

    def shapes(self, config: Any, batch_size: int) -> Shapes:  # noqa: ARG002
        # Without a mask: no text of a plan is padded.
        return {
            "input_ids": ((batch_size, self.max_length), torch.int64),
            "labels": ((batch_size, self.data.target_length), torch.int64),
        }

    def collate(self, batch: Batch) -> Batch:
        labels = batch["labels"].long()
        length = int((labels != IGNORED).sum(1).max())
        return trim(batch) | {"labels": labels[:, :length]}

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        return _losses(network, batch).mean()

    def measure(
        self, network: Any, batch: Batch, answers: Sequence[Sequence[str]]
    ) -> dict[str, float]:
        loss = float(_losses(network, batch).sum())
        tokens = network.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.data.target_length,
            do_sample=False,
            num_beams=1,
            use_cache=True,
        )
        texts = self.reader.batch_decode(tokens, skip_special_tokens=True)
        scores = [self.score(text, right) for text, right in zip(texts, answers, strict=True)]
        return {"loss": loss, self.metric: float(sum(scores))}


def _losses(network: Any, batch: Batch) -> Tensor:
    """Of each example, the mean over the tokens of its target."""
    labels = batch["labels"]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    shifted = network.prepare_decoder_input_ids_from_labels(labels)
    logits = network(**inputs, decoder_input_ids=shifted, use_cache=False).logits.float()
    by_token = F.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
    )
    return by_token.sum(1) / (labels != IGNORED).sum(1)
