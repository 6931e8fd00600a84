"""Preference tuning of a decoder by DPO (Rafailov et al., 2023).

    loss = -log sigmoid(r(chosen) - r(rejected)),    r(y) = beta log(p(y | x) / p_ref(y | x))

The reference p_ref is the same network without its adapters, so no second copy is kept. Each
adapter begins as zero, so the reference is the model at the beginning of the run. To start after
supervised training, set `model` to a run's result that was exported as merged.

An example is a prompt, made of columns, with the columns `chosen` and `rejected`: texts, or lists
of messages. Without prompt columns, these two have whole conversations that differ in the last
answer. If prompt and answer are too long, the front of the prompt is cut, equally for both answers.
Dropout is off, so that policy and reference differ only by what is learned.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.adapters import without_adapters
from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.tasks import TASKS
from ravan_flwr.tasks.base import Batch, Encoded, Measures
from ravan_flwr.tasks.decoder import Decoder, ExampleTokens
from ravan_flwr.tasks.prompts import Row, check_messages
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.tasks.token_loss import losses_of_texts
from ravan_flwr.tasks.tokens import Tokens, tokenize_text

PAIR = TASKS["preference"].answers
BETA = 0.1  # where a preset has no data.beta


class Preference(Decoder):
    """Read the columns `prompt`, `chosen` and `rejected`, or `chosen` and `rejected` alone."""

    metric = "accuracy"
    right = "chosen"
    messages_role = "chosen"
    texts = 2

    @property
    def input_roles(self) -> list[str]:
        roles = [role for role, _ in self.data.columns if role not in PAIR]
        return roles or ["chosen"]

    def read(self, row: Row) -> ExampleTokens:
        if not self.data.prompts:
            first, second = (check_messages(row[role])[:-1] for role in PAIR)
            if first != second:
                raise UnreadableError("its conversations differ before their last answers")
        pair = [tokenize_text(self.reader, self.prompt_format.answered(row, role)) for role in PAIR]
        if pair[0].ids == pair[1].ids:
            raise UnreadableError("its chosen and rejected answers are the same")
        fitting = _fitted(pair, self.max_length, self.data.overlong)
        return ExampleTokens(fitting, len(fitting[0]) < len(pair[0]))

    def lengths(self, examples: Encoded) -> np.ndarray:
        longest: np.ndarray = super().lengths(examples).max(1)
        return self.texts * longest  # both texts are padded to the longer one

    def collate(self, batch: Batch) -> Batch:
        if "learned" in batch:  # a row for each text, chosen and rejected in turn
            batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
        return super().collate(batch)

    def adjust(self, network: nn.Module) -> None:
        super().adjust(network)
        module: Any
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0

    def size(self, batch: Batch) -> int:
        return len(batch["input_ids"]) // self.texts

    def rewards(self, network: nn.Module, batch: Batch) -> Tensor:
        """Return beta log(p / p_ref) of the answers, (pairs, 2): chosen, rejected."""
        with torch.no_grad(), without_adapters(network):  # before the policy's activations exist
            reference = losses_of_texts(network, **batch)
        policy = losses_of_texts(network, **batch)
        rewards: Tensor = (self.data.beta or BETA) * (reference - policy)
        return rewards.view(-1, self.texts)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        chosen, rejected = self.rewards(network, batch).unbind(1)
        return -F.logsigmoid(chosen - rejected).mean()

    def measure(
        self, network: Any, batch: Batch, answers: Sequence[Sequence[str]],
        tally: Tally | None = None,
    ) -> dict[str, float]:  # fmt: skip
        chosen, rejected = self.rewards(network, batch).unbind(1)
        return {
            "loss": float(-F.logsigmoid(chosen - rejected).sum()),
            "accuracy": float((chosen > rejected).sum()),
            "margin": float((chosen - rejected).sum()),
        }

    @property
    def measures(self) -> Measures:
        return Measures(("loss", "accuracy", "margin"))


TASK = Preference


def _fitted(pair: Sequence[Tokens], max_tokens: int, overlong: str) -> list[Tokens]:
    """Cut the prompt's front, equally in both texts: the longer text then has `max_tokens`."""
    excess = max(map(len, pair)) - max_tokens
    if excess <= 0:
        return [*pair]
    if overlong == "drop":
        raise UnreadableError("it has more tokens than max-length")
    cut = []
    for tokens in pair:
        if tokens.learned.index(True) <= tokens.first + excess:
            raise UnreadableError("its longer answer leaves no room for a prompt within max-length")
        cut.append(tokens.without_front(excess))
    return cut
