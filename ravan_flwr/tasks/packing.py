"""Lay short texts side by side in one row of a batch, so that less of it is padding.

No text sees another. Positions begin anew with each, and from these transformers makes the mask of
attention: a block for each text, within which no token sees a later one. So loss and gradients are
those of the texts one below the other. A row is as long as the longest text of the batch: rows are
fewer than texts, and never longer than without packing.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ravan_flwr.tasks.base import Batch
from ravan_flwr.tasks.token_loss import hidden_states


class Rows:
    """Fill rows of one length with texts, each into the first that has room."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.room: list[int] = []  # tokens that are left of each row

    def find(self, tokens: int) -> int | None:
        """Find the first row with room for so many tokens."""
        return next((row for row, room in enumerate(self.room) if room >= tokens), None)

    def place(self, tokens: int) -> tuple[int, int]:
        """Lay a text into a row, a new one if none has room; return the row, and where in it."""
        row = self.find(tokens)
        if row is None:
            self.room.append(self.length)
            row = len(self.room) - 1
        start = self.length - self.room[row]
        self.room[row] -= tokens
        return row, start


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Order texts as they are laid out: few rows remain half empty so."""
    return np.argsort(-lengths, kind="stable")


def packed(batch: Batch, follows: Tensor) -> Batch | None:
    """Lay a batch's texts side by side; None where no row has room for a second one.

    `follows`, (texts, tokens), says after which tokens one comes that is learned.
    """
    lengths = batch["length"].numpy()
    rows, starts = Rows(int(lengths.max())), np.zeros(len(lengths), dtype=np.int64)
    for text in longest_first(lengths):
        row, start = rows.place(int(lengths[text]))
        starts[text] = row * rows.length + start
    if len(rows.room) == len(lengths):
        return None
    length = rows.length
    ids, follows = batch["input_ids"][:, :length].long(), follows[:, :length]
    within = torch.arange(length).expand(ids.shape)
    texts = within < batch["length"].long()[:, None]  # no padding
    places = torch.from_numpy(starts)[:, None] + within
    shape = (len(rows.room), length)
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
    if carries or pieces or not takes or not _apart(network):
        raise ValueError(
            f"batching = 'packed': in {type(network).__name__} texts side by side would not be as "
            "each alone, expected attention over positions that begin anew with each; set "
            "batching=random"
        )


def _apart(network: Any) -> bool:
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
