"""Instruction tuning of a decoder, with its pretrained language-model head.

An example is a conversation (`messages`), rendered by the tokenizer's chat template, or a prompt
with a completion; the prompt may combine several columns. The answers are learned: every turn of
the assistant with the token that ends it, or the completion with the end token. With
`loss-on: all` every token is learned. Loss and perplexity are by token: sums over all tokens of all
examples, divided once.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ravan_flwr.tasks.base import IGNORED, Batch, Measures
from ravan_flwr.tasks.decoder import Decoder, ExampleTokens, next_is_learned
from ravan_flwr.tasks.extensions import ByExample, Packs
from ravan_flwr.tasks.prompts import Row, check_messages, conversation
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.tasks.token_loss import packed, summed_loss
from ravan_flwr.tasks.tokens import shortened, tokenize_text

MAX_LOSS = 100.0  # by token; a much larger loss would overflow as perplexity


class Causal(Decoder, Packs, ByExample):
    """Read the column `messages`, or `completion` and the columns of a prompt."""

    metric = "perplexity"
    right = "completion"
    messages_role = "messages"

    def read(self, row: Row) -> ExampleTokens:
        learn_all = self.data.loss_on == "all"
        if self.data.prompts:
            annotated = self.prompt_format.answered(row, "completion")
        else:
            annotated = conversation(self.reader, check_messages(row["messages"]))
        all_tokens = tokenize_text(self.reader, annotated, learn_all=learn_all)
        tokens = shortened(all_tokens, self.max_length, self.data.overlong, learn_all=learn_all)
        return ExampleTokens([tokens], len(all_tokens) > len(tokens), annotated.unlearned)

    def packed(self, batch: Batch) -> Batch:
        return packed(batch, next_is_learned(batch)) or self.collate(batch)

    def made_up(self, config: Any, number: int) -> Batch:
        batch = super().made_up(config, number)
        ids = batch["input_ids"]
        positions = torch.arange(ids.numel()).view_as(ids)[:, :-1].flatten()
        return batch | {"positions": positions, "targets": ids.flatten()[positions + 1]}

    def size(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORED).sum())

    def sizes(self, batch: Batch) -> Tensor:
        texts, length = batch["input_ids"].shape
        sizes = torch.bincount(batch["positions"] // length, minlength=texts)
        return sizes.float()

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        return summed_loss(network, **batch) / (batch["targets"] != IGNORED).sum()

    def measure(
        self, network: Any, batch: Batch, answers: Sequence[Sequence[str]],
        tally: Tally | None = None,
    ) -> dict[str, float]:  # fmt: skip
        loss = float(summed_loss(network, **batch))
        return {"loss": loss, "tokens": float(self.size(batch))}

    @property
    def measures(self) -> Measures:
        def completed(means: Mapping[str, float]) -> dict[str, float]:
            loss = means["loss"]
            return {"loss": loss, "perplexity": math.exp(min(loss, MAX_LOSS))}

        return Measures(("loss",), "tokens", self.max_length - 1, completed)


TASK = Causal
