"""Compute a language model's loss on the learned tokens, in blocks, and pack short texts.

The logits of all positions are the largest tensor of a step: 16 texts of 512 tokens over a
vocabulary of 128 thousand are 4 GB. Here the network's last layer is computed only for positions
with a loss, in blocks whose logits fit into `BLOCK` bytes. A block's logits are not kept: the
backward pass recomputes them.

Packing puts several short texts into one row of a batch, which reduces padding. No text attends to
another. Positions restart at each text, and from them transformers derives the attention mask: a
causal block for each text. So loss and gradients equal those without packing. A row is as long as
the longest text of the batch: rows are fewer than texts, and never longer than without packing.
"""

import inspect
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ravan_flwr.tasks.base import Batch

BLOCK = 2**27  # bytes of a block's logits, in float32


def summed_loss(
    network: Any, input_ids: Tensor, positions: Tensor, targets: Tensor, **where: Tensor
) -> Tensor:
    """Return the sum of -log p of the targets of all texts; arguments as for `losses_at`."""
    blocks = losses_at(network, input_ids, positions, targets, "sum", **where)
    return sum(blocks[1:], start=blocks[0])


def losses_of_texts(
    network: Any, input_ids: Tensor, positions: Tensor, targets: Tensor, **where: Tensor
) -> Tensor:
    """Return the sum of -log p of the targets of each text, (texts,)."""
    by_token = torch.cat(losses_at(network, input_ids, positions, targets, "none", **where))
    texts, length = input_ids.shape
    return by_token.new_zeros(texts).index_add(0, positions // length, by_token)


def losses_at(
    network: Any, input_ids: Tensor, positions: Tensor, targets: Tensor, reduction: str,
    **where: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return -log p of the targets, block by block; the backward pass recomputes each block.

    `positions` index the flattened `input_ids`; each target is the token after its position.
    `where` is as for `hidden_states`.
    """
    hidden = hidden_states(network, input_ids, **where).flatten(0, 1).index_select(0, positions)
    rows = block_rows(network.config)
    recompute = torch.is_grad_enabled() and len(targets) > rows
    blocks = []
    for states, labels in zip(hidden.split(rows), targets.split(rows), strict=True):
        inputs = (network, states, labels, reduction)
        loss = (
            checkpoint(_block, *inputs, use_reentrant=False, preserve_rng_state=False) if recompute
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
    """Return the input of the last layer, (texts, tokens, width).

    Texts are padded at their ends, and no token attends to a later one. So no mask is needed, and
    the fastest attention is used. Packed texts need `position_ids`.
    """
    where = {} if position_ids is None else {"position_ids": position_ids}
    output = network.base_model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **where
    )
    return cast(Tensor, output.last_hidden_state)


def compute_logits(network: Any, hidden: Tensor) -> Tensor:
    """Return the logits of the last layer, scaled or capped as some architectures do."""
    config, logits = network.config, network.get_output_embeddings()(hidden)
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return cast(Tensor, logits)


def check_logits(network: Any) -> None:
    """Raise ValueError if the network's logits differ from those of `compute_logits`."""
    tokens = torch.tensor([[0, 1]], device=next(network.parameters()).device)
    with torch.inference_mode():
        expected = network(input_ids=tokens, use_cache=False).logits
        logits = compute_logits(network, hidden_states(network, tokens))
    if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"model: the logits of {type(network).__name__} do not follow from its last layer "
            "alone, as expected; choose a model of another architecture"
        )


def _block(network: Any, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = compute_logits(network, hidden).float()
    return F.cross_entropy(logits, targets, reduction=reduction)


def block_rows(config: Any) -> int:
    """Return the number of positions in a block."""
    return max(1, BLOCK // (4 * int(config.get_text_config().vocab_size)))


def block_bytes(config: Any, positions: int) -> int:
    """Return the temporary bytes of a block: logits, probabilities and gradients.

    It is 0 if there is only one block: autograd keeps it like any other tensor.
    """
    rows = block_rows(config)
    return 0 if positions <= rows else 3 * 4 * rows * int(config.get_text_config().vocab_size)


def _pack_rows(lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Put each text into the first row that has room; rows are as long as the longest text.

    Return where each text starts in the flattened rows, and the number of rows. Long texts come
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


def packed(batch: Batch, next_is_learned: Tensor) -> Batch | None:
    """Return a batch with several texts per row; None if no row has room for a second text.

    `next_is_learned`, (texts, tokens), marks the tokens before learned ones.
    """
    lengths = batch["length"].numpy()
    starts, rows = _pack_rows(lengths)
    if rows == len(lengths):
        return None
    length = int(lengths.max())
    ids, next_is_learned = batch["input_ids"][:, :length].long(), next_is_learned[:, :length]
    within = torch.arange(length).expand(ids.shape)  # position within the text
    is_token = within < batch["length"].long()[:, None]  # no padding
    indices = torch.from_numpy(starts)[:, None] + within  # in the flattened rows
    shape = (rows, length)
    return {
        "input_ids": _scattered(ids[is_token], indices[is_token], shape),
        # A padding token has position 0, so it is a text of its own.
        "position_ids": _scattered(within[is_token], indices[is_token], shape),
        "positions": indices[next_is_learned],
        "targets": ids.roll(-1, 1)[next_is_learned],
    }


def _scattered(values: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return zeros of this shape with the values at these flat indices."""
    return torch.zeros(shape, dtype=values.dtype).flatten().scatter(0, indices, values).view(shape)


def check_packing(network: Any) -> None:
    """Raise ValueError if packed texts would affect each other; a network without weights passes.

    They do if a state or a convolution runs along the row, or positions do not restart.
    """
    has_positions = "position_ids" in inspect.signature(network.base_model.forward).parameters
    is_stateful = bool(getattr(network, "_is_stateful", False))
    chunk_size = getattr(network.config.get_text_config(), "attention_chunk_size", None)
    if is_stateful or chunk_size or not has_positions or not _isolates_texts(network):
        raise ValueError(
            f"batching = 'packed': in {type(network).__name__} texts side by side would not be as "
            "each alone, expected attention over positions that begin anew with each; set "
            "batching=random"
        )


def _isolates_texts(network: Any) -> bool:
    """Return whether a text has the same hidden states after another text as alone."""
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
