"""Count what attention keeps, on the meta device, as the kernel of the run's own device does.

PyTorch's fused kernels keep queries, keys, values, the result, one number a row, and the mask in
float32 if there is one. Where none serves, as on the meta device itself, the plain way is taken,
which keeps matrices of all scores, (texts, heads, tokens, tokens): far more than all else together
for a long text.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ravan_flwr.config.run_config import Config
from ravan_flwr.tasks.base import Task
from ravan_flwr.training.network import likely_device


def attention_of(config: Config, network: Any, task: Task) -> AbstractContextManager[object]:
    """Count, within it, what attention keeps in a step of this run; with one mask of all texts."""
    masks = task.masks or config.packing
    device = likely_device(config.device)
    if device == "cpu":
        return _Fused(masks=masks, drops=False)
    # No kernel of CUDA takes keys that several heads share in float32; with a mask transformers
    # repeats them, so that one does.
    text = network.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    shared = getattr(text, "num_key_value_heads", None) not in (None, heads)
    if device == "cuda" and (masks or config.precision != "float32" or not shared):
        return _Fused(masks=masks, drops=True)
    return nullcontext()


class _Fused(TorchFunctionMode):
    """Stand for a fused kernel; without dropout, where it takes none, for the plain way."""

    def __init__(self, *, masks: bool, drops: bool) -> None:
        super().__init__()
        self.masks, self.drops = masks, drops

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        attends = func is F.scaled_dot_product_attention
        return (self._attend if attends else func)(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if dropout_p and not self.drops:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **kwargs)
        mask = attn_mask if self.masks else None
        if mask is not None and not mask.is_floating_point():
            mask = mask.to(query.dtype)
        return cast(Tensor, _Kept.apply(query, key, value, mask))  # type: ignore[no-untyped-call]


class _Kept(torch.autograd.Function):
    """Keep what a fused kernel keeps, and compute nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        by_row = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, result, by_row)
        return result
