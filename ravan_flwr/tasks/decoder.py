"""Define what tasks of a decoder have in common: tokenizing texts, cutting them, and generation.

An example becomes tokens, of which those of answers are learned. Examples that cannot be learned
are left out before partitioning, and counted. The network keeps its pretrained language-model head.
"""

import dataclasses
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig

from ravan_flwr.data.partition import find_column
from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.tasks.base import (
    IGNORED,
    Batch,
    Columns,
    Encoded,
    Shapes,
    as_rows,
    encoded_as_it_is,
    mapped,
)
from ravan_flwr.tasks.extensions import Predicts
from ravan_flwr.tasks.prompts import PromptFormat, Row, end_of_turn
from ravan_flwr.tasks.text import check_positions, describe, load_tokenizer, rounded_up
from ravan_flwr.tasks.token_loss import block_bytes, check_logits
from ravan_flwr.tasks.tokens import (
    Tokens,
    question_tokens,
    report_cut_examples,
    report_skipped_examples,
)  # fmt: skip

log = logging.getLogger(__name__)

EVALUATION_TOKENS = 16_384  # that are evaluated at a time
ENCODED = ("input_ids", "learned", "length")


@dataclasses.dataclass(frozen=True)
class ExampleTokens:
    """The tokens of an example's texts, and what is not learned of them."""

    texts: Sequence[Tokens]
    is_cut: bool  # whether tokens were removed from the front
    unlearned: int = 0  # earlier answers that are input only, without a loss


class Decoder(Predicts):
    """Tokenize examples of one or several texts with answers, and generate answers."""

    prediction_columns: ClassVar[tuple[str, ...]] = ("text",)
    classifies = False
    auto_class = "AutoModelForCausalLM"
    pipeline = "text-generation"
    peft_type = "CAUSAL_LM"
    masks = False  # padding is at the ends, and no token attends to later ones
    texts: ClassVar[int] = 1  # per example

    messages_role: ClassVar[str]  # the role of the column with whole conversations

    @cached_property
    def prompt_format(self) -> PromptFormat:
        """Return the `PromptFormat` that converts examples to texts."""
        return PromptFormat(self.reader, self.data.prompts, self.messages_role)

    @abstractmethod
    def read(self, row: Row) -> ExampleTokens:
        """Return an example's tokens; UnreadableError if it cannot be learned."""

    def load_reader(self, folder: Path) -> Any:
        tokenizer = load_tokenizer(folder)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"model {folder}: its tokenizer has no token for the end of a text, expected one, "
                "by which answers end; choose another model"
            )
        tokenizer.padding_side = "left"  # for generation with an exported model
        if self.data.chat_template:
            tokenizer.chat_template = self.data.chat_template
        return tokenizer

    def check_sizes(self) -> None:
        check_positions(self.model_config, self.max_length)
        if self.max_length < 2:
            raise ValueError(
                f"max-length = {self.max_length}: expected 2 at least, since the first token of a "
                "text follows from nothing; raise max-length"
            )

    def check(self) -> None:
        vocabulary_size, tokens = self.model_config.get("vocab_size"), self.reader.get_vocab()
        tokens.pop(self.reader.pad_token, None)  # the network never reads it
        last = max(tokens, key=tokens.__getitem__)
        if isinstance(vocabulary_size, int) and tokens[last] >= vocabulary_size:
            raise ValueError(
                f"model: its tokenizer has {last!r} as token {tokens[last]}, but the model has "
                f"vocab_size = {vocabulary_size}, expected every token below that; take the "
                "tokenizer that belongs to the model"
            )
        self.prompt_format.check()

    # From examples to tokens.

    def prepared(self, examples: datasets.Dataset) -> datasets.Dataset:
        """Tokenize all examples; leave out those that cannot be learned, and log how many."""
        self.check()
        roles = {role for role, _ in self.data.columns} - {find_column(self.data)}
        keep = [name for name in examples.column_names if name not in roles]
        if taken := [name for name in keep if name in self._features()]:
            raise ValueError(
                f"partition: got the column {taken[0]!r}, expected another name, since encoded "
                "examples have a column of that name; rename it in the data"
            )
        settings = {
            "reader": describe(self.reader),
            "special": self.reader.special_tokens_map,
            "template": self.reader.chat_template,
            "length": self.max_length,
            "data": self.data,
            "task": type(self).__name__,
        }
        encoded = mapped(examples, self._encode_batch, self._features(), settings, keep)
        problems = encoded["problem"][:]
        report_skipped_examples(problems)
        report_cut_examples(sum(encoded["cut"][:]), len(encoded), self.max_length)
        if unlearned := sum(encoded["unlearned"][:]):
            log.warning(
                "examples: %d earlier answers of conversations are input only, not learned, since "
                "the chat template writes them otherwise when more messages follow", unlearned,
            )  # fmt: skip
        usable = [row for row, problem in enumerate(problems) if not problem]
        return encoded.select(usable).remove_columns(["cut", "unlearned", "problem"])

    def _features(self) -> dict[str, Any]:
        def feature(dtype: str, *inner: int) -> Any:
            if self.texts > 1 and inner:
                return datasets.Array2D((self.texts, *inner), dtype)
            sides = inner or ((self.texts,) if self.texts > 1 else ())
            value = datasets.Value(dtype)
            return datasets.List(value, length=sides[0]) if sides else value

        return {
            "input_ids": feature("int32", self.max_length),
            "learned": feature("bool", self.max_length),
            "length": feature("int32"),
            "cut": datasets.Value("bool"),
            "unlearned": datasets.Value("int32"),
            "problem": datasets.Value("string"),
        }

    def _encode_batch(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a batch; an invalid example has no tokens, but a `problem`."""
        read, problems = [], []
        for row in as_rows(columns, [role for role, _ in self.data.columns]):
            try:
                example, problem = self.read(row), ""
            except UnreadableError as error:
                example, problem = ExampleTokens([Tokens([], [])] * self.texts, False), str(error)
            read.append(example)
            problems.append(problem)
        texts = [tokens for example in read for tokens in example.texts]
        shape = (len(read), self.texts) if self.texts > 1 else (len(read),)
        ids = padded([tokens.ids for tokens in texts], self.max_length)
        learned = padded([tokens.learned for tokens in texts], self.max_length)
        return {
            "input_ids": ids.astype(np.int32).reshape(*shape, -1),
            "learned": learned.astype(bool).reshape(*shape, -1),
            "length": np.asarray([*map(len, texts)], np.int32).reshape(shape),
            "cut": [example.is_cut for example in read],
            "unlearned": [example.unlearned for example in read],
            "problem": problems,
        }

    def encode(self, examples: datasets.Dataset) -> Encoded:
        if "learned" not in examples.column_names:
            examples = self.prepared(examples)
        return encoded_as_it_is(examples.select_columns([*ENCODED]))

    def lengths(self, examples: Encoded) -> np.ndarray:
        read = examples.only("length").take(np.arange(len(examples)))
        counts: np.ndarray = read["length"].numpy()
        return counts

    @property
    def cut_at(self) -> int:
        return int(self.reader.model_max_length)

    def collate(self, batch: Batch) -> Batch:
        length = rounded_up(int(batch["length"].max()), self.multiple)
        ids = batch["input_ids"][:, :length].long()
        if "learned" not in batch:
            return _left_padded(ids, batch["length"])
        positions = next_is_learned(batch)[:, :length].flatten().nonzero().squeeze(1)
        targets = ids.flatten()[positions + 1]
        if self.multiple > 1:  # few numbers of targets, too
            zeros = (1 << (len(targets) - 1).bit_length()) - len(targets)
            positions = F.pad(positions, (0, zeros))
            targets = F.pad(targets, (0, zeros), value=IGNORED)
        return {"input_ids": ids, "positions": positions, "targets": targets}

    # The network's options, sizes and memory.

    def adjust(self, network: nn.Module) -> None:
        config: Any = network.config
        config.use_cache = False  # the cache of keys and values is for generation
        if not next(network.parameters()).is_meta:
            check_logits(network.eval())

    def shapes(self, config: Any, batch_size: int) -> Shapes:
        # A plan assumes texts without padding, and a loss on every token, as with `loss-on: all`.
        texts, length = self.texts * batch_size, self.max_length
        return {
            "input_ids": ((texts, length), torch.int64),
            # Without a mask, networks inspect values to decide whether they need one.
            "attention_mask": ((texts, 1, length, length), torch.bool),
            "positions": ((texts * (length - 1),), torch.int64),
            "targets": ((texts * (length - 1),), torch.int64),
        }

    def transient(self, config: Any, batch_size: int) -> int:
        return block_bytes(config, self.texts * batch_size * (self.max_length - 1))

    @property
    def evaluation_batch(self) -> int:
        max_texts = EVALUATION_TOKENS // (self.texts * self.max_length)
        return max(1, min(super().evaluation_batch, max_texts))

    # Predictions.

    def checked(self, role: str, value: Any) -> Any:
        return self.prompt_format.checked(role, value)

    @property
    def _answer_tokens(self) -> int:
        """Return an answer's most tokens: `target-length`, but at most half of `max-length`."""
        return min(self.data.target_length, self.max_length // 2)

    def inputs(self, columns: Mapping[str, Any]) -> Columns:
        roles = [role for role, _ in self.data.columns if role in columns]
        max_tokens = self.max_length - self._answer_tokens
        questions = map(self.prompt_format.question, as_rows(columns, roles))
        ids = [question_tokens(self.reader, question, max_tokens) for question in questions]
        lengths = np.asarray([len(row) for row in ids], dtype=np.int32)
        return {"input_ids": padded(ids, max_tokens).astype(np.int32), "length": lengths}

    def predict(self, network: Any, batch: Batch) -> list[tuple[str | float, ...]]:
        answers = _new_tokens(network, batch, self._ends(network), self._answer_tokens)
        return [(text,) for text in self.reader.batch_decode(answers, skip_special_tokens=True)]

    def _ends(self, network: Any) -> list[int]:
        """Return the tokens that end an answer: the model's, the tokenizer's, the template's."""
        eos = getattr(network.generation_config, "eos_token_id", None)
        ends = {self.reader.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
        if self.prompt_format.may_have_messages and (after := end_of_turn(self.reader)):
            first = self.reader(after, add_special_tokens=False).input_ids[0]
            if first in self.reader.all_special_ids:
                ends.add(first)
        return sorted(end for end in ends if end is not None)


def padded(rows: Sequence[Sequence[int | bool]], length: int) -> np.ndarray:
    """Return the rows as one array, padded at the right with zeros, which are never used."""
    table = np.zeros((len(rows), length), dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


def next_is_learned(batch: Batch) -> Tensor:
    """Return the mask of the positions whose next token is learned, (texts, tokens)."""
    mask = batch["learned"].roll(-1, 1)
    mask[:, -1] = False
    return mask


def _left_padded(ids: Tensor, lengths: Tensor) -> Batch:
    """Move the padding to the left, so that generated tokens directly follow the text."""
    width = ids.shape[1]
    sources = torch.arange(width)[None] - (width - lengths.long()[:, None])
    mask = sources >= 0
    return {"input_ids": ids.gather(1, sources.clamp(min=0)) * mask, "attention_mask": mask.long()}


def _new_tokens(network: Any, batch: Batch, ends: list[int], max_tokens: int) -> list[list[int]]:
    """Return at most `max_tokens` generated tokens for each prompt, up to the first end token.

    Decoding is greedy, with cached keys and values. The model's own generation config is ignored:
    no temperature, no penalty.
    """
    previous = network.generation_config
    network.generation_config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, num_beams=1, use_cache=True, eos_token_id=ends,
        pad_token_id=ends[0],
    )  # fmt: skip
    try:
        with torch.no_grad():
            generated = network.generate(**batch)
    finally:
        network.generation_config = previous
    width = batch["input_ids"].shape[1]
    return [
        list(takewhile(lambda token: token not in ends, row))
        for row in generated[:, width:].tolist()
    ]
