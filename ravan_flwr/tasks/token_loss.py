"""Compute a language model's loss on the tokens that are learned, in blocks.

The logits of all positions are the largest tensor of a step: 16 texts of 512 tokens over a
vocabulary of 128 thousand are 4 GB. Here the network's last layer is computed for the positions
that count alone, so many at a time that their logits fit into `BLOCK` bytes. A block's logits are
not kept: the backward pass computes them again.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BLOCK = 2**27  # bytes of the logits of a block, in float32


def summed_loss(
    network: Any, input_ids: Tensor, positions: Tensor, targets: Tensor,
    attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum -log p of the targets, which follow the tokens at these positions of all texts."""
    hidden = hidden_states(network, input_ids, attention_mask, position_ids)
    hidden = hidden.flatten(0, 1).index_select(0, positions)
    rows = block_rows(network.config)
    if len(targets) <= rows:
        return _block(network, hidden, targets)
    total = torch.zeros((), device=hidden.device)
    for some, right in zip(hidden.split(rows), targets.split(rows), strict=True):
        if torch.is_grad_enabled():
            loss = checkpoint(
                _block, network, some, right, use_reentrant=False, preserve_rng_state=False
            )
        else:
            loss = _block(network, some, right)
        total = total + cast(Tensor, loss)
    return total


def hidden_states(
    network: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Compute what the last layer reads, (texts, tokens, width).

    Texts are padded at their ends, and no token sees a later one: so there need be no mask, and
    attention takes its fastest way. Texts side by side (packing.py) have positions.
    """
    where = {} if position_ids is None else {"position_ids": position_ids}
    found = network.base_model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **where
    )
    return cast(Tensor, found.last_hidden_state)


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
        found = logits_of(network, hidden_states(network, tokens))
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"model: the logits of {type(network).__name__} do not follow from its last layer "
            "alone, as expected; choose a model of another architecture"
        )


def _block(network: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(network, hidden).float(), targets, reduction="sum")


def block_rows(config: Any) -> int:
    """Count the positions of a block."""
    return max(1, BLOCK // (4 * int(config.get_text_config().vocab_size)))


def block_bytes(config: Any, positions: int) -> int:
    """Count what a block takes while it is worked on: logits, probabilities and gradients.

    None where one block is all: then autograd keeps it, as anything else.
    """
    rows = block_rows(config)
    return 0 if positions <= rows else 3 * 4 * rows * int(config.get_text_config().vocab_size)
