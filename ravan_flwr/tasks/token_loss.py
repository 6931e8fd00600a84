"""Compute a language model's loss on the tokens that are learned, in blocks, and pack short texts.

The logits of all positions are the largest tensor of a step: 16 texts of 512 tokens over a
vocabulary of 128 thousand are 4 GB. Here the network's last layer is computed for the positions
that count alone, so many at a time that their logits fit into `BLOCK` bytes. A block's logits are
not kept: the backward pass computes them again.

Packing lays short texts side by side in one row of a batch, so that less of it is padding.
No text sees another. Positions begin anew with each, and from these transformers makes the mask of
attention: a block for each text, within which no token sees a later one. So loss and gradients are
those of the texts one below the other. A row is as long as the longest text of the batch: rows are
fewer than texts, and never longer than without packing.
"""

import inspect
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ravan_flwr.tasks.base import Batch

BLOCK = 2**27  # bytes of the logits of a block, in float32


def summed_loss(
    network: Any, input_ids: Tensor, positions: Tensor, targets: Tensor, **where: Tensor
) -> Tensor:
    """Sum -log p of the targets of all texts, as `losses_at` has them."""
    blocks = losses_at(network, input_ids, positions, targets, "sum", **where)
    return sum(blocks[1:], start=blocks[0])


def losses_of_texts(
    network: Any, input_ids: Tensor, positions: Tensor, targets: Tensor, **where: Tensor
) -> Tensor:
    """Sum -log p of the targets of each text, (texts,)."""
    by_token = torch.cat(losses_at(network, input_ids, positions, targets, "none", **where))
    texts, length = input_ids.shape
    return by_token.new_zeros(texts).index_add(0, positions // length, by_token)


def losses_at(
    network: Any, input_ids: Tensor, positions: Tensor, targets: Tensor, reduction: str,
    **where: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Compute -log p of the targets, which follow the tokens at these positions of all texts.

    It is done block by block, and each is computed again in the backward pass. `where` is as for
    `hidden_states`.
    """
    hidden = hidden_states(network, input_ids, **where).flatten(0, 1).index_select(0, positions)
    rows = block_rows(network.config)
    again = torch.is_grad_enabled() and len(targets) > rows
    blocks = []
    for some, right in zip(hidden.split(rows), targets.split(rows), strict=True):
        inputs = (network, some, right, reduction)
        loss = (
            checkpoint(_block, *inputs, use_reentrant=False, preserve_rng_state=False) if again
            else _block(*inputs)
        )  # fmt: skip
        blocks.append(cast(Tensor, loss))
    return blocks


def hidden_states(
    network: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Compute what the last layer reads, (texts, tokens, width).

    Texts are padded at their ends, and no token sees a later one: so there need be no mask, and
    attention takes its fastest way. Texts side by side have positions.
    """
    where = {} if position_ids is None else {"position_ids": position_ids}
    output = network.base_model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **where
    )
    return cast(Tensor, output.last_hidden_state)


def logits_of(network: Any, hidden: Tensor) -> Tensor:
    """Compute the last layer, with what some architectures do to its logits."""
    config, logits = network.config, network.get_output_embeddings()(hidden)
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return cast(Tensor, logits)


def check_logits(network: Any) -> None:
    """Refuse a network whose logits are other ones: not by its last layer alone."""
    tokens = torch.tensor([[0, 1]], device=next(network.parameters()).device)
    with torch.inference_mode():
        expected = network(input_ids=tokens, use_cache=False).logits
        logits = logits_of(network, hidden_states(network, tokens))
    if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"model: the logits of {type(network).__name__} do not follow from its last layer "
            "alone, as expected; choose a model of another architecture"
        )


def _block(network: Any, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = logits_of(network, hidden).float()
    return F.cross_entropy(logits, targets, reduction=reduction)


def block_rows(config: Any) -> int:
    """Count the positions of a block."""
    return max(1, BLOCK // (4 * int(config.get_text_config().vocab_size)))


def block_bytes(config: Any, positions: int) -> int:
    """Count what a block takes while it is worked on: logits, probabilities and gradients.

    0 where one block is all: then autograd keeps it, as anything else.
    """
    rows = block_rows(config)
    return 0 if positions <= rows else 3 * 4 * rows * int(config.get_text_config().vocab_size)


def _laid_into_rows(lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Lay texts into rows as long as the longest, each into the first that has room.

    Return where each begins, counted through all rows, and the number of rows. Long texts come
    first, so that few rows remain half empty.
    """
    length = int(lengths.max())
    filled: list[int] = []  # tokens in each row
    starts = np.zeros(len(lengths), dtype=np.int64)
    for text in np.argsort(-lengths, kind="stable"):
        tokens = int(lengths[text])
        row = next((n for n, used in enumerate(filled) if used + tokens <= length), len(filled))
        if row == len(filled):
            filled.append(0)
        starts[text] = row * length + filled[row]
        filled[row] += tokens
    return starts, len(filled)


def packed(batch: Batch, follows: Tensor) -> Batch | None:
    """Lay a batch's texts side by side; None where no row has room for a second one.

    `follows`, (texts, tokens), says after which tokens one comes that is learned.
    """
    lengths = batch["length"].numpy()
    starts, rows = _laid_into_rows(lengths)
    if rows == len(lengths):
        return None
    length = int(lengths.max())
    ids, follows = batch["input_ids"][:, :length].long(), follows[:, :length]
    within = torch.arange(length).expand(ids.shape)
    texts = within < batch["length"].long()[:, None]  # no padding
    places = torch.from_numpy(starts)[:, None] + within
    shape = (rows, length)
    return {
        "input_ids": _laid_out(ids[texts], places[texts], shape),
        # A token of padding begins anew, too, and so is a text of its own.
        "position_ids": _laid_out(within[texts], places[texts], shape),
        "positions": places[follows],
        "targets": ids.roll(-1, 1)[follows],
    }


def _laid_out(values: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Put values at their places; all others are zero."""
    return torch.zeros(shape, dtype=values.dtype).flatten().scatter(0, places, values).view(shape)


def check_packing(network: Any) -> None:
    """Refuse a network in which texts side by side would see each other, with weights or without.

    That is so where a state or a convolution runs along the row, or positions do not begin anew.
    """
    takes = "position_ids" in inspect.signature(network.base_model.forward).parameters
    carries = bool(getattr(network, "_is_stateful", False))
    pieces = getattr(network.config.get_text_config(), "attention_chunk_size", None)
    if carries or pieces or not takes or not _isolates_texts(network):
        raise ValueError(
            f"batching = 'packed': in {type(network).__name__} texts side by side would not be as "
            "each alone, expected attention over positions that begin anew with each; set "
            "batching=random"
        )


def _isolates_texts(network: Any) -> bool:
    """Try whether a text is the same after another one as alone."""
    device = next(network.parameters()).device
    if device.type == "meta":
        return True
    tokens = torch.tensor([[1, 0, 1, 0, 1]], device=device)
    positions = torch.tensor([[0, 1, 2, 0, 1]], device=device)
    with torch.inference_mode():
        after = hidden_states(network, tokens, position_ids=positions)[:, 3:]
        alone = hidden_states(network, tokens[:, 3:])
    near = 1e-4 * float(alone.abs().max())
    return torch.allclose(after, alone, rtol=0, atol=near)
