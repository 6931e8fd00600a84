"""Let a decoder write answers: greedy decoding, with the keys and values of what is there kept."""

from typing import Any

import torch
from transformers import GenerationConfig

from ravan_flwr.tasks.base import Batch


def new_tokens(network: Any, batch: Batch, ends: list[int], most: int) -> list[list[int]]:
    """Write at most so many tokens after each prompt, up to the first that ends an answer.

    Nothing of the model's own way to generate is taken over: no temperature, no penalty.
    """
    how = GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    own, network.generation_config = network.generation_config, how
    try:
        with torch.no_grad():
            written = network.generate(**batch)
    finally:
        network.generation_config = own
    width = batch["input_ids"].shape[1]
    return [_until(row, set(ends)) for row in written[:, width:].tolist()]


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """Return what stands before the first token that ends an answer."""
    found = (place for place, token in enumerate(tokens) if token in ends)
    return tokens[: next(found, len(tokens))]
