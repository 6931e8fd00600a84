"""Add RAVAN's heads to a linear layer, under PEFT's conventions.

`MultiHeadLinear` and this layer share the computation and the choice between its two forms
(adapters/multihead.py). This module adds PEFT's interface: named adapters, merging, state dicts.
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ravan_flwr.adapters.bases import make_bases
from ravan_flwr.adapters.multihead import Heads, multihead_linear, side_by_side
from ravan_flwr.adapters.stored import StoredLinear, dense_weight, requantize
from ravan_flwr.peft.config import RavanConfig

PLAIN = (nn.Linear, StoredLinear, Conv1D)  # these compute only W x + b


class RavanLinear(nn.Module, BaseTunerLayer):
    """Compute W x + b + sum_i s_i B_i H_i A_i x of the active adapters.

    Args:
        base_layer: a `Linear`, quantised by bitsandbytes or not, or a `Conv1D`, of `out` x `in`.
        adapter_name: the first adapter's name.
        layer_name: the layer's name in the model, from which its bases are derived.
        config: the first adapter's configuration.

    Attributes:
        ravan_H: the cores (heads, r, r) by adapter, initially zero; trained.
        ravan_s: the scales (heads,) by adapter, initially one; trained if `trainable_scales`.
        ravan_B: the frozen bases B_i (heads, out, r) by adapter.
        ravan_A: the frozen bases A_i (heads, r, in) by adapter.
    """

    adapter_layer_names = ("ravan_H", "ravan_s")
    other_param_names = ("ravan_B", "ravan_A", "constant_scales")

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, layer_name: str, config: RavanConfig
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        base: Any = self.get_base_layer()
        if isinstance(base, Conv1D):
            self.in_features, self.out_features = base.weight.shape
        elif not isinstance(base, nn.Linear):
            raise ValueError(
                f"layer {layer_name}: got a {type(base).__name__}, expected a Linear or a Conv1D; "
                "leave it out of target_modules, or name it in exclude_modules"
            )
        elif config.fan_in_fan_out:
            raise ValueError(
                f"layer {layer_name}: got a Linear with fan_in_fan_out=True, expected a Conv1D; "
                "leave fan_in_fan_out out"
            )
        else:
            self.in_features, self.out_features = base.in_features, base.out_features
        self.ravan_H = nn.ParameterDict()
        self.ravan_s = nn.ParameterDict()
        self.ravan_B = _Frozen()
        self.ravan_A = _Frozen()
        self.constant_scales: dict[str, bool] = {}
        self.merged_adapters: list[str] = []
        self._unmerged: list[Any] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, layer_name, config)

    def update_layer(self, adapter_name: str, layer_name: str, config: RavanConfig) -> None:
        """Add an adapter whose delta-weight is zero.

        Args:
            adapter_name: the adapter's name.
            layer_name: the layer's name in the model.
            config: the adapter's configuration.
        """
        heads, rank = config.num_heads, config.r
        side = min(self.out_features, self.in_features)
        if rank > side:
            raise ValueError(
                f"r = {rank}: layer {layer_name} is {self.out_features} x {self.in_features}, "
                f"expected at most {side}; lower r, or name the layer in exclude_modules"
            )
        max_heads = self.out_features * self.in_features // rank**2
        if heads > max_heads:
            raise ValueError(
                f"num_heads = {heads}: heads of r = {rank} would have more numbers than layer "
                f"{layer_name}, expected at most {max_heads}; lower num_heads or r, or name the "
                "layer in exclude_modules"
            )
        B, A = make_bases(
            config.init,
            heads=heads,
            rank=rank,
            out_features=self.out_features,
            in_features=self.in_features,
            seed=config.base_seed,
            layer=layer_name,
        )
        device = self._weight().device
        if device.type == "meta":
            device = B.device  # a checkpoint loaded later need not contain the bases
        # B_i are stored side by side, and A_i stacked, as the forward pass needs them; these are
        # views.
        B = side_by_side(B).to(device).view(-1, heads, rank).transpose(0, 1)
        A = A.flatten(0, 1).to(device).view_as(A)
        for bases, basis in ((self.ravan_B, B), (self.ravan_A, A)):
            bases.register_buffer(adapter_name, basis, persistent=config.save_bases)
        self.ravan_H[adapter_name] = nn.Parameter(torch.zeros(heads, rank, rank))
        self.ravan_s[adapter_name] = nn.Parameter(torch.ones(heads))
        self.constant_scales[adapter_name] = not config.trainable_scales
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output.

        Args:
            x: the input, (..., in).

        Returns:
            The output, (..., out).
        """
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [name for name in self.active_adapters if name in self.ravan_H]
        if self.disable_adapters or self.merged or not active:
            y: Tensor = self.base_layer(x)
            return y
        form = "auto" if self._is_plain() else "factored"
        adapters = [self.heads(name) for name in active]
        return multihead_linear(x, self.base_layer, self._weight(), adapters, form)

    def heads(self, adapter: str) -> Heads:
        """Return the tensors of an adapter's heads.

        Args:
            adapter: the adapter's name.

        Returns:
            Its bases side by side, its cores and its scales.
        """
        return Heads(
            side_by_side(self.ravan_B[adapter]),
            self.ravan_A[adapter].flatten(0, 1),
            self.ravan_H[adapter],
            self.ravan_s[adapter],
        )

    def _weight(self) -> Tensor:
        """Return a view of the frozen weight, (out, in)."""
        base: Any = self.get_base_layer()
        weight: Tensor = base.weight
        return weight.T if isinstance(base, Conv1D) else weight

    def _is_plain(self) -> bool:
        """Return whether the frozen layer's weight may be used without calling the layer."""
        base = self.base_layer
        hooked = base._forward_hooks or base._forward_pre_hooks or "forward" in vars(base)
        return type(base) in PLAIN and not hooked

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return the delta-weight of an adapter.

        Args:
            adapter: the adapter's name.

        Returns:
            sum_i s_i B_i H_i A_i in the shape of the weight: (out, in), or (in, out) for a
            `Conv1D`.
        """
        if adapter not in self.ravan_H:
            raise ValueError(
                f"adapter {adapter!r}: expected one of {', '.join(self.ravan_H)}; add it first"
            )
        with torch.no_grad():
            B, A, H, s, _ = self.heads(adapter)
            delta = Heads(B.float(), A.float(), H.float(), s.float()).delta_weight()
        return delta.T if isinstance(self.get_base_layer(), Conv1D) else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters' delta-weights to the frozen weight, which is kept for `unmerge`.

        Args:
            safe_merge: raise ValueError, and merge nothing, if the sum is not finite.
            adapter_names: the adapters; the active ones if None.
        """
        base: Any = self.get_base_layer()
        chosen = check_adapters_to_merge(self, adapter_names)
        names = [name for name in chosen if name in self.ravan_H]
        if not names:
            return
        old = dense_weight(base)
        wide = old.to(torch.promote_types(old.dtype, torch.float32))
        merged = (wide + sum(map(self.get_delta_weight, names))).to(old.dtype)
        if safe_merge and not torch.isfinite(merged).all():
            raise ValueError(
                f"adapter {', '.join(map(repr, names))}: the merged weight has values that are not "
                "finite, expected finite ones; load an adapter that is not broken"
            )
        if not self.merged:
            # bitsandbytes keeps a part of a quantised layer in `state`.
            state = copy.copy(getattr(base, "state", None))
            self._unmerged = [base.weight, base.weight.data, state]
        if base.weight.is_floating_point():
            base.weight.data = merged
        else:
            requantize(base, merged)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Restore the layer's frozen weight, bit for bit unless the model was cast since."""
        if not self.merged:
            warnings.warn("no adapter is merged: nothing to unmerge", stacklevel=2)
            return
        base: Any = self.get_base_layer()
        merged = base.weight
        base.weight, data, state = self._unmerged
        base.weight.data = data.to(merged.device, merged.dtype)
        if state is not None:
            base.state = state
        self._unmerged = []
        self.merged_adapters = []

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapters, and train only them; see PEFT's `BaseTunerLayer`."""
        super().set_adapter(adapter_names, inference_mode)
        self._freeze_scales()

    def set_requires_grad(self, adapter_names: Any, requires_grad: bool = True) -> None:
        """Make some adapters trainable or not; see PEFT's `BaseTunerLayer`."""
        super().set_requires_grad(adapter_names, requires_grad)
        self._freeze_scales()

    def _freeze_scales(self) -> None:
        for name, constant in self.constant_scales.items():
            if constant and name in self.ravan_s:
                self.ravan_s[name].requires_grad_(False)

    def __repr__(self) -> str:
        return "ravan." + super().__repr__()


class _Frozen(nn.Module):
    """Frozen tensors by adapter, saved with the adapter or not.

    PEFT would cast its own `BufferDict` to the dtype of the frozen weight.
    """

    def keys(self) -> Iterator[str]:
        return iter(self._buffers)

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._buffers

    def __getitem__(self, adapter: str) -> Tensor:
        return cast(Tensor, self._buffers[adapter])

    def __delitem__(self, adapter: str) -> None:
        delattr(self, adapter)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._buffers:
            if (key := prefix + name) in destination:
                destination[key] = destination[key].contiguous()  # as safetensors requires
