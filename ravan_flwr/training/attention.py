"""Count the tensors that attention saves for its backward pass on the run's device.

PyTorch's fused kernels save queries, keys, values, the result, one number per row, and the mask in
float32 if there is one. Without a fused kernel PyTorch computes attention in plain operations. They
save matrices of all scores, (texts, heads, tokens, tokens): for a long text far more than all other
tensors together. The meta device has no fused kernel, so a count there must imitate one.
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


def imitate_attention(config: Config, network: Any, task: Task) -> AbstractContextManager[object]:
    """Return a context in which attention on the meta device saves what the run's device saves.

    The mask counts under packing, and for tasks that give attention a mask (`Task.masks`).
    """
    keeps_mask = task.masks or config.packing
    device = likely_device(config.device)
    if device == "cpu":
        return _FusedKernel(keeps_mask=keeps_mask, has_dropout=False)
    # No fused CUDA kernel supports float32 keys that several heads share. With a mask, transformers
    # repeats the keys, and a kernel supports them.
    text = network.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    shared = getattr(text, "num_key_value_heads", None) not in (None, heads)
    if device == "cuda" and (keeps_mask or config.precision != "float32" or not shared):
        return _FusedKernel(keeps_mask=keeps_mask, has_dropout=True)
    return nullcontext()


class _FusedKernel(TorchFunctionMode):
    """Imitate a fused kernel; a kernel without dropout leaves dropout to the plain operations."""

    def __init__(self, *, keeps_mask: bool, has_dropout: bool) -> None:
        super().__init__()
        self.keeps_mask, self.has_dropout = keeps_mask, has_dropout

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
        if dropout_p and not self.has_dropout:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **kwargs)
        mask = attn_mask if self.keeps_mask else None
        if mask is not None and not mask.is_floating_point():
            mask = mask.to(query.dtype)
        return cast(
            Tensor,
            _SavedTensors.apply(query, key, value, mask),  # type: ignore[no-untyped-call]
        )


class _SavedTensors(torch.autograd.Function):
    """Save the tensors that a fused kernel saves, and compute nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        row_statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, result, row_statistics)
        return result
