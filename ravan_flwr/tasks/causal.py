"""Go on with a text: instruction tuning of a decoder, by its pretrained language-model head.

An example is a conversation (`messages`), which the tokenizer's chat template writes, or a prompt
with a completion; the prompt may be made of columns. The answers are learned: every turn of the
assistant with the token that ends it, or the completion with the token for the end; with
`loss-on: all` every token. Loss and perplexity are by token: sums over all tokens of all examples,
divided once.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from ravan_flwr.data.partition import column_of
from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.base import (
    Batch,
    Columns,
    Encoded,
    Measures,
    Shapes,
    encoded_as_it_is,
    mapped,
)  # fmt: skip
from ravan_flwr.tasks.extensions import ByExample, Packs, Predicts, Sample
from ravan_flwr.tasks.forms import Form, form_of
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.tasks.text import check_positions, describe, fixed_length, load_tokenizer
from ravan_flwr.tasks.token_loss import block_bytes, check_logits, packed, summed_loss
from ravan_flwr.tasks.tokens import (
    fitted,
    question_tokens,
    report_cut_examples,
    report_skipped_examples,
    tokens_of,
)  # fmt: skip

log = logging.getLogger(__name__)

EVALUATION_TOKENS = 16_384  # of an evaluation at a time
MOST_LOSS = 100.0  # by token; what is beyond it would be no finite perplexity


class Causal(Packs, Predicts, ByExample):
    """Read the column `messages`, or `completion` and the columns of a prompt."""

    metric = "perplexity"
    right = "completion"
    prediction_columns: ClassVar[tuple[str, ...]] = ("text",)
    classifies = False
    classes = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    auto_class = "AutoModelForCausalLM"
    pipeline = "text-generation"
    peft_type = "CAUSAL_LM"
    masks = False  # padding is at the ends, where no token sees it

    def __init__(self, data: DataSpec, *rest: Any, **more: Any) -> None:
        super().__init__(data, *rest, **more)
        if data.questions is not None:  # tasks/multiple_choice.py
            self.metric = "accuracy"

    def load_reader(self, folder: Path) -> Any:
        tokenizer = load_tokenizer(folder)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"model {folder}: its tokenizer has no token for the end of a text, expected one, "
                "by which answers end; choose another model"
            )
        tokenizer.padding_side = "left"  # for those who let an export answer
        if self.data.chat_template:
            tokenizer.chat_template = self.data.chat_template
        return tokenizer

    @cached_property
    def form(self) -> Form:
        """Choose what writes the examples."""
        return form_of(self.data, self.reader)

    def check_sizes(self) -> None:
        check_positions(self.model_config, self.max_length)
        if self.max_length < 2:
            raise ValueError(
                f"max-length = {self.max_length}: expected 2 at least, since the first token of a "
                "text follows from nothing; raise max-length"
            )

    def check(self) -> None:
        most, tokens = self.model_config.get("vocab_size"), self.reader.get_vocab()
        tokens.pop(self.reader.pad_token, None)  # it is never read
        last = max(tokens, key=tokens.__getitem__)
        if isinstance(most, int) and tokens[last] >= most:
            raise ValueError(
                f"model: its tokenizer has {last!r} as token {tokens[last]}, but the model has "
                f"vocab_size = {most}, expected every token below that; take the tokenizer that "
                "belongs to the model"
            )
        self.form.check()

    # From examples to tokens.

    def prepared(self, examples: datasets.Dataset) -> datasets.Dataset:
        """Write and read all examples, and leave out those that teach nothing; tell of them."""
        self.check()
        done = {role for role, _ in self.data.columns} - {column_of(self.data)}
        keep = [name for name in examples.column_names if name not in done]
        features = fixed_length(("input_ids",), self.max_length) | {
            "learned": datasets.List(datasets.Value("bool"), length=self.max_length),
            "length": datasets.Value("int32"),
            "cut": datasets.Value("bool"),
            "unlearned": datasets.Value("int32"),
            "problem": datasets.Value("string"),
        }
        settings = {
            "reader": describe(self.reader),
            "special": self.reader.special_tokens_map,
            "template": self.reader.chat_template,
            "length": self.max_length,
            "data": self.data,
        }
        made = mapped(examples, self._encode_batch, features, settings, keep)
        problems = made["problem"][:]
        report_skipped_examples(problems)
        report_cut_examples(sum(made["cut"][:]), len(made), self.max_length)
        if unlearned := sum(made["unlearned"][:]):
            log.warning(
                "examples: %d earlier answers of conversations are read, but not learned, since "
                "the chat template writes them otherwise when more messages follow", unlearned,
            )  # fmt: skip
        usable = [row for row, problem in enumerate(problems) if not problem]
        return made.select(usable).remove_columns(["cut", "unlearned", "problem"])

    def _encode_batch(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a batch, with what is wrong with an example in place of its tokens."""
        made: dict[str, list[Any]] = {
            name: [] for name in ("ids", "of", "length", "cut", "unlearned", "problem")
        }
        names, everything = [role for role, _ in self.data.columns], self.data.loss_on == "all"
        for values in zip(*(columns[name] for name in names), strict=True):
            row: tuple[Any, ...]
            try:
                written = self.form.whole(dict(zip(names, values, strict=True)))
                whole = tokens_of(self.reader, written, everything=everything)
                tokens = fitted(whole, self.max_length, self.data.overlong, everything=everything)
                is_cut = len(whole) > len(tokens)
                row = tokens.ids, tokens.learned, len(tokens), is_cut, written.unlearned, ""
            except UnreadableError as error:
                row = [], [], 0, False, 0, str(error)
            for column, value in zip(made.values(), row, strict=True):
                column.append(value)
        ids, learned = (_padded(made.pop(name), self.max_length) for name in ("ids", "of"))
        return made | {"input_ids": ids.astype(np.int32), "learned": learned.astype(bool)}

    def encode(self, examples: datasets.Dataset) -> Encoded:
        if "learned" not in examples.column_names:
            examples = self.prepared(examples)
        return encoded_as_it_is(examples.select_columns(["input_ids", "learned", "length"]))

    def lengths(self, examples: Encoded) -> np.ndarray:
        if isinstance(examples.whole, datasets.Dataset):  # in a file: read what is counted alone
            narrow = examples.whole.select_columns("length")
            examples = dataclasses.replace(examples, whole=narrow)
        counts: np.ndarray = examples.take(np.arange(len(examples)))["length"].numpy()
        return counts

    @property
    def cut_at(self) -> int:
        return int(self.reader.model_max_length)

    def collate(self, batch: Batch) -> Batch:
        length = int(batch["length"].max())
        ids = batch["input_ids"][:, :length].long()
        if "learned" not in batch:
            return _left_padded(ids, batch["length"])
        follows = _follows(batch)[:, :length]
        positions = follows.flatten().nonzero().squeeze(1)
        return {"input_ids": ids, "positions": positions, "targets": ids.flatten()[positions + 1]}

    def packed(self, batch: Batch) -> Batch:
        return packed(batch, _follows(batch)) or self.collate(batch)

    # What the network makes of them.

    def adjust(self, network: nn.Module) -> None:
        config: Any = network.config
        config.use_cache = False  # of keys and values, for generation
        if not next(network.parameters()).is_meta:
            check_logits(network.eval())

    def shapes(self, config: Any, batch_size: int) -> Shapes:
        # No text of a plan is padded, and every token counts, as with `loss-on: all`.
        length, counted = self.max_length, batch_size * (self.max_length - 1)
        return {
            "input_ids": ((batch_size, length), torch.int64),
            # Without one, networks look at values to find out whether they need any.
            "attention_mask": ((batch_size, 1, length, length), torch.bool),
            "positions": ((counted,), torch.int64),
            "targets": ((counted,), torch.int64),
        }

    def made_up(self, config: Any, number: int) -> Batch:
        batch = super().made_up(config, number)
        ids = batch["input_ids"]
        positions = torch.arange(ids.numel()).view_as(ids)[:, :-1].flatten()
        return batch | {"positions": positions, "targets": ids.flatten()[positions + 1]}

    def transient(self, config: Any, batch_size: int) -> int:
        return block_bytes(config, batch_size * (self.max_length - 1))

    @property
    def evaluation_batch(self) -> int:
        return max(1, min(super().evaluation_batch, EVALUATION_TOKENS // self.max_length))

    def size(self, batch: Batch) -> int:
        return len(batch["targets"])

    def sizes(self, batch: Batch) -> Tensor:
        texts, length = batch["input_ids"].shape
        of_each = torch.bincount(batch["positions"] // length, minlength=texts)
        return of_each.float()

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        return summed_loss(network, **batch) / len(batch["targets"])

    def measure(
        self, network: Any, batch: Batch, answers: Sequence[Sequence[str]],
        tally: Tally | None = None,
    ) -> dict[str, float]:  # fmt: skip
        loss = float(summed_loss(network, **batch))
        return {"loss": loss, "tokens": float(len(batch["targets"]))}

    @property
    def measures(self) -> Measures:
        def completed(means: Mapping[str, float]) -> dict[str, float]:
            loss = means["loss"]
            return {"loss": loss, "perplexity": math.exp(min(loss, MOST_LOSS))}

        return Measures(("loss",), "tokens", self.max_length - 1, completed)

    # Answers.

    def checked(self, role: str, value: Any) -> Any:
        return self.form.checked(role, value)

    def samples(self, examples: datasets.Dataset, most: int) -> list[Sample]:
        found: list[Sample] = []
        for row in examples:
            with suppress(UnreadableError):
                sample = self.form.sample(row)
                question_tokens(self.reader, self.form.question(sample.values), self.max_length)
                found.append(sample)
            if len(found) == most:
                break
        return found

    @property
    def _answer_tokens(self) -> int:
        """Return how many tokens an answer has: `target-length`, half of `max-length` at most."""
        return min(self.data.target_length, self.max_length // 2)

    def inputs(self, columns: Mapping[str, Any]) -> Columns:
        names = [role for role, _ in self.data.columns if role in columns]
        rows = [
            dict(zip(names, values, strict=True))
            for values in zip(*(columns[name] for name in names), strict=True)
        ]
        most = self.max_length - self._answer_tokens
        ids = [question_tokens(self.reader, self.form.question(row), most) for row in rows]
        lengths = np.asarray([len(row) for row in ids], dtype=np.int32)
        return {"input_ids": _padded(ids, most).astype(np.int32), "length": lengths}

    def predict(self, network: Any, batch: Batch) -> list[tuple[str | float, ...]]:
        answers = _new_tokens(network, batch, self._ends(network), self._answer_tokens)
        return [(text,) for text in self.reader.batch_decode(answers, skip_special_tokens=True)]

    def _ends(self, network: Any) -> list[int]:
        """List the tokens that end an answer: the model's, the tokenizer's, the template's."""
        known = getattr(network.generation_config, "eos_token_id", None)
        ends = {self.reader.eos_token_id, *(known if isinstance(known, list) else [known])}
        if after := self.form.end():
            first = self.reader(after, add_special_tokens=False).input_ids[0]
            if first in self.reader.all_special_ids:
                ends.add(first)
        return sorted(end for end in ends if end is not None)


TASK = Causal


def _padded(rows: Sequence[Sequence[int | bool]], length: int) -> np.ndarray:
    """Lay rows out in a table; what is behind their ends is zero, and never looked at."""
    table = np.zeros((len(rows), length), dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


def _follows(batch: Batch) -> Tensor:
    """Say which positions count, (texts, tokens): those whose next token is learned."""
    follows = batch["learned"].roll(-1, 1)
    follows[:, -1] = False
    return follows


def _left_padded(ids: Tensor, lengths: Tensor) -> Batch:
    """Move texts to the right ends of their rows, so that what is generated follows at once."""
    width = ids.shape[1]
    places = torch.arange(width)[None] - (width - lengths.long()[:, None])
    mask = places >= 0
    return {"input_ids": ids.gather(1, places.clamp(min=0)) * mask, "attention_mask": mask.long()}


def _new_tokens(network: Any, batch: Batch, ends: list[int], most: int) -> list[list[int]]:
    """Write at most so many tokens after each prompt, up to the first that ends an answer.

    Decoding is greedy, with keys and values kept. Nothing of the model's own way to generate is
    taken over: no temperature, no penalty.
    """
    own = network.generation_config
    network.generation_config = GenerationConfig(
        max_new_tokens=most, do_sample=False, num_beams=1, use_cache=True, eos_token_id=ends,
        pad_token_id=ends[0],
    )  # fmt: skip
    try:
        with torch.no_grad():
            written = network.generate(**batch)
    finally:
        network.generation_config = own
    width = batch["input_ids"].shape[1]
    return [
        list(takewhile(lambda token: token not in ends, row)) for row in written[:, width:].tolist()
    ]
